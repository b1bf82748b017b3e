"""Error bounds of low-bit products, derived from the number of terms, the dtypes and the formats.

Notation: ``u`` is the unit roundoff of a dtype (half the distance from 1 to the next number): 2**-24 for
float32, 2**-11 for float16, 2**-8 for bfloat16. ``gamma(n) = n u / (1 - n u)`` bounds the relative effect of
n roundings (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., lemma 3.1).

Three questions have three bounds:

- is the kernel right: ``dot_bound``, against the float64 product of the same quantized operands;
- is the format good enough: ``quantization_bound`` and ``dot_quantization_bound``, against unquantized
  inputs;
- do two arrays tell the same story: ``calc_diff``, one number, for trends and not for correctness.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from jaxlowbit.formats import Format
from jaxlowbit.testing.reference import Product

F64: TypeAlias = npt.NDArray[np.float64]

UNIT_ROUNDOFF: dict[str, float] = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}
LARGEST: dict[str, float] = {
    "float64": float(np.finfo(np.float64).max),
    "float32": (2 - 2.0**-23) * 2.0**127,
    "float16": 65504.0,
    "bfloat16": (2 - 2.0**-7) * 2.0**127,
}

# Roundings of one term besides the additions: lhs code * scale and * global_scale, the same for rhs, the
# product of the two, and the addition of the bias. An implementation that scales partial sums instead makes
# no more than these.
ROUNDINGS_PER_TERM = 6

_F32_SMALLEST_NORMAL = 2.0**-126
_SMALLEST_SCALE = {"e8m0": 2.0**-127, "e4m3": 2.0**-9, "f32": 2.0**-126}


def unit_roundoff(dtype: Any) -> float:
    """Largest relative error of one rounding to nearest into ``dtype``; ValueError for others."""
    name = np.dtype(dtype).name
    if name not in UNIT_ROUNDOFF:
        raise ValueError(f"unit_roundoff: expected one of {sorted(UNIT_ROUNDOFF)}, got {name}")
    return UNIT_ROUNDOFF[name]


def gamma(n: int, u: float = UNIT_ROUNDOFF["float32"]) -> float:
    """Bound of the relative effect of n roundings of relative size u. Raises ValueError where none exists."""
    if n * u >= 1:
        raise ValueError(f"gamma: {n} roundings of {u} have no bound")
    return n * u / (1 - n * u)


def dot_bound(
    product: Product,
    out_dtype: Any,
    *,
    accumulate: Any = np.float32,
    bf16_operand: bool = False,
) -> F64:
    """Element-wise bound of ``|computed - product.value|`` for a right implementation.

    Derivation. Codes decode exactly. Every term ``a_k b_k`` meets at most ``ROUNDINGS_PER_TERM`` roundings of
    its own and, in whatever order K terms are added, at most ``K - 1`` roundings of partial sums, so with ``n
    = K - 1 + ROUNDINGS_PER_TERM`` the sum before the last rounding differs from the exact one by at most

        A = gamma(n) * sum_k |a_k| |b_k|  (+ gamma(n) * |bias|, which ``magnitude`` holds).

    ``bf16_operand``: code * scale of one operand may have been rounded to bfloat16 once (the backward pass):
    its values move by 2**-8 relatively, hence A grows by ``2**-8 (1 + gamma(n)) * magnitude``.

    The last rounding adds ``u_out * |computed before it| <= u_out * (|value| + A)``, or below the normal
    range of the output half a subnormal step, or the whole number where subnormals are flushed.

    Flushed float32 subnormals (XLA:CPU computes with FTZ/DAZ) move a product or scaled operand by at most
    2**-126. Callers keep scales within about 2**+-60, so that no such number is multiplied back into the
    normal range; with ``terms`` products and as many partial sums that is ``(2 n + 1) * 2**-126``.

    The float64 reference has the same form of error with u = 2**-53, added for completeness.

    Args:
      product: from ``reference.dot`` or ``reference.dot_transposed``.
      out_dtype: dtype of the result.
      accumulate: dtype of the accumulation.
      bf16_operand: see above.
    """
    u_out = unit_roundoff(out_dtype)
    n = max(product.terms - 1, 0) + ROUNDINGS_PER_TERM
    relative = gamma(n, unit_roundoff(accumulate)) + gamma(n, UNIT_ROUNDOFF["float64"])
    if bf16_operand:
        relative += UNIT_ROUNDOFF["bfloat16"] * (1 + relative)
    before = relative * product.magnitude + (2 * n + 1) * _F32_SMALLEST_NORMAL
    # bfloat16 and float32 outputs may be flushed below 2**-126; float16 keeps its subnormals, 2**-24 apart.
    underflow = 2.0**-25 if np.dtype(out_dtype) == np.float16 else _F32_SMALLEST_NORMAL
    bound: F64 = before + u_out * (np.abs(product.value) + before) + underflow
    return bound


def check(got: Any, want: Any, bound: Any, *, what: str = "result") -> float:
    """Asserts ``|got - want| <= bound`` element by element; returns the largest ratio of the two (0 if empty).

    NaN must meet NaN. A finite value that rounds past the largest number of got's dtype must be that dtype's
    inf, and where the bound reaches across that edge both are right; an infinite reference value asks for the
    same inf.

    Raises:
      AssertionError: with the number of wrong elements and the worst one, its index, got, want and bound.
    """
    result = np.asarray(got)
    expected = np.asarray(want, np.float64)
    limit = np.broadcast_to(np.asarray(bound, np.float64), expected.shape)
    if result.shape != expected.shape:
        raise AssertionError(f"{what}: expected shape {expected.shape}, got {result.shape}")
    values = result.astype(np.float64)
    # Numbers at or past the last midpoint round to inf.
    overflow = LARGEST[result.dtype.name] * (1 + unit_roundoff(result.dtype) / 2)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(values - expected)
        may_be_inf = np.isinf(values) & (np.sign(values) == np.sign(expected)) & (np.abs(expected) + limit >= overflow)
        ok = (error <= limit) | may_be_inf
        ok = np.where(np.isnan(expected), np.isnan(values), ok)
        ok = np.where(np.isinf(expected), values == expected, ok)
        ratio = np.nan_to_num(error / np.maximum(limit, 1e-300), nan=np.inf, posinf=np.inf)
    if not ok.all():
        at = tuple(int(i) for i in np.unravel_index(int(np.argmax(np.where(ok, -1.0, ratio))), expected.shape))
        raise AssertionError(
            f"{what}: {int((~ok).sum())} of {expected.size} elements outside the bound; worst at {at}: got "
            f"{values[at]!r}, want {expected[at]!r}, |error| {error[at]:.3e}, bound {limit[at]:.3e}"
        )
    return float(np.max(ratio, initial=0.0, where=np.isfinite(error)))


def calc_diff(x: Any, y: Any) -> float:
    """``1 - 2 <x, y> / (<x, x> + <y, y>)``: 0 for equal arrays, about half the squared relative error for
    close ones.

    It averages over the array, so single wrong elements hide: use it for trends, and ``check`` for
    correctness.
    """
    a, b = np.asarray(x).astype(np.float64), np.asarray(y).astype(np.float64)
    squares = float(np.sum(a * a) + np.sum(b * b))
    return 0.0 if squares == 0 else 1 - 2 * float(np.sum(a * b)) / squares


def _scale_range(fmt: Format, rounding: str) -> tuple[float, float]:
    """Smallest and largest ratio of a stored scale (times global_scale) to the ideal ``amax / largest
    code``."""
    top = fmt.element.max / 2.0**fmt.element.max_exponent  # 1.75 for E4M3 and E5M2, 1.5 for E2M1
    ratios = {
        "none": (1 - 2.0**-22, 1 + 2.0**-22),  # at most three float32 roundings
        "pow2": (1 - 2.0**-23, 2.0 + 2.0**-22),
        "rceil": (1.0, 2.0),
        "floor": (top / 2, top),  # 2**floor(log2 amax) lies in (amax / 2, amax]
        "ceil": (top, 2 * top),
        "even": (top / 2, 2 * top),  # floor or ceil, whichever the rounding of amax's mantissa gives
    }
    low, high = ratios[rounding]
    if fmt.scale.name == "e4m3":
        low, high = low * (1 - 2.0**-4), high * (1 + 2.0**-4)  # a block scale rounded to three mantissa bits
    return low, high


def quantization_bound(x: Any, fmt: Format, *, scale_rounding: str | None = None) -> F64:
    """Element-wise bound of ``|dequantize(quantize(x)) - x|`` for computed scales, from ``x`` and the format
    alone.

    Derivation. Let A be the largest magnitude in the element's block and t the largest code. The ideal step
    is A / t; the stored one lies within ``[low, high]`` times that, by the rule that rounds scales (``floor``
    may halve the range, ``rceil`` may double the step, E4M3 block scales move by 2**-4). A code with m
    mantissa bits is then

    - in the normal range off by ``2**-(m + 1)`` of its value,
    - below it off by half of the fixed spacing, ``step * 2**(min_exponent - m - 1)``,
    - clipped where ``|x| > low * A``, by at most the excess,

    plus ``2**-21 |x|`` for the float32 division and the products of dequantize.

    Args:
      x: ``(..., rows, K)``; each matrix of a batch by itself. Non-finite blocks are not covered.
      fmt: the format. scale_rounding: as in ``quantize``; None for the format's own.
    """
    values = np.abs(np.asarray(x).astype(np.float64))
    low, high = _scale_range(fmt, scale_rounding or fmt.scale_rounding)
    largest, mantissa = fmt.element.max, fmt.element.mantissa_bits
    out = np.empty(values.shape)
    rows, k = values.shape[-2:]
    block_rows, block_k = fmt.block[0] or max(rows, 1), fmt.block[1] or max(k, 1)
    for batch in np.ndindex(*values.shape[:-2]):
        matrix = values[batch]
        # Smallest step of a block: what the scale's type can hold, and for two levels one E4M3 unit of the
        # outer scale.
        outer = max(float(np.max(matrix, initial=0.0)) / (448 * largest), 2.0**-126) if fmt.two_level else 1.0
        floor = _SMALLEST_SCALE[fmt.scale.name] * outer
        slack = 2.0**-10 * outer if fmt.scale.name == "e4m3" else 0.0  # subnormal E4M3 scales: half a spacing
        for i in range(0, rows, block_rows):
            for j in range(0, k, block_k):
                where = (*batch, slice(i, i + block_rows), slice(j, j + block_k))
                block = values[where]
                ideal = float(np.max(block)) / largest
                step = max(ideal * high, floor) + slack
                clip = max(ideal * low - slack, 0.0) * largest
                fixed = step * 2.0 ** (fmt.element.min_exponent - mantissa - 1)
                rounding = np.maximum(block * 2.0 ** -(mantissa + 1), fixed)
                out[where] = rounding + np.maximum(block - clip, 0.0) + 2.0**-21 * block
    return out


def dot_quantization_bound(x: Any, w: Any, x_error: Any, w_error: Any) -> F64:
    """Bound of ``|x' w'^T - x w^T|`` where ``|x' - x| <= x_error`` and ``|w' - w| <= w_error`` element by
    element.

    ``x' w' - x w = (x' - x) w + x (w' - w) + (x' - x)(w' - w)``, summed in absolute values. x ``(M, K)``, w
    ``(N, K)``.
    """
    a, b = np.abs(np.asarray(x).astype(np.float64)), np.abs(np.asarray(w).astype(np.float64))
    da, db = np.asarray(x_error, np.float64), np.asarray(w_error, np.float64)
    bound: F64 = da @ b.T + a @ db.T + da @ db.T
    return bound
