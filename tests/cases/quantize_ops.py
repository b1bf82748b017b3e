"""Cases of quantize and dequantize."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxlowbit as jlb
from jaxlowbit import codecs
from jaxlowbit.formats import Format
from tests.cases.shim import (
    IMPLEMENTATIONS,
    array,
    check_bits,
    check_close,
    check_equal,
    format_of,
    of_op,
    runs,
)


def quantize(x: np.ndarray, fmt: Format, way: str, **keywords: Any) -> jlb.ScaledArray:
    return jax.jit(lambda v: jlb.quantize(v, fmt, implementation=way, **keywords))(jnp.asarray(x))


def _rounding(inputs: dict[str, Any]) -> dict[str, Any]:
    return {"scale_rounding": inputs["scale_mode"]} if "scale_mode" in inputs else {}


@runs("B18a", "B24a", ways=IMPLEMENTATIONS)
def quantize_codes(case: dict[str, Any], way: str) -> None:
    inputs, want = case["inputs"], case["expected"]
    q = quantize(array(inputs["x"]), format_of(inputs), way, **_rounding(inputs))
    if "q" in want:
        check_bits(q.data, want["q"])
        check_bits(q.scale, want["scale"])
    else:
        check_close(np.asarray(q.scale).reshape(-1), want["scale"], {"rel": case["tol"]["scale_rel"]})
        check_bits(np.asarray(q.data)[0, :2], want["q_first2"])


@runs("B25a", ways=("all",))
def one_formula(case: dict[str, Any], way: str) -> None:
    inputs, want = case["inputs"], case["expected"]
    results = [quantize(array(inputs["x"]), format_of(inputs), way) for way in IMPLEMENTATIONS]
    codes = [np.asarray(q.data).view(np.uint8) for q in results]
    assert codes[0][0, 1] in want["q1_accept"]
    # The division is ours to keep: float32 x / s rounds to the tie 5.25, which goes to the even code 74.
    assert codes[0][0, 1] == 74
    np.testing.assert_array_equal(codes[0], codes[1])
    np.testing.assert_array_equal(np.asarray(results[0].scale), np.asarray(results[1].scale))


@runs(*of_op("quantize_roundtrip"), ways=IMPLEMENTATIONS)
def roundtrip(case: dict[str, Any], way: str) -> None:
    inputs, want = case["inputs"], case["expected"]
    x = array(inputs["x"])
    for fmt in _formats(inputs):
        keywords = _rounding(inputs)
        if "static_scale" in inputs:
            keywords["scale"] = jnp.full(fmt.grid(1, x.size)[1:], inputs["static_scale"], jnp.float32)
        q = quantize(x, fmt, way, **keywords)
        values = np.asarray(jax.jit(jlb.dequantize)(q))
        if "data" in want:
            tol = case.get("tol")
            if tol:
                check_close(values, want, tol)
            else:
                check_equal(values, want)
        else:
            _properties(x, q, values, want, case.get("tol", {}))


def _formats(inputs: dict[str, Any]) -> list[Format]:
    if inputs["block"] == "each of per_tensor, per_row, [1,128], mx32, mxfp4, nvfp4":
        blocks = ["per_tensor", "per_row", [1, 128], "mx32", "mxfp4", "nvfp4"]
        return [format_of(inputs, block) for block in blocks]
    if inputs["fmt"] == "e4m3fn and e2m1":
        return [format_of({**inputs, "fmt": fmt}) for fmt in ("e4m3fn", "e2m1")]
    return [format_of(inputs)]


def _properties(x: np.ndarray, q: jlb.ScaledArray, values: np.ndarray, want: dict[str, Any], tol: dict) -> None:
    left = dict(want)
    scales = _decoded_scales(q)
    k = 32 if q.format.scale.name == "e8m0" else 16
    if "nan_bytes" in left:
        codes = np.asarray(q.data)
        count = 0 if codes.dtype == np.uint8 else int(np.isnan(codes.astype(np.float32)).sum())
        assert count == left.pop("nan_bytes")
    if left.pop("scale_finite_positive", False):
        assert np.isfinite(scales).all()
        assert (scales > 0).all()
    if left.pop("scale_not_nan", False) or left.pop("scale_bytes_no_nan", False):
        assert np.isfinite(scales).all()
    if left.pop("dequant_equals_input", False):
        np.testing.assert_allclose(values, x.astype(np.float32), rtol=tol.get("rel", 0), atol=0)
    for index in left.pop("not_finite_at", []):
        assert not np.isfinite(values[tuple(index)])
    for block in left.pop("equal_elsewhere_in_blocks", []):
        part = np.s_[:, block * k : (block + 1) * k]
        clean = jlb.quantize(jnp.asarray(x[part]), q.format)
        np.testing.assert_array_equal(values[part], np.asarray(jlb.dequantize(clean)))
    if "block1_expected" in left:
        assert (values[:, k : 2 * k] == left.pop("block1_expected")).all()
    for block, value in left.pop("equal_in_blocks", {}).items():
        assert (values[int(block) * k : (int(block) + 1) * k] == value).all()
    if "block0_rel_err_max" in left:
        np.testing.assert_allclose(values[:k], x[:k], rtol=left.pop("block0_rel_err_max"))
    assert not left, f"unchecked expectations: {left}"


def _decoded_scales(q: jlb.ScaledArray) -> np.ndarray:
    scale = np.asarray(q.scale)
    if q.format.scale.name == "e8m0":
        return codecs.decode_e8m0(scale)
    return scale.astype(np.float32)


@runs("B19a", "B19b", "B31a", ways=("numpy", "jax"))
def dequantize(case: dict[str, Any], way: str) -> None:
    inputs, want = case["inputs"], array(case["expected"])
    codes, scale, fmt = array(inputs["q"]), array(inputs["scale"]), format_of(inputs)
    if way == "numpy":
        factors = codecs.decode_e8m0(scale)[:, None] if fmt.scale.name == "e8m0" else scale
        with np.errstate(over="ignore"):
            got = (codecs.decode(codes, fmt.element.name) * factors).astype(want.dtype)
    else:
        if fmt.scale.name == "e8m0":
            scale = scale[:, None]
        q = jlb.ScaledArray(jnp.asarray(codes.view(fmt.element.storage)), jnp.asarray(scale), format=fmt)
        got = np.asarray(jax.jit(lambda v: jlb.dequantize(v, inputs["out"]))(q.validate()))
    assert got.dtype == want.dtype
    if codes.ndim == 2:
        np.testing.assert_array_equal(got, np.broadcast_to(got[:, :1], got.shape))
        got = got[:, 0]
    if case["id"] == "B19b" and way == "jax":
        # The case accepts a flushed first value: 2**-127 is a subnormal float32 and XLA's threads flush
        # those. The second, 2**-126, is normal and stays.
        assert got[0] in (0, want[0])
        got, want = got[1:], want[1:]
    check = got.astype(np.float64), want.astype(np.float64)
    np.testing.assert_array_equal(*check)


@runs("B52a", ways=IMPLEMENTATIONS)
def grouped_quantize(case: dict[str, Any], way: str) -> None:
    """Blocks lie along K, so quantizing rows at once and group by group, empty groups included, is one
    thing."""
    inputs, want = case["inputs"], case["expected"]
    x, fmt = array(inputs["x"]), format_of(inputs)
    whole = quantize(x, fmt, way, scale_rounding=inputs["mode"])
    check_bits(np.asarray(whole.scale).reshape(-1), want["scale"])
    check_bits(np.asarray(whole.data).reshape(-1)[:32], want["q_first32"])
    start = 0
    for size in inputs["group_sizes"]:
        part = quantize(x[start : start + size], fmt, way, scale_rounding=inputs["mode"])
        rows = slice(start, start + size)
        np.testing.assert_array_equal(np.asarray(part.data), np.asarray(whole.data)[rows])
        np.testing.assert_array_equal(np.asarray(part.scale), np.asarray(whole.scale)[rows])
        start += size
    assert start == len(x)


@runs("B73a", ways=IMPLEMENTATIONS)
def sharded(case: dict[str, Any], way: str) -> None:
    """A per-tensor scale over rows on two devices is that of the whole tensor."""
    want = case["expected"]
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",))
    x = jax.device_put(jnp.asarray(array(case["inputs"]["x"])), NamedSharding(mesh, PartitionSpec("rows")))
    q = jax.jit(lambda v: jlb.quantize(v, jlb.FP8_TENSOR, implementation=way))(x)
    codes = np.asarray(q.data).view(np.uint8)
    assert np.asarray(q.scale).item() == want["scale"]
    assert (codes[0] == want["q_row0"]).all()
    assert (codes[1] == want["q_row1"]).all()


@runs("B86a", ways=("jax",))
def fused_rows(case: dict[str, Any], way: str) -> None:
    """Fused parts keep their own per-tensor scales."""
    inputs = case["inputs"]
    edges = np.cumsum(inputs["rows_per_part"])
    data = jnp.asarray(np.full((int(edges[-1]), 8), 0x38, np.uint8)).view(jnp.float8_e4m3fn)
    scale = jnp.asarray(inputs["scales"], jnp.float32)[:, None]
    q = jlb.ScaledArray(data, scale, format=jlb.FP8_TENSOR, row_splits=tuple(int(e) for e in edges[:-1])).validate()
    want = np.repeat(np.array(case["expected"]["row_values"])[:, None], 8, axis=1)
    np.testing.assert_array_equal(np.asarray(jlb.dequantize(q)), want)
    # and the dot takes them as they are: each row sums its eight values
    x = jnp.ones((1, 8), jnp.float32)
    for implementation in IMPLEMENTATIONS:
        out = jlb.fp8_dot(x, q, act=None, implementation=implementation)
        np.testing.assert_array_equal(np.asarray(out)[0], want.sum(axis=1))
