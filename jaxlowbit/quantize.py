"""quantize, dequantize and fake_quantize: checks, the choice of an implementation, and the rules of differentiation."""

from __future__ import annotations

import functools
from typing import Any, Literal, NoReturn, TypeAlias

import jax
import jax.numpy as jnp

from jaxlowbit import _dispatch, _ffi, errors, sharding
from jaxlowbit._dispatch import Decision
from jaxlowbit._quantize_args import checked_operands, checked_values, quantize_spec
from jaxlowbit._quantize_native import native
from jaxlowbit._quantize_xla import QuantizeSpec, poison_given, quantize_xla, two_level_scale
from jaxlowbit.formats import Format, ScaleRounding, named
from jaxlowbit.scaled_array import ScaledArray

__all__ = ["dequantize", "fake_quantize", "quantize", "quantize_rows", "quantize_xla", "two_level_scale"]

Array: TypeAlias = Any
Rounding: TypeAlias = Literal["nearest", "stochastic"]


def quantize(
    x: Array,
    format: str | Format,
    *,
    axis: int = -1,
    scale_rounding: ScaleRounding | None = None,
    rounding: Rounding = "nearest",
    key: Array | None = None,
    offset: int | Array = 0,
    scale: Array | None = None,
    global_scale: Array | None = None,
    amax_ub: float | None = None,
    pad: bool = False,
    implementation: str | None = None,
) -> ScaledArray:
    """Quantizes an array: scales from the largest magnitude of each block, then codes with the stored scales.

    Per block, in float32: ``scale = max(amax / max_code, 2**-126)``, rounded to the format's scale type, then
    ``code = round(x / scale)``, one division and one rounding, saturating. A block that holds an infinity or a NaN
    gets scale NaN, and so only NaN values. Two-level formats (NVFP4) have
    ``global_scale = max(amax / (448 * 6), 2**-126)`` per matrix, from its finite values, and E4M3 block scales of at
    least ``2**-9``. Float32 subnormals count as zeros of their sign.

    Args:
      x: floating-point values with at least one dimension; float64 is converted to float32 first. The last two
        dimensions (after ``axis`` has moved to the end) are a matrix; dimensions before them are a batch with
        scales of their own.
      format: a Format or the name of one.
      axis: the dimension along which values share scales and, for FP4, bytes. It becomes the last one.
      scale_rounding: for E8M0 scales ``"rceil"`` (never saturates), ``"floor"`` (OCP MX v1.0), ``"ceil"`` or
        ``"even"``; for float32 ones ``"none"`` or ``"pow2"`` (up to a power of two). None: the format's own.
      rounding: ``"nearest"`` (ties to even) or ``"stochastic"``, which needs a key.
      key: a Threefry key of JAX, typed or raw uint32 (2,).
      offset: number of elements before x in the array that it is a shard of, below 2**64: shards then round as
        the whole does. An int, an integer scalar, or uint32 words (hi, lo). Rows of odd length in FP4 count one
        more element.
      scale: scales to use as they are (static quantization): one for all blocks, or the format's grid. In FP4, where
        codes cannot be NaN, blocks that hold NaN still get scale NaN.
      global_scale: global scale to use as it is, one per matrix or one for all; two-level formats only.
      amax_ub: upper bound of a block's amax: larger values saturate.
      pad: lets FP4 take an odd K; the last high nibble is 0 and ``last_dim`` keeps K. Refused otherwise.
      implementation: ``"native"``, ``"xla"``, or None for the first that the platform has. Both give the same bits.

    Returns:
      A ScaledArray of x's shape, with ``axis`` moved to the end.

    Raises:
      TypeError: x is not floating-point; a scale or key has the wrong dtype; x is being differentiated (quantize has
        no useful derivative: see ``fake_quantize``).
      ValueError: a shape, a rounding or an odd K that the format does not have.
      UnsupportedError: ``implementation="native"`` on a platform without the kernel.
    """
    fmt = named(format)
    x = checked_values(x, axis)
    if x.shape[-1] % fmt.element.per_byte and not pad:
        errors.bad_value(
            "quantize",
            "x",
            expected=f"an even length along axis {axis}: {fmt.name} has two codes per byte",
            got=x,
            fix="Pass pad=True (the result then knows its logical length), or pad x yourself.",
        )
    spec = quantize_spec(fmt, scale_rounding, rounding, key, amax_ub, computed=scale is None)
    codes, scales, outer = _quantize(spec, x, scale, global_scale, key, offset, implementation)
    odd = x.shape[-1] if x.shape[-1] % fmt.element.per_byte else None
    return ScaledArray(codes, scales, outer, format=fmt, last_dim=odd)


def dequantize(q: ScaledArray, dtype: Any = jnp.float32) -> Array:
    """Values of a ScaledArray in ``dtype``: decoded and scaled in float32, rounded once. See ScaledArray.dequantize."""
    return q.dequantize(dtype)


def fake_quantize(
    x: Array,
    format: str | Format,
    *,
    axis: int = -1,
    scale_rounding: ScaleRounding | None = None,
    rounding: Rounding = "nearest",
    key: Array | None = None,
    offset: int | Array = 0,
    scale: Array | None = None,
    global_scale: Array | None = None,
    amax_ub: float | None = None,
    implementation: str | None = None,
) -> Array:
    """``dequantize(quantize(x))`` in x's shape and dtype, with the identity as derivative (straight-through).

    Forward and reverse mode work; scales, given or computed, count as constants. Arguments and errors are those of
    ``quantize``; an odd K is no obstacle here, since nothing is stored.
    """
    fmt = named(format)
    values = checked_values(x, axis)
    spec = quantize_spec(fmt, scale_rounding, rounding, key, amax_ub, computed=scale is None)
    rest = checked_operands(spec, values, scale, global_scale, key, offset)
    _dispatch.check_implementation("quantize", implementation)
    call = functools.partial(_straight_through, spec, implementation)
    result = sharding.explicit_quantize(call, fmt, values, *rest, values=True)
    return jnp.moveaxis(result, -1, axis).astype(jnp.asarray(x).dtype)  # float64 was narrowed on the way in


def quantize_rows(
    x: Array,
    fmt: Format,
    *,
    scale_rounding: ScaleRounding | None = None,
    amax_ub: float | None = None,
    scale: Array | None = None,
    global_scale: Array | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Codes and scales of ``x (B, M, K)`` for the operations: ``quantize`` without the ScaledArray around it.

    ``scale_rounding`` and ``amax_ub`` describe computed scales and do not touch a given one. Two-level formats take
    ``global_scale (B,)``, from ``two_level_scale`` or static; it is computed where None.

    Returns:
      codes ``(B, M, K)`` or packed ``(B, M, K/2)``, and scales ``(B, grid_rows, grid_k)``.
    """
    if scale is not None:
        scale_rounding = amax_ub = None
    spec = quantize_spec(fmt, scale_rounding, "nearest", None, amax_ub, computed=scale is None)
    codes, scales, _ = _quantize(spec, x, scale, global_scale, None, 0, implementation)
    return codes, scales


# The choice of an implementation, and differentiation.


def _quantize(
    spec: QuantizeSpec,
    x: Array,
    scale: Array | None,
    outer: Array | None,
    key: Array | None,
    offset: int | Array,
    implementation: str | None,
) -> tuple[Array, Array, Array | None]:
    _dispatch.check_implementation("quantize", implementation)
    given, outer, rng = checked_operands(spec, x, scale, outer, key, offset)
    call = functools.partial(_refusing, spec, _choose(spec, x, implementation))
    codes, scales, outer = sharding.explicit_quantize(call, spec.format, x, given, outer, rng, values=False)
    return codes, scales, outer


def _choose(spec: QuantizeSpec, x: Array, implementation: str | None) -> Decision:
    decision = _dispatch.choose(
        "quantize",
        f"{spec.format.name} x={errors.describe(x)} rounding={'stochastic' if spec.stochastic else 'nearest'} "
        f"scale_rounding={spec.scale_rounding}",
        implementation,
        kernel=_dispatch.tier_name,
        xla_kernel="XLA: float32 arithmetic on whole blocks",
    )
    return _dispatch.without_kernel(decision, "the array is empty") if x.size == 0 else decision


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _refusing(
    spec: QuantizeSpec, choice: Decision, x: Array, given: Array | None, outer: Array | None, rng: Array | None
) -> tuple[Array, Array, Array | None]:
    return _run(spec, choice, _ffi.current_tier(), x, given, outer, rng)  # type: ignore[no-any-return]


@_refusing.defjvp
def _refuse(spec: QuantizeSpec, *_: Any) -> NoReturn:
    raise TypeError(
        f"jaxlowbit.quantize is not differentiable: codes of {spec.format.name} are integers, so the true derivative "
        "is zero almost everywhere. Use jaxlowbit.fake_quantize for a straight-through gradient, or "
        "jax.lax.stop_gradient on x to quantize a constant."
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _straight_through(
    spec: QuantizeSpec,
    implementation: str | None,
    x: Array,
    given: Array | None,
    outer: Array | None,
    rng: Array | None,
) -> Array:
    codes, scales, outer = _run(spec, _choose(spec, x, implementation), _ffi.current_tier(), x, given, outer, rng)
    q = ScaledArray(codes, scales, outer, format=spec.format, last_dim=x.shape[-1])
    return q.dequantize(x.dtype)


@_straight_through.defjvp
def _identity(spec: QuantizeSpec, implementation: str | None, primals: Any, tangents: Any) -> tuple[Array, Array]:
    return _straight_through(spec, implementation, *primals), tangents[0]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(
    spec: QuantizeSpec,
    choice: Decision,
    tier: _ffi.Tier,
    x: Array,
    given: Array | None,
    outer: Array | None,
    rng: Array | None,
) -> tuple[Array, Array, Array | None]:
    """Codes, scales and global scale. ``tier`` is a static argument so that the cache tells forced tiers apart."""
    return sharding.mapped(functools.partial(_one, spec, choice, tier))(x, given, outer, rng)  # type: ignore[no-any-return]


def _one(
    spec: QuantizeSpec,
    choice: Decision,
    tier: _ffi.Tier,
    x: Array,
    given: Array | None,
    outer: Array | None,
    rng: Array | None,
) -> tuple[Array, Array, Array | None]:
    x, given, outer, rng = sharding.align_vma((x, given, outer, rng))
    fmt = spec.format
    one_row = x.ndim == 1
    if one_row:
        x = x[None]
        given = None if given is None else given[None]
    if given is not None:
        given = poison_given(spec, x, given)
    if fmt.two_level and outer is None:
        outer = two_level_scale(x, fmt, amax_ub=spec.amax_ub)
    xla = functools.partial(quantize_xla, spec)
    codes, scales = _dispatch.run(choice, native(spec, tier), xla, x, given, outer, rng)
    if one_row:
        codes, scales = codes[0], scales[0]
    return codes, scales, outer
