// The AVX-512 tier: F, BW, DQ and VL, as every server processor with AVX-512 has them.
#if defined(__x86_64__)

// Everything that is not this tier's own code, before the pragma: it must stay runnable anywhere.
#include <immintrin.h>

#include "ffi/cpu/dot.h"
#include "ffi/cpu/dot_plan.h"
#include "ffi/cpu/isa.h"
#include "ffi/cpu/scratch.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC diagnostic ignored "-Wuninitialized"        // both: in GCC 12's own avx512fintrin.h
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#include "ffi/cpu/dot_avx512.h"
#include "ffi/cpu/dot_blocked.h"
#include "ffi/cpu/dot_gemv.h"

namespace jaxlowbit {
namespace {

struct E4m3Chunk {
  static constexpr int kCodes = 32, kBytes = 32, kVectors = 2, kGranule = 32;
  static constexpr float kUnit = 1.0f;
  static constexpr int Source(int vector, int lane) { return 16 * vector + lane; }
  static void Decode(const uint8_t* bytes, Avx512::V* out) {
    const __m512i half = HalvesFromE4m3(_mm512_cvtepi8_epi16(Load<__m256i_u>(bytes)));
    out[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(half)) * 256.0f;
    out[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1)) * 256.0f;
  }
};

// A lane takes eight codes that follow each other; the table look-up ignores all but the low four bits.
struct E2m1Chunk {
  static constexpr int kCodes = 128, kBytes = 64, kVectors = 8, kGranule = 8;
  static constexpr float kUnit = 1.0f;
  static constexpr int Source(int vector, int lane) { return 8 * lane + vector; }
  static void Decode(const uint8_t* bytes, Avx512::V* out) {
    const __m512i codes = _mm512_loadu_si512(bytes);
    const __m512 table = _mm512_loadu_ps(kE2m1.value);
    out[0] = _mm512_permutexvar_ps(codes, table);
    out[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), table);
    out[2] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 8), table);
    out[3] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 12), table);
    out[4] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 16), table);
    out[5] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 20), table);
    out[6] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 24), table);
    out[7] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 28), table);
  }
};

}  // namespace

void DotAvx512(const DotProblem* problems, int64_t count, Executor& executor) {
  DotBlocked<Avx512>(problems, count, executor);
}

bool GemvAvx512Serves(const DotProblem& p) {
  if (p.transposed || p.m() > Avx512::kGemvRows) return false;
  return p.rhs.element == Element::kE2m1 ? ChunkServes<E2m1Chunk>(p.block_c(), p.contraction())
                                         : ChunkServes<E4m3Chunk>(p.block_c(), p.contraction());
}

void GemvAvx512(const DotProblem* problems, int64_t count, Executor& executor) {
  if (problems->rhs.element == Element::kE2m1) {
    DotGemv<Avx512, E2m1Chunk>(problems, count, executor);
  } else if (DetectedCpuFeatures().avx512_vbmi && GemvAvx512VbmiServes(*problems)) {
    GemvAvx512Vbmi(problems, count, executor);
  } else {
    DotGemv<Avx512, E4m3Chunk>(problems, count, executor);
  }
}

}  // namespace jaxlowbit

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // defined(__x86_64__)
