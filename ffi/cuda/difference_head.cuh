// One head whose selection replaces another, and which heads those are.
#pragma once

#include "cuda/select_topk.cuh"

namespace clo::cuda {

constexpr int kMaxHeads = 2048;  // B·Ko

struct Head {
  int number;
  int32_t* tokens;       // [C]
  uint16_t* last;        // [C]
  int32_t* from;         // [C] request: source tokens
  int32_t* to;           // [C] request: destination slots
  const uint32_t* bits;  // the selection
  int before;            // filled slots before this refresh
  uint16_t refresh;      // its number
  int n, capacity;       // selected tokens; slots that may be filled
  int words;             // masks over tokens that hold the selection
  bool whole;            // nothing is kept

  __device__ void fill(int move, int slot, int token) const {
    tokens[slot] = token;
    last[slot] = refresh;
    to[move] = slot;
  }
};

__device__ inline Head head_of(const PrefetchParams& p, const uint32_t* bits, const LayerView& v, int i) {
  const int b = i / static_cast<int>(v.kv_heads);
  const int64_t slots = i * v.num_slots;
  Head h{i, v.slot_tokens + slots, v.slot_last + slots, v.request.tokens + slots, v.request.slots + slots};
  h.before = v.slot_counts[i];
  h.refresh = static_cast<uint16_t>(v.refreshes[i] + 1);
  h.capacity = p.capacity[b];
  int begin;
  const int end = candidates(p.select, b, &begin) + begin;
  h.n = selected(p.select, b);
  h.words = h.n > 0 ? (end + 31) / 32 : 0;
  h.bits = bits + i * ((v.max_tokens + 31) / 32);
  // A buffer that is to shrink keeps nothing: its prefix could not be kept full otherwise.
  h.whole = p.whole || h.before > h.capacity;
  return h;
}

// One warp checks that the operands of all sequences describe a selection that fits in the buffer.
__device__ inline bool operands_fit(const PrefetchParams& p, const LayerView& v) {
  const SelectTopkParams& s = p.select;
  bool fit = true;
#pragma unroll 1
  for (int b = threadIdx.x % 32; b < static_cast<int>(v.batch); b += 32) {
    const int begin = s.begin[b], end = s.end[b], k = s.k[b], capacity = p.capacity[b];
    fit = fit && begin >= 0 && begin <= end && end <= v.max_tokens && capacity >= 0 && capacity <= v.num_slots && k >= 0 &&
          k <= s.k_max && k <= capacity;
  }
  return __all_sync(~0u, fit);
}

// The n-th of the heads whose bits are set in `missed` [kMaxHeads / 32]; -1 when there are fewer. For a whole warp.
__device__ inline int nth_missed(const uint32_t* missed, int n) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int first = 0; first < kMaxHeads / 32; first += 32) {
    uint32_t mask = missed[first + lane];
    const int count = __popc(mask);
    int before = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, before, step);
      if (lane >= step) before += other;
    }
    const int all = __shfl_sync(~0u, before, 31), place = n - (before - count);
    const bool mine = place >= 0 && place < count;
#pragma unroll 1
    for (int i = 0; mine && i < place; ++i) mask &= mask - 1;
    const uint32_t has = __ballot_sync(~0u, mine);
    if (has != 0) return __shfl_sync(~0u, (first + lane) * 32 + __ffs(mask) - 1, __ffs(has) - 1);
    n -= all;
  }
  return -1;
}

}  // namespace clo::cuda
