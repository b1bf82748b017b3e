"""Products whose operands are sharded: gradients under shard_map, and explicit meshes, on eight CPU devices."""

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

IMPLEMENTATIONS = ("xla", "native")
M, N, K = 16, 256, 512

# name: (x, weight codes, bias): which dimensions are sharded
LAYOUTS = {
    "M": (P("a", None), P(None, None), P(None)),
    "N": (P(None, None), P("a", None), P("a")),
    "K": (P(None, "a"), P(None, "a"), P(None)),
    "M+N": (P("a", None), P("b", None), P("b")),
    "M+K": (P("a", "b"), P(None, "b"), P(None)),
}


def mesh(axis_type: Any) -> Any:
    return jax.make_mesh((2, 4), ("b", "a"), axis_types=(axis_type,) * 2)


def specs(layout: str, q: jlb.ScaledArray) -> tuple[Any, Any, Any]:
    x, w, bias = LAYOUTS[layout]
    grid = q.scale.shape
    scale = P(w[0] if grid[0] > 1 else None, w[1] if grid[1] > 1 else None)
    outer = None if q.global_scale is None else P()
    return x, jlb.ScaledArray(w, scale, outer, format=q.format), bias


def case(name: str, layout: str) -> tuple[Any, ...]:
    n = N if "N" not in layout else 1024  # four shards of whole 128-row blocks
    q = layers.weight(layers.FORMATS[name], n, K)
    return layers.activations((M, K)), q, layers.activations((n,), seed=2), layers.activations((M, n), seed=3)


def expected(x: Any, q: jlb.ScaledArray, bias: Any, g: Any) -> tuple[Any, ...]:
    """Output, dx and dbias: the sum of the cotangents is a product with ones."""
    ones = np.ones((1, g.shape[0]))
    return reference.dot(x, q, bias), reference.dot_transposed(g, q), reference.dot_transposed(ones, g)


def close(got: Any, want: reference.Product) -> None:
    bound = tolerance.dot_bound(want, np.float32)
    tolerance.check(np.asarray(got).reshape(want.value.shape), want.value, bound)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["128x128", "channel", "nvfp4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_inside_shard_map(layout: str, name: str, implementation: str, axis_type: Any) -> None:
    x, q, bias, g = case(name, layout)
    sx, sq, sb = specs(layout, q)
    contracted = tuple(a for a in ("a", "b") if a in (sx[1] or ()))

    def f(x: Any, q: Any, bias: Any) -> Any:
        y = layers.call(x, q, act=None, implementation=implementation)
        return (jax.lax.psum(y, contracted) if contracted else y) + bias[None]

    out = P(sx[0], sb[0])
    m = mesh(axis_type)
    sharded = jax.shard_map(f, mesh=m, in_specs=(sx, sq, sb), out_specs=out)
    place = lambda t, s: jax.tree.map(lambda a, p: jax.device_put(a, NamedSharding(m, p)), t, s)  # noqa: E731
    args = (place(x, sx), place(q, sq), place(bias, sb))
    y, pullback = jax.vjp(lambda x, bias: sharded(x, args[1], bias), args[0], args[2])
    dx, dbias = pullback(place(g, out))
    wy, wdx, wdb = expected(x, q, bias, g)
    close(y, wy)
    close(dx, wdx)
    close(dbias, wdb)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_missing_psum_is_rejected(implementation: str) -> None:
    x, q, _, _ = case("128x128", "K")
    sx, sq, _ = specs("K", q)
    f = jax.shard_map(
        lambda x, q: layers.call(x, q, act=None, implementation=implementation),
        mesh=mesh(AxisType.Auto),
        in_specs=(sx, sq),
        out_specs=P(None, None),
    )
    with pytest.raises(Exception, match=r"vary|varying|replicat"):
        f(x, q)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dynamic_quantization_and_remat_inside_shard_map(implementation: str) -> None:
    x, q, _, g = case("128x128", "M")
    m = mesh(AxisType.Auto)
    body = jax.checkpoint(lambda x, q: jnp.tanh(layers.call(x, q, implementation=implementation)))
    f = jax.shard_map(
        lambda x, q, g: jax.lax.psum(jnp.sum(body(x, q) * g), "a"),
        mesh=m,
        in_specs=(P("a", None), jax.tree.map(lambda _: P(), q), P("a", None)),
        out_specs=P(),
    )
    plain = jax.grad(lambda x: jnp.sum(body(x, q) * g))(x)
    np.testing.assert_allclose(jax.grad(f)(x, q, g), plain, rtol=1e-4, atol=1e-3)


def test_vmap_inside_shard_map() -> None:
    x, q, _, _ = case("128x128", "M")
    f = jax.shard_map(
        lambda x, q: jax.vmap(lambda row: layers.call(row, q, implementation="native"))(x),
        mesh=mesh(AxisType.Auto),
        in_specs=(P("a", None), jax.tree.map(lambda _: P(), q)),
        out_specs=P("a", None),
    )
    np.testing.assert_allclose(f(x, q), layers.call(x, q, implementation="native"), rtol=1e-5, atol=1e-4)


def on(m: Any, tree: Any, spec: Any) -> Any:
    return jax.tree.map(lambda a, p: jax.device_put(a, NamedSharding(m, p)), tree, spec)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["128x128", "nvfp4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_explicit_mesh_forward_and_gradient(layout: str, name: str, implementation: str, jit: bool) -> None:
    x, q, bias, g = case(name, layout)
    sx, sq, sb = specs(layout, q)
    m = jax.make_mesh((2, 4), ("b", "a"), axis_types=(AxisType.Explicit,) * 2)
    x3 = x.reshape(M, 1, K)
    with jax.set_mesh(m):
        args = (on(m, x3, P(sx[0], None, sx[1])), on(m, q, sq), on(m, bias, sb))
        out_spec = P(sx[0], None, sb[0])

        def f(x: Any, bias: Any) -> Any:
            return layers.call(x, args[1], bias=bias, act=None, implementation=implementation)

        def both(x: Any, bias: Any, g: Any) -> Any:
            y, pullback = jax.vjp(f, x, bias)
            return y, *pullback(g)

        run = jax.jit(both) if jit else both
        y, dx, dbias = run(args[0], args[2], on(m, g.reshape(M, 1, -1), out_spec))
    assert jax.typeof(y).sharding.spec == out_spec
    wy, wdx, wdb = expected(x, q, bias, g)
    close(y, wy)
    close(dx, wdx)
    close(dbias, wdb)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_partial_products_are_added_in_float32(implementation: str) -> None:
    """The two K shards contribute 257 and -256, of which bfloat16 holds the second alone."""
    codes = jnp.tile(jnp.array([[256.0, 1.0, -256.0, 0.0]]), (8, 1)).astype(jnp.float8_e4m3fn)
    q = jlb.ScaledArray(codes, jnp.ones((1, 1)), format=jlb.FP8_TENSOR)
    m = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(m):
        x = on(m, jnp.ones((3, 4), jnp.bfloat16), P(None, "a"))
        w = jlb.ScaledArray(on(m, q.data, P(None, "a")), on(m, q.scale, P()), format=q.format)
        y = jlb.fp8_dot(x, w, act=None, implementation=implementation)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(y).astype(np.float32), np.ones((3, 8), np.float32))


def test_explicit_dynamic_on_sharded_rows() -> None:
    x, q, _, _ = case("128x128", "M")
    m = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(m):
        y = jax.jit(layers.call)(on(m, x, P("a", None)), on(m, q, jax.tree.map(lambda _: P(), q)))
    np.testing.assert_allclose(y, layers.call(x, q), rtol=1e-5, atol=1e-4)


REFUSED = {
    "K of x only": (P(None, "a"), P(None, None), None, "reshard"),
    "K of w only": (P(None, None), P(None, "a"), None, "reshard"),
    "N and M on one axis": (P("a", None), P("a", None), None, "reshard"),
    "N blocks cut": (P(None, None), P(("a", "b"), None), None, "whole blocks|whole 128"),
    "K blocks cut": (P(None, ("a", "b")), P(None, ("a", "b")), None, "whole 128"),
    "per-tensor act over shards": (P("a", None), P(None, None), jlb.FP8_TENSOR, "act_scale"),
    "per-row act over K shards": (P(None, "a"), P(None, "a"), jlb.FP8_CHANNEL, "FP8_1X128"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_explicit_layouts_that_are_refused(reason: str) -> None:
    sx, sw, act, fix = REFUSED[reason]
    x, q = layers.activations((M, K)), layers.weight(jlb.FP8_128X128, N, K)
    m = jax.make_mesh((2, 4), ("b", "a"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(m):
        w = jlb.ScaledArray(on(m, q.data, sw), on(m, q.scale, P()), format=q.format)
        with pytest.raises(ValueError, match=fix):
            jlb.fp8_dot(on(m, x, sx), w, act=act)


def test_explicit_fused_rows_are_refused_when_n_is_sharded() -> None:
    q = layers.weight(jlb.FP8_128X128, 512, K)
    m = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(m):
        w = jlb.ScaledArray(
            on(m, q.data, P("a", None)), on(m, q.scale, P("a", None)), format=q.format, row_splits=(256,)
        )
        with pytest.raises(ValueError, match="segment"):
            jlb.fp8_dot(layers.activations((M, K)), w, act=None)


def test_align_vma_leaves_plain_trees_alone() -> None:
    tree = {"a": jnp.ones(2), "b": None}
    assert jlb.align_vma(tree) is tree
