#include <algorithm>

#include "cuda/check.h"
#include "cuda/kernels.h"
#include "cuda/numeric.cuh"

namespace clo::cuda {
namespace {

// A block makes the codes of 64 tokens, 128 columns at a time; a thread 4 tokens and 2 x 4 columns. Every projection is
// one chain of multiply-adds in the order of d, as in the CPU kernel, so that signs agree to the bit. That is why this
// runs on ordinary arithmetic: tensor cores round differently.
constexpr int kTokens = 64, kColumns = 128, kThreads = 256;
constexpr int kPitch = kTokens + 4;  // of the transposed tokens: 16-byte aligned, few bank conflicts

size_t shared_bytes(int64_t dim) { return static_cast<size_t>(dim) * (kPitch + kColumns) * sizeof(float); }

// The estimator's factor. No finite projection to divide by (x equals the mean, or is not finite): 0. Beyond the largest
// finite half: that one.
__device__ uint16_t factor(float squares, float magnitudes) {
  const float ratio = squares / magnitudes;
  if (!(magnitudes > 0 && ratio >= 0)) return 0;
  return __half_as_ushort(__float2half_rn(fminf(ratio, 65504.0f)));
}

template <typename T>
__global__ void __launch_bounds__(kThreads) encode_kernel(const __grid_constant__ HashEncodeParams p) {
  extern __shared__ __align__(16) float shared[];
  const int D = static_cast<int>(p.head_dim), R = static_cast<int>(p.bits), words = R / 32;
  float* const centred = shared;                // [D][kPitch]
  float* const panel = shared + D * kPitch;     // [D][kColumns]
  const int64_t bh = blockIdx.y;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTokens;
  const int tokens = static_cast<int>(p.tokens - first < kTokens ? p.tokens - first : kTokens);
  const T* x = static_cast<const T*>(p.x) + (bh * p.tokens + first) * D;
  const float* mean = p.mean + bh * D;
  const float* weights = p.weights + bh % p.heads * D * R;
  const int tid = threadIdx.x, tx = tid % 16, ty = tid / 16;

  for (int i = tid; i < kTokens * D; i += kThreads) {
    const int t = i / D, d = i % D;
    centred[d * kPitch + t] = t < tokens ? widen(x[static_cast<int64_t>(t) * D + d]) - mean[d] : 0.0f;
  }
  float magnitudes[4] = {};
  for (int column = 0; column < R; column += kColumns) {
    __syncthreads();
    for (int i = tid; i < D * (kColumns / 4); i += kThreads) {
      const int d = i / (kColumns / 4), c = i % (kColumns / 4) * 4;
      float4 w = {};
      if (column + c < R) w = *reinterpret_cast<const float4*>(weights + static_cast<int64_t>(d) * R + column + c);
      *reinterpret_cast<float4*>(panel + d * kColumns + c) = w;
    }
    __syncthreads();
    float sums[4][8] = {};
#pragma unroll 4
    for (int d = 0; d < D; ++d) {
      const float4 a = *reinterpret_cast<const float4*>(centred + d * kPitch + ty * 4);
      const float4 u = *reinterpret_cast<const float4*>(panel + d * kColumns + tx * 4);
      const float4 v = *reinterpret_cast<const float4*>(panel + d * kColumns + 64 + tx * 4);
      const float left[4] = {a.x, a.y, a.z, a.w}, right[8] = {u.x, u.y, u.z, u.w, v.x, v.y, v.z, v.w};
#pragma unroll
      for (int t = 0; t < 4; ++t)
#pragma unroll
        for (int c = 0; c < 8; ++c) sums[t][c] = fmaf(left[t], right[c], sums[t][c]);
    }
#pragma unroll
    for (int t = 0; t < 4; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t word = 0;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float s = sums[t][half * 4 + c];
          word |= static_cast<uint32_t>(s > 0) << (tx % 8 * 4 + c);
          magnitudes[t] += fabsf(s);
        }
#pragma unroll
        for (int offset = 1; offset < 8; offset *= 2) word |= __shfl_xor_sync(~0u, word, offset);
        const int w = column / 32 + half * 2 + tx / 8, token = ty * 4 + t;
        if (tx % 8 == 0 && w < words && token < tokens) p.codes[(bh * p.tokens + first + token) * words + w] = word;
      }
    }
  }
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    float squares = 0;
    for (int d = tx; d < D; d += 16) squares += centred[d * kPitch + ty * 4 + t] * centred[d * kPitch + ty * 4 + t];
    squares = warp_sum<16>(squares);
    const float total = warp_sum<16>(magnitudes[t]);
    if (tx == 0 && ty * 4 + t < tokens) p.factors[bh * p.tokens + first + ty * 4 + t] = factor(squares, total);
  }
}

}  // namespace

cudaError_t hash_encode(const HashEncodeParams& p, cudaStream_t stream) {
  if (p.batch * p.heads * p.tokens == 0) return cudaSuccess;
  const auto kernel = choose(p.dtype, encode_kernel<float>, encode_kernel<BFloat>, encode_kernel<Half>);
  const size_t bytes = shared_bytes(p.head_dim);
  CLO_CUDA_RETURN(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  const dim3 grid(static_cast<unsigned>((p.tokens + kTokens - 1) / kTokens), static_cast<unsigned>(p.batch * p.heads));
  kernel<<<grid, kThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace clo::cuda
