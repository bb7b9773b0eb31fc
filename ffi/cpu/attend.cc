#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "clo/params.h"
#include "clo/softmax_state.h"
#include "cpu/parallel.h"
#include "cpu/simd/dispatch.h"
#include "cpu/simd/rows.h"

namespace clo {
namespace {

// Rows of a task. Fixed, so that neither the number of threads nor the place of the rows changes a result.
constexpr int64_t kSplitRows = 1024;
// Bytes of a block: it and the next one, which is being prefetched, fit in L1.
constexpr int64_t kBlockBytes = 16384;
constexpr int64_t kBytesPerUs = 10000;  // read by one thread; decides only whether threads are worth waking

// The rows of one KV head that are attended together: row j is token j for j < pinned, then a ring in which `first`
// comes next; or, gathered, row tokens[j].
struct Segment {
  const char* base;
  int64_t count;
  int64_t pinned = 0, first = 0, sink = 0, ring_rows = 0;
  const int32_t* tokens = nullptr;
  RowFormat format = RowFormat::kPlain;

  int64_t index(int64_t j) const {
    if (tokens != nullptr) return tokens[j];
    return j < pinned ? j : ring_index(first + j - pinned, sink, ring_rows);
  }
};

struct Task {
  int64_t head;  // b·K + KV head
  Segment segment;
  int64_t begin, end;  // of the segment's rows
};

class Attention {
  using Kernel = void (*)(const RowsBlock&);

 public:
  explicit Attention(const AttendParams& p)
      : p_(p),
        kv_heads_(p.offloaded_heads + p.resident_heads),
        row_bytes_(row_bytes(p.head_dim, p.dtype, RowFormat::kPlain)),
        block_(std::clamp<int64_t>(kBlockBytes / row_bytes_, 8, kRowsBlock)),
        stored_bytes_(row_bytes(p.head_dim, p.dtype, p.view.format)),
        stride_((p.group * (p.head_dim + 2) + 15) / 16 * 16),  // whole cache lines, so that threads do not share one
        query_(p.batch * kv_heads_ * p.group * p.head_dim),
        total_(p.batch * kv_heads_ * stride_) {
    dispatch(p.dtype, [&](auto* tag) {
      const auto* q = static_cast<const std::remove_pointer_t<decltype(tag)>*>(p.query);
      for (size_t i = 0; i < query_.size(); ++i) query_[i] = to_float(q[i]) * (p.scale * kLog2E);
    });
    for (int64_t head = 0; head < p.batch * kv_heads_; ++head) clear(total_.data() + head * stride_);
  }

  void add_resident() {
    for (int64_t b = 0; b < p_.batch; ++b) {
      for (int64_t h = 0; h < p_.resident_heads; ++h) {
        Segment s{row(p_.resident, (b * p_.resident_heads + h) * p_.max_tokens), p_.position[b] + int64_t{1}};
        s.pinned = s.count;
        add(b * kv_heads_ + p_.offloaded_heads + h, s);
      }
    }
  }

  void add_tails() {
    for (int64_t b = 0; b < p_.batch; ++b) {
      const int64_t end = p_.position[b] + int64_t{1}, sinks = std::min(p_.sink, end);
      const int64_t first = std::max<int64_t>(p_.sink, p_.flushed[b]);
      for (int64_t h = 0; h < p_.offloaded_heads; ++h) {
        Segment s{row(p_.tail, (b * p_.offloaded_heads + h) * p_.tail_rows), sinks + std::max<int64_t>(0, end - first)};
        s.pinned = sinks;
        s.first = first;
        s.sink = p_.sink;
        s.ring_rows = p_.tail_rows;
        add(b * kv_heads_ + h, s);
      }
    }
  }

  void add_selected() {
    const LayerView& v = p_.view;
    for (int64_t b = 0; b < p_.batch; ++b) {
      for (int64_t h = 0; h < p_.offloaded_heads; ++h) {
        const int64_t i = b * p_.offloaded_heads + h;
        Segment s{nullptr, v.slot_counts[i]};
        s.format = v.format;
        if (v.selected_rows != nullptr) {
          s.base = static_cast<const char*>(v.selected_rows) + i * v.num_slots * stored_bytes_;
          s.pinned = s.count;
        } else {
          s.base = static_cast<const char*>(v.host_rows) + i * v.max_tokens * stored_bytes_;
          s.tokens = v.slot_tokens + i * v.num_slots;
        }
        add(b * kv_heads_ + h, s);
      }
    }
  }

  // Attends over what was added since the last call, and folds it into the totals in the order in which it was added.
  void run() {
    parts_.resize(tasks_.size() * stride_);
    int64_t rows = 0;
    for (const Task& t : tasks_) rows += t.end - t.begin;
    parallel_for(static_cast<int64_t>(tasks_.size()), rows * row_bytes_ / kBytesPerUs,
                 [&](int64_t i) { attend_rows(tasks_[i], parts_.data() + i * stride_); });
    for (size_t i = 0; i < tasks_.size(); ++i)
      fold(total_.data() + tasks_[i].head * stride_, parts_.data() + i * stride_);
    tasks_.clear();
  }

  void finish() const {
    dispatch(p_.dtype, [&](auto* tag) {
      auto* out = static_cast<std::remove_pointer_t<decltype(tag)>*>(p_.out);
      for (int64_t i = 0; i < p_.batch * kv_heads_ * p_.group; ++i) {
        const float* part = total_.data() + i / p_.group * stride_;
        const int64_t g = i % p_.group;
        const SoftmaxState state{part[g], part[p_.group + g]};
        const float* acc = part + 2 * p_.group + g * p_.head_dim;
        const float norm = normaliser(state);
        for (int64_t d = 0; d < p_.head_dim; ++d) from_float(acc[d] * norm, out + i * p_.head_dim + d);
        p_.lse[i] = log_sum_exp(state);
      }
    });
  }

 private:
  const char* row(const void* base, int64_t index) const { return static_cast<const char*>(base) + index * row_bytes_; }

  void add(int64_t head, const Segment& segment) {
    for (int64_t begin = 0; begin < segment.count; begin += kSplitRows)
      tasks_.push_back({head, segment, begin, std::min(begin + kSplitRows, segment.count)});
  }

  // A partial result is max [G], sum [G], acc [G, D].
  void clear(float* part) const {
    std::fill(part, part + p_.group, -std::numeric_limits<float>::infinity());
    std::fill(part + p_.group, part + stride_, 0.0f);
  }

  void attend_rows(const Task& t, float* part) const {
    clear(part);
    const void* addresses[2][kRowsBlock];
    const bool quantized = t.segment.format != RowFormat::kPlain;
    const int64_t bytes = quantized ? stored_bytes_ : row_bytes_;
    const auto fill = [&](int64_t begin, const void** out) {
      const int64_t count = std::min(block_, t.end - begin);
      for (int64_t i = 0; i < count; ++i) out[i] = t.segment.base + t.segment.index(begin + i) * bytes;
      return std::max<int64_t>(count, 0);
    };
    RowsBlock block{};
    block.query = query_.data() + t.head * p_.group * p_.head_dim;
    block.group = p_.group;
    block.head_dim = p_.head_dim;
    block.max = part;
    block.sum = part + p_.group;
    block.acc = part + 2 * p_.group;
    std::vector<float> scratch(quantized ? block_ * 2 * p_.head_dim : 0);
    block.scratch = scratch.data();
    const Kernel kernel = kernel_for(t.segment.format);
    int64_t count = fill(t.begin, addresses[0]);
    for (int64_t begin = t.begin, side = 0; begin < t.end; begin += block_, side ^= 1) {
      block.rows = addresses[side];
      block.count = count;
      block.next = addresses[side ^ 1];
      block.next_count = count = fill(begin + block_, addresses[side ^ 1]);
      kernel(block);
    }
  }

  Kernel kernel_for(RowFormat format) const {
    const RowsTable& table = rows_table();
    if (format == RowFormat::kPlain) return choose(p_.dtype, table.f32, table.bf16, table.f16);
    return format == RowFormat::kInt8 ? table.int8 : table.fp8;
  }

  void fold(float* total, const float* part) const {
    const int64_t G = p_.group, D = p_.head_dim;
    for (int64_t g = 0; g < G; ++g) {
      SoftmaxState state{total[g], total[G + g]};
      const MergeWeights w = merge(state, {part[g], part[G + g]});
      total[g] = state.max;
      total[G + g] = state.sum;
      float* acc = total + 2 * G + g * D;
      const float* other = part + 2 * G + g * D;
      for (int64_t d = 0; d < D; ++d) acc[d] = acc[d] * w.first + other[d] * w.second;
    }
  }

  const AttendParams& p_;
  const int64_t kv_heads_, row_bytes_, block_, stored_bytes_, stride_;
  std::vector<float> query_;  // [B, K, G, D], times scale and log2 e
  std::vector<float> total_;  // [B, K] partial results
  std::vector<float> parts_;  // [tasks] partial results
  std::vector<Task> tasks_;
};

// Writes the new token's rows where attention and later steps look for them.
void append_rows(const AttendParams& p) {
  const int64_t bytes = p.head_dim * dtype_bytes(p.dtype), heads = p.offloaded_heads + p.resident_heads;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      const bool offloaded = h < p.offloaded_heads;
      const int64_t r = h - p.offloaded_heads;
      const int64_t index = offloaded ? (b * p.offloaded_heads + h) * p.tail_rows +
                                            ring_index(p.position[b], p.sink, p.tail_rows)
                                      : (b * p.resident_heads + r) * p.max_tokens + p.position[b];
      char* row = static_cast<char*>(offloaded ? p.tail : p.resident) + index * 2 * bytes;
      std::memcpy(row, static_cast<const char*>(p.key) + (b * heads + h) * bytes, bytes);
      std::memcpy(row + bytes, static_cast<const char*>(p.value) + (b * heads + h) * bytes, bytes);
    }
  }
}

void append_codes(const AttendParams& p) {
  const int64_t Ko = p.offloaded_heads, words = p.bits / 32;
  if (Ko == 0 || words == 0) return;
  std::vector<uint32_t> codes(Ko * words);
  std::vector<uint16_t> factors(Ko);
  for (int64_t b = 0; b < p.batch; ++b) {
    const char* keys = static_cast<const char*>(p.key) +
                       b * (Ko + p.resident_heads) * p.head_dim * dtype_bytes(p.dtype);
    hash_encode({1, Ko, 1, p.head_dim, p.bits, p.dtype, keys, p.weights, p.mean + b * Ko * p.head_dim, codes.data(),
                 factors.data()});
    for (int64_t h = 0; h < Ko; ++h) {
      const int64_t token = (b * Ko + h) * p.max_tokens + p.position[b];
      std::copy_n(codes.data() + h * words, words, p.codes + token * words);
      p.factors[token] = factors[h];
    }
  }
}

}  // namespace

std::string attend(const AttendParams& p) {
  append_rows(p);
  append_codes(p);
  Attention attention(p);
  attention.add_resident();
  attention.add_tails();
  attention.run();
  // Everything that needs no transfer is done: only now is a late one waited for.
  std::string error = p.ready.wait == nullptr ? std::string() : p.ready.wait(p.ready.context);
  if (error.empty() && p.view.kv_heads > 0) {
    attention.add_selected();
    attention.run();
  }
  attention.finish();
  return error;
}

}  // namespace clo
