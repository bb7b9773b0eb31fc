// Small helpers shared by the handlers: dtype translation and argument errors.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <string>

#include "clo/dtype.h"
#include "xla/ffi/api/ffi.h"

#if CLO_CUDA_BUILD
#include <cuda_runtime_api.h>
#endif

namespace clo {

namespace ffi = xla::ffi;

// False for an element type that no kernel computes in.
inline bool translate(ffi::DataType type, DType* out) {
  if (type == ffi::F32) *out = DType::kF32;
  else if (type == ffi::BF16) *out = DType::kBF16;
  else if (type == ffi::F16) *out = DType::kF16;
  else return false;
  return true;
}

inline ffi::Error invalid(const std::string& op, const std::string& what) {
  return ffi::Error::InvalidArgument("clo_" + op + ": " + what);
}

// Runs a kernel that may throw (a bad environment variable, no memory): the exception becomes the call's error.
template <typename Kernel>
ffi::Error guarded(const std::string& op, Kernel&& kernel) {
  try {
    kernel();
    return ffi::Error::Success();
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, "clo_" + op + ": " + error.what());
  }
}

// The last line of defence: Python has checked with better words. Dimensions must equal `want`; -1 matches any.
template <typename Buffer>
bool has_shape(const Buffer& buffer, std::initializer_list<int64_t> want) {
  const auto dims = buffer.dimensions();
  if (dims.size() != want.size()) return false;
  size_t i = 0;
  for (int64_t n : want) {
    if (n >= 0 && dims[i] != n) return false;
    ++i;
  }
  return true;
}

#if CLO_CUDA_BUILD
using StreamContext = ffi::PlatformStream<cudaStream_t>;

// The retriever `exact` reads keys 16 bytes at a time, from rows that begin at multiples of two keys. Every head
// dimension of a known model fits.
inline bool exact_takes(int64_t head_dim, DType dtype) { return head_dim * dtype_bytes(dtype) % 16 == 0; }
inline ffi::Error exact_refuses(const std::string& op) {
  return invalid(op, "exact on a GPU wants head dimensions whose keys take a multiple of 16 bytes");
}

// How often handlers have launched something: once for a whole command buffer, whenever that is captured, and at every
// call outside of one.
inline std::atomic<int64_t> handler_launches{0};

// What a launcher returned, as the call's error.
inline ffi::Error launched(const std::string& op, cudaError_t error) {
  handler_launches.fetch_add(1, std::memory_order_relaxed);
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal, "clo_" + op + ": " + cudaGetErrorString(error));
}
#endif

}  // namespace clo
