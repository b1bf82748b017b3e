"""The faults of mutations.py: each has to turn one of its tests red."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutant:
    """In ``file``, ``old`` (there exactly once) becomes ``new``; one of ``tests`` has to notice."""

    name: str
    fault: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


DOT_PY, AUTODIFF_PY, DOT_H, PACK_H = (
    "jaxlowbit/ops/dot.py",
    "jaxlowbit/autodiff/dot.py",
    "ffi/cpu/dot.h",
    "ffi/cpu/dot_pack.h",
)
FORWARD = "tests/autodiff/test_dot.py::test_weight_only_against_float64"
GRADIENT = "tests/autodiff/test_dot.py::test_gradient_is_that_of_the_dequantized_layer"
VMAP = "tests/autodiff/test_transforms.py::test_vmap_over_x_equals_the_loop"
KERNEL = "tests/ffi/test_dot_cpu.py::test_scales_blocks_and_types"

MUTANTS = (
    Mutant(
        "xla-scale-index",
        "scale of the next row for rows of the weight, XLA",
        DOT_PY,
        "rows = (start + jnp.arange(size, dtype=jnp.int32)) // block_rows",
        "rows = (start + 1 + jnp.arange(size, dtype=jnp.int32)) // block_rows",
        (f"{FORWARD}[channel-float32-xla]",),
    ),
    Mutant(
        "xla-dx-scale-index",
        "scale of the next K column in the backward product, XLA",
        DOT_PY,
        "columns = (start + jnp.arange(size, dtype=jnp.int32)) // block_k",
        "columns = (start + 1 + jnp.arange(size, dtype=jnp.int32)) // block_k",
        (f"{GRADIENT}[nvfp4-float32-None-xla]",),
    ),
    Mutant(
        "xla-transposed-block",
        "rows and columns of a weight's scale block exchanged, XLA",
        DOT_PY,
        "block_rows, block_k = fmt.kernel_block(problem.n, problem.k)",
        "block_k, block_rows = fmt.kernel_block(problem.n, problem.k)",
        (f"{FORWARD}[explicit-float32-xla]",),
    ),
    Mutant(
        "config-transposed-block",
        "rows and columns of a weight's scale block exchanged in the kernel's attributes",
        "jaxlowbit/ops/_config.py",
        "rhs_block_n=rhs_block[0],\n        rhs_block_k=rhs_block[1],",
        "rhs_block_n=rhs_block[1],\n        rhs_block_k=rhs_block[0],",
        (f"{FORWARD}[explicit-float32-native]",),
    ),
    Mutant(
        "xla-bias",
        "bias dropped, XLA",
        DOT_PY,
        "out = out + operands.bias.astype(jnp.float32)[:, None, :]",
        "out = out + 0 * operands.bias.astype(jnp.float32)[:, None, :]",
        (f"{FORWARD}[tensor-float32-xla]",),
    ),
    Mutant(
        "nibble-order",
        "the first code of a pair in the high nibble",
        "jaxlowbit/codecs.py",
        "return low | high << 4",
        "return high | low << 4",
        ("tests/test_codecs.py::test_the_low_nibble_is_the_even_index",),
    ),
    Mutant(
        "codec-saturation",
        "values past the largest code become NaN or infinity where saturation was asked for",
        "jaxlowbit/_bits.py",
        "if saturate or not (element.has_inf or element.has_nan):",
        "if not (element.has_inf or element.has_nan):",
        ("tests/test_codecs.py::test_encode_codes_midpoints_and_one_ulp_around",),
    ),
    Mutant(
        "rceil-is-floor",
        "E8M0 scales rounded down, so that the largest values of a block saturate",
        "jaxlowbit/_e8m0.py",
        "exponent = exponent + (mantissa > top).astype(np.int32)",
        "exponent = exponent + (mantissa > MANTISSA).astype(np.int32)",
        ("tests/test_e8m0.py::test_rceil_never_saturates_and_is_the_smallest",),
    ),
    Mutant(
        "dx-dtype",
        "gradient of x in the dtype of the output",
        AUTODIFF_PY,
        "return total.astype(spec.lhs_dtype)",
        "return total.astype(spec.out_dtype)",
        ("tests/autodiff/test_dot.py::test_cotangents_have_the_primals_dtype",),
    ),
    Mutant(
        "dbias-dtype",
        "gradient of the bias in float32, whatever the bias is",
        AUTODIFF_PY,
        "axis=0).astype(bias_like.dtype)",
        "axis=0)",
        ("tests/autodiff/test_dot.py::test_bias_gradient_dtype",),
    ),
    Mutant(
        "dbias-promotion",
        "gradient of the bias summed and rounded in the dtype of the cotangent",
        AUTODIFF_PY,
        "jnp.sum(g.astype(jnp.float32), axis=0)",
        "jnp.sum(g, axis=0)",
        (f"{GRADIENT}[tensor-bfloat16-None-xla]",),
    ),
    Mutant(
        "dx-promotion",
        "partial gradients of a fused weight rounded to the dtype of x before they are added",
        AUTODIFF_PY,
        'out_dtype = spec.lhs_dtype if len(pieces) == 1 else "float32"',
        "out_dtype = spec.lhs_dtype",
        ("tests/autodiff/test_dot.py::test_partial_gradients_are_added_in_float32",),
    ),
    Mutant(
        "psum-promotion",
        "partial products over a sharded K rounded to the output's dtype before the psum",
        "jaxlowbit/sharding.py",
        'call(x, act_scale, weight, None, "float32")',
        "call(x, act_scale, weight, None, out_dtype)",
        ("tests/test_sharding.py::test_partial_products_are_added_in_float32",),
    ),
    Mutant(
        "align-vma",
        "operands not aligned over mesh axes: gradients of replicated operands miss a psum",
        AUTODIFF_PY,
        "lhs, act_scale, weight, bias = sharding.align_vma((lhs, act_scale, weight, bias))",
        "lhs, act_scale, weight, bias = (lhs, act_scale, weight, bias)",
        ("tests/test_sharding.py::test_gradients_inside_shard_map[N-128x128-native-auto]",),
    ),
    Mutant(
        "x-is-residual",
        "activations held for a backward pass that does not need them",
        AUTODIFF_PY,
        "jnp.zeros((0,), bias.dtype))\n\n\n"
        "def _dot_bwd(spec: LayerSpec, residuals: tuple[Any, ...], g: Array) -> tuple[Any, ...]:\n"
        "    weight, frozen_lhs, bias_like = residuals\n",
        "jnp.zeros((0,), bias.dtype), lhs)\n\n\n"
        "def _dot_bwd(spec: LayerSpec, residuals: tuple[Any, ...], g: Array) -> tuple[Any, ...]:\n"
        "    weight, frozen_lhs, bias_like, _ = residuals\n",
        ("tests/autodiff/test_dot.py::test_residuals_are_the_packed_weight",),
    ),
    Mutant(
        "k-shard-blocks",
        "shards that cut a scale block accepted",
        "jaxlowbit/sharding.py",
        "if parts > 1 and (extent % parts or (extent // parts) % step):",
        "if parts > 1 and extent % parts:",
        ("tests/test_sharding.py::test_explicit_layouts_that_are_refused[K blocks cut]",),
    ),
    Mutant(
        "vmap-act-scale",
        "vmap gives every example the activation scale of the first",
        DOT_PY,
        'rows_scale(wide["lhs_scale"], block_rows, m)',
        'rows_scale(jnp.broadcast_to(wide["lhs_scale"][:1], wide["lhs_scale"].shape), block_rows, m)',
        (f"{VMAP}[tensor-'static'-native]",),
    ),
    Mutant(
        "vmap-order",
        "outputs of a batched product given to the wrong example by a second vmap",
        DOT_PY,
        "out = out.reshape(out.shape[0], size, m, out.shape[-1])\n    return jnp.moveaxis(out, 1, 0)",
        "return out.reshape(size, out.shape[0], m, out.shape[-1])",
        ("tests/autodiff/test_transforms.py::test_vmap_over_x_of_vmap_over_weights",),
    ),
    Mutant(
        "e8m0-cotangent",
        "no cotangent for float8_e8m0fnu scales: JAX's zeros of that dtype are NaN",
        AUTODIFF_PY,
        "if q.scale.dtype != jnp.float8_e8m0fnu:",
        "if q.scale is not None:",
        ("tests/autodiff/test_dot.py::test_e8m0_scales_get_byte_zero_not_nan",),
    ),
    Mutant(
        "kernel-lhs-scale-index",
        "scale of the block before along K, left operand",
        DOT_H,
        "const int64_t index = block_row * grid_cols + block_col;",
        "const int64_t index = block_row * grid_cols + (block_col > 0 ? block_col - 1 : 0);",
        (f"{KERNEL}[exact-F32-E4M3-PORTABLE]",),
    ),
    Mutant(
        "kernel-rhs-scale-index",
        "scale of the block before along K, right operand",
        DOT_H,
        ": block_ * stride + block_c;",
        ": block_ * stride + (block_c > 0 ? block_c - 1 : 0);",
        (f"{KERNEL}[exact-F32-E4M3-PORTABLE]",),
    ),
    Mutant(
        "kernel-global-scale",
        "global scale of the right operand dropped",
        DOT_H,
        "if (p_.rhs.global_count != 0) {",
        "if (p_.rhs.global_count < 0) {",
        (f"{KERNEL}[exact-F32-E4M3-PORTABLE]",),
    ),
    Mutant(
        "kernel-nibbles",
        "even and odd codes of a packed weight exchanged",
        PACK_H,
        "even[i] = byte & 15;\n      even[kLine + i] = byte >> 4;",
        "even[i] = byte >> 4;\n      even[kLine + i] = byte & 15;",
        (f"{KERNEL}[exact-F32-E2M1-PORTABLE]",),
    ),
    Mutant(
        "kernel-bias",
        "bias dropped in the kernel",
        PACK_H,
        "if (p.bias != nullptr) {",
        "if (p.bias != nullptr && count < 0) {",
        (f"{KERNEL}[exact-F32-E4M3-PORTABLE]",),
    ),
    Mutant(
        "quantizer-saturation",
        "codes past the largest one where a given scale is too small",
        "ffi/cpu/quantize_rows.h",
        "Ints bounded = Min(magnitude, Splat(Element::max_bits));\n  Ints anchor",
        "Ints bounded = magnitude;\n  Ints anchor",
        ("tests/ffi/test_quantize_cpu.py::test_values_and_midpoints",),
    ),
    Mutant(
        "quantizer-nan",
        "a NaN does not reach the scale of its block",
        "ffi/cpu/quantize_scale.h",
        "return bits < kMinNormalBits ? 0 : bits;",
        "return bits < kMinNormalBits || bits > kInfinityBits ? 0 : bits;",
        ("tests/ffi/test_quantize_cpu.py::test_inf_and_nan_spoil_their_block_alone[E2M1]",),
    ),
)
