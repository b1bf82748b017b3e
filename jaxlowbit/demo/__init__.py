"""``python -m jaxlowbit demo``: a real language model fine-tuned on top of frozen FP8 and FP4 weights."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from jaxlowbit.demo.errors import DemoError, missing_package

NEEDED = ("optax", "tokenizers", "tqdm", "matplotlib")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; returns the exit status, 1 with a message on stderr where something it asserts does not hold."""
    parser = argparse.ArgumentParser(prog="python -m jaxlowbit demo", description=main_description())
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for results.json and loss.png")
    parser.add_argument("--steps", type=int, default=40, help="train steps per format (default: 40)")
    parser.add_argument("--quick", action="store_true", help="a tiny random model instead of SmolLM2: seconds")
    parser.add_argument(
        "--implementation",
        choices=("native", "xla"),
        help="of the low-bit products (default: native where it is supported)",
    )
    args = parser.parse_args(argv)
    try:
        for name in NEEDED:
            if find_spec(name) is None:
                raise missing_package(name)
        return _run(args)
    except (DemoError, NotImplementedError) as failure:  # NotImplementedError: native was asked for by name
        print(f"demo failed: {failure}", file=sys.stderr)
        return 1


def main_description() -> str:
    """What ``--help`` says."""
    return (
        "Freezes the linears of SmolLM2-135M in FP8 and in NVFP4, trains LoRA adapters on top on the text of "
        "Python's language reference, and reports losses, perplexities, bytes, speed and a sentence before and after."
    )


def _run(args: argparse.Namespace) -> int:
    # Here, not above: these need the demo's own packages, and a missing one is to be told in words.
    from jaxlowbit.demo import report, run

    settings = run.Settings(quick=args.quick, steps=args.steps, implementation=args.implementation)
    results = run.run(settings, say=lambda line: print(line, flush=True))
    print(report.text(results))
    written = report.write(results, args.out)
    print(f"\n{results.seconds:.0f} s; wrote {', '.join(map(str, written))}")
    return 0
