"""The dots inside jitted Flax models, NNX and Linen: gradients, optimizers, and weights that stay frozen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowbit as jlb
from jaxlowbit.testing import reference, tolerance

from .autodiff import layers

nnx = pytest.importorskip("flax.nnx", reason="Flax is optional")
linen = pytest.importorskip("flax.linen", reason="Flax is optional")
optax = pytest.importorskip("optax", reason="optax is optional")

N, K = 48, 160


class LowBitWeight(nnx.Variable):  # type: ignore[misc, name-defined]
    """Not an nnx.Param: neither gradients nor optimizers see it."""


class NnxLinear(nnx.Module):  # type: ignore[misc, name-defined]
    def __init__(self, q: jlb.ScaledArray, act: Any) -> None:
        self.weight = LowBitWeight(q)
        self.bias = nnx.Param(jnp.zeros((q.rows,), jnp.float32))
        self.act = act

    def __call__(self, x: Any) -> Any:
        return layers.call(x, self.weight.get_value(), bias=self.bias.get_value(), act=self.act)


class LinenLinear(linen.Module):  # type: ignore[misc, name-defined]
    features: int
    act: Any
    make: Any

    @linen.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Any) -> Any:
        q = self.variable("lowbit", "weight", self.make).value
        bias = self.param("bias", linen.initializers.zeros, (self.features,), jnp.float32)
        return layers.call(x, q, bias=bias, act=self.act)


def act_for(fmt: jlb.Format, dynamic: bool) -> Any:
    if not dynamic:
        return None
    return "dynamic" if fmt.dynamic_act else jlb.NVFP4


def check_gradients(q: jlb.ScaledArray, x: Any, g: Any, dx: Any, dbias: Any) -> None:
    product = reference.dot_transposed(g, q)
    bound = tolerance.dot_bound(product, x.dtype, bf16_operand=layers.rounds("native"))
    tolerance.check(dx, product.value, bound, what="dx")
    want = np.asarray(g, np.float64).sum(0)
    tolerance.check(dbias, want, 1e-6 * np.abs(np.asarray(g, np.float64)).sum(0), what="dbias")


@pytest.mark.parametrize("dynamic", [False, True], ids=["weight-only", "dynamic"])
@pytest.mark.parametrize("name", layers.FORMATS)
def test_nnx_layer(name: str, dynamic: bool) -> None:
    q = layers.weight(layers.FORMATS[name], N, K)
    model = NnxLinear(q, act_for(q.format, dynamic))
    x, g = layers.activations((6, K), jnp.bfloat16), layers.activations((6, N), jnp.bfloat16, seed=2)

    @nnx.jit  # type: ignore[untyped-decorator]
    def gradients(model: Any, x: Any, g: Any) -> Any:
        loss = lambda model, x: jnp.sum((model(x) * g).astype(jnp.float32))  # noqa: E731
        return nnx.grad(loss, argnums=(nnx.DiffState(0, nnx.Param), 1))(model, x)

    d_model, dx = gradients(model, x, g)
    assert len(jax.tree.leaves(d_model)) == 1, "only the bias is a parameter"
    check_gradients(q, x, g, dx, jax.tree.leaves(d_model)[0])


@pytest.mark.parametrize("dynamic", [False, True], ids=["weight-only", "dynamic"])
@pytest.mark.parametrize("name", layers.FORMATS)
def test_linen_layer(name: str, dynamic: bool) -> None:
    q = layers.weight(layers.FORMATS[name], N, K)
    model = LinenLinear(N, act_for(q.format, dynamic), lambda: q)
    x, g = layers.activations((6, K), jnp.bfloat16), layers.activations((6, N), jnp.bfloat16, seed=2)
    variables = model.init(jax.random.key(0), x)
    assert isinstance(variables["lowbit"]["weight"], jlb.ScaledArray)

    @jax.jit
    def gradients(params: Any, x: Any, frozen: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            y = model.apply({"params": params, "lowbit": frozen}, x)
            return jnp.sum((y * g).astype(jnp.float32))

        return jax.grad(loss, (0, 1))(params, x)

    d_params, dx = gradients(variables["params"], x, variables["lowbit"])
    check_gradients(q, x, g, dx, d_params["bias"])


@jax.numpy_dtype_promotion("standard")  # optax promotes its step counter
def test_adamw_with_weight_decay_leaves_packed_weights_alone() -> None:
    q = layers.weight(jlb.FP8_128X128, N, K)
    before = [np.asarray(leaf).copy().view(np.uint8) for leaf in jax.tree.leaves(q)]
    model = NnxLinear(q, None)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2, weight_decay=0.1), wrt=nnx.Param)
    x, target = layers.activations((16, K)), layers.activations((16, N), seed=5)

    @nnx.jit  # type: ignore[untyped-decorator]
    def step(model: Any, optimizer: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - target) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(20)]
    assert losses[-1] < losses[0]
    after = [np.asarray(leaf).view(np.uint8) for leaf in jax.tree.leaves(model.weight.get_value())]
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


def test_nnx_scan_over_layers() -> None:
    """Stacked frozen weights scan like any other state."""
    stack = jax.tree.map(lambda *a: jnp.stack(a), *[layers.weight(jlb.NVFP4, 64, 64, seed=i) for i in range(3)])
    x = layers.activations((4, 64))

    @jax.jit
    def scanned(x: Any, stack: Any) -> Any:
        return jax.lax.scan(lambda x, q: (jnp.tanh(layers.call(x, q)), None), x, stack)[0]

    want = x
    for i in range(3):
        want = jnp.tanh(layers.call(want, jax.tree.map(lambda a: a[i], stack)))  # noqa: B023
    np.testing.assert_allclose(scanned(x, stack), want, rtol=1e-4, atol=1e-5)
