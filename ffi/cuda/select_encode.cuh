// What the first of the two kernels of a selection leaves to the second.
#pragma once

#include "cuda/kernels.h"

namespace clo::cuda {

constexpr int kPlanes = 4;  // of an integer in [-8, 7]: weights 1, 2, 4, -8

// Of the heads that select. All of it in the workspace.
struct EncodedQueries {
  uint32_t* planes;   // hata: [B·Ko][kPlanes + 1][R/32] bit planes of the weight of each bit, then sums (weigh_bits)
  float* z;           // sign: [B·Ko][G][R] q·W
  uint32_t* largest;  // sign: [B·Ko][G][R/32] bits of max |z| over the 32 bits of a word
  float* offsets;     // sign: [B·Ko][G] scale·q·mean - lse
  uint4* clear;       // becomes 0: what the blocks of the second kernel publish and count in
  int clear_words;    // 16 bytes each
};

struct LookupRequest {
  const CacheLookupParams* params;  // null: p.skip is there already
  uint32_t* clear;                  // a word that becomes 0, or null
};

// The next kernel of the stream may begin before this one ends, but not before all that are ahead of this one have ended.
// `exact` has no projections: only the lookup and the clearing are done.
cudaError_t encode_queries(const SelectTopkParams& p, const LookupRequest& lookup, const EncodedQueries& out,
                           cudaStream_t stream);

}  // namespace clo::cuda
