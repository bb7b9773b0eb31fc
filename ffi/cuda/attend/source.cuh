// Where the layer's rows are and how far its transfers, found with as few loads one after the other as can be: the first
// copy of a row waits for them.
#pragma once

#include <cstdint>

#include "cuda/attend/args.cuh"
#include "cuda/flags.cuh"

namespace clo::cuda {

// What of a layer's view is needed before the first copy.
struct Place {
  int kv_heads;
  const int32_t* slot_counts;
  const char* selected_rows;
};

__device__ inline Place place_of(const LayerView& view) {
  return {static_cast<int>(view.kv_heads), view.slot_counts, static_cast<const char*>(view.selected_rows)};
}

template <typename T>
__device__ const T* shuffled(const T* pointer, int lane) {
  return reinterpret_cast<const T*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(pointer), lane));
}

// That of another lane.
__device__ inline Place shuffled(const Place& place, int lane) {
  return {__shfl_sync(~0u, place.kv_heads, lane), shuffled(place.slot_counts, lane), shuffled(place.selected_rows, lane)};
}

// Where the engine has the layer's rows. Fixed for the engine's life, but for which layer it is.
struct Source {
  int layer;
  const LayerView* view;  // null: there is no such layer, or it cannot be known yet
  const int32_t* slot_counts;
  const char* selected_rows;  // null: rows are gathered from host_rows
};

// Which layer it is and where the first 32 layers have their rows is asked at once, by one warp: the second question would
// else wait for the first. The number is from L2, because what the L1 has may be older than the previous kernel's work.
struct SourceLoads {
  int layer;
  Place place;  // of layer `lane`

  __device__ SourceLoads(const AttendArgs& a, int lane) : layer(0), place{} {
    if (a.offloaded == 0) return;
    layer = __ldcg(a.engine.layer.index);
    if (static_cast<uint32_t>(lane) < a.engine.layer.count) place = place_of(a.engine.layer.views[lane]);
  }
};

// settled: the previous kernel is over. Before, the layer's number may be anything, so that it must be among those that
// the engine has, and name one of this call's shape.
__device__ inline Source find_source(const AttendArgs& a, const SourceLoads& loads, bool settled) {
  Source s{};
  if (a.offloaded == 0) return s;
  const LayerRef& layers = a.engine.layer;
  s.layer = loads.layer;
  Place place = shuffled(loads.place, s.layer & 31);
  if (layers.count == 0 ? !settled : static_cast<uint32_t>(s.layer) >= layers.count) return s;
  if (layers.count == 0 || s.layer >= 32) place = place_of(layers.views[s.layer]);
  if (!settled && place.kv_heads != a.offloaded) return s;
  s.view = layers.views + s.layer;
  s.slot_counts = place.slot_counts;
  s.selected_rows = place.selected_rows;
  return s;
}

// How far the layer's transfers are.
struct Progress {
  int layer;        // -1: there is no such layer, or nothing is ever transferred
  uint32_t posted;  // the last request
  bool ready;       // all its rows are there
};

// By one warp, asked at once like the source.
__device__ inline Progress find_progress(const AttendArgs& a, bool settled, int lane) {
  if (a.offloaded == 0 || a.engine.flags == nullptr) return {-1, 0, true};
  const uint32_t count = a.engine.layer.count;
  const int layer = __ldcg(a.engine.layer.index);
  uint32_t posted = 0, ready = 0;
  if (static_cast<uint32_t>(lane) < count) {
    posted = load_relaxed(&a.engine.flags[lane].posted);
    ready = load_acquire(&a.engine.flags[lane].ready);
  }
  posted = __shfl_sync(~0u, posted, layer & 31);
  ready = __shfl_sync(~0u, ready, layer & 31);
  if (count == 0 ? !settled : static_cast<uint32_t>(layer) >= count) return {-1, 0, true};
  if (count == 0 || layer >= 32) {
    posted = load_relaxed(&a.engine.flags[layer].posted);
    ready = load_acquire(&a.engine.flags[layer].ready);
  }
  return {layer, posted, static_cast<int32_t>(ready - posted) >= 0};
}

}  // namespace clo::cuda
