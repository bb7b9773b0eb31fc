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
        row(2 * c.head_dim * dtype_bytes(c.dtype)),
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

}  // namespace

Layers::Layers(const EngineConfig& c) : offload_(c.offload) {
  int64_t host = 0, selected = 0, tables = 0, requests = 0;
  for (int64_t kv_heads : c.kv_heads) {
    const Sizes n(c, kv_heads);
    host = add(host, Arena::padded(n.rows, n.row));
    selected = add(selected, Arena::padded(n.selected, n.row));
    tables = add(tables, Arena::padded(n.slots, 4) + Arena::padded(n.slots, 2) + Arena::padded(n.heads, 4) +
                             Arena::padded(n.heads, 2));
    requests = add(requests, Arena::padded(n.heads, 4) + 2 * Arena::padded(n.slots, 4));
  }
  host_ = Arena(host, "host rows");
  selected_ = Arena(selected, "selected rows");
  tables_ = Arena(tables, "slot tables");
  requests_ = Arena(requests, "requests");
  for (int64_t kv_heads : c.kv_heads) {
    LayerView v{};
    v.batch = c.batch;
    v.kv_heads = kv_heads;
    v.max_tokens = c.max_tokens;
    v.num_slots = c.num_slots;
    v.head_dim = c.head_dim;
    v.dtype = c.dtype;
    if (kv_heads > 0) {
      const Sizes n(c, kv_heads);
      v.host_rows = host_.take_bytes(Arena::padded(n.rows, n.row));
      if (c.offload) v.selected_rows = selected_.take_bytes(Arena::padded(n.selected, n.row));
      v.slot_tokens = tables_.take<int32_t>(n.slots);
      v.slot_last = tables_.take<uint16_t>(n.slots);
      v.slot_counts = tables_.take<int32_t>(n.heads);
      v.refreshes = tables_.take<uint16_t>(n.heads);
      v.request.counts = requests_.take<int32_t>(n.heads);
      v.request.tokens = requests_.take<int32_t>(n.slots);
      v.request.slots = requests_.take<int32_t>(n.slots);
    }
    views_.push_back(v);
  }
  clear_slots();
}

int64_t Layers::host_bytes() const { return offload_ ? host_.size() + requests_.size() : 0; }

int64_t Layers::device_bytes() const {
  const int64_t slots = selected_.size() + tables_.size();
  return offload_ ? slots : slots + host_.size() + requests_.size();
}

void Layers::clear_slots() {
  for (const LayerView& v : views_) {
    const int64_t heads = v.batch * v.kv_heads;
    std::fill_n(v.slot_tokens, heads * v.num_slots, -1);
    std::fill_n(v.slot_last, heads * v.num_slots, uint16_t{0});
    std::fill_n(v.slot_counts, heads, 0);
    std::fill_n(v.refreshes, heads, uint16_t{0});
    std::fill_n(v.request.counts, heads, 0);
  }
}

}  // namespace clo
