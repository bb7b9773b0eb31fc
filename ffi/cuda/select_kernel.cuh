// The second kernel of a selection: see select_topk.cu.
#pragma once

#include "cuda/overlap.cuh"
#include "cuda/select_compact.cuh"
#include "cuda/select_encode.cuh"
#include "cuda/select_plan.cuh"
#include "cuda/select_search.cuh"
#include "cuda/select_work.cuh"

namespace clo::cuda {

// Of a thread. What 48 leave takes a block of the difference (and of the lookup ahead), which then starts and loads its
// slots behind this kernel instead of after it. More than 32 in any case: see launch in select_topk.cu. Where 48 would send
// much to local memory, 56 leave room for a block of the lookup.
template <Retriever kRetriever, int kSets, bool kFast>
constexpr int kRegisters = kFast && (kRetriever == Retriever::kHata || kSets == 1) ? 48 : 56;
constexpr int kOctave = 256;  // ranks of sign and exact by which scores differ by a factor of two
constexpr uint64_t kTimeout = 2000000000;  // nanoseconds

struct SelectArguments {
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
__global__ void __maxnreg__((kRegisters<kRetriever, kSets, kFast>)) select_kernel(const __grid_constant__ SelectArguments a) {
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
      kLocal || plan.shared_ranks ? shared + plan.stream_offset - plan.rank_bytes
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
    if (!assign(p, a.kv_heads, &done, &heads, &w)) break;
    const int tid = thread_index();
    if (tid == 0) work = w;
    uint16_t* const ranks = part_ranks + w.first % 32;  // as words of bits begin
    const int64_t token = static_cast<int64_t>(w.bh) * p.max_tokens + w.first;
    CodeStream<kRetriever == Retriever::kSign> stream(shared + plan.stream_offset, p.codes + token * words,
                                                      p.factors + token, w.n);
    // With sign, loads of the projected queries come first if they are there: behind those of the codes they would wait.
    const bool queries_first = kRetriever == Retriever::kSign && !a.early;
    if (kFast && !queries_first) stream.start();
#pragma unroll 1
    for (int i = tid; i < exchange_words(plan.fine); i += kThreads) counts[i] = 0;
    clear_totals(&totals);
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
      quantise<kSets>(a.encoded, static_cast<int64_t>(w.bh) * G, group, G, words, p.scale, [&](int turn) {
        if (kFast && queries_first && turn < kWarps) stream.start();
      });
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
                                            stream, put);
    }
    __syncthreads();

    // Not kept in registers while keys are scored and words awaited.
    const Work& kept = work;
    const Exchange e{kept.blocks, kept.rank, plan.fine, counts,
                     a.published + static_cast<int64_t>(kept.leader) * exchange_words(plan.fine), &totals, &found};
    publish(e);
    if (kept.blocks == 1) __syncthreads();
    find_threshold(e, kept.k, patience);
    Threshold threshold = found;
    bool ended = threshold.bin >= 0;
    const bool outside = (threshold.bin == 0 && origin > 0) || (threshold.bin == bins - 1 && origin + bins < plan.ranks);
    threshold.bin += origin;
    if (ended && outside) {
      ended = search_all(e, part_ranks + kept.first % 32, kept.n, kept.k, a.counters + kept.leader * kCounterWords, patience);
      threshold = found;
    }
    const int row_words = static_cast<int>((p.max_tokens + 31) / 32);
    const Output out{p.indices == nullptr ? nullptr : p.indices + static_cast<int64_t>(kept.bh) * p.k_max,
                     a.options.selected_bits == nullptr ? nullptr
                                                        : a.options.selected_bits + static_cast<int64_t>(kept.bh) * row_words};
    if (!ended) {
      // The error word says so. What reads the bits all the same finds a valid selection, an empty one.
      if (out.bits != nullptr) clear_outside(out.bits, row_words, 0, 0, kept.rank, kept.blocks);
      return;
    }
    compact({part_ranks, kept.first % 32, kept.n, kept.first / 32 * 32}, threshold, kept.k, out, warp_counts);
    if (out.bits != nullptr) clear_outside(out.bits, row_words, kept.begin, kept.end, kept.rank, kept.blocks);
    if (out.indices != nullptr)
      for (int i = kept.k + kept.rank * kThreads + thread_index(); i < p.k_max; i += kept.blocks * kThreads) out.indices[i] = -1;
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

}  // namespace clo::cuda
