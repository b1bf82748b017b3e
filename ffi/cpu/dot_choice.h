// From the buffers of a call to problems, and which kernel serves which problem: the one place that knows.
#ifndef JAXLOWBIT_FFI_CPU_DOT_CHOICE_H_
#define JAXLOWBIT_FFI_CPU_DOT_CHOICE_H_

#include <vector>

#include "ffi/cpu/dot.h"
#include "ffi/cpu/isa.h"

namespace jaxlowbit {

// The op's "config" attribute. A block that spans the whole extent is given as the extent, at least 1.
struct DotConfig {
  int32_t lhs_element, lhs_scale_kind, lhs_block_m, lhs_block_k;
  int32_t rhs_element, rhs_scale_kind, rhs_block_n, rhs_block_k;
  int32_t transposed, tier;
};

// A call's buffers, checked. n and k are the rows and the columns of rhs.
struct DotBuffers {
  int64_t batch = 0, m = 0, n = 0, k = 0;
  const void* lhs = nullptr;
  Plain lhs_type = Plain::kF32;  // of a plain lhs
  const void* lhs_scale = nullptr;
  const void* lhs_global = nullptr;
  int64_t lhs_global_count = 0;
  const void* rhs = nullptr;
  const void* rhs_scale = nullptr;
  const void* rhs_global = nullptr;
  int64_t rhs_global_count = 0;
  const void* bias = nullptr;  // or null
  Plain bias_type = Plain::kF32;
  void* out = nullptr;
  Plain out_type = Plain::kF32;
};

// One problem for each matrix of the batch.
std::vector<DotProblem> MakeDotProblems(const DotConfig& config, const DotBuffers& buffers);

// A kernel, and what it is called in explain().
struct DotKernel {
  const char* name;
  DotFunction* run;
};

// The kernel for a product when instructions up to `tier` may be used (kAuto: all that the processor has).
// Looks at shapes, formats and types, not at data.
DotKernel ChooseDotKernel(Tier tier, const DotProblem& problem);

}  // namespace jaxlowbit

#endif  // JAXLOWBIT_FFI_CPU_DOT_CHOICE_H_
