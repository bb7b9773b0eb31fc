// Attention of a group of query heads over one block of [K | V] rows: the inner loop of attend.
#pragma once

#include <cstdint>

namespace clo {

constexpr int64_t kRowsBlock = 64;  // most rows of one call

// D head dim, G query heads. A row is 2·D elements: the key, then the value; or quantized (clo/row_format.h).
struct RowsBlock {
  const float* query;       // [G, D], times the attention's scale and log2 e
  int64_t group, head_dim;  // G, D
  const void* const* rows;  // [count] addresses, 1 <= count <= kRowsBlock; they need not be contiguous
  int64_t count;
  const void* const* next;  // [next_count] rows of the call after this one, which are prefetched meanwhile
  int64_t next_count;       // <= count
  // In and out: the partial result so far (softmax_state.h), with scores in base 2.
  float* max;  // [G]
  float* sum;  // [G]
  float* acc;  // [G, D]
  float* scratch = nullptr;  // [count, 2, D]; for quantized rows
};

// Each row comes from memory once for all G heads: keys and values of a block stay in L1 between the two passes.
// Powers of two are a polynomial with a relative error below 2e-7; below 2^-126 they are 0.
struct RowsTable {
  void (*f32)(const RowsBlock& block);
  void (*bf16)(const RowsBlock& block);
  void (*f16)(const RowsBlock& block);
  void (*int8)(const RowsBlock& block);
  void (*fp8)(const RowsBlock& block);
};

const RowsTable* rows_table_generic();
const RowsTable* rows_table_avx2();
const RowsTable* rows_table_avx512();

}  // namespace clo
