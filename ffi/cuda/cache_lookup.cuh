// The lookup with what prefetch adds to it.
#pragma once

#include "cuda/kernels.h"

namespace clo::cuda {

// Sequences with k[b] <= 0 have nothing to select: their heads hit and have no label afterwards (age -1). `clear` points
// at a word that becomes 0. Both may be null.
cudaError_t lookup(const CacheLookupParams& p, const int32_t* k, uint32_t* clear, cudaStream_t stream);

}  // namespace clo::cuda
