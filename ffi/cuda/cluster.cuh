// Blocks of a cluster: their barrier, and the shared memory of each other.
#pragma once

#include <cstdint>

namespace clo::cuda {

__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// A barrier of all threads of the cluster in two halves: what was written before the one, to shared or to global memory,
// is seen after the other.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_barrier() {
  cluster_arrive();
  cluster_wait();
}

// Address of a variable in shared memory of this block, in the block of that rank.
template <typename T>
__device__ __forceinline__ uint32_t remote(const T* variable, int rank) {
  const auto local = static_cast<uint32_t>(__cvta_generic_to_shared(variable));
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(local), "r"(rank));
  return address;
}

__device__ __forceinline__ uint32_t remote_load(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ void remote_or(uint32_t address, uint32_t bits) {
  asm volatile("red.relaxed.cluster.shared::cluster.or.b32 [%0], %1;" ::"r"(address), "r"(bits) : "memory");
}

}  // namespace clo::cuda
