// Rows from device memory to mapped host memory, 16 bytes a lane, whole rows by neighbouring lanes: full lines on the
// link. Quantized ones are made in shared memory first. It does not wait for anything, so it may run beside the resident
// transfer kernel; rows that it writes are posted to that kernel by a later kernel of the same stream only.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/flags.cuh"
#include "cuda/kernels.h"
#include "cuda/quantize.cuh"

namespace clo::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kInFlight = 4;
// Blocks of a launch: stores to the host need few, and an operation that usually has nothing to do should start few.
constexpr int64_t kMaxBlocks = 128;
constexpr int64_t kRowsPerBlock = 256;

// False when the tokens do not have a row of their own each, in the buffer and in the arena.
__device__ bool in_range(int64_t begin, int64_t end, int64_t num_rows, int64_t sink, int64_t max_tokens) {
  if (begin < 0 || begin > end || end > max_tokens) return false;
  return end <= num_rows || (num_rows > sink && end - max(begin, sink) <= num_rows - sink);
}

// What a block's head is to offload.
struct Work {
  int64_t head, begin, end;
};

// False, and the error word says so, when the operands do not fit the layer. One block counts.
__device__ bool find_work(const OffloadParams& p, const EngineRef& engine, const LayerView& view, int32_t layer,
                          Work* work) {
  const int64_t head = blockIdx.y, b = head / p.kv_heads;
  *work = {head, p.begin[b], p.end[b]};
  const bool leader = blockIdx.x == 0 && threadIdx.x == 0;
  if (view.kv_heads != p.kv_heads || !in_range(work->begin, work->end, p.num_rows, p.sink, view.max_tokens)) {
    if (leader) fail(engine.error, Failure::kBadOperand, static_cast<uint32_t>(layer), 0);
    return false;
  }
  if (leader && work->end > work->begin && engine.counters != nullptr)
    atomicAdd(&engine.counters->rows_offloaded, static_cast<unsigned long long>(work->end - work->begin));
  return true;
}

__global__ __launch_bounds__(kThreads) void offload_kernel(OffloadParams p, EngineRef engine) {
  const int32_t layer = *engine.layer.index;
  const LayerView& view = engine.layer.views[layer];
  Work work;
  if (!find_work(p, engine, view, layer, &work)) return;
  const auto [head, begin, end] = work;
  const int64_t vectors = row_bytes(view) / 16, total = (end - begin) * vectors;
  const uint4* const from = static_cast<const uint4*>(p.rows) + head * p.num_rows * vectors;
  uint4* const to = static_cast<uint4*>(view.host_rows) + (head * view.max_tokens + begin) * vectors;
  const int64_t step = int64_t{kThreads} * gridDim.x;
  for (int64_t start = int64_t{blockIdx.x} * kThreads + threadIdx.x; start < total; start += step * kInFlight) {
    uint4 value[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int64_t i = start + u * step, token = begin + i / vectors;
      if (i < total) value[u] = __ldcs(from + ring_index(token, p.sink, p.num_rows) * vectors + i % vectors);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u)
      if (start + u * step < total) __stcs(to + start + u * step, value[u]);
  }
}

// One row a warp at a time.
template <typename T>
__global__ __launch_bounds__(kThreads) void offload_quantized_kernel(OffloadParams p, EngineRef engine) {
  constexpr int kRows = kThreads / 32;
  extern __shared__ __align__(16) unsigned char rows[];  // [kRows] quantized ones
  const int32_t layer = *engine.layer.index;
  const LayerView& view = engine.layer.views[layer];
  Work work;
  if (!find_work(p, engine, view, layer, &work)) return;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int dim = static_cast<int>(p.head_dim), bytes = static_cast<int>(row_bytes(view));
  const T* const from = static_cast<const T*>(p.rows) + work.head * p.num_rows * 2 * dim;
  char* const to = static_cast<char*>(view.host_rows) + work.head * view.max_tokens * bytes;
  for (int64_t token = work.begin + int64_t{blockIdx.x} * kRows; token < work.end; token += int64_t{gridDim.x} * kRows) {
    const int count = static_cast<int>(min(int64_t{kRows}, work.end - token));
    if (warp < count)
      quantize_row(from + ring_index(token + warp, p.sink, p.num_rows) * 2 * dim, dim, view.format, rows + warp * bytes,
                   lane);
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < count * bytes / 16; i += kThreads)
      __stcs(reinterpret_cast<uint4*>(to + token * bytes) + i, reinterpret_cast<const uint4*>(rows)[i]);
    __syncthreads();
  }
}

}  // namespace

cudaError_t offload(const OffloadParams& p, const EngineRef& engine, cudaStream_t stream) {
  const int64_t heads = p.batch * p.kv_heads;
  if (heads == 0 || p.num_rows == 0) return cudaSuccess;
  int64_t blocks = (p.num_rows + kRowsPerBlock - 1) / kRowsPerBlock;
  if (blocks * heads > kMaxBlocks) blocks = std::max(int64_t{1}, kMaxBlocks / heads);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(heads));
  if (p.view.format == RowFormat::kPlain) {
    offload_kernel<<<grid, kThreads, 0, stream>>>(p, engine);
    return cudaGetLastError();
  }
  if (p.head_dim > kMaxQuantizedDim) return cudaErrorInvalidValue;
  const auto kernel = choose(p.dtype, offload_quantized_kernel<float>, offload_quantized_kernel<BFloat>,
                             offload_quantized_kernel<Half>);
  kernel<<<grid, kThreads, kThreads / 32 * row_bytes(p.view), stream>>>(p, engine);
  return cudaGetLastError();
}

}  // namespace clo::cuda
