"""Random products against the float64 reference, within the bound derived from their terms and dtypes.

Operands are built from codes and scales, not by quantizing: every code, blocks of very different scale, blocks of
zeros, partial blocks in both axes. The reference decodes the same bits, so the bound is that of the kernel alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxlowbit as jlb
from jaxlowbit import _ffi
from jaxlowbit.formats import Format
from jaxlowbit.testing import reference, shapes, tolerance

FLOATS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
# One fault at a time: shrinking several takes minutes.
EXAMPLES = settings(max_examples=15, report_multiple_bugs=False)

lengths = st.one_of(st.sampled_from(shapes.edge_lengths(130)), st.integers(1, 150))
small = st.one_of(st.sampled_from((1, 2, 8, 16, 17, 33)), st.integers(1, 40))
seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(sorted(FLOATS))
blocks = st.builds(
    lambda rows, k: (rows, k), st.one_of(st.none(), st.integers(1, 40)), st.one_of(st.none(), st.integers(1, 200))
)
fp8_formats = st.one_of(
    st.sampled_from((jlb.FP8_TENSOR, jlb.FP8_CHANNEL, jlb.FP8_1X128, jlb.FP8_128X128, jlb.MXFP8)),
    blocks.map(lambda block: jlb.FP8_1X128.with_block(*block)),
)
fp4_formats = st.one_of(
    st.sampled_from((jlb.MXFP4, jlb.NVFP4)),
    st.sampled_from((16, 32, 48, 64)).map(lambda k: jlb.MXFP4.with_block(1, k)),
)


@pytest.fixture(scope="module", params=["xla", "native"])
def implementation(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        for target in (_ffi.DOT, _ffi.QUANTIZE):
            available, reason = _ffi.native_available(jax.default_backend(), target)
            if not available:
                pytest.skip(f"no native kernels: {reason}")
    return str(request.param)


def scales(random: np.random.Generator, kind: str, grid: tuple[int, int]) -> np.ndarray:
    """Block scales of which each has another power of two, in the format's stored type."""
    exponent = random.integers(-20, 20, grid)
    if kind == "e8m0":
        return (exponent + 127).astype(np.uint8)
    if kind == "e4m3":
        return random.integers(1, 0x7F, grid).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    return (np.exp2(exponent) * random.uniform(1, 2, grid)).astype(np.float32)


def operand(random: np.random.Generator, fmt: Format, rows: int, k: int) -> jlb.ScaledArray:
    """A quantized matrix of random codes without NaN; some blocks all zeros, one code the largest."""
    grid = fmt.grid(rows, k)
    zero = reference._spread((random.random(grid) < 0.15).astype(np.float64), fmt.block, rows, k) > 0
    if fmt.element.name == "e2m1":
        codes = np.where(zero, 0, random.integers(0, 16, (rows, k))).astype(np.uint8)
        codes[random.integers(rows), random.integers(k)] = 7
        codes = np.pad(codes, ((0, 0), (0, k % 2)))
        data = codes[:, 0::2] | (codes[:, 1::2] << 4)
    else:
        codes = np.where(zero, 0, random.integers(0, 0x7F, (rows, k)) | (random.integers(0, 2, (rows, k)) << 7))
        codes[random.integers(rows), random.integers(k)] = 0x7E
        data = codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    outer = jnp.asarray(np.float32(2.0 ** random.integers(-10, 10) * 1.375)) if fmt.two_level else None
    last_dim = k if fmt.element.packed and k % 2 else None
    scale = jnp.asarray(scales(random, fmt.scale.name, grid))
    return jlb.ScaledArray(jnp.asarray(data), scale, outer, format=fmt, last_dim=last_dim).validate()


def plain(random: np.random.Generator, rows: int, k: int, dtype: str) -> np.ndarray:
    """Activations whose rows differ by powers of two, with a row of zeros and one huge value."""
    spread = 6 if dtype == "float16" else 14
    x = random.standard_normal((rows, k)) * np.exp2(random.integers(-spread, spread, (rows, 1)))
    x[random.integers(rows)] = 0
    x[random.integers(rows), random.integers(k)] = 2.0**13 if dtype == "float16" else 2.0**30
    return x.astype(FLOATS[dtype])


def bias_of(random: np.random.Generator, n: int, dtype: str) -> np.ndarray | None:
    return random.standard_normal(n).astype(FLOATS[dtype]) if random.random() < 0.5 else None


def check(out: jax.Array, product: reference.Product, dtype: str, **keywords: Any) -> None:
    assert out.dtype == FLOATS[dtype]
    tolerance.check(out, product.value, tolerance.dot_bound(product, out.dtype, **keywords))


@EXAMPLES
@given(fmt=fp8_formats, m=small, n=lengths, k=lengths, x_dtype=dtypes, out_dtype=dtypes, seed=seeds)
def test_fp8_weights(
    implementation: str, fmt: Format, m: int, n: int, k: int, x_dtype: str, out_dtype: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    x, w, bias = plain(random, m, k, x_dtype), operand(random, fmt, n, k), bias_of(random, n, x_dtype)
    out = jlb.fp8_dot(
        jnp.asarray(x), w, bias=bias, act=None, preferred_element_type=out_dtype, implementation=implementation
    )
    check(out, reference.dot(x, w, bias), out_dtype)


@EXAMPLES
@given(fmt=fp4_formats, m=small, n=lengths, k=lengths, x_dtype=dtypes, out_dtype=dtypes, seed=seeds)
def test_fp4_weights(
    implementation: str, fmt: Format, m: int, n: int, k: int, x_dtype: str, out_dtype: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    x, w, bias = plain(random, m, k, x_dtype), operand(random, fmt, n, k), bias_of(random, n, x_dtype)
    out = jlb.fp4_dot(jnp.asarray(x), w, bias=bias, preferred_element_type=out_dtype, implementation=implementation)
    check(out, reference.dot(x, w, bias), out_dtype)


@EXAMPLES
@given(
    lhs=st.one_of(
        st.sampled_from((jlb.FP8_TENSOR, jlb.FP8_CHANNEL, jlb.FP8_1X128, jlb.MXFP8)), fp4_formats, fp8_formats
    ),
    rhs=st.one_of(fp8_formats, fp4_formats),
    m=small,
    n=lengths,
    k=lengths,
    out_dtype=dtypes,
    seed=seeds,
)
def test_two_quantized_operands(
    implementation: str, lhs: Format, rhs: Format, m: int, n: int, k: int, out_dtype: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    a, b, bias = operand(random, lhs, m, k), operand(random, rhs, n, k), bias_of(random, n, "float32")
    options: dict[str, Any] = {"preferred_element_type": out_dtype, "implementation": implementation}
    if lhs.element.packed and k % 2:
        with pytest.raises(ValueError, match="even K"):
            jlb.scaled_dot(a, b, bias=bias, **options)
        return
    out = jlb.scaled_dot(a, b, bias=bias, **options)
    check(out, reference.dot(a, b, bias), out_dtype)


@EXAMPLES
@given(
    act=st.sampled_from(("dynamic", jlb.Act(jlb.FP8_1X128, scale_rounding="pow2"), jlb.FP8_CHANNEL, jlb.MXFP8)),
    fmt=st.sampled_from((jlb.FP8_128X128, jlb.FP8_CHANNEL, jlb.FP8_TENSOR, jlb.MXFP8)),
    m=small,
    n=small,
    k=lengths,
    x_dtype=dtypes,
    seed=seeds,
)
def test_quantized_activations(
    implementation: str, act: Any, fmt: Format, m: int, n: int, k: int, x_dtype: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    x, w = plain(random, m, k, x_dtype), operand(random, fmt, n, k)
    out = jlb.fp8_dot(jnp.asarray(x), w, act=act, preferred_element_type="float32", implementation=implementation)
    customary = {"FP8_128X128": jlb.FP8_1X128, "MXFP8": jlb.MXFP8}.get(fmt.name, jlb.FP8_CHANNEL)
    asked = customary if act == "dynamic" else getattr(act, "format", act)
    lhs = reference.quantize(x, asked, pow2=getattr(act, "scale_rounding", None) == "pow2")
    check(out, reference.dot(lhs, w), "float32")


@EXAMPLES
@given(
    fmt=st.one_of(fp8_formats, fp4_formats),
    m=small,
    n=lengths,
    k=lengths,
    x_dtype=dtypes,
    out_dtype=st.sampled_from(("bfloat16", "float32")),
    seed=seeds,
)
def test_gradient(
    implementation: str, fmt: Format, m: int, n: int, k: int, x_dtype: str, out_dtype: str, seed: int
) -> None:
    """dx is the cotangent times the dequantized weights, in x's dtype, whatever the activations were quantized to."""
    random = np.random.default_rng(seed)
    x, w = plain(random, m, k, x_dtype), operand(random, fmt, n, k)
    g = plain(random, m, n, out_dtype)
    dot = jlb.fp4_dot if fmt.element.packed else jlb.fp8_dot

    def call(v: jax.Array, bias: jax.Array) -> jax.Array:
        return dot(v, w, bias=bias, act=None, preferred_element_type=out_dtype, implementation=implementation)

    _, pull = jax.vjp(call, jnp.asarray(x), jnp.zeros((n,), jnp.float32))
    dx, dbias = pull(jnp.asarray(g))
    rounds = implementation == "native" and _ffi.Tier.AMX in _ffi.available_tiers()
    check(dx, reference.dot_transposed(g, w), x_dtype, bf16_operand=rounds)
    sums = g.astype(np.float64)
    total = reference.Product(sums.sum(axis=0), np.abs(sums).sum(axis=0), m)
    check(dbias, total, "float32")


@EXAMPLES
@given(fmt=st.one_of(fp8_formats, fp4_formats), m=small, n=lengths, k=lengths, seed=seeds, where=st.integers(0, 2**16))
def test_nan_goes_where_it_belongs(
    implementation: str, fmt: Format, m: int, n: int, k: int, seed: int, where: int
) -> None:
    """A NaN scale reaches the outputs of its rows and no other; a NaN activation its row and no other."""
    random = np.random.default_rng(seed)
    x, w = plain(random, m, k, "float32"), operand(random, fmt, n, k)
    scale = np.array(w.scale)
    scale.reshape(-1)[where % scale.size] = 255 if scale.dtype == np.uint8 else np.nan
    poisoned = dataclasses.replace(w, scale=jnp.asarray(scale))
    x[where % m, where % k] = np.nan
    dot = jlb.fp4_dot if fmt.element.packed else jlb.fp8_dot
    out = dot(jnp.asarray(x), poisoned, act=None, implementation=implementation)
    product = reference.dot(x, poisoned)
    assert np.isnan(product.value).any()
    check(out, product, "float32")


@pytest.mark.parametrize("fmt", [jlb.FP8_1X128, jlb.MXFP8, jlb.MXFP4, jlb.NVFP4], ids=repr)
@pytest.mark.parametrize("tier", _ffi.available_tiers(), ids=lambda tier: tier.name.lower())
def test_scratch_holds_nothing_over(tier: _ffi.Tier, fmt: Format) -> None:
    """After a product full of NaN, edges of partial tiles still read zeros, not what its scratch memory held."""
    random = np.random.default_rng(0)
    dot = jlb.fp4_dot if fmt.element.packed else jlb.fp8_dot
    w = operand(random, fmt, 256, 1024)
    scale = np.full(w.scale.shape, 255 if fmt.scale.name == "e8m0" else np.nan, w.scale.dtype)
    poison = dataclasses.replace(w, scale=jnp.asarray(scale))
    with _ffi.force_tier(tier):
        for m, k in ((1, 30), (3, 33), (1, 129), (3, 130), (5, 130), (1, 200), (17, 200), (65, 31)):
            x, w = plain(random, m, k, "float32"), operand(random, fmt, 40, k)
            for rows in (1, 4, 64):
                nan = jnp.full((rows, 1024), jnp.nan)
                jax.block_until_ready(dot(nan, poison, act=None, implementation="native"))
            out = dot(jnp.asarray(x), w, act=None, implementation="native")
            check(out, reference.dot(x, w), "float32")
