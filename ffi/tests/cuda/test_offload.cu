// offload on a GPU against the CPU kernel: the same host rows, byte for byte, for whole prompts and for tails, as they are
// and quantized.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "cuda/check.h"
#include "cuda/flags.cuh"
#include "cuda/pull.h"
#include "host/engine.h"
#include "tests/check.h"

using namespace clo;

namespace {

struct Case {
  int64_t batch, kv_heads, tokens, num_rows, sink, head_dim;
  DType dtype;
  bool offload;  // to the host, or to device memory when nothing moves
  RowFormat format = RowFormat::kPlain;
};

// Rows [count, 2, D] of a dtype: every fourth of random bits, so also of NaN, infinities and subnormal numbers; others of
// every size, of zeros, and with one NaN or infinity.
template <typename T>
std::vector<char> make_rows(int64_t count, int64_t D) {
  const float odd[] = {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity(),
                       std::numeric_limits<float>::infinity()};
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  std::vector<T> rows(static_cast<size_t>(count * 2 * D));
  for (int64_t r = 0; r < count; ++r) {
    T* const row = rows.data() + r * 2 * D;
    const float size = std::ldexp(1.0f, static_cast<int>(random() % 24) - 16);
    for (int64_t i = 0; i < 2 * D; ++i) {
      if (r % 4 == 3) {
        const uint64_t bits = random();
        std::memcpy(row + i, &bits, sizeof(T));
      } else {
        from_float(r % 16 == 8 ? (i % 3 == 0 ? -0.0f : 0.0f) : size * normal(random), row + i);
      }
    }
    if (r % 8 == 5) from_float(odd[random() % 3], row + random() % static_cast<uint64_t>(2 * D));
  }
  const char* const bytes = reinterpret_cast<const char*>(rows.data());
  return {bytes, bytes + rows.size() * sizeof(T)};
}

template <typename T>
T* to_device(const std::vector<T>& values) {
  T* p = nullptr;
  CLO_CUDA_CHECK(cudaMalloc(&p, values.size() * sizeof(T)));
  CLO_CUDA_CHECK(cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}

void run(const Case& c, const std::vector<int32_t>& begin, const std::vector<int32_t>& end) {
  EngineConfig config;
  config.kv_heads = {c.kv_heads, c.kv_heads};
  config.batch = c.batch;
  config.max_tokens = c.tokens;
  config.num_slots = 8;
  config.head_dim = c.head_dim;
  config.dtype = c.dtype;
  config.format = c.format;
  config.offload = c.offload;
  config.backend = "pull";
  Engine engine(config);
  const LayerView view = engine.layer(1);
  const size_t row = static_cast<size_t>(row_bytes(view));
  const size_t heads = static_cast<size_t>(c.batch * c.kv_heads);
  const std::vector<char> rows = dispatch(c.dtype, [&](auto* tag) {
    return make_rows<std::remove_pointer_t<decltype(tag)>>(c.batch * c.kv_heads * c.num_rows, c.head_dim);
  });
  std::vector<char> want(heads * static_cast<size_t>(c.tokens) * row, 0), got(want);

  OffloadParams p{c.batch, c.kv_heads, c.num_rows, c.head_dim, c.sink, c.dtype, rows.data(), begin.data(), end.data(),
                  view};
  p.view.host_rows = want.data();
  const uint64_t written = offload(p);

  char* device_rows = to_device(rows);
  int32_t *device_begin = to_device(begin), *device_end = to_device(end), *layer = to_device(std::vector<int32_t>{1});
  p.rows = device_rows;
  p.begin = device_begin;
  p.end = device_end;
  p.view = view;
  cuda::EngineRef ref = *engine.device();
  ref.layer.index = layer;
  CLO_CUDA_CHECK(cuda::offload(p, ref, nullptr));
  CLO_CUDA_CHECK(cudaDeviceSynchronize());
  engine.copy(got.data(), view.host_rows, static_cast<int64_t>(got.size()));
  CHECK(got == want);
  CHECK(engine.counters().rows_offloaded == written);
  CHECK(engine.end().empty());

  // Values that lead outside of the buffers write nothing and are reported.
  const std::vector<int32_t> past(static_cast<size_t>(c.batch), static_cast<int32_t>(c.tokens + 1));
  int32_t* device_past = to_device(past);
  p.end = device_past;
  CLO_CUDA_CHECK(cuda::offload(p, ref, nullptr));
  CLO_CUDA_CHECK(cudaDeviceSynchronize());
  CHECK(engine.end() == "layer 1, backend pull: an operand is out of range");
  engine.copy(got.data(), view.host_rows, static_cast<int64_t>(got.size()));
  CHECK(got == want);
  for (void* x : {static_cast<void*>(device_rows), static_cast<void*>(device_begin), static_cast<void*>(device_end),
                  static_cast<void*>(layer), static_cast<void*>(device_past)})
    CLO_CUDA_CHECK(cudaFree(x));
}

}  // namespace

int main() {
  for (bool offloaded : {true, false}) {
    // A prefilled layer: token p at row p.
    run({2, 3, 700, 640, 0, 128, DType::kBF16, offloaded}, {0, 0}, {640, 1});
    run({2, 1, 700, 700, 4, 16, DType::kF32, offloaded}, {0, 17}, {0, 333});
    // A tail: sinks, then a ring that turns over.
    run({3, 2, 500, 40, 4, 80, DType::kBF16, offloaded}, {0, 30, 470}, {40, 64, 500});
    run({1, 5, 300, 24, 0, 64, DType::kF32, offloaded}, {200}, {224});
    run({1, 1, 300, 8, 8, 64, DType::kBF16, offloaded}, {0}, {8});
    run({40, 8, 64, 64, 4, 8, DType::kBF16, offloaded}, std::vector<int32_t>(40, 3), std::vector<int32_t>(40, 60));
    for (const RowFormat format : {RowFormat::kPlain, RowFormat::kInt8, RowFormat::kFp8})
      for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
        for (const int64_t D : {8, 24, 64, 80, 96, 128, 256}) {
          run({2, 3, 330, 300, 0, D, dtype, offloaded, format}, {0, 11}, {300, 12});
          run({3, 2, 500, 40, 4, D, dtype, offloaded, format}, {0, 30, 470}, {40, 64, 500});
        }
        run({1, 1, 300, 24, 0, 128, dtype, offloaded, format}, {200}, {224});
        run({1, 1, 300, 8, 8, 128, dtype, offloaded, format}, {0}, {8});
        run({40, 8, 64, 64, 4, 64, dtype, offloaded, format}, std::vector<int32_t>(40, 3), std::vector<int32_t>(40, 60));
        run({1, 2, 5000, 5000, 4, 128, dtype, offloaded, format}, {0}, {5000});
      }
  }
  std::puts("ok");
  return 0;
}
