"""The CPU product on every tier: exact where sums are exact, within the derived bound elsewhere.

"Small" operands are such that every sum of products is exact in f32 in any order and scales may be applied anywhere,
so that the result must be the float64 one, bit for bit: a wrong index, nibble or block cannot hide in a tolerance.
"""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxlowbit._ffi import Element, ScaleKind, Tier
from jaxlowbit.testing.tolerance import check, dot_bound
from tests.ffi import dot_model as model
from tests.ffi.dot_model import BF16, KINDS, PLAIN_TYPES, Matrix, coded, plain, product, run

F32, F16 = np.dtype(np.float32), np.dtype(np.float16)
ELEMENTS = [Element.E4M3, Element.E2M1]
# (block rows, block columns); 0 is the whole extent
BLOCKS = [(1, 32), (128, 128), (1, 16), (0, 0), (1, 0), (1, 1), (3, 7), (16, 64), (2, 48), (1, 128), (5, 96), (1, 2)]
SHAPES = [(1, 33, 130), (2, 17, 66), (5, 35, 258), (9, 40, 64), (17, 33, 96), (33, 70, 300), (40, 16, 34), (8, 5, 520)]

tier_test = pytest.mark.parametrize("tier", [Tier.PORTABLE, Tier.AVX2, Tier.AVX512, Tier.AMX], ids=lambda t: t.name)


@pytest.fixture(autouse=True)
def _runs_here(request: pytest.FixtureRequest) -> None:
    tier = getattr(request.node, "callspec", None) and request.node.callspec.params.get("tier")
    if tier is not None and tier not in model.tiers():
        pytest.skip(f"this processor does not run {tier.name}")


def extent(block: tuple[int, int], rows: int, cols: int) -> tuple[int, int]:
    return block[0] or rows, block[1] or cols


def exact(got: np.ndarray, want: np.ndarray, what: str) -> None:
    with np.errstate(over="ignore"):
        expected = want.astype(np.float32).astype(got.dtype)
    assert np.array_equal(got.view(np.uint8), expected.view(np.uint8)) or np.array_equal(got, expected), (
        f"{what}: {np.count_nonzero(got != expected)} of {got.size} differ, first at {np.argwhere(got != expected)[0]}"
    )


def lhs_of(rng: np.random.Generator, index: int, m: int, c: int, *, small: bool) -> Matrix:
    """A different left operand for every index: plain types, FP8 and FP4 with every kind of scale."""
    choice = index % 9
    if choice < 3:
        return plain(rng, m, c, PLAIN_TYPES[choice], small=small)
    element, kind = ELEMENTS[choice % 2], KINDS[choice // 2 % 3]
    block = extent(BLOCKS[index % len(BLOCKS)], m, c)
    return coded(rng, m, c, element, kind, block, outer=(0, 1, m)[index % 3], small=small)


@tier_test
@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@pytest.mark.parametrize("small", [True, False], ids=["exact", "bound"])
def test_scales_blocks_and_types(tier: Tier, element: Element, kind: ScaleKind, small: bool) -> None:
    rng = np.random.default_rng(int(tier) * 100 + int(element) * 10 + int(kind))
    used = set()
    for index, (block, (m, n, k)) in enumerate(itertools.product(BLOCKS, SHAPES)):
        rhs = coded(rng, n, k, element, kind, extent(block, n, k), outer=(0, 1, n)[index % 3], small=small)
        lhs = lhs_of(rng, index, m, k, small=small)
        bias = None if index % 2 else plain(rng, 1, n, PLAIN_TYPES[index // 2 % 3], small=small).data[0]
        out = PLAIN_TYPES[(index // 3) % 3]
        what = f"{(m, n, k)} block {rhs.block}, lhs {lhs.element.name} {lhs.kind.name} {lhs.block}"
        with np.errstate(over="ignore"):
            want = product(lhs, rhs, bias)
        got, name = run(lhs, rhs, bias, tier=tier, out=out)
        used.add(name)
        if small:
            exact(got, want.value, what)
        else:
            check(got, want.value, dot_bound(want, out), what=f"{name} {what}")
        if lhs.element == Element.PLAIN:
            cotangent = plain(rng, m, n, PLAIN_TYPES[index % 3], small=small)
            want = product(cotangent, rhs, transposed=True)
            got, name = run(cotangent, rhs, tier=tier, out=out, transposed=True)
            used.add(name)
            if small:
                exact(got, want.value, f"transposed {what}")
            else:
                bound = dot_bound(want, out, bf16_operand=name.startswith("amx"))
                check(got, want.value, bound, what=f"{name} transposed {what}")
    names = {Tier.PORTABLE: {"portable gemm"}, Tier.AVX2: {"avx2 gemm", "avx2 gemv"}}
    names |= {Tier.AVX512: {"avx512 gemm", "avx512 gemv"}, Tier.AMX: {"amx gemm", "avx512 gemm", "avx512 gemv"}}
    assert used == names[tier]


@tier_test
@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
def test_every_residue(tier: Tier, transposed: bool) -> None:
    """Every extent around the tiles and panels of every tier, one axis at a time."""
    rng = np.random.default_rng(int(tier))
    edges = [127, 128, 129, 255, 256, 257, 259, 511, 512, 513]
    cases = [(m, 18, 40) for m in range(1, 36)] + [(m, 33, 72) for m in (63, 64, 65, 97)]
    cases += [(6, n, 38) for n in range(1, 68)] + [(1, n, 70) for n in range(1, 36)] + [(3, n, 34) for n in edges]
    cases += [(7, 19, k) for k in range(1, 68)] + [(1, 9, k) for k in range(1, 140)] + [(4, 9, k) for k in edges]
    for index, (m, n, k) in enumerate(cases):
        element = ELEMENTS[index % 2]
        k += k % 2 if element == Element.E2M1 else 0
        kind, block = ((ScaleKind.F32, (128, 128)), (ScaleKind.E8M0, (1, 32)), (ScaleKind.E4M3, (1, 16)))[index % 3]
        rhs = coded(rng, n, k, element, kind, block, small=True)
        lhs = plain(rng, m, n if transposed else k, BF16, small=True)
        bias = None if transposed else plain(rng, 1, n, F32, small=True).data[0]
        got, name = run(lhs, rhs, bias, tier=tier, transposed=transposed)
        exact(got, product(lhs, rhs, bias, transposed=transposed).value, f"{name} {(m, n, k)} {element.name}")


@tier_test
def test_many_blocks_of_work(tier: Tier) -> None:
    """More rows, columns and contraction than one task, one panel or one set of accumulators takes."""
    rng = np.random.default_rng(5)
    for (m, n, k), transposed in itertools.product([(530, 35, 70), (6, 600, 1100), (35, 290, 530)], [False, True]):
        rhs = coded(rng, n, k, Element.E4M3, ScaleKind.F32, (128, 128), small=True)
        lhs = plain(rng, m, n if transposed else k, BF16, small=True)
        got, name = run(lhs, rhs, tier=tier, transposed=transposed, threads=3)
        exact(got, product(lhs, rhs, transposed=transposed).value, f"{name} {(m, n, k)} {transposed}")


@tier_test
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_every_code_and_scale(tier: Tier, rows: int) -> None:
    """All codes times all scales, through one-hot rows: the product is the value itself, exactly."""
    codes = np.arange(256, dtype=np.uint8)
    scales = {ScaleKind.E8M0: np.arange(18, 236, dtype=np.uint8), ScaleKind.E4M3: np.arange(1, 127, dtype=np.uint8)}
    scales[ScaleKind.F32] = np.array([1, 0.75, 3, 2.0**-60, 2.0**60], np.float32)
    for element, (kind, scale) in itertools.product(ELEMENTS, scales.items()):
        data = np.resize(codes, (len(scale), 256))
        for start in range(0, 256 if rows == 20 else 2 * rows, rows):
            one_hot = np.zeros((rows, data.shape[1] * (2 if element == Element.E2M1 else 1)), np.float32)
            one_hot[np.arange(rows), (np.arange(rows) * 7 + start) % one_hot.shape[1]] = 1
            if element == Element.E4M3:
                data = np.where((data & 127) == 127, np.uint8(0), data)  # NaN times 0 is NaN: see the next test
            rhs = Matrix(data, element, kind, (1, one_hot.shape[1]), scale[:, None])
            lhs = Matrix(one_hot.astype(BF16))
            got, name = run(lhs, rhs, tier=tier)
            assert np.array_equal(got, product(lhs, rhs).value), f"{name} {element.name} {kind.name}"


@tier_test
@pytest.mark.parametrize("rows", [1, 4, 6, 20])
@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
def test_nan_and_inf_reach_what_they_touch_and_nothing_else(tier: Tier, rows: int, transposed: bool) -> None:
    rng = np.random.default_rng(rows)
    n, k = 37, 102
    for element, kind in itertools.product(ELEMENTS, KINDS):
        block = {ScaleKind.F32: (32, 32), ScaleKind.E8M0: (1, 32), ScaleKind.E4M3: (1, 16)}[kind]
        for fault in ("code", "negative code", "scale", "outer", "lhs nan", "lhs inf", "-inf"):
            rhs = coded(rng, n, k, element, kind, block, outer=n, small=True)
            lhs = plain(rng, rows, n if transposed else k, BF16, small=True)
            if "code" in fault:
                if element == Element.E2M1:
                    continue  # has no NaN
                rhs.data[n - 1, k - 1] = 0x7F if fault == "code" else 0xFF
            elif fault == "scale":
                nan = {ScaleKind.F32: np.float32(np.nan), ScaleKind.E8M0: 0xFF, ScaleKind.E4M3: 0x7F}[kind]
                rhs.scale[-1, -1] = nan
            elif fault == "outer":
                rhs.outer[5] = np.nan
            else:
                lhs.data[rows - 1, 3] = {"lhs nan": np.nan, "lhs inf": np.inf, "-inf": -np.inf}[fault]
            want = product(lhs, rhs, transposed=transposed).value
            got, name = run(lhs, rhs, tier=tier, transposed=transposed)
            assert np.isnan(want).any() or np.isinf(want).any()
            assert np.array_equal(got.astype(np.float64), want, equal_nan=True), (
                f"{name} {element.name} {kind.name} {fault}"
            )


@tier_test
@pytest.mark.parametrize("rows", [2, 18])
def test_coded_lhs_with_nan(tier: Tier, rows: int) -> None:
    rng = np.random.default_rng(rows)
    for element, kind, fault in itertools.product(ELEMENTS, KINDS, ("code", "scale", "outer")):
        lhs = coded(rng, rows, 70, element, kind, (1, 32), outer=rows, small=True)
        rhs = coded(rng, 21, 70, Element.E4M3, ScaleKind.E8M0, (1, 32), small=True)
        if fault == "code":
            if element == Element.E2M1:
                continue
            lhs.data[rows - 1, 69] = 0x7F
        elif fault == "scale":
            lhs.scale[rows - 1, -1] = {ScaleKind.F32: np.float32(np.nan), ScaleKind.E8M0: 255}.get(kind, 0x7F)
        else:
            lhs.outer[rows - 1] = np.nan
        want = product(lhs, rhs).value
        got, name = run(lhs, rhs, tier=tier)
        assert np.isnan(want[rows - 1]).all() and not np.isnan(want[: rows - 1]).any()
        assert np.array_equal(got.astype(np.float64), want, equal_nan=True), (
            f"{name} {element.name} {kind.name} {fault}"
        )


@tier_test
@pytest.mark.parametrize("dtype", PLAIN_TYPES, ids=lambda d: d.name)
def test_rounding_of_results(tier: Tier, dtype: Any) -> None:
    """One rounding to nearest even from f32, f16 subnormals kept, overflow to inf: against ml_dtypes and NumPy."""
    rng = np.random.default_rng(3)
    x = np.exp2(rng.uniform(-26, 17, (19, 40))).astype(np.float32)
    x *= rng.choice([-1, 1], x.shape)
    x[:, :3] = [1 + 2.0**-8, 1 + 2.0**-11, 65520]  # halfway between two numbers of bf16, of f16, and of f16 and inf
    one = np.eye(40, dtype=np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    for rows in (1, 19):
        rhs = Matrix(one, Element.E4M3, ScaleKind.F32, (40, 40), np.ones((1, 1), np.float32))
        got, _ = run(Matrix(x[:rows]), rhs, tier=tier, out=dtype)
        exact(got, x[:rows], dtype.name)


@tier_test
def test_f16_input_is_exact(tier: Tier) -> None:
    """All f16 numbers, subnormals too."""
    bits = np.arange(0x7C00, dtype=np.uint16)
    x = np.concatenate([bits, bits | 0x8000]).view(np.float16).reshape(-1, 128)
    one = np.eye(128, dtype=np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    rhs = Matrix(one, Element.E4M3, ScaleKind.F32, (128, 128), np.ones((1, 1), np.float32))
    for rows in (1, len(x)):
        got, _ = run(Matrix(x[:rows]), rhs, tier=tier)
        assert np.array_equal(got, x[:rows].astype(np.float32))


@tier_test
def test_plain_lhs_is_not_rounded(tier: Tier) -> None:
    """An f32 lhs keeps its 24 bits on every tier: it is not taken through bf16."""
    rng = np.random.default_rng(0)
    for rows in (1, 20):
        lhs = plain(rng, rows, 64, F32)
        rhs = coded(rng, 33, 64, Element.E4M3, ScaleKind.F32, (128, 128))
        want = product(lhs, rhs)
        check(run(lhs, rhs, tier=tier)[0], want.value, dot_bound(want, F32))


@tier_test
def test_no_contraction(tier: Tier) -> None:
    """A sum of nothing is the bias, or zero."""
    rhs = Matrix(np.zeros((5, 0), np.uint8), Element.E4M3, ScaleKind.F32, (128, 1), np.zeros((1, 0), np.float32))
    bias = np.arange(5, dtype=np.float32)
    for rows in (1, 20):
        lhs = Matrix(np.zeros((rows, 0), BF16))
        assert np.array_equal(run(lhs, rhs, bias, tier=tier)[0], np.tile(bias, (rows, 1)))
        assert np.array_equal(run(lhs, rhs, tier=tier)[0], np.zeros((rows, 5)))
    rhs = Matrix(np.zeros((0, 6), np.uint8), Element.E4M3, ScaleKind.F32, (1, 6), np.zeros((0, 1), np.float32))
    got, _ = run(Matrix(np.zeros((3, 0), BF16)), rhs, tier=tier, transposed=True)
    assert np.array_equal(got, np.zeros((3, 6)))


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_without_byte_permutations(element: Element) -> None:
    """Processors with AVX-512 but without VBMI decode FP8 another way."""
    if Tier.AVX512 not in model.tiers(vbmi=False):
        pytest.skip("this processor does not run AVX512")
    rng = np.random.default_rng(11)
    for (m, k), (kind, block) in itertools.product(
        itertools.product((1, 2, 5, 8), (2, 31, 32, 64, 100, 256, 330)),
        [(ScaleKind.F32, (128, 128)), (ScaleKind.E8M0, (1, 32)), (ScaleKind.F32, (1, 512)), (ScaleKind.E4M3, (1, 16))],
    ):
        k += k % 2
        lhs, rhs = plain(rng, m, k, F32), coded(rng, 21, k, element, kind, block)
        want = product(lhs, rhs)
        got, name = run(lhs, rhs, tier=Tier.AVX512, vbmi=False)
        check(got, want.value, dot_bound(want, F32), what=f"{name} {(m, k)} {kind.name}")
