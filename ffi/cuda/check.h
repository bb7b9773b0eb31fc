// CUDA errors: returned by launchers, ended on in tests.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

// Leaves the enclosing launcher with the error.
#define CLO_CUDA_RETURN(expression)                                \
  do {                                                             \
    const cudaError_t clo_error_ = (expression);                   \
    if (clo_error_ != cudaSuccess) return clo_error_;              \
  } while (false)

// Ends the program with file and line; for tests and benchmarks.
#define CLO_CUDA_CHECK(expression)                                                                     \
  do {                                                                                                 \
    const cudaError_t clo_error_ = (expression);                                                       \
    if (clo_error_ != cudaSuccess) {                                                                   \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #expression,                         \
                   cudaGetErrorString(clo_error_));                                                    \
      std::exit(1);                                                                                    \
    }                                                                                                  \
  } while (false)
