// A cluster of blocks for each head that missed. Each block has a share of the head's slots and of its tokens:
//
//   1  looks the tokens of its slots up in the selection. Those that are selected stay, and are marked in the block that
//      has the token; the others are counted by how long ago they were selected.
//   2  From the marks and counts of all blocks: how many tokens are new, the number of this block's first, and the slots
//      that give way. Writes its new tokens into the request, and the slots too while there are empty ones.
//   3  Gives its victims the new tokens of their numbers.
//
// Blocks of a cluster run at the same time whatever else there is, so nothing here waits for a block that cannot start.
#include "cuda/difference.h"

#include <algorithm>

#include "cuda/check.h"
#include "cuda/difference_share.cuh"
#include "cuda/overlap.cuh"
#include "cuda/row_copies.cuh"

namespace clo::cuda {
namespace {

struct Arguments {
  PrefetchParams p;
  EngineRef engine;
  SelectedTokens selected;
  ShareLayout layout;
  unsigned char* memory;  // [blocks][layout.bytes] unless layout.shared
};

// How the request is handed over; loaded when a block starts, for at its end nothing hides loads that depend on each other.
struct Hand {
  LayerFlags* flags;  // null: no transfers
  uint32_t layer, sequence;
  uint32_t max_delay_us;
  bool serves;  // no resident kernel copies rows: this one does. The host writes the word between programs only
};

__device__ Hand hand_of(const EngineRef& engine) {
  Hand hand{};
  hand.layer = static_cast<uint32_t>(*engine.layer.index);
  if (engine.flags == nullptr) return hand;
  hand.flags = engine.flags + hand.layer;
  hand.sequence = hand.flags->posted + 1;
  if (engine.control == nullptr) return hand;
  hand.max_delay_us = engine.control->max_delay_us;
  hand.serves = engine.control->resident == 0;
  return hand;
}

// Two warps of the first block of a cluster decide for all: at the limit of a wait, blocks might see different things.
__device__ void decide(const Arguments& a, const LayerView& v, Exchange* exchange) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == kShareWarps - 1) {
    const bool fit = operands_fit(a.p, v);
    if (lane != 0) return;
    exchange->fit = fit;
    if (!fit && a.engine.error != nullptr) {
      const Hand hand = hand_of(a.engine);
      fail(a.engine.error, Failure::kBadOperand, hand.layer, hand.sequence);
    }
  } else if (warp == kShareWarps - 2 && lane == 0) {
    // Normally attention has waited already. The first fill at the end of prefill is followed by another prefetch, which
    // must not rewrite a request that is being served.
    LayerFlags* const flags = a.engine.flags;
    exchange->ready =
        flags == nullptr || wait_ready(flags + *a.engine.layer.index, a.engine.timeout_ns, a.engine.error);
  }
}

// Heads that hit move nothing. They count unless there was nothing to select.
__device__ void note_hits(const Arguments& a, const LayerView& v) {
  const int heads = static_cast<int>(v.batch * v.kv_heads);
#pragma unroll 1
  for (int i = threadIdx.x; i < (heads + 31) / 32 * 32; i += kShareThreads) {
    const bool hit = i < heads && a.p.lookup.hit[i] != 0;
    if (hit) v.request.counts[i] = 0;
    const bool counts = hit && a.p.select.k[i / static_cast<int>(v.kv_heads)] > 0;
    const unsigned hits = __reduce_add_sync(~0u, counts ? 1u : 0u);
    if (a.engine.counters != nullptr && threadIdx.x % 32 == 0 && hits > 0)
      atomicAdd(&a.engine.counters->hits, static_cast<unsigned long long>(hits));
  }
}

__device__ void note_miss(DeviceCounters* counters, int selected, int moves, bool served) {
  if (counters == nullptr) return;
  atomicAdd(&counters->misses, 1ull);
  atomicAdd(&counters->rows_selected, static_cast<unsigned long long>(selected));
  atomicAdd(&counters->rows_posted, static_cast<unsigned long long>(moves));
  if (served) atomicAdd(&counters->rows_moved, static_cast<unsigned long long>(moves));
}

// The blocks of a cluster copy the rows of a head's request.
template <bool kOdd>
__device__ __noinline__ void copy_moves(const LayerView& v, int head, int moves, int rank) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  copy_chunks<kOdd>(v, head, moves, warp * kClusterBlocks + rank, kShareWarps * kClusterBlocks);
}

// What a block that ends adds to the count of those that have; the first of a cluster for all of it.
constexpr uint32_t kEnded = 1, kMoved = 1u << 16, kGaveUp = 1u << 24;

// Room on a multiprocessor, in registers: a block of 256 threads then fits beside one of the selection.
constexpr int kShareBlocks = 4;

// The last block to end hands the request over, with its rows when they are there.
__device__ void finish(const Arguments& a, const Hand& hand, bool gave_up, bool moved) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  // Of a cluster by its first block, as `gave_up`; beside the count, not after it.
  if (blockIdx.x % kClusterBlocks == 0 && a.engine.error != nullptr) gave_up = gave_up || load_relaxed(a.engine.error) != 0;
  const uint32_t mine = kEnded + (moved ? kMoved : 0) + (gave_up ? kGaveUp : 0);
  uint32_t before;  // releases what this block has written, acquires what others have
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(a.selected.finished), "r"(mine) : "memory");
  const uint32_t all = before + mine;
  if (all % kMoved != gridDim.x * kEnded || all >= kGaveUp) return;
  if (a.engine.counters != nullptr && all >= kMoved) atomicAdd(&a.engine.counters->requests, 1ull);
  if (hand.flags == nullptr) return;
  store_release(&hand.flags->posted, hand.sequence);
  if (!hand.serves) return;
  if (hand.max_delay_us > 0) late(*a.engine.control, hand.layer, hand.sequence);
  store_release(&hand.flags->ready, hand.sequence);
}

template <bool kShared>
__global__ void __cluster_dims__(kClusterBlocks)
    __launch_bounds__(kShareThreads, kShareBlocks) difference_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Exchange exchange;
  __shared__ Scratch scratch;
  __shared__ Head head;
  __shared__ Hand hand;
  __shared__ uint32_t missed[kMaxHeads / 32];
  const LayerView& v = a.engine.layer.views[*a.engine.layer.index];
  const int tid = threadIdx.x, heads = static_cast<int>(v.batch * v.kv_heads);
  Share<kShared> share(a.layout, shared, a.memory, &exchange, &scratch);
  if (tid == 0) hand = hand_of(a.engine);
  if (share.rank() == 0) decide(a, v, &exchange);
  // Which heads have missed is known ahead of the wait: the kernel before last has told.
#pragma unroll 1
  for (int i = tid; i < kMaxHeads; i += kShareThreads) {
    const uint32_t mask = __ballot_sync(~0u, i < heads && a.p.lookup.hit[i] == 0);
    if (tid % 32 == 0) missed[i / 32] = mask;
  }
  __syncthreads();
  bool proceed = true, moved = false;
#pragma unroll 1
  for (int n = blockIdx.x / kClusterBlocks; proceed; n += gridDim.x / kClusterBlocks) {
    const int i = nth_missed(missed, n);
    if (i < 0) break;
    __syncthreads();  // the head before is done with
    share.load_slots(v, i, 0);
    if (tid == 0) head = head_of(a.p, a.selected.bits, v, i);
    share.clear();
    __syncthreads();
    share.note_recencies(head.refresh, 0);
    cluster_arrive();
    wait_for_earlier();
    share.load_selection(head);
    cluster_wait();
    proceed = (remote_load(remote(&exchange.fit, 0)) & remote_load(remote(&exchange.ready, 0))) != 0;
    if (!proceed) break;
    share.look_up_slots(v, head);
    cluster_barrier();
    const Outcome outcome = share.move(head);
    if (hand.serves) {
      cluster_barrier();  // the request is complete
      if (odd_rows(v)) copy_moves<true>(v, i, outcome.moves, share.rank());
      else copy_moves<false>(v, i, outcome.moves, share.rank());
    }
    if (share.rank() == 0 && tid == 0) {
      v.request.counts[i] = outcome.moves;
      v.slot_counts[i] = outcome.filled;
      v.refreshes[i] = head.refresh;
      note_miss(a.engine.counters, head.n, outcome.moves, hand.serves);
      moved = moved || outcome.moves > 0;
    }
  }
  const bool gave_up = share.rank() == 0 && (exchange.fit & exchange.ready) == 0;
  // By a cluster that has no head if there are any hits, and so ahead of the wait.
  if (blockIdx.x == gridDim.x - kClusterBlocks && !gave_up) note_hits(a, v);
  wait_for_earlier();
  if (!proceed) cluster_barrier();  // nobody reads the memory of a block that has ended
  finish(a, hand, gave_up, moved);
}

cudaError_t grid_size(int64_t heads, int* grid) {
  int device = 0, processors = 0;
  CLO_CUDA_RETURN(cudaGetDevice(&device));
  CLO_CUDA_RETURN(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  // Two blocks a multiprocessor.
  const int64_t most = std::max(1, 2 * (processors - kTransferBlocks) / kClusterBlocks);
  *grid = static_cast<int>(std::min(heads, most)) * kClusterBlocks;
  return cudaSuccess;
}

}  // namespace

size_t difference_workspace_bytes(const PrefetchParams& p) {
  int grid = 0;
  const ShareLayout layout = share_layout(p.view);
  if (layout.shared || grid_size(p.view.batch * p.view.kv_heads, &grid) != cudaSuccess) return 0;
  return static_cast<size_t>(grid) * layout.bytes;
}

cudaError_t difference(const PrefetchParams& p, const EngineRef& engine, const SelectedTokens& selected, void* workspace,
                       cudaStream_t stream) {
  int grid = 0;
  if (p.view.batch * p.view.kv_heads > kMaxHeads) return cudaErrorInvalidValue;
  CLO_CUDA_RETURN(grid_size(p.view.batch * p.view.kv_heads, &grid));
  const Arguments a{p, engine, selected, share_layout(p.view), static_cast<unsigned char*>(workspace)};
  const auto kernel = a.layout.shared ? difference_kernel<true> : difference_kernel<false>;
  const size_t bytes = a.layout.shared ? a.layout.bytes : 0;
  CLO_CUDA_RETURN(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  CLO_CUDA_RETURN(share_multiprocessor(reinterpret_cast<const void*>(kernel)));
  cudaLaunchAttribute early = overlaps_earlier();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(kShareThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, a);
}

}  // namespace clo::cuda
