// NVIDIA's GDRCopy library, opened at run time: it maps device memory into this process with the help of the kernel
// module gdrdrv. The few declarations that are needed are ours, of its ABI from version 2.0 on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace clo {

class GdrLibrary {
 public:
  static constexpr int64_t kPage = int64_t{64} << 10;  // of the GPU; mappings start at a multiple of it

  // Opens the library, which the environment variable CLO_JAX_GDRAPI may name, and its device /dev/gdrdrv. Throws
  // std::runtime_error that says which of the two is missing.
  GdrLibrary();
  explicit GdrLibrary(const std::string& path);
  ~GdrLibrary();
  GdrLibrary(const GdrLibrary&) = delete;
  GdrLibrary& operator=(const GdrLibrary&) = delete;

  class Mapping {
   public:
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    void* host() const { return host_; }

   private:
    friend class GdrLibrary;
    Mapping() = default;
    GdrLibrary* library_ = nullptr;
    unsigned long handle_ = 0;  // gdr_mh_t
    void* va_ = nullptr;
    void* host_ = nullptr;
    size_t bytes_ = 0;
    bool pinned_ = false;
  };

  // Maps [device, device + bytes), both multiples of kPage, for as long as the mapping lives, which must be shorter
  // than the library. Throws std::runtime_error that names the refused step. One call at a time: the library is not
  // thread-safe.
  std::unique_ptr<Mapping> map(uint64_t device, int64_t bytes);

 private:
  struct Functions;
  void* const handle_;
  std::unique_ptr<Functions> call_;
  void* gdr_ = nullptr;
};

}  // namespace clo
