#include "host/cuda/pull_transfers.h"

#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <thread>

#include "host/cuda/device_guard.h"

namespace clo {
namespace {

constexpr auto kLook = std::chrono::microseconds(20);  // between looks at a layer's flags

}  // namespace

PullTransfers::PullTransfers(const EngineConfig& config, const std::vector<LayerView>& views)
    : timeout_s_(config.timeout_s), offload_(config.offload), control_(config, views, nullptr) {
  int least = 0, greatest = 0;
  control_.check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream priorities");
  control_.check(cudaStreamCreateWithPriority(&transfer_, cudaStreamNonBlocking, greatest), "the transfer stream");
  control_.check(cudaHostAlloc(reinterpret_cast<void**>(&host_word_), 64, cudaHostAllocMapped), "the host's word");
  tell(cuda::HostWord::kServe);
}

PullTransfers::~PullTransfers() {
  close();
  const DeviceGuard guard(control_.device());
  if (host_word_ != nullptr) cudaFreeHost(host_word_);
  if (transfer_ != nullptr) cudaStreamDestroy(transfer_);
}

void PullTransfers::tell(cuda::HostWord word) {
  __atomic_store_n(host_word_, static_cast<uint32_t>(word), __ATOMIC_RELEASE);
}

void PullTransfers::copy(void* to, const void* from, int64_t bytes) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const DeviceGuard guard(control_.device());
  settle();
  control_.copy(to, from, bytes);
}

void PullTransfers::settle() const {
  if (!serving_) control_.check(cudaDeviceSynchronize(), "programs before");
}

void PullTransfers::begin(int64_t requests) {
  std::lock_guard<std::mutex> lock(mutex_);
  const DeviceGuard guard(control_.device());
  if (closed_) throw std::logic_error("the engine is closed");
  if (serving_) throw std::logic_error("begin: the last program has not ended");
  const cuda::Ring ring = control_.ring(host_word_);
  if (!offload_ || ring.size == 0) return;
  tell(cuda::HostWord::kServe);
  // Seen by every program that is started from now on: its prefetches leave their requests to the resident kernel.
  control_.write(&cuda::TransferControl::resident, 1);
  control_.check(cuda::serve_resident(ring, requests, cuda::kTransferBlocks, transfer_), "the transfer kernel");
  serving_ = true;
}

void PullTransfers::finish() {
  if (!serving_) return;
  serving_ = false;
  if (__atomic_load_n(host_word_, __ATOMIC_ACQUIRE) == static_cast<uint32_t>(cuda::HostWord::kServe))
    tell(cuda::HostWord::kStop);
  control_.check(cudaStreamSynchronize(transfer_), "the transfer kernel");
  tell(cuda::HostWord::kServe);
  control_.write(&cuda::TransferControl::resident, 0);
}

std::string PullTransfers::end() {
  std::lock_guard<std::mutex> lock(mutex_);
  const DeviceGuard guard(control_.device());
  finish();
  settle();
  return control_.describe(control_.error(), why_);
}

uint64_t PullTransfers::post(int64_t layer) {
  std::lock_guard<std::mutex> lock(mutex_);
  const DeviceGuard guard(control_.device());
  if (!offload_) return 0;
  const cuda::EngineRef ref = control_.ref_of(layer);
  const cuda::LayerFlags flags = control_.flags(layer);
  if (flags.posted != flags.ready)
    throw std::logic_error(control_.name(layer, flags.posted) + ": not ready yet, and another one is posted");
  control_.check(cuda::post_request(ref, control_.side()), "a post");
  control_.check(cuda::serve_posted(ref, control_.side()), "a transfer");
  return flags.posted + 1;
}

std::string PullTransfers::wait(int64_t layer) {
  if (!offload_) return {};
  const auto start = std::chrono::steady_clock::now();
  const DeviceGuard guard(control_.device());
  for (;;) {
    // The lock is not held between looks: abort() may end the wait.
    std::unique_lock<std::mutex> lock(mutex_);
    settle();
    const cuda::LayerFlags flags = control_.flags(layer);
    if (const uint32_t error = control_.error(); error != 0) return control_.describe(error, why_);
    if (flags.posted == flags.ready) return {};
    if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > timeout_s_)
      return control_.describe(
          cuda::error_word(cuda::Failure::kNotDelivered, static_cast<uint32_t>(layer), flags.posted), why_);
    lock.unlock();
    std::this_thread::sleep_for(kLook);
  }
}

void PullTransfers::abort(const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  const DeviceGuard guard(control_.device());
  why_ = why;
  if (serving_) {
    tell(cuda::HostWord::kAbort);
    return;
  }
  if (control_.error() == 0)
    control_.write(&cuda::TransferControl::error, cuda::error_word(cuda::Failure::kAborted, 0, 0));
}

void PullTransfers::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  const DeviceGuard guard(control_.device());
  if (closed_) return;
  closed_ = true;
  why_ = "the engine is closed";
  if (serving_) tell(cuda::HostWord::kAbort);
  // A destructor may come here with a device that has failed: then nothing is left to be ended.
  try {
    finish();
    control_.write(&cuda::TransferControl::error, cuda::error_word(cuda::Failure::kAborted, 0, 0));
  } catch (const std::runtime_error& e) {
    std::fprintf(stderr, "clo_jax: while the engine closed: %s\n", e.what());
  }
}

void PullTransfers::reset(const std::function<void()>& clear) {
  std::lock_guard<std::mutex> lock(mutex_);
  const DeviceGuard guard(control_.device());
  if (closed_) throw std::logic_error("the engine is closed");
  if (serving_) tell(cuda::HostWord::kAbort);
  finish();
  why_.clear();
  clear();
  control_.clear_flags();
  control_.write(&cuda::TransferControl::error, 0);
}

void PullTransfers::add_to(Counters* counters) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const DeviceGuard guard(control_.device());
  settle();
  control_.add_to(counters);
}

void PullTransfers::clear_counters() {
  std::lock_guard<std::mutex> lock(mutex_);
  const DeviceGuard guard(control_.device());
  control_.clear_counters();
}

void PullTransfers::inject_delay(int64_t max_us, uint64_t seed) {
  std::lock_guard<std::mutex> lock(mutex_);
  const DeviceGuard guard(control_.device());
  control_.write(&cuda::TransferControl::max_delay_us, static_cast<uint32_t>(max_us));
  control_.write(&cuda::TransferControl::seed, static_cast<uint32_t>(seed));
}

void PullTransfers::inject_thread_death(int64_t) {
  throw std::invalid_argument("inject_thread_death: backend pull has no threads");
}

}  // namespace clo
