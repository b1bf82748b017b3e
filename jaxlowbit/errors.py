"""Builders for error messages: what was asked, what was expected, what was found, what to do."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn


class FallbackWarning(UserWarning):
    """A call that has a native kernel on this platform took the XLA implementation. Issued once per reason."""


class UnsupportedError(NotImplementedError):
    """``implementation="native"`` was asked for and cannot serve the call."""


def describe(x: Any) -> str:
    """``float32[4,8]`` for arrays and ShapeDtypeStructs, the repr for the rest."""
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if shape is None or dtype is None:
        return repr(x)
    return f"{dtype}[{','.join(map(str, shape))}]"


def message(op: str, arg: str, *, expected: str, got: Any, fix: str) -> str:
    """The sentence of every refusal: op, argument, expected, got, what to do."""
    got_text = got if isinstance(got, str) else describe(got)
    return f"jaxlowbit.{op}: {arg}: expected {expected}; got {got_text}. {fix}"


def bad_value(op: str, arg: str, *, expected: str, got: Any, fix: str) -> NoReturn:
    """Raises ValueError with ``message``."""
    raise ValueError(message(op, arg, expected=expected, got=got, fix=fix))


def bad_type(op: str, arg: str, *, expected: str, got: Any, fix: str) -> NoReturn:
    """Raises TypeError with ``message``."""
    raise TypeError(message(op, arg, expected=expected, got=got, fix=fix))


def unsupported(op: str, reasons: list[str], *, fix: str) -> NoReturn:
    """Raises UnsupportedError with one line per reason."""
    lines = "\n".join(f"  - {reason}" for reason in reasons)
    raise UnsupportedError(f"jaxlowbit.{op}: implementation='native' cannot serve this call:\n{lines}\n{fix}")


_WARNED: set[str] = set()


def warn_fallback(op: str, reason: str) -> None:
    """Warns once per (op, reason): a silent slow path is a fault, a warning per call is noise."""
    key = f"{op}: {reason}"
    if key not in _WARNED:
        _WARNED.add(key)
        warnings.warn(f"jaxlowbit.{op} takes the xla implementation: {reason}", FallbackWarning, stacklevel=3)
