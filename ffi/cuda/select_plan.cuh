// How a selection is laid out: sizes that follow from shapes and the grid alone.
#pragma once

#include <algorithm>

#include "cuda/select_scores.cuh"

namespace clo::cuda {

constexpr int kMaxBlocks = 160;     // of a grid
constexpr int kMaxHeadBlocks = 64;  // that share one head
constexpr int kBins = 2 * kThreads;
constexpr int kLowBits = 5;         // 65536 ranks are kBins times 2^5
constexpr int kFastBits = 256;      // the usual number of hash bits
constexpr size_t kMaxShared = 222 * 1024;

struct Plan {
  int ranks;          // number of different ranks
  int part;           // most keys of a block
  bool shared_ranks;  // ranks fit in shared memory; else they are in the workspace
  int query_bytes, plane_bytes, shared_bytes;  // of shared memory
  int ring_offset, ring_slots;                 // of 256-bit codes; 0 slots for others
  size_t rank_bytes;  // of one block's ranks, masks and places
};

constexpr size_t align(size_t n, size_t to) { return (n + to - 1) / to * to; }

inline int head_blocks(int64_t heads, int grid) {
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(kMaxHeadBlocks, grid / std::max<int64_t>(heads, 1))));
}

inline Plan make_plan(const SelectTopkParams& p, int grid) {
  Plan plan{};
  const int64_t G = p.group, R = p.bits, sets = (G + 3) / 4;
  const bool exact = p.retriever == Retriever::kExact;
  plan.ranks = p.retriever == Retriever::kHata ? static_cast<int>(G % 2 == 0 ? G * R / 2 : G * R) + 1 : 65536;
  const int blocks = head_blocks(p.batch * p.kv_heads, grid);
  plan.part = static_cast<int>(align((p.max_tokens + blocks - 1) / blocks, 32));
  plan.rank_bytes = align(static_cast<size_t>(plan.part) * 2 + static_cast<size_t>(plan.part) / 32 * 8, 256);
  plan.query_bytes = exact ? static_cast<int>(4 * sets * p.head_dim * sizeof(float)) : 0;
  plan.plane_bytes = exact ? 0 : static_cast<int>(4 * sets * kPlanes * (R / 32) * sizeof(uint32_t));
  const size_t fixed = kBins * sizeof(uint32_t) + plan.query_bytes + plan.plane_bytes;
  const size_t slot = !exact && R == kFastBits ? CodeRing::kSlotBytes : 0;
  plan.shared_ranks = fixed + plan.rank_bytes + slot + 128 <= kMaxShared;
  plan.ring_offset = static_cast<int>(align(fixed + (plan.shared_ranks ? plan.rank_bytes : 0), 128));
  if (slot > 0)
    plan.ring_slots = std::min(CodeRing::kMaxSlots, static_cast<int>((kMaxShared - plan.ring_offset) / slot));
  plan.shared_bytes = plan.ring_offset + plan.ring_slots * CodeRing::kSlotBytes;
  return plan;
}

}  // namespace clo::cuda
