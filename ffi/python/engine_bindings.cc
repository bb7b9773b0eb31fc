#include "python/engine_bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "host/engine.h"

namespace nb = nanobind;

namespace {

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
         const std::string& dtype, const std::string& kv_dtype, std::string backend, int64_t device, int64_t threads,
         bool offload, double timeout_s, std::optional<nb::callable> progress) {
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

}  // namespace

void clo::bind_engine(nb::module_& m) {
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
