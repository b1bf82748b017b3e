"""The demo's course: load, quantize, measure, train, measure again, check. Printing is in ``report``."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxlowbit
from jaxlowbit.demo import data, lora, model, train, weights
from jaxlowbit.demo.errors import DemoError
from jaxlowbit.demo.model import Execution, Params
from jaxlowbit.demo.train import Evaluator, Recipe

FORMATS = (jaxlowbit.FP8_128X128, jaxlowbit.NVFP4)
PROMPT = "In Python, a class definition"
XLA_STEPS = 4  # of the comparison with the XLA implementation: one compiles, three are timed


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run does; ``quick`` is the tiny random model."""

    quick: bool = False
    steps: int = 40
    implementation: str | None = None
    new_tokens: int = 24
    heldout_windows: int = 8

    def recipe(self) -> Recipe:
        if self.quick:
            return Recipe(steps=self.steps, batch=4, length=32, learning_rate=1e-2)
        return Recipe(steps=self.steps, batch=2, length=128)


@dataclasses.dataclass(frozen=True)
class Base:
    """One base as it is held: bytes of its linears and of all of it, and its held-out loss (nats per token)."""

    name: str
    linear_bytes: int
    total_bytes: int
    heldout_loss: float

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.heldout_loss))


@dataclasses.dataclass(frozen=True)
class Training:
    """One format's training. Losses are nats per token, ``train`` on the first windows that were trained on.

    Attributes:
      heldout_losses: steps done -> held-out loss.
      implementations: implementation -> number of the step's low-bit products that take it.
      products: each different product of the step, with its implementation and kernel.
      tokens_per_second: implementation -> of the median step.
    """

    format: str
    losses: list[float]
    heldout_losses: dict[int, float]
    train_before: float
    train_after: float
    heldout_before: float
    heldout_after: float
    text_before: str
    text_after: str
    implementations: dict[str, int]
    products: list[str]
    tokens_per_second: dict[str, float]
    frozen_leaves: int
    frozen_bytes: int


@dataclasses.dataclass(frozen=True)
class Results:
    """Everything the demo found out."""

    model: str
    adapter_parameters: int
    train_tokens: int
    heldout_tokens: int
    recipe: Recipe
    prompt: str
    bases: list[Base]
    trainings: list[Training]
    seconds: float


def run(settings: Settings, say: Callable[[str], None]) -> Results:
    """Runs the demo; ``say`` gets a line at each stage.

    Raises:
      DemoError: a package is missing, a loss does not fall or is not finite, a gradient is not finite, or a frozen
        weight changes.
    """
    start = time.perf_counter()
    recipe = settings.recipe()
    if recipe.steps < 2:
        raise DemoError(f"--steps: expected at least 2, got {recipe.steps}")
    checkpoint = weights.tiny_random() if settings.quick else weights.load_smollm2()
    text = data.windows(
        data.split(data.load_topics()),
        checkpoint.tokenizer,
        recipe.length,
        recipe.steps * recipe.batch,
        settings.heldout_windows,
        recipe.seed,
    )
    adapters = lora.init(jax.random.key(recipe.seed), checkpoint.config, recipe.rank)
    results = Results(
        model=checkpoint.name,
        adapter_parameters=lora.parameter_count(adapters),
        train_tokens=text.train[:, 1:].size,
        heldout_tokens=text.heldout[:, 1:].size,
        recipe=recipe,
        prompt=PROMPT,
        bases=[],
        trainings=[],
        seconds=0.0,
    )
    say(
        f"{results.model}: {checkpoint.config.layers} layers; adapters of rank {recipe.rank} "
        f"({results.adapter_parameters:,} parameters); {results.train_tokens:,} tokens to train on, "
        f"{results.heldout_tokens:,} held out"
    )
    how = Execution(implementation=settings.implementation)
    bf16 = train.freeze(checkpoint.params, None)
    evaluate = Evaluator(checkpoint.config, how, recipe.batch)
    results.bases.append(_measure("bf16", bf16, evaluate(bf16, adapters, text.heldout)))
    del bf16
    for format in FORMATS:
        say(f"{format.name}: quantizing the base")
        base, training = _train_one(checkpoint, format, adapters, text, how, settings, say)
        results.bases.append(base)
        results.trainings.append(training)
    return dataclasses.replace(results, seconds=time.perf_counter() - start)


def _measure(name: str, base: Params, heldout_loss: float) -> Base:
    return Base(name, train.linear_bytes(base), train.total_bytes(base), heldout_loss)


def _train_one(
    checkpoint: weights.Checkpoint,
    format: jaxlowbit.Format,
    adapters: Params,
    text: data.Windows,
    how: Execution,
    settings: Settings,
    say: Callable[[str], None],
) -> tuple[Base, Training]:
    config, recipe = checkpoint.config, settings.recipe()
    base = train.freeze(checkpoint.params, format, how.implementation)
    frozen = train.fingerprint(base)
    evaluate = Evaluator(config, how, recipe.batch)
    write = _writer(checkpoint, base, how, settings.new_tokens)
    batches = text.train.reshape(recipe.steps, recipe.batch, -1)
    probe = text.train[: settings.heldout_windows]
    train_before, text_before = evaluate(base, adapters, probe), write(adapters)
    implementations, products = _decisions(config, how, recipe, base, adapters, batches[0])

    trained = train.train(
        base,
        adapters,
        batches,
        config,
        how,
        recipe,
        label=format.name,
        heldout=lambda adapters: evaluate(base, adapters, text.heldout),
    )
    train_after, text_after = evaluate(base, trained.lora, probe), write(trained.lora)
    heldout_before, heldout_after = trained.heldout[0], trained.heldout[recipe.steps]
    speeds = {"+".join(implementations): trained.tokens_per_second(recipe)}
    if "native" in implementations:
        say(f"{format.name}: timing {XLA_STEPS - 1} steps of the XLA implementation")
        xla = how._replace(implementation="xla")
        compared = train.train(base, adapters, batches[:XLA_STEPS], config, xla, recipe)
        speeds["xla"] = compared.tokens_per_second(recipe)

    train.check_unchanged(frozen, train.fingerprint(base))
    check_fell(format.name, "training", train_before, train_after)
    check_fell(format.name, "held-out", heldout_before, heldout_after)
    return _measure(format.name, base, heldout_before), Training(
        format=format.name,
        losses=trained.losses,
        heldout_losses=trained.heldout,
        train_before=train_before,
        train_after=train_after,
        heldout_before=heldout_before,
        heldout_after=heldout_after,
        text_before=text_before,
        text_after=text_after,
        implementations=implementations,
        products=products,
        tokens_per_second=speeds,
        frozen_leaves=len(frozen),
        frozen_bytes=sum(x.size for x in frozen.values()),
    )


def check_fell(format: str, what: str, before: float, after: float) -> None:
    """Raises DemoError unless the loss fell (also if it is NaN)."""
    if not after < before:
        raise DemoError(f"{format}: the {what} loss did not fall: {before:.4f} before, {after:.4f} after training")


def _writer(checkpoint: weights.Checkpoint, base: Params, how: Execution, new_tokens: int) -> Callable[[Params], str]:
    """A function from adapters to the sentence that the model goes on with after PROMPT."""
    prompt = jnp.asarray(checkpoint.tokenizer.encode(PROMPT), jnp.int32)
    continued = jax.jit(lambda base, adapters: model.greedy(base, adapters, prompt, new_tokens, checkpoint.config, how))
    return lambda adapters: checkpoint.tokenizer.decode(np.asarray(continued(base, adapters)).tolist())


def _decisions(
    config: model.Config, how: Execution, recipe: Recipe, base: Params, adapters: Params, tokens: data.Ids
) -> tuple[dict[str, int], list[str]]:
    """What jaxlowbit.explain says about the products of the train step."""
    tx = train.optimizer(recipe)
    step: Any = train.make_step(config, how, tx)
    decisions = jaxlowbit.explain(step, adapters, tx.init(adapters), base, tokens).decisions
    found = [d for d in decisions if d.op != "quantize"]
    counts = {d.implementation: 0 for d in found}
    for decision in found:
        counts[decision.implementation] += 1
    return counts, list(dict.fromkeys(f"{d.problem}: {d.implementation} ({d.kernel})" for d in found))
