// What a selection scores the keys with: the bit planes of a group's queries (see select_scores.cuh), or the queries.
#pragma once

#include <math_constants.h>

#include "cuda/block_threads.cuh"
#include "cuda/numeric.cuh"
#include "cuda/select_encode.cuh"

namespace clo::cuda {

constexpr int kMaxGroup = 8;
constexpr float kLog2e = 1.44269504f;

// What scoring needs to know about the queries of a group, in shared memory. Of the estimates' logarithms to base 2.
struct GroupFacts {
  float slopes[kMaxGroup], offsets[kMaxGroup];
  int32_t sums[kMaxGroup];  // sign: sum of the levels
};

struct GroupQuery {
  float* query;      // exact: [D][4·kSets], zero beyond G
  uint32_t* planes;  // else: [queries][kPlanes][words]; hata: one query
  GroupFacts* facts;
};

// hata: rank of a key whose bits are all 0; every warp finds it for itself.
__device__ __forceinline__ int empty_rank(const uint32_t* planes, int G, int words) {
  int sum = 0;
  for (int w = thread_index() % 32; w < words; w += 32) sum += static_cast<int>(__ldcg(planes + kPlanes * words + w));
  sum = __reduce_add_sync(~0u, sum);
  return G % 2 == 0 ? sum / 2 : sum;
}

// The size of one level of a query's projections, 0 when they are zero or not finite.
__device__ __forceinline__ float level_step(uint32_t largest) {
  return largest < 0x7f800000u ? __fdiv_rn(__uint_as_float(largest), 7.0f) : 0.0f;
}

// sign: the planes of each query's levels, and its slope and offset. Begins after and ends with __syncthreads; facts.sums
// are 0 before. Calls loaded(i) when the loads of word number i have begun.
template <int kSets, typename Loaded>
__device__ __forceinline__ void quantise(const EncodedQueries& from, int64_t first, const GroupQuery& s, int G, int words,
                                         float scale, Loaded loaded) {
  constexpr int kQueries = 4 * kSets;
  const int thread = thread_index(), lane = thread % 32;
  GroupFacts& facts = *s.facts;
  for (int i = thread / 32; i < kQueries * words; i += kWarps) {
    const int g = i / words, word = i % words;
    float z = 0;
    uint32_t largest = 0;
    if (g < G) {
      z = __ldcg(from.z + (first + g) * 32 * words + word * 32 + lane);
      if (lane < words) largest = __ldcg(from.largest + (first + g) * words + lane);
      for (int w = lane + 32; w < words; w += 32) largest = max(largest, __ldcg(from.largest + (first + g) * words + w));
    }
    const float offset = word == 0 && g < G ? __ldcg(from.offsets + first + g) : -CUDART_INF_F;
    loaded(i);
    const float step = level_step(__reduce_max_sync(~0u, largest));
    const int level = step > 0 ? max(-7, min(7, __float2int_rn(__fdiv_rn(z, step)))) : 0;
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      const uint32_t mask = __ballot_sync(~0u, level >> plane & 1);
      if (lane == plane) s.planes[(g * kPlanes + plane) * words + word] = mask;
    }
    const int total = __reduce_add_sync(~0u, level);
    if (lane == 0) {
      atomicAdd(&facts.sums[g], total);
      if (word == 0) {
        facts.slopes[g] = step * scale * kLog2e;
        facts.offsets[g] = offset * kLog2e;
      }
    }
  }
  __syncthreads();
}

// exact: brings the queries of a head to shared memory. Ends with __syncthreads.
template <int kSets, typename T>
__device__ void load_queries(const T* query, const float* lse, float scale, const GroupQuery& s, int G, int D) {
  constexpr int kQueries = 4 * kSets;
  for (int i = threadIdx.x; i < D * kQueries; i += kThreads) {
    const int g = i / D, d = i % D;
    s.query[d * kQueries + g] = g < G ? widen(query[g * D + d]) : 0.0f;
  }
  if (threadIdx.x < kMaxGroup) {
    const int g = static_cast<int>(threadIdx.x);
    s.facts->slopes[g] = scale * kLog2e;
    s.facts->offsets[g] = g < G ? -lse[g] * kLog2e : -CUDART_INF_F;
  }
  __syncthreads();
}

}  // namespace clo::cuda
