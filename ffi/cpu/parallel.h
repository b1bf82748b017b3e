// Work shared between the calling thread and the threads of a pool, without ever waiting for work that has not
// begun: XLA's pool may be full of calls that wait for each other.
#ifndef JAXLOWBIT_FFI_CPU_PARALLEL_H_
#define JAXLOWBIT_FFI_CPU_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jaxlowbit {

// Flushes f32 subnormals while it lives. XLA's threads differ in this setting, and a result must not depend on
// the thread that computed it.
class FlushSubnormals {
 public:
#if defined(__x86_64__)
  FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }  // FTZ and DAZ
  ~FlushSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushSubnormals() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" : : "r"(saved_ | (uint64_t{1} << 24)));  // FZ
  }
  ~FlushSubnormals() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
  FlushSubnormals() {}
  ~FlushSubnormals() {}
#endif
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;
};

// Runs numbered tasks. Plain function pointers, so that kernels see neither XLA's headers nor std::function.
class Executor {
 public:
  using Body = void (*)(void* context, int64_t task);
  virtual ~Executor() = default;
  // Threads that may work at once, the caller among them.
  virtual int64_t threads() const = 0;
  // Calls body(context, t) once for every t in [0, tasks); returns when all have returned.
  virtual void Run(int64_t tasks, Body body, void* context) = 0;
};

// On a Pool with num_threads() and Schedule(callable). The caller takes tasks from the same counter as the
// helpers, so the work gets done even when no helper ever starts. A helper that starts too late finds the
// counter used up and touches nothing but the shared state, which it keeps alive.
template <typename Pool>
class PoolExecutor final : public Executor {
 public:
  explicit PoolExecutor(Pool& pool) : pool_(pool), threads_(std::max<int64_t>(1, pool.num_threads())) {}

  int64_t threads() const override { return threads_; }

  void Run(int64_t tasks, Body body, void* context) override {
    if (tasks <= 0) return;
    if (tasks == 1 || threads_ == 1) {
      FlushSubnormals flush;
      for (int64_t task = 0; task < tasks; ++task) body(context, task);
      return;
    }
    auto shared = std::make_shared<Shared>(tasks, body, context);
    const int64_t helpers = std::min(threads_, tasks) - 1;
    for (int64_t helper = 0; helper < helpers; ++helper) {
      pool_.Schedule([shared] { shared->Work(); });
    }
    shared->Work();
    shared->AwaitTaken();
  }

 private:
  struct Shared {
    Shared(int64_t count, Body function, void* argument) : tasks(count), body(function), context(argument) {}

    // A task that throws would leave the caller waiting for ever: better to end.
    void Work() noexcept {
      FlushSubnormals flush;
      int64_t done = 0;
      for (int64_t task; (task = next.fetch_add(1)) < tasks; ++done) body(context, task);
      if (done == 0) return;
      std::lock_guard<std::mutex> lock(mutex);
      finished += done;
      if (finished == tasks) all_finished.notify_all();
    }

    // Every task has been taken by a running thread when this is called, so it waits for no one to start.
    void AwaitTaken() {
      std::unique_lock<std::mutex> lock(mutex);
      all_finished.wait(lock, [this] { return finished == tasks; });
    }

    const int64_t tasks;
    const Body body;
    void* const context;
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable all_finished;
    int64_t finished = 0;
  };

  Pool& pool_;
  const int64_t threads_;
};

}  // namespace jaxlowbit

#endif  // JAXLOWBIT_FFI_CPU_PARALLEL_H_
