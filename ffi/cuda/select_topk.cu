// Selection of the k best keys of every head in one cooperative kernel.
//
// The blocks share out the heads that select. Those of a head project a part of the query's columns each, while their first
// codes are on the way, and exchange them. Then each scores a part of the keys, into 16-bit ranks that stay in shared memory,
// and counts them in a histogram; after a barrier every block reads the histograms of all blocks of its head, which tells it
// the rank of the k-th best key and how many keys the parts before its own contribute. So each compacts its keys, ascending,
// straight to their final places. Ranks with too many values for one histogram are counted by their leading bits, then, in
// the bin of the k-th key, by the others.
#include <cooperative_groups.h>

#include <algorithm>

#include "cuda/check.h"
#include "cuda/block_select.cuh"
#include "cuda/select_scores.cuh"
#include "cuda/select_topk.cuh"

namespace clo::cuda {
namespace {

constexpr int kMaxBlocks = 160;     // of a grid
constexpr int kMaxHeadBlocks = 64;  // that share one head
constexpr int kBins = 2 * kThreads;
constexpr int kLowBits = 6;
constexpr int kFastBits = 256;      // the usual number of hash bits
constexpr size_t kMaxShared = 222 * 1024;
constexpr int kCounterWords = 32;       // a cache line for each barrier

struct Plan {
  int bins, shift;      // of the first histogram; bits that it leaves to the second
  int part;             // most keys of a block
  bool shared_ranks;    // ranks fit in shared memory; else they are in the workspace
  int query_bytes, plane_bytes, shared_bytes;  // of shared memory
  int ring_offset, ring_slots;  // of 256-bit codes; 0 slots for others
  int project_floats;   // of a head's projections
  size_t rank_bytes;    // of one block's ranks, masks and places
};

struct Arguments {
  SelectTopkParams p;
  SelectOptions options;
  Plan plan;
  uint32_t* histograms;   // [2][kMaxBlocks][kBins]
  uint32_t* low;          // [2][kMaxBlocks][1 << kLowBits]
  uint32_t* counters;     // [2][kMaxBlocks][kCounterWords] barriers of heads, by their first block
  float* projections;     // [2][kMaxBlocks][project_floats] of heads, by their first block
  unsigned char* ranks;   // [blocks][rank_bytes] unless shared_ranks
};

constexpr size_t align(size_t n, size_t to) { return (n + to - 1) / to * to; }

int head_blocks(int64_t heads, int grid) {
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(kMaxHeadBlocks, grid / std::max<int64_t>(heads, 1))));
}

Plan make_plan(const SelectTopkParams& p, int grid) {
  Plan plan{};
  const int64_t G = p.group, R = p.bits, sets = (G + 3) / 4;
  const bool hata = p.retriever == Retriever::kHata;
  const int64_t values = hata ? (G % 2 == 0 ? G * R / 2 : G * R) + 1 : 65536;
  plan.shift = values <= kBins ? 0 : kLowBits;
  plan.bins = static_cast<int>(((values - 1) >> plan.shift) + 1);
  const int blocks = head_blocks(p.batch * p.kv_heads, grid);
  plan.part = static_cast<int>(align((p.max_tokens + blocks - 1) / blocks, 32));
  plan.rank_bytes = align(static_cast<size_t>(plan.part) * 2 + static_cast<size_t>(plan.part) / 32 * 8, 256);
  plan.query_bytes = static_cast<int>(4 * sets * p.head_dim * sizeof(float));
  plan.plane_bytes = static_cast<int>(4 * sets * kPlanes * (R / 32) * sizeof(uint32_t));
  plan.project_floats = static_cast<int>(4 * sets * R);
  // Ranks take the place of what is needed while preparing only; the ring of codes is filled meanwhile.
  const bool codes = p.retriever != Retriever::kExact;
  size_t large = codes ? (kStageFloats + 4 * sets * R) * sizeof(float) : 0;
  const size_t fixed = kBins * sizeof(uint32_t) + plan.query_bytes + plan.plane_bytes;
  const size_t ring = codes && R == kFastBits ? CodeRing::kSlotBytes : 0;
  plan.shared_ranks = fixed + ring + std::max(large, plan.rank_bytes) <= kMaxShared;
  if (plan.shared_ranks) large = std::max(large, plan.rank_bytes);
  plan.ring_offset = static_cast<int>(align(fixed + large, 128));
  if (ring > 0)
    plan.ring_slots = std::min(CodeRing::kMaxSlots, static_cast<int>((kMaxShared - plan.ring_offset) / ring));
  plan.shared_bytes = plan.ring_offset + plan.ring_slots * CodeRing::kSlotBytes;
  return plan;
}

__device__ __forceinline__ bool takes_part(const SelectTopkParams& p, int bh) {
  const bool skip = p.skip[bh];  // read beside the others, not before them
  return selected(p, bh / static_cast<int>(p.kv_heads)) > 0 && !skip;
}

// The heads that select, found by every warp for itself.
class Heads {
 public:
  __device__ explicit Heads(const SelectTopkParams& p) : p_(p), all_(static_cast<int>(p.batch * p.kv_heads)) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held_[i] = mask(i * 32);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) count_ += __popc(held_[i]);
    for (int first = kHeld * 32; first < all_; first += 32) count_ += __popc(mask(first));
  }

  __device__ int count() const { return count_; }

  // The n-th, 0 <= n < count().
  __device__ int nth(int n) const {
    int before = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int head = find(held_[i], i * 32, n - before);
      if (head >= 0) return head;
      before += __popc(held_[i]);
    }
    for (int first = kHeld * 32; first < all_; first += 32) {
      const uint32_t heads = mask(first);
      const int head = find(heads, first, n - before);
      if (head >= 0) return head;
      before += __popc(heads);
    }
    return -1;
  }

 private:
  static constexpr int kHeld = 4;

  __device__ uint32_t mask(int first) const {
    const int head = first + static_cast<int>(threadIdx.x % 32);
    return __ballot_sync(~0u, head < all_ && takes_part(p_, min(head, all_ - 1)));
  }

  __device__ static int find(uint32_t heads, int first, int n) {
    const int lane = threadIdx.x % 32;
    const bool mine = (heads >> lane & 1) && __popc(heads & ((1u << lane) - 1)) == n;
    const uint32_t found = __ballot_sync(~0u, mine);
    return found != 0 ? first + __ffs(found) - 1 : -1;
  }

  const SelectTopkParams& p_;
  int all_, count_ = 0;
  uint32_t held_[kHeld];
};

// Waits for the other blocks of a head. `target` grows by their number with each use of the counter.
__device__ __forceinline__ void head_barrier(uint32_t* counter, uint32_t target) {
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
    uint32_t arrived = 0;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
    } while (arrived < target);
  }
  __syncthreads();
}

// Bit i of the results: rank i of 32 is better than the threshold; is equal to it.
__device__ __forceinline__ uint2 compare(const uint16_t* ranks, uint32_t threshold) {
  uint32_t better = 0, equal = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int part = (j + threadIdx.x / 2) % 4;  // rotated against bank conflicts
    const uint4 v = reinterpret_cast<const uint4*>(ranks)[part];
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    uint32_t lt = 0, eq = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = words[i] & 0xffffu, high = words[i] >> 16;
      lt |= static_cast<uint32_t>(low < threshold) << (2 * i) | static_cast<uint32_t>(high < threshold) << (2 * i + 1);
      eq |= static_cast<uint32_t>(low == threshold) << (2 * i) | static_cast<uint32_t>(high == threshold) << (2 * i + 1);
    }
    better |= lt << (8 * part);
    equal |= eq << (8 * part);
  }
  return {better, equal};
}

template <Retriever kRetriever, int kSets, bool kFast, typename T>
__global__ void __launch_bounds__(kThreads, 1) select_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ GroupFacts facts;
  __shared__ uint64_t scratch[3][kWarps];
  __shared__ Threshold threshold, low_threshold;
  const SelectTopkParams& p = a.p;
  const Plan& plan = a.plan;
  const int tid = threadIdx.x, block = blockIdx.x, grid = gridDim.x;
  const int Ko = static_cast<int>(p.kv_heads), words = static_cast<int>(p.bits / 32);

  uint32_t* const histogram = reinterpret_cast<uint32_t*>(shared);
  float* const query = reinterpret_cast<float*>(histogram + kBins);
  uint32_t* const planes = reinterpret_cast<uint32_t*>(query + plan.query_bytes / sizeof(float));
  unsigned char* const large = reinterpret_cast<unsigned char*>(planes) + plan.plane_bytes;
  float* const stage = reinterpret_cast<float*>(large);
  const GroupQuery group{query, planes, stage + kStageFloats, stage, &facts};
  unsigned char* const rank_memory =
      plan.shared_ranks ? large : a.ranks + static_cast<size_t>(block) * plan.rank_bytes;
  uint16_t* const ranks = reinterpret_cast<uint16_t*>(rank_memory);
  uint32_t* const masks = reinterpret_cast<uint32_t*>(ranks + plan.part);
  uint32_t* const places = masks + plan.part / 32;

  const Heads selecting(p);
  const int heads = selecting.count();
  for (int done = 0, round = 0; done < heads; ++round) {
    const int blocks = max(1, min(kMaxHeadBlocks, grid / (heads - done)));  // of each head of this round
    const int nth = done + block / blocks, rank = block % blocks, leader = block - rank;
    const int bh = nth < min(heads, done + grid / blocks) ? selecting.nth(nth) : -1;
    done += grid / blocks;

    const int parity = round % 2;
    uint32_t* const counter = a.counters + (parity * kMaxBlocks + leader) * kCounterWords;
    float* const projections = a.projections + static_cast<int64_t>(parity * kMaxBlocks + leader) * plan.project_floats;
    int k = 0, first = 0, n = 0;
    int64_t token = 0;
    CodeRing ring(shared, 1, nullptr, 0);
    if (bh >= 0) {
      int begin;
      const int count = candidates(p, bh / Ko, &begin);
      const int part = ((count + blocks - 1) / blocks + 31) / 32 * 32;
      k = selected(p, bh / Ko);
      first = begin + min(count, rank * part);
      n = max(0, min(part, count - rank * part));
      token = static_cast<int64_t>(bh) * p.max_tokens + first;
      ring = CodeRing(shared + plan.ring_offset, plan.ring_slots, p.codes + token * words, n);
      if constexpr (kFast) ring.start();
      for (int i = tid; i < kBins; i += kThreads) histogram[i] = 0;
      load_group<kSets, T>(p, bh, group);
      if constexpr (kRetriever != Retriever::kExact) {
        const int R = static_cast<int>(p.bits), D = static_cast<int>(p.head_dim);
        const int columns = ((R + blocks - 1) / blocks + 3) / 4 * 4, column = min(R, rank * columns);
        const float* weights = p.weights + static_cast<int64_t>(bh % Ko) * D * R;
        if (column < R)
          project<kSets>(weights, D, R, column, min(columns, R - column), group,
                         blocks > 1 ? projections : group.projection);
      }
    }
    if (blocks > 1) {
      if (block == leader && tid == 0) *counter = 0;
      cooperative_groups::this_grid().sync();
    }
    if (bh >= 0) {
      if constexpr (kRetriever != Retriever::kExact) {
        if (blocks > 1)
          for (int i = tid; i < plan.project_floats; i += kThreads) group.projection[i] = __ldcg(projections + i);
        __syncthreads();
      }
      if constexpr (kRetriever == Retriever::kHata)
        weigh_bits<kSets>(group, static_cast<int>(p.group), static_cast<int>(p.bits));
      if constexpr (kRetriever == Retriever::kSign) quantise<kSets>(p, bh, group);
      const int shift = plan.shift;
      const auto put = [&](int key, uint16_t value) {
        ranks[key] = value;
        atomicAdd(&histogram[value >> shift], 1u);
      };
      if constexpr (kRetriever == Retriever::kExact) {
        const void* rows = a.options.rows.views != nullptr ? a.options.rows.views[*a.options.rows.index].host_rows : p.rows;
        const int D = static_cast<int>(p.head_dim);
        score_rows<kSets>(static_cast<const T*>(rows) + token * 2 * D, D, n, group, put);
      } else {
        score_codes<kRetriever, kSets, kFast>(p.codes + token * words, p.factors + token, words, n, group, ring, put);
      }
      __syncthreads();
    }

    uint32_t* const histograms = a.histograms + static_cast<int64_t>(parity) * kMaxBlocks * kBins;
    if (bh < 0) continue;
    if (blocks > 1) {
      for (int i = tid; i < plan.bins; i += kThreads) __stcg(histograms + block * kBins + i, histogram[i]);
      // The last bin's neighbour is read with it.
      if (tid == 0 && plan.bins % 2 != 0) __stcg(histograms + block * kBins + plan.bins, 0u);
      head_barrier(counter, blocks);
    }
    find_threshold(histogram, histograms + leader * kBins, kBins, plan.bins, blocks, rank, k, scratch[0], &threshold);
    if (plan.shift > 0) {
      constexpr int kLow = 1 << kLowBits;
      uint32_t* const low = a.low + static_cast<int64_t>(parity) * kMaxBlocks * kLow;
      if (tid < kLow) histogram[tid] = 0;
      __syncthreads();
      for (int i = tid; i < n; i += kThreads) {
        const uint32_t value = ranks[i];
        if (value >> kLowBits == static_cast<uint32_t>(threshold.bin)) atomicAdd(&histogram[value & (kLow - 1)], 1u);
      }
      __syncthreads();
      if (blocks > 1) {
        if (tid < kLow) __stcg(low + block * kLow + tid, histogram[tid]);
        head_barrier(counter, 2 * blocks);
      }
      find_threshold(histogram, low + leader * kLow, kLow, kLow, blocks, rank, k - threshold.better, scratch[1],
                       &low_threshold);
    }
    uint32_t better_before = threshold.better_before, equal_before = threshold.equal_before;
    uint32_t wanted = k - threshold.better, limit = threshold.bin;  // keys that are equal to the threshold
    if (plan.shift > 0) {
      better_before += low_threshold.better_before;
      equal_before = low_threshold.equal_before;
      wanted -= low_threshold.better;
      limit = limit << kLowBits | low_threshold.bin;
    }
    const int masked = (n + 31) / 32;
    for (int w = tid; w < masked; w += kThreads) {
      const uint2 m = compare(ranks + w * 32, limit);
      const uint32_t valid = n - w * 32 >= 32 ? ~0u : (1u << (n - w * 32)) - 1;
      masks[w] = m.x & valid;
      places[w] = m.y & valid;
    }
    __syncthreads();
    resolve_ties(masks, places, masked, better_before, equal_before, wanted, scratch[2]);
    int32_t* const out = p.indices + static_cast<int64_t>(bh) * p.k_max;
    for_each_bit(masks, places, masked, [&](uint32_t place, int key) { out[place] = first + key; });
    for (int i = k + rank * kThreads + tid; i < p.k_max; i += blocks * kThreads) out[i] = -1;
    __syncthreads();
  }

  if (!a.options.fill_skipped) return;
  for (int64_t bh = block; bh < p.batch * p.kv_heads; bh += grid) {
    if (takes_part(p, static_cast<int>(bh))) continue;
    for (int64_t i = tid; i < p.k_max; i += kThreads) p.indices[bh * p.k_max + i] = -1;
  }
}

using Kernel = void (*)(Arguments);

template <Retriever kRetriever, typename T>
Kernel pick_codes(bool two_sets, bool fast) {
  if (two_sets) return fast ? select_kernel<kRetriever, 2, true, T> : select_kernel<kRetriever, 2, false, T>;
  return fast ? select_kernel<kRetriever, 1, true, T> : select_kernel<kRetriever, 1, false, T>;
}

template <typename T>
Kernel pick(const SelectTopkParams& p) {
  const bool two = p.group > 4, fast = p.bits == kFastBits;
  if (p.retriever == Retriever::kHata) return pick_codes<Retriever::kHata, T>(two, fast);
  if (p.retriever == Retriever::kSign) return pick_codes<Retriever::kSign, T>(two, fast);
  return two ? select_kernel<Retriever::kExact, 2, false, T> : select_kernel<Retriever::kExact, 1, false, T>;
}

cudaError_t grid_size(int* grid) {
  int device = 0, processors = 0;
  CLO_CUDA_RETURN(cudaGetDevice(&device));
  CLO_CUDA_RETURN(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  *grid = std::max(1, std::min(kMaxBlocks, processors - kTransferBlocks));
  return cudaSuccess;
}

// Where the parts of the workspace are.
struct Layout {
  size_t histograms, low, counters, projections, ranks, end;
};

Layout lay_out(const Plan& plan, int grid) {
  Layout l{};
  l.low = l.histograms + size_t{2} * kMaxBlocks * kBins * sizeof(uint32_t);
  l.counters = l.low + size_t{2} * kMaxBlocks * (1 << kLowBits) * sizeof(uint32_t);
  l.projections = l.counters + size_t{2} * kMaxBlocks * kCounterWords * sizeof(uint32_t);
  l.ranks = l.projections + align(size_t{2} * kMaxBlocks * static_cast<size_t>(plan.project_floats) * sizeof(float), 256);
  l.end = l.ranks + (plan.shared_ranks ? 0 : static_cast<size_t>(grid) * plan.rank_bytes);
  return l;
}

}  // namespace

size_t select_topk_workspace_bytes(const SelectTopkParams& p) {
  int grid = 0;
  if (grid_size(&grid) != cudaSuccess) return 0;
  return lay_out(make_plan(p, grid), grid).end;
}

cudaError_t select(const SelectTopkParams& p, const SelectOptions& options, void* workspace, cudaStream_t stream) {
  if (p.batch * p.kv_heads == 0) return cudaSuccess;
  if (p.group > kMaxGroup) return cudaErrorInvalidValue;
  int grid = 0;
  CLO_CUDA_RETURN(grid_size(&grid));
  Arguments a{};
  a.p = p;
  a.options = options;
  a.plan = make_plan(p, grid);
  const Layout layout = lay_out(a.plan, grid);
  auto* memory = static_cast<unsigned char*>(workspace);
  a.histograms = reinterpret_cast<uint32_t*>(memory + layout.histograms);
  a.low = reinterpret_cast<uint32_t*>(memory + layout.low);
  a.counters = reinterpret_cast<uint32_t*>(memory + layout.counters);
  a.projections = reinterpret_cast<float*>(memory + layout.projections);
  a.ranks = memory + layout.ranks;
  const Kernel kernel = p.dtype == DType::kF32 ? pick<float>(p) : pick<BFloat>(p);
  const auto bytes = static_cast<size_t>(a.plan.shared_bytes);
  CLO_CUDA_RETURN(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  cudaLaunchAttribute cooperative;
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &cooperative;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, a);
}

cudaError_t select_topk(const SelectTopkParams& p, void* workspace, cudaStream_t stream) {
  return select(p, {{nullptr, nullptr}, true}, workspace, stream);
}

}  // namespace clo::cuda
