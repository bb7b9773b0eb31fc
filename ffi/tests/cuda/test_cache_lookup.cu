// cache_lookup on the device against the CPU kernel.
#include <cstdio>

#include "clo/params.h"
#include "cuda/cache_lookup.cuh"
#include "cuda/kernels.h"
#include "device.h"

namespace {

using clo::DType;

struct Case {
  int64_t batch, kv_heads, group, dim;
  DType dtype;
};

void check(std::mt19937& random, const Case& c) {
  const auto heads = static_cast<size_t>(c.batch * c.kv_heads), values = heads * c.group * c.dim;
  clo::test::Array<uint8_t> query(clo::test::normal(random, values, c.dtype));
  clo::test::Array<uint8_t> label(clo::test::normal(random, values, c.dtype));
  std::vector<int32_t> ages(heads), limits(static_cast<size_t>(c.batch));
  for (auto& age : ages) age = static_cast<int32_t>(random() % 6) - 1;
  for (auto& limit : limits) limit = static_cast<int32_t>(random() % 8);
  // Every other head's label is its query, so that about half of them hit.
  const size_t row = static_cast<size_t>(c.group * c.dim * clo::dtype_bytes(c.dtype));
  for (size_t h = 0; h < heads; h += 2) std::memcpy(label.host.data() + h * row, query.host.data() + h * row, row);
  if (heads > 2) std::memset(query.host.data() + 2 * row, 0, row);
  label.upload();
  query.upload();
  clo::test::Array<int32_t> age(ages), max_age(limits);
  std::vector<float> weights(static_cast<size_t>(c.kv_heads * c.group));
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = i < static_cast<size_t>(c.group) ? 0.0f : 0.25f * (i % 4);
  clo::test::Array<float> importance(weights), thresholds(static_cast<size_t>(c.kv_heads), 0.7f);
  clo::test::Array<uint8_t> hit(heads, 7);
  clo::CacheLookupParams p{c.batch,           c.kv_heads,           c.group,
                           c.dim,             c.dtype,              query.host.data(),
                           label.host.data(), age.host.data(),      importance.host.data(),
                           thresholds.host.data(), max_age.host.data(), hit.host.data()};
  clo::cache_lookup(p);
  p = {c.batch,      c.kv_heads, c.group,           c.dim,             c.dtype,        query.device,
       label.device, age.device, importance.device, thresholds.device, max_age.device, hit.device};
  CLO_CUDA_CHECK(clo::cuda::cache_lookup(p, nullptr));
  CLO_CUDA_CHECK(cudaDeviceSynchronize());
  CHECK(hit.same());
  CHECK(age.same());
  CHECK(label.same());
}

}  // namespace

int main() {
  std::mt19937 random(1);
  for (DType dtype : {DType::kF32, DType::kBF16})
    for (int64_t group = 1; group <= 8; ++group)
      for (int64_t dim : {64, 80, 128, 256})
        for (int64_t batch : {1, 5, 64}) check(random, {batch, 8, group, dim, dtype});
  check(random, {3, 2, 12, 128, DType::kF32});
  std::puts("cache_lookup: ok");
  return 0;
}
