#include "cpu/parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace clo {
namespace {

// A parked thread is back about 45 us after the notification. Work that each thread would finish sooner is not shared.
constexpr int64_t kWakeUs = 45;
// Layers follow each other closely, so a thread that stays awake this long usually meets the next call.
constexpr std::chrono::microseconds kSpin{50};

int64_t read_thread_count() {
  const char* text = std::getenv("CLO_JAX_THREADS");
  if (text == nullptr || *text == '\0') return std::max(1u, std::thread::hardware_concurrency());
  char* rest = nullptr;
  const long value = std::strtol(text, &rest, 10);
  if (*rest != '\0' || value < 1 || value > 4096)
    throw std::invalid_argument("CLO_JAX_THREADS: got '" + std::string(text) + "', wanted an integer in [1, 4096]");
  return value;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// XLA flushes denormals to zero on its own threads. Pool threads take over the caller's mode, so that a result does not
// depend on which thread computed it.
#if defined(__x86_64__)
unsigned float_mode() { return __builtin_ia32_stmxcsr(); }
void set_float_mode(unsigned mode) { __builtin_ia32_ldmxcsr(mode); }
#else
unsigned float_mode() { return 0; }
void set_float_mode(unsigned) {}
#endif

// True as soon as `ready` is, false when it was not for the whole spinning time.
template <typename Ready>
bool spin_until(Ready ready) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

struct Job {
  void (*run)(void*, int64_t) noexcept;
  void* context;
  int64_t tasks;
  unsigned mode;
  int64_t helpers;                 // pool threads that may still join; guarded by the pool's mutex
  std::atomic<int64_t> next{0};    // first task that nobody has taken
  std::atomic<int64_t> active{0};  // pool threads inside; the job dies on its caller's stack once it is closed and 0

  void drain() {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) run(context, task);
  }
};

class Pool {
 public:
  void run(Job& job) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      start(num_threads() - 1);
      jobs_.push_back(&job);
      open_.store(static_cast<int64_t>(jobs_.size()), std::memory_order_release);
      for (int64_t i = std::min(job.helpers, parked_); i > 0; --i) work_.notify_one();
    }
    job.drain();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      close(job);
    }
    const auto finished = [&] { return job.active.load(std::memory_order_acquire) == 0; };
    if (spin_until(finished)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, finished);
  }

 private:
  // With the mutex held. A thread that cannot be had is done without: the caller does the work of those that are missing.
  void start(int64_t threads) {
    while (started_ < threads) {
      try {
        std::thread([this] { serve(); }).detach();
      } catch (const std::system_error&) {
        return;
      }
      ++started_;
    }
  }

  // With the mutex held: nobody joins the job any more.
  void close(Job& job) {
    jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), &job), jobs_.end());
    open_.store(static_cast<int64_t>(jobs_.size()), std::memory_order_release);
  }

  void serve() {
    for (;;) {
      spin_until([&] { return open_.load(std::memory_order_acquire) > 0; });
      std::unique_lock<std::mutex> lock(mutex_);
      ++parked_;
      work_.wait(lock, [&] { return !jobs_.empty(); });
      --parked_;
      Job& job = *jobs_.front();
      job.active.fetch_add(1, std::memory_order_relaxed);
      if (--job.helpers == 0) close(job);
      lock.unlock();
      set_float_mode(job.mode);
      job.drain();
      lock.lock();
      if (job.active.fetch_sub(1, std::memory_order_acq_rel) == 1) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::vector<Job*> jobs_;        // that a thread may join
  std::atomic<int64_t> open_{0};  // their number, for spinning threads
  int64_t parked_ = 0;
  int64_t started_ = 0;
};

// The pool and its detached threads are never destroyed: XLA's threads may still be inside a kernel while static objects
// are torn down, and joining from exit() would wait for a thread that exit() has already stopped.
std::atomic<Pool*> g_pool{nullptr};

// A forked child has none of the threads, and perhaps a locked mutex: it forgets the pool and makes its own when needed.
const int g_fork_handler = pthread_atfork(nullptr, nullptr, [] { g_pool.store(nullptr); });

Pool& pool() {
  Pool* present = g_pool.load(std::memory_order_acquire);
  if (present != nullptr) return *present;
  Pool* mine = new Pool;  // no threads yet, so the loser of a race is simply deleted
  if (g_pool.compare_exchange_strong(present, mine, std::memory_order_acq_rel)) return *mine;
  delete mine;
  return *present;
}

}  // namespace

int64_t num_threads() {
  static const int64_t count = read_thread_count();
  return count;
}

void detail::parallel_run(int64_t tasks, int64_t total_us, void (*run)(void*, int64_t) noexcept, void* context) {
  const int64_t helpers = std::min({num_threads(), tasks, total_us / kWakeUs}) - 1;
  if (helpers <= 0) {
    for (int64_t task = 0; task < tasks; ++task) run(context, task);
    return;
  }
  Job job{run, context, tasks, float_mode(), helpers};
  pool().run(job);
}

}  // namespace clo
