// Backend `host`: both ends are host memory, and the transfer threads copy with ordinary stores (attention reads the
// rows next, so they belong in the cache).
#include <cstring>

#include "host/backends/backend.h"
#include "host/backends/row_moves.h"

namespace clo {
namespace {

class HostBackend : public Backend {
 public:
  void serve(int64_t, const LayerView& view, const Job* jobs, int64_t count) override {
    const int64_t bytes = row_bytes(view);
    for_each_row(
        view, jobs, count, kRowsAhead, [=](const char* row) { fetch_row(row, bytes); },
        [&](const Job& job, int64_t move, const char* row) {
          std::memcpy(destination(view, job, move), row, static_cast<size_t>(bytes));
        });
  }
};

}  // namespace

std::unique_ptr<Backend> make_host_backend() { return std::make_unique<HostBackend>(); }

}  // namespace clo
