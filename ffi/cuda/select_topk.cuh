// The selection with what prefetch adds to it.
#pragma once

#include "cuda/kernels.h"

namespace clo::cuda {

struct SelectOptions {
  LayerRef rows;            // where `exact` finds the rows: host_rows of the layer; views null: p.rows
  bool fill_skipped;        // indices of skipped heads become -1; else they stay as they are
  uint32_t* selected_bits;  // [B·Ko, ceil(S/32)] bit t of a selecting head's row: token t is selected; rows of others stay
                            // as they are. May be null; if not, p.indices may be null
  uint32_t* error;          // the engine's error word, or null. It tells of operands out of range, which are clamped, and of
                            // a selection that did not come to an end in time, whose indices are undefined and whose
                            // bits are some of the right ones
  uint64_t timeout_ns;      // of waits between the blocks of a head; 0: two seconds
};

// Candidates of sequence b are tokens [*begin, *begin + result).
__device__ __forceinline__ int candidates(const SelectTopkParams& p, int b, int* begin) {
  *begin = max(p.begin[b], 0);
  return min(p.end[b], static_cast<int>(p.max_tokens)) - *begin;
}

// Keys that a head of sequence b selects unless it is skipped.
__device__ __forceinline__ int selected(const SelectTopkParams& p, int b) {
  int begin;
  const int count = candidates(p, b, &begin);
  return max(0, min(min(p.k[b], static_cast<int>(p.k_max)), count));
}

// The two halves of a selection, one after the other in a stream over the same workspace of select_topk_workspace_bytes.
// The second begins while the first still runs.
//
// The first with a lookup: heads that hit become p.skip, which is lookup.hit. Heads of sequences with k[b] <= 0 have
// nothing to select: they hit and have no label afterwards (age -1). `clear` points at a word that becomes 0, or is null.
cudaError_t lookup_and_encode(const CacheLookupParams& lookup, const SelectTopkParams& p, uint32_t* clear, void* workspace,
                              cudaStream_t stream);
cudaError_t encode(const SelectTopkParams& p, void* workspace, cudaStream_t stream);  // without a lookup
cudaError_t select_encoded(const SelectTopkParams& p, const SelectOptions& options, void* workspace, cudaStream_t stream);

// Both, without a lookup, and so with the codes' loads under way while the queries are projected.
cudaError_t select(const SelectTopkParams& p, const SelectOptions& options, void* workspace, cudaStream_t stream);

}  // namespace clo::cuda
