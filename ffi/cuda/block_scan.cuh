// Sums over a block of 1024 threads, and the ordered compaction of bit masks.
#pragma once

#include <cstdint>

#include "cuda/block_threads.cuh"

namespace clo::cuda {

// Sum of the values of the threads before this one; *total gets the sum of all. `scratch` [kWarps] must not be in use: a
// thread may still read it when another returns. Holds one __syncthreads.
__device__ __forceinline__ uint64_t scan_exclusive(uint64_t value, uint64_t* scratch, uint64_t* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t sum = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint64_t other = __shfl_up_sync(~0u, sum, offset);
    if (lane >= offset) sum += other;
  }
  if (lane == 31) scratch[warp] = sum;
  __syncthreads();
  uint64_t all = lane < kWarps ? scratch[lane] : 0, before = lane < warp ? all : 0;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    before += __shfl_xor_sync(~0u, before, offset);
    all += __shfl_xor_sync(~0u, all, offset);
  }
  *total = all;
  return before + sum - value;
}

// put(place, i) for every set bit i of `words` masks, in no order; the first set bit of mask w has place places[w]. A
// sparse mask is handled by its lane, a dense one by the warp, so that its stores are consecutive.
template <typename Put>
__device__ __forceinline__ void for_each_bit(const uint32_t* masks, const uint32_t* places, int words, Put put) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int part = (words + kWarps - 1) / kWarps, end = min(words, (warp + 1) * part);
  for (int first = warp * part; first < end; first += 32) {
    const int w = first + lane;
    uint32_t mask = w < end ? masks[w] : 0, place = w < end ? places[w] : 0;
    if (__popc(mask) <= 6) {
      for (; mask != 0; mask &= mask - 1) put(place++, w * 32 + __ffs(mask) - 1);
    }
    for (uint32_t dense = __ballot_sync(~0u, mask != 0); dense != 0; dense &= dense - 1) {
      const int from = __ffs(dense) - 1;
      const uint32_t bits = __shfl_sync(~0u, mask, from), start = __shfl_sync(~0u, place, from);
      if (bits >> lane & 1) put(start + __popc(bits & ((1u << lane) - 1)), (first + from) * 32 + lane);
    }
  }
}

}  // namespace clo::cuda
