// The transfer threads: they share the chunks of posted requests, and the last one to finish a request publishes its
// number as the layer's ready number. One mutex guards the queue and everything that is not an atomic; it is taken
// once per chunk of at least 16 KiB.
//
// Requests are posted by post(), or by kernels of a GPU (RemoteBackend). Then one idle thread at a time looks out for
// them: all the time while `hot` says so, else less and less often, so that an engine without work costs no core.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "clo/protocol.h"
#include "host/backends/backend.h"
#include "host/engine.h"
#include "host/transfer_queue.h"
#include "host/transfer_service.h"

namespace clo {

class Transfers : public TransferService {
 public:
  // `backend` null: nothing moves, no threads, every post is ready at once. Of a remote backend `views` are as the
  // threads see the memory, and post() and wait() are not for use.
  Transfers(const std::string& name, std::unique_ptr<Backend> backend, const std::vector<LayerView>& views,
            int64_t threads, double timeout_s);
  ~Transfers() override;

  uint64_t post(int64_t layer) override;
  std::string wait(int64_t layer) override;
  void begin(int64_t) override {}  // the threads run all the time
  std::string end() override { return {}; }
  void abort(const std::string& why) override;
  void close() override;
  void reset(const std::function<void()>& clear) override;
  void add_to(Counters* counters) const override;
  void clear_counters() override;
  void inject_delay(int64_t max_us, uint64_t seed) override;
  void inject_thread_death(int64_t after_chunks) override;
  void copy(void* to, const void* from, int64_t bytes) const override;
  const cuda::EngineRef* device() const override { return nullptr; }

  void hot(bool on);                 // whether threads of a remote backend look out all the time
  bool is_hot() const { return hot_; }
  std::string failure() const;       // since the last reset; empty: none

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Clock = std::chrono::steady_clock;

  // A round trip through a condition variable costs about this long on two cores. Whoever spins yields all the while:
  // on a busy machine both sides are often on one core, where a spin without it holds up just what it waits for
  // (measured, one row from post to ready with 11 runnable tasks on two cores: 106 us without, 3 us with).
  static constexpr auto kSpin = std::chrono::microseconds(50);
  static uint64_t count_moves(const LayerView& view);  // of its request

  struct alignas(64) Flag {  // one cache line per layer, so that no wait disturbs another layer's
    std::atomic<uint64_t> posted{0}, ready{0};
  };
  struct Chunks {  // of a layer's request: chunk i is jobs[begin[i], begin[i + 1])
    std::vector<Job> jobs;
    std::vector<size_t> begin;
    uint64_t rows = 0;
    uint32_t taken = 0;  // number of the last remote request that was put in the queue
  };

  void stop(const std::string& why);  // both need control_
  void restart();
  void run(int64_t thread);
  bool await_work(Lock& lock);
  bool await_remote_work(Lock& lock);
  int64_t look_out(Clock::time_point until) const;
  bool take(int64_t layer);  // needs mutex_
  void deliver(const TransferQueue::Claim& claim, Lock& lock);
  void serve(const TransferQueue::Claim& claim);
  void inject();
  void fail(const std::string& why, int64_t layer = 0, uint64_t sequence = 0);  // needs mutex_
  void cut(int64_t layer);
  uint64_t number(const TransferQueue::Claim& claim) const;
  std::string describe(int64_t layer, uint64_t sequence) const;

  const std::string name_;
  const std::vector<LayerView> views_;
  const int64_t num_threads_;
  const double timeout_s_;
  const std::unique_ptr<Backend> backend_;
  RemoteBackend* const remote_;  // the same, or null
  const std::unique_ptr<Flag[]> flags_;

  std::mutex control_;  // one reset or close at a time; taken before mutex_
  std::vector<std::thread> threads_;
  bool started_ = false, closed_ = false;  // under control_

  mutable std::mutex mutex_;
  std::condition_variable work_;       // a request was posted, or the threads are to end
  std::condition_variable delivered_;  // a layer became ready, or a failure
  std::condition_variable interrupt_;  // cuts injected delays short
  TransferQueue queue_;
  std::vector<Chunks> chunks_;
  std::string failure_;
  bool stopping_ = false;
  uint64_t generation_ = 0;  // of resets: a wait that spans one has lost its request
  Counters counters_;
  std::atomic<bool> failed_{false};
  std::atomic<bool> wake_{false};  // what an idle thread spins on: work or an end
  std::atomic<bool> hot_{false};
  std::atomic<bool> watched_{false};  // a thread looks out; changed under mutex_
  std::atomic<uint64_t> wait_ns_{0};

  std::atomic<bool> injecting_{false};
  int64_t max_delay_us_ = 0;
  std::mt19937_64 random_;
  int64_t chunks_to_death_ = -1;
};

}  // namespace clo
