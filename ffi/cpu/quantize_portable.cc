// The quantizer's row loops on any machine: 128-bit vectors, and no intrinsics but the fused multiply-add that every
// 64-bit Arm has.
#include <cstdint>
#include <cstring>

#include "ffi/cpu/quantize_kernels.h"
#include "ffi/cpu/quantize_simd.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace jaxlowbit::cpu {
namespace {

constexpr int kLanes = 4;
typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));

JAXLOWBIT_LANE Words Widen(const uint16_t* x) { return Words{x[0], x[1], x[2], x[3]}; }

JAXLOWBIT_LANE Floats Load(const float* x, F32) {
  Floats value;
  std::memcpy(&value, x, sizeof(value));
  return value;
}

JAXLOWBIT_LANE Floats Load(const uint16_t* x, Bf16) { return (Floats)(Widen(x) << 16); }

JAXLOWBIT_LANE Floats Load(const uint16_t* x, F16) {
  const Words half = Widen(x);
  const Ints magnitude = (Ints)((half & 0x7FFFu) << 13);
  const Ints normal = magnitude + (112 << 23);
  // A subnormal's fraction below an exponent of 2**-14 is that power of two too much.
  const Ints subnormal = (Ints)((Floats)(magnitude + (113 << 23)) - 0x1p-14f);
  const Ints special = magnitude + (224 << 23);
  const Ints value = magnitude < (1 << 23) ? subnormal : magnitude >= (31 << 23) ? special : normal;
  return (Floats)((Words)value | ((half & 0x8000u) << 16));
}

#if defined(__aarch64__)
constexpr bool kHasMultiplyAdd = true;
JAXLOWBIT_LANE Floats MultiplyAdd(Floats a, Floats b, Floats c) {
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#else
constexpr bool kHasMultiplyAdd = false;  // emulated it would be slower than a division; not called
[[maybe_unused]] JAXLOWBIT_LANE Floats MultiplyAdd(Floats a, Floats b, Floats c) { return a * b + c; }
#endif

JAXLOWBIT_LANE void StoreBytes(Ints codes, uint8_t* out) {
  for (int i = 0; i < kLanes; ++i) out[i] = static_cast<uint8_t>(codes[i]);
}

JAXLOWBIT_LANE void StoreNibbles(Ints codes, uint8_t* out) {
  for (int i = 0; i < kLanes; i += 2) out[i / 2] = static_cast<uint8_t>(codes[i] | (codes[i + 1] << 4));
}

uint32_t Peak(const uint16_t* x, int64_t n) {
  uint16_t peak = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t magnitude = x[i] & 0x7FFF;
    peak = magnitude > peak ? magnitude : peak;
  }
  return peak;
}

uint32_t Peak(const uint32_t* x, int64_t n) {
  int32_t peak = 0;  // signed, for which every vector unit has a maximum
  for (int64_t i = 0; i < n; ++i) {
    const int32_t magnitude = static_cast<int32_t>(x[i] & 0x7FFFFFFFu);
    peak = magnitude > peak ? magnitude : peak;
  }
  return static_cast<uint32_t>(peak);
}

#include "ffi/cpu/quantize_rows.h"

}  // namespace

const QuantizeKernels& QuantizeKernelsPortable() {
  static const QuantizeKernels kernels = MakeKernels();
  return kernels;
}

}  // namespace jaxlowbit::cpu
