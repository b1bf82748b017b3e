#include <algorithm>

#include "ffi/cuda/probe_sm90.h"

namespace jaxlowbit {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1024;

__global__ void __launch_bounds__(kThreads)
CopyBytes(const uint8_t* __restrict__ source, uint8_t* __restrict__ target, int64_t bytes) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < bytes; i += stride) target[i] = source[i];
}

}  // namespace

cudaError_t LaunchCopyBytes(const uint8_t* source, uint8_t* target, int64_t bytes, cudaStream_t stream) {
  const int64_t blocks = std::min(kMaxBlocks, (bytes + kThreads - 1) / kThreads);
  CopyBytes<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(source, target, bytes);
  return cudaGetLastError();
}

}  // namespace jaxlowbit
