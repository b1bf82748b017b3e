"""Times candidates in one process: interleaved, in a new order each round, one blocking call at a time."""

from __future__ import annotations

import dataclasses
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

Call = Callable[[], Any]

# After so many rounds, peers whose best time is more than so many times that of their group's best have lost: the time
# they would take goes to the others. The first rounds are noisy, so only clear losers leave then.
CUTS = {2: 2.0, 5: 1.3}


@dataclasses.dataclass
class Candidate:
    """One thing to time.

    Attributes:
      name: unique within its run.
      call: runs it once; what it returns is waited for.
      group: candidates that compete with each other, e.g. one format's.
      kind: ``"ours"``, ``"peer"`` (same job with XLA alone) or ``"baseline"`` (another job, for scale).
      seconds: one number per round.
    """

    name: str
    call: Call
    group: str
    kind: str
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def fastest(self) -> float:
        return min(self.seconds)


def progress(text: str) -> None:
    """A line on stderr, so that stdout holds results alone."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def once(call: Call) -> float:
    """Seconds of one call, until its result is ready."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def interleave(
    candidates: Sequence[Candidate], *, seconds: float, min_rounds: int, max_rounds: int, label: str
) -> None:
    """Fills ``candidate.seconds``: rounds of all candidates until the time is up.

    All candidates run once per round, in a random order, so that drifts of the machine (frequency, neighbors)
    and what a predecessor leaves in the caches meet all of them alike. The first call of each, which
    compiles, is not counted.

    Args:
      candidates: what to time. Peers that ``CUTS`` rules out stop early.
      seconds: time to spend, about; the round that crosses it is the last.
      min_rounds, max_rounds: limits that go before ``seconds``.
      label: what progress lines begin with.
    """
    order = random.Random(0)
    for candidate in candidates:
        once(candidate.call)
    running = list(candidates)
    start = time.perf_counter()
    for done in range(max_rounds):
        if done >= min_rounds and time.perf_counter() - start > seconds:
            break
        order.shuffle(running)
        for candidate in running:
            candidate.seconds.append(once(candidate.call))
        if done + 1 in CUTS:
            running = _with_a_chance(running, CUTS[done + 1])
        if done + 1 in (1, *CUTS):
            progress(f"{label}: round {done + 1}, {len(running)} candidates, {time.perf_counter() - start:.1f} s")


def _with_a_chance(candidates: list[Candidate], factor: float) -> list[Candidate]:
    best: dict[str, float] = {}
    for candidate in candidates:
        if candidate.kind == "peer":
            best[candidate.group] = min(best.get(candidate.group, float("inf")), candidate.fastest)
    return [c for c in candidates if c.kind != "peer" or c.fastest <= factor * best[c.group]]
