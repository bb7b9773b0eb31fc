#include <algorithm>
#include <string>
#include <utility>

#include "clo/params.h"
#include "xla/engine_call.h"
#include "xla/handlers.h"

namespace clo {
namespace {

// Empty when every token of [begin, end) has a row of its own in the buffer and in the arena.
std::string range_error(int64_t begin, int64_t end, int64_t num_rows, int64_t sink, int64_t max_tokens) {
  const std::string range = "tokens [" + std::to_string(begin) + ", " + std::to_string(end) + ") ";
  if (begin < 0 || begin > end || end > max_tokens)
    return range + "are not a range within the context capacity of " + std::to_string(max_tokens);
  const bool held = end <= num_rows || (num_rows > sink && end - std::max(begin, sink) <= num_rows - sink);
  if (!held) return range + "do not fit in a buffer of " + std::to_string(num_rows) + " rows";
  return {};
}

// Everything but the layer and the values of begin and end, which are in device memory on a GPU.
ffi::Error parse(ffi::AnyBuffer rows, ffi::Buffer<ffi::S32> begin, ffi::Buffer<ffi::S32> end, int64_t sink,
                 OffloadParams* p) {
  if (!translate(rows.element_type(), &p->dtype)) return invalid("offload", "rows must be float32 or bfloat16");
  const auto d = rows.dimensions();
  if (d.size() != 5 || d[3] != 2) return invalid("offload", "rows must be [B, Ko, N, 2, D]");
  if (!has_shape(begin, {d[0]}) || !has_shape(end, {d[0]})) return invalid("offload", "begin and end must be [B]");
  if (sink < 0) return invalid("offload", "sink must not be negative");
  p->batch = d[0];
  p->kv_heads = d[1];
  p->num_rows = d[2];
  p->head_dim = d[4];
  p->sink = sink;
  p->rows = rows.untyped_data();
  p->begin = begin.typed_data();
  p->end = end.typed_data();
  return ffi::Error::Success();
}

ffi::Error run(ffi::AnyBuffer rows, ffi::Buffer<ffi::S32> begin, ffi::Buffer<ffi::S32> end,
               ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::U32>, ffi::Result<ffi::Buffer<ffi::U32>>, int64_t engine,
               int64_t sink) {
  OffloadParams p;
  if (ffi::Error error = parse(rows, begin, end, sink, &p); error.failure()) return error;
  EngineCall call;
  if (ffi::Error error = find_layer("offload", engine, layer, p.batch, p.kv_heads, p.head_dim, p.dtype, &call);
      error.failure())
    return error;
  p.view = call.view;
  for (int64_t b = 0; b < p.batch; ++b) {
    const std::string error = range_error(p.begin[b], p.end[b], p.num_rows, sink, p.view.max_tokens);
    if (!error.empty()) return invalid("offload", "sequence " + std::to_string(b) + ": " + error);
  }
  const uint64_t written = offload(p);
  call.engine->record_offload(written, written * static_cast<uint64_t>(row_bytes(p.view)));
  return ffi::Error::Success();
}

#if CLO_CUDA_BUILD
ffi::Error run_on_stream(cudaStream_t stream, ffi::AnyBuffer rows, ffi::Buffer<ffi::S32> begin,
                         ffi::Buffer<ffi::S32> end, ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::U32>,
                         ffi::Result<ffi::Buffer<ffi::U32>>, int64_t engine, int64_t sink) {
  OffloadParams p;
  if (ffi::Error error = parse(rows, begin, end, sink, &p); error.failure()) return error;
  DeviceCall call;
  if (ffi::Error error = find_device_layer("offload", engine, layer, p.batch, p.kv_heads, p.head_dim, p.dtype, &call);
      error.failure())
    return error;
  p.view = call.view;
  return launched("offload", cuda::offload(p, call.ref, stream));
}
#endif

template <typename Bind>
auto operands(Bind bind) {
  return std::move(bind)
      .template Arg<ffi::AnyBuffer>()        // rows [B, Ko, N, 2, D]
      .template Arg<ffi::Buffer<ffi::S32>>()  // begin [B]
      .template Arg<ffi::Buffer<ffi::S32>>()  // end [B]
      .template Arg<ffi::Buffer<ffi::S32>>()  // layer [1]
      .template Arg<ffi::Buffer<ffi::U32>>()  // token [1]
      .template Ret<ffi::Buffer<ffi::U32>>()  // token, aliased
      .template Attr<int64_t>("engine")
      .template Attr<int64_t>("sink");
}

}  // namespace
}  // namespace clo

XLA_FFI_DEFINE_HANDLER_SYMBOL(clo_offload, clo::run, clo::operands(xla::ffi::Ffi::Bind()));
#if CLO_CUDA_BUILD
XLA_FFI_DEFINE_HANDLER_SYMBOL(clo_offload_cuda, clo::run_on_stream,
                              clo::operands(xla::ffi::Ffi::Bind().Ctx<clo::StreamContext>()),
                              {xla::ffi::Traits::kCmdBufferCompatible});
#endif
