#include "cuda/cache_lookup.cuh"

#include <algorithm>

namespace clo::cuda {
namespace {

// One block a KV head, one warp a query head of its group.
template <typename T>
__global__ void __launch_bounds__(32 * kMaxLookupWarps) lookup_kernel(const __grid_constant__ CacheLookupParams p) {
  __shared__ LookupScratch scratch;
  const int bh = blockIdx.x;
  const bool hit = head_hits<T>(p, bh, &scratch);
  if (threadIdx.x == 0) {
    p.hit[bh] = hit;
    p.age[bh] = hit ? p.age[bh] + 1 : 0;
  }
  if (!hit) renew_label<T>(p, bh);
}

}  // namespace

cudaError_t cache_lookup(const CacheLookupParams& p, cudaStream_t stream) {
  const int blocks = static_cast<int>(p.batch * p.kv_heads);
  if (blocks == 0) return cudaSuccess;
  const int threads = 32 * static_cast<int>(std::min<int64_t>(p.group, kMaxLookupWarps));
  const auto kernel = choose(p.dtype, lookup_kernel<float>, lookup_kernel<BFloat>, lookup_kernel<Half>);
  kernel<<<blocks, threads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace clo::cuda
