// How the transfer threads find what kernels of a GPU have posted (transfers.h).
#include <algorithm>

#include "host/transfers.h"

namespace clo {
namespace {

// How long a thread that looks out for requests of a GPU sleeps between looks: doubled from one look to the next.
constexpr auto kFirstNap = std::chrono::microseconds(50);
constexpr auto kLongestNap = std::chrono::microseconds(2000);

}  // namespace

void Transfers::hot(bool on) {
  Lock lock(mutex_);
  hot_ = on;
  if (!on) return;
  interrupt_.notify_all();
  work_.notify_all();
}

// As await_work, where requests come from a GPU: whoever is idle looks out for them, unless another thread does.
bool Transfers::await_remote_work(Lock& lock) {
  std::chrono::microseconds nap = kFirstNap;
  for (;;) {
    if (stopping_) return false;
    if (!failed_ && queue_.has_work()) return true;
    if (failed_) {
      work_.wait(lock, [this] { return stopping_; });
    } else if (!watched_) {
      watched_ = true;
      lock.unlock();
      const int64_t layer = look_out(Clock::now() + (nap == kFirstNap ? kSpin : Clock::duration::zero()));
      lock.lock();
      if (layer < 0 || failed_ || !take(layer)) {
        // Still watched: the others sleep on.
        if (!failed_ && !hot_) interrupt_.wait_for(lock, nap, [this] { return failed_ || hot_; });
        nap = std::min(2 * nap, kLongestNap);
      }
      watched_ = false;
      if (failed_) work_.notify_all();
    } else if (hot_) {
      lock.unlock();
      while (hot_ && watched_ && !wake_.load(std::memory_order_relaxed)) std::this_thread::yield();
      lock.lock();
    } else {
      work_.wait(lock, [this] { return stopping_ || failed_ || hot_ || queue_.has_work() || !watched_; });
    }
  }
}

// A layer with a request that is not in the queue yet, or -1 when there is none until then.
int64_t Transfers::look_out(Clock::time_point until) const {
  do {
    for (size_t i = 0; i < views_.size(); ++i)
      if (remote_->posted(static_cast<int64_t>(i)) != chunks_[i].taken) return static_cast<int64_t>(i);
    std::this_thread::yield();
  } while (!failed_ && (hot_ || Clock::now() < until));
  return -1;
}

// Puts a remote request in the queue. False when the backend has no room for it.
bool Transfers::take(int64_t layer) {
  const size_t i = static_cast<size_t>(layer);
  if (!remote_->admit(layer)) return false;
  chunks_[i].taken = remote_->posted(layer);
  chunks_[i].rows = count_moves(views_[i]);
  cut(layer);
  queue_.post(layer, static_cast<int64_t>(chunks_[i].begin.size()) - 1);
  wake_ = true;
  return true;
}

}  // namespace clo
