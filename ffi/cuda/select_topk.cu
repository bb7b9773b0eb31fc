// Selection of the k best keys of every head, in two kernels: the projections of the queries (select_encode.cu), and this.
//
// The blocks share out the heads that select. Those of a head score a part of its keys each, into 16-bit ranks that stay in
// shared memory, count them, and exchange their counts, which tells every block the rank of the k-th best key and how many
// keys the parts before its own contribute. So each compacts its keys, ascending, straight to their final places. Where
// there are more ranks than bins, the histogram covers those around which the k-th is expected; should it lie outside, two
// more histograms find it, by leading bits and by the others.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/overlap.cuh"
#include "cuda/select_compact.cuh"
#include "cuda/select_encode.cuh"
#include "cuda/select_heads.cuh"
#include "cuda/select_plan.cuh"
#include "cuda/select_topk.cuh"

namespace clo::cuda {
namespace {

// Of a thread: leaves room for a small block of the kernel ahead or of the next one, so that neither kernel waits for a
// multiprocessor of its own to start.
constexpr int kRegisters = 56;
constexpr int kOctave = 256;        // ranks of sign and exact by which scores differ by a factor of two
constexpr int kCounterWords = 32;   // a cache line for each barrier
constexpr uint64_t kTimeout = 2000000000;

struct Arguments {
  SelectTopkParams p;
  SelectOptions options;
  Plan plan;
  EncodedQueries encoded;
  uint32_t* published;     // [grid][exchange_words(fine)], by the first block of the head
  uint32_t* counters;      // [grid][kCounterWords] of barriers, by the first block of the head
  unsigned char* ranks;    // [grid][rank_bytes] unless shared_ranks
  Divisor kv_heads;
  int grid;
  bool early;              // the kernel ahead does not write p.skip
};

__device__ __forceinline__ void wait_for_queries() {
  wait_for_earlier();
  let_next_start();
}

__device__ __forceinline__ void prefetch_line(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }

// Of numbers below 2^16, in a few instructions.
__device__ __forceinline__ int quotient(int n, int by) {
  return static_cast<int>(__fdividef(static_cast<float>(n) + 0.5f, static_cast<float>(by)));
}

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
      *e.found = {high.bin << kLowBits | t.bin, high.better + t.better, high.better_before + t.better_before, t.equal_before};
    __syncthreads();
  }
  return true;
}

// What a block does in a round.
struct Work {
  int bh, begin, end, k;      // the head, its candidates, the keys that it selects
  int blocks, rank, leader;   // of the head; this block's place among them; the first of them
  int first, n;               // this block's keys are those of tokens [first, first + n)
};

// This block's work in the round that begins with the head number *done of those that select; moves *done on, and makes
// *heads their number. False: there is none.
__device__ __forceinline__ bool assign(const Arguments& a, int* done, int* heads, Work* w) {
  const SelectTopkParams& p = a.p;
  const Heads selecting(p, a.kv_heads);
  *heads = selecting.count();
  if (*heads == 0) return false;
  w->blocks = max(1, min(kMaxHeadBlocks, quotient(gridDim.x, *heads - *done)));
  const int index = quotient(blockIdx.x, w->blocks), round = quotient(gridDim.x, w->blocks);
  w->rank = static_cast<int>(blockIdx.x) - index * w->blocks;
  w->leader = static_cast<int>(blockIdx.x) - w->rank;
  w->bh = index < min(*heads - *done, round) ? selecting.nth(*done + index) : -1;
  *done += round;
  if (w->bh < 0) return false;
  const int b = a.kv_heads(w->bh);
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

// Values in device memory that the host cannot have checked.
__device__ __forceinline__ void check_operands(const SelectTopkParams& p, const SelectOptions& options) {
  for (int b = threadIdx.x; b < p.batch; b += kThreads) {
    const int begin = p.begin[b], end = p.end[b], k = p.k[b];
    if (begin < 0 || begin > end || end > p.max_tokens || k < 0 || k > p.k_max)
      fail(options.error, Failure::kBadOperand, options.rows.index == nullptr ? 0 : *options.rows.index, 0);
  }
}

// kLocal: ranks are known to be in shared memory.
template <Retriever kRetriever, int kSets, bool kFast, bool kLocal, typename T>
__global__ void __maxnreg__(kRegisters) select_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ GroupFacts facts;
  __shared__ uint32_t warp_counts[2 * kWarps];
  __shared__ Totals totals;
  __shared__ Work work;
  __shared__ Threshold found;
  const SelectTopkParams& p = a.p;
  const Plan& plan = a.plan;
  const int block = blockIdx.x, grid = gridDim.x;
  const int Ko = static_cast<int>(p.kv_heads), G = static_cast<int>(p.group), words = static_cast<int>(p.bits / 32);

  uint32_t* const counts = reinterpret_cast<uint32_t*>(shared);
  float* const query = reinterpret_cast<float*>(counts + exchange_words(plan.fine));
  uint32_t* const planes = reinterpret_cast<uint32_t*>(query + plan.query_bytes / sizeof(float));
  const GroupQuery group{query, planes, &facts};
  uint16_t* const part_ranks = reinterpret_cast<uint16_t*>(
      kLocal || plan.shared_ranks ? shared + plan.ring_offset - plan.rank_bytes
                                  : a.ranks + static_cast<size_t>(block) * plan.rank_bytes);
  const Patience patience(a.options.error, a.options.timeout_ns != 0 ? a.options.timeout_ns : kTimeout,
                          a.options.rows.index);

  bool waited = !a.early;
  if (waited) {
    // What is small and cold comes on the way meanwhile.
    if (threadIdx.x < 3) prefetch_line(threadIdx.x == 0 ? p.begin : threadIdx.x == 1 ? p.end : p.k);
    wait_for_queries();
  }
  // Several rounds only where there are more heads than blocks. Only in the last can several blocks share a head, so
  // nothing that they exchange is used twice.
#pragma unroll 1
  for (int done = 0, heads = 1; done < heads;) {
    Work w;
    if (!assign(a, &done, &heads, &w)) break;
    const int tid = thread_index();
    uint16_t* const ranks = part_ranks + w.first % 32;  // as words of bits begin
    const int64_t token = static_cast<int64_t>(w.bh) * p.max_tokens + w.first;
    CodeRing<kRetriever == Retriever::kSign> ring(shared + plan.ring_offset, plan.ring_slots, p.codes + token * words,
                                                  p.factors + token, w.n);
    if constexpr (kFast) ring.start();
#pragma unroll 1
    for (int i = tid; i < exchange_words(plan.fine); i += kThreads) counts[i] = 0;
    clear_totals(&totals);
    if (tid == 0) work = w;
    if (tid < kMaxGroup) facts.sums[tid] = 0;
    if (!waited) wait_for_queries();
    waited = true;
    __syncthreads();
    const uint32_t* const encoded = a.encoded.planes + static_cast<int64_t>(w.bh) * (kPlanes + 1) * words;
    int base = 0;
    if constexpr (kRetriever == Retriever::kExact) {
      const int D = static_cast<int>(p.head_dim);
      load_queries<kSets>(static_cast<const T*>(p.query) + static_cast<int64_t>(w.bh) * G * D, p.lse + w.bh * G, p.scale,
                          group, G, D);
    } else if constexpr (kRetriever == Retriever::kSign) {
      quantise<kSets>(a.encoded, static_cast<int64_t>(w.bh) * G, group, G, words, p.scale);
    } else {
      base = empty_rank(encoded, G, words);
      if constexpr (!kFast) {
        for (int i = tid; i < kPlanes * words; i += kThreads) planes[i] = __ldcg(encoded + i);
        __syncthreads();
      }
    }

    // The histogram covers ranks [origin, origin + bins) and counts others in its first and last bin. Around the middle of
    // all distances, more below than above, or around the score of a key whose estimate is that of the mean.
    const int bins = plan.bins;
    int origin = 0;
    if (plan.ranks > bins) {
      int middle = plan.ranks / 2;
      if constexpr (kRetriever != Retriever::kHata) {
        float score = 0;
#pragma unroll
        for (int g = 0; g < 4 * kSets; ++g) score += clamped_power(facts.offsets[g]);
        middle = score_rank(score);
      }
      origin = max(0, min(middle - 6 * kOctave, plan.ranks - bins));
    }
    uint32_t* const histogram = counts + kGroups;
    const auto put = [&](int key, uint16_t value) {
      ranks[key] = value;
      atomicAdd(&histogram[max(0, min(value - origin, bins - 1))], 1u);
    };
    if constexpr (kRetriever == Retriever::kExact) {
      const void* rows = a.options.rows.views != nullptr ? a.options.rows.views[*a.options.rows.index].host_rows : p.rows;
      const int D = static_cast<int>(p.head_dim);
      score_rows<kSets>(static_cast<const T*>(rows) + token * 2 * D, D, w.n, group, put);
    } else {
      score_codes<kRetriever, kSets, kFast>(p.codes + token * words, p.factors + token, words, w.n, group, encoded, base,
                                            ring, put);
    }
    __syncthreads();

    // Not kept in registers while keys are scored.
    w = work;
    const Exchange e{w.blocks, w.rank, plan.fine, counts,
                     a.published + static_cast<int64_t>(w.leader) * exchange_words(plan.fine), &totals, &found};
    publish(e);
    if (w.blocks == 1) __syncthreads();
    find_threshold(e, w.k, patience);
    Threshold threshold = found;
    bool ended = threshold.bin >= 0;
    const bool outside = (threshold.bin == 0 && origin > 0) || (threshold.bin == bins - 1 && origin + bins < plan.ranks);
    threshold.bin += origin;
    if (ended && outside) {
      ended = search_all(e, part_ranks + w.first % 32, w.n, w.k, a.counters + w.leader * kCounterWords, patience);
      threshold = found;
    }
    const int row_words = static_cast<int>((p.max_tokens + 31) / 32);
    const Output out{p.indices == nullptr ? nullptr : p.indices + static_cast<int64_t>(w.bh) * p.k_max,
                     a.options.selected_bits == nullptr ? nullptr
                                                        : a.options.selected_bits + static_cast<int64_t>(w.bh) * row_words};
    if (!ended) {
      // The error word says so. What reads the bits all the same finds a valid selection, an empty one.
      if (out.bits != nullptr) clear_outside(out.bits, row_words, 0, 0, w.rank, w.blocks);
      return;
    }
    compact({part_ranks, w.first % 32, w.n, w.first / 32 * 32}, threshold, w.k, out, warp_counts);
    if (out.bits != nullptr) clear_outside(out.bits, row_words, w.begin, w.end, w.rank, w.blocks);
    if (out.indices != nullptr)
      for (int i = w.k + w.rank * kThreads + thread_index(); i < p.k_max; i += w.blocks * kThreads) out.indices[i] = -1;
    __syncthreads();
  }

  if (!waited) wait_for_queries();
  if (a.options.error != nullptr && block == grid - 1) check_operands(p, a.options);
  if (!a.options.fill_skipped || p.indices == nullptr) return;
#pragma unroll 1
  for (int bh = block; bh < Ko * static_cast<int>(p.batch); bh += grid) {
    if (takes_part(p, a.kv_heads, bh)) continue;
#pragma unroll 1
    for (int64_t i = thread_index(); i < p.k_max; i += kThreads) p.indices[bh * p.k_max + i] = -1;
  }
}

using Kernel = void (*)(Arguments);

template <Retriever kRetriever, bool kFast, bool kLocal>
Kernel pick_codes(bool two_sets) {
  return two_sets ? select_kernel<kRetriever, 2, kFast, kLocal, float> : select_kernel<kRetriever, 1, kFast, kLocal, float>;
}

template <Retriever kRetriever>
Kernel pick_codes(bool two_sets, bool fast, bool local) {
  if (!fast) return pick_codes<kRetriever, false, false>(two_sets);
  return local ? pick_codes<kRetriever, true, true>(two_sets) : pick_codes<kRetriever, true, false>(two_sets);
}

template <typename T>
Kernel pick_rows(bool two_sets) {
  return two_sets ? select_kernel<Retriever::kExact, 2, false, false, T> : select_kernel<Retriever::kExact, 1, false, false, T>;
}

Kernel pick(const SelectTopkParams& p, const Plan& plan) {
  const bool two = p.group > 4, fast = p.bits == kFastBits;
  if (p.retriever == Retriever::kHata) return pick_codes<Retriever::kHata>(two, fast, plan.shared_ranks);
  if (p.retriever == Retriever::kSign) return pick_codes<Retriever::kSign>(two, fast, plan.shared_ranks);
  return p.dtype == DType::kF32 ? pick_rows<float>(two) : pick_rows<BFloat>(two);
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
  size_t published, counters, cleared, queries, largest, offsets, ranks, end;
};

Layout lay_out(const SelectTopkParams& p, const Plan& plan, int grid) {
  const auto heads = static_cast<size_t>(p.batch * p.kv_heads), words = static_cast<size_t>(p.bits / 32);
  const size_t queries = heads * static_cast<size_t>(p.group);
  const bool hata = p.retriever == Retriever::kHata, sign = p.retriever == Retriever::kSign;
  Layout l{};
  l.counters = l.published + static_cast<size_t>(grid * exchange_words(plan.fine)) * sizeof(uint32_t);
  l.cleared = l.counters + static_cast<size_t>(grid * kCounterWords) * sizeof(uint32_t);
  l.queries = align(l.cleared, 256);
  l.largest = l.queries + (hata ? heads * (kPlanes + 1) * words : sign ? queries * words * 32 : 0) * sizeof(uint32_t);
  l.offsets = l.largest + (sign ? queries * words : 0) * sizeof(uint32_t);
  l.ranks = align(l.offsets + queries * sizeof(float), 256);
  l.end = l.ranks + (plan.shared_ranks ? 0 : static_cast<size_t>(grid) * plan.rank_bytes);
  return l;
}

cudaError_t make_arguments(const SelectTopkParams& p, void* workspace, Arguments* a) {
  if (p.group > kMaxGroup || p.batch * p.kv_heads >= 1 << 16) return cudaErrorInvalidValue;
  CLO_CUDA_RETURN(grid_size(&a->grid));
  a->p = p;
  a->plan = make_plan(p, a->grid);
  a->kv_heads = Divisor(p.kv_heads);
  const Layout layout = lay_out(p, a->plan, a->grid);
  auto* memory = static_cast<unsigned char*>(workspace);
  a->published = reinterpret_cast<uint32_t*>(memory + layout.published);
  a->counters = reinterpret_cast<uint32_t*>(memory + layout.counters);
  a->encoded.planes = reinterpret_cast<uint32_t*>(memory + layout.queries);
  a->encoded.z = reinterpret_cast<float*>(memory + layout.queries);
  a->encoded.largest = reinterpret_cast<uint32_t*>(memory + layout.largest);
  a->encoded.offsets = reinterpret_cast<float*>(memory + layout.offsets);
  a->encoded.clear = reinterpret_cast<uint4*>(memory);
  a->encoded.clear_words = static_cast<int>(layout.cleared / sizeof(uint4));
  a->ranks = memory + layout.ranks;
  return cudaSuccess;
}

// The blocks of a head wait for each other, so all of the grid must come to run. It does: a block takes a multiprocessor to
// itself, of which the grid leaves kTransferBlocks to the transfer kernel; earlier kernels of the stream end, for they do
// not wait for this one; and later ones start when every block of this one has let them (wait_for_queries) and so runs.
// Should another stream hold multiprocessors for good all the same, the waits end with the time limit.
cudaError_t launch(const SelectTopkParams& p, const SelectOptions& options, void* workspace, bool early,
                   cudaStream_t stream) {
  Arguments a{};
  CLO_CUDA_RETURN(make_arguments(p, workspace, &a));
  a.options = options;
  a.early = early;
  const Kernel kernel = pick(p, a.plan);
  const auto bytes = static_cast<size_t>(a.plan.shared_bytes);
  CLO_CUDA_RETURN(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  cudaLaunchAttribute overlap = overlaps_earlier();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(a.grid));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, a);
}

}  // namespace

size_t select_topk_workspace_bytes(const SelectTopkParams& p) {
  int grid = 0;
  if (grid_size(&grid) != cudaSuccess) return 0;
  return lay_out(p, make_plan(p, grid), grid).end;
}

cudaError_t lookup_and_encode(const CacheLookupParams& lookup, const SelectTopkParams& p, uint32_t* clear, void* workspace,
                              cudaStream_t stream) {
  if (p.batch * p.kv_heads == 0) return cudaSuccess;
  Arguments a{};
  CLO_CUDA_RETURN(make_arguments(p, workspace, &a));
  return encode_queries(p, {&lookup, clear}, a.encoded, stream);
}

cudaError_t encode(const SelectTopkParams& p, void* workspace, cudaStream_t stream) {
  if (p.batch * p.kv_heads == 0) return cudaSuccess;
  Arguments a{};
  CLO_CUDA_RETURN(make_arguments(p, workspace, &a));
  return encode_queries(p, {nullptr, nullptr}, a.encoded, stream);
}

cudaError_t select_encoded(const SelectTopkParams& p, const SelectOptions& options, void* workspace, cudaStream_t stream) {
  if (p.batch * p.kv_heads == 0) return cudaSuccess;
  return launch(p, options, workspace, false, stream);
}

cudaError_t select(const SelectTopkParams& p, const SelectOptions& options, void* workspace, cudaStream_t stream) {
  if (p.batch * p.kv_heads == 0) return cudaSuccess;
  CLO_CUDA_RETURN(encode(p, workspace, stream));
  return launch(p, options, workspace, true, stream);
}

cudaError_t select_topk(const SelectTopkParams& p, void* workspace, cudaStream_t stream) {
  return select(p, {{nullptr, nullptr}, true, nullptr, nullptr, 0}, workspace, stream);
}

}  // namespace clo::cuda
