// cache_lookup on the device against the CPU kernel.
#include <cstdio>

#include "clo/params.h"
#include "cuda/kernels.h"
#include "cuda/select_topk.cuh"
#include "device.h"

namespace {

using clo::DType;

struct Case {
  int64_t batch, kv_heads, group, dim;
  DType dtype;
};

// `projects`: the lookup that begins a prefetch, in one kernel with the projection of the queries. With it, sequences with
// nothing to select hit and lose their label.
void check(std::mt19937& random, const Case& c, bool projects = false) {
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
  clo::SelectTopkParams select{};
  select.batch = c.batch;
  select.kv_heads = c.kv_heads;
  select.group = c.group;
  select.head_dim = c.dim;
  select.bits = 256;
  select.max_tokens = 1000;
  select.k_max = 10;
  select.dtype = c.dtype;
  select.retriever = clo::Retriever::kSign;
  select.query = query.device;
  select.skip = hit.device;
  clo::test::Array<float> projection(static_cast<size_t>(projects ? c.kv_heads * c.dim * select.bits : 1), 0.5f);
  clo::test::Array<float> mean(heads * static_cast<size_t>(c.dim), 0.1f), lse(heads * static_cast<size_t>(c.group), 0.1f);
  clo::test::Array<int32_t> k(static_cast<size_t>(c.batch), 10);
  clo::test::Array<uint32_t> cleared(1, 0u);
  select.weights = projection.device;
  select.mean = mean.device;
  select.lse = lse.device;
  if (projects) {
    for (size_t b = 0; b < k.host.size(); b += 3) {
      k.host[b] = 0;
      for (size_t h = b * c.kv_heads; h < (b + 1) * c.kv_heads; ++h) {
        hit.host[h] = 1;
        age.host[h] = -1;
      }
    }
    k.upload();
    select.k = k.device;
    clo::test::Array<uint8_t> workspace(clo::cuda::select_topk_workspace_bytes(select), uint8_t{0});
    cleared.poison();
    CLO_CUDA_CHECK(clo::cuda::lookup_and_encode(p, select, cleared.device, workspace.device, nullptr));
    CLO_CUDA_CHECK(cudaDeviceSynchronize());
    CHECK(cleared.same());
  } else {
    CLO_CUDA_CHECK(clo::cuda::cache_lookup(p, nullptr));
  }
  CLO_CUDA_CHECK(cudaDeviceSynchronize());
  CHECK(hit.same());
  CHECK(age.same());
  CHECK(label.same());
}

}  // namespace

// "small": for a sanitizer.
int main(int argc, char** argv) {
  std::mt19937 random(1);
  if (argc > 1 && std::string(argv[1]) == "small") {
    for (bool projects : {false, true}) {
      check(random, {3, 2, 4, 64, DType::kBF16}, projects);
      check(random, {2, 2, 5, 80, DType::kF32}, projects);
    }
    std::puts("cache_lookup: small cases ok");
    return 0;
  }
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16})
    for (int64_t group = 1; group <= 8; ++group)
      for (int64_t dim : {64, 80, 128, 256})
        for (int64_t batch : {1, 5, 64}) check(random, {batch, 8, group, dim, dtype});
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16})
    for (int64_t group : {1, 4, 5, 8})
      for (int64_t batch : {1, 5, 16, 40, 256}) check(random, {batch, 8, group, 128, dtype}, true);
  check(random, {3, 2, 12, 128, DType::kF32});
  std::puts("cache_lookup: ok");
  return 0;
}
