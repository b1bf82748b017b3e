"""Which implementation serves a call, and why: decided once, recorded, never silent."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.export

from jaxlowbit import _ffi, errors

IMPLEMENTATIONS = (None, "native", "xla")


@dataclasses.dataclass(frozen=True)
class Decision:
    """What one call takes on one platform.

    Attributes:
      op: public name of the operation.
      problem: its static facts, printable.
      platform: the platform asked about (``jax.default_backend()`` at trace time).
      implementation: ``"native"`` or ``"xla"``.
      kernel: the kernel configuration in words.
      reason: why this implementation.
      batch_invariant: whether a row of the output is independent of the other rows of the call.
    """

    op: str
    problem: str
    platform: str
    implementation: str
    kernel: str
    reason: str
    batch_invariant: bool

    def __str__(self) -> str:
        invariant = "batch-invariant" if self.batch_invariant else "not batch-invariant"
        return (
            f"{self.op}: {self.problem}\n  on {self.platform}: {self.implementation} ({self.kernel}; {invariant})"
            f"\n  because {self.reason}"
        )


# Decisions by the name of the jitted function that carries them: names survive every cache of JAX, so `explain` can
# read them back from a jaxpr that was traced long before it was asked.
_BY_NAME: dict[str, Decision] = {}
_PREFIX = "jaxlowbit_"


def check_implementation(op: str, implementation: str | None) -> None:
    if implementation not in IMPLEMENTATIONS:
        errors.bad_value(
            op,
            "implementation",
            expected="'native', 'xla' or None (the first that is supported)",
            got=repr(implementation),
            fix="Pass one of these.",
        )


def platform() -> str:
    """The platform decisions are made for; ``gpu`` counts as ``cuda`` unless it is ROCm's."""
    name = jax.default_backend()
    if name == "gpu":
        version = getattr(jax.devices()[0].client, "platform_version", "")
        return "rocm" if "rocm" in version.lower() else "cuda"
    return name


def native_on(op: str, target: str) -> tuple[bool, str]:
    """Whether the native library has a kernel for this op on that platform, and the reason in words."""
    if target != "cpu":
        return False, f"this version has no native {op} kernel for platform {target!r}"
    return _ffi.native_available("cpu")


def choose(
    op: str, problem: Any, implementation: str | None, *, kernel: Callable[[], str], batch_invariant: bool
) -> Decision:
    """Decides and records. Raises UnsupportedError where ``"native"`` was asked for and cannot serve."""
    check_implementation(op, implementation)
    where = platform()
    available, reason = native_on(op, where)
    if implementation == "native" and not available:
        errors.unsupported(
            op, [f"{problem}: {reason}"], fix="Use implementation=None or 'xla', or see jaxlowbit.info()."
        )
    native = available and implementation != "xla"
    if implementation == "xla":
        reason = "implementation='xla' was asked for"
    elif not native and where == "cpu":
        # The CPU always has native kernels: not having them here is a fault of the installation, worth a warning.
        errors.warn_fallback(op, reason)
    return Decision(
        op=op,
        problem=str(problem),
        platform=where,
        implementation="native" if native else "xla",
        kernel=kernel() if native else "XLA: dequantize in bounded tiles, float32 dot",
        reason=reason,
        batch_invariant=batch_invariant if native else False,
    )


def run(decision: Decision, native: Callable[..., Any], xla: Callable[..., Any], *args: Any) -> Any:
    """Calls the chosen implementation under a jitted function whose name leads back to the decision.

    A native choice still lowers for other platforms (cross-lowering, multi-platform export): there the XLA
    implementation stands in, unless native was asked for by name.
    """

    def call(*operands: Any) -> Any:
        if decision.implementation == "xla":
            return xla(*operands)
        return jax.lax.platform_dependent(*operands, cpu=native, default=xla)

    digest = hashlib.sha256(repr(decision).encode()).hexdigest()[:10]
    call.__name__ = call.__qualname__ = f"{_PREFIX}{decision.op}_{digest}"
    _BY_NAME[call.__name__] = decision
    return jax.jit(call)(*args)


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What ``jax.export.export(..., disabled_checks=)`` needs to let programs with native kernels through.

    Exported programs call custom-call targets, which JAX cannot promise to keep stable; jaxlowbit versions the
    names of its targets, so a program and a library that do not fit together fail to compile instead.
    """
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in (_ffi.DOT, _ffi.QUANTIZE)]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The decisions of every jaxlowbit product in a function, in the order of its jaxpr."""

    decisions: tuple[Decision, ...]

    def __str__(self) -> str:
        if not self.decisions:
            return "no jaxlowbit operation in this function"
        return "\n".join(str(d) for d in self.decisions)

    __repr__ = __str__


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Which implementation and kernel configuration each jaxlowbit operation of ``fn(*args, **kwargs)`` takes, and why.

    Args:
      fn: any traceable function that calls jaxlowbit (jitted or not, with gradients or not).
      *args, **kwargs: arrays or ``jax.ShapeDtypeStruct``; nothing is computed.

    Returns:
      An ``Explanation``; print it, or read ``decisions``.
    """
    # Static arguments cannot pass through make_jaxpr, so everything that is not an array is closed over.
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves]

    def closed(*arrays: Any) -> Any:
        it = iter(arrays)
        full = [next(it) if a else leaf for a, leaf in zip(is_array, leaves, strict=True)]
        a, k = jax.tree.unflatten(tree, full)
        return fn(*a, **k)

    arrays = [x for x, a in zip(leaves, is_array, strict=True) if a]
    found: list[Decision] = []
    _walk(jax.make_jaxpr(closed)(*arrays).jaxpr, found)
    return Explanation(tuple(found))


def _walk(jaxpr: Any, found: list[Decision]) -> None:
    for eqn in jaxpr.eqns:
        decision = _BY_NAME.get(str(eqn.params.get("name", "")))
        if decision is not None:
            found.append(decision)
            continue
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    _walk(inner, found)
