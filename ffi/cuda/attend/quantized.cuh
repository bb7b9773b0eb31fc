// Units of quantized rows (clo/row_format.h), made in their stage what the tiles compute on.
//
// While a byte for each lane of a warp arrives from memory, a scheduler has some seven instructions to give, for the
// attention itself, too. So bfloat16 elements are made in pairs, and nothing is made by the instructions that convert bytes,
// of which a multiprocessor does 16 lanes a clock.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <cstring>

#include "clo/row_format.h"
#include "cuda/attend/ptx.cuh"

namespace clo::cuda {

// Four elements, without their scale. Integers have their place in the mantissa of 2^23, less the sign's bit.
template <RowFormat kFormat>
__device__ __forceinline__ float4 elements(uint32_t codes) {
  if constexpr (kFormat == RowFormat::kInt8) {
    const uint32_t shifted = codes ^ 0x80808080u;
    const auto number = [&](int selector) {
      return __uint_as_float(__byte_perm(shifted, 0x4b000000u, selector)) - 8388736.0f;
    };
    return make_float4(number(0x7440), number(0x7441), number(0x7442), number(0x7443));
  } else {
    const float2 low = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<uint16_t>(codes), __NV_E4M3)));
    const float2 high =
        __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<uint16_t>(codes >> 16), __NV_E4M3)));
    return make_float4(low.x, low.y, high.x, high.y);
  }
}

__device__ __forceinline__ __nv_bfloat162 bfloat_pair(uint32_t bits) {
  __nv_bfloat162 pair;
  memcpy(&pair, &bits, sizeof pair);
  return pair;
}

__device__ __forceinline__ uint32_t bits_of(__nv_bfloat162 pair) {
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}

// Elements 0 and 2 or, kOdd, 1 and 3 of four times their scales, the halves of a word. Every element is a bfloat16, every
// product has at most 15 places and is rounded once.
template <RowFormat kFormat, bool kOdd>
__device__ __forceinline__ uint32_t scaled_pair(uint32_t codes, uint32_t scales) {
  const __nv_bfloat162 scale = bfloat_pair(scales);
  if constexpr (kFormat == RowFormat::kInt8) {
    // A byte in the lowest bits is 2^-133 of its number, whether that is subnormal or not: of the element plus 128 here.
    const uint32_t x = __byte_perm(codes ^ 0x80808080u, 0, kOdd ? 0x4341 : 0x4240);
    const __nv_bfloat162 number = __hmul2(bfloat_pair(x), bfloat_pair(0x7f007f00u));  // 2^127
    return bits_of(__hfma2(number, __hmul2(scale, bfloat_pair(0x42804280u)), __hmul2(scale, bfloat_pair(0xc300c300u))));
  } else {
    // Exponent and mantissa in their places are 2^-120 of the number, in the same way.
    const uint32_t magnitude = (kOdd ? codes >> 4 : codes << 4) & 0x07f007f0u, sign = kOdd ? codes : codes << 8;
    return bits_of(__hmul2(__hmul2(bfloat_pair(magnitude | (sign & 0x80008000u)), bfloat_pair(0x7b807b80u)), scale));
  }
}

// Four elements times their scale, a bfloat16.
template <RowFormat kFormat>
__device__ __forceinline__ uint2 widened(const __nv_bfloat16*, uint32_t codes, uint32_t scale) {
  const uint32_t even = scaled_pair<kFormat, false>(codes, scale * 0x10001u);
  const uint32_t odd = scaled_pair<kFormat, true>(codes, scale * 0x10001u);
  return make_uint2(__byte_perm(even, odd, 0x5410), __byte_perm(even, odd, 0x7632));
}

template <RowFormat kFormat>
__device__ __forceinline__ uint4 widened(const float*, uint32_t codes, uint32_t scale) {
  const float4 x = elements<kFormat>(codes);
  const float factor = __uint_as_float(scale << 16);
  return make_uint4(__float_as_uint(x.x * factor), __float_as_uint(x.y * factor), __float_as_uint(x.z * factor),
                    __float_as_uint(x.w * factor));
}

// By way of floats: scales may be beyond float16.
template <RowFormat kFormat>
__device__ __forceinline__ uint2 widened(const __half* type, uint32_t codes, uint32_t scale) {
  const float4 x = elements<kFormat>(codes);
  const float factor = __uint_as_float(scale << 16);
  return make_uint2(pack(type, x.x * factor, x.y * factor), pack(type, x.z * factor, x.w * factor));
}

// A unit of quantized rows lies at the end of its stage, one row after the other. Rows are written in their order, wide
// ones over narrow ones that have been read: the end of row r, wide, is never behind the end of row r, narrow.
//
// A lane makes whole chunks of 16 wide bytes: what a warp reads and writes at once is contiguous but for the swizzle, so
// that no bank is asked twice.
template <class Tile>
class QuantizedUnit {
  using T = typename Tile::Element;
  static constexpr int D = Tile::kDim, kRows = Tile::kUnitRows, kGroup = D / static_cast<int>(kScaleGroups);
  static constexpr int kWords = 4 / static_cast<int>(sizeof(T));  // of codes in a chunk: 1 or 2
  static constexpr int kChunks = 2 * D / 4 / kWords;              // of a row
  static constexpr int kAtOnce = kChunks <= 32 ? 8 : 4, kEach = kAtOnce * kChunks / 32;  // rows, and a lane's chunks
  static constexpr int kScales = kGroup % (4 * kWords) == 0 ? 1 : kWords;                // of a chunk
  static_assert(kAtOnce * kChunks % 32 == 0 && kRows % kAtOnce == 0, "every lane widens as many chunks");
  static_assert(kGroup % 4 == 0, "a word is of one group");

 public:
  static constexpr int kRowBytes = 2 * D + kScaleBytes, kBegin = kRows * (Tile::kStride - kRowBytes);
  static_assert(kRowBytes <= Tile::kStride, "wide rows are longer");
  static_assert(kBegin % 16 == 0 && kRowBytes % 16 == 0, "copies are of 16 bytes");

  // By one warp, whose copies to the stage have arrived.
  __device__ static void widen_rows(unsigned char* stage, RowFormat format, int lane) {
    if (format == RowFormat::kInt8) widen<RowFormat::kInt8>(stage, lane);
    else widen<RowFormat::kFp8>(stage, lane);
  }

 private:
  template <RowFormat kFormat>
  __device__ static void widen(unsigned char* stage, int lane) {
#pragma unroll 1
    for (int first = 0; first < kRows; first += kAtOnce) {
      const unsigned char* const narrow = stage + kBegin + first * kRowBytes;
      uint32_t codes[kEach][kWords];
      uint16_t scales[kEach][kScales];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int row = (i * 32 + lane) / kChunks, word = (i * 32 + lane) % kChunks * kWords;
        memcpy(codes[i], __builtin_assume_aligned(narrow + row * kRowBytes + 4 * word, 4 * kWords), 4 * kWords);
        const auto* of_row = reinterpret_cast<const uint16_t*>(narrow + row * kRowBytes + 2 * D);
#pragma unroll
        for (int j = 0; j < kScales; ++j) scales[i][j] = of_row[4 * (word + j) / kGroup];
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int row = (i * 32 + lane) / kChunks, chunk = (i * 32 + lane) % kChunks;
        // Rows come by whole numbers of eights or fours, of which the swizzle takes no notice.
        const int place = chunk ^ Tile::swizzle(kAtOnce % 8 == 0 ? row : first + row);
        uint4 wide;
        const T* const type = nullptr;
        if constexpr (kWords == 1) {
          wide = widened<kFormat>(type, codes[i][0], scales[i][0]);
        } else {
          const uint2 low = widened<kFormat>(type, codes[i][0], scales[i][0]);
          const uint2 high = widened<kFormat>(type, codes[i][1], scales[i][kScales - 1]);
          wide = make_uint4(low.x, low.y, high.x, high.y);
        }
        *reinterpret_cast<uint4*>(stage + (first + row) * Tile::kStride + place * 16) = wide;
      }
      __syncwarp();
    }
  }
};

}  // namespace clo::cuda
