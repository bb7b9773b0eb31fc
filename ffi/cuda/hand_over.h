// Requests that threads of the CPU serve (backends bar and staged): a kernel behind each prefetch hands the request
// over, and with `staged` another one takes the rows from a staging buffer to their slots.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/kernels.h"

namespace clo::cuda {

// Copies the request of one layer that has been posted earlier in this stream to pinned memory
// (TransferControl::mirrors) and rings the layer's doorbell. A request without moves is ready at once. Nothing happens
// after a failure.
cudaError_t hand_over(const EngineRef& engine, cudaStream_t stream);

// Takes the rows of the layer's request, which lie one after the other in `rows` (device memory) in the order of heads
// and moves, to their slots, publishes `number`, and writes `uses` to *freed (mapped pinned memory): `rows` may be
// overwritten then.
cudaError_t scatter_rows(const EngineRef& engine, const void* rows, uint32_t number, uint32_t* freed, uint32_t uses,
                         cudaStream_t stream);

// As load_transfer_kernels (pull.h), of these.
cudaError_t load_hand_over_kernels();

}  // namespace clo::cuda
