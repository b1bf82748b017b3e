// The low-bit product as the kernels see it: one matrix of the batch, no XLA types.
//
//   forward      out[m, n] = sum_k lhs[m, k] * rhs[n, k] + bias[n]
//   transposed   out[m, k] = sum_n lhs[m, n] * rhs[n, k]
//
// Both are a sum over `contraction` for each of `columns` output columns; the Rhs functions below speak of these
// two axes, so that one kernel serves both forms. A value is code * scale * global.
#ifndef JAXLOWBIT_FFI_CPU_DOT_H_
#define JAXLOWBIT_FFI_CPU_DOT_H_

#include <algorithm>
#include <cstdint>

#include "ffi/common/enums.h"
#include "ffi/cpu/decode.h"
#include "ffi/cpu/parallel.h"

namespace jaxlowbit {

// Storage of plain numbers.
enum class Plain : int32_t { kF32 = 0, kBf16 = 1, kF16 = 2 };

constexpr int64_t PlainBytes(Plain type) { return type == Plain::kF32 ? 4 : 2; }

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

// Row-major (rows, cols) values with their scales, as stored.
struct Operand {
  const uint8_t* data = nullptr;
  Element element = Element::kPlain;
  Plain plain = Plain::kF32;  // meaningful for Element::kPlain
  int64_t rows = 0, cols = 0;

  const uint8_t* scale = nullptr;
  ScaleKind scale_kind = ScaleKind::kNone;
  int64_t block_rows = 1, block_cols = 1;
  int64_t grid_cols = 0;  // blocks in a row of the scale grid

  const float* global = nullptr;
  int64_t global_count = 0;  // 0: none, 1: one for all, else one for every row

  int64_t RowBytes() const {
    if (element == Element::kPlain) return cols * PlainBytes(plain);
    return element == Element::kE2m1 ? cols / 2 : cols;
  }
  const uint8_t* Row(int64_t row) const { return data + row * RowBytes(); }

  float Scale(int64_t block_row, int64_t block_col) const {
    const int64_t index = block_row * grid_cols + block_col;
    switch (scale_kind) {
      case ScaleKind::kF32: return reinterpret_cast<const float*>(scale)[index];
      case ScaleKind::kE8m0: return E8m0Value(scale[index]);
      case ScaleKind::kE4m3: return kE4m3.value[scale[index]];
      default: return 1.0f;
    }
  }
  float Global(int64_t row) const { return global_count == 0 ? 1.0f : global[global_count == 1 ? 0 : row]; }
};

struct DotProblem {
  Operand lhs;  // (m, contraction)
  Operand rhs;  // (columns, contraction), or (contraction, columns) when transposed
  bool transposed = false;
  const uint8_t* bias = nullptr;  // (columns,) or null
  Plain bias_type = Plain::kF32;
  uint8_t* out = nullptr;  // (m, columns)
  Plain out_type = Plain::kF32;

  int64_t m() const { return lhs.rows; }
  int64_t contraction() const { return lhs.cols; }
  int64_t columns() const { return transposed ? rhs.cols : rhs.rows; }

  // Scale blocks along the contraction and along the columns.
  int64_t block_c() const { return transposed ? rhs.block_rows : rhs.block_cols; }
  int64_t block_o() const { return transposed ? rhs.block_cols : rhs.block_rows; }
};

// The end, at most `limit`, of the run of contraction indices from `c` over which no column's scale changes.
inline int64_t RhsSegmentEnd(const DotProblem& p, int64_t c, int64_t limit) {
  int64_t end = std::min(limit, (c / p.block_c() + 1) * p.block_c());
  if (p.transposed && p.rhs.global_count > 1) {
    // Fused weights have one global scale per group of rows, so runs are long.
    const uint32_t first = BitsFromFloat(p.rhs.global[c]);
    for (int64_t i = c + 1; i < end; ++i) {
      if (BitsFromFloat(p.rhs.global[i]) != first) end = i;
    }
  }
  return end;
}

// out[i] = scale * global of column o + i at contraction index c, for i < count; zeros up to `padded`.
inline void RhsScales(const DotProblem& p, int64_t c, int64_t o, int64_t count, int64_t padded, float* out) {
  const int64_t block_c = c / p.block_c();
  int64_t block = o / p.block_o();
  int64_t end = (block + 1) * p.block_o() - o;
  for (int64_t i = 0; i < count; ++block, end += p.block_o()) {
    const float scale = p.transposed ? p.rhs.Scale(block_c, block) : p.rhs.Scale(block, block_c);
    for (const int64_t stop = std::min(count, end); i < stop; ++i) out[i] = scale;
  }
  if (p.rhs.global_count != 0) {
    for (int64_t i = 0; i < count; ++i) out[i] *= p.rhs.Global(p.transposed ? c : o + i);
  }
  for (int64_t i = count; i < padded; ++i) out[i] = 0.0f;
}

// Kernels fill every element of every problem's output. The problems of a call differ in their pointers only.
// Each kernel runs only where the processor has its instructions; those with a "Serves" take what it accepts, the
// others take anything. "Gemv" kernels are for few lhs rows.
using DotFunction = void(const DotProblem* problems, int64_t count, Executor& executor);
using DotServes = bool(const DotProblem& problem);

DotFunction DotPortable;
#if defined(__x86_64__)
DotFunction DotAvx2, DotAvx512, DotAmx;
DotFunction GemvAvx2, GemvAvx512, GemvAvx512Vbmi;
DotServes GemvAvx2Serves, GemvAvx512Serves, GemvAvx512VbmiServes, DotAmxServes;
#endif

}  // namespace jaxlowbit

#endif  // JAXLOWBIT_FFI_CPU_DOT_H_
