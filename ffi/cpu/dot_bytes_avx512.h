// E4M3 codes to bf16 by byte tables (AVX-512 VBMI). Every E4M3 value is a bf16 number.
// To be included after "#pragma GCC target".
#ifndef JAXLOWBIT_FFI_CPU_DOT_BYTES_AVX512_H_
#define JAXLOWBIT_FFI_CPU_DOT_BYTES_AVX512_H_

#include "ffi/cpu/decode.h"

namespace jaxlowbit {
namespace {

// High and low bytes of the bf16 numbers of the 128 codes without sign.
struct Bf16Tables {
  alignas(64) uint8_t high[128];
  alignas(64) uint8_t low[128];
};

// From the definition of the format rather than from kE4m3: a constant expression cannot look into a float.
constexpr Bf16Tables MakeBf16Tables() {
  Bf16Tables tables{};
  for (int code = 0; code < 128; ++code) {
    int exponent = code >> 3, mantissa = code & 7, bits = 0;
    if (code == 127) {
      bits = 0x7fc0;  // NaN
    } else if (code != 0) {
      if (exponent == 0) {  // subnormal: shift the leading bit out
        exponent = 1;
        for (; mantissa < 8; mantissa *= 2) --exponent;
        mantissa -= 8;
      }
      bits = ((exponent + 120) << 7) | (mantissa << 4);
    }
    tables.high[code] = static_cast<uint8_t>(bits >> 8);
    tables.low[code] = static_cast<uint8_t>(bits & 255);
  }
  return tables;
}

constexpr Bf16Tables kBf16Tables = MakeBf16Tables();

struct Bf16Bytes {
  __m512i high, low;
};

inline __attribute__((always_inline)) Bf16Bytes Bf16BytesFromE4m3(__m512i codes) {
  const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(kBf16Tables.high), codes,
                                                _mm512_load_si512(kBf16Tables.high + 64));
  const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(kBf16Tables.low), codes,
                                               _mm512_load_si512(kBf16Tables.low + 64));
  // high | (codes & 0x80)
  return {_mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8), low};
}

}  // namespace
}  // namespace jaxlowbit

#endif  // JAXLOWBIT_FFI_CPU_DOT_BYTES_AVX512_H_
