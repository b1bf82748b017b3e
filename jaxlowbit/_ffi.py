"""The way to the native kernels: loads the two libraries, registers their targets with XLA, and owns every call.

Nothing else in the package names a custom-call target or writes an attribute. Attributes are typed in one place
because JAX's caches take ``2``, ``np.int32(2)`` and ``np.float32(2)`` for the same value: one call with another
type would decide the type of every later one.

A library that is missing, does not load, or was built against a newer FFI than this JAX leaves JAX as it was:
nothing is registered (one handler too new would stop the whole backend from starting), and `status` says why.
"""

import contextlib
import ctypes
import dataclasses
import enum
import importlib.metadata
import importlib.util
import json
import operator
import re
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxlowbit._version import __version__

DOT: Final = "jaxlowbit_dot_v1"
QUANTIZE: Final = "jaxlowbit_quantize_v1"
PROBE: Final = "jaxlowbit_probe_v1"


# Numbers inside "config" attributes: the same as in ffi/common/enums.h.
class Element(enum.IntEnum):
    """How an operand's values are stored."""

    PLAIN = 0
    E4M3 = 1
    E5M2 = 2
    E2M1 = 3


class ScaleKind(enum.IntEnum):
    """How an operand's block scales are stored."""

    NONE = 0
    F32 = 1
    E8M0 = 2
    E4M3 = 3


class Tier(enum.IntEnum):
    """Which kernel serves a call on the CPU; AUTO takes the best one that the machine runs."""

    AUTO = 0
    PORTABLE = 1
    AVX2 = 2
    AVX512 = 3
    AMX = 4


class ScaleRounding(enum.IntEnum):
    """How a computed scale is rounded to its stored type."""

    NONE = 0
    RCEIL = 1
    FLOOR = 2
    CEIL = 3
    EVEN = 4
    POW2 = 5


# ---------------------------------------------------------------------------------------------------------------
# Libraries


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


# ---------------------------------------------------------------------------------------------------------------
# Tiers


def available_tiers() -> tuple[Tier, ...]:
    """The CPU kernel tiers that this machine runs, the slowest first; empty without the CPU library."""
    if _CPU_STATUS.tier is None:
        return ()
    best = Tier[_CPU_STATUS.tier.upper()]
    return tuple(tier for tier in Tier if Tier.AUTO < tier <= best)


_FORCED_TIER: ContextVar[Tier] = ContextVar("jaxlowbit_forced_tier", default=Tier.AUTO)


def current_tier() -> Tier:
    """The tier that `force_tier` asks for here, else AUTO."""
    return _FORCED_TIER.get()


@contextlib.contextmanager
def force_tier(tier: Tier) -> Iterator[None]:
    """For tests and benchmarks: calls traced inside take this CPU tier.

    The tier is no part of jit's cache key, so compiled programs are dropped on the way in and out.

    Raises:
      ValueError: if this machine does not run the tier.
    """
    tier = Tier(tier)
    if tier is not Tier.AUTO and tier not in available_tiers():
        names = ", ".join(one.name.lower() for one in available_tiers()) or "none"
        raise ValueError(f"force_tier: this machine does not run tier {tier.name.lower()!r}; it runs: {names}")
    changed = tier is not _FORCED_TIER.get()
    token = _FORCED_TIER.set(tier)
    if changed:
        jax.clear_caches()
    try:
        yield
    finally:
        _FORCED_TIER.reset(token)
        if changed:
            jax.clear_caches()


# ---------------------------------------------------------------------------------------------------------------
# Calls


def _to_attrs(config: "DotConfig | QuantizeConfig") -> dict[str, np.int32 | np.float32]:
    """The struct attribute of a call, each field in the one type that the handler decodes.

    operator.index refuses a float where an integer belongs, instead of cutting it off.
    """
    return {
        field.name: np.float32(getattr(config, field.name))
        if field.type is float
        else np.int32(operator.index(getattr(config, field.name)))
        for field in dataclasses.fields(config)
    }


@dataclasses.dataclass(frozen=True)
class DotConfig:
    """Static description of one `dot`. Blocks are in logical elements, at least 1; a block that spans a whole
    extent is given as that extent. ``transposed`` contracts over the rows of the right side (N, not K)."""

    lhs_element: int = Element.PLAIN
    lhs_scale_kind: int = ScaleKind.NONE
    lhs_block_m: int = 1
    lhs_block_k: int = 1
    rhs_element: int = Element.E4M3
    rhs_scale_kind: int = ScaleKind.F32
    rhs_block_n: int = 1
    rhs_block_k: int = 1
    transposed: int = 0
    tier: int = dataclasses.field(default_factory=current_tier)

    def to_attrs(self) -> dict[str, np.int32 | np.float32]:
        """The call's ``config`` attribute."""
        return _to_attrs(self)


@dataclasses.dataclass(frozen=True)
class QuantizeConfig:
    """Static description of one `quantize`. ``amax_ub`` bounds the amax of a block from above (inf: no bound);
    ``given`` takes the scales as they come instead of computing them."""

    element: int = Element.E4M3
    scale_kind: int = ScaleKind.F32
    block_r: int = 1
    block_c: int = 1
    scale_rounding: int = ScaleRounding.NONE
    stochastic: int = 0
    given: int = 0
    tier: int = dataclasses.field(default_factory=current_tier)
    amax_ub: float = float("inf")

    def to_attrs(self) -> dict[str, np.int32 | np.float32]:
        """The call's ``config`` attribute."""
        return _to_attrs(self)


def out_struct(shape: tuple[int, ...], dtype: DTypeLike, *operands: jax.Array) -> jax.ShapeDtypeStruct:
    """Result type of a call: inside shard_map it varies over every mesh axis that an operand varies over.

    Without this the result would count as replicated, and gradients would come out wrong without an error.
    """
    varying = frozenset[str]().union(*(jax.typeof(operand).manual_axis_type.varying for operand in operands))
    if not varying:
        return jax.ShapeDtypeStruct(shape, dtype)
    return jax.ShapeDtypeStruct(
        shape,
        dtype,
        # Required beside the axes: JAX asserts a mesh when a type varies.
        sharding=NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(*[None] * len(shape))),
        manual_axis_type=jax.sharding.ManualAxisType(varying=varying),
    )


def _no_scale(scale: jax.Array | None) -> jax.Array:
    return jnp.zeros((0, 0, 0), jnp.float32) if scale is None else scale


def _no_row(row: jax.Array | None, batch: int) -> jax.Array:
    return jnp.zeros((batch, 0), jnp.float32) if row is None else row


def dot(
    lhs: jax.Array,
    lhs_scale: jax.Array | None,
    lhs_global: jax.Array | None,
    rhs: jax.Array,
    rhs_scale: jax.Array | None,
    rhs_global: jax.Array | None,
    bias: jax.Array | None,
    *,
    config: DotConfig,
    out_dtype: DTypeLike,
) -> jax.Array:
    """out[b, m, n] = sum_k L[b, m, k] * R[b, n, k] + bias[b, n], or over n when ``config.transposed``.

    Args:
      lhs: bf16/f16/f32 (B, M, C), or codes: float8_e4m3fn (B, M, K), packed E2M1 uint8 (B, M, K/2).
      lhs_scale: (B, ceil(M/block_m), ceil(K/block_k)) f32, e8m0 (or its uint8 bits) or e4m3; None for plain lhs.
      lhs_global: f32 (B, 1) or (B, M), multiplies row m; or None.
      rhs: float8_e4m3fn (B, N, K) or packed E2M1 uint8 (B, N, K/2).
      rhs_scale: (B, ceil(N/block_n), ceil(K/block_k)), types as lhs_scale.
      rhs_global: f32 (B, 1) or (B, N), multiplies row n; or None.
      bias: (B, N) f32/bf16/f16, or None.
      config: formats, blocks and kernel tier.
      out_dtype: bfloat16, float16 or float32.

    Returns:
      (B, M, N), or (B, M, K) when transposed. Shapes are the caller's to check; the handler checks them again.
    """
    batch, rows = lhs.shape[:2]
    packing = 2 if config.rhs_element == Element.E2M1 else 1
    columns = rhs.shape[2] * packing if config.transposed else rhs.shape[1]
    operands = (
        lhs, _no_scale(lhs_scale), _no_row(lhs_global, batch),
        rhs, _no_scale(rhs_scale), _no_row(rhs_global, batch), _no_row(bias, batch),
    )  # fmt: skip
    call = jax.ffi.ffi_call(DOT, out_struct((batch, rows, columns), out_dtype, *operands))
    result: jax.Array = call(*operands, config=config.to_attrs())
    return result


_CODE_TYPES: Final = {Element.E4M3: jnp.float8_e4m3fn, Element.E5M2: jnp.float8_e5m2, Element.E2M1: jnp.uint8}
_SCALE_TYPES: Final = {ScaleKind.F32: jnp.float32, ScaleKind.E8M0: jnp.uint8, ScaleKind.E4M3: jnp.float8_e4m3fn}


def quantize(
    x: jax.Array,
    given_scale: jax.Array | None,
    global_scale: jax.Array | None,
    rng: jax.Array | None,
    *,
    config: QuantizeConfig,
) -> tuple[jax.Array, jax.Array]:
    """Codes and block scales of x.

    Args:
      x: bf16/f16/f32 (B, R, C).
      given_scale: (B, ceil(R/block_r), ceil(C/block_c)) in the scale kind's type, where ``config.given``; or None.
      global_scale: f32 (B, 1) of a two-level format, or None.
      rng: uint32 (4,) = key0, key1, offset_lo, offset_hi, where ``config.stochastic``; or None.
      config: format, blocks and rounding.

    Returns:
      codes, float8 (B, R, C) or packed E2M1 uint8 (B, R, C/2); scales in the shape of given_scale, as f32, uint8
      (E8M0 bits) or float8_e4m3fn.
    """
    batch, rows, columns = x.shape
    element, kind = Element(config.element), ScaleKind(config.scale_kind)
    packing = 2 if element is Element.E2M1 else 1
    grid = (batch, -(-rows // config.block_r), -(-columns // config.block_c))
    operands = (
        x,
        _no_scale(given_scale),
        _no_row(global_scale, batch),
        jnp.zeros((0,), jnp.uint32) if rng is None else rng,
    )
    results = (
        out_struct((batch, rows, columns // packing), _CODE_TYPES[element], *operands),
        out_struct(grid, _SCALE_TYPES[kind], *operands),
    )
    codes, scale = jax.ffi.ffi_call(QUANTIZE, results)(*operands, config=config.to_attrs())
    return codes, scale


def probe_fp4(x: jax.Array) -> jax.Array:
    """The bytes of a float4_e2m1fn array (n,) as a CUDA handler sees them: uint8 (ceil(n/2),).

    Shows that this runtime hands FP4 buffers over packed, low nibble first. CUDA only.
    """
    size = -(-x.size // 2)
    result: jax.Array = jax.ffi.ffi_call(PROBE, out_struct((size,), jnp.uint8, x))(x)
    return result
