#include "host/backends/gdr.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace clo {
namespace {

constexpr const char* kDefaultPath = "libgdrapi.so.2";

// gdr_mh_t is a struct of one unsigned long, passed by value.
struct Handle {
  unsigned long h;
};

// gdr_info_t. Later versions append to it, so there is room.
struct Info {
  uint64_t va;  // device address that the mapping starts at: at or before the one that was pinned
  uint64_t mapped_size;
  uint32_t page_size;
  uint64_t tm_cycles;
  uint32_t cycles_per_ms;
  unsigned bits;
  unsigned char room[192];
};

std::string library_path() {
  const char* path = std::getenv("CLO_JAX_GDRAPI");
  return path != nullptr && *path != '\0' ? path : kDefaultPath;
}

void* open_library(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw std::runtime_error("no libgdrapi: " + std::string(dlerror()));
  return handle;
}

[[noreturn]] void refused(const char* step, int error) {
  throw std::runtime_error(std::string("libgdrapi: ") + step + " refused: " + std::strerror(error));
}

}  // namespace

struct GdrLibrary::Functions {
  void* (*open)();
  int (*close)(void*);
  int (*pin)(void*, unsigned long, size_t, uint64_t, uint32_t, Handle*);
  int (*unpin)(void*, Handle);
  int (*info)(void*, Handle, Info*);
  int (*map)(void*, Handle, void**, size_t);
  int (*unmap)(void*, Handle, void*, size_t);
};

GdrLibrary::GdrLibrary() : GdrLibrary(library_path()) {}

GdrLibrary::GdrLibrary(const std::string& path) : handle_(open_library(path)), call_(new Functions) {
  const auto find = [&](const char* name, auto* function) {
    void* symbol = dlsym(handle_, name);
    if (symbol == nullptr) {
      dlclose(handle_);
      throw std::runtime_error("libgdrapi: " + path + " has no " + name);
    }
    *function = reinterpret_cast<std::remove_reference_t<decltype(*function)>>(symbol);
  };
  find("gdr_open", &call_->open);
  find("gdr_close", &call_->close);
  find("gdr_pin_buffer", &call_->pin);
  find("gdr_unpin_buffer", &call_->unpin);
  // The exported name of gdr_get_info has a version in it since 2.0.
  find(dlsym(handle_, "gdr_get_info_v2") != nullptr ? "gdr_get_info_v2" : "gdr_get_info", &call_->info);
  find("gdr_map", &call_->map);
  find("gdr_unmap", &call_->unmap);
  gdr_ = call_->open();
  if (gdr_ == nullptr) {
    dlclose(handle_);
    throw std::runtime_error("libgdrapi: gdr_open refused: no /dev/gdrdrv (is the kernel module gdrdrv loaded?)");
  }
}

GdrLibrary::~GdrLibrary() {
  call_->close(gdr_);
  dlclose(handle_);
}

GdrLibrary::Mapping::~Mapping() {
  if (va_ != nullptr) library_->call_->unmap(library_->gdr_, Handle{handle_}, va_, bytes_);
  if (pinned_) library_->call_->unpin(library_->gdr_, Handle{handle_});
}

std::unique_ptr<GdrLibrary::Mapping> GdrLibrary::map(uint64_t device, int64_t bytes) {
  if (device % kPage != 0 || bytes % kPage != 0 || bytes <= 0)
    throw std::logic_error("gdr: wanted whole pages of the GPU");
  std::unique_ptr<Mapping> m(new Mapping);
  m->library_ = this;
  m->bytes_ = static_cast<size_t>(bytes);
  Handle handle{};
  if (const int error = call_->pin(gdr_, device, m->bytes_, 0, 0, &handle)) refused("gdr_pin_buffer", error);
  m->handle_ = handle.h;
  m->pinned_ = true;
  void* va = nullptr;
  if (const int error = call_->map(gdr_, handle, &va, m->bytes_)) refused("gdr_map", error);
  m->va_ = va;
  Info info{};
  if (const int error = call_->info(gdr_, handle, &info)) refused("gdr_get_info", error);
  if (info.va > device || device - info.va >= info.mapped_size)
    throw std::runtime_error("libgdrapi: gdr_get_info names another address than the one that was pinned");
  m->host_ = static_cast<char*>(va) + (device - info.va);
  return m;
}

}  // namespace clo
