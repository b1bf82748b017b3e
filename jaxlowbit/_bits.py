"""Bit patterns of NumPy and JAX arrays alike, and the one division whose bits are the same everywhere."""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowbit import errors
from jaxlowbit.formats import ELEMENTS, ElementType

Array: TypeAlias = Any

F32_INF = np.uint32(0x7F800000)
F32_NAN = np.uint32(0x7FC00000)
MAGNITUDE = np.uint32(0x7FFFFFFF)
MANTISSA = np.uint32(0x007FFFFF)


def namespace(*arrays: Array) -> Any:
    """``jax.numpy`` if any of the arrays is a JAX array or tracer, else ``numpy``."""
    return jnp if any(isinstance(a, jax.Array) for a in arrays) else np


def bitcast(x: Array, dtype: Any) -> Array:
    """The same bits in another dtype of the same width."""
    if isinstance(x, jax.Array):
        return jax.lax.bitcast_convert_type(x, dtype)
    return x.view(np.dtype(dtype))


def float_bits(x: Array) -> Array:
    """float32 to its uint32 bit pattern."""
    return bitcast(x, np.uint32)


def bits_float(bits: Array) -> Array:
    """A uint32 bit pattern to float32."""
    return bitcast(bits, np.float32)


def operand(x: Array) -> tuple[Array, tuple[int, ...]]:
    """The array and its shape; NumPy scalars get one dimension, since NumPy warns when a scalar integer wraps."""
    if isinstance(x, jax.Array):
        return x, x.shape
    x = np.asarray(x)
    return np.ascontiguousarray(np.atleast_1d(x)), x.shape


def shaped(x: Array, shape: tuple[int, ...]) -> Array:
    return x if x.shape == shape else x.reshape(shape)


def _narrow(x: Array) -> Array:
    """float64 to float32, rounded to odd: a later rounding to few bits then equals one rounding from float64.

    Boldo and Melquiond, "Emulation of FMA and correctly rounded sums" (2008): truncation with a sticky last bit.
    """
    xp = namespace(x)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        near = x.astype(np.float32)
    wide = near.astype(np.float64)
    bits = float_bits(near)
    bits = xp.where(abs(wide) > abs(x), bits - np.uint32(1), bits)
    return bits_float(xp.where((wide != x) & (x == x), bits | np.uint32(1), bits))


def as_f32(x: Array, op: str) -> tuple[Array, tuple[int, ...]]:
    """Values as float32 (exactly, or rounded to odd from float64) and the shape to return."""
    x, shape = operand(x)
    dtype = np.dtype(x.dtype)
    if dtype == np.float32:
        return x, shape
    if dtype == np.float64:
        return _narrow(x), shape
    if not (jnp.issubdtype(dtype, jnp.floating) or dtype.kind in "iu"):
        errors.bad_type(op, "x", expected="an array of real numbers", got=x, fix="Convert to float32 first.")
    return x.astype(np.float32), shape  # integers past 2**24 lie beyond the largest code of every element type


def divide(x: Array, y: Array) -> Array:
    """The float32 quotient x / y with one rounding, whatever the compiler makes of the expression around it.

    XLA rewrites ``x / broadcast(y)`` into ``x * broadcast(1 / y)``, and ``(a / b) / c`` into ``a / (b * c)``: both
    move codes that lie near a midpoint. It looks for divisions by broadcasts and of divisions, so both operands
    get an integer zero added to their bits, made of x so that XLA cannot tell it is one (LLVM can, and drops it).
    """
    bits = float_bits(x)
    zero = (bits & MAGNITUDE) >> 31
    return bits_float(bits + zero) / bits_float(float_bits(y) + zero)


# Element codes: what rounding to nearest and stochastic rounding share.


def element_type(name: str | ElementType, op: str) -> ElementType:
    """The element type of that name. Raises ValueError."""
    if isinstance(name, ElementType):
        return name
    found = ELEMENTS.get(name)
    if found is None:
        errors.bad_value(
            op,
            "element",
            expected=f"one of {sorted(ELEMENTS)}",
            got=repr(name),
            fix="E8M0 is a scale, not an element: see encode_e8m0.",
        )
    return found


@functools.cache
def max_code(element: ElementType) -> int:
    """The magnitude code of the largest finite value: 0x7E, 0x7B and 7 for E4M3, E5M2 and E2M1."""
    return int(nearest_code(np.full(1, element.max, np.float32), element)[0])


def nan_code(element: ElementType) -> int:
    """The code that NaN becomes, without sign: E4M3 0x7F, E5M2 0x7E; E2M1 has none and takes 0."""
    if not element.has_nan:
        return 0
    exponent = ((1 << element.exponent_bits) - 1) << element.mantissa_bits
    if element.has_inf:
        return exponent | 1 << (element.mantissa_bits - 1)
    return exponent | ((1 << element.mantissa_bits) - 1)


def nearest_code(x: Array, element: ElementType) -> Array:
    """Magnitude code of |x| as uint32, round to nearest even, before any range rule. NaN gives anything."""
    xp = namespace(x)
    magnitude = float_bits(x) & MAGNITUDE
    # Normal codes: move the exponent's bias, then round off the mantissa bits that do not fit. A carry runs into
    # the exponent by itself.
    drop = 23 - element.mantissa_bits
    rebased = magnitude - np.uint32((127 - element.bias) << 23)
    normal = (rebased + np.uint32((1 << (drop - 1)) - 1) + ((rebased >> drop) & np.uint32(1))) >> drop
    # Below the smallest normal code the spacing is fixed. Adding 2**23 spacings leaves no bits below one spacing,
    # so the adder rounds to nearest even, and the low bits of the sum are the code.
    magic = np.float32(2.0 ** (element.min_exponent - element.mantissa_bits + 23))
    with np.errstate(invalid="ignore"):  # signaling NaNs
        small = float_bits(bits_float(magnitude) + magic) - magic.view(np.uint32)
    first_normal = np.uint32((element.min_exponent + 127) << 23)
    return xp.where(magnitude < first_normal, small, normal)


def finish(x: Array, code: Array, element: ElementType, saturate: bool) -> Array:
    """Range rule, NaN and sign: magnitude codes to uint8 codes."""
    xp = namespace(x)
    bits = float_bits(x)
    top = np.uint32(max_code(element))
    if saturate or not (element.has_inf or element.has_nan):
        code = xp.minimum(code, top)
    else:  # the code after the largest finite one: infinity in E5M2, NaN in E4M3
        code = xp.minimum(code, top + np.uint32(1))
    signed = code | (bits >> 31) << (element.bits - 1)
    is_nan = (bits & MAGNITUDE) > F32_INF
    return xp.where(is_nan, np.uint32(nan_code(element)), signed).astype(np.uint8)
