// Backend `pull`: kernels read the host rows in place. This class launches the resident kernel around a program
// (cuda/pull.h). Also what any backend of a GPU is without offload: then nothing moves.
//
// The host never writes device memory that a running program may use, but for one word of mapped host memory that the
// resident kernel polls.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <string>
#include <vector>

#include "host/cuda/device_control.h"
#include "host/transfer_service.h"

namespace clo {

class PullTransfers : public TransferService {
 public:
  // `views` of arenas in device memory, host rows mapped (without offload: in device memory too). Throws as
  // DeviceControl.
  PullTransfers(const EngineConfig& config, const std::vector<LayerView>& views);
  ~PullTransfers() override;

  uint64_t post(int64_t layer) override;
  std::string wait(int64_t layer) override;
  void begin(int64_t requests) override;
  std::string end() override;
  void abort(const std::string& why) override;
  void close() override;
  void reset(const std::function<void()>& clear) override;
  void add_to(Counters* counters) const override;
  void clear_counters() override;
  void inject_delay(int64_t max_us, uint64_t seed) override;
  void inject_thread_death(int64_t after_chunks) override;
  void copy(void* to, const void* from, int64_t bytes) const override;
  const cuda::EngineRef* device() const override { return &control_.ref(); }

 private:
  void settle() const;  // until programs that were started are done, unless one is served
  void finish();        // ends the resident kernel, if there is one; needs mutex_
  void tell(cuda::HostWord word);

  const double timeout_s_;
  const bool offload_;
  mutable std::mutex mutex_;
  DeviceControl control_;
  cudaStream_t transfer_ = nullptr;  // of the resident kernel
  uint32_t* host_word_ = nullptr;    // mapped pinned memory
  bool serving_ = false, closed_ = false;
  std::string why_;                  // of the last abort
};

}  // namespace clo
