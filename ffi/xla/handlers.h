// The one list of FFI targets: registrations() hands exactly these to Python.
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
