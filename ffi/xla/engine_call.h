// How a handler reaches its engine: by the handle attribute and the layer operand, with every mismatch an FFI error.
#pragma once

#include <memory>
#include <string>

#include "clo/params.h"
#include "host/engine.h"
#include "xla/common.h"
#if CLO_CUDA_BUILD
#include "cuda/hand_over.h"
#include "cuda/kernels.h"
#endif

namespace clo {

struct EngineCall {
  std::shared_ptr<Engine> engine;  // kept alive for the call, even when it is closed meanwhile
  int64_t layer = 0;
  LayerView view{};
};

inline ffi::Error find_open_engine(const std::string& op, int64_t handle, std::shared_ptr<Engine>* out) {
  *out = find_engine(handle);
  if (*out != nullptr) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                    "clo_" + op + ": engine " + std::to_string(handle) +
                        " is closed; a program compiled for an engine must not outlive it");
}

// What an operand set or a layer is about, for comparison in words.
inline std::string geometry(int64_t batch, int64_t kv_heads, int64_t head_dim, DType dtype) {
  return "[batch " + std::to_string(batch) + ", KV heads " + std::to_string(kv_heads) + ", head dim " +
         std::to_string(head_dim) + ", " + choose(dtype, "float32", "bfloat16", "float16") + "]";
}

// Finds engine and layer, and checks the layer's arenas against the shapes of the call: `kv_heads` rows of `head_dim`
// and `dtype` for `batch` sequences.
inline ffi::Error find_layer(const std::string& op, int64_t handle, ffi::Buffer<ffi::S32> layer, int64_t batch,
                             int64_t kv_heads, int64_t head_dim, DType dtype, EngineCall* out) {
  if (ffi::Error error = find_open_engine(op, handle, &out->engine); error.failure()) return error;
  if (out->engine->device() != nullptr)
    return invalid(op, "a program on the CPU needs backend host, the engine's is " + out->engine->config().backend);
  if (layer.element_count() != 1) return invalid(op, "layer must be int32[1]");
  out->layer = layer.typed_data()[0];
  const int64_t layers = static_cast<int64_t>(out->engine->config().kv_heads.size());
  if (out->layer < 0 || out->layer >= layers)
    return invalid(op, "layer is " + std::to_string(out->layer) + ", the engine has " + std::to_string(layers));
  out->view = out->engine->layer(out->layer);
  const LayerView& v = out->view;
  if (v.batch != batch || v.kv_heads != kv_heads || v.head_dim != head_dim || v.dtype != dtype) {
    return invalid(op, "the call has " + geometry(batch, kv_heads, head_dim, dtype) + ", layer " +
                           std::to_string(out->layer) + " of the engine " +
                           geometry(v.batch, v.kv_heads, v.head_dim, v.dtype));
  }
  return ffi::Error::Success();
}

// ReadyWait of one layer; `call` must outlive the kernel's run.
inline ReadyWait ready_wait(EngineCall* call) {
  const auto wait = [](void* context) {
    auto* c = static_cast<EngineCall*>(context);
    return c->engine->wait(c->layer);
  };
  return {wait, call};
}

#if CLO_CUDA_BUILD
// The same for a call on the GPU. The layer is a value in device memory there: `view` is that of the first layer with as
// many heads, and holds for every such layer but for its pointers.
struct DeviceCall {
  std::shared_ptr<Engine> engine;
  cuda::EngineRef ref{};
  LayerView view{};
};

inline ffi::Error find_device_layer(const std::string& op, int64_t handle, ffi::Buffer<ffi::S32> layer, int64_t batch,
                                    int64_t kv_heads, int64_t head_dim, DType dtype, DeviceCall* out) {
  if (ffi::Error error = find_open_engine(op, handle, &out->engine); error.failure()) return error;
  const cuda::EngineRef* ref = out->engine->device();
  if (ref == nullptr)
    return invalid(op, "a program on the GPU needs backend pull, bar or staged, the engine's is " +
                           out->engine->config().backend);
  if (layer.element_count() != 1) return invalid(op, "layer must be int32[1]");
  out->ref = *ref;
  out->ref.layer.index = layer.typed_data();
  const int64_t layers = static_cast<int64_t>(out->engine->config().kv_heads.size());
  for (int64_t i = 0; i < layers; ++i) {
    out->view = out->engine->layer(i);
    const LayerView& v = out->view;
    if (v.batch == batch && v.kv_heads == kv_heads && v.head_dim == head_dim && v.dtype == dtype)
      return ffi::Error::Success();
  }
  const LayerView& v = out->view;
  return invalid(op, "the call has " + geometry(batch, kv_heads, head_dim, dtype) + ", the engine's last layer " +
                         geometry(v.batch, v.kv_heads, v.head_dim, v.dtype) + ", and no other fits");
}
#endif

inline ffi::Error transfer_failed(const std::string& op, const std::string& why) {
  return ffi::Error(ffi::ErrorCode::kAborted, "clo_" + op + ": transfer failed: " + why);
}

}  // namespace clo
