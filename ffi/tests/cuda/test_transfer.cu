// Backends `pull`, `bar` and `staged` on a GPU: the right rows arrive under random requests, within begin() and end()
// and without, posted by the host and by kernels; every wait ends; the GPU serves again afterwards.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cuda/check.h"
#include "host/backends/backend.h"
#include "tests/check.h"
#include "tests/cuda/transfer_program.h"

using namespace clo;
using namespace clo::test;

namespace {

// A request of random moves on the host, written to the layer's, and its effect on a mirror of the selected rows.
void stage(const Engine& engine, int64_t layer, std::mt19937_64& random, std::vector<char>* mirror) {
  const LayerView v = engine.layer(layer);
  const int64_t heads = v.batch * v.kv_heads, C = v.num_slots, bytes = row_bytes(v);
  std::vector<int32_t> counts(static_cast<size_t>(heads)), tokens(static_cast<size_t>(heads * C)), slots(tokens);
  mirror->resize(static_cast<size_t>(heads * C * bytes));
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t count = random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % static_cast<uint64_t>(C + 1));
    counts[static_cast<size_t>(h)] = static_cast<int32_t>(count);
    std::vector<int32_t> order(static_cast<size_t>(C));
    for (int64_t i = 0; i < C; ++i) order[static_cast<size_t>(i)] = static_cast<int32_t>(i);
    std::shuffle(order.begin(), order.end(), random);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t token = static_cast<int64_t>(random() % static_cast<uint64_t>(v.max_tokens));
      tokens[static_cast<size_t>(h * C + i)] = static_cast<int32_t>(token);
      slots[static_cast<size_t>(h * C + i)] = order[static_cast<size_t>(i)];
      std::memcpy(mirror->data() + (h * C + order[static_cast<size_t>(i)]) * bytes,
                  static_cast<const char*>(v.host_rows) + (h * v.max_tokens + token) * bytes,
                  static_cast<size_t>(bytes));
    }
  }
  engine.copy(v.request.counts, counts.data(), heads * 4);
  engine.copy(v.request.tokens, tokens.data(), heads * C * 4);
  engine.copy(v.request.slots, slots.data(), heads * C * 4);
}

void check_rows(const Engine& engine, int64_t layer, const std::vector<char>& mirror) {
  std::vector<char> got(mirror.size());
  engine.copy(got.data(), engine.layer(layer).selected_rows, static_cast<int64_t>(got.size()));
  CHECK(got == mirror);
}

void test_rows_posted_by_the_host(const Shape& shape, bool resident) {
  Engine engine(config_of(shape));
  const int64_t layers = static_cast<int64_t>(shape.kv_heads.size());
  fill_host(engine, layers);
  std::mt19937_64 random(1);
  std::vector<std::vector<char>> mirror(static_cast<size_t>(layers));
  const int64_t rounds = serialised ? 3 : 12;
  int64_t ring = 0;
  for (int64_t heads : shape.kv_heads) ring += heads > 0;
  engine.inject_delay(30, 7);
  if (resident) engine.begin(ring * rounds);
  for (int64_t round = 0; round < rounds; ++round) {
    for (int64_t i = 0; i < layers; ++i) {
      if (shape.kv_heads[static_cast<size_t>(i)] == 0) continue;
      stage(engine, i, random, &mirror[static_cast<size_t>(i)]);
      CHECK(engine.post(i) == static_cast<uint64_t>(round + 1));
      CHECK(engine.wait(i).empty());
      check_rows(engine, i, mirror[static_cast<size_t>(i)]);
    }
  }
  CHECK(engine.end().empty());
  const Counters c = engine.counters();
  CHECK(c.rows_moved > 0 && c.rows_moved == c.rows_posted);
  CHECK(c.bytes_moved == c.rows_moved * static_cast<uint64_t>(row_bytes(engine.layer(0))));
  engine.clear_counters();
  CHECK(engine.counters().rows_moved == 0);
}
const Shape kProgramShape{{2, 3, 1}, 2, 3000, 96, 128, DType::kBF16};

void test_rows_posted_by_kernels(bool resident, int64_t delay_us, uint32_t steps) {
  Engine engine(config_of(kProgramShape));
  fill_host(engine, 3);
  Program program(engine, 3);
  if (delay_us > 0) engine.inject_delay(delay_us, 3);
  if (resident) engine.begin(3 * static_cast<int64_t>(steps));
  for (uint32_t n = 0; n < steps; ++n) program.step(n);
  CHECK(program.mismatches() == 0);
  CHECK(engine.end().empty());
  CHECK(engine.counters().rows_moved > 0);
}

// A chunk that ends early: the kernel waits for requests that never come, until it is told.
void test_end_before_the_count() {
  Engine engine(config_of(kProgramShape));
  fill_host(engine, 3);
  Program program(engine, 3);
  for (uint32_t chunk = 0; chunk < 5; ++chunk) {
    engine.begin(3000);
    for (uint32_t n = 0; n < 7; ++n) program.step(chunk * 7 + n);
    CHECK(program.mismatches() == 0);
    const auto start = std::chrono::steady_clock::now();
    CHECK(engine.end().empty());
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::milliseconds(50));
  }
  program.step(99);  // and without a resident kernel again
  CHECK(program.mismatches() == 0 && engine.end().empty());
}

void check_usable(Engine& engine) {
  engine.reset();
  Program program(engine, 3);
  engine.begin(30);
  for (uint32_t n = 0; n < 10; ++n) program.step(n);
  CHECK(program.mismatches() == 0);
  CHECK(engine.end().empty());
}

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

std::string request_name(int layer, int request) {
  return "layer " + std::to_string(layer) + ", backend " + backend + ", request " + std::to_string(request);
}

void test_abort() {
  Engine engine(config_of(kProgramShape));
  fill_host(engine, 3);
  Program program(engine, 3);  // first: it waits for the whole device, which a resident kernel would hold up
  engine.begin(300);
  program.step(0);
  CHECK(program.mismatches() == 0);
  engine.abort("the test says so");
  std::string why = engine.end();
  CHECK(contains(why, "aborted: the test says so"));
  CHECK(contains(why, request_name(0, by_threads() ? 1 : 2).c_str()));
  program.step(1);  // a program that comes too late gives up at once
  CLO_CUDA_CHECK(cudaStreamSynchronize(program.stream));
  CHECK(contains(engine.wait(1), "aborted"));
  check_usable(engine);
  engine.abort("between programs");
  CHECK(contains(engine.end(), "aborted: between programs"));
  check_usable(engine);
}

// An abort while a kernel waits for rows that are not coming.
void test_abort_of_a_wait() {
  Engine engine(config_of(kProgramShape));
  fill_host(engine, 3);
  Program program(engine, 3);
  engine.inject_delay(1'000'000'000, 1);
  const auto start = std::chrono::steady_clock::now();
  engine.begin(300);
  program.step(0);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  engine.abort("enough");
  const std::string why = engine.end();
  CHECK(contains(why, "aborted: enough") && contains(why, ("backend " + backend).c_str()));
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
  engine.inject_delay(0, 0);
  check_usable(engine);
}

void test_time_limits() {
  Engine engine(config_of(kProgramShape, 0.1));
  fill_host(engine, 3);
  Program program(engine, 3);
  const auto start = std::chrono::steady_clock::now();
  engine.begin(3);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const std::string idle = engine.end();
  // Threads wait for as long as the program likes.
  if (by_threads()) CHECK(idle.empty());
  else CHECK(contains(idle, "layer 0, backend pull, request 1: not posted in time (limit 0.100 s)"));
  check_usable(engine);
  // Posted, and nobody serves it: attention gives up, and so does everything after it.
  produce<<<1, 1024, 0, program.stream>>>(program.of(1), 0);
  for (int i = 0; i < 20; ++i) consume<<<1, 1024, 0, program.stream>>>(program.of(1), program.wrong);
  CLO_CUDA_CHECK(cudaStreamSynchronize(program.stream));
  // check_usable has reset the numbers and used ten.
  CHECK(contains(engine.end(), (request_name(1, 11) + ": not delivered in time (limit 0.100 s)").c_str()));
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
  check_usable(engine);
}

// Served, but too late.
void test_a_flag_that_never_comes() {
  Engine engine(config_of(kProgramShape, 0.1));
  fill_host(engine, 3);
  Program program(engine, 3);
  engine.inject_delay(1'000'000'000, 1);
  for (bool within : {true, false}) {
    const auto start = std::chrono::steady_clock::now();
    if (within) engine.begin(3);
    program.step(0);
    CLO_CUDA_CHECK(cudaStreamSynchronize(program.stream));
    const std::string why = engine.end();
    CHECK(contains(why, (request_name(0, 1) + ": not delivered in time (limit 0.100 s)").c_str()));
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
    engine.reset();  // does not sit the delay out
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
  }
  engine.inject_delay(0, 0);
  check_usable(engine);
}

void test_a_dead_thread() {
  Engine engine(config_of(kProgramShape));
  fill_host(engine, 3);
  Program program(engine, 3);
  for (bool within : {true, false}) {
    const auto start = std::chrono::steady_clock::now();
    engine.inject_thread_death(5);
    if (within) engine.begin(300);
    for (uint32_t n = 0; n < 10; ++n) program.step(n);
    CLO_CUDA_CHECK(cudaStreamSynchronize(program.stream));
    const std::string why = engine.end();
    CHECK(contains(why, "transfer thread ") && contains(why, "died while it served layer ") &&
          contains(why, ("backend " + backend).c_str()) && contains(why, "injected death"));
    CHECK(contains(engine.wait(2), ("layer 2, backend " + backend + ", request ").c_str()));
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
    check_usable(engine);
  }
}

void test_reset_and_close_end_a_program() {
  Engine engine(config_of(kProgramShape));
  fill_host(engine, 3);
  engine.begin(1000);
  check_usable(engine);
  engine.begin(1000);
  engine.close();
  CLO_CUDA_CHECK(cudaDeviceSynchronize());
}

void test_refusals() {
  Shape odd = kProgramShape;
  odd.head_dim = 6;  // 24 bytes a row
  bool refused = false;
  try {
    Engine engine(config_of(odd));
  } catch (const std::invalid_argument& e) {
    refused = contains(e.what(), "rows of 24 bytes");
  }
  CHECK(refused);
  Engine engine(config_of(kProgramShape));
  engine.begin(3);
  bool twice = false;
  try {
    engine.begin(3);
  } catch (const std::logic_error&) {
    twice = true;
  }
  CHECK(twice);
  CHECK(engine.end().empty());
}


void run(bool small) {
  const Shape shapes[] = {
      {{2, 0, 3}, 2, 500, 40, 128, DType::kBF16},  // 512-byte rows
      {{1}, 3, 257, 33, 16, DType::kF32},          // 128
      {{2, 2}, 1, 300, 50, 80, DType::kBF16},      // 320: no power of two
      {{1, 4}, 1, 200, 100, 256, DType::kF32},     // 2048
      {{3}, 1, 200, 64, 8, DType::kBF16},          // 32
      {{2}, 1, 100, 20, 520, DType::kF32},         // more than a warp has in flight
      {{3, 1}, 1, 301, 60, 20, DType::kBF16},      // 80: rows that end in the middle of a sector, two a load
      {{3}, 2, 301, 60, 68, DType::kBF16},         // 272: one a load
      {{2}, 1, 301, 60, 132, DType::kBF16},        // 528: two loads a row
      {{2}, 1, 301, 60, 60, DType::kBF16},         // 240: a load's lanes but one
      {{8}, 160, 64, 8, 64, DType::kBF16},         // more heads than fit at once
  };
  for (const Shape& s : shapes)
    for (bool within : {false, true})
      if (!small || !within || by_threads()) test_rows_posted_by_the_host(s, within);
  test_rows_posted_by_kernels(false, 0, small ? 5 : 200);
  if (small) return;
  for (int64_t n : {1, 2, 4, 8}) {
    threads = n;
    test_rows_posted_by_kernels(true, 0, by_threads() ? 400 : 1500);
    test_rows_posted_by_kernels(true, 40, 200);
    if (!by_threads()) break;
  }
  threads = 3;
  test_end_before_the_count();
  test_abort();
  test_time_limits();
  if (by_threads()) {
    test_abort_of_a_wait();
    test_a_flag_that_never_comes();
    test_a_dead_thread();
  }
  test_reset_and_close_end_a_program();
  test_refusals();
  CLO_CUDA_CHECK(cudaDeviceSynchronize());
}

}  // namespace

// test_transfer [small] [backend...]: "small": nothing that runs beside something else, for a sanitizer, which holds
// kernels back. Backends that are named must be there; without names all that are there.
int main(int argc, char** argv) {
  std::vector<std::string> wanted;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "small") == 0) serialised = true;
    else wanted.push_back(argv[i]);
  }
  for (const BackendInfo& b : list_backends()) {
    if (b.name == "host") continue;
    const bool named = std::find(wanted.begin(), wanted.end(), b.name) != wanted.end();
    if (!wanted.empty() && !named) continue;
    std::printf("%s: %s: %s\n", b.name.c_str(), b.available ? "tested" : "not available", b.reason.c_str());
    std::fflush(stdout);
    CHECK(b.available || !named);
    if (!b.available) continue;
    backend = b.name;
    run(serialised);
  }
  std::puts("ok");
  return 0;
}
