#include "host/arena.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#if CLO_CUDA_BUILD
#include "host/cuda/device_memory.h"
#endif

namespace clo {
namespace {

// A smaller block would be rounded up to one huge page that it does not fill.
constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kPage = 4096;

// Anonymous memory, or null. `aligned`: starts at a huge page, so that all of it can be in huge pages.
void* map_memory(int64_t bytes, bool aligned) {
  const int64_t more = aligned ? kHugePage : 0;
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS;
  void* p = mmap(nullptr, static_cast<size_t>(bytes + more), PROT_READ | PROT_WRITE, kFlags, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  if (!aligned) return p;
  char* const begin = static_cast<char*>(p);
  const int64_t before = (kHugePage - reinterpret_cast<intptr_t>(p) % kHugePage) % kHugePage;
  const int64_t end = (before + bytes + kPage - 1) / kPage * kPage;
  if (before > 0) munmap(begin, static_cast<size_t>(before));
  if (bytes + more > end) munmap(begin + end, static_cast<size_t>(bytes + more - end));
  return begin + before;
}

}  // namespace

int64_t Arena::padded(int64_t count, int64_t element_bytes) {
  int64_t bytes;
  if (__builtin_mul_overflow(count, element_bytes, &bytes) || bytes > std::numeric_limits<int64_t>::max() - kAlignment)
    throw OutOfMemory("an array of " + std::to_string(count) + " elements of " + std::to_string(element_bytes) +
                      " bytes is larger than any memory");
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

Arena::Arena(int64_t bytes, const char* purpose, Memory where, [[maybe_unused]] const Progress& progress)
    : where_(where) {
  if (bytes == 0) return;
#if CLO_CUDA_BUILD
  if (where == Memory::kDevice) {
    data_ = device_allocate(bytes, purpose);
    size_ = bytes;
    return;
  }
#else
  if (where != Memory::kHost) throw std::logic_error("arena: this build knows host memory only");
#endif
  void* p = map_memory(bytes, where == Memory::kMapped && bytes >= 2 * kHugePage);
  if (p == nullptr)
    throw OutOfMemory(std::string(purpose) + ": " + std::to_string(bytes) + " bytes needed, " + std::strerror(errno));
  // Only advice: without huge pages the arena works all the same.
  if (bytes >= 2 * kHugePage) madvise(p, static_cast<size_t>(bytes), MADV_HUGEPAGE);
#if CLO_CUDA_BUILD
  if (where == Memory::kMapped) {
    try {
      device_map(p, bytes, purpose, progress);
    } catch (...) {
      munmap(p, static_cast<size_t>(bytes));
      throw;
    }
  }
#endif
  data_ = p;
  size_ = bytes;
}

Arena::Arena(int64_t bytes, const char* purpose, WindowSource& windows) : where_(Memory::kDevice) {
  if (bytes == 0) return;
  try {
    window_ = windows.open(bytes);
  } catch (const std::runtime_error& e) {
    throw OutOfMemory("device memory of " + std::string(purpose) + ": " + std::to_string(bytes) + " bytes needed, " +
                      e.what());
  }
  data_ = window_->device();
  size_ = bytes;
  fill(data_, 0, bytes);
}

Arena::~Arena() { release(); }

void Arena::release() noexcept {
  if (data_ == nullptr || window_ != nullptr) return;
#if CLO_CUDA_BUILD
  if (where_ == Memory::kDevice) {
    device_free(data_);
    return;
  }
  if (where_ == Memory::kMapped) device_unmap(data_);
#endif
  munmap(data_, static_cast<size_t>(size_));
}

Arena::Arena(Arena&& other) noexcept { *this = std::move(other); }

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(used_, other.used_);
  std::swap(where_, other.where_);
  std::swap(window_, other.window_);
  return *this;
}

void Arena::fill(void* data, int byte, int64_t bytes) const {
  if (bytes == 0) return;
#if CLO_CUDA_BUILD
  if (where_ == Memory::kDevice) {
    device_fill(data, byte, bytes);
    return;
  }
#endif
  std::memset(data, byte, static_cast<size_t>(bytes));
}

void* Arena::take_bytes(int64_t padded_bytes) {
  if (padded_bytes > size_ - used_) throw std::logic_error("arena: more taken than was planned");
  void* p = static_cast<char*>(data_) + used_;
  used_ += padded_bytes;
  return p;
}

}  // namespace clo
