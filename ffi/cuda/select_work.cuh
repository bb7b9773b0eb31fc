// Which heads of a selection have anything to select, and who does what of it.
#pragma once

#include "cuda/select_plan.cuh"
#include "cuda/select_topk.cuh"

namespace clo::cuda {

// Division of numbers below 2^16 by one, the same for all: a product instead.
struct Divisor {
  uint32_t magic;  // 0: by one

  explicit Divisor(int64_t by) : magic(by == 1 ? 0 : static_cast<uint32_t>((int64_t{1} << 32) / by + 1)) {}
  Divisor() = default;
  __device__ __forceinline__ int operator()(int n) const {
    return magic == 0 ? n : static_cast<int>(__umulhi(static_cast<uint32_t>(n), magic));
  }
};

__device__ __forceinline__ bool takes_part(const SelectTopkParams& p, Divisor kv_heads, int bh) {
  const bool skip = p.skip[bh];  // read beside the others, not before them
  return selected(p, kv_heads(bh)) > 0 && !skip;
}

// The heads that select, found by every warp for itself.
class Heads {
 public:
  __device__ __forceinline__ Heads(const SelectTopkParams& p, Divisor kv_heads)
      : p_(p), kv_heads_(kv_heads), all_(static_cast<int>(p.batch) * static_cast<int>(p.kv_heads)) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held_[i] = mask(i * 32);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) count_ += __popc(held_[i]);
#pragma unroll 1
    for (int first = kHeld * 32; first < all_; first += 32) count_ += __popc(mask(first));
  }

  __device__ int count() const { return count_; }

  // The n-th, 0 <= n < count().
  __device__ __forceinline__ int nth(int n) const {
    int before = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int head = find(held_[i], i * 32, n - before);
      if (head >= 0) return head;
      before += __popc(held_[i]);
    }
#pragma unroll 1
    for (int first = kHeld * 32; first < all_; first += 32) {
      const uint32_t heads = mask(first);
      const int head = find(heads, first, n - before);
      if (head >= 0) return head;
      before += __popc(heads);
    }
    return -1;
  }

 private:
  static constexpr int kHeld = 1;

  __device__ __forceinline__ uint32_t mask(int first) const {
    const int head = first + thread_index() % 32;
    return __ballot_sync(~0u, head < all_ && takes_part(p_, kv_heads_, head));
  }

  __device__ __forceinline__ static int find(uint32_t heads, int first, int n) {
    const int lane = thread_index() % 32;
    const bool mine = (heads >> lane & 1) && __popc(heads & ((1u << lane) - 1)) == n;
    const uint32_t found = __ballot_sync(~0u, mine);
    return found != 0 ? first + __ffs(found) - 1 : -1;
  }

  const SelectTopkParams& p_;
  Divisor kv_heads_;
  int all_, count_ = 0;
  uint32_t held_[kHeld];
};

// Of numbers below 2^16, in a few instructions.
__device__ __forceinline__ int quotient(int n, int by) {
  return static_cast<int>(__fdividef(static_cast<float>(n) + 0.5f, static_cast<float>(by)));
}

// What a block does in a round.
struct Work {
  int bh, begin, end, k;      // the head, its candidates, the keys that it selects
  int blocks, rank, leader;   // of the head; this block's place among them; the first of them
  int first, n;               // this block's keys are those of tokens [first, first + n)
};

// This block's work in the round that begins with the head number *done of those that select; moves *done on, and makes
// *heads their number. False: there is none.
__device__ __forceinline__ bool assign(const SelectTopkParams& p, Divisor kv_heads, int* done, int* heads, Work* w) {
  const Heads selecting(p, kv_heads);
  *heads = selecting.count();
  if (*heads == 0) return false;
  w->blocks = max(1, min(kMaxHeadBlocks, quotient(gridDim.x, *heads - *done)));
  const int block = block_index(), index = quotient(block, w->blocks), round = quotient(gridDim.x, w->blocks);
  w->rank = block - index * w->blocks;
  w->leader = block - w->rank;
  w->bh = index < min(*heads - *done, round) ? selecting.nth(*done + index) : -1;
  *done += round;
  if (w->bh < 0) return false;
  const int b = kv_heads(w->bh);
  w->end = candidates(p, b, &w->begin) + w->begin;
  w->k = selected(p, b);
  // Parts begin at multiples of 32 tokens, but for the first.
  const int aligned = w->begin & ~31;
  const auto keys = static_cast<uint32_t>(w->end - aligned + w->blocks - 1);
  const int size = static_cast<int>((keys / static_cast<uint32_t>(w->blocks) + 31) / 32 * 32);
  w->first = min(w->end, max(w->begin, aligned + w->rank * size));
  w->n = max(0, min(w->end, aligned + (w->rank + 1) * size) - w->first);
  return true;
}

}  // namespace clo::cuda
