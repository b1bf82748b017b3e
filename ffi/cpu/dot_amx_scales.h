// Where the AMX kernel applies scales. Its products are exact in bf16 operands, so codes go in unrounded, and a
// scale is either
//
//   folded     multiplied into the codes, where code * scale is a bf16 number again: E8M0 scales (a power of two) and
//              E4M3 scales (4 + 4 significant bits at most, and bf16 has 8). In the transposed form also f32
//              scales that change within a tile: one rounding of code * scale to bf16, which the contract allows
//   promoted   multiplied with the f32 sum over the contraction indices that share it, as Hopper's FP8 kernels do
//
// No scale is ever rounded by itself.
#ifndef JAXLOWBIT_FFI_CPU_DOT_AMX_SCALES_H_
#define JAXLOWBIT_FFI_CPU_DOT_AMX_SCALES_H_

#include "ffi/cpu/dot.h"

namespace jaxlowbit {

constexpr int64_t kTileDepth = 32;  // bf16 numbers in a tile's row: contraction of one tile product

inline bool ExactInBf16(ScaleKind kind) { return kind == ScaleKind::kE8m0 || kind == ScaleKind::kE4m3; }

// A sum over `block` contraction indices is a sum of whole tile products.
inline bool WholeTiles(int64_t block, int64_t contraction) { return block % kTileDepth == 0 || block >= contraction; }

// Transposed with a global scale for every row of rhs: it changes along the contraction.
inline bool RhsGlobalAlongContraction(const DotProblem& p) { return p.transposed && p.rhs.global_count > 1; }

inline bool FoldsRhs(const DotProblem& p) {
  return ExactInBf16(p.rhs.scale_kind) || RhsGlobalAlongContraction(p) || !WholeTiles(p.block_c(), p.contraction());
}

inline bool FoldsLhs(const DotProblem& p) { return ExactInBf16(p.lhs.scale_kind); }

inline bool AmxServesScales(const DotProblem& p) {
  const bool rhs = ExactInBf16(p.rhs.scale_kind) || p.transposed || WholeTiles(p.block_c(), p.contraction());
  const bool lhs = p.lhs.element == Element::kPlain || ExactInBf16(p.lhs.scale_kind) ||
                   WholeTiles(p.lhs.block_cols, p.contraction());
  return rhs && lhs;
}

// The problem with only the folded part of rhs's scales, and with only the promoted part.
inline DotProblem WithFoldedScales(DotProblem p) {
  if (!RhsGlobalAlongContraction(p)) p.rhs.global_count = 0;
  return p;
}

inline DotProblem WithPromotedScales(DotProblem p) {
  const bool folds_global = RhsGlobalAlongContraction(p);
  if (FoldsRhs(p)) p.rhs.scale_kind = ScaleKind::kNone;
  if (folds_global) p.rhs.global_count = 0;
  return p;
}

// The promoted part of row m's scale.
inline float PromotedLhsScale(const DotProblem& p, int64_t m, int64_t c) {
  const float global = p.lhs.Global(m);
  if (p.lhs.element == Element::kPlain || FoldsLhs(p)) return global;
  return p.lhs.Scale(m / p.lhs.block_rows, c / p.lhs.block_cols) * global;
}

// The end, at most `limit`, of the contraction indices from c that share all promoted scales; a whole number of
// tiles away where c is, unless it is the limit.
inline int64_t PromotionEnd(const DotProblem& p, int64_t c, int64_t limit) {
  if (!FoldsRhs(p)) limit = std::min(limit, (c / p.block_c() + 1) * p.block_c());
  if (p.lhs.element != Element::kPlain && !FoldsLhs(p)) {
    limit = std::min(limit, (c / p.lhs.block_cols + 1) * p.lhs.block_cols);
  }
  return limit;
}

}  // namespace jaxlowbit

#endif  // JAXLOWBIT_FFI_CPU_DOT_AMX_SCALES_H_
