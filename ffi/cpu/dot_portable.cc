// The tier of any processor: 128-bit vectors, tables for the codes.
#include "ffi/cpu/dot.h"
#include "ffi/cpu/dot_blocked.h"

namespace jaxlowbit {
namespace {

struct Portable {
  using V = float __attribute__((vector_size(16)));
  static constexpr int kLanes = 4;
  static constexpr int kPanel = 8;
#if defined(__aarch64__)
  static constexpr int kRows = 8;  // 32 vector registers
#else
  static constexpr int kRows = 4;
#endif

  static V E4m3(const uint8_t* codes) {
    return V{kE4m3.value[codes[0]], kE4m3.value[codes[1]], kE4m3.value[codes[2]], kE4m3.value[codes[3]]};
  }
  static V E2m1(const uint8_t* codes) {
    return V{kE2m1.value[codes[0]], kE2m1.value[codes[1]], kE2m1.value[codes[2]], kE2m1.value[codes[3]]};
  }
  static void F16ToFloat(const uint8_t* in, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = FloatFromF16(Load<uint16_t>(in + 2 * i));
  }
  static void FloatToF16(const float* in, int64_t n, uint8_t* out) {
    for (int64_t i = 0; i < n; ++i) Store<uint16_t>(out + 2 * i, F16FromFloat(in[i]));
  }
};

}  // namespace

void DotPortable(const DotProblem* problems, int64_t count, Executor& executor) {
  DotBlocked<Portable>(problems, count, executor);
}

}  // namespace jaxlowbit
