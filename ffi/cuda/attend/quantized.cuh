// Units of quantized rows (clo/row_format.h), made in their stage what the tiles compute on.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "clo/row_format.h"
#include "cuda/attend/ptx.cuh"

namespace clo::cuda {

// Four elements of a row, without their scale.
__device__ inline float4 elements(RowFormat format, uint32_t bytes) {
  if (format == RowFormat::kInt8)
    return make_float4(static_cast<int8_t>(bytes), static_cast<int8_t>(bytes >> 8), static_cast<int8_t>(bytes >> 16),
                       static_cast<int8_t>(bytes >> 24));
  const float2 low = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<uint16_t>(bytes), __NV_E4M3)));
  const float2 high = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<uint16_t>(bytes >> 16), __NV_E4M3)));
  return make_float4(low.x, low.y, high.x, high.y);
}

// A unit of quantized rows lies at the end of its stage, one row after the other. Rows are written in their order, wide
// ones over narrow ones that have been read: the end of row r, wide, is never behind the end of row r, narrow.
template <class Tile>
class QuantizedUnit {
  static constexpr int D = Tile::kDim, kRows = Tile::kUnitRows, kWords = 2 * D / 4;
  static constexpr int kAtOnce = 4, kEach = kAtOnce * kWords / 32;
  static_assert(kAtOnce * kWords % 32 == 0 && kRows % kAtOnce == 0, "every lane widens as many words");

 public:
  static constexpr int kRowBytes = 2 * D + kScaleBytes, kBegin = kRows * (Tile::kStride - kRowBytes);
  static_assert(kBegin % 16 == 0, "copies are of 16 bytes");

  // By one warp, whose copies to the stage have arrived.
  __device__ static void widen_rows(unsigned char* stage, RowFormat format, int lane) {
#pragma unroll 1
    for (int first = 0; first < kRows; first += kAtOnce) {
      uint32_t bytes[kEach];
      float scale[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int word = i * 32 + lane, column = word % kWords;
        const unsigned char* row = stage + kBegin + (first + word / kWords) * kRowBytes;
        bytes[i] = *reinterpret_cast<const uint32_t*>(row + 4 * column);
        const auto* scales = reinterpret_cast<const __nv_bfloat16*>(row + 2 * D);
        scale[i] = __bfloat162float(scales[4 * column / (D / static_cast<int>(kScaleGroups))]);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int word = i * 32 + lane, row = first + word / kWords;
        const int offset = word % kWords * 4 * static_cast<int>(sizeof(typename Tile::Element));
        const float4 x = elements(format, bytes[i]);
        unsigned char* to = stage + row * Tile::kStride + ((offset & ~15) ^ Tile::swizzle(row) << 4) + (offset & 15);
        store(reinterpret_cast<typename Tile::Element*>(to),
              make_float4(x.x * scale[i], x.y * scale[i], x.z * scale[i], x.w * scale[i]));
      }
      __syncwarp();
    }
  }
};

}  // namespace clo::cuda
