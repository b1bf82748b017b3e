"""ScaledArray: codes, scales and an optional global scale that travel together as one pytree."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jaxlowbit import codecs, errors
from jaxlowbit.formats import Format

Array = Any


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class ScaledArray:
    """A quantized array: ``value = decode(data) * decode(scale) [* global_scale]``.

    The last two logical dimensions are the matrix ``(rows, K)``; dimensions before them are a batch in which every
    matrix has its own scales, so that ``scan``, ``vmap`` and ``tree.map(stack)`` need no special case. A 1-D array is
    one row. Shape is derived from ``data``, never stored, so a transformation cannot make it stale; unflattening never
    validates (JAX unflattens with placeholder leaves): call ``validate()``.

    Attributes:
      data: codes. E4M3/E5M2 ``(..., rows, K)`` in their float8 dtype; E2M1 ``uint8 (..., rows, ceil(K/2))``, the low
        nibble holding the even K index.
      scale: ``(..., grid_rows, grid_k)``, see ``Format.grid``; float32, uint8 (E8M0) or float8_e4m3fn.
      global_scale: float32, the batch's shape (``()`` for one matrix), or batch + (segments,) with ``row_splits``;
        ``None`` for one-level formats.
      format: static descriptor; it knows the block.
      last_dim: static logical K where ``data`` cannot tell it (odd K in packed FP4); ``None`` otherwise.
      row_splits: static, strictly increasing interior row boundaries of fused weights (gate/up, QKV); the scale grid
        starts anew at each. ``()`` for one segment.

    Invariants, as ``validate()`` asserts them: ``data.dtype == format.element.storage``; ``scale.dtype`` is one the
    format's scale type accepts; ``scale.shape == (*batch, *grid)``; ``global_scale`` present exactly if
    ``format.two_level``.
    """

    data: Array
    scale: Array
    global_scale: Array | None = None
    format: Format = dataclasses.field(kw_only=True)
    last_dim: int | None = dataclasses.field(default=None, kw_only=True)
    row_splits: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)

    @property
    def k(self) -> int:
        """Logical length of the last dimension."""
        if self.last_dim is not None:
            return self.last_dim
        return int(self.data.shape[-1]) * self.format.element.per_byte

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.data.shape[:-1], self.k)

    @property
    def ndim(self) -> int:
        return len(self.data.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        return int(self.data.shape[-2]) if self.ndim > 1 else 1

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and global scale."""
        leaves = [x for x in (self.data, self.scale, self.global_scale) if x is not None]
        return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in leaves)

    @property
    def segments(self) -> list[tuple[int, int]]:
        """``(start, stop)`` rows of each segment."""
        edges = (0, *self.row_splits, self.rows)
        return list(zip(edges[:-1], edges[1:], strict=True))

    @property
    def grid(self) -> tuple[int, int]:
        """Shape of one matrix's scale grid, summed over the row segments."""
        grids = [self.format.grid(stop - start, self.k) for start, stop in self.segments]
        return (sum(g[0] for g in grids), grids[0][1])

    def segment(self, index: int) -> ScaledArray:
        """One row segment as a ScaledArray of its own (a view of the same rows and scales)."""
        start, stop = self.segments[index]
        first = sum(self.format.grid(b - a, self.k)[0] for a, b in self.segments[:index])
        count = self.format.grid(stop - start, self.k)[0]
        outer = self.global_scale
        if outer is not None and self.row_splits:
            outer = outer[..., index]
        return dataclasses.replace(
            self,
            data=self.data[..., start:stop, :],
            scale=self.scale[..., first : first + count, :],
            global_scale=outer,
            row_splits=(),
        )

    def validate(self, op: str = "ScaledArray", arg: str = "value") -> ScaledArray:
        """Returns self, or raises TypeError/ValueError naming what does not fit."""
        fmt, element = self.format, self.format.element
        if np.dtype(self.data.dtype) != element.storage:
            errors.bad_type(
                op,
                f"{arg}.data",
                expected=f"{element.storage} codes for {fmt.name}",
                got=self.data,
                fix="Bit-cast the codes to that dtype; a value conversion would change them.",
            )
        if np.dtype(self.scale.dtype) not in fmt.scale.accepts:
            errors.bad_type(
                op,
                f"{arg}.scale",
                expected=f"a dtype of {[str(d) for d in fmt.scale.accepts]} for {fmt.name}",
                got=self.scale,
                fix="Convert the scale, or name the format whose scales these are.",
            )
        if self.last_dim is not None and -(-self.last_dim // element.per_byte) != self.data.shape[-1]:
            errors.bad_value(
                op,
                f"{arg}.last_dim",
                expected=f"a length stored in {self.data.shape[-1]} bytes",
                got=f"last_dim={self.last_dim}",
                fix="Leave last_dim None unless K is odd in a packed format.",
            )
        if list(self.row_splits) != sorted({s for s in self.row_splits if 0 < s < self.rows}):
            errors.bad_value(
                op,
                f"{arg}.row_splits",
                expected=f"strictly increasing rows inside 1..{self.rows - 1}",
                got=f"{self.row_splits}",
                fix="Give interior boundaries only, without 0 and the last row.",
            )
        batch = tuple(self.data.shape[:-2])
        grid = (*batch, *self.grid) if self.ndim > 1 else self.grid[1:]
        if tuple(self.scale.shape) != grid:
            errors.bad_value(
                op,
                f"{arg}.scale",
                expected=f"shape {grid} for {fmt.name} codes of logical shape {self.shape}",
                got=self.scale,
                fix="The block comes from the format: pass a Format whose block fits (format.with_block).",
            )
        self._validate_global(op, arg, batch)
        return self

    def _validate_global(self, op: str, arg: str, batch: tuple[int, ...]) -> None:
        if (self.global_scale is not None) != self.format.two_level:
            need = "a float32 global_scale" if self.format.two_level else "no global_scale"
            errors.bad_value(
                op,
                f"{arg}.global_scale",
                expected=f"{need} for {self.format.name}",
                got="none" if self.global_scale is None else self.global_scale,
                fix="NVFP4 has two levels of scales, the other formats one.",
            )
        if self.global_scale is None:
            return
        shape = (*batch, len(self.segments)) if self.row_splits else batch
        if tuple(self.global_scale.shape) != shape:
            errors.bad_value(
                op,
                f"{arg}.global_scale",
                expected=f"shape {shape} (one per matrix{' and row segment' if self.row_splits else ''})",
                got=self.global_scale,
                fix="Keep one outer scale per matrix and per fused segment; never merge them.",
            )

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """Values in ``dtype``: decoded and scaled in float32, rounded once.

        Not differentiable with respect to the codes and scales: they are frozen (integer and float8 leaves).
        """
        if self.row_splits:
            parts = [self.segment(i).dequantize(dtype) for i in range(len(self.segments))]
            return jnp.concatenate(parts, axis=-2)
        values = decode_elements(jnp.asarray(self.data), self.format, self.k)
        block_rows, block_k = self.format.resolve_block(self.rows, self.k)
        for scale in scale_factors(jnp.asarray(self.scale), self.format):
            scale = expand_axis(scale, -1, block_k, self.k)
            if self.ndim > 1:
                scale = expand_axis(scale, -2, block_rows, self.rows)
            values = values * scale
        if self.global_scale is not None:
            outer = jnp.asarray(self.global_scale, jnp.float32)
            values = values * outer.reshape(outer.shape + (1,) * (values.ndim - outer.ndim))
        result: jax.Array = values.astype(dtype)
        return result

    @property
    def mT(self) -> ScaledArray:
        """The transposed matrix with its codes unchanged: byte-wide formats only (FP4 is packed along K)."""
        if self.format.element.packed or self.row_splits or self.ndim < 2:
            errors.bad_value(
                "ScaledArray",
                "mT",
                expected="a byte-wide format, at least two dimensions and one row segment",
                got=f"{self!r}",
                fix="Dequantize, transpose and quantize again (that rounds once more), or keep both copies.",
            )
        return dataclasses.replace(
            self,
            data=jnp.swapaxes(self.data, -1, -2),
            scale=jnp.swapaxes(self.scale, -1, -2),
            format=self.format.transposed,
        )

    def __repr__(self) -> str:
        if not (hasattr(self.data, "shape") and hasattr(self.scale, "shape")):
            return f"ScaledArray({self.format.name}, leaves={self.data!r}, {self.scale!r}, {self.global_scale!r})"
        shape = ",".join(map(str, self.shape))
        splits = f", row_splits={self.row_splits}" if self.row_splits else ""
        return f"ScaledArray({self.format.name}[{shape}], {self.nbytes} bytes{splits})"


def _deserialize(data: bytearray | bytes) -> tuple[Format, int | None, tuple[int, ...]]:
    fmt, last_dim, row_splits = json.loads(bytes(data))
    return Format.from_json(fmt), last_dim, tuple(row_splits)


jax.tree_util.register_dataclass(
    ScaledArray,
    data_fields=["data", "scale", "global_scale"],
    meta_fields=["format", "last_dim", "row_splits"],
)


jax.export.register_pytree_node_serialization(
    ScaledArray,
    serialized_name="jaxlowbit.ScaledArray",
    serialize_auxdata=lambda aux: json.dumps([aux[0].to_json(), aux[1], list(aux[2])]).encode(),
    deserialize_auxdata=_deserialize,
    from_children=lambda aux, children: ScaledArray(
        *children, format=aux[0], last_dim=aux[1], row_splits=tuple(aux[2])
    ),
)


def decode_elements(data: Array, fmt: Format, k: int) -> Array:
    """Codes as float32 values ``(..., k)``; packed codes are unpacked, an odd tail dropped."""
    if fmt.element.packed:
        return codecs.unpack_e2m1(data, length=k)
    return codecs.decode(data, fmt.element.name)


def decode_scale(scale: Array, fmt: Format) -> Array:
    """Block scales as float32 multipliers."""
    if fmt.scale.name == "e8m0":
        return codecs.decode_e8m0(scale)
    if fmt.scale.name == "e4m3":
        return codecs.decode(scale, "e4m3")
    return jnp.asarray(scale, jnp.float32)


def scale_factors(scale: Array, fmt: Format) -> tuple[Array, ...]:
    """Float32 factors to multiply by one after the other: one, but two for E8M0, whose 2**-127 is a subnormal."""
    if fmt.scale.name == "e8m0":
        return codecs.e8m0_factors(scale)
    return (decode_scale(scale, fmt),)


def expand_axis(scale: Array, axis: int, block: int, length: int) -> Array:
    """Repeats each scale over its block along ``axis`` and cuts the partial last block.

    A broadcast and a reshape, not a gather: XLA fuses it into the product that follows.
    """
    axis = axis % scale.ndim
    if block == 1 or scale.shape[axis] == 1:
        return scale  # one per element already, or one for the whole axis: the product broadcasts it
    shape = (*scale.shape[: axis + 1], block, *scale.shape[axis + 1 :])
    wide = jnp.broadcast_to(jnp.expand_dims(scale, axis + 1), shape)
    wide = wide.reshape(*scale.shape[:axis], scale.shape[axis] * block, *scale.shape[axis + 1 :])
    return jax.lax.slice_in_dim(wide, 0, length, axis=axis)
