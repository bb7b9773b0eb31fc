// Threads that serve a GPU (RemoteBackend), where a thread of the test stands in for the GPU: it hands requests over
// and waits for their numbers as kernels do. Rows go by every kind of streaming store, or by way of a staging buffer.
// Also a program for the sanitizers.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "host/backends/gather_rows.h"
#include "host/backends/stream_rows.h"
#include "host/layers.h"
#include "host/transfers.h"

namespace {

using clo::Job;
using clo::LayerView;
using Clock = std::chrono::steady_clock;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

clo::EngineConfig config() {
  clo::EngineConfig c;
  c.kv_heads = {2, 0, 3};
  c.batch = 2;
  c.max_tokens = 256;
  c.num_slots = 48;
  c.head_dim = 64;
  c.dtype = clo::DType::kBF16;
  c.backend = "host";
  return c;
}

// What kernels and the far end of the link would have: doorbells, ready numbers, an error word.
struct Gpu {
  std::atomic<uint32_t> doorbells[3]{}, ready[3]{};
  std::atomic<uint64_t> error{0};
  std::atomic<int> rooms{2};  // of the staging buffer
};

// Streams rows straight to their slots, or with `stores` null gathers them and scatters when the request is published.
class StandInLink : public clo::RemoteBackend {
 public:
  StandInLink(Gpu* gpu, const std::vector<LayerView>& views, const clo::StreamStores* stores)
      : gpu_(gpu), views_(views), stores_(stores), staging_(views.size()) {}

  uint32_t posted(int64_t layer) const override { return gpu_->doorbells[layer].load(std::memory_order_acquire); }
  bool admit(int64_t layer) override {
    if (stores_ != nullptr) return true;
    if (gpu_->rooms.load(std::memory_order_acquire) == 0) return false;
    --gpu_->rooms;
    const LayerView& v = views_[static_cast<size_t>(layer)];
    staging_[static_cast<size_t>(layer)].resize(static_cast<size_t>(v.batch * v.kv_heads * v.num_slots * row_bytes(v)));
    return true;
  }
  void serve(int64_t layer, const LayerView& view, const Job* jobs, int64_t count) override {
    if (stores_ != nullptr) clo::stream_rows(view, jobs, count, *stores_);
    else clo::gather_rows(view, jobs, count, staging_[static_cast<size_t>(layer)].data());
  }
  void publish(int64_t layer, uint32_t number) override {
    if (stores_ == nullptr) scatter(layer);
    gpu_->ready[layer].store(number, std::memory_order_release);
  }
  void give_up(int64_t layer, uint32_t number) noexcept override {
    gpu_->error = 1 + (static_cast<uint64_t>(layer) << 32 | number);
  }

 private:
  void scatter(int64_t layer) {
    const LayerView& v = views_[static_cast<size_t>(layer)];
    const char* from = staging_[static_cast<size_t>(layer)].data();
    for (int64_t h = 0; h < v.batch * v.kv_heads; ++h)
      for (int64_t i = 0; i < v.request.counts[h]; ++i, from += row_bytes(v))
        std::memcpy(static_cast<char*>(v.selected_rows) +
                        (h * v.num_slots + v.request.slots[h * v.num_slots + i]) * row_bytes(v),
                    from, static_cast<size_t>(row_bytes(v)));
    ++gpu_->rooms;
  }

  Gpu* const gpu_;
  const std::vector<LayerView> views_;
  const clo::StreamStores* const stores_;
  std::vector<std::vector<char>> staging_;
};

struct Fixture {
  explicit Fixture(int64_t threads, const clo::StreamStores* stores = &clo::stream_stores().front())
      : layers(config(), nullptr),
        transfers("bar", std::make_unique<StandInLink>(&gpu, layers.views(), stores), layers.views(), threads, 5.0) {
    std::mt19937 random(1);
    for (const LayerView& v : layers.views())
      for (int64_t i = 0; i < v.batch * v.kv_heads * v.max_tokens * row_bytes(v) / 4; ++i)
        static_cast<uint32_t*>(v.host_rows)[i] = static_cast<uint32_t>(random());
  }
  const LayerView& view(int64_t layer) const { return layers.views()[static_cast<size_t>(layer)]; }

  // As a kernel: a request of random moves, not empty, then the doorbell.
  void hand_over(int64_t layer, std::mt19937& random) {
    const LayerView& v = view(layer);
    std::vector<int32_t> slots(static_cast<size_t>(v.num_slots));
    for (int64_t h = 0; h < v.batch * v.kv_heads; ++h) {
      for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int32_t>(i);
      std::shuffle(slots.begin(), slots.end(), random);
      const int32_t count = static_cast<int32_t>(1 + random() % slots.size());
      v.request.counts[h] = count;
      for (int32_t i = 0; i < count; ++i) {
        v.request.tokens[h * v.num_slots + i] = static_cast<int32_t>(random() % static_cast<uint32_t>(v.max_tokens));
        v.request.slots[h * v.num_slots + i] = slots[static_cast<size_t>(i)];
      }
      rows += static_cast<uint64_t>(count);
    }
    number[layer] += 1 + random() % 3;  // requests without moves are not handed over, but counted
    gpu.doorbells[layer].store(number[layer], std::memory_order_release);
  }
  // As a kernel that waits; false when the engine gave up, or never ended within the limit.
  bool await(int64_t layer) const {
    const auto start = Clock::now();
    while (gpu.ready[layer].load(std::memory_order_acquire) != number[layer]) {
      if (gpu.error != 0 || Clock::now() - start > std::chrono::seconds(20)) return false;
      std::this_thread::yield();
    }
    return true;
  }
  bool rows_are_there(int64_t layer) const {
    const LayerView& v = view(layer);
    for (int64_t h = 0; h < v.batch * v.kv_heads; ++h)
      for (int64_t i = h * v.num_slots; i < h * v.num_slots + v.request.counts[h]; ++i)
        if (std::memcmp(static_cast<char*>(v.selected_rows) + (h * v.num_slots + v.request.slots[i]) * row_bytes(v),
                        static_cast<char*>(v.host_rows) + (h * v.max_tokens + v.request.tokens[i]) * row_bytes(v),
                        static_cast<size_t>(row_bytes(v))) != 0)
          return false;
    return true;
  }
  // One layer ahead, as a decode step.
  void steps(int n, uint32_t seed) {
    std::mt19937 random(seed);
    for (int i = 0; i < n; ++i)
      for (int64_t layer : {0, 2}) {
        hand_over(layer, random);
        const int64_t before = 2 - layer;
        if (number[before] == 0) continue;
        CHECK(await(before) && rows_are_there(before));
      }
    for (int64_t layer : {0, 2}) CHECK(await(layer) && rows_are_there(layer));
  }
  void reset() {
    transfers.reset([&] {
      for (auto& word : gpu.doorbells) word = 0;
      for (auto& word : gpu.ready) word = 0;
      gpu.error = 0;
      gpu.rooms = 2;
      for (uint32_t& n : number) n = 0;
    });
  }

  Gpu gpu;
  clo::Layers layers;
  uint32_t number[3]{};
  uint64_t rows = 0;
  clo::Transfers transfers;
};

void rows_arrive_intact(int64_t threads, const clo::StreamStores* stores, int64_t delay_us, int steps) {
  Fixture f(threads, stores);
  f.transfers.inject_delay(delay_us, 3);
  for (bool hot : {true, false}) {
    f.transfers.hot(hot);
    f.steps(steps, static_cast<uint32_t>(threads));
  }
  clo::Counters c;
  f.transfers.add_to(&c);
  CHECK(c.rows_moved == f.rows && c.bytes_moved == f.rows * 256 && c.requests == 0 && f.gpu.error == 0);
  f.reset();
  f.steps(5, 9);
}

void a_dead_thread_ends_every_wait_until_reset(int64_t threads) {
  Fixture f(threads);
  std::mt19937 random(2);
  f.steps(2, 1);
  f.transfers.inject_thread_death(0);
  f.hand_over(2, random);
  CHECK(!f.await(2));
  CHECK(f.gpu.error == 1 + (uint64_t{2} << 32 | f.number[2]));
  const std::string name = "layer 2, backend bar, request " + std::to_string(f.number[2]);
  CHECK(contains(f.transfers.failure(), "died while it served " + name + ": injected death"));
  f.hand_over(0, random);
  CHECK(!f.await(0));
  f.reset();
  CHECK(f.transfers.failure().empty());
  f.steps(10, 4);
}

void an_abort_ends_a_wait() {
  Fixture f(2);
  std::mt19937 random(2);
  f.transfers.inject_delay(1'000'000'000, 1);
  f.hand_over(0, random);
  while (f.transfers.failure().empty()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // until a thread has the request
    f.transfers.abort("enough");
  }
  CHECK(!f.await(0) && f.transfers.failure() == "aborted: enough");
  CHECK(f.gpu.error == 1 + f.number[0]);  // names layer 0
  const auto start = Clock::now();
  f.reset();
  CHECK(Clock::now() - start < std::chrono::seconds(10));
  f.transfers.inject_delay(0, 0);
  f.steps(5, 5);
}

// An engine without work does not keep a core busy, and one that waits for a program does.
void idle_threads_sleep() {
  Fixture f(4);
  f.steps(3, 6);
  const auto busy = [](auto&& during) {
    const std::clock_t start = std::clock();
    during();
    return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  };
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(busy([] { std::this_thread::sleep_for(std::chrono::milliseconds(400)); }) < 0.1);
  f.transfers.hot(true);
  CHECK(f.transfers.is_hot());
  // Half of a core, once the machine lets it have as much.
  bool seen = false;
  for (int i = 0; i < 50 && !seen; ++i)
    seen = busy([] { std::this_thread::sleep_for(std::chrono::milliseconds(100)); }) > 0.05;
  CHECK(seen);
}

}  // namespace

// test_remote [steps]: more of them for a sanitizer build.
int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 60;
  for (const clo::StreamStores& stores : clo::stream_stores()) {
    std::printf("%s\n", stores.name);
    rows_arrive_intact(3, &stores, 0, steps);
  }
  for (int64_t threads : {1, 2, 4, 8}) {
    rows_arrive_intact(threads, nullptr, 0, steps);
    rows_arrive_intact(threads, &clo::stream_stores().back(), 200, steps);
    rows_arrive_intact(threads, nullptr, 200, steps);
  }
  for (int64_t threads : {1, 3}) a_dead_thread_ends_every_wait_until_reset(threads);
  an_abort_ends_a_wait();
  idle_threads_sleep();
  std::puts("ok");
}
