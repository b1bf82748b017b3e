"""Weights in every form that the dots take, for the gradient tests."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jaxlowbit as jlb
from jaxlowbit import _ffi

FP8_FORMATS = {
    "tensor": jlb.FP8_TENSOR,
    "channel": jlb.FP8_CHANNEL,
    "1x128": jlb.FP8_1X128,
    "128x128": jlb.FP8_128X128,
    "explicit": jlb.FP8_128X128.with_block(48, 32),
    "mxfp8": jlb.MXFP8,
}
FP4_FORMATS = {"mxfp4": jlb.MXFP4, "nvfp4": jlb.NVFP4}
FORMATS = FP8_FORMATS | FP4_FORMATS

# Per-tensor and per-channel scales in every spelling, then grids; bfloat16 and E8M0 scales besides float32.
FP8_SPELLINGS: dict[str, tuple[jlb.Format, Any]] = {
    "()": (jlb.FP8_TENSOR, lambda s: s.reshape(())),
    "(1,)": (jlb.FP8_TENSOR, lambda s: s.reshape(1)),
    "(1,1)": (jlb.FP8_TENSOR, lambda s: s),
    "(N,)": (jlb.FP8_CHANNEL, lambda s: s.reshape(-1)),
    "(N,1)": (jlb.FP8_CHANNEL, lambda s: s),
    "grid": (jlb.FP8_128X128, lambda s: s),
    "1x128": (jlb.FP8_1X128, lambda s: s),
    "mxfp8": (jlb.MXFP8, lambda s: s),
    "48x32": (jlb.FP8_128X128.with_block(48, 32), lambda s: s),
}


def weight(fmt: jlb.Format, n: int, k: int, seed: int = 0) -> jlb.ScaledArray:
    """A quantized weight whose blocks differ by powers of two, so that a wrong scale index shows."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(n, k)).astype(np.float32)
    rows, cols = np.arange(n)[:, None] // 16, np.arange(k)[None, :] // 16
    w *= 2.0 ** ((rows * 5 + cols * 3) % 9 - 4)
    return jlb.quantize(jnp.asarray(w.astype(np.float32)), fmt)


def activations(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 1) -> Any:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape).astype(np.float32)).astype(dtype)


def call(x: Any, q: jlb.ScaledArray, **kwargs: Any) -> Any:
    """fp8_dot or fp4_dot, whichever takes the weight."""
    op = jlb.fp4_dot if q.format.element.packed else jlb.fp8_dot
    return op(x, q, **kwargs)


def rounds(implementation: str) -> bool:
    """Whether code * scale may be rounded to bfloat16 once in the backward product: AMX multiplies bfloat16 only."""
    return implementation == "native" and _ffi.Tier.AMX in _ffi.available_tiers()


def with_scale_dtype(q: jlb.ScaledArray, dtype: Any) -> jlb.ScaledArray:
    """The same weight with scales rounded to, or re-typed as, another accepted dtype."""
    if np.dtype(dtype) == np.dtype(ml_dtypes.float8_e8m0fnu):
        return dataclasses.replace(q, scale=jnp.asarray(np.asarray(q.scale).view(ml_dtypes.float8_e8m0fnu)))
    return dataclasses.replace(q, scale=q.scale.astype(dtype))
