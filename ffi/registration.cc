// THE list of custom-call targets. Each library is built with this file and keeps the targets of its own
// platform; jaxlowbit/_ffi.py reads the list through the functions below and registers what it finds, so no
// name stands anywhere else. A target's name ends in the version of its calling convention: a changed
// convention is a new name, and two versions of the library can live in one process.
#include "ffi/common/export.h"
#include "jaxlowbit_version.h"
#include "xla/ffi/api/c_api.h"

//                name, handler
#define JAXLOWBIT_CPU_TARGETS(TARGET)             \
  TARGET("jaxlowbit_dot_v1", JaxlowbitDotCpu)     \
  TARGET("jaxlowbit_quantize_v1", JaxlowbitQuantizeCpu)

#define JAXLOWBIT_CUDA_TARGETS(TARGET) TARGET("jaxlowbit_probe_v1", JaxlowbitProbeCuda)

#if defined(JAXLOWBIT_PLATFORM_CPU)
#define JAXLOWBIT_TARGETS JAXLOWBIT_CPU_TARGETS
#define JAXLOWBIT_PLATFORM "cpu"
#elif defined(JAXLOWBIT_PLATFORM_CUDA)
#define JAXLOWBIT_TARGETS JAXLOWBIT_CUDA_TARGETS
#define JAXLOWBIT_PLATFORM "CUDA"
#else
#error "define JAXLOWBIT_PLATFORM_CPU or JAXLOWBIT_PLATFORM_CUDA"
#endif

#define JAXLOWBIT_DECLARE(name, handler) extern "C" XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame);
JAXLOWBIT_TARGETS(JAXLOWBIT_DECLARE)
#undef JAXLOWBIT_DECLARE

namespace {

struct Target {
  const char* name;
  XLA_FFI_Handler* handler;
};

#define JAXLOWBIT_ENTRY(name, handler) {name, handler},
constexpr Target kTargets[] = {JAXLOWBIT_TARGETS(JAXLOWBIT_ENTRY)};
#undef JAXLOWBIT_ENTRY
constexpr int kTargetCount = sizeof(kTargets) / sizeof(kTargets[0]);

}  // namespace

// The FFI version of the headers this library was built with. A runtime with an older one would fail to start
// its whole backend if these handlers were registered, so Python compares before it registers.
JAXLOWBIT_EXPORT int jaxlowbit_ffi_api_minor() { return XLA_FFI_API_MINOR; }

JAXLOWBIT_EXPORT const char* jaxlowbit_version() { return JAXLOWBIT_VERSION; }

// The platform's name as jax.ffi.register_ffi_target takes it.
JAXLOWBIT_EXPORT const char* jaxlowbit_platform() { return JAXLOWBIT_PLATFORM; }

JAXLOWBIT_EXPORT int jaxlowbit_target_count() { return kTargetCount; }

// Gives the name and the handler of target `index`; 0 when there is none of that index, else 1.
JAXLOWBIT_EXPORT int jaxlowbit_target(int index, const char** name, void** handler) {
  if (index < 0 || index >= kTargetCount) return 0;
  *name = kTargets[index].name;
  *handler = reinterpret_cast<void*>(kTargets[index].handler);
  return 1;
}
