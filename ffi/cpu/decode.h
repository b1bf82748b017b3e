// Values of single codes, scales and plain numbers, in portable C++. The vector kernels take their tables from
// here. Nothing here computes with subnormal floats, which XLA's threads flush.
#ifndef JAXLOWBIT_FFI_CPU_DECODE_H_
#define JAXLOWBIT_FFI_CPU_DECODE_H_

#include <cstdint>
#include <cstring>
#include <limits>

namespace jaxlowbit {

inline float FloatFromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t BitsFromFloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

template <int kSize>
struct FloatTable {
  float value[kSize];
};

// E4M3 of "OFP8" (OCP 8-bit floating point, revision 1.0): bias 7, no infinities, NaN is all ones.
constexpr FloatTable<256> MakeE4m3Table() {
  FloatTable<256> table{};
  for (int code = 0; code < 256; ++code) {
    const int exponent = (code >> 3) & 15;
    float value = exponent == 0 ? (code & 7) / 512.0f : (8 + (code & 7)) / 8.0f;
    for (int i = 7; i < exponent; ++i) value *= 2.0f;
    for (int i = exponent; exponent != 0 && i < 7; ++i) value *= 0.5f;
    if ((code & 127) == 127) value = std::numeric_limits<float>::quiet_NaN();
    table.value[code] = code & 128 ? -value : value;
  }
  return table;
}

// E2M1 of "OCP Microscaling formats (MX), version 1.0": bias 1, no NaN.
constexpr FloatTable<16> MakeE2m1Table() {
  FloatTable<16> table{};
  for (int code = 0; code < 16; ++code) {
    const int exponent = (code >> 1) & 3, mantissa = code & 1;
    const float value = exponent == 0 ? 0.5f * mantissa : (1.0f + 0.5f * mantissa) * (1 << (exponent - 1));
    table.value[code] = code & 8 ? -value : value;
  }
  return table;
}

inline constexpr FloatTable<256> kE4m3 = MakeE4m3Table();
inline constexpr FloatTable<16> kE2m1 = MakeE2m1Table();

// 2**(byte - 127), byte 255 is NaN. Byte 0 is an f32 subnormal.
// Without branches, since a row has many: the two odd ones differ from byte << 23 in the same bit.
inline float E8m0Value(uint8_t byte) {
  const uint32_t odd = byte == 0 || byte == 255 ? 0x00400000u : 0u;
  return FloatFromBits(static_cast<uint32_t>(byte) << 23 | odd);
}

inline float FloatFromBf16(uint16_t bits) { return FloatFromBits(static_cast<uint32_t>(bits) << 16); }

// To nearest, ties to even; a NaN stays one.
inline uint16_t Bf16FromFloat(float value) {
  const uint32_t bits = BitsFromFloat(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float FloatFromF16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return FloatFromBits(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  if (magnitude >= 0x0400u) return FloatFromBits(sign | ((magnitude << 13) + (112u << 23)));
  const float value = static_cast<float>(magnitude) * FloatFromBits(103u << 23);  // times 2**-24
  return sign != 0 ? -value : value;
}

// To nearest, ties to even, f16 subnormals included.
inline uint16_t F16FromFloat(float value) {
  const uint32_t bits = BitsFromFloat(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above round to inf
  if (magnitude >= 0x38800000u) {
    return static_cast<uint16_t>(sign | ((magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
  }
  if (magnitude < 0x33000000u) return static_cast<uint16_t>(sign);  // below half of the smallest f16
  const int shift = 126 - static_cast<int>(magnitude >> 23);        // 14 to 24: to units of 2**-24
  const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t kept = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
  return static_cast<uint16_t>(sign | (kept + (rest > half || (rest == half && (kept & 1u)) ? 1u : 0u)));
}

}  // namespace jaxlowbit

#endif  // JAXLOWBIT_FFI_CPU_DECODE_H_
