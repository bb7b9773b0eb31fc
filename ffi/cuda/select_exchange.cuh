// How the blocks of a head tell each other what they have counted, and what each makes of it: the k-th best rank of all.
//
// A block counts its ranks in 64 groups of `fine` bins and publishes the bins and the groups' sums. Every block reads the
// sums of all, finds the group of the k-th rank, and then that group's bins. Nobody waits at a barrier: a word that is
// published has its top bit set, and had not before (the kernel ahead clears them), so that whoever needs it polls just
// that word. All blocks of a head run at once: see launch in select_topk.cu.
#pragma once

#include "cuda/block_threads.cuh"
#include "cuda/flags.cuh"

namespace clo::cuda {

constexpr int kGroups = 64;   // of bins
constexpr int kMaxFine = 32;  // bins of a group
constexpr int kMaxHeadBlocks = 64;  // that share one head
constexpr uint32_t kPublished = 0x80000000u;

constexpr int exchange_words(int fine) { return kGroups * (1 + fine); }

// A bounded wait, by one warp or thread.
class Patience {
 public:
  __device__ __forceinline__ Patience(uint32_t* error, uint64_t limit_ns, const int32_t* layer)
      : error_(error), limit_(limit_ns), layer_(layer) {}

  // Called when what is waited for is not there; false: give up.
  __device__ bool more() {
    const uint64_t now = global_nanoseconds();
    if (start_ == 0) start_ = now;
    if (error_ != nullptr && load_acquire(error_) != 0) return false;
    if (now - start_ <= limit_) return true;
    if (error_ != nullptr) fail(error_, Failure::kSelection, layer_ == nullptr ? 0 : *layer_, 0);
    return false;
  }

 private:
  uint32_t* error_;
  uint64_t limit_, start_ = 0;
  const int32_t* layer_;
};

struct Threshold {
  int bin;                 // of the k-th best key; -1: the others did not come in time
  uint32_t better;         // keys of the head in better bins
  uint32_t better_before;  // such keys in parts before this block's
  uint32_t equal_before;   // keys of the bin in parts before this block's
};

// What the blocks have counted: the groups' sums, then the bins of one group; of all blocks, and of those before this one.
struct alignas(8) Totals {
  uint32_t all[2][kGroups], before[2][kGroups];
};

// One block's side.
struct Exchange {
  int blocks, rank;     // of the head; this block's place among them
  int fine;             // even, at most kMaxFine
  uint32_t* counts;     // shared, exchange_words(fine): sums, then bins. The bins are counted by the caller
  uint32_t* leader;     // what the head's first block publishes; not used by a block that has the head to itself
  Totals* totals;       // shared
  Threshold* found;     // shared

  __device__ uint32_t* bins() const { return counts + kGroups; }
};

__device__ __forceinline__ void store_relaxed(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// By all warps, after a __syncthreads behind the counting.
__device__ __forceinline__ void publish(const Exchange& e) {
  const int thread = thread_index(), lane = thread % 32;
  uint32_t* const mine = e.leader + e.rank * exchange_words(e.fine);
#pragma unroll
  for (int group = thread / 32; group < kGroups; group += kWarps) {
    uint32_t n = 0;
    if (lane < e.fine) {
      const int i = kGroups + group * e.fine + lane;
      n = e.counts[i];
      if (e.blocks > 1) store_relaxed(mine + i, n | kPublished);
    }
    n = __reduce_add_sync(~0u, n);
    if (lane != 0) continue;
    if (e.blocks > 1) store_relaxed(mine + group, n | kPublished);
    else e.counts[group] = n;
  }
}

// Adds up words [from, from + width) of the head's blocks, by the whole block. False in a thread: not there in time.
__device__ __forceinline__ bool add_up(const Exchange& e, int pass, int from, int width, Patience patience) {
  uint32_t* const all = e.totals->all[pass];
  uint32_t* const before = e.totals->before[pass];
  if (e.blocks == 1) {
    if (static_cast<int>(threadIdx.x) < width) all[threadIdx.x] = e.counts[from + threadIdx.x];
    return true;
  }
  constexpr int kTogether = 2 * kMaxHeadBlocks / kWarps;  // loads of a thread, all under way at once
  const int stride = exchange_words(e.fine), halves = pass == 0 ? 2 : 1;  // of a warp's width
  const int thread = thread_index(), warp = thread / 32, lane = thread % 32;
  const auto wanted = [&](int u, int* rank, int* at) {
    const int unit = warp + u * kWarps;
    *rank = unit / halves;
    *at = unit % halves * 32 + lane;
    return *rank < e.blocks && *at < width;
  };
  int rank, at;
  uint32_t values[kTogether];
  // One loop for all of them: a loop for each is code that every warp has to fetch.
  for (;;) {
    uint32_t there = kPublished;
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      values[u] = wanted(u, &rank, &at) ? load_relaxed(e.leader + rank * stride + from + at) : kPublished;
      there &= values[u];
    }
    if (there != 0) break;
    if (!patience.more()) return false;
  }
#pragma unroll
  for (int u = 0; u < kTogether; ++u) {
    if (!wanted(u, &rank, &at)) continue;
    const uint32_t value = values[u] & ~kPublished;
    atomicAdd(&all[at], value);
    if (rank < e.rank) atomicAdd(&before[at], value);
  }
  return true;
}

// Moves the threshold to the word of those added up that has the k-th key, by one warp.
__device__ __forceinline__ int find_word(const Totals& totals, int pass, uint32_t k, Threshold* found) {
  const int lane = thread_index() % 32;
  const uint2 all = reinterpret_cast<const uint2*>(totals.all[pass])[lane];
  const uint2 before = reinterpret_cast<const uint2*>(totals.before[pass])[lane];
  const uint32_t mine = all.x + all.y;
  uint32_t sum = mine;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, sum, offset);
    if (lane >= offset) sum += other;
  }
  const int owner = __ffs(__ballot_sync(~0u, found->better + sum >= k)) - 1;
  const bool second = found->better + sum - mine + all.x < k;
  const uint32_t ahead = sum - mine + (second ? all.x : 0);
  found->better += __shfl_sync(~0u, ahead, owner);
  const uint32_t share = lane < owner ? before.x + before.y : lane == owner && second ? before.x : 0;
  found->better_before += __reduce_add_sync(~0u, share);
  found->equal_before = __shfl_sync(~0u, second ? before.y : before.x, owner);
  return __shfl_sync(~0u, 2 * lane + second, owner);
}

// Zeroes what `exchange` adds to; before it, with a __syncthreads between.
__device__ __forceinline__ void clear_totals(Totals* totals) {
  if (threadIdx.x < sizeof(Totals) / sizeof(uint32_t)) reinterpret_cast<uint32_t*>(totals)[threadIdx.x] = 0;
}

// Finds the k-th best rank after publish, by the whole block; e.found is it. A block that has the head to itself needs a
// __syncthreads between. Ends with one.
__device__ __forceinline__ void find_threshold(const Exchange& e, uint32_t k, const Patience& patience) {
  Threshold t{0, 0, 0, 0};
  int from = 0, width = kGroups;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    if (!__syncthreads_and(add_up(e, pass, from, width, patience))) {
      if (threadIdx.x == 0) e.found->bin = -1;
      __syncthreads();
      return;
    }
    if (threadIdx.x < 32) {
      const int word = find_word(*e.totals, pass, k, &t);
      t.bin = pass == 0 ? word * e.fine : t.bin + word;
      if (threadIdx.x == 0) *e.found = t;
    }
    __syncthreads();
    from = kGroups + e.found->bin;
    width = e.fine;
  }
}

// Waits for the other blocks of a head: `target` is their number times the uses of the counter. False: not in time.
__device__ __forceinline__ bool head_barrier(uint32_t* counter, uint32_t target, Patience patience) {
  __shared__ bool arrived;
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
    arrived = true;
    while (load_acquire(counter) < target && arrived) arrived = patience.more();
  }
  __syncthreads();
  return arrived;
}

}  // namespace clo::cuda
