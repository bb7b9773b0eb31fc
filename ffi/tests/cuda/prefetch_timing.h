// Times of calls on a PrefetchProblem.
//
// Several layers take turns, so that their codes do not stay in the L2 cache. A figure is what a graph of many calls takes
// more than the same graph without them: between two calls a kernel waits for a fixed time, in which the transfer kernel
// delivers the rows. Beside a transfer kernel that copies all the time (it gets the next request while it still serves the
// one before) a call is timed between two event nodes instead, which adds about 2 us.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "cuda/select_topk.cuh"
#include "prefetch_problem.h"

namespace clo::test {

constexpr int kReplays = 5;

inline __global__ void pause_kernel(uint64_t nanoseconds) {
  const uint64_t start = cuda::global_nanoseconds();
  while (cuda::global_nanoseconds() - start < nanoseconds) {
  }
}

enum class Stage { kLookup, kSelection, kWhole };
enum class Transfers { kInLine, kWaiting, kCopying };  // the last two: by the resident kernel

class PrefetchTiming : public PrefetchProblem {
 public:
  PrefetchTiming(int64_t batch, int num_layers)
      : PrefetchProblem(batch, num_layers), bits(heads * kTokens / 32, 0u) {
    for (int i = 0; i < 2 * kRounds * layers; ++i) {
      events.emplace_back();
      CLO_CUDA_CHECK(cudaEventCreate(&events.back()));
    }
    CLO_CUDA_CHECK(cudaEventCreate(&start));
    CLO_CUDA_CHECK(cudaEventCreate(&stop));
    nothing = time([](int, int) {}, {}, {}, false);
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
      CLO_CUDA_CHECK(cuda::prefetch(params(layer, round, retriever, whole), ref(layer), workspace, stream));
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
      CLO_CUDA_CHECK(cuda::prefetch(p, ref(layer, false), workspace, stream));
      return;
    }
    CLO_CUDA_CHECK(cuda::lookup_and_encode(p.lookup, p.select, nullptr, workspace, stream));
    if (stage == Stage::kLookup) return;
    CLO_CUDA_CHECK(cuda::select_encoded(p.select, {{nullptr, nullptr}, false, bits.device, nullptr, 0}, workspace, stream));
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

  Array<uint32_t> bits;
  std::vector<cudaEvent_t> events;
  cudaEvent_t start = nullptr, stop = nullptr;
  double nothing = 0;
};

}  // namespace clo::test
