"""What is installed here and what will serve a call: versions, native libraries, kernel tiers, GPUs."""

import dataclasses
import importlib.metadata
import platform
from typing import Any

from jaxlowbit import _ffi
from jaxlowbit._version import __version__


@dataclasses.dataclass(frozen=True)
class Info:
    """The result of `info`; prints itself as a short report.

    Attributes:
      versions: of jaxlowbit, jax, jaxlib and python.
      machine: processor family and system, e.g. ``"x86_64 Linux"``.
      cpu: the CPU library: whether it is loaded, from where, or why not.
      cuda: the CUDA library, likewise.
      tiers: CPU kernel tiers that this machine runs, the slowest first. The last one serves.
      gpu: what the CUDA library sees: ``driver``, ``runtime``, ``devices``, and ``error`` where something is missing.
    """

    versions: dict[str, str]
    machine: str
    cpu: _ffi.LibraryStatus
    cuda: _ffi.LibraryStatus
    tiers: tuple[str, ...]
    gpu: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The same as nested dicts and lists, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [f"jaxlowbit {self.versions['jaxlowbit']}"]
        lines += [_line(name, self.versions[name]) for name in ("python", "jax", "jaxlib")]
        lines.append(_line("machine", self.machine))
        for library in (self.cpu, self.cuda):
            lines += _library_lines(library)
            if library.platform == "cpu" and self.tiers:
                lines.append(_line("kernel tier", f"{self.tiers[-1]} (this machine runs {', '.join(self.tiers)})"))
        lines.append("GPU")
        lines += _gpu_lines(self.gpu)
        return "\n".join(lines)


def _line(name: str, value: str) -> str:
    return f"  {name:<12} {value}"


def _library_lines(library: _ffi.LibraryStatus) -> list[str]:
    title = f"{library.platform.upper()} library"
    lines = [title, _line("state", "loaded" if library.loaded else f"not loaded: {library.reason}")]
    if library.path is not None:
        lines.append(_line("file", library.path))
    if library.ffi_minor is not None:
        runtime = "unknown" if library.runtime_ffi_minor is None else f"0.{library.runtime_ffi_minor}"
        lines.append(_line("XLA FFI", f"built against 0.{library.ffi_minor}, jaxlib speaks {runtime}"))
    if library.targets:
        lines.append(_line("targets", ", ".join(library.targets)))
    return lines


def _gpu_lines(gpu: dict[str, Any]) -> list[str]:
    lines = []
    if "driver" in gpu:
        lines.append(_line("CUDA", f"driver {gpu['driver'] or 'not found'}, runtime {gpu['runtime']}"))
    for index, device in enumerate(gpu["devices"]):
        memory = f"{device['memory_bytes'] / 2**30:.0f} GiB"
        text = f"{device['name']}, compute capability {device['capability']}, {memory}"
        if device["capability"] != "9.0":
            text += " (no native kernels: they need 9.0)"
        lines.append(_line(f"device {index}", text))
    if not gpu["devices"]:
        lines.append(_line("devices", f"none ({gpu['error']})" if "error" in gpu else "none"))
    elif "error" in gpu:
        lines.append(_line("error", gpu["error"]))
    return lines


def info() -> Info:
    """Gathers what is installed and what would serve a call. Starts no JAX backend and takes no GPU memory."""
    versions = {
        "jaxlowbit": __version__,
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
        "jaxlib": importlib.metadata.version("jaxlib"),
    }
    libraries = _ffi.status()
    return Info(
        versions=versions,
        machine=f"{platform.machine()} {platform.system()}",
        cpu=libraries.cpu,
        cuda=libraries.cuda,
        tiers=tuple(tier.name.lower() for tier in _ffi.available_tiers()),
        gpu=_ffi.cuda_probe(),
    )
