"""What a number has to carry: the machine, the versions, the commit and the command."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import jaxlowbit


def describe(argv: Sequence[str], tier: str | None) -> dict[str, Any]:
    """A JSON-ready description of this run. ``tier``: the forced CPU tier, or None for the best one."""
    found = jaxlowbit.info()
    return {
        "command": shlex.join(["python", "-m", "jaxlowbit", "bench", *argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": found.versions,
        "platform": jax.default_backend(),
        "cpu": cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "tier": tier or (found.tiers[-1] if found.tiers else None),
        "tier_forced": tier is not None,
        "tiers": list(found.tiers),
        "devices": [str(device) for device in jax.devices()][:1],
    }


def cpu_model() -> str:
    """The model name that Linux reports, else what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str | None:
    """The checkout's commit, with ``+dirty`` where files differ from it; None outside a checkout."""
    root = Path(jaxlowbit.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}+dirty" if changed else head


def _git(root: Path, *args: str) -> str:
    return subprocess.run(["git", "-C", str(root), *args], check=True, capture_output=True, text=True).stdout.strip()
