// The selection with what prefetch adds to it.
#pragma once

#include "cuda/kernels.h"

namespace clo::cuda {

struct SelectOptions {
  LayerRef rows;       // where `exact` finds the rows: host_rows of the layer; views null: p.rows
  bool fill_skipped;   // indices of skipped heads become -1; else they stay as they are
};

cudaError_t select(const SelectTopkParams& p, const SelectOptions& options, void* workspace, cudaStream_t stream);

}  // namespace clo::cuda
