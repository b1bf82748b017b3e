// Visibility of the few C functions that Python calls through ctypes. Everything else is built with
// -fvisibility=hidden, so two versions of the library in one process cannot mix their symbols.
#ifndef JAXLOWBIT_FFI_COMMON_EXPORT_H_
#define JAXLOWBIT_FFI_COMMON_EXPORT_H_

#define JAXLOWBIT_EXPORT extern "C" __attribute__((visibility("default")))

#endif  // JAXLOWBIT_FFI_COMMON_EXPORT_H_
