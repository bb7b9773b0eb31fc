// What comes before a selection, in one kernel: the lookup, if one is asked for, and of the heads that select the
// projections q·W of their queries.
//
// A few blocks a head, each with every n-th word of 32 hash bits. All of them decide for themselves whether the head hits;
// they are a cluster, so that its first block can wait until the others have read the label and the age before it
// overwrites them.
#include <algorithm>

#include "cuda/cache_lookup.cuh"
#include "cuda/check.h"
#include "cuda/overlap.cuh"
#include "cuda/select_encode.cuh"

namespace clo::cuda {
namespace {

constexpr int kColumns = 32, kMaxSlices = 8;
constexpr int kMaxBlocks = 512;      // of a grid: with more heads fewer blocks a head
constexpr int kEagerHeads = 64;      // up to that many heads load weights before they know whether they select

struct Arguments {
  SelectTopkParams p;
  CacheLookupParams lookup;
  uint32_t* clear;
  EncodedQueries out;
};

// The weights of 32 columns on their way to shared memory, [D][kColumns].
template <int kThreads>
__device__ __forceinline__ void fetch_weights(const float* from, float* to, int D, int R) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  for (int i = threadIdx.x; i < D * (kColumns / 4); i += kThreads) {
    const float* source = from + static_cast<int64_t>(i / (kColumns / 4)) * R + i % (kColumns / 4) * 4;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address + i * 16), "l"(source) : "memory");
  }
}

// hata: where all queries of the group count alike, a key's distance grows by G - 2n when it has a bit that n queries have
// set; halved for an even G, whose distances all have one parity. By one warp: `set` is n of the lane's bit.
__device__ __forceinline__ void weigh_bits(int set, int G, uint32_t* planes, int words, int word) {
  const int lane = threadIdx.x % 32, weight = G % 2 == 0 ? G / 2 - set : G - 2 * set;
#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane) {
    const uint32_t mask = __ballot_sync(~0u, weight >> plane & 1);
    if (lane == plane) planes[plane * words + word] = mask;
  }
  const uint32_t total = __reduce_add_sync(~0u, set);
  if (lane == kPlanes) planes[kPlanes * words + word] = total;
}

// A warp projects a query head, a lane a column: one chain of multiply-adds in the order of d as in the CPU kernel, so that
// signs agree to the bit.
template <typename T, bool kLookup, int kQueries>
__global__ void __launch_bounds__(32 * kQueries, 32 / kQueries) encode_kernel(const __grid_constant__ Arguments a) {
  constexpr int kThreads = 32 * kQueries;
  extern __shared__ __align__(16) float shared[];
  __shared__ LookupScratch scratch;
  __shared__ uint32_t signs[kQueries];
  wait_for_earlier();
  if (kLookup) let_next_start();
  const SelectTopkParams& p = a.p;
  const int bh = blockIdx.y, b = bh / static_cast<int>(p.kv_heads), h = bh % static_cast<int>(p.kv_heads);
  const int G = static_cast<int>(p.group), D = static_cast<int>(p.head_dim), R = static_cast<int>(p.bits), words = R / 32;
  const int tid = threadIdx.x, lane = tid % 32, g = tid / 32;
  const bool first = blockIdx.x == 0;
  float* const query = shared;              // [G][D]
  float* const weights = query + G * D;     // [D][kColumns]
  const float* const from = p.weights + static_cast<int64_t>(h) * D * R;

  // Loads before anything that waits for one.
  const bool eager = gridDim.y <= kEagerHeads;
  if (eager && static_cast<int>(blockIdx.x) < words) fetch_weights<kThreads>(from + blockIdx.x * 32, weights, D, R);
  const bool wanted = p.k[b] > 0;
  bool runs = wanted, hit = false;
  if constexpr (!kLookup) runs = runs && !p.skip[bh];
  const int32_t age = kLookup && first ? a.lookup.age[bh] : 0;
  const uint4 nothing = {};
  for (int i = (bh * gridDim.x + blockIdx.x) * kThreads + tid; i < a.out.clear_words; i += gridDim.x * gridDim.y * kThreads)
    a.out.clear[i] = nothing;
  if constexpr (kLookup) {
    hit = head_hits<T>(a.lookup, bh, &scratch);
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
    runs = runs && !hit;
  }
  const T* q = static_cast<const T*>(p.query) + static_cast<int64_t>(bh) * G * D;
  if (runs || !kLookup)
    for (int i = tid; i < G * D; i += kThreads) query[i] = widen(q[i]);

  bool fetched = eager;
  for (int word = static_cast<int>(blockIdx.x); runs && word < words; word += gridDim.x, fetched = false) {
    if (!fetched) fetch_weights<kThreads>(from + word * 32, weights, D, R);
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    // Without a lookup the next kernel begins to load codes at once, which keeps memory busy for as long as this takes.
    if (!kLookup) let_next_start();
    float sum = 0;
    if (g < G) {
      const float4* x = reinterpret_cast<const float4*>(query + g * D);
#pragma unroll 8
      for (int d = 0; d < D / 4; ++d) {
        const float4 v = x[d];
        const float* w = weights + d * 4 * kColumns + lane;
        sum = fmaf(v.x, w[0], sum);
        sum = fmaf(v.y, w[kColumns], sum);
        sum = fmaf(v.z, w[2 * kColumns], sum);
        sum = fmaf(v.w, w[3 * kColumns], sum);
      }
    }
    if (p.retriever == Retriever::kHata) {
      const uint32_t mask = __ballot_sync(~0u, sum > 0);
      if (lane == 0) signs[g] = mask;
      __syncthreads();
      if (g == 0) {
        int set = 0;
        for (int i = 0; i < G; ++i) set += signs[i] >> lane & 1;
        weigh_bits(set, G, a.out.planes + static_cast<int64_t>(bh) * (kPlanes + 1) * words, words, word);
      }
    } else if (g < G) {
      const int64_t at = static_cast<int64_t>(bh) * G + g;
      a.out.z[at * R + word * 32 + lane] = sum;
      // Values >= 0 sort as their bits do, infinity and NaN last.
      const uint32_t most = __reduce_max_sync(~0u, __float_as_uint(sum) & 0x7fffffffu);
      if (lane == 0) a.out.largest[at * words + word] = most;
      if (word == 0) {
        float along_mean = 0;
        for (int d = lane; d < D; d += 32) along_mean += query[g * D + d] * p.mean[static_cast<int64_t>(bh) * D + d];
        along_mean = warp_sum(along_mean);
        if (lane == 0) a.out.offsets[at] = p.scale * along_mean - p.lse[at];
      }
    }
    __syncthreads();
  }

  asm volatile("cp.async.wait_all;" ::: "memory");  // weights that nobody has wanted
  if (!kLookup || !first) return;
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  if (tid == 0) {
    // A sequence with nothing to select hits, and has no label afterwards.
    a.lookup.hit[bh] = hit || !wanted;
    a.lookup.age[bh] = !wanted ? -1 : hit ? age + 1 : 0;
    if (a.clear != nullptr && bh == 0) *a.clear = 0;
  }
  if (!hit) renew_label<T>(a.lookup, bh);
}

using Kernel = void (*)(Arguments);

template <typename T, int kQueries>
Kernel pick(bool looks_up) {
  return looks_up ? encode_kernel<T, true, kQueries> : encode_kernel<T, false, kQueries>;
}

}  // namespace

cudaError_t encode_queries(const SelectTopkParams& p, const LookupRequest& lookup, const EncodedQueries& out,
                           cudaStream_t stream) {
  if (p.head_dim % 4 != 0) return cudaErrorInvalidValue;
  Arguments a{};
  a.p = p;
  if (p.retriever == Retriever::kExact) a.p.bits = 0;
  const bool looks_up = lookup.params != nullptr;
  if (looks_up) a.lookup = *lookup.params;
  a.clear = lookup.clear;
  a.out = out;
  const int64_t heads = p.batch * p.kv_heads;
  int64_t blocks = 1;  // of a head
  while (blocks < kMaxSlices && 2 * blocks <= a.p.bits / 32 && 2 * blocks * heads <= kMaxBlocks) blocks *= 2;
  const int queries = p.group <= 4 ? 4 : 8;
  const Kernel kernel =
      queries == 4 ? choose(p.dtype, pick<float, 4>(looks_up), pick<BFloat, 4>(looks_up), pick<Half, 4>(looks_up))
                   : choose(p.dtype, pick<float, 8>(looks_up), pick<BFloat, 8>(looks_up), pick<Half, 8>(looks_up));
  const size_t bytes = static_cast<size_t>(p.head_dim * (kColumns + p.group)) * sizeof(float);
  CLO_CUDA_RETURN(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  CLO_CUDA_RETURN(share_multiprocessor(reinterpret_cast<const void*>(kernel)));
  cudaLaunchAttribute attributes[2] = {overlaps_earlier(), {}};
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(heads));
  config.blockDim = dim3(static_cast<unsigned>(32 * queries));
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = looks_up ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, a);
}

}  // namespace clo::cuda
