// One warp's attention over units of 16-bit rows, on tensor cores: 16 rows against up to 8 query heads.
//
// Scores are Sᵀ = K·Qᵀ and the result Oᵀ += Vᵀ·Pᵀ, so that rows lie on the long side of the instruction and the group is
// padded to 8 only. A thread holds queries 2·(lane % 4) and the next, of rows or dimensions lane / 4 and 8 more.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/attend/ptx.cuh"

namespace clo::cuda {

template <int D, typename T>
class MmaTile {
 public:
  using Element = T;
  static constexpr int kDim = D, kUnitRows = 16, kRowBytes = 4 * D;
  static constexpr int kStride = (kRowBytes + 127) / 128 * 128;
  static constexpr int kWarps = D > 128 ? 4 : 8, kStages = D > 96 ? 2 : D > 64 ? 3 : 4;
  static constexpr int kScratchBytes = 0;

  // Chunk c of a row is kept at c ^ swizzle(row): 8 rows of one column are in different banks.
  __device__ static int swizzle(int row) { return row & 7; }

  __device__ MmaTile(int group, float scale_log2, int lane, float*)
      : group_(group), scale_(scale_log2), g_(lane >> 2), t_(lane & 3),
        keys_((lane & 15) * kStride + (((lane >> 4) ^ swizzle(lane)) << 4)),
        values_(((lane & 7) + ((lane >> 4) << 3)) * kStride + ((((lane >> 3) & 1) ^ swizzle(lane)) << 4)) {}

  // Begins a head: its queries [G, D].
  __device__ void begin(const Element* query) {
    max0_ = max1_ = -INFINITY;
    sum0_ = sum1_ = 0;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      query_[k][0] = query_[k][1] = 0;
      if (g_ < group_) {
        const uint32_t* q = reinterpret_cast<const uint32_t*>(query + g_ * D + k * 16);
        query_[k][0] = q[t_];
        query_[k][1] = q[t_ + 4];
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) acc_[k][j] = 0;
    }
  }

  // n of the 16 rows in the stage are valid, the others zero.
  __device__ void add(uint32_t stage, int n) {
    float s[2][4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t a[4];
      load_matrix(a, column(stage + keys_, k * 32));
      multiply(kType, s[k & 1], a, query_[k][0], query_[k][1]);
    }
    uint32_t b0, b1;
    weigh(s, n, &b0, &b1);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t a[4];
      load_matrix_transposed(a, column(stage + values_, kRowBytes / 2 + k * 32));
      multiply(kType, acc_[k], a, b0, b1);
    }
  }

  // Leaves acc [G, D + 4] and (max, sum) [G] in shared memory.
  __device__ void finish(float* acc, float2* state) { finish(acc, state, g_, g_ + 8); }

 protected:
  // The sum of both parts of the scores becomes weights, the second operand of what the values are multiplied with.
  __device__ void weigh(const float (&s)[2][4], int n, uint32_t* b0, uint32_t* b1) {
    float x0 = (s[0][0] + s[1][0]) * scale_, x1 = (s[0][1] + s[1][1]) * scale_;
    float x2 = (s[0][2] + s[1][2]) * scale_, x3 = (s[0][3] + s[1][3]) * scale_;
    if (n < kUnitRows) {
      if (g_ >= n) x0 = x1 = -INFINITY;
      if (g_ + 8 >= n) x2 = x3 = -INFINITY;
    }
    float n0 = fmaxf(x0, x2), n1 = fmaxf(x1, x3);
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) {
      n0 = fmaxf(n0, __shfl_xor_sync(~0u, n0, o));
      n1 = fmaxf(n1, __shfl_xor_sync(~0u, n1, o));
    }
    if (__any_sync(~0u, n0 > max0_ || n1 > max1_)) {  // rare after the first units
      n0 = fmaxf(n0, max0_);
      n1 = fmaxf(n1, max1_);
      const float w0 = power_of_two(max0_ - n0), w1 = power_of_two(max1_ - n1);
      max0_ = n0;
      max1_ = n1;
      sum0_ *= w0;
      sum1_ *= w1;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        acc_[k][0] *= w0;
        acc_[k][1] *= w1;
        acc_[k][2] *= w0;
        acc_[k][3] *= w1;
      }
    }
    x0 = power_of_two(x0 - (max0_ - kLift));
    x1 = power_of_two(x1 - (max1_ - kLift));
    x2 = power_of_two(x2 - (max0_ - kLift));
    x3 = power_of_two(x3 - (max1_ - kLift));
    sum0_ += x0 + x2;
    sum1_ += x1 + x3;
    *b0 = transpose_matrix(pack(kType, x0, x1));
    *b1 = transpose_matrix(pack(kType, x2, x3));
  }

  // first, second: the dimensions of every 16 that this thread has.
  __device__ void finish(float* acc, float2* state, int first, int second) {
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) {
      sum0_ += __shfl_xor_sync(~0u, sum0_, o);
      sum1_ += __shfl_xor_sync(~0u, sum1_, o);
    }
    const int q = 2 * t_;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      float* at = acc + q * (D + 4) + k * 16 + first;
      if (q < group_) {
        at[0] = acc_[k][0];
        at[second - first] = acc_[k][2];
      }
      if (q + 1 < group_) {
        at[D + 4] = acc_[k][1];
        at[D + 4 + second - first] = acc_[k][3];
      }
    }
    if (g_ == 0 && q < group_) state[q] = make_float2(max0_ - kLift, sum0_);
    if (g_ == 0 && q + 1 < group_) state[q + 1] = make_float2(max1_ - kLift, sum1_);
  }

  static constexpr int kSteps = D / 16;
  static constexpr const T* kType = nullptr;
  // Weights are powers of two up to 2^kLift: those of float16 would be subnormal below 2^-14.
  static constexpr float kLift = std::is_same_v<T, __half> ? 10.0f : 0.0f;

  // A lane's address moved by an even number of chunks, in rows that begin at multiples of 128 bytes.
  __device__ static uint32_t column(uint32_t address, int bytes) { return (address ^ (bytes & 127)) + (bytes & ~127); }

  const int group_;
  const float scale_;
  const int g_, t_;
  const uint32_t keys_, values_;  // this lane's addresses inside a stage
  uint32_t query_[kSteps][2];
  float acc_[kSteps][4], max0_, max1_, sum0_, sum1_;
};

}  // namespace clo::cuda
