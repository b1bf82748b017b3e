"""Low-rank adapters (LoRA) beside every base linear: ``y = W x + alpha / rank * B (A x)``, W frozen.

B starts at zero, so training starts at the base model exactly. Source: Hu et al., "LoRA: Low-Rank Adaptation of Large
Language Models", 2021.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxlowbit.demo.model import Config, Params


def init(key: jax.Array, config: Config, rank: int) -> Params:
    """Adapters of every linear: ``a (L, rank, K)`` normal with variance 1/K, ``b (L, N, rank)`` zero; float32."""
    shapes = config.linear_shapes()
    keys = jax.random.split(key, len(shapes))
    return {
        name: {
            "a": jax.random.normal(k, (config.layers, rank, in_features), jnp.float32) * in_features**-0.5,
            "b": jnp.zeros((config.layers, out_features, rank), jnp.float32),
        }
        for k, (name, (out_features, in_features)) in zip(keys, shapes.items(), strict=True)
    }


def parameter_count(lora: Params) -> int:
    """Trained numbers."""
    return sum(leaf.size for leaf in jax.tree.leaves(lora))
