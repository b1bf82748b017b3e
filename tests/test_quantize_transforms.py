"""quantize and fake_quantize under JAX's transformations, and what they refuse."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlowbit as jlb
from jaxlowbit import _ffi, errors
from jaxlowbit.formats import FORMATS, Format
from jaxlowbit.quantize import quantize_rows, two_level_scale

from .naive_quantize import F32, spread

_AVAILABLE, _REASON = _ffi.native_available("cpu", _ffi.QUANTIZE)
needs_native = pytest.mark.skipif(not _AVAILABLE, reason=_REASON)
IMPLEMENTATIONS = ["xla", pytest.param("native", marks=needs_native)]
both = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)


def same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# Differentiation.


def loss(x: Any, implementation: str | None = None) -> Any:
    return jlb.dequantize(jlb.quantize(x, jlb.FP8_1X128, implementation=implementation)).sum()


@both
def test_quantize_refuses_every_derivative_and_names_the_way_out(implementation: str) -> None:
    x = jnp.ones((2, 128))
    f = functools.partial(loss, implementation=implementation)
    ways = {
        "grad": lambda: jax.grad(f)(x),
        "jit(grad)": lambda: jax.jit(jax.grad(f))(x),
        "grad(jit)": lambda: jax.grad(jax.jit(f))(x),
        "jvp": lambda: jax.jvp(f, (x,), (x,)),
        "jacrev": lambda: jax.jacrev(f)(x),
        "vmap(grad)": lambda: jax.vmap(jax.grad(f))(x[:, None]),
        "grad of a scan": lambda: jax.grad(lambda x: jax.lax.scan(lambda c, v: (c + f(v[None]), None), 0.0, x)[0])(x),
        "scale": lambda: jax.grad(lambda s: jlb.quantize(x, "FP8_TENSOR", scale=s).scale.sum())(jnp.float32(1)),
    }
    raised = {}
    for name, way in ways.items():
        try:
            way()
        except TypeError as error:
            raised[name] = "quantize is not differentiable" in str(error) and "fake_quantize" in str(error)
    assert raised == dict.fromkeys(ways, True)


@both
def test_constants_are_quantized_inside_differentiated_functions(implementation: str) -> None:
    x, w = jnp.ones((2, 128)), jnp.asarray(spread((4, 128)))

    def f(x: Any, w: Any) -> Any:
        q = jlb.quantize(jax.lax.stop_gradient(w), jlb.FP8_1X128, implementation=implementation)
        return (x @ jlb.dequantize(q).T).sum()

    want = np.asarray(jlb.dequantize(jlb.quantize(w, jlb.FP8_1X128))).sum(0)
    np.testing.assert_allclose(np.asarray(jax.grad(f)(x, w))[0], want, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(jax.jit(jax.grad(f))(x, w))[0], want, rtol=1e-5)


@every_format
@both
def test_fake_quantize_is_the_round_trip_with_the_gradient_of_identity(fmt: Format, implementation: str) -> None:
    x = jnp.asarray(spread((4, 64)))
    fake = functools.partial(jlb.fake_quantize, format=fmt, implementation=implementation)
    np.testing.assert_array_equal(
        np.asarray(fake(x)), np.asarray(jlb.dequantize(jlb.quantize(x, fmt, implementation=implementation)))
    )
    g = jnp.asarray(spread((4, 64), seed=1)) * 1e-6
    value, pull = jax.vjp(fake, x)
    np.testing.assert_array_equal(np.asarray(pull(g)[0]), np.asarray(g))
    np.testing.assert_array_equal(np.asarray(jax.jit(jax.grad(lambda x: (fake(x) * g).sum()))(x)), np.asarray(g))
    primal, tangent = jax.jvp(fake, (x,), (g,))
    np.testing.assert_array_equal(np.asarray(tangent), np.asarray(g))
    np.testing.assert_array_equal(np.asarray(primal), np.asarray(value))


def test_fake_quantize_keeps_shape_axis_and_dtype() -> None:
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        x = jnp.asarray(spread((31, 6))).astype(dtype)
        got = jlb.fake_quantize(x, jlb.MXFP4, axis=0)
        assert (got.shape, got.dtype) == (x.shape, dtype)
        want = jlb.dequantize(jlb.quantize(x, jlb.MXFP4, axis=0, pad=True), dtype).T
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
        grad = jax.grad(lambda x: jlb.fake_quantize(x, jlb.MXFP4, axis=0).sum().astype(jnp.float32))(x)
        assert grad.dtype == dtype
        assert (np.asarray(grad) == 1).all()


def test_fake_quantize_second_order_scales_and_keys() -> None:
    x, key = jnp.asarray(spread((2, 32))), jax.random.key(0)

    def f(x: Any, scale: Any) -> Any:
        y = jlb.fake_quantize(x, "FP8_TENSOR", scale=scale, rounding="stochastic", key=key)
        return (y**3).sum()

    y = jlb.fake_quantize(x, "FP8_TENSOR", scale=jnp.float32(0.1), rounding="stochastic", key=key)
    dx, dscale = jax.jit(jax.grad(f, argnums=(0, 1)))(x, jnp.float32(0.1))
    np.testing.assert_allclose(np.asarray(dx), 3 * np.asarray(y) ** 2, rtol=1e-6)
    assert float(dscale) == 0, "scales count as constants"
    second = jax.grad(lambda x: jax.grad(f)(x, jnp.float32(0.1)).sum())(x)
    np.testing.assert_allclose(np.asarray(second), 6 * np.asarray(y), rtol=1e-6)


# vmap, scan, sharding.


@every_format
@both
def test_vmap_is_the_loop(fmt: Format, implementation: str) -> None:
    x = jnp.asarray(spread((3, 2, 5, 64)))
    go = functools.partial(jlb.quantize, format=fmt, implementation=implementation)
    want = jax.tree.map(lambda *q: jnp.stack(q), *(go(one) for one in x))
    same(jax.vmap(go)(x), want)
    same(jax.jit(jax.vmap(jax.vmap(go)))(x), want)
    moved = jax.vmap(go, in_axes=1)(jnp.moveaxis(x, 0, 1))
    same(moved, want)


@both
def test_vmap_over_some_operands(implementation: str) -> None:
    x, outer = jnp.asarray(spread((3, 4, 32))), jnp.asarray([0.5, 1.0, 2.0])
    go = functools.partial(jlb.quantize, format=jlb.NVFP4, implementation=implementation)
    same(
        jax.vmap(lambda g: go(x[0], global_scale=g))(outer),
        jax.tree.map(lambda *q: jnp.stack(q), *(go(x[0], global_scale=g) for g in outer)),
    )
    scales = jnp.asarray([0.1, 0.2, 0.4])
    tensor = functools.partial(jlb.quantize, format=jlb.FP8_TENSOR, implementation=implementation)
    same(
        jax.vmap(lambda v, s: tensor(v, scale=s))(x, scales),
        jax.tree.map(lambda *q: jnp.stack(q), *(tensor(v, scale=s) for v, s in zip(x, scales, strict=True))),
    )


@both
def test_vmap_of_stochastic_rounding_is_the_loop(implementation: str) -> None:
    x, keys = jnp.asarray(spread((3, 4, 32))), jax.random.split(jax.random.key(0), 3)
    go = functools.partial(jlb.quantize, format=jlb.MXFP4, rounding="stochastic", implementation=implementation)
    want = jax.tree.map(lambda *q: jnp.stack(q), *(go(v, key=k) for v, k in zip(x, keys, strict=True)))
    same(jax.vmap(lambda v, k: go(v, key=k))(x, keys), want)
    shared = jax.tree.map(lambda *q: jnp.stack(q), *(go(v, key=keys[0], offset=5) for v in x))
    same(jax.vmap(lambda v: go(v, key=keys[0], offset=5))(x), shared)
    starts = jnp.arange(3, dtype=jnp.int32) * 128
    moving = jax.vmap(lambda v, o: go(v, key=keys[0], offset=o))(x, starts)
    same(moving.data, go(x, key=keys[0]).data)


@both
def test_scan_and_checkpoint(implementation: str) -> None:
    x = jnp.asarray(spread((3, 4, 64)))
    go = functools.partial(jlb.quantize, format=jlb.MXFP8, implementation=implementation)
    _, stacked = jax.lax.scan(lambda c, v: (c, go(v)), 0, x)
    same(stacked, go(x))
    fake = jax.checkpoint(functools.partial(jlb.fake_quantize, format=jlb.MXFP8, implementation=implementation))
    np.testing.assert_array_equal(np.asarray(jax.grad(lambda x: fake(x).sum())(x)), np.ones(x.shape))


@both
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_shard_map_keeps_varying_axes(implementation: str, axis_type: Any) -> None:
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(axis_type,) * 2)
    x, key = jnp.asarray(spread((8, 128))), jax.random.key(0)
    columns = x.shape[1]

    def shard(v: Any) -> tuple[Any, Any, Any, Any]:
        q = jlb.quantize(v, jlb.FP8_1X128, implementation=implementation)
        start = jax.lax.axis_index("a") * (v.shape[0] * columns)
        r = jlb.quantize(v, jlb.NVFP4, rounding="stochastic", key=key, offset=start, global_scale=2.0**-9,
                         implementation=implementation)  # fmt: skip
        return q.data, q.scale, r.data, jax.grad(lambda v: jlb.fake_quantize(v, jlb.MXFP8).sum())(v)

    with jax.set_mesh(mesh):
        sharded = jax.jit(jax.shard_map(shard, in_specs=P("a"), out_specs=P("a")))
        data, scale, rounded, grad = sharded(jax.device_put(x, NamedSharding(mesh, P("a"))))
    whole = jlb.quantize(x, jlb.FP8_1X128)
    np.testing.assert_array_equal(np.asarray(data), np.asarray(whole.data))
    np.testing.assert_array_equal(np.asarray(scale), np.asarray(whole.scale))
    want = jlb.quantize(x, jlb.NVFP4, rounding="stochastic", key=key, global_scale=2.0**-9)
    np.testing.assert_array_equal(np.asarray(rounded), np.asarray(want.data))
    assert (np.asarray(grad) == 1).all()


def test_explicit_mesh_keeps_rows_sharded() -> None:
    mesh = jax.make_mesh((4,), ("a",))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.asarray(spread((8, 256))), NamedSharding(mesh, P("a", None)))
        q = jax.jit(lambda v: jlb.quantize(v, jlb.FP8_1X128, implementation="xla"))(x)
        assert jax.typeof(q.data).sharding.spec == P("a", None)
    same(jax.tree.map(np.asarray, q), jax.tree.map(np.asarray, jlb.quantize(np.asarray(x), jlb.FP8_1X128)))


# What the operations use.


@both
def test_quantize_rows(implementation: str) -> None:
    x = jnp.asarray(spread((1, 6, 64)))
    for fmt in FORMATS.values():
        outer = two_level_scale(x, fmt) if fmt.two_level else None
        codes, scale = quantize_rows(x, fmt, global_scale=outer, implementation=implementation)
        q = jlb.quantize(x, fmt)
        same((codes, scale), (q.data, q.scale))
        assert outer is None or (outer == q.global_scale).all()
    static = quantize_rows(
        x,
        jlb.FP8_CHANNEL,
        scale=jnp.full((1, 1, 1), 0.5),
        scale_rounding="pow2",
        amax_ub=3.0,
        implementation=implementation,
    )
    same(static, tuple(jax.tree.leaves(jlb.quantize(x, jlb.FP8_CHANNEL, scale=0.5))))
    with pytest.raises(TypeError, match="fake_quantize"):
        jax.grad(lambda x: quantize_rows(x, jlb.FP8_1X128, implementation=implementation)[1].sum())(x)


# Which implementation.


@needs_native
def test_native_is_the_default_and_lowers_for_other_platforms() -> None:
    x = jnp.ones((4, 128))
    go = jax.jit(lambda v: jlb.quantize(v, jlb.FP8_1X128))
    assert _ffi.QUANTIZE in go.lower(x).as_text()
    assert (
        _ffi.QUANTIZE not in jax.jit(lambda v: jlb.quantize(v, jlb.FP8_1X128, implementation="xla")).lower(x).as_text()
    )
    for platform in ("cuda", "tpu"):
        assert _ffi.QUANTIZE not in go.trace(x).lower(lowering_platforms=(platform,)).as_text()


def test_without_the_library_the_default_warns_once_and_native_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ffi, "native_available", lambda *_: (False, "it was left at home"))
    monkeypatch.setattr(errors, "_WARNED", set())
    x = jnp.ones((4, 128))
    with pytest.warns(jlb.FallbackWarning, match=r"quantize takes the xla implementation: it was left at home"):
        jlb.quantize(x, jlb.FP8_1X128)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jlb.quantize(x, jlb.FP8_1X128)
        jlb.quantize(x, jlb.FP8_1X128, implementation="xla")
    with pytest.raises(jlb.UnsupportedError, match=r"quantize: implementation='native'[\s\S]*left at home"):
        jlb.quantize(x, jlb.FP8_1X128, implementation="native")


# Refusals.

X = np.ones((4, 32), F32)
REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "integers": (TypeError, r"x: expected a floating-point array; got int32\[2\]", {"x": np.ones(2, np.int32)}),
    "scalar": (ValueError, r"axis: expected one of the dimensions", {"x": F32(1)}),
    "axis": (ValueError, r"axis: .*got axis=2 for float32\[4,32\]", {"axis": 2}),
    "format": (ValueError, r"format: expected a Format or one of .*NVFP4", {"format": "FP9"}),
    "odd K": (ValueError, r"x: expected an even length along axis -1.*pad=True", {"x": X[:, :31], "format": "MXFP4"}),
    "rounding": (ValueError, r"rounding: expected 'nearest' without a key", {"rounding": "up"}),
    "no key": (ValueError, r"rounding: .*got rounding='stochastic', key=none", {"rounding": "stochastic"}),
    "idle key": (ValueError, r"rounding: .*got rounding='nearest', key=uint32", {"key": np.zeros(2, np.uint32)}),
    "bad key": (TypeError, r"key: expected one key", {"rounding": "stochastic", "key": np.zeros(3, np.uint32)}),
    "pow2 of e8m0": (ValueError, r"scale_rounding: expected one of \['rceil'", {"scale_rounding": "pow2"}),
    "rceil of f32": (
        ValueError, r"\['none', 'pow2'\] for the f32 scales", {"scale_rounding": "rceil", "format": "FP8_TENSOR"},
    ),
    "none of e8m0": (ValueError, r"scale_rounding", {"scale_rounding": "none"}),
    "amax_ub": (ValueError, r"amax_ub: expected a positive float32 number; got 0.0", {"amax_ub": 0.0}),
    "amax_ub nan": (ValueError, r"amax_ub", {"amax_ub": float("nan")}),
    "scale and bound": (ValueError, r"scale: .*got .*amax_ub=1.0", {"scale": np.uint8(127), "amax_ub": 1.0}),
    "f32 for e8m0": (TypeError, r"scale: expected .*uint8.*encode_e8m0", {"scale": np.ones((4, 1), F32)}),
    "int for f32": (
        TypeError, r"scale: expected .*float32.*got int32", {"scale": np.ones((4, 1), "i4"), "format": "FP8_CHANNEL"},
    ),
    "bool": (TypeError, r"scale: expected .*float32.*got bool", {"scale": True, "format": "FP8_TENSOR"}),
    "grid": (ValueError, r"scale: expected one value or shape \(4, 1\)", {"scale": np.full((4, 2), 127, np.uint8)}),
    "one level": (ValueError, r"global_scale: expected none: MXFP8 has one level", {"global_scale": 1.0}),
    "global shape": (
        ValueError, r"global_scale: expected one value or", {"global_scale": np.ones(3, F32), "format": "NVFP4"},
    ),
    "global type": (
        TypeError, r"global_scale: expected float32", {"global_scale": np.ones((), np.int32), "format": "NVFP4"},
    ),
    "implementation": (ValueError, r"implementation: expected 'native', 'xla'", {"implementation": "cuda"}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_was_expected(name: str) -> None:
    error, match, keywords = REFUSED[name]
    keywords = {"x": X, "format": "MXFP8", **keywords}
    with pytest.raises(error, match=match):
        jlb.quantize(**keywords)
    if name != "odd K":
        with pytest.raises(error, match=match):
            jlb.fake_quantize(**keywords)


def test_float64_is_converted_first() -> None:
    with jax.enable_x64(True):
        x = spread((4, 64), dtype=np.float64)
        same(jlb.quantize(x, jlb.MXFP8), jlb.quantize(x.astype(F32), jlb.MXFP8))
        assert jlb.fake_quantize(jnp.asarray(x), jlb.MXFP8).dtype == jnp.float64
