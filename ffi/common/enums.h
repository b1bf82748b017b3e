// Numbers that cross the FFI inside an op's "config" attribute. jaxlowbit/_ffi.py has the same ones;
// tests/test_ffi.py compares the two.
#ifndef JAXLOWBIT_FFI_COMMON_ENUMS_H_
#define JAXLOWBIT_FFI_COMMON_ENUMS_H_

#include <cstdint>

namespace jaxlowbit {

// How an operand's values are stored.
enum class Element : int32_t {
  kPlain = 0,  // bf16, f16 or f32: the buffer's own type says which
  kE4m3 = 1,   // float8_e4m3fn, one byte a value
  kE5m2 = 2,   // float8_e5m2, one byte a value
  kE2m1 = 3,   // FP4, two values a byte, the low nibble is the even index
};

// How an operand's block scales are stored. They are dequantization multipliers.
enum class ScaleKind : int32_t {
  kNone = 0,
  kF32 = 1,
  kE8m0 = 2,  // 2**(byte - 127); byte 255 is NaN
  kE4m3 = 3,  // float8_e4m3fn
};

// Which kernel serves a call on the CPU. kAuto takes the best one that the machine runs.
enum class Tier : int32_t {
  kAuto = 0,
  kPortable = 1,
  kAvx2 = 2,
  kAvx512 = 3,
  kAmx = 4,
};

// How a computed scale is rounded to its stored type.
enum class ScaleRounding : int32_t {
  kNone = 0,   // kept as computed in f32 (an E4M3 scale: to the nearest)
  kRceil = 1,  // to the power of two at or above amax / max_code
  kFloor = 2,  // OCP MX v1.0: 2**(floor(log2(amax)) - emax)
  kCeil = 3,
  kEven = 4,
  kPow2 = 5,   // an f32 scale, rounded up to a power of two
};

}  // namespace jaxlowbit

#endif  // JAXLOWBIT_FFI_COMMON_ENUMS_H_
