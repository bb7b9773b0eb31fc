// The engine without XLA or Python: transfers under random delays are checked row for row, and every way in which a
// wait can fail. Also the program that runs under the thread, address and undefined-behaviour sanitizers.
#include "host/engine.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "host/arena.h"

namespace {

using clo::Engine;
using clo::EngineConfig;
using clo::LayerView;
using Clock = std::chrono::steady_clock;

EngineConfig small(int64_t threads) {
  EngineConfig c;
  c.kv_heads = {2, 0, 3};
  c.batch = 2;
  c.max_tokens = 256;
  c.num_slots = 48;
  c.head_dim = 64;
  c.dtype = clo::DType::kBF16;
  c.threads = threads;
  c.timeout_s = 20;
  return c;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

char* row(const LayerView& v, void* rows, int64_t per_head, int64_t head, int64_t index) {
  return static_cast<char*>(rows) + (head * per_head + index) * clo::row_bytes(v);
}

// Every host row is filled with bytes that depend on layer, head, token and round.
void write_pattern(const LayerView& v, int64_t layer, int64_t round) {
  for (int64_t h = 0; h < v.batch * v.kv_heads; ++h)
    for (int64_t t = 0; t < v.max_tokens; ++t) {
      std::mt19937 bytes(static_cast<uint32_t>(((round * 7 + layer) * 101 + h) * 1009 + t));
      char* p = row(v, v.host_rows, v.max_tokens, h, t);
      for (int64_t i = 0; i < clo::row_bytes(v); i += 4) {
        const uint32_t word = static_cast<uint32_t>(bytes());
        std::memcpy(p + i, &word, 4);
      }
    }
}

// A random request: distinct slots, any tokens; updates the slot table as a prefetch would. Returns the rows asked for.
uint64_t fill_request(const LayerView& v, std::mt19937_64& random) {
  uint64_t rows = 0;
  std::vector<int32_t> slots(static_cast<size_t>(v.num_slots));
  for (int64_t h = 0; h < v.batch * v.kv_heads; ++h) {
    for (size_t j = 0; j < slots.size(); ++j) slots[j] = static_cast<int32_t>(j);
    std::shuffle(slots.begin(), slots.end(), random);
    const int64_t n = random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % static_cast<uint64_t>(v.num_slots + 1));
    v.request.counts[h] = static_cast<int32_t>(n);
    for (int64_t i = 0; i < n; ++i) {
      const auto token = static_cast<int32_t>(random() % static_cast<uint64_t>(v.max_tokens));
      v.request.tokens[h * v.num_slots + i] = token;
      v.request.slots[h * v.num_slots + i] = slots[static_cast<size_t>(i)];
      v.slot_tokens[h * v.num_slots + slots[static_cast<size_t>(i)]] = token;
    }
    rows += static_cast<uint64_t>(n);
  }
  return rows;
}

bool slots_hold_their_rows(const LayerView& v) {
  for (int64_t h = 0; h < v.batch * v.kv_heads; ++h)
    for (int64_t j = 0; j < v.num_slots; ++j) {
      const int32_t token = v.slot_tokens[h * v.num_slots + j];
      if (token < 0) continue;
      if (std::memcmp(row(v, v.selected_rows, v.num_slots, h, j), row(v, v.host_rows, v.max_tokens, h, token),
                      static_cast<size_t>(clo::row_bytes(v))) != 0)
        return false;
    }
  return true;
}

void post_full(Engine& engine, int64_t layer) {
  const LayerView v = engine.layer(layer);
  for (int64_t h = 0; h < v.batch * v.kv_heads; ++h) {
    v.request.counts[h] = static_cast<int32_t>(v.num_slots);
    for (int64_t j = 0; j < v.num_slots; ++j)
      v.request.tokens[h * v.num_slots + j] = v.request.slots[h * v.num_slots + j] = static_cast<int32_t>(j);
  }
  engine.post(layer);
}

// Decode-like order: the request of one layer is in flight while the other layer's rows are read. Resets in between.
void rows_arrive_intact(int64_t threads, int64_t max_delay_us, int64_t rounds) {
  Engine engine(small(threads));
  const std::vector<int64_t> layers = {0, 2};
  for (int64_t l : layers) write_pattern(engine.layer(l), l, 0);
  engine.inject_delay(max_delay_us, 17);
  std::mt19937_64 random(static_cast<uint64_t>(threads * 1000 + max_delay_us));
  uint64_t rows = 0, requests = 0;
  for (int64_t round = 0; round < rounds; ++round) {
    for (int64_t l : layers) {
      CHECK(engine.wait(l).empty());
      CHECK(slots_hold_their_rows(engine.layer(l)));
      const uint64_t n = fill_request(engine.layer(l), random);
      rows += n;
      requests += n > 0;
      engine.post(l);
    }
    if (round % 50 == 49) {
      for (int64_t l : layers) CHECK(engine.wait(l).empty());
      engine.reset();
      for (int64_t l : layers) write_pattern(engine.layer(l), l, round);
    }
  }
  for (int64_t l : layers) {
    CHECK(engine.wait(l).empty());
    CHECK(slots_hold_their_rows(engine.layer(l)));
  }
  const clo::Counters c = engine.counters();
  CHECK(c.requests == requests && c.rows_posted == rows && c.rows_moved == rows && c.bytes_moved == rows * 256);
}

void layers_are_aligned_and_apart() {
  Engine engine(small(1));
  const LayerView a = engine.layer(0), none = engine.layer(1), b = engine.layer(2);
  for (const void* p : {a.host_rows, a.selected_rows, b.host_rows, b.selected_rows, static_cast<void*>(b.slot_tokens),
                        static_cast<void*>(b.slot_last), static_cast<void*>(b.refreshes)})
    CHECK(reinterpret_cast<uintptr_t>(p) % clo::Arena::kAlignment == 0);
  CHECK(none.kv_heads == 0 && none.host_rows == nullptr && none.slot_tokens == nullptr);
  CHECK(static_cast<char*>(b.host_rows) - static_cast<char*>(a.host_rows) == 2 * 2 * 256 * 256);
  CHECK(engine.host_bytes() >= 2 * 5 * 256 * 256 && engine.device_bytes() >= 2 * 5 * 48 * 256);
  for (int64_t j = 0; j < 2 * 3 * 48; ++j) CHECK(b.slot_tokens[j] == -1);
}

void a_request_without_moves_is_ready() {
  Engine engine(small(2));
  CHECK(engine.post(0) == 0);
  CHECK(engine.wait(0).empty());
  CHECK(engine.counters().requests == 0);
}

void a_second_post_before_delivery_is_refused() {
  Engine engine(small(1));
  engine.inject_delay(20'000'000, 1);
  post_full(engine, 0);
  bool refused = false;
  try {
    engine.post(0);
  } catch (const std::logic_error& e) {
    refused = contains(e.what(), "layer 0, backend host, request 1");
  }
  CHECK(refused);
}

void a_wait_has_a_limit_and_may_be_repeated() {
  EngineConfig c = small(1);
  c.timeout_s = 0.02;
  Engine engine(c);
  engine.inject_delay(1'000'000'000, 3);
  post_full(engine, 2);
  const auto start = Clock::now();
  const std::string why = engine.wait(2);
  CHECK(contains(why, "layer 2, backend host, request 1: not delivered after") && contains(why, "limit 0.020 s"));
  CHECK(Clock::now() - start < std::chrono::seconds(10));
  CHECK(!engine.wait(2).empty());  // still under way
  engine.reset();                  // does not sit the delay out
  CHECK(Clock::now() - start < std::chrono::seconds(10));
  CHECK(engine.wait(2).empty());
}

void an_abort_wakes_a_wait() {
  Engine engine(small(2));
  engine.inject_delay(1'000'000'000, 5);
  post_full(engine, 0);
  std::string why;
  std::thread waiter([&] { why = engine.wait(0); });
  engine.abort("stop it");
  waiter.join();
  CHECK(contains(why, "layer 0, backend host, request 1: aborted: stop it"));
  CHECK(contains(engine.wait(2), "aborted: stop it"));  // every layer
  engine.inject_delay(0, 0);
  engine.reset();
  post_full(engine, 0);
  CHECK(engine.wait(0).empty());
}

void a_dead_thread_fails_every_wait_until_reset() {
  for (int64_t threads : {1, 3}) {
    Engine engine(small(threads));
    write_pattern(engine.layer(0), 0, 0);
    engine.inject_thread_death(2);
    std::string why;
    for (int64_t i = 0; i < 3 && why.empty(); ++i) {
      post_full(engine, 0);
      why = engine.wait(0);
    }
    CHECK(contains(why, "died while it served layer 0, backend host, request") && contains(why, "injected death"));
    CHECK(contains(engine.wait(2), "died while it served layer 0"));
    engine.reset();
    const clo::Counters before = engine.counters();
    post_full(engine, 0);
    CHECK(engine.wait(0).empty());
    CHECK(engine.counters().rows_moved - before.rows_moved == 2 * 2 * 48);
  }
}

void close_ends_waits_and_service() {
  Engine engine(small(2));
  engine.inject_delay(1'000'000'000, 7);
  post_full(engine, 0);
  std::string why;
  std::thread waiter([&] { why = engine.wait(0); });
  engine.close();
  waiter.join();
  CHECK(contains(why, "the engine is closed"));
  engine.close();
  bool refused = false;
  try {
    engine.reset();
  } catch (const std::logic_error& e) {
    refused = contains(e.what(), "the engine is closed");
  }
  CHECK(refused);
}

void without_offload_nothing_moves() {
  EngineConfig c = small(4);
  c.offload = false;
  Engine engine(c);
  CHECK(engine.layer(0).selected_rows == nullptr && engine.layer(0).host_rows != nullptr);
  CHECK(engine.host_bytes() == 0 && engine.device_bytes() > 2 * 5 * 256 * 256);
  post_full(engine, 0);
  CHECK(engine.wait(0).empty());
  engine.record_lookup(3, 4, 100);
  engine.record_offload(5, 1280);
  const clo::Counters n = engine.counters();
  CHECK(n.requests == 1 && n.rows_posted == 2 * 2 * 48 && n.rows_moved == 0 && n.bytes_moved == 0);
  CHECK(n.hits == 3 && n.misses == 4 && n.rows_selected == 100 && n.rows_offloaded == 5 && n.bytes_offloaded == 1280);
  engine.clear_counters();
  CHECK(engine.counters().hits == 0 && engine.counters().requests == 0);
}

template <typename Error>
std::string refusal(const EngineConfig& c) {
  try {
    Engine engine(c);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

void bad_configurations_are_refused() {
  EngineConfig c = small(1);
  c.backend = "pull";
  CHECK(contains(refusal<std::invalid_argument>(c), "backend: got \"pull\", not in this build"));
  c.backend = "rocket";
  CHECK(contains(refusal<std::invalid_argument>(c), "got \"rocket\", unknown; available here: auto, host"));
  c = small(0);
  CHECK(contains(refusal<std::invalid_argument>(c), "threads: got 0"));
  c = small(1);
  c.max_tokens = INT32_MAX;
  c.batch = 1 << 20;
  c.head_dim = 1 << 20;
  CHECK(contains(refusal<std::bad_alloc>(c), "larger than any memory"));
  c.batch = 1;
  c.head_dim = 4096;  // 175 TB: more than an address space
  CHECK(contains(refusal<std::bad_alloc>(c), "host rows: 175921860362240 bytes needed"));
}

void handles_are_the_smallest_free() {
  const auto make = [] { return std::make_shared<Engine>(small(1)); };
  const int64_t a = clo::register_engine(make()), b = clo::register_engine(make());
  CHECK(a == 1 && b == 2 && clo::find_engine(0) == nullptr);
  clo::unregister_engine(a);
  clo::unregister_engine(a);
  CHECK(clo::find_engine(a) == nullptr && clo::find_engine(b) != nullptr);
  CHECK(clo::register_engine(make()) == a);
  clo::unregister_engine(a);
  clo::unregister_engine(b);
}

}  // namespace

// test_engine [rounds]: more rounds make it the stress program of the sanitizer builds.
int main(int argc, char** argv) {
  const int64_t rounds = argc > 1 ? std::stoll(argv[1]) : 200;
  layers_are_aligned_and_apart();
  a_request_without_moves_is_ready();
  a_second_post_before_delivery_is_refused();
  a_wait_has_a_limit_and_may_be_repeated();
  an_abort_wakes_a_wait();
  a_dead_thread_fails_every_wait_until_reset();
  close_ends_waits_and_service();
  without_offload_nothing_moves();
  bad_configurations_are_refused();
  handles_are_the_smallest_free();
  for (int64_t threads : {1, 2, 4, 8}) {
    rows_arrive_intact(threads, 0, rounds);
    rows_arrive_intact(threads, 200, rounds);
  }
  std::printf("ok\n");
}
