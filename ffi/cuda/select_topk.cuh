// The selection with what prefetch adds to it.
#pragma once

#include "cuda/kernels.h"

namespace clo::cuda {

struct SelectOptions {
  LayerRef rows;       // where `exact` finds the rows: host_rows of the layer; views null: p.rows
  bool fill_skipped;   // indices of skipped heads become -1; else they stay as they are
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

cudaError_t select(const SelectTopkParams& p, const SelectOptions& options, void* workspace, cudaStream_t stream);

}  // namespace clo::cuda
