// Host checks of a handler's buffers. A failure names the op, the argument, what was expected and what came.
// Python checks every call before it is traced and its messages teach the fix; these are the second line, for
// a program that was exported, or lowered by another version. No platform code here.
#ifndef JAXLOWBIT_FFI_COMMON_CHECK_H_
#define JAXLOWBIT_FFI_COMMON_CHECK_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "xla/ffi/api/ffi.h"

namespace jaxlowbit {

namespace ffi = xla::ffi;

// Leaves the enclosing function with the error, if there is one.
#define JAXLOWBIT_RETURN_IF_ERROR(expression)                   \
  do {                                                          \
    ::xla::ffi::Error jaxlowbit_error_ = (expression);          \
    if (jaxlowbit_error_.failure()) return jaxlowbit_error_;    \
  } while (0)

// The names that JAX uses, so that a message reads the same on both sides.
inline const char* TypeName(ffi::DataType type) {
  switch (type) {
    case ffi::PRED: return "bool";
    case ffi::S8: return "int8";
    case ffi::S16: return "int16";
    case ffi::S32: return "int32";
    case ffi::S64: return "int64";
    case ffi::U8: return "uint8";
    case ffi::U16: return "uint16";
    case ffi::U32: return "uint32";
    case ffi::U64: return "uint64";
    case ffi::F16: return "float16";
    case ffi::BF16: return "bfloat16";
    case ffi::F32: return "float32";
    case ffi::F64: return "float64";
    case ffi::F8E4M3FN: return "float8_e4m3fn";
    case ffi::F8E5M2: return "float8_e5m2";
    case ffi::F8E8M0FNU: return "float8_e8m0fnu";
    case ffi::F4E2M1FN: return "float4_e2m1fn";
    default: return "another type";
  }
}

template <typename Range>
std::string ShapeText(const Range& dimensions) {
  std::string text = "(";
  for (int64_t dimension : dimensions) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(dimension);
  }
  return text + ")";
}

// "float32 (4, 8)"
inline std::string Describe(ffi::AnyBuffer buffer) {
  return std::string(TypeName(buffer.element_type())) + " " + ShapeText(buffer.dimensions());
}

// The one form that every refusal of a handler has.
inline ffi::Error Refuse(std::string_view op, std::string_view argument, std::string_view expected,
                         std::string_view got) {
  std::string message = "jaxlowbit.";
  message.append(op).append(": ").append(argument);
  message.append(": expected ").append(expected).append(", got ").append(got);
  return ffi::Error::InvalidArgument(message);
}

inline ffi::Error CheckRank(std::string_view op, std::string_view argument, ffi::AnyBuffer buffer, size_t rank) {
  if (buffer.dimensions().size() == rank) return ffi::Error::Success();
  return Refuse(op, argument, "rank " + std::to_string(rank), Describe(buffer));
}

inline ffi::Error CheckType(std::string_view op, std::string_view argument, ffi::AnyBuffer buffer,
                            std::initializer_list<ffi::DataType> accepted) {
  std::string names;
  for (ffi::DataType type : accepted) {
    if (buffer.element_type() == type) return ffi::Error::Success();
    if (!names.empty()) names += " or ";
    names += TypeName(type);
  }
  return Refuse(op, argument, names, Describe(buffer));
}

inline ffi::Error CheckShape(std::string_view op, std::string_view argument, ffi::AnyBuffer buffer,
                             std::initializer_list<int64_t> shape) {
  ffi::AnyBuffer::Dimensions got = buffer.dimensions();
  bool equal = got.size() == shape.size();
  for (size_t i = 0; equal && i < got.size(); ++i) equal = got[i] == shape.begin()[i];
  if (equal) return ffi::Error::Success();
  return Refuse(op, argument, "shape " + ShapeText(shape), Describe(buffer));
}

}  // namespace jaxlowbit

#endif  // JAXLOWBIT_FFI_COMMON_CHECK_H_
