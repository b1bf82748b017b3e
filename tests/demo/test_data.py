"""The demo's text: a split that shares nothing and windows that do not overlap."""

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="the demo needs tokenizers: pip install 'jaxlowbit[demo]'")

from jaxlowbit.demo import data
from jaxlowbit.demo.errors import DemoError
from jaxlowbit.demo.tokenizer import byte_tokenizer


def test_split_shares_no_paragraph_and_never_changes():
    topics = data.load_topics()
    text = data.split(topics)
    train_paragraphs, heldout = (set(part.split("\n\n")) for part in text)
    assert not train_paragraphs & heldout
    assert len(text.train) > 100_000
    assert len(text.heldout) > 20_000
    assert text == data.split(dict(reversed(topics.items())))


def test_a_quoted_paragraph_is_not_trained_on():
    names = [f"topic{i}" for i in range(64)]
    common = "A sentence that every topic quotes."
    text = data.split({name: f"{common}\n\nOnly {name} says this,\nin two lines." for name in names})
    assert common in text.heldout
    assert common not in text.train
    assert "says this, in two lines." in text.train


def test_windows_do_not_overlap_and_hold_the_target():
    text = data.Split("".join(map(chr, range(33, 124))), "x" * 40)
    found = data.windows(text, byte_tokenizer(), 8, 11, 3, seed=0)
    assert found.train.shape == (11, 9)
    assert found.heldout.shape == (3, 9)
    starts = sorted(found.train[:, 0].tolist())
    assert np.all(np.diff(starts) == 8)
    with pytest.raises(DemoError, match="held-out text: expected 5 windows of 8 tokens, got 4"):
        data.windows(text, byte_tokenizer(), 8, 11, 5, seed=0)
