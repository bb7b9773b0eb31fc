// What the tests of transfers share: engines of the backend under test, host rows with a pattern, and a program of
// kernels that post and wait as a decode step does.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/check.h"
#include "cuda/flags.cuh"
#include "cuda/hand_over.h"
#include "host/engine.h"
#include "tests/check.h"
#include "tests/cuda/program_kernels.cuh"

namespace clo::test {

inline std::string backend;    // under test
inline int64_t threads = 3;
inline bool serialised = false;  // kernels of two streams never run at the same time: a sanitizer's doing

inline bool by_threads() { return backend != "pull"; }

struct Shape {
  std::vector<int64_t> kv_heads;
  int64_t batch, tokens, slots, head_dim;
  DType dtype;
};

inline EngineConfig config_of(const Shape& s, double timeout_s = 20.0) {
  EngineConfig c;
  c.kv_heads = s.kv_heads;
  c.batch = s.batch;
  c.max_tokens = s.tokens;
  c.num_slots = s.slots;
  c.head_dim = s.head_dim;
  c.dtype = s.dtype;
  c.timeout_s = timeout_s;
  c.backend = backend;
  c.threads = threads;
  return c;
}

// Every 32-bit word of the host rows is another value.
__host__ __device__ inline uint32_t pattern(uint32_t layer, uint64_t word) {
  uint64_t x = (word + 1) * 0x9e3779b97f4a7c15ull + layer;
  x = (x ^ x >> 31) * 0xbf58476d1ce4e5b9ull;
  return static_cast<uint32_t>(x >> 32);
}

inline uint64_t words(const LayerView& v, int64_t rows) { return static_cast<uint64_t>(rows * row_bytes(v) / 4); }

inline void fill_host(const Engine& engine, int64_t layers) {
  for (int64_t i = 0; i < layers; ++i) {
    const LayerView v = engine.layer(i);
    auto* rows = static_cast<uint32_t*>(v.host_rows);
    for (uint64_t w = 0; w < words(v, v.batch * v.kv_heads * v.max_tokens); ++w)
      rows[w] = pattern(static_cast<uint32_t>(i), w);
  }
}

__device__ inline uint32_t mix(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

// As a prefetch: a request that depends on the step, then the post.
static __global__ void produce(cuda::EngineRef engine, uint32_t step) {
  const int32_t layer = *engine.layer.index;
  const LayerView& v = engine.layer.views[layer];
  const int64_t heads = v.batch * v.kv_heads, C = v.num_slots;
  for (int64_t i = threadIdx.x; i < heads * C; i += blockDim.x) {
    const uint32_t h = static_cast<uint32_t>(i / C), j = static_cast<uint32_t>(i % C);
    const uint32_t count = mix(step * 977u + static_cast<uint32_t>(layer) * 31u + h) % static_cast<uint32_t>(C + 1);
    if (j == 0) v.request.counts[h] = static_cast<int32_t>(h % 3 == step % 3 ? 0 : count);
    v.request.tokens[i] = static_cast<int32_t>(mix(step * 131u + static_cast<uint32_t>(i)) %
                                               static_cast<uint32_t>(v.max_tokens));
    v.request.slots[i] = static_cast<int32_t>((j * 7u + step) % static_cast<uint32_t>(C));  // C is no multiple of 7
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  cuda::post(engine.flags + layer);
}

// As attention: waits, then compares what the request asked for with the rows that are there.
static __global__ void consume(cuda::EngineRef engine, unsigned long long* wrong) {
  __shared__ bool ready;
  const int32_t layer = *engine.layer.index;
  if (threadIdx.x == 0) ready = cuda::wait_ready(engine.flags + layer, engine.timeout_ns, engine.error);
  __syncthreads();
  if (!ready) return;
  const LayerView& v = engine.layer.views[layer];
  const int64_t heads = v.batch * v.kv_heads, C = v.num_slots, row_words = row_bytes(v) / 4;
  const auto* rows = static_cast<const uint32_t*>(v.selected_rows);
  for (int64_t i = threadIdx.x; i < heads * C; i += blockDim.x) {
    const int64_t h = i / C;
    if (i % C >= v.request.counts[h]) continue;
    for (int64_t w = 0; w < row_words; ++w) {
      const uint64_t source = static_cast<uint64_t>((h * v.max_tokens + v.request.tokens[i]) * row_words + w);
      const uint32_t got = rows[(h * C + v.request.slots[i]) * row_words + w];
      if (got != pattern(static_cast<uint32_t>(layer), source)) atomicAdd(wrong, 1ull);
    }
  }
}

struct Program {
  Program(Engine& engine, int64_t layers) : engine(engine), ref(*engine.device()), layers(layers) {
    CLO_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CLO_CUDA_CHECK(cudaMalloc(&wrong, sizeof *wrong));
    CLO_CUDA_CHECK(cudaMalloc(&numbers, static_cast<size_t>(layers) * 4));
    std::vector<int32_t> n;
    for (int32_t i = 0; i < layers; ++i) n.push_back(i);
    CLO_CUDA_CHECK(cudaMemcpy(numbers, n.data(), n.size() * 4, cudaMemcpyHostToDevice));
    CLO_CUDA_CHECK(cudaMemset(wrong, 0, sizeof *wrong));
    CLO_CUDA_CHECK(cudaDeviceSynchronize());
    cudaFuncAttributes attributes;
    CLO_CUDA_CHECK(cudaFuncGetAttributes(&attributes, produce));
    CLO_CUDA_CHECK(cudaFuncGetAttributes(&attributes, consume));
  }
  ~Program() {
    cudaStreamDestroy(stream);
    cudaFree(wrong);
    cudaFree(numbers);
  }
  cuda::EngineRef of(int64_t layer) const {
    cuda::EngineRef r = ref;
    r.layer.index = numbers + layer;
    return r;
  }
  // One layer ahead, as a decode step.
  void step(uint32_t n) {
    for (int64_t l = 0; l <= layers; ++l) {
      if (l < layers) {
        produce<<<1, 1024, 0, stream>>>(of(l), n);
        CLO_CUDA_CHECK(follow_post(of(l), stream));
      }
      if (l == 0) continue;
      if (serialised) CHECK(engine.wait(l - 1).empty());
      consume<<<1, 1024, 0, stream>>>(of(l - 1), wrong);
    }
  }
  unsigned long long mismatches() const {
    CLO_CUDA_CHECK(cudaStreamSynchronize(stream));
    unsigned long long n = 0;
    CLO_CUDA_CHECK(cudaMemcpy(&n, wrong, sizeof n, cudaMemcpyDeviceToHost));
    return n;
  }

  Engine& engine;
  cuda::EngineRef ref;
  int64_t layers;
  cudaStream_t stream = nullptr;
  unsigned long long* wrong = nullptr;
  int32_t* numbers = nullptr;
};

}  // namespace clo::test
