// Turns a CUDA runtime status into a handler's error: what op, which call, what CUDA said.
#ifndef JAXLOWBIT_FFI_CUDA_STATUS_H_
#define JAXLOWBIT_FFI_CUDA_STATUS_H_

#include <cuda_runtime_api.h>

#include <string>
#include <string_view>

#include "xla/ffi/api/ffi.h"

namespace jaxlowbit {

inline xla::ffi::Error CudaStatus(std::string_view op, std::string_view call, cudaError_t status) {
  if (status == cudaSuccess) return xla::ffi::Error::Success();
  std::string message = "jaxlowbit.";
  message.append(op).append(": ").append(call).append(": ").append(cudaGetErrorString(status));
  if (status == cudaErrorNoKernelImageForDevice) {
    // The library holds Hopper's machine code alone: nothing is wrong with the call, the GPU is another one.
    message.append(" (the kernels need compute capability 9.0; use implementation=\"xla\" on this GPU)");
    return xla::ffi::Error(xla::ffi::ErrorCode::kUnimplemented, message);
  }
  return xla::ffi::Error::Internal(message);
}

}  // namespace jaxlowbit

#endif  // JAXLOWBIT_FFI_CUDA_STATUS_H_
