// From ranks and the threshold to the selected tokens, ascending.
#pragma once

#include "cuda/select_exchange.cuh"

namespace clo::cuda {

// Bit i of the results: rank i of eight is better than the threshold; is not worse. The difference's sign is shifted in.
__device__ __forceinline__ uint2 compare(uint4 ranks, int threshold) {
  uint32_t better = 0, not_worse = 0;
  const uint32_t words[4] = {ranks.x, ranks.y, ranks.z, ranks.w};
#pragma unroll
  for (int i = 3; i >= 0; --i) {
    const int high = static_cast<int>(words[i] >> 16) - threshold, low = static_cast<int>(words[i] & 0xffffu) - threshold;
    better = __funnelshift_l(high, better, 1);
    better = __funnelshift_l(low, better, 1);
    not_worse = __funnelshift_l(high - 1, not_worse, 1);
    not_worse = __funnelshift_l(low - 1, not_worse, 1);
  }
  return {better, not_worse};
}

// One block's keys. `ranks` is aligned to 16 bytes; the keys are [skew, skew + n) of them, and rank i is that of token
// first + i, where first is a multiple of 32.
struct Part {
  uint16_t* ranks;
  int skew, n, first;
};

struct Output {
  int32_t* indices;  // of the head, or null
  uint32_t* bits;    // of the head, or null
};

// Compacts the part's keys straight to their final places: of k keys those better than the threshold and the first of those
// equal to it. Overwrites ranks. Begins after a __syncthreads; `counts` [2][kWarps] is free.
//
// A warp takes consecutive keys, a lane eight at a time. What the lane finds there replaces their ranks until it is known
// how many there are before.
__device__ __forceinline__ void compact(const Part& part, const Threshold& t, uint32_t k, const Output& out,
                                        uint32_t* counts) {
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32;
  const int total = part.n > 0 ? (part.skew + part.n + 31) / 32 * 32 : 0;
  const int each = ((total + kWarps - 1) / kWarps + 31) / 32 * 32;
  const int begin = min(total, warp * each), end = min(total, begin + each);
  uint32_t better = 0, equal = 0;  // of this warp, before the step
#pragma unroll 1
  for (int first = begin; first < end; first += 256) {
    const int at = first + lane * 8;
    uint2 m = {};
    if (at < end) {
      m = compare(*reinterpret_cast<const uint4*>(part.ranks + at), t.bin);
      const uint32_t valid = (0xffu << max(0, min(8, part.skew - at))) & ~(~0u << max(0, min(8, part.skew + part.n - at)));
      m.x &= valid;
      m.y &= valid & ~m.x;
    }
    const uint32_t mine = __popc(m.x) | __popc(m.y) << 16;
    uint32_t sum = mine;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, sum, offset);
      if (lane >= offset) sum += other;
    }
    const uint32_t ahead = sum - mine;
    if (at < end)
      *reinterpret_cast<uint4*>(part.ranks + at) = {m.x, m.y, better + (ahead & 0xffff), equal + (ahead >> 16)};
    const uint32_t step = __shfl_sync(~0u, sum, 31);
    better += step & 0xffff;
    equal += step >> 16;
  }
  if (lane == 0) {
    counts[warp] = better;
    counts[kWarps + warp] = equal;
  }
  __syncthreads();
  better = t.better_before + __reduce_add_sync(~0u, lane < warp ? counts[lane] : 0);
  equal = t.equal_before + __reduce_add_sync(~0u, lane < warp ? counts[kWarps + lane] : 0);
  const int wanted = static_cast<int>(k - t.better);
#pragma unroll 1
  for (int at = begin + lane * 8; at < end; at += 256) {
    const uint4 found = *reinterpret_cast<const uint4*>(part.ranks + at);
    const int equal_ahead = static_cast<int>(equal + found.w);
    uint32_t ties = found.y;
    for (int drop = __popc(ties) - max(wanted - equal_ahead, 0); drop > 0 && ties != 0; --drop)
      ties &= ~(0x80000000u >> __clz(ties));
    uint32_t kept = found.x | ties;
    if (out.bits != nullptr) reinterpret_cast<uint8_t*>(out.bits)[(part.first + at) / 8] = static_cast<uint8_t>(kept);
    if (out.indices != nullptr) {
      int32_t* to = out.indices + better + found.z + min(equal_ahead, wanted);
      for (; kept != 0; kept &= kept - 1) *to++ = part.first + at + __ffs(kept) - 1;
    }
  }
}

// Words of the head's row of bits outside of those that hold its candidates become 0.
__device__ __forceinline__ void clear_outside(uint32_t* bits, int words, int begin, int end, int rank, int blocks) {
  const int ahead = begin / 32, after = (end + 31) / 32;
#pragma unroll 1
  for (int i = rank * kThreads + thread_index(); i < ahead + words - after; i += blocks * kThreads)
    bits[i < ahead ? i : after + i - ahead] = 0;
}

}  // namespace clo::cuda
