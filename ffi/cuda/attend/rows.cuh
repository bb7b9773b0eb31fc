// One warp's share of its block's rows, copied to a ring of stages in shared memory some units ahead of their use.
#pragma once

#include <cstdint>

#include "cuda/attend/plan.cuh"
#include "cuda/attend/ptx.cuh"
#include "cuda/attend/quantized.cuh"
#include "cuda/attend/source.cuh"
#include "cuda/flags.cuh"

namespace clo::cuda {

// Tile: what is computed on a unit; gives kRowBytes, kUnitRows, kStages, kWarps, and how rows lie in a
// stage: kStride bytes apart, chunks of 16 bytes moved by swizzle(row). kQuantized: selected rows are.
template <class Tile, bool kQuantized>
class RowReader {
  static constexpr int kRowBytes = Tile::kRowBytes, kHalf = kRowBytes / 2, kUnitRows = Tile::kUnitRows;
  static constexpr int kChunks = kRowBytes / 16, kCopies = kUnitRows * kChunks / 32;
  static_assert(kUnitRows * kChunks % 32 == 0, "every lane copies as many chunks");
  static constexpr int kStored = kQuantized ? QuantizedUnit<Tile>::kRowBytes : kRowBytes;  // bytes of a selected row
  static constexpr int kStoredChunks = kStored / 16, kNarrowChunks = kUnitRows * kStoredChunks;

 public:
  static constexpr int kStageBytes = kUnitRows * Tile::kStride;

  __device__ RowReader(const AttendArgs& a, const Plan& plan, const Source& source, int warp, int lane, uint32_t stages,
                       int* filled)
      : a_(a), plan_(plan), source_(source), warp_(warp), lane_(lane), stages_(stages), filled_(filled),
        policy_(evict_first_policy()) {}

  // shares: of the block in line 0 and 1; lead: the line that is read first; ready: no transfer need be waited for.
  __device__ void start(const Share (&shares)[2], int lead, bool ready) {
    other_ = lead == 0 ? shares[1] : shares[0];
    ready_ = ready;
    leading_ = true;
    begin_line(lead, lead == 0 ? shares[0] : shares[1]);
  }

  // Which of its block's units of a line is a warp's first. Both lines are dealt out alike whichever is read first, for
  // results must not depend on that.
  __device__ static int first_unit(int line, int warp) { return line == 0 ? warp : Tile::kWarps - 1 - warp; }

  __device__ uint32_t stage(int slot) const { return stages_ + slot * kStageBytes; }
  __device__ int rows(int slot) const { return kQuantized ? filled_[slot] & kUnitCount : filled_[slot]; }  // of its unit
  __device__ bool quantized(int slot) const { return kQuantized && filled_[slot] > kUnitCount; }

  // Whether the next unit is of selected rows.
  __device__ bool selected_is_next() {
    if (!find_next() || line_ == 0) return false;
    return unit_ - plan_.before(1)[head_] >= dense_units(plan_.rows(1)[head_]);
  }

  // Starts the copy of the warp's next unit, if any, into a stage.
  __device__ void issue(int slot) {
    if (find_next()) {
      const HeadRows rows = plan_.rows(line_)[head_];
      const int i = unit_ - plan_.before(line_)[head_], dense = dense_units(rows);
      int n;
      Row mine;  // row `lane` of the unit
      if (line_ == 0) {
        n = find_resident(i * kUnitRows, rows.dense, &mine);
      } else if (i < dense) {
        n = find_tail(i * kUnitRows, rows.dense, &mine);
      } else {
        wait_once();
        n = find_selected((i - dense) * kUnitRows, rows.selected, &mine);
      }
      const bool narrow = kQuantized && line_ == 1 && i >= dense;
      if (lane_ == 0) filled_[slot] = min(n, kUnitRows) + (narrow ? kUnitCount + 1 : 0);
      if (narrow && n == kWhole) copy_narrow_block(slot, mine.address);
      else if (narrow) copy_narrow_rows(slot, n, mine.address);
      else if (n == kWhole) copy_block(slot, mine.address);
      else copy_rows(slot, n, mine);
      unit_ += Tile::kWarps;
    }
    commit_copies();
  }

 private:
  static constexpr int kUnitCount = 31;         // bits of a stage's number of rows; the next one: they are quantized
  static constexpr int kWhole = kUnitRows + 1;  // all rows of the unit, one after the other from the address found

  // A row, unless it is the new token's: that one is read from where it comes from, for it is being written meanwhile.
  struct Row {
    const char* address;
    bool is_new;
  };

  __device__ static int dense_units(HeadRows rows) { return (rows.dense + kUnitRows - 1) / kUnitRows; }

  __device__ void begin_line(int line, const Share& share) {
    line_ = line;
    head_ = share.head;
    unit_ = share.begin + first_unit(line, warp_);
    end_ = share.begin + share.count;
  }

  // Moves on to the line and the head of the next unit. False: there is none.
  __device__ bool find_next() {
    if (unit_ >= end_) {
      if (!leading_) return false;
      leading_ = false;
      begin_line(1 - line_, other_);
      if (unit_ >= end_) return false;
    }
    const int* const before = plan_.before(line_);
#pragma unroll 1
    while (unit_ >= before[head_ + 1]) ++head_;
    return true;
  }

  // Each finds this lane's row of a unit that begins at row `first` of `count`, and returns how many rows the unit has,
  // or kWhole.
  __device__ int find_resident(int first, int count, Row* mine) const {
    const char* base = a_.resident_rows + (static_cast<size_t>(head_) * a_.max_tokens + first) * kRowBytes;
    const int n = count - first, row = min(lane_, n - 1);
    if (n > kUnitRows) return whole(base, mine);
    *mine = {base + row * kRowBytes, row == n - 1};
    return n;
  }

  __device__ int find_tail(int first, int count, Row* mine) const {
    const int b = head_ / a_.offloaded, position = a_.position[b], sinks = min(a_.sink, position + 1);
    const int oldest = max(a_.sink, a_.flushed[b]), ring = a_.tail_rows - a_.sink;
    const char* base = a_.tail + static_cast<size_t>(head_) * a_.tail_rows * kRowBytes;
    const int n = min(count - first, kUnitRows), j = first + min(lane_, n - 1);
    const int token = j < sinks ? j : oldest + j - sinks;
    const int index = token < a_.sink ? token : a_.sink + (token - a_.sink) % ring;
    const int begin = __shfl_sync(~0u, index, 0);
    const bool in_place = index == begin + j - first && token != position;
    if (n == kUnitRows && __all_sync(~0u, in_place))
      return whole(base + static_cast<size_t>(begin) * kRowBytes, mine);
    *mine = {base + static_cast<size_t>(index) * kRowBytes, token == position};
    return n;
  }

  __device__ int find_selected(int first, int count, Row* mine) const {
    const int n = min(count - first, kUnitRows), row = min(lane_, n - 1);
    if (source_.selected_rows != nullptr) {
      const char* base = source_.selected_rows + (static_cast<size_t>(head_) * a_.num_slots + first) * kStored;
      if (n == kUnitRows) return whole(base, mine);
      *mine = {base + row * kStored, false};
      return n;
    }
    const int token = source_.view->slot_tokens[static_cast<size_t>(head_) * a_.num_slots + first + row];
    *mine = {static_cast<const char*>(source_.view->host_rows) +
                 (static_cast<size_t>(head_) * a_.max_tokens + token) * kStored,
             false};
    return n;
  }

  __device__ static int whole(const char* base, Row* mine) {
    *mine = {base, false};
    return kWhole;
  }

  // True for one warp of the grid, which speaks for all when the wait is counted.
  __device__ bool reads_last_unit() const {
    const int last = plan_.before(1)[a_.heads(1)] - 1;
    return line_ == 1 && end_ == last + 1 && (last - unit_) % Tile::kWarps == 0;
  }

  // After a failed wait the rows are those that were there before: the error word tells.
  __device__ void wait_once() {
    if (ready_) return;
    if (lane_ == 0) {
      const uint64_t start = global_nanoseconds();
      wait_ready(a_.engine.flags + a_.engine.layer.index[0], a_.engine.timeout_ns, a_.engine.error);
      if (a_.engine.counters != nullptr && reads_last_unit())
        atomicAdd(&a_.engine.counters->wait_ns, global_nanoseconds() - start);
    }
    __syncwarp();
    ready_ = true;
  }

  __device__ void copy_block(int slot, const char* from) {
    // The place of a chunk follows from the lane alone where a number of rows is copied at a time; else all of them would
    // be kept in registers.
    constexpr int kUnroll = 32 % kChunks == 0 || kChunks % 32 == 0 ? kCopies : 2;
    const uint32_t to = stage(slot);
    const char* source = from + lane_ * 16;
#pragma unroll kUnroll
    for (int i = 0; i < kCopies; ++i) {
      const int chunk = i * 32 + lane_, row = chunk / kChunks;
      copy_async(to + row * Tile::kStride + ((chunk % kChunks ^ Tile::swizzle(row)) << 4), source + i * 512, 16,
                 policy_);
    }
  }

  // n rows wherever they are; the rest of the unit becomes zero.
  __device__ void copy_rows(int slot, int n, Row mine) {
    const unsigned long long address = reinterpret_cast<unsigned long long>(mine.address);
    const unsigned new_rows = __ballot_sync(~0u, mine.is_new);
    const size_t new_offset = static_cast<size_t>(a_.kv_head(line_, head_)) * kHalf;
    const uint32_t to = stage(slot);
#pragma unroll 2
    for (int i = 0; i < kCopies; ++i) {
      const int chunk = i * 32 + lane_, row = chunk / kChunks, column = chunk % kChunks * 16;
      const char* from = reinterpret_cast<const char*>(__shfl_sync(~0u, address, row)) + column;
      if ((new_rows >> row & 1) != 0)
        from = column < kHalf ? static_cast<const char*>(a_.key) + new_offset + column
                              : static_cast<const char*>(a_.value) + new_offset + column - kHalf;
      copy_async(to + row * Tile::kStride + (column ^ Tile::swizzle(row) << 4), from, row < n ? 16 : 0, policy_);
    }
  }

  // The same of quantized rows, which lie at the end of the stage.
  __device__ void copy_narrow_block(int slot, const char* from) {
    const uint32_t to = stage(slot) + QuantizedUnit<Tile>::kBegin + lane_ * 16;
    const char* source = from + lane_ * 16;
#pragma unroll
    for (int i = 0; i < (kNarrowChunks + 31) / 32; ++i)
      if (i * 32 + lane_ < kNarrowChunks) copy_async(to + i * 512, source + i * 512, 16, policy_);
  }

  __device__ void copy_narrow_rows(int slot, int n, const char* mine) {
    const unsigned long long address = reinterpret_cast<unsigned long long>(mine);
    const uint32_t to = stage(slot) + QuantizedUnit<Tile>::kBegin;
#pragma unroll 2
    for (int i = 0; i < (kNarrowChunks + 31) / 32; ++i) {
      const int chunk = i * 32 + lane_, row = min(chunk / kStoredChunks, kUnitRows - 1);
      const char* from =
          reinterpret_cast<const char*>(__shfl_sync(~0u, address, row)) + (chunk - row * kStoredChunks) * 16;
      if (chunk < kNarrowChunks) copy_async(to + chunk * 16, from, row < n ? 16 : 0, policy_);
    }
  }

  const AttendArgs& a_;
  const Plan plan_;
  const Source& source_;
  const int warp_, lane_;
  const uint32_t stages_;
  int* const filled_;
  const uint64_t policy_;
  Share other_;  // of the line that is read last
  bool ready_, leading_;
  int line_, head_, unit_, end_;  // the next unit of the line and the end of the block's share
};

}  // namespace clo::cuda
