// Rows copied past the caches: by stores that a write-combining mapping (a window, window.h) takes at full speed, with
// the scattered source rows fetched ahead.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "host/backends/backend.h"

namespace clo {

// Copies one row to a destination; both the address and `bytes` are multiples of the width of the stores.
using CopyRow = void (*)(char* to, const char* from, int64_t bytes);

struct StreamStores {
  const char* name;
  int64_t width;  // of one store; destinations and rows must be multiples of it
  CopyRow copy;
};

// Those that this CPU has, the best first; the last one takes any row of a multiple of 16 bytes.
const std::vector<StreamStores>& stream_stores();

// The best for rows of this size.
const StreamStores& stream_stores_for(int64_t row_bytes);

// As Backend::serve. Every store has left the CPU when it returns.
void stream_rows(const LayerView& view, const Job* jobs, int64_t count, const StreamStores& stores);

// Until every store of this thread, write-combined ones too, has left the CPU.
void drain_stores();

}  // namespace clo
