// The row loops of the CPU quantizer, written once over a tier's vectors (GCC and Clang vector extensions).
//
// Included by quantize_<tier>.cc AFTER that file has selected its instruction set and defined, in its own anonymous
// namespace, `kLanes`, the vectors `Floats`, `Ints`, `Words` of that many 32-bit lanes, and the functions listed
// below. There is no include guard and nothing here has external linkage: a function compiled for one instruction
// set must never be picked by the linker for another.
//
//   Floats Load(const uint16_t*, Bf16)   Load(const uint16_t*, F16)   Load(const float*, F32)    kLanes values, exact
//   Floats MultiplyAdd(a, b, c)          a * b + c rounded once (kHasMultiplyAdd says whether it exists)
//   void StoreBytes(Ints, uint8_t*)      low bytes of kLanes codes
//   void StoreNibbles(Ints, uint8_t*)    kLanes codes below 16 as kLanes / 2 bytes, low nibble first
//   uint32_t Peak(const uint16_t*, int64_t), Peak(const uint32_t*, int64_t)   largest value with the sign bit cleared

template <int kMantissaBits, int kMinExponent, uint32_t kMaxValueBits, int kNanCode, int kSignBit,
          bool kIsPacked>
struct ElementTraits {
  static constexpr int mantissa = kMantissaBits;
  static constexpr int32_t max_bits = kMaxValueBits;               // largest finite value as f32 bits
  static constexpr int32_t min_bits = (127 + kMinExponent) << 23;  // smallest normal value as f32 bits
  static constexpr int nan_code = kNanCode;
  static constexpr int sign = kSignBit;
  static constexpr bool packed = kIsPacked;
};
using E4m3Traits = ElementTraits<3, -6, 0x43E00000u, 0x7F, 7, false>;   // 448
using E5m2Traits = ElementTraits<2, -14, 0x47600000u, 0x7E, 7, false>;  // 57344
using E2m1Traits = ElementTraits<1, 0, 0x40C00000u, 0, 3, true>;     // 6; no NaN: its scale holds it
using E2m1UnpackedTraits = ElementTraits<1, 0, 0x40C00000u, 0, 3, false>;

constexpr int32_t kMagnitude = 0x7FFFFFFF;
constexpr int32_t kExponent = 0x7F800000;  // also the bits of infinity
constexpr int32_t kMinNormal = 0x00800000;

JAXLOWBIT_LANE Ints Splat(int32_t value) { return Ints{} + value; }
JAXLOWBIT_LANE Floats Splat(float value) { return Floats{} + value; }
JAXLOWBIT_LANE Ints Select(Ints mask, Ints a, Ints b) { return mask ? a : b; }
JAXLOWBIT_LANE Ints Min(Ints a, Ints b) { return a < b ? a : b; }
JAXLOWBIT_LANE Ints Max(Ints a, Ints b) { return a > b ? a : b; }

// x / divisor, correctly rounded where a code can depend on it. f32 subnormals count as zero.
template <typename In, Division kDivision>
JAXLOWBIT_LANE Floats Quotient(Floats x, const Divisor& by) {
  const Floats divisor = Splat(by.value), reciprocal = Splat(by.reciprocal);
  if constexpr (kDivision == Division::kRefined && kHasMultiplyAdd) {
    // Markstein: with the correctly rounded reciprocal and an exact remainder this is the IEEE quotient. No flush
    // of x is needed: the divisor is at least 2**-60 here, so a subnormal x is far below half the smallest code.
    Floats first = x * reciprocal;
    Floats remainder = MultiplyAdd(-first, divisor, x);
    return MultiplyAdd(remainder, reciprocal, first);
  } else {
    if constexpr (In::has_f32_subnormals) x = (Floats)((Ints)x & (((Ints)x & kMagnitude) >= Splat(kMinNormal)));
    return kDivision == Division::kExact ? x * reciprocal : x * by.lift / divisor;
  }
}

// Puts sign and NaN to the code of a magnitude. `sign` has the wanted sign in its top bit.
template <typename Element>
JAXLOWBIT_LANE Ints Finish(Ints code, Ints magnitude, Ints sign) {
  code |= ((Ints)((Words)sign >> (31 - Element::sign))) & Splat(1 << Element::sign);
  return Select(magnitude > Splat(kExponent), Splat(Element::nan_code), code);
}

// The nearest code, ties to even. Adding 2**(23 - mantissa) times the value's own power of two makes the f32 adder
// round to the element's spacing; the same sum serves below the smallest normal, where the spacing stays.
template <typename Element>
JAXLOWBIT_LANE Ints EncodeNearest(Floats quotient, Ints sign) {
  constexpr int kShift = 23 - Element::mantissa;
  Ints magnitude = (Ints)quotient & kMagnitude;
  Ints bounded = Min(magnitude, Splat(Element::max_bits));
  Ints anchor = (Max(bounded, Splat(Element::min_bits)) & kExponent) + (kShift << 23);
  Ints sum = (Ints)((Floats)bounded + (Floats)anchor);
  constexpr int32_t kBias = ((Element::min_bits >> 23) + kShift) << Element::mantissa;
  return Finish<Element>(sum - anchor + ((anchor >> kShift) - kBias), magnitude, sign);
}

// The code below or above with a probability equal to the distance: up where word * 2**-32, cut to 24 bits, is below
// the fraction. Every step is exact.
template <typename Element>
JAXLOWBIT_LANE Ints EncodeStochastic(Floats quotient, Ints sign, Words word) {
  Ints magnitude = (Ints)quotient & kMagnitude;
  Ints bounded = Min(magnitude, Splat(Element::max_bits));
  bounded &= bounded >= Splat(kMinNormal);  // a subnormal quotient is zero
  Ints exponent = Max(bounded, Splat(Element::min_bits)) & kExponent;
  Floats per_spacing = (Floats)(((254 + Element::mantissa) << 23) - exponent);
  Floats steps = (Floats)bounded * per_spacing;
  Ints whole = __builtin_convertvector(steps, Ints);
  Floats fraction = steps - __builtin_convertvector(whole, Floats);
  Floats uniform = __builtin_convertvector((Ints)(word >> 8), Floats) * 0x1p-24f;
  Ints up = (Ints)(uniform < fraction);  // -1 where it holds
  Ints code = whole - up + ((exponent - Element::min_bits) >> (23 - Element::mantissa));
  return Finish<Element>(code, magnitude, sign);  // the largest value has no fraction, so no code lies past it
}

template <int kBits>
JAXLOWBIT_LANE Words Rotate(Words x) {
  return (x << kBits) | (x >> (32 - kBits));
}

template <int kA, int kB, int kC, int kD>
JAXLOWBIT_LANE void FourRounds(Words& x0, Words& x1, uint32_t add0, uint32_t add1) {
  x0 += x1, x1 = Rotate<kA>(x1) ^ x0;
  x0 += x1, x1 = Rotate<kB>(x1) ^ x0;
  x0 += x1, x1 = Rotate<kC>(x1) ^ x0;
  x0 += x1, x1 = Rotate<kD>(x1) ^ x0;
  x0 += add0, x1 += add1;
}

// First output word of Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// 2011) for the counters from `counter` on, high word first.
JAXLOWBIT_LANE Words RandomWords(const uint32_t* key, uint64_t counter) {
  const uint32_t k0 = key[0], k1 = key[1], k2 = 0x1BD11BDAu ^ k0 ^ k1;
  Words lane = {};
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  Words x1 = lane + static_cast<uint32_t>(counter);
  Words x0 = static_cast<uint32_t>(counter >> 32) - (Words)(x1 < lane);  // the comparison gives -1 at a carry
  x0 += k0, x1 += k1;
  FourRounds<13, 15, 26, 6>(x0, x1, k1, k2 + 1);
  FourRounds<17, 29, 16, 24>(x0, x1, k2, k0 + 2);
  FourRounds<13, 15, 26, 6>(x0, x1, k0, k1 + 3);
  FourRounds<17, 29, 16, 24>(x0, x1, k1, k2 + 4);
  FourRounds<13, 15, 26, 6>(x0, x1, k2, k0 + 5);
  return x0;
}

template <typename In, typename Element, Division kDivision, bool kStochastic>
JAXLOWBIT_LANE void EncodeLanes(const typename In::Raw* x, const Divisor& divisor, const Random& random,
                                uint64_t counter, uint8_t* codes) {
  Floats value = Load(x, In{});
  Floats quotient = Quotient<In, kDivision>(value, divisor);
  // Not the quotient's sign: the refined division loses that of a zero.
  int32_t divisor_bits;
  std::memcpy(&divisor_bits, &divisor.value, 4);
  Ints sign = (Ints)value ^ divisor_bits;
  Ints code;
  if constexpr (kStochastic) {
    code = EncodeStochastic<Element>(quotient, sign, RandomWords(random.key, counter));
  } else {
    code = EncodeNearest<Element>(quotient, sign);
  }
  if constexpr (Element::packed) {
    StoreNibbles(code, codes);
  } else {
    StoreBytes(code, codes);
  }
}

// One block of one row. The tail goes through a buffer, so that nothing past the block is read or written.
template <typename In, typename Element, Division kDivision, bool kStochastic>
static void EncodeBlock(const typename In::Raw* x, int64_t columns, const Divisor& divisor, const Random& random,
                        uint64_t counter, uint8_t* codes) {
  constexpr int kPerByte = Element::packed ? 2 : 1;
  int64_t c = 0;
  for (; c + kLanes <= columns; c += kLanes) {
    EncodeLanes<In, Element, kDivision, kStochastic>(x + c, divisor, random, counter + c, codes + c / kPerByte);
  }
  if (c < columns) {
    typename In::Raw rest[kLanes] = {};
    uint8_t bytes[kLanes];
    std::memcpy(rest, x + c, (columns - c) * sizeof(rest[0]));
    EncodeLanes<In, Element, kDivision, kStochastic>(rest, divisor, random, counter + c, bytes);
    std::memcpy(codes + c / kPerByte, bytes, (columns - c) / kPerByte);
  }
}

template <typename In, typename Element, bool kStochastic>
static void EncodeRow(const RowPiece& piece) {
  constexpr int kPerByte = Element::packed ? 2 : 1;
  const auto* x = static_cast<const typename In::Raw*>(piece.x);
  const Divisor* divisor = piece.divisors;
  for (int64_t c = 0; c < piece.columns; c += piece.block, ++divisor) {
    const int64_t columns = piece.columns - c < piece.block ? piece.columns - c : piece.block;
    uint8_t* codes = piece.codes + c / kPerByte;
    const uint64_t counter = piece.random.counter + c;
    if constexpr (kStochastic) {
      // The threshold of a fraction is sharp, so only the true division will do.
      EncodeBlock<In, Element, Division::kDivide, true>(x + c, columns, *divisor, piece.random, counter, codes);
    } else if (divisor->division == Division::kRefined) {
      EncodeBlock<In, Element, Division::kRefined, false>(x + c, columns, *divisor, piece.random, counter, codes);
    } else if (divisor->division == Division::kExact) {
      EncodeBlock<In, Element, Division::kExact, false>(x + c, columns, *divisor, piece.random, counter, codes);
    } else {
      EncodeBlock<In, Element, Division::kDivide, false>(x + c, columns, *divisor, piece.random, counter, codes);
    }
  }
}

template <typename Raw>
static void RowPeaks(const void* x, int64_t columns, int64_t block, uint32_t* peaks) {
  const Raw* row = static_cast<const Raw*>(x);
  for (int64_t c = 0; c < columns; c += block, ++peaks) {
    const uint32_t peak = Peak(row + c, columns - c < block ? columns - c : block);
    if (peak > *peaks) *peaks = peak;
  }
}

template <typename In, bool kStochastic>
static void FillEncoders(void (**table)(const RowPiece&)) {
  table[static_cast<int>(Codes::kE4m3)] = EncodeRow<In, E4m3Traits, kStochastic>;
  table[static_cast<int>(Codes::kE5m2)] = EncodeRow<In, E5m2Traits, kStochastic>;
  table[static_cast<int>(Codes::kE2m1)] = EncodeRow<In, E2m1Traits, kStochastic>;
  table[static_cast<int>(Codes::kE2m1Unpacked)] = EncodeRow<In, E2m1UnpackedTraits, kStochastic>;
}

template <typename In>
static void FillInput(QuantizeKernels& kernels, Input input) {
  FillEncoders<In, false>(kernels.nearest[static_cast<int>(input)]);
  FillEncoders<In, true>(kernels.stochastic[static_cast<int>(input)]);
}

static QuantizeKernels MakeKernels() {
  QuantizeKernels kernels = {};
  kernels.peaks[static_cast<int>(Input::kBf16)] = RowPeaks<uint16_t>;
  kernels.peaks[static_cast<int>(Input::kF16)] = RowPeaks<uint16_t>;
  kernels.peaks[static_cast<int>(Input::kF32)] = RowPeaks<uint32_t>;
  FillInput<Bf16>(kernels, Input::kBf16);
  FillInput<F16>(kernels, Input::kF16);
  FillInput<F32>(kernels, Input::kF32);
  return kernels;
}
