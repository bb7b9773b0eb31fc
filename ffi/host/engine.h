// The transfer engine: owns the arenas of every layer, the requests and the ready flags, and moves rows on threads of
// its own. Kernels fill a layer's request (protocol.h); post() hands it over, wait() returns once its rows are there.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "clo/protocol.h"

namespace clo {

namespace cuda {
struct EngineRef;  // cuda/kernels.h
}

struct EngineConfig {
  std::vector<int64_t> kv_heads;  // Ko of each layer
  int64_t batch = 0;
  int64_t max_tokens = 0;   // S
  int64_t num_slots = 0;    // C
  int64_t head_dim = 0;     // D
  DType dtype = DType::kF32;                // of activations
  RowFormat format = RowFormat::kPlain;     // of rows; quantized ones want D to be a multiple of 8
  int64_t threads = 1;      // that move rows
  double timeout_s = 30.0;  // bound of every wait
  bool offload = true;      // false: rows stay put and attention reads them through the slot table; no threads
  std::string backend = "auto";
  int64_t device = -1;      // ordinal of the GPU that CUDA knows it by; -1: the calling thread's current one
  std::function<void(int64_t done, int64_t total)> progress;  // bytes of host rows that are pinned; may be empty
  std::string link;         // out: what maps device memory for backend bar, else empty
};

struct Counters {
  uint64_t requests = 0;        // posts with at least one move
  uint64_t rows_posted = 0;     // rows that prefetches asked for
  uint64_t rows_moved = 0;      // rows that transfers delivered
  uint64_t bytes_moved = 0;
  uint64_t rows_offloaded = 0;  // rows written to the host by prefill and tail flushes
  uint64_t bytes_offloaded = 0;
  uint64_t wait_ns = 0;         // time that attention spent waiting for ready
  uint64_t hits = 0;            // head lookups that reused their set
  uint64_t misses = 0;          // head lookups that refreshed it
  uint64_t rows_selected = 0;   // k summed over refreshes (what a whole-head refresh would move)
};

class Engine {
 public:
  explicit Engine(EngineConfig config);  // throws std::invalid_argument, OutOfMemory (a std::bad_alloc)
  // The same without a look at whether the backend works here; for the probe that finds that out.
  enum Unprobed { kUnprobed };
  Engine(EngineConfig config, Unprobed);
  ~Engine();                             // closes, frees
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const EngineConfig& config() const;  // with the backend that "auto" stood for, and its device
  LayerView layer(int64_t index) const;  // throws std::out_of_range
  int64_t host_bytes() const;            // host rows and requests
  int64_t device_bytes() const;          // selected rows and slot tables; without offload the rows too

  // Hands the layer's request to the transfer threads. Never blocks on the transfer itself. The previous request of the
  // layer must be ready (attention of the layer has waited for it): else std::logic_error. A request without moves
  // leaves the layer ready. Returns the sequence number of the layer's last request that moves something.
  uint64_t post(int64_t layer);

  // Until the layer's last posted request is delivered. Empty on success, else why not (names layer, backend, sequence
  // number): timeout, abort, close, reset, or a transfer thread's error. After a timeout one may wait again.
  std::string wait(int64_t layer);

  // Around a program that will post up to `requests` requests, one of each layer with offloaded heads in turn: whatever
  // needs to be launched to serve them beside it is; after the program, end() says why a transfer of it, or of any
  // program since the last end(), failed (empty: none did), and begin() may come again. Without begin() a program's
  // rows arrive all the same. Backend host needs neither.
  void begin(int64_t requests);
  std::string end();

  // Copies between the host and arena memory, wherever that is.
  void copy(void* to, const void* from, int64_t bytes) const;

  // What GPU kernels of a call get (its layer index is the call's to set); null: the arenas are the host's.
  const cuda::EngineRef* device() const;

  void record_lookup(uint64_t hits, uint64_t misses, uint64_t rows_selected);
  void record_offload(uint64_t rows, uint64_t bytes);

  void abort(const std::string& why);  // every present and future wait fails until reset()
  void reset();                        // ends and restarts the threads, empties slot tables, clears failures; keeps
                                       // counters and host rows. Waits under way fail. std::logic_error once closed.
  void close();                        // ends the threads; every wait fails from now on; memory stays until destruction
  Counters counters() const;
  void clear_counters();

  // Test hooks: delay each chunk by a random time up to max_us (seeded; 0: no more); end a thread, as an error of its
  // link would, at the chunk after the next n.
  void inject_delay(int64_t max_us, uint64_t seed);
  void inject_thread_death(int64_t after_chunks);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Process-wide table of engines. Handles are the smallest free positive integer, so that a program compiled for handle 1
// is found again in the persistent compilation cache by the next process. 0 means "no engine". Captured graphs hold
// device addresses, so the handle of an engine on a device is not given out again.
int64_t register_engine(std::shared_ptr<Engine> engine);
void unregister_engine(int64_t handle);
std::shared_ptr<Engine> find_engine(int64_t handle);  // null when there is none

}  // namespace clo
