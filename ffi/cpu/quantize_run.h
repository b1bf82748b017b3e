// One quantize call without its XLA buffers: shapes, pointers and rules.
#ifndef JAXLOWBIT_FFI_CPU_QUANTIZE_RUN_H_
#define JAXLOWBIT_FFI_CPU_QUANTIZE_RUN_H_

#include <cstdint>

#include "ffi/cpu/parallel.h"
#include "ffi/cpu/quantize_kernels.h"
#include "ffi/cpu/quantize_scale.h"

namespace jaxlowbit::cpu {

struct QuantizeProblem {
  int64_t batch, rows, columns;  // of x; all at least 1
  int64_t block_rows, block_columns;
  Input input;
  Element element;
  ScaleRule rule;
  bool stochastic;
  uint32_t key[2];
  uint64_t offset;             // counter of the first element
  const void* x;               // (batch, rows, columns)
  const void* given_scale;     // (batch, grid) where rule.given
  const float* global_scale;   // (batch) or null
  uint8_t* codes;              // (batch, rows, columns), nibbles packed
  void* scale;                 // (batch, grid)
};

// Fills codes and scale. Results do not depend on the executor's threads.
void RunQuantize(const QuantizeProblem& problem, const QuantizeKernels& kernels, Executor& executor);

}  // namespace jaxlowbit::cpu

#endif  // JAXLOWBIT_FFI_CPU_QUANTIZE_RUN_H_
