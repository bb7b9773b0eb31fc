// Arrays that live on host and device, for the tests of CUDA kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include "clo/dtype.h"
#include "cuda/check.h"
#include "tests/check.h"

namespace clo::test {

// `host` is what the CPU kernel works on; `device` starts as a copy of it.
template <typename T>
class Array {
 public:
  explicit Array(std::vector<T> values) : host(std::move(values)) {
    CLO_CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&device), bytes() + 256));
    upload();
  }
  Array(size_t count, T value) : Array(std::vector<T>(count, value)) {}
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { cudaFree(device); }

  size_t bytes() const { return host.size() * sizeof(T); }
  void upload() { CLO_CUDA_CHECK(cudaMemcpy(device, host.data(), bytes(), cudaMemcpyHostToDevice)); }
  void poison() { CLO_CUDA_CHECK(cudaMemset(device, 0x77, bytes())); }

  std::vector<T> download() const {
    std::vector<T> values(host.size());
    CLO_CUDA_CHECK(cudaMemcpy(values.data(), device, bytes(), cudaMemcpyDeviceToHost));
    return values;
  }
  bool same() const { return download() == host; }

  std::vector<T> host;
  T* device = nullptr;
};

// Standard normal values of an activation dtype, as bytes.
inline std::vector<uint8_t> normal(std::mt19937& random, size_t count, DType dtype, float spread = 1) {
  std::normal_distribution<float> draw(0, spread);
  std::vector<uint8_t> out(count * static_cast<size_t>(dtype_bytes(dtype)));
  for (size_t i = 0; i < count; ++i) {
    const float x = draw(random);
    dispatch(dtype, [&](auto* tag) {
      std::remove_pointer_t<decltype(tag)> y;
      from_float(x, &y);
      std::memcpy(out.data() + i * sizeof y, &y, sizeof y);
    });
  }
  return out;
}

inline std::vector<float> normal_floats(std::mt19937& random, size_t count, float spread = 1) {
  std::normal_distribution<float> draw(0, spread);
  std::vector<float> out(count);
  for (float& x : out) x = draw(random);
  return out;
}

inline float element(const std::vector<uint8_t>& bytes, size_t i, DType dtype) {
  return dispatch(dtype, [&](auto* tag) {
    std::remove_pointer_t<decltype(tag)> y;
    std::memcpy(&y, bytes.data() + i * sizeof y, sizeof y);
    return to_float(y);
  });
}

}  // namespace clo::test
