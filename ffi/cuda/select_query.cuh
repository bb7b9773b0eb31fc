// What a selection scores the keys with: the bit planes of a group's queries (see select_scores.cuh), or the queries.
#pragma once

#include <math_constants.h>

#include "cuda/block_scan.cuh"
#include "cuda/numeric.cuh"

namespace clo::cuda {

constexpr int kPlanes = 4;
constexpr int kMaxGroup = 8;

// What scoring needs to know about the queries of a group, in shared memory.
struct GroupFacts {
  float slopes[kMaxGroup], offsets[kMaxGroup];
  int32_t sums[kMaxGroup];      // sign: sum of the levels
  uint32_t largest[kMaxGroup];  // sign: bits of max |z|
  int32_t base;                 // hata: rank of a key whose bits are all 0
};

struct GroupQuery {
  float* query;      // exact: [D][4·kSets], zero beyond G
  uint32_t* planes;  // else: [queries][kPlanes][words]; hata: one query
  GroupFacts* facts;
};

// hata: the planes of the weights of all bits, and the rank of an empty code, from z = q·W [G][R] in global memory. Begins
// after and ends with __syncthreads.
template <int kSets>
__device__ void weigh_bits(const float* z, const GroupQuery& s, int G, int R) {
  const int lane = threadIdx.x % 32, words = R / 32;
  for (int w = threadIdx.x / 32; w < words; w += kWarps) {
    int set = 0;
#pragma unroll
    for (int g = 0; g < 4 * kSets; ++g) set += g < G && __ldcg(z + g * R + w * 32 + lane) > 0;
    const int weight = G % 2 == 0 ? G / 2 - set : G - 2 * set;
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      const uint32_t mask = __ballot_sync(~0u, weight >> plane & 1);
      if (lane == 0) s.planes[plane * words + w] = mask;
    }
    const int total = __reduce_add_sync(~0u, set);
    if (lane == 0) atomicAdd(&s.facts->base, total);
  }
  __syncthreads();
  if (threadIdx.x == 0 && G % 2 == 0) s.facts->base >>= 1;
  __syncthreads();
}

// The size of one level of a query's projections, 0 when they are zero or not finite.
__device__ __forceinline__ float level_step(uint32_t largest) {
  return largest < 0x7f800000u ? __fdiv_rn(__uint_as_float(largest), 7.0f) : 0.0f;
}

// sign: the planes of each query's levels and its slope, from z as above. Begins after and ends with __syncthreads.
template <int kSets>
__device__ void quantise(const float* z, const GroupQuery& s, int G, int R, float scale) {
  constexpr int kQueries = 4 * kSets;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, words = R / 32;
  GroupFacts& facts = *s.facts;
  for (int i = warp; i < G * words; i += kWarps) {
    const uint32_t bits = __float_as_uint(__ldcg(z + i * 32 + lane)) & 0x7fffffffu;
    const uint32_t most = __reduce_max_sync(~0u, bits);  // values >= 0 sort as their bits do, infinity and NaN last
    if (lane == 0) atomicMax(&facts.largest[i / words], most);
  }
  __syncthreads();
  for (int i = warp; i < kQueries * words; i += kWarps) {
    const int g = i / words;
    const float step = level_step(facts.largest[g]);
    int level = 0;
    if (step > 0) level = max(-7, min(7, __float2int_rn(__fdiv_rn(__ldcg(z + i * 32 + lane), step))));
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      const uint32_t mask = __ballot_sync(~0u, level >> plane & 1);
      if (lane == 0) s.planes[(g * kPlanes + plane) * words + i % words] = mask;
    }
    const int total = __reduce_add_sync(~0u, level);
    if (lane == 0) atomicAdd(&facts.sums[g], total);
  }
  if (threadIdx.x < kQueries) facts.slopes[threadIdx.x] = level_step(facts.largest[threadIdx.x]) * scale;
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
    s.facts->slopes[g] = scale;
    s.facts->offsets[g] = g < G ? -lse[g] : -CUDART_INF_F;
  }
  __syncthreads();
}

}  // namespace clo::cuda
