// The lookup of one head by one block, for the kernels that begin with it.
#pragma once

#include "cuda/kernels.h"
#include "cuda/numeric.cuh"

namespace clo::cuda {

constexpr int kMaxLookupWarps = 8;

struct LookupScratch {
  float weighted[kMaxLookupWarps], plain[kMaxLookupWarps], importance[kMaxLookupWarps];
};

// Whether head bh (of sequence b, KV head h) hits: a warp takes a query head of the group at a time. Every thread gets the
// answer. Reads age and label, writes nothing but `scratch`; holds one __syncthreads.
template <typename T>
__device__ __forceinline__ bool head_hits(const CacheLookupParams& p, int bh, LookupScratch* scratch) {
  const int b = bh / static_cast<int>(p.kv_heads), h = bh % static_cast<int>(p.kv_heads);
  const int G = static_cast<int>(p.group), D = static_cast<int>(p.head_dim);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warps = min(kMaxLookupWarps, static_cast<int>(blockDim.x / 32));
  const T* query = static_cast<const T*>(p.query) + static_cast<int64_t>(bh) * G * D;
  const T* label = static_cast<const T*>(p.label) + static_cast<int64_t>(bh) * G * D;
  const int32_t age = p.age[bh], max_age = p.max_age[b];
  const float threshold = p.thresholds[h];

  float sum = 0, similarities = 0, total = 0;
  for (int g = warp; g < G && warp < warps; g += warps) {
    const float s = p.importance[h * G + g];
    float dot = 0, aa = 0, bb = 0;
    for (int d = lane; d < D; d += 32) {
      const float x = widen(query[g * D + d]), y = widen(label[g * D + d]);
      dot += x * y;
      aa += x * x;
      bb += y * y;
    }
    dot = warp_sum(dot);
    const float norms = sqrtf(warp_sum(aa)) * sqrtf(warp_sum(bb));
    const float similarity = norms > 0 ? dot / norms : 0;
    sum += s * similarity;
    similarities += similarity;
    total += s;
  }
  if (lane == 0 && warp < warps) {
    scratch->weighted[warp] = sum;
    scratch->plain[warp] = similarities;
    scratch->importance[warp] = total;
  }
  __syncthreads();
  sum = similarities = total = 0;
  for (int w = 0; w < min(G, warps); ++w) {
    sum += scratch->weighted[w];
    similarities += scratch->plain[w];
    total += scratch->importance[w];
  }
  // Equation 10; with no importance at all it is the plain mean.
  const float similarity = total > 0 ? sum / total : similarities / static_cast<float>(G);
  return age >= 0 && age < max_age && similarity >= threshold;
}

// The label of a head that missed becomes its query, by one block.
template <typename T>
__device__ __forceinline__ void renew_label(const CacheLookupParams& p, int bh) {
  const int n = static_cast<int>(p.group * p.head_dim);
  const T* query = static_cast<const T*>(p.query) + static_cast<int64_t>(bh) * n;
  T* label = static_cast<T*>(p.label) + static_cast<int64_t>(bh) * n;
  for (int i = threadIdx.x; i < n; i += blockDim.x) label[i] = query[i];
}

}  // namespace clo::cuda
