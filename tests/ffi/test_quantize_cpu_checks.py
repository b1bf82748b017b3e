"""What the CPU quantizer's handler refuses. Python checks before it; these messages are for programs from elsewhere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlowbit import _ffi

pytestmark = pytest.mark.skipif(not _ffi.available_tiers(), reason="the CPU library is not loaded")


def call(x: Any, given_scale: Any, outer: Any, rng: Any, codes: Any, scale: Any, **changes: Any) -> None:
    base = {
        "element": 1,
        "scale_kind": 1,
        "block_r": 1,
        "block_c": 4,
        "scale_rounding": 0,
        "stochastic": 0,
        "given": 0,
        "tier": 0,
    }
    attributes: dict[str, Any] = {
        name: np.int32(value) for name, value in {**base, **changes}.items() if name != "amax_ub"
    }
    attributes["amax_ub"] = np.float32(changes.get("amax_ub", np.inf))
    results = tuple(jax.ShapeDtypeStruct(*spec) for spec in (codes, scale))
    operands = [jnp.zeros(*spec) for spec in (x, given_scale, outer, rng)]
    jax.block_until_ready(jax.ffi.ffi_call(_ffi.QUANTIZE, results)(*operands, config=attributes))


GOOD: dict[str, Any] = {
    "x": ((2, 3, 8), jnp.float32),
    "given_scale": ((0, 0, 0), jnp.float32),
    "outer": ((2, 0), jnp.float32),
    "rng": ((0,), jnp.uint32),
    "codes": ((2, 3, 8), jnp.float8_e4m3fn),
    "scale": ((2, 3, 2), jnp.float32),
}
E4M3_SCALE = {"scale_kind": 3, "scale": ((2, 3, 2), jnp.float8_e4m3fn)}


def test_the_base_of_the_refusals_is_accepted() -> None:
    call(**GOOD)
    call(**{**GOOD, **E4M3_SCALE, "outer": ((2, 1), jnp.float32)})
    call(**{**GOOD, "scale_kind": 2, "scale_rounding": 1, "scale": ((2, 3, 2), jnp.float8_e8m0fnu)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"element": 0}, "config.element: expected 1 e4m3, 2 e5m2 or 3 e2m1, got 0"),
        ({"element": 4}, "config.element"),
        ({"scale_kind": 0}, "config.scale_kind: expected 1 f32, 2 e8m0 or 3 e4m3, got 0"),
        ({"scale_kind": 4}, "config.scale_kind"),
        ({"block_r": 0}, "config.block_r: expected at least 1, got 0"),
        ({"block_c": -1}, "config.block_c: expected at least 1, got -1"),
        ({"stochastic": 2}, "config.stochastic: expected 0 or 1, got 2"),
        ({"given": 2}, "config.given: expected 0 or 1, got 2"),
        ({"amax_ub": 0.0}, "config.amax_ub: expected above 0"),
        ({"amax_ub": np.nan}, "config.amax_ub: expected above 0"),
        ({"scale_rounding": 1}, "config.scale_rounding: expected 0 none or 5 pow2 for f32 scales, got 1"),
        (
            {"scale_kind": 2},
            "config.scale_rounding: expected 1 rceil, 2 floor, 3 ceil or 4 even for e8m0 scales, got 0",
        ),
        ({"scale_kind": 2, "scale_rounding": 5}, "config.scale_rounding"),
        ({"scale_kind": 3, "scale_rounding": 1}, "config.scale_rounding: expected 0 none for e4m3 scales, got 1"),
        ({"tier": 5}, "config.tier: expected 0 auto, 1 portable, 2 avx2, 3 avx512 or 4 amx, and at most"),
        ({"tier": -1}, "config.tier"),
        ({"x": ((3, 8), jnp.float32)}, "x: expected rank 3, got float32 (3, 8)"),
        ({"x": ((2, 3, 8), jnp.int32)}, "x: expected bfloat16 or float16 or float32, got int32"),
        ({"codes": ((2, 3, 8), jnp.float8_e5m2)}, "codes: expected float8_e4m3fn, got float8_e5m2"),
        ({"element": 2}, "codes: expected float8_e5m2, got float8_e4m3fn"),
        ({"codes": ((2, 3, 9), jnp.float8_e4m3fn)}, "codes: expected shape (2, 3, 8)"),
        ({"element": 3}, "codes: expected uint8, got float8_e4m3fn"),
        ({"element": 3, "codes": ((2, 3, 8), jnp.uint8)}, "codes: expected shape (2, 3, 4)"),
        (
            {"element": 3, "x": ((2, 3, 7), jnp.float32), "codes": ((2, 3, 3), jnp.uint8)},
            "x: expected an even last dimension for packed e2m1 codes, got float32 (2, 3, 7)",
        ),
        ({"scale": ((2, 3, 2), jnp.uint8)}, "scale: expected float32, got uint8"),
        ({"scale_kind": 2, "scale_rounding": 1}, "scale: expected uint8 or float8_e8m0fnu, got float32"),
        ({"scale_kind": 3}, "scale: expected float8_e4m3fn, got float32"),
        ({"scale": ((2, 3, 3), jnp.float32)}, "scale: expected shape (2, 3, 2)"),
        ({"given": 1, "scale_rounding": 9}, "given_scale: expected shape (2, 3, 2), got float32 (0, 0, 0)"),
        ({"given_scale": ((2, 3, 2), jnp.float32)}, "given_scale (scales are computed): expected shape (0, 0, 0)"),
        ({"outer": ((2,), jnp.float32)}, "global_scale: expected rank 2"),
        ({"outer": ((2, 0), jnp.bfloat16)}, "global_scale: expected float32, got bfloat16"),
        ({"outer": ((2, 1), jnp.float32)}, "global_scale: expected none: only e4m3 scales have a second level"),
        ({**E4M3_SCALE, "outer": ((2, 3), jnp.float32)}, "global_scale: expected shape (2, 1)"),
        ({"rng": ((0,), jnp.int32)}, "rng: expected uint32, got int32"),
        ({"stochastic": 1}, "rng: expected shape (4), got uint32 (0)"),
        ({"rng": ((4,), jnp.uint32)}, "rng: expected shape (0), got uint32 (4)"),
    ],
    ids=str,
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        call(**{**GOOD, **changes})
    assert "jaxlowbit.quantize: " + message in str(caught.value)
