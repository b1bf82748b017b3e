"""How many float32 quotients of a jitted division differ from the correctly rounded ones, by how it is written.

``python benchmarks/division.py [FILE]``. Quantizers divide a block by its scale; XLA may turn that into a product with
the rounded reciprocal. NumPy's division is the reference.
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowbit import _bits
from jaxlowbit.testing.bench import environment

ROWS, BLOCKS = 4096, 32
WAYS = {
    "x / broadcast(s)": lambda x, s: x / s,
    "x / broadcast(barrier(s))": lambda x, s: x / jax.lax.optimization_barrier(s),
    "x / 448": lambda x, _: x / jnp.float32(448),
    "_bits.divide(x, s)": lambda x, s: _bits.divide(x, jnp.broadcast_to(s, x.shape)),
}


def main(path: str | None) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, BLOCKS, 128)).astype(np.float32)
    s = np.abs(x).max(axis=-1, keepdims=True) / np.float32(448)
    rows = []
    for name, way in WAYS.items():
        want = x / np.float32(448) if "448" in name else x / s
        share = float(np.mean(np.asarray(jax.jit(way)(x, s)) != want))
        rows.append({"written": name, "share_of_quotients_that_differ": round(share, 4)})
        print(f"{name:28} {100 * share:6.2f} %")
    if path is not None:
        about = environment.describe([], None) | {"command": f"python benchmarks/division.py {path}"}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"what": "division", **about, "results": rows}, file, indent=1)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
