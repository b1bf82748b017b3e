// Which kernel tier this machine runs.
#ifndef JAXLOWBIT_FFI_CPU_ISA_H_
#define JAXLOWBIT_FFI_CPU_ISA_H_

#include "ffi/common/enums.h"

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
