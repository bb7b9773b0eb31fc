// CUDA memory of the engine's arenas. Only in builds with CUDA.
#pragma once

#include <cstdint>

#include "host/arena.h"

namespace clo {

// Zeroed device memory. Throws OutOfMemory.
void* device_allocate(int64_t bytes, const char* purpose);
void device_free(void* data) noexcept;

// Touches every page (with several threads: one alone takes seconds for gigabytes) on the NUMA node of the GPU where
// there is one, pins the memory and makes it readable for kernels at its own address. Throws OutOfMemory.
void device_map(void* host, int64_t bytes, const char* purpose, const Progress& progress);
void device_unmap(void* host) noexcept;

// Sets device memory to a byte; done when it returns. Throws std::runtime_error.
void device_fill(void* data, int byte, int64_t bytes);

}  // namespace clo
