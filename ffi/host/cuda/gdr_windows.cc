// Windows by libgdrapi over memory of cudaMalloc, and the choice between the sources of windows.
#include <cuda_runtime_api.h>

#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "host/backends/gdr.h"
#include "host/backends/stream_rows.h"
#include "host/cuda/windows.h"

namespace clo {
namespace {

// The library, with a lock: it takes one call at a time.
struct Gdr {
  std::mutex mutex;
  GdrLibrary library;
};

class GdrWindow : public Window {
 public:
  GdrWindow(std::shared_ptr<Gdr> gdr, int64_t wanted) : gdr_(std::move(gdr)) {
    constexpr int64_t kPage = GdrLibrary::kPage;
    const int64_t bytes = (wanted + kPage - 1) / kPage * kPage;
    // cudaMalloc does not promise the alignment, and two mappings must not share a page.
    const cudaError_t error = cudaMalloc(&block_, static_cast<size_t>(bytes + kPage));
    if (error != cudaSuccess) {
      cudaGetLastError();
      throw std::runtime_error("device memory for libgdrapi: " + std::string(cudaGetErrorString(error)));
    }
    const uint64_t device = (reinterpret_cast<uint64_t>(block_) + kPage - 1) / kPage * kPage;
    device_ = reinterpret_cast<void*>(device);
    try {
      std::lock_guard<std::mutex> lock(gdr_->mutex);
      mapping_ = gdr_->library.map(device, bytes);
    } catch (...) {
      cudaFree(block_);
      throw;
    }
    host_ = mapping_->host();
  }
  ~GdrWindow() override {
    {
      std::lock_guard<std::mutex> lock(gdr_->mutex);
      mapping_.reset();
    }
    cudaFree(block_);
  }

 private:
  const std::shared_ptr<Gdr> gdr_;
  void* block_ = nullptr;
  std::unique_ptr<GdrLibrary::Mapping> mapping_;
};

class GdrWindows : public WindowSource {
 public:
  const char* name() const override { return "libgdrapi"; }
  std::unique_ptr<Window> open(int64_t bytes) override { return std::make_unique<GdrWindow>(gdr_, bytes); }

 private:
  std::shared_ptr<Gdr> gdr_ = std::make_shared<Gdr>();
};

// Writes through a window and reads the device's side.
void probe(WindowSource& source) {
  constexpr int64_t kWords = 1024;
  const std::unique_ptr<Window> window = source.open(kWords * 4);
  uint32_t written[kWords], read[kWords];
  for (uint32_t i = 0; i < kWords; ++i) written[i] = i * 0x9e3779b9u + 1;
  std::memcpy(window->host(), written, sizeof written);
  drain_stores();
  const cudaError_t error = cudaMemcpy(read, window->device(), sizeof read, cudaMemcpyDeviceToHost);
  if (error != cudaSuccess) {
    cudaGetLastError();
    throw std::runtime_error(std::string(source.name()) + ": reading a window: " + cudaGetErrorString(error));
  }
  if (std::memcmp(written, read, sizeof read) != 0)
    throw std::runtime_error(std::string(source.name()) + ": what the CPU writes does not arrive on the GPU");
}

}  // namespace

std::unique_ptr<WindowSource> make_gdr_windows() { return std::make_unique<GdrWindows>(); }

std::unique_ptr<WindowSource> choose_windows(std::string* skipped) {
  skipped->clear();
  for (const auto make : {make_gdr_windows, make_vulkan_windows}) {
    try {
      std::unique_ptr<WindowSource> source = make();
      probe(*source);
      return source;
    } catch (const std::runtime_error& e) {
      *skipped += (skipped->empty() ? "" : "; ") + std::string(e.what());
    }
  }
  throw std::runtime_error(*skipped);
}

FoundWindows find_windows() {
  static std::mutex mutex;
  // Never destroyed: windows of control blocks stay open, see DeviceControl.
  static auto* const known = new std::map<int, FoundWindows>;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) throw std::runtime_error("no GPU");
  std::lock_guard<std::mutex> lock(mutex);
  FoundWindows& found = (*known)[device];
  if (found.source == nullptr) found.source = choose_windows(&found.skipped);
  return found;
}

}  // namespace clo
