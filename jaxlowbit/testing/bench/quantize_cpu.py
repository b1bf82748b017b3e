"""``bench quantize`` on the CPU: the native quantizer against the jnp one, and against copying as many
bytes."""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxlowbit
from jaxlowbit.formats import FORMATS
from jaxlowbit.testing import reference, shapes
from jaxlowbit.testing.bench import report, timing

Array = Any


def run(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """Times every format and shape. Returns JSON-ready records and the table."""
    default = ["256x1024"] if arguments.quick else ["1024x4096", "4096x4096"]
    sizes = arguments.shapes or [shapes.parse(text) for text in default]
    seconds = arguments.seconds or (0.5 if arguments.quick else 5.0)
    results = []
    for size in sizes:
        for name in arguments.formats or ["FP8_1X128"]:
            results.append(_one(name, size.n, size.k, seconds))
    return results, _table(results)


def _one(name: str, rows: int, k: int, seconds: float) -> dict[str, Any]:
    fmt = FORMATS[name]
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((rows, k), np.float32)).astype(jnp.bfloat16)
    jitted = {
        kind: jax.jit(functools.partial(jaxlowbit.quantize, format=fmt, implementation=implementation))
        for kind, implementation in (("ours", None), ("xla", "xla"))
    }
    outputs = {kind: fn(x) for kind, fn in jitted.items()}
    _verify(name, x, outputs)
    traffic = x.nbytes + outputs["ours"].nbytes
    with concurrent.futures.ThreadPoolExecutor() as pool:
        candidates = [timing.Candidate(kind, functools.partial(fn, x), name, "ours") for kind, fn in jitted.items()]
        candidates.append(timing.Candidate("copy", _copier(traffic // 2, pool), name, "baseline"))
        timing.interleave(
            candidates, seconds=seconds, min_rounds=5, max_rounds=1000, label=f"quantize {name} {rows}x{k}"
        )
    times = {c.name: c for c in candidates}
    record: dict[str, Any] = {"bench": "quantize", "format": name, "rows": rows, "k": k, "dtype": "bfloat16"}
    record["bytes"] = traffic
    for kind, candidate in times.items():
        record[f"{kind}_median_s"], record[f"{kind}_min_s"] = candidate.median, candidate.fastest
        record[f"{kind}_gb_per_s"] = traffic / candidate.median / 1e9
    record["rounds"] = len(candidates[0].seconds)
    record["speedup_over_xla"] = record["xla_median_s"] / record["ours_median_s"]
    record["share_of_copy"] = record["copy_median_s"] / record["ours_median_s"]
    return record


def _verify(name: str, x: Array, outputs: dict[str, Any]) -> None:
    """Both implementations agree bit for bit, and their first rows with the reference."""
    ours, xla = outputs["ours"], outputs["xla"]
    for leaf, other in zip(jax.tree.leaves(ours), jax.tree.leaves(xla), strict=True):
        if np.asarray(leaf).tobytes() != np.asarray(other).tobytes():
            raise AssertionError(f"bench quantize: {name}: native and xla differ in their bits")
    fmt = FORMATS[name]
    rows = min(x.shape[0], fmt.block[0] or x.shape[0])
    outer = None if ours.global_scale is None else float(ours.global_scale)
    expected = reference.quantize(np.asarray(x)[:rows], fmt, global_scale=outer)
    if np.asarray(ours.data)[:rows].tobytes() != expected.data.tobytes():
        raise AssertionError(f"bench quantize: {name}: codes differ from the reference's")


def _copier(size: int, pool: concurrent.futures.ThreadPoolExecutor) -> timing.Call:
    """Copies ``size`` bytes on all CPUs: reads and writes as many bytes as the quantizer does in all."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    cpus = len(os.sched_getaffinity(0))
    edges = [size * i // cpus for i in range(cpus + 1)]
    parts = [slice(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]

    def call() -> None:
        list(pool.map(lambda part: np.copyto(target[part], source[part]), parts))

    return call


def _table(results: list[dict[str, Any]]) -> str:
    header = ["format", "rows", "K", "ms", "min", "xla ms", "x xla", "GB/s", "copy GB/s", "of copy"]
    rows = [
        [
            r["format"], str(r["rows"]), str(r["k"]), report.milliseconds(r["ours_median_s"]),
            report.milliseconds(r["ours_min_s"]), report.milliseconds(r["xla_median_s"]),
            f"{r['speedup_over_xla']:.2f}", f"{r['ours_gb_per_s']:.1f}", f"{r['copy_gb_per_s']:.1f}",
            f"{r['share_of_copy']:.2f}",
        ]
        for r in results
    ]  # fmt: skip
    note = (
        "GB/s: bytes read and written by the quantizer; copy: numpy.copyto of as many bytes on all CPUs, same rounds."
    )
    return "\n".join([report.table(header, rows), note])
