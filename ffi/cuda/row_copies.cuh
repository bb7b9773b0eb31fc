// Copies of rows from pinned host memory into selected rows, by whole warps.
#pragma once

#include <cstdint>

#include "cuda/flags.cuh"
#include "cuda/pull.h"

namespace clo::cuda {

// 16-byte loads that each lane has in flight. With 512-byte rows a warp has four rows under way; four blocks have
// 256 KiB, several times what covers the latency of the link.
constexpr int kInFlight = 4;
constexpr int kChunkVectors = 32 * kInFlight;

// Host rows change between two requests of a kernel that runs on, so they must not come from the (incoherent) L1.
// For a lane that has nothing to load `instead` is read, device memory: a load under a condition would be made into one
// register and a move from there, and the move waits for the link.
__device__ __forceinline__ uint4 load_host(bool used, const uint4* p, const uint4* instead) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(used ? p : instead)
               : "memory");
  return v;
}

// Lanes for a row of an odd number of vectors, one more than it has where they are fewer than a warp's.
__device__ __forceinline__ int odd_lanes(int row_vectors) { return row_vectors < 16 ? 16 : 32; }

// copy_rows for rows that begin or end in the middle of a sector of 32 bytes. No two loads of a warp may ask for the two
// halves of one: whatever else uses memory then becomes slower by up to ten times (docs/gpu.md). So every load begins
// with a row or with a sector.
__device__ inline void copy_odd_rows(const uint4* from, uint4* to, int32_t token, int32_t slot, int rows, int row_vectors) {
  const int lane = static_cast<int>(threadIdx.x) & 31, lanes = odd_lanes(row_vectors), beside = 32 / lanes;
  const int odd = static_cast<int>(reinterpret_cast<uintptr_t>(from) / 16 % 2);  // where the head's rows begin
  const auto row_of = [&](int first, int u) { return first + u * beside + lane / lanes; };
  const auto column_of = [&](int begin, int t) { return begin + lane % lanes - ((odd + t) & 1); };
  for (int first = 0; first < rows; first += kInFlight * beside) {
    for (int begin = 0; begin <= row_vectors; begin += lanes) {
      uint4 value[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int row = row_of(first, u), t = __shfl_sync(~0u, token, row & 31), column = column_of(begin, t);
        value[u] = load_host(row < rows && column >= 0 && column < row_vectors, from + t * row_vectors + column, to);
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int row = row_of(first, u), t = __shfl_sync(~0u, token, row & 31), s = __shfl_sync(~0u, slot, row & 31);
        const int column = column_of(begin, t);
        if (row < rows && column >= 0 && column < row_vectors) to[s * row_vectors + column] = value[u];
      }
    }
  }
}

// One warp copies up to 32 rows of a head, given by one token and slot in each of the first `rows` lanes. All loads of a
// step are issued before its first store. (A head has less than 2^31 vectors: the engine sees to it.)
__device__ inline void copy_rows(const uint4* from, uint4* to, int32_t token, int32_t slot, int rows, int row_vectors) {
  const int lane = static_cast<int>(threadIdx.x) & 31, total = rows * row_vectors;
  for (int start = 0; start < total; start += kChunkVectors) {
    uint4 value[kInFlight];
    int target[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int vector = start + 32 * u + lane, row = vector / row_vectors, column = vector - row * row_vectors;
      const int t = __shfl_sync(~0u, token, row & 31), s = __shfl_sync(~0u, slot, row & 31);
      target[u] = vector < total ? s * row_vectors + column : -1;
      value[u] = load_host(vector < total, from + t * row_vectors + column, to);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u)
      if (target[u] >= 0) to[target[u]] = value[u];
  }
}

// Whether a layer's rows are of an odd number of vectors: kOdd of what follows, for which registers are shared out apart.
__device__ __forceinline__ bool odd_rows(const LayerView& view) { return row_bytes(view) / 16 % 2 != 0; }

// Rows that a warp copies together.
template <bool kOdd>
__device__ __forceinline__ int rows_at_once(int row_vectors) {
  return kOdd ? kInFlight * (32 / odd_lanes(row_vectors)) : max(1, min(32, kChunkVectors / row_vectors));
}

struct Move {
  int32_t token, slot;
};

// The chunk-th rows_at_once() moves of a head that has `count` of them, one in each of the first lanes; there may be none.
template <bool kOdd>
__device__ __forceinline__ Move load_moves(const LayerView& view, int64_t head, int count, int chunk) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int move = chunk * rows_at_once<kOdd>(static_cast<int>(row_bytes(view) / 16)) + lane;
  if (move >= count) return {0, 0};
  return {__ldcg(view.request.tokens + head * view.num_slots + move),
          __ldcg(view.request.slots + head * view.num_slots + move)};
}

// Copies the rows of those moves.
template <bool kOdd>
__device__ __forceinline__ void copy_chunk(const LayerView& view, int64_t head, int count, int chunk, Move move) {
  const int row_vectors = static_cast<int>(row_bytes(view) / 16), at_once = rows_at_once<kOdd>(row_vectors);
  const int rows = min(at_once, count - chunk * at_once);
  const uint4* const from = static_cast<const uint4*>(view.host_rows) + head * view.max_tokens * row_vectors;
  uint4* const to = static_cast<uint4*>(view.selected_rows) + head * view.num_slots * row_vectors;
  if constexpr (kOdd) copy_odd_rows(from, to, move.token, move.slot, rows, row_vectors);
  else copy_rows(from, to, move.token, move.slot, rows, row_vectors);
}

// Every `step`-th chunk of a head's moves from `first` on, by one warp. The next chunk's moves are on their way while this
// one's rows are: loads of device memory, which take long where others use it, would else stand in front of each wait for
// the link.
template <bool kOdd>
__device__ __forceinline__ void copy_chunks(const LayerView& view, int64_t head, int count, int first, int step) {
  const int at_once = rows_at_once<kOdd>(static_cast<int>(row_bytes(view) / 16)), chunks = (count + at_once - 1) / at_once;
  Move next = load_moves<kOdd>(view, head, count, first);
#pragma unroll 1
  for (int chunk = first; chunk < chunks; chunk += step) {
    const Move move = next;
    next = load_moves<kOdd>(view, head, count, chunk + step);
    copy_chunk<kOdd>(view, head, count, chunk, move);
  }
}

// A pseudo-random time, the same for the same seed, layer and sequence number.
__device__ inline void late(const TransferControl& control, uint32_t layer, uint32_t sequence) {
  uint32_t x = control.seed ^ layer * 0x9e3779b9u ^ sequence * 0x85ebca6bu;
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  const uint64_t wait = (x ^ x >> 16) % (control.max_delay_us + 1) * uint64_t{1000}, start = global_nanoseconds();
  while (global_nanoseconds() - start < wait) __nanosleep(500);
}

}  // namespace clo::cuda
