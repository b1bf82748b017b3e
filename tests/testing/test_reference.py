"""The reference against arithmetic spelled out by hand: it may not lean on what it is there to check."""

from __future__ import annotations

import ast
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxlowbit import formats
from jaxlowbit.testing import reference


def by_definition(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """The value of a code from its fields, without special codes."""
    bias = 2 ** (exponent_bits - 1) - 1
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    sign = -1.0 if code >> (mantissa_bits + exponent_bits) else 1.0
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


@pytest.mark.parametrize(
    ("element", "exponent_bits", "mantissa_bits"), [("e4m3", 4, 3), ("e5m2", 5, 2), ("e2m1", 2, 1)]
)
def test_every_code(element: str, exponent_bits: int, mantissa_bits: int) -> None:
    codes = np.arange(2 ** (1 + exponent_bits + mantissa_bits), dtype=np.uint8)
    got = reference.decode(codes, element)
    for code, value in zip(codes, got, strict=True):
        magnitude = int(code) & (len(codes) // 2 - 1)
        if (element == "e4m3" and magnitude == 0x7F) or (element == "e5m2" and magnitude > 0x7C):
            assert np.isnan(value)
        elif element == "e5m2" and magnitude == 0x7C:
            assert np.isinf(value)
        else:
            assert value == by_definition(int(code), exponent_bits, mantissa_bits)


def test_scale_ends() -> None:
    np.testing.assert_array_equal(
        reference.decode_scale(np.array([0, 1, 127, 254, 255], np.uint8), "e8m0"),
        [2.0**-127, 2.0**-126, 1.0, 2.0**127, np.nan],
    )


def test_low_nibble_first() -> None:
    np.testing.assert_array_equal(reference.nibbles(np.array([0x71, 0x0A], np.uint8)), [1, 7, 10, 0])


def quantized(
    fmt: formats.Format, data: np.ndarray, scale: np.ndarray, outer: np.ndarray | None = None, **rest: object
):
    return reference.Quantized(data, scale, outer, fmt, **rest)


def test_partial_blocks_and_segments() -> None:
    """Each element names its own scale: rows 3 + 2 in segments, blocks of 2 x 3 over five columns."""
    fmt = formats.FP8_1X128.with_block(2, 3)
    data = np.full((5, 5), 0x38, np.uint8).view(ml_dtypes.float8_e4m3fn)
    scale = np.arange(1, 7, dtype=np.float32).reshape(3, 2)
    got = reference.dequantize(quantized(fmt, data, scale, row_splits=(3,)))
    rows, columns = [0, 0, 1, 2, 2], [0, 0, 0, 1, 1]
    np.testing.assert_array_equal(got, [[scale[r, c] for c in columns] for r in rows])


def test_batch_odd_k_and_outer_scale() -> None:
    data = np.array([[[0x21, 0x07]], [[0x21, 0x07]]], np.uint8)  # 0.5 1 6 (0)
    scale = np.full((2, 1, 1), 0x40, np.uint8).view(ml_dtypes.float8_e4m3fn)  # 2
    q = quantized(formats.NVFP4, data, scale, np.array([1.0, 4.0], np.float32), last_dim=3)
    np.testing.assert_array_equal(reference.dequantize(q), [[[1, 2, 12]], [[4, 8, 48]]])


def test_dot_and_its_transpose() -> None:
    x, w, bias = np.array([[1.0, -2.0]]), np.array([[3.0, 4.0], [5.0, 6.0], [-7.0, 8.0]]), np.array([1.0, 2.0, -3.0])
    out = reference.dot(x, w, bias)
    np.testing.assert_array_equal(out.value, [[-4.0, -5.0, -26.0]])
    np.testing.assert_array_equal(out.magnitude, [[12.0, 19.0, 26.0]])
    assert out.terms == 2
    back = reference.dot_transposed(np.array([[1.0, 0.5, -1.0]]), w)
    np.testing.assert_array_equal(back.value, [[12.5, -1.0]])
    np.testing.assert_array_equal(back.magnitude, [[12.5, 15.0]])
    assert back.terms == 3


@pytest.mark.parametrize("fmt", formats.FORMATS.values(), ids=repr)
def test_quantize_keeps_representable_values(fmt: formats.Format) -> None:
    """Blocks that hold the largest code and multiples of powers of two come back exactly."""
    random = np.random.default_rng(0)
    largest = fmt.element.max
    x = random.choice([0.0, 0.5, 1.0, -1.5, 2.0, -3.0, 4.0], (130, 256)) * (largest / 6 if fmt.element.bits == 4 else 1)
    x = x * 2.0**-3
    x[:, ::16] = largest * 2.0**-3
    q = reference.quantize(x, fmt, global_scale=2.0**-3 if fmt.two_level else None)
    np.testing.assert_array_equal(reference.dequantize(q), x)


def test_quantize_ends() -> None:
    zero = reference.quantize(np.zeros((2, 32)), formats.MXFP8)
    assert (reference.dequantize(zero) == 0).all()
    x = np.ones((2, 64), np.float32)
    x[0, 3], x[1, 40] = np.nan, np.inf
    for fmt in (formats.MXFP8, formats.MXFP4, formats.FP8_1X128.with_block(1, 32)):
        got = reference.dequantize(reference.quantize(x, fmt))
        assert np.isnan(got[0, :32]).all()
        assert np.isnan(got[1, 32:]).all()
        np.testing.assert_allclose(got[0, 32:], 1, rtol=2.0**-23)


def test_takes_nothing_from_the_library_but_formats() -> None:
    tree = ast.parse(Path(reference.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in modules if name and name.startswith("jaxlowbit")} == {"jaxlowbit.formats"}
