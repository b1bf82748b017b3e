"""Float64 NumPy reference for dequantize, dot and its transposed form, and a plain quantizer.

A reference that calls the code it checks proves nothing, so this module decodes through ``ml_dtypes``,
expands blocks with ``np.repeat`` and multiplies with ``@`` in float64. From the library it takes only the
fields of a ``Format`` (block, element name, scale name) and the leaves of a ``ScaledArray``.

Sources: OCP 8-bit Floating Point (OFP8) v1.0 (E4M3, E5M2), OCP Microscaling Formats (MX) v1.0 (E2M1, E8M0),
NVIDIA's NVFP4 description (E4M3 block scales under one float32 scale).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxlowbit.formats import Format

F64: TypeAlias = npt.NDArray[np.float64]
NumPy: TypeAlias = npt.NDArray[Any]

_CODE_DTYPE: dict[str, np.dtype[Any]] = {
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "e2m1": np.dtype(ml_dtypes.float4_e2m1fn),
}
_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
_SCALE_FLOOR = np.float32(2.0**-126)


class Product(NamedTuple):
    """A float64 product and what its error bound needs.

    Attributes:
      value: ``(..., M, N)``, the sums.
      magnitude: same shape, the sums of absolute values ``sum |a| |b| (+ |bias|)``.
      terms: number of products in one sum.
    """

    value: F64
    magnitude: F64
    terms: int


def nibbles(packed: Any) -> NumPy:
    """Bytes ``(..., n)`` as 4-bit codes ``(..., 2n)``: the low nibble comes first."""
    bytes_ = np.asarray(packed)
    out = np.empty((*bytes_.shape[:-1], 2 * bytes_.shape[-1]), np.uint8)
    out[..., 0::2] = bytes_ & 15
    out[..., 1::2] = bytes_ >> 4
    return out


def decode(data: Any, element: str) -> F64:
    """Codes as float64. ``data``: float8 arrays or their bytes; for E2M1 nibbles, one a byte."""
    codes = np.ascontiguousarray(np.asarray(data))
    values: F64 = codes.view(_CODE_DTYPE[element]).astype(np.float64)
    return values


def decode_scale(scale: Any, kind: str) -> F64:
    """Block scales as float64 multipliers. ``kind``: "f32" (any real float dtype), "e8m0" or "e4m3".

    E8M0 byte 0 is ``2**-127`` and byte 255 NaN, as MX v1.0 defines them.
    """
    stored = np.ascontiguousarray(np.asarray(scale))
    if kind == "e8m0":
        values: F64 = stored.view(np.dtype(ml_dtypes.float8_e8m0fnu)).astype(np.float64)
        return values
    if kind == "e4m3":
        return decode(stored, "e4m3")
    return stored.astype(np.float64)


def _spread(grid: F64, block: tuple[int | None, int | None], rows: int, k: int) -> F64:
    """One scale per element ``(rows, k)`` from the scale grid ``(grid_rows, grid_k)``; last blocks may be
    partial."""
    down = grid if block[0] is None else np.repeat(grid, block[0], axis=0)
    down = np.repeat(down, rows, axis=0) if block[0] is None else down[:rows]
    across = np.repeat(down, k if block[1] is None else block[1], axis=1)[:, :k]
    if across.shape != (rows, k):
        raise ValueError(f"scale grid {grid.shape} does not cover {(rows, k)} in blocks of {block}")
    return across


def _segments(fmt: Format, rows: int, splits: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """``(first row, last row, rows of the scale grid)`` of every fused segment."""
    edges = [0, *splits, rows]
    out = []
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        height = stop - start if fmt.block[0] is None else fmt.block[0]
        out.append((start, stop, math.ceil((stop - start) / max(height, 1))))
    return out


def _matrix(fmt: Format, data: NumPy, scale: NumPy, outer: NumPy, k: int, splits: tuple[int, ...]) -> F64:
    codes = nibbles(data)[:, :k] if fmt.element.name == "e2m1" else data
    values = decode(codes, fmt.element.name)
    scales = decode_scale(scale, fmt.scale.name)
    out, row = np.empty(values.shape), 0
    with np.errstate(invalid="ignore", over="ignore"):
        for index, (start, stop, height) in enumerate(_segments(fmt, len(values), splits)):
            part = scales[row : row + height]
            per_element = _spread(part, fmt.block, stop - start, k)
            out[start:stop] = values[start:stop] * per_element * float(outer[index])
            row += height
    return out


def dequantize(q: Any) -> F64:
    """Values of a ScaledArray (or of anything with its leaves and fields) in float64, of its logical
    shape."""
    fmt: Format = q.format
    data, scale = np.asarray(q.data), np.asarray(q.scale)
    one_row = data.ndim == 1
    if one_row:
        data, scale = data[None], scale[None]
    k = q.last_dim if q.last_dim is not None else data.shape[-1] * (2 if fmt.element.name == "e2m1" else 1)
    batch, splits = data.shape[:-2], tuple(q.row_splits)
    segments = len(splits) + 1
    outer = np.ones((*batch, segments)) if q.global_scale is None else np.asarray(q.global_scale, np.float64)
    outer = outer.reshape(*batch, segments)
    out = np.empty((*data.shape[:-1], k))
    for index in np.ndindex(*batch):
        out[index] = _matrix(fmt, data[index], scale[index], outer[index], k, splits)
    return out[..., 0, :] if one_row else out


def dense(x: Any) -> F64:
    """A ScaledArray's values, or a plain array, in float64."""
    return dequantize(x) if hasattr(x, "format") and hasattr(x, "scale") else np.asarray(x).astype(np.float64)


def dot(lhs: Any, rhs: Any, bias: Any = None) -> Product:
    """``out[..., m, n] = sum_k lhs[..., m, k] * rhs[n, k] (+ bias[n])`` in float64.

    Args:
      lhs: plain ``(..., K)`` or a ScaledArray.
      rhs: plain ``(N, K)`` or a ScaledArray; with a batch ``(B, N, K)``, lhs is ``(B, M, K)``.
      bias: ``(N,)`` or None.
    """
    a, b = dense(lhs), np.swapaxes(dense(rhs), -1, -2)
    with np.errstate(invalid="ignore", over="ignore"):
        value, magnitude = a @ b, np.abs(a) @ np.abs(b)
        if bias is not None:
            extra = np.asarray(bias).astype(np.float64)
            value, magnitude = value + extra, magnitude + np.abs(extra)
    return Product(value, magnitude, a.shape[-1])


def dot_transposed(cotangent: Any, rhs: Any) -> Product:
    """``dx[..., m, k] = sum_n cotangent[..., m, n] * rhs[n, k]``: the gradient of ``dot`` with respect to
    lhs."""
    g, w = dense(cotangent), dense(rhs)
    with np.errstate(invalid="ignore", over="ignore"):
        return Product(g @ w, np.abs(g) @ np.abs(w), g.shape[-1])


class Quantized(NamedTuple):
    """What ``quantize`` returns: the leaves and fields that ``dequantize`` reads."""

    data: NumPy
    scale: NumPy
    global_scale: NumPy | None
    format: Format
    last_dim: int | None = None
    row_splits: tuple[int, ...] = ()


def quantize(x: Any, fmt: Format, *, global_scale: float | None = None, pow2: bool = False) -> Quantized:
    """Quantizes one matrix ``(rows, K)`` with loops over its blocks, rounding to nearest even.

    float32 scales: ``max(amax / largest, 2**-126)``, one float32 division; with ``pow2`` rounded up to a
    power of two. E8M0 scales: the smallest power of two that leaves the block unclipped ("rceil"). E4M3
    scales (NVFP4): the block's float32 ``amax / 6 / global_scale`` rounded to E4M3, at least ``2**-9``;
    ``global_scale`` is amax / (448 * 6) unless given. A block that holds NaN or inf gets scale NaN. K must be
    even for E2M1.
    """
    values = np.asarray(x).astype(np.float32)
    rows, k = values.shape
    largest = np.float32(_LARGEST[fmt.element.name])
    high, wide = fmt.block[0] or max(rows, 1), fmt.block[1] or max(k, 1)
    grid = (math.ceil(rows / high), math.ceil(k / wide))
    outer = np.float32(1.0)
    if fmt.two_level:
        top = np.max(np.abs(values), initial=np.float32(0))
        outer = np.float32(global_scale) if global_scale is not None else np.float32(top / np.float32(448 * 6))
        outer = np.float32(max(outer, _SCALE_FLOOR))
    scales = np.empty(grid, _stored(fmt))
    codes = np.empty((rows, k), _CODE_DTYPE[fmt.element.name])
    for i, j in np.ndindex(*grid):
        where = (slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide))
        block = values[where]
        scales[i, j] = _block_scale(np.max(np.abs(block)), largest, outer, fmt, pow2)
        step = np.float32(decode_scale(scales[i : i + 1, j], fmt.scale.name)[0]) * outer
        with np.errstate(invalid="ignore", over="ignore"):
            codes[where] = np.clip(block / step, -largest, largest).astype(codes.dtype)
    data: NumPy = codes
    if fmt.element.name == "e2m1":
        bits = codes.view(np.uint8)
        data = bits[:, 0::2] | (bits[:, 1::2] << 4)
    return Quantized(data, scales, np.asarray(outer) if fmt.two_level else None, fmt)


def _stored(fmt: Format) -> np.dtype[Any]:
    kinds: dict[str, np.dtype[Any]] = {
        "f32": np.dtype(np.float32),
        "e8m0": np.dtype(np.uint8),
        "e4m3": _CODE_DTYPE["e4m3"],
    }
    return kinds[fmt.scale.name]


def _block_scale(amax: Any, largest: np.float32, outer: np.float32, fmt: Format, pow2: bool) -> Any:
    """The stored scale of one block whose largest magnitude is ``amax`` (float32)."""
    if not np.isfinite(amax):
        return 255 if fmt.scale.name == "e8m0" else math.nan
    if fmt.scale.name == "e8m0":
        return _ceil_log2(float(amax), float(largest)) + 127
    if fmt.scale.name == "e4m3":
        ideal = np.float32(np.float32(amax / largest) / outer)
        return min(max(ideal, np.float32(2.0**-9)), np.float32(_LARGEST["e4m3"]))
    scale = max(np.float32(amax / largest), _SCALE_FLOOR)
    return np.float32(2.0) ** _ceil_log2(float(scale), 1.0) if pow2 else scale


def _ceil_log2(amax: float, largest: float) -> int:
    """Smallest e in -127..127 with ``amax <= largest * 2**e``; exact, since float64 holds both sides."""
    e = -127
    while e < 127 and amax > math.ldexp(largest, e):
        e += 1
    return e
