// What benches and tests launch beside the kernels under test: a plain read as control, random data, the wait of a
// program's attention, and what serves a post.
#pragma once

#include <cstdint>

#include "cuda/flags.cuh"
#include "cuda/hand_over.h"
#include "cuda/kernels.h"
#include "cuda/pull.h"

namespace clo::test {

inline __global__ void __launch_bounds__(1024) read_kernel(const uint4* from, size_t count, uint32_t* sink) {
  uint32_t x = 0;
  for (size_t i = blockIdx.x * 1024 + threadIdx.x; i < count; i += static_cast<size_t>(gridDim.x) * 4096) {
    uint4 v[4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const size_t at = i + static_cast<size_t>(j) * gridDim.x * 1024;
      if (at < count) v[j] = __ldcs(from + at);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (x == 0x12345) *sink = x;
}

inline __global__ void fill_kernel(uint32_t* to, size_t count, uint32_t seed) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    uint64_t x = (i + 1 + (static_cast<uint64_t>(seed) << 40)) * 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    to[i] = static_cast<uint32_t>((x ^ (x >> 27)) >> 16);
  }
}

inline __global__ void wait_kernel(cuda::EngineRef engine) {
  cuda::wait_ready(engine.flags + *engine.layer.index, engine.timeout_ns, engine.error);
}

// What a program that posts by post_request goes on with: prefetch itself needs it for engines served by threads only.
inline cudaError_t follow_post(const cuda::EngineRef& engine, cudaStream_t stream) {
  return engine.served_by_threads ? cuda::hand_over(engine, stream) : cuda::serve_posted(engine, stream);
}

}  // namespace clo::test
