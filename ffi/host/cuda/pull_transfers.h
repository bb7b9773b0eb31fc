// Backend `pull`: kernels read the host rows in place. This class owns the flags, the control block and the streams, and
// launches the resident kernel around a program (cuda/pull.h).
//
// The host never writes device memory that a running program may use, but for one word of mapped host memory that the
// resident kernel polls.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <string>
#include <vector>

#include "cuda/pull.h"
#include "host/transfer_service.h"

namespace clo {

class PullTransfers : public TransferService {
 public:
  // `views` of arenas in device memory, host rows mapped (without offload: in device memory too, and nothing moves).
  // Throws std::invalid_argument for shapes that the kernels do not take, OutOfMemory, std::runtime_error.
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
  const cuda::EngineRef* device() const override { return &ref_; }

 private:
  void settle() const;                            // until programs that were started are done, unless one is served
  void finish();                                  // ends the resident kernel, if there is one; needs mutex_
  void to_device(void* to, const void* from, int64_t bytes) const;  // on the side stream; done when it returns
  void from_device(void* to, const void* from, int64_t bytes) const;
  void write_control(uint32_t cuda::TransferControl::*field, uint32_t value);
  void tell(cuda::HostWord word);
  std::string describe(uint32_t error) const;     // empty for 0
  cuda::EngineRef ref_of(int64_t layer) const;

  const std::vector<LayerView> views_;
  const double timeout_s_;
  const bool offload_;
  int32_t ring_size_ = 0;
  mutable std::mutex mutex_;
  cudaStream_t transfer_ = nullptr, side_ = nullptr;  // of the resident kernel; of everything else
  uint32_t* host_word_ = nullptr;                     // mapped pinned memory
  char* block_ = nullptr;                             // device: control, flags, views, ring order, layer numbers
  cuda::EngineRef ref_{};
  const int32_t* order_ = nullptr;
  const int32_t* numbers_ = nullptr;                  // device [layers]: 0, 1, 2, ...
  bool serving_ = false, closed_ = false;
  std::string why_;                                   // of the last abort
};

}  // namespace clo
