"""Calls into the native kernels: the type of each attribute, the types of results, the tier switch."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxlowbit import _ffi

ROOT = Path(__file__).parent.parent

needs_cpu_library = pytest.mark.skipif(not _ffi.status().cpu.loaded, reason=_ffi.status().cpu.reason)


# ---- what both sides say


def test_enums_equal_the_header() -> None:
    text = (ROOT / "ffi/common/enums.h").read_text()
    header = {
        name: {key.upper(): int(value) for key, value in re.findall(r"k(\w+) = (\d+)", body)}
        for name, body in re.findall(r"enum class (\w+) : int32_t \{(.*?)\};", text, re.DOTALL)
    }
    python = {
        enum.__name__: {member.name: member.value for member in enum}
        for enum in (_ffi.Element, _ffi.ScaleKind, _ffi.Tier, _ffi.ScaleRounding)
    }
    assert header == python


# ---- what crosses in a call


def quantize_text(config: _ffi.QuantizeConfig) -> str:
    x = jax.ShapeDtypeStruct((1, 4, 8), jnp.float32)
    return jax.jit(lambda x: _ffi.quantize(x, None, None, None, config=config)).lower(x).as_text()


@pytest.mark.parametrize("integer", [int, np.int32, np.int64, np.uint8])
def test_attributes_have_one_type_whatever_came(integer: type) -> None:
    config = _ffi.QuantizeConfig(block_r=integer(2), block_c=integer(4), amax_ub=integer(3))
    text = quantize_text(config)
    assert "block_r = 2 : i32" in text
    assert "block_c = 4 : i32" in text
    assert "amax_ub = 3.000000e+00 : f32" in text
    assert "i64" not in re.search(r"config = \{(.*?)\}", text).group(1)


def test_attributes_keep_their_type_within_one_program() -> None:
    """JAX takes 2 and np.int32(2) for one value and would give both calls the type of the first."""

    def both(x: jax.Array) -> list[jax.Array]:
        first = _ffi.quantize(x, None, None, None, config=_ffi.QuantizeConfig(block_r=2, block_c=4))
        other = _ffi.QuantizeConfig(block_r=np.int32(2), block_c=np.int8(4))
        second = _ffi.quantize(x + 1, None, None, None, config=other)
        return [*first, *second]

    text = jax.jit(both).lower(jax.ShapeDtypeStruct((1, 4, 8), jnp.float32)).as_text()
    assert text.count("block_r = 2 : i32") == 2


def test_fields_of_the_configs() -> None:
    dot = _ffi.DotConfig(transposed=True).to_attrs()
    assert all(type(value) is np.int32 for value in dot.values())
    assert list(dot) == [
        "lhs_element", "lhs_scale_kind", "lhs_block_m", "lhs_block_k", "rhs_element", "rhs_scale_kind",
        "rhs_block_n", "rhs_block_k", "transposed", "tier",
    ]  # fmt: skip
    quantize = _ffi.QuantizeConfig().to_attrs()
    assert type(quantize.pop("amax_ub")) is np.float32
    assert all(type(value) is np.int32 for value in quantize.values())
    assert list(quantize) == [
        "element", "scale_kind", "block_r", "block_c", "scale_rounding", "stochastic", "given", "tier",
    ]  # fmt: skip


def test_a_float_is_no_integer_attribute() -> None:
    with pytest.raises(TypeError, match="float"):
        _ffi.QuantizeConfig(block_r=2.0).to_attrs()
    with pytest.raises(TypeError, match="float32"):
        _ffi.DotConfig(lhs_block_m=np.float32(2)).to_attrs()


def test_an_integer_that_does_not_fit_raises() -> None:
    with pytest.raises(OverflowError):
        _ffi.DotConfig(lhs_block_k=2**31).to_attrs()


@pytest.mark.parametrize(
    ("element", "kind", "codes", "scale"),
    [
        (_ffi.Element.E4M3, _ffi.ScaleKind.F32, (jnp.float8_e4m3fn, 10), jnp.float32),
        (_ffi.Element.E5M2, _ffi.ScaleKind.E8M0, (jnp.float8_e5m2, 10), jnp.uint8),
        (_ffi.Element.E2M1, _ffi.ScaleKind.E4M3, (jnp.uint8, 5), jnp.float8_e4m3fn),
    ],
)
def test_result_types_of_quantize(
    element: _ffi.Element, kind: _ffi.ScaleKind, codes: tuple[jnp.dtype, int], scale: jnp.dtype
) -> None:
    config = _ffi.QuantizeConfig(element=element, scale_kind=kind, block_r=2, block_c=4)
    out = jax.eval_shape(
        lambda x: _ffi.quantize(x, None, None, None, config=config), jax.ShapeDtypeStruct((3, 5, 10), jnp.bfloat16)
    )
    assert (out[0].dtype, out[0].shape) == (codes[0], (3, 5, codes[1]))
    assert (out[1].dtype, out[1].shape) == (scale, (3, 3, 3))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_result_types_of_dot(packed: bool, transposed: bool) -> None:
    element = _ffi.Element.E2M1 if packed else _ffi.Element.E4M3
    config = _ffi.DotConfig(rhs_element=element, transposed=transposed)
    lhs = jax.ShapeDtypeStruct((2, 3, 6 if transposed else 8), jnp.bfloat16)
    rhs = jax.ShapeDtypeStruct((2, 6, 4 if packed else 8), jnp.uint8 if packed else jnp.float8_e4m3fn)
    scale = jax.ShapeDtypeStruct((2, 6, 8), jnp.float32)

    def call(lhs: jax.Array, rhs: jax.Array, scale: jax.Array) -> jax.Array:
        return _ffi.dot(lhs, None, None, rhs, scale, None, None, config=config, out_dtype=jnp.float32)

    out = jax.eval_shape(call, lhs, rhs, scale)
    assert out.shape == (2, 3, 8 if transposed else 6)
    assert out.dtype == jnp.float32


def test_probe_lowers_for_cuda() -> None:
    x = jax.ShapeDtypeStruct((7,), jnp.float4_e2m1fn)
    lowered = jax.jit(_ffi.probe_fp4).trace(x).lower(lowering_platforms=("cuda",))
    assert f"custom_call @{_ffi.PROBE}" in lowered.as_text()
    assert "tensor<7xf4E2M1FN>) -> tensor<4xui8>" in lowered.as_text()


def test_results_vary_over_the_axes_of_every_operand() -> None:
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=kinds, devices=jax.devices("cpu")[:4])

    @jax.shard_map(mesh=mesh, in_specs=(P("a"), P(None, "b"), P()), out_specs=P())
    def inner(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
        struct = _ffi.out_struct((3, 4), jnp.bfloat16, x, y, z)
        assert struct.manual_axis_type.varying == {"a", "b"}
        assert _ffi.out_struct((3, 4), jnp.bfloat16, x).manual_axis_type.varying == {"a"}
        assert _ffi.out_struct((3, 4), jnp.bfloat16, z) == jax.ShapeDtypeStruct((3, 4), jnp.bfloat16)
        codes, scale = _ffi.quantize(x[None], None, None, None, config=_ffi.QuantizeConfig())
        assert jax.typeof(codes).manual_axis_type.varying == {"a"}
        assert jax.typeof(scale).manual_axis_type.varying == {"a"}
        return z

    jax.eval_shape(inner, jnp.ones((2, 2)), jnp.ones((2, 2)), jnp.ones((2, 2)))


# ---- the test switch


@needs_cpu_library
def test_force_tier_reaches_calls_traced_inside() -> None:
    call = jax.jit(lambda x: _ffi.quantize(x, None, None, None, config=_ffi.QuantizeConfig()))
    x = jax.ShapeDtypeStruct((1, 2, 4), jnp.float32)
    assert "tier = 0 : i32" in call.lower(x).as_text()
    with _ffi.force_tier(_ffi.Tier.PORTABLE):
        assert _ffi.current_tier() is _ffi.Tier.PORTABLE
        assert "tier = 1 : i32" in call.lower(x).as_text()  # the same function: its cached trace was dropped
        with _ffi.force_tier(_ffi.Tier.AUTO):
            assert _ffi.DotConfig().tier == _ffi.Tier.AUTO
        assert _ffi.DotConfig().tier == _ffi.Tier.PORTABLE
    assert "tier = 0 : i32" in call.lower(x).as_text()


def test_force_tier_refuses_what_the_machine_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ffi, "available_tiers", lambda: (_ffi.Tier.PORTABLE, _ffi.Tier.AVX2))
    message = "does not run tier 'amx'; it runs: portable, avx2"
    with pytest.raises(ValueError, match=message), _ffi.force_tier(_ffi.Tier.AMX):
        pass
    assert _ffi.current_tier() is _ffi.Tier.AUTO
