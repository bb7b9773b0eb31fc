// The difference of one head, computed by the blocks of a cluster that share its slots and its tokens.
#pragma once

#include "cuda/difference_exchange.cuh"

namespace clo::cuda {

struct Outcome {
  int moves, filled;
};

template <bool kShared>
class Share {
 public:
  __device__ Share(const ShareLayout& layout, unsigned char* shared, unsigned char* workspace, Exchange* exchange,
                   Scratch* scratch)
      : layout_(layout),
        exchange_(*exchange),
        scratch_(*scratch),
        rank_(cluster_rank()),
        slots_(layout.slot_words * 32),
        marks_(reinterpret_cast<uint32_t*>(kShared ? shared : workspace + blockIdx.x * layout.bytes)),
        fresh_(marks_ + layout.token_words),
        slot_words_(reinterpret_cast<SlotWord*>(fresh_ + layout.token_words)),
        recencies_(reinterpret_cast<uint16_t*>(slot_words_ + layout.slot_words)) {}

  __device__ int rank() const { return rank_; }

  // Of head i, ahead of what Head has to say of it.
  __device__ void load_slots(const LayerView& v, int i, int first) {
    const int start = rank_ * slots_ + first + static_cast<int>(threadIdx.x), rest = static_cast<int>(v.num_slots) - start;
    const int32_t* const tokens = v.slot_tokens + i * v.num_slots + start;
    const uint16_t* const last = v.slot_last + i * v.num_slots + start;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const bool there = mine_of(first, j) < slots_ && j * kShareThreads < rest;
      tokens_[j] = there ? tokens[j * kShareThreads] : -1;
      last_[j] = there ? last[j * kShareThreads] : 0;
    }
  }

  // Of the loaded slots: not kept in registers until the selection is there.
  __device__ void note_recencies(uint16_t refresh, int first) const {
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      if (mine_of(first, j) < slots_) recencies_[mine_of(first, j)] = static_cast<uint16_t>(recency_of(last_[j], refresh));
  }

  __device__ void clear() const {
#pragma unroll
    for (auto& histogram : exchange_.histogram) histogram[threadIdx.x] = 0;
    if (threadIdx.x < kClusterBlocks) exchange_.kept[threadIdx.x] = 0;
    if (threadIdx.x == kClusterBlocks) exchange_.chosen = 0;
#pragma unroll 1
    for (int w = threadIdx.x; w < layout_.token_words; w += kShareThreads) marks_[w] = 0;
  }

  // What the selection says of the tokens in the loaded slots, and this block's part of it.
  __device__ void load_selection(const Head& h) {
    each_ = max(1, (h.words + kClusterBlocks - 1) / kClusterBlocks);
    inverse_ = __fdividef(1.0f, static_cast<float>(each_));
    words_ = max(0, min(each_, h.words - rank_ * each_));
    const uint32_t* const bits = h.bits + rank_ * each_;
    load_selected(h, 0);
#pragma unroll 2
    for (int w = threadIdx.x; w < words_; w += kShareThreads) fresh_[w] = __ldcg(bits + w);
  }

  // Marks tokens that are in a slot in the block whose share they are in, and counts the slots of others by recency.
  __device__ void look_up_slots(const LayerView& v, const Head& h) {
    uint32_t chosen = 0;
#pragma unroll 1
    for (int w = threadIdx.x; w < words_; w += kShareThreads) chosen += __popc(fresh_[w]);
    chosen = __reduce_add_sync(~0u, chosen);
    if (threadIdx.x % 32 == 0) atomicAdd(&exchange_.chosen, chosen);
#pragma unroll 1
    for (int first = 0; first < slots_; first += kBatch * kShareThreads) {
      if (first > 0) {
        load_slots(v, h.number, first);
        note_recencies(h.refresh, first);
        load_selected(h, first);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const unsigned mine = mine_of(first, j);
        const int token = tokens_[j];
        const bool keep = selected_[j] >> (token & 31) & 1, other = token >= 0 && !keep;
        const int recency = mine < slots_ ? recencies_[mine] : 0;
        if (keep) mark(static_cast<uint32_t>(token));
        if (other) atomicAdd(&exchange_.histogram[0][max(0, recency - kFirstRecency)], 1u);
        const uint32_t other_slots = __ballot_sync(~0u, other), kept_slots = __ballot_sync(~0u, keep);
        if (mine >= slots_) continue;
        if (threadIdx.x % 32 == 0) slot_words_[mine / 32] = {other_slots, 0, kept_slots, 0};
      }
    }
  }

  // After a barrier of the cluster. Writes the request and the slots.
  __device__ Outcome move(const Head& h) const {
    const int lane = threadIdx.x % 32, owner = lane % kClusterBlocks;
    const Bin bin = gather_bin(exchange_.histogram[0], rank_);
    uint32_t stay = 0;
#pragma unroll
    for (int r = 0; r < kClusterBlocks; r += 32 / kClusterBlocks)
      stay += remote_load(remote(&exchange_.kept[owner], r + lane / kClusterBlocks));
    const uint32_t chosen = remote_load(remote(&exchange_.chosen, owner));
    const int part = (words_ + kShareThreads - 1) / kShareThreads;
    const int first = min(words_, static_cast<int>(threadIdx.x) * part), end = min(words_, first + part);
    uint32_t count = 0;
#pragma unroll 1
    for (int w = first; w < end; ++w) {
      fresh_[w] &= ~(kShared ? marks_[w] : __ldcg(marks_ + w));
      count += __popc(fresh_[w]);
    }
#pragma unroll
    for (int step = kClusterBlocks; step < 32; step *= 2) stay += __shfl_xor_sync(~0u, stay, step);
    const int moves = static_cast<int>(__reduce_add_sync(~0u, lane < kClusterBlocks ? chosen - stay : 0));
    const int filled = h.whole ? 0 : h.before, room = min(h.capacity - filled, moves), evicted = moves - room;

    const Sums before = scan_exclusive({count, bin.total, bin.lower}, scratch_.scan[0]);
    note_threshold(bin, before.b, before.c, static_cast<uint32_t>(evicted), kFirstRecency, &scratch_.threshold);
    int move = static_cast<int>(__reduce_add_sync(~0u, lane < rank_ ? chosen - stay : 0) + before.a);
#pragma unroll 1
    for (int w = first; w < end; ++w)
      for (uint32_t mask = fresh_[w]; mask != 0; mask &= mask - 1, ++move) {
        const int token = (rank_ * each_ + w) * 32 + __ffs(mask) - 1;
        h.from[move] = token;
        if (move < room) h.fill(move, filled + move, token);
      }
    if (h.whole)
#pragma unroll 1
      for (int slot = moves + rank_ * kShareThreads + threadIdx.x; slot < h.before; slot += kClusterBlocks * kShareThreads)
        h.tokens[slot] = -1;

    // After this barrier the new tokens of all blocks are in the request, and nobody reads another block's memory.
    cluster_arrive();
    __syncthreads();
    Threshold limit = scratch_.threshold;
    const bool found = evicted > 0 && limit.recency > kFirstRecency;
    if (found) choose_victims(limit, static_cast<uint32_t>(evicted));
    cluster_wait();
    if (evicted > 0 && !found) {
      search_first_bin(slot_words_, recencies_, layout_.slot_words, static_cast<uint32_t>(evicted), rank_, &exchange_,
                       &scratch_);
      choose_victims(scratch_.threshold, static_cast<uint32_t>(evicted));
    }
    if (!h.whole) update_slots(h, evicted > 0, room);
    return {moves, filled + room};
  }

 private:
  __device__ static unsigned mine_of(int first, int j) { return first + j * kShareThreads + threadIdx.x; }

  // Of block r: marks of its tokens that are in a slot.
  __device__ uint32_t* marks_of(int r) const {
    return kShared ? marks_ : marks_ + (r - rank_) * static_cast<int64_t>(layout_.bytes / sizeof(uint32_t));
  }

  __device__ void mark(uint32_t token) const {
    const uint32_t word = token / 32, bit = 1u << (token % 32);
    // Exact: half a word is more than the rounding makes of it.
    const int owner = static_cast<int>((static_cast<float>(word) + 0.5f) * inverse_);
    const uint32_t at = word - owner * each_;
    if constexpr (kShared) remote_or(remote(marks_ + at, owner), bit);
    else atomicOr(marks_of(owner) + at, bit);
    atomicAdd(&exchange_.kept[owner], 1u);
  }

  // Words of the selection that hold the tokens of the loaded slots.
  __device__ void load_selected(const Head& h, int first) {
    const int rest = h.whole ? 0 : h.before - rank_ * slots_ - first - static_cast<int>(threadIdx.x);
    const uint32_t* const bits = h.bits;
    const uint32_t words = h.words;  // no token is -1 / 32u
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (j * kShareThreads >= rest) tokens_[j] = -1;
      const uint32_t word = static_cast<uint32_t>(tokens_[j]) / 32;
      selected_[j] = word < words ? __ldcg(bits + word) : 0;
    }
  }

  // Finds the slots that give way and the numbers of their tokens. Ends with __syncthreads.
  __device__ void choose_victims(const Threshold& limit, uint32_t wanted) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, words = layout_.slot_words;
#pragma unroll 1
    for (int w = warp; w < words; w += kShareWarps) {
      const bool other = slot_words_[w].others >> lane & 1;
      const int value = recencies_[w * 32 + lane];
      const uint32_t older = __ballot_sync(~0u, other && value < limit.recency);
      const uint32_t equal = __ballot_sync(~0u, other && value == limit.recency);
      __syncwarp();  // every lane has read the word
      if (lane == 0) {
        slot_words_[w].others = older;
        slot_words_[w].place = equal;
      }
    }
    __syncthreads();
    const int part = (words + kShareThreads - 1) / kShareThreads;
    const int first = min(words, static_cast<int>(threadIdx.x) * part), end = min(words, first + part);
    uint32_t older = 0, equal = 0;
#pragma unroll 1
    for (int w = first; w < end; ++w) {
      older += __popc(slot_words_[w].others);
      equal += __popc(slot_words_[w].place);
    }
    const Sums before = scan_exclusive({older, equal, 0}, scratch_.scan[1]);
    older = limit.better_before + before.a;
    equal = limit.equal_before + before.b;
    const uint32_t ties = wanted - limit.better;  // of all blocks, the first in the order of slots
#pragma unroll 1
    for (int w = first; w < end; ++w) {
      SlotWord& word = slot_words_[w];
      const uint32_t mask = word.others;
      uint32_t tied = word.place;
      word.place = older + min(equal, ties);
      const uint32_t keep = equal < ties ? ties - equal : 0;
      equal += __popc(tied);
#pragma unroll 1
      for (uint32_t n = __popc(tied); n > keep; --n) tied &= ~(0x80000000u >> __clz(tied));
      older += __popc(mask);
      word.others = mask | tied;
    }
    __syncthreads();
  }

  // Tokens that stay have been selected again; victims get new ones, from number `room` on.
  __device__ void update_slots(const Head& h, bool evict, int room) const {
    const uint32_t below = (1u << (threadIdx.x % 32)) - 1, bit = below + 1;
    const int32_t* const from = h.from;
    int32_t* const to = h.to;
    const uint16_t refresh = h.refresh;
#pragma unroll 1
    for (int first = 0; first < slots_; first += kBatch * kShareThreads) {
      const int start = rank_ * slots_ + first + static_cast<int>(threadIdx.x);
      int32_t* const tokens = h.tokens + start;
      uint16_t* const last = h.last + start;
      int moves[kBatch], fresh[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const unsigned mine = mine_of(first, j);
        const SlotWord word = mine < slots_ ? slot_words_[mine / 32] : SlotWord{};
        const bool victim = evict && (word.others & bit) != 0;
        moves[j] = victim ? room + static_cast<int>(word.place) + __popc(word.others & below) : -1;
        fresh[j] = victim ? __ldcg(from + moves[j]) : 0;
        if (victim || (word.kept & bit) != 0) last[j * kShareThreads] = refresh;
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (moves[j] < 0) continue;
        tokens[j * kShareThreads] = fresh[j];
        to[moves[j]] = start + j * kShareThreads;
      }
    }
  }

  const ShareLayout& layout_;
  Exchange& exchange_;
  Scratch& scratch_;
  const int rank_;
  const unsigned slots_;       // of a block; a multiple of 32
  uint32_t* const marks_;      // tokens of this block's share that are in a slot
  uint32_t* const fresh_;      // selected tokens of this block's share; later those that are in no slot
  SlotWord* const slot_words_;
  uint16_t* const recencies_;  // of the slots
  int each_ = 1, words_ = 0;   // words of masks over tokens of each block; of this one
  float inverse_ = 1;          // of each_
  int tokens_[kBatch];           // of the slots that are being looked up
  uint16_t last_[kBatch];
  uint32_t selected_[kBatch];
};

}  // namespace clo::cuda
