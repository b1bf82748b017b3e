"""Every public fault of tests/cases/cases.json: run here on every implementation, or listed with what it
waits for."""

from __future__ import annotations

import importlib.util

import jax
import pytest

import jaxlowbit as jlb
from jaxlowbit import _ffi
from tests.cases import codec_ops, dot_ops, grad_ops, quantize_ops
from tests.cases.shim import CASES, RUNNERS

# Importing an adapter module registers its cases.
assert all((codec_ops, dot_ops, grad_ops, quantize_ops))

# Case id -> kind of work it waits for.
WAITING: dict[str, str] = {
    "B37a": "grouped dot",
    "B47a": "grouped dot",
    "B48a": "grouped dot",
    "B51a": "grouped dot",
    "B53a": "grouped dot",
    "B53b": "grouped dot",
    "B57a": "weight gradient",
    "B57b": "weight gradient",
    "B58a": "weight gradient",
    "B50a": "grouped weight gradient",
    "B67a": "delayed scaling",
    "B77a": "checkpoint loading",
    "B77b": "checkpoint loading",
    "B78a": "checkpoint loading",
    "B78b": "checkpoint loading",
    "B81a": "checkpoint loading",
    "B84a": "checkpoint loading",
    "B85a": "checkpoint loading",
    "B88a": "checkpoint loading",
    "B45a": "CUDA kernels",  # 2**31 elements: 8 GiB that a test machine without a GPU does not have to spare
    "B72a": "CUDA kernels",
    "B74a": "CUDA kernels",
    "B75a": "CUDA kernels",
}

# Cases that run, but for a part.
WAITING_PARTS: dict[str, tuple[str, str]] = {
    "B40a": ("grouped dot", "the variant whose group_sizes has a wrong length"),
    "B43a": ("weight gradient", "dw of no rows"),
}


def _cuda_kernels() -> bool:
    return jax.default_backend() == "gpu" and _ffi.native_available("cuda")[0]


# What would have arrived if these were true: the test below then asks for the cases.
ARRIVED = {
    "grouped dot": lambda: hasattr(jlb, "fp8_ragged_dot"),
    "weight gradient": lambda: hasattr(jlb, "fp8_wgrad"),
    "grouped weight gradient": lambda: hasattr(jlb, "fp8_ragged_wgrad"),
    "delayed scaling": lambda: any("delayed" in name.lower() for name in dir(jlb)),
    "checkpoint loading": lambda: importlib.util.find_spec("jaxlowbit.checkpoints") is not None,
    "CUDA kernels": _cuda_kernels,
}

RUNS = [(case_id, way) for case_id, (_, ways) in RUNNERS.items() for way in ways]


def _native_missing() -> str | None:
    for target in (_ffi.DOT, _ffi.QUANTIZE):
        available, reason = _ffi.native_available(jax.default_backend(), target)
        if not available:
            return reason
    return None


@pytest.mark.parametrize(("case_id", "way"), RUNS, ids=[f"{case_id}-{way}" for case_id, way in RUNS])
def test_case(case_id: str, way: str) -> None:
    reason = _native_missing() if way in ("native", "all") else None
    if reason is not None:
        pytest.skip(f"no native kernels: {reason}")
    adapter, _ = RUNNERS[case_id]
    adapter(CASES[case_id], way)


def test_every_case_runs_or_waits() -> None:
    assert set(RUNNERS).isdisjoint(WAITING)
    assert set(RUNNERS) | set(WAITING) == set(CASES)
    assert set(WAITING_PARTS) <= set(RUNNERS)


@pytest.mark.parametrize("kind", sorted(ARRIVED))
def test_nothing_waits_for_what_is_here(kind: str) -> None:
    waiting = [case_id for case_id, reason in WAITING.items() if reason == kind]
    waiting += [f"{case_id}: {part}" for case_id, (reason, part) in WAITING_PARTS.items() if reason == kind]
    assert waiting, f"no case waits for {kind}: remove it from ARRIVED"
    assert not ARRIVED[kind](), (
        f"{kind} is here: adapt these cases in tests/cases and take them off the list: {waiting}"
    )


def test_waiting_kinds_are_known() -> None:
    kinds = set(WAITING.values()) | {kind for kind, _ in WAITING_PARTS.values()}
    assert kinds == set(ARRIVED)
