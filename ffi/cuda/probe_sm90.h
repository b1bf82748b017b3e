#ifndef JAXLOWBIT_FFI_CUDA_PROBE_SM90_H_
#define JAXLOWBIT_FFI_CUDA_PROBE_SM90_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxlowbit {

// Copies `bytes` bytes with a kernel, in order on `stream`. bytes > 0.
cudaError_t LaunchCopyBytes(const uint8_t* source, uint8_t* target, int64_t bytes, cudaStream_t stream);

}  // namespace jaxlowbit

#endif  // JAXLOWBIT_FFI_CUDA_PROBE_SM90_H_
