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
  explicit Layers(const EngineConfig& config);  // throws OutOfMemory

  const std::vector<LayerView>& views() const { return views_; }
  int64_t host_bytes() const;
  int64_t device_bytes() const;

  void clear_slots();  // empties every slot table and request; rows stay

  // Whether everything but the host rows is in device memory; without offload the rows are there too.
  static bool on_device(const EngineConfig& config) { return config.backend == "pull"; }

 private:
  bool offload_, on_device_;
  Arena host_, selected_, tables_, requests_;
  std::vector<LayerView> views_;
};

}  // namespace clo
