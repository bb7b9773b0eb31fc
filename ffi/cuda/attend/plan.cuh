// Who attends to which rows.
//
// Rows are read in units of a few consecutive rows of one head's segment. Two lines of units exist: the resident heads'
// (line 0), and the offloaded heads', each head's sink and tail rows before its selected ones (line 1). Each line is cut
// into equal contiguous ranges, one a block, so that every block has its share of what needs no transfer before it waits
// for one. A range touches one or more heads; what a block finds out about one head in one line is a fragment, and the
// fragments of a line, in order, have growing slots in the workspace.
#pragma once

#include <cstdint>

#include "cuda/attend/args.cuh"
#include "cuda/attend/ptx.cuh"
#include "cuda/attend/source.cuh"

namespace clo::cuda {

// x / d by way of a reciprocal, for at least 0 and 1. The compiler's own way is twice as many instructions one after the
// other, for which the first copies wait.
struct Quotient {
  int value, rest;

  __device__ Quotient(int x, int d) {
    const float reciprocal = reciprocal_of(static_cast<float>(d));
    value = static_cast<int>(static_cast<float>(x) * reciprocal);
    value += static_cast<int>(static_cast<float>(x - value * d) * reciprocal);  // large ones have not enough places
    rest = x - value * d;
    const int step = (rest >= d ? 1 : 0) - (rest < 0 ? 1 : 0);
    value += step;
    rest -= step * d;
  }
};

// Rows of one head of a line: of its resident or tail segment, and of its selected one.
struct HeadRows {
  int dense, selected;

  __device__ bool operator!=(const HeadRows& other) const {
    return dense != other.dense || selected != other.selected;
  }
};

// What a head's rows follow from, its slots apart.
struct Lengths {
  int position, flushed;
};

// Of head i of a line.
__device__ inline Lengths lengths_of(const AttendArgs& a, int line, int i) {
  if (i >= a.heads(line)) return {-1, 0};
  const int b = a.batch == 1 ? 0 : Quotient(i, line == 0 ? a.resident : a.offloaded).value;
  return {__ldcg(a.position + b), __ldcg(a.flushed + b)};
}

__device__ inline HeadRows rows_of(const AttendArgs& a, int line, int i, Lengths lengths, const int32_t* slot_counts) {
  if (i >= a.heads(line) || (line == 1 && slot_counts == nullptr)) return {0, 0};
  const int selected = line == 0 ? 0 : __ldcg(slot_counts + i), end = lengths.position + 1;
  if (!a.valid(lengths.position, lengths.flushed)) return {0, 0};
  if (line == 0) return {end, 0};
  return {min(a.sink, end) + max(0, end - max(a.sink, lengths.flushed)), min(max(selected, 0), a.num_slots)};
}

template <int UnitRows>
__device__ inline int units_of(HeadRows rows) {
  return (rows.dense + UnitRows - 1) / UnitRows + (rows.selected + UnitRows - 1) / UnitRows;
}

struct Range {
  int begin, count;
};

// `units` cut into contiguous ranges that differ by at most one; no range is empty. Where heads are equally long and as
// many as divide the blocks, no range has units of two.
struct Split {
  int units, blocks, each, extra;

  __device__ Split(int units_, int grid, int warps) : units(units_), blocks(min(grid, (units_ + warps - 1) / warps)) {
    const Quotient quotient(units, max(blocks, 1));
    each = quotient.value;
    extra = quotient.rest;
  }
  __device__ Range range(int block) const {
    if (block >= blocks) return {units, 0};
    const Quotient before(block * extra, blocks);
    return {block * each + before.value, each + (before.rest + extra >= blocks ? 1 : 0)};
  }
  __device__ int begin(int block) const { return range(block).begin; }
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

// The share of the block at that place in the line, by one warp.
__device__ inline Share share_of(const int* before, int heads, int place, int grid, int warps, int lane) {
  if (before[heads] == 0) return {0, 0, 0};
  const Split split(before[heads], grid, warps);
  const Range range = split.range(place);
  Share share = {range.begin, range.count, 0};
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

// A line's part of the plan, and the share of the block at that place in it, by one warp. lengths: of this lane's head
// among the first 32.
template <int UnitRows>
__device__ void plan_line(const AttendArgs& a, int line, Lengths lengths, const int32_t* slot_counts, const Plan& plan,
                          int place, int warps, Share* share, int lane) {
  const int heads = a.heads(line);
  int total = 0;
#pragma unroll 1
  for (int first = 0; first < heads; first += 32) {
    const int i = first + lane;
    if (first > 0) lengths = lengths_of(a, line, i);
    const HeadRows rows = rows_of(a, line, i, lengths, slot_counts);
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
  __syncwarp();
  const Share mine = share_of(plan.before(line), heads, place, a.blocks, warps, lane);
  if (lane == 0) *share = mine;
}

// What the plan follows from, looked at again by one warp after the previous kernel.
class PlanCheck {
 public:
  __device__ PlanCheck(const AttendArgs& a, int lane) : posted_(0) {
    const SourceLoads loads(a, lane);
    const Lengths first = lengths_of(a, 0, lane), second = lengths_of(a, 1, lane);
    source_ = find_source(a, loads, true);
    if (source_.view != nullptr && a.engine.flags != nullptr)
      posted_ = load_relaxed(&a.engine.flags[source_.layer].posted);
    first_ = rows_of(a, 0, lane, first, nullptr);
    second_ = rows_of(a, 1, lane, second, source_.slot_counts);
  }

  // Whether a plan made before would be another now, or rows have been asked for since.
  __device__ bool differs(const AttendArgs& a, const Plan& plan, const Source& source, const Progress& progress,
                          int lane) const {
    bool changed = false;
    if (a.offloaded > 0) {
      changed = source.view == nullptr || source.layer != source_.layer;
      if (a.engine.flags != nullptr) changed |= progress.layer != source_.layer || progress.posted != posted_;
    }
#pragma unroll 1
    for (int line = 0; line < 2; ++line) {
      HeadRows rows = line == 0 ? first_ : second_;
#pragma unroll 1
      for (int i = lane; i < a.heads(line); i += 32) {
        if (i >= 32) rows = rows_of(a, line, i, lengths_of(a, line, i), source_.slot_counts);
        changed |= rows != plan.rows(line)[i];
      }
    }
    return __any_sync(~0u, changed);
  }

 private:
  Source source_;
  uint32_t posted_;
  HeadRows first_, second_;  // of head `lane` in each line
};

}  // namespace clo::cuda
