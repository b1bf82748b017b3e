"""The version, written here once: the wheel's metadata and the C++ libraries read it from this file."""

__version__ = "0.1.0"
