"""Every refusal of the dots: at trace time, naming the op, the argument, what was expected and what to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxlowbit as jlb

N, K = 24, 64
W = jlb.quantize(jnp.ones((N, K)), jlb.FP8_CHANNEL)
F4 = jlb.quantize(jnp.ones((N, K)), jlb.NVFP4)
MX = jlb.quantize(jnp.ones((N, K)), jlb.MXFP4)
X = jnp.ones((2, K))
E5 = jlb.quantize(jnp.ones((N, K)), jlb.FP8_1X128.with_element("e5m2"))
NEGATIVE = jnp.full((1,), -2.0, jnp.bfloat16)  # outside the refusal's trace: known


def fp8(**kw: Any) -> Any:
    args = {"x": X, "w": W.data, "s": W.scale} | kw
    return jlb.fp8_dot(args.pop("x"), args.pop("w"), args.pop("s"), **args)


def fp4(**kw: Any) -> Any:
    args = {"x": X, "w": F4.data, "s": F4.scale, "global_scale": F4.global_scale} | kw
    return jlb.fp4_dot(args.pop("x"), args.pop("w"), args.pop("s"), **args)


CASES: dict[str, tuple[Any, type[Exception], str]] = {
    "x not an array": (lambda: fp8(x=[1.0]), TypeError, r"fp8_dot: x: .*jax.Array"),
    "x integer": (lambda: fp8(x=jnp.ones((2, K), jnp.int32)), TypeError, r"x: expected dtype float32"),
    "x wrong K": (lambda: fp8(x=jnp.ones((2, 32))), ValueError, r"x: .*64.*got float32\[2,32\].*transpose"),
    "x scalar": (lambda: fp8(x=jnp.float32(1)), ValueError, r"x: "),
    "w bfloat16": (lambda: fp8(w=jnp.ones((N, K), jnp.bfloat16)), TypeError, r"w: .*float8_e4m3fn.*quantize"),
    "w uint8": (lambda: fp8(w=jnp.ones((N, K), jnp.uint8)), TypeError, r"w: .*Bit-cast"),
    "w not an array": (lambda: fp8(w="w"), TypeError, r"w: "),
    "w e5m2": (lambda: fp8(w=E5.data), TypeError, r"w: .*E5M2 has codecs"),
    "w ScaledArray e5m2": (lambda: jlb.fp8_dot(X, E5), TypeError, r"E5M2 has codecs"),
    "w 3-D": (lambda: fp8(w=W.data[None]), ValueError, r"w: .*vmap"),
    "w ScaledArray 3-D": (
        lambda: jlb.fp8_dot(X, jax.tree.map(lambda a: a[None], W)),
        ValueError,
        r"w: .*vmap",
    ),
    "s missing": (lambda: fp8(s=None), ValueError, r"s: .*None.*multipliers"),
    "s int32": (lambda: fp8(s=jnp.ones((N,), jnp.int32)), TypeError, r"s: .*multipliers"),
    "s bool": (lambda: fp8(s=True), TypeError, r"fp8_dot: s: .*got True.*multipliers"),
    "s e4m3": (lambda: fp8(s=jnp.ones((N, 4), jnp.float8_e4m3fn)), TypeError, r"s: .*NVFP4"),
    "s wrong shape": (lambda: fp8(s=jnp.ones((5,))), ValueError, r"s: .*\(24,\).*\(1, 1\).*block_shape"),
    "s needs block_shape": (lambda: fp8(s=jnp.ones((N, 2))), ValueError, r"block_shape"),
    "s not the explicit grid": (
        lambda: fp8(s=jnp.ones((3, 3)), block_shape=(8, 32)),
        ValueError,
        r"s: .*\(3, 2\)",
    ),
    "block_shape zero": (lambda: fp8(block_shape=(0, 1)), ValueError, r"block_shape: .*positive"),
    "block_shape not a pair": (lambda: fp8(block_shape=128), ValueError, r"block_shape"),
    "ScaledArray with s": (lambda: jlb.fp8_dot(X, W, W.scale), ValueError, r"s: .*carries its own"),
    "ScaledArray with block": (lambda: jlb.fp8_dot(X, W, block_shape=(1, 1)), ValueError, r"block_shape"),
    "FP4 into fp8_dot": (lambda: jlb.fp8_dot(X, F4), TypeError, r"fp4_dot"),
    "FP8 into fp4_dot": (lambda: jlb.fp4_dot(X, W), TypeError, r"fp8_dot"),
    "bias shape": (lambda: fp8(bias=jnp.ones((1, N))), ValueError, r"bias: .*\(24,\)"),
    "bias dtype": (lambda: fp8(bias=jnp.ones((N,), jnp.int32)), TypeError, r"bias"),
    "output int32": (lambda: fp8(preferred_element_type=jnp.int32), TypeError, r"preferred_element_type"),
    "output e4m3": (
        lambda: fp8(preferred_element_type=jnp.float8_e4m3fn),
        TypeError,
        r"preferred_element_type: .*quantize",
    ),
    "output unknown": (
        lambda: fp8(preferred_element_type="foo"),
        TypeError,
        r"fp8_dot: preferred_element_type: expected bfloat16.*got 'foo'.*quantize",
    ),
    "implementation": (lambda: fp8(implementation="cuda"), ValueError, r"implementation: .*native"),
    "act_scale without act": (lambda: fp8(act=None, act_scale=jnp.float32(1)), ValueError, r"act_scale"),
    "act_scale vector": (lambda: fp8(act_scale=jnp.ones((2,))), ValueError, r"act_scale: .*one"),
    "act_scale integer": (lambda: fp8(act_scale=jnp.int32(1)), ValueError, r"act_scale"),
    "act_scale with a block format": (
        lambda: fp8(act=jlb.FP8_1X128, act_scale=jnp.float32(1)),
        ValueError,
        r"act_scale: .*FP8_1X128",
    ),
    "act_scale negative": (lambda: fp8(act_scale=-0.5), ValueError, r"fp8_dot: act_scale: .*got -0.5.*magnitude"),
    "act_scale negative array": (
        lambda: fp4(act=jlb.NVFP4, act_scale=NEGATIVE),
        ValueError,
        r"fp4_dot: act_scale: .*not negative; got -2.0",
    ),
    "act_scale with amax_ub": (
        lambda: fp8(act=jlb.Act(jlb.FP8_TENSOR, amax_ub=1.0), act_scale=1.0),
        ValueError,
        r"fp8_dot: act_scale: .*used as it is; got scale_rounding=None, amax_ub=1.0.*drop act_scale",
    ),
    "act_scale with scale_rounding": (
        lambda: fp4(act=jlb.Act(jlb.FP8_TENSOR, scale_rounding="pow2"), act_scale=1.0),
        ValueError,
        r"fp4_dot: act_scale: .*got scale_rounding='pow2', amax_ub=None.*act=FP8_TENSOR",
    ),
    "act scale_rounding of another scale": (
        lambda: fp8(act=jlb.Act(jlb.FP8_1X128, scale_rounding="rceil")),
        ValueError,
        r"fp8_dot: act: .*\['none', 'pow2'\].*FP8_1X128.*got scale_rounding='rceil'",
    ),
    "act scale_rounding beside act_scale": (
        lambda: fp4(act=jlb.Act(jlb.NVFP4, scale_rounding="pow2"), act_scale=1.0),
        ValueError,
        r"fp4_dot: act: .*\['none'\].*NVFP4",
    ),
    "act unknown": (lambda: fp8(act="static"), ValueError, r"act: .*dynamic"),
    "act 128x128": (lambda: fp8(act=jlb.FP8_128X128), ValueError, r"act: .*one row"),
    "act e5m2": (lambda: fp8(act=jlb.FP8_1X128.with_element("e5m2")), ValueError, r"act"),
    "act dynamic for NVFP4": (lambda: fp4(act="dynamic"), ValueError, r"act: .*weight-only"),
    "act FP4 odd K": (
        lambda: jlb.fp8_dot(jnp.ones((2, 33)), jlb.quantize(jnp.ones((4, 33)), jlb.FP8_CHANNEL), act=jlb.MXFP4),
        ValueError,
        r"even K",
    ),
    "amax_ub": (lambda: jlb.Act(jlb.FP8_1X128, amax_ub=0.0), ValueError, r"amax_ub"),
    "fp4 w dtype": (lambda: fp4(w=jnp.ones((N, K // 2), jnp.int8)), TypeError, r"fp4_dot: w: .*pack_e2m1"),
    "fp4 w not an array": (lambda: fp4(w=1), TypeError, r"w: "),
    "fp4 w 1-D": (lambda: fp4(w=F4.data[0]), ValueError, r"w: "),
    "float4 odd K": (
        lambda: fp4(w=jnp.zeros((N, 63), jnp.float4_e2m1fn)),
        ValueError,
        r"w: .*even K",
    ),
    "fp4 s missing": (lambda: fp4(s=None), ValueError, r"s: .*E8M0"),
    "fp4 s shape": (lambda: fp4(s=F4.scale[:, :2]), ValueError, r"s: .*\(24, 4\).*format="),
    "fp4 format is FP8": (lambda: fp4(format=jlb.MXFP8), ValueError, r"format"),
    "fp4 format unknown": (lambda: fp4(format="NF4"), ValueError, r"format: .*NVFP4"),
    "NVFP4 without global": (lambda: fp4(global_scale=None), ValueError, r"global_scale: .*weight_scale_2"),
    "MXFP4 with global": (
        lambda: jlb.fp4_dot(X, MX.data, MX.scale, global_scale=1.0),
        ValueError,
        r"global_scale: .*one level",
    ),
    "global per row": (lambda: fp4(global_scale=jnp.ones((N,))), ValueError, r"global_scale: .*row_splits"),
    "scaled_dot of arrays": (lambda: jlb.scaled_dot(X, W), TypeError, r"scaled_dot: lhs: .*quantize"),
    "scaled_dot rhs array": (lambda: jlb.scaled_dot(W, X), TypeError, r"scaled_dot: rhs"),
    "scaled_dot K": (
        lambda: jlb.scaled_dot(jlb.quantize(jnp.ones((2, 32)), jlb.FP8_1X128), W),
        ValueError,
        r"lhs: .*64",
    ),
    "scaled_dot e5m2": (lambda: jlb.scaled_dot(E5, W), TypeError, r"E5M2"),
    "scaled_dot lhs row_splits": (
        lambda: jlb.scaled_dot(dataclasses.replace(W, row_splits=(8,)), W),
        ValueError,
        r"row_splits",
    ),
    "scaled_dot odd FP4 lhs": (
        lambda: jlb.scaled_dot(
            jlb.quantize(jnp.ones((2, 33)), jlb.MXFP4, pad=True), jlb.quantize(jnp.ones((4, 33)), jlb.FP8_CHANNEL)
        ),
        ValueError,
        r"even K",
    ),
    "scales of another grid": (
        lambda: jlb.fp8_dot(X, dataclasses.replace(W, scale=W.scale[:3])),
        ValueError,
        r"w.scale: expected shape \(24, 1\)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refusal(name: str) -> None:
    call, kind, pattern = CASES[name]
    with pytest.raises(kind, match=pattern):
        jax.eval_shape(call)


def test_python_float_scale_and_numpy_operands() -> None:
    w = np.ones((N, K), ml_dtypes.float8_e4m3fn)
    y = jlb.fp8_dot(np.ones((2, K), np.float32), w, 0.5)
    np.testing.assert_array_equal(y, np.full((2, N), K * 0.5, np.float32))


def test_e8m0_block_scales() -> None:
    w = jnp.ones((N, K), jnp.float8_e4m3fn)
    byte = jnp.full((1, 1), 128, jnp.uint8)  # 2.0, per tensor
    np.testing.assert_array_equal(jlb.fp8_dot(X, w, byte), np.full((2, N), 2 * K, np.float32))
    wide = jnp.ones((200, 200), jnp.float8_e4m3fn)
    grid = jnp.asarray([[127, 128], [129, 130]], jnp.uint8)
    y = jlb.fp8_dot(jnp.ones((1, 200)), wide, grid, act=None)
    np.testing.assert_array_equal(y[0, [0, 199]], [128 + 2 * 72, 4 * 128 + 8 * 72])
