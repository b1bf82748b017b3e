"""The XLA implementation of quantize, and the reference that the native kernels equal bit for bit.

Arrays are ``(..., R, C)``; every matrix of the leading dimensions has its own scales. All arithmetic is float32 or on
float32 bit patterns. Subnormals count as zeros of their sign by explicit rules, so that a platform that flushes them
and one that does not agree.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from jaxlowbit import codecs
from jaxlowbit._bits import F32_INF, F32_NAN, MAGNITUDE, bits_float, divide, float_bits, max_code
from jaxlowbit.formats import E4M3, Format, ScaleRounding
from jaxlowbit.scaled_array import expand_axis

Array: TypeAlias = Any

SCALE_FLOOR = np.float32(2.0**-126)  # the smallest normal float32: scales stay finite, positive and never flushed
_FLOOR_BITS = np.uint32(0x00800000)


@dataclasses.dataclass(frozen=True)
class QuantizeSpec:
    """What a quantization does, apart from its arrays. Hashable: it is a static argument.

    Attributes:
      format: the target.
      scale_rounding: of computed scales.
      amax_ub: upper bound of a block's absolute maximum; infinity for none.
      stochastic: whether codes are rounded stochastically.
    """

    format: Format
    scale_rounding: ScaleRounding
    amax_ub: float = math.inf
    stochastic: bool = False

    def stored_columns(self, columns: int) -> int:
        """The columns that whole bytes of codes hold."""
        per_byte = self.format.element.per_byte
        return -(-columns // per_byte) * per_byte


def quantize_xla(
    spec: QuantizeSpec, x: Array, given: Array | None, outer: Array | None, rng: Array | None
) -> tuple[Array, Array]:
    """Codes as the format stores them, and scales ``(..., grid_rows, grid_k)``.

    Args:
      spec: what to do.
      x: bf16/f16/f32 ``(..., R, C)``.
      given: scales to use as they are, in the format's storage dtype and grid; ``None`` computes them.
      outer: float32 global scale of two-level formats, one per matrix; ``None`` otherwise.
      rng: uint32 (4,), key and (lo, hi) of the offset, for stochastic rounding; ``None`` otherwise.
    """
    fmt = spec.format
    rows, columns = x.shape[-2:]
    block = fmt.resolve_block(rows, columns)
    values = _flush(x.astype(np.float32))
    scale = (
        _computed_scale(spec, _block_amax(values, block, fmt.grid(rows, columns)), outer) if given is None else given
    )

    def wide(per_block: Array) -> Array:
        return expand_axis(expand_axis(per_block, -1, block[1], columns), -2, block[0], rows)

    quotient = divide(values, wide(_divisor(fmt, scale, outer)))
    if fmt.scale.name == "e8m0" and (given is not None or spec.scale_rounding != "rceil"):
        # Byte 0, 2**-127, was divided by as 2**-126 (a subnormal divisor would be flushed); rceil never gives it.
        quotient = quotient * wide(jnp.where(scale == np.uint8(0), np.float32(2), np.float32(1)))
    if rng is None:
        codes = codecs.encode(quotient, fmt.element)
    else:
        key, offset = rng[:2], rng[2:][::-1]
        hi, lo = codecs.counter_words(x.shape, offset, row_stride=spec.stored_columns(columns))
        # Flushed by rule, since the smallest positive quotient would round up for one pattern of the random bits.
        codes = codecs.encode_stochastic(_flush(quotient), fmt.element, codecs.stochastic_bits(key, hi, lo))
    return codecs.to_storage(codes, fmt.element, pad=True), scale


def two_level_scale(x: Array, fmt: Format, *, amax_ub: float = math.inf) -> Array:
    """Global scale of a two-level format, ``max(amax / (448 * max_code), 2**-126)``, one per matrix of ``(..., R, C)``.

    Only finite values count: an infinity or NaN spoils its own block's scale, not the whole matrix.
    """
    bits = float_bits(x.astype(np.float32)) & MAGNITUDE
    bits = jnp.where(bits >= F32_INF, np.uint32(0), bits)
    amax = jnp.minimum(_flushed_amax(bits.max(axis=(-2, -1), initial=np.uint32(0))), np.float32(amax_ub))
    return jnp.maximum(divide(amax, np.float32(E4M3.max * fmt.element.max)), SCALE_FLOOR)


def poison_given(spec: QuantizeSpec, x: Array, given: Array) -> Array:
    """Given scales, with NaN for blocks that hold NaN if the element type has none to carry it."""
    fmt = spec.format
    if fmt.element.has_nan:
        return given
    rows, columns = x.shape[-2:]
    values = x.astype(np.float32)
    amax = _block_amax(values, fmt.resolve_block(rows, columns), fmt.grid(rows, columns))
    return jnp.where(amax > F32_INF, _nan_scale(fmt), given)


def _nan_scale(fmt: Format) -> Array:
    return jnp.asarray(255, np.uint8) if fmt.scale.name == "e8m0" else jnp.asarray(np.nan, fmt.scale.storage)


def _flush(x: Array) -> Array:
    """Subnormals to zeros of their sign."""
    bits = float_bits(x)
    return bits_float(jnp.where((bits & MAGNITUDE) < _FLOOR_BITS, bits & ~MAGNITUDE, bits))


def _block_amax(values: Array, block: tuple[int, int], grid: tuple[int, int]) -> Array:
    """Bits of the largest magnitude of each block, ``(..., grid_rows, grid_k)``.

    The maximum of unsigned integers: it cannot lose a NaN, which lies above infinity, and flushes nothing.
    """
    bits = float_bits(values) & MAGNITUDE
    rows, columns = values.shape[-2:]
    # A block larger than the matrix needs no padding to its own size.
    high, wide = min(block[0], max(rows, 1)), min(block[1], max(columns, 1))
    missing = (grid[0] * high - rows, grid[1] * wide - columns)
    if any(missing):
        bits = jnp.pad(bits, [(0, 0)] * (bits.ndim - 2) + [(0, missing[0]), (0, missing[1])])
    bits = bits.reshape(*bits.shape[:-2], grid[0], high, grid[1], wide)
    return bits.max(axis=(-3, -1), initial=np.uint32(0))


def _flushed_amax(bits: Array) -> Array:
    return bits_float(jnp.where(bits < _FLOOR_BITS, np.uint32(0), bits))


def _computed_scale(spec: QuantizeSpec, amax_bits: Array, outer: Array | None) -> Array:
    """Stored scales from the blocks' largest magnitudes. Infinity and NaN give NaN, before any bound applies."""
    fmt = spec.format
    bad = amax_bits >= F32_INF
    amax = jnp.minimum(_flushed_amax(jnp.where(bad, np.uint32(0), amax_bits)), np.float32(spec.amax_ub))
    if fmt.scale.name == "e8m0":
        return jnp.where(bad, np.uint8(255), codecs.mx_scale(amax, fmt.element, spec.scale_rounding))
    scale = divide(amax, np.float32(fmt.element.max))
    if fmt.scale.name == "e4m3":
        if outer is not None:
            scale = divide(_flush(scale), outer.reshape(*outer.shape, 1, 1))
        code = jnp.maximum(codecs.encode(scale, E4M3), np.uint8(1))  # the smallest positive code: 2**-9
        code = jnp.where(bad | jnp.isnan(scale), np.uint8(max_code(E4M3) + 1), code)
        return codecs.to_storage(code, E4M3)
    bits = float_bits(jnp.maximum(scale, SCALE_FLOOR))
    if spec.scale_rounding == "pow2":
        bits = (bits + np.uint32(0x007FFFFF)) & np.uint32(0xFF800000)
    return bits_float(jnp.where(bad, F32_NAN, bits))


def _divisor(fmt: Format, scale: Array, outer: Array | None) -> Array:
    """What values are divided by: normal numbers (but for a given zero), since XLA's threads flush the others."""
    if fmt.scale.name == "e8m0":
        return codecs.e8m0_factors(scale)[1]
    if fmt.scale.name == "f32":
        return _flush(scale)
    step = codecs.decode(scale, E4M3)
    if outer is not None:
        step = step * outer.reshape(*outer.shape, 1, 1)
        step = jnp.where(step < SCALE_FLOOR, SCALE_FLOOR, step)  # a NaN stays
    return step
