// A stand-in for NVIDIA's libgdrapi, for tests only: it "maps" ordinary memory, whatever device address it is given,
// and refuses the step that the environment variable STANDIN_GDR_REFUSE names. It never touches a GPU.
#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

constexpr unsigned long kPage = 65536;
int live = 0;  // opened, pinned and mapped things

struct Handle {
  unsigned long h;
};

struct Pinned {
  unsigned long address;
  size_t bytes;
};

// As gdr_info_t of version 2.
struct Info {
  uint64_t va, mapped_size;
  uint32_t page_size;
  uint64_t tm_cycles;
  uint32_t cycles_per_ms;
  unsigned mapped : 1, wc_mapping : 1;
  int mapping_type;
};

bool refused(const char* step) {
  const char* wanted = std::getenv("STANDIN_GDR_REFUSE");
  return wanted != nullptr && std::strcmp(wanted, step) == 0;
}

// The kernel module may map from an earlier address on; so does this one.
constexpr unsigned long kBefore = 4096;

}  // namespace

extern "C" {

int standin_gdr_live() { return live; }

void* gdr_open() {
  if (refused("open")) return nullptr;
  ++live;
  return new int;
}

int gdr_close(void* gdr) {
  delete static_cast<int*>(gdr);
  --live;
  return 0;
}

int gdr_pin_buffer(void*, unsigned long address, size_t bytes, uint64_t, uint32_t, Handle* handle) {
  if (refused("pin")) return ENOMEM;
  if (address % kPage != 0) return EINVAL;
  handle->h = reinterpret_cast<unsigned long>(new Pinned{address, bytes});
  ++live;
  return 0;
}

int gdr_unpin_buffer(void*, Handle handle) {
  delete reinterpret_cast<Pinned*>(handle.h);
  --live;
  return 0;
}

int gdr_map(void*, Handle handle, void** va, size_t bytes) {
  if (refused("map")) return EAGAIN;
  if (bytes != reinterpret_cast<Pinned*>(handle.h)->bytes) return EINVAL;
  *va = mmap(nullptr, bytes + kBefore, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*va == MAP_FAILED) return ENOMEM;
  ++live;
  return 0;
}

int gdr_unmap(void*, Handle, void* va, size_t bytes) {
  munmap(va, bytes + kBefore);
  --live;
  return 0;
}

int gdr_get_info_v2(void*, Handle handle, Info* info) {
  if (refused("info")) return EINVAL;
  const auto* pinned = reinterpret_cast<Pinned*>(handle.h);
  std::memset(info, 0, sizeof *info);
  info->va = pinned->address - kBefore;
  info->mapped_size = pinned->bytes + kBefore;
  info->page_size = kPage;
  if (refused("address")) info->va = pinned->address + kPage;
  return 0;
}

}  // extern "C"
