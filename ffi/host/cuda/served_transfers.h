// Backends `bar` and `staged`: threads of the CPU (transfers.h) serve what kernels post. Behind each prefetch a kernel
// hands the request over through pinned memory (cuda/hand_over.h); the thread that copies its last rows publishes it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "host/arena.h"
#include "host/cuda/device_control.h"
#include "host/layers.h"
#include "host/transfer_service.h"
#include "host/transfers.h"

namespace clo {

class ServedTransfers : public TransferService {
 public:
  // `windows`: of backend bar, else null. Throws as DeviceControl, and std::system_error for threads.
  ServedTransfers(const EngineConfig& config, const Layers& layers, WindowSource* windows);
  ~ServedTransfers() override;

  uint64_t post(int64_t layer) override;
  std::string wait(int64_t layer) override;
  void begin(int64_t requests) override;
  std::string end() override;
  void abort(const std::string& why) override;
  void close() override;
  void reset(const std::function<void()>& clear) override;
  void add_to(Counters* counters) const override;
  void clear_counters() override;
  void inject_delay(int64_t max_us, uint64_t seed) override { threads_->inject_delay(max_us, seed); }
  void inject_thread_death(int64_t after_chunks) override { threads_->inject_thread_death(after_chunks); }
  void copy(void* to, const void* from, int64_t bytes) const override;
  const cuda::EngineRef* device() const override { return &control_.ref(); }

 private:
  void settle() const;          // until programs that were started are done
  // Of the threads, else of the kernels; empty: none. Names the request that is waited for, or that which the kernels
  // name.
  std::string failure() const;
  std::string failure(int64_t layer, uint64_t request) const;

  const double timeout_s_;
  DeviceControl control_;
  Arena words_;
  uint32_t* const doorbells_;           // [layers] mapped pinned memory
  std::unique_ptr<Transfers> threads_;  // last: they end before anything above goes
};

}  // namespace clo
