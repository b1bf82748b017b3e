"""The demo's tokenizer: bytes, merges, digits, control tokens."""

import pytest

pytest.importorskip("tokenizers", reason="the demo needs tokenizers: pip install 'jaxlowbit[demo]'")

from jaxlowbit.demo.tokenizer import Tokenizer, byte_tokenizer

TEXT = "def f(x):\n\treturn x[1:42]  # naïve … 漢字 \U0001f40d\n\n"


def test_byte_tokenizer_round_trip():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(TEXT)
    assert tokenizer.size == 256
    assert len(ids) == len(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT


def small_tokenizer():
    space = "\u0120"
    tokens = ["<|end|>", "a", "b", "1", "2", space, "ab", "abab", space + "ab", "12"]
    merges = ["a b", "ab ab", f"{space} ab", "1 2"]
    return Tokenizer(tokens, merges, special=[0])


def test_merges_apply_in_rank_order_within_words():
    tokenizer = small_tokenizer()
    assert tokenizer.encode("abab ab") == [7, 8]
    assert tokenizer.decode([7, 8]) == "abab ab"


def test_digits_stand_alone_even_where_a_merge_would_join_them():
    assert small_tokenizer().encode("12 1") == [3, 4, 5, 3]


def test_control_tokens_are_one_id_and_vanish_in_decoding():
    tokenizer = small_tokenizer()
    assert tokenizer.encode("ab<|end|>ab") == [6, 0, 6]
    assert tokenizer.decode([6, 0, 6]) == "abab"


def test_tokenizer_refuses_a_broken_vocabulary():
    with pytest.raises(ValueError, match="1 repeated"):
        Tokenizer(["a", "a"], [])
    with pytest.raises(ValueError, match="got 'a c'"):
        Tokenizer(["a", "b"], ["a c"])
    with pytest.raises(ValueError, match="left right"):
        Tokenizer(["a", "b"], ["ab"])
