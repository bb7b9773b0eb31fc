#include "host/cuda/device_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "host/numa.h"

namespace clo {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kStep = int64_t{1} << 30;  // between reports of progress
constexpr int64_t kBytesPerToucher = int64_t{64} << 20;
constexpr int64_t kMaxTouchers = 16;

void touch(char* data, int64_t bytes) {
  const int64_t threads = std::clamp<int64_t>(bytes / kBytesPerToucher, 1, kMaxTouchers);
  const int64_t share = (bytes / threads + kPage - 1) / kPage * kPage;
  std::vector<std::thread> touchers;
  for (int64_t begin = 0; begin < bytes; begin += share)
    touchers.emplace_back([=] {
      for (int64_t i = begin; i < std::min(begin + share, bytes); i += kPage) static_cast<volatile char*>(data)[i] = 0;
    });
  for (std::thread& t : touchers) t.join();
}

int node_of_current_device() {
  int device = 0;
  char address[32] = {};
  if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetPCIBusId(address, sizeof address, device) != cudaSuccess)
    return -1;
  return numa_node_of_pci(address);
}

[[noreturn]] void no_memory(const char* purpose, int64_t bytes, cudaError_t error) {
  cudaGetLastError();  // not sticky: the next call must not report it again
  throw OutOfMemory(std::string(purpose) + ": " + std::to_string(bytes) + " bytes needed, " +
                    cudaGetErrorString(error));
}

}  // namespace

void* device_allocate(int64_t bytes, const char* purpose) {
  void* data = nullptr;
  if (const cudaError_t e = cudaMalloc(&data, static_cast<size_t>(bytes)); e != cudaSuccess)
    no_memory((std::string("device memory of ") + purpose).c_str(), bytes, e);
  device_fill(data, 0, bytes);
  return data;
}

void device_free(void* data) noexcept { cudaFree(data); }

void device_map(void* host, int64_t bytes, const char* purpose, const Progress& progress) {
  prefer_numa_node(host, bytes, node_of_current_device());
  for (int64_t done = 0; done < bytes; done += kStep) {
    if (progress) progress(done, bytes);
    touch(static_cast<char*>(host) + done, std::min(kStep, bytes - done));
  }
  const auto flags = cudaHostRegisterMapped | cudaHostRegisterPortable;
  if (const cudaError_t e = cudaHostRegister(host, static_cast<size_t>(bytes), flags); e != cudaSuccess)
    no_memory((std::string("pinned memory of ") + purpose).c_str(), bytes, e);
  void* device = nullptr;
  const cudaError_t e = cudaHostGetDevicePointer(&device, host, 0);
  if (e != cudaSuccess || device != host) {
    cudaHostUnregister(host);
    throw std::runtime_error("kernels do not see pinned memory at its own address on this system");
  }
  if (progress) progress(bytes, bytes);
}

void device_unmap(void* host) noexcept { cudaHostUnregister(host); }

void device_fill(void* data, int byte, int64_t bytes) {
  cudaError_t e = cudaMemset(data, byte, static_cast<size_t>(bytes));
  if (e == cudaSuccess) e = cudaDeviceSynchronize();
  if (e != cudaSuccess) throw std::runtime_error(std::string("device memory: ") + cudaGetErrorString(e));
}

}  // namespace clo
