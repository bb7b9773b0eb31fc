#include <algorithm>
#include <vector>

#include "clo/params.h"

namespace clo {
namespace {

// One head's slots and moves.
struct Head {
  int32_t* tokens;     // [C]
  uint16_t* last;      // [C]
  int32_t& count;
  uint16_t refresh;    // number of this refresh
  int32_t* from;       // [C] request: source tokens
  int32_t* to;         // [C] request: destination slots
  int32_t moves = 0;

  void fill(int32_t slot, int32_t token) {
    tokens[slot] = token;
    last[slot] = refresh;
    from[moves] = token;
    to[moves] = slot;
    ++moves;
  }
};

// Kept by each thread between calls, so that the hot path allocates nothing.
struct Workspace {
  std::vector<int32_t> where;     // [S] slot of a token, -1 for none; all -1 between heads
  std::vector<int32_t> fresh;     // selected tokens that are in no slot, ascending
  std::vector<uint8_t> chosen;    // [C] the slot's token is in the present selection
  std::vector<uint64_t> victims;  // slots that may be evicted, the oldest first when sorted
};

void replace_all(Head& h, const int32_t* selected, int32_t n, int64_t num_slots) {
  std::fill(h.tokens, h.tokens + std::min<int64_t>(h.count, num_slots), -1);
  h.count = n;
  for (int32_t i = 0; i < n; ++i) h.fill(i, selected[i]);
}

// Keeps what is there, fills empty slots up to `capacity`, then evicts the slots selected longest ago (of equals the
// lowest), never one of the present selection: there are enough others, because n <= capacity.
void replace_difference(Head& h, const int32_t* selected, int32_t n, int32_t capacity, Workspace& w) {
  const int32_t before = h.count;
  w.fresh.clear();
  w.chosen.assign(static_cast<size_t>(before), 0);
  for (int32_t j = 0; j < before; ++j) w.where[static_cast<size_t>(h.tokens[j])] = j;
  for (int32_t i = 0; i < n; ++i) {
    const int32_t slot = w.where[static_cast<size_t>(selected[i])];
    if (slot < 0) {
      w.fresh.push_back(selected[i]);
    } else {
      h.last[slot] = h.refresh;
      w.chosen[static_cast<size_t>(slot)] = 1;
    }
  }
  for (int32_t j = 0; j < before; ++j) w.where[static_cast<size_t>(h.tokens[j])] = -1;

  size_t next = 0;
  while (next < w.fresh.size() && h.count < capacity) h.fill(h.count++, w.fresh[next++]);
  const size_t evictions = w.fresh.size() - next;
  if (evictions == 0) return;
  w.victims.clear();
  for (int32_t j = 0; j < before; ++j) {
    if (w.chosen[static_cast<size_t>(j)]) continue;
    const uint16_t age = static_cast<uint16_t>(h.refresh - h.last[j]);
    w.victims.push_back(static_cast<uint64_t>(UINT16_MAX - age) << 32 | static_cast<uint32_t>(j));
  }
  // Which slots go is decided by age; they are then filled in order of the slot, which keeps writes ascending.
  const auto end = w.victims.begin() + static_cast<std::ptrdiff_t>(evictions);
  std::nth_element(w.victims.begin(), end - 1, w.victims.end());
  std::sort(w.victims.begin(), end, [](uint64_t a, uint64_t b) { return (a & UINT32_MAX) < (b & UINT32_MAX); });
  for (auto v = w.victims.begin(); v != end; ++v) h.fill(static_cast<int32_t>(*v & UINT32_MAX), w.fresh[next++]);
}

}  // namespace

PrefetchResult prefetch(const PrefetchParams& p) {
  cache_lookup(p.lookup);
  // With nothing to select there is no set to reuse: the heads move nothing now and miss as soon as there is.
  for (int64_t b = 0; b < p.view.batch; ++b) {
    if (p.select.k[b] > 0) continue;
    std::fill_n(p.lookup.hit + b * p.view.kv_heads, p.view.kv_heads, uint8_t{1});
    std::fill_n(p.lookup.age + b * p.view.kv_heads, p.view.kv_heads, -1);
  }
  select_topk(p.select);

  thread_local Workspace workspace;
  const LayerView& v = p.view;
  if (workspace.where.size() < static_cast<size_t>(v.max_tokens))
    workspace.where.resize(static_cast<size_t>(v.max_tokens), -1);
  PrefetchResult result;
  for (int64_t i = 0; i < v.batch * v.kv_heads; ++i) {
    v.request.counts[i] = 0;
    if (p.lookup.hit[i]) {
      result.hits += p.select.k[i / v.kv_heads] > 0;
      continue;
    }
    const int64_t C = v.num_slots;
    const int32_t capacity = p.capacity[i / v.kv_heads];
    const int32_t* selected = p.select.indices + i * p.select.k_max;
    const int32_t n = static_cast<int32_t>(std::find(selected, selected + p.select.k_max, -1) - selected);
    Head head{v.slot_tokens + i * C,    v.slot_last + i * C,        v.slot_counts[i], ++v.refreshes[i],
              v.request.tokens + i * C, v.request.slots + i * C};
    // A buffer that is to shrink keeps nothing: its prefix could not be kept full otherwise.
    if (p.whole || head.count > capacity) replace_all(head, selected, n, C);
    else replace_difference(head, selected, n, capacity, workspace);
    v.request.counts[i] = head.moves;
    ++result.misses;
    result.rows_selected += static_cast<uint64_t>(n);
    result.rows_new += static_cast<uint64_t>(head.moves);
  }
  return result;
}

}  // namespace clo
