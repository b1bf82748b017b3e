// Operands into bf16 tiles for TDPBF16PS. A tile of lhs holds 16 rows of 32 contraction indices; a tile of rhs
// holds 16 pairs of contraction indices by 16 columns, the pair side by side in 32 bits.
// To be included after "#pragma GCC target".
#ifndef JAXLOWBIT_FFI_CPU_DOT_AMX_PACK_H_
#define JAXLOWBIT_FFI_CPU_DOT_AMX_PACK_H_

#include "ffi/cpu/amx_tile.h"
#include "ffi/cpu/dot.h"
#include "ffi/cpu/dot_amx_scales.h"
#include "ffi/cpu/dot_bytes_avx512.h"
#include "ffi/cpu/dot_pack.h"

namespace jaxlowbit {
namespace {

constexpr int64_t kAmxDepth = 512;                           // contraction of one panel
constexpr int64_t kTilesDeep = kAmxDepth / kTileDepth;       // tiles of one panel, for 16 rows or columns
constexpr int64_t kPanelBytes = kTilesDeep * kTileBytes;     // 16 KiB
constexpr int64_t kTileColumns = 16;
constexpr int64_t kMostColumns = 256;                        // of a task; its panels take 256 KiB

// The first `count` bytes set; all of them from 64 on, none below 1.
inline __mmask64 FirstBytes(int64_t count) {
  return count >= 64 ? ~__mmask64{0} : count <= 0 ? 0 : (__mmask64{1} << count) - 1;
}

// 16 bf16 values of E2M1, twice: a look-up by 16-bit lanes uses five bits, and the fifth is left over from a
// neighbor.
inline __m512i E2m1Bf16Table() {
  alignas(64) uint16_t table[32];
  for (int i = 0; i < 32; ++i) table[i] = static_cast<uint16_t>(BitsFromFloat(kE2m1.value[i & 15]) >> 16);
  return _mm512_load_si512(table);
}

// 32 bf16 numbers from 32 E4M3 codes, each code in both bytes of its 16-bit lane.
inline __m512i Bf16FromDoubledE4m3(__m512i codes) {
  const Bf16Bytes value = Bf16BytesFromE4m3(codes);
  return _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaaull, value.low, value.high);
}

// bf16 pairs times a scale for the first and one for the second of each pair, rounded to bf16.
inline __m512i ScalePairs(__m512i pairs, __m512 first_scale, __m512 second_scale) {
  const __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  const __m512 second = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000))));
  const __m512i first_half = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(first, first_scale)));
  const __m512i second_half = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(second, second_scale)));
  return _mm512_or_si512(first_half, _mm512_slli_epi32(second_half, 16));
}

// ----------------------------------------------------------------------------------------------------------------
// lhs

// 32 codes, at most `count` of them there, as bf16 numbers in order.
inline __m512i LhsCodes(Element element, const uint8_t* codes, int64_t count, __m512i e2m1_table) {
  if (element == Element::kE4m3) {
    const __m256i bytes = _mm256_maskz_loadu_epi8(static_cast<__mmask32>(FirstBytes(count)), codes);
    const __m512i wide = _mm512_cvtepu8_epi16(bytes);
    return Bf16FromDoubledE4m3(_mm512_or_si512(wide, _mm512_slli_epi16(wide, 8)));
  }
  const __m128i bytes = _mm_maskz_loadu_epi8(static_cast<__mmask16>(FirstBytes(count / 2)), codes);
  const __m512i wide = _mm512_cvtepu8_epi32(bytes);  // low nibble to the low half, high nibble to the high half
  return _mm512_permutexvar_epi16(_mm512_or_si512(wide, _mm512_slli_epi32(wide, 12)), e2m1_table);
}

inline __m512i FoldLhsScale(const Operand& lhs, int64_t row, int64_t c, int64_t count, __m512i values) {
  const int64_t block_row = row / lhs.block_rows, block = c / lhs.block_cols;
  if (c + count <= (block + 1) * lhs.block_cols) {
    const __m512 scale = _mm512_set1_ps(lhs.Scale(block_row, block));
    // Codes past `count` are zero, and must stay zero when the scale is NaN.
    const __m512i scaled = ScalePairs(values, scale, scale);
    return _mm512_maskz_mov_epi16(static_cast<__mmask32>(FirstBytes(count)), scaled);
  }
  alignas(64) float first[16] = {}, second[16] = {};
  for (int64_t i = 0; i < count; ++i) {
    (i % 2 == 0 ? first : second)[i / 2] = lhs.Scale(block_row, (c + i) / lhs.block_cols);
  }
  return ScalePairs(values, _mm512_load_ps(first), _mm512_load_ps(second));
}

// Rows m0 to m0 + rows, at least one, and contraction c0 to c0 + depth into row_tiles panels; zeros elsewhere.
inline void PackLhs(const DotProblem& p, int64_t m0, int64_t rows, int64_t row_tiles, int64_t c0, int64_t depth,
                    uint8_t* out) {
  const Operand& lhs = p.lhs;
  const __m512i table = E2m1Bf16Table();
  const bool fold = lhs.element != Element::kPlain && FoldsLhs(p);
  for (int64_t r = 0; r < row_tiles * kTileRows; ++r) {
    uint8_t* line = out + r / kTileRows * kPanelBytes + r % kTileRows * kTileRowBytes;
    const uint8_t* row = lhs.Row(m0 + std::min(r, rows - 1));
    for (int64_t d = 0; d < depth; d += kTileDepth, line += kTileBytes) {
      const int64_t count = r < rows ? std::min(kTileDepth, depth - d) : 0;
      __m512i values = _mm512_setzero_si512();
      if (count == 0) {
      } else if (lhs.element == Element::kPlain) {
        values = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(FirstBytes(count)), row + 2 * (c0 + d));
      } else {
        const int64_t byte = lhs.element == Element::kE2m1 ? (c0 + d) / 2 : c0 + d;
        values = LhsCodes(lhs.element, row + byte, count, table);
        if (fold) values = FoldLhsScale(lhs, m0 + r, c0 + d, count, values);
      }
      _mm512_storeu_si512(line, values);
    }
  }
}

// ----------------------------------------------------------------------------------------------------------------
// rhs

// Folded scales of 16 columns by contraction index: Of(d) is the line at c0 + d, zeros for columns and indices that
// are not there.
class FoldLines {
 public:
  FoldLines(const DotProblem& p, int64_t c0, int64_t depth, int64_t o0, int64_t count)
      : p_(WithFoldedScales(p)), scales_(p_, o0, count), c0_(c0), depth_(depth) {}

  __m512 Of(int64_t d) {
    if (d >= depth_) return _mm512_setzero_ps();
    if (d < begin_ || d >= end_) {
      begin_ = d;
      end_ = RhsSegmentEnd(p_, c0_ + d, c0_ + depth_) - c0_;
      alignas(64) float line[kTileColumns];
      scales_.At(c0_ + d, kTileColumns, line);
      line_ = _mm512_load_ps(line);
    }
    return line_;
  }

 private:
  const DotProblem p_;
  const ColumnScales scales_;
  const int64_t c0_, depth_;
  int64_t begin_ = 0, end_ = 0;
  __m512 line_ = _mm512_setzero_ps();
};

// r[i], 32-bit lane j <- r[j], lane i.
inline __attribute__((always_inline)) void TransposeLanes(__m512i r[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // r[4 g + j], 128-bit lane l, now holds lane 4 l + j of rows 4 g to 4 g + 3.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i low_even = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88), low_odd = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
    const __m512i high_even = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    const __m512i high_odd = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
    t[j] = _mm512_shuffle_i32x4(low_even, high_even, 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
    t[8 + j] = _mm512_shuffle_i32x4(low_even, high_even, 0xdd);
    t[12 + j] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// Forward form: columns are rows of rhs, so 64 bytes of 16 of them are transposed, and become 2 tiles of E4M3 or 4 of
// E2M1. Columns o0 to o0 + count, at most 16.
inline void PackRhsForward(const DotProblem& p, int64_t c0, int64_t depth, int64_t o0, int64_t count, uint8_t* out) {
  const bool fp4 = p.rhs.element == Element::kE2m1, fold = FoldsRhs(p);
  const int64_t bytes = fp4 ? depth / 2 : depth, first_byte = fp4 ? c0 / 2 : c0;
  const __m512i table = E2m1Bf16Table();
  // Bytes of a 32-bit lane are 4 codes of a column: codes 0, 1 of 4 columns first, then codes 2, 3 of them, so that
  // interleaving low and high bytes leaves pairs.
  const __m512i pairs_apart = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  FoldLines lines(p, c0, depth, o0, count);
  int64_t d = 0;  // contraction index of the next line of pairs
  auto emit = [&](__m512i pairs) __attribute__((always_inline)) {
    if (fold) {
      const __m512 first = lines.Of(d);
      pairs = ScalePairs(pairs, first, lines.Of(d + 1));
    }
    _mm512_storeu_si512(out, pairs);
    out += kTileRowBytes;
    d += 2;
  };
  for (int64_t b = 0; b < bytes; b += 64) {
    const __mmask64 there = FirstBytes(bytes - b);
    __m512i r[16];
#pragma GCC unroll 16
    for (int64_t i = 0; i < 16; ++i) {
      // The rows of the next tile: too short a run of each for the processor to foresee.
      _mm_prefetch(reinterpret_cast<const char*>(p.rhs.Row(o0 + i + 16) + first_byte + b), _MM_HINT_T0);
      r[i] = i < count ? _mm512_maskz_loadu_epi8(there, p.rhs.Row(o0 + i) + first_byte + b) : _mm512_setzero_si512();
    }
    TransposeLanes(r);
    for (int i = 0; i < 16; ++i) {
      const __m512i v = r[i];
      if (fp4) {
        emit(_mm512_permutexvar_epi16(_mm512_mask_blend_epi16(0xaaaaaaaa, v, _mm512_slli_epi32(v, 12)), table));
        emit(_mm512_permutexvar_epi16(
            _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(v, 8), _mm512_slli_epi32(v, 4)), table));
        emit(_mm512_permutexvar_epi16(
            _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(v, 16), _mm512_srli_epi32(v, 4)), table));
        emit(_mm512_permutexvar_epi16(
            _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(v, 24), _mm512_srli_epi32(v, 12)), table));
      } else {
        const Bf16Bytes value = Bf16BytesFromE4m3(_mm512_shuffle_epi8(v, pairs_apart));
        emit(_mm512_unpacklo_epi8(value.low, value.high));
        emit(_mm512_unpackhi_epi8(value.low, value.high));
      }
    }
  }
}

// Transposed form: columns o0 to o0 + columns, at most kTransposedColumns; two contraction indices become a line of
// pairs in every column tile. Row by row of rhs, of which the columns take about a cache line.
constexpr int64_t kTransposedColumns = 64;

inline void PackRhsTransposed(const DotProblem& p, int64_t c0, int64_t depth, int64_t o0, int64_t columns,
                              uint8_t* out) {
  const bool fp4 = p.rhs.element == Element::kE2m1, fold = FoldsRhs(p);
  const __m512i table = E2m1Bf16Table();
  const __m512i high_nibble = _mm512_set1_epi64(int64_t{4} << 32);  // every second column
  const DotProblem folded = WithFoldedScales(p);
  const ColumnScales scales(folded, o0, columns);
  alignas(64) float lines[2][kTransposedColumns];  // folded scales at the two contraction indices
  int64_t line_end = 0;                      // up to where the second is good
  const int64_t row_bytes = p.rhs.RowBytes();
  for (int64_t d = 0; d < RoundUp(depth, kTileDepth); d += 2, out += kTileRowBytes) {
    const uint8_t* row = p.rhs.Row(c0 + d) + (fp4 ? o0 / 2 : o0);
    if (fold && d < depth) {
      for (int64_t i = 0; i < 2; ++i) {
        if (d + i < line_end) {
          if (i == 0) std::memcpy(lines[0], lines[1], sizeof(lines[0]));
        } else if (d + i < depth) {
          line_end = RhsSegmentEnd(p, c0 + d + i, c0 + depth) - c0;
          scales.At(c0 + d + i, kTransposedColumns, lines[i]);
          if (i == 0 && d + 1 < line_end) std::memcpy(lines[1], lines[0], sizeof(lines[1]));
        } else {
          std::memset(lines[1], 0, sizeof(lines[1]));
        }
      }
    }
    _mm_prefetch(reinterpret_cast<const char*>(row + 16 * row_bytes), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(row + 17 * row_bytes), _MM_HINT_T0);
    for (int64_t tile = 0; tile < CeilDiv(columns, kTileColumns); ++tile) {
      const int64_t o = tile * kTileColumns, count = columns - o;
      const __mmask16 there = d < depth ? static_cast<__mmask16>(FirstBytes(fp4 ? std::min<int64_t>(count / 2, 8) : count)) : 0;
      const __mmask16 there_too = d + 1 < depth ? there : 0;
      const uint8_t* at = row + (fp4 ? o / 2 : o);
      const __m128i first = _mm_maskz_loadu_epi8(there, at);
      const __m128i second = _mm_maskz_loadu_epi8(there_too, at + row_bytes);
      const __m128i low = _mm_unpacklo_epi8(first, second);
      __m512i pairs;
      if (fp4) {
        // 16-bit lanes of `wide`: byte i of the first row, of the second, byte i + 1 of the first, ...: columns 2 i
        // and 2 i + 1, which share their bytes and part by the nibble.
        const __m256i wide = _mm256_cvtepu8_epi16(low);
        const __m512i doubled = _mm512_permutexvar_epi32(
            _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), _mm512_castsi256_si512(wide));
        pairs = _mm512_permutexvar_epi16(_mm512_srlv_epi32(doubled, high_nibble), table);
      } else {
        const __m128i high = _mm_unpackhi_epi8(first, second);
        const __m512i wide = _mm512_cvtepu8_epi16(_mm256_set_m128i(high, low));
        pairs = Bf16FromDoubledE4m3(_mm512_or_si512(wide, _mm512_slli_epi16(wide, 8)));
      }
      if (fold && d < depth) pairs = ScalePairs(pairs, _mm512_load_ps(lines[0] + o), _mm512_load_ps(lines[1] + o));
      _mm512_storeu_si512(out + tile * kPanelBytes, pairs);
    }
  }
}

}  // namespace
}  // namespace jaxlowbit

#endif  // JAXLOWBIT_FFI_CPU_DOT_AMX_PACK_H_
