// parallel_for: every task exactly once, from several threads at once, nested, and in a forked child.
#undef NDEBUG
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cassert>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include "cpu/parallel.h"

namespace {

void covers_every_task_once(int64_t tasks, int64_t total_us) {
  std::vector<std::atomic<int>> seen(static_cast<size_t>(tasks));
  for (auto& s : seen) s = 0;
  clo::parallel_for(tasks, total_us, [&](int64_t t) { ++seen[static_cast<size_t>(t)]; });
  for (auto& s : seen) assert(s == 1);
}

void several_callers_at_once() {
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([] {
      for (int i = 0; i < 500; ++i) covers_every_task_once(1 + i % 17, 1000000);
    });
  for (auto& caller : callers) caller.join();
}

void nested_calls_finish() {
  std::atomic<int> sum{0};
  clo::parallel_for(6, 1000000, [&](int64_t) { clo::parallel_for(5, 1000000, [&](int64_t) { ++sum; }); });
  assert(sum == 30);
}

// Each of four tasks waits for the three others, so they end only if four threads run them.
void work_is_shared() {
  std::atomic<int> arrived{0};
  clo::parallel_for(4, 1000000, [&](int64_t) {
    ++arrived;
    while (arrived < 4) std::this_thread::yield();
  });
}

void small_work_stays_on_the_caller() {
  const auto me = std::this_thread::get_id();
  clo::parallel_for(64, 10, [&](int64_t) { assert(std::this_thread::get_id() == me); });
}

void a_forked_child_works() {
  const pid_t child = fork();
  if (child == 0) {
    work_is_shared();
    _exit(0);
  }
  int status = 1;
  waitpid(child, &status, 0);
  assert(status == 0);
}

}  // namespace

int main() {
  setenv("CLO_JAX_THREADS", "4", 1);
  assert(clo::num_threads() == 4);
  for (int64_t tasks : {0, 1, 2, 3, 100}) covers_every_task_once(tasks, 1000000);
  work_is_shared();
  std::this_thread::sleep_for(std::chrono::milliseconds(5));  // now every worker is parked
  work_is_shared();
  several_callers_at_once();
  nested_calls_finish();
  small_work_stays_on_the_caller();
#ifndef __SANITIZE_THREAD__  // which forbids threads in a forked child
  a_forked_child_works();
#endif
  return 0;
}
