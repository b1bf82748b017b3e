"""``python -m jaxlowbit bench dense | quantize``: the kernels against XLA, in one process and one run.

Every result is checked against the float64 reference before it is timed; a wrong number is an error and never
a time. Each platform has its own module of benchmarks (``dense_cpu``, ``quantize_cpu``), which share shapes,
timing and report.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxlowbit import _ffi
from jaxlowbit.formats import FORMATS
from jaxlowbit.testing import shapes
from jaxlowbit.testing.bench import dense_cpu, environment, quantize_cpu, report

Bench = Callable[[argparse.Namespace], tuple[list[dict[str, Any]], str]]

# What is measured on which platform (as jax.default_backend names it).
BENCHES: dict[str, dict[str, Bench]] = {"cpu": {"dense": dense_cpu.run, "quantize": quantize_cpu.run}}


def _weight(text: str) -> shapes.WeightShape:
    try:
        return shapes.parse(text)
    except ValueError as error:  # argparse would drop the message
        raise argparse.ArgumentTypeError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jaxlowbit bench", description="Measure the kernels against XLA.")
    benches = parser.add_subparsers(dest="bench", required=True, metavar="dense|quantize")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--quick", action="store_true", help="small shapes and little time: a check, not a claim")
    common.add_argument("--json", metavar="FILE", help="also write the results, with the machine and the command")
    tiers = [tier.name.lower() for tier in _ffi.Tier if tier is not _ffi.Tier.AUTO]
    common.add_argument("--tier", choices=tiers, help="force a CPU kernel tier; the best one otherwise")
    common.add_argument("--seconds", type=float, help="time to spend on each M (dense) or shape (quantize), about")
    dense = benches.add_parser("dense", parents=[common], help="FP8 and FP4 products")
    names = ", ".join(shapes.BY_NAME)
    dense.add_argument("--shapes", nargs="+", type=_weight, metavar="S", help=f"weights: NxK, or one of: {names}")
    dense.add_argument("--m", nargs="+", type=int, help="rows of x; 1 32 1024 by default")
    dense.add_argument("--formats", nargs="+", choices=list(dense_cpu.FORMATS_TIMED), help="all by default")
    quantize = benches.add_parser("quantize", parents=[common], help="quantizers")
    quantize.add_argument("--shapes", nargs="+", type=_weight, metavar="RxC", help="1024x4096 4096x4096 by default")
    quantize.add_argument("--formats", nargs="+", choices=list(FORMATS), help="FP8_1X128 by default")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one benchmark; returns 0, or 1 where this platform has none."""
    arguments = _parser().parse_args(argv)
    given = list(argv) if argv is not None else []
    platform = jax.default_backend()
    bench = BENCHES.get(platform, {}).get(arguments.bench)
    if bench is None:
        report.write(
            f"jaxlowbit bench {arguments.bench}: this version has no benchmark for platform {platform!r}, only for "
            f"{sorted(BENCHES)}. To measure the CPU kernels set JAX_PLATFORMS=cpu."
        )
        return 1
    forced: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if arguments.tier is not None:
        tier = _ffi.Tier[arguments.tier.upper()]
        if tier not in _ffi.available_tiers():
            names = ", ".join(one.name.lower() for one in _ffi.available_tiers()) or "none"
            report.write(f"jaxlowbit bench: this machine does not run tier {arguments.tier}; it runs: {names}.")
            return 1
        forced = _ffi.force_tier(tier)
    described = environment.describe(given, arguments.tier)
    report.write(report.heading(described))
    with forced:
        results, text = bench(arguments)
    report.write(text)
    if arguments.json:
        report.save(arguments.json, described, results)
        report.write(f"wrote {arguments.json}")
    return 0
