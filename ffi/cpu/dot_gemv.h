// Product with few lhs rows: the codes are read once and go from their bytes into multiply-adds without touching
// memory in between, so that it runs as fast as the codes arrive.
//
// A chunk decoder C gives, for a tier T:
//
//   kCodes, kBytes, kVectors       codes of one chunk, its bytes, the float vectors it decodes to
//   Source(vector, lane)           which of the chunk's codes stands there; the lhs is laid out to match, which
//                                  saves the decoder from putting its results in order
//   kGranule                       codes that share a lane or a group of lanes: blocks as small as this can be
//                                  scaled lane by lane
//   kUnit                          decoded number * kUnit = value of the code
//   Decode(bytes, V*)
//
// and the tier, besides what dot_pack.h asks, Permute(V, const int32_t*) and Sum(V).
#ifndef JAXLOWBIT_FFI_CPU_DOT_GEMV_H_
#define JAXLOWBIT_FFI_CPU_DOT_GEMV_H_

#include "ffi/cpu/dot.h"
#include "ffi/cpu/dot_pack.h"
#include "ffi/cpu/scratch.h"

namespace jaxlowbit {
namespace {

template <typename C>
bool ChunkServes(int64_t block, int64_t contraction) {
  return block >= contraction || block % C::kCodes == 0 || (C::kCodes % block == 0 && block % C::kGranule == 0);
}

struct GemvPlan {
  const DotProblem* problems;
  const float* lhs;           // [problem][m][chunk][vector][lane]
  int64_t lhs_stride;         // floats of one lhs row
  int64_t chunks;
  int64_t columns, column_blocks;  // of a task, and tasks of a problem
};

// f32 scales of one row of blocks, with room to load a whole vector at the last one.
template <typename T>
void ScaleRow(const Operand& rhs, int64_t block_row, float* out) {
  const int64_t first = block_row * rhs.grid_cols;
  switch (rhs.scale_kind) {
    case ScaleKind::kF32: std::memcpy(out, rhs.scale + 4 * first, 4 * rhs.grid_cols); break;
    case ScaleKind::kE4m3: CodeValues<T>(Element::kE4m3, rhs.scale + first, rhs.grid_cols, out); break;
    default:
      for (int64_t i = 0; i < rhs.grid_cols; ++i) out[i] = E8m0Value(rhs.scale[first + i]);
  }
}

// sums[i * kColumns + j] of lhs row i and rhs row n0 + j, without rhs's global scale. scales[j]: ScaleRow of it.
template <typename T, typename C, int kRows, int kColumns, bool kLaneScales>
void GemvColumns(const GemvPlan& plan, const DotProblem& p, const float* lhs, int64_t n0, const float* const* scales,
                 float* sums) {
  using V = typename T::V;
  const int64_t row_bytes = p.rhs.RowBytes(), block = p.rhs.block_cols;
  const uint8_t* rows[kColumns];
  for (int j = 0; j < kColumns; ++j) rows[j] = p.rhs.Row(n0 + j);

  int32_t lane_block[T::kLanes] = {};
  int64_t scales_per_chunk = 0, chunks_per_scale = plan.chunks;
  if constexpr (kLaneScales) {
    scales_per_chunk = C::kCodes / block;
    for (int lane = 0; lane < T::kLanes; ++lane) lane_block[lane] = static_cast<int32_t>(C::Source(0, lane) / block);
  } else if (block < p.contraction()) {
    chunks_per_scale = block / C::kCodes;
  }

  V acc[kRows][kColumns];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kColumns; ++j) acc[i][j] = V{};
  }
  auto add_chunk = [&](int64_t chunk, int64_t scale_index, const uint8_t* const* bytes)
                       __attribute__((always_inline)) {
    const float* x = lhs + chunk * C::kVectors * T::kLanes;
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) {
      V values[C::kVectors];
      C::Decode(bytes[j], values);
      V scale;
      if constexpr (kLaneScales) {
        scale = T::Permute(Load<V>(scales[j] + scale_index), lane_block);
      } else {
        scale = scales[j][scale_index] - V{};
      }
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const float* row = x + i * plan.lhs_stride;
        V part = Load<V>(row) * values[0];
#pragma GCC unroll 8
        for (int v = 1; v < C::kVectors; ++v) part += Load<V>(row + v * T::kLanes) * values[v];
        if constexpr (C::kUnit != 1.0f) part *= C::kUnit;
        acc[i][j] += part * scale;
      }
    }
  };

  const int64_t whole = row_bytes / C::kBytes;
  int64_t scale_index = 0, left = chunks_per_scale;
  for (int64_t chunk = 0; chunk < whole; ++chunk) {
    const uint8_t* bytes[kColumns];
    for (int j = 0; j < kColumns; ++j) {
      bytes[j] = rows[j] + chunk * C::kBytes;
      // The next rows: short rows read side by side end before the hardware has recognized their streams.
      __builtin_prefetch(bytes[j] + kColumns * row_bytes);
    }
    add_chunk(chunk, scale_index, bytes);
    scale_index += scales_per_chunk;
    if (!kLaneScales && --left == 0) {
      ++scale_index;
      left = chunks_per_scale;
    }
  }
  if (whole < plan.chunks) {
    uint8_t edge[kColumns][C::kBytes] = {};  // code 0 past the end of the row
    const uint8_t* bytes[kColumns];
    for (int j = 0; j < kColumns; ++j) {
      std::memcpy(edge[j], rows[j] + whole * C::kBytes, row_bytes - whole * C::kBytes);
      bytes[j] = edge[j];
    }
    add_chunk(whole, scale_index, bytes);
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kColumns; ++j) sums[i * kColumns + j] = T::Sum(acc[i][j]);
  }
}

template <typename T, typename C, int kRows, int kColumns, bool kLaneScales>
void GemvTask(void* context, int64_t task) {
  const GemvPlan& plan = *static_cast<const GemvPlan*>(context);
  const int64_t index = task / plan.column_blocks;
  const DotProblem& p = plan.problems[index];
  const int64_t n0 = task % plan.column_blocks * plan.columns, count = std::min(plan.columns, p.columns() - n0);
  const float* lhs = plan.lhs + index * kRows * plan.lhs_stride;

  const int64_t scale_stride = RoundUp(p.rhs.grid_cols, T::kLanes) + T::kLanes;
  float* scratch = static_cast<float*>(
      TaskScratch().Reserve(sizeof(float) * (kColumns * scale_stride + kRows * plan.columns)));
  float* acc = scratch + kColumns * scale_stride;
  std::fill(scratch, acc, 0.0f);  // the last chunk's lanes past the last scale: zeros times anything but NaN
  int64_t held[kColumns];  // which row of blocks each scale buffer holds
  for (int j = 0; j < kColumns; ++j) held[j] = -1;

  for (int64_t n = 0; n < count;) {
    const bool group = n + kColumns <= count;
    const float* scales[kColumns];
    for (int j = 0; j < (group ? kColumns : 1); ++j) {
      const int64_t block_row = (n0 + n + j) / p.rhs.block_rows;
      const int buffer = j > 0 && held[j - 1] == block_row ? j - 1 : j;
      float* row = scratch + buffer * scale_stride;
      scales[j] = j > 0 && held[j - 1] == block_row ? scales[j - 1] : row;
      if (held[j] == block_row && scales[j] == row) continue;
      held[j] = block_row;
      if (scales[j] == row) ScaleRow<T>(p.rhs, block_row, row);
    }
    float sums[kRows * kColumns];
    if (group) {
      GemvColumns<T, C, kRows, kColumns, kLaneScales>(plan, p, lhs, n0 + n, scales, sums);
    } else {
      GemvColumns<T, C, kRows, 1, kLaneScales>(plan, p, lhs, n0 + n, scales, sums);
    }
    const int step = group ? kColumns : 1;
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < step; ++j) acc[i * plan.columns + n + j] = sums[i * step + j] * p.rhs.Global(n0 + n + j);
    }
    n += step;
  }
  for (int64_t i = 0; i < kRows; ++i) StoreRow<T>(p, i, n0, count, acc + i * plan.columns);
}

template <typename T, typename C, int kRows = T::kGemvRows>
Executor::Body GemvTaskFor(int64_t rows, bool lane_scales) {
  // Columns share the loads of lhs values, as far as the registers go.
  constexpr int kColumns = kRows == 1 ? 4 : T::kGemvAccumulators / kRows < 1 ? 1 : T::kGemvAccumulators / kRows;
  if constexpr (kRows > 1) {
    if (rows < kRows) return GemvTaskFor<T, C, kRows - 1>(rows, lane_scales);
  }
  if constexpr (C::kGranule < C::kCodes) {
    if (lane_scales) return GemvTask<T, C, kRows, kColumns, true>;
  }
  return GemvTask<T, C, kRows, kColumns, false>;
}

// lhs row values in the order in which C decodes, zeros past the contraction.
template <typename T, typename C>
void ArrangeRow(const Operand& lhs, int64_t row, int64_t chunks, float* values, float* out) {
  LhsValues<T>(lhs, row, 0, lhs.cols, values);
  std::fill(values + lhs.cols, values + chunks * C::kCodes, 0.0f);
  int32_t source[C::kCodes];
  for (int v = 0; v < C::kVectors; ++v) {
    for (int lane = 0; lane < T::kLanes; ++lane) source[v * T::kLanes + lane] = C::Source(v, lane);
  }
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    for (int i = 0; i < C::kCodes; ++i) out[chunk * C::kCodes + i] = values[chunk * C::kCodes + source[i]];
  }
}

// Serves m() <= T::kGemvRows, the forward form, blocks for which ChunkServes<C>.
template <typename T, typename C>
void DotGemv(const DotProblem* problems, int64_t count, Executor& executor) {
  constexpr int64_t kTasksPerThread = 8, kFewestColumns = 16, kMostColumnsOfTask = 512;
  const DotProblem& first = problems[0];
  const int64_t chunks = CeilDiv(first.contraction(), C::kCodes), stride = chunks * C::kCodes;
  FlushSubnormals flush;
  CallScratch memory;
  float* lhs = static_cast<float*>(memory.Reserve(sizeof(float) * stride * (count * first.m() + 1)));
  float* values = lhs + stride * count * first.m();
  for (int64_t b = 0; b < count; ++b) {
    for (int64_t i = 0; i < first.m(); ++i) {
      ArrangeRow<T, C>(problems[b].lhs, i, chunks, values, lhs + (b * first.m() + i) * stride);
    }
  }
  const int64_t wanted = CeilDiv(first.columns() * count, kTasksPerThread * executor.threads());
  const int64_t columns = RoundUp(std::clamp(wanted, kFewestColumns, kMostColumnsOfTask), kFewestColumns);
  GemvPlan plan{problems, lhs, stride, chunks, columns, CeilDiv(first.columns(), columns)};
  const int64_t block = first.rhs.block_cols;
  const bool lane_scales = block < first.contraction() && block % C::kCodes != 0;
  executor.Run(count * plan.column_blocks, GemvTaskFor<T, C>(first.m(), lane_scales), &plan);
}

}  // namespace
}  // namespace jaxlowbit

#endif  // JAXLOWBIT_FFI_CPU_DOT_GEMV_H_
