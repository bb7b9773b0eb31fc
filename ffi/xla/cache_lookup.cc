#include "clo/params.h"
#include "xla/common.h"
#include "xla/handlers.h"

namespace clo {
namespace {

ffi::Error run(ffi::AnyBuffer query, ffi::AnyBuffer label, ffi::Buffer<ffi::S32> age,
               ffi::Buffer<ffi::F32> importance, ffi::Buffer<ffi::F32> thresholds, ffi::Buffer<ffi::S32> max_age,
               ffi::Result<ffi::Buffer<ffi::PRED>> hit, ffi::Result<ffi::AnyBuffer> label_out,
               ffi::Result<ffi::Buffer<ffi::S32>> age_out) {
  CacheLookupParams p;
  if (!translate(query.element_type(), &p.dtype)) return invalid("cache_lookup", "query must be float32 or bfloat16");
  const auto q = query.dimensions();
  if (q.size() != 3) return invalid("cache_lookup", "query must be [B, H, D]");
  const int64_t heads = thresholds.element_count();
  if (heads == 0 || q[1] % heads != 0) return invalid("cache_lookup", "heads must be a multiple of KV heads");
  p.batch = q[0];
  p.kv_heads = heads;
  p.group = q[1] / heads;
  p.head_dim = q[2];
  if (!has_shape(label, {q[0], q[1], q[2]}) || label.element_type() != query.element_type() ||
      !has_shape(age, {p.batch, heads}) || !has_shape(importance, {q[1]}) || !has_shape(max_age, {p.batch}))
    return invalid("cache_lookup", "operand shapes do not agree");
  // Aliased operands: XLA passes the same address twice, and the kernel updates in place.
  p.query = query.untyped_data();
  p.label = label_out->untyped_data();
  p.age = age_out->typed_data();
  p.importance = importance.typed_data();
  p.thresholds = thresholds.typed_data();
  p.max_age = max_age.typed_data();
  p.hit = reinterpret_cast<uint8_t*>(hit->typed_data());
  cache_lookup(p);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace clo

XLA_FFI_DEFINE_HANDLER_SYMBOL(clo_cache_lookup, clo::run,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()                      // query [B, H, D]
                                  .Arg<xla::ffi::AnyBuffer>()                      // label [B, H, D]
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()          // age [B, Ko]
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()          // importance [H]
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()          // thresholds [Ko]
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()          // max_age [B]
                                  .Ret<xla::ffi::Buffer<xla::ffi::PRED>>()         // hit [B, Ko]
                                  .Ret<xla::ffi::AnyBuffer>()                      // label, aliased
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>());        // age, aliased
