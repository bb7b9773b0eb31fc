// The walk over the moves of a request that every backend with threads makes. For backends only.
#pragma once

#include <cstdint>

#include "host/backends/backend.h"

namespace clo {

// Source rows are scattered over gigabytes: every row misses the caches and often the TLB. A few rows ahead cover that
// latency without overrunning the line-fill buffers.
constexpr int64_t kRowsAhead = 8;

// Calls copy(job, move, row) for every move of these jobs, in order; `row` is the source. fetch(row) has been called for
// it `ahead` moves before.
template <typename Fetch, typename Copy>
void for_each_row(const LayerView& view, const Job* jobs, int64_t count, int64_t ahead, Fetch fetch, Copy copy) {
  const int64_t bytes = row_bytes(view);
  for (const Job* job = jobs; job != jobs + count; ++job) {
    const char* from = static_cast<const char*>(view.host_rows) + job->head * view.max_tokens * bytes;
    const int32_t* tokens = view.request.tokens + job->head * view.num_slots;
    for (int64_t i = job->first; i < job->last; ++i) {
      if (i + ahead < job->last) fetch(from + tokens[i + ahead] * bytes);
      copy(*job, i, from + tokens[i] * bytes);
    }
  }
}

// Where a move of a job goes in the selected rows.
inline char* destination(const LayerView& view, const Job& job, int64_t move) {
  const int64_t place = job.head * view.num_slots;
  return static_cast<char*>(view.selected_rows) + (place + view.request.slots[place + move]) * row_bytes(view);
}

// Starts to fetch a row that will be read soon, and kept.
inline void fetch_row(const char* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

}  // namespace clo
