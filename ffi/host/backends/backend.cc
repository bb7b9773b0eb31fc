#include "host/backends/backend.h"

#include <stdexcept>

#if CLO_CUDA_BUILD
#include <cuda_runtime_api.h>
#endif

namespace clo {
namespace {

#if CLO_CUDA_BUILD
BackendInfo pull() {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error == cudaSuccess && devices > 0) return {"pull", true, "kernels read pinned host memory"};
  cudaGetLastError();
  return {"pull", false, std::string("no GPU: ") + cudaGetErrorString(error)};
}
constexpr const char* kLater = "not in this version";
#else
BackendInfo pull() { return {"pull", false, "not in this build (needs CUDA)"}; }
constexpr const char* kLater = "not in this build (needs CUDA)";
#endif

}  // namespace

std::vector<BackendInfo> list_backends() {
  return {
      pull(),
      {"bar", false, kLater},
      {"staged", false, kLater},
      {"host", true, "copies inside host memory"},
  };
}

std::string resolve_backend(const std::string& name) {
  std::string available, reason = "unknown";
  for (const BackendInfo& b : list_backends()) {
    if (b.available && (name == "auto" || name == b.name)) return b.name;
    if (b.available) available += (available.empty() ? "" : ", ") + b.name;
    if (b.name == name) reason = b.reason;
  }
  throw std::invalid_argument("backend: got \"" + name + "\", " + reason + "; available here: auto, " + available);
}

std::unique_ptr<Backend> make_backend(const std::string& resolved_name) {
  if (resolved_name == "host") return make_host_backend();
  throw std::invalid_argument("backend: \"" + resolved_name + "\" has no implementation in this build");
}

}  // namespace clo
