"""From a problem to a kernel configuration: pure functions of static facts, testable without any device."""

from __future__ import annotations

import dataclasses

from jaxlowbit import _ffi
from jaxlowbit.formats import Format

_ELEMENTS = {"e4m3": _ffi.Element.E4M3, "e5m2": _ffi.Element.E5M2, "e2m1": _ffi.Element.E2M1}
_SCALES = {"f32": _ffi.ScaleKind.F32, "e8m0": _ffi.ScaleKind.E8M0, "e4m3": _ffi.ScaleKind.E4M3}


@dataclasses.dataclass(frozen=True)
class DotProblem:
    """Everything static about one low-bit product; equal problems get equal configurations.

    ``out[b, m, n] = sum_k lhs[b, m, k] * rhs[b, n, k] + bias[b, n]``, or with ``transposed`` (the backward product)
    ``out[b, m, k] = sum_n lhs[b, m, n] * rhs[b, n, k]``.

    Attributes:
      batch, m, n, k: extents; ``n`` rows and ``k`` columns of the right operand, whichever is contracted.
      lhs_dtype: dtype name of a plain left operand, or its storage dtype when quantized.
      lhs_format: the left operand's format, ``None`` when plain.
      rhs_format: the right operand's format.
      out_dtype: name of the output dtype.
    """

    batch: int
    m: int
    n: int
    k: int
    lhs_dtype: str
    lhs_format: Format | None
    rhs_format: Format
    out_dtype: str
    transposed: bool = False

    def __str__(self) -> str:
        lhs = self.lhs_format.name if self.lhs_format else self.lhs_dtype
        form = " transposed" if self.transposed else ""
        batch = f"batch={self.batch} " if self.batch != 1 else ""
        return (
            f"{batch}m={self.m} n={self.n} k={self.k} {lhs} x {self.rhs_format.name} -> {self.out_dtype}{form}"
        )


def dot_config(problem: DotProblem, tier: _ffi.Tier) -> _ffi.DotConfig:
    """The attributes of the CPU kernel for a problem; ``tier`` AUTO lets the library choose."""
    lhs, rhs = problem.lhs_format, problem.rhs_format
    lhs_block = lhs.kernel_block(problem.m, problem.k) if lhs else (1, 1)
    rhs_block = rhs.kernel_block(problem.n, problem.k)
    return _ffi.DotConfig(
        lhs_element=_ELEMENTS[lhs.element.name] if lhs else _ffi.Element.PLAIN,
        lhs_scale_kind=_SCALES[lhs.scale.name] if lhs else _ffi.ScaleKind.NONE,
        lhs_block_m=lhs_block[0],
        lhs_block_k=lhs_block[1],
        rhs_element=_ELEMENTS[rhs.element.name],
        rhs_scale_kind=_SCALES[rhs.scale.name],
        rhs_block_n=rhs_block[0],
        rhs_block_k=rhs_block[1],
        transposed=int(problem.transposed),
        tier=tier,
    )
