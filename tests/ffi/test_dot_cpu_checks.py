"""The handler of the CPU product through XLA: every tier of the installed library, batches, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlowbit import _ffi
from jaxlowbit._ffi import Element, ScaleKind, Tier
from jaxlowbit.testing.tolerance import check, dot_bound
from tests.ffi.dot_model import BF16, KINDS, Matrix, coded, plain, product

TIERS = [tier for tier in _ffi.available_tiers() if tier != Tier.AUTO]
F32 = np.dtype(np.float32)
pytestmark = pytest.mark.skipif(not TIERS, reason="the CPU library is not loaded")


def stored(matrix: Matrix) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Data, scale and global scale of one matrix as the FFI takes them, without the batch."""
    if matrix.element == Element.PLAIN:
        return jnp.asarray(matrix.data), None, None
    data = matrix.data.view(jnp.float8_e4m3fn) if matrix.element == Element.E4M3 else matrix.data
    scale = matrix.scale.view(jnp.float8_e4m3fn) if matrix.kind == ScaleKind.E4M3 else matrix.scale
    return jnp.asarray(data), jnp.asarray(scale), jnp.asarray(matrix.outer) if matrix.outer.size else None


def stack(matrices: list[Matrix]) -> list[jax.Array | None]:
    columns = zip(*(stored(matrix) for matrix in matrices), strict=True)
    return [None if column[0] is None else jnp.stack(column) for column in columns]


def config(lhs: Matrix, rhs: Matrix, tier: Tier = Tier.AUTO, **changes: Any) -> _ffi.DotConfig:
    fields = {
        "lhs_element": lhs.element, "lhs_scale_kind": lhs.kind,
        "lhs_block_m": lhs.block[0], "lhs_block_k": lhs.block[1],
        "rhs_element": rhs.element, "rhs_scale_kind": rhs.kind,
        "rhs_block_n": rhs.block[0], "rhs_block_k": rhs.block[1],
        "transposed": 0, "tier": tier,
    }  # fmt: skip
    return _ffi.DotConfig(**{**fields, **changes})


@pytest.mark.parametrize("tier", TIERS, ids=lambda t: t.name)
@pytest.mark.parametrize("transposed", [0, 1], ids=["forward", "transposed"])
def test_batches_through_xla(tier: Tier, transposed: int) -> None:
    rng = np.random.default_rng(0)
    for m, element, kind in [(m, e, k) for m in (1, 3, 40) for e in (Element.E4M3, Element.E2M1) for k in KINDS]:
        n, k, batch = 70, 262, 3
        block = {ScaleKind.F32: (128, 128), ScaleKind.E8M0: (1, 32), ScaleKind.E4M3: (1, 16)}[kind]
        rhs = [coded(rng, n, k, element, kind, block, outer=n) for _ in range(batch)]
        lhs = [plain(rng, m, n if transposed else k, BF16) for _ in range(batch)]
        bias = None if transposed else rng.standard_normal((batch, n)).astype(np.float32)
        call = jax.jit(_ffi.dot, static_argnames=("config", "out_dtype"))
        got = call(
            *stack(lhs), *stack(rhs), None if bias is None else jnp.asarray(bias),
            config=config(lhs[0], rhs[0], tier, transposed=transposed), out_dtype=jnp.dtype(jnp.bfloat16),
        )  # fmt: skip
        for b in range(batch):
            want = product(lhs[b], rhs[b], None if bias is None else bias[b], transposed=bool(transposed))
            check(np.asarray(got[b]), want.value, dot_bound(want, BF16, bf16_operand=bool(transposed)))


@pytest.mark.parametrize("tier", TIERS, ids=lambda t: t.name)
def test_subnormal_codes_survive_the_state_of_xlas_threads(tier: Tier) -> None:
    """XLA's threads flush f32 subnormals, which E4M3's smallest numbers would be if they were shifted into place."""
    rng = np.random.default_rng(0)
    for m in (1, 20):
        rhs = coded(rng, 40, 256, Element.E4M3, ScaleKind.F32, (128, 128), small=True)
        rhs.data[...] &= 0x87
        lhs = plain(rng, m, 256, BF16, small=True)
        got = _ffi.dot(*stack([lhs]), *stack([rhs]), None, config=config(lhs, rhs, tier), out_dtype=jnp.float32)
        assert np.array_equal(np.asarray(got[0]), product(lhs, rhs).value)


def test_empty_results() -> None:
    rng = np.random.default_rng(0)
    for m, n in ((0, 5), (5, 0)):
        lhs, rhs = plain(rng, m, 8, BF16), coded(rng, n, 8, Element.E4M3, ScaleKind.F32, (1, 8))
        got = _ffi.dot(*stack([lhs]), *stack([rhs]), None, config=config(lhs, rhs), out_dtype=jnp.float32)
        assert got.shape == (1, m, n)


def test_kernel_names() -> None:
    """explain() asks the library, which answers with the function that chooses."""
    rng = np.random.default_rng(0)
    lhs, rhs = plain(rng, 1, 256, BF16), coded(rng, 8, 256, Element.E4M3, ScaleKind.F32, (128, 128))
    names = {tier: _ffi.dot_kernel(config(lhs, rhs, tier), "bfloat16", 1, 8, 256) for tier in TIERS}
    assert names[Tier.PORTABLE] == "portable gemm"
    assert Tier.AVX2 not in names or names[Tier.AVX2] == "avx2 gemv"
    assert Tier.AVX512 not in names or names[Tier.AVX512] == "avx512 gemv"
    assert _ffi.dot_kernel(config(lhs, rhs), "bfloat16", 1, 8, 256) == names[TIERS[-1]]


# ---- refusals


def raw(config: dict[str, int] | None = None, out: tuple[int, ...] = (2, 3, 5), **buffers: Any) -> None:
    """A call with B = 2, M = 3, N = 5, K = 8, block 4 x 4, of which anything may be replaced."""
    fields = dict.fromkeys(("lhs_element", "lhs_scale_kind"), 0) | {"lhs_block_m": 1, "lhs_block_k": 1}
    fields |= {"rhs_element": 1, "rhs_scale_kind": 1, "rhs_block_n": 4, "rhs_block_k": 4, "transposed": 0, "tier": 0}
    attributes = {name: np.int32(value) for name, value in (fields | (config or {})).items()}
    arguments = {
        "lhs": jnp.ones((2, 3, 8), jnp.bfloat16), "lhs_scale": jnp.ones((0, 0, 0)), "lhs_global": jnp.ones((2, 0)),
        "rhs": jnp.ones((2, 5, 8), jnp.float8_e4m3fn), "rhs_scale": jnp.ones((2, 2, 2)),
        "rhs_global": jnp.ones((2, 0)), "bias": jnp.ones((2, 0)),
    }  # fmt: skip
    out_dtype = buffers.pop("out_dtype", jnp.float32)
    assert set(buffers) <= set(arguments)
    call = jax.ffi.ffi_call("jaxlowbit_dot_v1", jax.ShapeDtypeStruct(out, out_dtype))
    call(*(arguments | buffers).values(), config=attributes).block_until_ready()


def test_the_call_that_the_refusals_change_is_accepted() -> None:
    raw()


CODED = {"lhs_element": 1, "lhs_scale_kind": 1, "lhs_block_m": 1, "lhs_block_k": 4}
CODES = {"lhs": jnp.ones((2, 3, 8), jnp.float8_e4m3fn), "lhs_scale": jnp.ones((2, 3, 2))}
REFUSALS: list[tuple[str, dict[str, Any]]] = [
    ("lhs_element: expected 0 (plain), 1 (e4m3) or 3 (e2m1), got 2", {"config": {"lhs_element": 2}}),
    ("rhs_element: expected 1 (e4m3) or 3 (e2m1), got 0", {"config": {"rhs_element": 0}}),
    ("transposed: expected 0 or 1, got 2", {"config": {"transposed": 2}}),
    ("lhs_element: expected 0 (plain) in the transposed form, got 1", {"config": CODED | {"transposed": 1}}),
    ("tier: expected 0 (auto) or a tier that this processor runs", {"config": {"tier": 5}}),
    ("tier: expected 0 (auto) or a tier that this processor runs", {"config": {"tier": -1}}),
    ("lhs: expected rank 3, got bfloat16 (3, 8)", {"lhs": jnp.ones((3, 8), jnp.bfloat16)}),
    ("rhs: expected rank 3, got float8_e4m3fn (5, 8)", {"rhs": jnp.ones((5, 8), jnp.float8_e4m3fn)}),
    ("out: expected rank 3, got float32 (3, 5)", {"out": (3, 5)}),
    ("lhs: expected bfloat16 or float16 or float32, got int32 (2, 3, 8)", {"lhs": jnp.ones((2, 3, 8), jnp.int32)}),
    ("lhs: expected float8_e4m3fn, got bfloat16 (2, 3, 8)", {"config": CODED}),
    ("rhs: expected float8_e4m3fn, got uint8 (2, 5, 8)", {"rhs": jnp.ones((2, 5, 8), jnp.uint8)}),
    ("rhs: expected uint8, got float8_e4m3fn (2, 5, 8)", {"config": {"rhs_element": 3}}),
    ("out: expected bfloat16 or float16 or float32, got int32", {"out_dtype": jnp.int32}),
    ("lhs: expected batch = 2 in dimension 0", {"lhs": jnp.ones((1, 3, 8), jnp.bfloat16)}),
    ("lhs: expected contraction length 8, as in rhs", {"lhs": jnp.ones((2, 3, 7), jnp.bfloat16)}),
    ("lhs: expected contraction length 5, as in rhs", {"config": {"transposed": 1}}),
    ("out: expected shape (2, 3, 5), got float32 (2, 5, 3)", {"out": (2, 5, 3)}),
    ("lhs_scale and lhs_global: expected none for a plain lhs", {"lhs_scale": jnp.ones((2, 3, 2))}),
    ("lhs_scale and lhs_global: expected none for a plain lhs", {"lhs_global": jnp.ones((2, 1))}),
    ("lhs_scale and lhs_global: expected none for a plain lhs", {"lhs_global": jnp.ones((0,))}),
    ("lhs_scale and lhs_global: expected none for a plain lhs", {"config": {"lhs_scale_kind": 1}}),
    (
        "lhs_scale: expected scale kind 1 (f32), 2 (e8m0) or 3 (e4m3), got 0",
        {"config": CODED | {"lhs_scale_kind": 0}, **CODES},
    ),
    (
        "lhs_scale: expected shape (2, 3, 2), got float32 (2, 3, 3)",
        {"config": CODED, **CODES, "lhs_scale": jnp.ones((2, 3, 3))},
    ),
    ("lhs_global: expected 0, 1 or 3 values per matrix", {"config": CODED, **CODES, "lhs_global": jnp.ones((2, 2))}),
    ("rhs_scale: expected scale kind 1 (f32), 2 (e8m0) or 3 (e4m3), got 4", {"config": {"rhs_scale_kind": 4}}),
    ("rhs_scale: expected float32, got bfloat16", {"rhs_scale": jnp.ones((2, 2, 2), jnp.bfloat16)}),
    ("rhs_scale: expected uint8 or float8_e8m0fnu, got float32", {"config": {"rhs_scale_kind": 2}}),
    ("rhs_scale: expected float8_e4m3fn, got float32", {"config": {"rhs_scale_kind": 3}}),
    ("rhs_scale: expected a block of at least 1 x 1, got 0 x 4", {"config": {"rhs_block_n": 0}}),
    ("rhs_scale: expected a block of at least 1 x 1, got 4 x -1", {"config": {"rhs_block_k": -1}}),
    ("rhs_scale: expected shape (2, 2, 2), got float32 (2, 2, 1)", {"rhs_scale": jnp.ones((2, 2, 1))}),
    ("rhs_global: expected float32, got bfloat16", {"rhs_global": jnp.ones((2, 0), jnp.bfloat16)}),
    ("rhs_global: expected rank 2, got float32 (2)", {"rhs_global": jnp.ones((2,))}),
    ("rhs_global: expected batch = 2 in dimension 0", {"rhs_global": jnp.ones((1, 1))}),
    ("rhs_global: expected 0, 1 or 5 values per matrix, got float32 (2, 4)", {"rhs_global": jnp.ones((2, 4))}),
    ("bias: expected bfloat16 or float16 or float32, got int32", {"bias": jnp.ones((2, 5), jnp.int32)}),
    ("bias: expected rank 2, got float32 (5)", {"bias": jnp.ones((5,))}),
    ("bias: expected shape (2, 5), got float32 (2, 4)", {"bias": jnp.ones((2, 4))}),
    (
        "bias: expected none in the transposed form",
        {"config": {"transposed": 1}, "lhs": jnp.ones((2, 3, 5)), "out": (2, 3, 8), "bias": jnp.ones((2, 5))},
    ),
]


@pytest.mark.parametrize(("message", "changes"), REFUSALS, ids=[message for message, _ in REFUSALS])
def test_refusals_name_argument_expected_and_got(message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=re.escape(f"jaxlowbit.dot: {message}")) as info:
        raw(**changes)
    assert "INVALID_ARGUMENT" in str(info.value)


def test_a_tier_that_the_processor_lacks_is_refused() -> None:
    if Tier.AMX in TIERS:
        pytest.skip("this processor runs every tier")
    with pytest.raises(Exception, match="jaxlowbit.dot: tier: expected"):
        raw(config={"tier": int(TIERS[-1]) + 1})


def test_results_of_every_output_type_agree() -> None:
    rng = np.random.default_rng(0)
    lhs, rhs = plain(rng, 7, 64, F32), coded(rng, 9, 64, Element.E4M3, ScaleKind.F32, (128, 128), small=True)
    want = product(lhs, rhs)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        got = _ffi.dot(*stack([lhs]), *stack([rhs]), None, config=config(lhs, rhs), out_dtype=dtype)
        check(np.asarray(got[0]), want.value, dot_bound(want, jnp.dtype(dtype)))
