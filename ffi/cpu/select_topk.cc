#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "clo/params.h"
#include "cpu/hash_encode.h"
#include "cpu/parallel.h"
#include "cpu/simd/dispatch.h"
#include "cpu/simd/scores.h"
#include "cpu/topk.h"

namespace clo {
namespace {

constexpr int64_t kTask = 4096;  // keys that one task scores: about 10 us

// Everything about one sequence and KV head that its scoring tasks share.
struct Head {
  int64_t bh, begin, count, k;
  std::vector<float> query;      // [G, D]
  std::vector<uint8_t> lookups;  // sign: [G, lookup_bytes]
  std::vector<int32_t> shifts;
  std::vector<float> slopes, offsets;
  std::vector<uint32_t> codes;  // hata: [G, R/32]
  std::vector<uint16_t> keys;   // [count], rounded up to whole blocks
};

void prepare(const SelectTopkParams& p, Head& head) {
  const int64_t G = p.group, D = p.head_dim, words = p.bits / 32;
  const char* query = static_cast<const char*>(p.query) + head.bh * G * D * dtype_bytes(p.dtype);
  head.query.resize(static_cast<size_t>(G * D));
  dispatch(p.dtype, [&](auto* tag) {
    const auto* from = reinterpret_cast<const std::remove_pointer_t<decltype(tag)>*>(query);
    for (int64_t i = 0; i < G * D; ++i) head.query[static_cast<size_t>(i)] = to_float(from[i]);
  });
  head.keys.resize(static_cast<size_t>((head.count + kScoreBlock - 1) / kScoreBlock * kScoreBlock));
  const Weights weights{p.weights + head.bh % p.kv_heads * D * p.bits, D, p.bits};
  if (p.retriever == Retriever::kHata) {
    head.codes.resize(static_cast<size_t>(G * words));
    float unused[kEncodeBlock];
    for (int64_t g = 0; g < G; g += kEncodeBlock)
      codes_table().encode(head.query.data() + g * D, std::min(kEncodeBlock, G - g), weights,
                           head.codes.data() + g * words, unused);
    return;
  }
  head.offsets.assign(p.lse + head.bh * G, p.lse + (head.bh + 1) * G);
  for (float& offset : head.offsets) offset = -offset;
  if (p.retriever == Retriever::kExact) return;
  std::vector<int8_t> levels(static_cast<size_t>(G * p.bits));
  head.slopes.resize(static_cast<size_t>(G));
  head.shifts.resize(static_cast<size_t>(G));
  head.lookups.resize(static_cast<size_t>(G * lookup_bytes(words)));
  encode_query_sign(head.query.data(), G, weights, levels.data(), head.slopes.data());
  for (int64_t g = 0; g < G; ++g) {
    head.shifts[g] =
        scores_table().build_lookup(levels.data() + g * p.bits, words, head.lookups.data() + g * lookup_bytes(words));
    float along_mean = 0;
    for (int64_t d = 0; d < D; ++d) along_mean += head.query[g * D + d] * p.mean[head.bh * D + d];
    head.slopes[g] *= p.scale;
    head.offsets[g] += p.scale * along_mean;
  }
}

void score(const SelectTopkParams& p, Head& head, int64_t first, int64_t n) {
  const int64_t words = p.bits / 32, token = head.bh * p.max_tokens + head.begin + first;
  uint16_t* keys = head.keys.data() + first;
  if (p.retriever == Retriever::kSign) {
    const SignQuery query{p.group,           words, head.lookups.data(), head.shifts.data(), head.slopes.data(),
                          head.offsets.data()};
    scores_table().sign(p.codes + token * words, p.factors + token, n, query, keys);
  } else if (p.retriever == Retriever::kHata) {
    scores_table().hata(p.codes + token * words, n, head.codes.data(), p.group, words, keys);
  } else {
    const ScoresTable& table = scores_table();
    const auto exact = choose(p.dtype, table.exact_f32, table.exact_bf16, table.exact_f16);
    exact(static_cast<const char*>(p.rows) + token * 2 * p.head_dim * dtype_bytes(p.dtype), n, p.head_dim,
          head.query.data(), p.group, p.scale, head.offsets.data(), keys);
  }
}

// Nanoseconds of one thread per key, roughly: only for the number of threads.
int64_t ns_per_key(const SelectTopkParams& p) {
  return 2 + p.group * (p.retriever == Retriever::kExact ? p.head_dim / 8 : p.bits / 256);
}

}  // namespace

void select_topk(const SelectTopkParams& p) {
  const int64_t heads = p.batch * p.kv_heads;
  std::fill_n(p.indices, heads * p.k_max, -1);
  // Grow-only, because fresh pages would cost as much as the scoring. One per calling thread; a task never selects.
  thread_local std::vector<Head> scratch;
  size_t used = 0;
  int64_t total = 0, longest = 0;
  for (int64_t bh = 0; bh < heads; ++bh) {
    const int64_t b = bh / p.kv_heads, begin = std::max<int64_t>(p.begin[b], 0);
    const int64_t count = std::min<int64_t>(p.end[b], p.max_tokens) - begin;
    const int64_t k = std::min({static_cast<int64_t>(p.k[b]), p.k_max, count});
    if (p.skip[bh] || k <= 0) continue;
    if (used == scratch.size()) scratch.emplace_back();
    Head& head = scratch[used++];
    head.bh = bh;
    head.begin = begin;
    head.count = count;
    head.k = k;
    total += count;
    longest = std::max(longest, count);
  }
  if (used == 0) return;
  Head* const head = scratch.data();
  const int64_t n = static_cast<int64_t>(used), tasks = (longest + kTask - 1) / kTask;
  parallel_for(n, n * p.group * p.head_dim * p.bits / 20000, [&](int64_t i) { prepare(p, head[i]); });
  parallel_for(n * tasks, total * ns_per_key(p) / 1000, [&](int64_t task) {
    Head& mine = head[task / tasks];
    const int64_t first = task % tasks * kTask;
    if (first < mine.count) score(p, mine, first, std::min(kTask, mine.count - first));
  });
  parallel_for(n, total * 3 / 1000, [&](int64_t i) {
    const Head& h = head[i];
    topk(h.keys.data(), h.count, h.k, static_cast<int32_t>(h.begin), p.indices + h.bh * p.k_max);
  });
}

}  // namespace clo
