"""Codecs against tables and roundings derived here from the formats' definitions, in NumPy and under jit."""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import Any

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxlowbit import codecs

from .ways import eager, every_way, in_jit, in_numpy, neighbors, numpy_and_jit

# name: (bits, exponent bits, mantissa bits, bias, largest finite code, NaN code, first infinite or NaN code)
LAYOUT = {
    "e4m3": (8, 4, 3, 7, 0x7E, 0x7F, 0x7F),
    "e5m2": (8, 5, 2, 15, 0x7B, 0x7E, 0x7C),
    "e2m1": (4, 2, 1, 1, 0x7, 0x0, 0x7),
}
NUMPY_DTYPE = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
every_element = pytest.mark.parametrize("element", sorted(LAYOUT))


@functools.cache
def magnitudes(element: str) -> np.ndarray:
    """Float64 values of the finite magnitude codes 0, 1, ... and of the one that would follow the largest."""
    _, _, mantissa, bias, top, _, _ = LAYOUT[element]
    values = []
    for code in range(top + 2):
        exponent, fraction = code >> mantissa, code & ((1 << mantissa) - 1)
        significand = Fraction(fraction, 1 << mantissa) + (1 if exponent else 0)
        values.append(float(significand * Fraction(2) ** (max(exponent, 1) - bias)))
    return np.array(values)


def nearest(x: np.ndarray, element: str, saturate: bool) -> np.ndarray:
    """Codes of float64 values by comparison with midpoints: nothing shared with the codec."""
    bits, _, _, _, top, nan, beyond = LAYOUT[element]
    table = magnitudes(element)
    midpoints = (table[:-1] + table[1:]) / 2
    size = np.abs(x)
    below = np.searchsorted(midpoints, size, side="left")  # a value at a midpoint stays at the lower code
    tie = np.isin(size, midpoints) & (below % 2 == 1)
    code = below + tie
    code = np.minimum(code, top if saturate else beyond)
    code = code | (np.signbit(x).astype(int) << (bits - 1))
    return np.where(np.isnan(x), nan, code).astype(np.uint8)


def hard_points(element: str, dtype: Any) -> np.ndarray:
    table = magnitudes(element).astype(dtype)
    midpoints = (table[:-1] + table[1:]) / dtype(2)
    special = np.array([np.inf, np.nan, np.finfo(dtype).max, 1e30, 2.0**-126, 2.0**-60], dtype)
    return neighbors(np.concatenate([table, midpoints, special]))


# Encoding.


@every_element
@every_way
@pytest.mark.parametrize("saturate", [True, False])
def test_encode_codes_midpoints_and_one_ulp_around(element: str, way: Any, saturate: bool) -> None:
    x = hard_points(element, np.float32)
    got = way(functools.partial(codecs.encode, element=element, saturate=saturate), x)
    assert got.dtype == np.uint8
    assert got.shape == x.shape
    np.testing.assert_array_equal(got, nearest(x.astype(np.float64), element, saturate))


@every_element
@numpy_and_jit
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["f16", "bf16"])
def test_encode_every_16_bit_value(element: str, way: Any, dtype: Any) -> None:
    x = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):
        want = nearest(x.astype(np.float64), element, True)
    np.testing.assert_array_equal(way(functools.partial(codecs.encode, element=element), x), want)


@every_element
def test_encode_float64_rounds_once(element: str) -> None:
    x = hard_points(element, np.float64)
    want = nearest(x, element, True)
    np.testing.assert_array_equal(codecs.encode(x, element), want)
    # and a way through float32 would not have: one float64 ulp beside a midpoint is lost in it
    with np.errstate(over="ignore", under="ignore"):
        twice = codecs.encode(x.astype(np.float32), element)
    assert (twice != want).any()
    with jax.enable_x64(True):
        got = in_jit(functools.partial(codecs.encode, element=element), x)
    np.testing.assert_array_equal(got, want)


@every_element
@hypothesis.given(bits=hnp.arrays(np.uint32, 64, elements=st.integers(0, 2**32 - 1)))
@hypothesis.settings(max_examples=60)
def test_encode_any_float32(element: str, bits: np.ndarray) -> None:
    x = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        wide = x.astype(np.float64)
    for saturate in (True, False):
        want = nearest(wide, element, saturate)
        fn = functools.partial(codecs.encode, element=element, saturate=saturate)
        np.testing.assert_array_equal(in_numpy(fn, x), want)
        np.testing.assert_array_equal(in_jit(fn, x), want)


@every_element
@hypothesis.given(x=hnp.arrays(np.float32, 32, elements=st.floats(-1000, 1000, width=32)), shift=st.integers(-20, 12))
@hypothesis.settings(max_examples=60)
def test_encode_keeps_order_and_decode_inverts_it(element: str, x: np.ndarray, shift: int) -> None:
    x = np.sort(np.ldexp(x, shift))
    values = codecs.decode(codecs.encode(x, element), element)
    assert (np.diff(values) >= 0).all()
    np.testing.assert_array_equal(codecs.encode(values, element), codecs.encode(x, element))


@every_element
def test_unsaturated_encode_is_what_astype_does(element: str) -> None:
    x = hard_points(element, np.float32)
    x = x[~np.isnan(x)]
    want = x.astype(NUMPY_DTYPE[element]).view(np.uint8)
    np.testing.assert_array_equal(codecs.encode(x, element, saturate=False), want)


def test_typed_encoders() -> None:
    x = np.array([1.0, 1000.0, -0.0, np.nan], np.float32)
    for encoder, element, dtype in (
        (codecs.encode_e4m3, "e4m3", ml_dtypes.float8_e4m3fn),
        (codecs.encode_e5m2, "e5m2", ml_dtypes.float8_e5m2),
    ):
        for way in (in_numpy, in_jit):
            got = way(encoder, x)
            assert got.dtype == dtype
            np.testing.assert_array_equal(got.view(np.uint8), codecs.encode(x, element))
            unsaturated = way(functools.partial(encoder, saturate=False), x * 100)
            np.testing.assert_array_equal(unsaturated.view(np.uint8), codecs.encode(x * 100, element, saturate=False))
    assert in_jit(codecs.encode_e2m1, x).tolist() == [2, 7, 8, 0]
    assert codecs.encode_e2m1(x).dtype == np.uint8


@numpy_and_jit
def test_shapes_scalars_and_integers(way: Any) -> None:
    encode = functools.partial(codecs.encode, element="e4m3")
    for shape in ((), (0,), (3, 0, 2), (2, 3, 4)):
        assert way(encode, np.ones(shape, np.float32)).shape == shape
        assert way(functools.partial(codecs.decode, element="e4m3"), np.ones(shape, np.uint8)).shape == shape
    assert way(encode, np.array([-3, 1000], np.int32)).tolist() == [0xC4, 0x7E]
    assert way(encode, np.float32(-2.0)).tolist() == 0xC0


def test_python_values_are_numpy() -> None:
    assert codecs.encode([1.0, 464.0000001, -0.0], "e4m3").tolist() == [0x38, 0x7E, 0x80]
    assert int(codecs.encode(1.5, "e5m2")) == 0x3E
    x = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    np.testing.assert_array_equal(codecs.decode(codecs.encode(x, "e4m3"), "e4m3"), x)
    np.testing.assert_array_equal(codecs.decode(codecs.encode(x[:, ::2], "e4m3"), "e4m3"), x[:, ::2])


def test_numpy_float32_subnormals_keep_their_sign() -> None:
    x = np.array([1, 0x80000001, 0x007FFFFF, 0x807FFFFF], np.uint32).view(np.float32)
    for element, (bits, *_) in LAYOUT.items():
        sign = 1 << (bits - 1)
        for way in (in_numpy, in_jit):
            got = way(functools.partial(codecs.encode, element=element), x)
            assert got.tolist() == [0, sign, 0, sign]


@pytest.mark.parametrize("bad", [np.array(["a"]), np.array([True]), np.array([1j])], ids=["str", "bool", "complex"])
def test_encode_refuses_what_is_no_number(bad: np.ndarray) -> None:
    with pytest.raises(TypeError, match=r"encode: x: expected an array of real numbers"):
        codecs.encode(bad, "e4m3")


@pytest.mark.parametrize("fn", [codecs.encode, codecs.decode, codecs.mx_scale])
def test_unknown_element(fn: Any) -> None:
    with pytest.raises(ValueError, match=r"element: expected one of .*e2m1.*; got 'e8m0'"):
        fn(np.ones(1, np.float32), "e8m0", **({"rounding": "floor"} if fn is codecs.mx_scale else {}))


# Decoding.


def decoded_table(element: str) -> np.ndarray:
    bits, _, _, _, top, _, _ = LAYOUT[element]
    half = np.full(1 << (bits - 1), np.nan)
    half[: top + 1] = magnitudes(element)[:-1]
    if element == "e5m2":
        half[top + 1] = np.inf
    return np.concatenate([half, -half]).astype(np.float32)


@every_element
@every_way
def test_decode_every_code(element: str, way: Any) -> None:
    want = decoded_table(element)
    codes = np.arange(len(want), dtype=np.uint8)
    got = way(functools.partial(codecs.decode, element=element), codes)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want)
    finite = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got)[finite], np.signbit(want)[finite])
    np.testing.assert_array_equal(want, codes.view(NUMPY_DTYPE[element]).astype(np.float32))
    # every finite code is its own encoding
    back = codecs.encode(want, element, saturate=False)
    np.testing.assert_array_equal(back[finite], codes[finite])


def test_decode_takes_the_types_codes_come_in() -> None:
    codes = np.array([0x38, 0xB8, 0x7E], np.uint8)
    want = [1.0, -1.0, 448.0]
    for way in (in_numpy, eager, in_jit):
        assert way(codecs.decode_e4m3, codes).tolist() == want
        assert way(codecs.decode_e4m3, codes.view(np.int8)).tolist() == want
        assert way(codecs.decode_e4m3, codes.view(ml_dtypes.float8_e4m3fn)).tolist() == want
        five = np.array([0x3C, 0xBC, 0x7C], np.uint8).view(ml_dtypes.float8_e5m2)
        assert way(codecs.decode_e5m2, five).tolist() == [1.0, -1.0, np.inf]
    four = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
    for way in (in_numpy, eager, in_jit):
        np.testing.assert_array_equal(way(codecs.decode_e2m1, four), decoded_table("e2m1"))
    np.testing.assert_array_equal(
        codecs.decode_e2m1(np.arange(256, dtype=np.uint8)), np.tile(decoded_table("e2m1"), 16)
    )


@pytest.mark.parametrize("dtype", [np.float32, np.int32, ml_dtypes.float8_e5m2], ids=str)
def test_decode_refuses_other_types(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"decode: codes: expected uint8 codes or float8_e4m3fn"):
        codecs.decode(np.zeros(2, dtype), "e4m3")


@numpy_and_jit
def test_fnuz(way: Any) -> None:
    codes = np.arange(256, dtype=np.uint8)
    got = way(codecs.e4m3fn_to_fnuz, codes)
    fnuz = got.view(ml_dtypes.float8_e4m3fnuz).astype(np.float32)
    np.testing.assert_array_equal(fnuz * 2, decoded_table("e4m3"))
    assert got[0x80] == 0


# Packing.


@every_way
def test_the_low_nibble_is_the_even_index(way: Any) -> None:
    codes = np.array([[1, 2, 3, 4], [15, 0, 8, 9]], np.uint8)
    packed = way(codecs.pack_nibbles, codes)
    assert packed.tolist() == [[0x21, 0x43], [0x0F, 0x98]]
    np.testing.assert_array_equal(way(codecs.unpack_nibbles, packed), codes)
    np.testing.assert_array_equal(packed, np.asarray(jax.lax.bitcast_convert_type(
        jnp.asarray(codes.reshape(2, 2, 2).view(ml_dtypes.float4_e2m1fn)), jnp.uint8)))  # fmt: skip


@numpy_and_jit
def test_values_through_packing(way: Any) -> None:
    values = np.tile(decoded_table("e2m1"), (3, 1))
    packed = way(codecs.pack_e2m1, values)
    assert packed.shape == (3, 8)
    np.testing.assert_array_equal(way(codecs.unpack_e2m1, packed), values)
    half = way(functools.partial(codecs.unpack_e2m1, dtype=jnp.bfloat16), packed)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half.astype(np.float32), values)


@numpy_and_jit
def test_odd_lengths_need_pad(way: Any) -> None:
    x = np.array([[0.5, -6.0, 3.0]], np.float32)
    with pytest.raises(ValueError, match=r"pack_nibbles: codes: expected an even last dimension.*pad=True"):
        way(codecs.pack_e2m1, x)
    packed = way(functools.partial(codecs.pack_e2m1, pad=True), x)
    assert packed.tolist() == [[0xF1, 0x05]]
    np.testing.assert_array_equal(way(functools.partial(codecs.unpack_e2m1, length=3), packed), x)
    assert way(codecs.unpack_e2m1, packed).shape == (1, 4)
    assert way(functools.partial(codecs.pack_nibbles, pad=True), np.zeros((2, 0), np.uint8)).shape == (2, 0)


@pytest.mark.parametrize("length", [0, 2, 5])
def test_unpack_refuses_other_lengths(length: int) -> None:
    with pytest.raises(ValueError, match=r"unpack_nibbles: length: expected 4 or 3"):
        codecs.unpack_nibbles(np.zeros(2, np.uint8), length=length)


def test_pack_refuses_scalars() -> None:
    with pytest.raises(ValueError, match="pack_nibbles"):
        codecs.pack_nibbles(np.uint8(3))
    with pytest.raises(ValueError, match="unpack_nibbles"):
        codecs.unpack_nibbles(np.uint8(3))


@hypothesis.given(codes=hnp.arrays(np.uint8, hnp.array_shapes(max_dims=3, max_side=9), elements=st.integers(0, 15)))
@hypothesis.settings(max_examples=50)
def test_packing_inverts(codes: np.ndarray) -> None:
    packed = codecs.pack_nibbles(codes, pad=True)
    assert packed.shape == (*codes.shape[:-1], -(-codes.shape[-1] // 2))
    np.testing.assert_array_equal(codecs.unpack_nibbles(packed, length=codes.shape[-1]), codes)
