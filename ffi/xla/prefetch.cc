#include <exception>
#include <string>
#include <tuple>
#include <utility>

#include "clo/params.h"
#include "xla/engine_call.h"
#include "xla/handlers.h"

namespace clo {
namespace {

// Empty when the operands of sequence b describe a selection that fits in the buffer.
std::string selection_error(const PrefetchParams& p, int64_t b) {
  const int64_t begin = p.select.begin[b], end = p.select.end[b], k = p.select.k[b], capacity = p.capacity[b];
  const auto text = [](const char* name, int64_t n) { return std::string(name) + " " + std::to_string(n); };
  if (begin < 0 || begin > end || end > p.view.max_tokens)
    return text("candidates from", begin) + text(" to", end) + text(", context capacity", p.view.max_tokens);
  if (capacity < 0 || capacity > p.view.num_slots)
    return text("capacity", capacity) + text(", the engine's slots", p.view.num_slots);
  if (k < 0 || k > p.select.k_max || k > capacity)
    return text("k", k) + text(", wanted at most k_max", p.select.k_max) + text(" and capacity", capacity);
  return {};
}

struct Call {
  PrefetchParams params;
  void* workspace;
  size_t workspace_bytes;
};

// Everything but the layer's arenas and what only the values of operands tell.
ffi::Error parse(ffi::AnyBuffer query, ffi::AnyBuffer label, ffi::Buffer<ffi::S32> age,
                 ffi::Buffer<ffi::F32> importance, ffi::Buffer<ffi::F32> thresholds, ffi::Buffer<ffi::S32> max_age,
                 ffi::Buffer<ffi::F32> weights, ffi::Buffer<ffi::F32> mean, ffi::Buffer<ffi::F32> lse,
                 ffi::Buffer<ffi::U32> codes, ffi::Buffer<ffi::F16> factors, ffi::Buffer<ffi::S32> begin,
                 ffi::Buffer<ffi::S32> end, ffi::Buffer<ffi::S32> k, ffi::Buffer<ffi::S32> capacity,
                 ffi::Buffer<ffi::S32>, ffi::Buffer<ffi::U32>, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer> label_out,
                 ffi::Result<ffi::Buffer<ffi::S32>> age_out, ffi::Result<ffi::Buffer<ffi::PRED>> hit,
                 ffi::Result<ffi::Buffer<ffi::U32>>, ffi::Result<ffi::AnyBuffer>,
                 ffi::Result<ffi::Buffer<ffi::S32>> indices,
                 ffi::Result<ffi::Buffer<ffi::U8>> workspace, int64_t, int64_t retriever, bool whole, float scale,
                 Call* call) {
  PrefetchParams& p = call->params;
  CacheLookupParams& l = p.lookup;
  SelectTopkParams& s = p.select;
  if (!translate(query.element_type(), &l.dtype)) return invalid("prefetch", "query must be float32 or bfloat16");
  if (retriever < 0 || retriever > 2) return invalid("prefetch", "unknown retriever");
  s.retriever = static_cast<Retriever>(retriever);
  const auto q = query.dimensions(), w = weights.dimensions();
  if (q.size() != 3 || w.size() != 3 || indices->dimensions().size() != 3)
    return invalid("prefetch", "query must be [B, H, D], weights [Ko, D, R] and indices [B, Ko, k_max]");
  const int64_t B = q[0], H = q[1], D = q[2], Ko = w[0], R = w[2];
  const bool exact = s.retriever == Retriever::kExact;
  if (Ko == 0 || H % Ko != 0 || w[1] != D || (!exact && (R == 0 || R % 32 != 0)) ||
      !has_shape(label, {B, H, D}) || label.element_type() != query.element_type() || !has_shape(age, {B, Ko}) ||
      !has_shape(importance, {H}) || !has_shape(thresholds, {Ko}) || !has_shape(max_age, {B}) ||
      !has_shape(mean, {B, Ko, D}) || !has_shape(lse, {B, H}) || !has_shape(begin, {B}) || !has_shape(end, {B}) ||
      !has_shape(k, {B}) || !has_shape(capacity, {B}))
    return invalid("prefetch", "operand shapes do not agree with each other");
  if (!exact && H / Ko * R > 65535) return invalid("prefetch", "G·R must be below 65536");

  l.batch = B;
  l.kv_heads = Ko;
  l.group = H / Ko;
  l.head_dim = D;
  l.query = query.untyped_data();
  // Aliased operands: XLA passes the same address twice, and the kernel updates in place.
  l.label = label_out->untyped_data();
  l.age = age_out->typed_data();
  l.importance = importance.typed_data();
  l.thresholds = thresholds.typed_data();
  l.max_age = max_age.typed_data();
  l.hit = reinterpret_cast<uint8_t*>(hit->typed_data());

  s.batch = B;
  s.kv_heads = Ko;
  s.group = l.group;
  s.head_dim = D;
  s.bits = exact ? 0 : R;
  s.k_max = indices->dimensions()[2];
  s.dtype = l.dtype;
  s.scale = scale;
  s.query = l.query;
  s.weights = weights.typed_data();
  s.mean = mean.typed_data();
  s.lse = lse.typed_data();
  s.codes = codes.typed_data();
  s.factors = reinterpret_cast<const uint16_t*>(factors.untyped_data());
  s.begin = begin.typed_data();
  s.end = end.typed_data();
  s.k = k.typed_data();
  s.skip = l.hit;
  s.indices = indices->typed_data();

  p.capacity = capacity.typed_data();
  p.whole = whole;
  call->workspace = workspace->untyped_data();
  call->workspace_bytes = workspace->size_bytes();
  return ffi::Error::Success();
}

// The arenas of a layer whose sizes are those of the operands.
ffi::Error use_view(const LayerView& view, ffi::Buffer<ffi::U32> codes, ffi::Buffer<ffi::F16> factors,
                    PrefetchParams* p) {
  SelectTopkParams& s = p->select;
  s.max_tokens = view.max_tokens;
  s.rows = view.host_rows;
  p->view = view;
  if (s.retriever == Retriever::kExact && view.format != RowFormat::kPlain)
    return invalid("prefetch", "retriever exact reads whole keys, and the engine's rows are quantized");
  if (s.retriever != Retriever::kExact &&
      (!has_shape(codes, {s.batch, s.kv_heads, s.max_tokens, s.bits / 32}) ||
       !has_shape(factors, {s.batch, s.kv_heads, s.max_tokens})))
    return invalid("prefetch", "the shapes of codes and factors do not agree with the engine's layer");
  return ffi::Error::Success();
}

ffi::Error serve(const EngineCall& call, const PrefetchParams& p) {
  for (int64_t b = 0; b < p.view.batch; ++b) {
    const std::string error = selection_error(p, b);
    if (!error.empty()) return invalid("prefetch", "sequence " + std::to_string(b) + ": " + error);
  }
  try {
    // Normally attention has waited already. The first fill at the end of prefill is followed by another prefetch,
    // which must not rewrite a request that is being served.
    const std::string failure = call.engine->wait(call.layer);
    if (!failure.empty()) return transfer_failed("prefetch", failure);
    const PrefetchResult result = prefetch(p);
    call.engine->record_lookup(result.hits, result.misses, result.rows_selected);
    call.engine->post(call.layer);
  } catch (const std::exception& e) {
    return ffi::Error::Internal(std::string("clo_prefetch: ") + e.what());
  }
  return ffi::Error::Success();
}

// Arguments of a handler by place: those of parse() less the last.
constexpr size_t kCodes = 9, kFactors = 10, kLayer = 15, kEngine = 25;

constexpr auto run = [](auto... arguments) -> ffi::Error {
  const auto all = std::tie(arguments...);
  Call call{};
  if (ffi::Error error = parse(arguments..., &call); error.failure()) return error;
  PrefetchParams& p = call.params;
  EngineCall engine;
  if (ffi::Error error = find_layer("prefetch", std::get<kEngine>(all), std::get<kLayer>(all), p.lookup.batch,
                                    p.lookup.kv_heads, p.lookup.head_dim, p.lookup.dtype, &engine);
      error.failure())
    return error;
  if (ffi::Error error = use_view(engine.view, std::get<kCodes>(all), std::get<kFactors>(all), &p); error.failure())
    return error;
  return serve(engine, p);
};

#if CLO_CUDA_BUILD
constexpr auto run_on_stream = [](cudaStream_t stream, auto... arguments) -> ffi::Error {
  const auto all = std::tie(arguments...);
  Call call{};
  if (ffi::Error error = parse(arguments..., &call); error.failure()) return error;
  PrefetchParams& p = call.params;
  DeviceCall engine;
  if (ffi::Error error = find_device_layer("prefetch", std::get<kEngine>(all), std::get<kLayer>(all), p.lookup.batch,
                                           p.lookup.kv_heads, p.lookup.head_dim, p.lookup.dtype, &engine);
      error.failure())
    return error;
  if (ffi::Error error = use_view(engine.view, std::get<kCodes>(all), std::get<kFactors>(all), &p); error.failure())
    return error;
  if (p.lookup.group > 8) return invalid("prefetch", "at most 8 query heads share a KV head on a GPU");
  if (p.select.retriever == Retriever::kExact && !exact_takes(p.lookup.head_dim, p.lookup.dtype))
    return exact_refuses("prefetch");
  if (call.workspace_bytes < cuda::prefetch_workspace_bytes(p))
    return invalid("prefetch", "the workspace is too small: the program was traced for another device or engine");
  if (ffi::Error error = launched("prefetch", cuda::prefetch(p, engine.ref, call.workspace, stream)); error.failure())
    return error;
  if (engine.ref.flags == nullptr || !engine.ref.served_by_threads) return ffi::Error::Success();
  return launched("prefetch", cuda::hand_over(engine.ref, stream));
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
      .template Arg<ffi::Buffer<ffi::F32>>()   // weights [Ko, D, R]
      .template Arg<ffi::Buffer<ffi::F32>>()   // mean [B, Ko, D]
      .template Arg<ffi::Buffer<ffi::F32>>()   // lse [B, H]
      .template Arg<ffi::Buffer<ffi::U32>>()   // codes [B, Ko, S, R/32]
      .template Arg<ffi::Buffer<ffi::F16>>()   // factors [B, Ko, S]
      .template Arg<ffi::Buffer<ffi::S32>>()   // begin [B]
      .template Arg<ffi::Buffer<ffi::S32>>()   // end [B]
      .template Arg<ffi::Buffer<ffi::S32>>()   // k [B]
      .template Arg<ffi::Buffer<ffi::S32>>()   // capacity [B]
      .template Arg<ffi::Buffer<ffi::S32>>()   // layer [1]
      .template Arg<ffi::Buffer<ffi::U32>>()   // token [1]
      .template Arg<ffi::AnyBuffer>()          // what is to be used after this call only
      .template Ret<ffi::AnyBuffer>()          // label, aliased
      .template Ret<ffi::Buffer<ffi::S32>>()   // age, aliased
      .template Ret<ffi::Buffer<ffi::PRED>>()  // hit [B, Ko]
      .template Ret<ffi::Buffer<ffi::U32>>()   // token, aliased
      .template Ret<ffi::AnyBuffer>()          // the same, aliased
      .template Ret<ffi::Buffer<ffi::S32>>()   // indices [B, Ko, k_max], scratch
      .template Ret<ffi::Buffer<ffi::U8>>()    // scratch of the CUDA kernels; else empty
      .template Attr<int64_t>("engine")
      .template Attr<int64_t>("retriever")
      .template Attr<bool>("whole")
      .template Attr<float>("scale");
}

}  // namespace
}  // namespace clo

XLA_FFI_DEFINE_HANDLER_SYMBOL(clo_prefetch, clo::run, clo::operands(xla::ffi::Ffi::Bind()));
#if CLO_CUDA_BUILD
XLA_FFI_DEFINE_HANDLER_SYMBOL(clo_prefetch_cuda, clo::run_on_stream,
                              clo::operands(xla::ffi::Ffi::Bind().Ctx<clo::StreamContext>()),
                              {xla::ffi::Traits::kCmdBufferCompatible});
#endif
