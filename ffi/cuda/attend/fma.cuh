// One warp's attention over units of float rows, by plain multiply-adds: 8 rows against up to 8 query heads.
//
// Scores: four lanes share a row, each takes every fourth chunk of 16 bytes. Values: a lane owns one or two chunks.
#pragma once

#include "cuda/attend/ptx.cuh"

namespace clo::cuda {

template <int D>
class FmaTile {
 public:
  using Element = float;
  static constexpr int kDim = D, kUnitRows = 8, kRowBytes = 8 * D;
  static constexpr int kStride = kRowBytes;
  static constexpr int kWarps = D > 128 ? 4 : 8, kStages = D > 96 ? 2 : D > 64 ? 3 : 4;
  static constexpr int kScratchBytes = kUnitRows * 8 * 4;
  static_assert(kStride % 128 == 0, "rows begin at the first bank");

  // Chunk c of a row is kept at c ^ swizzle(row): four chunks of two neighbouring rows are in different banks.
  __device__ static int swizzle(int row) { return (row & 1) << 2; }

  __device__ FmaTile(int group, float scale_log2, int lane, float* scratch)
      : group_(group), scale_(scale_log2), lane_(lane), row_(lane >> 2), part_(lane & 3), weights_(scratch) {}

  __device__ void begin(const Element* query) {
    query_ = query;
#pragma unroll
    for (int g = 0; g < 8; ++g) {
      max_[g] = -INFINITY;
      sum_[g] = 0;
#pragma unroll
      for (int c = 0; c < kOwned; ++c) acc_[g][c] = make_float4(0, 0, 0, 0);
    }
  }

  __device__ void add(uint32_t stage, int n) {
    float s[8] = {};
#pragma unroll 1
    for (int i = 0; i < D / 16; ++i) {
      const int chunk = 4 * i + part_;
      const float4 k = load(stage + row_ * kStride + ((chunk ^ swizzle(row_)) << 4));
#pragma unroll
      for (int g = 0; g < 8; ++g) {
        if (g < group_) {
          const float4 q = reinterpret_cast<const float4*>(query_ + g * D)[chunk];
          s[g] += q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w;
        }
      }
    }
#pragma unroll
    for (int g = 0; g < 8; ++g) {
      if (g < group_) {
        float x = s[g] + __shfl_xor_sync(~0u, s[g], 1);
        x = (x + __shfl_xor_sync(~0u, x, 2)) * scale_;
        if (row_ >= n) x = -INFINITY;
        float largest = x;
#pragma unroll
        for (int o = 4; o < 32; o <<= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, o));
        if (largest > max_[g]) {  // the same in all lanes
          const float w = power_of_two(max_[g] - largest);
          max_[g] = largest;
          sum_[g] *= w;
#pragma unroll
          for (int c = 0; c < kOwned; ++c) {
            acc_[g][c].x *= w;
            acc_[g][c].y *= w;
            acc_[g][c].z *= w;
            acc_[g][c].w *= w;
          }
        }
        x = power_of_two(x - max_[g]);
        sum_[g] += x;
        if (part_ == 0) weights_[row_ * 8 + g] = x;
      }
    }
    __syncwarp();
#pragma unroll
    for (int c = 0; c < kOwned; ++c) {
      const int chunk = c * 32 + lane_;
      if (chunk < D / 4) {
#pragma unroll 4
        for (int r = 0; r < kUnitRows; ++r) {
          const float4 v = load(stage + r * kStride + (((D / 4 + chunk) ^ swizzle(r)) << 4));
#pragma unroll
          for (int g = 0; g < 8; ++g) {
            if (g < group_) {
              const float w = weights_[r * 8 + g];
              acc_[g][c].x += w * v.x;
              acc_[g][c].y += w * v.y;
              acc_[g][c].z += w * v.z;
              acc_[g][c].w += w * v.w;
            }
          }
        }
      }
    }
  }

  __device__ void finish(float* acc, float2* state) {
#pragma unroll
    for (int g = 0; g < 8; ++g) {
      if (g < group_) {
        float sum = sum_[g];
#pragma unroll
        for (int o = 4; o < 32; o <<= 1) sum += __shfl_xor_sync(~0u, sum, o);
        if (lane_ == 0) state[g] = make_float2(max_[g], sum);
#pragma unroll
        for (int c = 0; c < kOwned; ++c) {
          const int chunk = c * 32 + lane_;
          if (chunk < D / 4) *reinterpret_cast<float4*>(acc + g * (D + 4) + chunk * 4) = acc_[g][c];
        }
      }
    }
  }

 private:
  static constexpr int kOwned = (D / 4 + 31) / 32;

  __device__ static float4 load(uint32_t from) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(from) : "memory");
    return v;
  }

  const int group_;
  const float scale_;
  const int lane_, row_, part_;
  float* const weights_;  // [8 rows, 8 query heads]
  const float* query_;
  float4 acc_[8][kOwned];
  float max_[8], sum_[8];
};

}  // namespace clo::cuda
