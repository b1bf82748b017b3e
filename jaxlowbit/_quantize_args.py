"""The checks of quantize's arguments, and their translation into what the implementations take."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxlowbit import codecs, errors
from jaxlowbit._quantize_xla import QuantizeSpec
from jaxlowbit._stochastic import offset_words
from jaxlowbit.formats import Format, ScaleRounding

Array: TypeAlias = Any

# Scale roundings that each stored type of scale has; the first one is taken when a format names none of them.
SCALE_ROUNDINGS: dict[str, tuple[ScaleRounding, ...]] = {
    "f32": ("none", "pow2"),
    "e8m0": ("rceil", "floor", "ceil", "even"),
    "e4m3": ("none",),
}


def checked_values(x: Array, axis: int) -> Array:
    """X as a JAX array, floating-point, at most 32 bits wide, with ``axis`` last."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        errors.bad_type("quantize", "x", expected="a floating-point array", got=x, fix="Convert it to float32.")
    if x.ndim == 0 or not -x.ndim <= axis < x.ndim:
        errors.bad_value(
            "quantize",
            "axis",
            expected="one of the dimensions of x",
            got=f"axis={axis} for {errors.describe(x)}",
            fix="x needs at least one dimension, the one along which values share a scale.",
        )
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        x = x.astype(jnp.float32)
    return jnp.moveaxis(x, axis, -1)


def quantize_spec(
    fmt: Format,
    scale_rounding: ScaleRounding | None,
    rounding: str,
    key: Array | None,
    amax_ub: float | None,
    *,
    computed: bool,
) -> QuantizeSpec:
    """The static side of a call, from its keywords."""
    known = SCALE_ROUNDINGS[fmt.scale.name]
    if scale_rounding is not None and scale_rounding not in known:
        errors.bad_value(
            "quantize",
            "scale_rounding",
            expected=f"one of {list(known)} for the {fmt.scale.name} scales of {fmt.name}",
            got=repr(scale_rounding),
            fix="Leave it None for the format's own.",
        )
    if not computed and (scale_rounding is not None or amax_ub is not None):
        errors.bad_value(
            "quantize",
            "scale",
            expected="no scale_rounding and no amax_ub beside a given scale",
            got=f"scale_rounding={scale_rounding!r}, amax_ub={amax_ub!r}",
            fix="A given scale is used as it is: drop them, or let the scale be computed.",
        )
    if amax_ub is not None and not np.float32(amax_ub) >= np.float32(2.0**-126):
        errors.bad_value(
            "quantize", "amax_ub", expected="a positive float32 number", got=repr(amax_ub), fix="None for no bound."
        )
    if rounding not in ("nearest", "stochastic") or (rounding == "stochastic") != (key is not None):
        errors.bad_value(
            "quantize",
            "rounding",
            expected="'nearest' without a key or 'stochastic' with one",
            got=f"rounding={rounding!r}, key={'none' if key is None else errors.describe(key)}",
            fix="Stochastic rounding draws its bits from (key, element index).",
        )
    default = fmt.scale_rounding if fmt.scale_rounding in known else known[0]
    bound = math.inf if amax_ub is None else float(np.float32(amax_ub))
    return QuantizeSpec(fmt, scale_rounding or default, bound, rounding == "stochastic")


def _given_scale(fmt: Format, scale: Array, grid: tuple[int, ...]) -> Array:
    """A caller's scale in the storage dtype and, from one value for all blocks, in the grid's shape."""
    if isinstance(scale, (int, float)) and not isinstance(scale, bool) and fmt.scale.name == "f32":
        scale = np.float32(scale)
    scale = jnp.asarray(scale)
    if np.dtype(scale.dtype) not in fmt.scale.accepts:
        errors.bad_type(
            "quantize",
            "scale",
            expected=f"a dtype of {[str(d) for d in fmt.scale.accepts]} for {fmt.name}",
            got=scale,
            fix="encode_e8m0 turns powers of two into E8M0 bytes." if fmt.scale.name == "e8m0" else "Convert it.",
        )
    if scale.dtype == jnp.float8_e8m0fnu:
        scale = lax.bitcast_convert_type(scale, jnp.uint8)
    scale = scale.astype(fmt.scale.storage)
    if scale.size == 1 and scale.shape != grid:
        return jnp.broadcast_to(scale.reshape((1,) * len(grid)), grid)
    if scale.shape != grid:
        errors.bad_value(
            "quantize",
            "scale",
            expected=f"one value or shape {grid} for {fmt.name}",
            got=scale,
            fix="The block comes from the format: pass a Format whose block fits (format.with_block).",
        )
    return scale


def _given_global(fmt: Format, outer: Array, batch: tuple[int, ...]) -> Array:
    if not fmt.two_level:
        errors.bad_value(
            "quantize",
            "global_scale",
            expected=f"none: {fmt.name} has one level of scales",
            got=outer,
            fix="Multiply it into scale, or name a two-level format.",
        )
    outer = jnp.asarray(outer)
    if not jnp.issubdtype(outer.dtype, jnp.floating):
        errors.bad_type("quantize", "global_scale", expected="float32", got=outer, fix="Convert it to float32.")
    outer = outer.astype(jnp.float32)
    if outer.size == 1 and outer.shape != batch:
        return jnp.broadcast_to(outer.reshape((1,) * len(batch)), batch)
    if outer.shape != batch:
        errors.bad_value(
            "quantize",
            "global_scale",
            expected=f"one value or shape {batch}, one per matrix",
            got=outer,
            fix="Give each matrix of the batch its own, or one for all.",
        )
    return outer


def checked_operands(
    spec: QuantizeSpec, x: Array, scale: Array | None, outer: Array | None, key: Array | None, offset: int | Array
) -> tuple[Array | None, Array | None, Array | None]:
    """Given scale, global scale and random words as the implementations take them, for x ``(..., K)``."""
    fmt = spec.format
    rows = x.shape[-2] if x.ndim > 1 else 1
    grid = (*x.shape[:-2], *fmt.grid(rows, x.shape[-1])) if x.ndim > 1 else fmt.grid(1, x.shape[-1])[1:]
    if scale is not None:
        scale = _given_scale(fmt, scale, grid)
    if outer is not None:
        outer = _given_global(fmt, outer, x.shape[:-2])
    rng = None
    if key is not None:
        hi, lo = offset_words(offset)
        words = codecs.key_words(key)
        rng = jnp.stack([jnp.asarray(words[0]), jnp.asarray(words[1]), jnp.asarray(lo), jnp.asarray(hi)])
    return scale, outer, rng
