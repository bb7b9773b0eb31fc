// prefetch on the device against the CPU kernel over several steps: the slot table, its ages and the request agree entry
// for entry. And the hand-over: it waits for the rows of the last request, gives up in time, and posts.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "clo/params.h"
#include "cuda/flags.cuh"
#include "cuda/kernels.h"
#include "device.h"

namespace {

using clo::DType;
using clo::LayerView;
using clo::test::Array;

struct Case {
  int64_t batch, kv_heads, group, dim, bits, tokens, k_max, slots;
  bool whole;
};

// The tables of one layer, on both sides.
struct Tables {
  explicit Tables(const Case& c)
      : heads(static_cast<size_t>(c.batch * c.kv_heads)),
        tokens(heads * c.slots, -1),
        last(heads * c.slots, uint16_t{0}),
        counts(heads, 0),
        refreshes(heads, uint16_t{65533}),
        moves(heads, 0),
        from(heads * c.slots, 0),
        to(heads * c.slots, 0) {}

  LayerView view(const Case& c, bool device) {
    const auto at = [&](auto& array) { return device ? array.device : array.host.data(); };
    return {c.batch, c.kv_heads, c.tokens, c.slots, c.dim, DType::kF32, nullptr, nullptr, at(tokens), at(last),
            at(counts), at(refreshes), {at(moves), at(from), at(to)}};
  }

  void check(const Case& c) const {
    CHECK(moves.same());
    CHECK(counts.same());
    CHECK(refreshes.same());
    CHECK(tokens.same());
    CHECK(last.same());
    const auto got_from = from.download(), got_to = to.download();
    for (size_t h = 0; h < heads; ++h)
      for (size_t m = h * c.slots; m < h * c.slots + static_cast<size_t>(moves.host[h]); ++m)
        CHECK(got_from[m] == from.host[m] && got_to[m] == to.host[m]);
  }

  size_t heads;
  Array<int32_t> tokens;
  Array<uint16_t> last;
  Array<int32_t> counts;
  Array<uint16_t> refreshes;
  Array<int32_t> moves, from, to;
};

void check(std::mt19937& random, const Case& c) {
  const auto B = static_cast<size_t>(c.batch), heads = B * c.kv_heads, queries = heads * c.group;
  Array<uint8_t> query(clo::test::normal(random, queries * c.dim, DType::kF32)), label(query.bytes(), uint8_t{0});
  Array<int32_t> age(heads, -1), max_age(B, 3), begin(B, 4), end(B, 0), k(B, 0), capacity(B, 0);
  Array<float> importance(static_cast<size_t>(c.kv_heads * c.group), 1.0f);
  Array<float> thresholds(static_cast<size_t>(c.kv_heads), 0.9f);
  Array<float> weights(clo::test::normal_floats(random, static_cast<size_t>(c.kv_heads * c.dim * c.bits)));
  Array<float> mean(heads * c.dim, 0.0f), lse(queries, 0.0f);
  std::vector<uint32_t> words(heads * c.tokens * c.bits / 32);
  for (auto& w : words) w = static_cast<uint32_t>(random());
  Array<uint32_t> codes(std::move(words));
  Array<uint16_t> factors(heads * c.tokens, uint16_t{0x2e00});
  Array<uint8_t> hit(heads, uint8_t{0});
  Array<int32_t> indices(heads * c.k_max, -7);
  Tables tables(c);
  const LayerView unused{};
  Array<LayerView> views(std::vector<LayerView>{unused, tables.view(c, true)});
  Array<int32_t> layer(1, 1);
  Array<clo::cuda::LayerFlags> flags(2, clo::cuda::LayerFlags{});
  Array<uint32_t> error(1, 0u);
  Array<clo::cuda::DeviceCounters> counters(1, clo::cuda::DeviceCounters{});

  const auto params = [&](bool device) {
    const auto at = [&](auto& array) { return device ? array.device : array.host.data(); };
    clo::PrefetchParams p;
    p.lookup = {c.batch, c.kv_heads, c.group, c.dim, DType::kF32, at(query), at(label), at(age), at(importance),
                at(thresholds), at(max_age), at(hit)};
    p.select = {c.batch, c.kv_heads, c.group, c.dim, c.bits, c.tokens, c.k_max, DType::kF32, clo::Retriever::kHata,
                0.125f, at(query), at(weights), at(mean), at(lse), at(codes), at(factors), nullptr, at(begin), at(end),
                at(k), at(hit), at(indices)};
    p.capacity = at(capacity);
    p.whole = c.whole;
    p.view = tables.view(c, device);
    return p;
  };
  const clo::PrefetchParams on_host = params(false), on_device = params(true);
  Array<uint8_t> workspace(clo::cuda::prefetch_workspace_bytes(on_device), uint8_t{0});
  workspace.poison();
  const clo::cuda::EngineRef engine{{views.device, layer.device}, flags.device, error.device, counters.device, 1000000000};

  clo::PrefetchResult sum;
  uint64_t requests = 0;
  for (uint32_t step = 1; step <= 12; ++step) {
    std::normal_distribution<float> draw(0, step % 3 == 0 ? 0.05f : 0.6f);
    auto* q = reinterpret_cast<float*>(query.host.data());
    for (size_t i = 0; i < queries * c.dim; ++i) q[i] += draw(random);
    for (size_t b = 0; b < B; ++b) {
      const bool nothing = step == 7 && b == 0;
      end.host[b] = static_cast<int32_t>(c.tokens * 3 / 4) + static_cast<int32_t>(step * 3) - static_cast<int32_t>(b);
      k.host[b] = nothing ? 0 : static_cast<int32_t>(c.k_max - static_cast<int64_t>(b));
      // It shrinks once, which throws out everything.
      capacity.host[b] = static_cast<int32_t>(step == 9 ? c.k_max : c.slots - static_cast<int64_t>(b));
    }
    query.upload();
    end.upload();
    k.upload();
    capacity.upload();
    const clo::PrefetchResult result = clo::prefetch(on_host);
    sum.hits += result.hits;
    sum.misses += result.misses;
    sum.rows_selected += result.rows_selected;
    sum.rows_new += result.rows_new;
    requests += result.rows_new > 0;
    CLO_CUDA_CHECK(clo::cuda::prefetch(on_device, engine, workspace.device, nullptr));
    CLO_CUDA_CHECK(cudaDeviceSynchronize());
    CHECK(hit.same());
    CHECK(age.same());
    CHECK(label.same());
    tables.check(c);
    auto posted = flags.download();
    CHECK(posted[0].posted == 0 && posted[1].posted == step && error.same());
    posted[1].ready = step;
    CLO_CUDA_CHECK(cudaMemcpy(flags.device, posted.data(), flags.bytes(), cudaMemcpyHostToDevice));
  }
  const auto got = counters.download()[0];
  CHECK(got.hits == sum.hits && got.misses == sum.misses && got.rows_selected == sum.rows_selected);
  CHECK(got.rows_posted == sum.rows_new && got.requests == requests);
  CHECK(sum.hits > 0 && sum.misses > 0);

  // The rows of the last request never come.
  auto posted = flags.download();
  posted[1].ready -= 1;
  CLO_CUDA_CHECK(cudaMemcpy(flags.device, posted.data(), flags.bytes(), cudaMemcpyHostToDevice));
  clo::cuda::EngineRef impatient = engine;
  impatient.timeout_ns = 2000000;
  CLO_CUDA_CHECK(clo::cuda::prefetch(on_device, impatient, workspace.device, nullptr));
  CLO_CUDA_CHECK(cudaDeviceSynchronize());
  CHECK(error.download()[0] != 0);
  CHECK(flags.download()[1].posted == posted[1].posted);
  tables.check(c);
}

}  // namespace

int main() {
  std::mt19937 random(3);
  for (bool whole : {false, true}) {
    check(random, {2, 3, 4, 64, 256, 1500, 100, 150, whole});
    check(random, {1, 2, 2, 64, 128, 400, 200, 200, whole});
    check(random, {1, 1, 1, 64, 64, 300, 7, 33, whole});
    check(random, {3, 60, 2, 64, 256, 500, 40, 60, whole});         // more heads than blocks
    check(random, {1, 2, 4, 64, 256, 1100000, 9000, 13500, whole});  // masks outside shared memory
  }
  check(random, {1, 8, 4, 128, 256, 131072, 13107, 19660, false});
  std::puts("prefetch: ok");
  return 0;
}
