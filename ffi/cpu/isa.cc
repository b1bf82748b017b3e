#include "ffi/cpu/isa.h"

#include <cstdint>

#include "ffi/common/export.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace jaxlowbit {
namespace {

#if defined(__x86_64__)

struct Leaf {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// All zeros where the processor has no such leaf.
Leaf Cpuid(uint32_t leaf, uint32_t subleaf) {
  Leaf out;
  __get_cpuid_count(leaf, subleaf, &out.eax, &out.ebx, &out.ecx, &out.edx);
  return out;
}

// The register states that the operating system saves at a context switch.
uint64_t EnabledStates() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

bool Bit(uint32_t value, int index) { return ((value >> index) & 1) != 0; }

// Whether this process may use AMX tiles and bf16 products of them.
bool TilesUsable([[maybe_unused]] const Leaf& seven, [[maybe_unused]] uint64_t states) {
#if defined(JAXLOWBIT_EMULATE_AMX)
  return true;
#elif defined(JAXLOWBIT_HAS_AMX) && defined(__linux__) && defined(SYS_arch_prctl)
  constexpr uint64_t kTileStates = 0x60000;  // tile configuration and tile data
  if (!Bit(seven.edx, 24) || !Bit(seven.edx, 22) || (states & kTileStates) != kTileStates) return false;
  // Linux gives the 8 KiB of tile data only to processes that ask (Documentation/arch/x86/xstate.rst). The
  // permission covers all threads, those of XLA's pool too.
  constexpr int kArchReqXcompPerm = 0x1023;
  constexpr int kTileDataState = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileDataState) == 0;
#else
  return false;
#endif
}

CpuFeatures Detect() {
  constexpr uint64_t kAvxStates = 0x6;        // XMM and YMM
  constexpr uint64_t kAvx512States = 0xe6;    // and masks, upper ZMM halves, ZMM16 to 31
  CpuFeatures found;
  const Leaf one = Cpuid(1, 0);
  if (!Bit(one.ecx, 27)) return found;  // no OSXSAVE, so no xgetbv
  const uint64_t states = EnabledStates();
  const Leaf seven = Cpuid(7, 0);
  found.avx2 = (states & kAvxStates) == kAvxStates && Bit(one.ecx, 12) /* FMA */ && Bit(one.ecx, 29) /* F16C */ &&
               Bit(seven.ebx, 5);
  found.avx512 = found.avx2 && (states & kAvx512States) == kAvx512States && Bit(seven.ebx, 16) /* F */ &&
                 Bit(seven.ebx, 17) /* DQ */ && Bit(seven.ebx, 30) /* BW */ && Bit(seven.ebx, 31) /* VL */;
#if !defined(JAXLOWBIT_WITHOUT_VBMI)  // which only tests define
  found.avx512_vbmi = found.avx512 && Bit(seven.ecx, 1);
#endif
  found.amx = found.avx512_vbmi && Bit(Cpuid(7, 1).eax, 5) /* AVX512-BF16 */ && TilesUsable(seven, states);
  return found;
}

#else

CpuFeatures Detect() { return CpuFeatures(); }

#endif

}  // namespace

const CpuFeatures& DetectedCpuFeatures() {
  static const CpuFeatures features = Detect();
  return features;
}

Tier BestTier() {
  const CpuFeatures& features = DetectedCpuFeatures();
  if (features.amx) return Tier::kAmx;
  if (features.avx512) return Tier::kAvx512;
  if (features.avx2) return Tier::kAvx2;
  return Tier::kPortable;
}

}  // namespace jaxlowbit

JAXLOWBIT_EXPORT int jaxlowbit_cpu_best_tier() { return static_cast<int>(jaxlowbit::BestTier()); }
