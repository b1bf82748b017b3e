"""What callers may pass, turned into checked ScaledArrays: every refusal happens here, at trace time."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from jaxlowbit import errors
from jaxlowbit.formats import (
    E8M0_SCALE,
    F32_SCALE,
    FP8_1X128,
    FP8_128X128,
    FP8_CHANNEL,
    FP8_TENSOR,
    MXFP4,
    MXFP8,
    NVFP4,
    Format,
    named,
)
from jaxlowbit.ops._activations import refuse_odd_k
from jaxlowbit.scaled_array import ScaledArray

Array = Any

FLOATS = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
_FLOAT_NAMES = "bfloat16, float16 or float32"
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_E5M2 = np.dtype(ml_dtypes.float8_e5m2)
_F4 = np.dtype(ml_dtypes.float4_e2m1fn)


def check_array(op: str, arg: str, value: Any, *, dtypes: tuple[np.dtype, ...] = FLOATS) -> Array:
    """A JAX array (or NumPy array) of one of the dtypes, at least 1-D."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        errors.bad_type(
            op,
            arg,
            expected=f"an array of {', '.join(str(d) for d in dtypes)}",
            got=repr(type(value).__name__),
            fix="Pass a jax.Array or a NumPy array.",
        )
    if np.dtype(value.dtype) not in dtypes:
        errors.bad_type(
            op,
            arg,
            expected=f"dtype {' or '.join(str(d) for d in dtypes)}",
            got=value,
            fix=f"Cast it, for example {arg}.astype(jnp.{dtypes[0]}).",
        )
    return jnp.asarray(value)


def check_x(op: str, x: Any, k: int) -> Array:
    x = check_array(op, "x", x)
    if x.ndim < 1 or x.shape[-1] != k:
        errors.bad_value(
            op,
            "x",
            expected=f"shape (..., {k}), since the weight contracts K={k}",
            got=x,
            fix="Weights are (N, K) = (out_features, in_features): transpose the weight if it is stored (K, N).",
        )
    return x


def check_out_dtype(op: str, preferred: Any, default: Any) -> str:
    try:
        dtype = np.dtype(default if preferred is None else preferred)
    except (TypeError, ValueError):  # NumPy knows no such dtype, and says so without naming the argument
        dtype = None
    if dtype not in FLOATS:
        errors.bad_type(
            op,
            "preferred_element_type",
            expected=_FLOAT_NAMES,
            got=repr(preferred) if dtype is None else str(dtype),
            fix="Quantize the result afterwards with jaxlowbit.quantize if low-bit output is wanted.",
        )
    return str(dtype.name)


def check_bias(op: str, bias: Any, n: int) -> Array | None:
    if bias is None:
        return None
    bias = check_array(op, "bias", bias)
    if bias.shape != (n,):
        errors.bad_value(
            op, "bias", expected=f"shape ({n},), one per output feature", got=bias, fix="Reshape the bias."
        )
    return bias


def _refuse_e5m2(op: str, arg: str, value: Any) -> None:
    if np.dtype(value.dtype) == _E5M2:
        errors.bad_type(
            op,
            arg,
            expected="float8_e4m3fn codes",
            got=value,
            fix="E5M2 has codecs and quantize, but no dot: its 2-bit mantissa is for gradients in transit. "
            "Quantize to an E4M3 format.",
        )


def fp8_weight(op: str, w: Any, s: Any, block_shape: Any) -> ScaledArray:
    """``(w, s)`` of ``fp8_dot`` as a validated ScaledArray; a ScaledArray carries its own format."""
    if isinstance(w, ScaledArray):
        _no_extra(op, w, s=s, block_shape=block_shape)
        return check_weight(op, w, packed=False)
    if not (hasattr(w, "shape") and hasattr(w, "dtype")) or np.dtype(w.dtype) != _E4M3:
        if hasattr(w, "dtype"):
            _refuse_e5m2(op, "w", w)
        errors.bad_type(
            op,
            "w",
            expected="a float8_e4m3fn array (N, K) or a ScaledArray",
            got=w,
            fix="Bit-cast uint8 codes with w.view(jnp.float8_e4m3fn), or quantize a float weight first: "
            "jaxlowbit.quantize(w, jaxlowbit.FP8_128X128).",
        )
    w = jnp.asarray(w)
    _matrix(op, w)
    if s is None:
        errors.bad_value(
            op,
            "s",
            expected="the dequantization scales of w",
            got="None",
            fix="Pass the checkpoint's scales (multipliers); for unscaled codes pass s=1.0 as a float32 array.",
        )
    s = _scale_array(op, s)
    fmt = _match_fp8(op, w.shape, s, block_shape)
    grid = fmt.grid(*w.shape)
    # An empty weight has an empty grid, however its scales were spelled.
    s = s.reshape(grid) if 0 not in w.shape else jnp.zeros(grid, s.dtype)
    return ScaledArray(w, s, None, format=fmt).validate(op, "w")


def _matrix(op: str, w: Array) -> None:
    if w.ndim != 2:
        errors.bad_value(
            op,
            "w",
            expected="two dimensions (N, K)",
            got=w,
            fix="For stacked weights use jax.vmap or lax.scan over the leading dimension.",
        )


def _scale_array(op: str, s: Any) -> Array:
    if isinstance(s, (int, float)) and not isinstance(s, bool):
        s = jnp.float32(s)
    accepted = (*F32_SCALE.accepts, *E8M0_SCALE.accepts, _E4M3)
    if not hasattr(s, "dtype") or np.dtype(s.dtype) not in accepted:
        errors.bad_type(
            op,
            "s",
            expected="float32 (bfloat16, float16), uint8 or float8_e8m0fnu (E8M0), or float8_e4m3fn scales",
            got=s,
            fix="Scales are multipliers: value = code * scale. Convert them to one of these dtypes.",
        )
    return jnp.asarray(s)


def _match_fp8(
    op: str, shape: tuple[int, ...], s: Array, block_shape: Any
) -> Format:
    n, k = shape
    if np.dtype(s.dtype) == _E4M3:
        errors.bad_type(
            op,
            "s",
            expected="float32 or E8M0 scales for FP8 weights",
            got=s,
            fix="E4M3 scales belong to NVFP4 weights: use fp4_dot, or convert them to float32.",
        )
    scale_type = E8M0_SCALE if np.dtype(s.dtype) in E8M0_SCALE.accepts else F32_SCALE
    if block_shape is not None:
        candidates = [_explicit(op, block_shape)]
    else:
        candidates = [FP8_TENSOR, FP8_CHANNEL, FP8_128X128]
    accepted: list[str] = []
    found: Format | None = None
    for fmt in candidates:
        shapes: list[tuple[int, ...]] = [fmt.grid(n, k)]
        if block_shape is None and fmt is FP8_TENSOR:
            shapes = [(), (1,), (1, 1)]
        elif block_shape is None and fmt is FP8_CHANNEL:
            shapes = [(n,), (n, 1)]
        accepted += [f"{g} ({fmt.name})" for g in shapes]
        if found is None and tuple(s.shape) in shapes:
            found = _with_scale(fmt, scale_type)
    if found is None:
        errors.bad_value(
            op,
            "s",
            expected=f"for w of shape ({n}, {k}) one of the shapes " + ", ".join(accepted),
            got=s,
            fix="For another scale grid pass block_shape=(rows, k); the block is never guessed from shapes.",
        )
    return found


def _explicit(op: str, block_shape: Any) -> Format:
    ok = isinstance(block_shape, (tuple, list)) and len(block_shape) == 2
    if not ok or not all(isinstance(b, int) and b > 0 for b in block_shape):
        errors.bad_value(
            op,
            "block_shape",
            expected="two positive ints (rows, k)",
            got=repr(block_shape),
            fix="For example block_shape=(128, 128) or (1, 32).",
        )
    rows, k = block_shape
    known = {f.block: f for f in (FP8_1X128, FP8_128X128)}
    return known.get((rows, k)) or FP8_128X128.with_block(rows, k)


def _with_scale(fmt: Format, scale_type: Any) -> Format:
    if fmt.scale == scale_type:
        return fmt
    if fmt.block == MXFP8.block:
        return MXFP8
    return dataclasses.replace(
        fmt, name=f"{fmt.name}:{scale_type.name}", scale=scale_type, scale_rounding="rceil"
    )


def _no_extra(op: str, q: ScaledArray, **extra: Any) -> None:
    given = [name for name, value in extra.items() if value is not None]
    if given:
        errors.bad_value(
            op,
            given[0],
            expected=f"nothing, since w is a {q.format.name} ScaledArray and carries its own scales and format",
            got=f"{given[0]}={extra[given[0]]!r}",
            fix="Pass either a ScaledArray or raw codes with scales.",
        )


def check_weight(op: str, q: ScaledArray, *, packed: bool | None, arg: str = "w") -> ScaledArray:
    """A validated 2-D weight of an element type that the op takes."""
    if q.format.element.name == "e5m2":
        _refuse_e5m2(op, arg, q.data)
    if packed is not None and q.format.element.packed != packed:
        other = "fp4_dot" if q.format.element.packed else "fp8_dot"
        errors.bad_type(
            op,
            arg,
            expected=f"an {'FP4' if packed else 'FP8'} ScaledArray",
            got=f"{q!r}",
            fix=f"Use jaxlowbit.{other}, or scaled_dot for any combination.",
        )
    if q.ndim != 2:
        errors.bad_value(
            op,
            arg,
            expected="two dimensions (N, K)",
            got=f"{q!r}",
            fix="For stacked weights use jax.vmap or lax.scan over the leading dimension.",
        )
    return q.validate(op, arg)


def fp4_weight(op: str, w: Any, s: Any, global_scale: Any, format: Any) -> ScaledArray:
    """``(w, s, global_scale)`` of ``fp4_dot`` as a validated ScaledArray."""
    if isinstance(w, ScaledArray):
        _no_extra(op, w, s=s, global_scale=global_scale, format=format)
        return check_weight(op, w, packed=True)
    if not (hasattr(w, "shape") and hasattr(w, "dtype")) or np.dtype(w.dtype) not in (np.dtype(np.uint8), _F4):
        errors.bad_type(
            op,
            "w",
            expected="packed uint8 (N, K/2), float4_e2m1fn (N, K) or a ScaledArray",
            got=w,
            fix="Pack codes with jaxlowbit.pack_e2m1 (low nibble = even K), or quantize with jaxlowbit.MXFP4 or NVFP4.",
        )
    w = jnp.asarray(w)
    _matrix(op, w)
    if np.dtype(w.dtype) == _F4:
        w = _pack_float4(op, w)
    if s is None:
        errors.bad_value(
            op,
            "s",
            expected="the block scales of w",
            got="None",
            fix="Pass E8M0 scales (N, K/32) for MXFP4 or float8_e4m3fn scales (N, K/16) for NVFP4.",
        )
    s = _scale_array(op, s)
    fmt = _match_fp4(op, w.shape[0], w.shape[1] * 2, s, format)
    outer = _global_scale(op, fmt, global_scale)
    return ScaledArray(w, s, outer, format=fmt).validate(op, "w")


def _pack_float4(op: str, w: Array) -> Array:
    if w.shape[1] % 2:
        errors.bad_value(
            op,
            "w",
            expected="an even K, since two codes share a byte",
            got=w,
            fix="Pad K with zeros, or quantize with pad=True, which records the logical K.",
        )
    return lax.bitcast_convert_type(w.reshape(w.shape[0], -1, 2), jnp.uint8)


def _match_fp4(op: str, n: int, k: int, s: Array, format: Any) -> Format:
    if format is not None:
        fmt = named(format)
        if not fmt.element.packed:
            errors.bad_value(
                op, "format", expected="an FP4 format", got=fmt.name, fix="Use fp8_dot for FP8 weights."
            )
        return fmt
    matching = [f for f in (MXFP4, NVFP4) if s.dtype in f.scale.accepts and tuple(s.shape) == f.grid(n, k)]
    if not matching:
        errors.bad_value(
            op,
            "s",
            expected=f"for w of logical shape ({n}, {k}) E8M0 scales {MXFP4.grid(n, k)} (MXFP4) or float8_e4m3fn "
            f"scales {NVFP4.grid(n, k)} (NVFP4)",
            got=s,
            fix="For other scales name the format: format=jaxlowbit.MXFP4.with_block(rows, k).",
        )
    return matching[0]


def _global_scale(op: str, fmt: Format, global_scale: Any) -> Array | None:
    if global_scale is None:
        if fmt.two_level:
            errors.bad_value(
                op,
                "global_scale",
                expected=f"the float32 outer scale of {fmt.name} (a multiplier: ModelOpt's weight_scale_2, or one over "
                "compressed-tensors' weight_global_scale)",
                got="None",
                fix="Pass global_scale=1.0 if the block scales are complete by themselves.",
            )
        return None
    if not fmt.two_level:
        errors.bad_value(
            op,
            "global_scale",
            expected=f"None, since {fmt.name} has one level of scales",
            got=global_scale,
            fix="Fold it into the activations or use NVFP4 scales.",
        )
    outer = jnp.asarray(global_scale, jnp.float32)
    if outer.size != 1:
        errors.bad_value(
            op,
            "global_scale",
            expected="one number",
            got=outer,
            fix="For fused weights with one outer scale per segment pass a ScaledArray with row_splits.",
        )
    return outer.reshape(())


def check_lhs(op: str, q: ScaledArray, k: int) -> None:
    """A validated quantized left operand that contracts K values."""
    _refuse_e5m2(op, "lhs", q.data)
    q.validate(op, "lhs")
    if q.k != k:
        errors.bad_value(
            op,
            "lhs",
            expected=f"shape (..., {k}), since rhs contracts K={k}",
            got=f"{q!r}",
            fix="Right operands are (N, K): transpose it (mT) before quantizing if it is stored (K, N).",
        )
    if q.row_splits:
        errors.bad_value(
            op, "lhs", expected="no row_splits", got=f"{q!r}", fix="Row segments belong to fused weights (rhs)."
        )
    if q.last_dim is not None and q.last_dim % q.format.element.per_byte:
        refuse_odd_k(op, "lhs", q.last_dim)
