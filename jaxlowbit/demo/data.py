"""English text that every Python brings along: the language reference of ``pydoc``, split into training and held-out.

Whole topics are held out, chosen by a checksum of their name, so the split is the same in every run and on every
Python version that has the topic. Some topics quote others: a paragraph that occurs in a held-out topic is removed
from the training text.
"""

from __future__ import annotations

import importlib
import re
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxlowbit.demo.errors import DemoError
from jaxlowbit.demo.tokenizer import Tokenizer

HELD_OUT_ONE_IN = 8
Ids = np.ndarray[Any, np.dtype[np.int32]]


class Split(NamedTuple):
    """Two texts without a common paragraph."""

    train: str
    heldout: str


class Windows(NamedTuple):
    """Token windows ``(count, length + 1)``: one more than the positions, for the last target."""

    train: Ids
    heldout: Ids


def load_topics() -> dict[str, str]:
    """The topics of pydoc by name."""
    topics = importlib.import_module("pydoc_data.topics").topics
    return {str(name): str(text) for name, text in topics.items()}


def split(topics: Mapping[str, str]) -> Split:
    """The fixed split described above, topics in alphabetical order."""
    heldout = [name for name in sorted(topics) if zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0]
    known = {paragraph for name in heldout for paragraph in _paragraphs(topics[name])}
    train: list[str] = []
    for name in sorted(set(topics) - set(heldout)):
        for paragraph in _paragraphs(topics[name]):
            if paragraph not in known:
                known.add(paragraph)  # said once is enough for training, too
                train.append(paragraph)
    return Split("\n\n".join(train), "\n\n".join(p for name in heldout for p in _paragraphs(topics[name])))


def windows(text: Split, tokenizer: Tokenizer, length: int, train_count: int, heldout_count: int, seed: int) -> Windows:
    """``train_count`` windows in an order shuffled by ``seed`` and ``heldout_count`` windows spread evenly over the
    held-out text; windows do not overlap. Raises DemoError if a text is too short."""
    train = _cut(tokenizer.encode(text.train), length, train_count, "training")
    heldout = _cut(tokenizer.encode(text.heldout), length, heldout_count, "held-out")
    order = np.random.default_rng(seed).permutation(len(train))[:train_count]
    spread = np.linspace(0, len(heldout) - 1, heldout_count).round().astype(int)
    return Windows(train[order], heldout[spread])


def _paragraphs(text: str) -> list[str]:
    """Paragraphs with their line breaks undone: the reference is wrapped at 72 columns, indented blocks are code."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.strip("\n").split("\n")
        code = all(line.startswith("   ") for line in lines)
        found.append("\n".join(lines) if code else " ".join(line.strip() for line in lines))
    return [paragraph for paragraph in found if paragraph.strip()]


def _cut(ids: list[int], length: int, need: int, what: str) -> Ids:
    count = (len(ids) - 1) // length
    if count < need:
        raise DemoError(
            f"{what} text: expected {need} windows of {length} tokens, got {count}. Ask for fewer steps (--steps)."
        )
    return np.stack([np.asarray(ids[i * length : i * length + length + 1], np.int32) for i in range(count)])
