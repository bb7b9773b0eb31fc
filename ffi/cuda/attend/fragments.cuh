// The fragments of both lines in the workspace: what the reading kernel leaves and the merging one takes.
//
// Each of their words says itself whether it is there, so that the merging kernel, which runs beside the reading one, need
// not wait for that to be over: before it lets the other one start, each block fills its fragments with a NaN that
// arithmetic never makes. A word that never comes stays that NaN, which makes the head's results NaN, too.
#pragma once

#include <cstdint>

#include "cuda/attend/plan.cuh"
#include "cuda/attend/ptx.cuh"

namespace clo::cuda {

__device__ inline float missing() { return __uint_as_float(~0u); }
__device__ inline bool is_missing(float x) { return __float_as_uint(x) == ~0u; }
__device__ inline float present(float x) { return is_missing(x) ? NAN : x; }

// How the merging kernel waits for words, a thread with one of these for all of its own. It asks for some 50 ms, longer
// than a GPU takes to read all of its memory, then waits for the reading kernel's end, whose own waits are bounded:
// nothing more comes after that. A word that is missing then is a fault, which must not stop the device.
class Polling {
 public:
  // Called when a word is not there; false: give up.
  __device__ bool wait() {
    if (left_ < 0) return false;
    if (left_-- > 0) __nanosleep(32);
    else wait_for_previous_kernel();
    return true;
  }

 private:
  int left_ = 1 << 17;
};

// Every fragment that the block will write is missing from now on, by one warp. shares: of the block in both lines.
template <int D>
__device__ void clear_fragments(const AttendArgs& a, const Plan& plan, const Share (&shares)[2], int block, int lane) {
  const float4 nothing = make_float4(missing(), missing(), missing(), missing());
#pragma unroll 1
  for (int line = 0; line < 2; ++line) {
    const int* const starts = plan.before(line);
    const int end = shares[line].begin + shares[line].count;
#pragma unroll 1
    for (int head = shares[line].head; shares[line].count > 0 && head < a.heads(line) && starts[head] < end; ++head) {
      const size_t at = (a.first_slot(line) + place_in_line(line, block, a.blocks) + head) * a.group;
#pragma unroll 1
      for (int v = lane; v < a.group * D / 4; v += 32)
        store_relaxed(reinterpret_cast<float4*>(a.acc + at * D) + v, nothing);
      if (lane < a.group) store_relaxed(a.state + at + lane, make_float2(missing(), missing()));
    }
  }
  __threadfence();
  __syncwarp();
}

// The partial results of one head that a block's warps have left in shared memory become the block's fragment.
template <class Tile>
__device__ void write_fragment(const AttendArgs& a, size_t slot, const float* acc, const float2* state, int tid) {
  constexpr int D = Tile::kDim, W = Tile::kWarps, kVectors = D / 4;
#pragma unroll 1
  for (int v = tid; v < a.group * kVectors; v += W * 32) {
    const int q = v / kVectors, d = v % kVectors * 4;
    float max = -INFINITY, sum = 0;
    float4 x = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < W; ++w) max = fmaxf(max, state[w * a.group + q].x);
#pragma unroll
    for (int w = 0; w < W; ++w) {
      const float2 s = state[w * a.group + q];
      const float weight = s.x == max ? 1.0f : power_of_two(s.x - max);
      const float4 y = *reinterpret_cast<const float4*>(acc + (w * a.group + q) * (D + 4) + d);
      sum += weight * s.y;
      x.x += weight * y.x;
      x.y += weight * y.y;
      x.z += weight * y.z;
      x.w += weight * y.w;
    }
    const size_t at = slot * a.group + q;
    store_relaxed(reinterpret_cast<float4*>(a.acc + at * D + d),
                  make_float4(present(x.x), present(x.y), present(x.z), present(x.w)));
    if (d == 0) store_relaxed(a.state + at, make_float2(present(max), present(sum)));
  }
}

}  // namespace clo::cuda
