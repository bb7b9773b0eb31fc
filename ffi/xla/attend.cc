#include <exception>
#include <string>

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

ffi::Error checked(AttendParams& p, int64_t handle, S32 layer) {
  std::string wrong = check_positions(p);
  if (!wrong.empty()) return invalid("attend", wrong);
  EngineCall call;
  if (p.offloaded_heads > 0) {
    if (ffi::Error error =
            find_layer("attend", handle, layer, p.batch, p.offloaded_heads, p.head_dim, p.dtype, &call);
        error.failure())
      return error;
    p.view = call.view;
    wrong = check_view(p);
    if (!wrong.empty()) return invalid("attend", wrong);
    p.ready = ready_wait(&call);
  }
  const std::string error = attend(p);
  return error.empty() ? ffi::Error::Success() : transfer_failed("attend", error);
}

ffi::Error run(AnyBuffer query, AnyBuffer key, AnyBuffer value, F32 weights, F32 mean, S32 position, S32 flushed,
               AnyBuffer resident, AnyBuffer tail, U32 codes, F16 factors, S32 layer, U32 token,
               ffi::Result<AnyBuffer> out, ffi::Result<F32> lse, ffi::Result<AnyBuffer> resident_out,
               ffi::Result<AnyBuffer> tail_out, ffi::Result<U32> codes_out, ffi::Result<F16> factors_out,
               ffi::Result<U32> token_out, int64_t engine, int64_t sink, float scale) {
  AttendParams p{};
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
  token_out->typed_data()[0] = token.typed_data()[0];
  try {
    return checked(p, engine, layer);
  } catch (const std::exception& e) {
    return ffi::Error::Internal(std::string("clo_attend: ") + e.what());
  }
}

}  // namespace
}  // namespace clo

XLA_FFI_DEFINE_HANDLER_SYMBOL(clo_attend, clo::run,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()                // query [B, K·G, D]
                                  .Arg<xla::ffi::AnyBuffer>()                // key [B, K, D]
                                  .Arg<xla::ffi::AnyBuffer>()                // value [B, K, D]
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()    // weights [Ko, D, R]
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()    // mean [B, Ko, D]
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()    // position [B]
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()    // flushed [B]
                                  .Arg<xla::ffi::AnyBuffer>()                // resident [B, Kr, S, 2, D]
                                  .Arg<xla::ffi::AnyBuffer>()                // tail [B, Ko, T, 2, D]
                                  .Arg<xla::ffi::Buffer<xla::ffi::U32>>()    // codes [B, Ko, S, R/32]
                                  .Arg<xla::ffi::Buffer<xla::ffi::F16>>()    // factors [B, Ko, S]
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()    // layer [1]
                                  .Arg<xla::ffi::Buffer<xla::ffi::U32>>()    // token [1]
                                  .Ret<xla::ffi::AnyBuffer>()                // out [B, K·G, D]
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()    // lse [B, K·G]
                                  .Ret<xla::ffi::AnyBuffer>()                // resident, aliased
                                  .Ret<xla::ffi::AnyBuffer>()                // tail, aliased
                                  .Ret<xla::ffi::Buffer<xla::ffi::U32>>()    // codes, aliased
                                  .Ret<xla::ffi::Buffer<xla::ffi::F16>>()    // factors, aliased
                                  .Ret<xla::ffi::Buffer<xla::ffi::U32>>()    // token, aliased
                                  .Attr<int64_t>("engine")
                                  .Attr<int64_t>("sink")
                                  .Attr<float>("scale"));
