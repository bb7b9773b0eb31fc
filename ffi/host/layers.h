// The arenas of all layers and the views into them.
#pragma once

#include <cstdint>
#include <vector>

#include "clo/protocol.h"
#include "host/arena.h"
#include "host/engine.h"

namespace clo {

class Layers {
 public:
  // `windows`: where the selected rows of backend bar come from; else null. Throws OutOfMemory.
  Layers(const EngineConfig& config, WindowSource* windows);

  const std::vector<LayerView>& views() const { return views_; }
  // As the transfer threads of backends bar and staged see the memory: requests are mirrored in pinned memory, and
  // selected rows are those of the window (staged: null).
  const std::vector<LayerView>& thread_views() const { return thread_views_; }
  // Backend staged: a pair of buffers in pinned and in device memory, each of which holds any layer's request.
  struct Staging {
    void* host[2];
    void* device[2];
  };
  const Staging& staging() const { return staging_; }

  int64_t host_bytes() const;
  int64_t device_bytes() const;

  void clear_slots();  // empties every slot table and request; rows stay

  // Whether everything but the host rows is in device memory; without offload the rows are there too.
  static bool on_device(const EngineConfig& config) { return config.backend != "host"; }
  // Whether threads of the CPU serve kernels of a GPU.
  static bool by_threads(const EngineConfig& config) {
    return config.offload && (config.backend == "bar" || config.backend == "staged");
  }

 private:
  bool offload_, on_device_;
  Arena host_, tables_, requests_, mirrors_, staging_host_, staging_device_;
  std::vector<Arena> selected_;  // one, or one a layer where they are windows, whose size is limited
  std::vector<LayerView> views_, thread_views_;
  Staging staging_{};
};

}  // namespace clo
