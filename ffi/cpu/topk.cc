#include "cpu/topk.h"

#include <algorithm>

#include "cpu/simd/dispatch.h"
#include "cpu/simd/scores.h"

namespace clo {
namespace {

constexpr int kCopies = 4;  // of a histogram, so that equal neighbours do not wait for each other's store

struct Bin {
  uint32_t value;
  int64_t rest;  // how many of the bin's keys belong to the largest k
};

// The bin of 256 that holds the k-th largest key.
Bin find(const uint32_t (&histogram)[kCopies][512], int64_t k) {
  for (uint32_t value = 255;; --value) {
    int64_t n = 0;
    for (const auto& copy : histogram) n += copy[value];
    if (k <= n || value == 0) return {value, k};
    k -= n;
  }
}

}  // namespace

void topk(const uint16_t* keys, int64_t count, int64_t k, int32_t offset, int32_t* indices) {
  uint32_t high[kCopies][512] = {}, low[kCopies][512] = {};
  for (int64_t i = 0; i < count; ++i) ++high[i % kCopies][keys[i] >> 8];
  const Bin major = find(high, k);
  // Keys of other bins are counted where nobody reads: a branch would be hard to predict.
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t other = keys[i] >> 8 != major.value;
    ++low[i % kCopies][(keys[i] & 255u) | other << 8];
  }
  const Bin minor = find(low, major.rest);
  const uint16_t threshold = static_cast<uint16_t>(major.value << 8 | minor.value);
  int64_t ties = minor.rest;
  const auto compare = scores_table().compare;
  for (int64_t i = 0; i < count; i += kScoreBlock) {
    uint64_t take, equal;
    compare(keys + i, threshold, &take, &equal);
    if (count - i < kScoreBlock) {
      const uint64_t present = (uint64_t{1} << (count - i)) - 1;
      take &= present;
      equal &= present;
    }
    for (; equal != 0 && ties > 0; --ties) {
      take |= equal & -equal;
      equal &= equal - 1;
    }
    for (; take != 0; take &= take - 1) *indices++ = offset + static_cast<int32_t>(i + __builtin_ctzll(take));
  }
}

}  // namespace clo
