"""The demo's decoder against a naive NumPy one, on plain and on packed weights; the shapes it accepts."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

for _package in ("optax", "tokenizers", "tqdm", "matplotlib"):
    pytest.importorskip(_package, reason=f"the demo needs {_package}: pip install 'jaxlowbit[demo]'")

import jaxlowbit  # noqa: E402
from jaxlowbit.demo import lora, model, run, train, weights  # noqa: E402
from jaxlowbit.demo.errors import DemoError  # noqa: E402
from jaxlowbit.demo.model import Config, Execution  # noqa: E402

HOW = Execution(implementation="xla")


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


def test_rope_turns_neighboring_pairs():
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 8)).astype(np.float32)
    found = model.rope(jnp.asarray(x), jnp.arange(3, 8), 1e5)
    np.testing.assert_allclose(found, naive_rope(x.astype(np.float64), range(3, 8), 1e5), atol=2e-6)


def test_attention_is_causal_and_groups_heads():
    rng = np.random.default_rng(1)
    q = rng.normal(size=(2, 7, 6, 4)).astype(np.float32)
    k, v = (rng.normal(size=(2, 7, 2, 4)).astype(np.float32) for _ in range(2))
    found = model.attention(*map(jnp.asarray, (q, k, v)), jnp.tril(jnp.ones((7, 7), bool)))
    np.testing.assert_allclose(found, naive_attention(q, k, v), atol=1e-5)


def test_decoder_equals_the_naive_one(tiny):
    tokens = np.random.default_rng(2).integers(0, 256, (2, 9))
    found, cache = model.forward(train.freeze(tiny.params, None), None, jnp.asarray(tokens), tiny.config, HOW)
    assert cache is None
    # bfloat16 rounds at 2^-9; some ten roundings follow each other, their errors add up like a random walk
    assert relative(found, naive_hidden(tiny.params, tokens, tiny.config)) < 10**0.5 * 2**-8


def test_losses_are_those_of_the_next_token(tiny):
    tokens = np.random.default_rng(5).integers(0, 256, (2, 9))
    base = train.freeze(tiny.params, None)
    hidden, _ = model.forward(base, None, jnp.asarray(tokens[:, :-1]), tiny.config, HOW)
    scores = np.asarray(model.logits(base, hidden), np.float64)
    p = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    wanted = [[-np.log(p[b, t, tokens[b, t + 1]]) for t in range(8)] for b in range(2)]
    np.testing.assert_allclose(model.token_losses(base, None, jnp.asarray(tokens), tiny.config, HOW), wanted, rtol=1e-4)


def test_generation_with_a_cache_equals_generation_without(tiny):
    base = train.freeze(tiny.params, None)
    adapters = lora.init(jax.random.key(0), tiny.config, 4)
    text = [65, 66, 67]
    for _ in range(6):
        hidden, _ = model.forward(base, adapters, jnp.asarray([text]), tiny.config, HOW)
        text.append(int(jnp.argmax(model.logits(base, hidden)[0, -1])))
    found = model.greedy(base, adapters, jnp.asarray([65, 66, 67]), 6, tiny.config, HOW)
    assert found.tolist() == text


@pytest.mark.parametrize("format", run.FORMATS, ids=lambda f: f.name)
def test_packed_base_equals_its_dequantized_self(tiny, format):
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


def test_adapters_start_at_the_base_and_add_a_low_rank_product(tiny):
    base = jax.tree.map(lambda w: w[0], train.freeze(tiny.params, None)["layers"])
    adapters = jax.tree.map(lambda w: w[0], lora.init(jax.random.key(1), tiny.config, 4))
    x = jax.random.normal(jax.random.key(2), (1, 3, tiny.config.ffn), jnp.bfloat16)
    start = model.adapted(x, "ffn_down", base, adapters, HOW)
    np.testing.assert_array_equal(start, model.adapted(x, "ffn_down", base, None, HOW))
    adapters["ffn_down"]["b"] = jax.random.normal(jax.random.key(3), (tiny.config.hidden, 4))
    a, b = (np.asarray(adapters["ffn_down"][key], np.float64) for key in "ab")
    wanted = np.asarray(x, np.float64) @ (np.asarray(base["ffn_down"], np.float64) + HOW.lora_scale * b @ a).T
    assert relative(model.adapted(x, "ffn_down", base, adapters, HOW), wanted) < 4 * 2**-8


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
