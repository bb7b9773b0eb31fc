// The flags of one layer between the kernels of a decode program and the resident transfer kernel.
//
// prefetch writes a request, then `posted`; the transfer kernel copies the rows, then writes `ready`; attend waits until
// ready has reached posted. Each word has a cache line of its own, and both only grow (mod 2^32).
#pragma once

#include <cstdint>

namespace clo::cuda {

struct LayerFlags {
  uint32_t posted;  // sequence number of the last request
  uint32_t pad[15];
  uint32_t ready;   // sequence number of the last request whose rows are all there
  uint32_t pad2[15];
};
static_assert(sizeof(LayerFlags) == 128, "a cache line for each word");

#if defined(__CUDACC__)

__device__ inline uint32_t load_acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ inline void store_release(uint32_t* word, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ inline uint64_t global_nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// One thread waits until the rows of the layer's last request are there. False when that took longer than timeout_ns, or
// when *error was set already: *error is then not 0.
__device__ inline bool wait_ready(LayerFlags* flags, uint64_t timeout_ns, uint32_t* error) {
  const uint32_t wanted = load_acquire(&flags->posted);
  const uint64_t start = global_nanoseconds();
  while (static_cast<int32_t>(load_acquire(&flags->ready) - wanted) < 0) {
    if (load_acquire(error) != 0) return false;
    if (global_nanoseconds() - start > timeout_ns) {
      atomicCAS(error, 0u, 1u);
      return false;
    }
  }
  return true;
}

// One thread hands over the layer's request, after every write to it has been fenced (__threadfence).
__device__ inline void post(LayerFlags* flags) { store_release(&flags->posted, flags->posted + 1); }

#endif

}  // namespace clo::cuda
