"""A quantizer in loops over blocks, float32 operation by float32 operation, and inputs for it."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from jaxlowbit import codecs
from jaxlowbit.formats import Format

F32 = np.float32
TINY = F32(2.0**-126)
CODE_DTYPE = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}


def naive_codes(values: np.ndarray, element: str, top: float) -> np.ndarray:
    """float32 to uint8 codes by ml_dtypes' casts; NaN and saturation by hand."""
    nan = {"e4m3": 0x7F, "e5m2": 0x7E, "e2m1": 0}[element]
    codes = np.clip(np.nan_to_num(values), -top, top).astype(CODE_DTYPE[element]).view(np.uint8)
    return np.where(np.isnan(values), nan, codes).astype(np.uint8)


def naive_scale(amax: np.float32, fmt: Format, rounding: str, outer: np.float32) -> tuple[Any, np.float32]:
    """What is stored, and what values are divided by (a float64 where float32 would not hold it)."""
    top, stored = F32(fmt.element.max), fmt.scale.storage.type
    if fmt.scale.name == "f32":
        scale = max(F32(amax / top), TINY)
        if rounding == "pow2":
            mantissa, exponent = math.frexp(scale)
            scale = F32(math.ldexp(1.0, exponent - (mantissa == 0.5)))
        return (np.nan, np.nan) if not np.isfinite(amax) else (scale, scale)
    if fmt.scale.name == "e8m0":
        byte = 255 if not np.isfinite(amax) else int(codecs.mx_scale(amax, fmt.element, rounding))
        return stored(byte), np.nan if byte == 255 else math.ldexp(1.0, byte - 127)
    part = F32(F32(amax / top) / outer) if amax / top >= TINY else F32(0)
    scale = stored(min(max(part, F32(2.0**-9)), F32(448))) if np.isfinite(amax) else stored(np.nan)
    return scale, max(F32(scale) * outer, TINY) if np.isfinite(amax) else np.nan


def naive(x: np.ndarray, fmt: Format, rounding: str, ub: float = np.inf, outer: Any = None) -> tuple[Any, ...]:
    """One matrix: codes (one per byte), scales, global scale."""
    x = x.astype(F32)
    x = np.where(np.abs(x) < TINY, np.copysign(F32(0), x), x)
    rows, k = x.shape
    high, wide = fmt.block[0] or max(rows, 1), fmt.block[1] or max(k, 1)
    finite = np.abs(x[np.isfinite(x)])
    if fmt.two_level and outer is None:
        outer = max(F32(min(finite.max(initial=F32(0)), F32(ub)) / F32(448 * fmt.element.max)), TINY)
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros((-(-rows // high), -(-k // wide)), fmt.scale.storage)
    for i, j in np.ndindex(*scales.shape):
        where = np.s_[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
        amax = np.abs(x[where]).max()
        amax = min(amax, F32(ub)) if np.isfinite(amax) else amax
        scales[i, j], step = naive_scale(amax, fmt, rounding, F32(1) if outer is None else outer)
        with np.errstate(invalid="ignore", over="ignore"):
            quotient = x[where] / F32(step) if isinstance(step, F32) else (x[where] / np.float64(step)).astype(F32)
        codes[where] = naive_codes(quotient, fmt.element.name, fmt.element.max)
    return codes, scales, outer


def spread(shape: tuple[int, ...], seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    """Normal numbers at a different power of two for each stretch of eight, some blocks zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    power = np.exp2(rng.integers(-12, 12, (*shape[:-1], -(-shape[-1] // 8))))
    x = x * np.repeat(power, 8, axis=-1)[..., : shape[-1]]
    if shape[-1] > 64:
        x[..., 32:64] = 0
    return x.astype(dtype)
