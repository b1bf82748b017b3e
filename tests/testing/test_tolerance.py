"""The bounds hold for right results, and common faults do not pass under them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import jaxlowbit as jlb
from jaxlowbit import formats
from jaxlowbit.testing import reference, tolerance

BF16 = ml_dtypes.bfloat16


def f32_dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """One addition after the other in float32: the order that the bound is about."""
    total = np.zeros((a.shape[0], b.shape[0]), np.float32)
    for k in range(a.shape[1]):
        total = total + a[:, k, None].astype(np.float32) * b[None, :, k].astype(np.float32)
    return total


def problem(k: int = 512, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.standard_normal((8, k)).astype(np.float32), random.standard_normal((16, k)).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_a_right_result_passes(dtype: type) -> None:
    x, w = problem()
    product = reference.dot(x, w)
    ratio = tolerance.check(f32_dot(x, w).astype(dtype), product.value, tolerance.dot_bound(product, dtype))
    assert 0 < ratio <= 1


def test_faults_do_not_pass() -> None:
    """Each fault changes the numbers little; the bound sees it all the same."""
    x, w = problem()
    bias = np.linspace(-1, 1, 16)
    product = reference.dot(x, w, bias)
    exact = f32_dot(x, w) + bias.astype(np.float32)
    bound = tolerance.dot_bound(product, np.float32)
    tolerance.check(exact, product.value, bound)
    rounded = f32_dot(x.astype(BF16), w) + bias.astype(np.float32)
    scaled = f32_dot(x, w) * np.float32(1 + 2.0**-9) + bias.astype(np.float32)  # a scale rounded to bfloat16
    wrong = exact.copy()
    wrong[3, 5] += 2e-2
    no_bias = exact - bias.astype(np.float32)
    for fault in (rounded, scaled, wrong, no_bias, exact.astype(BF16).astype(np.float32)):
        with pytest.raises(AssertionError, match="outside the bound"):
            tolerance.check(fault, product.value, bound)


def test_one_bf16_rounding_is_allowed_where_asked() -> None:
    g, w = problem()
    product = reference.dot_transposed(g[:, :16].copy(), w)
    once = g[:, :16].astype(np.float32) @ w.astype(BF16).astype(np.float32)
    with pytest.raises(AssertionError):
        tolerance.check(once, product.value, tolerance.dot_bound(product, np.float32))
    tolerance.check(once, product.value, tolerance.dot_bound(product, np.float32, bf16_operand=True))


def test_check_names_the_worst_element() -> None:
    want = np.zeros((2, 3))
    got = np.zeros((2, 3), np.float32)
    got[1, 2] = 0.5
    with pytest.raises(AssertionError, match=r"layer: 1 of 6 .*\(1, 2\).*0\.5"):
        tolerance.check(got, want, 0.1, what="layer")
    with pytest.raises(AssertionError, match="shape"):
        tolerance.check(got[0], want, 0.1)
    assert tolerance.check(np.zeros((0, 3), np.float32), np.zeros((0, 3)), 0.0) == 0


def test_check_and_what_is_not_finite() -> None:
    nan, inf = np.nan, np.inf
    right = [(nan, nan), (inf, inf), (-inf, -inf), (np.float16(inf), 65530.0)]
    wrong = [(0.0, nan), (nan, 0.0), (1.0, inf), (inf, -inf), (inf, 1.0), (inf, nan), (np.float16(inf), 60000.0)]
    for got, want in right:
        tolerance.check(np.array([got]), np.array([want]), 1.0)
    for got, want in wrong:
        with pytest.raises(AssertionError):
            tolerance.check(np.array([got]), np.array([want]), np.array([inf]) if np.isinf(want) else 1.0)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        tolerance.unit_roundoff(np.int8)
    with pytest.raises(ValueError, match="no bound"):
        tolerance.gamma(2**24)


def test_calc_diff() -> None:
    x = np.arange(1.0, 5)
    assert tolerance.calc_diff(x, x) == 0
    assert tolerance.calc_diff(np.zeros(3), np.zeros(3)) == 0
    assert tolerance.calc_diff(x, 1.01 * x) == pytest.approx(0.5e-4, rel=0.02)
    assert tolerance.calc_diff(x, -x) == 2


def modes() -> list[tuple[formats.Format, str | None]]:
    mx = [(fmt, mode) for fmt in (formats.MXFP8, formats.MXFP4) for mode in ("rceil", "floor", "ceil", "even")]
    others = [fmt for fmt in formats.FORMATS.values() if fmt.scale.name != "e8m0"]
    return [*mx, *((fmt, None) for fmt in others), (formats.FP8_1X128, "pow2")]


@pytest.mark.parametrize(("fmt", "mode"), modes(), ids=lambda value: str(value))
def test_quantization_bound_holds_and_is_close(fmt: formats.Format, mode: str | None) -> None:
    random = np.random.default_rng(0)
    worst = 0.0
    for spread in (0, 4, 20):
        x = random.standard_normal((2, 130, 160)) * np.exp2(random.integers(-spread, spread + 1, (2, 130, 160)))
        x = x.astype(np.float32)
        x[:, 5] = 0
        got = jlb.dequantize(jlb.quantize(x, fmt, scale_rounding=mode))
        worst = max(worst, tolerance.check(got, x, tolerance.quantization_bound(x, fmt, scale_rounding=mode)))
    assert worst > 0.4  # not so wide that a wrong scale rule would pass


def test_dot_quantization_bound() -> None:
    x, w = problem(256)
    for x_format, w_format in ((formats.FP8_1X128, formats.FP8_128X128), (formats.MXFP4, formats.NVFP4)):
        a, b = reference.quantize(x, x_format), reference.quantize(w, w_format)
        bound = tolerance.dot_quantization_bound(
            x, w, tolerance.quantization_bound(x, x_format), tolerance.quantization_bound(w, w_format)
        )
        tolerance.check(reference.dot(a, b).value, reference.dot(x, w).value, bound)
