// Transfers by kernels that read host rows in place (mapped pinned memory), so that no CPU and no copy engine takes part.
//
// One request protocol (flags.cuh), served by one of two. serve_resident is launched once for many requests, on a stream
// of its own beside the program that posts them. While none is at work, a prefetch copies the rows of its request itself,
// and a request that the host posts is followed by serve_posted. So every program gets its rows; those that run beside a
// resident kernel get them without waiting.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/kernels.h"

namespace clo::cuda {

// In device memory, one an engine, zeroed at the start.
struct TransferControl {
  uint32_t error;         // flags.cuh
  uint32_t resident;      // not 0: a resident kernel serves; written by the host between programs only
  uint32_t max_delay_us;  // for tests: every delivery is late by a pseudo-random time up to this
  uint32_t seed;
  DeviceCounters counters;
  const Request* mirrors;  // [layers] in mapped pinned memory, for threads of the CPU (hand_over.h); null for pull
  uint32_t* doorbells;     // [layers] the same: number of the layer's last request with moves
};

// What the host tells a resident kernel: one word of mapped pinned memory.
enum class HostWord : uint32_t {
  kServe = 0,
  kStop = 1,   // nothing more will be posted: serve what is, then end
  kAbort = 2,  // end at once; every wait fails
};

// The layers that have offloaded heads, in the order in which a program posts them.
struct Ring {
  const LayerView* views;  // [layers] device
  LayerFlags* flags;       // [layers] device
  const int32_t* order;    // [size] device
  int32_t size;
  TransferControl* control;
  const uint32_t* host_word;  // device address of mapped pinned memory
  uint64_t timeout_ns;        // longest wait for one request
};

// Serves `requests` requests, one of each layer of the ring in turn, then ends; sooner when it fails or is told to.
// `blocks` of 1024 threads, all of which must be resident at once.
cudaError_t serve_resident(const Ring& ring, int64_t requests, int blocks, cudaStream_t stream);

// Serves the request of one layer that has been posted earlier in this stream, if there is one and nobody else does.
cudaError_t serve_posted(const EngineRef& engine, cudaStream_t stream);

// Posts the layer's request (which is in device memory), as a prefetch does; for probes and tests.
cudaError_t post_request(const EngineRef& engine, cudaStream_t stream);

// Loads every kernel of this file. A kernel that is loaded on its first launch would wait for those that run, and a
// resident one may wait for the very kernel that is being loaded.
cudaError_t load_transfer_kernels();

}  // namespace clo::cuda
