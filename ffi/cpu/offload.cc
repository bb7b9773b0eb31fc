#include <algorithm>
#include <cstring>

#include "clo/params.h"
#include "cpu/quantize.h"

namespace clo {
namespace {

// Copies or quantizes tokens [begin, end) whose rows are consecutive in the buffer.
void copy_run(const OffloadParams& p, const char* from, char* to, int64_t begin, int64_t end) {
  const int64_t bytes = row_bytes(p.head_dim, p.dtype, RowFormat::kPlain);
  from += ring_index(begin, p.sink, p.num_rows) * bytes;
  to += begin * row_bytes(p.view);
  if (p.view.format == RowFormat::kPlain) std::memcpy(to, from, static_cast<size_t>((end - begin) * bytes));
  else quantize_rows(from, end - begin, p.head_dim, p.dtype, p.view.format, reinterpret_cast<uint8_t*>(to));
}

}  // namespace

uint64_t offload(const OffloadParams& p) {
  const int64_t bytes = row_bytes(p.head_dim, p.dtype, RowFormat::kPlain), ring = p.num_rows - p.sink;
  uint64_t written = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      const char* from = static_cast<const char*>(p.rows) + (b * p.kv_heads + h) * p.num_rows * bytes;
      char* to = static_cast<char*>(p.view.host_rows) + (b * p.kv_heads + h) * p.view.max_tokens * row_bytes(p.view);
      for (int64_t t = p.begin[b]; t < p.end[b];) {
        // A run ends where the sink ends, where the ring turns over, or with the tokens.
        int64_t stop = p.end[b];
        if (t < p.sink) stop = std::min(stop, p.sink);
        else stop = std::min(stop, t + ring - (t - p.sink) % ring);
        copy_run(p, from, to, t, stop);
        written += static_cast<uint64_t>(stop - t);
        t = stop;
      }
    }
  }
  return written;
}

}  // namespace clo
