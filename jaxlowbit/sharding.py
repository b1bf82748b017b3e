"""Sharding: varying axes under shard_map, and the products under explicit meshes (``jax.make_mesh``'s default)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
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


def explicit(
    op: str,
    call: Callable[..., Array],
    x: Array,
    weight: ScaledArray,
    bias: Array | None,
    *,
    act_format: Format | None,
    act_scale: Array | None,
    out_dtype: str,
) -> Array:
    """``call(x, act_scale, weight, bias, out_dtype)`` on the shards of explicitly sharded operands.

    Rows (M) and output features (N) keep their sharding; a sharded K is contracted locally and summed with psum in
    float32 before the bias and the rounding. Nothing is gathered: layouts that would need it are refused, with the
    reshard that the caller may choose. Outside an explicit mesh this is the plain call.
    """
    mesh = explicit_mesh(x, weight, bias)
    if mesh is None:
        return call(x, act_scale, weight, bias, out_dtype)
    *lead, kx = _spec(x)
    n_axis, kw = _spec(weight.data)
    _check_axes(op, lead, kx, n_axis, kw)
    sizes = dict(mesh.shape)
    parts_k = math.prod(sizes[a] for a in _names(kx))
    parts_n = math.prod(sizes[a] for a in _names(n_axis))
    _check_blocks(op, weight, parts_n, parts_k)
    _check_act(op, act_format, lead, kx, static=act_scale is not None)
    grid = weight.scale.shape
    scale_spec = P(n_axis if grid[0] > 1 else None, kx if grid[1] > 1 else None)
    weight_spec = _weight_specs(weight, P(n_axis, kx), scale_spec)
    bias_spec = None if bias is None else P(n_axis)
    act_spec = None if act_scale is None else P()

    def shard(x: Array, act_scale: Array | None, weight: ScaledArray, bias: Array | None) -> Array:
        if parts_k == 1:
            return call(x, act_scale, weight, bias, out_dtype)
        out = lax.psum(call(x, act_scale, weight, None, "float32"), _names(kx))
        if bias is not None:
            out = out + jnp.broadcast_to(bias.astype(jnp.float32), out.shape)
        return out.astype(out_dtype)

    specs = (P(*lead, kx), act_spec, weight_spec, bias_spec)
    args = (x, act_scale, weight, bias)

    # The jit gives eager calls an abstract mesh, which is what shard_map and reshard take here.
    @jax.jit
    def run(*operands: Any) -> Array:
        placed = jax.tree.map(jax.sharding.reshard, operands, specs)
        return jax.shard_map(shard, in_specs=specs, out_specs=P(*lead, n_axis))(*placed)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh if hasattr(mesh, "abstract_mesh") else mesh):
        return run(*args)


def _weight_specs(weight: ScaledArray, data: P, scale: P) -> Any:
    return ScaledArray(
        data,
        scale,
        None if weight.global_scale is None else P(),
        format=weight.format,
        last_dim=weight.last_dim,
        row_splits=weight.row_splits,
    )


def _refuse(op: str, arg: str, *, expected: str, got: str, fix: str) -> NoReturn:
    errors.bad_value(op, arg, expected=expected, got=got, fix=fix)


def _check_axes(op: str, lead: list[Axes], kx: Axes, n_axis: Axes, kw: Axes) -> None:
    if _names(kx) != _names(kw):
        _refuse(
            op,
            "x",
            expected=f"the sharding of w's K, {kw!r}, on the last dimension",
            got=f"{kx!r}",
            fix="Use jax.sharding.reshard on x or w (resharding w moves the packed weight) so that K agrees.",
        )
    used = [name for axes in (*lead, kx) for name in _names(axes)]
    clash = sorted(set(used) & set(_names(n_axis)))
    if clash:
        _refuse(
            op,
            "w",
            expected="N sharded over mesh axes that x does not use",
            got=f"axes {clash} shard both w's N and x",
            fix=f"Gather the packed weight first: jax.sharding.reshard(w, P(None, {kw!r})).",
        )


def _check_blocks(op: str, weight: ScaledArray, parts_n: int, parts_k: int) -> None:
    block_rows, block_k = weight.format.resolve_block(weight.rows, weight.k)
    for axis, parts, extent, block, whole in (
        ("N", parts_n, weight.rows, block_rows, weight.format.block[0] is None),
        ("K", parts_k, weight.k, block_k, weight.format.block[1] is None),
    ):
        step = weight.format.element.per_byte if whole and axis == "K" else 1 if whole else block
        if parts > 1 and (extent % parts or (extent // parts) % step):
            _refuse(
                op,
                "w",
                expected=f"{axis} shards of whole {step}-element scale blocks",
                got=f"{axis}={extent} over {parts} shards with {weight.format.name}",
                fix=f"Replicate {axis} (jax.sharding.reshard), or use a mesh axis whose size leaves whole blocks.",
            )
    if parts_n > 1 and weight.row_splits:
        _refuse(
            op,
            "w",
            expected="N not sharded for a fused weight with row_splits",
            got=f"N over {parts_n} shards",
            fix="Shard the segments one by one (weight.segment(i)) and concatenate the outputs.",
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
