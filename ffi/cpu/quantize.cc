// The handler of jaxlowbit_quantize_v1 on the CPU: checks, choice of the kernels, call.
#include <cmath>
#include <cstdint>
#include <string>

#include "ffi/common/check.h"
#include "ffi/common/enums.h"
#include "ffi/cpu/isa.h"
#include "ffi/cpu/parallel.h"
#include "ffi/cpu/quantize_kernels.h"
#include "ffi/cpu/quantize_run.h"
#include "xla/ffi/api/ffi.h"

namespace jaxlowbit::cpu {

struct QuantizeConfig {
  int32_t element, scale_kind, block_r, block_c, scale_rounding, stochastic, given, tier;
  float amax_ub;
};

}  // namespace jaxlowbit::cpu

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxlowbit::cpu::QuantizeConfig,
                                      xla::ffi::StructMember<int32_t>("element"),
                                      xla::ffi::StructMember<int32_t>("scale_kind"),
                                      xla::ffi::StructMember<int32_t>("block_r"),
                                      xla::ffi::StructMember<int32_t>("block_c"),
                                      xla::ffi::StructMember<int32_t>("scale_rounding"),
                                      xla::ffi::StructMember<int32_t>("stochastic"),
                                      xla::ffi::StructMember<int32_t>("given"),
                                      xla::ffi::StructMember<int32_t>("tier"),
                                      xla::ffi::StructMember<float>("amax_ub"));

namespace jaxlowbit::cpu {
namespace {

constexpr char kOp[] = "quantize";

ffi::Error CheckConfig(const QuantizeConfig& config) {
  auto refuse = [](const char* name, const char* expected, int32_t got) {
    return Refuse(kOp, std::string("config.") + name, expected, std::to_string(got));
  };
  if (config.element < 1 || config.element > 3) return refuse("element", "1 e4m3, 2 e5m2 or 3 e2m1", config.element);
  if (config.scale_kind < 1 || config.scale_kind > 3) {
    return refuse("scale_kind", "1 f32, 2 e8m0 or 3 e4m3", config.scale_kind);
  }
  if (config.block_r < 1) return refuse("block_r", "at least 1", config.block_r);
  if (config.block_c < 1) return refuse("block_c", "at least 1", config.block_c);
  if (config.stochastic != 0 && config.stochastic != 1) return refuse("stochastic", "0 or 1", config.stochastic);
  if (config.given != 0 && config.given != 1) return refuse("given", "0 or 1", config.given);
  if (!(config.amax_ub > 0)) {
    return Refuse(kOp, "config.amax_ub", "above 0 (infinity: no bound)", std::to_string(config.amax_ub));
  }
  if (config.given) return ffi::Error::Success();  // nothing is rounded to a scale
  switch (static_cast<ScaleKind>(config.scale_kind)) {
    case ScaleKind::kF32:
      if (config.scale_rounding == 0 || config.scale_rounding == 5) break;
      return refuse("scale_rounding", "0 none or 5 pow2 for f32 scales", config.scale_rounding);
    case ScaleKind::kE8m0:
      if (config.scale_rounding >= 1 && config.scale_rounding <= 4) break;
      return refuse("scale_rounding", "1 rceil, 2 floor, 3 ceil or 4 even for e8m0 scales", config.scale_rounding);
    default:
      if (config.scale_rounding == 0) break;
      return refuse("scale_rounding", "0 none for e4m3 scales", config.scale_rounding);
  }
  return ffi::Error::Success();
}

ffi::Error CheckScaleType(const char* name, ffi::AnyBuffer buffer, ScaleKind kind) {
  switch (kind) {
    case ScaleKind::kF32: return CheckType(kOp, name, buffer, {ffi::F32});
    case ScaleKind::kE8m0: return CheckType(kOp, name, buffer, {ffi::U8, ffi::F8E8M0FNU});
    default: return CheckType(kOp, name, buffer, {ffi::F8E4M3FN});
  }
}

// The kernels of a tier, or null where this machine does not run it. AMX has nothing for a quantizer.
const QuantizeKernels* KernelsOf(int32_t tier) {
  if (tier < 0 || tier > static_cast<int32_t>(Tier::kAmx)) return nullptr;
  Tier wanted = static_cast<Tier>(tier);
  if (wanted == Tier::kAuto) wanted = BestTier();
  if (wanted > BestTier()) return nullptr;
#if defined(__x86_64__)
  if (wanted >= Tier::kAvx512) return &QuantizeKernelsAvx512();
  if (wanted == Tier::kAvx2) return &QuantizeKernelsAvx2();
#endif
  return &QuantizeKernelsPortable();
}

ffi::Error Quantize(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer given_scale, ffi::AnyBuffer global_scale,
                    ffi::AnyBuffer rng, ffi::Result<ffi::AnyBuffer> codes_out, ffi::Result<ffi::AnyBuffer> scale_out,
                    QuantizeConfig config) {
  ffi::AnyBuffer codes = *codes_out, scale = *scale_out;
  JAXLOWBIT_RETURN_IF_ERROR(CheckConfig(config));
  const Element element = static_cast<Element>(config.element);
  const ScaleKind kind = static_cast<ScaleKind>(config.scale_kind);

  JAXLOWBIT_RETURN_IF_ERROR(CheckRank(kOp, "x", x, 3));
  JAXLOWBIT_RETURN_IF_ERROR(CheckType(kOp, "x", x, {ffi::BF16, ffi::F16, ffi::F32}));
  const int64_t batch = x.dimensions()[0], rows = x.dimensions()[1], columns = x.dimensions()[2];
  const int64_t grid_rows = (rows + config.block_r - 1) / config.block_r;
  const int64_t grid_columns = (columns + config.block_c - 1) / config.block_c;

  if (element == Element::kE2m1) {
    JAXLOWBIT_RETURN_IF_ERROR(CheckType(kOp, "codes", codes, {ffi::U8}));
    if (columns % 2) return Refuse(kOp, "x", "an even last dimension for packed e2m1 codes", Describe(x));
    JAXLOWBIT_RETURN_IF_ERROR(CheckShape(kOp, "codes", codes, {batch, rows, columns / 2}));
  } else {
    const ffi::DataType wanted = element == Element::kE4m3 ? ffi::F8E4M3FN : ffi::F8E5M2;
    JAXLOWBIT_RETURN_IF_ERROR(CheckType(kOp, "codes", codes, {wanted}));
    JAXLOWBIT_RETURN_IF_ERROR(CheckShape(kOp, "codes", codes, {batch, rows, columns}));
  }
  JAXLOWBIT_RETURN_IF_ERROR(CheckScaleType("scale", scale, kind));
  JAXLOWBIT_RETURN_IF_ERROR(CheckShape(kOp, "scale", scale, {batch, grid_rows, grid_columns}));
  if (config.given) {
    JAXLOWBIT_RETURN_IF_ERROR(CheckScaleType("given_scale", given_scale, kind));
    JAXLOWBIT_RETURN_IF_ERROR(CheckShape(kOp, "given_scale", given_scale, {batch, grid_rows, grid_columns}));
  } else {
    JAXLOWBIT_RETURN_IF_ERROR(CheckShape(kOp, "given_scale (scales are computed)", given_scale, {0, 0, 0}));
  }
  JAXLOWBIT_RETURN_IF_ERROR(CheckRank(kOp, "global_scale", global_scale, 2));
  JAXLOWBIT_RETURN_IF_ERROR(CheckType(kOp, "global_scale", global_scale, {ffi::F32}));
  const int64_t globals = global_scale.dimensions()[1];
  if (globals != 0) {
    JAXLOWBIT_RETURN_IF_ERROR(CheckShape(kOp, "global_scale", global_scale, {batch, 1}));
    if (kind != ScaleKind::kE4m3) {
      return Refuse(kOp, "global_scale", "none: only e4m3 scales have a second level", Describe(global_scale));
    }
  }
  JAXLOWBIT_RETURN_IF_ERROR(CheckType(kOp, "rng", rng, {ffi::U32}));
  JAXLOWBIT_RETURN_IF_ERROR(CheckShape(kOp, "rng", rng, {config.stochastic ? 4 : 0}));

  const QuantizeKernels* kernels = KernelsOf(config.tier);
  if (kernels == nullptr) {
    return Refuse(kOp, "config.tier",
                  "0 auto, 1 portable, 2 avx2, 3 avx512 or 4 amx, and at most " +
                      std::to_string(static_cast<int>(BestTier())) + ", the best of this machine",
                  std::to_string(config.tier));
  }
  if (x.element_count() == 0) return ffi::Error::Success();

  QuantizeProblem problem = {};
  problem.batch = batch, problem.rows = rows, problem.columns = columns;
  problem.block_rows = config.block_r, problem.block_columns = config.block_c;
  problem.input = x.element_type() == ffi::F32    ? Input::kF32
                  : x.element_type() == ffi::BF16 ? Input::kBf16
                                                  : Input::kF16;
  problem.element = element;
  problem.rule = {LimitsOf(element), kind, static_cast<ScaleRounding>(config.scale_rounding), config.amax_ub,
                  config.given != 0};
  problem.stochastic = config.stochastic != 0;
  if (problem.stochastic) {
    const uint32_t* words = static_cast<const uint32_t*>(rng.untyped_data());
    problem.key[0] = words[0], problem.key[1] = words[1];
    problem.offset = (static_cast<uint64_t>(words[3]) << 32) | words[2];
  }
  problem.x = x.untyped_data();
  problem.given_scale = given_scale.untyped_data();
  problem.global_scale = globals ? static_cast<const float*>(global_scale.untyped_data()) : nullptr;
  problem.codes = static_cast<uint8_t*>(codes.untyped_data());
  problem.scale = scale.untyped_data();
  PoolExecutor<ffi::ThreadPool> executor(pool);
  RunQuantize(problem, *kernels, executor);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxlowbit::cpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitQuantizeCpu, jaxlowbit::cpu::Quantize,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()  // given_scale
                                  .Arg<xla::ffi::AnyBuffer>()  // global_scale
                                  .Arg<xla::ffi::AnyBuffer>()  // rng
                                  .Ret<xla::ffi::AnyBuffer>()  // codes
                                  .Ret<xla::ffi::AnyBuffer>()  // scale
                                  .Attr<jaxlowbit::cpu::QuantizeConfig>("config"));
