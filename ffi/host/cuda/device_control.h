// The engine's state on a GPU: flags, control block, views and counters, which kernels reach through an EngineRef, and
// the stream by which the host looks at them. What moves the rows is on top of it (pull_transfers.h,
// served_transfers.h).
//
// Not thread-safe, but for what is const. Every method wants the engine's device to be the current one.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "cuda/flags.cuh"
#include "cuda/pull.h"
#include "host/backends/window.h"
#include "host/engine.h"

namespace clo {

class DeviceControl {
 public:
  // `views` of arenas in device memory. With `windows` the flags and the error word are written by the host too,
  // through a window. Throws std::invalid_argument for shapes that the kernels do not take, std::runtime_error.
  DeviceControl(const EngineConfig& config, const std::vector<LayerView>& views, WindowSource* windows);
  ~DeviceControl();
  DeviceControl(const DeviceControl&) = delete;
  DeviceControl& operator=(const DeviceControl&) = delete;

  int device() const { return device_; }
  const cuda::EngineRef& ref() const { return ref_; }
  cuda::EngineRef ref_of(int64_t layer) const;
  cudaStream_t side() const { return side_; }
  cuda::Ring ring(const uint32_t* host_word) const;  // of the layers that have offloaded heads
  void served_by_threads(const Request* mirrors, uint32_t* doorbells);

  // Copies by the side stream, done when they return.
  void copy(void* to, const void* from, int64_t bytes) const;
  void write(uint32_t cuda::TransferControl::*field, uint32_t value);
  void clear_flags();

  cuda::LayerFlags flags(int64_t layer) const;
  uint32_t error() const;
  void add_to(Counters* counters) const;
  void clear_counters();

  // Stores of the host through the window, in order when they return.
  void publish(int64_t layer, uint32_t number) const;
  void publish_error(uint32_t word) const;

  // An error word in words, empty for 0. `why` of an abort.
  std::string describe(uint32_t error, const std::string& why) const;
  std::string name(int64_t layer, uint64_t request) const;

  // Throws std::runtime_error that names the backend.
  void check(cudaError_t error, const char* what) const;

 private:
  template <typename T>
  T* window_address(T* device) const;

  const std::string backend_;
  const std::vector<LayerView> views_;
  const double timeout_s_;
  int device_ = 0;
  int32_t ring_size_ = 0;
  cudaStream_t side_ = nullptr;
  const Window* window_ = nullptr;
  char* block_ = nullptr;  // control, flags, views, ring order, layer numbers, mirrors
  cuda::EngineRef ref_{};
  cuda::LayerFlags* flags_ = nullptr;  // ref_.flags, also where it is null
  const int32_t* order_ = nullptr;
  const int32_t* numbers_ = nullptr;   // [layers]: 0, 1, 2, ...
  Request* mirrors_ = nullptr;         // [layers]
};

}  // namespace clo
