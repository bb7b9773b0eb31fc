// What both kernels of attend are called with.
#pragma once

#include <cstdint>

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
  RowFormat format;   // of selected rows
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

}  // namespace clo::cuda
