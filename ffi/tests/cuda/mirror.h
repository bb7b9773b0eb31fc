// Memory that a test has on the host and on the GPU, with a guard after the GPU's part.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "cuda/check.h"
#include "tests/check.h"

// Memory on both sides; the GPU's copy ends with a guard that must stay untouched.
template <typename T>
class Mirror {
 public:
  std::vector<T> host;

  explicit Mirror(size_t n) : host(n) { CLO_CUDA_CHECK(cudaMalloc(&device_, n * sizeof(T) + kGuard)); }
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;
  ~Mirror() { cudaFree(device_); }

  T* device() const { return device_; }
  void upload() {
    CLO_CUDA_CHECK(cudaMemcpy(device_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    CLO_CUDA_CHECK(cudaMemset(device_ + host.size(), kPattern, kGuard));
  }
  std::vector<T> download() const {
    std::vector<T> x(host.size());
    CLO_CUDA_CHECK(cudaMemcpy(x.data(), device_, x.size() * sizeof(T), cudaMemcpyDeviceToHost));
    std::vector<uint8_t> guard(kGuard);
    CLO_CUDA_CHECK(cudaMemcpy(guard.data(), device_ + x.size(), kGuard, cudaMemcpyDeviceToHost));
    for (const uint8_t byte : guard) CHECK(byte == kPattern);
    return x;
  }

 private:
  static constexpr size_t kGuard = 256;
  static constexpr int kPattern = 0x5a;
  T* device_ = nullptr;
};
