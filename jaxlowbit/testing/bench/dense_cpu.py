"""``bench dense`` on the CPU: fp8_dot and fp4_dot against the fastest XLA expression of dequantize + dot."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxlowbit
from jaxlowbit.formats import FORMATS, Act, Format
from jaxlowbit.scaled_array import ScaledArray
from jaxlowbit.testing import reference, shapes, tolerance
from jaxlowbit.testing.bench import peers, report, timing

Array = Any

# Formats in the order of the table, with the activation modes timed for each.
FORMATS_TIMED: dict[str, tuple[str | None, ...]] = {
    "FP8_128X128": (None, "dynamic"),
    "FP8_CHANNEL": (None, "dynamic"),
    "NVFP4": (None,),
    "MXFP4": (None, "dynamic"),
}
ROWS_CHECKED = 128  # rows of W per check: one scale block of the widest format


@dataclasses.dataclass(frozen=True)
class Problem:
    """One (M, N, K) with its inputs: activations, plain weights, and the weights in every format."""

    m: int
    n: int
    k: int
    x: Array
    plain: Array
    weights: dict[str, ScaledArray]


def run(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """Times every shape and M. Returns JSON-ready records and the table."""
    weights = arguments.shapes or [shapes.parse("1024x1024" if arguments.quick else "4096x4096")]
    rows = arguments.m or ([1, 32, 128] if arguments.quick else [1, 32, 1024])
    formats = arguments.formats or list(FORMATS_TIMED)
    seconds = arguments.seconds or (1.0 if arguments.quick else 20.0)
    results: list[dict[str, Any]] = []
    for weight in weights:
        for m in rows:
            label = f"dense {m}x{weight.n}x{weight.k}"
            timing.progress(f"{label}: quantizing {', '.join(formats)}")
            problem = make_problem(m, weight.n, weight.k, formats)
            candidates, checks = _candidates(problem)
            for index, (name, check) in enumerate(checks.items()):
                if index % 8 == 0:
                    timing.progress(f"{label}: checking against the reference, {index} of {len(checks)}")
                check(name)
            timing.interleave(candidates, seconds=seconds, min_rounds=7, max_rounds=200, label=label)
            results += _records(problem, weight.name, candidates)
    return results, _table(results)


def make_problem(m: int, n: int, k: int, formats: list[str]) -> Problem:
    """Normal activations and weights of the size that layers have, from a fixed seed."""
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((m, k), np.float32)).astype(jnp.bfloat16)
    w = jnp.asarray(random.standard_normal((n, k), np.float32) * np.float32(k**-0.5))
    weights = {name: jaxlowbit.quantize(w, FORMATS[name]) for name in formats}
    return Problem(m, n, k, x, w, weights)


# ---------------------------------------------------------------------------------------------------------------
# Candidates and their checks


def _candidates(problem: Problem) -> tuple[list[timing.Candidate], dict[str, Any]]:
    """Everything to time, and a check per name that raises AssertionError for a wrong result."""
    out: list[timing.Candidate] = []
    checks: dict[str, Any] = {}

    def add(name: str, group: str, kind: str, fn: Any, args: tuple[Any, ...], check: Any) -> None:
        jitted = jax.jit(fn)
        out.append(timing.Candidate(name, functools.partial(jitted, *args), group, kind))
        checks[name] = lambda what: check(jitted(*args), what)

    for format_name, weight in problem.weights.items():
        fmt = weight.format
        dot = jaxlowbit.fp4_dot if fmt.element.packed else jaxlowbit.fp8_dot
        for act in FORMATS_TIMED[format_name]:
            verify = functools.partial(_verify, problem, weight, act, False)
            for implementation in (None, "xla"):
                kind = "ours" if implementation is None else "baseline"
                fn = functools.partial(dot, act=act, implementation=implementation)
                name = f"{format_name} act={act} {implementation or 'best'}"
                add(name, format_name, kind, fn, (problem.x, weight), verify)
        leaves = (problem.x, weight.data, weight.scale, weight.global_scale)
        for peer in peers.peers(fmt, problem.m, problem.n, problem.k):
            verify = functools.partial(_verify, problem, weight, None, peer.bf16_weights)
            add(f"{format_name} XLA: {peer.name}", format_name, "peer", peer.fn, leaves, verify)
    bf16 = problem.plain.astype(jnp.bfloat16)
    add("bf16 weights", "plain", "baseline", peers.bf16_dot, (problem.x, bf16), _plain_check(problem, bf16))
    add(
        "f32 weights",
        "plain",
        "baseline",
        peers.f32_dot,
        (problem.x, problem.plain),
        _plain_check(problem, problem.plain),
    )
    return out, checks


def _checked_rows(problem: Problem) -> list[tuple[np.ndarray, int, int]]:
    """Rows of x and a range of rows of W: the first and the last block of the output."""
    rows = np.unique([0, problem.m // 2, problem.m - 1])
    last = (problem.n - 1) // ROWS_CHECKED * ROWS_CHECKED
    return [(rows, start, min(start + ROWS_CHECKED, problem.n)) for start in sorted({0, last})]


def _verify(problem: Problem, weight: ScaledArray, act: str | None, bf16_weights: bool, out: Array, what: str) -> None:
    """Some rows of the result against the float64 product of the same quantized operands."""
    for rows, start, stop in _checked_rows(problem):
        x: Any = np.asarray(problem.x)[rows]
        if act is not None:
            x = reference.quantize(x, Act(FORMATS[str(weight.format.dynamic_act)]).format)
        product = reference.dot(x, _rows_of(weight, start, stop))
        bound = tolerance.dot_bound(product, jnp.bfloat16, bf16_operand=bf16_weights)
        tolerance.check(np.asarray(out)[rows][:, start:stop], product.value, bound, what=what)


def _plain_check(problem: Problem, weights: Array) -> Any:
    def check(out: Array, what: str) -> None:
        for rows, start, stop in _checked_rows(problem):
            product = reference.dot(np.asarray(problem.x)[rows], np.asarray(weights[start:stop]))
            bound = tolerance.dot_bound(product, jnp.bfloat16)
            tolerance.check(np.asarray(out)[rows][:, start:stop], product.value, bound, what=what)

    return check


def _rows_of(weight: ScaledArray, start: int, stop: int) -> reference.Quantized:
    """Rows ``start:stop`` of quantized weights; ``start`` lies on a block boundary."""
    fmt: Format = weight.format
    height = fmt.block[0] or weight.rows
    first, last = (start // height, -(-stop // height))
    outer = None if weight.global_scale is None else np.asarray(weight.global_scale)
    data, scale = np.asarray(weight.data[start:stop]), np.asarray(weight.scale[first:last])
    return reference.Quantized(data, scale, outer, fmt, weight.last_dim)


# ---------------------------------------------------------------------------------------------------------------
# Results


def _records(problem: Problem, shape: str, candidates: list[timing.Candidate]) -> list[dict[str, Any]]:
    """One record per format and activation mode."""
    m, n, k = problem.m, problem.n, problem.k
    by_name = {c.name: c for c in candidates}
    records = []
    for format_name, weight in problem.weights.items():
        rivals = [c for c in candidates if c.group == format_name and c.kind == "peer"]
        # The fastest by median: the peer a user would pick after trying all of them.
        fastest = min(rivals, key=lambda c: c.median)
        for act in FORMATS_TIMED[format_name]:
            ours = by_name[f"{format_name} act={act} best"]
            dot = jaxlowbit.fp4_dot if weight.format.element.packed else jaxlowbit.fp8_dot
            decisions = jaxlowbit.explain(functools.partial(dot, act=act), problem.x, weight).decisions
            (taken,) = [d for d in decisions if d.op == dot.__name__]
            record = {
                "bench": "dense", "shape": shape, "m": m, "n": n, "k": k, "format": format_name, "act": act,
                "implementation": taken.implementation, "kernel": taken.kernel, "reason": taken.reason,
                "weight_bytes": weight.nbytes, **_summary("ours", ours),
                **_summary("xla_implementation", by_name[f"{format_name} act={act} xla"]),
                "fastest_peer": fastest.name, **_summary("peer", fastest),
                **_summary("bf16_dot", by_name["bf16 weights"]), **_summary("f32_dot", by_name["f32 weights"]),
                "peers": {c.name: _timed(c) for c in rivals},
            }  # fmt: skip
            for rival in ("peer", "bf16_dot", "f32_dot", "xla_implementation"):
                record[f"speedup_over_{rival}"] = record[f"{rival}_median_s"] / record["ours_median_s"]
            records.append(record)
    return records


def _timed(candidate: timing.Candidate) -> dict[str, Any]:
    return {"median_s": candidate.median, "min_s": candidate.fastest, "rounds": len(candidate.seconds)}


def _summary(prefix: str, candidate: timing.Candidate) -> dict[str, Any]:
    return {f"{prefix}_{key}": value for key, value in _timed(candidate).items()}


def _table(results: list[dict[str, Any]]) -> str:
    header = [
        "format",
        "act",
        "M",
        "N",
        "K",
        "kernel",
        "ms",
        "min",
        "peer ms",
        "x peer",
        "x bf16",
        "x f32",
        "GB/s",
        "GF/s",
    ]
    rows = []
    for r in results:
        seconds = r["ours_median_s"]
        rows.append([
            r["format"], str(r["act"]), str(r["m"]), str(r["n"]), str(r["k"]),
            r["kernel"] if r["implementation"] == "native" else "xla",
            report.milliseconds(seconds), report.milliseconds(r["ours_min_s"]), report.milliseconds(r["peer_median_s"]),
            f"{r['speedup_over_peer']:.2f}", f"{r['speedup_over_bf16_dot']:.2f}", f"{r['speedup_over_f32_dot']:.2f}",
            f"{r['weight_bytes'] / seconds / 1e9:.1f}", f"{2 * r['m'] * r['n'] * r['k'] / seconds / 1e9:.0f}",
        ])  # fmt: skip
    notes = [
        "ms: median. x peer: times faster than the fastest XLA expression of dequantize + dot. x bf16, x f32: than",
        "XLA's dot on unquantized weights. GB/s: packed weights. All candidates of one M are interleaved in one run.",
        *_fastest_peers(results),
        *_fp4_against_fp8(results),
    ]
    return "\n".join([report.table(header, rows), *notes])


def _fastest_peers(results: list[dict[str, Any]]) -> list[str]:
    seen = {(r["m"], r["n"], r["k"], r["fastest_peer"]): None for r in results}
    return [f"peer at {m}x{n}x{k}: {name}" for m, n, k, name in seen]


def _fp4_against_fp8(results: list[dict[str, Any]]) -> list[str]:
    """FP4 reads half the bytes: at M = 1 it has to be faster than FP8 in the same rounds."""
    weight_only = {(r["m"], r["n"], r["k"], r["format"]): r["ours_median_s"] for r in results if r["act"] is None}
    lines = []
    for (m, n, k, name), seconds in weight_only.items():
        fp8 = weight_only.get((m, n, k, "FP8_128X128"))
        if m == 1 and fp8 is not None and FORMATS[name].element.packed:
            lines.append(f"M=1 {n}x{k}: {name} is {fp8 / seconds:.2f} times as fast as FP8_128X128")
    return lines
