// Selects an instruction set for the functions that follow, on GCC and on Clang, so that no source file needs
// compiler flags of its own:
//
//   #include <...>                        every system header first: their functions keep the base instruction set
//   JAXLOWBIT_TARGET_BEGIN("avx2,fma")
//   namespace { ... }
//   JAXLOWBIT_TARGET_END
#ifndef JAXLOWBIT_FFI_CPU_QUANTIZE_SIMD_H_
#define JAXLOWBIT_FFI_CPU_QUANTIZE_SIMD_H_

#define JAXLOWBIT_PRAGMA(text) _Pragma(#text)

#if defined(__clang__)
#define JAXLOWBIT_TARGET_BEGIN(isa) \
  JAXLOWBIT_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define JAXLOWBIT_TARGET_END _Pragma("clang attribute pop")
#else
#define JAXLOWBIT_TARGET_BEGIN(isa) _Pragma("GCC push_options") JAXLOWBIT_PRAGMA(GCC target(isa))
#define JAXLOWBIT_TARGET_END _Pragma("GCC pop_options")
#endif

// A function over vectors. Inlining is a must: passed through a call, a wide vector would need an ABI that depends
// on the instruction set (what -Wpsabi tells about).
#define JAXLOWBIT_LANE static inline __attribute__((always_inline))
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
// GCC 12's own AVX-512 header trips this warning: its "undefined" vectors are initialized with themselves.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#endif  // JAXLOWBIT_FFI_CPU_QUANTIZE_SIMD_H_
