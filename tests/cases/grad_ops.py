"""Cases of gradients and transformations: straight-through, frozen leaves, second order, vmap, remat,
scan."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowbit as jlb
from jaxlowbit.testing import tolerance
from tests.cases.dot_ops import F32, unscaled
from tests.cases.shim import (
    CASES,
    IMPLEMENTATIONS,
    array,
    check_close,
    check_equal,
    check_result,
    e4m3,
    runs,
    weight,
)


@runs("B60a", "B61a", ways=IMPLEMENTATIONS)
def grad_x(case: dict[str, Any], way: str) -> None:
    inputs = case["inputs"]
    factor = {"sum": 1.0, "1e-6*sum": 1e-6}[inputs["loss"]]
    x, w = jnp.asarray(array(inputs["x"])), e4m3(weight(inputs["w"]))

    def through_dot(v: jax.Array) -> jax.Array:
        return (factor * jlb.fp8_dot(v, w, jnp.ones(()), implementation=way)).sum()

    def through_quantize(v: jax.Array) -> jax.Array:
        return (factor * jlb.fake_quantize(v, jlb.FP8_1X128, implementation=way)).sum()

    dx = np.asarray(jax.grad(through_dot)(x))
    # Where the products cancel, what is left of their float32 roundings: a relative tolerance of 0 asks for too much.
    left = tolerance.gamma(w.shape[0] + 1) * factor * np.abs(np.asarray(w).astype(np.float64)).sum(axis=0).max()
    for row in dx:
        if "tol" in case:
            check_close(row, case["expected"]["dx_row"], {**case["tol"], "abs": left})
        else:
            check_equal(row, case["expected"]["dx_row"])
    # Straight through the quantizer: a cotangent in E4M3 would have flushed 1e-6 to 0.
    np.testing.assert_array_equal(np.asarray(jax.grad(through_quantize)(x)), np.full(x.shape, np.float32(factor)))
    with pytest.raises(TypeError, match="fake_quantize"):
        jax.grad(lambda v: jlb.dequantize(jlb.quantize(v, jlb.FP8_1X128, implementation=way)).sum())(x)


@runs("B62a", ways=IMPLEMENTATIONS)
def frozen_leaves(case: dict[str, Any], way: str) -> None:
    like = CASES["B60a"]
    x, w = jnp.asarray(array(like["inputs"]["x"])), weight(like["inputs"]["w"])
    for fmt in (jlb.FP8_128X128, jlb.MXFP8, jlb.MXFP4):
        q = unscaled(w, fmt)

        def loss(tree: dict[str, Any]) -> jax.Array:
            return _layer(tree, way).sum()

        grads = jax.grad(loss, allow_int=True)({"x": x, "w": q})
        for row in np.asarray(grads["x"]):
            check_equal(row, like["expected"]["dx_row"])
        for leaf in jax.tree.leaves(grads["w"]):
            assert leaf.dtype == jax.dtypes.float0 or (np.asarray(leaf).astype(np.float32) == 0).all()
        value, closed = jax.value_and_grad(lambda v, q=q: _layer({"x": v, "w": q}, way).sum())(x)
        assert np.isfinite(value)
        np.testing.assert_array_equal(np.asarray(closed), np.asarray(grads["x"]))
        assert jax.tree.map(lambda leaf: leaf, q).format is fmt  # an optimizer's tree map passes over it


def _layer(tree: dict[str, Any], way: str) -> jax.Array:
    dot = jlb.fp4_dot if tree["w"].format.element.packed else jlb.fp8_dot
    return dot(tree["x"], tree["w"], act=None, implementation=way)


@runs("B62b", ways=("jax",))
def grad_scale(case: dict[str, Any], way: str) -> None:
    inputs, want = case["inputs"], case["expected"]
    codes = jnp.asarray(array(inputs["q"])).view(jnp.float8_e4m3fn)

    def total(scale: jax.Array) -> jax.Array:
        return jlb.dequantize(jlb.ScaledArray(codes, scale, format=jlb.FP8_TENSOR)).sum()

    grad = jax.grad(total)(jnp.full((1,), inputs["scale"], F32))
    assert float(grad[0]) in want["accept_values"]


@runs("B64a", ways=IMPLEMENTATIONS)
def second_order(case: dict[str, Any], way: str) -> None:
    inputs = case["inputs"]
    x, w = jnp.asarray(array(inputs["x"])), e4m3(weight(inputs["w"]))

    def f(v: jax.Array) -> jax.Array:
        return (jlb.fp8_dot(v, w, jnp.ones(()), implementation=way) ** 2).sum() / 2

    hessian = jax.jacrev(jax.jacrev(f))(x)
    check_close(hessian, case["expected"], case["tol"])
    with pytest.raises(TypeError, match=re.compile("fp8_dot.*jacrev", re.DOTALL)):
        jax.jvp(f, (x,), (jnp.ones_like(x),))


@runs("B65a", ways=IMPLEMENTATIONS)
def transformations(case: dict[str, Any], way: str) -> None:
    inputs = case["inputs"]
    x, w = jnp.asarray(array(inputs["x"])), e4m3(weight(inputs["w"]))
    s = jnp.ones((1, 1))

    def dot(v: jax.Array, codes: jax.Array) -> jax.Array:
        return jlb.fp8_dot(v, codes, s, act=None, implementation=way)

    loop = np.stack([np.asarray(dot(v, w)) for v in x])
    check_result(loop, case["expected"])
    check_result(jax.vmap(dot, (0, None))(x, w), case["expected"])
    both = jax.vmap(dot)(x, jnp.stack([w, w[::-1]]))
    np.testing.assert_array_equal(np.asarray(both[0]), loop[0])
    np.testing.assert_array_equal(np.asarray(both[1]), loop[1][:, ::-1])
    only_w = jax.vmap(dot, (None, 0))(x[0], jnp.stack([w, w[::-1]]))
    np.testing.assert_array_equal(np.asarray(only_w[1]), loop[0][:, ::-1])

    # Two square layers, one scan step each: unrolled, scanned and rematerialized agree.
    layers = jnp.stack([e4m3(weight({**inputs["w"], "shape": [64, 64], "b": b})) for b in (1, 4)])

    def scanned(v: jax.Array, wrap: Any) -> jax.Array:
        body = wrap(lambda carry, codes: (dot(carry, codes) / 64, None))
        return jax.lax.scan(body, v, layers)[0].sum()

    def unrolled(v: jax.Array) -> jax.Array:
        for codes in layers:
            v = dot(v, codes) / 64
        return v.sum()

    value, grad = jax.value_and_grad(unrolled)(x[0])
    for wrap in (lambda body: body, jax.checkpoint):
        other_value, other_grad = jax.jit(jax.value_and_grad(lambda v, wrap=wrap: scanned(v, wrap)))(x[0])
        np.testing.assert_array_equal(np.asarray(other_value), np.asarray(value))
        np.testing.assert_array_equal(np.asarray(other_grad), np.asarray(grad))


@runs("B76a", ways=("native",))
def lowered(case: dict[str, Any], way: str) -> None:
    """The forward pass and its dx are our kernels, and nothing is computed for a weight gradient nobody asked
    for."""
    inputs = CASES["B60a"]["inputs"]
    x, w = jnp.asarray(array(inputs["x"])), e4m3(weight(inputs["w"]))
    s = jnp.ones(())

    def calls(fn: Any) -> list[str]:
        text = jax.jit(fn).trace(x).lower(lowering_platforms=("cpu",)).as_text()
        return re.findall(r"custom_call @(jaxlowbit_\w+)", text)

    forward = calls(lambda v: jlb.fp8_dot(v, w, s, act=None, implementation=way))
    assert forward == ["jaxlowbit_dot_v1"]
    only_dx = calls(jax.grad(lambda v: jlb.fp8_dot(v, w, s, act=None, implementation=way).sum()))
    # Straight-through and frozen weights: the forward value is dead, one transposed product is left.
    assert set(only_dx) == {"jaxlowbit_dot_v1"}
    assert case["expected"]["no_wgrad_call"]
    assert not [name for name in only_dx if "quantize" in name or "wgrad" in name]
