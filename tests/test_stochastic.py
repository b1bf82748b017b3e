"""Stochastic rounding: the generator against published vectors, the rounding against exact arithmetic."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlowbit import codecs

from .ways import in_jit, in_numpy, numpy_and_jit

every_element = pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m1"])
TOP = {"e4m3": 0x7E, "e5m2": 0x7B, "e2m1": 7}
U32 = st.integers(0, 2**32 - 1)


# Known answers of threefry2x32-20 in the Random123 distribution: (counter, key) -> output.
VECTORS = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("counter", "key", "output"), VECTORS)
@numpy_and_jit
def test_generator_gives_the_published_vectors(counter: Any, key: Any, output: Any, way: Any) -> None:
    words = [np.array(key, np.uint32), np.uint32(counter[0]), np.uint32(counter[1])]
    assert int(way(codecs.stochastic_bits, *words)) == output[0]


def test_numpy_and_jax_draw_the_same_bits() -> None:
    key = np.array([7, 0xDEADBEEF], np.uint32)
    lo = np.arange(1000, dtype=np.uint32) * np.uint32(0x01000193)
    hi = lo[::-1].copy()
    np.testing.assert_array_equal(
        in_numpy(codecs.stochastic_bits, key, hi, lo), in_jit(codecs.stochastic_bits, key, hi, lo)
    )


def test_keys_of_jax_typed_and_raw_are_the_same() -> None:
    typed, raw = jax.random.key(3, impl="threefry2x32"), jax.random.PRNGKey(3, impl="threefry2x32")
    hi, lo = np.uint32(1), np.arange(5, dtype=np.uint32)
    want = codecs.stochastic_bits(np.asarray(raw), hi, lo)
    np.testing.assert_array_equal(np.asarray(codecs.stochastic_bits(typed, hi, lo)), want)
    np.testing.assert_array_equal(np.asarray(codecs.stochastic_bits(raw, hi, lo)), want)
    np.testing.assert_array_equal(np.asarray(jax.jit(codecs.stochastic_bits)(typed, hi, lo)), want)


@pytest.mark.parametrize(
    "key", [None, 3, np.zeros(2, np.int32), np.zeros(4, np.uint32), np.zeros((1, 2), np.uint32)], ids=str
)
def test_other_keys_are_refused(key: Any) -> None:
    with pytest.raises(TypeError, match=r"key: expected one key of two uint32 words.*threefry2x32"):
        codecs.stochastic_bits(key, np.uint32(0), np.uint32(0))


def test_keys_of_another_generator_are_refused() -> None:
    with pytest.raises(TypeError, match="key"):
        codecs.key_words(jax.random.key(0, impl="rbg"))


# Counters.


@hypothesis.given(
    offset=st.integers(0, 2**64 - 1), columns=st.integers(1, 9), rows=st.integers(0, 5), extra=st.booleans()
)
@hypothesis.settings(max_examples=60)
def test_counters_are_64_bits_wide(offset: int, columns: int, rows: int, extra: bool) -> None:
    stride = columns + extra
    hi, lo = codecs.counter_words((rows, columns), offset, row_stride=stride)
    got = (hi.astype(object) << 32) + lo.astype(object)
    want = [[(offset + r * stride + c) % 2**64 for c in range(columns)] for r in range(rows)]
    assert got.tolist() == want
    assert hi.dtype == lo.dtype == np.uint32


def test_counters_of_a_large_array_carry() -> None:
    # 70000 rows of a stride beyond 2**16: products of the row number and the stride pass 2**32.
    for way in (in_numpy, in_jit):
        hi = way(lambda o: codecs.counter_words((70000, 1), o, row_stride=131_071)[0], np.array([0, 5], np.uint32))
        lo = way(lambda o: codecs.counter_words((70000, 1), o, row_stride=131_071)[1], np.array([0, 5], np.uint32))
        got = (hi[:, 0].astype(np.uint64) << np.uint64(32)) + lo[:, 0]
        np.testing.assert_array_equal(got, np.arange(70000, dtype=np.uint64) * np.uint64(131_071) + np.uint64(5))


def test_offsets_in_every_form() -> None:
    want = codecs.counter_words((2, 3), 12)
    forms = [np.int32(12), jnp.int32(12), jnp.uint32(12), np.uint64(12), np.array([0, 12], np.uint32)]
    for form in forms:
        for got, expected in zip(codecs.counter_words((2, 3), form), want, strict=True):
            np.testing.assert_array_equal(np.asarray(got), expected)
    high = codecs.counter_words((1, 1), np.uint64(2**40 + 1))
    assert [int(word[0, 0]) for word in high] == [1 << 8, 1]
    leading = codecs.counter_words((2, 2, 3), 0)[1]
    assert leading.reshape(-1).tolist() == list(range(12))


@pytest.mark.parametrize("offset", [-1, 2**64])
def test_offsets_out_of_range(offset: int) -> None:
    with pytest.raises(ValueError, match=r"offset: expected 0 <= offset < 2\*\*64"):
        codecs.counter_words((1, 1), offset)


@pytest.mark.parametrize("offset", [1.5, True, np.float32(2), np.zeros(3, np.int32)], ids=str)
def test_offsets_of_other_types(offset: Any) -> None:
    with pytest.raises(TypeError, match=r"offset: expected an int"):
        codecs.counter_words((1, 1), offset)


# Rounding.


def exact(x: np.ndarray, element: str, bits: np.ndarray) -> np.ndarray:
    """The rule in float64: neighbors from the table of codes, the part between them against the bits."""
    top = TOP[element]
    table = codecs.decode(np.arange(top + 1, dtype=np.uint8), element).astype(np.float64)
    size = np.minimum(np.abs(x).astype(np.float64), table[-1])
    low = np.searchsorted(table, size, side="right") - 1
    gap = np.append(np.diff(table), 1.0)[low]
    up = (bits >> 8) * 2.0**-24 < (size - table[low]) / gap
    sign = 8 if element == "e2m1" else 128
    return (np.minimum(low + up, top) | np.where(np.signbit(x), sign, 0)).astype(np.uint8)


@every_element
@hypothesis.given(
    x=hnp.arrays(np.float32, 48, elements=st.floats(-70000, 70000, width=32, allow_subnormal=False)),
    shift=st.integers(-24, 0),
    bits=hnp.arrays(np.uint32, 48, elements=U32),
)
@hypothesis.settings(max_examples=60)
def test_rounding_is_exact(element: str, x: np.ndarray, shift: int, bits: np.ndarray) -> None:
    x = np.ldexp(x, shift)
    x = np.where(np.abs(x) < 2.0**-100, np.copysign(np.float32(0), x), x)
    want = exact(x, element, bits)
    fn = functools.partial(codecs.encode_stochastic, element=element)
    np.testing.assert_array_equal(in_numpy(lambda x, b: fn(x, bits=b), x, bits), want)
    np.testing.assert_array_equal(in_jit(_JITTED[element], x, bits), want)


def _stochastic(x: Any, bits: Any, *, element: str) -> Any:
    return codecs.encode_stochastic(x, element, bits)


_JITTED = {e: functools.partial(_stochastic, element=e) for e in TOP}


@every_element
@numpy_and_jit
def test_codes_never_move_and_ends_saturate(element: str, way: Any) -> None:
    codes = np.arange(TOP[element] + 1, dtype=np.uint8)
    values = codecs.decode(codes, element)
    for word in (0, 0xFFFFFFFF):
        got = way(_JITTED[element], values, np.full(values.shape, word, np.uint32))
        np.testing.assert_array_equal(got, codes)
    ends = np.array([np.inf, -np.inf, 3e38, np.nan, -0.0], np.float32)
    sign = 8 if element == "e2m1" else 128
    nan = {"e4m3": 0x7F, "e5m2": 0x7E, "e2m1": 0}[element]
    got = way(_JITTED[element], ends, np.zeros(5, np.uint32))
    assert got.tolist() == [TOP[element], TOP[element] | sign, TOP[element], nan, sign]


@every_element
def test_the_mean_is_the_value(element: str) -> None:
    """Over n draws the mean of the rounded values lies within six standard errors of the value."""
    n = 1 << 14
    values = np.array([0.3, -1.3, 2.71, 5.9, 0.01, -0.124], np.float32)
    x = np.repeat(values[:, None], n, axis=1)
    hi, lo = codecs.counter_words(x.shape, 0)
    bits = codecs.stochastic_bits(np.array([1, 2], np.uint32), hi, lo)
    decoded = codecs.decode(codecs.encode_stochastic(x, element, bits), element).astype(np.float64)
    spread = np.ptp(decoded, axis=1)
    assert (spread > 0).all(), "every one of the values lies between two codes"
    error = np.abs(decoded.mean(axis=1) - values)
    assert (error < 6 * spread / 2 / np.sqrt(n)).all()


def test_bits_must_be_words() -> None:
    with pytest.raises(TypeError, match=r"encode_stochastic: bits: expected uint32 bits"):
        codecs.encode_stochastic(np.ones(2, np.float32), "e4m3", np.zeros(2, np.int32))
    with pytest.raises(TypeError, match=r"encode_stochastic: x"):
        codecs.encode_stochastic(np.ones(2, bool), "e4m3", np.zeros(2, np.uint32))
    with pytest.raises(ValueError, match=r"encode_stochastic: element"):
        codecs.encode_stochastic(np.ones(2, np.float32), "e3m2", np.zeros(2, np.uint32))
