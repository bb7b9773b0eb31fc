// Element types and small arithmetic that the kernels share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "clo/dtype.h"

namespace clo::cuda {

using BFloat = __nv_bfloat16;
using Half = __half;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(BFloat x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(Half x) { return __half2float(x); }

// Sum over the lanes of a warp whose numbers differ in bits below `width`; each of them gets it.
template <int kWidth = 32>
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// exp(x) for x in [-87, 80]; 0 below and for NaN, exp(80) above: as the CPU kernels have it, so that sums stay finite.
__device__ __forceinline__ float clamped_exp(float x) {
  return x >= -87.0f ? exp2f(fminf(x, 80.0f) * 1.44269504f) : 0.0f;
}

}  // namespace clo::cuda
