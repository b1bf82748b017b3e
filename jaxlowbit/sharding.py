"""Sharding: varying axes under shard_map, and every op under explicit meshes (``jax.make_mesh``'s default)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxlowbit import errors
from jaxlowbit.formats import Format
from jaxlowbit.scaled_array import ScaledArray

Array = Any
Axes = Any  # one entry of a PartitionSpec: None, a mesh axis name, or a tuple of names


def varying(x: Any) -> frozenset[str]:
    """Mesh axes over which a value differs between the shards of a shard_map; empty outside of one."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def align_vma(tree: Any) -> Any:
    """Every array of a pytree varying over the union of the arrays' axes.

    Belongs outside custom_vjp: the transpose of the pcast inserts the psum. A custom call has no rule by which JAX
    could do this itself; without it the gradient of an operand that is replicated over an axis would silently miss
    the sum over that axis.
    """
    leaves, structure = jax.tree.flatten(tree)
    union: frozenset[str] = frozenset().union(*map(varying, leaves))
    if not union:
        return tree

    def cast(x: Any) -> Any:
        missing = tuple(sorted(union - varying(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.unflatten(structure, [cast(x) for x in leaves])


def explicit_mesh(*operands: Any) -> Any:
    """The mesh whose Explicit axes shard any of the arrays, or None: then JAX needs no help from us."""
    for x in jax.tree.leaves(operands):
        sharding = jax.typeof(x).sharding
        mesh = sharding.mesh
        if not mesh.empty and AxisType.Explicit in mesh.axis_types and any(a is not None for a in sharding.spec):
            return mesh
    return None


def _spec(x: Any) -> tuple[Axes, ...]:
    spec: tuple[Axes, ...] = tuple(jax.typeof(x).sharding.spec)
    missing: int = x.ndim - len(spec)
    return spec + (None,) * missing


def _names(axes: Axes) -> tuple[str, ...]:
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _parts(mesh: Any, axes: Axes) -> int:
    sizes = dict(mesh.shape)
    return math.prod(sizes[name] for name in _names(axes))


def _on_shards(mesh: Any, call: Callable[..., Any], args: Any, in_specs: Any, out_specs: Any) -> Any:
    """``call`` on the shards of ``args``, whose layouts the caller has checked: placing them gathers nothing large."""

    # The jit gives eager calls an abstract mesh, which is what shard_map and reshard take here.
    @jax.jit
    def run(*operands: Any) -> Any:
        placed = jax.tree.map(jax.sharding.reshard, operands, in_specs)
        return jax.shard_map(call, in_specs=in_specs, out_specs=out_specs)(*placed)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh if hasattr(mesh, "abstract_mesh") else mesh):
        return run(*args)


def mapped(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` with a vmap that keeps the sharding of an explicitly sharded mapped axis.

    Each shard maps over its own examples under shard_map. Our own batching rules flatten the mapped axis into
    others, which loses its sharding or has no answer. Forward only: it belongs inside a rule of differentiation.
    """

    @jax.custom_batching.custom_vmap
    def outer(*operands: Any) -> Any:
        return call(*operands)

    @outer.def_vmap
    def rule(size: int, batched: Any, *operands: Any) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(operands)
        flags = jax.tree.leaves(batched)
        in_axes = tuple(0 if flag else None for flag in flags)

        def flat(*leaves: Any) -> Any:
            return call(*jax.tree.unflatten(tree, leaves))

        in_front = [x for x, flag in zip(leaves, flags, strict=True) if flag]
        mesh = explicit_mesh(in_front)
        fronts = [] if mesh is None else [_spec(x)[0] for x in in_front]
        front = next((axes for axes in fronts if axes is not None), None)
        if front is None:
            out = mapped(jax.vmap(flat, in_axes=in_axes, axis_size=size))(*leaves)
        else:
            # Mapped again, for another vmap around this one, whose axis comes into the shards.
            local = mapped(jax.vmap(flat, in_axes=in_axes, axis_size=size // _parts(mesh, front)))
            specs = tuple(P(front) if flag else P() for flag in flags)
            out = _on_shards(mesh, lambda *shards: local(*align_vma(shards)), leaves, specs, P(front))
        return out, jax.tree.map(lambda _: True, out)

    return outer


def explicit(
    op: str,
    call: Callable[..., Array],
    x: Array | ScaledArray,
    weight: ScaledArray,
    bias: Array | None,
    *,
    act_format: Format | None,
    act_scale: Array | None,
    out_dtype: str,
) -> Array:
    """``call(x, act_scale, weight, bias, out_dtype)`` on the shards of explicitly sharded operands.

    Rows (M) and output features (N) keep their sharding; a sharded K is contracted locally and summed with psum in
    float32 before the bias and the rounding. Neither activations nor codes are gathered: layouts that would need it are
    refused, with the reshard that the caller may choose; scales and bias, which are small, are laid as the codes are.
    Outside an explicit mesh this is the plain call.
    """
    mesh = explicit_mesh(x, weight, bias)
    if mesh is None:
        return call(x, act_scale, weight, bias, out_dtype)
    quantized = isinstance(x, ScaledArray)
    left, right = ("lhs", "rhs") if quantized else ("x", "w")
    *lead, kx = _spec(x.data if quantized else x)
    n_axis, kw = _spec(weight.data)
    _check_axes(op, (left, right), lead, kx, n_axis, kw)
    parts_k, parts_n = _parts(mesh, kx), _parts(mesh, n_axis)
    _check_blocks(op, right, "N", weight, parts_n, parts_k)
    if quantized:
        _check_blocks(op, left, "M", x, _parts(mesh, lead[-1]) if lead else 1, parts_k)
    _check_act(op, act_format, lead, kx, static=act_scale is not None)
    x_spec = _scaled_specs(x, [*lead, kx]) if quantized else P(*lead, kx)
    bias_spec = None if bias is None else P(n_axis)
    act_spec = None if act_scale is None else P()

    def shard(x: Any, act_scale: Array | None, weight: ScaledArray, bias: Array | None) -> Array:
        if parts_k == 1:
            return call(x, act_scale, weight, bias, out_dtype)
        out = lax.psum(call(x, act_scale, weight, None, "float32"), _names(kx))
        if bias is not None:
            out = out + jnp.broadcast_to(bias.astype(jnp.float32), out.shape)
        return out.astype(out_dtype)

    specs = (x_spec, act_spec, _scaled_specs(weight, [n_axis, kw]), bias_spec)
    out: Array = _on_shards(mesh, shard, (x, act_scale, weight, bias), specs, P(*lead, n_axis))
    return out


def _scaled_specs(q: ScaledArray, data: list[Axes]) -> Any:
    """Specs of a ScaledArray's leaves from that of its codes; a scale for the whole extent is replicated."""
    *batch, rows, k = [None, *data] if q.ndim == 1 else data
    grid = q.scale.shape
    scale = [k if grid[-1] > 1 else None]
    if q.ndim > 1:
        scale = [*batch, rows if grid[-2] > 1 else None, *scale]
    outer = None if q.global_scale is None else P() if q.row_splits else P(*batch)
    return dataclasses.replace(q, data=P(*data), scale=P(*scale), global_scale=outer)


def explicit_quantize(
    call: Callable[..., Any],
    fmt: Format,
    x: Array,
    given: Array | None,
    outer: Array | None,
    rng: Array | None,
    *,
    values: bool,
) -> Any:
    """``call(x, given, outer, rng)`` on the shards of an explicitly sharded ``x (..., R, K)`` or ``(K,)``.

    Shards hold whole scale blocks, so that each quantizes as the whole would; other layouts are refused. The call
    returns values of x's shape, or else codes, scales and global scale, which are sharded as x is. For stochastic
    rounding each shard counts its elements from where it stands.
    """
    mesh = explicit_mesh(x, given, outer)
    if mesh is None:
        return call(x, given, outer, rng)
    spec = _spec(x)
    *batch, rows, k = spec if x.ndim > 1 else (None, *spec)
    _check_quantized(mesh, fmt, x, rows, k, given=given is not None, outer=outer is not None)
    offsets = None if rng is None else _shard_offsets(mesh, fmt, x, spec)
    by_rows = [None if fmt.block[0] is None and _parts(mesh, rows) > 1 else rows] if x.ndim > 1 else []
    scale_spec = P(*batch, *by_rows, None if fmt.block[1] is None and _parts(mesh, k) > 1 else k)
    names = [name for axes in spec for name in _names(axes)]

    def shard(x: Array, given: Array | None, outer: Array | None, rng: Array | None) -> Any:
        if rng is not None and offsets is not None and names:
            hi, lo = jnp.asarray(offsets)[lax.axis_index(tuple(names))]
            low = rng[2] + lo
            rng = jnp.stack([rng[0], rng[1], low, rng[3] + hi + (low < lo).astype(np.uint32)])
        out = call(x, given, outer, rng)
        if values:
            return out
        codes, scale, computed = out
        # What was given comes back as it was: a result of the kernel would count as different between the shards.
        kept = given is not None and fmt.element.has_nan
        return codes, given if kept else scale, computed if outer is None else outer

    outer_spec = P(*batch) if fmt.two_level else None
    in_specs = (
        P(*spec),
        None if given is None else scale_spec,
        None if outer is None else outer_spec,
        None if rng is None else P(),
    )
    out_specs = P(*spec) if values else (P(*spec), scale_spec, outer_spec)
    return _on_shards(mesh, shard, (x, given, outer, rng), in_specs, out_specs)


def _shard_offsets(mesh: Any, fmt: Format, x: Array, spec: tuple[Axes, ...]) -> Any:
    """Elements before each shard, uint32 (shards, 2) as (hi, lo), in the order of their places in x."""
    parts = [_parts(mesh, axes) for axes in spec]
    local = [size // part for size, part in zip(x.shape, parts, strict=True)]
    last = max((i for i, part in enumerate(parts) if part > 1), default=0)
    if any(size > 1 for size in local[:last]):
        _refuse(
            "quantize",
            "x",
            expected="shards of consecutive elements for stochastic rounding",
            got=f"{x.shape} sharded as {P(*spec)}",
            fix="Shard the first dimension alone (jax.sharding.reshard), or quantize the parts one by one.",
        )
    per_byte = fmt.element.per_byte
    step = math.prod(local[:-1]) * (-(-local[-1] // per_byte) * per_byte)
    counts = [i * step for i in range(math.prod(parts))]
    return np.array([(count >> 32 & 0xFFFFFFFF, count & 0xFFFFFFFF) for count in counts], np.uint32)


def _refuse(op: str, arg: str, *, expected: str, got: str, fix: str) -> NoReturn:
    errors.bad_value(op, arg, expected=expected, got=got, fix=fix)


def _check_axes(op: str, args: tuple[str, str], lead: list[Axes], kx: Axes, n_axis: Axes, kw: Axes) -> None:
    left, right = args
    if _names(kx) != _names(kw):
        _refuse(
            op,
            left,
            expected=f"the sharding of {right}'s K, {kw!r}, on the last dimension",
            got=f"{kx!r}",
            fix=f"Use jax.sharding.reshard on {left} or {right} (the latter moves packed weight) so that K agrees.",
        )
    used = [name for axes in (*lead, kx) for name in _names(axes)]
    clash = sorted(set(used) & set(_names(n_axis)))
    if clash:
        _refuse(
            op,
            right,
            expected=f"N sharded over mesh axes that {left} does not use",
            got=f"axes {clash} shard both {right}'s N and {left}",
            fix=f"Gather the packed weight first: jax.sharding.reshard({right}, P(None, {kw!r})).",
        )


def _check_blocks(op: str, arg: str, rows_name: str, q: ScaledArray, parts_rows: int, parts_k: int) -> None:
    rows = 1 if q.ndim == 1 else q.rows
    block_rows, block_k = q.format.resolve_block(rows, q.k)
    for axis, parts, extent, block, whole in (
        (rows_name, parts_rows, rows, block_rows, q.format.block[0] is None),
        ("K", parts_k, q.k, block_k, q.format.block[1] is None),
    ):
        step = q.format.element.per_byte if whole and axis == "K" else 1 if whole else block
        if parts > 1 and (extent % parts or (extent // parts) % step):
            _refuse(
                op,
                arg,
                expected=f"{axis} shards of whole {step}-element scale blocks",
                got=f"{axis}={extent} over {parts} shards with {q.format.name}",
                fix=f"Replicate {axis} (jax.sharding.reshard), or use a mesh axis whose size leaves whole blocks.",
            )
    if parts_rows > 1 and q.row_splits:
        _refuse(
            op,
            arg,
            expected=f"{rows_name} not sharded for a fused weight with row_splits",
            got=f"{rows_name} over {parts_rows} shards",
            fix="Shard the segments one by one (weight.segment(i)) and concatenate the outputs.",
        )


def _check_quantized(mesh: Any, fmt: Format, x: Array, rows: Axes, k: Axes, *, given: bool, outer: bool) -> None:
    extents = (x.shape[-2] if x.ndim > 1 else 1, x.shape[-1])
    per_byte = fmt.element.per_byte
    for name, axes, extent, block, unit in (
        ("row", rows, extents[0], fmt.block[0], 1),
        ("K", k, extents[1], fmt.block[1], per_byte),
    ):
        parts = _parts(mesh, axes)
        if parts == 1:
            continue
        if block is None and not (given and fmt.element.has_nan):
            _refuse(
                "quantize",
                "x",
                expected="scale blocks inside one shard",
                got=f"{fmt.name}, whose scale spans every {name}, over {parts} shards",
                fix="Pass a static scale"
                + (" with an FP8 format" if not fmt.element.has_nan else "")
                + ", name a format with finer blocks (FP8_1X128, MXFP8), or use jax.sharding.reshard first.",
            )
        step = math.lcm(block or 1, unit)
        if (extent // parts) % step:
            _refuse(
                "quantize",
                "x",
                expected=f"{name} shards of whole {step}-element scale blocks",
                got=f"{extent} over {parts} shards with {fmt.name}",
                fix="Name a format with finer blocks, or replicate the dimension with jax.sharding.reshard.",
            )
        if fmt.two_level and not outer:
            _refuse(
                "quantize",
                "global_scale",
                expected=f"a static one for {fmt.name} on a matrix that is sharded",
                got=f"none, with {name} over {parts} shards",
                fix="Pass global_scale, name a one-level format (MXFP4), or use jax.sharding.reshard first.",
            )


def _check_act(op: str, fmt: Format | None, lead: list[Axes], kx: Axes, *, static: bool) -> None:
    if fmt is None or static:
        return
    spans_rows = fmt.block[0] is None or fmt.two_level
    if spans_rows and any(_names(a) for a in (*lead, kx)):
        _refuse(
            op,
            "act",
            expected=f"a static act_scale for {fmt.name} activations on a sharded x",
            got="a scale computed from one shard's values",
            fix="Pass act_scale, or a format with a scale per row (FP8_1X128, FP8_CHANNEL).",
        )
    if fmt.block[1] is None and _names(kx):
        _refuse(
            op,
            "act",
            expected="an activation scale block inside one K shard",
            got=f"{fmt.name}, whose scale spans all of K, with K sharded over {kx!r}",
            fix="Use act=FP8_1X128 or act=None, or replicate K.",
        )
