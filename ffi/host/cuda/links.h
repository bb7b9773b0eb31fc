// How the threads of backends `bar` and `staged` reach a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "host/backends/backend.h"
#include "host/backends/stream_rows.h"
#include "host/cuda/device_control.h"
#include "host/layers.h"

namespace clo {

// Requests that kernels have handed over, and what both links do alike.
class GpuLink : public RemoteBackend {
 public:
  GpuLink(const DeviceControl& control, const uint32_t* doorbells) : control_(control), doorbells_(doorbells) {}
  uint32_t posted(int64_t layer) const override { return __atomic_load_n(doorbells_ + layer, __ATOMIC_ACQUIRE); }

 protected:
  const DeviceControl& control_;

 private:
  const uint32_t* const doorbells_;
};

// Rows go through the PCIe BAR, and behind them the flag: posted writes of one way stay in order. The threads make no
// CUDA call.
class BarLink : public GpuLink {
 public:
  BarLink(const DeviceControl& control, const uint32_t* doorbells, const std::vector<LayerView>& views);
  void serve(int64_t layer, const LayerView& view, const Job* jobs, int64_t count) override;
  void publish(int64_t layer, uint32_t number) override;
  void give_up(int64_t layer, uint32_t number) noexcept override;

 private:
  const StreamStores& stores_;
};

// Rows are gathered in pinned memory. The thread that gathers the last ones of a request starts one copy of all of
// them, and a kernel behind it that takes them to their slots and publishes the request: CUDA calls, which cannot be
// avoided here. They neither allocate nor load anything: buffers, streams and kernels are there from the start, because a first
// launch would wait for the program that waits for these rows.
class StagedLink : public GpuLink {
 public:
  StagedLink(const DeviceControl& control, const uint32_t* doorbells, const Layers& layers);
  ~StagedLink() override;
  void start() override;
  void enter() override;
  bool admit(int64_t layer) override;
  void serve(int64_t layer, const LayerView& view, const Job* jobs, int64_t count) override;
  void publish(int64_t layer, uint32_t number) override;
  void give_up(int64_t layer, uint32_t number) noexcept override;

 private:
  // Free when *freed is `uses`. Changed in admit() only, and then not before it is free again.
  struct Buffer {
    char* host;
    char* device;
    uint32_t uses;
    uint32_t* freed;  // the kernel that takes the rows to their slots writes `uses` here
  };

  const std::vector<LayerView> views_;
  cudaStream_t stream_ = nullptr;
  uint32_t* words_ = nullptr;  // mapped pinned memory: `freed` of each buffer, and an error word to be copied
  Buffer buffers_[2]{};
  std::vector<int> buffer_of_;  // [layers]
};

}  // namespace clo
