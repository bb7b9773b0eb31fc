// What the benches of prefetch work on: several layers with random codes, and queries of several rounds that move so far
// that a wanted share of the selection is new.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "clo/params.h"
#include "cuda/flags.cuh"
#include "cuda/kernels.h"
#include "device.h"
#include "host/engine.h"
#include "program_kernels.cuh"

namespace clo::test {

constexpr int64_t kHeads = 8, kGroup = 4, kDim = 128, kBits = 256, kTokens = 131072, kSelected = 13107, kSlots = 19660;
constexpr int kRounds = 8;

inline std::vector<int32_t> upto(int n) {
  std::vector<int32_t> numbers;
  for (int32_t i = 0; i < n; ++i) numbers.push_back(i);
  return numbers;
}

struct PrefetchProblem {
  PrefetchProblem(int64_t batch, int num_layers)
      : B(batch),
        layers(num_layers),
        heads(static_cast<size_t>(batch * kHeads)),
        engine(config(batch, num_layers)),
        numbers(upto(num_layers)),
        label(layers * heads * kGroup * kDim * 2, uint8_t{0}),
        age(layers * heads, -1),
        max_age(static_cast<size_t>(batch), 1 << 30),
        begin(static_cast<size_t>(batch), 0),
        end(static_cast<size_t>(batch), static_cast<int32_t>(kTokens)),
        k(static_cast<size_t>(batch), static_cast<int32_t>(kSelected)),
        capacity(static_cast<size_t>(batch), static_cast<int32_t>(kSlots)),
        importance(static_cast<size_t>(kHeads * kGroup), 1.0f),
        thresholds(static_cast<size_t>(num_layers * kHeads), 2.0f),
        weights(normal_floats(random, static_cast<size_t>(kHeads * kDim * kBits), 0.1f)),
        mean(heads * kDim, 0.1f),
        lse(heads * kGroup, 3.0f),
        factors(heads * kTokens, uint16_t{0x2e00}),
        hit(heads, uint8_t{0}),
        sink(1, 0u) {
    CLO_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int i = 0; i < layers; ++i) {
      uint32_t* words = nullptr;
      CLO_CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&words), code_bytes()));
      fill_kernel<<<1024, 256, 0, stream>>>(words, code_bytes() / 4, static_cast<uint32_t>(i));
      codes.push_back(words);
    }
    CLO_CUDA_CHECK(cudaMalloc(&workspace, clo::cuda::prefetch_workspace_bytes(params(0, 0, Retriever::kSign, false))));
    CLO_CUDA_CHECK(cudaDeviceSynchronize());
  }

  static clo::EngineConfig config(int64_t batch, int num_layers) {
    clo::EngineConfig c;
    c.kv_heads.assign(static_cast<size_t>(num_layers), kHeads);
    c.batch = batch;
    c.max_tokens = kTokens;
    c.num_slots = kSlots;
    c.head_dim = kDim;
    c.dtype = DType::kBF16;
    c.backend = "pull";
    return c;
  }

  size_t code_bytes() const { return heads * kTokens * kBits / 8; }

  // Queries of the rounds lie on a circle around a fixed one: after the last comes the first.
  void make_queries(float radius) {
    queries.clear();
    std::mt19937 r(9);
    const size_t n = static_cast<size_t>(layers) * heads * kGroup * kDim;
    const auto centre = normal_floats(r, n), x = normal_floats(r, n), y = normal_floats(r, n);
    for (int round = 0; round < kRounds; ++round) {
      const float angle = 6.2831853f * static_cast<float>(round) / kRounds;
      std::vector<uint8_t> bytes(n * 2);
      for (size_t i = 0; i < n; ++i) {
        clo::BF16 value;
        clo::from_float(centre[i] + radius * (std::cos(angle) * x[i] + std::sin(angle) * y[i]), &value);
        std::memcpy(bytes.data() + 2 * i, &value, 2);
      }
      queries.push_back(std::make_unique<Array<uint8_t>>(std::move(bytes)));
    }
  }

  clo::PrefetchParams params(int layer, int round, Retriever retriever, bool whole) const {
    const auto at = static_cast<size_t>(layer);
    const void* query = queries.empty() ? nullptr : queries[round]->device + at * heads * kGroup * kDim * 2;
    clo::PrefetchParams p;
    p.lookup = {B, kHeads, kGroup, kDim, DType::kBF16, query, label.device + at * heads * kGroup * kDim * 2,
                age.device + at * heads, importance.device, thresholds.device + at * kHeads, max_age.device, hit.device};
    p.select = {B, kHeads, kGroup, kDim, kBits, kTokens, kSelected, DType::kBF16, retriever, 0.08838835f, query,
                weights.device, mean.device, lse.device, codes[at], factors.device, nullptr, begin.device, end.device,
                k.device, hit.device, nullptr};
    p.capacity = capacity.device;
    p.whole = whole;
    p.view = engine.layer(layer);
    return p;
  }

  clo::cuda::EngineRef ref(int layer, bool transfers = true) const {
    clo::cuda::EngineRef r = *engine.device();
    r.layer.index = numbers.device + layer;
    if (!transfers) {
      r.flags = nullptr;
      r.control = nullptr;
    }
    return r;
  }

  // From now on the first `count` heads of a layer miss, of the first layer one less; all heads do before.
  void miss(int64_t count) {
    for (size_t i = 0; i < thresholds.host.size(); ++i) {
      const auto head = static_cast<int64_t>(i) % kHeads, first_layer = static_cast<int64_t>(i < kHeads);
      thresholds.host[i] = head < count - first_layer ? 2.0f : -2.0f;
    }
    thresholds.upload();
  }

  std::mt19937 random{5};
  int64_t B;
  int layers;
  size_t heads;
  clo::Engine engine;
  Array<int32_t> numbers;
  Array<uint8_t> label;
  Array<int32_t> age, max_age, begin, end, k, capacity;
  Array<float> importance, thresholds, weights, mean, lse;
  Array<uint16_t> factors;
  Array<uint8_t> hit;
  Array<uint32_t> sink;
  cudaStream_t stream = nullptr;
  std::vector<uint32_t*> codes;
  std::vector<std::unique_ptr<Array<uint8_t>>> queries;
  void* workspace = nullptr;
};

}  // namespace clo::test
