// How a handler reaches its engine: by the handle attribute and the layer operand, with every mismatch an FFI error.
#pragma once

#include <memory>
#include <string>

#include "clo/params.h"
#include "host/engine.h"
#include "xla/common.h"

namespace clo {

struct EngineCall {
  std::shared_ptr<Engine> engine;  // kept alive for the call, even when it is closed meanwhile
  int64_t layer = 0;
  LayerView view{};
};

// Finds engine and layer, and checks the layer's arenas against the shapes of the call: `kv_heads` rows of `head_dim`
// and `dtype` for `batch` sequences.
inline ffi::Error find_layer(const std::string& op, int64_t handle, ffi::Buffer<ffi::S32> layer, int64_t batch,
                             int64_t kv_heads, int64_t head_dim, DType dtype, EngineCall* out) {
  out->engine = find_engine(handle);
  if (out->engine == nullptr)
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                      "clo_" + op + ": engine " + std::to_string(handle) +
                          " is closed; a program compiled for an engine must not outlive it");
  if (layer.element_count() != 1) return invalid(op, "layer must be int32[1]");
  out->layer = layer.typed_data()[0];
  const int64_t layers = static_cast<int64_t>(out->engine->config().kv_heads.size());
  if (out->layer < 0 || out->layer >= layers)
    return invalid(op, "layer is " + std::to_string(out->layer) + ", the engine has " + std::to_string(layers));
  out->view = out->engine->layer(out->layer);
  const LayerView& v = out->view;
  if (v.batch != batch || v.kv_heads != kv_heads || v.head_dim != head_dim || v.dtype != dtype) {
    const auto text = [](int64_t b, int64_t k, int64_t d, DType t) {
      return "[batch " + std::to_string(b) + ", KV heads " + std::to_string(k) + ", head dim " + std::to_string(d) +
             ", " + (t == DType::kF32 ? "float32" : "bfloat16") + "]";
    };
    return invalid(op, "the call has " + text(batch, kv_heads, head_dim, dtype) + ", layer " +
                           std::to_string(out->layer) + " of the engine " +
                           text(v.batch, v.kv_heads, v.head_dim, v.dtype));
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

inline ffi::Error transfer_failed(const std::string& op, const std::string& why) {
  return ffi::Error(ffi::ErrorCode::kAborted, "clo_" + op + ": transfer failed: " + why);
}

}  // namespace clo
