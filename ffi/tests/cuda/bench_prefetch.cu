// Times of prefetch and of its stages. One line a figure, tab-separated: name, value, unit, name of the control, control,
// goal ("-" where there is none); clo_jax/bench/native.py makes a results file of them. Other lines are for people.
//
// Several layers take turns, so that their codes do not stay in the L2 cache. A figure is what a graph of many calls takes
// more than the same graph without them: between two calls a kernel waits for a fixed time, in which the transfer kernel
// delivers the rows. Beside a transfer kernel that copies all the time (it gets the next request while it still serves the
// one before) a call is timed between two event nodes instead, which adds about 2 us.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "program_kernels.cuh"
#include "clo/params.h"
#include "cuda/difference.h"
#include "cuda/flags.cuh"
#include "cuda/kernels.h"
#include "cuda/select_topk.cuh"
#include "device.h"
#include "host/engine.h"

namespace {

using clo::DType;
using clo::LayerView;
using clo::Retriever;
using clo::test::Array;
using clo::test::fill_kernel;
using clo::test::read_kernel;
using clo::test::wait_kernel;

constexpr int64_t kHeads = 8, kGroup = 4, kDim = 128, kBits = 256, kTokens = 131072, kSelected = 13107, kSlots = 19660;
constexpr int kRounds = 8, kReplays = 5;

void row(const std::string& name, double us, double control, const char* control_name, const char* goal) {
  std::printf("%s\t%.4g\tus\t%s\t%.4g\t%s\n", name.c_str(), us, control_name, control, goal);
  std::fflush(stdout);
}

__global__ void pause_kernel(uint64_t nanoseconds) {
  const uint64_t start = clo::cuda::global_nanoseconds();
  while (clo::cuda::global_nanoseconds() - start < nanoseconds) {
  }
}

std::vector<int32_t> upto(int n) {
  std::vector<int32_t> numbers;
  for (int32_t i = 0; i < n; ++i) numbers.push_back(i);
  return numbers;
}

enum class Stage { kLookup, kSelection, kWhole };
enum class Transfers { kInLine, kWaiting, kCopying };  // the last two: by the resident kernel

class Bench {
 public:
  Bench(int64_t batch, int num_layers)
      : B(batch),
        layers(num_layers),
        heads(static_cast<size_t>(batch * kHeads)),
        engine(config(batch, num_layers)),
        numbers(upto(num_layers)),
        label(layers * heads * kGroup * kDim * 2, uint8_t{0}),
        age(layers * heads, -1),
        max_age(static_cast<size_t>(batch), 1 << 30),
        begin(static_cast<size_t>(batch), 0),
        end(static_cast<size_t>(batch), static_cast<int32_t>(kTokens)),
        k(static_cast<size_t>(batch), static_cast<int32_t>(kSelected)),
        capacity(static_cast<size_t>(batch), static_cast<int32_t>(kSlots)),
        importance(static_cast<size_t>(kHeads * kGroup), 1.0f),
        thresholds(static_cast<size_t>(num_layers * kHeads), 2.0f),
        weights(clo::test::normal_floats(random, static_cast<size_t>(kHeads * kDim * kBits), 0.1f)),
        mean(heads * kDim, 0.1f),
        lse(heads * kGroup, 3.0f),
        factors(heads * kTokens, uint16_t{0x2e00}),
        hit(heads, uint8_t{0}),
        sink(1, 0u) {
    CLO_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int i = 0; i < layers; ++i) {
      uint32_t* words = nullptr;
      CLO_CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&words), code_bytes()));
      fill_kernel<<<1024, 256, 0, stream>>>(words, code_bytes() / 4, static_cast<uint32_t>(i));
      codes.push_back(words);
    }
    CLO_CUDA_CHECK(cudaMalloc(&workspace, clo::cuda::prefetch_workspace_bytes(params(0, 0, Retriever::kSign, false))));
    for (int i = 0; i < 2 * kRounds * layers; ++i) {
      events.emplace_back();
      CLO_CUDA_CHECK(cudaEventCreate(&events.back()));
    }
    CLO_CUDA_CHECK(cudaDeviceSynchronize());
    CLO_CUDA_CHECK(cudaEventCreate(&start));
    CLO_CUDA_CHECK(cudaEventCreate(&stop));
    nothing = time([](int, int) {}, {}, {}, false);
  }

  static clo::EngineConfig config(int64_t batch, int num_layers) {
    clo::EngineConfig c;
    c.kv_heads.assign(static_cast<size_t>(num_layers), kHeads);
    c.batch = batch;
    c.max_tokens = kTokens;
    c.num_slots = kSlots;
    c.head_dim = kDim;
    c.dtype = DType::kBF16;
    c.backend = "pull";
    return c;
  }

  size_t code_bytes() const { return heads * kTokens * kBits / 8; }

  // Queries of the rounds lie on a circle around a fixed one: after the last comes the first.
  void make_queries(float radius) {
    queries.clear();
    std::mt19937 r(9);
    const size_t n = static_cast<size_t>(layers) * heads * kGroup * kDim;
    const auto centre = clo::test::normal_floats(r, n), x = clo::test::normal_floats(r, n), y = clo::test::normal_floats(r, n);
    for (int round = 0; round < kRounds; ++round) {
      const float angle = 6.2831853f * static_cast<float>(round) / kRounds;
      std::vector<uint8_t> bytes(n * 2);
      for (size_t i = 0; i < n; ++i) {
        clo::BF16 value;
        clo::from_float(centre[i] + radius * (std::cos(angle) * x[i] + std::sin(angle) * y[i]), &value);
        std::memcpy(bytes.data() + 2 * i, &value, 2);
      }
      queries.push_back(std::make_unique<Array<uint8_t>>(std::move(bytes)));
    }
  }

  clo::PrefetchParams params(int layer, int round, Retriever retriever, bool whole) const {
    const auto at = static_cast<size_t>(layer);
    const void* query = queries.empty() ? nullptr : queries[round]->device + at * heads * kGroup * kDim * 2;
    clo::PrefetchParams p;
    p.lookup = {B, kHeads, kGroup, kDim, DType::kBF16, query, label.device + at * heads * kGroup * kDim * 2,
                age.device + at * heads, importance.device, thresholds.device + at * kHeads, max_age.device, hit.device};
    p.select = {B, kHeads, kGroup, kDim, kBits, kTokens, kSelected, DType::kBF16, retriever, 0.08838835f, query,
                weights.device, mean.device, lse.device, codes[at], factors.device, nullptr, begin.device, end.device,
                k.device, hit.device, nullptr};
    p.capacity = capacity.device;
    p.whole = whole;
    p.view = engine.layer(layer);
    return p;
  }

  clo::cuda::EngineRef ref(int layer, bool transfers = true) const {
    clo::cuda::EngineRef r = *engine.device();
    r.layer.index = numbers.device + layer;
    if (!transfers) {
      r.flags = nullptr;
      r.control = nullptr;
    }
    return r;
  }

  using Call = std::function<void(int layer, int round)>;

  // Microseconds of one call of `run`, by events around each. `before` and `after` are not timed. With `resident`, beside
  // the transfer kernel.
  double time(const Call& run, const Call& before, const Call& after, bool resident) {
    size_t event = 0;
    double sum = 0;
    replay(
        [&](int layer, int round) {
          if (before) before(layer, round);
          CLO_CUDA_CHECK(cudaEventRecordWithFlags(events[event++], stream, cudaEventRecordExternal));
          run(layer, round);
          CLO_CUDA_CHECK(cudaEventRecordWithFlags(events[event++], stream, cudaEventRecordExternal));
          if (after) after(layer, round);
        },
        resident,
        [&](double) {
          for (size_t e = 0; e < event; e += 2) {
            float ms = 0;
            CLO_CUDA_CHECK(cudaEventElapsedTime(&ms, events[e], events[e + 1]));
            sum += ms * 1000;
          }
        });
    return sum / (kReplays * kRounds * layers) - nothing;
  }

  // Microseconds that one call of `run` adds to a stream of kernels that take `pause` each.
  double cost(const Call& run, double pause = 30, bool resident = false) {
    const auto total = [&](bool with_it) {
      std::vector<double> times;
      replay(
          [&](int layer, int round) {
            if (with_it) run(layer, round);
            pause_kernel<<<1, 1, 0, stream>>>(static_cast<uint64_t>(pause * 1000));
          },
          resident && with_it, [&](double us) { times.push_back(us); });
      return *std::min_element(times.begin(), times.end()) / (kRounds * layers);
    };
    const double without = total(false);
    return total(true) - without;
  }

  // Captures calls of `body` for all rounds and layers, replays them, and tells how long each replay took.
  void replay(const Call& body, bool resident, const std::function<void(double)>& done) {
    cudaGraph_t graph;
    cudaGraphExec_t program;
    CLO_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int round = 0; round < kRounds; ++round)
      for (int layer = 0; layer < layers; ++layer) body(layer, round);
    CLO_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    CLO_CUDA_CHECK(cudaGraphInstantiate(&program, graph, 0));
    for (int i = 0; i <= kReplays; ++i) {
      const bool warm = i == 0;
      if (resident && !warm) engine.begin(kRounds * layers);
      CLO_CUDA_CHECK(cudaEventRecord(start, stream));
      CLO_CUDA_CHECK(cudaGraphLaunch(program, stream));
      CLO_CUDA_CHECK(cudaEventRecord(stop, stream));
      CLO_CUDA_CHECK(cudaStreamSynchronize(stream));
      finish();
      if (warm) {
        engine.clear_counters();
        continue;
      }
      float ms = 0;
      CLO_CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
      done(ms * 1000);
    }
    CLO_CUDA_CHECK(cudaGraphExecDestroy(program));
    CLO_CUDA_CHECK(cudaGraphDestroy(graph));
  }

  void wait(int layer) { wait_kernel<<<1, 1, 0, stream>>>(ref(layer)); }

  double prefetch(Retriever retriever, bool whole, Transfers transfers) {
    const auto run = [&](int layer, int round) {
      CLO_CUDA_CHECK(clo::cuda::prefetch(params(layer, round, retriever, whole), ref(layer), workspace, stream));
    };
    if (transfers == Transfers::kCopying)
      return time(run, {}, [&](int layer, int) { wait((layer + layers - 1) % layers); }, true);
    // Long enough for the transfer of all rows at 45 GB/s.
    const double pause = 100 + (whole ? 1.0 : 0.7) * static_cast<double>(heads * kSelected) * 512 / 45e3;
    return cost(run, transfers == Transfers::kInLine ? 30 : pause, transfers == Transfers::kWaiting);
  }

  void run_stage(Retriever retriever, Stage stage, int layer, int round) {
    const clo::PrefetchParams p = params(layer, round, retriever, false);
    if (stage == Stage::kWhole) {
      CLO_CUDA_CHECK(clo::cuda::prefetch(p, ref(layer, false), workspace, stream));
      return;
    }
    auto* memory = static_cast<unsigned char*>(workspace);
    auto* bits = reinterpret_cast<uint32_t*>(memory + 256);
    unsigned char* own = memory + 256 + heads * kTokens / 8;
    CLO_CUDA_CHECK(clo::cuda::lookup_and_encode(p.lookup, p.select, reinterpret_cast<uint32_t*>(memory), own, stream));
    if (stage == Stage::kLookup) return;
    CLO_CUDA_CHECK(clo::cuda::select_encoded(p.select, {{nullptr, nullptr}, false, bits, nullptr, 0}, own, stream));
  }

  double stage(Retriever retriever, Stage stage) {
    return cost([&](int layer, int round) { run_stage(retriever, stage, layer, round); });
  }

  double read() {
    return cost([&](int layer, int) {
      read_kernel<<<264, 1024, 0, stream>>>(reinterpret_cast<const uint4*>(codes[static_cast<size_t>(layer)]),
                                            code_bytes() / 16, sink.device);
    });
  }

  double copy(size_t bytes) {
    return cost([&](int layer, int) {
      const LayerView v = engine.layer(layer);
      CLO_CUDA_CHECK(cudaMemcpyAsync(v.selected_rows, v.host_rows, bytes, cudaMemcpyHostToDevice, stream));
    });
  }

  double new_share() const {
    const clo::Counters c = engine.counters();
    return static_cast<double>(c.rows_posted) / static_cast<double>(c.rows_selected);
  }

  // "n % new rows", of the last call of prefetch: what it was, not what was sought.
  std::string new_rows() const { return std::to_string(std::lround(100 * new_share())) + " % new rows"; }

  // A radius with about this share of new rows at each step of that retriever.
  void seek(Retriever retriever, double share) {
    float low = 0, high = 2;
    for (int i = 0; i < 7; ++i) {
      make_queries((low + high) / 2);
      stage(retriever, Stage::kWhole);
      (new_share() < share ? low : high) = (low + high) / 2;
    }
    std::printf("queries: radius %.3f, new rows %.3f of the selection\n", (low + high) / 2, new_share());
  }

  void finish() {
    const std::string why = engine.end();
    if (why.empty()) return;
    std::fprintf(stderr, "%s\n", why.c_str());
    std::exit(1);
  }

  std::mt19937 random{5};
  int64_t B;
  int layers;
  size_t heads;
  clo::Engine engine;
  Array<int32_t> numbers;
  Array<uint8_t> label;
  Array<int32_t> age, max_age, begin, end, k, capacity;
  Array<float> importance, thresholds, weights, mean, lse;
  Array<uint16_t> factors;
  Array<uint8_t> hit;
  Array<uint32_t> sink;
  cudaStream_t stream = nullptr;
  std::vector<uint32_t*> codes;
  std::vector<std::unique_ptr<Array<uint8_t>>> queries;
  std::vector<cudaEvent_t> events;
  cudaEvent_t start = nullptr, stop = nullptr;
  void* workspace = nullptr;
  double nothing = 0;
};

const char* name_of(Retriever r) { return r == Retriever::kHata ? "hata" : "sign"; }

}  // namespace

int main() {
  const char* const kRead = "plain read of the codes of all heads";
  const char* const kCopy = "contiguous cudaMemcpyAsync of the bytes moved";
  const auto rows_us = [](Bench& b, double share) {
    return b.copy(static_cast<size_t>(share * static_cast<double>(b.heads * kSelected)) * 512);
  };
  {
    Bench b(1, 6);
    const double read = b.read();
    std::printf("two events with nothing between them %.2f us (taken off), plain read %.2f us\n", b.nothing, read);
    for (Retriever r : {Retriever::kHata, Retriever::kSign}) {
      b.seek(r, 0.26);
      const double lookup = b.stage(r, Stage::kLookup), selection = b.stage(r, Stage::kSelection);
      const double whole = b.stage(r, Stage::kWhole);
      std::printf("%s: lookup and projection %.2f us, selection %.2f us, difference %.2f us, whole %.2f us (without transfers)\n",
                  name_of(r), lookup, selection - lookup, whole - selection, whole);
      const std::string prefix = std::string("prefetch, ") + name_of(r) + ", 8 x 131072, every head missed";
      const double waiting = b.prefetch(r, false, Transfers::kWaiting);
      row(prefix + ", " + b.new_rows() + ", beside a transfer kernel that waits", waiting, read, kRead, "<= 30 us");
      const double copying = b.prefetch(r, false, Transfers::kCopying);
      row(prefix + ", " + b.new_rows() + ", beside one that copies", copying, read, kRead, "-");
      row(prefix + ", whole sets, beside a transfer kernel that waits", b.prefetch(r, true, Transfers::kWaiting), read, kRead,
          "-");
      const double in_line = b.prefetch(r, false, Transfers::kInLine), share = b.new_share();
      const std::string moved = b.new_rows();
      row(prefix + ", " + moved + ", transfer in line", in_line, rows_us(b, share), kCopy, "-");
    }
    row("prefetch, hata, 8 x 131072, every head missed, whole sets, transfer in line", b.prefetch(Retriever::kHata, true, Transfers::kInLine),
        rows_us(b, 1), kCopy, "-");
    b.make_queries(4);
    const double other = b.prefetch(Retriever::kHata, false, Transfers::kWaiting);
    row("prefetch, hata, 8 x 131072, every head missed, " + b.new_rows() + ", beside a transfer kernel that waits", other, read,
        kRead, "-");
    // The first two heads of a layer miss, of one layer the first only.
    for (size_t i = 0; i < b.thresholds.host.size(); ++i)
      b.thresholds.host[i] = i % kHeads < (i / kHeads == 0 ? 1 : 2) ? 2.0f : -2.0f;
    b.thresholds.upload();
    b.seek(Retriever::kHata, 0.26);
    const double few = b.prefetch(Retriever::kHata, false, Transfers::kWaiting);
    const clo::Counters c = b.engine.counters();
    row("prefetch, hata, 8 x 131072, 23 % of the heads missed, " + b.new_rows() + ", beside a transfer kernel that waits", few,
        read, kRead, "-");
    std::printf("  missed %.3f of the heads\n", static_cast<double>(c.misses) / static_cast<double>(c.misses + c.hits));
    std::fill(b.thresholds.host.begin(), b.thresholds.host.end(), -2.0f);
    b.thresholds.upload();
    row("prefetch, 8 x 131072, no head missed, beside a transfer kernel that waits", b.prefetch(Retriever::kHata, false, Transfers::kWaiting), read,
        kRead, "-");
  }
  {
    Bench b(4, 2);
    const double read = b.read();
    for (Retriever r : {Retriever::kHata, Retriever::kSign}) {
      b.seek(r, 0.26);
      const double lookup = b.stage(r, Stage::kLookup), selection = b.stage(r, Stage::kSelection);
      const double whole = b.stage(r, Stage::kWhole);
      std::printf("%s, B 4: lookup and projection %.2f us, selection %.2f us, difference %.2f us, whole %.2f us\n", name_of(r),
                  lookup, selection - lookup, whole - selection, whole);
      const double waiting = b.prefetch(r, false, Transfers::kWaiting);
      row(std::string("prefetch, ") + name_of(r) + ", 32 x 131072, every head missed, " + b.new_rows() +
              ", beside a transfer kernel that waits",
          waiting, read, kRead, "-");
    }
  }
  return 0;
}
