#include <utility>

#include "clo/params.h"
#include "xla/common.h"
#include "xla/handlers.h"

#if CLO_CUDA_BUILD
#include "cuda/kernels.h"
#endif

namespace clo {
namespace {

struct Call {
  SelectTopkParams params;
  void* workspace;
  size_t workspace_bytes;
};

ffi::Error parse(ffi::AnyBuffer query, ffi::Buffer<ffi::F32> weights, ffi::Buffer<ffi::F32> mean,
                 ffi::Buffer<ffi::F32> lse, ffi::Buffer<ffi::U32> codes, ffi::Buffer<ffi::F16> factors,
                 ffi::AnyBuffer rows, ffi::Buffer<ffi::S32> begin, ffi::Buffer<ffi::S32> end, ffi::Buffer<ffi::S32> k,
                 ffi::Buffer<ffi::PRED> skip, ffi::Result<ffi::Buffer<ffi::S32>> indices,
                 ffi::Result<ffi::Buffer<ffi::U8>> workspace, int64_t retriever, float scale, Call* call) {
  SelectTopkParams& p = call->params;
  if (!translate(query.element_type(), &p.dtype)) return invalid("select_topk", "query must be float32 or bfloat16");
  if (retriever < 0 || retriever > 2) return invalid("select_topk", "unknown retriever");
  p.retriever = static_cast<Retriever>(retriever);
  const bool exact = p.retriever == Retriever::kExact;
  const auto q = query.dimensions();
  const auto out = indices->dimensions();
  const auto keys = exact ? rows.dimensions() : codes.dimensions();
  if (q.size() != 3 || out.size() != 3 || keys.size() != (exact ? 5 : 4) || out[1] == 0 || q[1] % out[1] != 0)
    return invalid("select_topk", "query must be [B, H, D], H a multiple of Ko; codes [B, Ko, S, R/32]");
  p.batch = q[0];
  p.kv_heads = out[1];
  p.group = q[1] / out[1];
  p.head_dim = q[2];
  p.max_tokens = keys[2];
  p.k_max = out[2];
  p.bits = exact ? 0 : 32 * keys[3];
  if (!has_shape(lse, {p.batch, q[1]}) || !has_shape(begin, {p.batch}) || !has_shape(end, {p.batch}) ||
      !has_shape(k, {p.batch}) || !has_shape(skip, {p.batch, p.kv_heads}) || out[0] != p.batch)
    return invalid("select_topk", "operand shapes do not agree");
  if (exact) {
    if (!has_shape(rows, {p.batch, p.kv_heads, p.max_tokens, 2, p.head_dim}) ||
        rows.element_type() != query.element_type())
      return invalid("select_topk", "rows must be [B, Ko, S, 2, D] of the query's dtype");
  } else if (p.bits == 0 || !has_shape(weights, {p.kv_heads, p.head_dim, p.bits}) ||
             !has_shape(codes, {p.batch, p.kv_heads, p.max_tokens, p.bits / 32}) ||
             !has_shape(mean, {p.batch, p.kv_heads, p.head_dim}) ||
             !has_shape(factors, {p.batch, p.kv_heads, p.max_tokens})) {
    return invalid("select_topk", "operand shapes do not agree");
  }
  if (p.group * p.bits > 65535) return invalid("select_topk", "G·R must be below 65536");
  p.scale = scale;
  p.query = query.untyped_data();
  p.weights = weights.typed_data();
  p.mean = mean.typed_data();
  p.lse = lse.typed_data();
  p.codes = codes.typed_data();
  p.factors = static_cast<const uint16_t*>(factors.untyped_data());
  p.rows = rows.untyped_data();
  p.begin = begin.typed_data();
  p.end = end.typed_data();
  p.k = k.typed_data();
  p.skip = reinterpret_cast<const uint8_t*>(skip.typed_data());
  p.indices = indices->typed_data();
  call->workspace = workspace->untyped_data();
  call->workspace_bytes = workspace->size_bytes();
  return ffi::Error::Success();
}

constexpr auto run = [](auto... arguments) {
  Call call;
  if (ffi::Error error = parse(arguments..., &call); error.failure()) return error;
  return guarded("select_topk", [&] { select_topk(call.params); });
};

#if CLO_CUDA_BUILD
constexpr auto run_on_stream = [](cudaStream_t stream, auto... arguments) {
  Call call;
  if (ffi::Error error = parse(arguments..., &call); error.failure()) return error;
  if (call.params.group > 8) return invalid("select_topk", "at most 8 query heads share a KV head on a GPU");
  if (call.params.retriever == Retriever::kExact && !exact_takes(call.params.head_dim, call.params.dtype))
    return exact_refuses("select_topk");
  if (call.workspace_bytes < cuda::select_topk_workspace_bytes(call.params))
    return invalid("select_topk", "the workspace is too small: the program was traced for another device");
  return launched("select_topk", cuda::select_topk(call.params, call.workspace, stream));
};
#endif

template <typename Bind>
auto operands(Bind bind) {
  return std::move(bind)
      .template Arg<ffi::AnyBuffer>()          // query [B, H, D]
      .template Arg<ffi::Buffer<ffi::F32>>()   // weights [Ko, D, R]
      .template Arg<ffi::Buffer<ffi::F32>>()   // mean [B, Ko, D]
      .template Arg<ffi::Buffer<ffi::F32>>()   // lse [B, H]
      .template Arg<ffi::Buffer<ffi::U32>>()   // codes [B, Ko, S, R/32]
      .template Arg<ffi::Buffer<ffi::F16>>()   // factors [B, Ko, S]
      .template Arg<ffi::AnyBuffer>()          // rows [B, Ko, S, 2, D], or empty
      .template Arg<ffi::Buffer<ffi::S32>>()   // begin [B]
      .template Arg<ffi::Buffer<ffi::S32>>()   // end [B]
      .template Arg<ffi::Buffer<ffi::S32>>()   // k [B]
      .template Arg<ffi::Buffer<ffi::PRED>>()  // skip [B, Ko]
      .template Ret<ffi::Buffer<ffi::S32>>()   // indices [B, Ko, k_max]
      .template Ret<ffi::Buffer<ffi::U8>>()    // scratch of the CUDA kernel; else empty
      .template Attr<int64_t>("retriever")
      .template Attr<float>("scale");
}

}  // namespace
}  // namespace clo

XLA_FFI_DEFINE_HANDLER_SYMBOL(clo_select_topk, clo::run, clo::operands(xla::ffi::Ffi::Bind()));
#if CLO_CUDA_BUILD
XLA_FFI_DEFINE_HANDLER_SYMBOL(clo_select_topk_cuda, clo::run_on_stream,
                              clo::operands(xla::ffi::Ffi::Bind().Ctx<clo::StreamContext>()),
                              {xla::ffi::Traits::kCmdBufferCompatible});
#endif
