// Times of the transfer backends of a GPU, each beside its control of the same run. One line a figure, tab-separated:
// name, value, unit, name of the control, control, goal ("-" where there is none). clo_jax/bench/native.py makes a
// results file of them. A table for people goes to stderr, and so does the reason of a backend that is not there.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/check.h"
#include "cuda/flags.cuh"
#include "cuda/pull.h"
#include "host/backends/backend.h"
#include "host/engine.h"
#include "tests/cuda/program_kernels.cuh"

using namespace clo;

namespace {

constexpr int64_t kLayers = 4, kHeads = 8, kTokens = 131072, kSelected = 13107, kHeadDim = 128;
constexpr int kRounds = 6, kRepeats = 5;
constexpr int64_t kStreamBytes = int64_t{4} << 30;
constexpr int kReadBlocks = 132 * 64;  // many small ones: alone the fastest, and nothing waits for a last wave
constexpr int64_t kLayerBytes = kHeads * kTokens * 512, kMovedBytes = kHeads * kSelected * 512;

constexpr const char* kToDevice = "contiguous cudaMemcpyAsync to the device";

void row(const char* name, double value, const char* unit, const char* control_name, double control,
         const char* goal) {
  std::printf("%s\t%.6g\t%s\t%s\t%.6g\t%s\n", name, value, unit, control_name, control, goal);
  std::fflush(stdout);
  std::fprintf(stderr, "%-72s %9.4g %-5s", name, value, unit);
  if (control > 0) std::fprintf(stderr, " %6.3f of %s, goal %s", value / control, control_name, goal);
  std::fputc('\n', stderr);
}

__global__ void stream_read(const uint4* data, uint4* sink, int64_t n) {
  uint4 sum = {0, 0, 0, 0};
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x) {
    const uint4 v = data[i];
    sum.x ^= v.x, sum.y ^= v.y, sum.z ^= v.z, sum.w ^= v.w;
  }
  if (sum.x == 0x12345678u) *sink = sum;
}

struct Timer {
  Timer() {
    CLO_CUDA_CHECK(cudaEventCreate(&a));
    CLO_CUDA_CHECK(cudaEventCreate(&b));
  }
  void start(cudaStream_t s) { CLO_CUDA_CHECK(cudaEventRecord(a, s)); }
  void stop(cudaStream_t s) { CLO_CUDA_CHECK(cudaEventRecord(b, s)); }
  double seconds() {
    CLO_CUDA_CHECK(cudaEventSynchronize(b));
    float ms = 0;
    CLO_CUDA_CHECK(cudaEventElapsedTime(&ms, a, b));
    return ms * 1e-3;
  }
  cudaEvent_t a, b;
};

struct Bench {
  explicit Bench(const char* backend, int64_t threads = 1) : engine(config(backend, threads)) {
    CLO_CUDA_CHECK(cudaStreamCreateWithFlags(&program, cudaStreamNonBlocking));
    CLO_CUDA_CHECK(cudaStreamCreateWithFlags(&neighbour, cudaStreamNonBlocking));
    CLO_CUDA_CHECK(cudaMalloc(&numbers, kLayers * 4));
    int32_t n[kLayers];
    for (int32_t i = 0; i < kLayers; ++i) n[i] = i;
    CLO_CUDA_CHECK(cudaMemcpy(numbers, n, sizeof n, cudaMemcpyHostToDevice));
    CLO_CUDA_CHECK(cudaDeviceSynchronize());
    cudaFuncAttributes attributes;
    CLO_CUDA_CHECK(cudaFuncGetAttributes(&attributes, test::wait_kernel));
    CLO_CUDA_CHECK(cudaFuncGetAttributes(&attributes, stream_read));
    fill();
  }
  ~Bench() {
    cudaStreamDestroy(program);
    cudaStreamDestroy(neighbour);
    cudaFree(numbers);
    cudaFree(stream_data);
  }
  static EngineConfig config(const char* backend, int64_t threads) {
    EngineConfig c;
    c.kv_heads.assign(kLayers, kHeads);
    c.batch = 1;
    c.max_tokens = kTokens;
    c.num_slots = kSelected;
    c.head_dim = kHeadDim;
    c.dtype = DType::kBF16;
    c.backend = backend;
    c.threads = threads;
    return c;
  }
  cuda::EngineRef of(int64_t layer) const {
    cuda::EngineRef r = *engine.device();
    r.layer.index = numbers + layer;
    return r;
  }
  void fill() {  // every page written, not all the same
    std::vector<std::thread> writers;
    for (int64_t l = 0; l < kLayers; ++l)
      writers.emplace_back([this, l] {
        auto* words = static_cast<uint64_t*>(engine.layer(l).host_rows);
        for (int64_t i = 0; i < kLayerBytes / 8; ++i) words[i] = static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15ull;
      });
    for (std::thread& t : writers) t.join();
  }
  // A fresh random set of `count` ascending tokens for every head.
  void stage(int64_t count) {
    for (int64_t l = 0; l < kLayers; ++l) {
      std::vector<int32_t> counts(kHeads, static_cast<int32_t>(count)), tokens(kHeads * kSelected, 0), slots(tokens);
      for (int64_t h = 0; h < kHeads; ++h) {
        std::vector<int32_t> all(kTokens);
        for (int32_t t = 0; t < kTokens; ++t) all[static_cast<size_t>(t)] = t;
        std::shuffle(all.begin(), all.end(), random);
        std::sort(all.begin(), all.begin() + count);
        for (int64_t i = 0; i < count; ++i) {
          tokens[static_cast<size_t>(h * kSelected + i)] = all[static_cast<size_t>(i)];
          slots[static_cast<size_t>(h * kSelected + i)] = static_cast<int32_t>(i);
        }
      }
      const Request& r = engine.layer(l).request;
      engine.copy(r.counts, counts.data(), kHeads * 4);
      engine.copy(r.tokens, tokens.data(), kHeads * kSelected * 4);
      engine.copy(r.slots, slots.data(), kHeads * kSelected * 4);
    }
  }
  // `ahead` as a decode program: the next layer's request is posted before this one's rows are waited for.
  void post_rounds(int rounds, bool ahead) {
    const int64_t posts = rounds * kLayers;
    for (int64_t i = 0; i < posts; ++i) {
      CLO_CUDA_CHECK(cuda::post_request(of(i % kLayers), program));
      CLO_CUDA_CHECK(test::follow_post(of(i % kLayers), program));
      if (!ahead || i > 0) test::wait_kernel<<<1, 1, 0, program>>>(of((i - ahead) % kLayers));
    }
    if (ahead) test::wait_kernel<<<1, 1, 0, program>>>(of((posts - 1) % kLayers));
  }
  double seconds(bool within, int rounds, bool ahead = true) {
    Timer t;
    if (within) engine.begin(rounds * kLayers);
    t.start(program);
    post_rounds(rounds, ahead);
    t.stop(program);
    const double s = t.seconds();
    finish();
    return s;
  }
  void finish() {
    const std::string why = engine.end();
    if (why.empty()) return;
    std::fprintf(stderr, "%s\n", why.c_str());
    std::exit(1);
  }
  double read_seconds(int times) {
    Timer t;
    t.start(neighbour);
    for (int i = 0; i < times; ++i)
      stream_read<<<kReadBlocks, 512, 0, neighbour>>>(static_cast<const uint4*>(stream_data),
                                                      static_cast<uint4*>(stream_data), kStreamBytes / 16);
    t.stop(neighbour);
    return t.seconds();
  }

  Engine engine;
  std::mt19937_64 random{1};
  cudaStream_t program = nullptr, neighbour = nullptr;
  int32_t* numbers = nullptr;
  void* stream_data = nullptr;  // of the neighbour
};

double best(const std::vector<double>& v) { return *std::min_element(v.begin(), v.end()); }

// The same rows by threads of the CPU; also what they cost the CPU while they do nothing.
void bench_threads(const char* backend, const std::vector<int64_t>& threads, double h2d) {
  const BackendInfo info = find_backend(backend);
  std::fprintf(stderr, "%s: %s\n", backend, info.reason.c_str());
  if (!info.available) return;
  for (const int64_t n : threads) {
    Bench b(backend, n);
    b.stage(kSelected);
    b.seconds(true, 1);
    std::vector<double> s;
    for (int i = 0; i < kRepeats; ++i) s.push_back(b.seconds(true, kRounds) / (kRounds * kLayers));
    const std::string name = std::string(backend) + ", " + std::to_string(n) + " threads: the same rows";
    const bool bar = std::strcmp(backend, "bar") == 0;
    row(name.c_str(), static_cast<double>(kMovedBytes) / best(s) / 1e9, "GB/s", kToDevice, h2d,
        bar && n == 4   ? ">= 0.25"
        : bar && n == 8 ? ">= 0.45"
                        : "-");
    if (n != threads.back()) continue;
    for (int64_t rows : {1, 0}) {
      b.stage(rows);
      s.clear();
      for (int i = 0; i < kRepeats; ++i) s.push_back(b.seconds(true, 50, false) / (50 * kLayers));
      row((std::string(backend) + (rows ? ", one row a head" : ", nothing to move") + ": post to ready").c_str(),
          best(s) * 1e6, "us", "-", 0, "-");
    }
    const std::clock_t start = std::clock();
    std::this_thread::sleep_for(std::chrono::seconds(1));
    row((std::string(backend) + ", " + std::to_string(n) + " idle threads: CPU time a second").c_str(),
        static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC, "s", "-", 0, "-");
    b.finish();
  }
}

// Backend pull, its neighbours and offload; returns the control, GB/s of a contiguous copy to the device.
double bench_pull() {
  Bench b("pull");
  CLO_CUDA_CHECK(cudaMalloc(&b.stream_data, kStreamBytes));
  CLO_CUDA_CHECK(cudaMemset(b.stream_data, 1, kStreamBytes));
  // Control: the same bytes, contiguous, by the copy engine.
  void* device = nullptr;
  CLO_CUDA_CHECK(cudaMalloc(&device, static_cast<size_t>(kLayerBytes)));
  const auto copy_rate = [&](bool up) {
    std::vector<double> s;
    for (int i = 0; i < kRepeats; ++i) {
      Timer t;
      void* host = b.engine.layer(i % kLayers).host_rows;
      t.start(b.program);
      CLO_CUDA_CHECK(cudaMemcpyAsync(up ? device : host, up ? host : device, static_cast<size_t>(kLayerBytes),
                                     cudaMemcpyDefault, b.program));
      t.stop(b.program);
      s.push_back(t.seconds());
    }
    return static_cast<double>(kLayerBytes) / best(s) / 1e9;
  };
  const double h2d = copy_rate(true);
  b.stage(kSelected);
  for (bool resident : {true, false}) {
    std::vector<double> s;
    for (int i = 0; i < kRepeats; ++i) s.push_back(b.seconds(resident, kRounds) / (kRounds * kLayers));
    row(resident ? "pull, resident, 4 blocks: 512-byte rows, 10 % of 128K tokens x 8 heads"
                 : "pull, in line, 8 blocks: the same rows",
        static_cast<double>(kMovedBytes) / best(s) / 1e9, "GB/s", kToDevice, h2d,
        resident ? ">= 0.90" : "-");
  }
  {  // an HBM-bound neighbour
    const int reads = 20;
    b.read_seconds(2);
    std::vector<double> alone, beside, pull;
    for (int i = 0; i < 3; ++i) alone.push_back(b.read_seconds(reads));
    for (int i = 0; i < 3; ++i) {
      const int rounds = 10;  // longer than the reads
      Timer t;
      b.engine.begin(rounds * kLayers);
      t.start(b.program);
      b.post_rounds(rounds, true);
      t.stop(b.program);
      beside.push_back(b.read_seconds(reads));
      pull.push_back(t.seconds());
      b.finish();
    }
    const double bytes = static_cast<double>(kStreamBytes) * reads / 1e9;
    row("HBM-bound kernel beside pull", bytes / best(beside), "GB/s", "the same kernel alone", bytes / best(alone),
        ">= 0.90");
    row("pull beside an HBM-bound kernel", static_cast<double>(kMovedBytes) * 10 * kLayers / best(pull) / 1e9, "GB/s",
        kToDevice, h2d, "-");
    row("time of that pull to time of the kernel beside it", best(pull) / best(beside), "ratio", "-", 0, "-");
  }
  for (int64_t rows : {1, 0}) {  // latency: a request of one row a head, and an empty one
    b.stage(rows);
    std::vector<double> s;
    for (int i = 0; i < kRepeats; ++i) s.push_back(b.seconds(true, 50, false) / (50 * kLayers));
    row(rows ? "post, one row a head, ready" : "post, nothing to move, ready", best(s) * 1e6, "us", "-", 0, "-");
  }
  {  // offload of a prefilled layer
    const double d2h = copy_rate(false);
    std::vector<int32_t> range{0, static_cast<int32_t>(kTokens)};
    int32_t* ends = nullptr;
    CLO_CUDA_CHECK(cudaMalloc(&ends, 8));
    CLO_CUDA_CHECK(cudaMemcpy(ends, range.data(), 8, cudaMemcpyHostToDevice));
    OffloadParams p{1, kHeads, kTokens, kHeadDim, 4, DType::kBF16, device, ends, ends + 1, b.engine.layer(0)};
    std::vector<double> s;
    for (int i = 0; i < kRepeats; ++i) {
      Timer t;
      t.start(b.program);
      CLO_CUDA_CHECK(cuda::offload(p, b.of(i % kLayers), b.program));
      t.stop(b.program);
      s.push_back(t.seconds());
    }
    row("offload of a layer: 128K tokens x 8 heads, 512-byte rows", static_cast<double>(kLayerBytes) / best(s) / 1e9,
        "GB/s", "contiguous cudaMemcpyAsync to the host", d2h, ">= 0.90");
    p.end = ends;
    s.clear();
    for (int i = 0; i < kRepeats; ++i) {
      Timer t;
      t.start(b.program);
      for (int n = 0; n < 100; ++n) CLO_CUDA_CHECK(cuda::offload(p, b.of(0), b.program));
      t.stop(b.program);
      s.push_back(t.seconds() / 100);
    }
    row("offload of nothing", best(s) * 1e6, "us", "-", 0, "-");
  }
  CLO_CUDA_CHECK(cudaFree(device));
  b.finish();
  return h2d;
}

}  // namespace

int main() {
  const double h2d = bench_pull();
  bench_threads("bar", {1, 2, 4, 8}, h2d);
  bench_threads("staged", {4, 16}, h2d);
  return 0;
}
