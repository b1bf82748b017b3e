"""The quantizer's rules in NumPy, written from the contract and from ml_dtypes, not from the kernel.

Values are computed in float64 where that is exact, and by single float32 operations where the contract names one.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from jaxlowbit._ffi import Element, ScaleKind, ScaleRounding

F32 = np.float32
TINY = F32(2.0**-126)
TYPES = {
    Element.E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    Element.E5M2: np.dtype(ml_dtypes.float8_e5m2),
    Element.E2M1: np.dtype(ml_dtypes.float4_e2m1fn),
}
MANTISSA = {Element.E4M3: 3, Element.E5M2: 2, Element.E2M1: 1}
NAN_CODE = {Element.E4M3: 0x7F, Element.E5M2: 0x7E, Element.E2M1: 0}


def largest(element: Element) -> np.float32:
    return F32(ml_dtypes.finfo(TYPES[element]).max)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: the config of the handler and its optional operands."""

    element: Element
    kind: ScaleKind
    rounding: ScaleRounding = ScaleRounding.NONE
    block: tuple[int, int] = (1, 128)
    amax_ub: float = float("inf")
    given: np.ndarray | None = None
    global_scale: np.ndarray | None = None  # (B, 1) f32
    rng: tuple[int, int, int] | None = None  # key0, key1, offset

    def rng_words(self) -> np.ndarray:
        """key0, key1, offset_lo, offset_hi; empty for rounding to nearest."""
        if self.rng is None:
            return np.zeros(0, np.uint32)
        key0, key1, offset = self.rng
        return np.array([key0, key1, offset & 0xFFFFFFFF, offset >> 32], np.uint32)


def flushed(x: np.ndarray) -> np.ndarray:
    """float32 subnormals as zeros of their sign."""
    return np.where(np.abs(x) < TINY, np.copysign(F32(0), x), x).astype(F32)


def spread(grid: np.ndarray, block: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    """One value per block (B, gr, gc) to one per element (B, R, C)."""
    return np.repeat(np.repeat(grid, block[0], 1), block[1], 2)[:, : shape[1], : shape[2]]


def block_amax(x: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """(B, gr, gc) largest magnitude; NaN where a block holds inf or NaN."""
    rows, columns = x.shape[1:]
    out = np.empty((x.shape[0], -(-rows // block[0]), -(-columns // block[1])), F32)
    for i in range(out.shape[1]):
        for j in range(out.shape[2]):
            part = x[:, i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            out[:, i, j] = np.abs(part).max((1, 2))  # NumPy's maximum keeps NaN
    return np.where(np.isfinite(out), out, F32(np.nan))


def e8m0_bytes(amax: np.ndarray, case: Case) -> np.ndarray:
    top = float(largest(case.element))
    emax = int(np.floor(np.log2(top)))
    safe = np.where(np.isnan(amax) | (amax == 0), 1.0, amax).astype(np.float64)
    exponent = np.frexp(safe)[1] - 1  # 2**exponent <= amax < 2**(exponent + 1)
    if case.rounding == ScaleRounding.RCEIL:
        power = exponent - emax
        power = power + (safe > top * np.exp2(power.astype(np.float64)))
    elif case.rounding == ScaleRounding.FLOOR:
        power = exponent - emax
    elif case.rounding == ScaleRounding.CEIL:
        power = exponent + (safe > np.exp2(exponent.astype(np.float64))) - emax
    else:
        spacing = np.exp2(exponent - float(MANTISSA[case.element]))
        rounded = np.floor(safe / spacing + 0.5) * spacing
        power = np.frexp(rounded)[1] - 1 - emax
    least = 1 if case.rounding == ScaleRounding.RCEIL else 0
    byte = np.clip(np.where(amax == 0, -999, power) + 127, least, 254)
    return np.where(np.isnan(amax), 255, byte).astype(np.uint8)


def scales(x: np.ndarray, case: Case, global_scale: np.ndarray) -> np.ndarray:
    amax = block_amax(x, case.block)
    amax = np.where(np.isnan(amax), amax, np.minimum(amax, F32(case.amax_ub))).astype(F32)
    if case.kind == ScaleKind.E8M0:
        return e8m0_bytes(amax, case)
    if case.kind == ScaleKind.F32:
        scale = np.maximum(amax / largest(case.element), TINY)
        if case.rounding == ScaleRounding.POW2:
            fraction, exponent = np.frexp(scale)
            scale = np.ldexp(F32(1), exponent - (fraction == 0.5)).astype(F32)
            scale = np.where(np.isnan(amax), F32(np.nan), scale)
        return np.where(np.isnan(scale), F32(np.nan), scale)  # one NaN
    scale = flushed(amax / largest(case.element)) / global_scale
    scale = np.where(np.isnan(scale), scale, np.clip(scale, F32(2.0**-9), F32(448)))
    codes = scale.astype(ml_dtypes.float8_e4m3fn)
    codes.view(np.uint8)[np.isnan(scale)] = 0x7F
    return codes


def quotients(x: np.ndarray, case: Case, stored: np.ndarray, global_scale: np.ndarray) -> np.ndarray:
    if case.kind == ScaleKind.E8M0:
        divisor = np.exp2(stored.astype(np.float64) - 127)
        divisor = np.where(stored == 255, np.nan, divisor)
        # Exact in float64; float32 then over- and underflows once.
        quotient = (x.astype(np.float64) / spread(divisor, case.block, x.shape)).astype(F32)
    elif case.kind == ScaleKind.F32:
        quotient = x / flushed(spread(stored, case.block, x.shape))
    else:
        divisor = stored.astype(F32) * global_scale
        if case.global_scale is not None:
            divisor = np.where(divisor < TINY, TINY, divisor)
        quotient = x / spread(divisor, case.block, x.shape)
    assert quotient.dtype == F32
    return flushed(quotient)


def threefry(key0: int, key1: int, counter: np.ndarray) -> np.ndarray:
    """First word of Threefry-2x32-20 for 64-bit counters, in arithmetic modulo 2**32 on uint64."""
    mask = np.uint64(0xFFFFFFFF)
    keys = [np.uint64(key0), np.uint64(key1), np.uint64(key0 ^ key1 ^ 0x1BD11BDA)]
    x0 = ((counter >> np.uint64(32)) + keys[0]) & mask
    x1 = ((counter & mask) + keys[1]) & mask
    for r in range(20):
        rotation = np.uint64((13, 15, 26, 6, 17, 29, 16, 24)[r % 8])
        x0 = (x0 + x1) & mask
        x1 = ((x1 << rotation) | (x1 >> (np.uint64(32) - rotation))) & mask
        x1 ^= x0
        if r % 4 == 3:
            turn = r // 4 + 1
            x0 = (x0 + keys[turn % 3]) & mask
            x1 = (x1 + keys[(turn + 1) % 3] + np.uint64(turn)) & mask
    return x0.astype(np.uint32)


def nearest(quotient: np.ndarray, element: Element) -> np.ndarray:
    """uint8 codes, one a byte."""
    top = largest(element)
    with np.errstate(invalid="ignore"):
        codes = np.clip(quotient, -top, top).astype(TYPES[element]).view(np.uint8)
    codes = codes & np.uint8(15) if element == Element.E2M1 else codes
    return np.where(np.isnan(quotient), np.uint8(NAN_CODE[element]), codes)


def stochastic(quotient: np.ndarray, case: Case) -> np.ndarray:
    """Between the two neighbors of the table of magnitudes; nothing here knows how a code is made of bits."""
    width = 3 if case.element == Element.E2M1 else 7
    table = np.arange(1 << width, dtype=np.uint8).view(TYPES[case.element]).astype(np.float64)
    table = table[np.isfinite(table)]
    magnitude = np.minimum(np.abs(quotient.astype(np.float64)), table[-1])
    magnitude = np.where(np.isnan(magnitude), 0, magnitude)
    below = np.searchsorted(table, magnitude, side="right") - 1
    above = np.minimum(below + 1, len(table) - 1)
    gap = np.where(above > below, table[above] - table[below], 1.0)
    key0, key1, offset = case.rng or (0, 0, 0)
    with np.errstate(over="ignore"):
        counter = np.uint64(offset) + np.arange(quotient.size, dtype=np.uint64)
    uniform = (threefry(key0, key1, counter) >> np.uint32(8)).astype(np.float64) * 2.0**-24
    up = uniform.reshape(quotient.shape) < (magnitude - table[below]) / gap
    codes = (below + up).astype(np.uint8) | (np.signbit(quotient).astype(np.uint8) << width)
    return np.where(np.isnan(quotient), np.uint8(NAN_CODE[case.element]), codes)


def quantize(x: np.ndarray, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Codes as bytes, (B, R, C) or packed (B, R, C/2), and scales (B, gr, gc), of x (B, R, C)."""
    with np.errstate(all="ignore"):
        values = flushed(x.astype(F32))
        global_scale = np.ones((1, 1, 1), F32)
        if case.global_scale is not None:
            global_scale = flushed(case.global_scale.astype(F32))[:, :, None]
        stored = scales(values, case, global_scale) if case.given is None else case.given
        quotient = quotients(values, case, stored, global_scale)
        codes = nearest(quotient, case.element) if case.rng is None else stochastic(quotient, case)
    if case.element == Element.E2M1:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    return codes, stored
