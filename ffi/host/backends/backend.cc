#include "host/backends/backend.h"

#include <stdexcept>

namespace clo {

std::vector<BackendInfo> list_backends() {
  return {
      {"pull", false, "not in this build (needs CUDA)"},
      {"bar", false, "not in this build (needs CUDA)"},
      {"staged", false, "not in this build (needs CUDA)"},
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
