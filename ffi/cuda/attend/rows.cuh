// One warp's share of its block's rows, copied to a ring of stages in shared memory some units ahead of their use.
#pragma once

#include <cstdint>

#include "cuda/attend/plan.cuh"
#include "cuda/attend/ptx.cuh"
#include "cuda/flags.cuh"

namespace clo::cuda {

// Tile: what is computed on a unit; gives kRowBytes, kUnitRows, kStride (bytes between rows of a stage), kStages, kWarps.
template <class Tile>
class RowReader {
  static constexpr int kRowBytes = Tile::kRowBytes, kHalf = kRowBytes / 2, kUnitRows = Tile::kUnitRows;
  static constexpr int kChunks = kRowBytes / 16, kCopies = kUnitRows * kChunks / 32;
  static_assert(kUnitRows * kChunks % 32 == 0, "every lane copies as many chunks");

 public:
  static constexpr int kStageBytes = kUnitRows * Tile::kStride;

  // The block's units of line 0 come first, then those of line 1.
  __device__ RowReader(const AttendArgs& a, const Plan& plan, const LayerView* view, const Share& first,
                       const Share& second, int warp, int lane, uint32_t stages, int* filled)
      : a_(a), plan_(plan), view_(view), next_(warp), head_(first.head), first_line_(first.count), second_(second),
        offset_(first.begin), line_(0), lane_(lane), stages_(stages), filled_(filled), policy_(evict_first_policy()) {
    selected_ = view == nullptr ? nullptr : static_cast<const char*>(view->selected_rows);
  }

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
      while (offset_ + next_ >= before[head_ + 1]) ++head_;
      const HeadRows rows = plan_.rows(line_)[head_];
      const int i = offset_ + next_ - before[head_], dense = (rows.dense + kUnitRows - 1) / kUnitRows;
      if (line_ == 0) {
        issue_resident(slot, i * kUnitRows, rows.dense);
      } else if (i < dense) {
        issue_tail(slot, i * kUnitRows, rows.dense);
      } else {
        wait_once();
        issue_selected(slot, (i - dense) * kUnitRows, rows.selected);
      }
      next_ += Tile::kWarps;
    }
    commit_copies();
  }

 private:
  // A row, unless it is the new token's: that one is read from where it comes from, for it is being written meanwhile.
  struct Row {
    const char* address;
    bool is_new;
  };

  __device__ void issue_resident(int slot, int first, int count) {
    const char* base = a_.resident_rows + (static_cast<size_t>(head_) * a_.max_tokens + first) * kRowBytes;
    if (first + kUnitRows < count) return copy_block(slot, base);
    copy_rows(slot, count - first,
              [&](int row) { return Row{base + row * kRowBytes, first + row == count - 1}; });
  }

  __device__ void issue_tail(int slot, int first, int count) {
    const int b = head_ / a_.offloaded, position = a_.position[b], sinks = min(a_.sink, position + 1);
    const int oldest = max(a_.sink, a_.flushed[b]), ring = a_.tail_rows - a_.sink;
    const char* base = a_.tail + static_cast<size_t>(head_) * a_.tail_rows * kRowBytes;
    const auto token_of = [&](int j) { return j < sinks ? j : oldest + j - sinks; };
    const auto index_of = [&](int token) { return token < a_.sink ? token : a_.sink + (token - a_.sink) % ring; };
    if (first + kUnitRows < count) {  // without the new token; most such units are in one piece
      const int begin = index_of(token_of(first));
      if (index_of(token_of(first + kUnitRows - 1)) == begin + kUnitRows - 1)
        return copy_block(slot, base + static_cast<size_t>(begin) * kRowBytes);
    }
    copy_rows(slot, min(count - first, kUnitRows), [&](int row) {
      const int token = token_of(first + row);
      return Row{base + static_cast<size_t>(index_of(token)) * kRowBytes, token == position};
    });
  }

  __device__ void issue_selected(int slot, int first, int count) {
    const int n = min(count - first, kUnitRows);
    if (selected_ != nullptr) {
      const char* base = selected_ + (static_cast<size_t>(head_) * a_.num_slots + first) * kRowBytes;
      if (n == kUnitRows) return copy_block(slot, base);
      return copy_rows(slot, n, [&](int row) { return Row{base + row * kRowBytes, false}; });
    }
    const int32_t* tokens = view_->slot_tokens + static_cast<size_t>(head_) * a_.num_slots + first;
    const char* base = static_cast<const char*>(view_->host_rows) +
                       static_cast<size_t>(head_) * a_.max_tokens * kRowBytes;
    copy_rows(slot, n, [&](int row) { return Row{base + static_cast<size_t>(tokens[row]) * kRowBytes, false}; });
  }

  // True for one warp of the grid, which speaks for all when the wait is counted.
  __device__ bool reads_last_unit() const {
    return second_.begin + second_.count == plan_.before(1)[a_.heads(1)] &&
           (first_line_ + second_.count - 1) % Tile::kWarps == next_ % Tile::kWarps;
  }

  // After a failed wait the rows are those that were there before: the error word tells.
  __device__ void wait_once() {
    if (ready_ || a_.engine.flags == nullptr) return;
    if (lane_ == 0) {
      const uint64_t start = global_nanoseconds();
      wait_ready(a_.engine.flags + a_.engine.layer.index[0], a_.engine.timeout_ns, a_.engine.error);
      if (a_.engine.counters != nullptr && reads_last_unit())
        atomicAdd(&a_.engine.counters->wait_ns, global_nanoseconds() - start);
    }
    __syncwarp();
    ready_ = true;
  }

  // A whole unit of consecutive rows.
  __device__ void copy_block(int slot, const char* from) {
    if (lane_ == 0) filled_[slot] = kUnitRows;
    const uint32_t to = stage(slot);
    const char* source = from + lane_ * 16;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int chunk = i * 32 + lane_;
      copy_async(to + chunk / kChunks * Tile::kStride + chunk % kChunks * 16, source + i * 512, 16, policy_);
    }
  }

  // n rows wherever they are; the rest of the unit becomes zero. Lane i finds row i.
  template <typename Find>
  __device__ void copy_rows(int slot, int n, Find find) {
    if (lane_ == 0) filled_[slot] = n;
    const Row mine = find(min(lane_, n - 1));
    const unsigned long long address = reinterpret_cast<unsigned long long>(mine.address);
    const unsigned new_rows = __ballot_sync(~0u, mine.is_new);
    const size_t new_offset = static_cast<size_t>(a_.kv_head(line_, head_)) * kHalf;
    const uint32_t to = stage(slot);
#pragma unroll 4
    for (int i = 0; i < kCopies; ++i) {
      const int chunk = i * 32 + lane_, row = chunk / kChunks, column = chunk % kChunks * 16;
      const char* from = reinterpret_cast<const char*>(__shfl_sync(~0u, address, row)) + column;
      if ((new_rows >> row & 1) != 0)
        from = column < kHalf ? static_cast<const char*>(a_.key) + new_offset + column
                              : static_cast<const char*>(a_.value) + new_offset + column - kHalf;
      copy_async(to + row * Tile::kStride + column, from, row < n ? 16 : 0, policy_);
    }
  }

  const AttendArgs& a_;
  const Plan plan_;
  const LayerView* view_;
  const char* selected_;
  int next_, head_;
  const int first_line_;  // units of line 0
  const Share second_;    // of line 1
  int offset_, line_;     // unit `next_` of the block is unit offset_ + next_ of its line
  const int lane_;
  uint32_t stages_;
  int* filled_;
  uint64_t policy_;
  bool ready_ = false;
};

}  // namespace clo::cuda
