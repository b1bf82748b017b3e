"""Operands, float64 products and calls for the tests of the CPU product.

Calls go through dot_entry.cc, which is compiled here together with the library's own sources, AMX tiles emulated, so
that the code of every tier runs on any x86-64 machine with AVX-512, and the tiers below on older ones.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxlowbit._ffi import Element, ScaleKind, Tier
from jaxlowbit.testing.reference import Product

ROOT = Path(__file__).parents[2]
BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
PLAIN_TYPES = [np.dtype(np.float32), BF16, np.dtype(np.float16)]  # in the order of ffi/cpu/dot.h's Plain
KINDS = [ScaleKind.F32, ScaleKind.E8M0, ScaleKind.E4M3]
KERNEL_SOURCES = ["dot_choice", "dot_portable", "dot_avx2", "dot_avx512", "dot_avx512_vbmi", "dot_amx"]

Place = Callable[[np.ndarray], np.ndarray]


# ---- the library under test


@functools.cache
def library(*, vbmi: bool = True) -> ctypes.CDLL:
    """The kernels with emulated AMX tiles; without ``vbmi``, as on a processor that cannot permute bytes.

    Built once for all test processes, again when a source changes.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    sources = sorted([*ROOT.glob("ffi/cpu/*"), *ROOT.glob("ffi/common/*"), ROOT / "tests/ffi/dot_entry.cc"])
    if compiler is None or len(sources) < 2:
        pytest.skip("needs a C++ compiler and the sources of ffi/cpu")
    digest = hashlib.sha256(compiler.encode())
    for source in sources:
        digest.update(source.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"jaxlowbit-tests-{os.getuid()}" / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").is_file():
            _build(compiler, folder)
            (folder / "done").touch()
    loaded = ctypes.CDLL(str(folder / ("kernels.so" if vbmi else "kernels_without_vbmi.so")))
    loaded.jaxlowbit_test_dot.restype = ctypes.c_char_p
    return loaded


def _build(compiler: str, folder: Path) -> None:
    common = [compiler, "-std=c++17", "-O1", "-fPIC", "-pthread", f"-I{ROOT}"]
    units = [(name, f"ffi/cpu/{name}.cc", ["-DJAXLOWBIT_EMULATE_AMX"]) for name in ["isa", *KERNEL_SOURCES]]
    units.append(("isa_without_vbmi", "ffi/cpu/isa.cc", ["-DJAXLOWBIT_WITHOUT_VBMI"]))
    units.append(("entry", "tests/ffi/dot_entry.cc", []))
    jobs = [
        subprocess.Popen([*common, *flags, "-c", source, "-o", str(folder / f"{name}.o")], cwd=ROOT)
        for name, source, flags in units
    ]
    assert [job.wait() for job in jobs] == [0] * len(jobs), "the kernels do not compile"
    for isa, target in (("isa", "kernels"), ("isa_without_vbmi", "kernels_without_vbmi")):
        objects = [str(folder / f"{name}.o") for name in [isa, *KERNEL_SOURCES, "entry"]]
        subprocess.run([*common, "-shared", *objects, "-o", str(folder / f"{target}.so")], check=True)


def tiers(*, vbmi: bool = True) -> list[Tier]:
    """The tiers that `library` runs here, AMX by emulation."""
    best = Tier(library(vbmi=vbmi).jaxlowbit_cpu_best_tier())
    return [tier for tier in Tier if Tier.AUTO < tier <= best]


# ---- operands


@dataclasses.dataclass
class Matrix:
    """Codes (rows, cols) with their scales, or plain numbers (element PLAIN)."""

    data: np.ndarray
    element: Element = Element.PLAIN
    kind: ScaleKind = ScaleKind.NONE
    block: tuple[int, int] = (1, 1)
    scale: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0), np.float32))
    outer: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.data.shape
        return rows, cols * (2 if self.element == Element.E2M1 else 1)

    @property
    def values(self) -> np.ndarray:
        """In float64, decoded without any code of ours."""
        if self.element == Element.PLAIN:
            return self.data.astype(np.float64)
        codes = self.data
        if self.element == Element.E2M1:
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(self.shape)
        values = codes.view(E4M3 if self.element == Element.E4M3 else ml_dtypes.float4_e2m1fn).astype(np.float64)
        rows, cols = self.shape
        scale = {ScaleKind.E8M0: ml_dtypes.float8_e8m0fnu, ScaleKind.E4M3: E4M3}.get(self.kind, np.float32)
        grid = self.scale.view(scale).astype(np.float64)
        grid = np.repeat(np.repeat(grid, self.block[0], axis=0), self.block[1], axis=1)[:rows, :cols]
        outer = self.outer.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            return np.asarray(values * grid * (outer[:, None] if outer.size else 1.0))


def coded(
    rng: np.random.Generator,
    rows: int,
    cols: int,
    element: Element,
    kind: ScaleKind,
    block: tuple[int, int],
    *,
    outer: int = 0,
    small: bool = False,
) -> Matrix:
    """Random codes and scales. ``small``: values whose sums of products are exact in f32, whatever the order."""
    grid = (-(-rows // block[0]), -(-cols // block[1]))
    if element == Element.E2M1:
        data = rng.integers(0, 256, (rows, cols // 2)).astype(np.uint8)
    elif small:
        data = rng.integers(-8, 9, (rows, cols)).astype(E4M3).view(np.uint8)
    else:
        data = rng.integers(0, 256, (rows, cols)).astype(np.uint8)
        data[(data & 127) == 127] = 3  # NaN has its own tests; the smallest numbers must be there
    if kind == ScaleKind.E8M0:
        scale = rng.integers(126, 129, grid) if small else rng.integers(107, 147, grid)
        stored = scale.astype(np.uint8)
    elif kind == ScaleKind.E4M3:
        choice = np.array([0.5, 1, 2, 4]).astype(E4M3).view(np.uint8)
        stored = rng.choice(choice, grid) if small else rng.integers(1, 127, grid).astype(np.uint8)
    else:
        stored = np.exp2(rng.integers(-1, 3, grid) if small else rng.uniform(-20, 20, grid)).astype(np.float32)
    globals_ = np.exp2(rng.integers(0, 2, outer) if small else rng.uniform(-9, 9, outer)).astype(np.float32)
    return Matrix(data, element, kind, block, stored, globals_)


def plain(rng: np.random.Generator, rows: int, cols: int, dtype: np.dtype[Any], *, small: bool = False) -> Matrix:
    numbers = rng.integers(-4, 5, (rows, cols)) if small else rng.standard_normal((rows, cols))
    return Matrix(numbers.astype(np.float32).astype(dtype))


def product(lhs: Matrix, rhs: Matrix, bias: np.ndarray | None = None, *, transposed: bool = False) -> Product:
    """The float64 product and its magnitude."""
    a, b = lhs.values, rhs.values
    b = b if transposed else b.T
    with np.errstate(invalid="ignore", over="ignore"):
        value, magnitude = a @ b, np.abs(a) @ np.abs(b)
        if bias is not None:
            value = value + bias.astype(np.float64)
            magnitude = magnitude + np.abs(bias.astype(np.float64))
    return Product(value, magnitude, a.shape[1])


# ---- calls


def run(
    lhs: Matrix,
    rhs: Matrix,
    bias: np.ndarray | None = None,
    *,
    tier: Tier,
    out: Any = np.float32,
    transposed: bool = False,
    threads: int = 1,
    late: bool = False,
    vbmi: bool = True,
    place: Place = np.ascontiguousarray,
) -> tuple[np.ndarray, str]:
    """The product and the name of the kernel that made it. ``late``: helpers start when the call has returned."""
    m, (n, k) = lhs.shape[0], rhs.shape
    dtype = np.dtype(out)
    config = (ctypes.c_int32 * 10)(
        lhs.element, lhs.kind, *lhs.block, rhs.element, rhs.kind, *rhs.block, int(transposed), tier
    )
    plain_type = PLAIN_TYPES.index(lhs.data.dtype) if lhs.element == Element.PLAIN else 0
    sizes = (ctypes.c_int64 * 11)(
        1, m, n, k, plain_type, lhs.outer.size, rhs.outer.size,
        0 if bias is None else PLAIN_TYPES.index(bias.dtype), PLAIN_TYPES.index(dtype), threads, int(late),
    )  # fmt: skip
    result = place(np.full((m, k if transposed else n), np.nan, np.float32).astype(dtype))
    buffers = [lhs.data, lhs.scale, lhs.outer, rhs.data, rhs.scale, rhs.outer, bias]
    placed = [None if buffer is None else place(buffer) for buffer in buffers]
    pointers = (ctypes.c_void_p * 8)(*(None if b is None else b.ctypes.data for b in [*placed, result]))
    name = library(vbmi=vbmi).jaxlowbit_test_dot(config, sizes, pointers)
    return result, name.decode()
