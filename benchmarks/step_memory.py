"""Temporary memory of a gradient step over L frozen layers, per layer, by implementation. No timing, no execution.

``python benchmarks/step_memory.py [FILE]`` compiles the step for 2 and for 8 layers and reads XLA's own
``memory_analysis``; the difference over 6 is what one more layer costs beyond its packed weights.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxlowbit as jlb
from jaxlowbit.testing.bench import environment

SIDE, ROWS = 1536, 16


def by_dequantizing(x: jax.Array, q: jlb.ScaledArray) -> jax.Array:
    """What people write without this package."""
    return x @ q.dequantize(jnp.bfloat16).T.astype(x.dtype)


def product(implementation: str) -> Callable[[jax.Array, jlb.ScaledArray], jax.Array]:
    def call(x: jax.Array, q: jlb.ScaledArray) -> jax.Array:
        op = jlb.fp4_dot if q.format.element.packed else jlb.fp8_dot
        return op(x, q, act=None, implementation=implementation)

    return call


def temporaries(layer: Callable[[Any, Any], Any], weight: Any, count: int) -> int:
    def loss(gain: jax.Array, x: jax.Array, weights: list[Any]) -> jax.Array:
        for w in weights:
            x = jnp.tanh(layer(x * gain, w))
        return jnp.sum(x.astype(jnp.float32))

    args = (jnp.float32(1), jnp.zeros((ROWS, SIDE)), [weight] * count)
    return int(jax.jit(jax.grad(loss)).lower(*args).compile().memory_analysis().temp_size_in_bytes)


def main(path: str | None) -> None:
    layers = {
        "native": product("native"),
        "xla, tiles": product("xla"),
        "dequantize to bfloat16, dot": by_dequantizing,
    }
    rows = []
    for fmt in (jlb.FP8_128X128, jlb.NVFP4):
        weight = jax.eval_shape(lambda fmt=fmt: jlb.quantize(jnp.zeros((SIDE, SIDE)), fmt))
        for name, layer in layers.items():
            per_layer = (temporaries(layer, weight, 8) - temporaries(layer, weight, 2)) / 6
            rows.append({"format": fmt.name, "layer": name, "bytes_per_layer": round(per_layer)})
            print(f"{fmt.name:12} {name:28} {per_layer / 2**20:8.2f} MiB a layer beyond the packed weight")
    if path is not None:
        about = environment.describe([], None) | {"command": f"python benchmarks/step_memory.py {path}"}
        report = {"what": "step_memory", "side": SIDE, "rows": ROWS, **about, "results": rows}
        with open(path, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
