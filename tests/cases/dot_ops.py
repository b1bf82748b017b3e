"""Cases of the dense products: values, shapes, refusals, threads, devices."""

from __future__ import annotations

import concurrent.futures
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowbit as jlb
from tests.cases.shim import (
    IMPLEMENTATIONS,
    array,
    check_close,
    check_equal,
    check_message,
    check_result,
    e2m1,
    e4m3,
    runs,
    weight,
)

F32 = jnp.float32


def ones_scale(fmt: jlb.Format, rows: int, k: int) -> jnp.ndarray:
    grid = fmt.grid(rows, k)
    return jnp.full(grid, 127, jnp.uint8) if fmt.scale.name == "e8m0" else jnp.ones(grid, F32)


def unscaled(values: np.ndarray, fmt: jlb.Format) -> jlb.ScaledArray:
    """Exactly representable values as a ScaledArray whose scales are all 1."""
    codes = e2m1(values) if fmt.element.packed else e4m3(values)
    return jlb.ScaledArray(codes, ones_scale(fmt, *values.shape), format=fmt).validate()


def exact_ways(x: np.ndarray, w: np.ndarray, way: str) -> Iterator[jax.Array]:
    """``x @ w.T`` through every route that keeps exactly representable operands exact.

    Values that E2M1 holds too go through the FP4 weights as well.
    """
    options: dict[str, Any] = {"implementation": way, "preferred_element_type": F32}
    n = w.shape[0]
    xs = jnp.asarray(x, F32)
    yield jlb.fp8_dot(xs, e4m3(w), ones_scale(jlb.FP8_128X128, *w.shape), act=None, **options)
    yield jlb.fp8_dot(xs, e4m3(w), jnp.ones((n, 1)), act_scale=jnp.ones(()), **options)
    yield jlb.scaled_dot(unscaled(x, jlb.FP8_1X128), unscaled(w, jlb.FP8_128X128), **options)
    if np.abs(w).max() <= 4 and w.shape[1] % 2 == 0:
        fp4 = unscaled(w, jlb.MXFP4)
        yield jlb.fp4_dot(xs, fp4.data, fp4.scale, format=jlb.MXFP4, **options)
        yield jlb.scaled_dot(unscaled(x, jlb.MXFP8), fp4, **options)
        if np.abs(x).max() <= 4:
            yield jlb.scaled_dot(unscaled(x, jlb.MXFP4), fp4, **options)


@runs("B37b", "B39a", ways=IMPLEMENTATIONS)
def exact(case: dict[str, Any], way: str) -> None:
    inputs = case["inputs"]
    for out in exact_ways(array(inputs["x"]), weight(inputs["w"]), way):
        assert out.dtype == F32
        check_result(out, case["expected"])


@runs("B46a", ways=IMPLEMENTATIONS)
def every_m(case: dict[str, Any], way: str) -> None:
    inputs = case["inputs"]
    x, w = array(inputs["x"]), weight(inputs["w"])
    for whole in exact_ways(x, w, way):
        check_result(whole, case["expected"])
    codes, scale = e4m3(w), jnp.ones((1, 1))
    for m in inputs["take_first_M_rows"]:
        options = {"act": None, "preferred_element_type": F32, "implementation": way}
        out = jlb.fp8_dot(jnp.asarray(x[:m]), codes, scale, **options)
        np.testing.assert_array_equal(np.asarray(out), np.asarray(whole)[:m])


def poison() -> None:
    """Fills memory that the allocator may hand out again with bytes that decode to NaN, then frees it."""
    blocks = [jnp.full(size, 0xFF, jnp.uint8) for size in (1 << 10, 1 << 13, 1 << 16, 1 << 20)]
    jax.block_until_ready(blocks)


@runs("B36a", ways=IMPLEMENTATIONS)
def padding(case: dict[str, Any], way: str) -> None:
    """Blocks past K and rows past M hold no one's data: the same bits from clean and from poisoned memory."""
    inputs = case["inputs"]
    x, w = array(inputs["x"]), weight(inputs["w"])
    for _ in range(2):
        poison()
        for out in exact_ways(x, w, way):
            check_result(out, case["expected"])


@runs("B68a", ways=IMPLEMENTATIONS)
def accumulator(case: dict[str, Any], way: str) -> None:
    inputs = case["inputs"]
    for out in exact_ways(array(inputs["x"]), weight(inputs["w"]), way):
        check_close(out, np.full(out.shape, case["expected"]["value"]), case["tol"])
        # float32 accumulation holds these integers; the tolerance is for tensor cores that keep fewer bits.
        if jax.default_backend() == "cpu":
            assert (np.asarray(out) == case["expected"]["value"]).all()


@runs("B16a", ways=IMPLEMENTATIONS)
def zero_row(case: dict[str, Any], way: str) -> None:
    inputs, tol = case["inputs"], dict(case["tol"])
    x, w = jnp.asarray(array(inputs["x"])), e4m3(weight(inputs["w"]))

    def loss(v: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = jlb.fp8_dot(v, w, jnp.ones((w.shape[0],)), implementation=way)
        return out.sum(), out

    grad, out = jax.grad(loss, has_aux=True)(x)
    for row in tol.pop("exact_rows"):
        assert (np.asarray(out)[row] == 0).all()
    check_close(out, case["expected"], tol)
    np.testing.assert_array_equal(np.asarray(grad), np.full(x.shape, float(w.shape[0])))


@runs("B33a", ways=("signature",))
def no_output_scale(case: dict[str, Any], way: str) -> None:
    """No low-bit outputs are offered, so a keyword that would be dropped does not exist."""
    for op in (jlb.fp8_dot, jlb.fp4_dot, jlb.scaled_dot):
        parameters = inspect.signature(op).parameters
        assert "out_scale" not in parameters
        assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    x, w = jnp.asarray(array(case["inputs"]["x"])), e4m3(weight(case["inputs"]["w"]))
    with pytest.raises(TypeError, match="preferred_element_type"):
        jlb.fp8_dot(x, w, jnp.ones(()), preferred_element_type=jnp.float8_e4m3fn)


@runs("B34a", ways=IMPLEMENTATIONS)
def block_scales(case: dict[str, Any], way: str) -> None:
    inputs = case["inputs"]
    x, w = array(inputs["x"]), weight(inputs["w"])
    exponents = np.log2(array(inputs["x_scale"])).astype(np.int64)
    lhs = jlb.ScaledArray(e4m3(x), jnp.asarray((exponents + 127).astype(np.uint8)), format=jlb.MXFP8)
    for dtype in (F32, jnp.bfloat16):
        out = jlb.scaled_dot(lhs, unscaled(w, jlb.MXFP8), preferred_element_type=dtype, implementation=way)
        for column in range(w.shape[0]):
            check_equal(np.asarray(out)[:, column], case["expected"]["column0"])


@runs("B39b", ways=IMPLEMENTATIONS)
def contraction_mismatch(case: dict[str, Any], way: str) -> None:
    x, w = jnp.asarray(array(case["inputs"]["x"])), e4m3(weight(case["inputs"]["w"]))
    with pytest.raises(ValueError, match="fp8_dot") as error:
        jax.eval_shape(lambda a, b: jlb.fp8_dot(a, b, jnp.ones(()), implementation=way), x, w)
    check_message(error.value, case["expected"]["message_mentions"])


@runs("B40a", ways=IMPLEMENTATIONS)
def wrong_types(case: dict[str, Any], way: str) -> None:
    """Four of the five variants; the one with group_sizes belongs to the grouped product (see
    WAITING_PARTS)."""
    x, w = jnp.ones((4, 256), jnp.bfloat16), jnp.ones((128, 256), jnp.float8_e4m3fn)
    s = jnp.ones((1, 2))
    weights = jlb.ScaledArray(w, s, format=jlb.FP8_128X128)

    def dot(*args: Any, **keywords: Any) -> Any:
        return jlb.fp8_dot(*args, implementation=way, **keywords)

    def acts(scale: jax.Array) -> Any:
        lhs = jlb.ScaledArray(jnp.ones((4, 256), jnp.float8_e4m3fn), scale, format=jlb.FP8_1X128)
        return jlb.scaled_dot(lhs, weights, implementation=way)

    variants: dict[str, tuple[Any, str]] = {
        "q dtype bfloat16": (lambda: dot(x, w.astype(jnp.bfloat16), s), "w.*float8_e4m3fn.*bfloat16"),
        "q dtype int8": (lambda: dot(x, jnp.ones((128, 256), jnp.int8), s), "w.*float8_e4m3fn.*int8"),
        "x_scale shape (M,K//64) for block 128": (lambda: acts(jnp.ones((4, 4))), r"scale.*4, 2.*\[4,4\]"),
        "out_dtype int32": (lambda: dot(x, w, s, preferred_element_type=jnp.int32), "preferred_element_type.*int32"),
    }
    assert set(variants) == set(case["inputs"]["variants"]) - {"group_sizes length G+1"}
    for call, message in variants.values():
        with pytest.raises((ValueError, TypeError), match=f"(?s){message}"):
            jax.eval_shape(call)
    acts(jnp.ones((4, 2)))  # the right one passes


@runs("B41a", ways=IMPLEMENTATIONS)
def views(case: dict[str, Any], way: str) -> None:
    inputs = case["inputs"]
    assert inputs["x_view"] == "base.T[::2]"
    base, w = jnp.asarray(array(inputs["x_base"])), weight(inputs["w"])
    codes, scale = e4m3(w), jnp.ones((1, 1))

    def dot(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jlb.fp8_dot(x, weights, scale, act=None, implementation=way)

    @jax.jit
    def call(base: jax.Array, codes: jax.Array, transposed: jax.Array) -> list[jax.Array]:
        x = base.T[::2]
        halves = jnp.concatenate([x[:, ::2], x[:, 1::2]], axis=1)
        shuffled = jnp.concatenate([codes[:, ::2], codes[:, 1::2]], axis=1)
        return [dot(x, codes), dot(x[::-1], codes)[::-1], dot(x, transposed.T), dot(halves, shuffled)]

    for out in call(base, codes, codes.T):
        check_result(out, case["expected"])
    q = jax.jit(lambda b: jlb.quantize(b.T[::2], jlb.FP8_1X128, implementation=way))(base)
    copy = jlb.quantize(jnp.asarray(np.ascontiguousarray(np.asarray(base).T[::2])), jlb.FP8_1X128)
    np.testing.assert_array_equal(np.asarray(q.data), np.asarray(copy.data))


@runs("B43a", ways=IMPLEMENTATIONS)
def no_rows(case: dict[str, Any], way: str) -> None:
    """M = 0: result and dx; dw of no rows belongs to the weight gradient (see WAITING_PARTS)."""
    inputs, want = case["inputs"], case["expected"]
    x, w = jnp.asarray(array(inputs["x"])), e4m3(weight(inputs["w"]))
    out, pull = jax.vjp(lambda v: jlb.fp8_dot(v, w, jnp.ones(()), implementation=way), x)
    (dx,) = pull(jnp.ones_like(out))
    assert list(out.shape) == want["out_shape"]
    assert list(dx.shape) == want["dx_shape"]
    for fmt in (jlb.FP8_TENSOR, jlb.FP8_1X128, jlb.MXFP8, jlb.NVFP4):
        q = jlb.quantize(x, fmt, implementation=way).validate()
        assert q.shape == x.shape


@runs("B44a", ways=IMPLEMENTATIONS)
def no_terms(case: dict[str, Any], way: str) -> None:
    inputs = case["inputs"]
    x, w = jnp.asarray(array(inputs["x"])), jnp.asarray(weight(inputs["w"])).astype(jnp.float8_e4m3fn)
    bias = jnp.arange(16, dtype=F32)
    for act in (None, "dynamic"):
        out = jlb.fp8_dot(x, w, jnp.ones(()), act=act, implementation=way)
        check_equal(out, case["expected"])
        out = jlb.fp8_dot(x, w, jnp.ones(()), act=act, bias=bias, implementation=way)
        np.testing.assert_array_equal(np.asarray(out), np.broadcast_to(np.asarray(bias), (3, 16)))


@runs("B66a", ways=IMPLEMENTATIONS)
def nan_row(case: dict[str, Any], way: str) -> None:
    inputs, want = case["inputs"], case["expected"]
    x, w = array(inputs["x"]), e4m3(weight(inputs["w"]))
    x[inputs["x_rows_nan"]] = np.nan
    # Power-of-two scales keep these integers exact; the case's sums are of exact values.
    per_row = jlb.Act(jlb.FP8_CHANNEL, scale_rounding="pow2")
    for act in (None, per_row):
        out = np.array(jlb.fp8_dot(jnp.asarray(x), w, jnp.ones((w.shape[0],)), act=act, implementation=way))
        nan_rows = np.isnan(out)
        np.testing.assert_array_equal(nan_rows.all(axis=1), nan_rows.any(axis=1))
        assert list(np.flatnonzero(nan_rows.any(axis=1))) == want["nan_rows"]
        out[want["nan_rows"]] = 0
        check_result(out, want)


@runs("B69a", ways=IMPLEMENTATIONS)
def threads(case: dict[str, Any], way: str) -> None:
    """Two Python threads run the same program on inputs that have just been computed."""
    inputs = case["inputs"]
    x, w = jnp.asarray(array(inputs["x"])), e4m3(weight(inputs["w"]))

    @jax.jit
    def step(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        late = jax.lax.fori_loop(0, 20, lambda i, v: jnp.roll(v, 1, axis=0), x)  # back in place after 20 + 44 rolls
        late = jax.lax.fori_loop(0, 44, lambda i, v: jnp.roll(v, 1, axis=0), late)
        out = jlb.fp8_dot(late, w, jnp.ones(()), act=None, implementation=way)
        return out, out * 2

    def loop(_: int) -> np.ndarray:
        results = [step(x, w) for _ in range(inputs["loop"])]
        for out, double in results[1:]:
            np.testing.assert_array_equal(np.asarray(out), np.asarray(results[0][0]))
            np.testing.assert_array_equal(np.asarray(double), 2 * np.asarray(out))
        return np.asarray(results[0][0])

    with concurrent.futures.ThreadPoolExecutor(inputs["threads"]) as pool:
        for out in pool.map(loop, range(inputs["threads"])):
            check_result(out, case["expected"])


@runs("B70a", ways=IMPLEMENTATIONS)
def devices(case: dict[str, Any], way: str) -> None:
    """The second device first, then back and forth: nothing may be kept per process."""
    inputs = case["inputs"]
    for index in inputs["devices"]:
        device = jax.devices()[index]
        x = jax.device_put(jnp.asarray(array(inputs["x"])), device)
        w = jax.device_put(e4m3(weight(inputs["w"])), device)
        s = jax.device_put(jnp.ones(()), device)
        out = jlb.fp8_dot(x, w, s, act=None, implementation=way)
        assert out.devices() == {device}
        check_result(out, case["expected"])


@runs("B80a", ways=IMPLEMENTATIONS)
def scale_spellings(case: dict[str, Any], way: str) -> None:
    inputs = case["inputs"]
    w = jnp.asarray(array(inputs["weight"])).view(jnp.float8_e4m3fn)
    x = jnp.zeros((1, w.shape[1]), F32).at[0, 0].set(1.0)
    rows = case["expected"]["rows"]
    for variant, want in zip(inputs["scale_variants"], rows, strict=True):
        s = jnp.asarray(variant["v"], F32).reshape(variant["shape"])
        out = jlb.fp8_dot(x, w, s, act=None, implementation=way)
        np.testing.assert_array_equal(np.asarray(out)[0], want)


@runs("B80b", ways=IMPLEMENTATIONS)
def scale_misfits(case: dict[str, Any], way: str) -> None:
    shape = case["inputs"]["weight_shape"]
    x, w = jnp.ones((1, shape[1])), jnp.ones(shape, jnp.float8_e4m3fn)
    for bad in case["inputs"]["bad_scale_shapes"]:
        with pytest.raises(ValueError, match=r"(?s)fp8_dot.*s.*4.*got.*" + str(bad[0])):
            jlb.fp8_dot(x, w, jnp.ones(bad), act=None, implementation=way)
