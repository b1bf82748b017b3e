"""Cases of the codecs: encode, decode, packing and MX scales, on NumPy arrays and under jit."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowbit as jlb
from jaxlowbit import codecs
from tests.cases.shim import (
    CODECS,
    ELEMENT,
    array,
    check_bits,
    check_equal,
    check_message,
    of_op,
    runs,
)


def call(way: str, fn: Any, *arrays: np.ndarray) -> Any:
    """``fn`` on NumPy arrays, or on traced ones."""
    if way == "numpy":
        out = fn(*arrays)
        assert isinstance(out, np.ndarray), type(out)
        return out
    return jax.jit(fn)(*map(jnp.asarray, arrays))


@runs(*of_op("encode"), ways=CODECS)
def encode(case: dict[str, Any], way: str) -> None:
    inputs = case["inputs"]
    element = ELEMENT[inputs["fmt"]]
    assert inputs["scale"] == 1.0
    got = call(way, functools.partial(codecs.encode, element=element, saturate=inputs["saturate"]), array(inputs["x"]))
    check_bits(got, case["expected"], element)


@runs(*of_op("decode"), ways=CODECS)
def decode(case: dict[str, Any], way: str) -> None:
    inputs = case["inputs"]
    got = call(way, functools.partial(codecs.decode, element=ELEMENT[inputs["fmt"]]), array(inputs["q"]))
    check_equal(got, case["expected"], sign_of_zero=True)


@runs(*of_op("mx_scale"), ways=CODECS)
def mx_scale(case: dict[str, Any], way: str) -> None:
    inputs = case["inputs"]
    scale = functools.partial(codecs.mx_scale, element=ELEMENT[inputs["elem"]], rounding=inputs["mode"])
    check_bits(call(way, scale, array(inputs["amax"])), case["expected"])


@runs("B09a", ways=CODECS)
def fn_to_fnuz(case: dict[str, Any], way: str) -> None:
    inputs, want = case["inputs"], case["expected"]
    check_bits(call(way, codecs.e4m3fn_to_fnuz, array(inputs["q"])), want["q"])
    assert want["scale"] == 2 * inputs["scale"]  # the codec's contract: same bits mean half the value


@runs("B82a", ways=CODECS)
def pack(case: dict[str, Any], way: str) -> None:
    x = array(case["inputs"]["x"])
    packed = call(way, jlb.pack_e2m1, x)
    check_bits(packed, case["expected"])
    np.testing.assert_array_equal(call(way, jlb.unpack_e2m1, np.asarray(packed)), x)


@runs("B27a", ways=("eager",))
def pack_e8m0(case: dict[str, Any], way: str) -> None:
    scale = array(case["inputs"]["scale"])
    for kind in (np.asarray, jnp.asarray):
        with pytest.raises(ValueError, match="power of two") as error:
            jlb.encode_e8m0(kind(scale))
        check_message(error.value, case["expected"]["message_mentions"])
    # Under jit values are unknown: float32 scales of an E8M0 format are a dtype error at trace time.
    w, x = jnp.zeros((3, 32), jnp.float8_e4m3fn), jnp.ones((2, 32), jnp.bfloat16)
    q = jlb.ScaledArray(w, jnp.asarray(scale)[:, None], format=jlb.MXFP8)
    with pytest.raises(TypeError, match="scale"):
        jax.eval_shape(jlb.fp8_dot, x, q)
