"""The choice of an implementation: explained, recorded, never silent."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest

import jaxlowbit as jlb
from jaxlowbit import _dispatch, _ffi, errors

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


def test_explain_sees_the_quantizer() -> None:
    """Alone, in a straight-through round trip, and inside a product that quantizes its activations."""
    x = jax.ShapeDtypeStruct((3, 128), jnp.bfloat16)
    key = jax.random.key(0)
    (native,) = jlb.explain(lambda x: jlb.quantize(x, jlb.FP8_1X128), x).decisions
    assert (native.op, native.implementation) == ("quantize", "native")
    assert native.kernel == _ffi.available_tiers()[-1].name.lower()
    assert "FP8_1X128 x=bfloat16[3,128] rounding=nearest scale_rounding=none" in str(native)
    (xla,) = jlb.explain(
        lambda x: jlb.fake_quantize(x, "MXFP8", rounding="stochastic", key=key, implementation="xla"), x
    ).decisions
    assert (xla.op, xla.implementation) == ("quantize", "xla")
    assert "MXFP8 x=bfloat16[3,128] rounding=stochastic scale_rounding=rceil" in xla.problem
    assert "asked for" in xla.reason
    (empty,) = jlb.explain(lambda x: jlb.quantize(x[:0], jlb.MXFP8), x).decisions
    assert (empty.implementation, empty.reason) == ("xla", "the array is empty")
    inside = jlb.explain(lambda x: jlb.fp8_dot(x, Q, act="dynamic"), X)
    assert [d.op for d in inside.decisions] == ["quantize", "fp8_dot"]
    assert str(inside).count("because") == 2


def test_every_decision_has_a_reason(monkeypatch: pytest.MonkeyPatch, no_caches: None) -> None:
    def reasons(**options: Any) -> set[str]:
        decisions = jlb.explain(lambda x: jlb.fp8_dot(x, Q, **options), X).decisions
        assert len(decisions) == 2
        return {d.reason for d in decisions}

    best = _ffi.available_tiers()[-1].name.lower()
    served = f"the CPU library serves it; tier {best} is the best tier of this machine"
    assert reasons() == reasons(implementation="native") == {served}
    assert reasons(implementation="xla") == {"implementation='xla' was asked for"}
    with _ffi.force_tier(_ffi.Tier.PORTABLE):
        assert reasons() == {"the CPU library serves it; tier portable is forced"}
    monkeypatch.setattr(_dispatch, "platform", lambda: "cuda")
    jax.clear_caches()
    assert reasons() == {
        f"this version has no native {op} kernel for platform 'cuda'; on a CPU device: {served}"
        for op in ("quantize", "fp8_dot")
    }


OPS = {
    "fp8_dot": lambda x, **kw: jlb.fp8_dot(x, Q, act=None, **kw),
    "fp8_dot dx": lambda x, **kw: jax.grad(lambda x: jlb.fp8_dot(x, Q, act=None, **kw).astype(jnp.float32).sum())(x),
    "quantize": lambda x, **kw: jlb.quantize(x, jlb.FP8_1X128, **kw).data,
    "fake_quantize": lambda x, **kw: jlb.fake_quantize(x, jlb.NVFP4, **kw),
}
every_op = pytest.mark.parametrize("op", OPS)


@every_op
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_native_by_name_does_not_lower_for_other_platforms(op: str, platform: str) -> None:
    named = jax.jit(lambda x: OPS[op](x, implementation="native"))
    with pytest.raises(NotImplementedError, match=platform):
        jax.export.export(named, platforms=[platform], disabled_checks=jlb.export_checks())(X)
    here = jax.export.export(named, platforms=["cpu"], disabled_checks=jlb.export_checks())(X)
    assert "custom_call @jaxlowbit" in here.mlir_module()


@every_op
def test_unnamed_lowers_for_other_platforms_without_custom_calls(op: str) -> None:
    unnamed = jax.jit(OPS[op])
    assert "custom_call @jaxlowbit" not in jax.export.export(unnamed, platforms=["cuda"])(X).mlir_module()
    both = jax.export.export(unnamed, platforms=["cpu", "cuda"], disabled_checks=jlb.export_checks())(X)
    assert "custom_call @jaxlowbit" in both.mlir_module()


@pytest.fixture
def no_caches() -> Iterator[None]:
    """Decisions are cached with the traces that they were made in: a test that fakes what they rest on clears them."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@every_op
def test_the_cpu_of_a_host_with_another_default_takes_native(
    op: str, monkeypatch: pytest.MonkeyPatch, no_caches: None
) -> None:
    cpu = jax.devices("cpu")[0]
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    explanation = jlb.explain(OPS[op], X)
    assert {(d.platform, d.implementation) for d in explanation.decisions} == {("tpu", "xla")}
    assert "no native" in str(explanation)
    assert "on a CPU device: the CPU library serves it" in str(explanation)
    lowered = jax.jit(OPS[op]).trace(X).lower(lowering_platforms=("cpu",)).as_text()
    assert "custom_call @jaxlowbit" in lowered
    with pytest.raises(jlb.UnsupportedError, match=r"'tpu'.*\n.*jax.default_device"):
        jax.eval_shape(lambda x: OPS[op](x, implementation="native"), X)
    for device in (cpu, "cpu"):
        with jax.default_device(device):
            explanation = jlb.explain(lambda x: OPS[op](x, implementation="native"), X)
            assert {(d.platform, d.implementation) for d in explanation.decisions} == {("cpu", "native")}
    assert {d.platform for d in jlb.explain(OPS[op], X).decisions} == {"tpu"}


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
