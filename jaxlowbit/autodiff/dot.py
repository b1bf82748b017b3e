"""fp8_dot, fp4_dot and scaled_dot: the public low-bit products, differentiable in the activations and the bias.

One custom_vjp spans quantize and dot. Its residuals are the packed codes and scales and nothing else: the gradient of
a linear layer with frozen weights needs neither the activations nor a dequantized copy of the weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxlowbit import _dispatch, errors, quantize, sharding
from jaxlowbit.formats import Act, Format
from jaxlowbit.ops import _activations, _operands
from jaxlowbit.ops import dot as ops_dot
from jaxlowbit.ops._activations import Activation
from jaxlowbit.ops.dot import DotOperands, DotSpec
from jaxlowbit.scaled_array import ScaledArray

Array = Any

# Pass jax.checkpoint_policies.save_only_these_names(REMAT_NAME) to keep the products' outputs under remat.
REMAT_NAME = "jaxlowbit_dot"


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """Static facts of one call: what custom_vjp and the inner jit are keyed by."""

    op: str
    out_dtype: str
    lhs_dtype: str
    activation: Activation
    implementation: str | None


def fp8_dot(
    x: Array,
    w: Array | ScaledArray,
    s: Array | None = None,
    *,
    bias: Array | None = None,
    block_shape: tuple[int, int] | None = None,
    act: str | Format | Act | None = "dynamic",
    act_scale: Array | None = None,
    preferred_element_type: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """``x @ dequantize(w).T + bias`` with FP8 weights ``w`` kept packed.

    Args:
      x: activations ``(..., K)``, bfloat16, float16 or float32.
      w: float8_e4m3fn codes ``(N, K)`` (out_features, in_features), or a ScaledArray, which carries its scales.
      s: dequantization multipliers of ``w``, float32 (bfloat16 and float16 are widened) or E8M0 (uint8 or
        float8_e8m0fnu). Matched in this order: ``()``, ``(1,)``, ``(1, 1)`` per tensor; ``(N,)``, ``(N, 1)`` per
        channel; ``(ceil(N/128), ceil(K/128))`` in 128x128 blocks; another grid only with ``block_shape``.
      bias: ``(N,)``, added in float32 before the one rounding to the output dtype.
      block_shape: ``(rows, k)`` of one scale, when it is none of the above.
      act: static. ``"dynamic"`` quantizes the activations to E4M3 on the fly (1x128 for block weights, per row for
        per-channel and per-tensor weights, 1x32 E8M0 for MX weights); ``None`` takes them as they are (weight-only);
        a Format or an ``Act`` names another way.
      act_scale: static activation scale (a multiplier), one number: per-tensor E4M3 activations, saturating.
      preferred_element_type: bfloat16, float16 or float32; x's dtype by default.
      implementation: ``"native"``, ``"xla"`` or ``None`` for the first that is supported.

    Returns:
      ``(..., N)``. Products are accumulated in float32.

    Differentiable in ``x`` and ``bias``: ``dx = g @ dequantize(w)``, accumulated in float32, straight through the
    activation quantization. Codes and scales are frozen: their cotangents are zeros, which is not their derivative.

    Raises:
      TypeError: a dtype is not one of those listed; forward-mode differentiation.
      ValueError: shapes, scales or options do not fit together.
      UnsupportedError: ``implementation="native"`` cannot serve the call.
    """
    weight = _operands.fp8_weight("fp8_dot", w, s, block_shape)
    return _layer("fp8_dot", x, weight, bias, act, act_scale, preferred_element_type, implementation)


def fp4_dot(
    x: Array,
    w: Array | ScaledArray,
    s: Array | None = None,
    *,
    global_scale: Array | float | None = None,
    format: str | Format | None = None,
    bias: Array | None = None,
    act: str | Format | Act | None = None,
    act_scale: Array | None = None,
    preferred_element_type: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """``x @ dequantize(w).T + bias`` with FP4 (E2M1) weights ``w`` kept packed.

    Args:
      x: activations ``(..., K)``, bfloat16, float16 or float32.
      w: packed codes, uint8 ``(N, K/2)`` with the low nibble at even K; float4_e2m1fn ``(N, K)``; or a ScaledArray.
      s: block scales: E8M0 (uint8 or float8_e8m0fnu) ``(N, K/32)`` is MXFP4, float8_e4m3fn ``(N, K/16)`` is NVFP4.
      global_scale: NVFP4's outer float32 multiplier (one number); a divisor, as compressed-tensors stores it, must be
        inverted first.
      format: names another format, for example ``MXFP4.with_block(1, 64)``.
      bias: ``(N,)``, added in float32.
      act: ``None`` takes activations as they are (weight-only, the default); ``"dynamic"`` is 1x32 MXFP8 for MXFP4
        weights and refused for NVFP4; a Format (``MXFP4``, ``NVFP4``, ``FP8_1X128``, ...) or ``Act`` names the way.
      act_scale: with NVFP4 activations their static global scale; with ``"dynamic"`` a static per-tensor E4M3 scale.
      preferred_element_type: bfloat16, float16 or float32; x's dtype by default.
      implementation: ``"native"``, ``"xla"`` or ``None``.

    Returns:
      ``(..., N)``. Gradients and errors are as for ``fp8_dot``.
    """
    weight = _operands.fp4_weight("fp4_dot", w, s, global_scale, format)
    return _layer("fp4_dot", x, weight, bias, act, act_scale, preferred_element_type, implementation)


def scaled_dot(
    lhs: ScaledArray,
    rhs: ScaledArray,
    *,
    bias: Array | None = None,
    preferred_element_type: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """``dequantize(lhs) @ dequantize(rhs).T + bias`` of two quantized operands, in any combination of formats.

    Args:
      lhs: ScaledArray ``(..., K)``; leading dimensions are flattened to M.
      rhs: ScaledArray ``(N, K)``.
      bias: ``(N,)``, added in float32.
      preferred_element_type: bfloat16 (default), float16 or float32.
      implementation: ``"native"``, ``"xla"`` or ``None``.

    Returns:
      ``(..., N)``. Both operands are frozen: only ``bias`` has a gradient.

    Raises:
      TypeError, ValueError, UnsupportedError: as ``fp8_dot``.
    """
    op = "scaled_dot"
    for arg, value in (("lhs", lhs), ("rhs", rhs)):
        if not isinstance(value, ScaledArray):
            errors.bad_type(
                op, arg, expected="a ScaledArray", got=value, fix="Quantize it first: jaxlowbit.quantize(x, format)."
            )
    rhs = _operands.check_weight(op, rhs, packed=None, arg="rhs")
    _operands.check_lhs(op, lhs, rhs.k)
    _dispatch.check_implementation(op, implementation)
    bias = _operands.check_bias(op, bias, rhs.rows)
    out_dtype = _operands.check_out_dtype(op, preferred_element_type, jnp.bfloat16)
    spec = LayerSpec(op, out_dtype, str(lhs.data.dtype), Activation(None), implementation)
    out: jax.Array = sharding.explicit(
        op,
        functools.partial(_flat, spec),
        lhs,
        rhs,
        bias,
        act_format=None,
        act_scale=None,
        out_dtype=out_dtype,
    )
    return out


def _layer(
    op: str,
    x: Array,
    weight: ScaledArray,
    bias: Array | None,
    act: str | Format | Act | None,
    act_scale: Array | None,
    preferred_element_type: Any,
    implementation: str | None,
) -> jax.Array:
    x = _operands.check_x(op, x, weight.k)
    _dispatch.check_implementation(op, implementation)
    bias = _operands.check_bias(op, bias, weight.rows)
    out_dtype = _operands.check_out_dtype(op, preferred_element_type, x.dtype)
    activation, scale = _activations.resolve_act(op, act, act_scale, weight.format)
    _activations.check_act_k(op, activation, weight.k)
    spec = LayerSpec(op, out_dtype, str(x.dtype), activation, implementation)
    out: jax.Array = sharding.explicit(
        op,
        functools.partial(_flat, spec),
        x,
        weight,
        bias,
        act_format=activation.act.format if activation.act else None,
        act_scale=scale,
        out_dtype=out_dtype,
    )
    return out


def _flat(
    spec: LayerSpec,
    x: Array | ScaledArray,
    act_scale: Array | None,
    weight: ScaledArray,
    bias: Array | None,
    out_dtype: str,
) -> Array:
    """Leading dimensions become rows; ``math.prod`` because -1 cannot be inferred when K is 0."""
    spec = dataclasses.replace(spec, out_dtype=out_dtype)
    rows = ops_dot.flatten_lhs(x) if isinstance(x, ScaledArray) else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    out = _call(spec, rows, act_scale, weight, bias)
    return out.reshape(*x.shape[:-1], weight.rows)


def _call(spec: LayerSpec, lhs: Any, act_scale: Array | None, weight: ScaledArray, bias: Array | None) -> Array:
    lhs, act_scale, weight, bias = sharding.align_vma((lhs, act_scale, weight, bias))
    try:
        out = _jitted(spec.op)(spec, lhs, act_scale, weight, bias)
    except TypeError as error:
        if "forward-mode" in str(error):
            raise TypeError(
                f"jaxlowbit.{spec.op}: forward-mode differentiation (jax.jvp, jax.jacfwd, jax.linearize) is not "
                "defined; its backward works from packed weights alone. Use reverse mode: jax.grad, jax.vjp or "
                "jax.jacrev (twice for second order)."
            ) from error
        raise
    return checkpoint_name(out, REMAT_NAME)


@functools.cache
def _jitted(op: str) -> Callable[..., Array]:
    """One jitted function per public name: cheap eager calls, and the op's name in jaxprs, HLO and profiles."""

    def call(spec: LayerSpec, lhs: Any, act_scale: Array | None, weight: ScaledArray, bias: Array | None) -> Array:
        return _dot(spec, lhs, act_scale, weight, bias)

    call.__name__ = call.__qualname__ = op
    return jax.jit(call, static_argnums=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(spec: LayerSpec, lhs: Any, act_scale: Array | None, weight: ScaledArray, bias: Array | None) -> Array:
    return _forward(spec)(lhs, act_scale, weight, bias)


@functools.cache
def _forward(spec: LayerSpec) -> Callable[..., Array]:
    return sharding.mapped(functools.partial(_product, spec))


def _product(spec: LayerSpec, lhs: Any, act_scale: Array | None, weight: ScaledArray, bias: Array | None) -> Array:
    operands, lhs_format = _left(spec, lhs, act_scale)
    dot_spec = DotSpec(spec.op, lhs_format, weight.format, weight.k, spec.out_dtype, implementation=spec.implementation)
    parts = []
    for (start, stop), segment in _pieces(weight):
        piece = None if bias is None else bias[None, start:stop]
        parts.append(ops_dot.dot(dot_spec, _with_weight(operands, segment, piece))[0])
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def _dot_fwd(
    spec: LayerSpec, lhs: Any, act_scale: Array | None, weight: ScaledArray, bias: Array | None
) -> tuple[Array, tuple[Any, ...]]:
    # The wrapped _dot, not its body: so the forward pass of a second differentiation has a rule too.
    out = _dot(spec, lhs, act_scale, weight, bias)
    frozen_lhs = lhs if isinstance(lhs, ScaledArray) else None
    return out, (weight, frozen_lhs, None if bias is None else jnp.zeros((0,), bias.dtype))


def _dot_bwd(spec: LayerSpec, residuals: tuple[Any, ...], g: Array) -> tuple[Any, ...]:
    weight, frozen_lhs, bias_like = residuals
    if frozen_lhs is not None:
        d_lhs = _frozen_cotangent(frozen_lhs)
    else:
        d_lhs = _dx(spec, g, weight)
    d_bias = None
    if bias_like is not None:
        d_bias = jnp.sum(g.astype(jnp.float32), axis=0).astype(bias_like.dtype)
    return d_lhs, None, _frozen_cotangent(weight), d_bias


_dot.defvjp(_dot_fwd, _dot_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dx(spec: LayerSpec, g: Array, weight: ScaledArray) -> Array:
    """``g @ dequantize(weight)``: ``(M, N)`` -> ``(M, K)`` in the primal's dtype, float32 accumulation."""
    return _backward(spec)(g, weight)


@functools.cache
def _backward(spec: LayerSpec) -> Callable[..., Array]:
    return sharding.mapped(functools.partial(_dx_product, spec))


def _dx_product(spec: LayerSpec, g: Array, weight: ScaledArray) -> Array:
    pieces = _pieces(weight)
    out_dtype = spec.lhs_dtype if len(pieces) == 1 else "float32"
    total = None
    for (start, stop), segment in pieces:
        dot_spec = DotSpec(
            f"{spec.op}_dx",
            None,
            weight.format,
            weight.k,
            out_dtype,
            transposed=True,
            implementation=spec.implementation,
        )
        operands = _with_weight(DotOperands(g[None, :, start:stop]), segment, None)
        part = ops_dot.dot(dot_spec, operands)[0]
        total = part if total is None else total + part
    assert total is not None
    return total.astype(spec.lhs_dtype)


def _dx_fwd(spec: LayerSpec, g: Array, weight: ScaledArray) -> tuple[Array, tuple[ScaledArray, Array]]:
    return _dx(spec, g, weight), (weight, jnp.zeros((0,), g.dtype))


def _dx_bwd(spec: LayerSpec, residuals: tuple[ScaledArray, Array], ct: Array) -> tuple[Any, ...]:
    """The transpose of a linear map is the forward product again, without activation quantization."""
    weight, g_like = residuals
    plain = dataclasses.replace(spec, out_dtype=str(g_like.dtype), lhs_dtype=str(ct.dtype), activation=Activation(None))
    return _dot(plain, ct, None, weight, None), _frozen_cotangent(weight)


_dx.defvjp(_dx_fwd, _dx_bwd)


def _frozen_cotangent(q: ScaledArray) -> ScaledArray | None:
    """None (zeros, or float0 for integers) except for float8_e8m0fnu scales.

    That dtype has no zero: the zeros JAX would make for it are NaN bytes, which would poison a global gradient norm.
    Byte 0, its smallest value, is the closest there is. The bytes are made from the scale's own so that they vary
    over the same mesh axes.
    """
    if q.scale.dtype != jnp.float8_e8m0fnu:
        return None
    zero = lax.bitcast_convert_type(lax.bitcast_convert_type(q.scale, jnp.uint8) & jnp.uint8(0), q.scale.dtype)
    return dataclasses.replace(q, data=None, scale=zero, global_scale=None)


def _left(spec: LayerSpec, lhs: Any, act_scale: Array | None) -> tuple[DotOperands, Format | None]:
    """The left operand as the kernel takes it: plain, already quantized, or quantized here."""
    if isinstance(lhs, ScaledArray):
        outer = lhs.global_scale
        if outer is not None:
            outer = outer.reshape(1, -1)
        return DotOperands(lhs.data[None], lhs_scale=lhs.scale[None], lhs_global=outer), lhs.format
    act = spec.activation.act
    if act is None:
        return DotOperands(lhs[None]), None
    x, fmt = lhs[None], act.format
    static_scale = static_global = None
    if fmt.two_level:
        bound = math.inf if act.amax_ub is None else act.amax_ub
        static_global = (
            act_scale.reshape(1)  # type: ignore[union-attr]
            if spec.activation.static
            else quantize.two_level_scale(x, fmt, amax_ub=bound)
        )
    elif spec.activation.static:
        static_scale = act_scale.reshape(1, 1, 1)  # type: ignore[union-attr]
    codes, scale = quantize.quantize_rows(
        x,
        fmt,
        scale_rounding=act.scale_rounding,
        amax_ub=act.amax_ub,
        scale=static_scale,
        global_scale=static_global,
        implementation=spec.implementation,
    )
    outer = None if static_global is None else static_global.reshape(1, 1)
    return DotOperands(codes, lhs_scale=scale, lhs_global=outer), fmt


def _pieces(weight: ScaledArray) -> list[tuple[tuple[int, int], ScaledArray]]:
    """The weight in pieces that one kernel call can take: whole, unless its scale grid restarts at row splits."""
    if not weight.row_splits or weight.format.block[0] == 1:
        return [((0, weight.rows), weight)]
    return [(bounds, weight.segment(i)) for i, bounds in enumerate(weight.segments)]


def _with_weight(operands: DotOperands, weight: ScaledArray, bias: Array | None) -> DotOperands:
    outer = weight.global_scale
    if outer is not None:
        outer = jnp.asarray(outer, jnp.float32)
        if weight.row_splits:
            spans = [outer[i : i + 1].repeat(b - a) for i, (a, b) in enumerate(weight.segments)]
            outer = jnp.concatenate(spans)
        outer = outer.reshape(1, -1)
    scale = jnp.asarray(weight.scale)
    return dataclasses.replace(operands, rhs=weight.data[None], rhs_scale=scale[None], rhs_global=outer, bias=bias)
