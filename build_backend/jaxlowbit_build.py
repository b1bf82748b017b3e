"""Build backend: scikit-build-core, and the one thing its settings cannot express.

JAXLOWBIT_CUDA=on|off|auto (a build-time variable, default auto) decides about the CUDA library; CMakeLists.txt reads
the same one. Asking for CUDA on a machine without nvcc is refused here, before any package is fetched.
"""

import os
import shutil

import scikit_build_core.build as _backend
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def _cuda_requires():
    """What the CUDA library needs from the package index: nothing, an nvcc must be on the path (or in CUDACXX)."""
    asked = os.environ.get("JAXLOWBIT_CUDA", "auto").lower()
    if asked not in ("on", "off", "auto"):
        raise SystemExit(f"jaxlowbit: JAXLOWBIT_CUDA is {asked!r}: expected on, off or auto")
    if asked == "on" and shutil.which(os.environ.get("CUDACXX", "nvcc")) is None:
        raise SystemExit(
            "jaxlowbit: JAXLOWBIT_CUDA=on, but no nvcc was found. Put the CUDA 13 toolkit's bin folder on PATH (or "
            "name nvcc in CUDACXX), or unset JAXLOWBIT_CUDA to build the CPU library alone."
        )
    return []


def get_requires_for_build_wheel(config_settings=None):
    """scikit-build-core's requirements and those of the CUDA library."""
    return _backend.get_requires_for_build_wheel(config_settings) + _cuda_requires()


def get_requires_for_build_editable(config_settings=None):
    """scikit-build-core's requirements and those of the CUDA library."""
    return _backend.get_requires_for_build_editable(config_settings) + _cuda_requires()
