"""Training adapters on a frozen base: one jitted step, the loop around it, and the checks that make it trustworthy.

The base is an argument of every jitted function: closed over, its packed weights would become constants of the
program, which XLA may fold into dequantized copies.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import jaxlowbit
from jaxlowbit.demo.data import Ids
from jaxlowbit.demo.errors import DemoError
from jaxlowbit.demo.model import LINEARS, Config, Execution, Params, token_losses

HELDOUT_POINTS = 4  # how often the held-out loss is measured during training

Step: TypeAlias = Callable[[Params, Params, Any, Any], tuple[Params, Any, jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is trained, and how long. Batch sizes are windows of ``length`` tokens."""

    steps: int
    batch: int
    length: int
    rank: int = 8
    learning_rate: float = 1e-3
    seed: int = 0


def freeze(params: Params, format: jaxlowbit.Format | None, implementation: str | None = None) -> Params:
    """The base on the device: its linears quantized to ``format``, or left in bfloat16 for ``None``; embedding and
    norms stay as they are, as they do in released checkpoints."""
    base: Params = jax.tree.map(jnp.asarray, params)
    if format is not None:
        for name in LINEARS:
            base["layers"][name] = jaxlowbit.quantize(base["layers"][name], format, implementation=implementation)
    return base


def linear_bytes(base: Params) -> int:
    """Bytes of the base's linears with their scales."""
    return sum(leaf.nbytes for name in LINEARS for leaf in jax.tree.leaves(base["layers"][name]))


def total_bytes(base: Params) -> int:
    """Bytes of the whole base: linears, scales, embedding, norms."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(base))


def fingerprint(base: Params) -> dict[str, np.ndarray[Any, Any]]:
    """The raw bytes of every leaf, by its path: a copy, since a view would change along with the leaf."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(base)
    return {jax.tree_util.keystr(path): np.frombuffer(np.asarray(x).tobytes(), np.uint8) for path, x in leaves}


def check_unchanged(before: dict[str, np.ndarray[Any, Any]], after: dict[str, np.ndarray[Any, Any]]) -> None:
    """Raises DemoError naming the frozen leaves whose bytes differ."""
    changed = [
        f"{path}: {np.count_nonzero(was != after[path])} of {was.size} bytes"
        for path, was in before.items()
        if not np.array_equal(was, after[path])
    ]
    if changed:
        raise DemoError("frozen weights changed during training: " + "; ".join(changed))


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW with a short warm-up and a cosine decay; gradients clipped to norm 1."""
    warmup = max(1, recipe.steps // 10)
    length = max(recipe.steps, warmup + 1)
    rate = optax.warmup_cosine_decay_schedule(0.0, recipe.learning_rate, warmup, length)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))


def make_step(config: Config, how: Execution, tx: optax.GradientTransformation) -> Step:
    """The jitted train step ``(lora, state, base, tokens) -> (lora, state, loss, finite)``.

    Differentiated in the adapters alone, so nothing asks for a gradient of a packed weight. ``finite`` holds one
    bool per adapter matrix, in the order of ``jax.tree.leaves``.
    """

    def step(lora: Params, state: Any, base: Params, tokens: Any) -> tuple[Params, Any, jax.Array, jax.Array]:
        def loss_of(lora: Params) -> jax.Array:
            return token_losses(base, lora, tokens, config, how).mean()

        loss, grads = jax.value_and_grad(loss_of)(lora)
        finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)])
        updates, state = tx.update(grads, state, lora)
        return optax.apply_updates(lora, updates), state, loss, finite

    return jax.jit(step, donate_argnums=(0, 1))


def check_step(number: int, loss: float, finite: Sequence[bool], lora: Params) -> None:
    """Raises DemoError if the loss or a gradient of this step is not finite, naming the adapters."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(lora)[0]]
    broken = [path for path, ok in zip(paths, finite, strict=True) if not ok]
    if broken or not np.isfinite(loss):
        raise DemoError(f"step {number}: loss {loss}, gradients that are not finite: {broken or 'none'}")


@dataclasses.dataclass
class Trained:
    """The adapters after training, the loss of every step, the seconds that each step took, and the held-out loss
    after some steps, by step (0: before training)."""

    lora: Params
    losses: list[float]
    seconds: list[float]
    heldout: dict[int, float]

    def tokens_per_second(self, recipe: Recipe) -> float:
        """Of the median step; the first, which compiles, is left out where there are others."""
        return recipe.batch * recipe.length / float(np.median(self.seconds[1:] or self.seconds))


def train(
    base: Params,
    lora: Params,
    batches: Ids,
    config: Config,
    how: Execution,
    recipe: Recipe,
    label: str | None = None,
    heldout: Callable[[Params], float] | None = None,
) -> Trained:
    """Runs one step per batch.

    Args:
      batches: ``(steps, batch, length + 1)``.
      lora: the adapters to start from; they are left as they are.
      label: heads the progress bar; None hides it.
      heldout: measures adapters, before the first step and after about every quarter of the steps.

    Raises:
      DemoError: a loss or a gradient is not finite; at once, at that step.
    """
    tx = optimizer(recipe)
    step = make_step(config, how, tx)
    lora = jax.tree.map(jnp.copy, lora)  # the step donates its adapters
    state = tx.init(lora)
    found = Trained(lora, [], [], {} if heldout is None else {0: heldout(lora)})
    every = -(-len(batches) // HELDOUT_POINTS)
    with tqdm(batches, desc=label, unit="step", disable=label is None) as bar:
        for number, tokens in enumerate(bar, start=1):
            start = time.perf_counter()
            lora, state, loss, finite = step(lora, state, base, tokens)
            found.losses.append(float(loss))
            found.seconds.append(time.perf_counter() - start)
            check_step(number, found.losses[-1], finite.tolist(), lora)
            bar.set_postfix(loss=f"{found.losses[-1]:.3f}")
            if heldout is not None and (number % every == 0 or number == len(batches)):
                found.heldout[number] = heldout(lora)
    return dataclasses.replace(found, lora=lora)


class Evaluator:
    """Mean loss over token windows, ``batch`` at a time, compiled once per kind of base."""

    def __init__(self, config: Config, how: Execution, batch: int) -> None:
        self._losses = jax.jit(lambda base, lora, tokens: token_losses(base, lora, tokens, config, how).mean())
        self._batch = batch

    def __call__(self, base: Params, lora: Params | None, tokens: Ids) -> float:
        """Nats per token; tokens ``(count, length + 1)`` with count a multiple of the batch."""
        return float(np.mean([float(self._losses(base, lora, part)) for part in self._parts(tokens)]))

    def _parts(self, tokens: Ids) -> Iterator[Ids]:
        if len(tokens) % self._batch:
            raise ValueError(f"Evaluator: expected a multiple of {self._batch} windows, got {len(tokens)}")
        yield from np.split(tokens, len(tokens) // self._batch)
