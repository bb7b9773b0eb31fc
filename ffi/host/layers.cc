#include "host/layers.h"

#include <algorithm>

namespace clo {
namespace {

// Elements of one layer's arrays.
struct Sizes {
  int64_t heads, slots, rows, row, selected;

  Sizes(const EngineConfig& c, int64_t kv_heads)
      : heads(c.batch * kv_heads),
        slots(product(heads, c.num_slots)),
        rows(product(heads, c.max_tokens)),
        row(row_bytes(c.head_dim, c.dtype, c.format)),
        selected(c.offload ? slots : 0) {}

  static int64_t product(int64_t a, int64_t b) {
    int64_t n;
    if (__builtin_mul_overflow(a, b, &n)) throw OutOfMemory("KV arenas: more rows than 64 bits count");
    return n;
  }
};

int64_t add(int64_t a, int64_t b) {
  int64_t n;
  if (__builtin_add_overflow(a, b, &n)) throw OutOfMemory("KV arenas: more bytes than 64 bits count");
  return n;
}

void take_request(Arena& arena, int64_t heads, int64_t slots, Request* request) {
  request->counts = arena.take<int32_t>(heads);
  request->tokens = arena.take<int32_t>(slots);
  request->slots = arena.take<int32_t>(slots);
}

}  // namespace

Layers::Layers(const EngineConfig& c, WindowSource* windows) : offload_(c.offload), on_device_(on_device(c)) {
  int64_t host = 0, selected = 0, largest = 0, tables = 0, requests = 0;
  for (int64_t kv_heads : c.kv_heads) {
    const Sizes n(c, kv_heads);
    const int64_t rows = Arena::padded(n.selected, n.row);
    host = add(host, Arena::padded(n.rows, n.row));
    selected = add(selected, rows);
    largest = std::max(largest, rows);
    tables = add(tables, Arena::padded(n.slots, 4) + Arena::padded(n.slots, 2) + Arena::padded(n.heads, 4) +
                             Arena::padded(n.heads, 2));
    requests = add(requests, Arena::padded(n.heads, 4) + 2 * Arena::padded(n.slots, 4));
  }
  const Memory device = on_device_ ? Memory::kDevice : Memory::kHost;
  host_ = Arena(host, "host rows", on_device_ && c.offload ? Memory::kMapped : device, c.progress);
  if (windows == nullptr) selected_.emplace_back(selected, "selected rows", device);
  tables_ = Arena(tables, "slot tables", device);
  requests_ = Arena(requests, "requests", device);
  if (by_threads(c)) mirrors_ = Arena(requests, "requests", Memory::kMapped);
  if (by_threads(c) && c.backend == "staged") {
    staging_host_ = Arena(add(largest, largest), "staged rows", Memory::kMapped);
    staging_device_ = Arena(staging_host_.size(), "staged rows", device);
    for (int i = 0; i < 2; ++i) {
      staging_.host[i] = staging_host_.take_bytes(largest);
      staging_.device[i] = staging_device_.take_bytes(largest);
    }
  }
  for (int64_t kv_heads : c.kv_heads) {
    LayerView v{};
    v.batch = c.batch;
    v.kv_heads = kv_heads;
    v.max_tokens = c.max_tokens;
    v.num_slots = c.num_slots;
    v.head_dim = c.head_dim;
    v.dtype = c.dtype;
    v.format = c.format;
    if (kv_heads > 0) {
      const Sizes n(c, kv_heads);
      const int64_t rows = Arena::padded(n.selected, n.row);
      if (windows != nullptr) selected_.emplace_back(rows, "selected rows", *windows);
      v.host_rows = host_.take_bytes(Arena::padded(n.rows, n.row));
      if (c.offload) v.selected_rows = selected_.back().take_bytes(rows);
      v.slot_tokens = tables_.take<int32_t>(n.slots);
      v.slot_last = tables_.take<uint16_t>(n.slots);
      v.slot_counts = tables_.take<int32_t>(n.heads);
      v.refreshes = tables_.take<uint16_t>(n.heads);
      take_request(requests_, n.heads, n.slots, &v.request);
    }
    views_.push_back(v);
    if (!by_threads(c)) continue;
    LayerView seen = v;
    if (kv_heads > 0) {
      const Window* window = selected_.back().window();
      seen.selected_rows = window == nullptr ? nullptr : window->host();
      take_request(mirrors_, v.batch * kv_heads, v.batch * kv_heads * v.num_slots, &seen.request);
    }
    thread_views_.push_back(seen);
  }
  clear_slots();
}

int64_t Layers::host_bytes() const {
  return offload_ ? host_.size() + mirrors_.size() + staging_host_.size() + (on_device_ ? 0 : requests_.size()) : 0;
}

int64_t Layers::device_bytes() const {
  int64_t selected = 0;
  for (const Arena& arena : selected_) selected += arena.size();
  return host_.size() + mirrors_.size() + staging_host_.size() + selected + tables_.size() + requests_.size() +
         staging_device_.size() - host_bytes();
}

void Layers::clear_slots() {
  for (const LayerView& v : views_) {
    const int64_t heads = v.batch * v.kv_heads;
    const int64_t slots = heads * v.num_slots;
    tables_.fill(v.slot_tokens, 0xff, slots * 4);  // -1
    tables_.fill(v.slot_last, 0, slots * 2);
    tables_.fill(v.slot_counts, 0, heads * 4);
    tables_.fill(v.refreshes, 0, heads * 2);
    requests_.fill(v.request.counts, 0, heads * 4);
  }
}

}  // namespace clo
