// The tile instructions of Intel AMX that the product uses, by their names (Intel SDM, volume 2). Tiles are always
// 16 rows of 64 bytes: the kernels pad with zeros instead of configuring smaller ones.
//
// Own assembly rather than <immintrin.h>: the intrinsics do not tell the compiler that they read memory, and they
// take tile numbers as text. With JAXLOWBIT_EMULATE_AMX, which only tests define, plain loops do the same on any
// processor, and stop the program on what would raise #UD or #GP.
#ifndef JAXLOWBIT_FFI_CPU_AMX_TILE_H_
#define JAXLOWBIT_FFI_CPU_AMX_TILE_H_

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace jaxlowbit {
namespace {

constexpr int kTiles = 8, kTileRows = 16, kTileRowBytes = 64, kTileBytes = kTileRows * kTileRowBytes;

// The operand of LDTILECFG.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  TileConfig() {
    for (int tile = 0; tile < kTiles; ++tile) {
      row_bytes[tile] = kTileRowBytes;
      rows[tile] = kTileRows;
    }
  }
};
static_assert(sizeof(TileConfig) == 64, "LDTILECFG reads 64 bytes");

#if defined(JAXLOWBIT_EMULATE_AMX)

struct TileFile {
  bool configured = false;
  int rows[kTiles], row_bytes[kTiles];
  uint8_t data[kTiles][kTileRows][kTileRowBytes];
};

inline TileFile& Tiles() {
  thread_local TileFile file;
  return file;
}

inline void TileRequire(bool condition) {
  if (!condition) std::abort();
}

inline void TileLoadConfig(const TileConfig& config) {
  TileFile& file = Tiles();
  TileRequire(config.palette == 1 && config.start_row == 0);
  for (uint8_t byte : config.reserved) TileRequire(byte == 0);
  for (int tile = 0; tile < 16; ++tile) {
    TileRequire(tile < kTiles || (config.rows[tile] == 0 && config.row_bytes[tile] == 0));
    TileRequire(config.rows[tile] <= kTileRows && config.row_bytes[tile] <= kTileRowBytes);
    TileRequire((config.rows[tile] == 0) == (config.row_bytes[tile] == 0));
    if (tile >= kTiles) continue;
    file.rows[tile] = config.rows[tile];
    file.row_bytes[tile] = config.row_bytes[tile];
  }
  std::memset(file.data, 0, sizeof(file.data));
  file.configured = true;
}

inline void TileRelease() { Tiles().configured = false; }

template <int kTile>
void TileZero() {
  static_assert(kTile >= 0 && kTile < kTiles, "there are eight tiles");
  TileRequire(Tiles().configured);
  std::memset(Tiles().data[kTile], 0, kTileBytes);
}

template <int kTile>
void TileLoad(const void* from, int64_t stride) {
  TileZero<kTile>();
  const TileFile& file = Tiles();
  for (int row = 0; row < file.rows[kTile]; ++row) {
    std::memcpy(Tiles().data[kTile][row], static_cast<const uint8_t*>(from) + row * stride, file.row_bytes[kTile]);
  }
}

template <int kTile>
void TileStore(void* to, int64_t stride) {
  const TileFile& file = Tiles();
  TileRequire(file.configured);
  for (int row = 0; row < file.rows[kTile]; ++row) {
    std::memcpy(static_cast<uint8_t*>(to) + row * stride, file.data[kTile][row], file.row_bytes[kTile]);
  }
}

// A bf16 number as TDPBF16PS takes it: subnormals are zero.
inline float TileBf16(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, sizeof(half));
  if ((half & 0x7f80) == 0) half &= 0x8000;
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// TDPBF16PS: kSum += kA * kB, in pairs along the contraction.
template <int kSum, int kA, int kB>
void TileDotBf16() {
  static_assert(kSum != kA && kSum != kB && kA != kB, "TDPBF16PS wants three different tiles");
  TileFile& file = Tiles();
  TileRequire(file.configured);
  TileRequire(file.row_bytes[kA] % 4 == 0 && file.row_bytes[kB] % 4 == 0 && file.row_bytes[kSum] % 4 == 0);
  TileRequire(file.rows[kSum] == file.rows[kA] && file.rows[kB] == file.row_bytes[kA] / 4);
  TileRequire(file.row_bytes[kSum] == file.row_bytes[kB]);
  for (int m = 0; m < file.rows[kSum]; ++m) {
    for (int n = 0; n < file.row_bytes[kSum] / 4; ++n) {
      float even = 0.0f, odd = 0.0f, sum;
      for (int pair = 0; pair < file.row_bytes[kA] / 4; ++pair) {
        const uint8_t* a = file.data[kA][m] + 4 * pair;
        const uint8_t* b = file.data[kB][pair] + 4 * n;
        even += TileBf16(a) * TileBf16(b);
        odd += TileBf16(a + 2) * TileBf16(b + 2);
      }
      std::memcpy(&sum, file.data[kSum][m] + 4 * n, sizeof(sum));
      sum += even + odd;
      std::memcpy(file.data[kSum][m] + 4 * n, &sum, sizeof(sum));
    }
  }
}

#else

inline void TileLoadConfig(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory"); }

inline void TileRelease() { __asm__ volatile("tilerelease" : : : "memory"); }

template <int kTile>
inline __attribute__((always_inline)) void TileZero() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

template <int kTile>
inline __attribute__((always_inline)) void TileLoad(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(from), "r"(stride) : "memory");
}

template <int kTile>
inline __attribute__((always_inline)) void TileStore(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(kTile), "r"(to), "r"(stride) : "memory");
}

// kSum += kA * kB, in pairs along the contraction.
template <int kSum, int kA, int kB>
inline __attribute__((always_inline)) void TileDotBf16() {
  static_assert(kSum != kA && kSum != kB && kA != kB, "TDPBF16PS wants three different tiles");
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kA), "i"(kB));
}

#endif

}  // namespace
}  // namespace jaxlowbit

#endif  // JAXLOWBIT_FFI_CPU_AMX_TILE_H_
