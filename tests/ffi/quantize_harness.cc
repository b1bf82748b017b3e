// The CPU quantizer without XLA, for tests that need what XLA does not give: buffers that end at a page that may not
// be touched, odd addresses, a chosen number of threads, a chosen floating-point state. Compiled by
// test_quantize_cpu_memory.py together with ffi/cpu/quantize_run.cc and the tiers.
#include <cstdint>
#include <thread>
#include <vector>

#include "ffi/cpu/parallel.h"
#include "ffi/cpu/quantize_kernels.h"
#include "ffi/cpu/quantize_run.h"

namespace {

using jaxlowbit::cpu::QuantizeKernels;

// Gives task t to thread t % threads: another order of work than the pool's for every count.
class Threads final : public jaxlowbit::Executor {
 public:
  Threads(int64_t count, unsigned float_state) : count_(count), float_state_(float_state) {}

  int64_t threads() const override { return count_; }

  void Run(int64_t tasks, Body body, void* context) override {
    auto work = [=](int64_t first) {
#if defined(__x86_64__)
      _mm_setcsr(float_state_);
#endif
      for (int64_t task = first; task < tasks; task += count_) body(context, task);
    };
    std::vector<std::thread> helpers;
    for (int64_t first = 0; first < count_; ++first) helpers.emplace_back(work, first);
    for (std::thread& helper : helpers) helper.join();
  }

 private:
  const int64_t count_;
  const unsigned float_state_;
};

}  // namespace

// ints: batch, rows, columns, block_r, block_c, input (0 bf16, 1 f16, 2 f32), element, scale kind, scale rounding,
// stochastic, given, tier, threads, mxcsr. Returns 0, or 1 where the tier does not exist in this build.
extern "C" int harness_quantize(const int64_t* ints, float amax_ub, const void* x, const void* given_scale,
                                const float* global_scale, const uint32_t* rng, uint8_t* codes, void* scale) {
  using namespace jaxlowbit;
  cpu::QuantizeProblem problem = {};
  problem.batch = ints[0], problem.rows = ints[1], problem.columns = ints[2];
  problem.block_rows = ints[3], problem.block_columns = ints[4];
  problem.input = static_cast<cpu::Input>(ints[5]);
  problem.element = static_cast<Element>(ints[6]);
  problem.rule = {cpu::LimitsOf(problem.element), static_cast<ScaleKind>(ints[7]),
                  static_cast<ScaleRounding>(ints[8]), amax_ub, ints[10] != 0};
  problem.stochastic = ints[9] != 0;
  if (problem.stochastic) {
    problem.key[0] = rng[0], problem.key[1] = rng[1];
    problem.offset = (static_cast<uint64_t>(rng[3]) << 32) | rng[2];
  }
  problem.x = x, problem.given_scale = given_scale, problem.global_scale = global_scale;
  problem.codes = codes, problem.scale = scale;
  const QuantizeKernels* kernels = nullptr;
  if (ints[11] == 1) kernels = &cpu::QuantizeKernelsPortable();
#if defined(__x86_64__)
  if (ints[11] == 2) kernels = &cpu::QuantizeKernelsAvx2();
  if (ints[11] == 3) kernels = &cpu::QuantizeKernelsAvx512();
#endif
  if (kernels == nullptr) return 1;
  Threads executor(ints[12], static_cast<unsigned>(ints[13]));
  RunQuantize(problem, *kernels, executor);
  return 0;
}
