// The flags of one layer between the kernels of a decode program and the resident transfer kernel.
//
// prefetch writes a request, then `posted`; the transfer kernel copies the rows, then writes `ready`; attend waits until
// ready has reached posted. Each word has a cache line of its own, and both only grow (mod 2^32).
#pragma once

#include <cstdint>

namespace clo::cuda {

struct LayerFlags {
  uint32_t posted;   // sequence number of the last request
  uint32_t layer;    // whose flags these are; names the layer in errors
  uint32_t pad[14];
  uint32_t ready;    // sequence number of the last request whose rows are all there
  uint32_t arrived;  // blocks of the transfer kernel that have finished their part of the next one
  uint32_t pad2[14];
};
static_assert(sizeof(LayerFlags) == 128, "a cache line for each word");

// The engine's error word: 0, or what failed first. Three bits say what, nine which layer, twenty the sequence number
// (modulo 2^20). Whoever waits gives up as soon as it is not 0.
enum class Failure : uint32_t {
  kNone = 0,
  kNotDelivered = 1,  // attention waited longer than the limit for a layer's rows
  kNotPosted = 2,     // the transfer kernel waited longer than the limit for a layer's request
  kAborted = 3,       // by the host
  kBadOperand = 4,    // a value in device memory that leads outside of the arenas
  kSelection = 5,     // blocks of the selection waited longer than the limit for each other
};
constexpr uint32_t kMaxLayers = 512;

constexpr uint32_t error_word(Failure what, uint32_t layer, uint32_t sequence) {
  return static_cast<uint32_t>(what) << 29 | (layer % kMaxLayers) << 20 | (sequence & 0xfffffu);
}
constexpr Failure error_failure(uint32_t word) { return static_cast<Failure>(word >> 29); }
constexpr uint32_t error_layer(uint32_t word) { return word >> 20 & (kMaxLayers - 1); }
constexpr uint32_t error_sequence(uint32_t word) { return word & 0xfffffu; }

#if defined(__CUDACC__)

// Of what the CPU writes through the PCIe BAR (backend bar), too: hence the scope, which costs nothing in device memory.
__device__ inline uint32_t load_acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ inline uint32_t load_relaxed(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
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

// Keeps the first failure.
__device__ inline void fail(uint32_t* error, Failure what, uint32_t layer, uint32_t sequence) {
  atomicCAS(error, 0u, error_word(what, layer, sequence));
}

// One thread waits until the rows of the layer's last request are there. False when that took longer than timeout_ns, or
// when *error was set already: *error is then not 0.
__device__ inline bool wait_ready(LayerFlags* flags, uint64_t timeout_ns, uint32_t* error) {
  // Written by an earlier kernel of this stream, so that it need not be looked at before the other word.
  const uint32_t wanted = __ldcg(&flags->posted);
  const auto ready = [&] { return static_cast<int32_t>(load_acquire(&flags->ready) - wanted) >= 0; };
  if (ready()) return true;
  const uint64_t start = global_nanoseconds();
  while (!ready()) {
    if (load_acquire(error) != 0) return false;
    if (global_nanoseconds() - start > timeout_ns) {
      fail(error, Failure::kNotDelivered, flags->layer, wanted);
      return false;
    }
  }
  return true;
}

// One thread hands over the layer's request, after every write to it has been fenced (__threadfence).
__device__ inline void post(LayerFlags* flags) { store_release(&flags->posted, flags->posted + 1); }

#endif

}  // namespace clo::cuda
