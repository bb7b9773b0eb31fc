// One warp's share of its block's rows, copied to a ring of stages in shared memory some units ahead of their use.
#pragma once

#include <cstdint>

#include "cuda/attend/plan.cuh"
#include "cuda/attend/ptx.cuh"
#include "cuda/flags.cuh"

namespace clo::cuda {

// Whether the layer's rows are there already. Its last request was posted by an earlier kernel, so that the two words
// may be read at once.
__device__ inline bool ready_now(const LayerFlags* flags) {
  uint32_t posted;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(posted) : "l"(&flags->posted) : "memory");
  return static_cast<int32_t>(load_acquire(&flags->ready) - posted) >= 0;
}

// Tile: what is computed on a unit; gives kRowBytes, kUnitRows, kStages, kWarps, and how rows lie in a
// stage: kStride bytes apart, chunks of 16 bytes moved by swizzle(row).
template <class Tile>
class RowReader {
  static constexpr int kRowBytes = Tile::kRowBytes, kHalf = kRowBytes / 2, kUnitRows = Tile::kUnitRows;
  static constexpr int kChunks = kRowBytes / 16, kCopies = kUnitRows * kChunks / 32;
  static_assert(kUnitRows * kChunks % 32 == 0, "every lane copies as many chunks");

 public:
  static constexpr int kStageBytes = kUnitRows * Tile::kStride;

  // The block's units of line 0 come first, then those of line 1. ready: nothing need be waited for.
  __device__ RowReader(const AttendArgs& a, const Plan& plan, const LayerView* view, const char* selected, bool ready,
                       const Share& first, const Share& second, int warp, int lane, uint32_t stages, int* filled)
      : a_(a), plan_(plan), view_(view), selected_(selected), next_(warp), head_(first.head),
        first_line_(first.count), second_(second), offset_(first.begin), line_(0), lane_(lane), stages_(stages),
        filled_(filled), policy_(evict_first_policy()), ready_(ready) {}

  __device__ uint32_t stage(int slot) const { return stages_ + slot * kStageBytes; }
  __device__ int rows(int slot) const { return filled_[slot]; }  // of the unit in that stage

  // Starts the copy of the warp's next unit, if any, into a stage.
  __device__ void issue(int slot) {
    if (next_ < first_line_ + second_.count) {
      if (line_ == 0 && next_ >= first_line_) {
        line_ = 1;
        head_ = second_.head;
        offset_ = second_.begin - first_line_;
      }
      const int* before = plan_.before(line_);
#pragma unroll 1
      while (offset_ + next_ >= before[head_ + 1]) ++head_;
      const HeadRows rows = plan_.rows(line_)[head_];
      const int i = offset_ + next_ - before[head_], dense = (rows.dense + kUnitRows - 1) / kUnitRows;
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
      if (lane_ == 0) filled_[slot] = min(n, kUnitRows);
      if (n == kWhole) copy_block(slot, mine.address);
      else copy_rows(slot, n, mine);
      next_ += Tile::kWarps;
    }
    commit_copies();
  }

 private:
  static constexpr int kWhole = kUnitRows + 1;  // all rows of the unit, one after the other from the address found

  // A row, unless it is the new token's: that one is read from where it comes from, for it is being written meanwhile.
  struct Row {
    const char* address;
    bool is_new;
  };

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
    if (selected_ != nullptr) {
      const char* base = selected_ + (static_cast<size_t>(head_) * a_.num_slots + first) * kRowBytes;
      if (n == kUnitRows) return whole(base, mine);
      *mine = {base + row * kRowBytes, false};
      return n;
    }
    const int token = view_->slot_tokens[static_cast<size_t>(head_) * a_.num_slots + first + row];
    *mine = {static_cast<const char*>(view_->host_rows) +
                 (static_cast<size_t>(head_) * a_.max_tokens + token) * kRowBytes,
             false};
    return n;
  }

  __device__ static int whole(const char* base, Row* mine) {
    *mine = {base, false};
    return kWhole;
  }

  // True for one warp of the grid, which speaks for all when the wait is counted.
  __device__ bool reads_last_unit() const {
    return second_.begin + second_.count == plan_.before(1)[a_.heads(1)] &&
           (first_line_ + second_.count - 1) % Tile::kWarps == next_ % Tile::kWarps;
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
    const uint32_t to = stage(slot);
    const char* source = from + lane_ * 16;
#pragma unroll
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

  const AttendArgs& a_;
  const Plan plan_;
  const LayerView* view_;
  const char* const selected_;  // null: rows are gathered from host_rows
  int next_, head_;
  const int first_line_;  // units of line 0
  const Share second_;    // of line 1
  int offset_, line_;     // unit `next_` of the block is unit offset_ + next_ of its line
  const int lane_;
  uint32_t stages_;
  int* filled_;
  uint64_t policy_;
  bool ready_;
};

}  // namespace clo::cuda
