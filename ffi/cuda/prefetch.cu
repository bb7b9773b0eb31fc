// Lookup, selection, and the difference of the selection to the slot table, as three kernels.
#include <algorithm>

#include "cuda/block_select.cuh"
#include "cuda/check.h"
#include "cuda/flags.cuh"
#include "cuda/select_topk.cuh"

namespace clo::cuda {
namespace {

constexpr size_t kHeader = 256;  // of the workspace: the number of blocks that have finished
constexpr size_t kMaxShared = 200 * 1024;
constexpr int kAgeBits = 8;      // of 16, that one histogram counts by

// Bit masks over tokens and slots with the place of each mask's first bit, and a number for each slot, for one block.
struct Masks {
  int token_words, slot_words;
  size_t bytes;
  bool shared;  // else in the workspace
};

Masks make_masks(const LayerView& v) {
  Masks m{};
  m.token_words = static_cast<int>((v.max_tokens + 31) / 32);
  m.slot_words = static_cast<int>((v.num_slots + 31) / 32);
  m.bytes = (static_cast<size_t>(m.token_words) + static_cast<size_t>(m.slot_words)) * 2 * sizeof(uint32_t);
  m.bytes += static_cast<size_t>(m.slot_words) * 32 * sizeof(uint16_t);
  m.bytes = (m.bytes + 255) / 256 * 256;
  m.shared = m.bytes <= kMaxShared;
  return m;
}

struct Arguments {
  PrefetchParams p;
  EngineRef engine;
  Masks masks;
  uint32_t* finished;
  unsigned char* memory;  // [blocks][masks.bytes] unless masks.shared
};

// One head's slots and moves.
struct Head {
  int32_t* tokens;   // [C]
  uint16_t* last;    // [C]
  int before;        // filled slots before this refresh
  uint16_t refresh;  // its number
  int32_t* from;     // [C] request: source tokens
  int32_t* to;       // [C] request: destination slots

  __device__ void fill(int move, int slot, int token) const {
    tokens[slot] = token;
    last[slot] = refresh;
    to[move] = slot;
  }
};

struct Outcome {
  int moves, filled;
};

__device__ Outcome replace_all(const Head& h, const int32_t* selected, int n) {
  for (int i = threadIdx.x; i < max(n, h.before); i += kThreads) {
    if (i < n) {
      h.from[i] = selected[i];
      h.fill(i, i, selected[i]);
    } else {
      h.tokens[i] = -1;
    }
  }
  return {n, n};
}

struct Scratch {
  uint64_t scan[4][kWarps];
  uint32_t histogram[2][1 << kAgeBits];
  Threshold threshold[2];
};

// Of the slots in `candidates`, keeps the `wanted` least recent, of equals the lowest, and gets their places.
__device__ void choose_victims(const uint16_t* recency, uint32_t* candidates, uint32_t* places, int words, int wanted,
                               Scratch& s) {
  constexpr int kValues = 1 << kAgeBits;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int i = threadIdx.x; i < 2 * kValues; i += kThreads) s.histogram[i / kValues][i % kValues] = 0;
  __syncthreads();
  for (int w = warp; w < words; w += kWarps)
    if (candidates[w] >> lane & 1) atomicAdd(&s.histogram[0][recency[w * 32 + lane] >> kAgeBits], 1u);
  __syncthreads();
  find_threshold(s.histogram[0], nullptr, 0, kValues, 1, 0, wanted, s.scan[0], &s.threshold[0]);
  const uint32_t high = s.threshold[0].bin;
  for (int w = warp; w < words; w += kWarps) {
    if (!(candidates[w] >> lane & 1)) continue;
    const uint32_t value = recency[w * 32 + lane];
    if (value >> kAgeBits == high) atomicAdd(&s.histogram[1][value & (kValues - 1)], 1u);
  }
  __syncthreads();
  const uint32_t rest = wanted - s.threshold[0].better;
  find_threshold(s.histogram[1], nullptr, 0, kValues, 1, 0, rest, s.scan[1], &s.threshold[1]);
  const uint32_t limit = high << kAgeBits | s.threshold[1].bin;
  for (int w = warp; w < words; w += kWarps) {
    const bool candidate = candidates[w] >> lane & 1;
    const uint32_t value = candidate ? recency[w * 32 + lane] : 0;
    const uint32_t older = __ballot_sync(~0u, candidate && value < limit);
    const uint32_t equal = __ballot_sync(~0u, candidate && value == limit);
    __syncwarp();
    if (lane == 0) {
      candidates[w] = older;
      places[w] = equal;
    }
  }
  __syncthreads();
  resolve_ties(candidates, places, words, 0, 0, rest - s.threshold[1].better, s.scan[2]);
}

// Keeps what is there, fills empty slots up to `capacity`, then evicts the slots selected longest ago (of equals the
// lowest), never one of the present selection: there are enough others, because n <= capacity.
__device__ Outcome replace_difference(const Head& h, const int32_t* selected, int n, int capacity, const Masks& m,
                                      unsigned char* memory, Scratch& s) {
  const int tid = threadIdx.x, lane = tid % 32;
  uint32_t* const fresh = reinterpret_cast<uint32_t*>(memory);  // selected tokens that are in no slot
  uint32_t* const fresh_places = fresh + m.token_words;
  uint32_t* const others = fresh_places + m.token_words;        // slots whose token is not in the selection
  uint32_t* const other_places = others + m.slot_words;
  uint16_t* const recency = reinterpret_cast<uint16_t*>(other_places + m.slot_words);  // smaller: selected longer ago
  constexpr int kBatch = 4;  // loads in flight
  for (int i = tid; i < m.token_words; i += kThreads) fresh[i] = 0;
  __syncthreads();
  for (int i = tid; i < n; i += kBatch * kThreads) {
    int tokens[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) tokens[j] = i + j * kThreads < n ? selected[i + j * kThreads] : -1;
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      if (tokens[j] >= 0) atomicOr(&fresh[tokens[j] / 32], 1u << (tokens[j] % 32));
  }
  __syncthreads();
  const int slot_words = (h.before + 31) / 32;
  for (int first = tid; first < slot_words * 32; first += kBatch * kThreads) {
    int tokens[kBatch];
    uint16_t last[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int slot = first + j * kThreads;
      tokens[j] = slot < h.before ? h.tokens[slot] : -1;
      last[j] = slot < h.before ? h.last[slot] : 0;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int slot = first + j * kThreads;
      if (slot >= slot_words * 32) break;  // the whole warp
      bool other = false;
      if (tokens[j] >= 0) {
        const uint32_t bit = 1u << (tokens[j] % 32);
        other = (fresh[tokens[j] / 32] & bit) == 0;
        if (!other) {
          h.last[slot] = h.refresh;
          atomicAnd(&fresh[tokens[j] / 32], ~bit);  // a token is in one slot at most: nobody else looks at this bit
        }
      }
      recency[slot] = UINT16_MAX - static_cast<uint16_t>(h.refresh - last[j]);
      const uint32_t mask = __ballot_sync(~0u, other);
      if (lane == 0) others[slot / 32] = mask;
    }
  }
  __syncthreads();
  const int each = (m.token_words + kThreads - 1) / kThreads;
  const int first = min(m.token_words, tid * each), end = min(m.token_words, first + each);
  uint64_t count = 0, total;
  for (int w = first; w < end; ++w) count += __popc(fresh[w]);
  uint32_t place = static_cast<uint32_t>(scan_exclusive(count, s.scan[3], &total));
  for (int w = first; w < end; ++w) {
    fresh_places[w] = place;
    place += __popc(fresh[w]);
  }
  __syncthreads();
  const int moves = static_cast<int>(total), room = min(capacity - h.before, moves);
  for_each_bit(fresh, fresh_places, m.token_words, [&](uint32_t move, int token) {
    h.from[move] = token;
    if (static_cast<int>(move) < room) h.fill(static_cast<int>(move), h.before + static_cast<int>(move), token);
  });
  __syncthreads();
  if (moves > room) {
    choose_victims(recency, others, other_places, slot_words, moves - room, s);
    for_each_bit(others, other_places, slot_words, [&](uint32_t i, int slot) {
      const int move = room + static_cast<int>(i);
      h.fill(move, slot, h.from[move]);
    });
  }
  return {moves, h.before + room};
}

__device__ void count(DeviceCounters* counters, bool hit, int selected, int moves) {
  if (counters == nullptr) return;
  if (hit) {
    atomicAdd(&counters->hits, 1ull);
    return;
  }
  atomicAdd(&counters->misses, 1ull);
  atomicAdd(&counters->rows_selected, static_cast<unsigned long long>(selected));
  atomicAdd(&counters->rows_posted, static_cast<unsigned long long>(moves));
}

__global__ void __launch_bounds__(kThreads, 1) difference_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Scratch scratch;
  __shared__ bool proceed;
  const int layer = *a.engine.layer.index, tid = threadIdx.x;
  const LayerView v = a.engine.layer.views[layer];
  LayerFlags* const flags = a.engine.flags == nullptr ? nullptr : a.engine.flags + layer;
  // Normally attention has waited already. The first fill at the end of prefill is followed by another prefetch, which
  // must not rewrite a request that is being served.
  if (tid == 0) proceed = flags == nullptr || wait_ready(flags, a.engine.timeout_ns, a.engine.error);
  __syncthreads();
  const int heads = static_cast<int>(v.batch * v.kv_heads), Ko = static_cast<int>(v.kv_heads);
  const int C = static_cast<int>(v.num_slots);
  unsigned char* const memory = a.masks.shared ? shared : a.memory + blockIdx.x * a.masks.bytes;
  for (int i = blockIdx.x; i < heads && proceed; i += gridDim.x) {
    const int b = i / Ko;
    if (a.p.lookup.hit[i]) {
      if (tid == 0) {
        v.request.counts[i] = 0;
        if (a.p.select.k[b] > 0) count(a.engine.counters, true, 0, 0);
      }
      continue;
    }
    const int capacity = min(a.p.capacity[b], C), n = min(selected(a.p.select, b), capacity);
    const int64_t slots = static_cast<int64_t>(i) * C;
    const Head head{v.slot_tokens + slots,
                    v.slot_last + slots,
                    v.slot_counts[i],
                    static_cast<uint16_t>(v.refreshes[i] + 1),
                    v.request.tokens + slots,
                    v.request.slots + slots};
    const int32_t* indices = a.p.select.indices + static_cast<int64_t>(i) * a.p.select.k_max;
    // A buffer that is to shrink keeps nothing: its prefix could not be kept full otherwise.
    const Outcome outcome = a.p.whole || head.before > capacity
                                ? replace_all(head, indices, n)
                                : replace_difference(head, indices, n, capacity, a.masks, memory, scratch);
    __syncthreads();
    if (tid == 0) {
      v.request.counts[i] = outcome.moves;
      v.slot_counts[i] = outcome.filled;
      v.refreshes[i] = head.refresh;
      count(a.engine.counters, false, n, outcome.moves);
    }
  }

  // The last block to finish hands the request over.
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (tid == 0) last = atomicAdd(a.finished, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!last || !proceed) return;
  __threadfence();
  bool moves = false;
  for (int i = tid; i < heads; i += kThreads) moves = moves || __ldcg(v.request.counts + i) > 0;
  moves = __syncthreads_or(moves);
  if (tid != 0) return;
  if (a.engine.counters != nullptr && moves) atomicAdd(&a.engine.counters->requests, 1ull);
  if (flags != nullptr) post(flags);
}

cudaError_t grid_size(int64_t heads, int* grid) {
  int device = 0, processors = 0;
  CLO_CUDA_RETURN(cudaGetDevice(&device));
  CLO_CUDA_RETURN(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  *grid = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(heads, processors - kTransferBlocks)));
  return cudaSuccess;
}

size_t select_bytes(const SelectTopkParams& p) { return (select_topk_workspace_bytes(p) + 255) / 256 * 256; }

}  // namespace

size_t prefetch_workspace_bytes(const PrefetchParams& p) {
  int grid = 0;
  if (grid_size(p.view.batch * p.view.kv_heads, &grid) != cudaSuccess) return 0;
  const Masks masks = make_masks(p.view);
  return kHeader + select_bytes(p.select) + (masks.shared ? 0 : static_cast<size_t>(grid) * masks.bytes);
}

cudaError_t prefetch(const PrefetchParams& p, const EngineRef& engine, void* workspace, cudaStream_t stream) {
  const int64_t heads = p.view.batch * p.view.kv_heads;
  if (heads == 0) return cudaSuccess;
  int grid = 0;
  CLO_CUDA_RETURN(grid_size(heads, &grid));
  auto* memory = static_cast<unsigned char*>(workspace);
  const Arguments a{p, engine, make_masks(p.view), reinterpret_cast<uint32_t*>(memory),
                    memory + kHeader + select_bytes(p.select)};
  CLO_CUDA_RETURN(lookup_and_encode(p.lookup, p.select, a.finished, memory + kHeader, stream));
  CLO_CUDA_RETURN(select_encoded(p.select, {engine.layer, false, nullptr, engine.error, engine.timeout_ns}, memory + kHeader, stream));
  const size_t bytes = a.masks.shared ? a.masks.bytes : 0;
  CLO_CUDA_RETURN(cudaFuncSetAttribute(reinterpret_cast<const void*>(difference_kernel),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  difference_kernel<<<grid, kThreads, bytes, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace clo::cuda
