// The AVX2 tier: AVX2, FMA and F16C.
#if defined(__x86_64__)

// Everything that is not this tier's own code, before the pragma: it must stay runnable anywhere.
#include <immintrin.h>

#include "ffi/cpu/dot.h"
#include "ffi/cpu/dot_plan.h"
#include "ffi/cpu/scratch.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "ffi/cpu/dot_blocked.h"
#include "ffi/cpu/dot_gemv.h"

namespace jaxlowbit {
namespace {

// The E4M3 codes in the high bytes of 16-bit lanes to f16 numbers of 2**-8 times their value, whatever the low bytes
// hold. An E4M3 code is an f16 whose exponent lacks the top bit, seven places up; f16 conversion, unlike f32
// arithmetic, never flushes subnormals. Only the NaN code carries into the exponent's top bit when 0x80 is added:
// that bit makes it an f16 NaN.
inline __m256i HalvesFromE4m3(__m256i codes) {
  const __m256i half = _mm256_and_si256(_mm256_srai_epi16(codes, 1), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
  const __m256i carry = _mm256_add_epi16(half, _mm256_set1_epi16(0x80));
  return _mm256_or_si256(half, _mm256_and_si256(carry, _mm256_set1_epi16(0x4000)));
}

// Twice the value of each E2M1 code, the codes being the bytes' low halves.
inline __m128i TwiceE2m1() { return _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12); }

struct Avx2 {
  using V = float __attribute__((vector_size(32)));
  static constexpr int kLanes = 8;
  static constexpr int kPanel = 16;
  static constexpr int kRows = 6;  // 12 accumulators, 2 columns, 1 row value
  static constexpr int kGemvRows = 4;
  static constexpr int kGemvAccumulators = 4;

  static V E4m3(const uint8_t* codes) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
    const __m256i high = _mm256_castsi128_si256(_mm_unpacklo_epi8(bytes, bytes));
    return _mm256_cvtph_ps(_mm256_castsi256_si128(HalvesFromE4m3(high))) * 256.0f;
  }
  static V E2m1(const uint8_t* codes) {
    const __m128i twice = _mm_shuffle_epi8(TwiceE2m1(), _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(twice)) * 0.5f;
  }
  static void F16ToFloat(const uint8_t* in, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(Load<__m128i_u>(in + 2 * i)));
    for (; i < n; ++i) out[i] = FloatFromF16(Load<uint16_t>(in + 2 * i));
  }
  static void FloatToF16(const float* in, int64_t n, uint8_t* out) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      Store<__m128i_u>(out + 2 * i, _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
    }
    for (; i < n; ++i) Store<uint16_t>(out + 2 * i, F16FromFloat(in[i]));
  }
  static V Permute(V values, const int32_t* lanes) {
    return _mm256_permutevar8x32_ps(values, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lanes)));
  }
  static float Sum(V values) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
};

struct E4m3Chunk {
  static constexpr int kCodes = 32, kBytes = 32, kVectors = 4, kGranule = 32;
  static constexpr float kUnit = 1.0f;
  // Codes at even places, then those at odd ones: each is the high byte of a 16-bit lane after at most one shift.
  static constexpr int Source(int vector, int lane) { return 16 * (vector % 2) + 2 * lane + vector / 2; }
  static void Decode(const uint8_t* bytes, Avx2::V* out) {
    const __m256i codes = Load<__m256i_u>(bytes);
    const __m256i even = HalvesFromE4m3(_mm256_slli_epi16(codes, 8)), odd = HalvesFromE4m3(codes);
    out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(even)) * 256.0f;
    out[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(even, 1)) * 256.0f;
    out[2] = _mm256_cvtph_ps(_mm256_castsi256_si128(odd)) * 256.0f;
    out[3] = _mm256_cvtph_ps(_mm256_extracti128_si256(odd, 1)) * 256.0f;
  }
};

// A lane takes eight codes that follow each other: byte j of its four holds codes 2 j and 2 j + 1.
struct E2m1Chunk {
  static constexpr int kCodes = 64, kBytes = 32, kVectors = 8, kGranule = 8;
  static constexpr float kUnit = 0.5f;
  static constexpr int Source(int vector, int lane) { return 8 * lane + vector; }
  static void Decode(const uint8_t* bytes, Avx2::V* out) {
    const __m256i codes = Load<__m256i_u>(bytes), nibble = _mm256_set1_epi8(15);
    const __m256i table = _mm256_broadcastsi128_si256(TwiceE2m1());
    const __m256i even = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, nibble));
    const __m256i odd = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble));
    out[0] = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(even, 24), 24));
    out[1] = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(odd, 24), 24));
    out[2] = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(even, 16), 24));
    out[3] = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(odd, 16), 24));
    out[4] = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(even, 8), 24));
    out[5] = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(odd, 8), 24));
    out[6] = _mm256_cvtepi32_ps(_mm256_srai_epi32(even, 24));
    out[7] = _mm256_cvtepi32_ps(_mm256_srai_epi32(odd, 24));
  }
};

}  // namespace

void DotAvx2(const DotProblem* problems, int64_t count, Executor& executor) {
  DotBlocked<Avx2>(problems, count, executor);
}

bool GemvAvx2Serves(const DotProblem& p) {
  if (p.transposed || p.m() > Avx2::kGemvRows) return false;
  return p.rhs.element == Element::kE2m1 ? ChunkServes<E2m1Chunk>(p.block_c(), p.contraction())
                                         : ChunkServes<E4m3Chunk>(p.block_c(), p.contraction());
}

void GemvAvx2(const DotProblem* problems, int64_t count, Executor& executor) {
  if (problems->rhs.element == Element::kE2m1) {
    DotGemv<Avx2, E2m1Chunk>(problems, count, executor);
  } else {
    DotGemv<Avx2, E4m3Chunk>(problems, count, executor);
  }
}

}  // namespace jaxlowbit

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // defined(__x86_64__)
