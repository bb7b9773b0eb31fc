// One block of anonymous memory with a fixed address: mapped at once, touched only as it is written, returned on
// destruction. Pieces are handed out front to back, each aligned to a cache line.
#pragma once

#include <cstdint>
#include <new>
#include <string>

namespace clo {

// std::bad_alloc that says what was asked for and how much.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string text) : text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

class Arena {
 public:
  static constexpr int64_t kAlignment = 64;

  // Bytes that an array of `count` elements takes in an arena. Throws OutOfMemory when the product overflows.
  static int64_t padded(int64_t count, int64_t element_bytes);

  Arena() = default;
  Arena(int64_t bytes, const char* purpose);  // zeroed; huge pages where the system grants them; throws OutOfMemory
  ~Arena();
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  int64_t size() const { return size_; }

  // The next array of the arena. The sum of padded() over all calls must not exceed the size: else std::logic_error.
  template <typename T>
  T* take(int64_t count) {
    return static_cast<T*>(take_bytes(padded(count, sizeof(T))));
  }
  void* take_bytes(int64_t padded_bytes);

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
  int64_t used_ = 0;
};

}  // namespace clo
