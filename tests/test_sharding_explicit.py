"""Explicit meshes: quantize on shards, products of quantized operands, and vmap over a sharded axis."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlowbit as jlb
from jaxlowbit.testing import reference, tolerance

from .autodiff import layers

IMPLEMENTATIONS = ("xla", "native", None)
both_ways = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def mesh() -> Any:
    return jax.make_mesh((2, 4), ("b", "a"), axis_types=(AxisType.Explicit,) * 2)


def on(m: Any, tree: Any, spec: Any) -> Any:
    specs = jax.tree.map(lambda _: spec, tree) if isinstance(spec, P) else spec
    return jax.tree.map(lambda a, p: jax.device_put(a, NamedSharding(m, p)), tree, specs)


def spec_of(x: Any) -> Any:
    return jax.typeof(x).sharding.spec


def same(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# name: (format, shape, spec of x, spec of the scale, keywords)
QUANTIZED: dict[str, tuple[jlb.Format, tuple[int, ...], Any, Any, dict[str, Any]]] = {
    "rows": (jlb.FP8_1X128, (8, 256), P("b", None), P("b", None), {}),
    "rows and K": (jlb.MXFP4, (8, 256), P("b", "a"), P("b", "a"), {}),
    "row blocks": (jlb.FP8_128X128, (256, 256), P("b", None), P("b", None), {}),
    "batch": (jlb.NVFP4, (2, 4, 64), P("b", None, None), P("b", None, None), {}),
    "one row": (jlb.MXFP8, (128,), P("a"), P("a"), {}),
    "static": (jlb.FP8_TENSOR, (8, 64), P("a", "b"), P(None, None), {"scale": 0.5}),
    "static global": (jlb.NVFP4, (8, 64), P("a", "b"), P("a", "b"), {"global_scale": jnp.float32(0.25)}),
}


@both_ways
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantize_on_shards(name: str, implementation: Any) -> None:
    fmt, shape, spec, scale_spec, kwargs = QUANTIZED[name]
    kwargs = {**kwargs, "implementation": implementation}
    x = layers.activations(shape)
    want, fake = jlb.quantize(x, fmt, **kwargs), jlb.fake_quantize(x, fmt, **kwargs)
    m = mesh()
    with jax.set_mesh(m):
        placed = on(m, x, spec)
        for transform in (jax.jit, lambda f: f):
            q = transform(lambda x: jlb.quantize(x, fmt, **kwargs))(placed)
            assert spec_of(q.data) == spec
            assert spec_of(q.scale) == scale_spec
            same(q, want)
        y, pullback = jax.vjp(lambda x: jlb.fake_quantize(x, fmt, **kwargs), placed)
        (dx,) = pullback(placed)
    assert spec_of(y) == spec_of(dx) == spec
    same((y, dx), (fake, x))


@both_ways
@pytest.mark.parametrize("spec", [P("b", None, None), P("b", "a", None)], ids=str)
def test_stochastic_rounding_on_shards(spec: Any, implementation: Any) -> None:
    shape = (2, 4, 64) if spec[1] else (4, 2, 64)
    x, key = layers.activations(shape), jax.random.key(3, impl="threefry2x32")
    kwargs = {"rounding": "stochastic", "key": key, "offset": 2**32 - 100, "implementation": implementation}
    m = mesh()
    with jax.set_mesh(m):
        q = jlb.quantize(on(m, x, spec), jlb.MXFP8, **kwargs)
    same(q, jlb.quantize(x, jlb.MXFP8, **kwargs))


REFUSED: dict[str, tuple[jlb.Format, Any, dict[str, Any], str]] = {
    "per tensor": (jlb.FP8_TENSOR, P("a", None), {}, "static scale"),
    "per row, K sharded": (jlb.FP8_CHANNEL, P(None, "a"), {}, "finer blocks"),
    "row blocks cut": (jlb.FP8_128X128, P("a", None), {}, "whole 128"),
    "K blocks cut": (jlb.FP8_1X128, P(None, "a"), {}, "whole 128"),
    "two levels": (jlb.NVFP4, P("a", None), {}, "Pass global_scale"),
    "NaN marks of static scales": (jlb.MXFP4.with_block(1, None), P(None, "a"), {"scale": jnp.uint8(127)}, "finer"),
    "stochastic columns": (
        jlb.MXFP8, P(None, "a"), {"rounding": "stochastic", "key": jax.random.key(0)}, "first dimension",
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_layouts_that_quantize_refuses(reason: str) -> None:
    fmt, spec, kwargs, fix = REFUSED[reason]
    m = mesh()
    with jax.set_mesh(m), pytest.raises(ValueError, match=fix):
        jlb.quantize(on(m, layers.activations((256, 256)), spec), fmt, **kwargs)


# ---- products of quantized operands

M, N, K = 8, 256, 512
SCALED = {"M+N": (P("b", None), P("a", None)), "K": (P(None, "a"), P(None, "a")), "M+K": (P("b", "a"), P(None, "a"))}


@both_ways
@pytest.mark.parametrize("layout", SCALED)
def test_scaled_dot_on_shards(layout: str, implementation: Any) -> None:
    left, right = SCALED[layout]
    lhs = jlb.quantize(layers.activations((M, 1, K)), jlb.MXFP4)
    rhs = jlb.quantize(layers.activations((N, K), seed=2), jlb.MXFP8)
    bias, g = layers.activations((N,), seed=3), layers.activations((M, 1, N), seed=4)
    m, out = mesh(), P(left[0], None, right[0])
    with jax.set_mesh(m):
        args = on(m, lhs, P(left[0], None, left[1])), on(m, rhs, right), on(m, bias, P(right[0]))

        def f(bias: Any) -> Any:
            return jlb.scaled_dot(
                args[0], args[1], bias=bias, preferred_element_type="float32", implementation=implementation
            )

        y, pullback = jax.vjp(f, args[2])
        (dbias,) = pullback(on(m, g, out))
    assert spec_of(y) == out
    assert spec_of(dbias) == P(right[0])
    want = reference.dot(lhs, rhs, bias)
    tolerance.check(y, want.value, tolerance.dot_bound(want, np.float32))
    np.testing.assert_allclose(dbias, np.asarray(g).sum((0, 1)), rtol=1e-5, atol=1e-5)


def test_scaled_dot_with_one_scale_and_one_row() -> None:
    lhs, rhs = (jlb.quantize(layers.activations((n, K)), jlb.FP8_TENSOR) for n in (M, N))
    row = jlb.quantize(layers.activations((K,)), jlb.MXFP8)
    m = mesh()
    with jax.set_mesh(m):
        one = P(None, None)
        specs = [jlb.ScaledArray(p, one, format=jlb.FP8_TENSOR) for p in (P("b", None), P("a", None))]
        y = jlb.scaled_dot(on(m, lhs, specs[0]), on(m, rhs, specs[1]))
        z = jlb.scaled_dot(on(m, row, P("a")), on(m, jlb.quantize(layers.activations((N, K)), jlb.MXFP8), P(None, "a")))
    assert spec_of(y) == P("b", "a")
    for got, want in (
        (y, reference.dot(lhs, rhs)),
        (z, reference.dot(row, jlb.quantize(layers.activations((N, K)), jlb.MXFP8))),
    ):
        tolerance.check(got, want.value.reshape(got.shape), tolerance.dot_bound(want, jnp.bfloat16).reshape(got.shape))


SCALED_REFUSED = {
    "K of one side": (jlb.MXFP8, P(None, "a"), P(None, None), "reshard on lhs or rhs"),
    "N and M on one axis": (jlb.MXFP8, P("a", None), P("a", None), r"reshard\(rhs"),
    "lhs blocks cut": (jlb.FP8_128X128.with_block(8, 128), P("b", None), P(None, None), "lhs.*M shards of whole 8"),
}


@pytest.mark.parametrize("reason", SCALED_REFUSED)
def test_layouts_that_scaled_dot_refuses(reason: str) -> None:
    fmt, left, right, fix = SCALED_REFUSED[reason]
    lhs, rhs = jlb.quantize(layers.activations((M, K)), fmt), jlb.quantize(layers.activations((N, K)), jlb.MXFP8)
    m = mesh()
    with jax.set_mesh(m):
        scale = left if lhs.scale.shape[0] > 1 else P(None, None)
        placed = on(m, lhs, jlb.ScaledArray(left, scale, format=fmt)), on(m, rhs, right)
        with pytest.raises(ValueError, match=fix):
            jlb.scaled_dot(*placed)


# ---- vmap over an explicitly sharded axis


@both_ways
@pytest.mark.parametrize("act", [None, "dynamic"])
@pytest.mark.parametrize("many", [False, True], ids=["one weight", "a weight each"])
def test_vmap_keeps_the_sharding_of_the_mapped_axis(many: bool, act: Any, implementation: Any) -> None:
    x, g = layers.activations((4, 2, 128)), layers.activations((4, 2, 64), seed=2)
    fmt = jlb.FP8_1X128
    q = jlb.quantize(layers.activations((4, 64, 128) if many else (64, 128), seed=3), fmt)
    bias = layers.activations((64,), seed=4)

    def run(x: Any, q: Any, bias: Any, g: Any) -> Any:
        def f(x: Any, q: Any, bias: Any) -> Any:
            return layers.call(x, q, bias=bias, act=act, implementation=implementation)

        y, pullback = jax.vjp(lambda x, bias: jax.vmap(f, (0, 0 if many else None, None))(x, q, bias), x, bias)
        return y, *pullback(g)

    want = run(x, q, bias, g)
    m = mesh()
    with jax.set_mesh(m):
        args = on(m, x, P("b", None, None)), on(m, q, P("b" if many else None)), bias, on(m, g, P("b", None, None))
        for got in (run(*args), jax.jit(run)(*args)):
            assert spec_of(got[0]) == spec_of(got[1]) == P("b", None, None)
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@both_ways
def test_vmap_of_sharded_rows_and_of_quantize(implementation: Any) -> None:
    """The mapped axis over one mesh axis and the rows, or another mapped axis, over the other."""
    x, q = layers.activations((2, 4, 128)), jlb.quantize(layers.activations((64, 128)), jlb.FP8_1X128)

    def dot(x: Any) -> Any:
        return layers.call(x, q, implementation=implementation)

    def codes(x: Any) -> Any:
        return jlb.quantize(x, jlb.MXFP8, implementation=implementation).data

    m = mesh()
    with jax.set_mesh(m):
        placed = on(m, x, P("b", "a", None))
        for f in (dot, codes):
            for mapped in (jax.vmap(f), jax.vmap(jax.vmap(f)), jax.vmap(jax.vmap(f), 1, 1)):
                got = mapped(placed)
                assert spec_of(got) == P("b", "a", None)
                np.testing.assert_allclose(
                    np.asarray(got).astype(np.float32), np.asarray(f(x)).astype(np.float32), rtol=1e-5, atol=1e-5
                )
