// Backend `host`: both ends are host memory, and the transfer threads copy with ordinary stores (attention reads the
// rows next, so they belong in the cache).
#include <cstring>

#include "host/backends/backend.h"
#include "host/backends/gather_rows.h"

namespace clo {
namespace {

// Source rows are scattered over gigabytes: every row misses the caches and often the TLB. A few rows ahead cover that
// latency without overrunning the line-fill buffers.
constexpr int64_t kRowsAhead = 8;

class HostBackend : public Backend {
 public:
  void serve(int64_t, const LayerView& view, const Job* jobs, int64_t count) override {
    const int64_t bytes = row_bytes(view), S = view.max_tokens, C = view.num_slots;
    for (const Job* job = jobs; job != jobs + count; ++job) {
      const char* from = static_cast<const char*>(view.host_rows) + job->head * S * bytes;
      char* to = static_cast<char*>(view.selected_rows) + job->head * C * bytes;
      const int32_t* tokens = view.request.tokens + job->head * C;
      const int32_t* slots = view.request.slots + job->head * C;
      for (int64_t i = job->first; i < job->last; ++i) {
        if (i + kRowsAhead < job->last) prefetch_row(from + tokens[i + kRowsAhead] * bytes, bytes);
        std::memcpy(to + slots[i] * bytes, from + tokens[i] * bytes, static_cast<size_t>(bytes));
      }
    }
  }
};

}  // namespace

std::unique_ptr<Backend> make_host_backend() { return std::make_unique<HostBackend>(); }

}  // namespace clo
