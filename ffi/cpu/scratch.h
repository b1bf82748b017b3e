// Memory of one thread, kept between calls: fresh pages cost more than a small product does.
#ifndef JAXLOWBIT_FFI_CPU_SCRATCH_H_
#define JAXLOWBIT_FFI_CPU_SCRATCH_H_

#include <cstddef>
#include <cstdlib>
#include <new>

namespace jaxlowbit {

class Scratch {
 public:
  static constexpr size_t kAlignment = 64;  // a cache line, and the widest vector

  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { Release(); }

  // At least `bytes` bytes, undefined, until the next call. Throws std::bad_alloc.
  void* Reserve(size_t bytes) {
    if (bytes <= size_) return memory_;
    Release();
    const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    memory_ = std::aligned_alloc(kAlignment, rounded);
    if (memory_ == nullptr) throw std::bad_alloc();
    size_ = rounded;
    return memory_;
  }

  void Release() {
    std::free(memory_);
    memory_ = nullptr;
    size_ = 0;
  }
  size_t size() const { return size_; }

 private:
  void* memory_ = nullptr;
  size_t size_ = 0;
};

// What a call needs besides: made by the calling thread, read by all. Kept unless it is large.
class CallScratch {
 public:
  ~CallScratch() {
    if (held().size() > kMostKept) held().Release();
  }
  void* Reserve(size_t bytes) { return held().Reserve(bytes); }

 private:
  static constexpr size_t kMostKept = size_t{16} << 20;
  static Scratch& held() {
    thread_local Scratch scratch;
    return scratch;
  }
};

// What a task needs. Its size is bounded by the tile constants of the kernels, not by the problem.
inline Scratch& TaskScratch() {
  thread_local Scratch scratch;
  return scratch;
}

}  // namespace jaxlowbit

#endif  // JAXLOWBIT_FFI_CPU_SCRATCH_H_
