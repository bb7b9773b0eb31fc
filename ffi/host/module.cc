// The Python module clo_jax._host: build facts, the FFI targets and the transfer engine. Typed Python wrappers live in
// clo_jax/ops and clo_jax/transfer; nothing else imports this module.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "cpu/simd/dispatch.h"
#include "host/backends/backend.h"
#include "host/engine.h"
#include "xla/handlers.h"

#if CLO_CUDA_BUILD
#include "cuda/kernels.h"
#include "host/cuda/device_memory.h"
#include "xla/common.h"
#endif

namespace nb = nanobind;

namespace {

nb::dict registrations(const std::string& platform) {
  nb::dict targets;
  if (platform == "cpu") {
#define CLO_REGISTER(name) targets["clo_" #name] = nb::capsule(reinterpret_cast<void*>(&clo_##name));
    CLO_HANDLERS(CLO_REGISTER)
#undef CLO_REGISTER
  }
#if CLO_CUDA_BUILD
  if (platform == "CUDA") {
#define CLO_REGISTER(name) targets["clo_" #name] = nb::capsule(reinterpret_cast<void*>(&clo_##name##_cuda));
    CLO_CUDA_HANDLERS(CLO_REGISTER)
#undef CLO_REGISTER
  }
#endif
  return targets;
}

// Bytes of scratch that the CUDA kernel wants as a further result; 0 without CUDA, or without a device.
int64_t select_topk_workspace([[maybe_unused]] int64_t batch, [[maybe_unused]] int64_t kv_heads,
                              [[maybe_unused]] int64_t group, [[maybe_unused]] int64_t head_dim,
                              [[maybe_unused]] int64_t bits, [[maybe_unused]] int64_t max_tokens,
                              [[maybe_unused]] int64_t retriever) {
#if CLO_CUDA_BUILD
  clo::SelectTopkParams p{};
  p.batch = batch;
  p.kv_heads = kv_heads;
  p.group = group;
  p.head_dim = head_dim;
  p.bits = bits;
  p.max_tokens = max_tokens;
  p.retriever = static_cast<clo::Retriever>(retriever);
  return static_cast<int64_t>(clo::cuda::select_topk_workspace_bytes(p));
#else
  return 0;
#endif
}

// The same for clo_prefetch, by the engine that the call names: 0 for one that serves the CPU, or is closed.
int64_t prefetch_workspace([[maybe_unused]] int64_t engine, [[maybe_unused]] int64_t kv_heads,
                           [[maybe_unused]] int64_t group, [[maybe_unused]] int64_t bits,
                           [[maybe_unused]] int64_t retriever) {
#if CLO_CUDA_BUILD
  const std::shared_ptr<clo::Engine> found = clo::find_engine(engine);
  if (found == nullptr || found->device() == nullptr) return 0;
  clo::PrefetchParams p{};
  const int64_t layers = static_cast<int64_t>(found->config().kv_heads.size());
  for (int64_t i = 0; i < layers && p.view.kv_heads != kv_heads; ++i) p.view = found->layer(i);
  p.select.batch = p.view.batch;
  p.select.kv_heads = kv_heads;
  p.select.group = group;
  p.select.head_dim = p.view.head_dim;
  p.select.bits = bits;
  p.select.max_tokens = p.view.max_tokens;
  p.select.retriever = static_cast<clo::Retriever>(retriever);
  return static_cast<int64_t>(clo::cuda::prefetch_workspace_bytes(p));
#else
  return 0;
#endif
}

// The same for clo_attend.
int64_t attend_workspace([[maybe_unused]] int64_t batch, [[maybe_unused]] int64_t offloaded,
                         [[maybe_unused]] int64_t resident, [[maybe_unused]] int64_t group,
                         [[maybe_unused]] int64_t head_dim, [[maybe_unused]] int64_t bits) {
#if CLO_CUDA_BUILD
  clo::AttendParams p{};
  p.batch = batch;
  p.offloaded_heads = offloaded;
  p.resident_heads = resident;
  p.group = group;
  p.head_dim = head_dim;
  p.bits = bits;
  return static_cast<int64_t>(clo::cuda::attend_workspace_bytes(p));
#else
  return 0;
#endif
}

// (free, all) bytes of the device; None without CUDA.
nb::object device_bytes() {
#if CLO_CUDA_BUILD
  int64_t free = 0, total = 0;
  clo::device_bytes(&free, &total);
  return nb::make_tuple(free, total);
#else
  return nb::none();
#endif
}

int64_t handler_launches() {
#if CLO_CUDA_BUILD
  return clo::handler_launches.load();
#else
  return 0;
#endif
}

nb::list backends() {
  nb::list list;
  for (const clo::BackendInfo& b : clo::list_backends()) list.append(nb::make_tuple(b.name, b.available, b.reason));
  return list;
}

std::pair<bool, std::string> find_backend(const std::string& name) {
  const clo::BackendInfo found = clo::find_backend(name);
  return {found.available, found.reason};
}

nb::dict build_info() {
  nb::dict info;
  info["jaxlib"] = CLO_JAXLIB_VERSION;
  info["compiler"] = CLO_COMPILER;
  info["build_type"] = CLO_BUILD_TYPE;
  info["cuda"] = static_cast<bool>(CLO_CUDA_BUILD);
  return info;
}

clo::DType element_type(const std::string& name) {
  if (name == "float32") return clo::DType::kF32;
  if (name == "bfloat16") return clo::DType::kBF16;
  if (name == "float16") return clo::DType::kF16;
  throw std::invalid_argument("dtype: got \"" + name + "\", wanted float32, bfloat16 or float16");
}

clo::RowFormat row_format(const std::string& name) {
  if (name == "auto") return clo::RowFormat::kPlain;
  if (name == "int8") return clo::RowFormat::kInt8;
  if (name == "fp8") return clo::RowFormat::kFp8;
  throw std::invalid_argument("kv_dtype: got \"" + name + "\", wanted auto, int8 or fp8");
}

// An engine and its handle. Arrays that Python holds share the engine, so its memory outlives close() while they live.
class Handle {
 public:
  Handle(std::vector<int64_t> kv_heads, int64_t batch, int64_t max_tokens, int64_t num_slots, int64_t head_dim,
         const std::string& dtype, const std::string& kv_dtype, std::string backend, int64_t device, int64_t threads, bool offload, double timeout_s,
         std::optional<nb::callable> progress) {
    clo::EngineConfig c;
    c.kv_heads = std::move(kv_heads);
    c.batch = batch;
    c.max_tokens = max_tokens;
    c.num_slots = num_slots;
    c.head_dim = head_dim;
    c.dtype = element_type(dtype);
    c.format = row_format(kv_dtype);
    c.backend = std::move(backend);
    c.device = device;
    c.threads = threads;
    c.offload = offload;
    c.timeout_s = timeout_s;
    if (progress)
      c.progress = [&progress](int64_t done, int64_t total) {
        nb::gil_scoped_acquire locked;
        (*progress)(done, total);
      };
    engine_ = std::make_shared<clo::Engine>(std::move(c));
    number_ = clo::register_engine(engine_);
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() { close(); }

  // A program that is waiting fails at once; one that runs keeps the engine's memory until it returns.
  void close() {
    engine_->close();
    clo::unregister_engine(number_);
    number_ = 0;
  }

  clo::Engine& engine() const { return *engine_; }
  int64_t number() const { return number_; }

  // A writable array over arena memory, or None where the layer has none. Where the host does not reach the arena:
  // a copy.
  nb::object array(void* data, const std::vector<int64_t>& dims, nb::dlpack::dtype type,
                   bool on_host = false) const {
    if (data == nullptr) return nb::none();
    std::vector<size_t> shape(dims.begin(), dims.end());
    if (engine_->device() != nullptr && !on_host) return copy(data, shape, type);
    auto* share = new std::shared_ptr<clo::Engine>(engine_);
    nb::capsule owner(share, [](void* p) noexcept { delete static_cast<std::shared_ptr<clo::Engine>*>(p); });
    return nb::cast(nb::ndarray<nb::numpy>(data, shape.size(), shape.data(), owner, nullptr, type));
  }

 private:
  nb::object copy(const void* data, const std::vector<size_t>& shape, nb::dlpack::dtype type) const {
    size_t bytes = type.bits / 8;
    for (size_t n : shape) bytes *= n;
    auto* values = new std::vector<char>(bytes);
    nb::capsule owner(values, [](void* p) noexcept { delete static_cast<std::vector<char>*>(p); });
    engine_->copy(values->data(), data, static_cast<int64_t>(bytes));
    return nb::cast(nb::ndarray<nb::numpy>(values->data(), shape.size(), shape.data(), owner, nullptr, type));
  }

  std::shared_ptr<clo::Engine> engine_;
  int64_t number_ = 0;
};

// The layer's arrays of these names, or all: those in device memory are copied. Rows of 16-bit elements are uint16 here,
// and Python reinterprets them; quantized rows are bytes.
nb::dict layer_arrays(const Handle& h, int64_t layer, const std::vector<std::string>& names) {
  const clo::LayerView v = h.engine().layer(layer);
  const bool quantized = v.format != clo::RowFormat::kPlain;
  const auto rows = quantized ? nb::dtype<uint8_t>()
                              : v.dtype == clo::DType::kF32 ? nb::dtype<float>() : nb::dtype<uint16_t>();
  const int64_t B = v.batch, Ko = v.kv_heads, S = v.max_tokens, C = v.num_slots, D = v.head_dim;
  nb::dict a;
  const auto give = [&](const char* name, auto* data, const std::vector<int64_t>& shape, nb::dlpack::dtype type,
                        bool on_host = false) {
    if (names.empty() || std::find(names.begin(), names.end(), name) != names.end())
      a[name] = h.array(data, shape, type, on_host);
  };
  const auto give_rows = [&](const char* name, void* data, int64_t count, bool on_host) {
    if (quantized) give(name, data, {B, Ko, count, clo::row_bytes(v)}, rows, on_host);
    else give(name, data, {B, Ko, count, 2, D}, rows, on_host);
  };
  give_rows("host_rows", v.host_rows, S, h.engine().config().offload);
  give_rows("selected_rows", v.selected_rows, C, false);
  give("slot_tokens", v.slot_tokens, {B, Ko, C}, nb::dtype<int32_t>());
  give("slot_last", v.slot_last, {B, Ko, C}, nb::dtype<uint16_t>());
  give("slot_counts", v.slot_counts, {B, Ko}, nb::dtype<int32_t>());
  give("refreshes", v.refreshes, {B, Ko}, nb::dtype<uint16_t>());
  give("request_counts", v.request.counts, {B, Ko}, nb::dtype<int32_t>());
  give("request_tokens", v.request.tokens, {B, Ko, C}, nb::dtype<int32_t>());
  give("request_slots", v.request.slots, {B, Ko, C}, nb::dtype<int32_t>());
  return a;
}

// Writes the layer's array of that name, as layer_arrays() gives it; Python has checked shape and dtype.
void write_array(const Handle& h, int64_t layer, const std::string& name,
                 const nb::ndarray<const uint8_t, nb::c_contig, nb::device::cpu>& bytes) {
  const clo::LayerView v = h.engine().layer(layer);
  const std::pair<const char*, void*> arrays[] = {
      {"host_rows", v.host_rows},
      {"selected_rows", v.selected_rows},
      {"slot_tokens", v.slot_tokens},
      {"slot_last", v.slot_last},
      {"slot_counts", v.slot_counts},
      {"refreshes", v.refreshes},
      {"request_counts", v.request.counts},
      {"request_tokens", v.request.tokens},
      {"request_slots", v.request.slots},
  };
  for (const auto& [known, data] : arrays)
    if (name == known && data != nullptr) h.engine().copy(data, bytes.data(), static_cast<int64_t>(bytes.nbytes()));
}

nb::dict counters(const Handle& h) {
  const clo::Counters c = h.engine().counters();
  nb::dict d;
  d["requests"] = c.requests;
  d["rows_posted"] = c.rows_posted;
  d["rows_moved"] = c.rows_moved;
  d["bytes_moved"] = c.bytes_moved;
  d["rows_offloaded"] = c.rows_offloaded;
  d["bytes_offloaded"] = c.bytes_offloaded;
  d["wait_ns"] = c.wait_ns;
  d["hits"] = c.hits;
  d["misses"] = c.misses;
  d["rows_selected"] = c.rows_selected;
  return d;
}

void bind_engine(nb::module_& m) {
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;  // for whatever may block or take long
  nb::class_<Handle>(m, "Engine")
      .def(nb::init<std::vector<int64_t>, int64_t, int64_t, int64_t, int64_t, const std::string&, const std::string&,
                    std::string, int64_t, int64_t, bool, double, std::optional<nb::callable>>(),
           Unlocked(), nb::kw_only(), nb::arg("kv_heads"), nb::arg("batch"), nb::arg("max_tokens"),
           nb::arg("num_slots"), nb::arg("head_dim"), nb::arg("dtype"), nb::arg("kv_dtype") = "auto",
           nb::arg("backend"), nb::arg("device"),
           nb::arg("threads"), nb::arg("offload"), nb::arg("timeout_s"), nb::arg("progress").none())
      .def_prop_ro("handle", &Handle::number)
      .def_prop_ro("backend", [](const Handle& h) { return h.engine().config().backend; })
      .def_prop_ro("link", [](const Handle& h) { return h.engine().config().link; })
      .def_prop_ro("host_bytes", [](const Handle& h) { return h.engine().host_bytes(); })
      .def_prop_ro("device_bytes", [](const Handle& h) { return h.engine().device_bytes(); })
      .def("post", [](const Handle& h, int64_t layer) { return h.engine().post(layer); }, Unlocked())
      .def("wait", [](const Handle& h, int64_t layer) { return h.engine().wait(layer); }, Unlocked())
      .def("begin", [](const Handle& h, int64_t requests) { h.engine().begin(requests); }, Unlocked())
      .def("end", [](const Handle& h) { return h.engine().end(); }, Unlocked())
      .def("write_array", &write_array)
      .def("abort", [](const Handle& h, const std::string& why) { h.engine().abort(why); }, Unlocked())
      .def("reset", [](const Handle& h) { h.engine().reset(); }, Unlocked())
      .def("close", &Handle::close, Unlocked())
      .def("layer_arrays", &layer_arrays)
      .def("counters", &counters)
      .def("clear_counters", [](const Handle& h) { h.engine().clear_counters(); }, Unlocked())
      .def("inject_delay", [](const Handle& h, int64_t us, uint64_t seed) { h.engine().inject_delay(us, seed); },
           Unlocked())
      .def("inject_thread_death", [](const Handle& h, int64_t n) { h.engine().inject_thread_death(n); }, Unlocked());
}

}  // namespace

NB_MODULE(_host, m) {
  m.def("registrations", &registrations, nb::arg("platform"),
        "FFI target name -> capsule, for platform cpu or CUDA; empty for a platform that this module is not built for.");
  m.def("select_topk_workspace", &select_topk_workspace, nb::kw_only(), nb::arg("batch"), nb::arg("kv_heads"),
        nb::arg("group"), nb::arg("head_dim"), nb::arg("bits"), nb::arg("max_tokens"), nb::arg("retriever"),
        "Bytes of scratch that clo_select_topk wants as its second result on this machine's device.");
  m.def("prefetch_workspace", &prefetch_workspace, nb::kw_only(), nb::arg("engine"), nb::arg("kv_heads"),
        nb::arg("group"), nb::arg("bits"), nb::arg("retriever"),
        "Bytes of scratch that clo_prefetch wants as its last result for this engine.");
  m.def("attend_workspace", &attend_workspace, nb::kw_only(), nb::arg("batch"), nb::arg("offloaded"),
        nb::arg("resident"), nb::arg("group"), nb::arg("head_dim"), nb::arg("bits"),
        "Bytes of scratch that clo_attend wants as its last result.");
  m.def("device_bytes", &device_bytes, "(free, all) bytes of the CUDA device; None in a build without CUDA.");
  m.def("handler_launches", &handler_launches, "Launches by FFI handlers on a GPU so far; a captured call counts once.");
  m.def("backends", &backends,
        "(name, available, reason) of every transfer backend in the order of \"auto\", each after a copy of some rows.");
  m.def("find_backend", &find_backend, nb::arg("name"), "(available, reason) of one of them.");
  m.def("instruction_set", [] { return std::string(clo::isa_name()); },
        "Of the CPU kernels: generic, avx2 or avx512. ValueError when CLO_JAX_ISA names none that works here.");
  m.def("build_info", &build_info, "How this module was built: jaxlib headers, compiler, build type, CUDA.");
  bind_engine(m);
}
