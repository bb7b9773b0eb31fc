// Device memory that the host writes at addresses of its own, through the PCIe BAR. Stores there are write-combined:
// they leave the CPU in order only around an sfence. Nobody reads there, which takes a microsecond a word.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace clo {

class Window {
 public:
  virtual ~Window() = default;
  void* device() const { return device_; }  // for kernels
  void* host() const { return host_; }      // for stores of the CPU

 protected:
  void* device_ = nullptr;
  void* host_ = nullptr;
};

// Where windows come from.
class WindowSource {
 public:
  virtual ~WindowSource() = default;
  virtual const char* name() const = 0;

  // A window of at least `bytes`, aligned to 64 KiB on both sides. Throws std::runtime_error, which says what was
  // refused.
  virtual std::unique_ptr<Window> open(int64_t bytes) = 0;
};

}  // namespace clo
