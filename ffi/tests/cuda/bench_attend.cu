// Times of attend on a GPU beside plain reads, in one process: replays of a graph over buffers in rotation, so that no
// row is in L2 when it is read. Each case is measured twice: with its launches captured one after the other, so that each
// begins before the one in front of it is over; and ("own graphs") with every call in a graph of its own inside of the
// graph, as XLA captures it, where it begins when all before it is over. One line a figure: name, value, unit, name of
// the control, control, goal (of the ratio of value to control), between tabs.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "clo/params.h"
#include "cuda/check.h"
#include "cuda/flags.cuh"
#include "cuda/kernels.h"

namespace {

constexpr int64_t kK = 8, kD = 128, kSelected = 13107, kDense = 131072;
constexpr size_t kPool = size_t{6} << 30;

cudaStream_t stream;
uint8_t* pool;

__global__ void __launch_bounds__(512) read_all(const uint4* x, size_t n, uint32_t* out) {
  uint32_t sum = 0;
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 7 * step < n; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j)
      asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w)
                   : "l"(x + i + j * step));
#pragma unroll
    for (int j = 0; j < 8; ++j) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  for (; i < n; i += step) {
    const uint4 v = __ldg(x + i);
    sum ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == 0x12345678) *out = sum;
}

// Small random bfloat16 numbers. Taken for quantized rows, their bytes are numbers, too, and small scales: none is 0x7f.
__global__ void fill(uint16_t* x, size_t n) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    uint64_t h = (i + 1) * 0x9E3779B97F4A7C15ull;
    h ^= h >> 29;
    h *= 0xBF58476D1CE4E5B9ull;
    x[i] = static_cast<uint16_t>((h >> 48 & 0x803f) | 0x3f00);
  }
}

// n calls, one after the other.
cudaGraph_t capture(int n, const std::function<void(int)>& call) {
  cudaGraph_t graph;
  CLO_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < n; ++i) call(i);
  CLO_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  return graph;
}

// n calls, each in a graph of its own.
cudaGraph_t nest(int n, const std::function<void(int)>& call) {
  cudaGraph_t graph;
  CLO_CUDA_CHECK(cudaGraphCreate(&graph, 0));
  cudaGraphNode_t last{};
  for (int i = 0; i < n; ++i) {
    cudaGraph_t child = capture(1, [&](int) { call(i); });
    cudaGraphNode_t node;
    CLO_CUDA_CHECK(cudaGraphAddChildGraphNode(&node, graph, &last, i > 0 ? 1 : 0, child));
    CLO_CUDA_CHECK(cudaGraphDestroy(child));
    last = node;
  }
  return graph;
}

// Median microseconds of a call among the n of a graph, which it destroys.
double time_us(int n, cudaGraph_t graph) {
  cudaGraphExec_t program;
  CLO_CUDA_CHECK(cudaGraphInstantiate(&program, graph, 0));
  cudaEvent_t start, stop;
  CLO_CUDA_CHECK(cudaEventCreate(&start));
  CLO_CUDA_CHECK(cudaEventCreate(&stop));
  for (int i = 0; i < 3; ++i) CLO_CUDA_CHECK(cudaGraphLaunch(program, stream));
  std::vector<float> times;
  for (int i = 0; i < 21; ++i) {
    CLO_CUDA_CHECK(cudaEventRecord(start, stream));
    CLO_CUDA_CHECK(cudaGraphLaunch(program, stream));
    CLO_CUDA_CHECK(cudaEventRecord(stop, stream));
    CLO_CUDA_CHECK(cudaStreamSynchronize(stream));
    float ms;
    CLO_CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
    times.push_back(ms * 1e3f / static_cast<float>(n));
  }
  CLO_CUDA_CHECK(cudaEventDestroy(start));
  CLO_CUDA_CHECK(cudaEventDestroy(stop));
  CLO_CUDA_CHECK(cudaGraphExecDestroy(program));
  CLO_CUDA_CHECK(cudaGraphDestroy(graph));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

template <typename T>
T* device(const std::vector<T>& x) {
  T* p;
  CLO_CUDA_CHECK(cudaMalloc(&p, std::max<size_t>(x.size(), 1) * sizeof(T)));
  CLO_CUDA_CHECK(cudaMemcpy(p, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}

template <typename T>
T* zeros(size_t n) {
  return device(std::vector<T>(n));
}

struct Case {
  const char* name;
  int64_t B, Kr, G, bits, tail;  // tail: rows attended beside the selected ones
  const char* goal;              // of the rate beside that of a plain read
  clo::DType dtype = clo::DType::kBF16;
  clo::RowFormat format = clo::RowFormat::kPlain;  // of selected rows
};

double read_us(size_t bytes, int sets, int n) {
  static uint32_t* const out = zeros<uint32_t>(1);
  int device, multiprocessors;
  CLO_CUDA_CHECK(cudaGetDevice(&device));
  CLO_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  return time_us(n, capture(n, [&](int i) {
    const uint8_t* rows = pool + static_cast<size_t>(i % sets) * bytes;
    read_all<<<4 * multiprocessors, 512, 0, stream>>>(reinterpret_cast<const uint4*>(rows), bytes / 16, out);
  }));
}

void print(const std::string& name, size_t bytes, double us, double same, double stream_rate, const char* goal) {
  const double rate = static_cast<double>(bytes) / us / 1e3;
  std::printf("%s\t%.6g\tGB/s\tplain read of 2 GiB\t%.6g\t%s\n", name.c_str(), rate, stream_rate, goal);
  std::printf("%s, time\t%.6g\tus\tplain read of as many bytes\t%.6g\t-\n", name.c_str(), us, same);
}

void bench(const Case& c, double stream_rate) {
  const int64_t B = c.B, Ko = kK - c.Kr, T = c.tail + 64, S = kDense, row = 2 * kD * clo::dtype_bytes(c.dtype);
  const int64_t stored = clo::row_bytes(kD, c.dtype, c.format);
  const size_t selected = B * Ko * kSelected * stored, resident = B * c.Kr * S * row, tail = B * Ko * T * row;
  const size_t set = (selected + resident + tail + 255) / 256 * 256;
  const int sets = static_cast<int>(std::min<size_t>(16, kPool / set));
  const size_t bytes = selected + resident + B * Ko * c.tail * row;
  const int n = static_cast<int>(std::max<size_t>(sets, 48 * (size_t{54} << 20) / bytes / sets * sets));

  clo::AttendParams p{};
  p.batch = B;
  p.offloaded_heads = Ko;
  p.resident_heads = c.Kr;
  p.group = c.G;
  p.head_dim = kD;
  p.bits = c.bits;
  p.max_tokens = S;
  p.tail_rows = T;
  p.dtype = c.dtype;
  p.scale = 1 / std::sqrt(static_cast<float>(kD));
  p.view.batch = B;
  p.view.kv_heads = Ko;
  p.view.max_tokens = S;
  p.view.num_slots = kSelected;
  p.view.head_dim = kD;
  p.view.dtype = p.dtype;
  p.view.format = c.format;
  const int64_t numbers_of_call = B * kK * c.G * kD;
  auto* numbers = zeros<uint16_t>(2 * numbers_of_call);
  fill<<<64, 256, 0, stream>>>(numbers, 2 * numbers_of_call);
  p.query = p.key = p.value = numbers;
  p.weights = zeros<float>(Ko * kD * c.bits);
  p.mean = zeros<float>(B * Ko * kD);
  p.codes = zeros<uint32_t>(B * Ko * S * c.bits / 32);
  p.factors = zeros<uint16_t>(B * Ko * S);
  p.position = device(std::vector<int32_t>(B, static_cast<int32_t>(S - 1)));
  p.flushed = device(std::vector<int32_t>(B, static_cast<int32_t>(S - c.tail)));
  p.out = zeros<uint16_t>(2 * numbers_of_call);
  p.lse = zeros<float>(B * kK * c.G);
  auto* workspace = zeros<uint8_t>(clo::cuda::attend_workspace_bytes(p));
  auto* counts = device(std::vector<int32_t>(B * Ko, static_cast<int32_t>(kSelected)));
  std::vector<clo::LayerView> views(sets, p.view);
  std::vector<int32_t> numbers_of_layers(sets);
  for (int i = 0; i < sets; ++i) {
    views[i].selected_rows = pool + i * set;
    views[i].slot_counts = counts;
    numbers_of_layers[i] = i;
  }
  const clo::LayerView* device_views = device(views);
  const int32_t* layers = device(numbers_of_layers);

  auto* flags = zeros<clo::cuda::LayerFlags>(sets);  // all rows are there
  auto* error = zeros<uint32_t>(1);

  const auto call = [&](int i) {
    const int s = i % sets;
    clo::AttendParams q = p;
    q.resident = pool + s * set + selected;
    q.tail = pool + s * set + selected + resident;
    clo::cuda::EngineRef engine{};
    engine.layer = {device_views, layers + s, static_cast<uint32_t>(sets)};
    engine.flags = flags;
    engine.error = error;
    engine.timeout_ns = 1'000'000'000;
    CLO_CUDA_CHECK(clo::cuda::attend(q, engine, workspace, stream));
  };
  const double same = read_us(bytes / 4096 * 4096, sets, n);
  const std::string name = "attend, " + std::string(c.name) + ", B " + std::to_string(B) + ", G " + std::to_string(c.G);
  print(name, bytes, time_us(n, capture(n, call)), same, stream_rate, c.goal);
  print(name + ", own graphs", bytes, time_us(n, nest(n, call)), same, stream_rate, "-");
}

}  // namespace

int main() {
  CLO_CUDA_CHECK(cudaStreamCreate(&stream));
  CLO_CUDA_CHECK(cudaMalloc(&pool, kPool));
  fill<<<2048, 256, 0, stream>>>(reinterpret_cast<uint16_t*>(pool), kPool / 2);
  CLO_CUDA_CHECK(cudaStreamSynchronize(stream));
  const size_t large = size_t{2} << 30;
  const double stream_rate = static_cast<double>(large) / read_us(large, 3, 6) / 1e3;
  const Case cases[] = {
      {"selected", 1, 0, 4, 0, 0, ">= 0.75"},
      {"selected", 1, 0, 5, 0, 0, ">= 0.75"},
      {"selected", 4, 0, 4, 0, 0, ">= 0.90"},
      {"selected", 4, 0, 5, 0, 0, ">= 0.90"},
      {"selected, tail, code", 1, 0, 4, 256, 68, "-"},
      {"selected, tail, code", 4, 0, 4, 256, 68, "-"},
      {"2 of 8 heads resident", 1, 2, 4, 0, 0, ">= 0.85"},
      {"2 of 8 heads resident", 1, 2, 5, 0, 0, ">= 0.85"},
      {"2 of 8 heads resident, tail, code", 1, 2, 4, 256, 68, "-"},
      {"2 of 8 heads resident, tail, code", 4, 2, 4, 256, 68, "-"},
      {"all heads resident", 1, 8, 4, 0, 0, ">= 0.95"},
      {"all heads resident", 1, 8, 5, 0, 0, ">= 0.95"},
      {"selected, float32", 1, 0, 4, 0, 0, "-", clo::DType::kF32},
      {"all heads resident, float32", 1, 8, 4, 0, 0, "-", clo::DType::kF32},
      {"selected, int8", 1, 0, 4, 0, 0, "-", clo::DType::kBF16, clo::RowFormat::kInt8},
      {"selected, int8", 1, 0, 5, 0, 0, "-", clo::DType::kBF16, clo::RowFormat::kInt8},
      {"selected, int8", 4, 0, 4, 0, 0, "-", clo::DType::kBF16, clo::RowFormat::kInt8},
      {"selected, fp8", 1, 0, 4, 0, 0, "-", clo::DType::kBF16, clo::RowFormat::kFp8},
      {"selected, fp8", 4, 0, 4, 0, 0, "-", clo::DType::kBF16, clo::RowFormat::kFp8},
      {"selected, tail, code, int8", 1, 0, 4, 256, 68, "-", clo::DType::kBF16, clo::RowFormat::kInt8},
      {"2 of 8 heads resident, int8", 1, 2, 4, 0, 0, "-", clo::DType::kBF16, clo::RowFormat::kInt8},
  };
  for (const Case& c : cases) bench(c, stream_rate);
}
