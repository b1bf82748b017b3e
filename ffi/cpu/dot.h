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
  // The block of contraction index c. Blocks of one are common (transposed NVFP4 and MX), and a division is slow.
  int64_t BlockOfC(int64_t c) const { return block_c() == 1 ? c : c / block_c(); }
};

// The end, at most `limit`, of the run of contraction indices from `c` over which no column's scale changes.
inline int64_t RhsSegmentEnd(const DotProblem& p, int64_t c, int64_t limit) {
  int64_t end = std::min(limit, (p.BlockOfC(c) + 1) * p.block_c());
  if (p.transposed && p.rhs.global_count > 1) {
    // Fused weights have one global scale per group of rows, so runs are long.
    const uint32_t first = BitsFromFloat(p.rhs.global[c]);
    for (int64_t i = c + 1; i < end; ++i) {
      if (BitsFromFloat(p.rhs.global[i]) != first) end = i;
    }
  }
  return end;
}

// Scales of the columns o to o + count, for one contraction index after another.
class ColumnScales {
 public:
  ColumnScales(const DotProblem& p, int64_t o, int64_t count)
      : p_(p), o_(o), count_(count), block_(o / p.block_o()), first_end_((block_ + 1) * p.block_o() - o) {}

  // out[i] = scale * global of column o + i at contraction index c; zeros from count up to `padded`. Inlined always, so
  // that each tier compiles it for its own instructions: with blocks of one it is called at every index.
  __attribute__((always_inline)) void At(int64_t c, int64_t padded, float* out) const {
    const int64_t block_c = p_.BlockOfC(c);
    const int64_t stride = p_.transposed ? 1 : p_.rhs.grid_cols;
    const int64_t at = p_.transposed ? block_c * p_.rhs.grid_cols + block_ : block_ * stride + block_c;
    const uint8_t* bytes = p_.rhs.scale;
    switch (p_.rhs.scale_kind) {
      case ScaleKind::kF32:
        Spread([&](int64_t i) { return reinterpret_cast<const float*>(bytes)[at + i * stride]; }, out);
        break;
      case ScaleKind::kE8m0: Spread([&](int64_t i) { return E8m0Value(bytes[at + i * stride]); }, out); break;
      case ScaleKind::kE4m3: Spread([&](int64_t i) { return kE4m3.value[bytes[at + i * stride]]; }, out); break;
      default: Spread([](int64_t) { return 1.0f; }, out);
    }
    if (p_.rhs.global_count != 0) {
      for (int64_t i = 0; i < count_; ++i) out[i] *= p_.rhs.Global(p_.transposed ? c : o_ + i);
    }
    for (int64_t i = count_; i < padded; ++i) out[i] = 0.0f;
  }

 private:
  // value(i) is the scale of the i-th block of columns.
  template <typename Value>
  void Spread(Value value, float* out) const {
    if (p_.block_o() == 1) {
      for (int64_t i = 0; i < count_; ++i) out[i] = value(i);
      return;
    }
    int64_t end = first_end_;
    for (int64_t i = 0, block = 0; i < count_; ++block, end += p_.block_o()) {
      const float scale = value(block);
      for (const int64_t stop = std::min(count_, end); i < stop; ++i) out[i] = scale;
    }
  }

  const DotProblem& p_;
  const int64_t o_, count_;
  const int64_t block_, first_end_;  // of the first column: its block, and the offset where that ends
};

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
