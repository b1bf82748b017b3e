// From a block's largest magnitude to its stored scale, and from a stored scale to what its values are divided by.
// Scalar, shared by all tiers. Expects the default floating-point state (FloatState below).
#ifndef JAXLOWBIT_FFI_CPU_QUANTIZE_SCALE_H_
#define JAXLOWBIT_FFI_CPU_QUANTIZE_SCALE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "ffi/common/enums.h"
#include "ffi/cpu/quantize_kernels.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jaxlowbit::cpu {

// XLA runs its CPU threads with subnormals flushed, other runtimes do not, and a caller may have changed the
// rounding mode. While one of these lives the thread rounds to nearest and flushes nothing, so results depend on
// the inputs alone; the contract's own flushes are written out where they are due.
class FloatState {
 public:
#if defined(__x86_64__)
  FloatState() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~FloatState() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FloatState() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~FloatState() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
  FloatState() {}
  ~FloatState() {}
#endif
  FloatState(const FloatState&) = delete;
  FloatState& operator=(const FloatState&) = delete;
};

inline uint32_t Bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

constexpr uint32_t kInfinityBits = 0x7F800000u;
constexpr uint32_t kNanBits = 0x7FC00000u;
constexpr uint32_t kMinNormalBits = 0x00800000u;
constexpr uint32_t kFractionBits = 0x007FFFFFu;
constexpr float kMinScale = 0x1p-126f;  // the smallest normal f32
constexpr uint8_t kE8m0Nan = 0xFF;
constexpr uint8_t kE4m3Nan = 0x7F;
constexpr uint8_t kE4m3Max = 0x7E;

struct ElementLimits {
  float max_code;
  int max_exponent;  // floor(log2(max_code))
  int mantissa;
};

inline ElementLimits LimitsOf(Element element) {
  switch (element) {
    case Element::kE5m2: return {57344.0f, 15, 2};
    case Element::kE2m1: return {6.0f, 2, 1};
    default: return {448.0f, 8, 3};
  }
}

// Everything of a call that its scales depend on.
struct ScaleRule {
  ElementLimits limits;
  ScaleKind kind;
  ScaleRounding rounding;
  float amax_ub;  // infinity: none
  bool given;     // the caller's scales, which need not bound anything
};

// A magnitude's bits in the input type, as f32 bits. f32 subnormals become zero.
inline uint32_t PeakToF32(Input input, uint32_t peak) {
  if (input == Input::kF16) {
    const uint32_t exponent = peak >> 10, fraction = peak & 0x3FFu;
    if (exponent == 31) return fraction ? kNanBits : kInfinityBits;
    if (exponent == 0) return Bits(static_cast<float>(fraction) * 0x1p-24f);
    return ((exponent + 112) << 23) | (fraction << 13);
  }
  const uint32_t bits = input == Input::kBf16 ? peak << 16 : peak;
  return bits < kMinNormalBits ? 0 : bits;
}

// Nearest E4M3 code of a number, saturating.
inline uint8_t E4m3Code(float value) {
  const float magnitude = std::fabs(value);
  const uint32_t bits = Bits(magnitude);
  uint32_t code;
  if (magnitude >= 448.0f) {
    code = kE4m3Max;
  } else if (magnitude < 0x1p-6f) {
    code = Bits(magnitude + 0x1p14f) - Bits(0x1p14f);  // the sum rounds to the spacing of E4M3 subnormals, 2**-9
  } else {
    code = ((bits + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
  }
  return static_cast<uint8_t>(code | (std::signbit(value) ? 0x80u : 0u));
}

inline float E4m3Value(uint8_t code) {
  const uint32_t magnitude = code & 0x7Fu;
  if (magnitude == kE4m3Nan) return FromBits(kNanBits);
  const float subnormal = static_cast<float>(magnitude) * 0x1p-9f;
  const float value = magnitude < 8 ? subnormal : FromBits((magnitude << 20) + (120u << 23));
  return code & 0x80 ? -value : value;
}

// The stored scale of a block, as f32 bits or as a byte. `global_scale` is 1 where there is none.
inline uint32_t StoredScale(const ScaleRule& rule, uint32_t peak_bits, float global_scale) {
  // Nothing is hidden: a block that holds inf or NaN says so, whatever bound the caller gave.
  if (peak_bits >= kInfinityBits) {
    return rule.kind == ScaleKind::kF32 ? kNanBits : rule.kind == ScaleKind::kE8m0 ? kE8m0Nan : kE4m3Nan;
  }
  float amax = FromBits(peak_bits);
  if (amax > rule.amax_ub) amax = rule.amax_ub;

  if (rule.kind == ScaleKind::kE4m3) {
    float scale = amax / rule.limits.max_code;
    if (scale < kMinScale) scale = 0.0f;
    scale /= global_scale;
    if (scale != scale) return kE4m3Nan;
    return std::max<uint8_t>(E4m3Code(scale), 1);  // code 1 is 2**-9, the smallest positive scale
  }

  if (rule.kind == ScaleKind::kF32) {
    float scale = amax / rule.limits.max_code;
    if (scale < kMinScale) scale = kMinScale;
    const uint32_t bits = Bits(scale);
    if (rule.rounding != ScaleRounding::kPow2) return bits;
    return (bits + kFractionBits) & ~kFractionBits;  // the exponent grows by one unless the fraction is zero
  }

  // E8M0: the biased f32 exponent of the wanted power of two is the byte.
  const uint32_t amax_bits = Bits(amax);
  int byte;
  switch (rule.rounding) {
    case ScaleRounding::kFloor: byte = static_cast<int>(amax_bits >> 23) - rule.limits.max_exponent; break;
    case ScaleRounding::kCeil:
      byte = static_cast<int>((amax_bits + kFractionBits) >> 23) - rule.limits.max_exponent;
      break;
    case ScaleRounding::kEven:
      byte = static_cast<int>((amax_bits + (1u << (22 - rule.limits.mantissa))) >> 23) - rule.limits.max_exponent;
      break;
    default: {  // rceil: the smallest power of two that amax / max_code does not exceed
      const bool above = (amax_bits & kFractionBits) > (Bits(rule.limits.max_code) & kFractionBits);
      byte = static_cast<int>(amax_bits >> 23) + above - rule.limits.max_exponent;
    }
  }
  // rceil has the bound of the f32 scales, 2**-126; the others use byte 0 too, which is 2**-127.
  const int smallest = rule.rounding == ScaleRounding::kRceil ? 1 : 0;
  return static_cast<uint32_t>(byte < smallest ? smallest : byte > 254 ? 254 : byte);
}

inline bool IsPowerOfTwo(float value) { return (Bits(value) & kFractionBits) == 0; }

// What a block's values are divided by, from its stored scale.
inline Divisor DivisorOf(const ScaleRule& rule, uint32_t stored, bool two_level, float global_scale) {
  float value;
  float lift = 1.0f;
  bool bounded = !rule.given && rule.amax_ub == std::numeric_limits<float>::infinity();
  if (rule.kind == ScaleKind::kF32) {
    value = FromBits(stored);
    if (std::fabs(value) < kMinScale) value = std::copysign(0.0f, value);
  } else if (rule.kind == ScaleKind::kE8m0) {
    value = stored == kE8m0Nan ? FromBits(kNanBits) : FromBits(stored << 23);
    if (stored == 0) value = kMinScale, lift = 2.0f;  // 2**-127, in normal numbers
  } else {
    value = E4m3Value(static_cast<uint8_t>(stored)) * global_scale;
    if (two_level && value < kMinScale) value = kMinScale;
    if (stored == kE4m3Max) bounded = false;  // may have saturated
  }
  if (lift == 1.0f) {
    const float magnitude = std::fabs(value);
    if (IsPowerOfTwo(value) && magnitude <= 0x1p126f && magnitude >= kMinScale) {
      return {value, 1.0f / value, lift, Division::kExact};
    }
    // The refined division wants every intermediate well inside f32's range. bounded: |x| is at most about twice
    // max_code times the scale, so the quotient cannot overflow.
    if (bounded && value >= 0x1p-60f && value <= 0x1p60f) return {value, 1.0f / value, lift, Division::kRefined};
  }
  return {value, 0.0f, lift, Division::kDivide};
}

}  // namespace jaxlowbit::cpu

#endif  // JAXLOWBIT_FFI_CPU_QUANTIZE_SCALE_H_
