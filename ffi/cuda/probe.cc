// What is this machine, and does it hand FP4 buffers over packed?
#include <cuda_runtime_api.h>

#include <cstdio>
#include <string>

#include "ffi/common/check.h"
#include "ffi/common/export.h"
#include "ffi/cuda/probe_sm90.h"
#include "ffi/cuda/status.h"

namespace jaxlowbit {
namespace {

// Returns the bytes of an FP4 buffer as they lie in memory. The header's size_bytes() counts one byte an element for
// FP4, twice what is there, so the size is taken from the element count.
ffi::Error ProbeCuda(cudaStream_t stream, ffi::AnyBuffer codes, ffi::Result<ffi::AnyBuffer> bytes) {
  const int64_t count = (static_cast<int64_t>(codes.element_count()) + 1) / 2;
  JAXLOWBIT_RETURN_IF_ERROR(CheckType("probe", "codes", codes, {ffi::F4E2M1FN}));
  JAXLOWBIT_RETURN_IF_ERROR(CheckType("probe", "bytes", *bytes, {ffi::U8}));
  JAXLOWBIT_RETURN_IF_ERROR(CheckShape("probe", "bytes", *bytes, {count}));
  if (count == 0) return ffi::Error::Success();
  const auto* source = static_cast<const uint8_t*>(codes.untyped_data());
  auto* target = static_cast<uint8_t*>(bytes->untyped_data());
  return CudaStatus("probe", "launch", LaunchCopyBytes(source, target, count, stream));
}

std::string VersionText(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

std::string Quoted(const char* text) {
  std::string quoted = "\"";
  for (const char* c = text; *c != '\0'; ++c) {
    if (*c == '"' || *c == '\\') quoted += '\\';
    if (static_cast<unsigned char>(*c) >= 0x20) quoted += *c;
  }
  return quoted + "\"";
}

// {"driver": "13.0" or null, "runtime": "13.0", "devices": [...], "error": "..." where something failed}. Creates no
// context and allocates nothing on a device.
std::string ProbeJson() {
  int driver = 0;
  int runtime = 0;
  int count = 0;
  cudaRuntimeGetVersion(&runtime);
  const bool has_driver = cudaDriverGetVersion(&driver) == cudaSuccess && driver != 0;
  std::string json = "{\"driver\": " + (has_driver ? "\"" + VersionText(driver) + "\"" : std::string("null"));
  json += ", \"runtime\": \"" + VersionText(runtime) + "\", \"devices\": [";
  cudaError_t status = cudaGetDeviceCount(&count);
  for (int i = 0; status == cudaSuccess && i < count; ++i) {
    cudaDeviceProp properties;
    status = cudaGetDeviceProperties(&properties, i);
    if (status != cudaSuccess) break;
    if (i > 0) json += ", ";
    json += "{\"name\": " + Quoted(properties.name);
    json += ", \"capability\": \"" + std::to_string(properties.major) + "." + std::to_string(properties.minor) + "\"";
    json += ", \"multiprocessors\": " + std::to_string(properties.multiProcessorCount);
    json += ", \"memory_bytes\": " + std::to_string(properties.totalGlobalMem) + "}";
  }
  json += "]";
  if (status != cudaSuccess) json += ", \"error\": " + Quoted(cudaGetErrorString(status));
  cudaGetLastError();  // a failed probe must not surface as the error of a later launch
  return json + "}";
}

}  // namespace
}  // namespace jaxlowbit

// Only enqueues one kernel on the stream it is given, so XLA may record it into a command buffer.
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxlowbitProbeCuda, jaxlowbit::ProbeCuda,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()   // codes: float4_e2m1fn (n,)
                                  .Ret<xla::ffi::AnyBuffer>(),  // bytes: uint8 (ceil(n/2),)
                              {xla::ffi::Traits::kCmdBufferCompatible});

// Writes the probe's JSON, NUL-terminated and cut to `capacity`; returns the length it needs without the NUL.
JAXLOWBIT_EXPORT int jaxlowbit_cuda_probe(char* json, int capacity) {
  return std::snprintf(json, static_cast<size_t>(capacity), "%s", jaxlowbit::ProbeJson().c_str());
}
