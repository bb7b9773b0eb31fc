// How a selection is laid out: sizes that follow from shapes and the grid alone.
#pragma once

#include <algorithm>

#include "cuda/select_exchange.cuh"
#include "cuda/select_scores.cuh"

namespace clo::cuda {

constexpr int kMaxBlocks = 160;     // of a grid
constexpr int kBins = kGroups * kMaxFine;
constexpr int kFastBits = 256;      // the usual number of hash bits
constexpr size_t kMaxShared = 222 * 1024;

struct Plan {
  int ranks;          // number of different ranks
  int bins, fine;     // of a histogram: kGroups times `fine` bins, of which `bins` are used
  int part;           // most keys of a block, with those before the first word of bits
  bool shared_ranks;  // ranks fit in shared memory; else they are in the workspace
  int query_bytes, plane_bytes, shared_bytes;  // of shared memory
  int stream_offset;  // of 256-bit codes
  size_t rank_bytes;  // of one block
};

constexpr size_t align(size_t n, size_t to) { return (n + to - 1) / to * to; }

inline int head_blocks(int64_t heads, int grid) {
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(kMaxHeadBlocks, grid / std::max<int64_t>(heads, 1))));
}

inline Plan make_plan(const SelectTopkParams& p, int grid) {
  Plan plan{};
  const int64_t G = p.group, R = p.bits, sets = (G + 3) / 4;
  const bool exact = p.retriever == Retriever::kExact, hata = p.retriever == Retriever::kHata;
  plan.ranks = hata ? static_cast<int>(G % 2 == 0 ? G * R / 2 : G * R) + 1 : 65536;
  plan.bins = std::min(plan.ranks, kBins);
  plan.fine = static_cast<int>(align((static_cast<size_t>(plan.bins) + kGroups - 1) / kGroups, 2));
  const int blocks = head_blocks(p.batch * p.kv_heads, grid);
  plan.part = static_cast<int>(align((p.max_tokens + blocks - 1) / blocks, 32));
  plan.rank_bytes = align(static_cast<size_t>(plan.part) * 2, 256);
  plan.query_bytes = exact ? static_cast<int>(4 * sets * p.head_dim * sizeof(float)) : 0;
  plan.plane_bytes = exact ? 0 : static_cast<int>((hata ? 1 : 4 * sets) * kPlanes * (R / 32) * sizeof(uint32_t));
  const size_t fixed =
      static_cast<size_t>(exchange_words(plan.fine)) * sizeof(uint32_t) + plan.query_bytes + plan.plane_bytes;
  const size_t stream = hata ? CodeStream<false>::kBytes : CodeStream<true>::kBytes;
  const size_t codes = !exact && R == kFastBits ? stream : 0;
  plan.shared_ranks = align(fixed, 128) + plan.rank_bytes + codes <= kMaxShared;
  plan.stream_offset = static_cast<int>(align(fixed, 128) + (plan.shared_ranks ? plan.rank_bytes : 0));
  plan.shared_bytes = plan.stream_offset + static_cast<int>(codes);
  return plan;
}

}  // namespace clo::cuda
