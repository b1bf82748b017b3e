"""quantize on the native kernel, which takes rank 3 and whole bytes: reshaping, padding, and the batching rule."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxlowbit import _ffi
from jaxlowbit._quantize_xla import QuantizeSpec

Array: TypeAlias = Any

_ELEMENTS = {"e4m3": _ffi.Element.E4M3, "e5m2": _ffi.Element.E5M2, "e2m1": _ffi.Element.E2M1}
_SCALES = {"f32": _ffi.ScaleKind.F32, "e8m0": _ffi.ScaleKind.E8M0, "e4m3": _ffi.ScaleKind.E4M3}


@functools.cache
def native(spec: QuantizeSpec, tier: _ffi.Tier) -> Callable[..., tuple[Array, Array]]:
    """The native implementation for one spec, with its batching rule: a vmapped axis joins the batch."""

    @jax.custom_batching.custom_vmap
    def call(x: Array, given: Array | None, outer: Array | None, rng: Array | None) -> tuple[Array, Array]:
        return _call_kernel(spec, tier, x, given, outer, rng)

    @call.def_vmap
    def rule(size: int, batched: Any, *operands: Any) -> tuple[tuple[Array, Array], tuple[bool, bool]]:
        if operands[3] is not None:
            # Every example counts its elements from its own offset, so they cannot share one call.
            out = _one_by_one(call, batched, operands)
        else:
            out = call(*(_batched(size, b, value) for b, value in zip(batched, operands, strict=True)))
        return out, (True, True)

    return call


def _batched(size: int, batched: bool, value: Array | None) -> Array | None:
    if value is None or batched:
        return value
    return jnp.broadcast_to(value[None], (size, *value.shape))


def _one_by_one(call: Any, batched: Any, operands: Any) -> tuple[Array, Array]:
    mapped = [value if b else None for b, value in zip(batched, operands, strict=True)]

    def step(picked: Any) -> tuple[Array, Array]:
        return call(*(one if b else value for one, b, value in zip(picked, batched, operands, strict=True)))  # type: ignore[no-any-return]

    return lax.map(step, mapped)  # type: ignore[no-any-return]


def _call_kernel(
    spec: QuantizeSpec, tier: _ffi.Tier, x: Array, given: Array | None, outer: Array | None, rng: Array | None
) -> tuple[Array, Array]:
    """One kernel call for any number of leading dimensions."""
    fmt = spec.format
    batch, (rows, columns) = x.shape[:-2], x.shape[-2:]
    grid = fmt.grid(rows, columns)
    block_columns = fmt.resolve_block(rows, columns)[1]
    stored = spec.stored_columns(columns)
    x = x.reshape(-1, rows, columns)
    if stored != columns:
        # A zero completes the last byte; where it starts a block of its own, that block's scale is dropped below.
        x = jnp.pad(x, ((0, 0), (0, 0), (0, stored - columns)))
    if given is not None:
        given = given.reshape(-1, *grid)
        extra = -(-stored // block_columns) - grid[1]
        given = jnp.pad(given, ((0, 0), (0, 0), (0, extra)), mode="edge") if extra else given
    config = _ffi.QuantizeConfig(
        element=_ELEMENTS[fmt.element.name],
        scale_kind=_SCALES[fmt.scale.name],
        block_r=fmt.kernel_block(rows, columns)[0],
        block_c=fmt.kernel_block(rows, columns)[1],
        scale_rounding=_ffi.ScaleRounding[spec.scale_rounding.upper()],
        stochastic=int(spec.stochastic),
        given=int(given is not None),
        tier=tier,
        amax_ub=spec.amax_ub,
    )
    outer = None if outer is None else outer.reshape(-1, 1)
    codes, scale = _ffi.quantize(x, given, outer, rng, config=config)
    codes = codes.reshape(*batch, rows, codes.shape[-1])
    return codes, scale[..., : grid[1]].reshape(*batch, *grid)
