"""quantize against a quantizer written here in loops, bit for bit, on both implementations."""

from __future__ import annotations

import functools
import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxlowbit as jlb
from jaxlowbit import _ffi, codecs
from jaxlowbit._bits import divide
from jaxlowbit.formats import FORMATS, Format
from jaxlowbit.testing import tolerance

from .naive_quantize import F32, TINY, naive, naive_codes, spread

_AVAILABLE, _REASON = _ffi.native_available("cpu", _ffi.QUANTIZE)
IMPLEMENTATIONS = ["xla", pytest.param("native", marks=pytest.mark.skipif(not _AVAILABLE, reason=_REASON))]
both = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)

ROUNDINGS = {"f32": ("none", "pow2"), "e8m0": ("rceil", "floor", "ceil", "even"), "e4m3": ("none",)}


def check(x: Any, fmt: Format, implementation: str, rounding: str | None = None, **keywords: Any) -> jlb.ScaledArray:
    """quantize(x) against the loops, every matrix of the batch."""
    q = jlb.quantize(x, fmt, scale_rounding=rounding, implementation=implementation, pad=True, **keywords).validate()
    assert q.shape == x.shape
    matrices = np.asarray(x).reshape(-1, *([1] * (2 - x.ndim)), *x.shape[-2:])
    codes = np.asarray(codecs.unpack_nibbles(q.data, length=q.k) if fmt.element.packed else q.data).view(np.uint8)
    codes, scale = codes.reshape(matrices.shape), np.asarray(q.scale).reshape(len(matrices), *q.grid)
    outer = None if q.global_scale is None else np.asarray(q.global_scale).reshape(-1)
    for b, matrix in enumerate(matrices):
        want = naive(matrix, fmt, rounding or fmt.scale_rounding, keywords.get("amax_ub") or np.inf)
        np.testing.assert_array_equal(codes[b], want[0])
        np.testing.assert_array_equal(scale[b].astype(F32), want[1].astype(F32))
        assert outer is None or outer[b] == want[2]
    return q


# The division that codes and scales rest on.


def test_divisions_keep_their_bits_whatever_xla_makes_of_them() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 512)).astype(F32)
    rows = np.exp2(rng.uniform(-9, 9, (64, 1))).astype(F32)
    scalar = F32(0.37)
    cases = {
        "by rows": (lambda x, r: divide(x, r), x / rows),
        "by a constant": (lambda x, r: divide(x, scalar), x / scalar),
        "of a division": (lambda x, r: divide(divide(x, r), F32(6)), x / rows / F32(6)),
        "by a division": (lambda x, r: divide(x, divide(r, scalar)), x / (rows / scalar)),
        "of scalars": (lambda x, r: divide(x, r[0, 0]), x / rows[0, 0]),
    }
    for name, (fn, want) in cases.items():
        np.testing.assert_array_equal(np.asarray(jax.jit(fn)(x, rows)), want, err_msg=name)


@both
def test_one_formula_decides_near_a_midpoint(implementation: str) -> None:
    # 0.00238037109375 / f32(0.203125 / 448) lies a hair above the midpoint 5.25 of codes 74 and 75 but is it in
    # float32; a product with the reciprocal is not.
    x = np.zeros((1, 128), F32)
    x[0, :2] = 0.203125, 0.00238037109375
    q = check(x, jlb.FP8_CHANNEL, implementation)
    assert np.asarray(q.data).view(np.uint8)[0, 1] == 74


# Formats, roundings, blocks, dtypes.


@every_format
@both
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["f32", "f16", "bf16"])
def test_formats(fmt: Format, implementation: str, dtype: Any) -> None:
    x = spread((40, 272), dtype=np.float32)
    if dtype == np.float16:
        x = np.clip(x, -60000, 60000)
    q = check(x.astype(dtype), fmt, implementation)
    assert q.data.dtype == fmt.element.storage
    assert q.scale.dtype == fmt.scale.storage


@pytest.mark.parametrize(
    ("fmt", "rounding"), [(f, r) for f in FORMATS.values() for r in ROUNDINGS[f.scale.name]], ids=str
)
@both
def test_scale_roundings(fmt: Format, rounding: str, implementation: str) -> None:
    x = spread((6, 160), seed=1)
    x[0, :4] = 448, 500, 512, 6  # where the rules part
    check(x, fmt, implementation, rounding)


@both
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("block", [(3, 7), (None, 5), (2, None), (1, 1), (100, 1000)], ids=str)
def test_any_block_and_element(block: Any, element: str, implementation: str) -> None:
    for fmt in (jlb.FP8_128X128.with_element(element).with_block(*block), jlb.MXFP8.with_block(*block)):
        q = check(spread((5, 17), seed=2), fmt, implementation)
        assert q.scale.shape == fmt.grid(5, 17)


@both
@pytest.mark.parametrize("fmt", [jlb.MXFP4.with_block(3, 5), jlb.NVFP4.with_block(2, 7)], ids=str)
def test_odd_blocks_and_lengths_in_fp4(fmt: Format, implementation: str) -> None:
    for k in (1, 7, 15):  # a block may end exactly where the last byte is half empty
        q = check(spread((4, k), seed=k), fmt, implementation)
        assert q.last_dim == k
        assert q.data.shape == (4, (k + 1) // 2)
        assert (np.asarray(q.data)[:, -1] >> 4 == 0).all()


@every_format
@both
def test_batches_have_scales_of_their_own(fmt: Format, implementation: str) -> None:
    x = spread((2, 3, 5, 64), seed=3) * np.exp2(np.arange(6)).reshape(2, 3, 1, 1).astype(F32)
    q = check(x, fmt, implementation)
    one = jlb.quantize(x[1, 2], fmt, implementation=implementation)
    np.testing.assert_array_equal(np.asarray(q.data)[1, 2], np.asarray(one.data))
    np.testing.assert_array_equal(np.asarray(q.scale)[1, 2], np.asarray(one.scale))


@every_format
@both
def test_vectors_and_empty_arrays(fmt: Format, implementation: str) -> None:
    q = check(spread((80,), seed=4), fmt, implementation)
    assert q.scale.shape == fmt.grid(1, 80)[1:]
    for shape in ((0, 64), (4, 0), (0,)):
        q = jlb.quantize(np.zeros(shape, F32), fmt, implementation=implementation).validate()
        assert q.shape == shape
        assert q.dequantize().shape == shape


@both
def test_axis_moves_to_the_end(implementation: str) -> None:
    x = spread((64, 3, 40), seed=5)
    for axis in (0, 1, -2, 2):
        got = jlb.quantize(x, jlb.MXFP8, axis=axis, implementation=implementation)
        want = jlb.quantize(np.moveaxis(x, axis, -1), jlb.MXFP8, implementation=implementation)
        jax.tree.map(np.testing.assert_array_equal, got, want)


@every_format
@both
@hypothesis.given(scale=st.integers(-118, 100), seed=st.integers(0, 999))
@hypothesis.settings(max_examples=8)
def test_error_stays_within_the_bound_of_the_format(fmt: Format, implementation: str, scale: int, seed: int) -> None:
    # Above 2**-118 every value of a code times a scale is a normal number or rounds to one within the bound.
    x = np.ldexp(np.random.default_rng(seed).standard_normal((3, 50)), scale).astype(F32)
    values = np.asarray(jlb.dequantize(jlb.quantize(x, fmt, implementation=implementation)), np.float64)
    bound = tolerance.quantization_bound(x, fmt) + 2.0**-126
    assert (np.abs(values - x) <= bound).all()


# Special values.


@every_format
@both
def test_zero_blocks_give_positive_scales_and_zeros(fmt: Format, implementation: str) -> None:
    x = np.zeros((4, 256), F32)
    x[0, 1] = -0.0
    for one in (0.0, 1.0):  # all zero; and one block that is not
        x[3, 255] = one
        q = check(x, fmt, implementation)
        scale = np.asarray(q.scale) if fmt.scale.name != "e8m0" else codecs.decode_e8m0(np.asarray(q.scale))
        assert np.isfinite(scale.astype(F32)).all()
        assert (scale.astype(F32) > 0).all()
        values = np.asarray(jlb.dequantize(q))
        np.testing.assert_allclose(values, x, rtol=2.0**-22, atol=0)
        assert np.signbit(values[0, 1])


@every_format
@both
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_non_finite_values_spoil_their_block_alone(fmt: Format, implementation: str, bad: float) -> None:
    x = spread((4, 256), seed=6)
    x[1, 5] = bad
    q = check(x, fmt, implementation)
    values, clean = np.asarray(jlb.dequantize(q)), jlb.quantize(np.nan_to_num(x, posinf=0, neginf=0), fmt)
    rows, k = fmt.resolve_block(4, 256)
    hit = np.zeros(x.shape, bool)
    hit[1 // rows * rows : 1 // rows * rows + rows, :k] = True
    assert np.isnan(values[hit]).all()
    np.testing.assert_array_equal(values[~hit], np.asarray(jlb.dequantize(clean))[~hit])


@every_format
@both
def test_subnormals_count_as_zeros(fmt: Format, implementation: str) -> None:
    x = np.full((2, 64), 1e-39, F32)
    x[1] = -1e-39
    q = check(x, fmt, implementation)
    values = np.asarray(jlb.dequantize(q))
    assert (values == 0).all()
    assert (np.signbit(values) == np.signbit(x)).all()


@both
def test_huge_and_tiny_values(implementation: str) -> None:
    for fmt in FORMATS.values():
        for power in (127, 100, -60, -100, -110, -120, -126):
            check(np.ldexp(spread((2, 64), seed=7) / 2**14, power).astype(F32), fmt, implementation)


# Given scales, bounds, stochastic rounding.


@both
def test_given_scales_are_used_as_they_are(implementation: str) -> None:
    x = np.array([[2.0, 1.0, -3.0, 0.0, np.inf, np.nan]], F32)
    q = jlb.quantize(x, jlb.FP8_TENSOR, scale=1 / 448, implementation=implementation)
    assert np.asarray(q.data).view(np.uint8).tolist() == [[0x7E, 0x7E, 0xFE, 0, 0x7E, 0x7F]]
    assert np.asarray(q.scale).tolist() == [[F32(1 / 448)]]
    half = jlb.quantize(x, jlb.FP8_CHANNEL, scale=jnp.full((1, 1), 0.5, jnp.bfloat16), implementation=implementation)
    assert half.scale.dtype == jnp.float32
    assert np.asarray(half.data).view(np.uint8)[0, :4].tolist() == [0x48, 0x40, 0xCC, 0]


@both
@pytest.mark.parametrize("byte", [0, 1, 100, 254, 255])
def test_given_e8m0_scales_reach_both_ends(byte: int, implementation: str) -> None:
    x = np.ldexp(np.linspace(-500, 500, 32), np.clip(byte - 127, -120, 118)).astype(F32)[None]
    with np.errstate(over="ignore"):
        want = naive_codes((x * math.ldexp(1.0, 127 - byte)).astype(F32), "e4m3", 448.0)
    for scale in (np.array([[byte]], np.uint8), np.array([[byte]], np.uint8).view(ml_dtypes.float8_e8m0fnu)):
        q = jlb.quantize(x, jlb.MXFP8, scale=scale, implementation=implementation)
        assert q.scale.dtype == jnp.uint8
        got = np.asarray(q.data).view(np.uint8)
        np.testing.assert_array_equal(got, want if byte < 255 else np.full_like(got, 0x7F))


@both
@pytest.mark.parametrize("fmt", [jlb.MXFP4, jlb.NVFP4], ids=str)
def test_nan_under_a_given_scale_is_carried_by_the_scale(fmt: Format, implementation: str) -> None:
    # FP4 codes have no NaN; the scale of that block is the only place for it.
    x = np.ones((1, 64), F32)
    x[0, 40] = np.nan
    x[0, 0] = np.inf  # under a finite scale it saturates
    one = np.uint8(127) if fmt.scale.name == "e8m0" else np.asarray(1.0, ml_dtypes.float8_e4m3fn)
    outer = {"global_scale": 1.0} if fmt.two_level else {}
    q = jlb.quantize(x, fmt, scale=one, implementation=implementation, **outer)
    values = np.asarray(jlb.dequantize(q))[0]
    block = 40 // fmt.block[1] * fmt.block[1]
    assert np.isnan(values[block : block + fmt.block[1]]).all()
    assert values[:block].tolist() == [6.0] + [1.0] * (block - 1)


@both
def test_given_global_scales(implementation: str) -> None:
    x = spread((3, 4, 32), seed=8)
    outer = np.array([0.5, 0.001, 3.0], F32)
    q = jlb.quantize(x, jlb.NVFP4, global_scale=outer, implementation=implementation).validate()
    np.testing.assert_array_equal(np.asarray(q.global_scale), outer)
    for b in range(3):
        codes, scales, _ = naive(x[b], jlb.NVFP4, "none", outer=outer[b])
        np.testing.assert_array_equal(np.asarray(codecs.unpack_nibbles(q.data))[b], codes)
        np.testing.assert_array_equal(np.asarray(q.scale)[b].astype(F32), scales.astype(F32))
    shared = jlb.quantize(x, jlb.NVFP4, global_scale=0.5, implementation=implementation)
    assert np.asarray(shared.global_scale).tolist() == [0.5] * 3


@every_format
@both
def test_amax_ub_bounds_the_scale_and_values_saturate(fmt: Format, implementation: str) -> None:
    x = spread((2, 64), seed=9)
    q = check(x, fmt, implementation, amax_ub=1.5)
    top = np.abs(np.asarray(jlb.dequantize(q))).max()
    assert top <= 1.5 * 2 * (1 + 2.0**-4), "E8M0 at most doubles the step"
    # a bound does not hide what is not finite
    x[0, 3] = np.inf
    check(x, fmt, implementation, amax_ub=1.5)


@every_format
@both
def test_stochastic_rounding_is_a_function_of_key_and_index(fmt: Format, implementation: str) -> None:
    x, key = spread((2, 6, 64), seed=10), jax.random.key(4)
    go = functools.partial(jlb.quantize, format=fmt, rounding="stochastic", implementation=implementation)
    q = go(x, key=key)
    hi, lo = codecs.counter_words(x.shape, 0)
    bits = codecs.stochastic_bits(key, hi, lo)
    nearest = jlb.quantize(x, fmt, implementation="xla")
    np.testing.assert_array_equal(np.asarray(q.scale), np.asarray(nearest.scale))
    want = codecs.encode_stochastic(_quotient(x, q), fmt.element, bits)
    got = codecs.unpack_nibbles(q.data) if fmt.element.packed else codecs.raw_codes(q.data, fmt.element)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert (np.asarray(q.data) != np.asarray(nearest.data)).any()
    raw = go(x, key=jax.random.key_data(key))
    np.testing.assert_array_equal(np.asarray(raw.data), np.asarray(q.data))


def _quotient(x: np.ndarray, q: jlb.ScaledArray) -> np.ndarray:
    """What the codes of q round: values over their block's step."""
    step = codecs.decode_e8m0(q.scale) if q.format.scale.name == "e8m0" else q.scale
    step = np.asarray(step).astype(F32)
    if q.global_scale is not None:
        step = np.maximum(step * np.asarray(q.global_scale)[:, None, None], TINY)
    block = q.format.resolve_block(*x.shape[-2:])
    step = np.repeat(np.repeat(step, block[0], axis=1)[:, : x.shape[1]], block[1], axis=2)[:, :, : x.shape[2]]
    return x / step


@both
def test_shards_round_as_the_whole_does(implementation: str) -> None:
    x, key = spread((8, 64), seed=11), jax.random.key(0)
    go = functools.partial(
        jlb.quantize, format=jlb.MXFP8, rounding="stochastic", key=key, implementation=implementation
    )
    for start in (0, 2**32 - 100, 2**40):
        whole = go(x, offset=start)
        halves = [go(x[:3], offset=start), go(x[3:], offset=start + 3 * 64)]
        got = np.concatenate([np.asarray(h.data) for h in halves])
        np.testing.assert_array_equal(got, np.asarray(whole.data))


@both
def test_odd_rows_count_whole_bytes(implementation: str) -> None:
    x, key = spread((4, 31), seed=12), jax.random.key(1)
    go = functools.partial(
        jlb.quantize, format=jlb.MXFP4, rounding="stochastic", key=key, implementation=implementation
    )
    padded = go(np.pad(x, ((0, 0), (0, 1))))
    np.testing.assert_array_equal(np.asarray(go(x, pad=True).data) & 15, np.asarray(padded.data) & 15)
    assert (np.asarray(go(x, pad=True).data) != np.asarray(go(x, pad=True, offset=1).data)).any()


@pytest.mark.skipif(not _AVAILABLE, reason=_REASON)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=25)
def test_native_and_xla_give_the_same_bits(data: st.DataObject) -> None:
    """Any bit patterns, block, option: the two implementations never part."""
    fmt = data.draw(st.sampled_from(list(FORMATS.values())))
    if data.draw(st.booleans()):
        fmt = fmt.with_block(data.draw(st.sampled_from([None, 1, 3])), data.draw(st.sampled_from([None, 5, 24])))
    shape = data.draw(st.sampled_from([(3, 49), (2, 3, 40), (97,)]))
    dtype = data.draw(st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    if data.draw(st.booleans()):
        x = rng.integers(0, 2**32, shape, dtype=np.uint32).view(F32)
    else:
        x = spread(shape, seed=int(rng.integers(1000))) * F32(2.0) ** F32(rng.integers(-130, 110))
    keywords: dict[str, Any] = {"scale_rounding": data.draw(st.sampled_from(ROUNDINGS[fmt.scale.name]))}
    if data.draw(st.booleans()):
        keywords |= {"rounding": "stochastic", "key": np.array([1, 2], np.uint32), "offset": 2**32 - 7}
    x = jax.jit(lambda v: v.astype(dtype))(x)
    native, xla = (jlb.quantize(x, fmt, pad=True, implementation=i, **keywords) for i in ("native", "xla"))
    for got, want in zip(jax.tree.leaves(native), jax.tree.leaves(xla), strict=True):
        np.testing.assert_array_equal(np.atleast_1d(got).view(np.uint8), np.atleast_1d(want).view(np.uint8))
