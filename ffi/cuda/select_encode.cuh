// What the first of the two kernels of a selection leaves to the second.
#pragma once

#include "cuda/kernels.h"

namespace clo::cuda {

struct EncodedQueries {
  float* z;            // [B, Ko, G, R] q·W of the heads that select; not for `exact`
  float* offsets;      // [B, Ko, G] scale·q·mean - lse, for `sign` only
  uint32_t* counters;  // barriers of the heads' blocks, all 0
  int counter_words;
};

cudaError_t encode_queries(const SelectTopkParams& p, const EncodedQueries& out, cudaStream_t stream);

}  // namespace clo::cuda
