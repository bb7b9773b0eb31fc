// Times of the lookup, the selection and the prefetch kernels, each beside a plain read of the same bytes in the same run.
//
// Every figure is the median over replays of a graph that runs the kernel over enough sets of inputs in turn that they do
// not fit in the L2 cache, divided by their number. One line a figure, tab-separated: name, value, unit, name of the
// control, control, goal ("-" where there is none). clo_jax/bench/native.py makes a results file of them; beside each
// stands a line for people. With the argument `goals` only what has a goal.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>

#include "clo/params.h"
#include "cuda/kernels.h"
#include "cuda/select_topk.cuh"
#include "program_kernels.cuh"
#include "device.h"

namespace {

using clo::DType;
using clo::Retriever;
using clo::test::fill_kernel;
using clo::test::read_kernel;

template <typename T>
T* allocate(size_t count) {
  T* p = nullptr;
  CLO_CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&p), count * sizeof(T) + 256));
  return p;
}

constexpr int kRounds = 2;  // through all sets in a graph

// Microseconds of one of `sets` calls of `run(set, stream)`; `call` counts them from 0 to kRounds * sets. `prepare` is
// called before every replay, outside of the time.
double time(int sets, const std::function<void(int set, int call, cudaStream_t)>& run,
            const std::function<void(cudaStream_t)>& prepare = {}) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  cudaEvent_t start, stop;
  CLO_CUDA_CHECK(cudaStreamCreate(&stream));
  CLO_CUDA_CHECK(cudaEventCreate(&start));
  CLO_CUDA_CHECK(cudaEventCreate(&stop));
  CLO_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int call = 0; call < kRounds * sets; ++call) run(call % sets, call, stream);
  CLO_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  CLO_CUDA_CHECK(cudaGraphInstantiate(&replay, graph, 0));
  std::vector<float> times;
  for (int i = 0; i < 28; ++i) {
    float ms = 0;
    if (prepare) prepare(stream);
    CLO_CUDA_CHECK(cudaEventRecord(start, stream));
    CLO_CUDA_CHECK(cudaGraphLaunch(replay, stream));
    CLO_CUDA_CHECK(cudaEventRecord(stop, stream));
    CLO_CUDA_CHECK(cudaEventSynchronize(stop));
    CLO_CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
    if (i >= 3) times.push_back(ms * 1000 / static_cast<float>(kRounds * sets));
  }
  CLO_CUDA_CHECK(cudaGraphExecDestroy(replay));
  CLO_CUDA_CHECK(cudaGraphDestroy(graph));
  CLO_CUDA_CHECK(cudaEventDestroy(start));
  CLO_CUDA_CHECK(cudaEventDestroy(stop));
  CLO_CUDA_CHECK(cudaStreamDestroy(stream));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// One figure in microseconds, for the results file and for people; goal 0: none.
void row(const std::string& name, double us, double control, double goal) {
  char bound[32] = "-";
  if (goal > 0) std::snprintf(bound, sizeof bound, "<= %g us", goal);
  std::printf("%s\t%.6g\tus\tplain read of the same bytes\t%.6g\t%s\n", name.c_str(), us, control, bound);
  std::printf("%-64s %8.2f us   read %8.2f us   ratio %5.2f   %s %s\n", name.c_str(), us, control, us / control, bound,
              goal <= 0 ? "" : us <= goal ? "met" : "MISSED");
  std::fflush(stdout);
}

// Inputs of selections, several sets of them.
struct Sets {
  Sets(int64_t batch, int64_t group, int64_t tokens, int64_t k)
      : B(batch), Ko(8), G(group), D(128), R(256), S(tokens), k_max(k) {
    const size_t heads = static_cast<size_t>(B * Ko);
    code_bytes = heads * S * R / 8;
    count = std::max<int>(2, static_cast<int>((size_t{300} << 20) / code_bytes) + 1);
    std::mt19937 random(4);
    for (int i = 0; i < count; ++i) {
      codes.push_back(allocate<uint32_t>(code_bytes / 4));
      factors.push_back(allocate<uint16_t>(heads * S));
      fill_kernel<<<1024, 256>>>(codes.back(), code_bytes / 4, static_cast<uint32_t>(i));
      fill_factors(factors.back(), heads * S);
      queries.push_back(std::make_unique<clo::test::Array<uint8_t>>(
          clo::test::normal(random, heads * G * D, DType::kBF16)));
      weights.push_back(std::make_unique<clo::test::Array<float>>(
          clo::test::normal_floats(random, static_cast<size_t>(Ko * D * R), 0.1f)));
    }
    lse = std::make_unique<clo::test::Array<float>>(heads * G, 3.0f);
    mean = std::make_unique<clo::test::Array<float>>(heads * D, 0.1f);
    begin = std::make_unique<clo::test::Array<int32_t>>(static_cast<size_t>(B), 0);
    end = std::make_unique<clo::test::Array<int32_t>>(static_cast<size_t>(B), static_cast<int32_t>(S));
    k_wanted = std::make_unique<clo::test::Array<int32_t>>(static_cast<size_t>(B), static_cast<int32_t>(k_max));
    skip = std::make_unique<clo::test::Array<uint8_t>>(heads, uint8_t{0});
    indices = allocate<int32_t>(heads * k_max);
    sink = allocate<uint32_t>(1);
    CLO_CUDA_CHECK(cudaDeviceSynchronize());
  }
  ~Sets() {
    for (void* p : codes) cudaFree(p);
    for (void* p : factors) cudaFree(p);
    cudaFree(indices);
    cudaFree(sink);
  }

  static void fill_factors(uint16_t* to, size_t n) {
    std::vector<uint16_t> host(n);
    std::mt19937 random(5);
    for (auto& x : host) x = static_cast<uint16_t>(0x2c00 + random() % 0x400);
    CLO_CUDA_CHECK(cudaMemcpy(to, host.data(), n * 2, cudaMemcpyHostToDevice));
  }

  clo::SelectTopkParams params(int set, Retriever retriever) const {
    return {B, Ko, G, D, R, S, k_max, DType::kBF16, retriever, 0.08838835f, queries[set]->device, weights[set]->device,
            mean->device, lse->device, codes[set], factors[set], nullptr, begin->device, end->device, k_wanted->device,
            skip->device, indices};
  }

  int64_t B, Ko, G, D, R, S, k_max;
  size_t code_bytes;
  int count;
  std::vector<uint32_t*> codes;
  std::vector<uint16_t*> factors;
  std::vector<std::unique_ptr<clo::test::Array<uint8_t>>> queries;
  std::vector<std::unique_ptr<clo::test::Array<float>>> weights;
  std::unique_ptr<clo::test::Array<float>> lse, mean;
  std::unique_ptr<clo::test::Array<int32_t>> begin, end, k_wanted;
  std::unique_ptr<clo::test::Array<uint8_t>> skip;
  int32_t* indices;
  uint32_t* sink;
};

void selection(const char* name, int64_t B, int64_t G, int64_t S, int64_t k, double hata_goal, double sign_goal) {
  const Sets sets(B, G, S, k);
  const auto read = [&](const std::vector<uint32_t*>& what, size_t bytes) {
    return time(sets.count, [&](int set, int, cudaStream_t stream) {
      read_kernel<<<264, 1024, 0, stream>>>(reinterpret_cast<const uint4*>(what[set]), bytes / 16, sets.sink);
    });
  };
  const double codes = read(sets.codes, sets.code_bytes);
  for (Retriever retriever : {Retriever::kHata, Retriever::kSign}) {
    const bool hata = retriever == Retriever::kHata;
    const std::string title = std::string("select_topk ") + (hata ? "hata, " : "sign, ") + name;
    // sign reads a factor beside each code, a sixteenth of the bytes more.
    const double control = hata ? codes : codes * 17 / 16;
    std::vector<uint8_t*> workspaces;  // the second half uses up what the first has left
    for (int i = 0; i < kRounds * sets.count; ++i)
      workspaces.push_back(allocate<uint8_t>(clo::cuda::select_topk_workspace_bytes(sets.params(0, retriever))));
    const auto project = [&](int set, int call, cudaStream_t stream) {
      CLO_CUDA_CHECK(clo::cuda::encode(sets.params(set, retriever), workspaces[static_cast<size_t>(call)], stream));
    };
    const double alone = time(
        sets.count,
        [&](int set, int call, cudaStream_t stream) {
          const clo::cuda::SelectOptions options{{nullptr, nullptr}, true, nullptr, nullptr, 0};
          CLO_CUDA_CHECK(clo::cuda::select_encoded(sets.params(set, retriever), options,
                                                   workspaces[static_cast<size_t>(call)], stream));
        },
        [&](cudaStream_t stream) {
          for (int call = 0; call < kRounds * sets.count; ++call) project(call % sets.count, call, stream);
        });
    row(title + ", score and top-k", alone, control, hata ? hata_goal : sign_goal);
    row(title + ", the projection of the queries", time(sets.count, project), control, 0);
    row(title + ", both", time(sets.count, [&](int set, int call, cudaStream_t stream) {
          CLO_CUDA_CHECK(clo::cuda::select_topk(sets.params(set, retriever), workspaces[static_cast<size_t>(call)], stream));
        }), control, 0);
    for (uint8_t* workspace : workspaces) CLO_CUDA_CHECK(cudaFree(workspace));
  }
}

void lookup(int64_t B) {
  constexpr int64_t K = 8, G = 4, D = 128;
  constexpr int kSets = 32;
  std::mt19937 random(6);
  const auto heads = static_cast<size_t>(B * K);
  clo::test::Array<float> importance(static_cast<size_t>(K * G), 1.0f), thresholds(static_cast<size_t>(K), 0.8f);
  clo::test::Array<int32_t> max_age(static_cast<size_t>(B), 1 << 30);
  std::vector<std::unique_ptr<clo::test::Array<uint8_t>>> queries, labels;
  std::vector<std::unique_ptr<clo::test::Array<int32_t>>> ages;
  for (int i = 0; i < kSets; ++i) {
    queries.push_back(std::make_unique<clo::test::Array<uint8_t>>(clo::test::normal(random, heads * G * D, DType::kBF16)));
    labels.push_back(std::make_unique<clo::test::Array<uint8_t>>(clo::test::normal(random, heads * G * D, DType::kBF16)));
    ages.push_back(std::make_unique<clo::test::Array<int32_t>>(heads, -1));
  }
  clo::test::Array<uint8_t> hit(heads, uint8_t{0});
  clo::test::Array<uint32_t> sink(1, 0u);
  const auto run = [&](const float* threshold) {
    return time(kSets, [&](int set, int, cudaStream_t stream) {
      CLO_CUDA_CHECK(clo::cuda::cache_lookup({B, K, G, D, DType::kBF16, queries[set]->device, labels[set]->device,
                                              ages[set]->device, importance.device, threshold, max_age.device, hit.device},
                                             stream));
    });
  };
  const double control = time(kSets, [&](int set, int, cudaStream_t stream) {
    const size_t count = labels[set]->bytes() / 16;
    const auto blocks = static_cast<unsigned>((count + 4095) / 4096);
    read_kernel<<<blocks, 1024, 0, stream>>>(reinterpret_cast<const uint4*>(labels[set]->device), count, sink.device);
    // The kernel reads queries too; one launch reads half of its bytes, which favours the control.
  });
  clo::test::Array<float> never(static_cast<size_t>(K), 2.0f);
  const std::string name = "lookup + label update, B " + std::to_string(B) + " H 32 K 8";
  row(name + ", all miss", run(never.device), control, 5);
  row(name + ", all hit", run(thresholds.device), control, 5);

  // The same with the projection of the queries, as a prefetch begins.
  clo::SelectTopkParams select{};
  select.batch = B;
  select.kv_heads = K;
  select.group = G;
  select.head_dim = D;
  select.bits = 256;
  select.max_tokens = 131072;
  select.k_max = 13107;
  select.dtype = DType::kBF16;
  select.retriever = Retriever::kHata;
  clo::test::Array<int32_t> wanted(static_cast<size_t>(B), 13107);
  select.k = wanted.device;
  select.skip = hit.device;
  std::vector<std::unique_ptr<clo::test::Array<float>>> weights;
  for (int i = 0; i < kSets; ++i)
    weights.push_back(std::make_unique<clo::test::Array<float>>(static_cast<size_t>(K * D * select.bits), 0.1f));
  auto* workspace = allocate<uint8_t>(clo::cuda::select_topk_workspace_bytes(select));
  const auto both = [&](const float* threshold) {
    return time(kSets, [&](int set, int, cudaStream_t stream) {
      const clo::CacheLookupParams p{B, K, G, D, DType::kBF16, queries[set]->device, labels[set]->device, ages[set]->device,
                                     importance.device, threshold, max_age.device, hit.device};
      clo::SelectTopkParams s = select;
      s.query = p.query;
      s.weights = weights[set]->device;
      CLO_CUDA_CHECK(clo::cuda::lookup_and_encode(p, s, nullptr, workspace, stream));
    });
  };
  row(name + " and projection of the queries, all miss", both(never.device), control, 0);
  row(name + " and projection of the queries, all hit", both(thresholds.device), control, 0);
  CLO_CUDA_CHECK(cudaFree(workspace));
}

void prefetch(int64_t B, int64_t S, int64_t k) {
  Sets sets(B, 4, S, k);
  const auto heads = static_cast<size_t>(B * sets.Ko);
  const int64_t C = k * 3 / 2;
  clo::test::Array<int32_t> tokens(heads * C, -1), counts(heads, 0), moves(heads, 0), from(heads * C, 0), to(heads * C, 0);
  clo::test::Array<uint16_t> last(heads * C, uint16_t{0}), refreshes(heads, uint16_t{0});
  const clo::LayerView view{B, sets.Ko, S, C, sets.D, DType::kBF16, clo::RowFormat::kPlain, nullptr, nullptr,
                            tokens.device, last.device, counts.device, refreshes.device,
                            {moves.device, from.device, to.device}};
  clo::test::Array<clo::LayerView> views(std::vector<clo::LayerView>{view});
  clo::test::Array<int32_t> layer(1, 0), max_age(static_cast<size_t>(B), 0);
  clo::test::Array<int32_t> capacity(static_cast<size_t>(B), static_cast<int32_t>(C));
  clo::test::Array<int32_t> age(heads, -1);
  clo::test::Array<float> importance(static_cast<size_t>(sets.Ko * sets.G), 1.0f);
  clo::test::Array<float> thresholds(static_cast<size_t>(sets.Ko), 2.0f);
  clo::test::Array<uint8_t> label(heads * sets.G * sets.D * 2, uint8_t{0});
  const clo::cuda::EngineRef engine{{views.device, layer.device}, nullptr, nullptr, nullptr, 0, nullptr};
  const auto params = [&](int set) {
    clo::PrefetchParams p;
    p.select = sets.params(set, Retriever::kHata);
    p.select.skip = sets.skip->device;
    p.lookup = {B, sets.Ko, sets.G, sets.D, DType::kBF16, p.select.query, label.device, age.device, importance.device,
                thresholds.device, max_age.device, sets.skip->device};
    p.capacity = capacity.device;
    p.whole = false;
    p.view = view;
    return p;
  };
  auto* workspace = allocate<uint8_t>(clo::cuda::prefetch_workspace_bytes(params(0)));
  const double us = time(sets.count, [&](int set, int, cudaStream_t stream) {
    CLO_CUDA_CHECK(clo::cuda::prefetch(params(set), engine, workspace, stream));
  });
  const double control = time(sets.count, [&](int set, int, cudaStream_t stream) {
    read_kernel<<<264, 1024, 0, stream>>>(reinterpret_cast<const uint4*>(sets.codes[set]), sets.code_bytes / 16, sets.sink);
  });
  row("prefetch, all heads miss, B " + std::to_string(B) + " 8 x " + std::to_string(S) + " k " + std::to_string(k), us,
        control, 0);
  CLO_CUDA_CHECK(cudaFree(workspace));
}

void encode(int64_t N) {
  constexpr int64_t K = 8, D = 128, R = 256;
  std::mt19937 random(7);
  clo::test::Array<uint8_t> x(clo::test::normal(random, static_cast<size_t>(K * N * D), DType::kBF16));
  clo::test::Array<float> weights(clo::test::normal_floats(random, static_cast<size_t>(K * D * R)));
  clo::test::Array<float> mean(static_cast<size_t>(K * D), 0.0f);
  auto* codes = allocate<uint32_t>(static_cast<size_t>(K * N * R / 32));
  auto* factors = allocate<uint16_t>(static_cast<size_t>(K * N));
  auto* sink = allocate<uint32_t>(1);
  const double us = time(1, [&](int, int, cudaStream_t stream) {
    const clo::HashEncodeParams p{1, K, N, D, R, DType::kBF16, x.device, weights.device, mean.device, codes, factors};
    CLO_CUDA_CHECK(clo::cuda::hash_encode(p, stream));
  });
  const double control = time(1, [&](int, int, cudaStream_t stream) {
    read_kernel<<<264, 1024, 0, stream>>>(reinterpret_cast<const uint4*>(x.device), x.bytes() / 16, sink);
  });
  row("hash_encode 8 x " + std::to_string(N) + " keys", us, control, 0);
  CLO_CUDA_CHECK(cudaFree(codes));
  CLO_CUDA_CHECK(cudaFree(factors));
  CLO_CUDA_CHECK(cudaFree(sink));
}

}  // namespace

int main(int argc, char** argv) {
  const bool goals = argc > 1 && std::string(argv[1]) == "goals";
  lookup(1);
  lookup(64);
  selection("8 x 131072, k 13107, G 4", 1, 4, 131072, 13107, 18, 24);
  selection("8 x 1048576, k 104857, G 4", 1, 4, 1048576, 104857, 80, 100);
  selection("64 x 32768, k 3276, G 4", 8, 4, 32768, 3276, 28, 36);
  if (goals) return 0;
  selection("8 x 131072, k 13107, G 5", 1, 5, 131072, 13107, 0, 0);
  selection("8 x 131072, k 2621, G 4", 1, 4, 131072, 2621, 0, 0);
  selection("8 x 1048576, k 13107, G 4", 1, 4, 1048576, 13107, 0, 0);
  selection("8 x 32768, k 3276, G 4", 1, 4, 32768, 3276, 0, 0);
  prefetch(1, 131072, 13107);
  prefetch(8, 32768, 3276);
  encode(64);
  encode(32768);
  return 0;
}
