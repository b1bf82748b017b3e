"""Bits to values and back: E4M3, E5M2, E2M1 and E8M0 codes, and the packing of 4-bit codes.

Every function takes NumPy arrays (or what ``numpy.asarray`` takes) and returns NumPy arrays, or takes JAX arrays and
tracers and returns JAX arrays. Both kinds run the same integer arithmetic on the float32 bit patterns, so they agree
bit for bit, jitted or not. The one allowed difference: XLA's threads may flush float32 subnormals, so in JAX a
subnormal input counts as a zero of its sign; every code in this file that could tell the difference is an E8M0 one.

Sources: OCP OFP8 v1.0 (E4M3 without infinities, E5M2, both conversion modes), OCP MX v1.0 (E2M1, E8M0).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from jaxlowbit import errors
from jaxlowbit._bits import (
    F32_INF,
    F32_NAN,
    Array,
    as_f32,
    bitcast,
    bits_float,
    element_type,
    finish,
    float_bits,
    max_code,
    namespace,
    nearest_code,
    operand,
    shaped,
)
from jaxlowbit._e8m0 import decode_e8m0, e8m0_factors, encode_e8m0, mx_scale
from jaxlowbit._stochastic import counter_words, encode_stochastic, key_words, stochastic_bits
from jaxlowbit.formats import E2M1, E4M3, E5M2, ElementType

__all__ = [
    "counter_words",
    "decode",
    "decode_e2m1",
    "decode_e4m3",
    "decode_e5m2",
    "decode_e8m0",
    "e4m3fn_to_fnuz",
    "e8m0_factors",
    "encode",
    "encode_e2m1",
    "encode_e4m3",
    "encode_e5m2",
    "encode_e8m0",
    "encode_stochastic",
    "key_words",
    "mx_scale",
    "pack_e2m1",
    "pack_nibbles",
    "stochastic_bits",
    "to_storage",
    "unpack_e2m1",
    "unpack_nibbles",
]


def raw_codes(codes: Array, element: str | ElementType, op: str = "decode") -> Array:
    """Codes as uint8, from uint8, int8 or the element's own float8 (E2M1: float4) dtype. Bits, not values."""
    element = element_type(element, op)
    codes, shape = operand(codes)
    dtype = np.dtype(codes.dtype)
    if dtype == np.uint8:
        return shaped(codes, shape)
    if element.packed and dtype == np.dtype(ml_dtypes.float4_e2m1fn):
        # Four-bit arrays have no eight-bit view in JAX; each of the 16 codes is its value.
        return encode(shaped(codes, shape), element)
    if dtype not in (np.dtype(np.int8), element.storage):
        errors.bad_type(
            op,
            "codes",
            expected=f"uint8 codes or {element.storage} for {element.name}",
            got=codes,
            fix="Bit-cast the codes to uint8; a value conversion would change them.",
        )
    return shaped(bitcast(codes, np.uint8), shape)


# Element codes.


def encode(x: Array, element: str | ElementType, *, saturate: bool = True) -> Array:
    """Values to codes of ``element`` ("e4m3", "e5m2" or "e2m1"): one rounding, to nearest even.

    Args:
      x: values of any shape; float64 is rounded once, not through float32.
      element: the code type.
      saturate: finite overflow and infinities become the largest finite code. Otherwise E4M3 gives NaN and E5M2
        infinity, as ``astype`` does; E2M1 has neither and always saturates.

    Returns:
      uint8 codes of x's shape; one code per byte for E2M1 too (0..15, see ``pack_nibbles``). NaN becomes the
      positive NaN code of E4M3 and E5M2 and code 0 of E2M1, which has none: quantize carries NaN in the scale.

    Raises:
      TypeError: x is not numeric. ValueError: unknown element.
    """
    kind = element_type(element, "encode")
    values, shape = as_f32(x, "encode")
    return shaped(finish(values, nearest_code(values, kind), kind, saturate), shape)


def decode(codes: Array, element: str | ElementType) -> Array:
    """Codes to float32 values, exactly: uint8 (or int8) codes, or an array of the element's own dtype.

    E2M1 codes are one per byte; only their low four bits are read.
    """
    kind = element_type(element, "decode")
    raw, shape = operand(raw_codes(codes, kind))
    xp = namespace(raw)
    code = raw.astype(np.uint32)
    magnitude = code & np.uint32((1 << (kind.bits - 1)) - 1)
    # Codes below the first normal one are small integers times the spacing. Assembling their bits as if they were
    # normal is wrong, and scaling a float32 subnormal up by 2**k would be flushed by XLA's threads.
    spacing = np.float32(2.0 ** (kind.min_exponent - kind.mantissa_bits))
    small = float_bits(magnitude.astype(np.float32) * spacing)
    normal = (magnitude << (23 - kind.mantissa_bits)) + np.uint32((127 - kind.bias) << 23)
    bits = xp.where(magnitude < np.uint32(1 << kind.mantissa_bits), small, normal)
    if kind.has_nan:
        bits = xp.where(magnitude > np.uint32(max_code(kind)), F32_NAN, bits)
    if kind.has_inf:
        bits = xp.where(magnitude == np.uint32(max_code(kind) + 1), F32_INF, bits)
    sign = (code >> (kind.bits - 1) & np.uint32(1)) << 31
    return shaped(bits_float(bits | sign), shape)


def encode_e4m3(x: Array, *, saturate: bool = True) -> Array:
    """Values to ``float8_e4m3fn`` of the same shape; see ``encode``."""
    return _to_storage(encode(x, E4M3, saturate=saturate), E4M3)


def encode_e5m2(x: Array, *, saturate: bool = True) -> Array:
    """Values to ``float8_e5m2`` of the same shape; see ``encode``."""
    return _to_storage(encode(x, E5M2, saturate=saturate), E5M2)


def encode_e2m1(x: Array) -> Array:
    """Values to E2M1 codes 0..15, one per byte, always saturating; see ``encode``."""
    return encode(x, E2M1)


def decode_e4m3(codes: Array) -> Array:
    """uint8 or ``float8_e4m3fn`` codes to float32."""
    return decode(codes, E4M3)


def decode_e5m2(codes: Array) -> Array:
    """uint8 or ``float8_e5m2`` codes to float32."""
    return decode(codes, E5M2)


def decode_e2m1(codes: Array) -> Array:
    """E2M1 codes, one per byte, to float32."""
    return decode(codes, E2M1)


def _to_storage(codes: Array, element: ElementType) -> Array:
    values, shape = operand(codes)
    return shaped(bitcast(values, element.storage), shape)


def to_storage(codes: Array, element: ElementType, *, pad: bool = False) -> Array:
    """uint8 codes as a format stores them: the float8 dtype, or two E2M1 codes per byte."""
    return pack_nibbles(codes, pad=pad) if element.packed else _to_storage(codes, element)


# Packed four-bit codes.


def pack_nibbles(codes: Array, *, pad: bool = False) -> Array:
    """Codes 0..15 ``(..., K)`` to bytes ``(..., K/2)``; the even index takes the low nibble.

    Raises ValueError for an odd K, unless ``pad``: then the last high nibble is 0. Higher bits of a code are ignored.
    """
    raw = raw_codes(codes, E2M1, "pack_nibbles")
    xp = namespace(raw)
    if raw.ndim == 0 or (raw.shape[-1] % 2 and not pad):
        errors.bad_value(
            "pack_nibbles",
            "codes",
            expected="an even last dimension (two codes share a byte)",
            got=raw,
            fix="Pass pad=True for a zero nibble at the end, and keep the logical length.",
        )
    raw = raw & np.uint8(15)
    low, high = raw[..., 0::2], raw[..., 1::2]
    if raw.shape[-1] % 2:
        high = xp.pad(high, [(0, 0)] * (raw.ndim - 1) + [(0, 1)])
    return low | high << 4


def unpack_nibbles(packed: Array, *, length: int | None = None) -> Array:
    """Bytes ``(..., n)`` to codes 0..15 ``(..., length)``, the low nibble first; length is 2n, or 2n - 1 if odd."""
    raw = raw_codes(packed, E2M1, "unpack_nibbles")
    xp = namespace(raw)
    full = 2 * raw.shape[-1] if raw.ndim else 0
    if raw.ndim == 0 or (length is not None and (length + 1) // 2 != raw.shape[-1]):
        errors.bad_value(
            "unpack_nibbles",
            "length",
            expected=f"{full} or {max(full - 1, 0)} codes from packed bytes with at least one dimension",
            got=f"length={length} for {errors.describe(raw)}",
            fix="The last dimension of packed codes is ceil(K / 2).",
        )
    codes = xp.stack([raw & np.uint8(15), raw >> 4], axis=-1).reshape(*raw.shape[:-1], full)
    return codes if length in (None, full) else codes[..., :length]


def pack_e2m1(x: Array, *, pad: bool = False) -> Array:
    """Values ``(..., K)`` to packed E2M1 ``uint8 (..., K/2)``: nearest even, saturating, low nibble first."""
    return pack_nibbles(encode(x, E2M1), pad=pad)


def unpack_e2m1(packed: Array, *, length: int | None = None, dtype: Any = np.float32) -> Array:
    """Packed E2M1 bytes ``(..., n)`` to values ``(..., length)`` of ``dtype``; every E2M1 value is exact in it."""
    return decode(unpack_nibbles(packed, length=length), E2M1).astype(dtype)


def e4m3fn_to_fnuz(codes: Array) -> Array:
    """E4M3 codes to uint8 codes of ``float8_e4m3fnuz`` that mean half the value: **double the scale with them**.

    The bits are the same but for three codes: -0 becomes 0 (0x80 is NaN there), and both NaNs become 0x80.
    """
    raw = raw_codes(codes, E4M3, "e4m3fn_to_fnuz")
    xp = namespace(raw)
    is_nan = (raw & np.uint8(0x7F)) == np.uint8(0x7F)
    return xp.where(is_nan, np.uint8(0x80), xp.where(raw == np.uint8(0x80), np.uint8(0), raw))
