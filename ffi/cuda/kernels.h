// Launchers of the CUDA kernels: one per op, over the params structs of the CPU kernels with device pointers in them
// (add_norms has no CPU kernel).
//
// A launcher only launches: no allocation, no synchronisation, no host work that depends on values in device memory, so
// that it can be captured in a graph and replayed. Grid and memory sizes follow from shapes. Scratch memory comes from
// the caller, `<op>_workspace_bytes` of it, 256-byte aligned, with any content; no kernel keeps state there.
//
// Grids that wait inside (for each other or for a transfer) leave kTransferBlocks multiprocessors to the resident
// transfer kernel, so that both fit on the device at once.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "clo/params.h"

namespace clo::cuda {

constexpr int kTransferBlocks = 4;
constexpr int kMaxQuantizedDim = 256;  // of rows that offload quantizes: a warp has them in registers

struct LayerFlags;       // flags.cuh
struct TransferControl;  // pull.h

// The layer is a value in device memory, because one program may serve many. Pointers in params.view are ignored; its
// sizes hold for every layer that the index may name.
struct LayerRef {
  const LayerView* views;  // device array, one a layer
  const int32_t* index;    // [1] device
  uint32_t count = 0;      // of views; 0: not known
};

struct DeviceCounters {
  unsigned long long hits, misses, rows_selected, rows_posted, requests, wait_ns;
  unsigned long long rows_moved, rows_offloaded;
};

// The engine's side of a call, all of it device memory.
struct EngineRef {
  LayerRef layer;
  LayerFlags* flags;         // one a layer; null: no transfers (prefetch does not post, attend does not wait)
  uint32_t* error;           // 0, or why waits have failed
  DeviceCounters* counters;  // null: not counted
  uint64_t timeout_ns;       // of every wait
  TransferControl* control;  // what the transfer kernels need; null with flags
  bool served_by_threads;    // of the CPU: a post is followed by hand_over (hand_over.h), not by serve_posted
};

cudaError_t add_norms(const AddNormsParams& p, cudaStream_t stream);

cudaError_t hash_encode(const HashEncodeParams& p, cudaStream_t stream);

cudaError_t cache_lookup(const CacheLookupParams& p, cudaStream_t stream);

size_t select_topk_workspace_bytes(const SelectTopkParams& p);  // of its sizes and retriever, on the current device
cudaError_t select_topk(const SelectTopkParams& p, void* workspace, cudaStream_t stream);

size_t prefetch_workspace_bytes(const PrefetchParams& p);  // of the sizes in p.select and p.view
cudaError_t prefetch(const PrefetchParams& p, const EngineRef& engine, void* workspace, cudaStream_t stream);

// Those that launch_dim has tiles for.
constexpr bool attend_takes(int64_t head_dim) {
  return head_dim == 64 || head_dim == 80 || head_dim == 96 || head_dim == 128 || head_dim == 256;
}
size_t attend_workspace_bytes(const AttendParams& p);
cudaError_t attend(const AttendParams& p, const EngineRef& engine, void* workspace, cudaStream_t stream);

cudaError_t offload(const OffloadParams& p, const EngineRef& engine, cudaStream_t stream);

}  // namespace clo::cuda
