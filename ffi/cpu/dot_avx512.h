// Vectors of the AVX-512 tiers. To be included after "#pragma GCC target".
#ifndef JAXLOWBIT_FFI_CPU_DOT_AVX512_H_
#define JAXLOWBIT_FFI_CPU_DOT_AVX512_H_

#include "ffi/cpu/dot.h"
#include "ffi/cpu/dot_pack.h"

namespace jaxlowbit {
namespace {

// 32 sign-extended E4M3 codes to f16 numbers of 2**-8 times their value. An E4M3 code is an f16 whose exponent
// lacks the top bit, seven places up; f16 conversion, unlike f32 arithmetic, never flushes subnormals. Only the
// NaN code carries into the exponent's top bit when 0x80 is added: that bit makes it an f16 NaN.
inline __m512i HalvesFromE4m3(__m512i codes) {
  const __m512i half = _mm512_and_si512(_mm512_slli_epi16(codes, 7), _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
  const __m512i carry = _mm512_add_epi16(half, _mm512_set1_epi16(0x80));
  return _mm512_ternarylogic_epi32(half, carry, _mm512_set1_epi16(0x4000), 0xf8);  // half | (carry & 0x4000)
}

struct Avx512 {
  using V = float __attribute__((vector_size(64)));
  static constexpr int kLanes = 16;
  static constexpr int kPanel = 32;
  static constexpr int kRows = 14;  // 28 accumulators, 2 columns, 1 row value
  static constexpr int kGemvRows = 8;
  static constexpr int kGemvAccumulators = 16;

  static V E4m3(const uint8_t* codes) {
    const __m256i wide = _mm256_cvtepi8_epi16(Load<__m128i_u>(codes));
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
    const __m256i carry = _mm256_add_epi16(half, _mm256_set1_epi16(0x80));
    const __m256i fixed = _mm256_ternarylogic_epi32(half, carry, _mm256_set1_epi16(0x4000), 0xf8);
    return _mm512_cvtph_ps(fixed) * 256.0f;
  }
  static V E2m1(const uint8_t* codes) {
    return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(Load<__m128i_u>(codes)), _mm512_loadu_ps(kE2m1.value));
  }
  static void F16ToFloat(const uint8_t* in, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) _mm512_storeu_ps(out + i, _mm512_cvtph_ps(Load<__m256i_u>(in + 2 * i)));
    for (; i < n; ++i) out[i] = FloatFromF16(Load<uint16_t>(in + 2 * i));
  }
  static void FloatToF16(const float* in, int64_t n, uint8_t* out) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
      Store<__m256i_u>(out + 2 * i, _mm512_cvtps_ph(_mm512_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
    }
    for (; i < n; ++i) Store<uint16_t>(out + 2 * i, F16FromFloat(in[i]));
  }
  static V Permute(V values, const int32_t* lanes) {
    return _mm512_permutexvar_ps(_mm512_loadu_si512(lanes), values);
  }
  static float Sum(V values) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(values), _mm512_extractf32x8_ps(values, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
};

}  // namespace
}  // namespace jaxlowbit

#endif  // JAXLOWBIT_FFI_CPU_DOT_AVX512_H_
