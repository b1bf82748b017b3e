"""Stochastic rounding: a counter-based generator, so that the same (key, index) rounds the same way everywhere.

Threefry-2x32 with 20 rounds: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC11).
"""

from __future__ import annotations

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
