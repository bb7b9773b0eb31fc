// Selection of the k best keys of every head, in two kernels: the projections of the queries (select_encode.cu), and this.
//
// The blocks share out the heads that select. Those of a head score a part of its keys each, into 16-bit ranks that stay in
// shared memory, and count them in a histogram; after a barrier every block reads the histograms of all blocks of its head,
// which tells it the rank of the k-th best key and how many keys the parts before its own contribute. So each compacts its
// keys, ascending, straight to their final places. Where there are more ranks than bins, the histogram covers those around
// which the k-th is expected; should it lie outside, two more histograms find it, by leading bits and by the others.
#include <algorithm>

#include "cuda/block_select.cuh"
#include "cuda/cache_lookup.cuh"
#include "cuda/check.h"
#include "cuda/select_encode.cuh"
#include "cuda/select_heads.cuh"
#include "cuda/select_plan.cuh"
#include "cuda/select_topk.cuh"

namespace clo::cuda {
namespace {

constexpr int kOctave = 256;        // ranks of sign and exact by which scores differ by a factor of two
constexpr int kCounterWords = 32;   // a cache line for each barrier

struct Arguments {
  SelectTopkParams p;
  SelectOptions options;
  Plan plan;
  EncodedQueries encoded;  // its counters: [kMaxBlocks][kCounterWords], by the first block of the head
  uint32_t* histograms;    // [2][kMaxBlocks][kBins], the second for the case that the first misses
  uint32_t* low;           // [kMaxBlocks][1 << kLowBits]
  unsigned char* ranks;    // [blocks][rank_bytes] unless shared_ranks
  int grid;
};

// Waits for the other blocks of a head. `target` is their number times the uses of the counter.
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

// One block's share of a head, and what it exchanges with the head's other blocks.
struct Share {
  int blocks, rank;      // of the head; this block's place among them
  uint32_t k;            // keys to select of the head
  int n;                 // keys of this block
  const uint16_t* ranks;
  uint32_t* histogram;   // shared, kBins
  uint32_t* counter;
  uint64_t* scratch;     // [2][kWarps]
  Threshold* threshold;
};

// Finds the threshold from the blocks' histograms of `bins` bins; `mine` is where this block's goes, `leader` where that of
// the head's first block is. Begins with __syncthreads or after one, ends with one.
__device__ __forceinline__ void exchange(const Share& s, int bins, uint32_t k, uint32_t* leader, int stride, int uses) {
  if (s.blocks > 1) {
    uint32_t* const mine = leader + s.rank * stride;
    for (int i = threadIdx.x; i < bins; i += kThreads) __stcg(mine + i, s.histogram[i]);
    // The last bin's neighbour is read with it.
    if (threadIdx.x == 0 && bins % 2 != 0) __stcg(mine + bins, 0u);
    head_barrier(s.counter, static_cast<uint32_t>(s.blocks * uses));
  }
  find_threshold(s.histogram, leader, stride, bins, s.blocks, s.rank, k, s.scratch, s.threshold);
}

// The threshold among all ranks, by two histograms.
__device__ __noinline__ Threshold search_all(const Share& s, uint32_t* leader, uint32_t* low_leader) {
  const int tid = threadIdx.x;
  for (int i = tid; i < kBins; i += kThreads) s.histogram[i] = 0;
  __syncthreads();
  for (int i = tid; i < s.n; i += kThreads) atomicAdd(&s.histogram[s.ranks[i] >> kLowBits], 1u);
  __syncthreads();
  exchange(s, kBins, s.k, leader, kBins, 2);
  const Threshold high = *s.threshold;
  constexpr int kLow = 1 << kLowBits;
  if (tid < kLow) s.histogram[tid] = 0;
  __syncthreads();
  for (int i = tid; i < s.n; i += kThreads) {
    const int rank = s.ranks[i];
    if (rank >> kLowBits == high.bin) atomicAdd(&s.histogram[rank & (kLow - 1)], 1u);
  }
  __syncthreads();
  exchange(s, kLow, s.k - high.better, low_leader, kLow, 3);
  const Threshold low = *s.threshold;
  return {high.bin << kLowBits | low.bin, high.better + low.better, high.better_before + low.better_before,
          low.equal_before};
}

template <Retriever kRetriever, int kSets, bool kFast, typename T>
__global__ void __launch_bounds__(kThreads, 1) select_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ GroupFacts facts;
  __shared__ uint64_t scratch[2][kWarps];
  __shared__ Threshold found;
  const SelectTopkParams& p = a.p;
  const Plan& plan = a.plan;
  const int tid = threadIdx.x, block = blockIdx.x, grid = gridDim.x;
  const int Ko = static_cast<int>(p.kv_heads), G = static_cast<int>(p.group), words = static_cast<int>(p.bits / 32);

  uint32_t* const histogram = reinterpret_cast<uint32_t*>(shared);
  float* const query = reinterpret_cast<float*>(histogram + kBins);
  uint32_t* const planes = reinterpret_cast<uint32_t*>(query + plan.query_bytes / sizeof(float));
  unsigned char* const large = reinterpret_cast<unsigned char*>(planes) + plan.plane_bytes;
  const GroupQuery group{query, planes, &facts};
  unsigned char* const rank_memory = plan.shared_ranks ? large : a.ranks + static_cast<size_t>(block) * plan.rank_bytes;
  uint16_t* const all_ranks = reinterpret_cast<uint16_t*>(rank_memory);
  uint32_t* const masks = reinterpret_cast<uint32_t*>(all_ranks + plan.part);
  uint32_t* const places = masks + plan.part / 32;

  const Heads selecting(p);
  const int heads = selecting.count();
  // Several rounds only where there are more heads than blocks. Only in the last can several blocks share a head, so
  // nothing that they exchange is used twice.
  for (int done = 0; done < heads;) {
    const int blocks = max(1, min(kMaxHeadBlocks, grid / (heads - done)));  // of each head of this round
    const int nth = done + block / blocks, rank = block % blocks, leader = block - rank;
    const int bh = nth < min(heads, done + grid / blocks) ? selecting.nth(nth) : -1;
    done += grid / blocks;
    if (bh < 0) break;

    int begin;
    const int count = candidates(p, bh / Ko, &begin), k = selected(p, bh / Ko);
    // Parts begin at multiples of 32 tokens, but for the first; `skew` is where in a word of bits this one begins.
    const int aligned = begin & ~31, end = begin + count;
    const int part = ((end - aligned + blocks - 1) / blocks + 31) / 32 * 32;
    const int first = min(end, max(begin, aligned + rank * part)), skew = first % 32;
    const int n = max(0, min(end, aligned + (rank + 1) * part) - first);
    uint16_t* const ranks = all_ranks + skew;
    const int64_t token = static_cast<int64_t>(bh) * p.max_tokens + first;
    const CodeRing ring(shared + plan.ring_offset, plan.ring_slots, p.codes + token * words, n);
    if constexpr (kFast) ring.start();
    for (int i = tid; i < kBins; i += kThreads) histogram[i] = 0;
    if constexpr (kRetriever == Retriever::kExact) {
      const int D = static_cast<int>(p.head_dim);
      load_queries<kSets>(static_cast<const T*>(p.query) + static_cast<int64_t>(bh) * G * D, p.lse + bh * G, p.scale, group,
                          G, D);
    } else {
      if (tid < kMaxGroup) {
        facts.sums[tid] = 0;
        facts.largest[tid] = 0;
        facts.offsets[tid] = kRetriever == Retriever::kSign && tid < G ? __ldcg(a.encoded.offsets + bh * G + tid)
                                                                       : -CUDART_INF_F;
        if (tid == 0) facts.base = 0;
      }
      __syncthreads();
      const float* z = a.encoded.z + static_cast<int64_t>(bh) * G * p.bits;
      if constexpr (kRetriever == Retriever::kHata) weigh_bits<kSets>(z, group, G, 32 * words);
      else quantise<kSets>(z, group, G, 32 * words, p.scale);
    }

    // The histogram covers ranks [origin, origin + bins) and counts others in its first and last bin. Around the middle of
    // all distances, more below than above, or around the score of a key whose estimate is that of the mean.
    int bins = plan.ranks, origin = 0;
    if (plan.ranks > kBins) {
      bins = kBins;
      int middle = plan.ranks / 2;
      if constexpr (kRetriever != Retriever::kHata) {
        float score = 0;
#pragma unroll
        for (int g = 0; g < 4 * kSets; ++g) score += clamped_exp(facts.offsets[g]);
        middle = score_rank(score);
      }
      origin = max(0, min(middle - 6 * kOctave, plan.ranks - bins));
    }
    const auto put = [&](int key, uint16_t value) {
      ranks[key] = value;
      atomicAdd(&histogram[max(0, min(value - origin, bins - 1))], 1u);
    };
    if constexpr (kRetriever == Retriever::kExact) {
      const void* rows = a.options.rows.views != nullptr ? a.options.rows.views[*a.options.rows.index].host_rows : p.rows;
      const int D = static_cast<int>(p.head_dim);
      score_rows<kSets>(static_cast<const T*>(rows) + token * 2 * D, D, n, group, put);
    } else {
      score_codes<kRetriever, kSets, kFast>(p.codes + token * words, p.factors + token, words, n, group, ring, put);
    }
    __syncthreads();

    const Share share{blocks, rank, static_cast<uint32_t>(k), n, ranks, histogram,
                      a.encoded.counters + leader * kCounterWords, scratch[0], &found};
    exchange(share, bins, share.k, a.histograms + leader * kBins, kBins, 1);
    Threshold threshold = found;
    const bool outside = (threshold.bin == 0 && origin > 0) || (threshold.bin == bins - 1 && origin + bins < plan.ranks);
    threshold.bin += origin;
    if (outside) {
      __syncthreads();
      threshold = search_all(share, a.histograms + (kMaxBlocks + leader) * kBins, a.low + leader * (1 << kLowBits));
    }

    const int masked = n > 0 ? (n + skew + 31) / 32 : 0;
    for (int w = tid; w < masked; w += kThreads) {
      const uint2 m = compare(all_ranks + w * 32, threshold.bin);
      const int rest = n + skew - w * 32;
      const uint32_t valid = (rest >= 32 ? ~0u : (1u << rest) - 1) & (w == 0 ? ~0u << skew : ~0u);
      masks[w] = m.x & valid;
      places[w] = m.y & valid;
    }
    __syncthreads();
    resolve_ties(masks, places, masked, threshold.better_before, threshold.equal_before, k - threshold.better, scratch[1]);
    if (a.options.selected_bits != nullptr) {
      const int64_t row_words = (p.max_tokens + 31) / 32;
      uint32_t* const row = a.options.selected_bits + bh * row_words;
      for (int w = tid; w < masked; w += kThreads) row[first / 32 + w] = masks[w];
      const int64_t after = (end + 31) / 32, outside = begin / 32 + row_words - after;
      for (int64_t i = rank * kThreads + tid; i < outside; i += blocks * kThreads)
        row[i < begin / 32 ? i : after + i - begin / 32] = 0;
    }
    if (p.indices != nullptr) {
      int32_t* const out = p.indices + static_cast<int64_t>(bh) * p.k_max;
      for_each_bit(masks, places, masked, [&](uint32_t place, int bit) { out[place] = first - skew + bit; });
      for (int i = k + rank * kThreads + tid; i < p.k_max; i += blocks * kThreads) out[i] = -1;
    }
    __syncthreads();
  }

  if (!a.options.fill_skipped || p.indices == nullptr) return;
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
  size_t histograms, low, counters, z, offsets, ranks, end;
};

Layout lay_out(const SelectTopkParams& p, const Plan& plan, int grid) {
  const auto queries = static_cast<size_t>(p.batch * p.kv_heads * p.group);
  Layout l{};
  l.low = l.histograms + size_t{2} * kMaxBlocks * kBins * sizeof(uint32_t);
  l.counters = l.low + size_t{kMaxBlocks} * (1 << kLowBits) * sizeof(uint32_t);
  l.z = l.counters + size_t{kMaxBlocks} * kCounterWords * sizeof(uint32_t);
  l.offsets = l.z + queries * static_cast<size_t>(p.bits) * sizeof(float);
  l.ranks = align(l.offsets + queries * sizeof(float), 256);
  l.end = l.ranks + (plan.shared_ranks ? 0 : static_cast<size_t>(grid) * plan.rank_bytes);
  return l;
}

cudaError_t make_arguments(const SelectTopkParams& p, void* workspace, Arguments* a) {
  if (p.group > kMaxGroup) return cudaErrorInvalidValue;
  CLO_CUDA_RETURN(grid_size(&a->grid));
  a->p = p;
  a->plan = make_plan(p, a->grid);
  const Layout layout = lay_out(p, a->plan, a->grid);
  auto* memory = static_cast<unsigned char*>(workspace);
  a->histograms = reinterpret_cast<uint32_t*>(memory + layout.histograms);
  a->low = reinterpret_cast<uint32_t*>(memory + layout.low);
  a->encoded = {reinterpret_cast<float*>(memory + layout.z), reinterpret_cast<float*>(memory + layout.offsets),
                reinterpret_cast<uint32_t*>(memory + layout.counters), kMaxBlocks * kCounterWords};
  a->ranks = memory + layout.ranks;
  return cudaSuccess;
}

}  // namespace

size_t select_topk_workspace_bytes(const SelectTopkParams& p) {
  int grid = 0;
  if (grid_size(&grid) != cudaSuccess) return 0;
  return lay_out(p, make_plan(p, grid), grid).end;
}

cudaError_t lookup_and_encode(const CacheLookupParams& lookup_params, const SelectTopkParams& p, uint32_t* clear,
                              void* workspace, cudaStream_t stream) {
  if (p.batch * p.kv_heads == 0) return cudaSuccess;
  Arguments a{};
  CLO_CUDA_RETURN(make_arguments(p, workspace, &a));
  CLO_CUDA_RETURN(lookup(lookup_params, p.k, clear, stream));
  return encode_queries(p, a.encoded, stream);
}

cudaError_t select_encoded(const SelectTopkParams& p, const SelectOptions& options, void* workspace, cudaStream_t stream) {
  if (p.batch * p.kv_heads == 0) return cudaSuccess;
  Arguments a{};
  CLO_CUDA_RETURN(make_arguments(p, workspace, &a));
  a.options = options;
  const Kernel kernel = p.dtype == DType::kF32 ? pick<float>(p) : pick<BFloat>(p);
  const auto bytes = static_cast<size_t>(a.plan.shared_bytes);
  CLO_CUDA_RETURN(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  cudaLaunchAttribute cooperative;  // all blocks run at once: they wait for each other
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(a.grid));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &cooperative;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, a);
}

cudaError_t select(const SelectTopkParams& p, const SelectOptions& options, void* workspace, cudaStream_t stream) {
  if (p.batch * p.kv_heads == 0) return cudaSuccess;
  Arguments a{};
  CLO_CUDA_RETURN(make_arguments(p, workspace, &a));
  CLO_CUDA_RETURN(encode_queries(p, a.encoded, stream));
  return select_encoded(p, options, workspace, stream);
}

cudaError_t select_topk(const SelectTopkParams& p, void* workspace, cudaStream_t stream) {
  return select(p, {{nullptr, nullptr}, true, nullptr, nullptr, 0}, workspace, stream);
}

}  // namespace clo::cuda
