"""The CPU quantizer without XLA: buffers at the edge of a page, odd addresses, thread counts, floating-point states.

Compiles quantize_harness.cc with the library's own sources; skipped where there is no C++ compiler.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxlowbit import _ffi
from jaxlowbit._ffi import Element, ScaleKind, ScaleRounding, Tier
from tests.ffi import quantize_model as model
from tests.ffi.placement import at_end, at_start, unaligned
from tests.ffi.quantize_model import Case

ROOT = Path(__file__).parents[2]
SOURCES = ["tests/ffi/quantize_harness.cc", "ffi/cpu/quantize_run.cc", "ffi/cpu/quantize_portable.cc"]
SOURCES += ["ffi/cpu/quantize_avx2.cc", "ffi/cpu/quantize_avx512.cc"]
TIERS = [tier for tier in _ffi.available_tiers() if tier not in (Tier.AUTO, Tier.AMX)] or [Tier.PORTABLE]
INPUTS = [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)]
DEFAULT_STATE = 0x1F80  # of x86: round to nearest, keep subnormals

Place = Callable[[np.ndarray], np.ndarray]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None or not (ROOT / SOURCES[1]).is_file():
        pytest.skip("needs a C++ compiler and the sources of ffi/cpu")
    library = tmp_path_factory.mktemp("harness") / "libharness.so"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", f"-I{ROOT}", "-o", str(library)]
    subprocess.run([compiler, *flags, *SOURCES], cwd=ROOT, check=True)
    return ctypes.CDLL(str(library))


def run(
    harness: ctypes.CDLL,
    x: np.ndarray,
    case: Case,
    tier: Tier,
    *,
    threads: int = 1,
    state: int = DEFAULT_STATE,
    place: Place = unaligned,
) -> tuple[np.ndarray, np.ndarray]:
    batch, rows, columns = x.shape
    grid = (batch, -(-rows // case.block[0]), -(-columns // case.block[1]))
    per_byte = 2 if case.element == Element.E2M1 else 1
    scale_type = {ScaleKind.F32: np.dtype(np.float32), ScaleKind.E8M0: np.dtype(np.uint8)}
    scale = place(np.zeros(grid, scale_type.get(case.kind, np.dtype(ml_dtypes.float8_e4m3fn))))
    codes = place(np.full((batch, rows, columns // per_byte), 0xAB, np.uint8))
    operands = [place(x)]
    for operand in (case.given, case.global_scale, case.rng_words() if case.rng else None):
        operands.append(None if operand is None else place(operand))
    ints = (ctypes.c_int64 * 14)(
        batch, rows, columns, *case.block, INPUTS.index(x.dtype), case.element, case.kind, case.rounding,
        case.rng is not None, case.given is not None, tier, threads, state,
    )  # fmt: skip
    pointers = [None if a is None else ctypes.c_void_p(a.ctypes.data) for a in (*operands, codes, scale)]
    assert harness.harness_quantize(ints, ctypes.c_float(case.amax_ub), *pointers) == 0
    return codes, scale


def assert_same(got: tuple[np.ndarray, np.ndarray], want: tuple[np.ndarray, np.ndarray], label: str) -> None:
    for name, a, b in zip(("codes", "scale"), got, want, strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8), err_msg=f"{name}, {label}")


def sample(shape: tuple[int, ...], dtype: np.dtype, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-8, 4, (*shape[:2], 1)).astype(np.float64))
    return x.astype(dtype)


GLOBAL = np.full((2, 1), 0.01, np.float32)


@pytest.mark.parametrize("place", [at_end, at_start, unaligned], ids=lambda f: f.__name__)
@pytest.mark.parametrize("tier", TIERS, ids=lambda t: t.name)
def test_no_access_outside_the_buffers(harness: ctypes.CDLL, tier: Tier, place: Place) -> None:
    """Every tail of the row loops, every output, given scales, global scales and random words."""
    widths = [2, 4, 6, 10, 14, 16, 18, 30, 32, 34, 46, 62, 64, 66, 94, 130]
    for columns, dtype in itertools.product(widths, INPUTS):
        x = sample((2, 3, columns), dtype)
        for element in (Element.E4M3, Element.E2M1):
            cases = [
                Case(element, ScaleKind.F32, block=(1, columns)),
                Case(element, ScaleKind.E8M0, ScaleRounding.RCEIL, (2, 7)),
                Case(element, ScaleKind.E4M3, block=(1, 16), global_scale=GLOBAL),
                Case(element, ScaleKind.E8M0, ScaleRounding.RCEIL, (1, 32), rng=(1, 2, 3)),
            ]
            grid = (2, 3, -(-columns // 5))
            cases.append(Case(element, ScaleKind.F32, block=(1, 5), given=np.full(grid, 0.03, np.float32)))
            for case in cases:
                assert_same(run(harness, x, case, tier, place=place), model.quantize(x, case), f"{case} {columns}")


@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, 4096), (300, 4096), (77, 1001)], ids=str)
def test_any_number_of_threads(harness: ctypes.CDLL, block: tuple[int, int]) -> None:
    x = sample((1, 300, 4096), INPUTS[0])
    for element in (Element.E4M3, Element.E2M1):
        for rng in (None, (4, 5, 6)):
            case = Case(element, ScaleKind.F32, block=block, rng=rng)
            one = run(harness, x, case, TIERS[-1])
            for threads in (2, 3, 7):
                assert_same(run(harness, x, case, TIERS[-1], threads=threads), one, f"{threads} threads, {case}")


STATES = {"nearest": 0x1F80, "flush": 0x9FC0, "up": 0x5F80, "down": 0x3F80, "zero, flush": 0xFFC0}


@pytest.mark.parametrize("tier", TIERS, ids=lambda t: t.name)
def test_any_floating_point_state(harness: ctypes.CDLL, tier: Tier) -> None:
    """The thread's rounding mode and its treatment of subnormals change nothing."""
    rng = np.random.default_rng(1)
    x = (rng.uniform(-2, 2, (1, 64, 32)) * np.exp2(np.linspace(-149, 126, 64))[None, :, None]).astype(np.float32)
    x[0, ::7, 3] = 1e-40
    subnormal = np.full((1, 64, 2), 1e-39, np.float32)
    for element in (Element.E4M3, Element.E5M2, Element.E2M1):
        cases = [
            Case(element, ScaleKind.F32, block=(1, 16)),
            Case(element, ScaleKind.F32, block=(1, 16), given=subnormal),
            Case(element, ScaleKind.E8M0, ScaleRounding.FLOOR, (1, 16)),
            Case(element, ScaleKind.E4M3, block=(1, 16), global_scale=np.full((1, 1), 2.0**-126, np.float32)),
            Case(element, ScaleKind.F32, block=(1, 16), rng=(7, 8, 9)),
        ]
        for case in cases:
            want = model.quantize(x, case)
            for name, state in STATES.items():
                assert_same(run(harness, x, case, tier, state=state), want, f"{name}, {case}")


@pytest.mark.parametrize(("place", "offset", "crashes"), [("at_end", 100, 1), ("at_end", 99, 0), ("at_start", -1, 1)])
def test_the_guards_guard(place: str, offset: int, crashes: int) -> None:
    """A read one byte outside is a crash, so the tests above can fail."""
    program = (
        "import ctypes, numpy; from tests.ffi.placement import *; "
        f"a = {place}(numpy.zeros(100, numpy.uint8)); print('placed', flush=True); "
        f"ctypes.string_at(a.ctypes.data + {offset}, 1)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "placed" in done.stdout, done.stderr
    assert (done.returncode != 0) == bool(crashes)
