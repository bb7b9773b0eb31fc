// One block of memory with a fixed address, returned on destruction. Host memory is mapped at once and touched only as it
// is written. Pieces are handed out front to back, each aligned to a cache line.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <string>

#include "host/backends/window.h"

namespace clo {

// std::bad_alloc that says what was asked for and how much.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string text) : text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

enum class Memory {
  kHost,    // of this process
  kMapped,  // the same, touched and pinned, which kernels of the GPU reach at the same address
  kDevice,  // of the GPU, which the host does not reach
};

// Called while memory is touched and pinned, which takes seconds for tens of gigabytes: bytes done, and of how many.
using Progress = std::function<void(int64_t done, int64_t total)>;

class Arena {
 public:
  static constexpr int64_t kAlignment = 64;

  // Bytes that an array of `count` elements takes in an arena. Throws OutOfMemory when the product overflows.
  static int64_t padded(int64_t count, int64_t element_bytes);

  Arena() = default;
  // Zeroed; host memory in huge pages where the system grants them. Throws OutOfMemory.
  Arena(int64_t bytes, const char* purpose, Memory where = Memory::kHost, const Progress& progress = {});
  // Device memory behind a window. Throws OutOfMemory.
  Arena(int64_t bytes, const char* purpose, WindowSource& windows);
  ~Arena();
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  int64_t size() const { return size_; }
  const Window* window() const { return window_.get(); }

  // The next array of the arena. The sum of padded() over all calls must not exceed the size: else std::logic_error.
  template <typename T>
  T* take(int64_t count) {
    return static_cast<T*>(take_bytes(padded(count, sizeof(T))));
  }
  void* take_bytes(int64_t padded_bytes);

  // Sets bytes of this arena, wherever it is.
  void fill(void* data, int byte, int64_t bytes) const;

 private:
  void release() noexcept;

  void* data_ = nullptr;
  int64_t size_ = 0;
  int64_t used_ = 0;
  Memory where_ = Memory::kHost;
  std::unique_ptr<Window> window_;
};

}  // namespace clo
