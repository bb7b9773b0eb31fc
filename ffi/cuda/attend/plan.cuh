// Who attends to which rows.
//
// Rows are read in units of a few consecutive rows of one head's segment. Two lines of units exist: the resident heads'
// (line 0), and the offloaded heads', each head's sink and tail rows before its selected ones (line 1). Each line is cut
// into equal contiguous ranges, one a block, so that every block has its share of what needs no transfer before it waits
// for one. A range touches one or more heads; what a block finds out about one head in one line is a fragment, and the
// fragments of a line, in order, have growing slots in the workspace.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "cuda/flags.cuh"
#include "cuda/kernels.h"

namespace clo::cuda {

constexpr int kMaxBlocks = 256;

struct AttendArgs {
  int batch, offloaded, resident, group, words;  // words = R / 32
  int max_tokens, tail_rows, sink, num_slots;
  float scale_log2;
  const void* query;
  const void* key;
  const void* value;
  const float* weights;
  const float* mean;
  const int32_t* position;
  const int32_t* flushed;
  char* resident_rows;
  char* tail;
  uint32_t* codes;
  uint16_t* factors;
  void* out;
  float* lse;
  EngineRef engine;
  int blocks;         // of the grid that reads rows
  float* acc;         // [slots, G, D] of the fragments
  float2* state;      // [slots, G] largest score and sum
  float* magnitudes;  // [B, Ko, words] Σ |projection| over 32 bits

  __device__ int kv_heads() const { return offloaded + resident; }
  __device__ int heads(int line) const { return batch * (line == 0 ? resident : offloaded); }

  // Head i of a line among all: b·K + KV head.
  __device__ int kv_head(int line, int i) const {
    return line == 0 ? i / resident * kv_heads() + offloaded + i % resident
                     : i / offloaded * kv_heads() + i % offloaded;
  }

  // Positions are data that nobody has checked. Those that lead outside of the buffers make a sequence's results NaN, and
  // are told in the error word when there is one.
  __device__ bool valid(int p, int f) const {
    if (p < 0 || p >= max_tokens) return false;
    return offloaded == 0 || (f >= 0 && f <= p + 1 && p + 1 - max(sink, f) <= tail_rows - sink);
  }
  __device__ bool valid(int b) const { return valid(position[b], flushed[b]); }

  __device__ size_t first_slot(int line) const { return line == 0 ? 0 : blocks + heads(0); }
};

// What of a layer's view is needed before the first copy.
struct Place {
  int kv_heads;
  const int32_t* slot_counts;
  const char* selected_rows;
};

__device__ inline Place place_of(const LayerView& view) {
  return {static_cast<int>(view.kv_heads), view.slot_counts, static_cast<const char*>(view.selected_rows)};
}

template <typename T>
__device__ const T* shuffled(const T* pointer, int lane) {
  return reinterpret_cast<const T*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(pointer), lane));
}

// That of another lane.
__device__ inline Place shuffled(const Place& place, int lane) {
  return {__shfl_sync(~0u, place.kv_heads, lane), shuffled(place.slot_counts, lane), shuffled(place.selected_rows, lane)};
}

// Where the engine has the layer's rows. Fixed for the engine's life, but for which layer it is.
struct Source {
  int layer;
  const LayerView* view;  // null: there is no such layer, or it cannot be known yet
  const int32_t* slot_counts;
  const char* selected_rows;  // null: rows are gathered from host_rows
};

// By one warp. Which layer it is and where the first 32 layers have their rows is asked at once: the second question would
// else wait for the first. The number is from L2, because what the L1 has may be older than the previous kernel's work.
// settled: that kernel is over. Before, the number may be anything, so that it must be among those that the engine has,
// and name a layer of this call's shape.
__device__ inline Source find_source(const AttendArgs& a, bool settled, int lane) {
  Source s{};
  if (a.offloaded == 0) return s;
  const LayerRef& layers = a.engine.layer;
  s.layer = __ldcg(layers.index);
  Place place{};
  if (static_cast<uint32_t>(lane) < layers.count) place = place_of(layers.views[lane]);
  place = shuffled(place, s.layer & 31);
  if (layers.count == 0 ? !settled : static_cast<uint32_t>(s.layer) >= layers.count) return s;
  if (layers.count == 0 || s.layer >= 32) place = place_of(layers.views[s.layer]);
  if (!settled && place.kv_heads != a.offloaded) return s;
  s.view = layers.views + s.layer;
  s.slot_counts = place.slot_counts;
  s.selected_rows = place.selected_rows;
  return s;
}

// How far the layer's transfers are.
struct Progress {
  uint32_t posted;  // the last request
  bool known;
  bool ready;       // all its rows are there, or nothing is ever transferred
};

// By one warp, asked at once like the source.
__device__ inline Progress find_progress(const AttendArgs& a, bool settled, int lane) {
  if (a.offloaded == 0 || a.engine.flags == nullptr) return {0, true, true};
  const uint32_t count = a.engine.layer.count;
  const int layer = __ldcg(a.engine.layer.index);
  uint32_t posted = 0, ready = 0;
  if (static_cast<uint32_t>(lane) < count) {
    posted = load_relaxed(&a.engine.flags[lane].posted);
    ready = load_acquire(&a.engine.flags[lane].ready);
  }
  posted = __shfl_sync(~0u, posted, layer & 31);
  ready = __shfl_sync(~0u, ready, layer & 31);
  if (count == 0 ? !settled : static_cast<uint32_t>(layer) >= count) return {0, false, false};
  if (count == 0 || layer >= 32) {
    posted = load_relaxed(&a.engine.flags[layer].posted);
    ready = load_acquire(&a.engine.flags[layer].ready);
  }
  return {posted, true, static_cast<int32_t>(ready - posted) >= 0};
}

// Rows of one head of a line: of its resident or tail segment, and of its selected one.
struct HeadRows {
  int dense, selected;

  __device__ bool operator!=(const HeadRows& other) const {
    return dense != other.dense || selected != other.selected;
  }
};

__device__ inline HeadRows rows_of(const AttendArgs& a, int line, int i, const int32_t* slot_counts) {
  if (line == 1 && slot_counts == nullptr) return {0, 0};
  const int b = i / (line == 0 ? a.resident : a.offloaded);
  const int position = __ldcg(a.position + b), flushed = __ldcg(a.flushed + b);
  const int selected = line == 0 ? 0 : __ldcg(slot_counts + i), end = position + 1;
  if (!a.valid(position, flushed)) return {0, 0};
  if (line == 0) return {end, 0};
  return {min(a.sink, end) + max(0, end - max(a.sink, flushed)), min(max(selected, 0), a.num_slots)};
}

template <int UnitRows>
__device__ inline int units_of(HeadRows rows) {
  return (rows.dense + UnitRows - 1) / UnitRows + (rows.selected + UnitRows - 1) / UnitRows;
}

// `units` cut into contiguous ranges that differ by at most one; no range is empty. Where heads are equally long and as
// many as divide the blocks, no range has units of two.
struct Split {
  int units, blocks, each, extra;

  __device__ Split(int units_, int grid, int warps) : units(units_), blocks(min(grid, (units_ + warps - 1) / warps)) {
    each = blocks > 0 ? units / blocks : 0;
    extra = units - each * blocks;
  }
  __device__ int begin(int block) const { return block < blocks ? block * each + block * extra / blocks : units; }
  __device__ int count(int block) const {
    return block < blocks ? each + (block * extra % blocks + extra >= blocks ? 1 : 0) : 0;
  }
  __device__ int owner(int unit) const {
    int block = min(blocks - 1, static_cast<int>(static_cast<float>(unit) / static_cast<float>(units) *
                                                 static_cast<float>(blocks)));
    while (begin(block) > unit) --block;
    while (begin(block + 1) <= unit) ++block;
    return block;
  }
};

// Block of the grid -> its place in a line. The lines begin at opposite ends, so that short ones do not meet.
__device__ inline int place_in_line(int line, int block, int blocks) { return line == 0 ? block : blocks - 1 - block; }

// In shared memory.
struct Plan {
  int *before_first, *before_second;     // [heads + 1] units before each head of the line, and of all
  HeadRows *rows_first, *rows_second;    // [heads]

  __device__ int* before(int line) const { return line == 0 ? before_first : before_second; }
  __device__ HeadRows* rows(int line) const { return line == 0 ? rows_first : rows_second; }
};

// A block's units of a line, and the head that the first is of.
struct Share {
  int begin, count, head;
};

// A line's part of the plan, by one warp.
template <int UnitRows>
__device__ void plan_line(const AttendArgs& a, int line, const int32_t* slot_counts, const Plan& plan, int lane) {
  const int heads = a.heads(line);
  int total = 0;
#pragma unroll 1
  for (int first = 0; first < heads; first += 32) {
    const int i = first + lane;
    const HeadRows rows = i < heads ? rows_of(a, line, i, slot_counts) : HeadRows{0, 0};
    const int units = units_of<UnitRows>(rows);
    int sum = units;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
      const int other = __shfl_up_sync(~0u, sum, offset);
      if (lane >= offset) sum += other;
    }
    if (i < heads) {
      plan.before(line)[i] = total + sum - units;
      plan.rows(line)[i] = rows;
    }
    total += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) plan.before(line)[heads] = total;
}

// Whether the plan would be another by now, or rows have been asked for since, by one warp.
__device__ inline bool plan_changed(const AttendArgs& a, const Plan& plan, const Source& source, const Progress& progress,
                                    int lane) {
  bool changed = false;
  if (a.offloaded > 0) {
    changed = source.view == nullptr || !progress.known || __ldcg(a.engine.layer.index) != source.layer;
    if (!changed && a.engine.flags != nullptr)
      changed = load_relaxed(&a.engine.flags[source.layer].posted) != progress.posted;
  }
#pragma unroll 1
  for (int line = 0; line < 2; ++line) {
#pragma unroll 1
    for (int i = lane; i < a.heads(line); i += 32)
      changed |= rows_of(a, line, i, source.slot_counts) != plan.rows(line)[i];
  }
  return __any_sync(~0u, changed);
}

// The share of the block at that place in the line, by one warp.
__device__ inline Share share_of(const int* before, int heads, int place, int grid, int warps, int lane) {
  if (before[heads] == 0) return {0, 0, 0};
  const Split split(before[heads], grid, warps);
  Share share = {split.begin(place), split.count(place), 0};
#pragma unroll 1
  for (int first = 0; share.count > 0 && first < heads; first += 32) {
    const int i = first + lane;
    const unsigned here = __ballot_sync(~0u, i < heads && before[i] <= share.begin && share.begin < before[i + 1]);
    if (here != 0) {
      share.head = first + __ffs(here) - 1;
      break;
    }
  }
  return share;
}

}  // namespace clo::cuda
