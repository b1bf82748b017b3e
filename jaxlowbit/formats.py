"""Formats are data: one frozen descriptor per low-bit format, and a table of the named ones.

Everything that differs between formats is a field here. Code that needs an ``if`` on a format's name lacks a field.

Sources: OCP Microscaling Formats (MX) v1.0 for E8M0, MXFP8 and MXFP4; OCP 8-bit Floating Point (OFP8) v1.0 for E4M3 and
E5M2; NVIDIA's NVFP4 description for the two-level format; DeepSeek-V3's technical report for 1x128 and 128x128 blocks.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np

_ANY_EXTENT = 2**31 - 1

ScaleRounding: TypeAlias = Literal["none", "rceil", "floor", "ceil", "even", "pow2"]


@dataclasses.dataclass(frozen=True)
class ElementType:
    """A code type: sign bit, ``exponent_bits``, ``mantissa_bits``.

    Attributes:
      name: ``"e4m3"``, ``"e5m2"`` or ``"e2m1"``.
      bits: bits of one code (8 or 4).
      exponent_bits, mantissa_bits, bias: the layout of the code below its sign bit.
      max: largest finite magnitude.
      has_inf, has_nan: whether codes exist for them.
      storage: NumPy dtype that holds the codes (``uint8``, two per byte, for 4-bit codes).
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    has_inf: bool
    has_nan: bool
    storage: np.dtype

    @property
    def packed(self) -> bool:
        """Two codes share a byte; the low nibble is the even index."""
        return self.bits == 4

    @property
    def per_byte(self) -> int:
        return 8 // self.bits

    @property
    def max_exponent(self) -> int:
        """floor(log2(max)): 8 for E4M3, 15 for E5M2, 2 for E2M1."""
        return int(np.floor(np.log2(self.max)))

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number; below it codes have a fixed spacing."""
        return 1 - self.bias


E4M3 = ElementType("e4m3", 8, 4, 3, 7, 448.0, False, True, np.dtype(ml_dtypes.float8_e4m3fn))
E5M2 = ElementType("e5m2", 8, 5, 2, 15, 57344.0, True, True, np.dtype(ml_dtypes.float8_e5m2))
E2M1 = ElementType("e2m1", 4, 2, 1, 1, 6.0, False, False, np.dtype(np.uint8))
ELEMENTS: dict[str, ElementType] = {e.name: e for e in (E4M3, E5M2, E2M1)}


@dataclasses.dataclass(frozen=True)
class ScaleType:
    """How a scale is stored. ``storage`` is what we write; ``accepts`` what callers may pass."""

    name: str
    storage: np.dtype
    accepts: tuple[np.dtype, ...]


F32_SCALE = ScaleType(
    "f32",
    np.dtype(np.float32),
    (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)),
)
# E8M0 lives in uint8: float8_e8m0fnu has no zero, so a zero cotangent of that dtype would be NaN.
E8M0_SCALE = ScaleType("e8m0", np.dtype(np.uint8), (np.dtype(np.uint8), np.dtype(ml_dtypes.float8_e8m0fnu)))
E4M3_SCALE = ScaleType("e4m3", np.dtype(ml_dtypes.float8_e4m3fn), (np.dtype(ml_dtypes.float8_e4m3fn),))
SCALES: dict[str, ScaleType] = {s.name: s for s in (F32_SCALE, E8M0_SCALE, E4M3_SCALE)}


@dataclasses.dataclass(frozen=True)
class Format:
    """A low-bit format: element type, scale block and scale type.

    ``value = decode(code) * decode(scale) [* global_scale]``: scales are always multipliers.

    Attributes:
      name: what reprs and errors print.
      element: the code type.
      block: ``(rows, k)`` of one scale; ``None`` means the whole extent of that axis. Last blocks may be partial.
      scale: the stored type of a block's scale.
      two_level: whether a float32 ``global_scale`` multiplies every block scale.
      scale_rounding: the rounding of computed scales when none is asked for.
      dynamic_act: name of the format that ``act="dynamic"`` gives to activations that meet weights of this format;
        ``None`` where no format is the obvious one, so that callers must name it.
    """

    name: str
    element: ElementType
    block: tuple[int | None, int | None]
    scale: ScaleType
    two_level: bool = False
    scale_rounding: ScaleRounding = "none"
    dynamic_act: str | None = "FP8_1X128"

    def resolve_block(self, rows: int, k: int) -> tuple[int, int]:
        """The block in numbers for a matrix of ``(rows, k)`` values; at least 1 in each axis."""
        return (self.block[0] or max(rows, 1), self.block[1] or max(k, 1))

    def kernel_block(self, rows: int, k: int) -> tuple[int, int]:
        """The block as the 32-bit numbers that kernels take.

        Past the extent all blocks are alike, and so they are for an extent that is not known yet (shape-polymorphic
        export), which no comparison with a block must decide.
        """

        def clamped(block: int | None, extent: Any) -> int:
            if not isinstance(extent, int):
                return _ANY_EXTENT if block is None else min(block, _ANY_EXTENT)
            return max(1, extent if block is None else min(block, extent))

        return (clamped(self.block[0], rows), clamped(self.block[1], k))

    def grid(self, rows: int, k: int) -> tuple[int, int]:
        """Shape of the scale grid: ``ceil(rows / block_rows), ceil(k / block_k)``."""
        block_rows, block_k = self.resolve_block(rows, k)
        return (-(-rows // block_rows), -(-k // block_k))

    def with_block(self, rows: int | None, k: int | None) -> Format:
        """This format with another scale block. Raises ValueError for a block below 1."""
        for value in (rows, k):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{self.name}.with_block: expected positive ints or None, got {(rows, k)}")
        if (rows, k) == self.block:
            return self
        label = "x".join("all" if v is None else str(v) for v in (rows, k))
        return dataclasses.replace(self, name=f"{self.name.split('[')[0]}[{label}]", block=(rows, k))

    def with_element(self, element: str | ElementType) -> Format:
        """This format with another code type, for example ``FP8_1X128.with_element("e5m2")``."""
        new = element if isinstance(element, ElementType) else ELEMENTS.get(element)
        if new is None:
            raise ValueError(f"{self.name}.with_element: expected one of {sorted(ELEMENTS)}, got {element!r}")
        if new == self.element:
            return self
        return dataclasses.replace(self, name=f"{self.name}:{new.name}", element=new)

    @property
    def transposed(self) -> Format:
        """The format of the transposed matrix: the block's axes change places."""
        return self.with_block(self.block[1], self.block[0])

    def bytes(self, rows: int, k: int) -> int:
        """Bytes held by one ``(rows, k)`` matrix: codes, scales and global scale."""
        grid_rows, grid_k = self.grid(rows, k)
        codes = rows * -(-k // self.element.per_byte)
        return codes + grid_rows * grid_k * self.scale.storage.itemsize + (4 if self.two_level else 0)

    def to_json(self) -> dict[str, Any]:
        """Plain values that ``from_json`` turns back into an equal Format: for exported programs and checkpoints."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return values | {"element": self.element.name, "scale": self.scale.name, "block": list(self.block)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Format:
        """The Format that ``to_json`` described."""
        rows, k = values["block"]
        element, scale = ELEMENTS[values["element"]], SCALES[values["scale"]]
        return cls(**values | {"element": element, "scale": scale, "block": (rows, k)})

    def __repr__(self) -> str:
        return self.name


FP8_TENSOR = Format("FP8_TENSOR", E4M3, (None, None), F32_SCALE, dynamic_act="FP8_CHANNEL")
FP8_CHANNEL = Format("FP8_CHANNEL", E4M3, (1, None), F32_SCALE, dynamic_act="FP8_CHANNEL")
FP8_1X128 = Format("FP8_1X128", E4M3, (1, 128), F32_SCALE)
FP8_128X128 = Format("FP8_128X128", E4M3, (128, 128), F32_SCALE)
MXFP8 = Format("MXFP8", E4M3, (1, 32), E8M0_SCALE, scale_rounding="rceil", dynamic_act="MXFP8")
MXFP4 = Format("MXFP4", E2M1, (1, 32), E8M0_SCALE, scale_rounding="rceil", dynamic_act="MXFP8")
NVFP4 = Format("NVFP4", E2M1, (1, 16), E4M3_SCALE, two_level=True, dynamic_act=None)

FORMATS: dict[str, Format] = {
    f.name: f for f in (FP8_TENSOR, FP8_CHANNEL, FP8_1X128, FP8_128X128, MXFP8, MXFP4, NVFP4)
}


def named(format: str | Format) -> Format:
    """A Format as it is, or the one of that name. Raises ValueError with the known names."""
    if isinstance(format, Format):
        return format
    found = FORMATS.get(format) if isinstance(format, str) else None
    if found is None:
        raise ValueError(f"format: expected a Format or one of {sorted(FORMATS)}, got {format!r}")
    return found


@dataclasses.dataclass(frozen=True)
class Act:
    """How activations are quantized on the fly, by name.

    Attributes:
      format: the activations' format; its row block must be 1 or the whole extent, since rows are independent.
      scale_rounding: ``None`` for the format's own; ``"pow2"`` rounds float32 scales up to powers of two, as models
        trained with UE8M0 activation scales expect.
      amax_ub: upper bound of the absolute maximum; larger values saturate (FBGEMM's activation_scale_ub).
    """

    format: Format
    scale_rounding: ScaleRounding | None = None
    amax_ub: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.format, Format):
            raise TypeError(f"Act: expected a Format such as jaxlowbit.FP8_1X128, got {self.format!r}")
        if self.amax_ub is not None and not self.amax_ub > 0:
            raise ValueError(f"Act: expected amax_ub > 0, got {self.amax_ub}")
