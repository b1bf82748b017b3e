// The order of work of the CPU quantizer.
//
// Blocks that fit the caches: a task takes whole blocks, finds their peaks, makes their scales and encodes them while
// they are still close. Larger blocks (per tensor, long rows): all threads find peaks of slabs, then the scales are
// made, then all threads encode. A maximum does not depend on the order of its operands, so neither does the result.
#include "ffi/cpu/quantize_run.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace jaxlowbit::cpu {
namespace {

constexpr int64_t kTaskBytes = 128 << 10;   // of x; long against the few microseconds that a task costs
constexpr int64_t kGroupBytes = 16 << 10;   // blocks read twice in a row should stay in the first-level cache
constexpr int64_t kLargeBlock = 512 << 10;  // bytes of a block that one thread should not do alone
constexpr int64_t kGroup = 64;              // blocks whose scales are made together
constexpr int64_t kChunk = 8192;            // columns of a row that are encoded in one go

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename Function>
void ForEach(Executor& executor, int64_t tasks, Function& function) {
  executor.Run(
      tasks,
      [](void* context, int64_t task) {
        FloatState state;
        (*static_cast<Function*>(context))(task);
      },
      &function);
}

class Run {
 public:
  Run(const QuantizeProblem& problem, const QuantizeKernels& kernels, Executor& executor)
      : p_(problem),
        executor_(executor),
        peaks_(kernels.peaks[static_cast<int>(p_.input)]),
        encode_((p_.stochastic ? kernels.stochastic : kernels.nearest)[static_cast<int>(p_.input)]),
        input_bytes_(InputBytes(p_.input)),
        scale_bytes_(p_.rule.kind == ScaleKind::kF32 ? 4 : 1),
        grid_rows_(CeilDiv(p_.rows, p_.block_rows)),
        grid_columns_(CeilDiv(p_.columns, p_.block_columns)),
        used_rows_(std::min(p_.block_rows, p_.rows)),
        used_columns_(std::min(p_.block_columns, p_.columns)),
        block_bytes_(used_rows_ * used_columns_ * input_bytes_),
        // An inner block that ends inside a byte: the two nibbles have different scales.
        split_bytes_(p_.element == Element::kE2m1 && p_.block_columns % 2 == 1 && grid_columns_ > 1) {}

  void All() {
    if (p_.rule.given) {
      std::memcpy(p_.scale, p_.given_scale, p_.batch * grid_rows_ * grid_columns_ * scale_bytes_);
      EncodeAllRows();
    } else if (block_bytes_ > kLargeBlock) {
      LargeBlockScales();
      EncodeAllRows();
    } else {
      SmallBlocks();
      if (split_bytes_) EncodeAllRows();
    }
  }

 private:
  const uint8_t* X(int64_t b, int64_t r, int64_t c) const {
    return static_cast<const uint8_t*>(p_.x) + ((b * p_.rows + r) * p_.columns + c) * input_bytes_;
  }
  uint8_t* CodesAt(int64_t b, int64_t r, int64_t c) const {
    const int64_t index = (b * p_.rows + r) * p_.columns + c;
    return p_.codes + (p_.element == Element::kE2m1 ? index / 2 : index);
  }
  Random RandomAt(int64_t b, int64_t r, int64_t c) const {
    const uint64_t index = static_cast<uint64_t>((b * p_.rows + r) * p_.columns + c);
    return {{p_.key[0], p_.key[1]}, p_.offset + index};
  }
  float Global(int64_t b) const {
    if (p_.global_scale == nullptr) return 1.0f;
    const float value = p_.global_scale[b];
    return std::fabs(value) < kMinScale ? 0.0f : value;  // a subnormal counts as zero
  }

  // Makes and stores the scale of block (b, i, j) from its peak in the input type.
  Divisor StoreScale(int64_t b, int64_t i, int64_t j, uint32_t peak) const {
    const uint32_t stored = StoredScale(p_.rule, PeakToF32(p_.input, peak), Global(b));
    uint8_t* out = ScaleAt(b, i, j);
    if (scale_bytes_ == 4) {
      std::memcpy(out, &stored, 4);
    } else {
      *out = static_cast<uint8_t>(stored);
    }
    return DivisorOf(p_.rule, stored, p_.global_scale != nullptr, Global(b));
  }
  uint8_t* ScaleAt(int64_t b, int64_t i, int64_t j) const {
    return static_cast<uint8_t*>(p_.scale) + ((b * grid_rows_ + i) * grid_columns_ + j) * scale_bytes_;
  }
  Divisor LoadDivisor(int64_t b, int64_t i, int64_t j) const {
    uint32_t stored = *ScaleAt(b, i, j);
    if (scale_bytes_ == 4) std::memcpy(&stored, ScaleAt(b, i, j), 4);
    return DivisorOf(p_.rule, stored, p_.global_scale != nullptr, Global(b));
  }

  Codes CodesKind() const {
    switch (p_.element) {
      case Element::kE5m2: return Codes::kE5m2;
      case Element::kE2m1: return Codes::kE2m1;
      default: return Codes::kE4m3;
    }
  }

  // Scales, and codes unless they must wait for the scale of a neighbor.
  void SmallBlocks() {
    const int64_t group = std::clamp<int64_t>(kGroupBytes / block_bytes_, 1, kGroup);
    const int64_t bands = p_.batch * grid_rows_;  // rows of blocks
    const int64_t band_bytes = used_rows_ * p_.columns * input_bytes_;
    // A task is some bands, or a piece of one.
    const int64_t bands_per_task = std::max<int64_t>(1, kTaskBytes / band_bytes);
    const int64_t piece =
        band_bytes <= kTaskBytes ? grid_columns_ : CeilDiv(kTaskBytes / block_bytes_ + 1, group) * group;
    const int64_t pieces = CeilDiv(grid_columns_, piece);
    auto task = [&](int64_t t) {
      const int64_t first = t / pieces * bands_per_task, j_first = t % pieces * piece;
      for (int64_t band = first; band < std::min(first + bands_per_task, bands); ++band) {
        const int64_t end = std::min(j_first + piece, grid_columns_);
        for (int64_t j = j_first; j < end; j += group) {
          BlockGroup(band / grid_rows_, band % grid_rows_, j, std::min(group, end - j));
        }
      }
    };
    ForEach(executor_, CeilDiv(bands, bands_per_task) * pieces, task);
  }

  void BlockGroup(int64_t b, int64_t i, int64_t j, int64_t count) const {
    const int64_t first_row = i * p_.block_rows, end_row = std::min(first_row + p_.block_rows, p_.rows);
    const int64_t first_column = j * p_.block_columns;
    const int64_t columns = std::min(count * p_.block_columns, p_.columns - first_column);
    uint32_t peaks[kGroup] = {};
    for (int64_t r = first_row; r < end_row; ++r) peaks_(X(b, r, first_column), columns, p_.block_columns, peaks);
    Divisor divisors[kGroup];
    for (int64_t n = 0; n < count; ++n) divisors[n] = StoreScale(b, i, j + n, peaks[n]);
    if (split_bytes_) return;
    for (int64_t r = first_row; r < end_row; ++r) {
      encode_[static_cast<int>(CodesKind())]({X(b, r, first_column), columns, p_.block_columns, divisors,
                                              CodesAt(b, r, first_column), RandomAt(b, r, first_column)});
    }
  }

  void LargeBlockScales() {
    const int64_t slab_columns = std::min<int64_t>(used_columns_, kTaskBytes / input_bytes_);
    const int64_t slab_rows = std::clamp<int64_t>(kTaskBytes / (slab_columns * input_bytes_), 1, used_rows_);
    const int64_t down = CeilDiv(used_rows_, slab_rows), across = CeilDiv(used_columns_, slab_columns);
    const int64_t blocks = p_.batch * grid_rows_ * grid_columns_;
    std::vector<uint32_t> peaks(blocks * down * across, 0);
    auto find = [&](int64_t t) {
      const int64_t block = t / (down * across), slab = t % (down * across);
      const int64_t j = block % grid_columns_, i = block / grid_columns_ % grid_rows_;
      const int64_t b = block / grid_columns_ / grid_rows_;
      const int64_t r0 = i * p_.block_rows + slab / across * slab_rows;
      const int64_t c0 = j * p_.block_columns + slab % across * slab_columns;
      // Slabs of a partial block may be empty.
      const int64_t r1 = std::min({r0 + slab_rows, (i + 1) * p_.block_rows, p_.rows});
      const int64_t c1 = std::min({c0 + slab_columns, (j + 1) * p_.block_columns, p_.columns});
      if (c0 >= c1) return;
      uint32_t peak = 0;
      for (int64_t r = r0; r < r1; ++r) peaks_(X(b, r, c0), c1 - c0, c1 - c0, &peak);
      peaks[t] = peak;
    };
    ForEach(executor_, static_cast<int64_t>(peaks.size()), find);
    auto store = [&](int64_t block) {
      const auto from = peaks.begin() + block * down * across;
      StoreScale(block / grid_columns_ / grid_rows_, block / grid_columns_ % grid_rows_, block % grid_columns_,
                 *std::max_element(from, from + down * across));
    };
    ForEach(executor_, blocks, store);
  }

  // All codes from the stored scales.
  void EncodeAllRows() {
    // A chunk starts on an even column, and on a block where blocks are short.
    const int64_t pair = 2 * p_.block_columns;
    const int64_t chunk = std::min(pair <= kChunk ? CeilDiv(kChunk, pair) * pair : kChunk, p_.columns);
    const int64_t chunks = CeilDiv(p_.columns, chunk);
    const int64_t units = p_.batch * p_.rows * chunks;
    const int64_t units_per_task = std::max<int64_t>(1, kTaskBytes / (chunk * input_bytes_));
    auto task = [&](int64_t t) {
      std::vector<uint8_t> unpacked(split_bytes_ ? chunk : 0);
      const int64_t end = std::min((t + 1) * units_per_task, units);
      for (int64_t unit = t * units_per_task; unit < end; ++unit) {
        const int64_t row = unit / chunks, first = unit % chunks * chunk;
        EncodeChunk(row / p_.rows, row % p_.rows, first, std::min(first + chunk, p_.columns), unpacked.data());
      }
    };
    ForEach(executor_, CeilDiv(units, units_per_task), task);
  }

  void EncodeChunk(int64_t b, int64_t r, int64_t first, int64_t end, uint8_t* unpacked) const {
    const int64_t i = r / p_.block_rows, width = p_.block_columns;
    const Codes kind = split_bytes_ ? Codes::kE2m1Unpacked : CodesKind();
    Divisor divisors[kGroup];
    for (int64_t c = first; c < end;) {
      const int64_t j = c / width;
      // To the end of a block begun before, or some whole blocks.
      const int64_t count = c % width ? 1 : std::min(kGroup, CeilDiv(end - c, width));
      const int64_t stop = std::min((j + count) * width, end);
      for (int64_t n = 0; n < count; ++n) divisors[n] = LoadDivisor(b, i, j + n);
      encode_[static_cast<int>(kind)]({X(b, r, c), stop - c, c % width ? stop - c : width, divisors,
                                       split_bytes_ ? unpacked + (c - first) : CodesAt(b, r, c), RandomAt(b, r, c)});
      c = stop;
    }
    if (!split_bytes_) return;
    uint8_t* codes = CodesAt(b, r, first);
    for (int64_t k = 0; k < (end - first) / 2; ++k) {
      codes[k] = static_cast<uint8_t>(unpacked[2 * k] | (unpacked[2 * k + 1] << 4));
    }
  }

  const QuantizeProblem& p_;
  Executor& executor_;
  void (*const peaks_)(const void*, int64_t, int64_t, uint32_t*);
  void (*const* const encode_)(const RowPiece&);
  const int64_t input_bytes_, scale_bytes_;
  const int64_t grid_rows_, grid_columns_;
  const int64_t used_rows_, used_columns_;  // of a full block that x really has
  const int64_t block_bytes_;
  const bool split_bytes_;
};

}  // namespace

void RunQuantize(const QuantizeProblem& problem, const QuantizeKernels& kernels, Executor& executor) {
  Run(problem, kernels, executor).All();
}

}  // namespace jaxlowbit::cpu
