// The projections z = q·W of the query heads that select, ahead of the selection kernel.
#include "cuda/check.h"
#include "cuda/numeric.cuh"
#include "cuda/select_encode.cuh"

namespace clo::cuda {
namespace {

constexpr int kColumns = 32, kQueries = 8, kThreads = kColumns * kQueries;

// A block makes 32 columns of one KV head: a warp a query head, a lane a column, each projection one chain of multiply-adds
// in the order of d as in the CPU kernel, so that signs agree to the bit.
template <typename T>
__global__ void __launch_bounds__(kThreads) encode_kernel(const __grid_constant__ SelectTopkParams p, EncodedQueries out) {
  extern __shared__ __align__(16) float shared[];
  const int bh = blockIdx.x, b = bh / static_cast<int>(p.kv_heads), h = bh % static_cast<int>(p.kv_heads);
  const int G = static_cast<int>(p.group), D = static_cast<int>(p.head_dim), R = static_cast<int>(p.bits);
  const int tid = threadIdx.x, lane = tid % 32, g = tid / 32, column = blockIdx.y * kColumns;
  if (blockIdx.y == 0)
    for (int i = bh * kThreads + tid; i < out.counter_words; i += gridDim.x * kThreads) out.counters[i] = 0;
  if (p.skip[bh] || p.k[b] <= 0) return;

  float* const weights = shared;                  // [D][kColumns]
  float* const query = weights + D * kColumns;    // [G][D]
  const float* from = p.weights + static_cast<int64_t>(h) * D * R + column;
#pragma unroll 4
  for (int i = tid; i < D * (kColumns / 4); i += kThreads)
    reinterpret_cast<float4*>(weights)[i] =
        __ldg(reinterpret_cast<const float4*>(from + static_cast<int64_t>(i / (kColumns / 4)) * R + i % (kColumns / 4) * 4));
  const T* q = static_cast<const T*>(p.query) + static_cast<int64_t>(bh) * G * D;
  for (int i = tid; i < G * D; i += kThreads) query[i] = widen(q[i]);
  __syncthreads();
  if (g >= G) return;
  float sum = 0;
#pragma unroll 8
  for (int d = 0; d < D; ++d) sum = fmaf(query[g * D + d], weights[d * kColumns + lane], sum);
  out.z[(static_cast<int64_t>(bh) * G + g) * R + column + lane] = sum;
  if (blockIdx.y != 0 || p.retriever != Retriever::kSign) return;
  float along_mean = 0;
  for (int d = lane; d < D; d += 32) along_mean += query[g * D + d] * p.mean[static_cast<int64_t>(bh) * D + d];
  along_mean = warp_sum(along_mean);
  if (lane == 0) out.offsets[bh * G + g] = p.scale * along_mean - p.lse[bh * G + g];
}

// Without projections only the counters are to be cleared.
__global__ void clear_kernel(EncodedQueries out) {
  for (int i = threadIdx.x; i < out.counter_words; i += blockDim.x) out.counters[i] = 0;
}

}  // namespace

cudaError_t encode_queries(const SelectTopkParams& p, const EncodedQueries& out, cudaStream_t stream) {
  if (p.retriever == Retriever::kExact) {
    clear_kernel<<<1, 1024, 0, stream>>>(out);
    return cudaGetLastError();
  }
  const auto kernel = p.dtype == DType::kF32 ? encode_kernel<float> : encode_kernel<BFloat>;
  const size_t bytes = static_cast<size_t>(p.head_dim * (kColumns + p.group)) * sizeof(float);
  CLO_CUDA_RETURN(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  const dim3 grid(static_cast<unsigned>(p.batch * p.kv_heads), static_cast<unsigned>(p.bits / kColumns));
  kernel<<<grid, kThreads, bytes, stream>>>(p, out);
  return cudaGetLastError();
}

}  // namespace clo::cuda
