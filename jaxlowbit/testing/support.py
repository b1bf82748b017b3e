"""The README's support table, asked of the code: ``python -m jaxlowbit.testing.support`` prints it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxlowbit import formats
from jaxlowbit._dispatch import explain, native_on
from jaxlowbit.autodiff.dot import fp4_dot, fp8_dot
from jaxlowbit.quantize import quantize

_HEADER = (
    '| format | codes | one scale per | scales | bits per weight | op | `act="dynamic"` | CPU | CUDA | elsewhere |',
    "|---|---|---|---|---|---|---|---|---|---|",
)
_SIDE = 4096


def _block(fmt: formats.Format) -> str:
    rows, k = fmt.block
    if (rows, k) == (None, None):
        return "tensor"
    if k is None:
        return "output feature"
    return f"{rows}x{k}"


def _row(fmt: formats.Format) -> str:
    op = fp4_dot if fmt.element.packed else fp8_dot
    weight = jax.eval_shape(lambda: quantize(jnp.zeros((_SIDE, _SIDE)), fmt))
    x = jax.ShapeDtypeStruct((8, _SIDE), jnp.bfloat16)
    (cpu,) = [d for d in explain(lambda x, w: op(x, w, act=None), x, weight).decisions if d.op == op.__name__]
    cuda, _ = native_on(op.__name__, "cuda")
    scales = {"f32": "float32", "e8m0": "E8M0", "e4m3": "E4M3"}[fmt.scale.name]
    cells = (
        f"`{fmt.name}`",
        fmt.element.name.upper(),
        _block(fmt),
        scales + (" + float32 per tensor" if fmt.two_level else ""),
        f"{8 * fmt.bytes(_SIDE, _SIDE) / _SIDE**2:.3g}",
        f"`{op.__name__}`",
        f"`{fmt.dynamic_act}`" if fmt.dynamic_act else "name it",
        cpu.implementation,
        "native" if cuda else "xla",
        "xla",
    )
    return "| " + " | ".join(cells) + " |"


def table() -> str:
    """The formats as a Markdown table: what they hold and what serves them. Needs the CPU library."""
    return "\n".join([*_HEADER, *(_row(fmt) for fmt in formats.FORMATS.values())])


if __name__ == "__main__":
    print(table())  # noqa: T201
