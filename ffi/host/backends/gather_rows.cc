#include "host/backends/gather_rows.h"

#include <cstring>

#include "host/backends/row_moves.h"

namespace clo {

void gather_rows(const LayerView& view, const Job* jobs, int64_t count, char* to) {
  const int64_t bytes = row_bytes(view);
  for_each_row(
      view, jobs, count, kRowsAhead, [=](const char* row) { fetch_row(row, bytes); },
      [=](const Job& job, int64_t move, const char* row) {
        std::memcpy(to + (job.row + move - job.first) * bytes, row, static_cast<size_t>(bytes));
      });
}

}  // namespace clo
