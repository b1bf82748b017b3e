"""A Llama-style decoder in plain JAX: functions over a pytree of parameters, the layers stacked and scanned.

A base weight is either a plain array ``(L, N, K)`` or a ``ScaledArray`` of that logical shape, and ``linear`` is the
only function that knows. Everything else (norms, attention, the tied embedding) is ordinary JAX.

Shapes: B batch, T positions, H hidden size, L layers, D head size, V vocabulary. Weights are (out, in).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

import jaxlowbit

Array: TypeAlias = jax.Array
Weight: TypeAlias = "Array | jaxlowbit.ScaledArray"
Params: TypeAlias = dict[str, Any]

LINEARS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
COMPUTE = jnp.bfloat16  # what enters a matrix product; sums, norms and the residual stream are float32


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the decoder. ``heads`` query heads share ``kv_heads`` key/value heads."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    rope_theta: float
    norm_eps: float

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """``(N, K)`` of each of the seven linears of a layer."""
        h, f, kv = self.hidden, self.ffn, self.kv_heads * self.head_dim
        return {
            "attn_q": (h, h),
            "attn_k": (kv, h),
            "attn_v": (kv, h),
            "attn_output": (h, h),
            "ffn_gate": (f, h),
            "ffn_up": (f, h),
            "ffn_down": (h, f),
        }


class Execution(NamedTuple):
    """Static choices of a forward pass."""

    implementation: str | None = None  # of jaxlowbit's dots: "native", "xla" or None
    lora_scale: float = 2.0  # alpha / rank


def linear(x: Array, w: Weight, implementation: str | None) -> Array:
    """``x (..., K)`` times one layer's ``w (N, K)``: ``(..., N)`` in x's dtype.

    A packed weight goes through the library: ``fp4_dot`` for 4-bit codes with bfloat16 activations, ``fp8_dot`` for
    8-bit codes with activations quantized on the fly, the way serving engines run such checkpoints.
    """
    if not isinstance(w, jaxlowbit.ScaledArray):
        return jnp.einsum("...k,nk->...n", x, w, preferred_element_type=jnp.float32).astype(x.dtype)
    if w.format.element.packed:
        return jaxlowbit.fp4_dot(x, w, act=None, implementation=implementation)
    return jaxlowbit.fp8_dot(x, w, act="dynamic", implementation=implementation)


def adapted(x: Array, name: str, base: Params, lora: Params | None, how: Execution) -> Array:
    """The frozen linear plus its low-rank adapter, if there is one: ``W x + scale * B (A x)``."""
    y = linear(x, base[name], how.implementation)
    if lora is None:
        return y
    a, b = (lora[name][key].astype(x.dtype) for key in ("a", "b"))
    return y + how.lora_scale * jnp.einsum("...r,nr->...n", jnp.einsum("...k,rk->...r", x, a), b)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Root-mean-square norm of ``x (B, T, H)`` over H, in float32; returns the compute dtype."""
    x = x.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (x * weight[None, None, :]).astype(COMPUTE)


def rope(x: Array, positions: Array, theta: float) -> Array:
    """Rotary embedding of ``x (B, T, heads, D)`` at ``positions (T,)``, float32 out.

    Pairs are neighbors ``(2i, 2i+1)``: GGUF files store the query and key rows permuted to that order.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[None, :, None, None] * frequencies[None, None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    even, odd = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def attention(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Grouped-query attention. q ``(B, T, heads, D)``, k and v ``(B, S, kv_heads, D)``, mask ``(T, S)`` of what may
    be seen; returns ``(B, T, heads * D)`` float32. Query head i reads key/value head ``i // (heads / kv_heads)``."""
    b, t, heads, d = q.shape
    q = q.reshape(b, t, k.shape[2], -1, d)
    scores = jnp.einsum("btgrd,bsgd->bgrts", q, k, preferred_element_type=jnp.float32) * d**-0.5
    weights = jax.nn.softmax(jnp.where(mask[None, None, None], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("bgrts,bsgd->btgrd", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(b, t, heads * d)


class Cache(NamedTuple):
    """Keys (rotated) and values of the positions seen so far, ``(L, B, S, kv_heads, D)``."""

    k: Array
    v: Array


def layer(
    x: Array, base: Params, lora: Params | None, cache: Cache | None, start: Array | int, cfg: Config, how: Execution
) -> tuple[Array, Cache | None]:
    """One decoder layer: x ``(B, T, H)`` float32 at positions ``start..start+T``; the cache, if given, is extended."""
    b, t, _ = x.shape
    positions = start + jnp.arange(t)
    h = rms_norm(x, base["attn_norm"], cfg.norm_eps)
    q, k, v = (
        adapted(h, name, base, lora, how).reshape(b, t, heads, cfg.head_dim)
        for name, heads in (("attn_q", cfg.heads), ("attn_k", cfg.kv_heads), ("attn_v", cfg.kv_heads))
    )
    q, k = rope(q, positions, cfg.rope_theta), rope(k, positions, cfg.rope_theta)
    v = v.astype(jnp.float32)
    if cache is not None:
        k = jax.lax.dynamic_update_slice_in_dim(cache.k, k, start, axis=1)
        v = jax.lax.dynamic_update_slice_in_dim(cache.v, v, start, axis=1)
        cache = Cache(k, v)
    seen = jnp.arange(k.shape[1])[None, :] <= positions[:, None]
    x = x + adapted(attention(q, k, v, seen).astype(COMPUTE), "attn_output", base, lora, how).astype(jnp.float32)
    h = rms_norm(x, base["ffn_norm"], cfg.norm_eps)
    gate = jax.nn.silu(adapted(h, "ffn_gate", base, lora, how).astype(jnp.float32))
    up = adapted(h, "ffn_up", base, lora, how).astype(jnp.float32)
    return x + adapted((gate * up).astype(COMPUTE), "ffn_down", base, lora, how).astype(jnp.float32), cache


def forward(
    base: Params,
    lora: Params | None,
    tokens: Array,
    cfg: Config,
    how: Execution,
    cache: Cache | None = None,
    start: Array | int = 0,
) -> tuple[Array, Cache | None]:
    """Hidden states ``(B, T, H)`` after the final norm for ``tokens (B, T)``, and the extended cache."""

    def step(x: Array, scanned: tuple[Params, Params | None, Cache | None]) -> tuple[Array, Cache | None]:
        return layer(x, *scanned, start, cfg, how)

    x = base["token_embd"][tokens].astype(jnp.float32)
    x, cache = jax.lax.scan(step, x, (base["layers"], lora, cache))
    return rms_norm(x, base["output_norm"], cfg.norm_eps), cache


def logits(base: Params, hidden: Array) -> Array:
    """Scores ``(..., V)`` float32: the output head is the embedding itself."""
    return jnp.einsum("...h,vh->...v", hidden, base["token_embd"], preferred_element_type=jnp.float32)


def token_losses(base: Params, lora: Params | None, tokens: Array, cfg: Config, how: Execution) -> Array:
    """Negative log-likelihood (nats) of each next token: tokens ``(B, T+1)`` -> ``(B, T)`` float32."""
    hidden, _ = forward(base, lora, tokens[:, :-1], cfg, how)
    scores = logits(base, hidden)
    picked = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
    return jax.nn.logsumexp(scores, axis=-1) - picked


def greedy(base: Params, lora: Params | None, prompt: Array, new_tokens: int, cfg: Config, how: Execution) -> Array:
    """The prompt ``(P,)`` followed by its ``new_tokens`` most likely continuations, one position at a time."""
    total = prompt.shape[0] + new_tokens
    shape = (cfg.layers, 1, total, cfg.kv_heads, cfg.head_dim)
    cache = Cache(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))
    text = jnp.concatenate([prompt, jnp.zeros((new_tokens,), prompt.dtype)])

    def step(carry: tuple[Array, Cache], i: Array) -> tuple[tuple[Array, Cache], None]:
        text, cache = carry
        hidden, grown = forward(base, lora, text[None, i, None], cfg, how, cache, i)
        assert grown is not None
        best = jnp.argmax(logits(base, hidden[0, 0])).astype(text.dtype)
        following = jnp.where(i + 1 < prompt.shape[0], text[i + 1], best)
        return (text.at[i + 1].set(following), grown), None

    (text, _), _ = jax.lax.scan(step, (text, cache), jnp.arange(total - 1))
    return text
