#include <utility>

#include "clo/params.h"
#include "xla/common.h"
#include "xla/handlers.h"

#if CLO_CUDA_BUILD
#include "cuda/kernels.h"
#endif

namespace clo {
namespace {

ffi::Error parse(ffi::AnyBuffer query, ffi::AnyBuffer label, ffi::Buffer<ffi::S32> age,
                 ffi::Buffer<ffi::F32> importance, ffi::Buffer<ffi::F32> thresholds, ffi::Buffer<ffi::S32> max_age,
                 ffi::Result<ffi::Buffer<ffi::PRED>> hit, ffi::Result<ffi::AnyBuffer> label_out,
                 ffi::Result<ffi::Buffer<ffi::S32>> age_out, CacheLookupParams* out) {
  CacheLookupParams& p = *out;
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
  return ffi::Error::Success();
}

constexpr auto run = [](auto... arguments) {
  CacheLookupParams p;
  if (ffi::Error error = parse(arguments..., &p); error.failure()) return error;
  return guarded("cache_lookup", [&] { cache_lookup(p); });
};

#if CLO_CUDA_BUILD
constexpr auto run_on_stream = [](cudaStream_t stream, auto... arguments) {
  CacheLookupParams p;
  if (ffi::Error error = parse(arguments..., &p); error.failure()) return error;
  return launched("cache_lookup", cuda::cache_lookup(p, stream));
};
#endif

template <typename Bind>
auto operands(Bind bind) {
  return std::move(bind)
      .template Arg<ffi::AnyBuffer>()          // query [B, H, D]
      .template Arg<ffi::AnyBuffer>()          // label [B, H, D]
      .template Arg<ffi::Buffer<ffi::S32>>()   // age [B, Ko]
      .template Arg<ffi::Buffer<ffi::F32>>()   // importance [H]
      .template Arg<ffi::Buffer<ffi::F32>>()   // thresholds [Ko]
      .template Arg<ffi::Buffer<ffi::S32>>()   // max_age [B]
      .template Ret<ffi::Buffer<ffi::PRED>>()  // hit [B, Ko]
      .template Ret<ffi::AnyBuffer>()          // label, aliased
      .template Ret<ffi::Buffer<ffi::S32>>();  // age, aliased
}

}  // namespace
}  // namespace clo

XLA_FFI_DEFINE_HANDLER_SYMBOL(clo_cache_lookup, clo::run, clo::operands(xla::ffi::Ffi::Bind()));
#if CLO_CUDA_BUILD
XLA_FFI_DEFINE_HANDLER_SYMBOL(clo_cache_lookup_cuda, clo::run_on_stream,
                              clo::operands(xla::ffi::Ffi::Bind().Ctx<clo::StreamContext>()),
                              {xla::ffi::Traits::kCmdBufferCompatible});
#endif
