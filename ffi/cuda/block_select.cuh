// The k smallest of many small integers by counting them: pieces that work on a block of 1024 threads.
#pragma once

#include "cuda/block_scan.cuh"

namespace clo::cuda {

struct Threshold {
  int bin;                    // of the k-th best key
  uint32_t better;            // keys of the head in better bins
  uint32_t better_before;     // such keys in parts before this block's
  uint32_t equal_before;      // keys of the bin in parts before this block's
};

// Looks the k-th best key up in the histograms of the head's blocks, `stride` words apart in global memory; this block is
// the rank-th. A block that has the head to itself uses its `own`, in shared memory.
__device__ inline void find_threshold(const uint32_t* own, const uint32_t* histograms, int stride, int bins, int blocks,
                                      int rank, uint32_t k, uint64_t* scratch, Threshold* out) {
  const int bin = 2 * static_cast<int>(threadIdx.x);
  uint32_t total[2] = {}, before[2] = {};
  if (blocks == 1) {
    if (bin < bins) {
      total[0] = own[bin];
      total[1] = own[bin + 1];
    }
  } else if (bin < bins) {
#pragma unroll 16
    for (int r = 0; r < blocks; ++r) {
      const uint2 n = __ldcg(reinterpret_cast<const uint2*>(histograms + static_cast<int64_t>(r) * stride + bin));
      total[0] += n.x;
      total[1] += n.y;
      if (r < rank) {
        before[0] += n.x;
        before[1] += n.y;
      }
    }
  }
  uint64_t all;
  uint64_t sums = scan_exclusive(static_cast<uint64_t>(total[0] + total[1]) << 32 | (before[0] + before[1]), scratch, &all);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t better = static_cast<uint32_t>(sums >> 32);
    if (better < k && k <= better + total[i]) *out = {bin + i, better, static_cast<uint32_t>(sums), before[i]};
    sums += static_cast<uint64_t>(total[i]) << 32 | before[i];
  }
  __syncthreads();
}

// Of the set bits of `ties`, taken in order, the first `wanted` of all parts belong to the selection, of which
// `equal_before` lie in parts before this one. Adds this part's to `masks`, and turns `ties` into the place of each mask's
// first bit, where `better_before` bits of masks lie before this part. Begins after and ends with __syncthreads.
__device__ __forceinline__ void resolve_ties(uint32_t* masks, uint32_t* ties, int words, uint32_t better_before,
                                             uint32_t equal_before, uint32_t wanted, uint64_t* scratch) {
  const int each = (words + kThreads - 1) / kThreads;
  const int first = min(words, static_cast<int>(threadIdx.x) * each), end = min(words, first + each);
  uint64_t sum = 0, all;
  for (int w = first; w < end; ++w) sum += static_cast<uint64_t>(__popc(ties[w])) << 32 | __popc(masks[w]);
  const uint64_t before = scan_exclusive(sum, scratch, &all);
  uint32_t better = better_before + static_cast<uint32_t>(before);
  uint32_t equal = equal_before + static_cast<uint32_t>(before >> 32);
  for (int w = first; w < end; ++w) {
    const uint32_t mask = masks[w];
    const int count = __popc(ties[w]);
    const int keep = max(0, min(count, static_cast<int>(wanted) - static_cast<int>(equal)));
    uint32_t kept = keep > 0 ? ties[w] : 0;
    for (int drop = count - keep; drop > 0 && kept != 0; --drop) kept &= ~(0x80000000u >> __clz(kept));
    masks[w] = mask | kept;
    ties[w] = better + min(equal, wanted);
    better += __popc(mask);
    equal += count;
  }
  __syncthreads();
}

}  // namespace clo::cuda
