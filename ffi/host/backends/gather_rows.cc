#include "host/backends/gather_rows.h"

#include <cstring>

namespace clo {
namespace {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kRowsAhead = 8;  // as backend host, and for the same reason

}  // namespace

void prefetch_row(const char* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(row + i);
}

void gather_rows(const LayerView& view, const Job* jobs, int64_t count, char* to) {
  const int64_t bytes = row_bytes(view), S = view.max_tokens, C = view.num_slots;
  for (const Job* job = jobs; job != jobs + count; ++job) {
    const char* from = static_cast<const char*>(view.host_rows) + job->head * S * bytes;
    const int32_t* tokens = view.request.tokens + job->head * C;
    char* place = to + job->row * bytes;
    for (int64_t i = job->first; i < job->last; ++i, place += bytes) {
      if (i + kRowsAhead < job->last) prefetch_row(from + tokens[i + kRowsAhead] * bytes, bytes);
      std::memcpy(place, from + tokens[i] * bytes, static_cast<size_t>(bytes));
    }
  }
}

}  // namespace clo
