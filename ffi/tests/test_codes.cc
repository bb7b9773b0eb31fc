// topk against a full sort, and select_topk with a code that is known by construction.
#undef NDEBUG
#include <algorithm>
#include <cassert>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "clo/params.h"
#include "cpu/simd/scores.h"
#include "cpu/topk.h"

namespace {

void matches_a_sort(std::mt19937& random, int64_t count, int64_t k, int distinct) {
  const auto n = static_cast<size_t>(count);
  std::vector<uint16_t> keys(n + clo::kScoreBlock, 0xffff);  // the padding must not win
  for (size_t i = 0; i < n; ++i) keys[i] = static_cast<uint16_t>(random() % distinct * (65535 / distinct));
  std::vector<int32_t> want(n), got(static_cast<size_t>(k));
  std::iota(want.begin(), want.end(), 0);
  std::stable_sort(want.begin(), want.end(), [&](int32_t a, int32_t b) { return keys[a] > keys[b]; });
  want.resize(static_cast<size_t>(k));
  std::sort(want.begin(), want.end());
  clo::topk(keys.data(), count, k, 0, got.data());
  assert(got == want);
}

// One-hot weights make the code the sign pattern of x; the query is one key, so that key is the best.
void finds_the_key_that_is_the_query(clo::Retriever retriever) {
  constexpr int64_t D = 64, S = 300, R = 64;
  std::mt19937 random(1);
  std::vector<float> keys(S * D), weights(D * R, 0.0f), mean(D, 0.0f);
  for (float& x : keys) x = random() % 2 ? 1.0f : -1.0f;
  for (int64_t i = 0; i < D; ++i) weights[static_cast<size_t>(i * R + i)] = 1;
  std::vector<uint32_t> codes(S * R / 32);
  std::vector<uint16_t> factors(S);
  clo::hash_encode({1, 1, S, D, R, clo::DType::kF32, keys.data(), weights.data(), mean.data(), codes.data(),
                    factors.data()});
  for (uint16_t factor : factors) assert(factor == 0x3c00);  // |x|² = sum of |x| = 64
  for (int32_t wanted = 0; wanted < S; wanted += 7) {
    const float lse = 8;
    const int32_t begin = 0, end = S, k = 1;
    const uint8_t skip = 0;
    int32_t index = -2;
    clo::select_topk({1, 1, 1, D, R, S, 1, clo::DType::kF32, retriever, 0.125f, keys.data() + wanted * D,
                      weights.data(), mean.data(), &lse, codes.data(), factors.data(), nullptr, &begin, &end, &k, &skip,
                      &index});
    assert(index == wanted);
  }
}

}  // namespace

int main() {
  std::mt19937 random(0);
  for (int64_t count : {1, 2, 63, 64, 65, 127, 1000, 4097})
    for (int64_t k : {int64_t{1}, count / 10 + 1, count - 1, count})
      for (int distinct : {1, 2, 300, 65535})
        if (k > 0) matches_a_sort(random, count, k, distinct);
  finds_the_key_that_is_the_query(clo::Retriever::kSign);
  finds_the_key_that_is_the_query(clo::Retriever::kHata);
  return 0;
}
