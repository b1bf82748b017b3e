"""The one place where the generic cases of cases.json meet this library: their arrays, names and checks.

cases.json stores weights as (K, N) and calls operations by generic names; ``weight`` transposes, and the
adapters in ``codec_ops``, ``quantize_ops``, ``dot_ops`` and ``grad_ops`` register themselves here under a
case's op or id.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jaxlowbit as jlb
from jaxlowbit.formats import Format

CASES: dict[str, dict[str, Any]] = {
    case["id"]: case for case in json.loads(Path(__file__).with_name("cases.json").read_text())["cases"]
}

CODECS = ("numpy", "jit")  # the codecs take both kinds of arrays
IMPLEMENTATIONS = ("xla", "native")

Adapter = Callable[[dict[str, Any], str], None]
# Case id -> (adapter, the ways it runs). An adapter raises AssertionError where the library is wrong.
RUNNERS: dict[str, tuple[Adapter, tuple[str, ...]]] = {}

ELEMENT = {"e4m3fn": "e4m3", "e5m2": "e5m2", "e2m1": "e2m1"}
_VIEW = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}


def runs(*ids: str, ways: tuple[str, ...]) -> Callable[[Adapter], Adapter]:
    """Registers an adapter for these case ids."""

    def register(adapter: Adapter) -> Adapter:
        for case_id in ids:
            if case_id in RUNNERS or case_id not in CASES:
                raise ValueError(f"{case_id}: registered twice, or not in cases.json")
            RUNNERS[case_id] = (adapter, ways)
        return adapter

    return register


def of_op(*ops: str) -> list[str]:
    """Ids of all cases of these ops."""
    return [case_id for case_id, case in CASES.items() if case["op"] in ops]


# ---------------------------------------------------------------------------------------------------------------
# Arrays


def array(spec: Any) -> np.ndarray:
    """A case's array: literal data, or one of the generators that the file describes."""
    if not isinstance(spec, dict):
        return np.asarray(spec, np.float32)
    dtype = _dtype(spec.get("dtype", "float32"))
    if "data" in spec:
        values = [float(v) if isinstance(v, str) else v for v in spec["data"]]
        if dtype == np.uint8:
            return np.array(values, np.uint8).reshape(spec["shape"])
        return np.array(values, np.float64).astype(dtype).reshape(spec["shape"])
    if "formula" in spec:
        return _formula(spec)
    return _generated(spec).astype(dtype)


def _dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _formula(spec: dict[str, Any]) -> np.ndarray:
    if spec["formula"] != "2**(((r//4+kb)%3)-1)":
        raise ValueError(f"unknown formula {spec['formula']!r}")
    return np.fromfunction(lambda r, kb: 2.0 ** ((r // 4 + kb) % 3 - 1), spec["shape"])


def _generated(spec: dict[str, Any]) -> np.ndarray:
    kind = spec["gen"]
    if kind == "arange":
        return np.arange(spec["n"])
    shape = spec["shape"]
    if kind == "affine_mod":
        i = np.arange(math.prod(shape), dtype=np.int64)
        return ((((spec["a"] * i + spec["b"]) % spec["m"]) - spec["c"]) / spec["d"]).reshape(shape)
    if kind == "zeros_with":
        out = np.zeros(shape)
        for index, value in spec["set"]:
            out[tuple(index)] = value
        return out
    if kind == "first_then":
        out = np.full(shape, spec["rest"])
        if spec.get("axis") == 0:
            out[0] = spec["first"]
        else:
            out[..., 0] = spec["first"]
        return out
    constant = {"zeros": 0.0, "ones": 1.0}.get(kind, spec.get("value"))
    if kind not in ("zeros", "ones", "full", "full_bytes") or "last_row" in spec:
        raise ValueError(f"unknown generator {spec}")
    return np.full(shape, constant)


def weight(spec: Any) -> np.ndarray:
    """A case's (..., K, N) weight as the library stores it, (..., N, K)."""
    return np.ascontiguousarray(np.swapaxes(array(spec), -1, -2))


def e4m3(values: np.ndarray) -> jnp.ndarray:
    """Exactly representable values as codes; asserts that they are."""
    codes = values.astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(codes.astype(np.float32), values.astype(np.float32))
    return jnp.asarray(codes)


def e2m1(values: np.ndarray) -> jnp.ndarray:
    """Exactly representable values as packed codes, the even index in the low nibble."""
    codes = values.astype(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(codes.astype(np.float32), values.astype(np.float32))
    nibbles = codes.view(np.uint8)
    return jnp.asarray(nibbles[..., 0::2] | (nibbles[..., 1::2] << 4))


def format_of(inputs: dict[str, Any], block: Any = None) -> Format:
    """The library's format for a case's ``fmt`` and ``block``."""
    block, element = block or inputs["block"], ELEMENT[inputs.get("fmt", "e4m3fn")]
    if isinstance(block, list):
        return jlb.FP8_1X128.with_block(*block).with_element(element)
    named = {"per_tensor": jlb.FP8_TENSOR, "per_row": jlb.FP8_CHANNEL, "mxfp4": jlb.MXFP4, "nvfp4": jlb.NVFP4}
    if block.startswith("mx32"):
        return {"e4m3": jlb.MXFP8, "e2m1": jlb.MXFP4}[element]
    return named[block]


# ---------------------------------------------------------------------------------------------------------------
# Checks


def check_bits(got: Any, want: Any, element: str | None = None) -> None:
    """Codes are equal; with ``element``, any NaN code equals any other."""
    codes = np.asarray(got)
    codes = codes if codes.dtype == np.uint8 else codes.view(np.uint8)
    expected = array(want)
    assert codes.shape == expected.shape, (codes.shape, expected.shape)
    if element is not None:
        nan = [np.isnan(c.view(_VIEW[element]).astype(np.float32)) for c in (codes, expected)]
        np.testing.assert_array_equal(*nan)
        codes, expected = np.where(nan[0], 0, codes), np.where(nan[1], 0, expected)
    np.testing.assert_array_equal(codes, expected)


def check_equal(got: Any, want: Any, *, sign_of_zero: bool = False) -> None:
    """Exactly equal values, NaN where NaN is expected."""
    values, expected = np.asarray(got).astype(np.float64), array(want).astype(np.float64)
    assert values.shape == expected.shape, (values.shape, expected.shape)
    np.testing.assert_array_equal(values, expected)
    if sign_of_zero:
        zero = expected == 0
        np.testing.assert_array_equal(np.signbit(values[zero]), np.signbit(expected[zero]))


def check_close(got: Any, want: Any, tol: dict[str, float]) -> None:
    """Within the case's absolute or relative tolerance."""
    np.testing.assert_allclose(
        np.asarray(got).astype(np.float64), array(want), rtol=tol.get("rel", 0), atol=tol.get("abs", 0)
    )


def check_probes(got: Any, want: dict[str, Any]) -> None:
    """Shape, sum, sum of squares, weighted sum and single values of an exact integer result."""
    values = np.asarray(got).astype(np.float64)
    assert list(values.shape) == want["shape"], (values.shape, want["shape"])
    flat = values.reshape(-1)
    for index, value in want["probes"]:
        assert flat[index] == value, (index, flat[index], value)
    assert flat.sum() == want["sum"]
    assert (flat * flat).sum() == want["sum_sq"]
    assert (flat * (np.arange(flat.size) % 13 + 1)).sum() == want["weighted_sum"]


def check_result(got: Any, want: dict[str, Any]) -> None:
    """Whichever of the two exact forms the case gives."""
    (check_probes if "probes" in want else check_equal)(got, want)


def check_message(error: BaseException, mentions: list[str]) -> None:
    for text in mentions:
        assert text in str(error), (text, str(error))
