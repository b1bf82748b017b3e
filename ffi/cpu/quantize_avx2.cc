// The quantizer's row loops for AVX2 with FMA and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "ffi/cpu/quantize_kernels.h"
#include "ffi/cpu/quantize_simd.h"

JAXLOWBIT_TARGET_BEGIN("avx2,fma,f16c")

namespace jaxlowbit::cpu {
namespace {

constexpr int kLanes = 8;
constexpr bool kHasMultiplyAdd = true;
typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(32)));

JAXLOWBIT_LANE __m128i Load16(const void* x) { return _mm_loadu_si128(static_cast<const __m128i*>(x)); }
JAXLOWBIT_LANE __m256i Load32(const void* x) { return _mm256_loadu_si256(static_cast<const __m256i*>(x)); }

JAXLOWBIT_LANE Floats Load(const float* x, F32) { return (Floats)_mm256_loadu_ps(x); }
JAXLOWBIT_LANE Floats Load(const uint16_t* x, Bf16) {
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(Load16(x)), 16);
}
JAXLOWBIT_LANE Floats Load(const uint16_t* x, F16) { return (Floats)_mm256_cvtph_ps(Load16(x)); }

JAXLOWBIT_LANE Floats MultiplyAdd(Floats a, Floats b, Floats c) {
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

JAXLOWBIT_LANE void StoreBytes(Ints codes, uint8_t* out) {
  const __m256i wide = (__m256i)codes;
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(words, words));
}

JAXLOWBIT_LANE void StoreNibbles(Ints codes, uint8_t* out) {
  // In each 64 bits: the even code, and 28 bits down from the odd one, its nibble above.
  const __m256i wide = (__m256i)codes;
  const __m256i pairs = _mm256_or_si256(wide, _mm256_srli_epi64(wide, 28));
  const __m128i pick = _mm_setr_epi8(0, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m128i low = _mm_shuffle_epi8(_mm256_castsi256_si128(pairs), pick);
  const __m128i high = _mm_shuffle_epi8(_mm256_extracti128_si256(pairs, 1), pick);
  const int bytes = _mm_cvtsi128_si32(_mm_unpacklo_epi16(low, high));
  std::memcpy(out, &bytes, 4);
}

JAXLOWBIT_LANE uint32_t Largest16(__m128i magnitudes) {  // there is a horizontal minimum only
  const __m128i inverted = _mm_xor_si128(magnitudes, _mm_set1_epi16(-1));
  return 0xFFFFu & ~static_cast<uint32_t>(_mm_extract_epi16(_mm_minpos_epu16(inverted), 0));
}

JAXLOWBIT_LANE uint32_t Largest32(__m128i magnitudes) {
  __m128i peak = _mm_max_epi32(magnitudes, _mm_shuffle_epi32(magnitudes, 0x4E));
  peak = _mm_max_epi32(peak, _mm_shuffle_epi32(peak, 0xB1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(peak));
}

// The last vector of a row overlaps the one before: a maximum may see a value twice.
uint32_t Peak(const uint16_t* x, int64_t n) {
  if (n >= 16) {
    const __m256i mask = _mm256_set1_epi16(0x7FFF);
    __m256i a = _mm256_and_si256(Load32(x + n - 16), mask), b = a;
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
      a = _mm256_max_epi16(a, _mm256_and_si256(Load32(x + i), mask));
      b = _mm256_max_epi16(b, _mm256_and_si256(Load32(x + i + 16), mask));
    }
    if (i + 16 <= n) a = _mm256_max_epi16(a, _mm256_and_si256(Load32(x + i), mask));
    a = _mm256_max_epi16(a, b);
    return Largest16(_mm_max_epi16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
  }
  if (n >= 8) {
    const __m128i mask = _mm_set1_epi16(0x7FFF);
    return Largest16(_mm_max_epi16(_mm_and_si128(Load16(x), mask), _mm_and_si128(Load16(x + n - 8), mask)));
  }
  uint32_t peak = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = x[i] & 0x7FFFu;
    peak = magnitude > peak ? magnitude : peak;
  }
  return peak;
}

uint32_t Peak(const uint32_t* x, int64_t n) {
  if (n >= 8) {
    const __m256i mask = _mm256_set1_epi32(0x7FFFFFFF);
    __m256i a = _mm256_and_si256(Load32(x + n - 8), mask), b = a;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
      a = _mm256_max_epi32(a, _mm256_and_si256(Load32(x + i), mask));
      b = _mm256_max_epi32(b, _mm256_and_si256(Load32(x + i + 8), mask));
    }
    if (i + 8 <= n) a = _mm256_max_epi32(a, _mm256_and_si256(Load32(x + i), mask));
    a = _mm256_max_epi32(a, b);
    return Largest32(_mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
  }
  uint32_t peak = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = x[i] & 0x7FFFFFFFu;
    peak = magnitude > peak ? magnitude : peak;
  }
  return peak;
}

#include "ffi/cpu/quantize_rows.h"

}  // namespace
}  // namespace jaxlowbit::cpu

JAXLOWBIT_TARGET_END

namespace jaxlowbit::cpu {

const QuantizeKernels& QuantizeKernelsAvx2() {
  static const QuantizeKernels kernels = MakeKernels();
  return kernels;
}

}  // namespace jaxlowbit::cpu
#endif  // defined(__x86_64__)
