"""XLA alone doing the same job: expressions of dequantize + dot, with the packed weights as arguments of jit.

No single expression is the fastest on every machine and shape, so a kernel is compared with the fastest of several:
ways to decode codes (convert, table lookup, bit arithmetic) times ways to apply scales (on the weights in bfloat16 or
float32, at once or a tile at a time, on the output, on partial sums, on the activations). Left out because it lost
everywhere: a product and a sum without a dot, which XLA fuses into one loop but does not vectorize.

Every peer takes ``(x, data, scale, global_scale)`` and returns ``(M, N)`` bfloat16.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from jaxlowbit.formats import Format

Array = Any
BF16, F32 = jnp.bfloat16, jnp.float32

# Peers that expand activations or partial sums are left out where that intermediate would be larger than
# this.
MAX_INTERMEDIATE = 1 << 26
TILE_ROWS = 256  # 2 MiB of bfloat16 weights at K = 4096: what a core's L2 holds


@dataclasses.dataclass(frozen=True)
class Peer:
    """One expression. ``bf16_weights``: code * scale is rounded to bfloat16 once, which widens its error
    bound."""

    name: str
    fn: Callable[[Array, Array, Array, Array | None], Array]
    bf16_weights: bool


def contract(x: Array, w: Array) -> Array:
    """``x @ w.T`` with float32 accumulation."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=F32)


def _look_up(table: Array, index: Array) -> Array:
    return table.at[index].get(mode="promise_in_bounds")


# ---------------------------------------------------------------------------------------------------------------
# Ways to decode: name -> (function of the stored codes to (N, K) values, factor that the scale has to take)


def _e4m3_convert(data: Array) -> Array:
    return data.astype(F32)


def _e4m3_table(data: Array) -> Array:
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    return _look_up(jnp.asarray(codes.astype(np.float32)), lax.bitcast_convert_type(data, jnp.uint8))


def _e4m3_bits(data: Array) -> Array:
    """Exponent and mantissa moved to their places in float16, whose bias is 8 larger: values * 2**-8.

    float16 because F16C converts its subnormals exactly where float32 ones would be flushed. NaN codes become
    480.
    """
    bits = lax.bitcast_convert_type(data, jnp.uint8).astype(jnp.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return lax.bitcast_convert_type(half, jnp.float16).astype(F32)


def _pairs(low: Array, high: Array) -> Array:
    return jnp.stack([low, high], axis=-1).reshape(low.shape[0], -1)


def _e2m1_convert(data: Array) -> Array:
    codes = lax.bitcast_convert_type(data, jnp.float4_e2m1fn)
    return codes.astype(F32).reshape(data.shape[0], -1)


_E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def _e2m1_table(data: Array) -> Array:
    table = jnp.asarray(_E2M1)
    return _pairs(_look_up(table, data & 15), _look_up(table, data >> 4))


def _e2m1_pair_table(data: Array) -> Array:
    byte = np.arange(256)
    table = np.stack([_E2M1[byte & 15], _E2M1[byte >> 4]], axis=-1)
    return _look_up(jnp.asarray(table), data).reshape(data.shape[0], -1)


def _e2m1_half(nibble: Array) -> Array:
    """Bits moved to float16, whose bias is 14 larger: values * 2**-14."""
    half = ((nibble & 8) << 12) | ((nibble & 7) << 9)
    return lax.bitcast_convert_type(half, jnp.float16).astype(F32)


def _e2m1_bits(data: Array) -> Array:
    bits = data.astype(jnp.uint16)
    return _pairs(_e2m1_half(bits & 15), _e2m1_half(bits >> 4))


DECODERS: dict[str, dict[str, tuple[Callable[[Array], Array], float]]] = {
    "e4m3": {"convert": (_e4m3_convert, 1.0), "table": (_e4m3_table, 1.0), "bits": (_e4m3_bits, 2.0**8)},
    "e2m1": {
        "convert": (_e2m1_convert, 1.0),
        "table": (_e2m1_table, 1.0),
        "pair table": (_e2m1_pair_table, 1.0),
        "bits": (_e2m1_bits, 2.0**14),
    },
}


# ---------------------------------------------------------------------------------------------------------------
# Ways to apply scales


def _scales(fmt: Format, scale: Array, outer: Array | None, factor: float) -> Array:
    """Block scales in float32, times the outer scale and the decoder's factor."""
    if fmt.scale.name == "e8m0":
        values = lax.bitcast_convert_type(scale.astype(jnp.uint32) << 23, F32)
    else:
        values = scale.astype(F32)
    return values * factor if outer is None else values * (outer * factor)


def _expand(fmt: Format, grid: Array, n: int, k: int) -> Array:
    block_n, block_k = fmt.resolve_block(n, k)
    rows = jnp.broadcast_to(grid[:, None, :], (grid.shape[0], block_n, grid.shape[1])).reshape(-1, grid.shape[1])[:n]
    if grid.shape[1] == 1:
        return rows
    wide = jnp.broadcast_to(rows[:, :, None], (n, grid.shape[1], block_k))
    return wide.reshape(n, -1)[:, :k]


def peers(fmt: Format, m: int, n: int, k: int) -> Iterator[Peer]:
    """All expressions that apply to this format and problem."""
    for how, (decode, factor) in DECODERS[fmt.element.name].items():
        for dtype in (BF16, F32):
            yield Peer(
                f"{how}, weights in {jnp.dtype(dtype).name}, dot",
                functools.partial(_on_weights, fmt, decode, factor, dtype, n, k),
                dtype == BF16,
            )
            if fmt.block == (1, None):
                yield Peer(
                    f"{how}, {jnp.dtype(dtype).name} dot, scale on the output",
                    functools.partial(_on_output, decode, factor, dtype),
                    False,
                )
        if n % TILE_ROWS == 0 and n > TILE_ROWS:
            for dtype in (BF16, F32):
                whole = functools.partial(_on_weights, fmt, decode, factor, dtype, TILE_ROWS, k)
                name = f"{how}, tiles of {TILE_ROWS} rows in {jnp.dtype(dtype).name}"
                yield Peer(name, functools.partial(_in_tiles, fmt, whole, n), dtype == BF16)
    if fmt.element.packed:
        yield Peer("table, even and odd K apart", functools.partial(_even_odd, fmt, n, k), True)
    elif fmt.block == (128, 128) and n % 128 == 0 and k % 128 == 0:
        yield Peer("convert, float32 dots of K blocks, scale on partial sums", _on_partial_sums, False)
        if m * n * k // 128 <= MAX_INTERMEDIATE:
            yield Peer("convert, float32 batched dot, scale on x", _on_activations, False)


def _on_weights(
    fmt: Format,
    decode: Callable[[Array], Array],
    factor: float,
    dtype: Any,
    n: int,
    k: int,
    x: Array,
    data: Array,
    scale: Array,
    outer: Array | None,
) -> Array:
    values = decode(data)[:, :k] * _expand(fmt, _scales(fmt, scale, outer, factor), n, k)
    return contract(x.astype(dtype), values.astype(dtype)).astype(BF16)


def _in_tiles(
    fmt: Format, tile: Callable[..., Array], n: int, x: Array, data: Array, scale: Array, outer: Array | None
) -> Array:
    """One tile of weights at a time: what is dequantized stays in the caches and needs no fresh pages."""
    count = n // TILE_ROWS
    height = fmt.resolve_block(n, 1)[0]
    if height <= TILE_ROWS:
        scales = scale.reshape(count, TILE_ROWS // height, scale.shape[1])
    else:
        scales = jnp.broadcast_to(scale[None], (count, *scale.shape))
    parts = lax.map(lambda part: tile(x, *part, outer), (data.reshape(count, TILE_ROWS, data.shape[1]), scales))
    return jnp.moveaxis(parts, 0, 1).reshape(x.shape[0], n)


def _on_output(
    decode: Callable[[Array], Array], factor: float, dtype: Any, x: Array, data: Array, scale: Array, _outer: None
) -> Array:
    out = contract(x.astype(dtype), decode(data).astype(dtype))
    return (out * (scale[:, 0] * factor)[None, :]).astype(BF16)


def _even_odd(fmt: Format, n: int, k: int, x: Array, data: Array, scale: Array, outer: Array | None) -> Array:
    """Two half products instead of interleaved weights: a nibble's values never change places."""
    scales = _expand(fmt, _scales(fmt, scale, outer, 1.0), n, k)
    table = jnp.asarray(_E2M1)
    low = (_look_up(table, data & 15) * scales[:, 0::2]).astype(BF16)
    high = (_look_up(table, data >> 4) * scales[:, 1::2]).astype(BF16)
    return (contract(x[:, 0::2], low) + contract(x[:, 1::2], high)).astype(BF16)


def _on_partial_sums(x: Array, data: Array, scale: Array, _outer: None) -> Array:
    """One dot per 128 of K; its partial sums take the scale of their block."""
    total = jnp.zeros((x.shape[0], data.shape[0]), F32)
    for block in range(scale.shape[1]):
        part = np.s_[:, block * 128 : (block + 1) * 128]
        rows = jnp.repeat(scale[:, block], 128, total_repeat_length=data.shape[0])
        total = total + contract(x[part].astype(F32), data[part].astype(F32)) * rows[None, :]
    return total.astype(BF16)


def _on_activations(x: Array, data: Array, scale: Array, _outer: None) -> Array:
    """Every 128 rows of weights see their own scaled copy of x; the weights are only converted."""
    copies = x.astype(F32)[None] * jnp.repeat(scale, 128, axis=1, total_repeat_length=x.shape[1])[:, None, :]
    weights = data.astype(F32).reshape(scale.shape[0], 128, data.shape[1])
    out = jnp.einsum("gmk,gnk->mgn", copies, weights, preferred_element_type=F32)
    return out.reshape(x.shape[0], data.shape[0]).astype(BF16)


def bf16_dot(x: Array, w: Array) -> Array:
    """Unquantized bfloat16 weights: what a model without low-bit weights runs."""
    return contract(x, w).astype(BF16)


def f32_dot(x: Array, w: Array) -> Array:
    """Unquantized float32 weights."""
    return contract(x.astype(F32), w).astype(BF16)
