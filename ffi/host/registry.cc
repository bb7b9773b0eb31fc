// The process-wide table of engines (engine.h).
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "host/engine.h"

namespace clo {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<Engine>> engines;
  std::set<int64_t> retired;  // handles that are not given out again
};

// Never destroyed: an XLA thread may still look a handle up while static objects are torn down.
Registry& registry() {
  static Registry* table = new Registry;
  return *table;
}

}  // namespace

int64_t register_engine(std::shared_ptr<Engine> engine) {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  int64_t handle = 1;
  while (r.engines.count(handle) > 0 || r.retired.count(handle) > 0) ++handle;
  r.engines.emplace(handle, std::move(engine));
  return handle;
}

void unregister_engine(int64_t handle) {
  std::shared_ptr<Engine> last;  // dropped after the lock: an engine's end joins threads
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  const auto it = r.engines.find(handle);
  if (it == r.engines.end()) return;
  last = std::move(it->second);
  if (last->device() != nullptr) r.retired.insert(handle);
  r.engines.erase(it);
}

std::shared_ptr<Engine> find_engine(int64_t handle) {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  const auto it = r.engines.find(handle);
  return it == r.engines.end() ? nullptr : it->second;
}

}  // namespace clo
