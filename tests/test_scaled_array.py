"""ScaledArray as a pytree, its checks, and dequantize against a loop over elements."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxlowbit as jlb
from jaxlowbit import _ffi, codecs
from jaxlowbit.formats import FORMATS, Format
from jaxlowbit.scaled_array import scale_factors

from .naive_quantize import F32, spread

# Both give the same bits; the native one compiles in no time.
IMPLEMENTATION = "native" if _ffi.native_available(jax.default_backend(), _ffi.QUANTIZE)[0] else "xla"

every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)


def make(fmt: Format, shape: tuple[int, ...] = (40, 80), seed: int = 0) -> jlb.ScaledArray:
    return jlb.quantize(spread(shape, seed), fmt, implementation=IMPLEMENTATION, pad=True)


@jax.jit
def dequantize(q: jlb.ScaledArray) -> Any:
    """One compilation instead of one for each operation."""
    return q.dequantize()


def same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), got, want)


def naive_dequantize(q: jlb.ScaledArray) -> np.ndarray:
    """One matrix, element by element, in float64: no expansion of scales, no shared indexing."""
    codes = np.asarray(codecs.unpack_nibbles(np.asarray(q.data)) if q.format.element.packed else q.data).view(np.uint8)
    table = codecs.decode(np.arange(256, dtype=np.uint8), q.format.element).astype(np.float64)
    scale = np.asarray(q.scale)
    scale = (codecs.decode_e8m0(scale) if q.format.scale.name == "e8m0" else scale).astype(np.float64)
    out = np.empty((q.rows, q.k))
    first = 0
    for index, (start, stop) in enumerate(q.segments):
        high, wide = q.format.resolve_block(stop - start, q.k)
        for r in range(start, stop):
            for c in range(q.k):
                out[r, c] = table[codes[r, c]] * scale[first + (r - start) // high, c // wide]
        if q.global_scale is not None:
            out[start:stop] *= np.asarray(q.global_scale, np.float64).reshape(-1)[index if q.row_splits else 0]
        first += -(-(stop - start) // high)
    return out


# Values.


@pytest.mark.parametrize(
    "fmt",
    [
        *FORMATS.values(),
        jlb.FP8_128X128.with_block(16, 24),
        jlb.MXFP8.with_block(7, 9),
        jlb.MXFP4.with_block(3, None),
        jlb.NVFP4.with_block(None, 5),
        jlb.FP8_1X128.with_element("e5m2"),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(40, 80), (17, 33), (130, 129)], ids=str)
def test_dequantize_is_the_loop(fmt: Format, shape: tuple[int, int]) -> None:
    q = make(fmt, shape).validate()
    want = naive_dequantize(q)
    values = dequantize(q)
    assert values.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(values), want, rtol=2.0**-22, atol=0)
    half = jax.jit(lambda q: q.dequantize(jnp.bfloat16))(q)
    np.testing.assert_array_equal(np.asarray(half), np.asarray(values).astype(ml_dtypes.bfloat16))


def test_dequantize_rounds_once() -> None:
    data = np.array([[0x3E, 0x7E]], np.uint8).view(ml_dtypes.float8_e4m3fn)
    q = jlb.ScaledArray(data, np.array([[1.005859375]], F32), format=jlb.FP8_TENSOR)
    assert np.asarray(q.dequantize(jnp.bfloat16)).astype(F32).tolist() == [[1.7578125, 450.0]]
    wide = dataclasses.replace(q, scale=jnp.asarray([[1.0]], jnp.bfloat16))
    assert np.asarray(wide.validate().dequantize()).tolist() == [[1.75, 448.0]]


def test_e8m0_scales_reach_both_ends() -> None:
    scale = np.array([0, 1, 127, 254, 255], np.uint8)[:, None]
    data = np.full((5, 32), 0x7E, np.uint8).view(ml_dtypes.float8_e4m3fn)
    for kind in (scale, scale.view(ml_dtypes.float8_e8m0fnu)):
        q = jlb.ScaledArray(jnp.asarray(data), jnp.asarray(kind), format=jlb.MXFP8).validate()
        values = np.asarray(dequantize(q))
        want = np.array([448 * 2.0**-127, 448 * 2.0**-126, 448, np.inf, np.nan], F32)
        np.testing.assert_array_equal(values, np.repeat(want[:, None], 32, axis=1))
    factors = scale_factors(jnp.asarray(scale), jlb.MXFP8)
    assert all((np.asarray(f)[:4] >= 2.0**-126).all() for f in factors), "no factor is flushed"


def test_one_dimension_is_one_row() -> None:
    for fmt in FORMATS.values():
        q = make(fmt, (80,)).validate()
        assert (q.shape, q.ndim, q.rows, q.grid[0]) == ((80,), 1, 1, 1)
        row = make(fmt, (1, 80))
        np.testing.assert_array_equal(np.asarray(dequantize(q)), np.asarray(dequantize(row))[0])


def test_odd_k_in_fp4_is_known_to_the_array() -> None:
    q = make(jlb.MXFP4, (3, 33)).validate()
    assert (q.shape, q.k, q.last_dim, q.size) == ((3, 33), 33, 33, 99)
    assert q.data.shape == (3, 17)
    assert dequantize(q).shape == (3, 33)
    assert jax.vmap(dequantize)(jax.tree.map(lambda x: x[None], q)).shape == (1, 3, 33)


# Row segments.


@pytest.mark.parametrize("fmt", [jlb.FP8_128X128.with_block(16, 32), jlb.MXFP4, jlb.NVFP4, jlb.FP8_TENSOR], ids=str)
def test_row_splits_keep_the_segments_scales(fmt: Format) -> None:
    parts = [make(fmt, (rows, 64), seed=rows) for rows in (24, 16, 7)]
    outer = None if not fmt.two_level else jnp.stack([p.global_scale for p in parts])
    q = jlb.ScaledArray(
        jnp.concatenate([p.data for p in parts]),
        jnp.concatenate([p.scale for p in parts]),
        outer,
        format=fmt,
        row_splits=(24, 40),
    ).validate()
    assert q.segments == [(0, 24), (24, 40), (40, 47)]
    for index, part in enumerate(parts):
        same(q.segment(index), part)
    want = np.concatenate([np.asarray(dequantize(p)) for p in parts])
    np.testing.assert_array_equal(np.asarray(dequantize(q)), want)
    np.testing.assert_allclose(want, naive_dequantize(q), rtol=2.0**-22)
    # where 24 rows are no whole number of blocks, one grid over all rows would be another
    if fmt.block[0] == 16:
        assert q.grid[0] == 2 + 1 + 1 == fmt.grid(47, 64)[0] + 1
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), q).validate()
    np.testing.assert_array_equal(np.asarray(dequantize(stacked))[1], want)


# The pytree.


@every_format
def test_jit_keeps_format_and_leaves(fmt: Format) -> None:
    q = make(fmt)
    out = jax.jit(lambda v: v)(q)
    same(out, q)
    assert out.format is fmt
    assert len(jax.tree.leaves(q)) == 2 + fmt.two_level
    names = [str(path[0]) for path, _ in jax.tree_util.tree_leaves_with_path(q)]
    assert names == [".data", ".scale", ".global_scale"][: 2 + fmt.two_level]


def test_two_formats_are_two_structures() -> None:
    a, b = make(jlb.FP8_1X128, (4, 16)), make(jlb.FP8_CHANNEL, (4, 16))
    assert jax.tree.structure(a) != jax.tree.structure(b)
    with pytest.raises(ValueError, match="pytree"):
        jax.tree.map(lambda x, y: x, a, b)


def test_unflattening_never_validates() -> None:
    q = make(jlb.NVFP4)
    leaves, structure = jax.tree.flatten(q)
    hollow = jax.tree.unflatten(structure, [object()] * len(leaves))
    assert "NVFP4" in repr(hollow)
    specs = jax.eval_shape(lambda v: v, q)
    assert specs.shape == (40, 80)
    assert specs.validate() is specs


@every_format
def test_grad_gives_frozen_leaves_zeros_of_their_kind(fmt: Format) -> None:
    q, x = make(fmt, (8, 64)), jnp.ones((2, 64))

    def f(tree: Any) -> Any:
        return (tree["x"] @ jax.lax.stop_gradient(tree["w"]).dequantize().T).sum()

    grads = jax.jit(jax.grad(f, allow_int=True))({"x": x, "w": q})
    want = np.asarray(dequantize(q)).sum(0)
    np.testing.assert_allclose(np.asarray(grads["x"])[0], want, rtol=1e-5, atol=1e-5)
    assert jax.tree.structure(grads["w"]) == jax.tree.structure(q)
    for leaf in jax.tree.leaves(grads["w"]):
        if leaf.dtype != jax.dtypes.float0:
            assert (np.asarray(leaf).astype(F32) == 0).all()


@every_format
def test_vmap_scan_and_stack(fmt: Format) -> None:
    parts = [make(fmt, (8, 64), seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts).validate()
    assert stacked.shape == (3, 8, 64)
    want = np.stack([np.asarray(dequantize(p)) for p in parts])
    np.testing.assert_array_equal(np.asarray(dequantize(stacked)), want)
    np.testing.assert_array_equal(np.asarray(jax.vmap(dequantize)(stacked)), want)
    carried, out = jax.lax.scan(lambda c, q: (c + 1, q.dequantize()), 0, stacked)
    np.testing.assert_array_equal(np.asarray(out), want)
    assert int(carried) == 3
    same(jax.lax.scan(lambda c, q: (c, q), 0, stacked)[1], stacked)
    same(jax.tree.map(lambda x: x[1], stacked), parts[1])


@pytest.mark.parametrize(
    "fmt", [f for f in FORMATS.values() if not f.element.packed] + [jlb.FP8_1X128.with_block(3, 5)], ids=str
)
def test_mt_transposes_codes_and_blocks(fmt: Format) -> None:
    q = make(fmt, (10, 33))
    t = q.mT.validate()
    assert t.shape == (33, 10)
    np.testing.assert_array_equal(np.asarray(dequantize(t)), np.asarray(dequantize(q)).T)
    np.testing.assert_array_equal(np.asarray(t.mT.data), np.asarray(q.data))
    batch = jax.tree.map(lambda x: jnp.stack([x, x]), q)
    np.testing.assert_array_equal(np.asarray(dequantize(batch.mT))[1], np.asarray(dequantize(t)))


def test_mt_refuses_what_it_cannot_transpose() -> None:
    split = dataclasses.replace(make(jlb.FP8_1X128), row_splits=(8,))
    for q in (make(jlb.NVFP4), make(jlb.FP8_TENSOR, (8,)), split):
        with pytest.raises(ValueError, match=r"ScaledArray: mT: expected a byte-wide format"):
            _ = q.mT


@every_format
def test_orbax_saves_and_restores(fmt: Format, tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    tree = {"layer": {"w": make(fmt, (8, 66)), "b": jnp.ones(8)}}
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", tree)
        saver.wait_until_finished()
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        back = saver.restore(tmp_path / "state", target)
    same(back, tree)
    assert back["layer"]["w"].validate().format is fmt


# Words and checks.


def test_repr_shows_format_shape_and_bytes() -> None:
    q = make(jlb.FP8_128X128, (256, 130))
    assert repr(q) == f"ScaledArray(FP8_128X128[256,130], {256 * 130 + 4 * 4} bytes)"
    four = make(jlb.NVFP4, (2, 32, 64))
    assert "NVFP4[2,32,64]" in repr(four)
    assert four.nbytes == 2 * (32 * 32 + 32 * 4 + 4) == 2 * jlb.NVFP4.bytes(32, 64)
    assert repr(dataclasses.replace(q, row_splits=(128,))).endswith("row_splits=(128,))")
    assert "FP8_128X128[256,130]" in str(jax.eval_shape(lambda v: v, q))


def broken() -> dict[str, tuple[type[Exception], str, jlb.ScaledArray]]:
    q8, q4, odd = make(jlb.FP8_1X128, (4, 256)), make(jlb.NVFP4, (4, 32)), make(jlb.MXFP4, (4, 33))
    swap = dataclasses.replace
    return {
        "raw codes": (
            TypeError, r"value\.data: expected float8_e4m3fn codes.*got uint8\[4,256\]. Bit-cast",
            swap(q8, data=codecs.raw_codes(q8.data, "e4m3")),
        ),
        "integer scale": (
            TypeError, r"value\.scale: expected a dtype of \['float32'", swap(q8, scale=q8.scale.astype(jnp.int32)),
        ),
        "grid": (ValueError, r"value\.scale: expected shape \(4, 2\)", swap(q8, scale=q8.scale[:, :1])),
        "transposed grid": (ValueError, r"expected shape \(4, 2\)", swap(q8, scale=q8.scale.T)),
        "length": (ValueError, r"last_dim: expected a length stored in 17 bytes", swap(odd, last_dim=31)),
        "splits": (ValueError, r"row_splits: expected strictly increasing rows in", swap(q8, row_splits=(4,))),
        "split order": (ValueError, r"row_splits", swap(q8, row_splits=(2, 1))),
        "no global": (ValueError, r"global_scale: expected a float32 global_scale", swap(q4, global_scale=None)),
        "global": (ValueError, r"expected no global_scale for FP8_1X128", swap(q8, global_scale=jnp.ones(()))),
        "global shape": (ValueError, r"global_scale: expected shape \(\)", swap(q4, global_scale=jnp.ones(4))),
        "global of segments": (
            ValueError, r"expected shape \(2,\) \(one per matrix and row segment\)", swap(q4, row_splits=(2,)),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", broken())
def test_validate_names_what_does_not_fit(name: str) -> None:
    error, match, q = broken()[name]
    with pytest.raises(error, match=match):
        q.validate()
    with pytest.raises(error, match=r"jaxlowbit\.fp8_dot: w\."):
        q.validate("fp8_dot", "w")
