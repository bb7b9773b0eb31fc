#include "host/cuda/served_transfers.h"

#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <thread>

#include "cuda/hand_over.h"
#include "host/cuda/device_guard.h"
#include "host/cuda/links.h"

namespace clo {
namespace {

constexpr auto kLook = std::chrono::microseconds(20);  // between looks at a layer's flags

}  // namespace

ServedTransfers::ServedTransfers(const EngineConfig& config, const Layers& layers, WindowSource* windows)
    : timeout_s_(config.timeout_s),
      control_(config, layers.views(), windows),
      words_(Arena::padded(static_cast<int64_t>(layers.views().size()), 4), "doorbells", Memory::kMapped),
      doorbells_(words_.take<uint32_t>(static_cast<int64_t>(layers.views().size()))) {
  std::vector<Request> mirrors;
  for (const LayerView& view : layers.thread_views()) mirrors.push_back(view.request);
  control_.served_by_threads(mirrors.data(), doorbells_);
  std::unique_ptr<Backend> link;
  if (windows != nullptr) link = std::make_unique<BarLink>(control_, doorbells_, layers.thread_views());
  else link = std::make_unique<StagedLink>(control_, doorbells_, layers);
  threads_ = std::make_unique<Transfers>(config.backend, std::move(link), layers.thread_views(), config.threads,
                                         config.timeout_s);
}

ServedTransfers::~ServedTransfers() { close(); }

void ServedTransfers::settle() const { control_.check(cudaDeviceSynchronize(), "programs before"); }

void ServedTransfers::copy(void* to, const void* from, int64_t bytes) const {
  const DeviceGuard guard(control_.device());
  settle();
  control_.copy(to, from, bytes);
}

void ServedTransfers::begin(int64_t) {
  if (threads_->is_hot()) throw std::logic_error("begin: the last program has not ended");
  threads_->hot(true);
}

std::string ServedTransfers::failure() const {
  const uint32_t error = control_.error();
  const std::string why = threads_->failure();
  if (why.empty()) return control_.describe(error, why);
  return control_.name(cuda::error_layer(error), cuda::error_sequence(error)) + ": " + why;
}

std::string ServedTransfers::failure(int64_t layer, uint64_t request) const {
  const std::string why = threads_->failure();
  return why.empty() ? control_.describe(control_.error(), why) : control_.name(layer, request) + ": " + why;
}

std::string ServedTransfers::end() {
  const DeviceGuard guard(control_.device());
  settle();
  threads_->hot(false);
  return failure();
}

uint64_t ServedTransfers::post(int64_t layer) {
  const DeviceGuard guard(control_.device());
  const cuda::EngineRef ref = control_.ref_of(layer);
  const cuda::LayerFlags flags = control_.flags(layer);
  if (flags.posted != flags.ready)
    throw std::logic_error(control_.name(layer, flags.posted) + ": not ready yet, and another one is posted");
  control_.check(cuda::post_request(ref, control_.side()), "a post");
  control_.check(cuda::hand_over(ref, control_.side()), "a hand-over");
  return flags.posted + 1;
}

std::string ServedTransfers::wait(int64_t layer) {
  const auto start = std::chrono::steady_clock::now();
  const DeviceGuard guard(control_.device());
  settle();
  for (;;) {
    const cuda::LayerFlags flags = control_.flags(layer);
    const std::string why = failure(layer, flags.posted);
    if (!why.empty()) return why;
    if (flags.posted == flags.ready) return {};
    if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > timeout_s_)
      return control_.describe(
          cuda::error_word(cuda::Failure::kNotDelivered, static_cast<uint32_t>(layer), flags.posted), "");
    std::this_thread::sleep_for(kLook);
  }
}

void ServedTransfers::abort(const std::string& why) {
  const DeviceGuard guard(control_.device());
  threads_->abort(why);
}

void ServedTransfers::close() {
  const DeviceGuard guard(control_.device());
  threads_->close();
  // A copy that a thread has started must not outlive the memory.
  if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess)
    std::fprintf(stderr, "clo_jax: while the engine closed: %s\n", cudaGetErrorString(error));
}

void ServedTransfers::reset(const std::function<void()>& clear) {
  const DeviceGuard guard(control_.device());
  threads_->reset([&] {
    settle();
    clear();
    words_.fill(doorbells_, 0, words_.size());
    control_.clear_flags();
    control_.write(&cuda::TransferControl::error, 0);
  });
}

void ServedTransfers::add_to(Counters* counters) const {
  const DeviceGuard guard(control_.device());
  settle();
  control_.add_to(counters);
  threads_->add_to(counters);
}

void ServedTransfers::clear_counters() {
  const DeviceGuard guard(control_.device());
  control_.clear_counters();
  threads_->clear_counters();
}

}  // namespace clo
