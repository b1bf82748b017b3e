"""The dots under vmap, scan, remat, export and lowering for other platforms, and what they hold in memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowbit as jlb
from jaxlowbit.testing import reference, tolerance

from . import layers

IMPLEMENTATIONS = ("xla", "native")


def stacked(fmt: jlb.Format, count: int, n: int, k: int) -> jlb.ScaledArray:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *[layers.weight(fmt, n, k, seed=i) for i in range(count)])


def equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def primitives(jaxpr: Any) -> set[str]:
    return {eqn.primitive.name for eqn in equations(jaxpr)}


def eqn_names(jaxpr: Any) -> list[str]:
    return [str(eqn.params.get("name", "")) for eqn in equations(jaxpr)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("act", [None, "dynamic", jlb.FP8_TENSOR, "static"], ids=repr)
@pytest.mark.parametrize("name", ["tensor", "128x128", "mxfp8", "mxfp4"])
def test_vmap_over_x_equals_the_loop(name: str, act: Any, implementation: str) -> None:
    q = layers.weight(layers.FORMATS[name], 40, 160)
    x, bias = layers.activations((3, 5, 160)), layers.activations((40,), seed=2)
    scales = jnp.array([0.01, 0.02, 0.04], jnp.float32)

    def f(x: Any, s: Any) -> Any:
        options = {"act": "dynamic", "act_scale": s} if act == "static" else {"act": act}
        return layers.call(x, q, bias=bias, implementation=implementation, **options)

    got = jax.vmap(f)(x, scales)
    want = np.stack([f(x[i], scales[i]) for i in range(3)])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["128x128", "nvfp4"])
def test_vmap_needs_no_loop(name: str) -> None:
    q = layers.weight(layers.FORMATS[name], 40, 160)
    f = jax.vmap(lambda x: layers.call(x, q, act=None, implementation="native"))
    names = primitives(jax.make_jaxpr(f)(jnp.zeros((3, 5, 160))).jaxpr)
    assert "ffi_call" in names, names
    assert not names & {"while", "scan"}, names
    both = jax.vmap(lambda x, q: layers.call(x, q, act=None, implementation="native"))
    names = primitives(jax.make_jaxpr(both)(jnp.zeros((2, 5, 160)), stacked(q.format, 2, 40, 160)).jaxpr)
    assert "ffi_call" in names, names
    assert not names & {"while", "scan"}, names


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["tensor", "channel", "128x128", "mxfp4", "nvfp4"])
def test_vmap_over_weights(name: str, implementation: str) -> None:
    fmt = layers.FORMATS[name]
    q = stacked(fmt, 3, 40, 160)
    x = layers.activations((3, 5, 160))
    f = functools.partial(layers.call, act=None, implementation=implementation)
    for axes in ((0, 0), (None, 0)):
        got = jax.vmap(f, axes)(x if axes[0] == 0 else x[0], q)
        for i in range(3):
            product = reference.dot(x[i] if axes[0] == 0 else x[0], jax.tree.map(lambda a: a[i], q))  # noqa: B023
            tolerance.check(got[i], product.value, tolerance.dot_bound(product, jnp.float32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("order", ["x outside", "weights outside"])
def test_vmap_over_x_of_vmap_over_weights(order: str, implementation: str) -> None:
    q = stacked(jlb.NVFP4, 3, 40, 160)
    x = layers.activations((2, 5, 160))
    f = functools.partial(layers.call, act=jlb.FP8_TENSOR, implementation=implementation)
    if order == "x outside":
        got = jax.vmap(jax.vmap(f, (None, 0)), (0, None))(x, q)
    else:
        got = jnp.swapaxes(jax.vmap(jax.vmap(f, (0, None)), (None, 0))(x, q), 0, 1)
    want = np.stack([[f(row, jax.tree.map(lambda a: a[i], q)) for i in range(3)] for row in x])  # noqa: B023
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_of_grad_and_grad_of_vmap(implementation: str) -> None:
    q = layers.weight(jlb.FP8_128X128, 40, 160)
    x = layers.activations((3, 5, 160))
    g = layers.activations((3, 5, 40), seed=2)
    f = lambda x, g: jnp.sum(layers.call(x, q, implementation=implementation) * g)  # noqa: E731
    product = reference.dot_transposed(g, q)
    bound = tolerance.dot_bound(product, jnp.float32, bf16_operand=layers.rounds(implementation))
    tolerance.check(jax.vmap(jax.grad(f))(x, g), product.value, bound, what="vmap of grad")
    tolerance.check(jax.grad(lambda x: jax.vmap(f)(x, g).sum())(x), product.value, bound, what="grad of vmap")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["128x128", "nvfp4"])
def test_scan_over_stacked_layers_with_remat(name: str, implementation: str) -> None:
    q = stacked(layers.FORMATS[name], 3, 64, 64)
    x = layers.activations((4, 64))

    def loss(x: Any, scan: bool) -> Any:
        body = jax.checkpoint(lambda x, q: jnp.tanh(layers.call(x, q, act=None, implementation=implementation)))
        if scan:
            x, _ = jax.lax.scan(lambda x, q: (body(x, q), None), x, q)
        else:
            for i in range(3):
                x = body(x, jax.tree.map(lambda a: a[i], q))  # noqa: B023
        return jnp.sum(x**2)

    a, b = (jax.jit(jax.grad(functools.partial(loss, scan=s)))(x) for s in (True, False))
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_remat_name_keeps_the_product() -> None:
    q = layers.weight(jlb.FP8_128X128, 64, 64)
    x = layers.activations((4, 64))

    def calls(policy: Any) -> int:
        layer = lambda x: jnp.sum(jnp.sin(jlb.fp8_dot(x, q, act=None, implementation="native")))  # noqa: E731
        f = jax.checkpoint(layer, policy=policy)
        names = eqn_names(jax.make_jaxpr(jax.grad(f))(x).jaxpr)
        return sum(name.startswith("jaxlowbit_fp8_dot_") and "_dx_" not in name for name in names)

    recomputed = calls(jax.checkpoint_policies.nothing_saveable)
    kept = calls(jax.checkpoint_policies.save_only_these_names(jlb.REMAT_NAME))
    assert (kept, recomputed) == (1, 2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["128x128", "nvfp4"])
def test_train_step_holds_no_dequantized_weights(name: str, implementation: str) -> None:
    """Temporaries must not grow by one dequantized W per layer: that is what packed weights are for."""
    n = k = 1536
    fmt = layers.FORMATS[name]
    spec = jax.eval_shape(lambda: jlb.quantize(jnp.zeros((n, k)), fmt))

    def temporaries(count: int) -> int:
        def loss(scale: Any, x: Any, ws: Any) -> Any:
            for q in ws:
                x = jnp.tanh(layers.call(x * scale, q, act=None, implementation=implementation))
            return jnp.sum(x.astype(jnp.float32))

        args = (jnp.float32(1), jnp.zeros((16, k)), [spec] * count)
        memory = jax.jit(jax.grad(loss)).lower(*args).compile().memory_analysis()
        return int(memory.temp_size_in_bytes)

    per_layer = (temporaries(8) - temporaries(2)) / 6
    dequantized_bf16 = n * k * 2
    # Native: activations only. XLA: on the CPU a byte view of the codes is a copy of them.
    most = 0.05 * dequantized_bf16 if implementation == "native" else 1.15 * fmt.bytes(n, k)
    assert per_layer < most, f"each layer costs {per_layer:.0f} bytes of temporaries, allowed {most:.0f}"


@pytest.mark.parametrize("platform", ["cuda", "tpu", "rocm"])
def test_lowers_for_other_platforms_without_them(platform: str) -> None:
    q = layers.weight(jlb.FP8_128X128, 40, 160)
    f = jax.jit(lambda x, q: jlb.fp8_dot(x, q))
    x = jax.ShapeDtypeStruct((8, 160), jnp.bfloat16)
    text = jax.export.export(f, platforms=[platform])(x, q).mlir_module()
    assert "dot_general" in text
    assert "custom_call @jaxlowbit" not in text


def test_export_round_trip_with_symbolic_rows_and_gradient() -> None:
    pytest.importorskip("flatbuffers")
    q = layers.weight(jlb.FP8_128X128, 40, 160)
    f = jax.jit(lambda x, q: jlb.fp8_dot(x, q, implementation="native"))
    (m,) = jax.export.symbolic_shape("m")
    spec = jax.ShapeDtypeStruct((m, 160), jnp.float32)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), q)
    exported = jax.export.export(f, disabled_checks=jlb.export_checks())(spec, shapes)
    again = jax.export.deserialize(exported.serialize(vjp_order=1))
    x = layers.activations((3, 160))
    np.testing.assert_array_equal(again.call(x, q), f(x, q))
    dx = jax.grad(lambda x: again.call(x, q).sum())(x)
    np.testing.assert_allclose(dx, jax.grad(lambda x: f(x, q).sum())(x), rtol=1e-5, atol=1e-4)


def test_only_dx_is_computed_for_dx() -> None:
    """The gradient with respect to x runs the backward product and no weight-gradient or quantization of g."""
    q = layers.weight(jlb.FP8_128X128, 40, 160)
    g = jax.jit(jax.grad(lambda x: jlb.fp8_dot(x, q, implementation="native").sum()))
    text = g.lower(jnp.zeros((8, 160))).as_text()
    assert "jaxlowbit_fp8_dot_dx" in text
    assert "wgrad" not in text


def test_unused_product_is_dropped() -> None:
    q = layers.weight(jlb.FP8_128X128, 40, 160)
    f = jax.jit(lambda x: (jlb.fp8_dot(x, q, implementation="native"), x)[1])
    assert "jaxlowbit_dot" not in f.lower(jnp.zeros((8, 160))).compile().as_text()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("v", "m", "n", "k"), [(0, 2, 4, 32), (3, 0, 4, 32), (3, 2, 0, 32), (3, 2, 4, 0)])
def test_vmap_over_weights_of_empty_extents(v: int, m: int, n: int, k: int, implementation: str) -> None:
    q = jax.tree.map(
        lambda leaf: jnp.zeros((v, *leaf.shape), leaf.dtype), jlb.quantize(jnp.ones((n, k)), jlb.FP8_CHANNEL)
    )
    f = lambda x, q: layers.call(x, q, act=None, implementation=implementation)  # noqa: E731
    np.testing.assert_array_equal(jax.vmap(f)(jnp.ones((v, m, k)), q), np.zeros((v, m, n), np.float32))
    dx = jax.vmap(jax.grad(lambda x, q: f(x, q).sum()))(jnp.ones((v, m, k)), q)
    np.testing.assert_array_equal(dx, np.zeros((v, m, k), np.float32))


@pytest.mark.parametrize("act", [jlb.FP8_TENSOR, "static", jlb.FP8_CHANNEL, jlb.FP8_1X128], ids=repr)
def test_export_with_symbolic_rows_for_every_activation(act: Any) -> None:
    q = layers.weight(jlb.FP8_128X128, 40, 160)
    options = {"act_scale": 0.1} if act == "static" else {"act": act}
    f = jax.jit(lambda x: jlb.fp8_dot(x, q, **options))
    (m,) = jax.export.symbolic_shape("m")
    exported = jax.export.export(f, disabled_checks=jlb.export_checks())(jax.ShapeDtypeStruct((m, 160), jnp.float32))
    x = layers.activations((5, 160))
    np.testing.assert_array_equal(exported.call(x), f(x))
