"""Stochastic rounding: a counter-based generator, so that the same (key, index) rounds the same way everywhere.

Threefry-2x32 with 20 rounds: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC11).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowbit import errors
from jaxlowbit._bits import (
    F32_INF,
    MAGNITUDE,
    Array,
    as_f32,
    bits_float,
    element_type,
    finish,
    float_bits,
    namespace,
    shaped,
)
from jaxlowbit.formats import ElementType

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def key_words(key: Array, op: str = "quantize") -> Array:
    """The two uint32 words of a key: a typed or raw Threefry key of JAX, or any uint32 array of shape (2,)."""
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    if tuple(getattr(key, "shape", ())) != (2,) or np.dtype(key.dtype) != np.uint32:
        errors.bad_type(
            op,
            "key",
            expected="one key of two uint32 words",
            got=repr(key) if key is None else key,
            fix="Pass jax.random.key(seed, impl='threefry2x32'), or split another kind of key into such bits.",
        )
    return key


def stochastic_bits(key: Array, index_hi: Array, index_lo: Array) -> Array:
    """32 random bits per counter: the first output word of Threefry-2x32-20.

    Args:
      key: see ``key_words``.
      index_hi, index_lo: uint32 words of a 64-bit counter; shapes broadcast.

    Returns:
      uint32 of the broadcast shape.
    """
    words = key_words(key, "stochastic_bits")
    xp = namespace(words, index_hi, index_lo)
    first, second = words[0], words[1]
    keys = (first, second, first ^ second ^ _PARITY)
    with np.errstate(over="ignore"):  # NumPy warns when scalar integers wrap, which is all they do here
        hi, lo = index_hi + keys[0], index_lo + keys[1]
        for group in range(5):
            for rotation in _ROTATIONS[group % 2]:
                hi = hi + lo
                lo = hi ^ (lo << rotation | lo >> (32 - rotation))
            hi = hi + keys[(group + 1) % 3]
            lo = lo + keys[(group + 2) % 3] + np.uint32(group + 1)
    return xp.asarray(hi)


def encode_stochastic(x: Array, element: str | ElementType, bits: Array) -> Array:
    """Values to codes, rounded up in magnitude with the probability of the part that does not fit.

    With ``q = |x| / spacing`` of the codes around x, the magnitude is ``floor(q)`` plus one if the top 24 of the
    random bits, as a fraction, lie below ``q - floor(q)``. The mean over the bits is x to within 2**-24 spacings.

    Args:
      x: values of any shape; float64 is converted to float32 (rounded to odd) first.
      element: the code type.
      bits: uint32 random bits, of x's shape.

    Returns:
      uint8 codes, saturated, with x's sign; exact values never move. NaN as in ``encode``.

    Raises:
      TypeError: x is not numeric, or bits are not uint32. ValueError: unknown element.
    """
    kind = element_type(element, "encode_stochastic")
    values, shape = as_f32(x, "encode_stochastic")
    if np.dtype(bits.dtype) != np.uint32:
        errors.bad_type("encode_stochastic", "bits", expected="uint32 bits", got=bits, fix="See stochastic_bits.")
    xp = namespace(values, bits)
    # Infinity and NaN round as the largest float does; the range rule of finish comes after.
    magnitude = xp.minimum(float_bits(values) & MAGNITUDE, F32_INF - np.uint32(1))
    # The exponent decides the spacing; below the smallest normal code it stays.
    exponent = xp.maximum((magnitude >> 23).astype(np.int32) - 127, np.int32(kind.min_exponent))
    per_spacing = bits_float((127 + kind.mantissa_bits - exponent).astype(np.uint32) << 23)
    q = bits_float(magnitude) * per_spacing  # a product with a power of two: exact
    whole = xp.floor(q)
    threshold = (bits >> 8).astype(np.float32) * np.float32(2.0**-24)
    up = threshold.reshape(q.shape) < q - whole
    binade = (exponent - kind.min_exponent).astype(np.uint32) << kind.mantissa_bits
    code = binade + whole.astype(np.uint32) + up.astype(np.uint32)
    return shaped(finish(values, code, kind, saturate=True), shape)


def counter_words(shape: tuple[int, ...], offset: int | Array, *, row_stride: int | None = None) -> tuple[Array, Array]:
    """64-bit counters ``offset + row * row_stride + column`` of an array, as uint32 words (hi, lo) of that shape.

    Args:
      shape: at least one dimension; rows are counted over all dimensions but the last.
      offset: a Python int below 2**64, or uint32 words (2,) as (hi, lo).
      row_stride: the last dimension unless given (packed codes of an odd length take one more).
    """
    words = offset_words(offset)
    xp = namespace(words)
    *outer, columns = shape
    stride = columns if row_stride is None else row_stride
    rows = xp.arange(math.prod(outer), dtype=np.uint32).reshape(*outer, 1)
    # rows * stride in 64 bits, from products of 16-bit halves.
    low_row, high_row = rows & np.uint32(0xFFFF), rows >> 16
    low_stride, high_stride = np.uint32(stride & 0xFFFF), np.uint32(stride >> 16 & 0xFFFF)
    middle = high_row * low_stride + (low_row * low_stride >> 16)
    other = low_row * high_stride + (middle & np.uint32(0xFFFF))
    hi = high_row * high_stride + (middle >> 16) + (other >> 16)
    lo = rows * np.uint32(stride & 0xFFFFFFFF)
    column = xp.arange(columns, dtype=np.uint32).reshape(*[1] * len(outer), columns)
    hi, lo = _add64(hi, lo, words[0], words[1])
    return _add64(hi, lo, np.uint32(0), column)


def offset_words(offset: int | Array) -> Array:
    """An offset as uint32 words (hi, lo): from a Python int, an integer scalar array, or such words already.

    Raises ValueError for an int outside 0..2**64 - 1 and TypeError for anything else.
    """
    if isinstance(offset, int) and not isinstance(offset, bool):
        if not 0 <= offset < 1 << 64:
            errors.bad_value(
                "quantize", "offset", expected="0 <= offset < 2**64", got=str(offset), fix="It counts elements."
            )
        return np.array([offset >> 32, offset & 0xFFFFFFFF], np.uint32)
    dtype = np.dtype(getattr(offset, "dtype", np.float32))
    if dtype == np.uint32 and offset.shape == (2,):
        return offset
    if dtype.kind not in "iu" or offset.shape != ():
        errors.bad_type(
            "quantize",
            "offset",
            expected="an int, an integer scalar, or uint32 words (2,) as (hi, lo)",
            got=offset,
            fix="Count the elements that earlier shards hold.",
        )
    xp = namespace(offset)
    high = (offset >> 32).astype(np.uint32) if dtype.itemsize == 8 else xp.zeros((), np.uint32)
    return xp.stack([high, offset.astype(np.uint32)])


def _add64(hi: Array, lo: Array, more_hi: Array, more_lo: Array) -> tuple[Array, Array]:
    total = lo + more_lo
    carry = (total < more_lo).astype(np.uint32)
    return hi + more_hi + carry, total
