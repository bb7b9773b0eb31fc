#include "cuda/hand_over.h"

#include "cuda/check.h"
#include "cuda/flags.cuh"
#include "cuda/pull.h"

namespace clo::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kPartsPerHead = 4;  // blocks that share a head's list
constexpr int kHeadBlocks = 16;    // that share the heads
constexpr int kScatterBlocks = 32;
constexpr int kRowsInFlight = 4;  // of a warp

// What the CPU is to see: orders everything that this thread has written or seen before, for the whole system.
__device__ void store_release_system(uint32_t* word, uint32_t value) {
  __threadfence_system();
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// True in thread 0 of the last block to come here.
__device__ bool is_last(LayerFlags* flags) {
  __syncthreads();
  if (threadIdx.x != 0) return false;
  __threadfence_system();
  if (atomicAdd(&flags->arrived, 1u) != gridDim.x * gridDim.y - 1) return false;
  __threadfence_system();
  flags->arrived = 0;
  return true;
}

__global__ __launch_bounds__(kThreads) void hand_over_kernel(EngineRef engine) {
  const TransferControl& control = *engine.control;
  if (load_acquire(engine.error) != 0) return;
  const int32_t layer = *engine.layer.index;
  LayerFlags* const flags = engine.flags + layer;
  // Uniform over the grid: nobody publishes this number before the last block has rung.
  const uint32_t posted = load_acquire(&flags->posted);
  if (posted == load_acquire(&flags->ready)) return;
  const LayerView& view = engine.layer.views[layer];
  const Request& from = view.request;
  const Request to = control.mirrors[layer];
  const int64_t heads = view.batch * view.kv_heads, C = view.num_slots;
  const int step = static_cast<int>(gridDim.x) * kThreads;
  for (int64_t h = blockIdx.y; h < heads; h += gridDim.y) {
    const int count = from.counts[h];
    const int32_t* const tokens = from.tokens + h * C;
    const int32_t* const slots = from.slots + h * C;
    int32_t* const mirror_tokens = to.tokens + h * C;
    int32_t* const mirror_slots = to.slots + h * C;
    if (blockIdx.x == 0 && threadIdx.x == 0) to.counts[h] = count;
    for (int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x); i < count; i += step) {
      mirror_tokens[i] = tokens[i];
      mirror_slots[i] = slots[i];
    }
  }
  if (!is_last(flags)) return;
  bool moves = false;
  for (int64_t h = 0; h < heads && !moves; ++h) moves = from.counts[h] > 0;
  if (moves) store_release_system(control.doorbells + layer, posted);
  else store_release(&flags->ready, posted);
}

__global__ __launch_bounds__(kThreads) void scatter_rows_kernel(EngineRef engine, const uint4* rows, uint32_t number,
                                                                uint32_t* freed, uint32_t uses) {
  const int32_t layer = *engine.layer.index;
  LayerFlags* const flags = engine.flags + layer;
  const LayerView& view = engine.layer.views[layer];
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) / 32 * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  const int warps = kWarps * static_cast<int>(gridDim.x);
  const int64_t heads = view.batch * view.kv_heads, C = view.num_slots, vectors = row_bytes(view) / 16;
  uint4* const selected = static_cast<uint4*>(view.selected_rows);
  int64_t before = 0;  // rows of the heads before this one
  for (int64_t h = 0; h < heads; ++h) {
    const int count = view.request.counts[h];
    const int32_t* const slots = view.request.slots + h * C;
    for (int first = warp * kRowsInFlight; first < count; first += warps * kRowsInFlight) {
      for (int64_t v = lane; v < vectors; v += 32) {
        uint4 value[kRowsInFlight];
#pragma unroll
        for (int u = 0; u < kRowsInFlight; ++u)
          if (first + u < count) value[u] = __ldcs(rows + (before + first + u) * vectors + v);
#pragma unroll
        for (int u = 0; u < kRowsInFlight; ++u)
          if (first + u < count) selected[(h * C + slots[first + u]) * vectors + v] = value[u];
      }
    }
    before += count;
  }
  if (!is_last(flags)) return;
  store_release(&flags->ready, number);
  store_release_system(freed, uses);
}

}  // namespace

cudaError_t hand_over(const EngineRef& engine, cudaStream_t stream) {
  const dim3 grid(kPartsPerHead, kHeadBlocks);
  hand_over_kernel<<<grid, kThreads, 0, stream>>>(engine);
  return cudaGetLastError();
}

cudaError_t scatter_rows(const EngineRef& engine, const void* rows, uint32_t number, uint32_t* freed, uint32_t uses,
                         cudaStream_t stream) {
  scatter_rows_kernel<<<kScatterBlocks, kThreads, 0, stream>>>(engine, static_cast<const uint4*>(rows), number, freed,
                                                               uses);
  return cudaGetLastError();
}

cudaError_t load_hand_over_kernels() {
  cudaFuncAttributes attributes;
  CLO_CUDA_RETURN(cudaFuncGetAttributes(&attributes, hand_over_kernel));
  return cudaFuncGetAttributes(&attributes, scatter_rows_kernel);
}

}  // namespace clo::cuda
