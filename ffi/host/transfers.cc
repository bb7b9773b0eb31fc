#include "host/transfers.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace clo {
namespace {

constexpr int64_t kMinChunkBytes = int64_t{16} << 10;
constexpr int64_t kMaxChunkBytes = int64_t{256} << 10;
constexpr int64_t kChunksPerThread = 4;  // so that a thread that is late holds up a fraction of its share only

std::string seconds(double s) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3f s", s);
  return text;
}

}  // namespace

uint64_t Transfers::count_moves(const LayerView& v) {
  uint64_t rows = 0;
  for (int64_t h = 0; h < v.batch * v.kv_heads; ++h) rows += static_cast<uint64_t>(v.request.counts[h]);
  return rows;
}

Transfers::Transfers(const std::string& name, std::unique_ptr<Backend> backend, const std::vector<LayerView>& views,
                     int64_t threads, double timeout_s)
    : name_(name),
      views_(views),
      num_threads_(backend == nullptr ? 0 : threads),
      timeout_s_(timeout_s),
      backend_(std::move(backend)),
      remote_(backend_ == nullptr ? nullptr : backend_->remote()),
      flags_(new Flag[views.size()]),
      queue_(static_cast<int64_t>(views.size())),
      chunks_(views.size()) {
  std::lock_guard<std::mutex> control(control_);
  restart();
}

Transfers::~Transfers() { close(); }

void Transfers::restart() {
  if (closed_) throw std::logic_error("the engine is closed");
  {
    Lock lock(mutex_);
    queue_.clear();
    for (size_t i = 0; i < views_.size(); ++i) {
      const uint64_t last = queue_.posted(static_cast<int64_t>(i));
      flags_[i].ready.store(last, std::memory_order_release);
      chunks_[i].taken = 0;
    }
    ++generation_;
    failure_.clear();
    failed_ = stopping_ = false;
    wake_ = watched_ = hot_ = false;
  }
  if (backend_ == nullptr) return;
  backend_->start();
  started_ = true;
  try {
    for (int64_t i = 0; i < num_threads_; ++i) threads_.emplace_back([this, i] { run(i); });
  } catch (...) {
    stop("a transfer thread could not be started");
    throw;
  }
}

void Transfers::stop(const std::string& why) {
  {
    Lock lock(mutex_);
    stopping_ = true;
    fail(why);
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  if (started_) backend_->stop();
  started_ = false;
}

void Transfers::reset(const std::function<void()>& clear) {
  std::lock_guard<std::mutex> control(control_);
  stop("the engine was reset during the wait");
  clear();
  restart();
}

void Transfers::copy(void* to, const void* from, int64_t bytes) const {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

void Transfers::close() {
  std::lock_guard<std::mutex> control(control_);
  if (closed_) return;
  stop("the engine is closed");
  closed_ = true;
}

void Transfers::abort(const std::string& why) {
  Lock lock(mutex_);
  // Of a remote backend: what somebody may be waiting for.
  int64_t layer = 0;
  for (size_t i = 0; i < views_.size(); ++i)
    if (queue_.outstanding(static_cast<int64_t>(i))) layer = static_cast<int64_t>(i);
  fail("aborted: " + why, layer, chunks_[static_cast<size_t>(layer)].taken);
}

std::string Transfers::failure() const {
  Lock lock(mutex_);
  return failure_;
}

void Transfers::fail(const std::string& why, int64_t layer, uint64_t sequence) {
  if (!failed_) {
    failure_ = why;
    if (remote_ != nullptr) remote_->give_up(layer, static_cast<uint32_t>(sequence));
  }
  failed_ = true;
  wake_ = true;
  work_.notify_all();
  delivered_.notify_all();
  interrupt_.notify_all();
}

// Cuts the layer's request into chunks of about equal bytes; a chunk may span heads and a head several chunks.
void Transfers::cut(int64_t layer) {
  const LayerView& v = views_[static_cast<size_t>(layer)];
  Chunks& c = chunks_[static_cast<size_t>(layer)];
  c.jobs.clear();
  c.begin.clear();
  const int64_t share = static_cast<int64_t>(c.rows) * row_bytes(v) / (kChunksPerThread * num_threads_);
  const int64_t rows_per_chunk = std::max<int64_t>(1, std::clamp(share, kMinChunkBytes, kMaxChunkBytes) / row_bytes(v));
  int64_t room = 0, row = 0;
  for (int64_t head = 0; head < v.batch * v.kv_heads; ++head) {
    for (int64_t first = 0, count = v.request.counts[head]; first < count;) {
      if (room == 0) {
        c.begin.push_back(c.jobs.size());
        room = rows_per_chunk;
      }
      const int64_t n = std::min(room, count - first);
      c.jobs.push_back({head, first, first + n, row});
      first += n;
      row += n;
      room -= n;
    }
  }
  c.begin.push_back(c.jobs.size());
}

uint64_t Transfers::post(int64_t layer) {
  const size_t i = static_cast<size_t>(layer);
  const uint64_t rows = count_moves(views_[i]);
  Lock lock(mutex_);
  if (queue_.outstanding(layer))
    throw std::logic_error(describe(layer, queue_.posted(layer)) + ": not ready yet, and another one is posted");
  if (rows == 0) return queue_.posted(layer);
  ++counters_.requests;
  counters_.rows_posted += rows;
  if (backend_ == nullptr) return queue_.posted(layer);
  chunks_[i].rows = rows;
  cut(layer);
  const uint64_t sequence = queue_.post(layer, static_cast<int64_t>(chunks_[i].begin.size()) - 1);
  flags_[i].posted.store(sequence, std::memory_order_release);
  wake_ = true;
  lock.unlock();
  work_.notify_one();  // who wakes the next thread if it finds more: a wake costs the poster microseconds
  return sequence;
}

std::string Transfers::wait(int64_t layer) {
  const Flag& flag = flags_[static_cast<size_t>(layer)];
  const uint64_t sequence = flag.posted.load(std::memory_order_acquire);
  const auto ready = [&] { return flag.ready.load(std::memory_order_acquire) >= sequence; };
  if (ready() && !failed_) return {};
  const Clock::time_point start = Clock::now();
  uint64_t generation;
  {
    Lock lock(mutex_);
    generation = generation_;
  }
  while (!ready() && !failed_ && Clock::now() - start < kSpin) std::this_thread::yield();
  Lock lock(mutex_);
  const auto limit = start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s_));
  delivered_.wait_until(lock, limit, [&] { return failed_ || generation_ != generation || ready(); });
  const auto elapsed = Clock::now() - start;
  wait_ns_ += static_cast<uint64_t>(std::chrono::nanoseconds(elapsed).count());
  if (failed_) return describe(layer, sequence) + ": " + failure_;
  if (generation_ != generation) return describe(layer, sequence) + ": the engine was reset during the wait";
  if (ready()) return {};
  return describe(layer, sequence) + ": not delivered after " +
         seconds(std::chrono::duration<double>(elapsed).count()) + " (limit " + seconds(timeout_s_) + ")";
}

std::string Transfers::describe(int64_t layer, uint64_t sequence) const {
  return "layer " + std::to_string(layer) + ", backend " + name_ + ", request " + std::to_string(sequence);
}

// How a claimed request is called in messages, and towards a remote backend.
uint64_t Transfers::number(const TransferQueue::Claim& claim) const {
  return remote_ == nullptr ? claim.sequence : chunks_[static_cast<size_t>(claim.layer)].taken;
}

void Transfers::run(int64_t thread) {
  if (backend_ != nullptr) backend_->enter();
  Lock lock(mutex_);
  while (await_work(lock)) {
    const TransferQueue::Claim claim = queue_.claim();
    wake_ = queue_.has_work();
    if (wake_ || remote_ != nullptr) work_.notify_one();  // with a remote backend also to look out
    lock.unlock();
    std::string error;
    try {
      serve(claim);
    } catch (const std::exception& e) {
      error = e.what();
    } catch (...) {
      error = "unknown exception";
    }
    lock.lock();
    try {
      if (error.empty() && queue_.finish(claim)) deliver(claim, lock);
    } catch (const std::exception& e) {
      error = e.what();
    }
    if (!error.empty()) {
      fail("transfer thread " + std::to_string(thread) + " died while it served " +
               describe(claim.layer, number(claim)) + ": " + error,
           claim.layer, number(claim));
      return;
    }
  }
}

void Transfers::deliver(const TransferQueue::Claim& claim, Lock& lock) {
  const size_t i = static_cast<size_t>(claim.layer);
  counters_.rows_moved += chunks_[i].rows;
  counters_.bytes_moved += chunks_[i].rows * static_cast<uint64_t>(row_bytes(views_[i]));
  if (remote_ != nullptr) {
    // Nobody posts to this layer before it is published, so what it has here stays as it is.
    const bool late = failed_;
    lock.unlock();
    struct Relock {
      Lock& lock;
      ~Relock() { lock.lock(); }
    } relock{lock};
    if (!late) remote_->publish(claim.layer, static_cast<uint32_t>(number(claim)));
    return;
  }
  flags_[i].ready.store(claim.sequence, std::memory_order_release);
  delivered_.notify_all();
}

// True: the queue has work and the mutex is held. False: end. After a failure threads stay idle until the reset.
bool Transfers::await_work(Lock& lock) {
  if (remote_ != nullptr) return await_remote_work(lock);
  const auto ready = [this] { return stopping_ || (!failed_ && queue_.has_work()); };
  if (!ready() && !failed_) {
    lock.unlock();
    const Clock::time_point start = Clock::now();
    while (!wake_.load(std::memory_order_relaxed) && Clock::now() - start < kSpin) std::this_thread::yield();
    lock.lock();
  }
  work_.wait(lock, ready);
  return !stopping_;
}

void Transfers::serve(const TransferQueue::Claim& claim) {
  if (injecting_) inject();
  const size_t i = static_cast<size_t>(claim.layer), c = static_cast<size_t>(claim.chunk);
  const Chunks& chunks = chunks_[i];
  const size_t first = chunks.begin[c], last = chunks.begin[c + 1];
  backend_->serve(claim.layer, views_[i], chunks.jobs.data() + first, static_cast<int64_t>(last - first));
}

void Transfers::inject() {
  Lock lock(mutex_);
  if (chunks_to_death_ >= 0 && chunks_to_death_-- == 0) throw std::runtime_error("injected death");
  if (max_delay_us_ == 0) return;
  const int64_t us = std::uniform_int_distribution<int64_t>(0, max_delay_us_)(random_);
  interrupt_.wait_for(lock, std::chrono::microseconds(us), [this] { return stopping_ || failed_; });
}

void Transfers::add_to(Counters* counters) const {
  Lock lock(mutex_);
  counters->requests += counters_.requests;
  counters->rows_posted += counters_.rows_posted;
  counters->rows_moved += counters_.rows_moved;
  counters->bytes_moved += counters_.bytes_moved;
  counters->wait_ns += wait_ns_;
}

void Transfers::clear_counters() {
  Lock lock(mutex_);
  counters_ = {};
  wait_ns_ = 0;
}

void Transfers::inject_delay(int64_t max_us, uint64_t seed) {
  Lock lock(mutex_);
  max_delay_us_ = max_us;
  random_.seed(seed);
  injecting_ = max_us > 0 || chunks_to_death_ >= 0;
}

void Transfers::inject_thread_death(int64_t after_chunks) {
  Lock lock(mutex_);
  chunks_to_death_ = after_chunks;
  injecting_ = true;
}

}  // namespace clo
