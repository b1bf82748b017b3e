"""The way to the native kernels: owns every custom call, and the type of every attribute.

Nothing else in the package names a custom-call target or writes an attribute. Attributes are typed in one place
because JAX's caches take ``2``, ``np.int32(2)`` and ``np.float32(2)`` for the same value: one call with another
type would decide the type of every later one. Importing this module loads the libraries (see `_libraries`).
"""

import contextlib
import dataclasses
import enum
import operator
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxlowbit._libraries import (
    DOT,
    PROBE,
    QUANTIZE,
    Libraries,
    LibraryStatus,
    Tier,
    available_tiers,
    cpu_dot_kernel,
    cuda_probe,
    native_available,
    status,
)

__all__ = [
    "DOT",
    "PROBE",
    "QUANTIZE",
    "DotConfig",
    "Element",
    "Libraries",
    "LibraryStatus",
    "QuantizeConfig",
    "ScaleKind",
    "ScaleRounding",
    "Tier",
    "available_tiers",
    "cuda_probe",
    "current_tier",
    "dot",
    "force_tier",
    "native_available",
    "out_struct",
    "probe_fp4",
    "quantize",
    "status",
]


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


class ScaleRounding(enum.IntEnum):
    """How a computed scale is rounded to its stored type."""

    NONE = 0
    RCEIL = 1
    FLOOR = 2
    CEIL = 3
    EVEN = 4
    POW2 = 5


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
    grid = (batch, -(-rows // operator.index(config.block_r)), -(-columns // operator.index(config.block_c)))
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


_LHS_TYPES: Final = {"float32": 0, "bfloat16": 1, "float16": 2}


def dot_kernel(config: DotConfig, lhs_dtype: str, m: int, n: int, k: int) -> str:
    """What the CPU library calls the kernel that it takes for a dot; its choice depends on shapes and types only.

    A symbolic extent (shape-polymorphic export) has no kernel until it is known.
    """
    if not all(isinstance(extent, int) for extent in (m, n, k)):
        return "kernel chosen at run time: symbolic shape"
    fields = [operator.index(getattr(config, field.name)) for field in dataclasses.fields(config)]
    lhs_type = _LHS_TYPES.get(lhs_dtype, 3) if config.lhs_element == Element.PLAIN else 3
    return cpu_dot_kernel(fields, lhs_type, m, n, k)
