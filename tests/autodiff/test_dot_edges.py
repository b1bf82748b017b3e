"""The public dots at their edges: empty and odd extents, blocks past the matrix, special values, spellings."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowbit as jlb
from jaxlowbit.testing import reference, tolerance

from . import layers

IMPLEMENTATIONS = ("xla", "native")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("op", ["fp8_dot", "fp4_dot", "scaled_dot"])
@pytest.mark.parametrize(("m", "n", "k"), [(0, 16, 32), (3, 16, 0), (0, 3, 0), (1, 1, 32), (2, 0, 32)])
def test_empty_and_tiny(m: int, n: int, k: int, op: str, implementation: str) -> None:
    fmt = jlb.MXFP4 if op == "fp4_dot" else jlb.FP8_128X128
    q = jlb.quantize(jnp.ones((n, k)), fmt)
    x, bias = jnp.ones((m, k)), jnp.full((n,), 0.5)

    def f(x: Any) -> Any:
        if op == "scaled_dot":
            xq = jlb.quantize(x, jlb.FP8_1X128)
            return jlb.scaled_dot(xq, q, bias=bias, preferred_element_type=jnp.float32, implementation=implementation)
        return getattr(jlb, op)(x, q, bias=bias, implementation=implementation)

    np.testing.assert_array_equal(f(x), np.full((m, n), k + 0.5, np.float32))
    if op != "scaled_dot":
        dx = jax.grad(lambda x: f(x).sum())(x)
        np.testing.assert_array_equal(dx, np.full((m, k), n, np.float32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_odd_k_fp4(implementation: str) -> None:
    w = np.random.default_rng(0).normal(size=(20, 33)).astype(np.float32)
    q = jlb.quantize(jnp.asarray(w), jlb.MXFP4, pad=True)
    assert q.shape == (20, 33)
    x = layers.activations((3, 33))
    y, pullback = jax.vjp(lambda x: jlb.fp4_dot(x, q, implementation=implementation), x)
    product = reference.dot(x, q)
    tolerance.check(y, product.value, tolerance.dot_bound(product, jnp.float32))
    g = layers.activations((3, 20), seed=5)
    back = reference.dot_transposed(g, q)
    tolerance.check(
        pullback(g)[0],
        back.value,
        tolerance.dot_bound(back, jnp.float32, bf16_operand=layers.rounds(implementation)),
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_rows_stay_apart(implementation: str) -> None:
    q = layers.weight(jlb.FP8_128X128, 24, 160)
    x = layers.activations((4, 160)).at[1, 3].set(jnp.nan).at[2, 5].set(jnp.inf)
    for act in (None, "dynamic"):
        y = np.asarray(jlb.fp8_dot(x, q, act=act, implementation=implementation))
        assert np.isnan(y[1]).all()
        assert not np.isfinite(y[2]).any()
        clean = jlb.fp8_dot(x[jnp.array([0, 3])], q, act=act, implementation=implementation)
        np.testing.assert_allclose(y[[0, 3]], clean, rtol=1e-5, atol=1e-4)


def test_float4_and_float8_weights_as_they_come() -> None:
    q = layers.weight(jlb.NVFP4, 24, 32)
    f4 = jax.lax.bitcast_convert_type(q.data, jnp.float4_e2m1fn).reshape(24, 32)
    x = layers.activations((3, 32))
    want = jlb.fp4_dot(x, q)
    np.testing.assert_array_equal(jlb.fp4_dot(x, f4, q.scale, global_scale=q.global_scale), want)
    np.testing.assert_array_equal(jlb.fp4_dot(x, q.data, q.scale, global_scale=q.global_scale), want)


def test_results_do_not_depend_on_global_precision() -> None:
    q = layers.weight(jlb.FP8_128X128, 24, 64)
    x = layers.activations((3, 64))
    base = jlb.fp8_dot(x, q, implementation="xla")
    with jax.default_matmul_precision("bfloat16"):
        jax.clear_caches()
        np.testing.assert_array_equal(jlb.fp8_dot(x, q, implementation="xla"), base)


def test_signatures_have_no_kwargs_and_no_out_scale() -> None:
    for op in (jlb.fp8_dot, jlb.fp4_dot, jlb.scaled_dot):
        parameters = inspect.signature(op).parameters
        assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        assert "out_scale" not in parameters


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("act", [jlb.FP8_TENSOR, jlb.FP8_CHANNEL, jlb.FP8_1X128.with_block(1, 11)], ids=repr)
@pytest.mark.parametrize("fmt", [jlb.MXFP4, jlb.MXFP4.with_block(1, 33)], ids=repr)
def test_odd_k_with_quantized_activations(fmt: jlb.Format, act: jlb.Format, implementation: str) -> None:
    """One zero code behind an odd K may widen both scale grids."""
    w = np.random.default_rng(0).normal(size=(20, 33)).astype(np.float32)
    q = jlb.quantize(jnp.asarray(w), fmt, pad=True)
    x = layers.activations((3, 33))
    y = jlb.fp4_dot(x, q, act=act, implementation=implementation)
    product = reference.dot(jlb.quantize(x, act), q)
    tolerance.check(y, product.value, tolerance.dot_bound(product, jnp.float32))
    g = layers.activations((3, 20), seed=5)
    dx = jax.vjp(lambda x: jlb.fp4_dot(x, q, act=act, implementation=implementation), x)[1](g)[0]
    back = reference.dot_transposed(g, q)
    tolerance.check(dx, back.value, tolerance.dot_bound(back, jnp.float32, bf16_operand=layers.rounds(implementation)))


@pytest.mark.parametrize("spelling", [(), (1,), (1, 1), (16,), (16, 1)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scales_of_an_empty_k(spelling: tuple[int, ...], implementation: str) -> None:
    w = jnp.zeros((16, 0), jnp.float8_e4m3fn)
    y = jlb.fp8_dot(jnp.zeros((3, 0)), w, jnp.ones(spelling), implementation=implementation)
    np.testing.assert_array_equal(y, np.zeros((3, 16), np.float32))
    empty = jlb.fp8_dot(jnp.ones((3, 8)), jnp.zeros((0, 8), jnp.float8_e4m3fn), jnp.ones(()))
    assert empty.shape == (3, 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_amax_bound_reaches_the_global_scale(implementation: str) -> None:
    q, x = layers.weight(jlb.NVFP4, 8, 64), layers.activations((4, 64)).at[0, 0].set(1000.0)
    y = jlb.fp4_dot(x, q, act=jlb.Act(jlb.NVFP4, amax_ub=3.0), implementation=implementation)
    product = reference.dot(jlb.quantize(x, jlb.NVFP4, amax_ub=3.0), q)
    tolerance.check(y, product.value, tolerance.dot_bound(product, jnp.float32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_blocks_past_every_extent(implementation: str) -> None:
    w = layers.weight(jlb.FP8_TENSOR, 16, 32)
    x = layers.activations((3, 32))
    y = jlb.fp8_dot(x, w.data, w.scale, block_shape=(2**40, 2**31), act=None, implementation=implementation)
    np.testing.assert_array_equal(y, jlb.fp8_dot(x, w, act=None, implementation=implementation))
    wide = jlb.quantize(x, jlb.FP8_1X128.with_block(1, 2**31), implementation=implementation)
    np.testing.assert_array_equal(np.asarray(wide.scale), np.asarray(jlb.quantize(x, jlb.FP8_CHANNEL).scale))


def test_scaled_arrays_compare_by_identity() -> None:
    q = layers.weight(jlb.FP8_128X128, 16, 32)
    assert q != dataclasses.replace(q)
    assert q in [q]
