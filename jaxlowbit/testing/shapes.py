"""Named problem shapes, tagged by the models they come from, and the edge shapes that tiles get wrong.

Tests, benchmarks and tuning read the same list, so that a number in one can be looked up in the others. N and
K are those of the weights ``(N, K)``; M is the number of tokens and belongs to the run, not to the model.
"""

from __future__ import annotations

import dataclasses
import itertools
import math


@dataclasses.dataclass(frozen=True)
class WeightShape:
    """One projection: ``(N, K) = (out_features, in_features)``, the models it is from, and what it does
    there."""

    name: str
    n: int
    k: int
    models: tuple[str, ...]
    role: str

    @property
    def elements(self) -> int:
        return self.n * self.k


# DeepSeek-V3: hidden 7168, 128 heads of 128 + 64 (rotary) dimensions, low-rank queries 1536 and keys/values
# 512. Qwen3-8B: hidden 4096, 32 + 2 * 8 heads of 128, intermediate 12288. Qwen3-30B-A3B: hidden 2048, experts
# of 768. SmolLM2-135M: hidden 576, 9 + 2 * 3 heads of 64, intermediate 1536. gpt-oss: hidden and intermediate
# 2880, 64 + 2 * 8 heads of 64.
WEIGHTS: tuple[WeightShape, ...] = (
    WeightShape("dsv3_qkv_a", 2112, 7168, ("deepseek-v3",), "fused low-rank query and key/value down"),
    WeightShape("dsv3_q_b", 24576, 1536, ("deepseek-v3",), "query up"),
    WeightShape("dsv3_kv_b", 32768, 512, ("deepseek-v3",), "key/value up"),
    WeightShape("dsv3_o", 7168, 16384, ("deepseek-v3",), "attention output"),
    WeightShape("dsv3_gate_up", 4096, 7168, ("deepseek-v3",), "shared expert gate and up"),
    WeightShape("dsv3_down", 7168, 2048, ("deepseek-v3",), "shared expert down"),
    WeightShape("qwen3_8b_qkv", 6144, 4096, ("qwen3-8b",), "fused query, key, value"),
    WeightShape("qwen3_8b_gate_up", 24576, 4096, ("qwen3-8b",), "fused gate and up"),
    WeightShape("qwen3_8b_down", 4096, 12288, ("qwen3-8b",), "down"),
    WeightShape("qwen3_30b_qkv", 5120, 2048, ("qwen3-30b-a3b",), "fused query, key, value"),
    WeightShape("qwen3_30b_gate_up", 1536, 2048, ("qwen3-30b-a3b",), "one expert's gate and up"),
    WeightShape("qwen3_30b_down", 2048, 768, ("qwen3-30b-a3b",), "one expert's down"),
    WeightShape("smollm2_q", 576, 576, ("smollm2-135m",), "query and attention output"),
    WeightShape("smollm2_kv", 192, 576, ("smollm2-135m",), "key or value"),
    WeightShape("smollm2_up", 1536, 576, ("smollm2-135m",), "gate or up"),
    WeightShape("smollm2_down", 576, 1536, ("smollm2-135m",), "down"),
    WeightShape("gptoss_qkv", 5120, 2880, ("gpt-oss",), "fused query, key, value"),
    WeightShape("gptoss_gate_up", 5760, 2880, ("gpt-oss",), "one expert's gate and up, rows interleaved"),
    WeightShape("gptoss_down", 2880, 2880, ("gpt-oss",), "one expert's down"),
    WeightShape("square_4096", 4096, 4096, ("llama", "qwen3-8b"), "attention output; the benchmarks' default"),
    WeightShape("square_8192", 8192, 8192, ("llama",), "attention output of a 70B model"),
)

BY_NAME: dict[str, WeightShape] = {shape.name: shape for shape in WEIGHTS}

# Tile and vector widths in use: registers (16, 32), packed FP4 and cache lines (64), scale blocks and GPU
# tiles (128).
EDGES: tuple[int, ...] = (1, 16, 32, 64, 128)


def tagged(model: str) -> list[WeightShape]:
    """The shapes of one model. Raises ValueError with the known tags."""
    found = [shape for shape in WEIGHTS if model in shape.models]
    if not found:
        known = sorted({tag for shape in WEIGHTS for tag in shape.models})
        raise ValueError(f"shapes.tagged: expected one of {known}, got {model!r}")
    return found


def parse(text: str) -> WeightShape:
    """A name of ``WEIGHTS``, or ``NxK`` in numbers. Raises ValueError that lists both."""
    if text in BY_NAME:
        return BY_NAME[text]
    parts = text.lower().split("x")
    if len(parts) == 2 and all(part.isdigit() and int(part) > 0 for part in parts):
        return WeightShape(text, int(parts[0]), int(parts[1]), (), "given on the command line")
    raise ValueError(f"shapes.parse: expected NxK or one of {sorted(BY_NAME)}, got {text!r}")


def around(edge: int) -> tuple[int, ...]:
    """The lengths where code for a tile of ``edge`` changes its path: one below, on and above one and two
    tiles."""
    return tuple(sorted({v for v in (edge - 1, edge, edge + 1, 2 * edge - 1, 2 * edge, 2 * edge + 1) if v > 0}))


def edge_lengths(limit: int = 257) -> tuple[int, ...]:
    """All lengths around the edges up to ``limit``, in ascending order."""
    return tuple(sorted({v for edge in EDGES for v in around(edge) if v <= limit}))


def edge_problems(limit: int = 257) -> list[tuple[int, int, int]]:
    """``(M, N, K)`` problems in which every edge length appears on every axis.

    A full product of lengths would be thousands of problems. Each axis walks through the list at its own
    stride, so that each length occurs on each axis and the lengths of one problem are not all alike.
    """
    lengths = edge_lengths(limit)
    count = len(lengths)
    # Strides that share no factor with the count visit every length once.
    n_step, k_step = itertools.islice((s for s in itertools.count(3) if math.gcd(s, count) == 1), 2)
    return [(lengths[i], lengths[(n_step * i + 1) % count], lengths[(k_step * i + 2) % count]) for i in range(count)]


def residues(base: int, edge: int) -> list[int]:
    """``base + 0 .. base + edge - 1``: every remainder of a length modulo ``edge``."""
    return list(itertools.chain(range(base, base + edge)))
