#include "cuda/cache_lookup.cuh"

#include <algorithm>

#include "cuda/numeric.cuh"

namespace clo::cuda {
namespace {

constexpr int kMaxWarps = 8;

// One block a KV head, one warp a query head of its group.
template <typename T>
__global__ void __launch_bounds__(32 * kMaxWarps) lookup_kernel(const __grid_constant__ CacheLookupParams p,
                                                                const int32_t* k, uint32_t* clear) {
  __shared__ float weighted[kMaxWarps], plain[kMaxWarps], importance[kMaxWarps];
  __shared__ bool hit;
  const int bh = blockIdx.x, b = bh / static_cast<int>(p.kv_heads), h = bh % static_cast<int>(p.kv_heads);
  const int G = static_cast<int>(p.group), D = static_cast<int>(p.head_dim);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const T* query = static_cast<const T*>(p.query) + static_cast<int64_t>(bh) * G * D;
  T* label = static_cast<T*>(p.label) + static_cast<int64_t>(bh) * G * D;
  int32_t age = 0;
  int32_t max_age = 0;
  float threshold = 0;
  if (threadIdx.x == 0) {
    age = p.age[bh];
    max_age = p.max_age[b];
    threshold = p.thresholds[h];
  }

  float sum = 0, similarities = 0, total = 0;
  for (int g = warp; g < G; g += warps) {
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
    const float s = p.importance[h * G + g];
    sum += s * similarity;
    similarities += similarity;
    total += s;
  }
  if (lane == 0) {
    weighted[warp] = sum;
    plain[warp] = similarities;
    importance[warp] = total;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < warps; ++w) {
      sum += weighted[w];
      similarities += plain[w];
      total += importance[w];
    }
    // Equation 10; with no importance at all it is the plain mean.
    const float similarity = total > 0 ? sum / total : similarities / static_cast<float>(G);
    hit = age >= 0 && age < max_age && similarity >= threshold;
    const bool nothing = k != nullptr && k[b] <= 0;
    p.hit[bh] = hit || nothing;
    p.age[bh] = nothing ? -1 : hit ? age + 1 : 0;
    if (clear != nullptr && bh == 0) *clear = 0;
  }
  __syncthreads();
  if (hit) return;
  for (int i = threadIdx.x; i < G * D; i += blockDim.x) label[i] = query[i];
}

}  // namespace

cudaError_t lookup(const CacheLookupParams& p, const int32_t* k, uint32_t* clear, cudaStream_t stream) {
  const int blocks = static_cast<int>(p.batch * p.kv_heads);
  if (blocks == 0) return cudaSuccess;
  const int threads = 32 * static_cast<int>(std::min<int64_t>(p.group, kMaxWarps));
  if (p.dtype == DType::kF32) lookup_kernel<float><<<blocks, threads, 0, stream>>>(p, k, clear);
  else lookup_kernel<BFloat><<<blocks, threads, 0, stream>>>(p, k, clear);
  return cudaGetLastError();
}

cudaError_t cache_lookup(const CacheLookupParams& p, cudaStream_t stream) { return lookup(p, nullptr, nullptr, stream); }

}  // namespace clo::cuda
