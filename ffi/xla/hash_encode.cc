#include <utility>

#include "clo/params.h"
#include "xla/common.h"
#include "xla/handlers.h"

#if CLO_CUDA_BUILD
#include "cuda/kernels.h"
#endif

namespace clo {
namespace {

ffi::Error parse(ffi::AnyBuffer x, ffi::Buffer<ffi::F32> weights, ffi::Buffer<ffi::F32> mean,
                 ffi::Result<ffi::Buffer<ffi::U32>> codes, ffi::Result<ffi::Buffer<ffi::F16>> factors,
                 HashEncodeParams* out) {
  HashEncodeParams& p = *out;
  if (!translate(x.element_type(), &p.dtype)) return invalid("hash_encode", "x must be float32 or bfloat16");
  const auto shape = x.dimensions();
  const auto w = weights.dimensions();
  if (shape.size() != 4) return invalid("hash_encode", "x must be [B, K, N, D]");
  if (w.size() != 3 || w[2] == 0 || w[2] % 32 != 0)
    return invalid("hash_encode", "weights must be [K, D, R], R a multiple of 32");
  p.batch = shape[0];
  p.heads = shape[1];
  p.tokens = shape[2];
  p.head_dim = shape[3];
  p.bits = w[2];
  if (!has_shape(weights, {p.heads, p.head_dim, p.bits}) || !has_shape(mean, {p.batch, p.heads, p.head_dim}) ||
      !has_shape(*codes, {p.batch, p.heads, p.tokens, p.bits / 32}) ||
      !has_shape(*factors, {p.batch, p.heads, p.tokens}))
    return invalid("hash_encode", "operand shapes do not agree");
  p.x = x.untyped_data();
  p.weights = weights.typed_data();
  p.mean = mean.typed_data();
  p.codes = codes->typed_data();
  p.factors = static_cast<uint16_t*>(factors->untyped_data());
  return ffi::Error::Success();
}

constexpr auto run = [](auto... arguments) {
  HashEncodeParams p;
  if (ffi::Error error = parse(arguments..., &p); error.failure()) return error;
  return guarded("hash_encode", [&] { hash_encode(p); });
};

#if CLO_CUDA_BUILD
constexpr auto run_on_stream = [](cudaStream_t stream, auto... arguments) {
  HashEncodeParams p;
  if (ffi::Error error = parse(arguments..., &p); error.failure()) return error;
  return launched("hash_encode", cuda::hash_encode(p, stream));
};
#endif

template <typename Bind>
auto operands(Bind bind) {
  return std::move(bind)
      .template Arg<ffi::AnyBuffer>()         // x [B, K, N, D]
      .template Arg<ffi::Buffer<ffi::F32>>()  // weights [K, D, R]
      .template Arg<ffi::Buffer<ffi::F32>>()  // mean [B, K, D]
      .template Ret<ffi::Buffer<ffi::U32>>()  // codes [B, K, N, R/32]
      .template Ret<ffi::Buffer<ffi::F16>>(); // factors [B, K, N]
}

}  // namespace
}  // namespace clo

XLA_FFI_DEFINE_HANDLER_SYMBOL(clo_hash_encode, clo::run, clo::operands(xla::ffi::Ffi::Bind()));
#if CLO_CUDA_BUILD
XLA_FFI_DEFINE_HANDLER_SYMBOL(clo_hash_encode_cuda, clo::run_on_stream,
                              clo::operands(xla::ffi::Ffi::Bind().Ctx<clo::StreamContext>()),
                              {xla::ffi::Traits::kCmdBufferCompatible});
#endif
