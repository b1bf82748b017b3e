// A way into the CPU product without XLA, for tests that place every buffer themselves (at the edge of a page) or
// choose the number of threads. Built by dot_model.py together with the library's own sources.
#include <cstring>
#include <deque>
#include <functional>
#include <thread>

#include "ffi/common/export.h"
#include "ffi/cpu/dot_choice.h"
#include "ffi/cpu/scratch.h"

namespace {

constexpr size_t kPoisoned = size_t{1} << 20;

// A pool whose helpers run when `late` is false, or only after the call has returned when it is true.
class TestPool {
 public:
  TestPool(int64_t threads, bool late) : threads_(threads), late_(late) {}
  ~TestPool() {
    for (auto& task : waiting_) task();
    for (auto& thread : running_) thread.join();
  }
  int64_t num_threads() const { return threads_; }
  template <typename F>
  void Schedule(F&& f) {
    if (late_) {
      waiting_.emplace_back(f);
    } else {
      running_.emplace_back(f);
    }
  }

 private:
  int64_t threads_;
  bool late_;
  std::deque<std::function<void()>> waiting_;
  std::deque<std::thread> running_;
};

}  // namespace

// sizes: batch, m, n, k, lhs_type, lhs_global_count, rhs_global_count, bias_type, out_type, threads, late.
// pointers: lhs, lhs_scale, lhs_global, rhs, rhs_scale, rhs_global, bias (or null), out.
JAXLOWBIT_EXPORT const char* jaxlowbit_test_dot(const int32_t config[10], const int64_t sizes[11],
                                                void* const pointers[8]) {
  using namespace jaxlowbit;
  const DotConfig parsed = {config[0], config[1], config[2], config[3], config[4],
                            config[5], config[6], config[7], config[8], config[9]};
  DotBuffers buffers;
  buffers.batch = sizes[0];
  buffers.m = sizes[1];
  buffers.n = sizes[2];
  buffers.k = sizes[3];
  buffers.lhs = pointers[0];
  buffers.lhs_type = static_cast<Plain>(sizes[4]);
  buffers.lhs_scale = pointers[1];
  buffers.lhs_global = pointers[2];
  buffers.lhs_global_count = sizes[5];
  buffers.rhs = pointers[3];
  buffers.rhs_scale = pointers[4];
  buffers.rhs_global = pointers[5];
  buffers.rhs_global_count = sizes[6];
  buffers.bias = pointers[6];
  buffers.bias_type = static_cast<Plain>(sizes[7]);
  buffers.out = pointers[7];
  buffers.out_type = static_cast<Plain>(sizes[8]);
  const std::vector<DotProblem> problems = MakeDotProblems(parsed, buffers);
  TestPool pool(sizes[9], sizes[10] != 0);
  PoolExecutor<TestPool> executor(pool);
  // What earlier calls leave in scratch memory must not matter: leave NaN.
  CallScratch call_scratch;
  std::memset(TaskScratch().Reserve(kPoisoned), 0xff, kPoisoned);
  std::memset(call_scratch.Reserve(kPoisoned), 0xff, kPoisoned);
  const DotKernel kernel = ChooseDotKernel(static_cast<Tier>(parsed.tier), problems[0]);
  kernel.run(problems.data(), buffers.batch, executor);
  return kernel.name;
}
