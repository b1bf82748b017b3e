"""The ways to call a function that takes NumPy and JAX arrays, and points where roundings go wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest


def in_numpy(fn: Callable[..., Any], *arrays: Any) -> np.ndarray:
    out = fn(*arrays)
    assert isinstance(out, np.ndarray), type(out)
    return out


@functools.cache
def _compiled(fn: Callable[..., Any], keywords: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(functools.partial(fn, **dict(keywords)))


def in_jit(fn: Callable[..., Any], *arrays: Any) -> np.ndarray:
    if isinstance(fn, functools.partial) and not fn.args:  # equal partials are different objects
        jitted = _compiled(fn.func, tuple(sorted(fn.keywords.items())))
    else:
        jitted = _compiled(fn, ())
    out = jitted(*map(jnp.asarray, arrays))
    assert isinstance(out, jax.Array)
    return np.asarray(out)


def eager(fn: Callable[..., Any], *arrays: Any) -> np.ndarray:
    out = fn(*map(jnp.asarray, arrays))
    assert isinstance(out, jax.Array)
    return np.asarray(out)


every_way = pytest.mark.parametrize("way", [in_numpy, eager, in_jit], ids=["numpy", "eager", "jit"])
numpy_and_jit = pytest.mark.parametrize("way", [in_numpy, in_jit], ids=["numpy", "jit"])


def neighbors(points: np.ndarray) -> np.ndarray:
    """The points, the float on either side of each, and all of these negated; same dtype."""
    with np.errstate(over="ignore", under="ignore"):
        away = [points, np.nextafter(points, points.dtype.type(np.inf)), np.nextafter(points, points.dtype.type(0))]
    return np.concatenate([*away, *(-a for a in away)])
