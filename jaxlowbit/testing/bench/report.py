"""Results as a table for people and as JSON for everything else."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCHEMA = "jaxlowbit-bench/1"


def write(text: str) -> None:
    """One line, or several, on stdout."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    cells = [
        [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in (header, *rows)
    ]
    lines = ["  ".join(row).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def milliseconds(seconds: float) -> str:
    """Three decimals below 100 ms, one above."""
    return f"{seconds * 1e3:.3f}" if seconds < 0.1 else f"{seconds * 1e3:.1f}"


def heading(environment: dict[str, Any]) -> str:
    """The machine, the versions and the command, in two lines."""
    versions = environment["versions"]
    forced = ", forced" if environment["tier_forced"] else ""
    return (
        f"{environment['cpu']}, {environment['cpus']} CPUs, tier {environment['tier']}{forced}; "
        f"jaxlowbit {versions['jaxlowbit']}, jax {versions['jax']}, commit {environment['commit']}\n"
        f"$ {environment['command']}"
    )


def save(path: str, environment: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Writes the run to ``path``; the folder is made if need be."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    document = {"schema": SCHEMA, "environment": environment, "results": results}
    target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
