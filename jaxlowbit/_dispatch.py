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
      platform: the platform of the default device at trace time; the fields below are about it.
      implementation: ``"native"`` or ``"xla"``.
      kernel: the kernel configuration in words.
      reason: why this implementation; never empty.
      lowering: what the program holds, whatever platform it is lowered for: ``"native"`` (and lowering it for another
        platform raises), ``"xla"``, or ``"by platform"``, native on the CPU and XLA elsewhere.
    """

    op: str
    problem: str
    platform: str
    implementation: str
    kernel: str
    reason: str
    lowering: str

    def __str__(self) -> str:
        return (
            f"{self.op}: {self.problem}\n  on {self.platform}: {self.implementation} ({self.kernel})"
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
    """The platform decisions are made for: that of ``jax_default_device`` where it is set, else the default backend's.

    ``gpu`` counts as ``cuda`` unless it is ROCm's.
    """
    config: Any = jax.config  # whose type does not list the options
    device = config.jax_default_device
    name = device if isinstance(device, str) else jax.default_backend() if device is None else device.platform
    if name == "gpu":
        first = device if hasattr(device, "client") else jax.devices()[0]
        version = getattr(first.client, "platform_version", "")
        return "rocm" if "rocm" in version.lower() else "cuda"
    return str(name)


_TARGETS = {"quantize": _ffi.QUANTIZE}  # every other op is a product


def native_on(op: str, target: str) -> tuple[bool, str]:
    """Whether the native library has a kernel for this op on that platform, and the reason in words."""
    if target != "cpu":
        return False, f"this version has no native {op} kernel for platform {target!r}"
    available, reason = _ffi.native_available("cpu", _TARGETS.get(op, _ffi.DOT))
    if not available:
        return False, reason
    how = "is the best tier of this machine" if _ffi.current_tier() is _ffi.Tier.AUTO else "is forced"
    return True, f"the CPU library serves it; tier {tier_name()} {how}"


def tier_name() -> str:
    """The tier of the CPU library that native calls traced here take, for example ``"avx512"``."""
    tier = _ffi.current_tier()
    return (_ffi.available_tiers()[-1] if tier is _ffi.Tier.AUTO else tier).name.lower()


def choose(
    op: str, problem: Any, implementation: str | None, *, kernel: Callable[[], str], xla_kernel: str
) -> Decision:
    """Decides and records. Raises UnsupportedError where ``"native"`` was asked for and cannot serve.

    None leaves the choice to the platform that the program is lowered for: a computation may be placed on the CPU of
    a host whose default device is another.
    """
    check_implementation(op, implementation)
    where = platform()
    available, reason = native_on(op, where)
    if implementation == "native" and not available:
        errors.unsupported(
            op,
            [f"{problem}: {reason}"],
            fix="Use implementation=None or 'xla', or see jaxlowbit.info(). For the CPU of a host with another default "
            "device, make it the default: jax.default_device(jax.devices('cpu')[0]).",
        )
    lowering = implementation
    if implementation == "xla":
        reason = "implementation='xla' was asked for"
    elif implementation is None:
        on_cpu, cpu_reason = native_on(op, "cpu")
        lowering = "by platform" if on_cpu else "xla"
        if where != "cpu":
            reason += f"; on a CPU device: {cpu_reason}"
        elif not on_cpu:
            # The CPU always has native kernels: not having them here is a fault of the installation, worth a warning.
            errors.warn_fallback(op, reason)
    native = available and implementation != "xla"
    return Decision(
        op=op,
        problem=str(problem),
        platform=where,
        implementation="native" if native else "xla",
        kernel=kernel() if native else xla_kernel,
        reason=reason,
        lowering=str(lowering),
    )


def without_kernel(decision: Decision, reason: str) -> Decision:
    """The decision for a call with nothing to compute, which needs no kernel on any platform."""
    return dataclasses.replace(decision, implementation="xla", kernel="none", reason=reason, lowering="xla")


def run(decision: Decision, native: Callable[..., Any], xla: Callable[..., Any], *args: Any) -> Any:
    """Calls the chosen implementation under a jitted function whose name leads back to the decision.

    Where nothing was named, one program holds the native kernel for the CPU and XLA for every other platform
    (cross-lowering, multi-platform export). Native by name has no stand-in: lowering it for another platform raises.
    """

    def call(*operands: Any) -> Any:
        if decision.lowering == "xla":
            return xla(*operands)
        if decision.lowering == "native":
            return jax.lax.platform_dependent(*operands, cpu=native)
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
    """The decisions of every jaxlowbit operation in a function (products and quantizers), in the order of its jaxpr."""

    decisions: tuple[Decision, ...]

    def __str__(self) -> str:
        if not self.decisions:
            return "no jaxlowbit operation in this function"
        return "\n".join(str(d) for d in self.decisions)

    __repr__ = __str__


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Which implementation and kernel configuration each jaxlowbit operation of ``fn(*args, **kwargs)`` takes, and why.

    Operations are the products, forward and backward, and the quantizers, those inside products included.

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
