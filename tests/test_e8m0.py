"""E8M0 scales against exact arithmetic, in NumPy and under jit."""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import Any

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxlowbit import codecs

from .ways import eager, every_way, in_jit, in_numpy, neighbors, numpy_and_jit

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
MANTISSA_BITS = {"e4m3": 3, "e5m2": 2, "e2m1": 1}
every_element = pytest.mark.parametrize("element", sorted(LARGEST))


@every_way
def test_decode_e8m0_every_byte(way: Any) -> None:
    codes = np.arange(256, dtype=np.uint8)
    want = np.array([*(math.ldexp(1.0, b - 127) for b in range(255)), np.nan], np.float32)
    for scale in (codes, codes.view(ml_dtypes.float8_e8m0fnu)):
        got = way(codecs.decode_e8m0, scale)
        np.testing.assert_array_equal(got.view(np.uint32)[:255], want.view(np.uint32)[:255])  # 2**-127 as bits
        assert np.isnan(got[255])


@numpy_and_jit
def test_e8m0_factors_multiply_exactly(way: Any) -> None:
    codes = np.arange(255, dtype=np.uint8)

    def scaled(codes: Any) -> Any:
        first, second = codecs.e8m0_factors(codes)
        return first * np.float32(448) * second

    with np.errstate(over="ignore"):
        want = np.array([448 * math.ldexp(1.0, b - 127) for b in range(255)]).astype(np.float32)
        np.testing.assert_array_equal(way(scaled, codes), want)
    assert want[0] == np.float32(2.633107345841924e-36)


def test_decode_e8m0_refuses_floats() -> None:
    with pytest.raises(TypeError, match=r"decode_e8m0: scale: expected uint8 or float8_e8m0fnu; got float32\[2\]"):
        codecs.decode_e8m0(np.ones(2, np.float32))


@every_way
def test_encode_e8m0_exact(way: Any) -> None:
    codes = np.arange(255, dtype=np.uint8)
    scale = codecs.decode_e8m0(codes)
    np.testing.assert_array_equal(way(codecs.encode_e8m0, scale), codes)
    assert way(codecs.encode_e8m0, np.array([np.nan], np.float32)).tolist() == [255]
    assert way(codecs.encode_e8m0, np.float32(0.25)).shape == ()


@pytest.mark.parametrize("bad", [0.75, 0.0, -2.0, np.inf, 3e-39, 1.0000001])
def test_encode_e8m0_refuses_other_numbers(bad: float) -> None:
    x = np.array([1.0, bad, 2.0], np.float32)
    for kind in (np.asarray, jnp.asarray):
        with pytest.raises(ValueError, match=r"power of two") as error:
            codecs.encode_e8m0(kind(x))
        assert str(x[1]) in str(error.value)
    # A tracer's values are unknown: the scale becomes NaN, never a number that was not asked for.
    assert in_jit(codecs.encode_e8m0, x).tolist() == [127, 255, 128]


@hypothesis.given(bits=hnp.arrays(np.uint32, 64, elements=st.integers(0, 0x7F7FFFFF)))
@hypothesis.settings(max_examples=60)
def test_encode_e8m0_roundings(bits: np.ndarray) -> None:
    bits = np.concatenate(
        [bits, [0, 1, 0x00400000, 0x00400001, 0x00600000, 0x00600001, 0x007FFFFF, 0x3FC00000, 0x40400000]]
    )
    x = bits.astype(np.uint32).view(np.float32)
    with np.errstate(divide="ignore"):
        log = np.log2(x.astype(np.float64))  # exact enough: float32 powers of two are 2**-24 apart or more in it
    floor = np.floor(log)
    # The nearest power of two: the midpoint of 2**n and 2**(n + 1) is 1.5 * 2**n.
    up = x.astype(np.float64) / np.exp2(np.maximum(floor, -127)) >= 1.5
    want = {
        "floor": floor,
        "ceil": np.ceil(log),
        "rceil": np.ceil(log),
        "even": np.where(floor < -127, -127, floor + up),
    }
    for rounding, exponent in want.items():
        byte = np.clip(exponent, -127, 127) + 127
        fn = functools.partial(codecs.encode_e8m0, rounding=rounding)
        np.testing.assert_array_equal(in_numpy(fn, x), byte, err_msg=rounding)
        np.testing.assert_array_equal(in_jit(fn, x), byte, err_msg=rounding)
    below_top = x < 1.5 * 2.0**127
    astype = x.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    # astype turns 0 into NaN, and versions of ml_dtypes differ on subnormals between 2**-127 and 2**-126.
    sane = below_top & (x >= 2.0**-126)
    np.testing.assert_array_equal(codecs.encode_e8m0(x, rounding="even")[sane], astype[sane])


@pytest.mark.parametrize("rounding", ["floor", "ceil", "rceil", "even"])
@numpy_and_jit
def test_encode_e8m0_of_what_is_no_scale(rounding: str, way: Any) -> None:
    x = np.array([np.nan, np.inf, -np.inf, -1.0, -0.0, 0.0], np.float32)
    got = way(functools.partial(codecs.encode_e8m0, rounding=rounding), x)
    assert got.tolist() == [255, 255, 255, 255, 0, 0]


def test_encode_e8m0_refuses_unknown_rounding() -> None:
    with pytest.raises(ValueError, match=r"encode_e8m0: rounding: expected exact, rceil.*got 'nearest'"):
        codecs.encode_e8m0(np.ones(1, np.float32), rounding="nearest")


# MX scales.


def mx_exponent(amax: float, element: str, rounding: str) -> int:
    """The scale's exponent by exact arithmetic."""
    value, top = Fraction(amax), Fraction(LARGEST[element])
    max_exponent = math.frexp(float(top))[1] - 1
    if rounding == "rceil":
        exponent = math.frexp(amax)[1] - max_exponent - 3
        while value > top * Fraction(2) ** exponent:
            exponent += 1
        return exponent
    if rounding == "even":
        mantissa, exponent = math.frexp(amax)
        steps = 2 ** (MANTISSA_BITS[element] + 1)
        value = Fraction(math.floor(mantissa * steps + 0.5), steps) * Fraction(2) ** exponent
    floor = math.frexp(float(value))[1] - 1
    exact = value == Fraction(2) ** floor
    return floor - max_exponent + (rounding == "ceil" and not exact)


@every_element
@pytest.mark.parametrize("rounding", ["rceil", "floor", "ceil", "even"])
@hypothesis.given(
    amax=st.one_of(
        st.floats(2.0**-126, 2.0**127, width=32),
        st.builds(
            lambda m, e: float(np.float32(m * 2.0**e)), st.sampled_from([1.0, 1.5, 1.75]), st.integers(-126, 126)
        ),
    )
)
@hypothesis.settings(max_examples=40)
def test_mx_scale_is_exact(element: str, rounding: str, amax: float) -> None:
    points = neighbors(np.array([amax], np.float32))[:3]
    points = np.abs(points[points >= np.float32(2.0**-126)])
    lowest = 1 if rounding == "rceil" else 0
    want = [min(max(mx_exponent(float(a), element, rounding) + 127, lowest), 254) for a in points]
    fn = functools.partial(codecs.mx_scale, element=element, rounding=rounding)
    assert in_numpy(fn, points).tolist() == want
    assert eager(fn, points).tolist() == want


@every_element
@numpy_and_jit
def test_mx_scale_ends(element: str, way: Any) -> None:
    amax = np.array([0.0, 1e-45, 1e-39, np.inf, np.nan], np.float32)
    for rounding in ("rceil", "floor", "ceil", "even"):
        lowest = 1 if rounding == "rceil" else 0
        got = way(functools.partial(codecs.mx_scale, element=element, rounding=rounding), amax)
        assert got.tolist() == [lowest, lowest, lowest, 255, 255]


@every_element
def test_rceil_never_saturates_and_is_the_smallest(element: str) -> None:
    rng = np.random.default_rng(0)
    amax = np.exp2(rng.uniform(-100, 100, 5000)).astype(np.float32)
    scale = codecs.decode_e8m0(codecs.mx_scale(amax, element, "rceil")).astype(np.float64)
    top = LARGEST[element]
    assert (amax / scale <= top).all()
    assert (amax / (scale / 2) > top).all()


def test_mx_scale_refuses_unknown_rounding() -> None:
    with pytest.raises(ValueError, match=r"mx_scale: rounding: expected rceil, floor, ceil or even; got 'none'"):
        codecs.mx_scale(np.ones(1, np.float32), "e4m3", "none")
