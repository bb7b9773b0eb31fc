// Splits a kernel's independent tasks over the caller and a process-wide pool of threads.
#pragma once

#include <cstdint>
#include <type_traits>

namespace clo {

// Threads that a kernel may use, the caller included: CLO_JAX_THREADS, else the hardware's. Fixed at the first call;
// throws std::invalid_argument when the variable is not a positive integer.
int64_t num_threads();

namespace detail {
void parallel_run(int64_t tasks, int64_t total_us, void (*run)(void* context, int64_t task) noexcept, void* context);
}

// Calls f(task) once for each task in [0, tasks), in any order and on any thread, and returns when all are done.
// `total_us` estimates the whole work in microseconds of one thread: it decides only how many threads are worth waking,
// so the split into tasks, and with it every result, does not depend on the number of threads.
// f must not throw. May be called from several threads at once, and from within f: the caller works through its own
// tasks, so it never depends on a free pool thread.
template <typename F>
void parallel_for(int64_t tasks, int64_t total_us, F&& f) {
  using Function = std::remove_reference_t<F>;
  detail::parallel_run(
      tasks, total_us, [](void* context, int64_t task) noexcept { (*static_cast<Function*>(context))(task); },
      const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace clo
