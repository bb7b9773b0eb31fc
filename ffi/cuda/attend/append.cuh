// The new token's row and code, written by one warp of each block beside those that attend.
#pragma once

#include <cuda_fp16.h>

#include "cuda/attend/args.cuh"
#include "cuda/numeric.cuh"

namespace clo::cuda {

// Key and value to the row where attention and later steps look for them.
template <typename T, int D>
__device__ void append_rows(const AttendArgs& a, int block, int lane) {
  constexpr int kHalf = D * sizeof(T), kChunks = kHalf / 16;
  const int heads = a.batch * a.kv_heads();
#pragma unroll 1
  for (int i = block; i < heads; i += a.blocks) {
    const int b = i / a.kv_heads(), h = i % a.kv_heads(), p = a.position[b];
    if (!a.valid(b)) continue;
    char* row = nullptr;
    if (h < a.offloaded) {
      const int index = p < a.sink ? p : a.sink + (p - a.sink) % (a.tail_rows - a.sink);
      row = a.tail + (static_cast<size_t>(b * a.offloaded + h) * a.tail_rows + index) * 2 * kHalf;
    } else {
      row = a.resident_rows +
            (static_cast<size_t>(b * a.resident + h - a.offloaded) * a.max_tokens + p) * 2 * kHalf;
    }
    const uint4* key = static_cast<const uint4*>(a.key) + static_cast<size_t>(i) * kChunks;
    const uint4* value = static_cast<const uint4*>(a.value) + static_cast<size_t>(i) * kChunks;
#pragma unroll 2
    for (int c = lane; c < 2 * kChunks; c += 32)
      reinterpret_cast<uint4*>(row)[c] = c < kChunks ? key[c] : value[c - kChunks];
  }
}

// 32 bits of a head's code at a time, one bit a lane: a chain of multiply-adds in the order of the dimensions, as on the
// CPU. The factor needs the magnitudes of all bits; the merging kernel makes it.
template <typename T, int D>
__device__ void append_codes(const AttendArgs& a, int block, int lane) {
  constexpr int kPart = D % 32 == 0 ? 32 : 16;
  const int tasks = a.batch * a.offloaded * a.words, bits = a.words * 32;
#pragma unroll 1
  for (int task = block; task < tasks; task += a.blocks) {
    const int head = task / a.words, word = task % a.words, b = head / a.offloaded, h = head % a.offloaded;
    if (!a.valid(b)) continue;
    const T* key = static_cast<const T*>(a.key) + (static_cast<size_t>(b) * a.kv_heads() + h) * D;
    const float* mean = a.mean + static_cast<size_t>(head) * D;
    const float* weights = a.weights + static_cast<size_t>(h) * D * bits + word * 32 + lane;
    float projection = 0;
#pragma unroll 1  // the code of this loop is fetched beside that of the warps that attend
    for (int first = 0; first < D; first += kPart) {
      const float x = lane < kPart ? widen(key[first + lane]) - mean[first + lane] : 0.0f;
      float w[kPart];
#pragma unroll
      for (int i = 0; i < kPart; ++i) w[i] = weights[(first + i) * bits];
#pragma unroll
      for (int i = 0; i < kPart; ++i) projection = fmaf(__shfl_sync(~0u, x, i), w[i], projection);
    }
    const unsigned code = __ballot_sync(~0u, projection > 0);
    float magnitude = fabsf(projection);
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) magnitude += __shfl_xor_sync(~0u, magnitude, o);
    if (lane == 0) {
      a.codes[(static_cast<size_t>(head) * a.max_tokens + a.position[b]) * a.words + word] = code;
      a.magnitudes[task] = magnitude;
    }
  }
}

// The estimator's factor: 0 when there is no finite projection to divide by, and never infinite.
__device__ inline uint16_t code_factor(float squares, float magnitudes) {
  const float ratio = squares / magnitudes;
  if (!(magnitudes > 0 && ratio >= 0)) return 0;
  return ratio < 65504.0f ? __half_as_ushort(__float2half_rn(ratio)) : 0x7bff;
}

}  // namespace clo::cuda
