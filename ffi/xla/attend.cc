#include <exception>
#include <string>
#include <utility>

#include "clo/params.h"
#include "xla/engine_call.h"
#include "xla/handlers.h"

namespace clo {
namespace {

using ffi::AnyBuffer;
using F32 = ffi::Buffer<ffi::F32>;
using F16 = ffi::Buffer<ffi::F16>;
using S32 = ffi::Buffer<ffi::S32>;
using U32 = ffi::Buffer<ffi::U32>;
using U8 = ffi::Buffer<ffi::U8>;

// Positions are data, so Python cannot check them. Returns what is wrong, or nothing.
std::string check_positions(const AttendParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t position = p.position[b], flushed = p.flushed[b];
    const std::string of = " of sequence " + std::to_string(b);
    if (position < 0 || position >= p.max_tokens)
      return "position: got " + std::to_string(position) + of + ", wanted 0 to " + std::to_string(p.max_tokens - 1);
    if (p.offloaded_heads == 0) continue;
    if (flushed < 0 || flushed > position + 1)
      return "flushed: got " + std::to_string(flushed) + of + ", wanted 0 to position + 1 = " +
             std::to_string(position + 1);
    const int64_t kept = position + 1 - (flushed > p.sink ? flushed : p.sink);
    if (kept > p.tail_rows - p.sink)
      return "flushed: got " + std::to_string(flushed) + of + " at position " + std::to_string(position) +
             ", which leaves more tokens than the tail's ring of " + std::to_string(p.tail_rows - p.sink) + " rows";
  }
  return "";
}

// What find_layer does not compare, and what would lead outside of the arenas. Returns what is wrong, or nothing.
std::string check_view(const AttendParams& p) {
  const LayerView& v = p.view;
  if (v.max_tokens != p.max_tokens)
    return "engine: its context capacity is " + std::to_string(v.max_tokens) + ", that of the codes " +
           std::to_string(p.max_tokens);
  for (int64_t i = 0; i < v.batch * v.kv_heads; ++i)
    if (v.slot_counts[i] < 0 || v.slot_counts[i] > v.num_slots)
      return "engine: a head has " + std::to_string(v.slot_counts[i]) + " filled slots of " +
             std::to_string(v.num_slots);
  return "";
}

// Everything but the layer and what is data, which is in device memory on a GPU.
struct Call {
  AttendParams params;
  void* workspace;
  size_t workspace_bytes;
};

ffi::Error parse(AnyBuffer query, AnyBuffer key, AnyBuffer value, F32 weights, F32 mean, S32 position, S32 flushed,
                 AnyBuffer resident, AnyBuffer tail, U32 codes, F16 factors, S32 layer, U32 token,
                 ffi::Result<AnyBuffer> out, ffi::Result<F32> lse, ffi::Result<AnyBuffer> resident_out,
                 ffi::Result<AnyBuffer> tail_out, ffi::Result<U32> codes_out, ffi::Result<F16> factors_out,
                 ffi::Result<U32>, ffi::Result<U8> workspace, int64_t, int64_t sink, float scale, Call* call) {
  AttendParams& p = call->params;
  p = {};
  if (!translate(query.element_type(), &p.dtype)) return invalid("attend", "query must be float32 or bfloat16");
  const auto q = query.dimensions(), k = key.dimensions(), t = tail.dimensions(), r = resident.dimensions();
  const auto c = codes.dimensions();
  if (q.size() != 3 || k.size() != 3 || t.size() != 5 || r.size() != 5 || c.size() != 4 || k[1] == 0 ||
      q[1] % k[1] != 0)
    return invalid("attend", "operand ranks do not agree");
  p.batch = q[0];
  p.offloaded_heads = t[1];
  p.resident_heads = r[1];
  p.group = q[1] / k[1];
  p.head_dim = q[2];
  p.bits = 32 * c[3];
  p.max_tokens = c[2];
  p.tail_rows = t[2];
  p.sink = sink;
  p.scale = scale;
  const int64_t B = p.batch, Ko = p.offloaded_heads, K = Ko + p.resident_heads, S = p.max_tokens, D = p.head_dim;
  const auto activation = [&](const AnyBuffer& x) { return x.element_type() == query.element_type(); };
  if (k[1] != K || !has_shape(key, {B, K, D}) || !has_shape(value, {B, K, D}) ||
      !has_shape(weights, {Ko, D, p.bits}) || !has_shape(mean, {B, Ko, D}) || !has_shape(position, {B}) ||
      !has_shape(flushed, {B}) || !has_shape(resident, {B, p.resident_heads, S, 2, D}) ||
      !has_shape(tail, {B, Ko, p.tail_rows, 2, D}) || !has_shape(codes, {B, Ko, S, p.bits / 32}) ||
      !has_shape(factors, {B, Ko, p.bits > 0 ? S : -1}) || !has_shape(layer, {1}) || !has_shape(token, {1}) ||
      !activation(key) || !activation(value) || !activation(resident) || !activation(tail) || sink < 0 ||
      (Ko > 0 && p.tail_rows <= sink))
    return invalid("attend", "operand shapes do not agree");
  p.query = query.untyped_data();
  p.key = key.untyped_data();
  p.value = value.untyped_data();
  p.weights = weights.typed_data();
  p.mean = mean.typed_data();
  p.position = position.typed_data();
  p.flushed = flushed.typed_data();
  // Aliased operands: XLA passes the same address twice, and the kernel appends in place.
  p.resident = resident_out->untyped_data();
  p.tail = tail_out->untyped_data();
  p.codes = codes_out->typed_data();
  p.factors = reinterpret_cast<uint16_t*>(factors_out->untyped_data());
  p.out = out->untyped_data();
  p.lse = lse->typed_data();
  call->workspace = workspace->untyped_data();
  call->workspace_bytes = workspace->size_bytes();
  return ffi::Error::Success();
}

ffi::Error on_host(AttendParams& p, int64_t handle, S32 layer) {
  std::string wrong = check_positions(p);
  if (!wrong.empty()) return invalid("attend", wrong);
  EngineCall engine;
  if (p.offloaded_heads > 0) {
    if (ffi::Error error =
            find_layer("attend", handle, layer, p.batch, p.offloaded_heads, p.head_dim, p.dtype, &engine);
        error.failure())
      return error;
    p.view = engine.view;
    wrong = check_view(p);
    if (!wrong.empty()) return invalid("attend", wrong);
    p.ready = ready_wait(&engine);
  }
  const std::string error = attend(p);
  return error.empty() ? ffi::Error::Success() : transfer_failed("attend", error);
}

ffi::Error run(AnyBuffer query, AnyBuffer key, AnyBuffer value, F32 weights, F32 mean, S32 position, S32 flushed,
               AnyBuffer resident, AnyBuffer tail, U32 codes, F16 factors, S32 layer, U32 token,
               ffi::Result<AnyBuffer> out, ffi::Result<F32> lse, ffi::Result<AnyBuffer> resident_out,
               ffi::Result<AnyBuffer> tail_out, ffi::Result<U32> codes_out, ffi::Result<F16> factors_out,
               ffi::Result<U32> token_out, ffi::Result<U8> workspace, int64_t engine, int64_t sink, float scale) {
  Call call;
  if (ffi::Error error = parse(query, key, value, weights, mean, position, flushed, resident, tail, codes, factors,
                               layer, token, out, lse, resident_out, tail_out, codes_out, factors_out, token_out,
                               workspace, engine, sink, scale, &call);
      error.failure())
    return error;
  token_out->typed_data()[0] = token.typed_data()[0];
  try {
    return on_host(call.params, engine, layer);
  } catch (const std::exception& e) {
    return ffi::Error::Internal(std::string("clo_attend: ") + e.what());
  }
}

#if CLO_CUDA_BUILD
// token goes in and comes out at the same address: nothing to do for it.
ffi::Error run_cuda(cudaStream_t stream, AnyBuffer query, AnyBuffer key, AnyBuffer value, F32 weights, F32 mean,
                    S32 position, S32 flushed, AnyBuffer resident, AnyBuffer tail, U32 codes, F16 factors, S32 layer,
                    U32 token, ffi::Result<AnyBuffer> out, ffi::Result<F32> lse, ffi::Result<AnyBuffer> resident_out,
                    ffi::Result<AnyBuffer> tail_out, ffi::Result<U32> codes_out, ffi::Result<F16> factors_out,
                    ffi::Result<U32> token_out, ffi::Result<U8> workspace, int64_t engine, int64_t sink, float scale) {
  Call call;
  if (ffi::Error error = parse(query, key, value, weights, mean, position, flushed, resident, tail, codes, factors,
                               layer, token, out, lse, resident_out, tail_out, codes_out, factors_out, token_out,
                               workspace, engine, sink, scale, &call);
      error.failure())
    return error;
  AttendParams& p = call.params;
  if (p.group > 8) return invalid("attend", "at most 8 query heads share a KV head on a GPU");
  if (!cuda::attend_takes(p.head_dim))
    return invalid("attend", "head dimension " + std::to_string(p.head_dim) +
                                 " on a GPU, which takes 64, 80, 96, 128 or 256");
  DeviceCall device;
  if (p.offloaded_heads > 0) {
    if (ffi::Error error =
            find_device_layer("attend", engine, layer, p.batch, p.offloaded_heads, p.head_dim, p.dtype, &device);
        error.failure())
      return error;
    p.view = device.view;
    if (p.view.max_tokens != p.max_tokens)
      return invalid("attend", "the context capacity of the engine is " + std::to_string(p.view.max_tokens) +
                                   ", that of the codes " + std::to_string(p.max_tokens));
  }
  if (call.workspace_bytes < cuda::attend_workspace_bytes(p))
    return invalid("attend", "the workspace is too small: the program was traced by a build without CUDA");
  return launched("attend", cuda::attend(p, device.ref, call.workspace, stream));
}
#endif

template <typename Bind>
auto operands(Bind bind) {
  return std::move(bind)
      .template Arg<AnyBuffer>()   // query [B, K·G, D]
      .template Arg<AnyBuffer>()   // key [B, K, D]
      .template Arg<AnyBuffer>()   // value [B, K, D]
      .template Arg<F32>()         // weights [Ko, D, R]
      .template Arg<F32>()         // mean [B, Ko, D]
      .template Arg<S32>()         // position [B]
      .template Arg<S32>()         // flushed [B]
      .template Arg<AnyBuffer>()   // resident [B, Kr, S, 2, D]
      .template Arg<AnyBuffer>()   // tail [B, Ko, T, 2, D]
      .template Arg<U32>()         // codes [B, Ko, S, R/32]
      .template Arg<F16>()         // factors [B, Ko, S]
      .template Arg<S32>()         // layer [1]
      .template Arg<U32>()         // token [1]
      .template Ret<AnyBuffer>()   // out [B, K·G, D]
      .template Ret<F32>()         // lse [B, K·G]
      .template Ret<AnyBuffer>()   // resident, aliased
      .template Ret<AnyBuffer>()   // tail, aliased
      .template Ret<U32>()         // codes, aliased
      .template Ret<F16>()         // factors, aliased
      .template Ret<U32>()         // token, aliased
      .template Ret<U8>()          // scratch of the CUDA kernel; else empty
      .template Attr<int64_t>("engine")
      .template Attr<int64_t>("sink")
      .template Attr<float>("scale");
}

}  // namespace
}  // namespace clo

XLA_FFI_DEFINE_HANDLER_SYMBOL(clo_attend, clo::run, clo::operands(xla::ffi::Ffi::Bind()));
#if CLO_CUDA_BUILD
XLA_FFI_DEFINE_HANDLER_SYMBOL(clo_attend_cuda, clo::run_cuda,
                              clo::operands(xla::ffi::Ffi::Bind().Ctx<clo::StreamContext>()),
                              {xla::ffi::Traits::kCmdBufferCompatible});
#endif
