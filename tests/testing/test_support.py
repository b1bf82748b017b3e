"""The README's table is what the code says."""

from __future__ import annotations

from pathlib import Path

from jaxlowbit.testing import support


def test_readme_holds_the_generated_table() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    start, end = "<!-- support: python -m jaxlowbit.testing.support -->\n", "\n<!-- /support -->"
    held = readme.split(start)[1].split(end)[0]
    assert held == support.table(), "run the command in the README's comment and paste what it prints"


def test_readme_example_runs() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    code = readme.split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {}
    exec(code, names)
    assert names["y"].shape == (8, 1024)
    assert names["dx"].shape == (8, 512)
