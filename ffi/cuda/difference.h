// The difference of a selection to the slot table, the last step of prefetch: which rows must move where.
#pragma once

#include "cuda/kernels.h"

namespace clo::cuda {

struct SelectedTokens {
  const uint32_t* bits;  // [B, Ko, ceil(S / 32)] of heads that missed and select something: bit t is set iff token t is
  uint32_t* finished;    // [1] 0 at the start
};

size_t difference_workspace_bytes(const PrefetchParams& p);

// Writes the requests of the heads that missed (p.lookup.hit is 0), updates their slots, and posts. Where no resident
// kernel serves the engine, copies the rows as well. Starts before the kernel ahead of it has ended (overlap.cuh).
cudaError_t difference(const PrefetchParams& p, const EngineRef& engine, const SelectedTokens& selected, void* workspace,
                       cudaStream_t stream);

}  // namespace clo::cuda
