// Vectorised primitives of the hash codes: projections and sign bits.
#pragma once

#include <cstdint>

namespace clo {

// Projections [dim, bits] of one head; 32 columns make a code word.
struct Weights {
  const float* data;
  int64_t dim, bits;
};

constexpr int64_t kEncodeBlock = 64;  // most tokens of one call of encode

struct CodesTable {
  // out[i] = x[i] - mean[i]; returns the sum of squares. The second is for bfloat16, the third for float16.
  float (*centre_f32)(const void* x, const float* mean, int64_t dim, float* out);
  float (*centre_bf16)(const void* x, const float* mean, int64_t dim, float* out);
  float (*centre_f16)(const void* x, const float* mean, int64_t dim, float* out);

  // p = x·W for x [tokens, dim], tokens <= kEncodeBlock: codes [tokens, bits/32] get the bits p > 0, magnitudes [tokens] the
  // sum of |p|. A token's result does not depend on the tokens beside it.
  void (*encode)(const float* x, int64_t tokens, const Weights& w, uint32_t* codes, float* magnitudes);

  // out [tokens, bits] = x·W.
  void (*project)(const float* x, int64_t tokens, const Weights& w, float* out);

  // step = max|z| / 7, levels = round(z / step), ties to even; returns the step. Levels and step are 0 when z is zero or
  // not finite.
  float (*quantise)(const float* z, int64_t bits, int8_t* levels);
};

const CodesTable* codes_table_generic();
const CodesTable* codes_table_avx2();
const CodesTable* codes_table_avx512();

}  // namespace clo
