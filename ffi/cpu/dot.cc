// Handler of jaxlowbit_dot_v1 on the CPU: checks the buffers, describes the problems, chooses the kernel.
#include "ffi/cpu/dot.h"

#include <string>
#include <vector>

#include "ffi/common/check.h"
#include "ffi/common/export.h"
#include "ffi/cpu/dot_choice.h"
#include "xla/ffi/api/ffi.h"

namespace jaxlowbit {
namespace {

constexpr char kOp[] = "dot";

ffi::Error CheckDim(const char* argument, const char* dimension, int64_t expected, ffi::AnyBuffer got, size_t axis) {
  if (got.dimensions()[axis] == expected) return ffi::Error::Success();
  return Refuse(kOp, argument, std::string(dimension) + " = " + std::to_string(expected) + " in dimension " +
                std::to_string(axis), Describe(got));
}

ffi::DataType StorageType(Element element) { return element == Element::kE4m3 ? ffi::F8E4M3FN : ffi::U8; }

Plain PlainOf(ffi::DataType type) {
  return type == ffi::F32 ? Plain::kF32 : type == ffi::BF16 ? Plain::kBf16 : Plain::kF16;
}

// Values per stored column.
int64_t Packing(Element element) { return element == Element::kE2m1 ? 2 : 1; }

ffi::Error CheckScale(const char* argument, ScaleKind kind, ffi::AnyBuffer scale, int64_t batch, int64_t rows,
                      int64_t cols, int64_t block_rows, int64_t block_cols) {
  switch (kind) {
    case ScaleKind::kF32: JAXLOWBIT_RETURN_IF_ERROR(CheckType(kOp, argument, scale, {ffi::F32})); break;
    case ScaleKind::kE8m0: JAXLOWBIT_RETURN_IF_ERROR(CheckType(kOp, argument, scale, {ffi::U8, ffi::F8E8M0FNU})); break;
    case ScaleKind::kE4m3: JAXLOWBIT_RETURN_IF_ERROR(CheckType(kOp, argument, scale, {ffi::F8E4M3FN})); break;
    default: return Refuse(kOp, argument, "scale kind 1 (f32), 2 (e8m0) or 3 (e4m3)",
                           std::to_string(static_cast<int32_t>(kind)));
  }
  if (block_rows < 1 || block_cols < 1) {
    return Refuse(kOp, argument, "a block of at least 1 x 1",
                  std::to_string(block_rows) + " x " + std::to_string(block_cols));
  }
  return CheckShape(kOp, argument, scale, {batch, CeilDiv(rows, block_rows), CeilDiv(cols, block_cols)});
}

// (B, 0), (B, 1) or (B, rows)
ffi::Error CheckGlobal(const char* argument, ffi::AnyBuffer global, int64_t batch, int64_t rows) {
  JAXLOWBIT_RETURN_IF_ERROR(CheckType(kOp, argument, global, {ffi::F32}));
  JAXLOWBIT_RETURN_IF_ERROR(CheckRank(kOp, argument, global, 2));
  JAXLOWBIT_RETURN_IF_ERROR(CheckDim(argument, "batch", batch, global, 0));
  const int64_t count = global.dimensions()[1];
  if (count == 0 || count == 1 || count == rows) return ffi::Error::Success();
  return Refuse(kOp, argument, "0, 1 or " + std::to_string(rows) + " values per matrix", Describe(global));
}

ffi::Error CheckConfig(const DotConfig& config) {
  const auto lhs = static_cast<Element>(config.lhs_element), rhs = static_cast<Element>(config.rhs_element);
  if (lhs != Element::kPlain && lhs != Element::kE4m3 && lhs != Element::kE2m1) {
    return Refuse(kOp, "lhs_element", "0 (plain), 1 (e4m3) or 3 (e2m1)", std::to_string(config.lhs_element));
  }
  if (rhs != Element::kE4m3 && rhs != Element::kE2m1) {
    return Refuse(kOp, "rhs_element", "1 (e4m3) or 3 (e2m1)", std::to_string(config.rhs_element));
  }
  if (config.transposed != 0 && config.transposed != 1) {
    return Refuse(kOp, "transposed", "0 or 1", std::to_string(config.transposed));
  }
  if (config.transposed == 1 && lhs != Element::kPlain) {
    return Refuse(kOp, "lhs_element", "0 (plain) in the transposed form", std::to_string(config.lhs_element));
  }
  if (config.tier < 0 || config.tier > static_cast<int32_t>(BestTier())) {
    return Refuse(kOp, "tier", "0 (auto) or a tier that this processor runs, at most " +
                  std::to_string(static_cast<int32_t>(BestTier())), std::to_string(config.tier));
  }
  return ffi::Error::Success();
}

ffi::Error CheckBuffers(const DotConfig& config, ffi::AnyBuffer lhs, ffi::AnyBuffer lhs_scale,
                        ffi::AnyBuffer lhs_global, ffi::AnyBuffer rhs, ffi::AnyBuffer rhs_scale,
                        ffi::AnyBuffer rhs_global, ffi::AnyBuffer bias, ffi::AnyBuffer out, DotBuffers& buffers) {
  const auto lhs_element = static_cast<Element>(config.lhs_element);
  const auto rhs_element = static_cast<Element>(config.rhs_element);
  JAXLOWBIT_RETURN_IF_ERROR(CheckRank(kOp, "lhs", lhs, 3));
  JAXLOWBIT_RETURN_IF_ERROR(CheckRank(kOp, "rhs", rhs, 3));
  JAXLOWBIT_RETURN_IF_ERROR(CheckRank(kOp, "out", out, 3));
  if (lhs_element == Element::kPlain) {
    JAXLOWBIT_RETURN_IF_ERROR(CheckType(kOp, "lhs", lhs, {ffi::BF16, ffi::F16, ffi::F32}));
  } else {
    JAXLOWBIT_RETURN_IF_ERROR(CheckType(kOp, "lhs", lhs, {StorageType(lhs_element)}));
  }
  JAXLOWBIT_RETURN_IF_ERROR(CheckType(kOp, "rhs", rhs, {StorageType(rhs_element)}));
  JAXLOWBIT_RETURN_IF_ERROR(CheckType(kOp, "out", out, {ffi::BF16, ffi::F16, ffi::F32}));

  const int64_t batch = rhs.dimensions()[0], n = rhs.dimensions()[1];
  const int64_t k = rhs.dimensions()[2] * Packing(rhs_element), m = lhs.dimensions()[1];
  buffers.batch = batch;
  buffers.m = m;
  buffers.n = n;
  buffers.k = k;
  const bool transposed = config.transposed == 1;
  JAXLOWBIT_RETURN_IF_ERROR(CheckDim("lhs", "batch", batch, lhs, 0));
  const int64_t contraction = transposed ? n : k;
  if (lhs.dimensions()[2] * Packing(lhs_element) != contraction) {
    return Refuse(kOp, "lhs", "contraction length " + std::to_string(contraction) + ", as in rhs", Describe(lhs));
  }
  JAXLOWBIT_RETURN_IF_ERROR(CheckShape(kOp, "out", out, {batch, m, transposed ? k : n}));

  if (lhs_element != Element::kPlain) {
    JAXLOWBIT_RETURN_IF_ERROR(CheckScale("lhs_scale", static_cast<ScaleKind>(config.lhs_scale_kind), lhs_scale, batch,
                                         m, k, config.lhs_block_m, config.lhs_block_k));
    JAXLOWBIT_RETURN_IF_ERROR(CheckGlobal("lhs_global", lhs_global, batch, m));
  } else if (config.lhs_scale_kind != 0 || lhs_scale.element_count() != 0 || lhs_global.element_count() != 0 ||
             lhs_global.dimensions().size() != 2) {
    return Refuse(kOp, "lhs_scale and lhs_global", "none for a plain lhs", Describe(lhs_scale) + " and " +
                  Describe(lhs_global) + ", kind " + std::to_string(config.lhs_scale_kind));
  }
  JAXLOWBIT_RETURN_IF_ERROR(CheckScale("rhs_scale", static_cast<ScaleKind>(config.rhs_scale_kind), rhs_scale, batch,
                                       n, k, config.rhs_block_n, config.rhs_block_k));
  JAXLOWBIT_RETURN_IF_ERROR(CheckGlobal("rhs_global", rhs_global, batch, n));

  JAXLOWBIT_RETURN_IF_ERROR(CheckType(kOp, "bias", bias, {ffi::BF16, ffi::F16, ffi::F32}));
  JAXLOWBIT_RETURN_IF_ERROR(CheckRank(kOp, "bias", bias, 2));
  if (bias.element_count() == 0) return ffi::Error::Success();
  if (transposed) return Refuse(kOp, "bias", "none in the transposed form", Describe(bias));
  return CheckShape(kOp, "bias", bias, {batch, n});
}

ffi::Error DotImpl(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer lhs_scale, ffi::AnyBuffer lhs_global,
                   ffi::AnyBuffer rhs, ffi::AnyBuffer rhs_scale, ffi::AnyBuffer rhs_global, ffi::AnyBuffer bias,
                   ffi::Result<ffi::AnyBuffer> out, DotConfig config) {
  DotBuffers buffers;
  JAXLOWBIT_RETURN_IF_ERROR(CheckConfig(config));
  JAXLOWBIT_RETURN_IF_ERROR(
      CheckBuffers(config, lhs, lhs_scale, lhs_global, rhs, rhs_scale, rhs_global, bias, *out, buffers));
  if (out->element_count() == 0) return ffi::Error::Success();

  buffers.lhs = lhs.untyped_data();
  buffers.lhs_type = PlainOf(lhs.element_type());
  buffers.lhs_scale = lhs_scale.untyped_data();
  buffers.lhs_global = lhs_global.untyped_data();
  buffers.lhs_global_count = lhs_global.dimensions()[1];
  buffers.rhs = rhs.untyped_data();
  buffers.rhs_scale = rhs_scale.untyped_data();
  buffers.rhs_global = rhs_global.untyped_data();
  buffers.rhs_global_count = rhs_global.dimensions()[1];
  buffers.bias = bias.element_count() == 0 ? nullptr : bias.untyped_data();
  buffers.bias_type = PlainOf(bias.element_type());
  buffers.out = out->untyped_data();
  buffers.out_type = PlainOf(out->element_type());

  const std::vector<DotProblem> problems = MakeDotProblems(config, buffers);
  PoolExecutor<ffi::ThreadPool> executor(pool);
  ChooseDotKernel(static_cast<Tier>(config.tier), problems[0]).run(problems.data(), buffers.batch, executor);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxlowbit

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jaxlowbit::DotConfig, StructMember<int32_t>("lhs_element"), StructMember<int32_t>("lhs_scale_kind"),
    StructMember<int32_t>("lhs_block_m"), StructMember<int32_t>("lhs_block_k"), StructMember<int32_t>("rhs_element"),
    StructMember<int32_t>("rhs_scale_kind"), StructMember<int32_t>("rhs_block_n"),
    StructMember<int32_t>("rhs_block_k"), StructMember<int32_t>("transposed"), StructMember<int32_t>("tier"));

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitDotCpu, jaxlowbit::DotImpl,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()   // lhs
                                  .Arg<xla::ffi::AnyBuffer>()   // lhs_scale
                                  .Arg<xla::ffi::AnyBuffer>()   // lhs_global
                                  .Arg<xla::ffi::AnyBuffer>()   // rhs
                                  .Arg<xla::ffi::AnyBuffer>()   // rhs_scale
                                  .Arg<xla::ffi::AnyBuffer>()   // rhs_global
                                  .Arg<xla::ffi::AnyBuffer>()   // bias
                                  .Ret<xla::ffi::AnyBuffer>()   // out
                                  .Attr<jaxlowbit::DotConfig>("config"));
#pragma GCC visibility pop
