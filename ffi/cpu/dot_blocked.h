// Cache-blocked product in f32, shared by the portable, AVX2 and AVX-512 tiers.
//
// A task owns a rectangle of the output. Per kDepth of the contraction it decodes the codes of its columns once
// into f32 panels, scale included, that stay in the second-level cache, converts a strip of lhs rows into the
// first-level cache, and multiplies each strip with all panels. An output is the work of one task and a chain
// of additions in ascending order of the contraction, so it does not depend on the number of threads.
//
// To be included after the tier's "#pragma GCC target". The unnamed namespace is deliberate: each tier compiles
// these functions for its own instruction set, and the linker must not merge them.
#ifndef JAXLOWBIT_FFI_CPU_DOT_BLOCKED_H_
#define JAXLOWBIT_FFI_CPU_DOT_BLOCKED_H_

#include "ffi/cpu/dot.h"
#include "ffi/cpu/dot_pack.h"
#include "ffi/cpu/dot_plan.h"
#include "ffi/cpu/scratch.h"

namespace jaxlowbit {
namespace {

constexpr int64_t kStripStride = kDepth + 16;  // keeps the rows of a strip out of each other's cache sets
constexpr int64_t kMostColumns = 256;    // a task's panels: 256 KiB
constexpr int64_t kMostRows = 512;       // a task's accumulators: 512 KiB

// acc[i][j] (+)= sum over depth of strip[i][d] * panel[d][j], for kRows rows and one panel of columns.
template <typename T, int kRows>
void MicroKernel(int64_t depth, const float* strip, const float* panel, float* acc, int64_t acc_stride,
                 bool accumulate) {
  using V = typename T::V;
  constexpr int kVectors = T::kPanel / T::kLanes;
  V sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      sum[i][j] = accumulate ? Load<V>(acc + i * acc_stride + j * T::kLanes) : V{};
    }
  }
  for (int64_t d = 0; d < depth; ++d) {
    V column[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) column[j] = Load<V>(panel + d * T::kPanel + j * T::kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const float x = strip[i * kStripStride + d];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[i][j] += x * column[j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) Store(acc + i * acc_stride + j * T::kLanes, sum[i][j]);
  }
}

using MicroKernelFunction = void (*)(int64_t, const float*, const float*, float*, int64_t, bool);

// The kernel for `rows` rows, at most kRows. A short last strip must not compute rows that are not there: with
// few lhs rows that would be most of the work.
template <typename T, int kRows = T::kRows>
MicroKernelFunction MicroKernelFor(int64_t rows) {
  if constexpr (kRows == 1) {
    return MicroKernel<T, 1>;
  } else {
    return rows == kRows ? MicroKernel<T, kRows> : MicroKernelFor<T, kRows - 1>(rows);
  }
}

template <typename T>
void BlockTask(void* context, int64_t task) {
  const DotPlan& plan = *static_cast<const DotPlan*>(context);
  const DotRectangle rectangle = plan.Rectangle(task);
  const DotProblem& p = plan.problem(rectangle);
  const int64_t m0 = rectangle.m0, rows = rectangle.rows, o0 = rectangle.o0, columns = rectangle.columns;
  const int64_t stride = RoundUp(columns, T::kPanel);

  float* panels = static_cast<float*>(TaskScratch().Reserve(
      sizeof(float) * (stride * kDepth + T::kRows * kStripStride + rows * stride)));
  float* strip = panels + stride * kDepth;
  float* acc = strip + T::kRows * kStripStride;
  if (p.contraction() == 0) std::fill(acc, acc + rows * stride, 0.0f);

  for (int64_t c0 = 0; c0 < p.contraction(); c0 += kDepth) {
    const int64_t depth = std::min(kDepth, p.contraction() - c0);
    for (int64_t j = 0; j < columns; j += T::kPanel) {
      PackPanel<T>(p, c0, depth, o0 + j, std::min<int64_t>(T::kPanel, columns - j), panels + j * kDepth);
    }
    for (int64_t i = 0; i < rows; i += T::kRows) {
      const int64_t strip_rows = std::min<int64_t>(T::kRows, rows - i);
      for (int64_t r = 0; r < strip_rows; ++r) {
        LhsValues<T>(p.lhs, m0 + i + r, c0, depth, strip + r * kStripStride);
      }
      const MicroKernelFunction kernel = MicroKernelFor<T>(strip_rows);
      for (int64_t j = 0; j < columns; j += T::kPanel) {
        kernel(depth, strip, panels + j * kDepth, acc + i * stride + j, stride, c0 > 0);
      }
    }
  }
  for (int64_t i = 0; i < rows; ++i) StoreRow<T>(p, m0 + i, o0, columns, acc + i * stride);
}

template <typename T>
void DotBlocked(const DotProblem* problems, int64_t count, Executor& executor) {
  DotPlan plan(problems, count, 0, problems->m(), executor.threads(), T::kRows, kMostRows, T::kPanel, kMostColumns);
  executor.Run(plan.tasks(), BlockTask<T>, &plan);
}

}  // namespace
}  // namespace jaxlowbit

#endif  // JAXLOWBIT_FFI_CPU_DOT_BLOCKED_H_
