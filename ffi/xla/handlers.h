// The lists of FFI targets, one a platform: registrations() hands exactly these to Python.
#pragma once

#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

#define CLO_HANDLERS(X) \
  X(attend) \
  X(cache_lookup) \
  X(hash_encode) \
  X(offload) \
  X(prefetch) \
  X(select_topk)

#define CLO_DECLARE_HANDLER(name) extern "C" XLA_FFI_Error* clo_##name(XLA_FFI_CallFrame* frame);
CLO_HANDLERS(CLO_DECLARE_HANDLER)
#undef CLO_DECLARE_HANDLER

#if CLO_CUDA_BUILD
#define CLO_CUDA_HANDLERS(X) \
  X(add_norms) \
  X(attend) \
  X(cache_lookup) \
  X(hash_encode) \
  X(offload) \
  X(prefetch) \
  X(select_topk)

#define CLO_DECLARE_HANDLER(name) extern "C" XLA_FFI_Error* clo_##name##_cuda(XLA_FFI_CallFrame* frame);
CLO_CUDA_HANDLERS(CLO_DECLARE_HANDLER)
#undef CLO_DECLARE_HANDLER
#endif
