// FP8 with few lhs rows where the processor permutes bytes (AVX-512 VBMI): half the instructions of the f16 way.
#if defined(__x86_64__)

#include <immintrin.h>

#include "ffi/cpu/dot.h"
#include "ffi/cpu/scratch.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC diagnostic ignored "-Wuninitialized"        // both: in GCC 12's own avx512fintrin.h
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c")
#endif

#include "ffi/cpu/dot_avx512.h"
#include "ffi/cpu/dot_bytes_avx512.h"
#include "ffi/cpu/dot_gemv.h"

namespace jaxlowbit {
namespace {

struct E4m3Chunk {
  static constexpr int kCodes = 64, kBytes = 64, kVectors = 4, kGranule = 16;
  static constexpr float kUnit = 1.0f;
  // Interleaving works within 16 bytes, and the two halves of a 32-bit lane are two codes.
  static constexpr int Source(int vector, int lane) {
    return 16 * (lane / 4) + 8 * (vector / 2) + 2 * (lane % 4) + vector % 2;
  }
  static void Decode(const uint8_t* bytes, Avx512::V* out) {
    const Bf16Bytes value = Bf16BytesFromE4m3(_mm512_loadu_si512(bytes));
    const __m512i first = _mm512_unpacklo_epi8(value.low, value.high);
    const __m512i second = _mm512_unpackhi_epi8(value.low, value.high);
    const __m512i odd = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
    out[0] = _mm512_castsi512_ps(_mm512_slli_epi32(first, 16));
    out[1] = _mm512_castsi512_ps(_mm512_and_si512(first, odd));
    out[2] = _mm512_castsi512_ps(_mm512_slli_epi32(second, 16));
    out[3] = _mm512_castsi512_ps(_mm512_and_si512(second, odd));
  }
};

}  // namespace

bool GemvAvx512VbmiServes(const DotProblem& p) {
  return !p.transposed && p.m() <= Avx512::kGemvRows && p.rhs.element == Element::kE4m3 &&
         ChunkServes<E4m3Chunk>(p.block_c(), p.contraction());
}

void GemvAvx512Vbmi(const DotProblem* problems, int64_t count, Executor& executor) {
  DotGemv<Avx512, E4m3Chunk>(problems, count, executor);
}

}  // namespace jaxlowbit

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // defined(__x86_64__)
