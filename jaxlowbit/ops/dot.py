"""The low-bit product on rank-3 operands: the choice of an implementation, batching, and the XLA implementation.

Everything here is forward only. Operands are rank 3 with a leading batch, so that one kernel call serves ``vmap``.
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

from jaxlowbit import _dispatch, _ffi
from jaxlowbit.formats import Format
from jaxlowbit.ops._config import DotProblem, dot_config
from jaxlowbit.scaled_array import ScaledArray, decode_elements, decode_scale, expand_axis

Array = Any

# The XLA implementation dequantizes at most this many weights at a time (4 MiB in float32): the packed weights, not a
# dequantized copy, set the peak memory of a step over many layers.
TILE_ELEMENTS = 1 << 20


@dataclasses.dataclass(frozen=True)
class DotSpec:
    """Static description of a product, independent of its extents (``DotProblem`` has those)."""

    op: str
    lhs_format: Format | None
    rhs_format: Format
    k: int
    out_dtype: str
    transposed: bool = False
    implementation: str | None = None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["lhs", "lhs_scale", "lhs_global", "rhs", "rhs_scale", "rhs_global", "bias"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class DotOperands:
    """Arrays of a product. ``None`` stands for what a product does not have.

    Attributes:
      lhs: plain ``(B, M, C)`` or codes ``(B, M, K)`` / packed ``(B, M, K/2)``; C is the contracted extent.
      lhs_scale: ``(B, gm, gk)``.
      lhs_global: float32 ``(B, 1)`` or ``(B, M)``, multiplies row m.
      rhs: codes ``(B, N, K)`` / packed ``(B, N, ceil(K/2))``.
      rhs_scale: ``(B, gn, gk)``.
      rhs_global: float32 ``(B, 1)`` or ``(B, N)``, multiplies row n.
      bias: ``(B, N)``.
    """

    lhs: Array
    rhs: Array = None
    rhs_scale: Array = None
    lhs_scale: Array | None = None
    lhs_global: Array | None = None
    rhs_global: Array | None = None
    bias: Array | None = None


def dot(spec: DotSpec, operands: DotOperands) -> Array:
    """``(B, M, N)``, or ``(B, M, K)`` when transposed, in ``spec.out_dtype``."""
    return _batchable(spec)(operands)


@functools.cache
def _batchable(spec: DotSpec) -> Callable[[DotOperands], Array]:
    """The product with its own batching rule: vmap flattens into M, or into the kernel's batch, never into a loop."""

    @jax.custom_batching.custom_vmap
    def call(operands: DotOperands) -> Array:
        return _dispatched(spec, operands)

    @call.def_vmap
    def rule(size: int, batched: list[DotOperands], operands: DotOperands) -> tuple[Array, bool]:
        (mask,) = batched
        rhs_batched = any(_leaf(mask, name) for name in ("rhs", "rhs_scale", "rhs_global", "bias"))
        if not rhs_batched:
            out = _flatten_into_m(spec, size, mask, operands)
        else:
            out = _flatten_into_batch(spec, size, mask, operands)
        return out, True

    return call


def _leaf(mask: DotOperands, name: str) -> bool:
    value = getattr(mask, name)
    return bool(value) if value is not None else False


def _broadcast(size: int, mask: DotOperands, operands: DotOperands, name: str) -> Array | None:
    """The operand with the vmapped axis in front, added where the operand is not batched."""
    value = getattr(operands, name)
    if value is None or _leaf(mask, name):
        return value
    return jnp.broadcast_to(value[None], (size, *value.shape))


def _flatten_into_m(spec: DotSpec, size: int, mask: DotOperands, ops: DotOperands) -> Array:
    """Shared weights: the vmapped examples become rows. ``(V, B, M, .)`` -> ``(B, V * M, .)``."""

    def rows(value: Array | None) -> Array | None:
        if value is None:
            return None
        value = jnp.moveaxis(value, 0, 1)
        return value.reshape(value.shape[0], value.shape[1] * value.shape[2], *value.shape[3:])

    wide = {name: _broadcast(size, mask, ops, name) for name in ("lhs", "lhs_scale", "lhs_global")}
    m = wide["lhs"].shape[2]  # type: ignore[union-attr]
    if wide["lhs_scale"] is not None:
        # One scale per row, whatever the block was: a block that spans rows of one example must not span two.
        assert spec.lhs_format is not None
        block_rows = spec.lhs_format.resolve_block(m, spec.k)[0]
        wide["lhs_scale"] = rows_scale(wide["lhs_scale"], block_rows, m)
        block_k = spec.lhs_format.block[1]
        spec = dataclasses.replace(spec, lhs_format=spec.lhs_format.with_block(1, block_k))
    if wide["lhs_global"] is not None:
        outer = wide["lhs_global"]
        wide["lhs_global"] = jnp.broadcast_to(outer, (*outer.shape[:-1], m))
    flat = dataclasses.replace(ops, **{name: rows(value) for name, value in wide.items()})
    out = dot(spec, flat)
    out = out.reshape(out.shape[0], size, m, out.shape[-1])
    return jnp.moveaxis(out, 1, 0)


def rows_scale(scale: Array, block_rows: int, rows: int) -> Array:
    """A scale grid ``(..., grid_rows, grid_k)`` with one scale per row, ``(..., rows, grid_k)``."""
    scale = expand_axis(scale, -2, block_rows, rows)
    return jnp.broadcast_to(scale, (*scale.shape[:-2], rows, scale.shape[-1]))


def flatten_lhs(lhs: ScaledArray) -> ScaledArray:
    """A quantized left operand as one matrix. With leading dimensions each row gets scales of its own."""
    if lhs.ndim == 2:
        return lhs
    m, fmt = math.prod(lhs.shape[:-1]), lhs.format
    data = lhs.data.reshape(m, lhs.data.shape[-1])
    if lhs.ndim == 1:
        return dataclasses.replace(lhs, data=data, scale=lhs.scale[None], format=fmt.with_block(1, fmt.block[1]))
    block_rows = fmt.resolve_block(lhs.rows, lhs.k)[0]
    scale = rows_scale(lhs.scale, block_rows, lhs.rows)
    outer = lhs.global_scale
    if outer is not None:
        # One global scale per matrix of the batch becomes one per row: two-level row scales keep their two levels.
        outer = jnp.broadcast_to(outer[..., None], lhs.shape[:-1]).reshape(m)
    return dataclasses.replace(
        lhs,
        data=data,
        scale=scale.reshape(m, scale.shape[-1]),
        global_scale=outer,
        format=fmt.with_block(1, fmt.block[1]),
    )


def _flatten_into_batch(spec: DotSpec, size: int, mask: DotOperands, ops: DotOperands) -> Array:
    """Weights differ: the vmapped axis joins the kernel's batch. ``(V, B, ...)`` -> ``(V * B, ...)``."""
    names = [f.name for f in dataclasses.fields(DotOperands)]
    wide = {name: _broadcast(size, mask, ops, name) for name in names}
    # The extent in numbers: reshape cannot infer it where another one is 0.
    batch = ops.lhs.shape[1] if _leaf(mask, "lhs") else ops.lhs.shape[0]
    flat = {n: None if v is None else v.reshape(size * batch, *v.shape[2:]) for n, v in wide.items()}
    out = dot(spec, DotOperands(**flat))
    return out.reshape(size, batch, *out.shape[1:])


def problem_of(spec: DotSpec, operands: DotOperands) -> DotProblem:
    """The static facts of a product, extents included."""
    return DotProblem(
        batch=operands.lhs.shape[0],
        m=operands.lhs.shape[1],
        n=operands.rhs.shape[1],
        k=spec.k,
        lhs_dtype=str(operands.lhs.dtype),
        lhs_format=spec.lhs_format,
        rhs_format=spec.rhs_format,
        out_dtype=spec.out_dtype,
        transposed=spec.transposed,
    )


def _dispatched(spec: DotSpec, operands: DotOperands) -> Array:
    problem = problem_of(spec, operands)
    tier = _ffi.current_tier()
    config = dot_config(problem, tier)
    decision = _dispatch.choose(
        spec.op,
        problem,
        spec.implementation,
        kernel=lambda: _ffi.dot_kernel(config, problem.lhs_dtype, problem.m, problem.n, problem.k),
        xla_kernel="XLA: dequantize in bounded tiles, float32 dot",
    )
    native = functools.partial(_native, problem, tier)
    return _dispatch.run(decision, native, functools.partial(dot_xla, problem), operands)


def _native(problem: DotProblem, tier: _ffi.Tier, operands: DotOperands) -> Array:
    odd = problem.k % problem.rhs_format.element.per_byte
    if odd:
        # The weight's last byte holds one code and a zero nibble: the kernel sees a whole pair on both sides.
        wide = dataclasses.replace(problem, k=problem.k + odd)
        return _native(wide, tier, _widened(wide, operands, odd))[..., : problem.k if problem.transposed else None]
    return _ffi.dot(
        operands.lhs,
        None if operands.lhs_scale is None else _raw_scale(operands.lhs_scale),
        operands.lhs_global,
        operands.rhs,
        _raw_scale(operands.rhs_scale),
        operands.rhs_global,
        operands.bias,
        config=dot_config(problem, tier),
        out_dtype=problem.out_dtype,
    )


def _widened(problem: DotProblem, operands: DotOperands, columns: int) -> DotOperands:
    """Operands of an odd K with zero codes behind it; a scale grid that grows by it repeats its last column."""

    def grow(scale: Array, rows: int, fmt: Format) -> Array:
        missing = fmt.grid(rows, problem.k)[1] - scale.shape[-1]
        return scale if missing == 0 else jnp.concatenate([scale, scale[..., -1:]], axis=-1)

    lhs, lhs_scale = operands.lhs, operands.lhs_scale
    if not problem.transposed:
        lhs = jnp.concatenate([lhs, jnp.zeros((*lhs.shape[:-1], columns), lhs.dtype)], axis=-1)
    if problem.lhs_format is not None:
        lhs_scale = grow(lhs_scale, problem.m, problem.lhs_format)
    rhs_scale = grow(operands.rhs_scale, problem.n, problem.rhs_format)
    return dataclasses.replace(operands, lhs=lhs, lhs_scale=lhs_scale, rhs_scale=rhs_scale)


def _raw_scale(scale: Array) -> Array:
    """Half-precision scales are widened once, exactly; the stored types go to the kernel as they are."""
    return scale.astype(jnp.float32) if scale.dtype in (jnp.bfloat16, jnp.float16) else scale


def dot_xla(problem: DotProblem, operands: DotOperands) -> Array:
    """The readable reference, for every platform: decode, scale and contract in float32, weights tile by tile."""
    batch, m = problem.batch, problem.m
    out_cols = problem.k if problem.transposed else problem.n
    if 0 in (batch, m, out_cols):
        return jnp.zeros((batch, m, out_cols), problem.out_dtype)
    # Without the barrier XLA may dequantize the weights of every layer at once, ahead of the activations they wait for.
    operands = lax.optimization_barrier(operands)
    # As bytes, because XLA:CPU carries float8 through slices and loops in float16: a copy of twice the size.
    operands = dataclasses.replace(operands, rhs=_bytes(operands.rhs))
    lhs = _lhs_values(problem, operands)
    count, tile, total = _tiles(problem, out_cols)

    def columns(start: Array | int) -> Array:
        weights = _weight_tile(problem, operands, start, tile)
        pattern = "bmn,bnk->bmk" if problem.transposed else "bmk,bnk->bmn"
        return jnp.einsum(pattern, lhs, weights, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

    if count == 1:
        out = columns(0)
    else:
        # The loop index enters every slice, so XLA cannot hoist a dequantized copy of all the weights out of the loop.
        # The last tile starts early enough to be whole; what it computes a second time is cut away.
        starts = jnp.minimum(jnp.arange(count, dtype=jnp.int32) * tile, total - tile)
        stacked = jnp.moveaxis(lax.map(columns, starts), 0, 2)
        head = stacked[:, :, :-1].reshape(batch, m, (count - 1) * tile)
        out = jnp.concatenate([head, stacked[:, :, -1, count * tile - total :]], axis=-1)
    out = out[..., :out_cols]
    if operands.bias is not None:
        out = out + operands.bias.astype(jnp.float32)[:, None, :]
    return out.astype(problem.out_dtype)


def _tiles(problem: DotProblem, out_cols: int) -> tuple[int, int, int]:
    """Number of tiles, output columns per tile, and columns in all, rounded up to whole bytes of packed codes."""
    step = problem.rhs_format.element.per_byte if problem.transposed else 1
    total = -(-out_cols // step) * step
    contracted = problem.n if problem.transposed else problem.k
    most = max(step, TILE_ELEMENTS // max(1, problem.batch * contracted))
    count = -(-total // most)
    tile = -(-total // (count * step)) * step
    return -(-total // tile), tile, total


def _bytes(codes: Array) -> Array:
    return codes if codes.dtype == jnp.uint8 else lax.bitcast_convert_type(codes, jnp.uint8)


def _lhs_values(problem: DotProblem, operands: DotOperands) -> Array:
    fmt = problem.lhs_format
    if fmt is None:
        return operands.lhs.astype(jnp.float32)
    values = decode_elements(operands.lhs, fmt, problem.k)
    block_rows, block_k = fmt.kernel_block(problem.m, problem.k)
    scale = decode_scale(operands.lhs_scale, fmt)
    scale = expand_axis(expand_axis(scale, -1, block_k, problem.k), -2, block_rows, problem.m)
    values = values * scale
    if operands.lhs_global is not None:
        values = values * operands.lhs_global[:, :, None]
    return values


def _weight_tile(problem: DotProblem, operands: DotOperands, start: Array | int, size: int) -> Array:
    """``size`` output columns of dequantized weights: rows of W, or columns of W in the transposed product."""
    fmt = problem.rhs_format
    per_byte = fmt.element.per_byte
    block_rows, block_k = fmt.kernel_block(problem.n, problem.k)
    outer = operands.rhs_global
    if problem.transposed:
        stored = -(-size // per_byte)
        codes = lax.dynamic_slice_in_dim(operands.rhs, start // per_byte, stored, axis=2)
        columns = (start + jnp.arange(size, dtype=jnp.int32)) // block_k
        scale = jnp.take(decode_scale(operands.rhs_scale, fmt), columns, axis=2, mode="clip")
        scale = expand_axis(scale, -2, block_rows, problem.n)
        values = decode_elements(codes, fmt, size)
    else:
        codes = lax.dynamic_slice_in_dim(operands.rhs, start, size, axis=1)
        rows = (start + jnp.arange(size, dtype=jnp.int32)) // block_rows
        scale = jnp.take(decode_scale(operands.rhs_scale, fmt), rows, axis=1, mode="clip")
        scale = expand_axis(scale, -1, block_k, problem.k)
        values = decode_elements(codes, fmt, problem.k)
        if outer is not None and outer.shape[1] != 1:
            outer = lax.dynamic_slice_in_dim(outer, start, size, axis=1)
    values = values * scale
    return values if outer is None else values * outer[:, :, None]
