// Which kernel tier this machine runs.
#ifndef JAXLOWBIT_FFI_CPU_ISA_H_
#define JAXLOWBIT_FFI_CPU_ISA_H_

#include "ffi/common/enums.h"

// Compilers that know AMX come with assemblers that do (GCC 11, Clang 11).
#if defined(__x86_64__) && defined(__has_include)
#if __has_include(<amxbf16intrin.h>) || (defined(__clang__) && __has_include(<amxintrin.h>))
#define JAXLOWBIT_HAS_AMX 1
#endif
#endif

namespace jaxlowbit {

// What the processor has and the operating system has switched on; found once.
struct CpuFeatures {
  bool avx2 = false;         // AVX2, FMA and F16C
  bool avx512 = false;       // F, BW, DQ and VL
  bool avx512_vbmi = false;  // byte permutations
  bool amx = false;          // AMX tiles with bf16 products, and AVX-512 with VBMI and BF16 to fill them
};

const CpuFeatures& DetectedCpuFeatures();

// The best tier of this machine. Never kAuto.
Tier BestTier();

}  // namespace jaxlowbit

#endif  // JAXLOWBIT_FFI_CPU_ISA_H_
