"""The CPU product's use of memory and threads: buffers at the edge of a page, odd addresses, any number of threads."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

from jaxlowbit._ffi import Element, ScaleKind, Tier
from tests.ffi import dot_model as model
from tests.ffi.dot_model import BF16, KINDS, PLAIN_TYPES, Matrix, coded, plain, product, run
from tests.ffi.placement import at_end, at_start, unaligned

SIZES = [
    (1, 1, 2),
    (1, 5, 34),
    (2, 17, 66),
    (3, 33, 98),
    (5, 18, 130),
    (9, 31, 62),
    (17, 35, 194),
    (33, 7, 258),
    (4, 66, 30),
]
# Whole tiles of rows of rhs, the last of which ends within a tile of columns and with the buffer.
SIZES += [(12, 32, 98), (20, 64, 70)]
BLOCKS = {ScaleKind.F32: (128, 128), ScaleKind.E8M0: (1, 32), ScaleKind.E4M3: (1, 16)}


def operands(index: int, m: int, n: int, k: int, element: Element, kind: ScaleKind) -> tuple[Matrix, Matrix]:
    rng = np.random.default_rng(index)
    k -= int(element == Element.E4M3 and index % 2)  # odd rows of bytes
    lhs = plain(rng, m, k, PLAIN_TYPES[index % 3], small=True)
    if index % 4 == 3 and k % 2 == 0:
        lhs = coded(rng, m, k, (Element.E4M3, Element.E2M1)[index % 2], kind, BLOCKS[kind], outer=m, small=True)
    return lhs, coded(rng, n, k, element, kind, BLOCKS[kind], outer=(0, 1, n)[index % 3], small=True)


def touch_the_edges(tier: Tier) -> None:
    """Every buffer between two pages that end the program when they are touched. Run in a process of its own."""
    cases = itertools.product(SIZES, (Element.E4M3, Element.E2M1), KINDS, (at_end, at_start), (False, True))
    for index, ((m, n, k), element, kind, place, transposed) in enumerate(cases):
        lhs, rhs = operands(index, m, n, k, element, kind)
        bias = None if transposed else plain(np.random.default_rng(0), 1, n, PLAIN_TYPES[index % 3], small=True).data[0]
        if transposed:
            lhs = plain(np.random.default_rng(1), m, n, PLAIN_TYPES[index % 3], small=True)
        out = PLAIN_TYPES[(index // 2) % 3]
        print(tier.name, (m, n, k), element.name, kind.name, place.__name__, transposed, flush=True)
        got, _ = run(lhs, rhs, bias, tier=tier, out=out, transposed=transposed, place=place)
        want = product(lhs, rhs, bias, transposed=transposed).value
        assert np.array_equal(got, want.astype(np.float32).astype(out))


def read_one_row_too_many(tier: Tier) -> None:
    lhs, rhs = operands(2, 3, 33, 98, Element.E4M3, ScaleKind.F32)
    rhs.data = at_end(rhs.data)
    # Tells the kernel of a row that is not there.
    rhs.data = np.lib.stride_tricks.as_strided(rhs.data, (rhs.shape[0] + 1, rhs.shape[1]))
    run(lhs, rhs, tier=tier, place=lambda array: array)


def in_another_process(function: str, tier: Tier) -> subprocess.CompletedProcess[str]:
    command = f"from tests.ffi import test_dot_cpu_memory as m; m.{function}(m.Tier({int(tier)}))"
    return subprocess.run(
        [sys.executable, "-c", command], cwd=model.ROOT, capture_output=True, text=True, check=False, timeout=120
    )


tier_test = pytest.mark.parametrize("tier", [Tier.PORTABLE, Tier.AVX2, Tier.AVX512, Tier.AMX], ids=lambda t: t.name)


@pytest.fixture(autouse=True)
def _runs_here(request: pytest.FixtureRequest) -> None:
    tier = getattr(request.node, "callspec", None) and request.node.callspec.params.get("tier")
    if tier is not None and tier not in model.tiers():
        pytest.skip(f"this processor does not run {tier.name}")


@tier_test
def test_stays_inside_every_buffer(tier: Tier) -> None:
    done = in_another_process("touch_the_edges", tier)
    assert done.returncode == 0, f"died at: {done.stdout.splitlines()[-1:]}\n{done.stderr}"


def test_the_guard_pages_guard() -> None:
    assert in_another_process("read_one_row_too_many", Tier.PORTABLE).returncode == -11  # SIGSEGV


@tier_test
@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
def test_any_alignment(tier: Tier, transposed: bool) -> None:
    for index, ((m, n, k), element, kind) in enumerate(itertools.product(SIZES, (Element.E4M3, Element.E2M1), KINDS)):
        lhs, rhs = operands(index, m, n, k, element, kind)
        if transposed:
            lhs = plain(np.random.default_rng(1), m, n, PLAIN_TYPES[index % 3], small=True)
        got, _ = run(lhs, rhs, tier=tier, transposed=transposed, place=unaligned)
        assert np.array_equal(got, product(lhs, rhs, transposed=transposed).value)


@tier_test
@pytest.mark.parametrize("m", [1, 7, 60, 600])
def test_threads_and_repetition_change_no_bit(tier: Tier, m: int) -> None:
    rng = np.random.default_rng(m)
    lhs, rhs = plain(rng, m, 700, BF16), coded(rng, 300, 700, Element.E4M3, ScaleKind.F32, (128, 128))
    once, _ = run(lhs, rhs, tier=tier)
    for threads in (1, 2, 3, 5, 16):
        again, _ = run(lhs, rhs, tier=tier, threads=threads)
        assert np.array_equal(once.view(np.uint32), again.view(np.uint32)), threads


@tier_test
def test_rows_depend_on_themselves_only_within_a_kernel(tier: Tier) -> None:
    """Rows of one call equal the same rows of a call with other neighbors, where the kernel is the same."""
    rng = np.random.default_rng(0)
    rhs = coded(rng, 90, 300, Element.E4M3, ScaleKind.F32, (128, 128))
    lhs = plain(rng, 70, 300, BF16)
    whole, kernel = run(lhs, rhs, tier=tier)
    for start, rows in ((0, 20), (13, 33), (64, 6), (69, 1)):
        part, name = run(Matrix(lhs.data[start : start + rows].copy()), rhs, tier=tier)
        if name == kernel:
            assert np.array_equal(part, whole[start : start + rows])


def call_with_late_helpers(tier: Tier) -> None:
    rng = np.random.default_rng(0)
    lhs, rhs = plain(rng, 40, 300, BF16), coded(rng, 300, 300, Element.E4M3, ScaleKind.F32, (128, 128))
    late, _ = run(lhs, rhs, tier=tier, threads=8, late=True)
    assert np.array_equal(late, run(lhs, rhs, tier=tier)[0])


@tier_test
def test_helpers_that_come_too_late_touch_nothing(tier: Tier) -> None:
    """The pool runs the helpers only when the call is over: it must not have waited, and they find no work."""
    assert in_another_process("call_with_late_helpers", tier).returncode == 0


def test_subnormals_do_not_depend_on_the_thread() -> None:
    """Every task flushes them, whatever state its thread is in; here the caller's thread keeps them."""
    lhs = Matrix(np.full((1, 64), 2.0**-126, np.float32))
    rhs = Matrix(
        np.full((600, 64), 0x30, np.uint8), Element.E4M3, ScaleKind.F32, (128, 128), np.ones((5, 1), np.float32)
    )
    assert np.float32(2.0**-126) * np.float32(0.5) != 0
    for tier in model.tiers():
        assert not run(lhs, rhs, tier=tier)[0].any()  # each product is 2**-127
        assert not run(lhs, rhs, tier=tier, threads=4)[0].any()
    assert np.float32(2.0**-126) * np.float32(0.5) != 0, "the caller's state has come back"
