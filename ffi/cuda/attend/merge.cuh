// The second kernel: the fragments of each head become its output and log-sum-exp; the new code gets its factor.
#pragma once

#include "clo/softmax_state.h"
#include "cuda/attend/append.cuh"
#include "cuda/attend/fragments.cuh"
#include "cuda/attend/plan.cuh"
#include "cuda/attend/ptx.cuh"
#include "cuda/attend/source.cuh"
#include "cuda/flags.cuh"

namespace clo::cuda {

constexpr int kMergeThreads = 256;
static_assert(kMaxBlocks <= kMergeThreads, "a thread for each fragment of a head");

// A partial result of four dimensions, in registers.
struct Partial {
  float2 state = make_float2(-INFINITY, 0);  // max, sum
  float4 acc = make_float4(0, 0, 0, 0);
};

// Merges N of them. Equal maxima have weight 1, which also covers empty states.
template <int N>
__device__ Partial merged(const Partial (&parts)[N]) {
  Partial total;
#pragma unroll
  for (int j = 0; j < N; ++j) total.state.x = fmaxf(total.state.x, parts[j].state.x);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float w = parts[j].state.x == total.state.x ? 1.0f : power_of_two(parts[j].state.x - total.state.x);
    total.state.y += parts[j].state.y * w;
    total.acc.x += parts[j].acc.x * w;
    total.acc.y += parts[j].acc.y * w;
    total.acc.z += parts[j].acc.z * w;
    total.acc.w += parts[j].acc.w * w;
  }
  return total;
}

template <typename T, int D>
__device__ float squared_distance(const AttendArgs& a, int b, int h, int lane) {
  const T* key = static_cast<const T*>(a.key) + (static_cast<size_t>(b) * a.kv_heads() + h) * D;
  const float* mean = a.mean + static_cast<size_t>(b * a.offloaded + h) * D;
  float squares = 0;
#pragma unroll
  for (int d = lane; d < D; d += 32) {
    const float x = widen(key[d]) - mean[d];
    squares += x * x;
  }
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o);
  return squares;
}

__device__ inline void append_factor(const AttendArgs& a, int b, int h, float squares, int lane) {
  const int head = b * a.offloaded + h;
  float magnitudes = 0;
#pragma unroll 1
  for (int w = lane; w < a.words; w += 32) magnitudes += __ldcg(a.magnitudes + static_cast<size_t>(head) * a.words + w);
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) magnitudes += __shfl_xor_sync(~0u, magnitudes, o);
  if (lane == 0) a.factors[static_cast<size_t>(head) * a.max_tokens + a.position[b]] = code_factor(squares, magnitudes);
}

__device__ inline bool is_missing(const Partial& p) {
  return is_missing(p.state.x) || is_missing(p.state.y) || is_missing(p.acc.x) || is_missing(p.acc.y) ||
         is_missing(p.acc.z) || is_missing(p.acc.w);
}

// One block for each query head. The last warp, with the least to merge, sees to the factor.
template <class Tile>
__global__ void __launch_bounds__(kMergeThreads) merge_fragments(const __grid_constant__ AttendArgs a) {
  using T = typename Tile::Element;
  constexpr int D = Tile::kDim, kVectors = D / 4, kGroups = kMergeThreads / kVectors, kBatch = 4;
  __shared__ int s_first, s_count;
  __shared__ bool s_known;
  __shared__ float2 s_state[kMergeThreads];
  __shared__ float4 s_acc[kMergeThreads];
  const int tid = threadIdx.x, lane = tid & 31, g = blockIdx.x % a.group, head = blockIdx.x / a.group;
  const int b = head / a.kv_heads(), h = head % a.kv_heads(), line = h < a.offloaded ? 1 : 0;
  const int i = line == 1 ? b * a.offloaded + h : b * a.resident + h - a.offloaded;

  // The fragments' slots follow from the plan, which is made again while the rows are still being read: the kernel that
  // reads them lets this one start when all kernels in front of both are over, so that the operands are settled, and has
  // cleared the fragments by then.
  launch_dependents();
  if (tid < 32) {
    const int32_t* slot_counts = line == 1 ? find_source(a, SourceLoads(a, lane), true).slot_counts : nullptr;
    if (lane == 0) s_known = line == 0 || slot_counts != nullptr;
    int before = 0, units = 0, own = 0;
#pragma unroll 1
    for (int j = lane; j < a.heads(line); j += 32) {
      const int n = units_of<Tile::kUnitRows>(rows_of(a, line, j, lengths_of(a, line, j), slot_counts));
      units += n;
      if (j < i) before += n;
      if (j == i) own = n;
    }
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
      before += __shfl_xor_sync(~0u, before, o);
      units += __shfl_xor_sync(~0u, units, o);
      own += __shfl_xor_sync(~0u, own, o);
    }
    if (lane == 0) {
      s_first = s_count = 0;
      if (own > 0) {
        const Split split(units, a.blocks, Tile::kWarps);
        s_first = split.owner(before);
        s_count = split.owner(before + own - 1) - s_first + 1;
      }
    }
  }
  const bool valid = a.valid(b), factor = g == 0 && line == 1 && a.words > 0 && valid && tid >= kMergeThreads - 32;
  const float squares = factor ? squared_distance<T, D>(a, b, h, lane) : 0.0f;
  __syncthreads();
  const bool known = valid && s_known;
  const size_t slot = a.first_slot(line) + s_first + i;

  const int v = tid % kVectors, part = tid / kVectors;
  const float2* states = a.state + slot * a.group + g;
  const float4* accs = reinterpret_cast<const float4*>(a.acc + (slot * a.group + g) * D) + v;
  // The first of two passes is for nothing: while rows are still being read, it brings the code and the translations of
  // the addresses near, which would otherwise be late when all others have ended.
  Polling polling;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    if (pass == 1) {
      // One word a fragment is asked for until it comes: asking for all of them would be in the way of the rows. The
      // others of a fragment are looked at one by one after that, for nothing says in which order they come.
      if (tid < s_count)
        while (is_missing(load_relaxed(states + tid * a.group).x) && polling.wait()) {
        }
      __syncthreads();
    }
    Partial total;
#pragma unroll 1
    for (int first = part; part < kGroups && first < s_count; first += kGroups * kBatch) {
      Partial parts[kBatch + 1];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int f = first + j * kGroups;
        if (f < s_count) {
          parts[j].state = load_relaxed(states + f * a.group);
          parts[j].acc = load_relaxed(accs + static_cast<size_t>(f) * a.group * kVectors);
        }
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int f = first + j * kGroups;
        while (pass == 1 && is_missing(parts[j]) && polling.wait()) {
          parts[j].state = load_relaxed(states + f * a.group);
          parts[j].acc = load_relaxed(accs + static_cast<size_t>(f) * a.group * kVectors);
        }
      }
      parts[kBatch] = total;
      total = merged(parts);
    }
    if (part < kGroups) {
      s_state[tid] = total.state;
      s_acc[tid] = total.acc;
    }
    __syncthreads();
    if (part == 0) {
      Partial parts[kGroups];
#pragma unroll
      for (int j = 0; j < kGroups; ++j) parts[j] = {s_state[j * kVectors + v], s_acc[j * kVectors + v]};
      total = merged(parts);
      float norm = total.state.y == 0 ? 0.0f : 1.0f / total.state.y;  // no rows: zeros
      if (!known) norm = NAN;
      const float4 x = make_float4(total.acc.x * norm, total.acc.y * norm, total.acc.z * norm, total.acc.w * norm);
      const size_t query = static_cast<size_t>(head) * a.group + g;
      if (pass == 1) {
        store(static_cast<T*>(a.out) + query * D + v * 4, x);
        if (v == 0) a.lse[query] = known ? (total.state.x + log2f(total.state.y)) * kLn2 : NAN;
      }
    }
    if (pass == 0) __syncthreads();
  }
  // Who comes after this kernel counts on the other one's end, too.
  wait_for_previous_kernel();
  if (factor) append_factor(a, b, h, squares, lane);
  if (!known && tid == 0 && a.engine.error != nullptr)
    fail(a.engine.error, Failure::kBadOperand, a.engine.layer.index == nullptr ? 0 : *a.engine.layer.index, 0);
}

}  // namespace clo::cuda
