"""The contract on a GPU, where this version is served by XLA: the bits of quantize, the bounds of the dots."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowbit as jlb
from jaxlowbit.testing import reference, tolerance

from ..autodiff import layers

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_gpu() -> Any:
    with jax.default_device(jax.devices("gpu")[0]):
        yield


def bits_case(name: str) -> Any:
    """Strict: a format that starts to give the bits has to lose its mark."""
    reason = "seen on an H200: XLA's quotients by float32 scales are not the correctly rounded ones on a GPU"
    off = layers.FORMATS[name].scale.name == "f32"
    return pytest.param(name, marks=pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason) if off else ())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", [bits_case(name) for name in layers.FORMATS])
def test_quantize_gives_the_bits_of_numpy(name: str, dtype: Any) -> None:
    """Among them quotients near the middle between two codes: one ulp of a rewritten division would show."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(256, 1024)) * 2.0 ** rng.integers(-12, 12, size=(256, 1))).astype(np.float32)
    x = jnp.asarray(x).astype(dtype)
    got = jax.jit(lambda x: jlb.quantize(x, layers.FORMATS[name]))(x)
    outer = None if got.global_scale is None else float(got.global_scale)
    want = reference.quantize(np.asarray(x), layers.FORMATS[name], global_scale=outer)
    np.testing.assert_array_equal(np.asarray(got.scale).view(np.uint8), np.asarray(want.scale).view(np.uint8))
    np.testing.assert_array_equal(np.asarray(got.data).view(np.uint8), np.asarray(want.data).view(np.uint8))


@pytest.mark.parametrize("act", [None, jlb.FP8_1X128], ids=repr)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", layers.FORMATS)
def test_values_and_gradients(name: str, dtype: Any, act: Any) -> None:
    q = layers.weight(layers.FORMATS[name], 136, 192)
    x, g = layers.activations((7, 192), dtype), layers.activations((7, 136), dtype, seed=2)
    y, pullback = jax.vjp(jax.jit(lambda x: layers.call(x, q, act=act)), x)
    product = reference.dot(x if act is None else jlb.quantize(x, act), q)
    tolerance.check(y, product.value, tolerance.dot_bound(product, dtype))
    back = reference.dot_transposed(g, q)
    tolerance.check(pullback(g)[0], back.value, tolerance.dot_bound(back, dtype))


def test_native_is_refused_and_explained() -> None:
    q = layers.weight(jlb.FP8_128X128, 16, 32)
    x = layers.activations((2, 32))
    (decision,) = jlb.explain(lambda x: jlb.fp8_dot(x, q, act=None), x).decisions
    assert decision.platform == "cuda"
    assert decision.implementation == "xla"
    with pytest.raises(jlb.UnsupportedError, match="cuda"):
        jlb.fp8_dot(x, q, implementation="native")
