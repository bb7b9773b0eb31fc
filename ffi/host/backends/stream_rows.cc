#include "host/backends/stream_rows.h"

#include <cstring>

#include "host/backends/row_moves.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace clo {
namespace {

constexpr int64_t kCacheLine = 64;
// More than of rows that are kept: what the prototype on an H200's host was fastest with.
constexpr int64_t kStreamedAhead = 12;

#if defined(__x86_64__)

// The source is read once: it shall not push anything else out of the caches.
void fetch_once(const char* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kCacheLine) _mm_prefetch(row + i, _MM_HINT_NTA);
}

void copy_sse2(char* to, const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
}

// One whole line on the link an instruction, whatever the write-combining buffers do.
__attribute__((target("movdir64b"))) void copy_movdir64b(char* to, const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) _movdir64b(to + i, from + i);
}

bool has_movdir64b() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (c >> 28 & 1) != 0;
}

// Wider registers are no way to more: stores of 32 and 64 bytes were slower than these with 4 threads on an H200's host,
// and as fast with 8.
std::vector<StreamStores> find_stores() {
  std::vector<StreamStores> found;
  if (has_movdir64b()) found.push_back({"movdir64b", 64, copy_movdir64b});
  found.push_back({"sse2", 16, copy_sse2});
  return found;
}

#else

void fetch_once(const char* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(row + i);
}

void copy_plain(char* to, const char* from, int64_t bytes) { std::memcpy(to, from, static_cast<size_t>(bytes)); }

std::vector<StreamStores> find_stores() { return {{"plain", 1, copy_plain}}; }

#endif

}  // namespace

const std::vector<StreamStores>& stream_stores() {
  static const std::vector<StreamStores> stores = find_stores();
  return stores;
}

const StreamStores& stream_stores_for(int64_t row_bytes) {
  for (const StreamStores& stores : stream_stores())
    if (row_bytes % stores.width == 0) return stores;
  return stream_stores().back();
}

void drain_stores() {
#if defined(__x86_64__)
  _mm_sfence();
#else
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

void stream_rows(const LayerView& view, const Job* jobs, int64_t count, const StreamStores& stores) {
  const int64_t bytes = row_bytes(view);
  for_each_row(
      view, jobs, count, kStreamedAhead, [=](const char* row) { fetch_once(row, bytes); },
      [&](const Job& job, int64_t move, const char* row) { stores.copy(destination(view, job, move), row, bytes); });
  drain_stores();
}

}  // namespace clo
