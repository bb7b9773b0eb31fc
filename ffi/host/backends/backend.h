// What differs between links: how one chunk of rows gets from the host rows to the selected rows. Threads, requests,
// flags and waits are the engine's and the same for all.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "clo/protocol.h"

namespace clo {

// Moves [first, last) of one head's list in the layer's request; head counts over [B, Ko].
struct Job {
  int64_t head, first, last;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // Around the life of the transfer threads: started before the first of them, stopped after the last has ended.
  virtual void start() {}
  virtual void stop() {}

  // Copies the rows of these jobs. Called from several threads at once with disjoint destinations. On return the rows
  // are visible to whoever acquires anything that this thread releases. Throws std::exception when the link fails.
  virtual void serve(const LayerView& view, const Job* jobs, int64_t count) = 0;
};

struct BackendInfo {
  std::string name;
  bool available;
  std::string reason;  // why, or why not
};

// Every backend that this source knows, in the order in which "auto" tries them.
std::vector<BackendInfo> list_backends();

// The name that "auto" or a backend's own name stands for here. Throws std::invalid_argument for an unknown or
// unavailable one, naming it and those available.
std::string resolve_backend(const std::string& name);

std::unique_ptr<Backend> make_backend(const std::string& resolved_name);

std::unique_ptr<Backend> make_host_backend();

}  // namespace clo
