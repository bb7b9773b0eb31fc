#include "cuda/pull.h"

#include "cuda/check.h"
#include "cuda/flags.cuh"
#include "cuda/row_copies.cuh"

namespace clo::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kHeadsAtOnce = 1024;
// A block of a serving kernel that is not resident may run beside others; more than a few gain nothing.
constexpr int kPostedBlocks = 8;
// Between looks at the host's word, which cost a round trip over the link.
constexpr uint64_t kHostLookNs = 20000;

__device__ uint32_t load_host_word(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// All blocks of the grid together copy the rows of a layer's request. Chunks of rows go round the warps of the grid
// regardless of heads, so that one long head keeps every warp busy.
template <bool kOdd>
__device__ void copy_request_of(const LayerView& view, DeviceCounters* counters) {
  __shared__ int32_t counts[kHeadsAtOnce];
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) / 32 * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  const int warps = kWarps * static_cast<int>(gridDim.x);
  const int heads = static_cast<int>(view.batch * view.kv_heads);
  const int at_once = rows_at_once<kOdd>(static_cast<int>(row_bytes(view) / 16));
  int turn = 0;  // chunks of the heads before this one, modulo the warps
  for (int first = 0; first < heads; first += kHeadsAtOnce) {
    const int batch = min(kHeadsAtOnce, heads - first);
    __syncthreads();
    for (int h = static_cast<int>(threadIdx.x); h < kHeadsAtOnce; h += kThreads) {
      const int count = h < batch ? view.request.counts[first + h] : 0;
      counts[h] = count;
      const unsigned moved = __reduce_add_sync(~0u, static_cast<unsigned>(count));
      if (blockIdx.x == 0 && lane == 0 && moved > 0) atomicAdd(&counters->rows_moved, moved);
    }
    __syncthreads();
    for (int h = 0; h < batch; ++h) {
      const int count = counts[h];
      if (count == 0) continue;
      copy_chunks<kOdd>(view, first + h, count, (warp - turn + warps) % warps, warps);
      turn = (turn + (count + at_once - 1) / at_once) % warps;
    }
  }
}

__device__ void copy_request(const LayerView& view, DeviceCounters* counters) {
  if (odd_rows(view)) copy_request_of<true>(view, counters);
  else copy_request_of<false>(view, counters);
}

// After every thread of the block has copied its rows: the last block to come here publishes the sequence number.
__device__ void arrive(LayerFlags* flags, const TransferControl& control, uint32_t sequence) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(&flags->arrived, 1u) != gridDim.x - 1) return;
  __threadfence();
  flags->arrived = 0;
  if (control.max_delay_us > 0) late(control, flags->layer, sequence);
  store_release(&flags->ready, sequence);
}

// Waits for the layer's request. False: the kernel is to end.
__device__ bool await_post(const Ring& ring, const LayerFlags* flags, uint32_t sequence) {
  const auto posted = [&] { return static_cast<int32_t>(load_acquire(&flags->posted) - sequence) >= 0; };
  const uint64_t start = global_nanoseconds();
  uint64_t looked = start;
  while (!posted()) {
    if (load_acquire(&ring.control->error) != 0) return false;
    const uint64_t now = global_nanoseconds();
    if (now - looked > kHostLookNs) {
      looked = now;
      const auto word = static_cast<HostWord>(load_host_word(ring.host_word));
      if (word == HostWord::kAbort) fail(&ring.control->error, Failure::kAborted, flags->layer, sequence);
      // What was posted before the host said stop is visible by now.
      if (word != HostWord::kServe) return word == HostWord::kStop && posted();
    }
    if (now - start > ring.timeout_ns) {
      fail(&ring.control->error, Failure::kNotPosted, flags->layer, sequence);
      return false;
    }
  }
  return load_acquire(&ring.control->error) == 0;
}

__global__ __launch_bounds__(kThreads, 1) void serve_resident_kernel(Ring ring, int64_t requests) {
  // Nobody publishes a sequence number before every block has come to that request, so these are the numbers of the
  // launch.
  __shared__ uint32_t base[kMaxLayers];
  __shared__ bool go;
  for (int i = static_cast<int>(threadIdx.x); i < ring.size; i += kThreads)
    base[i] = load_acquire(&ring.flags[ring.order[i]].ready);
  __syncthreads();
  int place = 0;
  uint32_t round = 1;
  for (int64_t request = 0; request < requests; ++request) {
    const int32_t layer = ring.order[place];
    const uint32_t sequence = base[place] + round;
    if (threadIdx.x == 0) go = await_post(ring, ring.flags + layer, sequence);
    __syncthreads();
    if (!go) return;
    copy_request(ring.views[layer], &ring.control->counters);
    arrive(ring.flags + layer, *ring.control, sequence);
    if (++place == ring.size) place = 0, ++round;
  }
}

__global__ __launch_bounds__(kThreads, 1) void serve_posted_kernel(EngineRef engine) {
  const TransferControl& control = *engine.control;
  if (control.resident != 0 || control.error != 0) return;
  const int32_t layer = *engine.layer.index;
  LayerFlags* const flags = engine.flags + layer;
  // Uniform over the grid: nobody else writes these words now, and this grid only when all its blocks have arrived.
  const uint32_t posted = load_acquire(&flags->posted);
  if (posted == load_acquire(&flags->ready)) return;
  copy_request(engine.layer.views[layer], engine.counters);
  arrive(flags, control, posted);
}

__global__ void post_request_kernel(EngineRef engine) {
  const int32_t layer = *engine.layer.index;
  const LayerView& view = engine.layer.views[layer];
  unsigned long long rows = 0;
  for (int64_t h = 0; h < view.batch * view.kv_heads; ++h)
    rows += static_cast<unsigned long long>(view.request.counts[h]);
  engine.counters->rows_posted += rows;
  engine.counters->requests += rows > 0;
  __threadfence();
  post(engine.flags + layer);
}

}  // namespace

cudaError_t serve_resident(const Ring& ring, int64_t requests, int blocks, cudaStream_t stream) {
  serve_resident_kernel<<<blocks, kThreads, 0, stream>>>(ring, requests);
  return cudaGetLastError();
}

cudaError_t serve_posted(const EngineRef& engine, cudaStream_t stream) {
  serve_posted_kernel<<<kPostedBlocks, kThreads, 0, stream>>>(engine);
  return cudaGetLastError();
}

cudaError_t post_request(const EngineRef& engine, cudaStream_t stream) {
  post_request_kernel<<<1, 1, 0, stream>>>(engine);
  return cudaGetLastError();
}

cudaError_t load_transfer_kernels() {
  cudaFuncAttributes attributes;
  CLO_CUDA_RETURN(cudaFuncGetAttributes(&attributes, serve_resident_kernel));
  CLO_CUDA_RETURN(cudaFuncGetAttributes(&attributes, serve_posted_kernel));
  return cudaFuncGetAttributes(&attributes, post_request_kernel);
}

}  // namespace clo::cuda
