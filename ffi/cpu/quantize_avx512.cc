// The quantizer's row loops for AVX-512 (F, BW, DQ, VL).
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "ffi/cpu/quantize_kernels.h"
#include "ffi/cpu/quantize_simd.h"

JAXLOWBIT_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

namespace jaxlowbit::cpu {
namespace {

constexpr int kLanes = 16;
constexpr bool kHasMultiplyAdd = true;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

JAXLOWBIT_LANE __m256i Load32(const void* x) { return _mm256_loadu_si256(static_cast<const __m256i*>(x)); }

JAXLOWBIT_LANE Floats Load(const float* x, F32) { return (Floats)_mm512_loadu_ps(x); }
JAXLOWBIT_LANE Floats Load(const uint16_t* x, Bf16) {
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(Load32(x)), 16);
}
JAXLOWBIT_LANE Floats Load(const uint16_t* x, F16) { return (Floats)_mm512_cvtph_ps(Load32(x)); }

JAXLOWBIT_LANE Floats MultiplyAdd(Floats a, Floats b, Floats c) {
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

JAXLOWBIT_LANE void StoreBytes(Ints codes, uint8_t* out) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8((__m512i)codes));
}

JAXLOWBIT_LANE void StoreNibbles(Ints codes, uint8_t* out) {
  // In each 64 bits: the even code, and 28 bits down from the odd one, its nibble above.
  const __m512i wide = (__m512i)codes;
  const __m512i pairs = _mm512_or_si512(wide, _mm512_srli_epi64(wide, 28));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm512_cvtepi64_epi8(pairs));
}

JAXLOWBIT_LANE uint32_t Largest16(__m256i magnitudes) {  // there is a horizontal minimum only
  const __m128i half = _mm_max_epi16(_mm256_castsi256_si128(magnitudes), _mm256_extracti128_si256(magnitudes, 1));
  const __m128i inverted = _mm_xor_si128(half, _mm_set1_epi16(-1));
  return 0xFFFFu & ~static_cast<uint32_t>(_mm_extract_epi16(_mm_minpos_epu16(inverted), 0));
}

// Masked loads do not touch what they leave out.
uint32_t Peak(const uint16_t* x, int64_t n) {
  if (n <= 16) {
    const __m256i value = _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), x);
    return Largest16(_mm256_and_si256(value, _mm256_set1_epi16(0x7FFF)));
  }
  const __m512i mask = _mm512_set1_epi16(0x7FFF);
  __m512i a = _mm512_setzero_si512(), b = a;
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    a = _mm512_max_epi16(a, _mm512_and_si512(_mm512_loadu_si512(x + i), mask));
    b = _mm512_max_epi16(b, _mm512_and_si512(_mm512_loadu_si512(x + i + 32), mask));
  }
  for (; i < n; i += 32) {
    const __mmask32 lanes = n - i >= 32 ? ~__mmask32{0} : (__mmask32{1} << (n - i)) - 1;
    a = _mm512_max_epi16(a, _mm512_and_si512(_mm512_maskz_loadu_epi16(lanes, x + i), mask));
  }
  a = _mm512_max_epi16(a, b);
  return Largest16(_mm256_max_epi16(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1)));
}

uint32_t Peak(const uint32_t* x, int64_t n) {
  const __m512i mask = _mm512_set1_epi32(0x7FFFFFFF);
  __m512i a = _mm512_setzero_si512(), b = a;
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    a = _mm512_max_epi32(a, _mm512_and_si512(_mm512_loadu_si512(x + i), mask));
    b = _mm512_max_epi32(b, _mm512_and_si512(_mm512_loadu_si512(x + i + 16), mask));
  }
  for (; i < n; i += 16) {
    const __mmask16 lanes = static_cast<__mmask16>(n - i >= 16 ? 0xFFFFu : (1u << (n - i)) - 1);
    a = _mm512_max_epi32(a, _mm512_and_si512(_mm512_maskz_loadu_epi32(lanes, x + i), mask));
  }
  return static_cast<uint32_t>(_mm512_reduce_max_epi32(_mm512_max_epi32(a, b)));
}

#include "ffi/cpu/quantize_rows.h"

}  // namespace
}  // namespace jaxlowbit::cpu

JAXLOWBIT_TARGET_END

namespace jaxlowbit::cpu {

const QuantizeKernels& QuantizeKernelsAvx512() {
  static const QuantizeKernels kernels = MakeKernels();
  return kernels;
}

}  // namespace jaxlowbit::cpu
#endif  // defined(__x86_64__)
