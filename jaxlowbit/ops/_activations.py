"""How the left operand of a product is treated: ``act=`` and ``act_scale=`` against the weight's format."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowbit import errors
from jaxlowbit._quantize_args import SCALE_ROUNDINGS
from jaxlowbit.formats import FORMATS, FP8_TENSOR, Act, Format

Array = Any


@dataclasses.dataclass(frozen=True)
class Activation:
    """How the left operand is treated: ``act`` None keeps it as it is; ``static`` says that act_scale is given."""

    act: Act | None
    static: bool = False


def resolve_act(op: str, act: Any, act_scale: Any, weight: Format) -> tuple[Activation, Array | None]:
    """``act=`` and ``act_scale=`` against the weight's format. Returns the plan and the float32 scale."""
    if act is None:
        if act_scale is not None:
            errors.bad_value(
                op,
                "act_scale",
                expected="None with act=None, which keeps activations unquantized",
                got=act_scale,
                fix="Pass act='dynamic' (static per-tensor scale) or name a format.",
            )
        return Activation(None), None
    scale = None if act_scale is None else _act_scale(op, act_scale)
    if isinstance(act, str) and act == "dynamic":
        if scale is not None:
            return Activation(Act(FP8_TENSOR), static=True), scale
        if weight.dynamic_act is None:
            errors.bad_value(
                op,
                "act",
                expected=f"None or a named format, since {weight.name} weights have no single customary activation "
                "format",
                got="'dynamic'",
                fix="Pass act=None (weight-only), act=jaxlowbit.NVFP4, or act=jaxlowbit.FP8_1X128.",
            )
        return Activation(Act(FORMATS[weight.dynamic_act])), None
    named_act = Act(act) if isinstance(act, Format) else act
    if not isinstance(named_act, Act):
        errors.bad_value(
            op,
            "act",
            expected="None, 'dynamic', a Format or an Act",
            got=repr(act),
            fix=f"Formats: {sorted(FORMATS)}.",
        )
    fmt = named_act.format
    if fmt.element.name == "e5m2" or fmt.block[0] not in (1, None):
        errors.bad_value(
            op,
            "act",
            expected="a format of E4M3 or E2M1 codes whose scale block spans one row (or the whole tensor)",
            got=fmt.name,
            fix="Rows of activations are independent: use FP8_1X128, FP8_CHANNEL, FP8_TENSOR, MXFP8, MXFP4 or NVFP4.",
        )
    roundings = SCALE_ROUNDINGS[fmt.scale.name]
    if named_act.scale_rounding not in (None, *roundings):
        errors.bad_value(
            op,
            "act",
            expected=f"an Act whose scale_rounding is one of {list(roundings)} for the {fmt.scale.name} scales of "
            f"{fmt.name}, or None",
            got=f"scale_rounding={named_act.scale_rounding!r}",
            fix="Leave it None for the format's own.",
        )
    if scale is not None and fmt.block != (None, None) and not fmt.two_level:
        errors.bad_value(
            op,
            "act_scale",
            expected=f"None with {fmt.name}, whose scales come from the data",
            got=scale,
            fix="A static scale goes with act='dynamic' or FP8_TENSOR (per tensor), or NVFP4 (its global scale).",
        )
    if scale is not None and not fmt.two_level and (named_act.scale_rounding or named_act.amax_ub is not None):
        errors.bad_value(
            op,
            "act_scale",
            expected="no scale_rounding and no amax_ub in act beside a static scale, which is used as it is",
            got=f"scale_rounding={named_act.scale_rounding!r}, amax_ub={named_act.amax_ub!r}",
            fix=f"Pass act={fmt.name} without them, or drop act_scale so that the scale is computed.",
        )
    return Activation(named_act, static=scale is not None), scale


def _act_scale(op: str, act_scale: Any) -> Array:
    scale = jnp.asarray(act_scale)
    if not jnp.issubdtype(scale.dtype, jnp.floating) or scale.size != 1 or scale.ndim > 1:
        errors.bad_value(
            op,
            "act_scale",
            expected="one floating-point number, shape () or (1,)",
            got=scale,
            fix="A static activation scale is one multiplier per tensor.",
        )
    # The value of a traced scale is not known, nor that of one whose shards lie with other processes.
    known = not isinstance(act_scale, jax.core.Tracer) and getattr(act_scale, "is_fully_addressable", True)
    if known and np.asarray(act_scale).astype(np.float64).item() < 0:
        errors.bad_value(
            op,
            "act_scale",
            expected="a multiplier that is not negative",
            got=str(np.asarray(act_scale).item()),
            fix="Value = code * scale, and codes carry the sign: pass its magnitude.",
        )
    return scale.astype(jnp.float32).reshape(())


def refuse_odd_k(op: str, arg: str, k: int) -> None:
    errors.bad_value(
        op,
        arg,
        expected="an even K, since two FP4 codes share a byte",
        got=f"K={k}",
        fix="Pad K with zeros on both operands, or use an FP8 format for the activations.",
    )


def check_act_k(op: str, activation: Activation, k: int) -> None:
    """FP4 activations are packed in pairs along K."""
    if activation.act is not None and activation.act.format.element.packed and k % 2:
        refuse_odd_k(op, "act", k)
