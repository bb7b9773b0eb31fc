// The blocks of 1024 threads of the selection.
#pragma once

namespace clo::cuda {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

// threadIdx.x where the compiler cannot know it: what follows from it is not worth keeping in registers from one use to the
// next, as the compiler would do.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// blockIdx.x, the same way.
__device__ __forceinline__ int block_index() {
  int index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

}  // namespace clo::cuda
