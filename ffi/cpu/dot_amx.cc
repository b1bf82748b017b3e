// The AMX tier: tile products of bf16, with AVX-512 (VBMI, BF16) to fill the tiles.
//
// First the lhs goes into tiles, once. Then a task owns a rectangle of the output: per kAmxDepth of the contraction
// it decodes the codes of its columns once into tiles in the second-level cache, forms 32 x 32 sums in four tiles and
// adds them, times their promoted scales, to f32 accumulators.
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
constexpr int64_t kMostRows = 512;         // a task's accumulators: 512 KiB
constexpr int64_t kHalfDepth = 256;        // 32 rows of it, 16 KiB, stay in the first-level cache between blocks
constexpr int64_t kMostLhsBytes = 64 << 20;  // of lhs tiles at a time
// Below, reading codes straight into AVX-512 multiply-adds is faster than filling tiles.
constexpr int64_t kFewestRows = 6;

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

// Contraction indices of a panel that share their promoted scales; they lie in one half of the panel.
struct Segment {
  int64_t tile, tiles;  // within the panel
  int64_t c;            // contraction index of its start
};

int64_t Segments(const DotProblem& p, int64_t c0, int64_t depth, Segment* out) {
  int64_t count = 0;
  for (int64_t c = c0; c < c0 + depth; ++count) {
    const int64_t half_end = c0 + ((c - c0) / kHalfDepth + 1) * kHalfDepth;
    const int64_t end = PromotionEnd(p, c, std::min(half_end, c0 + depth));
    out[count] = {(c - c0) / kTileDepth, CeilDiv(end - c, kTileDepth), c};
    c = end;
  }
  return count;
}

// One round of work: rows m0 to m0 + m of some problems.
struct AmxRound {
  const DotProblem* problems;
  int64_t m0, m;
  int64_t panels, strips;  // of a problem: along the contraction, along the rows
  uint8_t* lhs;            // [problem][panel][strip][2] panels of 16 rows
  float* row_scales;       // [problem][panel][strip][segment][32], promoted
  DotPlan plan;

  int64_t Index(int64_t problem, int64_t panel, int64_t strip) const {
    return (problem * panels + panel) * strips + strip;
  }
  uint8_t* Lhs(int64_t index) const { return lhs + 2 * index * kPanelBytes; }
  float* RowScales(int64_t index) const { return row_scales + index * kTilesDeep * kStripRows; }
};

void PackLhsTask(void* context, int64_t task) {
  const AmxRound& round = *static_cast<const AmxRound*>(context);
  const int64_t strip = task % round.strips, panel = task / round.strips % round.panels;
  const DotProblem& p = round.problems[task / round.strips / round.panels];
  const int64_t c0 = panel * kAmxDepth, depth = std::min(kAmxDepth, p.contraction() - c0);
  const int64_t m = round.m0 + strip * kStripRows, rows = std::min(kStripRows, round.m0 + round.m - m);
  PackLhs(p, m, rows, CeilDiv(rows, kTileRows), c0, depth, round.Lhs(task));
  if (p.lhs.element == Element::kPlain) return;
  Segment segments[kTilesDeep];
  const int64_t count = Segments(p, c0, depth, segments);
  float* scales = round.RowScales(task);
  for (int64_t s = 0; s < count; ++s) {
    for (int64_t r = 0; r < rows; ++r) scales[s * kStripRows + r] = PromotedLhsScale(p, m + r, segments[s].c);
  }
}

void AmxTask(void* context, int64_t task) {
  const AmxRound& round = *static_cast<const AmxRound*>(context);
  const DotRectangle rectangle = round.plan.Rectangle(task);
  const DotProblem& p = round.plan.problem(rectangle);
  const int64_t rows = rectangle.rows, o0 = rectangle.o0, columns = rectangle.columns;
  const int64_t column_tiles = 2 * CeilDiv(columns, kBlockColumns), blocks = column_tiles / 2;
  const int64_t first_strip = (rectangle.m0 - round.m0) / kStripRows, strips = CeilDiv(rows, kStripRows);
  const DotProblem promoted = WithPromotedScales(p);
  const ColumnScales column_scales(promoted, o0, columns);

  float* const scales = static_cast<float*>(TaskScratch().Reserve(
      sizeof(float) * ((kTilesDeep + 1) * kMostColumns + kBlockFloats + strips * blocks * kBlockFloats) +
      kPanelBytes * column_tiles));
  float* const sums = scales + kTilesDeep * kMostColumns;  // scales: [segment][column]
  float* const line = sums + kBlockFloats;
  float* const acc = line + kMostColumns;  // [strip][block][32][32]
  uint8_t* const rhs = reinterpret_cast<uint8_t*>(acc + strips * blocks * kBlockFloats);

  TileLoadConfig(TileConfig());
  for (int64_t panel = 0; panel < round.panels; ++panel) {
    const int64_t c0 = panel * kAmxDepth, depth = std::min(kAmxDepth, p.contraction() - c0);
    for (int64_t o = 0; o < columns && p.transposed; o += kTransposedColumns) {
      const int64_t count = std::min(columns - o, kTransposedColumns);
      PackRhsTransposed(p, c0, depth, o0 + o, count, rhs + o / kTileColumns * kPanelBytes);
    }
    for (int64_t o = 0; o < columns && !p.transposed; o += kTileColumns) {
      const int64_t count = std::min(columns - o, kTileColumns);
      PackRhsForward(p, c0, depth, o0 + o, count, rhs + o / kTileColumns * kPanelBytes);
    }
    // Blocks take two column tiles.
    if (CeilDiv(columns, kTileColumns) < column_tiles) {
      std::memset(rhs + (column_tiles - 1) * kPanelBytes, 0, kPanelBytes);
    }
    Segment segments[kTilesDeep];
    const int64_t segment_count = Segments(p, c0, depth, segments);
    for (int64_t s = 0; s < segment_count; ++s) {
      column_scales.At(segments[s].c, column_tiles * kTileColumns, scales + s * kMostColumns);
    }
    for (int64_t strip = 0; strip < strips; ++strip) {
      const int64_t strip_rows = std::min(kStripRows, rows - strip * kStripRows);
      const int64_t index = round.Index(rectangle.problem, panel, first_strip + strip);
      const float* row_scales = p.lhs.element == Element::kPlain ? nullptr : round.RowScales(index);
      for (int64_t first = 0, last = 0; first < segment_count; first = last) {
        const int64_t half = segments[first].tile * kTileDepth / kHalfDepth;
        while (last < segment_count && segments[last].tile * kTileDepth / kHalfDepth == half) ++last;
        for (int64_t block = 0; block < blocks; ++block) {
          for (int64_t s = first; s < last; ++s) {
            const uint8_t* left = round.Lhs(index) + segments[s].tile * kTileBytes;
            const uint8_t* right = rhs + 2 * block * kPanelBytes + segments[s].tile * kTileBytes;
            if (strip_rows > kTileRows) {
              TileBlock<2>(segments[s].tiles, left, right, sums);
            } else {
              TileBlock<1>(segments[s].tiles, left, right, sums);
            }
            Promote(strip_rows, sums, scales + s * kMostColumns + block * kBlockColumns,
                    row_scales == nullptr ? nullptr : row_scales + s * kStripRows, panel == 0 && s == 0,
                    acc + (strip * blocks + block) * kBlockFloats);
          }
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
    StoreRow<Avx512>(p, rectangle.m0 + r, o0, columns, line);
  }
}

}  // namespace

bool DotAmxServes(const DotProblem& p) {
  const bool lhs = p.lhs.element != Element::kPlain || p.lhs.plain == Plain::kBf16;
  return lhs && p.m() >= kFewestRows && p.contraction() > 0 && AmxServesScales(p);
}

void DotAmx(const DotProblem* problems, int64_t count, Executor& executor) {
  const int64_t panels = CeilDiv(problems->contraction(), kAmxDepth);
  // As many rows, and then problems, in a round as the limit on lhs tiles allows.
  const int64_t strip_bytes = panels * (2 * kPanelBytes + kTilesDeep * kStripRows * sizeof(float));
  const int64_t most_strips = std::max<int64_t>(1, kMostLhsBytes / strip_bytes);
  const int64_t strips = std::min(CeilDiv(problems->m(), kStripRows), most_strips);
  const int64_t group = std::min(count, most_strips / strips);
  CallScratch memory;
  uint8_t* lhs = static_cast<uint8_t*>(memory.Reserve(group * strips * strip_bytes));
  float* row_scales = reinterpret_cast<float*>(lhs + group * strips * panels * 2 * kPanelBytes);
  for (int64_t b = 0; b < count; b += group) {
    const int64_t in_round = std::min(group, count - b);
    for (int64_t m0 = 0; m0 < problems->m(); m0 += strips * kStripRows) {
      const int64_t m = std::min(strips * kStripRows, problems->m() - m0);
      AmxRound round{problems + b, m0, m, panels, CeilDiv(m, kStripRows), lhs, row_scales,
                     DotPlan(problems + b, in_round, m0, m, executor.threads(), kStripRows, kMostRows, kBlockColumns,
                             kMostColumns)};
      executor.Run(in_round * round.panels * round.strips, PackLhsTask, &round);
      executor.Run(round.plan.tasks(), AmxTask, &round);
    }
  }
}

}  // namespace jaxlowbit

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // defined(JAXLOWBIT_HAS_AMX)
