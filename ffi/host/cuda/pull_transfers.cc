#include "host/cuda/pull_transfers.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "cuda/flags.cuh"

namespace clo {
namespace {

constexpr int64_t kVectorBytes = 16;
constexpr auto kLook = std::chrono::microseconds(20);  // between looks at a layer's flags

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("backend pull: ") + what + ": " + cudaGetErrorString(error));
}

void refuse(bool wrong, const std::string& text) {
  if (wrong) throw std::invalid_argument(text);
}

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

PullTransfers::PullTransfers(const EngineConfig& config, const std::vector<LayerView>& views)
    : views_(views), timeout_s_(config.timeout_s), offload_(config.offload) {
  const int64_t layers = static_cast<int64_t>(views.size());
  const int64_t bytes = row_bytes(views[0]);
  refuse(layers > cuda::kMaxLayers, "kv_heads: got " + std::to_string(layers) + " layers, backend pull serves at most " +
                                        std::to_string(cuda::kMaxLayers));
  refuse(bytes % kVectorBytes != 0, "head_dim: got " + std::to_string(config.head_dim) + ", rows of " +
                                        std::to_string(bytes) + " bytes; backend pull wants multiples of 16");
  refuse(config.max_tokens > INT32_MAX / (bytes / kVectorBytes),
         "max_tokens: got " + std::to_string(config.max_tokens) + ", more 16-byte words a head than 31 bits count");
  std::vector<int32_t> order, numbers;
  std::vector<cuda::LayerFlags> flags(views.size());
  for (int32_t i = 0; i < layers; ++i) {
    flags[static_cast<size_t>(i)].layer = static_cast<uint32_t>(i);
    numbers.push_back(i);
    if (views[static_cast<size_t>(i)].kv_heads > 0) order.push_back(i);
  }
  ring_size_ = static_cast<int32_t>(order.size());

  int least = 0, greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream priorities");
  check(cudaStreamCreateWithPriority(&transfer_, cudaStreamNonBlocking, greatest), "the transfer stream");
  check(cudaStreamCreateWithPriority(&side_, cudaStreamNonBlocking, greatest), "the side stream");
  check(cudaHostAlloc(reinterpret_cast<void**>(&host_word_), kVectorBytes, cudaHostAllocMapped), "the host's word");
  tell(cuda::HostWord::kServe);
  check(cuda::load_transfer_kernels(), "loading the transfer kernels (is the GPU one that this build is for?)");

  const int64_t control_bytes = aligned(sizeof(cuda::TransferControl));
  const int64_t flag_bytes = aligned(layers * static_cast<int64_t>(sizeof(cuda::LayerFlags)));
  const int64_t view_bytes = aligned(layers * static_cast<int64_t>(sizeof(LayerView)));
  const int64_t number_bytes = aligned(layers * static_cast<int64_t>(sizeof(int32_t)));
  const int64_t total = control_bytes + flag_bytes + view_bytes + 2 * number_bytes;
  check(cudaMalloc(reinterpret_cast<void**>(&block_), static_cast<size_t>(total)), "the control block");
  std::vector<char> image(static_cast<size_t>(total), 0);
  char* at = block_;
  const auto place = [&](const void* data, size_t size, int64_t room) {
    if (size > 0) std::memcpy(image.data() + (at - block_), data, size);
    char* const placed = at;
    at += room;
    return placed;
  };
  ref_.control = reinterpret_cast<cuda::TransferControl*>(place(nullptr, 0, control_bytes));
  auto* placed_flags = reinterpret_cast<cuda::LayerFlags*>(
      place(flags.data(), flags.size() * sizeof(cuda::LayerFlags), flag_bytes));
  ref_.layer.views =
      reinterpret_cast<const LayerView*>(place(views.data(), views.size() * sizeof(LayerView), view_bytes));
  ref_.layer.count = static_cast<uint32_t>(layers);
  order_ = reinterpret_cast<const int32_t*>(place(order.data(), order.size() * sizeof(int32_t), number_bytes));
  numbers_ = reinterpret_cast<const int32_t*>(place(numbers.data(), numbers.size() * sizeof(int32_t), number_bytes));
  to_device(block_, image.data(), total);
  ref_.flags = offload_ ? placed_flags : nullptr;
  ref_.error = &ref_.control->error;
  ref_.counters = &ref_.control->counters;
  ref_.timeout_ns = static_cast<uint64_t>(timeout_s_ * 1e9);
}

PullTransfers::~PullTransfers() {
  close();
  // The control block stays: a graph that was captured for this engine may be replayed by mistake, and finds an error.
  if (host_word_ != nullptr) cudaFreeHost(host_word_);
  if (transfer_ != nullptr) cudaStreamDestroy(transfer_);
  if (side_ != nullptr) cudaStreamDestroy(side_);
}

void PullTransfers::tell(cuda::HostWord word) {
  __atomic_store_n(host_word_, static_cast<uint32_t>(word), __ATOMIC_RELEASE);
}

void PullTransfers::to_device(void* to, const void* from, int64_t bytes) const {
  check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, side_), "a copy");
  check(cudaStreamSynchronize(side_), "a copy");
}

void PullTransfers::from_device(void* to, const void* from, int64_t bytes) const { to_device(to, from, bytes); }

void PullTransfers::copy(void* to, const void* from, int64_t bytes) const {
  std::lock_guard<std::mutex> lock(mutex_);
  settle();
  to_device(to, from, bytes);
}

void PullTransfers::settle() const {
  if (!serving_) check(cudaDeviceSynchronize(), "programs before");
}

void PullTransfers::write_control(uint32_t cuda::TransferControl::*field, uint32_t value) {
  to_device(&(ref_.control->*field), &value, sizeof value);
}

cuda::EngineRef PullTransfers::ref_of(int64_t layer) const {
  cuda::EngineRef ref = ref_;
  ref.layer.index = numbers_ + layer;
  return ref;
}

void PullTransfers::begin(int64_t requests) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) throw std::logic_error("the engine is closed");
  if (serving_) throw std::logic_error("begin: the last program has not ended");
  if (!offload_ || ring_size_ == 0) return;
  tell(cuda::HostWord::kServe);
  // Seen by every program that is started from now on: its prefetches leave their requests to the resident kernel.
  write_control(&cuda::TransferControl::resident, 1);
  const cuda::Ring ring{ref_.layer.views, ref_.flags, order_, ring_size_, ref_.control, host_word_, ref_.timeout_ns};
  check(cuda::serve_resident(ring, requests, cuda::kTransferBlocks, transfer_), "the transfer kernel");
  serving_ = true;
}

void PullTransfers::finish() {
  if (!serving_) return;
  serving_ = false;
  if (__atomic_load_n(host_word_, __ATOMIC_ACQUIRE) == static_cast<uint32_t>(cuda::HostWord::kServe))
    tell(cuda::HostWord::kStop);
  check(cudaStreamSynchronize(transfer_), "the transfer kernel");
  tell(cuda::HostWord::kServe);
  write_control(&cuda::TransferControl::resident, 0);
}

std::string PullTransfers::end() {
  std::lock_guard<std::mutex> lock(mutex_);
  finish();
  settle();
  uint32_t error = 0;
  from_device(&error, ref_.error, sizeof error);
  return describe(error);
}

std::string PullTransfers::describe(uint32_t error) const {
  const std::string request = "layer " + std::to_string(cuda::error_layer(error)) + ", backend pull, request " +
                              std::to_string(cuda::error_sequence(error));
  char limit[48];
  std::snprintf(limit, sizeof limit, " (limit %.3f s)", timeout_s_);
  switch (cuda::error_failure(error)) {
    case cuda::Failure::kNone: return {};
    case cuda::Failure::kNotDelivered: return request + ": not delivered in time" + limit;
    case cuda::Failure::kNotPosted: return request + ": not posted in time" + limit;
    case cuda::Failure::kAborted: return request + ": aborted: " + why_;
    case cuda::Failure::kBadOperand:
      return "layer " + std::to_string(cuda::error_layer(error)) + ", backend pull: an operand is out of range";
  }
  return request + ": unknown failure";
}

uint64_t PullTransfers::post(int64_t layer) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!offload_) return 0;
  const cuda::EngineRef ref = ref_of(layer);
  cuda::LayerFlags flags;
  from_device(&flags, ref.flags + layer, sizeof flags);
  if (flags.posted != flags.ready)
    throw std::logic_error("layer " + std::to_string(layer) + ", backend pull, request " +
                           std::to_string(flags.posted) + ": not ready yet, and another one is posted");
  check(cuda::post_request(ref, side_), "a post");
  check(cuda::serve_posted(ref, side_), "a transfer");
  return flags.posted + 1;
}

std::string PullTransfers::wait(int64_t layer) {
  if (!offload_) return {};
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    // The lock is not held between looks: abort() may end the wait.
    std::unique_lock<std::mutex> lock(mutex_);
    settle();
    cuda::LayerFlags flags;
    uint32_t error = 0;
    from_device(&flags, ref_.flags + layer, sizeof flags);
    from_device(&error, ref_.error, sizeof error);
    if (error != 0) return describe(error);
    if (flags.posted == flags.ready) return {};
    if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > timeout_s_)
      return describe(cuda::error_word(cuda::Failure::kNotDelivered, static_cast<uint32_t>(layer), flags.posted));
    lock.unlock();
    std::this_thread::sleep_for(kLook);
  }
}

void PullTransfers::abort(const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  why_ = why;
  if (serving_) {
    tell(cuda::HostWord::kAbort);
    return;
  }
  uint32_t error = 0;
  from_device(&error, ref_.error, sizeof error);
  if (error == 0)
    write_control(&cuda::TransferControl::error, cuda::error_word(cuda::Failure::kAborted, 0, 0));
}

void PullTransfers::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return;
  closed_ = true;
  if (block_ == nullptr) return;
  why_ = "the engine is closed";
  if (serving_) tell(cuda::HostWord::kAbort);
  // A destructor may come here with a device that has failed: then nothing is left to be ended.
  try {
    finish();
    write_control(&cuda::TransferControl::error, cuda::error_word(cuda::Failure::kAborted, 0, 0));
  } catch (const std::runtime_error& e) {
    std::fprintf(stderr, "clo_jax: while the engine closed: %s\n", e.what());
  }
}

void PullTransfers::reset(const std::function<void()>& clear) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) throw std::logic_error("the engine is closed");
  if (serving_) tell(cuda::HostWord::kAbort);
  finish();
  why_.clear();
  clear();
  std::vector<cuda::LayerFlags> flags(views_.size());
  for (size_t i = 0; i < flags.size(); ++i) flags[i].layer = static_cast<uint32_t>(i);
  if (offload_) to_device(ref_.flags, flags.data(), static_cast<int64_t>(flags.size() * sizeof flags[0]));
  write_control(&cuda::TransferControl::error, 0);
}

void PullTransfers::add_to(Counters* counters) const {
  std::lock_guard<std::mutex> lock(mutex_);
  settle();
  cuda::DeviceCounters device;
  from_device(&device, ref_.counters, sizeof device);
  const uint64_t bytes = static_cast<uint64_t>(row_bytes(views_[0]));
  counters->requests += device.requests;
  counters->rows_posted += device.rows_posted;
  counters->rows_moved += device.rows_moved;
  counters->bytes_moved += device.rows_moved * bytes;
  counters->rows_offloaded += device.rows_offloaded;
  counters->bytes_offloaded += device.rows_offloaded * bytes;
  counters->wait_ns += device.wait_ns;
  counters->hits += device.hits;
  counters->misses += device.misses;
  counters->rows_selected += device.rows_selected;
}

void PullTransfers::clear_counters() {
  std::lock_guard<std::mutex> lock(mutex_);
  const cuda::DeviceCounters zero{};
  to_device(ref_.counters, &zero, sizeof zero);
}

void PullTransfers::inject_delay(int64_t max_us, uint64_t seed) {
  std::lock_guard<std::mutex> lock(mutex_);
  write_control(&cuda::TransferControl::max_delay_us, static_cast<uint32_t>(max_us));
  write_control(&cuda::TransferControl::seed, static_cast<uint32_t>(seed));
}

void PullTransfers::inject_thread_death(int64_t) {
  throw std::invalid_argument("inject_thread_death: backend pull has no threads");
}

}  // namespace clo
