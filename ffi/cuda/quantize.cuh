// A row of activations to a quantized one (clo/row_format.h), by one warp: four lanes a group of channels.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "clo/row_format.h"
#include "cuda/kernels.h"
#include "cuda/numeric.cuh"

namespace clo::cuda {

// row: [2, D]; out: in shared memory, 2·D + kScaleBytes bytes. The same bits as on the CPU.
template <typename T>
__device__ void quantize_row(const T* row, int dim, RowFormat format, unsigned char* out, int lane) {
  constexpr int kEach = kMaxQuantizedDim / static_cast<int>(kScaleGroups) / 4;
  const int width = dim / static_cast<int>(kScaleGroups), group = lane >> 2, first = group * width + (lane & 3);
  float x[kEach];
  uint32_t top = 0;  // of the magnitudes' bits: NaN compares as larger than infinity
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    x[i] = (lane & 3) + 4 * i < width ? widen(row[first + 4 * i]) : 0.0f;
    top = max(top, __float_as_uint(x[i]) & 0x7fffffffu);
  }
  top = max(top, __shfl_xor_sync(~0u, top, 1));
  top = max(top, __shfl_xor_sync(~0u, top, 2));
  const bool known = top < 0x7f800000u, zero = !known || __uint_as_float(top) < kSmallestAmax;
  const float largest = format == RowFormat::kInt8 ? 1.0f / kLargestInt8 : 1.0f / kLargestFp8;
  const uint32_t scale = zero ? 0 : (__float_as_uint(__uint_as_float(top) * largest) + 0xffffu) >> 16;
  const float inverse = zero ? 0.0f : __frcp_rn(__uint_as_float(scale << 16));
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if ((lane & 3) + 4 * i >= width) continue;
    const float y = x[i] * inverse;
    int code = 0;
    if (!zero && format == RowFormat::kInt8) code = min(max(__float2int_rn(y), -127), 127);
    if (!zero && format == RowFormat::kFp8) code = __nv_cvt_float_to_fp8(y, __NV_SATFINITE, __NV_E4M3);
    out[first + 4 * i] = static_cast<unsigned char>(code);
  }
  if ((lane & 3) == 0)
    reinterpret_cast<uint16_t*>(out + 2 * dim)[group] = known ? static_cast<uint16_t>(scale) : kScaleNaN;
}

}  // namespace clo::cuda
