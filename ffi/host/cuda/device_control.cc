#include "host/cuda/device_control.h"

#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "cuda/hand_over.h"
#include "host/backends/stream_rows.h"

namespace clo {
namespace {

constexpr int64_t kVectorBytes = 16;

void refuse(bool wrong, const std::string& text) {
  if (wrong) throw std::invalid_argument(text);
}

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

void DeviceControl::check(cudaError_t error, const char* what) const {
  if (error == cudaSuccess) return;
  throw std::runtime_error("backend " + backend_ + ": " + what + ": " + cudaGetErrorString(error));
}

DeviceControl::DeviceControl(const EngineConfig& config, const std::vector<LayerView>& views, WindowSource* windows)
    : backend_(config.backend), views_(views), timeout_s_(config.timeout_s) {
  const int64_t layers = static_cast<int64_t>(views.size());
  const int64_t bytes = row_bytes(views[0]);
  refuse(layers > cuda::kMaxLayers, "kv_heads: got " + std::to_string(layers) + " layers, backend " + backend_ +
                                        " serves at most " + std::to_string(cuda::kMaxLayers));
  refuse(bytes % kVectorBytes != 0, "head_dim: got " + std::to_string(config.head_dim) + ", rows of " +
                                        std::to_string(bytes) + " bytes; backend " + backend_ +
                                        " wants multiples of 16");
  refuse(config.format != RowFormat::kPlain && config.head_dim > cuda::kMaxQuantizedDim,
         "head_dim: got " + std::to_string(config.head_dim) + ", quantized rows on a GPU want at most " +
             std::to_string(cuda::kMaxQuantizedDim));
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
  check(cudaGetDevice(&device_), "the current device");
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream priorities");
  check(cudaStreamCreateWithPriority(&side_, cudaStreamNonBlocking, greatest), "the side stream");
  check(cuda::load_transfer_kernels(), "loading the transfer kernels (is the GPU one that this build is for?)");
  check(cuda::load_hand_over_kernels(), "loading the transfer kernels");

  const int64_t control_bytes = aligned(sizeof(cuda::TransferControl));
  const int64_t flag_bytes = aligned(layers * static_cast<int64_t>(sizeof(cuda::LayerFlags)));
  const int64_t view_bytes = aligned(layers * static_cast<int64_t>(sizeof(LayerView)));
  const int64_t number_bytes = aligned(layers * static_cast<int64_t>(sizeof(int32_t)));
  const int64_t mirror_bytes = aligned(layers * static_cast<int64_t>(sizeof(Request)));
  const int64_t total = control_bytes + flag_bytes + view_bytes + 2 * number_bytes + mirror_bytes;
  if (windows == nullptr) {
    check(cudaMalloc(reinterpret_cast<void**>(&block_), static_cast<size_t>(total)), "the control block");
  } else {
    window_ = windows->open(total).release();  // for good, see the destructor
    block_ = static_cast<char*>(window_->device());
  }
  std::vector<char> image(static_cast<size_t>(total), 0);
  char* at = block_;
  const auto place = [&](const void* data, size_t size, int64_t room) {
    if (size > 0) std::memcpy(image.data() + (at - block_), data, size);
    char* const placed = at;
    at += room;
    return placed;
  };
  ref_.control = reinterpret_cast<cuda::TransferControl*>(place(nullptr, 0, control_bytes));
  flags_ = reinterpret_cast<cuda::LayerFlags*>(
      place(flags.data(), flags.size() * sizeof(cuda::LayerFlags), flag_bytes));
  ref_.layer.views =
      reinterpret_cast<const LayerView*>(place(views.data(), views.size() * sizeof(LayerView), view_bytes));
  ref_.layer.count = static_cast<uint32_t>(layers);
  order_ = reinterpret_cast<const int32_t*>(place(order.data(), order.size() * sizeof(int32_t), number_bytes));
  numbers_ = reinterpret_cast<const int32_t*>(place(numbers.data(), numbers.size() * sizeof(int32_t), number_bytes));
  mirrors_ = reinterpret_cast<Request*>(place(nullptr, 0, mirror_bytes));
  copy(block_, image.data(), total);
  ref_.flags = config.offload ? flags_ : nullptr;
  ref_.error = &ref_.control->error;
  ref_.counters = &ref_.control->counters;
  ref_.timeout_ns = static_cast<uint64_t>(timeout_s_ * 1e9);
}

DeviceControl::~DeviceControl() {
  // The control block stays: a graph that was captured for this engine may be replayed by mistake, and finds an error.
  if (side_ != nullptr) cudaStreamDestroy(side_);
}

void DeviceControl::served_by_threads(const Request* mirrors, uint32_t* doorbells) {
  copy(mirrors_, mirrors, static_cast<int64_t>(views_.size() * sizeof(Request)));
  const Request* const placed = mirrors_;
  copy(&ref_.control->mirrors, &placed, sizeof placed);
  copy(&ref_.control->doorbells, &doorbells, sizeof doorbells);
  // Whatever serves requests in line leaves them alone.
  write(&cuda::TransferControl::resident, 1);
  ref_.served_by_threads = true;
}

cuda::EngineRef DeviceControl::ref_of(int64_t layer) const {
  cuda::EngineRef ref = ref_;
  ref.layer.index = numbers_ + layer;
  return ref;
}

cuda::Ring DeviceControl::ring(const uint32_t* host_word) const {
  return {ref_.layer.views, flags_, order_, ring_size_, ref_.control, host_word, ref_.timeout_ns};
}

void DeviceControl::copy(void* to, const void* from, int64_t bytes) const {
  check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, side_), "a copy");
  check(cudaStreamSynchronize(side_), "a copy");
}

void DeviceControl::write(uint32_t cuda::TransferControl::*field, uint32_t value) {
  copy(&(ref_.control->*field), &value, sizeof value);
}

void DeviceControl::clear_flags() {
  std::vector<cuda::LayerFlags> flags(views_.size());
  for (size_t i = 0; i < flags.size(); ++i) flags[i].layer = static_cast<uint32_t>(i);
  copy(flags_, flags.data(), static_cast<int64_t>(flags.size() * sizeof flags[0]));
}

cuda::LayerFlags DeviceControl::flags(int64_t layer) const {
  cuda::LayerFlags flags;
  copy(&flags, flags_ + layer, sizeof flags);
  return flags;
}

uint32_t DeviceControl::error() const {
  uint32_t error = 0;
  copy(&error, ref_.error, sizeof error);
  return error;
}

template <typename T>
T* DeviceControl::window_address(T* device) const {
  return reinterpret_cast<T*>(static_cast<char*>(window_->host()) + (reinterpret_cast<char*>(device) - block_));
}

void DeviceControl::publish(int64_t layer, uint32_t number) const {
  *static_cast<volatile uint32_t*>(window_address(&flags_[layer].ready)) = number;
  drain_stores();
}

void DeviceControl::publish_error(uint32_t word) const {
  *static_cast<volatile uint32_t*>(window_address(ref_.error)) = word;
  drain_stores();
}

void DeviceControl::add_to(Counters* counters) const {
  cuda::DeviceCounters device;
  copy(&device, ref_.counters, sizeof device);
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

void DeviceControl::clear_counters() {
  const cuda::DeviceCounters zero{};
  copy(ref_.counters, &zero, sizeof zero);
}

std::string DeviceControl::name(int64_t layer, uint64_t request) const {
  return "layer " + std::to_string(layer) + ", backend " + backend_ + ", request " + std::to_string(request);
}

std::string DeviceControl::describe(uint32_t error, const std::string& why) const {
  const std::string request = name(cuda::error_layer(error), cuda::error_sequence(error));
  char limit[48];
  std::snprintf(limit, sizeof limit, " (limit %.3f s)", timeout_s_);
  switch (cuda::error_failure(error)) {
    case cuda::Failure::kNone: return {};
    case cuda::Failure::kNotDelivered: return request + ": not delivered in time" + limit;
    case cuda::Failure::kNotPosted: return request + ": not posted in time" + limit;
    case cuda::Failure::kAborted: return request + ": aborted: " + why;
    case cuda::Failure::kSelection: return request + ": the selection did not come to an end in time" + limit;
    case cuda::Failure::kBadOperand:
      return "layer " + std::to_string(cuda::error_layer(error)) + ", backend " + backend_ +
             ": an operand is out of range";
  }
  return request + ": unknown failure";
}

}  // namespace clo
