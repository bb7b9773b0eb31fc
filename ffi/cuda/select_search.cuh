// The threshold where one histogram has not found it.
#pragma once

#include "cuda/select_exchange.cuh"

namespace clo::cuda {

constexpr int kLowBits = 5;        // 65536 ranks are kGroups * kMaxFine times 2^5
constexpr int kCounterWords = 32;  // of a head's barrier: a cache line

// The threshold among all ranks, where it lies outside of the histogram: two more of them, behind barriers, over the same
// memory. It does not happen with usual data, so it may take its time.
__device__ __forceinline__ bool search_all(const Exchange& e, const uint16_t* ranks, int n, uint32_t k, uint32_t* counter,
                                           const Patience& patience) {
  Threshold high{};
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    const Exchange mine{e.blocks, e.rank, pass == 0 ? kMaxFine : 2, e.counts, e.leader, e.totals, e.found};
    const auto target = static_cast<uint32_t>(e.blocks) * static_cast<uint32_t>(2 * pass);
    if (e.blocks > 1 && !head_barrier(counter, target + e.blocks, patience)) return false;  // all have read the last
#pragma unroll 1
    for (int i = thread_index(); i < exchange_words(mine.fine); i += kThreads) e.counts[i] = 0;
    clear_totals(e.totals);
    __syncthreads();
#pragma unroll 1
    for (int i = thread_index(); i < n; i += kThreads) {
      const int rank = ranks[i];
      if (pass == 0) atomicAdd(mine.bins() + (rank >> kLowBits), 1u);
      else if (rank >> kLowBits == high.bin) atomicAdd(mine.bins() + (rank & ((1 << kLowBits) - 1)), 1u);
    }
    __syncthreads();
    publish(mine);
    if (e.blocks > 1 && !head_barrier(counter, target + 2 * e.blocks, patience)) return false;
    __syncthreads();
    find_threshold(mine, k - high.better, patience);
    const Threshold t = *e.found;
    if (t.bin < 0) return false;
    __syncthreads();
    if (pass == 0) high = t;
    else if (threadIdx.x == 0)
      *e.found = {high.bin << kLowBits | t.bin, high.better + t.better, high.better_before + t.better_before,
                  t.equal_before};
    __syncthreads();
  }
  return true;
}

}  // namespace clo::cuda
