// The AMX tier: tile products of bf16, with AVX-512 (VBMI, BF16) to fill the tiles.
//
// A task owns a rectangle of the output. Per kAmxDepth of the contraction it decodes the codes of its columns once
// into tiles in the second-level cache; then, strip by strip of 32 lhs rows, which stay in the first-level cache,
// it forms 32 x 32 sums in four tiles and adds them, times their promoted scales, to f32 accumulators.
#include "ffi/cpu/isa.h"

#if defined(JAXLOWBIT_HAS_AMX)

// Everything that is not this tier's own code, before the pragma: it must stay runnable anywhere.
#include <immintrin.h>

#include "ffi/cpu/dot.h"
#include "ffi/cpu/dot_amx_scales.h"
#include "ffi/cpu/dot_plan.h"
#include "ffi/cpu/scratch.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC diagnostic ignored "-Wuninitialized"        // both: in GCC 12's own avx512fintrin.h
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma,f16c")
#endif

#include "ffi/cpu/amx_tile.h"
#include "ffi/cpu/dot_amx_pack.h"
#include "ffi/cpu/dot_avx512.h"
#include "ffi/cpu/dot_pack.h"

namespace jaxlowbit {
namespace {

constexpr int64_t kStripRows = 2 * kTileRows, kBlockColumns = 2 * kTileColumns;
constexpr int64_t kBlockFloats = kStripRows * kBlockColumns;
constexpr int64_t kMostColumns = 256;  // a task's panels: 256 KiB
constexpr int64_t kMostRows = 512;     // a task's accumulators: 512 KiB
// Below, reading codes straight into AVX-512 multiply-adds is faster than filling tiles.
constexpr int64_t kFewestRows = 5;

// sums (32 x 32, or 16 x 32 for one row tile) = lhs tiles * rhs tiles over `steps` tiles of the contraction.
template <int kRowTiles>
void TileBlock(int64_t steps, const uint8_t* lhs, const uint8_t* rhs, float* sums) {
  TileZero<0>();
  TileZero<1>();
  if constexpr (kRowTiles == 2) {
    TileZero<2>();
    TileZero<3>();
  }
  for (int64_t step = 0; step < steps; ++step, lhs += kTileBytes, rhs += kTileBytes) {
    TileLoad<4>(lhs, kTileRowBytes);
    TileLoad<6>(rhs, kTileRowBytes);
    TileLoad<7>(rhs + kPanelBytes, kTileRowBytes);
    TileDotBf16<0, 4, 6>();
    TileDotBf16<1, 4, 7>();
    if constexpr (kRowTiles == 2) {
      TileLoad<5>(lhs + kPanelBytes, kTileRowBytes);
      TileDotBf16<2, 5, 6>();
      TileDotBf16<3, 5, 7>();
    }
  }
  constexpr int64_t kStride = kBlockColumns * sizeof(float);
  TileStore<0>(sums, kStride);
  TileStore<1>(sums + kTileColumns, kStride);
  if constexpr (kRowTiles == 2) {
    TileStore<2>(sums + kTileRows * kBlockColumns, kStride);
    TileStore<3>(sums + kTileRows * kBlockColumns + kTileColumns, kStride);
  }
}

// acc (+)= sums * column_scales * row_scales, the latter null where all are one.
inline void Promote(int64_t rows, const float* sums, const float* column_scales, const float* row_scales, bool first,
                    float* acc) {
  const __m512 left = _mm512_load_ps(column_scales), right = _mm512_load_ps(column_scales + kTileColumns);
  for (int64_t i = 0; i < rows; ++i, sums += kBlockColumns, acc += kBlockColumns) {
    __m512 left_scale = left, right_scale = right;
    if (row_scales != nullptr) {
      const __m512 row = _mm512_set1_ps(row_scales[i]);
      left_scale = _mm512_mul_ps(left, row);
      right_scale = _mm512_mul_ps(right, row);
    }
    const __m512 left_sum = _mm512_load_ps(sums), right_sum = _mm512_load_ps(sums + kTileColumns);
    if (first) {
      _mm512_store_ps(acc, _mm512_mul_ps(left_sum, left_scale));
      _mm512_store_ps(acc + kTileColumns, _mm512_mul_ps(right_sum, right_scale));
    } else {
      _mm512_store_ps(acc, _mm512_fmadd_ps(left_sum, left_scale, _mm512_load_ps(acc)));
      _mm512_store_ps(acc + kTileColumns, _mm512_fmadd_ps(right_sum, right_scale, _mm512_load_ps(acc + kTileColumns)));
    }
  }
}

// A run of contraction indices of the panel that share their promoted scales.
struct Segment {
  int64_t tile, tiles;  // within the panel
  int64_t c;            // contraction index of its start
};

void AmxTask(void* context, int64_t task) {
  const DotRectangle rectangle = static_cast<const DotPlan*>(context)->Rectangle(task);
  const DotProblem& p = *rectangle.problem;
  const int64_t m0 = rectangle.m0, rows = rectangle.rows, o0 = rectangle.o0, columns = rectangle.columns;
  const int64_t column_tiles = 2 * CeilDiv(columns, kBlockColumns), blocks = column_tiles / 2;
  const int64_t strips = CeilDiv(rows, kStripRows);
  const bool lhs_scaled = p.lhs.element != Element::kPlain;

  float* const scales = static_cast<float*>(TaskScratch().Reserve(
      sizeof(float) * (kTilesDeep * kMostColumns + kStripRows + kBlockFloats + strips * blocks * kBlockFloats +
                       kMostColumns) + kPanelBytes * (2 + column_tiles)));
  float* const row_scales = scales + kTilesDeep * kMostColumns;  // scales: [segment][column]
  float* const sums = row_scales + kStripRows;
  float* const line = sums + kBlockFloats;
  float* const acc = line + kMostColumns;  // [strip][block][32][32]
  uint8_t* const lhs = reinterpret_cast<uint8_t*>(acc + strips * blocks * kBlockFloats);
  uint8_t* const rhs = lhs + 2 * kPanelBytes;

  TileLoadConfig(TileConfig());
  for (int64_t c0 = 0; c0 < p.contraction(); c0 += kAmxDepth) {
    const int64_t depth = std::min(kAmxDepth, p.contraction() - c0);
    for (int64_t tile = 0; tile < column_tiles; ++tile) {
      const int64_t o = tile * kTileColumns, count = std::clamp<int64_t>(columns - o, 0, kTileColumns);
      if (count == 0) {
        std::memset(rhs + tile * kPanelBytes, 0, kPanelBytes);
      } else if (p.transposed) {
        PackRhsTransposed(p, c0, depth, o0 + o, count, rhs + tile * kPanelBytes);
      } else {
        PackRhsForward(p, c0, depth, o0 + o, count, rhs + tile * kPanelBytes);
      }
    }
    Segment segments[kTilesDeep];
    int64_t segment_count = 0;
    for (int64_t c = c0; c < c0 + depth; ++segment_count) {
      const int64_t end = PromotionEnd(p, c, c0 + depth);
      segments[segment_count] = {(c - c0) / kTileDepth, CeilDiv(end - c, kTileDepth), c};
      PromotedScales(p, c, o0, columns, column_tiles * kTileColumns, scales + segment_count * kMostColumns);
      c = end;
    }
    for (int64_t strip = 0; strip < strips; ++strip) {
      const int64_t i = strip * kStripRows, strip_rows = std::min(kStripRows, rows - i);
      const int64_t row_tiles = CeilDiv(strip_rows, kTileRows);
      PackLhs(p, m0 + i, strip_rows, row_tiles, c0, depth, lhs);
      for (int64_t s = 0; s < segment_count; ++s) {
        const Segment& segment = segments[s];
        for (int64_t r = 0; lhs_scaled && r < strip_rows; ++r) row_scales[r] = PromotedLhsScale(p, m0 + i + r, segment.c);
        for (int64_t block = 0; block < blocks; ++block) {
          const uint8_t* left = lhs + segment.tile * kTileBytes;
          const uint8_t* right = rhs + 2 * block * kPanelBytes + segment.tile * kTileBytes;
          if (row_tiles == 2) {
            TileBlock<2>(segment.tiles, left, right, sums);
          } else {
            TileBlock<1>(segment.tiles, left, right, sums);
          }
          Promote(strip_rows, sums, scales + s * kMostColumns + block * kBlockColumns,
                  lhs_scaled ? row_scales : nullptr, c0 == 0 && s == 0, acc + (strip * blocks + block) * kBlockFloats);
        }
      }
    }
  }
  TileRelease();

  for (int64_t r = 0; r < rows; ++r) {
    const float* row = acc + r / kStripRows * blocks * kBlockFloats + r % kStripRows * kBlockColumns;
    for (int64_t block = 0; block < blocks; ++block) {
      std::memcpy(line + block * kBlockColumns, row + block * kBlockFloats, kBlockColumns * sizeof(float));
    }
    StoreRow<Avx512>(p, m0 + r, o0, columns, line);
  }
}

}  // namespace

bool DotAmxServes(const DotProblem& p) {
  const bool lhs = p.lhs.element != Element::kPlain || p.lhs.plain == Plain::kBf16;
  return lhs && p.m() >= kFewestRows && p.contraction() > 0 && AmxServesScales(p);
}

void DotAmx(const DotProblem* problems, int64_t count, Executor& executor) {
  DotPlan plan(problems, count, executor.threads(), kStripRows, kMostRows, kBlockColumns, kMostColumns);
  executor.Run(plan.tasks(), AmxTask, &plan);
}

}  // namespace jaxlowbit

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // defined(JAXLOWBIT_HAS_AMX)
