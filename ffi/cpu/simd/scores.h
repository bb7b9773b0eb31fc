// Vectorised scoring of keys: from codes or rows to 16-bit sort keys, and the comparison that a selection compacts with.
#pragma once

#include <cstdint>

namespace clo {

constexpr int64_t kScoreBlock = 64;  // scoring writes whole blocks: room for a multiple of it, rubbish after the last key

// sign: key m scores sum over g of exp(slope[g] · factor[m] · sum_r z_g[r] · (bit r of m ? 1 : -1) + offset[g]).
struct SignQuery {
  int64_t group, words;
  const uint8_t* lookups;  // [G] tables of lookup_bytes(words) each, made by build_lookup
  const int32_t* shifts;   // [G] as build_lookup returned
  const float* slopes;     // [G]
  const float* offsets;    // [G]
};

constexpr int64_t lookup_bytes(int64_t words) { return words * 2 * 4 * 16; }

struct ScoresTable {
  // Lookup tables of one query's levels z [32·words]; the second function undoes their bias with the returned shift.
  int32_t (*build_lookup)(const int8_t* levels, int64_t words, uint8_t* lookup);
  void (*sign)(const uint32_t* codes, const uint16_t* factors, int64_t n, const SignQuery& query, uint16_t* keys);

  // hata: group·32·words less the sum of Hamming distances to the query codes [G, words].
  void (*hata)(const uint32_t* codes, int64_t n, const uint32_t* query, int64_t group, int64_t words, uint16_t* keys);

  // exact: key m scores sum over g of exp(scale · q_g·K[m] + offset[g]); rows [n, 2, dim], query [G, dim]. The second is
  // for bfloat16 rows.
  void (*exact_f32)(const void* rows, int64_t n, int64_t dim, const float* query, int64_t group, float scale,
                    const float* offsets, uint16_t* keys);
  void (*exact_bf16)(const void* rows, int64_t n, int64_t dim, const float* query, int64_t group, float scale,
                     const float* offsets, uint16_t* keys);
  void (*exact_f16)(const void* rows, int64_t n, int64_t dim, const float* query, int64_t group, float scale,
                    const float* offsets, uint16_t* keys);

  // Bit i of `above` and of `equal`: keys[i] > threshold, keys[i] == threshold; for one block.
  void (*compare)(const uint16_t* keys, uint16_t threshold, uint64_t* above, uint64_t* equal);
};

const ScoresTable* scores_table_generic();
const ScoresTable* scores_table_avx2();
const ScoresTable* scores_table_avx512();

}  // namespace clo
