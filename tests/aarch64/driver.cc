// Runs the CPU kernels without Python or XLA and compares them with sums in double precision: how the portable tier
// is tested on a processor that is only emulated here (see check.sh). Prints what it ran; exits 1 on the first fault.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "ffi/common/enums.h"

extern "C" const char* jaxlowbit_test_dot(const int32_t config[10], const int64_t sizes[11], void* const pointers[8]);
extern "C" int harness_quantize(const int64_t* ints, float amax_ub, const void* x, const void* given_scale,
                                const float* global_scale, const uint32_t* rng, uint8_t* codes, void* scale);

namespace {

using jaxlowbit::Element;
using jaxlowbit::ScaleKind;

uint32_t random_state = 1;

uint32_t Random() {  // a linear congruence: the same numbers on every processor
  random_state = random_state * 1664525u + 1013904223u;
  return random_state >> 8;
}

float RandomFloat() { return static_cast<float>(Random()) / (1 << 23) - 1.0f; }

double E4m3(uint8_t code) {
  const int exponent = code >> 3 & 15;
  const int mantissa = code & 7;
  const double size = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return code & 0x80 ? -size : size;
}

double E2m1(uint8_t code) {
  constexpr double kSizes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return code & 8 ? -kSizes[code & 7] : kSizes[code & 7];
}

void Fail(const char* what, int64_t at, double got, double want) {
  std::printf("FAILED %s at %lld: got %g, want %g\n", what, static_cast<long long>(at), got, want);
  std::exit(1);
}

// One product of f32 rows with FP8 or packed FP4 weights, against the same decoded weights summed in double.
void CheckDot(Element element, ScaleKind kind, int64_t m, int64_t n, int64_t k, int32_t block_n, int32_t block_k,
              bool transposed) {
  const bool packed = element == Element::kE2m1;
  const int64_t contraction = transposed ? n : k;
  const int64_t columns = transposed ? k : n;
  std::vector<float> lhs(m * contraction);
  for (float& x : lhs) x = RandomFloat();
  std::vector<uint8_t> rhs(n * k / (packed ? 2 : 1));
  for (uint8_t& code : rhs) {
    code = static_cast<uint8_t>(Random());
    if (!packed && (code & 0x7f) == 0x7f) code = 0;  // NaN
  }
  const int64_t grid_n = (n + block_n - 1) / block_n;
  const int64_t grid_k = (k + block_k - 1) / block_k;
  std::vector<float> f32_scale(grid_n * grid_k);
  std::vector<uint8_t> byte_scale(grid_n * grid_k);
  std::vector<double> scale(grid_n * grid_k);
  for (size_t i = 0; i < scale.size(); ++i) {
    f32_scale[i] = 0.5f + std::fabs(RandomFloat());
    byte_scale[i] = static_cast<uint8_t>(kind == ScaleKind::kE8m0 ? 120 + Random() % 16 : 1 + Random() % 126);
    scale[i] = kind == ScaleKind::kF32    ? f32_scale[i]
               : kind == ScaleKind::kE8m0 ? std::ldexp(1.0, byte_scale[i] - 127)
                                          : E4m3(byte_scale[i]);
  }
  std::vector<float> bias(n);
  for (float& b : bias) b = RandomFloat();
  std::vector<float> out(m * columns, NAN);

  const int32_t config[10] = {0, 0, 1, 1, static_cast<int32_t>(element), static_cast<int32_t>(kind), block_n, block_k,
                              transposed, static_cast<int32_t>(jaxlowbit::Tier::kPortable)};
  const int64_t sizes[11] = {1, m, n, k, 0, 0, 0, 0, 0, 2, 0};
  void* scales = kind == ScaleKind::kF32 ? static_cast<void*>(f32_scale.data()) : byte_scale.data();
  void* const pointers[8] = {lhs.data(), nullptr, nullptr, rhs.data(), scales, nullptr,
                             transposed ? nullptr : bias.data(), out.data()};
  const char* kernel = jaxlowbit_test_dot(config, sizes, pointers);

  auto weight = [&](int64_t row, int64_t column) {
    const int64_t at = row * k + column;
    const double code = packed ? E2m1(rhs[at / 2] >> (at % 2 * 4) & 15) : E4m3(rhs[at]);
    return code * scale[row / block_n * grid_k + column / block_k];
  };
  // f32 sums, one rounding of code * scale to bf16 allowed in the transposed form.
  const double unit = transposed ? std::ldexp(1.0, -8) : std::ldexp(1.0, -24);
  for (int64_t i = 0; i < m * columns; ++i) {
    const int64_t row = i / columns;
    const int64_t column = i % columns;
    double sum = transposed ? 0 : bias[column];
    double size = std::fabs(sum);
    for (int64_t c = 0; c < contraction; ++c) {
      const double term = lhs[row * contraction + c] * (transposed ? weight(c, column) : weight(column, c));
      sum += term;
      size += std::fabs(term);
    }
    const double bound = size * (unit + (contraction + 4) * std::ldexp(1.0, -24));
    if (!(std::fabs(out[i] - sum) <= bound)) Fail(kernel, i, out[i], sum);
  }
  std::printf("ok %s m=%lld n=%lld k=%lld\n", kernel, static_cast<long long>(m), static_cast<long long>(n),
              static_cast<long long>(k));
}

// One f32 array to E4M3 with a f32 scale per 1 x block values: each code is a nearest one.
void CheckQuantize(int64_t rows, int64_t columns, int64_t block) {
  const int64_t grid = (columns + block - 1) / block;
  std::vector<float> x(rows * columns);
  for (float& value : x) value = std::ldexp(RandomFloat(), static_cast<int>(Random() % 12));
  std::vector<uint8_t> codes(rows * columns);
  std::vector<float> scale(rows * grid);
  const int64_t ints[14] = {1, rows, columns, 1, block, 2, static_cast<int64_t>(Element::kE4m3),
                            static_cast<int64_t>(ScaleKind::kF32), 0, 0, 0, 1, 2, 0x1f80};
  if (harness_quantize(ints, INFINITY, x.data(), nullptr, nullptr, nullptr, codes.data(), scale.data()) != 0) {
    Fail("quantize: no portable tier", 0, 0, 0);
  }
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t b = 0; b < grid; ++b) {
      float amax = 0;
      const int64_t end = columns < (b + 1) * block ? columns : (b + 1) * block;
      for (int64_t c = b * block; c < end; ++c) amax = std::fmax(amax, std::fabs(x[row * columns + c]));
      const float want = amax / 448.0f;
      const float got = scale[row * grid + b];
      if (got != want) Fail("quantize: scale", row * grid + b, got, want);
      for (int64_t c = b * block; c < end; ++c) {
        const double target = x[row * columns + c] / static_cast<double>(got);
        const double value = E4m3(codes[row * columns + c]);
        // Half a step of E4M3 at this size, and the rounding of the f32 quotient.
        const double step = std::ldexp(1.0, std::fmax(std::ilogb(target == 0 ? 1e-9 : target), -6) - 3);
        if (std::fabs(value - target) > step / 2 * (1 + 1e-5)) Fail("quantize: code", row * columns + c, value, target);
      }
    }
  }
  std::printf("ok quantize %lld x %lld, blocks of %lld\n", static_cast<long long>(rows),
              static_cast<long long>(columns), static_cast<long long>(block));
}

}  // namespace

int main() {
  for (int64_t m : {1, 3, 17, 70}) {
    CheckDot(Element::kE4m3, ScaleKind::kF32, m, 130, 300, 128, 128, false);
    CheckDot(Element::kE4m3, ScaleKind::kF32, m, 130, 300, 128, 128, true);
    CheckDot(Element::kE4m3, ScaleKind::kE8m0, m, 33, 96, 1, 32, false);
    CheckDot(Element::kE2m1, ScaleKind::kE8m0, m, 65, 160, 1, 32, false);
    CheckDot(Element::kE2m1, ScaleKind::kE8m0, m, 65, 160, 1, 32, true);
    CheckDot(Element::kE2m1, ScaleKind::kE4m3, m, 19, 80, 1, 16, false);
  }
  CheckQuantize(5, 300, 128);
  CheckQuantize(1, 4096, 4096);
  std::printf("all passed\n");
  return 0;
}
