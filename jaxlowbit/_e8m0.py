"""E8M0 scales: powers of two in one byte, built with integer arithmetic because XLA flushes float32 subnormals."""

from __future__ import annotations

from typing import Literal, TypeAlias

import jax
import ml_dtypes
import numpy as np

from jaxlowbit import errors
from jaxlowbit._bits import (
    F32_INF,
    F32_NAN,
    MAGNITUDE,
    MANTISSA,
    Array,
    as_f32,
    bitcast,
    bits_float,
    element_type,
    float_bits,
    namespace,
    operand,
    shaped,
)
from jaxlowbit.formats import ElementType

E8M0Rounding: TypeAlias = Literal["exact", "rceil", "floor", "ceil", "even"]
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def _e8m0_byte(bits: Array, exponent: Array, lowest: int = 0) -> Array:
    """Clamps a biased exponent (int32) to finite bytes; negative, infinite and NaN inputs give 255."""
    xp = namespace(bits)
    byte = xp.clip(exponent, lowest, 254)
    # As unsigned numbers, negative floats lie above NaN and infinity.
    bad = (bits >= F32_INF) & (bits != np.uint32(0x80000000))
    return xp.where(bad, np.int32(255), byte).astype(np.uint8)


def encode_e8m0(x: Array, *, rounding: E8M0Rounding = "exact") -> Array:
    """float32 scales to E8M0 bytes (value ``2**(byte - 127)``).

    Args:
      x: positive scales. float64 is converted to float32 first, which keeps powers of two.
      rounding: ``"exact"`` takes powers of two only; ``"floor"``, ``"ceil"`` (also called ``"rceil"``) and
        ``"even"`` (to nearest, halfway up, as ``astype`` rounds) round others and clamp to bytes 0..254.

    Returns:
      uint8 of x's shape. NaN gives 255, and so do infinite and negative scales where rounding is named.

    Raises:
      ValueError: a scale that is no power of two under ``"exact"``. Values of tracers are unknown: there such a
        scale gives 255, so it shows as NaN and never as a wrong number.
    """
    if rounding not in ("exact", "rceil", "floor", "ceil", "even"):
        errors.bad_value(
            "encode_e8m0",
            "rounding",
            expected="exact, rceil, floor, ceil or even",
            got=repr(rounding),
            fix="Name the rounding of scales that are no powers of two.",
        )
    values, shape = as_f32(x, "encode_e8m0")
    xp = namespace(values)
    bits = float_bits(values)
    exponent = ((bits & MAGNITUDE) >> 23).astype(np.int32)
    mantissa = bits & MANTISSA
    if rounding == "exact":
        # 2**-127 is a float32 subnormal: its one bit is the highest of the mantissa.
        is_power = (mantissa == 0) & (exponent > 0) & (bits < F32_INF) | (bits == np.uint32(0x00400000))
        is_nan = (bits & MAGNITUDE) > F32_INF
        if not isinstance(values, jax.core.Tracer):
            bad = np.asarray(~(is_power | is_nan))
            if bad.any():
                errors.bad_value(
                    "encode_e8m0",
                    "x",
                    expected="every scale a power of two in 2**-127 .. 2**127",
                    got=f"{np.asarray(values)[bad].flat[0]!s}",
                    fix="Name a rounding ('ceil', 'floor', 'even') and requantize the codes, or keep float32 scales.",
                )
        return shaped(xp.where(is_power, exponent, np.int32(255)).astype(np.uint8), shape)
    if rounding in ("ceil", "rceil"):
        # Byte 0 is 2**-127, half-way into the subnormals.
        above = xp.where(exponent == 0, mantissa > np.uint32(0x400000), mantissa != 0)
        exponent = exponent + above.astype(np.int32)
    elif rounding == "even":
        # Halfway is 1.5 times a power of two; between 2**-127 and 2**-126 that is the mantissa 0x600000.
        half = xp.where(exponent == 0, np.uint32(0x600000), np.uint32(0x400000))
        exponent = exponent + (mantissa >= half).astype(np.int32)
    return shaped(_e8m0_byte(bits, exponent), shape)


def decode_e8m0(scale: Array) -> Array:
    """E8M0 bytes (``uint8`` or ``float8_e8m0fnu``) to float32: 255 is NaN, 0 is 2**-127.

    2**-127 is a float32 subnormal: a product with it may be flushed in jitted code. To apply scales use
    ``e8m0_factors``.
    """
    raw, shape = _e8m0_raw(scale)
    xp = namespace(raw)
    bits = raw.astype(np.uint32) << 23
    bits = xp.where(raw == np.uint8(0), np.uint32(0x00400000), bits)
    bits = xp.where(raw == np.uint8(255), F32_NAN, bits)
    return shaped(bits_float(bits), shape)


def e8m0_factors(scale: Array) -> tuple[Array, Array]:
    """Two float32 factors of an E8M0 scale, both normal numbers: multiply by the first, then by the second.

    The first is 1/2 for byte 0 and 1 otherwise, so code * 2**-127 comes out right where it is a normal number.
    """
    raw, shape = _e8m0_raw(scale)
    xp = namespace(raw)
    zero = raw == np.uint8(0)
    first = xp.where(zero, np.float32(0.5), np.float32(1))
    return shaped(first, shape), shaped(decode_e8m0(xp.where(zero, np.uint8(1), raw)), shape)


def _e8m0_raw(scale: Array) -> tuple[Array, tuple[int, ...]]:
    raw, shape = operand(scale)
    if np.dtype(raw.dtype) not in (np.dtype(np.uint8), _E8M0):
        errors.bad_type(
            "decode_e8m0",
            "scale",
            expected="uint8 or float8_e8m0fnu",
            got=raw,
            fix="float32 scales need no decoding; encode_e8m0 turns powers of two into bytes.",
        )
    return bitcast(raw, np.uint8), shape


def mx_scale(amax: Array, element: str | ElementType, rounding: str) -> Array:
    """E8M0 byte of a block from its absolute maximum, by integer arithmetic alone.

    With ``emax`` the exponent of the element's largest value:
      ``"rceil"``: the smallest power of two s with amax / s <= max, so nothing saturates; at least 2**-126.
      ``"floor"``: 2**(floor(log2 amax) - emax), the text of OCP MX v1.0; up to the top of the last binade saturates.
      ``"ceil"``:  2**(ceil(log2 amax) - emax).
      ``"even"``:  floor, after amax is rounded to the element's mantissa.

    Args:
      amax: non-negative, any shape, float32 (or narrower).

    Returns:
      uint8, clamped to 0..254 (``"rceil"``: 1..254, like float32 scales); an infinite or NaN amax gives 255.

    Raises:
      ValueError: unknown element or rounding.
    """
    kind = element_type(element, "mx_scale")
    values, shape = as_f32(amax, "mx_scale")
    bits = float_bits(values)
    exponent = ((bits & MAGNITUDE) >> 23).astype(np.int32)
    mantissa = bits & MANTISSA
    if rounding == "rceil":
        top = float_bits(np.full(1, kind.max, np.float32))[0] & MANTISSA
        exponent = exponent + (mantissa > top).astype(np.int32)
    elif rounding == "ceil":
        exponent = exponent + (mantissa != 0).astype(np.int32)
    elif rounding == "even":
        exponent = ((bits + np.uint32(1 << (22 - kind.mantissa_bits))) >> 23).astype(np.int32)
    elif rounding != "floor":
        errors.bad_value(
            "mx_scale",
            "rounding",
            expected="rceil, floor, ceil or even",
            got=repr(rounding),
            fix="Name the rule that the checkpoint or recipe uses; rceil never saturates.",
        )
    lowest = 1 if rounding == "rceil" else 0
    return shaped(_e8m0_byte(bits, exponent - kind.max_exponent, lowest), shape)
