// Reading operands and writing results for the f32 kernels. A tier T gives
//
//   V                            a vector of kLanes floats (GCC's vector extension)
//   kPanel, kRows                columns and rows of its register tile
//   V E4m3(const uint8_t*)       the values of kLanes codes
//   V E2m1(const uint8_t*)       the values of kLanes codes, one to a byte
//   F16ToFloat(in, n, out), FloatToF16(in, n, out)
//
// To be included after the tier's "#pragma GCC target"; see dot_blocked.h for the unnamed namespace.
#ifndef JAXLOWBIT_FFI_CPU_DOT_PACK_H_
#define JAXLOWBIT_FFI_CPU_DOT_PACK_H_

#include "ffi/cpu/dot.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace jaxlowbit {
namespace {

template <typename V>
struct __attribute__((packed, may_alias)) Unaligned {
  V value;
};

template <typename V>
inline __attribute__((always_inline)) V Load(const void* from) {
  return static_cast<const Unaligned<V>*>(from)->value;
}

template <typename V>
inline __attribute__((always_inline)) void Store(void* to, V value) {
  static_cast<Unaligned<V>*>(to)->value = value;
}

constexpr int64_t kDepth = 256;     // contraction of one panel: 32 KiB for each 32 columns
constexpr int64_t kByteTile = 16;
constexpr int64_t kBiasChunk = 64;

// to[j][i] = from[i][j] for 16 x 16 bytes.
inline void TransposeByteTile(const uint8_t* from, int64_t from_stride, uint8_t* to, int64_t to_stride) {
#if defined(__x86_64__)
  // Four rounds of interleaving row i with row i + 8: each moves one bit of the row index into the column index.
  __m128i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * from_stride));
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      b[2 * i] = _mm_unpacklo_epi8(a[i], a[i + 8]);
      b[2 * i + 1] = _mm_unpackhi_epi8(a[i], a[i + 8]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = b[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * to_stride), a[i]);
#else
  for (int64_t i = 0; i < kByteTile; ++i) {
    for (int64_t j = 0; j < kByteTile; ++j) to[j * to_stride + i] = from[i * from_stride + j];
  }
#endif
}

// to[j][i] = from[i][j] for rows x cols bytes; columns of `to` from `rows` up to `padded`, a multiple of 16,
// are zero. Writes whole tiles: `to` has room for cols rounded up to 16 rows.
inline void TransposeBytes(const uint8_t* from, int64_t from_stride, int64_t rows, int64_t cols, uint8_t* to,
                           int64_t padded) {
  for (int64_t i = 0; i < padded; i += kByteTile) {
    for (int64_t j = 0; j < cols; j += kByteTile) {
      const int64_t tile_rows = std::clamp<int64_t>(rows - i, 0, kByteTile);
      const int64_t tile_cols = std::min(cols - j, kByteTile);
      const uint8_t* tile = from + i * from_stride + j;
      if (tile_rows == kByteTile && tile_cols == kByteTile) {
        TransposeByteTile(tile, from_stride, to + j * padded + i, padded);
        continue;
      }
      uint8_t edge[kByteTile * kByteTile] = {};  // reading past the operand's end is not allowed
      for (int64_t r = 0; r < tile_rows; ++r) std::memcpy(edge + r * kByteTile, tile + r * from_stride, tile_cols);
      TransposeByteTile(edge, kByteTile, to + j * padded + i, padded);
    }
  }
}

// Two codes from every byte, the low nibble first.
inline void SplitNibbles(const uint8_t* from, int64_t bytes, uint8_t* to) {
  int64_t i = 0;
#if defined(__x86_64__)
  const __m128i nibble = _mm_set1_epi8(15);
  for (; i + 16 <= bytes; i += 16) {
    const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    const __m128i low = _mm_and_si128(both, nibble), high = _mm_and_si128(_mm_srli_epi16(both, 4), nibble);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i), _mm_unpacklo_epi8(low, high));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i + 16), _mm_unpackhi_epi8(low, high));
  }
  for (; i + 8 <= bytes; i += 8) {
    const __m128i both = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i));
    const __m128i low = _mm_and_si128(both, nibble), high = _mm_and_si128(_mm_srli_epi16(both, 4), nibble);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i), _mm_unpacklo_epi8(low, high));
  }
#endif
  for (; i < bytes; ++i) {
    to[2 * i] = from[i] & 15;
    to[2 * i + 1] = from[i] >> 4;
  }
}

// Codes of kPanel columns at `depth` contraction indices, one to a byte, [contraction][column]; absent columns
// are code 0. Returns where they are: in `stage`, which holds kDepth * kStageLine bytes, or in the operand itself.
template <typename T>
constexpr int64_t kStageLine = RoundUp(T::kPanel, kByteTile);

struct PanelCodes {
  const uint8_t* data;
  int64_t stride;
};

template <typename T>
PanelCodes GatherCodes(const DotProblem& p, int64_t c0, int64_t depth, int64_t o0, int64_t count, uint8_t* stage) {
  constexpr int64_t kPanel = T::kPanel, kLine = kStageLine<T>;
  const int64_t row_bytes = p.rhs.RowBytes();
  const bool fp4 = p.rhs.element == Element::kE2m1;
  if (p.transposed) {
    if (!fp4 && count == kPanel) return {p.rhs.Row(c0) + o0, row_bytes};
    for (int64_t d = 0; d < depth; ++d) {
      const uint8_t* row = p.rhs.Row(c0 + d) + (fp4 ? o0 / 2 : o0);
      uint8_t* line = stage + d * kLine;
      __builtin_prefetch(row + 16 * row_bytes);  // too short a run of each row for the processor to foresee
      if (fp4) {
        SplitNibbles(row, count / 2, line);
      } else {
        std::memcpy(line, row, count);
      }
      std::memset(line + count, 0, kPanel - count);
    }
    return {stage, kLine};
  }
  if (!fp4) {
    TransposeBytes(p.rhs.Row(o0) + c0, row_bytes, count, depth, stage, kLine);
    return {stage, kLine};
  }
  alignas(64) uint8_t bytes[kDepth / 2 * kLine];  // a line of bytes becomes two lines of codes
  TransposeBytes(p.rhs.Row(o0) + c0 / 2, row_bytes, count, depth / 2, bytes, kLine);
  for (int64_t b = 0; b < depth / 2; ++b) {
    const uint8_t* line = bytes + b * kLine;
    uint8_t* even = stage + 2 * b * kLine;
    for (int64_t i = 0; i < kLine; ++i) {
      const uint8_t byte = line[i];
      even[i] = byte & 15;
      even[kLine + i] = byte >> 4;
    }
  }
  return {stage, kLine};
}

// panel[d][j] = value, scale included, of column o0 + j at contraction index c0 + d; zero for j >= count.
template <typename T>
void PackPanel(const DotProblem& p, int64_t c0, int64_t depth, int64_t o0, int64_t count, float* panel) {
  using V = typename T::V;
  constexpr int kVectors = T::kPanel / T::kLanes;
  alignas(64) uint8_t stage[kDepth * kStageLine<T>];
  const PanelCodes codes = GatherCodes<T>(p, c0, depth, o0, count, stage);
  const ColumnScales column_scales(p, o0, count);
  for (int64_t d = 0; d < depth;) {
    const int64_t end = RhsSegmentEnd(p, c0 + d, c0 + depth) - c0;
    alignas(64) float scales[T::kPanel];
    column_scales.At(c0 + d, T::kPanel, scales);
    V scale[kVectors];
    for (int j = 0; j < kVectors; ++j) scale[j] = Load<V>(scales + j * T::kLanes);
    const bool fp4 = p.rhs.element == Element::kE2m1;
    for (; d < end; ++d) {
      const uint8_t* line = codes.data + d * codes.stride;
      float* to = panel + d * T::kPanel;
      for (int j = 0; j < kVectors; ++j) {
        const uint8_t* at = line + j * T::kLanes;
        Store(to + j * T::kLanes, (fp4 ? T::E2m1(at) : T::E4m3(at)) * scale[j]);
      }
    }
  }
}

// The values of `count` codes that follow each other in memory, unscaled. FP4 starts at a whole byte.
template <typename T>
void CodeValues(Element element, const uint8_t* codes, int64_t count, float* out) {
  using V = typename T::V;
  constexpr int64_t kChunk = 64;
  for (int64_t i = 0; i < count; i += kChunk) {
    const int64_t n = std::min(kChunk, count - i);
    alignas(64) uint8_t bytes[kChunk] = {};
    if (element == Element::kE2m1) {
      SplitNibbles(codes + i / 2, n / 2, bytes);
    } else {
      std::memcpy(bytes, codes + i, n);
    }
    alignas(64) float values[kChunk];
    float* to = n == kChunk ? out + i : values;
    for (int64_t j = 0; j < kChunk; j += T::kLanes) {
      const V value = element == Element::kE2m1 ? T::E2m1(bytes + j) : T::E4m3(bytes + j);
      Store(to + j, value);
    }
    if (n != kChunk) std::memcpy(out + i, values, n * sizeof(float));
  }
}

// out[i] = value of lhs (row, c0 + i), scale included. c0 is even.
template <typename T>
void LhsValues(const Operand& lhs, int64_t row, int64_t c0, int64_t count, float* out) {
  const uint8_t* codes = lhs.Row(row);
  if (lhs.element == Element::kPlain) {
    const uint8_t* from = codes + c0 * PlainBytes(lhs.plain);
    switch (lhs.plain) {
      case Plain::kF32: std::memcpy(out, from, count * sizeof(float)); break;
      case Plain::kF16: T::F16ToFloat(from, count, out); break;
      case Plain::kBf16:
        for (int64_t i = 0; i < count; ++i) out[i] = FloatFromBf16(Load<uint16_t>(from + 2 * i));
    }
    return;
  }
  CodeValues<T>(lhs.element, codes + (lhs.element == Element::kE2m1 ? c0 / 2 : c0), count, out);
  const float global = lhs.Global(row);
  const int64_t block_row = row / lhs.block_rows;
  int64_t block = c0 / lhs.block_cols;
  for (int64_t i = 0; i < count; ++block) {
    const int64_t end = std::min(count, (block + 1) * lhs.block_cols - c0);
    const float scale = lhs.Scale(block_row, block) * global;
    for (; i < end; ++i) out[i] *= scale;
  }
}

// Row m of the output, columns o0 to o0 + count, from its accumulators, which it may overwrite.
template <typename T>
void StoreRow(const DotProblem& p, int64_t m, int64_t o0, int64_t count, float* acc) {
  if (p.bias != nullptr) {
    const uint8_t* bias = p.bias + o0 * PlainBytes(p.bias_type);
    alignas(64) float values[kBiasChunk];
    for (int64_t i = 0; i < count; i += kBiasChunk) {
      const int64_t n = std::min(kBiasChunk, count - i);
      switch (p.bias_type) {
        case Plain::kF32: std::memcpy(values, bias + 4 * i, 4 * n); break;
        case Plain::kF16: T::F16ToFloat(bias + 2 * i, n, values); break;
        case Plain::kBf16:
          for (int64_t j = 0; j < n; ++j) values[j] = FloatFromBf16(Load<uint16_t>(bias + 2 * (i + j)));
      }
      for (int64_t j = 0; j < n; ++j) acc[i + j] += values[j];
    }
  }
  uint8_t* out = p.out + (m * p.columns() + o0) * PlainBytes(p.out_type);
  switch (p.out_type) {
    case Plain::kF32: std::memcpy(out, acc, count * sizeof(float)); break;
    case Plain::kF16: T::FloatToF16(acc, count, out); break;
    case Plain::kBf16:
      for (int64_t i = 0; i < count; ++i) Store<uint16_t>(out + 2 * i, Bf16FromFloat(acc[i]));
  }
}

}  // namespace
}  // namespace jaxlowbit

#endif  // JAXLOWBIT_FFI_CPU_DOT_PACK_H_
