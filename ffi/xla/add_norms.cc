// Of this op there is a CUDA kernel alone; on a CPU it is plain JAX.
#if CLO_CUDA_BUILD
#include "clo/params.h"
#include "cuda/kernels.h"
#include "xla/common.h"
#include "xla/handlers.h"

namespace clo {
namespace {

ffi::Error parse(ffi::AnyBuffer x, ffi::AnyBuffer y, ffi::RemainingArgs scales, ffi::Result<ffi::AnyBuffer> sum,
                 ffi::RemainingRets normed, float eps, AddNormsParams* out) {
  AddNormsParams& p = *out;
  if (!translate(x.element_type(), &p.dtype)) return invalid("add_norms", "x must be float32, bfloat16 or float16");
  const auto shape = x.dimensions();
  if (shape.size() == 0 || shape.back() < 1 || shape.back() > kMaxNormHidden)
    return invalid("add_norms", "x must be [..., hidden], hidden from 1 to " + std::to_string(kMaxNormHidden));
  if (scales.empty() || scales.size() > kMaxNorms || normed.size() != scales.size())
    return invalid("add_norms", "wanted one or two scales and as many norms");
  const auto like_x = [&](const ffi::AnyBuffer& other) {
    return other.dimensions() == shape && other.element_type() == x.element_type();
  };
  if (!like_x(y) || !like_x(*sum)) return invalid("add_norms", "y and the sum must be like x");
  p.hidden = shape.back();
  p.rows = static_cast<int64_t>(x.element_count()) / p.hidden;
  p.norms = static_cast<int>(scales.size());
  p.eps = eps;
  p.x = x.untyped_data();
  p.y = y.untyped_data();
  // An aliased operand: XLA passes the same address twice.
  p.sum = sum->untyped_data();
  for (int n = 0; n < p.norms; ++n) {
    const auto scale = scales.get<ffi::AnyBuffer>(n);
    auto result = normed.get<ffi::AnyBuffer>(n);
    if (scale.has_error() || result.has_error()) return invalid("add_norms", "scales and norms must be arrays");
    DType dtype;
    if (!has_shape(*scale, {p.hidden}) || !translate(scale->element_type(), &dtype) ||
        (dtype != p.dtype && dtype != DType::kF32) || (n > 0 && dtype != p.scale_dtype))
      return invalid("add_norms", "scales must be [hidden], all of x's dtype or all float32");
    if (!like_x(**result)) return invalid("add_norms", "norms must be like x");
    p.scale_dtype = dtype;
    p.scales[n] = scale->untyped_data();
    p.normed[n] = (*result)->untyped_data();
  }
  return ffi::Error::Success();
}

constexpr auto run_on_stream = [](cudaStream_t stream, auto... arguments) {
  AddNormsParams p{};
  if (ffi::Error error = parse(arguments..., &p); error.failure()) return error;
  return launched("add_norms", cuda::add_norms(p, stream));
};

}  // namespace
}  // namespace clo

XLA_FFI_DEFINE_HANDLER_SYMBOL(clo_add_norms_cuda, clo::run_on_stream,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<clo::StreamContext>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x [..., hidden]
                                  .Arg<xla::ffi::AnyBuffer>()  // y [..., hidden]
                                  .RemainingArgs()             // scales [hidden]
                                  .Ret<xla::ffi::AnyBuffer>()  // sum, aliased to x
                                  .RemainingRets()             // norms [..., hidden], as many as scales
                                  .Attr<float>("eps"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
#endif
