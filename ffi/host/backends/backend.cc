#include "host/backends/backend.h"

#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "host/backends/probe.h"

namespace clo {
namespace {

constexpr const char* kNames[] = {"pull", "bar", "staged", "host"};

#if !CLO_CUDA_BUILD
BackendInfo look_at(const std::string& name) {
  if (name == "host") return {name, true, "copies inside host memory"};
  return {name, false, "not in this build (needs CUDA)"};
}
#else
// Each is tried once for each device, and not before it is asked for.
BackendInfo look_at(const std::string& name) {
  if (name == "host") return {name, true, "copies inside host memory"};
  static std::mutex mutex;
  static auto* const known = new std::map<std::pair<std::string, int>, BackendInfo>;
  std::lock_guard<std::mutex> lock(mutex);
  int device = 0;
  std::string why = probe_device(&device);
  if (!why.empty()) return {name, false, why};
  const auto key = std::make_pair(name, device);
  const auto found = known->find(key);
  if (found != known->end()) return found->second;
  std::string how;
  why = probe_backend(name, &how);
  return (*known)[key] = BackendInfo{name, why.empty(), why.empty() ? how : why};
}
#endif

}  // namespace

std::vector<BackendInfo> list_backends() {
  std::vector<BackendInfo> list;
  for (const char* name : kNames) list.push_back(look_at(name));
  return list;
}

BackendInfo find_backend(const std::string& name) {
  for (const char* known : kNames)
    if (name == known) return look_at(name);
  throw std::invalid_argument("backend: got \"" + name + "\", unknown");
}

std::string resolve_backend(const std::string& name) {
  for (const char* known : kNames)
    if ((name == "auto" || name == known) && look_at(known).available) return known;
  std::string available, reason = "unknown";
  for (const BackendInfo& b : list_backends()) {
    if (b.available) available += (available.empty() ? "" : ", ") + b.name;
    if (b.name == name) reason = b.reason;
  }
  throw std::invalid_argument("backend: got \"" + name + "\", " + reason + "; available here: auto, " + available);
}

}  // namespace clo
