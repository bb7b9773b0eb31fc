// prefetch on the device against the CPU kernel over several steps: the slot table, its ages and the request agree entry
// for entry. And the hand-over: it waits for the rows of the last request, gives up in time, refuses operands that do not
// fit, posts, and copies the rows where nobody else does.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>

#include "clo/params.h"
#include "cuda/flags.cuh"
#include "cuda/kernels.h"
#include "cuda/pull.h"
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
    return {c.batch, c.kv_heads, c.tokens, c.slots, c.dim, DType::kF32, clo::RowFormat::kPlain, nullptr, nullptr,
            at(tokens), at(last), at(counts), at(refreshes), {at(moves), at(from), at(to)}};
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

std::vector<uint32_t> random_words(std::mt19937& random, size_t count) {
  std::vector<uint32_t> words(count);
  for (auto& w : words) w = static_cast<uint32_t>(random());
  return words;
}

// Layer 1 of an engine of two, its operands, and the CPU's side of both.
struct Problem {
  Problem(std::mt19937& r, const Case& shape)
      : c(shape),
        random(r),
        B(static_cast<size_t>(c.batch)),
        heads(B * c.kv_heads),
        queries(heads * c.group),
        query(clo::test::normal(random, queries * c.dim, DType::kF32)),
        label(query.bytes(), uint8_t{0}),
        age(heads, -1),
        max_age(B, 3),
        begin(B, 4),
        end(B, static_cast<int32_t>(c.tokens)),
        k(B, static_cast<int32_t>(c.k_max)),
        capacity(B, static_cast<int32_t>(c.slots)),
        importance(static_cast<size_t>(c.kv_heads * c.group), 1.0f),
        thresholds(static_cast<size_t>(c.kv_heads), 0.9f),
        weights(clo::test::normal_floats(random, static_cast<size_t>(c.kv_heads * c.dim * c.bits))),
        mean(heads * c.dim, 0.0f),
        lse(queries, 0.0f),
        codes(random_words(random, heads * c.tokens * c.bits / 32)),
        factors(heads * c.tokens, uint16_t{0x2e00}),
        hit(heads, uint8_t{0}),
        indices(heads * c.k_max, -7),
        tables(c),
        views(std::vector<LayerView>{LayerView{}, tables.view(c, true)}),
        layer(1, 1),
        flags(std::vector<clo::cuda::LayerFlags>{{}, {0, 1, {}, 0, 0, {}}}),
        error(1, 0u),
        counters(1, clo::cuda::DeviceCounters{}),
        workspace(clo::cuda::prefetch_workspace_bytes(params(true)), uint8_t{0}),
        engine{{views.device, layer.device}, flags.device, error.device, counters.device, 1000000000, nullptr, false} {
    workspace.poison();
  }

  clo::PrefetchParams params(bool device) {
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
  }

  void move_queries(float spread) {
    std::normal_distribution<float> draw(0, spread);
    auto* q = reinterpret_cast<float*>(query.host.data());
    for (size_t i = 0; i < queries * c.dim; ++i) q[i] += draw(random);
  }

  void upload() {
    query.upload();
    thresholds.upload();
    begin.upload();
    end.upload();
    k.upload();
    capacity.upload();
  }

  void run_device() {
    CLO_CUDA_CHECK(clo::cuda::prefetch(params(true), engine, workspace.device, nullptr));
    CLO_CUDA_CHECK(cudaDeviceSynchronize());
  }

  // On both sides; they agree, and the request has been posted.
  clo::PrefetchResult step() {
    upload();
    const clo::PrefetchResult result = clo::prefetch(params(false));
    sum.hits += result.hits;
    sum.misses += result.misses;
    sum.rows_selected += result.rows_selected;
    sum.rows_new += result.rows_new;
    requests += result.rows_new > 0;
    ++steps;
    run_device();
    CHECK(hit.same());
    CHECK(age.same());
    CHECK(label.same());
    tables.check(c);
    const auto posted = flags.download();
    CHECK(posted[0].posted == 0 && posted[1].posted == steps && error.same());
    if (engine.control == nullptr) set_ready(steps);
    else CHECK(posted[1].ready == steps);
    return result;
  }

  void set_ready(uint32_t sequence) {
    auto now = flags.download();
    now[1].ready = sequence;
    CLO_CUDA_CHECK(cudaMemcpy(flags.device, now.data(), flags.bytes(), cudaMemcpyHostToDevice));
  }

  void check_counters() const {
    const auto got = counters.download()[0];
    CHECK(got.hits == sum.hits && got.misses == sum.misses && got.rows_selected == sum.rows_selected);
    CHECK(got.rows_posted == sum.rows_new && got.requests == requests);
  }

  // It leaves the tables and the flags alone, and says why.
  void check_refused(clo::cuda::Failure why) {
    const auto before = flags.download();
    run_device();
    const uint32_t word = error.download()[0];
    CHECK(clo::cuda::error_failure(word) == why && clo::cuda::error_layer(word) == 1);
    CHECK(flags.download()[1].posted == before[1].posted);
    tables.check(c);
    error.upload();
  }

  Case c;
  std::mt19937& random;
  size_t B, heads, queries;
  Array<uint8_t> query, label;
  Array<int32_t> age, max_age, begin, end, k, capacity;
  Array<float> importance, thresholds, weights, mean, lse;
  Array<uint32_t> codes;
  Array<uint16_t> factors;
  Array<uint8_t> hit;
  Array<int32_t> indices;
  Tables tables;
  Array<LayerView> views;
  Array<int32_t> layer;
  Array<clo::cuda::LayerFlags> flags;
  Array<uint32_t> error;
  Array<clo::cuda::DeviceCounters> counters;
  Array<uint8_t> workspace;
  clo::cuda::EngineRef engine;
  clo::PrefetchResult sum;
  uint64_t requests = 0;
  uint32_t steps = 0;
};

// Hits and misses mixed, a set that grows, a sequence with nothing to select for once, a buffer that shrinks once.
void test_decode(std::mt19937& random, const Case& c) {
  Problem p(random, c);
  for (uint32_t step = 1; step <= 12; ++step) {
    p.move_queries(step % 3 == 0 ? 0.05f : 0.6f);
    for (size_t b = 0; b < p.B; ++b) {
      const bool nothing = step == 7 && b == 0;
      p.end.host[b] = static_cast<int32_t>(c.tokens * 3 / 4) + static_cast<int32_t>(step * 3) - static_cast<int32_t>(b % 32);
      p.k.host[b] = nothing ? 0 : static_cast<int32_t>(c.k_max - static_cast<int64_t>(b % 3));
      // It shrinks once, which throws out everything.
      p.capacity.host[b] = static_cast<int32_t>(step == 9 ? c.k_max : c.slots - static_cast<int64_t>(b % 3));
    }
    p.step();
  }
  p.check_counters();
  CHECK(p.sum.hits > 0 && p.sum.misses > 0);

  // The rows of the last request never come. The limit is long enough for a selection under a sanitizer.
  p.set_ready(p.steps - 1);
  p.engine.timeout_ns = 300000000;
  p.check_refused(clo::cuda::Failure::kNotDelivered);
}

// Every head misses: the same set again, another one, half of it.
void test_extremes(std::mt19937& random, const Case& c) {
  Problem p(random, c);
  std::fill(p.thresholds.host.begin(), p.thresholds.host.end(), 2.0f);
  const auto half = static_cast<int32_t>(c.tokens / 2);
  const auto candidates = [&](int32_t from, int32_t to) {
    std::fill(p.begin.host.begin(), p.begin.host.end(), from);
    std::fill(p.end.host.begin(), p.end.host.end(), to);
  };
  candidates(0, half);
  CHECK(p.step().rows_new == p.heads * c.k_max);
  CHECK(p.step().rows_new == (c.whole ? p.heads * c.k_max : 0));  // all retained
  candidates(half, static_cast<int32_t>(c.tokens));
  CHECK(p.step().rows_new == p.heads * c.k_max);  // all new
  candidates(half / 2, half + half / 2);
  p.step();
  candidates(5, 5);  // missed, and nothing to select from
  CHECK(p.step().rows_new == 0);
  candidates(0, static_cast<int32_t>(c.tokens));
  // Ages of any size, which wrap around; of equals the lowest goes.
  for (const int spread : {4, 1000, 65536, 300}) {
    for (size_t i = 0; i < p.tables.last.host.size(); ++i)
      p.tables.last.host[i] = static_cast<uint16_t>(p.tables.refreshes.host[i / c.slots] - random() % spread);
    p.tables.last.upload();
    p.move_queries(0.7f);
    p.step();
  }
  for (auto& last : p.tables.last.host) last = 77;
  p.tables.last.upload();
  p.move_queries(0.7f);
  p.step();
  p.check_counters();
}

void test_bad_operands(std::mt19937& random) {
  const Case c{3, 2, 2, 64, 64, 300, 40, 60, false};
  Problem p(random, c);
  p.step();
  const auto refused = [&](Array<int32_t>& operand, int32_t value) {
    const int32_t before = operand.host[1];
    operand.host[1] = value;
    p.upload();
    p.check_refused(clo::cuda::Failure::kBadOperand);
    operand.host[1] = before;
  };
  refused(p.begin, -1);
  refused(p.begin, 301);
  refused(p.end, 301);
  refused(p.end, 3);
  refused(p.k, -1);
  refused(p.k, 41);
  refused(p.capacity, 61);
  refused(p.capacity, 39);
  refused(p.capacity, -1);
}

// No resident kernel serves: the rows are there when prefetch ends. A `resident` word leaves them to somebody else.
void test_in_line(std::mt19937& random, const Case& c) {
  Problem p(random, c);
  const size_t row_floats = static_cast<size_t>(2 * c.dim);
  Array<float> host_rows(clo::test::normal_floats(random, p.heads * c.tokens * row_floats));
  Array<float> rows(p.heads * c.slots * row_floats, 0.0f);
  Array<clo::cuda::TransferControl> control(1, clo::cuda::TransferControl{});
  p.views.host[1].host_rows = host_rows.device;
  p.views.host[1].selected_rows = rows.device;
  p.views.upload();
  p.engine.control = control.device;
  uint64_t moved = 0;
  for (int step = 0; step < 6; ++step) {
    p.move_queries(0.5f);
    moved += p.step().rows_new;
    const auto got = rows.download();
    for (size_t h = 0; h < p.heads; ++h)
      for (int32_t slot = 0; slot < p.tables.counts.host[h]; ++slot) {
        const auto token = static_cast<size_t>(p.tables.tokens.host[h * c.slots + slot]);
        const float* wanted = host_rows.host.data() + (h * c.tokens + token) * row_floats;
        CHECK(std::equal(wanted, wanted + row_floats, got.data() + (h * c.slots + slot) * row_floats));
      }
  }
  CHECK(p.counters.download()[0].rows_moved == moved && moved > 0);
  control.host[0].resident = 1;
  control.upload();
  p.move_queries(0.9f);
  p.upload();
  p.run_device();
  const auto flags = p.flags.download()[1];
  CHECK(flags.posted == p.steps + 1 && flags.ready == p.steps);
  CHECK(p.counters.download()[0].rows_moved == moved);
}

}  // namespace

// "small": for a sanitizer.
int main(int argc, char** argv) {
  std::mt19937 random(3);
  if (argc > 1 && std::string(argv[1]) == "small") {
    test_decode(random, {2, 2, 4, 64, 256, 1500, 100, 150, false});
    test_extremes(random, {1, 2, 2, 64, 64, 400, 150, 150, false});
    test_decode(random, {1, 1, 1, 64, 64, 300, 7, 33, true});
    test_in_line(random, {1, 2, 2, 32, 64, 700, 90, 130, false});
    std::puts("prefetch: small cases ok");
    return 0;
  }
  std::vector<std::function<void(std::mt19937&, const Case&)>> tests{test_decode, test_extremes};
  for (bool whole : {false, true}) {
    for (const auto& test : tests) {
      test(random, {2, 3, 4, 64, 256, 1500, 100, 150, whole});
      test(random, {1, 2, 2, 64, 128, 400, 150, 150, whole});       // c = 1
      test(random, {1, 1, 1, 64, 64, 300, 7, 33, whole});
      test(random, {1, 2, 1, 64, 64, 300, 140, 450, whole});        // more slots than tokens
      test(random, {3, 60, 2, 64, 256, 500, 40, 60, whole});        // more heads than blocks
    }
    test_in_line(random, {2, 3, 2, 32, 64, 700, 90, 130, whole});
    test_in_line(random, {5, 8, 2, 20, 64, 300, 90, 130, whole});   // rows of 160 bytes
    test_decode(random, {1, 2, 4, 64, 256, 1100000, 9000, 13500, whole});
  }
  test_bad_operands(random);
  test_decode(random, {1, 8, 4, 128, 256, 131072, 13107, 19660, false});
  test_extremes(random, {1, 8, 4, 128, 256, 131072, 13107, 19660, false});
  test_extremes(random, {1, 1, 1, 64, 32, 4000000, 300000, 450000, false});  // what the blocks hold is in the workspace
  test_decode(random, {256, 8, 1, 64, 32, 200, 20, 30, false});
  std::puts("prefetch: ok");
  return 0;
}
