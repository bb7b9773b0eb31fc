// What differs between links: how one chunk of rows gets from the host rows to the selected rows. Threads, requests,
// and failures are the engine's and the same for all.
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
  int64_t row;  // place of the first of them among all moves of the request
};

class RemoteBackend;

class Backend {
 public:
  virtual ~Backend() = default;

  // Around the life of the transfer threads: started before the first of them, stopped after the last has ended.
  virtual void start() {}
  virtual void stop() {}

  // On each transfer thread, before anything else.
  virtual void enter() {}

  // Copies the rows of these jobs of a layer's request. Called from several threads at once with disjoint destinations.
  // On return the rows are visible to whoever acquires anything that this thread releases. Throws std::exception when
  // the link fails.
  virtual void serve(int64_t layer, const LayerView& view, const Job* jobs, int64_t count) = 0;

  // Of a backend that serves kernels of a GPU: itself.
  virtual RemoteBackend* remote() { return nullptr; }
};

// A backend whose requests come from kernels of a GPU, which leave them in memory that the threads see, and whose waits
// are there too. Numbers are the GPU's own, which count a layer's posts.
class RemoteBackend : public Backend {
 public:
  RemoteBackend* remote() final { return this; }

  // Number of the layer's last request with moves, 0 before the first; what it asks for is visible to who has read it.
  // Called all the time by idle threads.
  virtual uint32_t posted(int64_t layer) const = 0;

  // Before the first chunk of a request: false when there is no room for it yet.
  virtual bool admit(int64_t) { return true; }

  // After the last chunk: whoever waits for this request sees its rows. Called by the thread that copied that chunk.
  virtual void publish(int64_t layer, uint32_t number) = 0;

  // After a failure: every wait ends, naming this request. Called under the engine's mutex; must not throw.
  virtual void give_up(int64_t layer, uint32_t number) noexcept = 0;
};

struct BackendInfo {
  std::string name;
  bool available;
  std::string reason;  // why, or why not
};

// Every backend that this source knows, in the order in which "auto" tries them, after a probe copy of each that can be
// had at all. What was found is kept, for each device, until the process ends.
std::vector<BackendInfo> list_backends();

// One of them. Throws std::invalid_argument for an unknown name.
BackendInfo find_backend(const std::string& name);

// The name that "auto" or a backend's own name stands for here. Throws std::invalid_argument for an unknown or
// unavailable one, naming it, the reason and those available.
std::string resolve_backend(const std::string& name);

std::unique_ptr<Backend> make_host_backend();

}  // namespace clo
