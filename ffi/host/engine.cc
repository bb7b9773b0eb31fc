#include "host/engine.h"

#include <mutex>
#include <stdexcept>
#include <utility>

#include "host/backends/backend.h"
#include "host/backends/window.h"
#include "host/layers.h"
#include "host/transfers.h"
#if CLO_CUDA_BUILD
#include <optional>

#include "host/cuda/device_guard.h"
#include "host/cuda/pull_transfers.h"
#include "host/cuda/served_transfers.h"
#include "host/cuda/windows.h"
#endif

namespace clo {
namespace {

void require(bool ok, const std::string& name, int64_t got, const char* wanted) {
  if (!ok) throw std::invalid_argument(name + ": got " + std::to_string(got) + ", wanted " + wanted);
}

EngineConfig checked(EngineConfig c) {
  require(!c.kv_heads.empty(), "kv_heads", 0, "at least one layer");
  for (int64_t heads : c.kv_heads) require(heads >= 0, "kv_heads", heads, "an integer >= 0");
  require(c.batch > 0, "batch", c.batch, "a positive integer");
  require(c.max_tokens > 0 && c.max_tokens <= INT32_MAX, "max_tokens", c.max_tokens, "a positive 32-bit integer");
  require(c.num_slots > 0 && c.num_slots <= INT32_MAX, "num_slots", c.num_slots, "a positive 32-bit integer");
  require(c.head_dim > 0, "head_dim", c.head_dim, "a positive integer");
  if (c.format != RowFormat::kPlain)
    require(c.head_dim % 8 == 0, "head_dim", c.head_dim, "a multiple of 8 for quantized rows");
  require(c.threads > 0 && c.threads <= 1024, "threads", c.threads, "an integer in [1, 1024]");
  if (!(c.timeout_s > 0 && c.timeout_s <= 1e6)) throw std::invalid_argument("timeout_s: wanted a number in (0, 1e6]");
  return c;
}

EngineConfig resolved(EngineConfig c) {
  c.backend = resolve_backend(c.backend);
  return c;
}

// Where the selected rows of backend bar come from; null for the others.
std::shared_ptr<WindowSource> open_windows([[maybe_unused]] EngineConfig* c) {
#if CLO_CUDA_BUILD
  if (c->backend == "bar" && c->offload) {
    FoundWindows found = find_windows();
    c->link = found.source->name();
    return std::move(found.source);
  }
#endif
  return nullptr;
}

std::unique_ptr<TransferService> make_transfers(const EngineConfig& c, const Layers& layers,
                                                [[maybe_unused]] WindowSource* windows) {
#if CLO_CUDA_BUILD
  if (Layers::by_threads(c)) return std::make_unique<ServedTransfers>(c, layers, windows);
  if (Layers::on_device(c)) return std::make_unique<PullTransfers>(c, layers.views());
#endif
  return std::make_unique<Transfers>(c.offload ? c.backend : "none", c.offload ? make_host_backend() : nullptr,
                                     layers.views(), c.threads, c.timeout_s);
}

}  // namespace

struct Engine::Impl {
  explicit Impl(EngineConfig c)
      : config(std::move(c)),
        windows(open_windows(&config)),
        layers(config, windows.get()),
        transfers(make_transfers(config, layers, windows.get())) {}

  EngineConfig config;
  const std::shared_ptr<WindowSource> windows;
  Layers layers;
  mutable std::mutex mutex;  // of counters, which kernels report; the transfers count theirs
  Counters counters;
  std::unique_ptr<TransferService> transfers;  // last: it ends before anything above goes
};

#if CLO_CUDA_BUILD
namespace {

// The device of the config, made the current one while the engine is made.
std::optional<DeviceGuard> use_device(const EngineConfig& c) {
  if (c.device < 0) return std::nullopt;
  return std::optional<DeviceGuard>(std::in_place, static_cast<int>(c.device));
}

}  // namespace
#endif

Engine::Engine(EngineConfig config) {
  config = checked(std::move(config));
#if CLO_CUDA_BUILD
  const auto guard = use_device(config);
#endif
  impl_ = std::make_unique<Impl>(resolved(std::move(config)));
}

Engine::Engine(EngineConfig config, Unprobed) : impl_(std::make_unique<Impl>(checked(std::move(config)))) {}
Engine::~Engine() = default;

const EngineConfig& Engine::config() const { return impl_->config; }

LayerView Engine::layer(int64_t index) const {
  const auto& views = impl_->layers.views();
  if (index < 0 || index >= static_cast<int64_t>(views.size()))
    throw std::out_of_range("layer: got " + std::to_string(index) + ", wanted one of " +
                            std::to_string(views.size()) + " layers");
  return views[static_cast<size_t>(index)];
}

int64_t Engine::host_bytes() const { return impl_->layers.host_bytes(); }
int64_t Engine::device_bytes() const { return impl_->layers.device_bytes(); }

uint64_t Engine::post(int64_t index) {
  layer(index);  // checks the index
  return impl_->transfers->post(index);
}

std::string Engine::wait(int64_t index) {
  layer(index);  // checks the index
  return impl_->transfers->wait(index);
}

void Engine::begin(int64_t requests) {
  require(requests > 0, "requests", requests, "a positive integer");
  impl_->transfers->begin(requests);
}

std::string Engine::end() { return impl_->transfers->end(); }

void Engine::copy(void* to, const void* from, int64_t bytes) const { impl_->transfers->copy(to, from, bytes); }

const cuda::EngineRef* Engine::device() const { return impl_->transfers->device(); }

void Engine::record_lookup(uint64_t hits, uint64_t misses, uint64_t rows_selected) {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  impl_->counters.hits += hits;
  impl_->counters.misses += misses;
  impl_->counters.rows_selected += rows_selected;
}

void Engine::record_offload(uint64_t rows, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  impl_->counters.rows_offloaded += rows;
  impl_->counters.bytes_offloaded += bytes;
}

void Engine::abort(const std::string& why) { impl_->transfers->abort(why); }
void Engine::reset() {
  impl_->transfers->reset([this] { impl_->layers.clear_slots(); });
}
void Engine::close() { impl_->transfers->close(); }

Counters Engine::counters() const {
  Counters counters;
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    counters = impl_->counters;
  }
  impl_->transfers->add_to(&counters);
  return counters;
}

void Engine::clear_counters() {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  impl_->counters = {};
  impl_->transfers->clear_counters();
}

void Engine::inject_delay(int64_t max_us, uint64_t seed) {
  require(max_us >= 0, "max_us", max_us, "an integer >= 0");
  impl_->transfers->inject_delay(max_us, seed);
}

void Engine::inject_thread_death(int64_t after_chunks) {
  require(after_chunks >= 0, "after_chunks", after_chunks, "an integer >= 0");
  impl_->transfers->inject_thread_death(after_chunks);
}

}  // namespace clo
