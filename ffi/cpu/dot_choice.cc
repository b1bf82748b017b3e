#include "ffi/cpu/dot_choice.h"

#include "ffi/common/export.h"

namespace jaxlowbit {
namespace {

const uint8_t* Advance(const void* data, int64_t bytes) {
  return data == nullptr ? nullptr : static_cast<const uint8_t*>(data) + bytes;
}

// Matrix b of a batch of (rows, cols).
Operand MakeOperand(int32_t element, Plain plain, int64_t b, int64_t rows, int64_t cols, const void* data) {
  Operand operand;
  operand.element = static_cast<Element>(element);
  operand.plain = plain;
  operand.rows = rows;
  operand.cols = cols;
  operand.data = Advance(data, b * rows * operand.RowBytes());
  return operand;
}

void AddScales(Operand& operand, int32_t kind, int64_t b, int64_t block_rows, int64_t block_cols, const void* scale,
               const void* global, int64_t global_count) {
  operand.scale_kind = static_cast<ScaleKind>(kind);
  operand.block_rows = block_rows;
  operand.block_cols = block_cols;
  operand.grid_cols = CeilDiv(operand.cols, block_cols);
  const int64_t count = CeilDiv(operand.rows, block_rows) * operand.grid_cols;
  operand.scale = Advance(scale, b * count * (operand.scale_kind == ScaleKind::kF32 ? 4 : 1));
  operand.global_count = global_count;
  operand.global = reinterpret_cast<const float*>(Advance(global, 4 * b * global_count));
}

}  // namespace

std::vector<DotProblem> MakeDotProblems(const DotConfig& config, const DotBuffers& buffers) {
  const bool transposed = config.transposed == 1;
  std::vector<DotProblem> problems(buffers.batch);
  for (int64_t b = 0; b < buffers.batch; ++b) {
    DotProblem& p = problems[b];
    p.transposed = transposed;
    p.lhs = MakeOperand(config.lhs_element, buffers.lhs_type, b, buffers.m, transposed ? buffers.n : buffers.k,
                        buffers.lhs);
    if (p.lhs.element != Element::kPlain) {
      AddScales(p.lhs, config.lhs_scale_kind, b, config.lhs_block_m, config.lhs_block_k, buffers.lhs_scale,
                buffers.lhs_global, buffers.lhs_global_count);
    }
    p.rhs = MakeOperand(config.rhs_element, Plain::kF32, b, buffers.n, buffers.k, buffers.rhs);
    AddScales(p.rhs, config.rhs_scale_kind, b, config.rhs_block_n, config.rhs_block_k, buffers.rhs_scale,
              buffers.rhs_global, buffers.rhs_global_count);
    p.bias_type = buffers.bias_type;
    p.bias = Advance(buffers.bias, b * buffers.n * PlainBytes(buffers.bias_type));
    p.out_type = buffers.out_type;
    p.out = static_cast<uint8_t*>(buffers.out) + b * p.m() * p.columns() * PlainBytes(buffers.out_type);
  }
  return problems;
}

DotKernel ChooseDotKernel(Tier tier, [[maybe_unused]] const DotProblem& problem) {
  if (tier == Tier::kAuto) tier = BestTier();
#if defined(JAXLOWBIT_HAS_AMX)
  if (tier == Tier::kAmx && DotAmxServes(problem)) return {"amx gemm", DotAmx};
#endif
#if defined(__x86_64__)
  if (tier >= Tier::kAvx512) {
    if (GemvAvx512Serves(problem)) return {"avx512 gemv", GemvAvx512};
    return {"avx512 gemm", DotAvx512};
  }
  if (tier == Tier::kAvx2) {
    if (GemvAvx2Serves(problem)) return {"avx2 gemv", GemvAvx2};
    return {"avx2 gemm", DotAvx2};
  }
#endif
  return {"portable gemm", DotPortable};
}

}  // namespace jaxlowbit

// What explain() says of a call: the name of its kernel. `lhs_type` is a Plain, or 3 for codes.
JAXLOWBIT_EXPORT const char* jaxlowbit_cpu_dot_kernel(const int32_t config[10], int lhs_type, int64_t m, int64_t n,
                                                      int64_t k) {
  using namespace jaxlowbit;
  const DotConfig parsed = {config[0], config[1], config[2], config[3], config[4],
                            config[5], config[6], config[7], config[8], config[9]};
  DotBuffers buffers;
  buffers.batch = 1;
  buffers.m = m;
  buffers.n = n;
  buffers.k = k;
  buffers.lhs_type = static_cast<Plain>(lhs_type == 3 ? 0 : lhs_type);
  return ChooseDotKernel(static_cast<Tier>(parsed.tier), MakeDotProblems(parsed, buffers)[0]).name;
}
