"""The byte-level BPE tokenizer of the model, rebuilt from its vocabulary and merges alone.

Pre-tokenization is the one SmolLM2 was trained with: digits one by one, then GPT-2's byte-level words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as _Tokenizer


class Tokenizer:
    """Text to token ids and back.

    Args:
      tokens: the vocabulary in id order, in the byte-level alphabet (a space is U+0120).
      merges: pairs ``"left right"`` in order of rank.
      special: ids of control tokens: one id when they occur in a text, dropped by ``decode``.
    """

    def __init__(self, tokens: Sequence[str], merges: Sequence[str], special: Sequence[int] = ()) -> None:
        vocab = {token: i for i, token in enumerate(tokens)}
        if len(vocab) != len(tokens):
            raise ValueError(f"Tokenizer: expected unique tokens, got {len(tokens) - len(vocab)} repeated")
        pairs = [_pair(merge, vocab) for merge in merges]
        self._tokenizer = _Tokenizer(models.BPE(vocab=vocab, merges=pairs))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens([AddedToken(tokens[i], normalized=False) for i in special])

    @property
    def size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))


def byte_tokenizer() -> Tokenizer:
    """One token per byte, 256 in all: for a model that has no vocabulary of its own."""
    return Tokenizer(sorted(pre_tokenizers.ByteLevel.alphabet()), merges=[])


def _pair(merge: str, vocab: Mapping[str, int]) -> tuple[str, str]:
    parts = merge.split(" ")
    if len(parts) != 2 or any(part not in vocab for part in parts):
        raise ValueError(f"Tokenizer: expected merges 'left right' of two known tokens, got {merge!r}")
    return parts[0], parts[1]
