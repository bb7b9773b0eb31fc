// What kernels and the transfer engine agree on: one layer's arenas, the request that a prefetch leaves behind, the
// slot table. Plain data with fixed addresses for the engine's life; no XLA, CUDA or Python.
//
// Letters: B sequences, Ko offloaded KV heads of the layer, S context capacity, C slots of a head, D head dim.
// A row is the key then the value of one token and head, contiguous: 2·D elements, or quantized (row_format.h).
#pragma once

#include <cstdint>

#include "clo/dtype.h"
#include "clo/row_format.h"

namespace clo {

// The moves of one refreshed head: row tokens[i] of the host goes to slot slots[i]. Lives in the layer's request.
struct Request {
  int32_t* counts;  // [B, Ko]     moves of each head; 0 for a hit
  int32_t* tokens;  // [B, Ko, C]  source token of each move
  int32_t* slots;   // [B, Ko, C]  destination slot of each move
};

struct LayerView {
  int64_t batch;           // B
  int64_t kv_heads;        // Ko; 0: nothing of this layer is offloaded and every pointer is null
  int64_t max_tokens;      // S
  int64_t num_slots;       // C
  int64_t head_dim;        // D
  DType dtype;             // of activations
  RowFormat format;        // of the rows below
  void* host_rows;         // [B, Ko, S] rows  every flushed token, position = token
  void* selected_rows;     // [B, Ko, C] rows  written by transfers; null when nothing moves (kv_offload off):
                           //                   attention then reads slot j from host_rows[slot_tokens[j]]
  int32_t* slot_tokens;    // [B, Ko, C]  token in each slot, -1 when empty; filled slots are a prefix
  uint16_t* slot_last;     // [B, Ko, C]  refresh number (mod 2^16) that last selected the slot's token
  int32_t* slot_counts;    // [B, Ko]     length of that prefix
  uint16_t* refreshes;     // [B, Ko]     number of refreshes of the head (mod 2^16)
  Request request;
};

constexpr int64_t row_bytes(int64_t head_dim, DType dtype, RowFormat format) {
  return 2 * head_dim * (format == RowFormat::kPlain ? dtype_bytes(dtype) : 1) +
         (format == RowFormat::kPlain ? 0 : kScaleBytes);
}

constexpr int64_t row_bytes(const LayerView& v) { return row_bytes(v.head_dim, v.dtype, v.format); }

// Index of token p's row in a buffer of n rows whose first `sink` rows are pinned to the first tokens and whose rest is
// a ring. A buffer that holds the whole context (p < n) degenerates to index p.
constexpr int64_t ring_index(int64_t p, int64_t sink, int64_t n) { return p < sink ? p : sink + (p - sink) % (n - sink); }

}  // namespace clo
