// Kernels of one stream that start before the one ahead of them has ended (programmatic dependent launch).
//
// In a chain of such kernels each calls wait_for_earlier() before it touches what another one writes, and let_next_start()
// only after that. So whatever runs may rely on all but the kernel right before it, even ahead of its wait.
#pragma once

#include <cuda_runtime_api.h>

namespace clo::cuda {

#if defined(__CUDACC__)

// Until the kernels before this one have ended and what they wrote is visible.
__device__ __forceinline__ void wait_for_earlier() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The next kernel may start as soon as every block has called this or ended, and there is room.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

#endif

// The attribute of a kernel that may start before the one ahead of it has ended.
inline cudaLaunchAttribute overlaps_earlier() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// For kernels whose blocks are to be on a multiprocessor with those of their neighbours: all ask for the same division of
// its memory, 132 KiB of 228 shared, for one that wants another division may have to wait until it is empty. A kernel whose
// blocks need more gets more.
inline cudaError_t share_multiprocessor(const void* kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 58);
}

}  // namespace clo::cuda
