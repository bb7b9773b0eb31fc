// One struct per kernel, the shape beside each pointer. Kernels know neither XLA nor Python.
//
// Letters: B sequences, S context capacity, G query heads per KV head, D head dim, R hash bits, K KV heads,
// Ko offloaded and Kr resident KV heads (K = Ko + Kr; the offloaded ones come first), T tail rows, k selected tokens.
// "[..] T" is an array of the activation dtype, named by `dtype`.
#pragma once

#include <cstdint>
#include <string>

#include "clo/dtype.h"
#include "clo/protocol.h"

namespace clo {

enum class Retriever : int32_t { kSign = 0, kHata = 1, kExact = 2 };

// Codes of keys: bit j of the code is set iff ((x - mean)·W)[j] > 0; factor = |x - mean|² / Σ_j |((x - mean)·W)[j]|.
struct HashEncodeParams {
  int64_t batch, heads, tokens, head_dim, bits;
  DType dtype;
  const void* x;         // [B, K, N, D] T
  const float* weights;  // [K, D, R]
  const float* mean;     // [B, K, D]
  uint32_t* codes;       // [B, K, N, R/32]
  uint16_t* factors;     // [B, K, N] IEEE half
};

// Equations 6-10: cosine of each query head to its label, importance-weighted mean over the group, against the
// threshold of the KV head. A head also misses when it has no label (age < 0) or when age >= max_age.
struct CacheLookupParams {
  int64_t batch, kv_heads, group, head_dim;
  DType dtype;
  const void* query;         // [B, Ko·G, D] T
  void* label;               // [B, Ko·G, D] T, in and out: becomes the query where the head missed
  int32_t* age;              // [B, Ko] in and out: steps since the last refresh, -1 before the first; 0 on a miss
  const float* importance;   // [Ko·G]
  const float* thresholds;   // [Ko]
  const int32_t* max_age;    // [B]
  uint8_t* hit;              // [B, Ko] out
};

struct SelectTopkParams {
  int64_t batch, kv_heads, group, head_dim, bits, max_tokens, k_max;
  DType dtype;
  Retriever retriever;
  float scale;               // of the attention, usually D^-1/2
  const void* query;         // [B, Ko·G, D] T
  const float* weights;      // [Ko, D, R]
  const float* mean;         // [B, Ko, D]
  const float* lse;          // [B, Ko·G] log-sum-exp of the last step's attention
  const uint32_t* codes;     // [B, Ko, S, R/32]; may be null for kExact
  const uint16_t* factors;   // [B, Ko, S] IEEE half; may be null for kExact, unused by kHata
  const void* rows;          // [B, Ko, S, 2, D] T; kExact only
  const int32_t* begin;      // [B] candidates are tokens [begin, end)
  const int32_t* end;        // [B]
  const int32_t* k;          // [B] wanted; never more than k_max nor end - begin are selected
  const uint8_t* skip;       // [B, Ko] 1: leave this head alone (its indices become -1)
  int32_t* indices;          // [B, Ko, k_max] ascending, -1 after the last
};

// Lookup, selection and difference to the slot table of one layer; fills view.request for Engine::post.
struct PrefetchParams {
  CacheLookupParams lookup;
  SelectTopkParams select;   // its query, skip and indices are the lookup's query, the lookup's hit, and scratch
  const int32_t* capacity;   // [B] slots that a head may use, k <= capacity <= C
  bool whole;                // true: replace the whole set on a miss (the paper); false: move the difference only
  LayerView view;
};

// The sum of two arrays and RMS norms of its rows. On a GPU only: see clo_jax/ops/add_norms.py.
constexpr int kMaxNorms = 2;
constexpr int64_t kMaxNormHidden = 16384;
struct AddNormsParams {
  int64_t rows, hidden;
  int norms;                       // 1 to kMaxNorms
  DType dtype, scale_dtype;        // the latter is dtype or kF32
  float eps;                       // added to the mean of squares
  const void* x;                   // [rows, hidden] T
  const void* y;                   // [rows, hidden] T
  const void* scales[kMaxNorms];   // [hidden] scale_dtype
  void* sum;                       // [rows, hidden] T; may be x
  void* normed[kMaxNorms];         // [rows, hidden] T
};

// What attend waits with before it reads selected rows; returns an error text or nothing. (A function pointer, so that
// kernels do not depend on the engine.)
struct ReadyWait {
  std::string (*wait)(void* context) = nullptr;  // null: nothing to wait for
  void* context = nullptr;
};

// Appends one token's K and V, then attends with q over resident rows, or over selected rows, sink and recent tail.
struct AttendParams {
  int64_t batch, offloaded_heads, resident_heads, group, head_dim, bits, max_tokens, tail_rows, sink;
  DType dtype;
  float scale;
  const void* query;         // [B, K·G, D] T, heads of offloaded KV heads first
  const void* key;           // [B, K, D] T
  const void* value;         // [B, K, D] T
  const float* weights;      // [Ko, D, R]; bits == 0: codes are not kept
  const float* mean;         // [B, Ko, D]
  const int32_t* position;   // [B] index of the new token
  const int32_t* flushed;    // [B] tokens before this one are selectable; the tail holds [flushed, position] and sinks
  void* resident;            // [B, Kr, S, 2, D] T in and out
  void* tail;                // [B, Ko, T, 2, D] T in and out; ring_index(token, sink, T)
  uint32_t* codes;           // [B, Ko, S, R/32] in and out
  uint16_t* factors;         // [B, Ko, S] in and out
  LayerView view;            // selected rows; view.kv_heads == 0 when nothing is offloaded
  ReadyWait ready;
  void* out;                 // [B, K·G, D] T
  float* lse;                // [B, K·G]
};

// Copies rows of tokens [begin, end) into view.host_rows.
struct OffloadParams {
  int64_t batch, kv_heads, num_rows, head_dim, sink;
  DType dtype;
  const void* rows;          // [B, Ko, N, 2, D] T; token p is at ring_index(p, sink, N)
  const int32_t* begin;      // [B]
  const int32_t* end;        // [B]
  LayerView view;
};

void hash_encode(const HashEncodeParams& p);
void cache_lookup(const CacheLookupParams& p);
void select_topk(const SelectTopkParams& p);

struct PrefetchResult {
  uint64_t hits = 0, misses = 0, rows_selected = 0, rows_new = 0;
};
PrefetchResult prefetch(const PrefetchParams& p);

std::string attend(const AttendParams& p);  // an error text of the wait, or nothing
uint64_t offload(const OffloadParams& p);   // rows written

}  // namespace clo
