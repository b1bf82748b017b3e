from __future__ import annotations

import pytest

from jaxlowbit.testing import shapes


def test_names_are_unique_and_tags_find_them() -> None:
    assert len(shapes.BY_NAME) == len(shapes.WEIGHTS)
    found = {(shape.n, shape.k) for shape in shapes.tagged("deepseek-v3")}
    assert found == {(2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)}
    assert {2880} == {shape.k for shape in shapes.tagged("gpt-oss")}
    with pytest.raises(ValueError, match="smollm2-135m"):
        shapes.tagged("gpt-2")


def test_parse() -> None:
    assert shapes.parse("dsv3_o") is shapes.BY_NAME["dsv3_o"]
    assert (shapes.parse("12x34").n, shapes.parse("12x34").k, shapes.parse("12x34").elements) == (12, 34, 408)
    for bad in ("12", "12x", "0x4", "axb", "1x2x3"):
        with pytest.raises(ValueError, match="NxK"):
            shapes.parse(bad)


def test_every_edge_length_on_every_axis() -> None:
    lengths = set(shapes.edge_lengths())
    assert lengths >= {1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257}
    for limit in (40, 130, 257):
        problems = shapes.edge_problems(limit)
        for axis in range(3):
            assert {problem[axis] for problem in problems} == set(shapes.edge_lengths(limit))


def test_residues() -> None:
    assert sorted(length % 16 for length in shapes.residues(100, 16)) == list(range(16))
