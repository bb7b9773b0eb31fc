// What an engine asks of whatever moves its rows: threads of the host (transfers.h) or kernels of a GPU
// (cuda/pull_transfers.h).
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "host/engine.h"

namespace clo {

class TransferService {
 public:
  virtual ~TransferService() = default;

  // As Engine's methods of the same names.
  virtual uint64_t post(int64_t layer) = 0;
  virtual std::string wait(int64_t layer) = 0;
  virtual void begin(int64_t requests) = 0;
  virtual std::string end() = 0;
  virtual void abort(const std::string& why) = 0;
  virtual void close() = 0;
  virtual void inject_delay(int64_t max_us, uint64_t seed) = 0;
  virtual void inject_thread_death(int64_t after_chunks) = 0;

  // Ends what is under way, calls `clear` while nothing runs, and starts again.
  virtual void reset(const std::function<void()>& clear) = 0;

  virtual void add_to(Counters* counters) const = 0;
  virtual void clear_counters() = 0;

  // Copies between the host and the arenas, wherever they are.
  virtual void copy(void* to, const void* from, int64_t bytes) const = 0;

  // The engine's side of calls from GPU kernels; null when it serves the CPU.
  virtual const cuda::EngineRef* device() const = 0;
};

}  // namespace clo
