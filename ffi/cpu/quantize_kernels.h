// What a tier of the CPU quantizer offers: two loops over a piece of one row. Everything that decides a scale is
// outside (quantize_scale.h), compiled once, so tiers can differ in speed but not in a scale.
#ifndef JAXLOWBIT_FFI_CPU_QUANTIZE_KERNELS_H_
#define JAXLOWBIT_FFI_CPU_QUANTIZE_KERNELS_H_

#include <cstdint>

#include "ffi/common/enums.h"

namespace jaxlowbit::cpu {

enum class Input : int { kBf16 = 0, kF16 = 1, kF32 = 2 };
constexpr int kInputs = 3;

constexpr int InputBytes(Input input) { return input == Input::kF32 ? 4 : 2; }

// Input types as the row loops see them.
struct Bf16 {
  using Raw = uint16_t;
  static constexpr bool has_f32_subnormals = true;
};
struct F16 {
  using Raw = uint16_t;
  static constexpr bool has_f32_subnormals = false;  // its smallest number is 2**-24
};
struct F32 {
  using Raw = float;
  static constexpr bool has_f32_subnormals = true;
};

// What the codes of a row become. A nibble block of odd width ends inside a byte: such rows are encoded to one
// code a byte and packed by the caller.
enum class Codes : int { kE4m3 = 0, kE5m2 = 1, kE2m1 = 2, kE2m1Unpacked = 3 };
constexpr int kCodes = 4;

// How x / divisor is computed. All ways give the correctly rounded f32 quotient wherever it matters for a code.
enum class Division : int32_t {
  kDivide = 0,   // x * lift / divisor, one IEEE division; any divisor, any input
  kExact = 1,    // x * reciprocal, the divisor being a power of two whose reciprocal is a normal number
  kRefined = 2,  // x * reciprocal with one exact-remainder step; needs a bounded quotient and a normal reciprocal
};

struct Divisor {
  float value;
  float reciprocal;
  float lift;  // 2 where the divisor stands for half of it, 2**-127, which is no normal number; else 1
  Division division;
};

// Counter-based random words: word i of the stream belongs to element i of the flattened array.
struct Random {
  uint32_t key[2];
  uint64_t counter;  // of the row piece's first element
};

// `columns` values from `x`, in blocks of `block` (the last may be short); block j has divisors[j].
// For packed nibbles `block` and `columns` are even.
struct RowPiece {
  const void* x;
  int64_t columns;
  int64_t block;
  const Divisor* divisors;
  uint8_t* codes;
  Random random;  // read by the stochastic loops alone
};

struct QuantizeKernels {
  // Raises peaks[j] to the largest |x| of block j, as the bits of the input type with the sign cleared. Order of
  // those integers is order of magnitudes, with inf above every number and NaN above inf: one maximum finds all.
  void (*peaks[kInputs])(const void* x, int64_t columns, int64_t block, uint32_t* peaks);
  void (*nearest[kInputs][kCodes])(const RowPiece& piece);
  void (*stochastic[kInputs][kCodes])(const RowPiece& piece);
};

const QuantizeKernels& QuantizeKernelsPortable();
#if defined(__x86_64__)
const QuantizeKernels& QuantizeKernelsAvx2();
const QuantizeKernels& QuantizeKernelsAvx512();
#endif

}  // namespace jaxlowbit::cpu

#endif  // JAXLOWBIT_FFI_CPU_QUANTIZE_KERNELS_H_
