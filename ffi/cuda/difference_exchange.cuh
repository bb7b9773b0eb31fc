// What the blocks that share a head tell each other, and which slots give way: those selected longest ago, of equals the
// lowest, among the slots of all of them.
#pragma once

#include "cuda/cluster.cuh"
#include "cuda/difference_head.cuh"

namespace clo::cuda {

constexpr int kClusterBlocks = 8;
// Few threads: what a head costs is dependent loads and exchanges, and every warp more has the same code to issue.
constexpr int kShareThreads = 256, kShareWarps = kShareThreads / 32;
constexpr int kBatch = 10;  // slots of a thread whose loads are in flight together

constexpr int kRecencyBins = kShareThreads;
// Recencies from this on have a bin each; those before it, of rows that nothing selected for so long, share the first.
constexpr int kFirstRecency = UINT16_MAX - (kRecencyBins - 1);

// Smaller: selected longer ago. Numbers of refreshes wrap around.
__device__ __forceinline__ int recency_of(uint16_t last, uint16_t refresh) {
  return UINT16_MAX - static_cast<uint16_t>(refresh - last);
}

// Of 32 slots.
struct __align__(16) SlotWord {
  uint32_t others;  // whose token is not in the selection; later those that give way
  uint32_t place;   // number of the first that gives way
  uint32_t kept;    // whose token is in the selection
  uint32_t unused;
};

// What one block holds of a head, at most: masks over its tokens and slots, and the recency of its slots.
struct ShareLayout {
  int token_words, slot_words;
  size_t bytes;
  bool shared;  // in shared memory, else in the workspace
};

inline ShareLayout share_layout(const LayerView& v) {
  constexpr size_t kMaxShared = 96 * 1024;  // so that two blocks fit on a multiprocessor
  const auto words = [](int64_t bits) { return static_cast<int>(((bits + 31) / 32 + kClusterBlocks - 1) / kClusterBlocks); };
  ShareLayout s{words(v.max_tokens), words(v.num_slots), 0, false};
  s.token_words = (s.token_words + 1) / 2 * 2;  // what comes after two such arrays is aligned to 16 bytes
  s.bytes = static_cast<size_t>(s.token_words) * 2 * 4 + static_cast<size_t>(s.slot_words) * (sizeof(SlotWord) + 32 * 2);
  s.bytes = (s.bytes + 255) / 256 * 256;
  s.shared = s.bytes <= kMaxShared;
  return s;
}

// In shared memory, read by the other blocks of the cluster.
struct Exchange {
  uint32_t histogram[3][kRecencyBins];  // slots that may give way by recency; two more for search_first_bin
  uint32_t kept[kClusterBlocks];        // tokens of each block's share that stay in slots of this one
  uint32_t chosen;                      // tokens of this block's share that are selected
  uint32_t fit, ready;                  // the first block's word for all: a new request may be written
};

struct Threshold {
  int recency;                           // of the last slot that gives way
  uint32_t better, better_before;        // slots selected longer ago; those of them in blocks of lower rank
  uint32_t equal_before;                 // slots of the same recency in blocks of lower rank
};

struct Sums {
  uint32_t a, b, c;
};

struct Scratch {
  Sums scan[2][kShareWarps];  // used in turn
  Threshold threshold;
};

// Sums of the values of the threads before this one. Holds one __syncthreads, which also separates it from the use of
// `scratch` before the last one.
__device__ __forceinline__ Sums scan_exclusive(const Sums& mine, Sums* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Sums sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t a = __shfl_up_sync(~0u, sum.a, step), b = __shfl_up_sync(~0u, sum.b, step),
                   c = __shfl_up_sync(~0u, sum.c, step);
    if (lane >= step) {
      sum.a += a;
      sum.b += b;
      sum.c += c;
    }
  }
  if (lane == 31) scratch[warp] = sum;
  __syncthreads();
  sum.a -= mine.a;
  sum.b -= mine.b;
  sum.c -= mine.c;
#pragma unroll
  for (int w = 0; w < kShareWarps - 1; ++w) {
    const Sums all = scratch[w];
    if (w < warp) {
      sum.a += all.a;
      sum.b += all.b;
      sum.c += all.c;
    }
  }
  return sum;
}

// The thread's bin in the histograms of all blocks of the cluster, `histogram` being this block's.
struct Bin {
  uint32_t total, lower;  // slots in it; of them in blocks of lower rank
};

__device__ __forceinline__ Bin gather_bin(const uint32_t* histogram, int rank) {
  uint32_t values[kClusterBlocks];
#pragma unroll
  for (int r = 0; r < kClusterBlocks; ++r) values[r] = remote_load(remote(histogram + threadIdx.x, r));
  Bin bin{};
#pragma unroll
  for (int r = 0; r < kClusterBlocks; ++r) {
    bin.total += values[r];
    if (r < rank) bin.lower += values[r];
  }
  return bin;
}

// In *threshold, if this thread's bin holds the `wanted`-th slot. `better` slots are in the bins before it, `better_lower`
// of them in blocks of lower rank. The first bin stands for recency `base`.
__device__ __forceinline__ void note_threshold(const Bin& bin, uint32_t better, uint32_t better_lower, uint32_t wanted,
                                               int base, Threshold* threshold) {
  if (better < wanted && wanted <= better + bin.total)
    *threshold = {base + static_cast<int>(threadIdx.x), better, better_lower, bin.lower};
}

// The threshold among slots of the first bin, whose recencies differ, by two more histograms, of leading and of other
// bits. All blocks of the cluster come here; the last barrier keeps their memory alive.
__device__ __noinline__ void search_first_bin(const SlotWord* slots, const uint16_t* recencies, int words, uint32_t wanted,
                                              int rank, Exchange* exchange, Scratch* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Threshold found{};
#pragma unroll 1
  for (int level = 0; level < 2; ++level) {
    uint32_t* const histogram = exchange->histogram[1 + level];
#pragma unroll 1
    for (int w = warp; w < words; w += kShareWarps) {
      const int value = recencies[w * 32 + lane];
      if (!(slots[w].others >> lane & 1) || value > kFirstRecency) continue;
      if (level == 0) atomicAdd(histogram + (value >> 8), 1u);
      else if (value >> 8 == found.recency) atomicAdd(histogram + (value & 255), 1u);
    }
    cluster_barrier();
    const Bin bin = gather_bin(histogram, rank);
    const Sums before = scan_exclusive({0, bin.total, bin.lower}, scratch->scan[1 - level]);
    note_threshold(bin, found.better + before.b, found.better_before + before.c, wanted, found.recency << 8,
                   &scratch->threshold);
    __syncthreads();
    found = scratch->threshold;
  }
  cluster_barrier();
}

}  // namespace clo::cuda
