"""The public dots: values against float64, gradients against the gradient of the dequantized layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxlowbit as jlb
from jaxlowbit.testing import reference, tolerance

from . import layers

IMPLEMENTATIONS = ("xla", "native")
N, K = 136, 192


def plain_bound(x: Any, q: jlb.ScaledArray, bias: Any, out_dtype: Any) -> tuple[Any, Any]:
    product = reference.dot(x, q, bias)
    return product.value, tolerance.dot_bound(product, out_dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", layers.FORMATS)
def test_weight_only_against_float64(name: str, dtype: Any, implementation: str) -> None:
    q = layers.weight(layers.FORMATS[name], N, K)
    x, bias = layers.activations((3, 2, K), dtype), layers.activations((N,), dtype, seed=2)
    y = layers.call(x, q, bias=bias, act=None, implementation=implementation)
    assert y.dtype == dtype
    assert y.shape == (3, 2, N)
    value, bound = plain_bound(x, q, bias, dtype)
    tolerance.check(y, value, bound)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("spelling", layers.FP8_SPELLINGS)
def test_every_scale_spelling(spelling: str, implementation: str) -> None:
    fmt, spell = layers.FP8_SPELLINGS[spelling]
    q = layers.weight(fmt, N, K)
    explicit = fmt.block if spelling in ("1x128", "mxfp8", "48x32") else None
    x = layers.activations((5, K))
    y = jlb.fp8_dot(x, q.data, spell(q.scale), block_shape=explicit, act=None, implementation=implementation)
    np.testing.assert_array_equal(y, jlb.fp8_dot(x, q, act=None, implementation=implementation))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["tensor", "channel", "128x128", "mxfp8", "mxfp4"])
def test_dynamic_equals_quantize_then_scaled_dot(name: str, implementation: str) -> None:
    q = layers.weight(layers.FORMATS[name], N, K)
    x = layers.activations((7, K), jnp.bfloat16)
    y = layers.call(x, q, act="dynamic", preferred_element_type=jnp.float32, implementation=implementation)
    act = {"tensor": jlb.FP8_CHANNEL, "channel": jlb.FP8_CHANNEL, "128x128": jlb.FP8_1X128}.get(name, jlb.MXFP8)
    xq = jlb.quantize(x, act)
    z = jlb.scaled_dot(xq, q, preferred_element_type=jnp.float32, implementation=implementation)
    np.testing.assert_array_equal(y, z)
    product = reference.dot(xq, q)
    tolerance.check(y, product.value, tolerance.dot_bound(product, jnp.float32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "act",
    [
        jlb.FP8_1X128,
        jlb.FP8_TENSOR,
        jlb.MXFP8,
        jlb.MXFP4,
        jlb.NVFP4,
        jlb.Act(jlb.FP8_1X128, scale_rounding="pow2"),
        jlb.Act(jlb.FP8_CHANNEL, amax_ub=0.5),
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", ["128x128", "nvfp4", "mxfp4"])
def test_named_activation_formats(name: str, act: Any, implementation: str) -> None:
    q = layers.weight(layers.FORMATS[name], 40, K)
    x = layers.activations((6, K))
    y = layers.call(x, q, act=act, implementation=implementation)
    named = act if isinstance(act, jlb.Act) else jlb.Act(act)
    xq = jlb.quantize(x, named.format, scale_rounding=named.scale_rounding, amax_ub=named.amax_ub)
    product = reference.dot(xq, q)
    tolerance.check(y, product.value, tolerance.dot_bound(product, jnp.float32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_static_activation_scale_saturates(implementation: str) -> None:
    q = layers.weight(jlb.FP8_TENSOR, 24, 32)
    x = layers.activations((4, 32)).at[0, 0].set(1e6)
    scale = jnp.float32(1 / 64)
    y = jlb.fp8_dot(x, q, act_scale=scale, implementation=implementation)
    xq = jlb.quantize(x, jlb.FP8_TENSOR, scale=scale.reshape(1, 1))
    assert float(jlb.dequantize(xq)[0, 0]) == 448 / 64
    product = reference.dot(xq, q)
    tolerance.check(y, product.value, tolerance.dot_bound(product, jnp.float32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_static_nvfp4_global_scale(implementation: str) -> None:
    q = layers.weight(jlb.NVFP4, 24, 32)
    x = layers.activations((4, 32))
    y = jlb.fp4_dot(x, q, act=jlb.NVFP4, act_scale=jnp.float32(0.01), implementation=implementation)
    xq = jlb.quantize(x, jlb.NVFP4, global_scale=jnp.float32(0.01))
    product = reference.dot(xq, q)
    tolerance.check(y, product.value, tolerance.dot_bound(product, jnp.float32))


def test_output_dtype() -> None:
    q = layers.weight(jlb.FP8_128X128, 16, 32)
    x = layers.activations((2, 32), jnp.bfloat16)
    assert jlb.fp8_dot(x, q).dtype == jnp.bfloat16
    assert jlb.fp8_dot(x, q, preferred_element_type=jnp.float32).dtype == jnp.float32
    assert jlb.scaled_dot(jlb.quantize(x, jlb.FP8_1X128), q).dtype == jnp.bfloat16


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("act", [None, "dynamic"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", layers.FORMATS)
def test_gradient_is_that_of_the_dequantized_layer(name: str, dtype: Any, act: Any, implementation: str) -> None:
    q = layers.weight(layers.FORMATS[name], N, K)
    if act == "dynamic" and q.format is jlb.NVFP4:
        act = jlb.FP8_1X128
    x, bias = layers.activations((2, 3, K), dtype), layers.activations((N,), jnp.float32, seed=3)
    g = layers.activations((2, 3, N), dtype, seed=4)

    def loss(x: Any, bias: Any) -> Any:
        y = layers.call(x, q, bias=bias, act=act, implementation=implementation)
        return jnp.sum((y * g).astype(jnp.float32))

    dx, dbias = jax.jit(jax.grad(loss, (0, 1)))(x, bias)
    assert dx.dtype == dtype
    assert dbias.dtype == jnp.float32
    product = reference.dot_transposed(g, q)
    tolerance.check(
        dx,
        product.value,
        tolerance.dot_bound(product, dtype, bf16_operand=layers.rounds(implementation)),
        what="dx",
    )
    want = np.asarray(g, np.float64).sum((0, 1))
    tolerance.check(dbias, want, 1e-6 * np.abs(np.asarray(g, np.float64)).sum((0, 1)), what="dbias")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bias_gradient_dtype(implementation: str) -> None:
    q = layers.weight(jlb.FP8_CHANNEL, 16, 32)
    x, bias = layers.activations((2, 32)), layers.activations((16,), jnp.bfloat16)
    d = jax.grad(lambda b: jlb.fp8_dot(x, q, bias=b, implementation=implementation).sum())(bias)
    assert d.dtype == jnp.bfloat16
    np.testing.assert_array_equal(d, np.full(16, 2, ml_dtypes.bfloat16))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("out", [jnp.float32, jnp.float16])
def test_cotangents_have_the_primals_dtype(out: Any, implementation: str) -> None:
    """x, bias and output of three dtypes: none may take another's."""
    q = layers.weight(jlb.FP8_128X128, 16, 32)
    x, bias = layers.activations((2, 32), jnp.bfloat16), layers.activations((16,), jnp.float16)
    f = lambda x, b: jlb.fp8_dot(x, q, bias=b, preferred_element_type=out, implementation=implementation)  # noqa: E731
    y, pullback = jax.vjp(f, x, bias)
    g = layers.activations((2, 16), out, seed=3)
    dx, dbias = pullback(g)
    assert (y.dtype, dx.dtype, dbias.dtype) == (out, jnp.bfloat16, jnp.float16)
    product = reference.dot_transposed(g, q)
    tolerance.check(
        dx,
        product.value,
        tolerance.dot_bound(product, jnp.bfloat16, bf16_operand=layers.rounds(implementation)),
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["128x128", "mxfp8", "mxfp4", "nvfp4"])
def test_residuals_are_the_packed_weight(name: str, implementation: str) -> None:
    q = layers.weight(layers.FORMATS[name], 256, 512)
    x = layers.activations((64, 512))
    _, pullback = jax.vjp(lambda x: layers.call(x, q, act=None, implementation=implementation), x)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(pullback))
    assert 0 < held <= q.nbytes, f"{held} bytes held, the packed weight has {q.nbytes}"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["128x128", "mxfp8", "mxfp4", "nvfp4"])
def test_frozen_leaves(name: str, implementation: str) -> None:
    q = layers.weight(layers.FORMATS[name], 32, 64)
    x = layers.activations((4, 64))
    loss = lambda x, q: layers.call(x, q, act=None, implementation=implementation).sum()  # noqa: E731
    dx, dq = jax.grad(loss, (0, 1), allow_int=True)(x, q)
    assert np.all(np.isfinite(dx))
    assert np.any(np.asarray(dx) != 0)
    for leaf, primal in zip(jax.tree.leaves(dq), jax.tree.leaves(q), strict=True):
        if jnp.issubdtype(primal.dtype, jnp.integer):
            assert leaf.dtype == jax.dtypes.float0
        else:
            assert leaf.dtype == primal.dtype
            np.testing.assert_array_equal(np.asarray(leaf).astype(np.float32), 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_e8m0_scales_get_byte_zero_not_nan(implementation: str) -> None:
    q = layers.with_scale_dtype(layers.weight(jlb.MXFP8, 32, 64), ml_dtypes.float8_e8m0fnu)
    x = layers.activations((4, 64))
    d = jax.grad(
        lambda s: jlb.fp8_dot(x, q.data, s, block_shape=(1, 32), act=None, implementation=implementation).sum()
    )(q.scale)
    assert d.dtype == q.scale.dtype
    np.testing.assert_array_equal(np.asarray(d).view(np.uint8), 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_second_order(implementation: str) -> None:
    q = layers.weight(jlb.FP8_128X128, 6, 8)
    w = np.asarray(jlb.dequantize(q), np.float64)
    x = layers.activations((8,))
    f = lambda x: 0.5 * jnp.sum(jlb.fp8_dot(x, q, act=None, implementation=implementation) ** 2)  # noqa: E731
    hessian = jax.jacrev(jax.jacrev(f))(x)
    np.testing.assert_allclose(hessian, w.T @ w, rtol=2**-7, atol=2**-7 * np.abs(w).max() ** 2)
    v = layers.activations((8,), seed=9)
    hvp = jax.grad(lambda x: jnp.vdot(jax.grad(f)(x), v))(x)
    np.testing.assert_allclose(hvp, w.T @ w @ np.asarray(v), rtol=2**-6, atol=2**-6 * np.abs(w).max() ** 2)


def test_forward_mode_is_refused_under_jit() -> None:
    """There JAX raises outside the call, in its own words."""
    q = layers.weight(jlb.FP8_128X128, 16, 32)
    x = layers.activations((2, 32))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(jax.jit(lambda x: jlb.fp8_dot(x, q, act=None)), (x,), (x,))


def test_forward_mode_names_the_op_eagerly() -> None:
    q = layers.weight(jlb.MXFP4, 16, 32)
    x = layers.activations((2, 32))
    with pytest.raises(TypeError, match=r"jaxlowbit\.fp4_dot: forward-mode .*jacrev"):
        jax.jvp(lambda x: jlb.fp4_dot(x, q), (x,), (x,))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["tensor", "channel", "128x128", "nvfp4"])
def test_fused_rows(name: str, implementation: str) -> None:
    """Gate and up fused by row_splits: each segment keeps its own scale grid and outer scale."""
    fmt = layers.FORMATS[name]
    gate, up = layers.weight(fmt, 72, 64, seed=5), layers.weight(fmt, 200, 64, seed=6)
    outer = None if gate.global_scale is None else jnp.stack([gate.global_scale, up.global_scale * 3])
    fused = jlb.ScaledArray(
        jnp.concatenate([gate.data, up.data]),
        jnp.concatenate([gate.scale, up.scale]),
        outer,
        format=fmt,
        row_splits=(72,),
    ).validate()
    if outer is not None:
        up = dataclasses.replace(up, global_scale=outer[1])
    x, bias = layers.activations((5, 64)), layers.activations((272,), seed=7)
    f = lambda x: layers.call(x, fused, bias=bias, act=None, implementation=implementation)  # noqa: E731
    want = [layers.call(x, q, act=None, implementation=implementation) for q in (gate, up)]
    np.testing.assert_allclose(f(x), np.concatenate(want, 1) + np.asarray(bias), rtol=1e-5, atol=1e-4)
    g = layers.activations((5, 272), seed=8)
    (dx,) = jax.vjp(f, x)[1](g)
    product = reference.dot_transposed(g, fused)
    tolerance.check(
        dx,
        product.value,
        tolerance.dot_bound(product, jnp.float32, bf16_operand=layers.rounds(implementation)),
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_partial_gradients_are_added_in_float32(implementation: str) -> None:
    """The segments of a fused weight contribute 257 and -256, of which bfloat16 holds the second alone."""
    codes = jnp.repeat(jnp.array([[256.0], [1.0], [-256.0]]), 32, axis=1).astype(jnp.float8_e4m3fn)
    fused = jlb.ScaledArray(codes, jnp.ones((2, 1)), format=jlb.FP8_TENSOR, row_splits=(2,)).validate()
    x = layers.activations((4, 32), jnp.bfloat16)
    y, pullback = jax.vjp(lambda x: jlb.fp8_dot(x, fused, act=None, implementation=implementation), x)
    (dx,) = pullback(jnp.ones_like(y))
    assert dx.dtype == jnp.bfloat16
    np.testing.assert_array_equal(dx, np.ones((4, 32), ml_dtypes.bfloat16))
