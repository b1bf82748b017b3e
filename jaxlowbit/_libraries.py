"""The two native libraries: finds them, loads them, registers their targets with XLA, and says what became of them.

A library that is missing, does not load, or was built against a newer FFI than this JAX leaves JAX as it was:
nothing is registered (one handler too new would stop the whole backend from starting), and `status` says why.
"""

import ctypes
import dataclasses
import enum
import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax

from jaxlowbit._version import __version__

DOT: Final = "jaxlowbit_dot_v1"
QUANTIZE: Final = "jaxlowbit_quantize_v1"
PROBE: Final = "jaxlowbit_probe_v1"


class Tier(enum.IntEnum):
    """Which kernel serves a call on the CPU; AUTO takes the best one that the machine runs."""

    AUTO = 0
    PORTABLE = 1
    AVX2 = 2
    AVX512 = 3
    AMX = 4


@dataclasses.dataclass(frozen=True)
class LibraryStatus:
    """What became of one native library.

    Attributes:
      platform: ``"cpu"`` or ``"cuda"``.
      loaded: whether its targets are registered with XLA.
      path: the file, or None when none was found.
      reason: why it is not loaded; empty when it is.
      version: the version of jaxlowbit it was built from, or None.
      ffi_minor: minor version of the XLA FFI it was built against, or None.
      runtime_ffi_minor: minor version of the XLA FFI of the installed jaxlib, or None where it cannot be told.
      targets: the custom-call targets it serves.
      tier: name of the best kernel tier on this machine (CPU library only).
    """

    platform: str
    loaded: bool
    path: str | None
    reason: str
    version: str | None
    ffi_minor: int | None
    runtime_ffi_minor: int | None
    targets: tuple[str, ...]
    tier: str | None


class Libraries(NamedTuple):
    """The state of both native libraries."""

    cpu: LibraryStatus
    cuda: LibraryStatus


def _library_path(stem: str) -> Path | None:
    """Where the library lies: in the package, or, when the package is imported from a source folder, in the
    installed distribution. find_spec rather than a path next to this file because it makes an editable install
    rebuild what changed; nothing is imported by it."""
    spec = importlib.util.find_spec(f"jaxlowbit.{stem}")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin)
    try:
        distribution = importlib.metadata.distribution("jaxlowbit")
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(f"jaxlowbit/{stem}.so")))
    return path if path.is_file() else None


def _runtime_ffi_minor() -> int | None:
    """Minor version of the FFI that the installed jaxlib speaks, from the headers it ships."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^#define\s+XLA_FFI_API_MINOR\s+(\d+)\s*$", text, re.MULTILINE)
    return int(found.group(1)) if found else None


def _read_targets(library: ctypes.CDLL) -> dict[str, int]:
    """Reads the list of targets that ffi/registration.cc exports: name -> address of the handler."""
    library.jaxlowbit_target.argtypes = [
        ctypes.c_int, ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(ctypes.c_void_p)
    ]  # fmt: skip
    targets: dict[str, int] = {}
    for index in range(library.jaxlowbit_target_count()):
        name, handler = ctypes.c_char_p(), ctypes.c_void_p()
        if not library.jaxlowbit_target(index, ctypes.byref(name), ctypes.byref(handler)):
            raise RuntimeError(f"jaxlowbit: library lists no target {index}")
        if name.value is None or handler.value is None:
            raise RuntimeError(f"jaxlowbit: target {index} of the library has no name or no handler")
        targets[name.value.decode()] = handler.value
    return targets


def _load(platform: str, path: Path | None) -> tuple[LibraryStatus, ctypes.CDLL | None]:
    """Loads one library and registers its targets, or says why it did not."""
    runtime = _runtime_ffi_minor()
    status = LibraryStatus(platform, False, str(path) if path else None, "", None, None, runtime, (), None)

    def refuse(reason: str) -> tuple[LibraryStatus, None]:
        return dataclasses.replace(status, reason=reason), None

    if path is None:
        return refuse(f"not built: no libjaxlowbit_{platform}.so in the installed package")
    try:
        library = ctypes.CDLL(str(path))
        ffi_minor = int(library.jaxlowbit_ffi_api_minor())
        library.jaxlowbit_version.restype = ctypes.c_char_p
        version = library.jaxlowbit_version().decode()
        library.jaxlowbit_platform.restype = ctypes.c_char_p
        xla_platform = library.jaxlowbit_platform().decode()
        targets = _read_targets(library)
    except (OSError, AttributeError) as error:  # not a library, or one without these functions
        return refuse(f"does not load: {error}")
    status = dataclasses.replace(status, version=version, ffi_minor=ffi_minor)
    if version != __version__:
        return refuse(f"built from jaxlowbit {version}, but this is {__version__}: install the package again")
    if runtime is None:
        return refuse("the installed jaxlib ships no readable xla/ffi/api/c_api.h, so its FFI version is unknown")
    if ffi_minor > runtime:
        return refuse(
            f"built against XLA FFI 0.{ffi_minor}, but jaxlib {importlib.metadata.version('jaxlib')} speaks "
            f"0.{runtime}: install a newer jax, or build jaxlowbit with this jaxlib's headers"
        )
    for name, handler in targets.items():
        address = ctypes.cast(handler, ctypes.c_void_p)
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(address), platform=xla_platform)
    tier = Tier(library.jaxlowbit_cpu_best_tier()).name.lower() if platform == "cpu" else None
    return dataclasses.replace(status, loaded=True, targets=tuple(targets), tier=tier), library


# The libraries must outlive every registered handler: JAX keeps the address, not the library.
_CPU_STATUS, _CPU_LIBRARY = _load("cpu", _library_path("libjaxlowbit_cpu"))
_CUDA_STATUS, _CUDA_LIBRARY = _load("cuda", _library_path("libjaxlowbit_cuda"))


def status() -> Libraries:
    """What became of the two native libraries when the package was imported."""
    return Libraries(_CPU_STATUS, _CUDA_STATUS)


def native_available(platform: str, target: str = DOT) -> tuple[bool, str]:
    """Whether a native kernel for ``target`` is registered for ``platform`` (as jax.default_backend names it).

    Returns (True, "") or (False, the reason).
    """
    library = {"cpu": _CPU_STATUS, "cuda": _CUDA_STATUS, "gpu": _CUDA_STATUS}.get(platform)
    if library is None:
        return False, f"jaxlowbit has no native kernels for platform {platform!r}"
    if not library.loaded:
        return False, f"the {library.platform} library is not loaded ({library.reason})"
    if target not in library.targets:
        return False, f"the {library.platform} library has no kernel {target}"
    return True, ""


def cuda_probe() -> dict[str, Any]:
    """What the CUDA library sees: driver and runtime versions, devices with name and compute capability.

    Works without a GPU or a driver; the key ``error`` then says what is missing.
    """
    if _CUDA_LIBRARY is None:
        return {"error": _CUDA_STATUS.reason, "devices": []}
    capacity = 1 << 16
    buffer = ctypes.create_string_buffer(capacity)
    needed = int(_CUDA_LIBRARY.jaxlowbit_cuda_probe(buffer, capacity))
    if needed >= capacity:
        raise RuntimeError(f"jaxlowbit: the CUDA probe needs {needed} bytes, more than {capacity}")
    result: dict[str, Any] = json.loads(buffer.value)
    return result


def available_tiers() -> tuple[Tier, ...]:
    """The CPU kernel tiers that this machine runs, the slowest first; empty without the CPU library."""
    if _CPU_STATUS.tier is None:
        return ()
    best = Tier[_CPU_STATUS.tier.upper()]
    return tuple(tier for tier in Tier if Tier.AUTO < tier <= best)


def cpu_dot_kernel(config: list[int], lhs_type: int, m: int, n: int, k: int) -> str:
    """Name of the CPU kernel that serves a dot, from the library itself.

    ``config`` holds the fields of DotConfig in order; ``lhs_type`` is 0 f32, 1 bf16, 2 f16, 3 codes.
    """
    assert _CPU_LIBRARY is not None
    function = _CPU_LIBRARY.jaxlowbit_cpu_dot_kernel
    function.restype = ctypes.c_char_p
    function.argtypes = [ctypes.POINTER(ctypes.c_int32), ctypes.c_int, *[ctypes.c_int64] * 3]
    name: bytes = function((ctypes.c_int32 * len(config))(*config), lhs_type, m, n, k)
    return name.decode()
