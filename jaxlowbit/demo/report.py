"""What the demo shows: tables on the terminal, results.json and loss.png in the output folder."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import jaxlowbit
from jaxlowbit.demo.run import Results


def text(results: Results) -> str:
    """The tables and sentences, without a final newline."""
    lines = [
        "",
        f"{'base':<12} {'linears':>10} {'all of it':>10} {'held-out perplexity':>20}",
    ]
    for base in results.bases:
        lines.append(
            f"{base.name:<12} {_megabytes(base.linear_bytes):>10} {_megabytes(base.total_bytes):>10} "
            f"{base.perplexity:>20.3f}"
        )
    recipe = results.recipe
    lines += [
        "",
        f"{recipe.steps} steps of {recipe.batch} x {recipe.length} tokens on the frozen base",
        f"{'format':<12} {'train loss':>18} {'held-out loss':>18} {'perplexity':>18}   tokens/s",
    ]
    for t in results.trainings:
        speeds = ", ".join(f"{name} {speed:,.0f}" for name, speed in t.tokens_per_second.items())
        lines.append(
            f"{t.format:<12} {_change(t.train_before, t.train_after):>18} "
            f"{_change(t.heldout_before, t.heldout_after):>18} "
            f"{_change(math.exp(t.heldout_before), math.exp(t.heldout_after)):>18}   {speeds}"
        )
    for t in results.trainings:
        taken = ", ".join(f"{count} {name}" for name, count in t.implementations.items())
        lines += [
            "",
            f"{t.format}: products of the train step by implementation: {taken}",
            f"  such as {t.products[-1]}",
            f"  every gradient finite; the {t.frozen_leaves} frozen arrays ({_megabytes(t.frozen_bytes)}) unchanged",
            f"  before: {_one_line(t.text_before)}",
            f"  after:  {_one_line(t.text_after)}",
        ]
    return "\n".join(lines)


def write(results: Results, folder: Path) -> list[Path]:
    """Writes results.json and loss.png; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "versions": {
            "jaxlowbit": jaxlowbit.__version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("jax", "jaxlib", "numpy", "optax")},
        },
        "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
        "command": ["python", "-m", "jaxlowbit", *sys.argv[1:]],
        **dataclasses.asdict(results),
    }
    for base, found in zip(record["bases"], results.bases, strict=True):
        base["perplexity"] = found.perplexity
    numbers = folder / "results.json"
    numbers.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    picture = folder / "loss.png"
    plot(results, picture)
    return [numbers, picture]


def plot(results: Results, path: Path) -> None:
    """The loss of every step's batch and the held-out loss, one color per format."""
    from matplotlib.figure import Figure  # not pyplot: it would choose a window system

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for t, color in zip(results.trainings, ("tab:blue", "tab:orange"), strict=True):
        steps = range(1, len(t.losses) + 1)
        axes.plot(steps, t.losses, color=color, alpha=0.4, label=f"{t.format}: training batch")
        axes.plot(
            list(t.heldout_losses),
            list(t.heldout_losses.values()),
            color=color,
            linewidth=2,
            marker="o",
            label=f"{t.format}: held-out text",
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(f"{results.model}: adapters on a frozen low-bit base")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _change(before: float, after: float) -> str:
    return f"{before:.3f} -> {after:.3f}"


def _one_line(text: str) -> str:
    """For a terminal: white space collapsed, and nothing that could be a control sequence."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
