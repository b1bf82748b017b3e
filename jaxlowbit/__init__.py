"""Low-bit matrix multiplication for JAX: FP8 and FP4 products on native kernels, with gradients.

The facade: public names and nothing else.
"""

from jaxlowbit._dispatch import Explanation, explain, export_checks
from jaxlowbit._info import info
from jaxlowbit._version import __version__
from jaxlowbit.autodiff.dot import REMAT_NAME, fp4_dot, fp8_dot, scaled_dot
from jaxlowbit.codecs import (
    decode,
    decode_e8m0,
    encode,
    encode_e8m0,
    pack_e2m1,
    pack_nibbles,
    unpack_e2m1,
    unpack_nibbles,
)
from jaxlowbit.errors import FallbackWarning, UnsupportedError
from jaxlowbit.formats import (
    FP8_1X128,
    FP8_128X128,
    FP8_CHANNEL,
    FP8_TENSOR,
    MXFP4,
    MXFP8,
    NVFP4,
    Act,
    Format,
)
from jaxlowbit.quantize import dequantize, fake_quantize, quantize
from jaxlowbit.scaled_array import ScaledArray
from jaxlowbit.sharding import align_vma

__all__ = [
    "FP8_1X128",
    "FP8_128X128",
    "FP8_CHANNEL",
    "FP8_TENSOR",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "REMAT_NAME",
    "Act",
    "Explanation",
    "FallbackWarning",
    "Format",
    "ScaledArray",
    "UnsupportedError",
    "__version__",
    "align_vma",
    "decode",
    "decode_e8m0",
    "dequantize",
    "encode",
    "encode_e8m0",
    "explain",
    "export_checks",
    "fake_quantize",
    "fp4_dot",
    "fp8_dot",
    "info",
    "pack_e2m1",
    "pack_nibbles",
    "quantize",
    "scaled_dot",
    "unpack_e2m1",
    "unpack_nibbles",
]
