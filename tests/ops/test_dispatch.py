"""The choice of an implementation: explained, recorded, never silent."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxlowbit as jlb
from jaxlowbit import _ffi, errors
from jaxlowbit.ops import _dispatch

Q = jlb.quantize(jnp.ones((24, 64)), jlb.FP8_128X128)
X = jax.ShapeDtypeStruct((3, 64), jnp.bfloat16)


def products(explanation: Any) -> list[Any]:
    return [d for d in explanation.decisions if d.op != "quantize"]


def test_explain_names_implementation_kernel_and_reason() -> None:
    (native,) = products(jlb.explain(jlb.fp8_dot, X, Q))
    assert native.implementation == "native"
    assert native.platform == "cpu"
    assert native.op == "fp8_dot"
    assert any(tier.name.lower() in native.kernel for tier in _ffi.available_tiers()), native.kernel
    (xla,) = products(jlb.explain(jlb.fp8_dot, X, Q, implementation="xla"))
    assert xla.implementation == "xla"
    assert "asked for" in xla.reason
    assert "m=3 n=24 k=64" in str(xla)
    assert "FP8_128X128" in str(xla)


def test_explain_sees_through_jit_caches_and_gradients() -> None:
    f = jax.jit(lambda x: jlb.fp8_dot(x, Q).sum())
    f(jnp.ones((3, 64)))  # traced and cached before anyone asks
    assert [d.op for d in products(jlb.explain(f, jnp.ones((3, 64))))] == ["fp8_dot"]
    backward = products(jlb.explain(jax.grad(f), jnp.ones((3, 64))))
    assert {d.op for d in backward} == {"fp8_dot", "fp8_dot_dx"}


def test_explain_without_products() -> None:
    assert "no jaxlowbit operation" in str(jlb.explain(jnp.sin, 1.0))


def test_explain_shows_a_forced_tier() -> None:
    with _ffi.force_tier(_ffi.Tier.PORTABLE):
        (decision,) = products(jlb.explain(jlb.fp8_dot, X, Q))
    assert "portable" in decision.kernel


def test_native_is_refused_with_reasons_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch, "platform", lambda: "tpu")
    with pytest.raises(jlb.UnsupportedError, match=r"fp8_dot.*\n.*tpu.*\n.*implementation=None"):
        jax.eval_shape(lambda x: jlb.fp8_dot(x, Q, act=None, implementation="native"), X)


def test_missing_library_warns_once_and_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ffi, "native_available", lambda *_: (False, "the cpu library is not loaded (test)"))
    monkeypatch.setattr(errors, "_WARNED", set())
    jax.clear_caches()
    try:
        with pytest.warns(jlb.FallbackWarning, match="not loaded"):
            jax.eval_shape(lambda x: jlb.fp8_dot(x, Q, act=None), X)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            jax.eval_shape(lambda x: jlb.fp8_dot(x, Q, act=None), jax.ShapeDtypeStruct((4, 64), jnp.float32))
    finally:
        jax.clear_caches()


def test_rocm_and_cuda_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def __init__(self, version: str) -> None:
            self.client = type("Client", (), {"platform_version": version})()

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for version, name in (("PJRT C API\nrocm 60400", "rocm"), ("PJRT C API\ncuda 13000", "cuda")):
        monkeypatch.setattr(jax, "devices", lambda v=version: [Device(v)])
        assert _dispatch.platform() == name
