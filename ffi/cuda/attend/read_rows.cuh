// The kernel of attend that reads every row once, and leaves what blocks make of heads as fragments.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/attend/append.cuh"
#include "cuda/attend/args.cuh"
#include "cuda/attend/fragments.cuh"
#include "cuda/attend/mma.cuh"
#include "cuda/attend/plan.cuh"
#include "cuda/attend/ptx.cuh"
#include "cuda/attend/quantized.cuh"
#include "cuda/attend/quantized_mma.cuh"
#include "cuda/attend/rows.cuh"
#include "cuda/attend/source.cuh"
#include "cuda/flags.cuh"

namespace clo::cuda {

// Dynamic shared memory of the row-reading kernel, from its start.
template <class Tile>
struct Layout {
  static constexpr int kStage = Tile::kUnitRows * Tile::kStride;
  size_t acc, state, scratch, filled, rows, before, total;

  __host__ __device__ Layout(int group, int heads) {
    constexpr int W = Tile::kWarps;
    acc = static_cast<size_t>(W) * Tile::kStages * kStage;           // two of [W, G, D + 4], used in turn
    state = acc + size_t{2} * W * group * (Tile::kDim + 4) * 4;      // two of [W, G]
    scratch = state + size_t{2} * W * group * 8;
    scratch = (scratch + 15) / 16 * 16;
    filled = scratch + static_cast<size_t>(W) * Tile::kScratchBytes;  // [W, stages]
    rows = filled + static_cast<size_t>(W) * Tile::kStages * 4;
    before = rows + heads * sizeof(HeadRows);
    total = before + (heads + 2) * 4;
  }
};

// What quantized rows are computed on, and whether as they are; else they become wide ones first.
template <class Tile>
struct OfQuantized {
  using Type = Tile;
  static constexpr bool kAsTheyAre = false;
};
template <>
struct OfQuantized<MmaTile<64, __nv_bfloat16>> {
  using Type = QuantizedMmaTile<64>;
  static constexpr bool kAsTheyAre = true;
};
template <>
struct OfQuantized<MmaTile<128, __nv_bfloat16>> {
  using Type = QuantizedMmaTile<128>;
  static constexpr bool kAsTheyAre = true;
};

// The unit in a stage, by one warp whose copies have arrived.
template <class Tile, bool kQuantized, class Used, class Reader>
__device__ __forceinline__ void add_unit(Used& tile, const Reader& reader, int slot, unsigned char* stage,
                                         RowFormat format, const typename Tile::Element* query, int lane) {
  if constexpr (kQuantized) {
    if (reader.quantized(slot)) {
      if constexpr (OfQuantized<Tile>::kAsTheyAre) {
        tile.add_quantized(stage + QuantizedUnit<Tile>::kBegin, format, reader.rows(slot), query);
        return;
      }
      QuantizedUnit<Tile>::widen_rows(stage, format, lane);
    }
  }
  tile.add(reader.stage(slot), reader.rows(slot));
}

// kWarps warps attend; one more appends. kQuantized: selected rows are.
//
// The grid may be there before the kernels in front of it are over, and does what it can do by then: it makes its plan,
// and reads selected rows if they are all there. Whoever produces the operands may still be at it, so the last warp looks
// at everything that the plan was made from again after the wait for the previous kernel, and the others ask it before
// they write anything: if something is different they begin anew. That a selected row was not being written meanwhile
// follows from its layer's flags: transfers write rows after a request is posted and before it is ready, requests are
// posted by kernels in front of this one, and none has been when the number of the last request is the same before and
// after. Nothing tells as much of resident and tail rows, which kernels of anybody may have written, nor of queries:
// those are read after the wait.
template <class Tile, bool kQuantized>
__global__ void __launch_bounds__((Tile::kWarps + 1) * 32, 1) read_rows(const __grid_constant__ AttendArgs a) {
  using T = typename Tile::Element;
  constexpr int W = Tile::kWarps, D = Tile::kDim, kReaders = 1, kPlanned = 2, kChecked = 3;  // kinds of barriers
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ Source source;
  __shared__ Progress progress;
  __shared__ Share shares[2];
  __shared__ bool changed;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const Layout<Tile> layout(a.group, a.batch * a.kv_heads());
  auto* rows = reinterpret_cast<HeadRows*>(shared + layout.rows);
  auto* before = reinterpret_cast<int*>(shared + layout.before);
  const Plan plan = {before, before + a.heads(0) + 1, rows, rows + a.heads(0)};
  const int places[2] = {place_in_line(0, blockIdx.x, a.blocks), place_in_line(1, blockIdx.x, a.blocks)};
  if (warp == W) {
    // Its own look is taken beside the readers', not after it: when rows are being read, every load takes long.
    wait_for_previous_kernel();
    const PlanCheck check(a, lane);
#pragma unroll 1
    for (bool first = true, again = true; again; first = false) {
      barrier(kPlanned, (W + 1) * 32);
      again = first && check.differs(a, plan, source, progress, lane);
      if (lane == 0) changed = again;
      if (!again) clear_fragments<D>(a, plan, shares, blockIdx.x, lane);
      __syncwarp();
      // Not while rows are waited for: the next kernel would take the multiprocessors that are left to the transfer
      // kernel. Nor before the fragments are cleared: it must not take those of an earlier call.
      if (!again && progress.ready) launch_dependents();
      arrive(kChecked, (W + 1) * 32);
    }
    append_rows<T, D>(a, blockIdx.x, lane);
    append_codes<T, D>(a, blockIdx.x, lane);
    if (!progress.ready) {
      if (lane == 0) wait_ready(a.engine.flags + source.layer, a.engine.timeout_ns, a.engine.error);
      __syncwarp();
      launch_dependents();
    }
    return;
  }

  const uint32_t stages = shared_address(shared) + warp * Tile::kStages * Layout<Tile>::kStage;
  int* const filled = reinterpret_cast<int*>(shared + layout.filled) + warp * Tile::kStages;
  RowReader<Tile, kQuantized> reader(a, plan, source, warp, lane, stages, filled);
  std::conditional_t<kQuantized, typename OfQuantized<Tile>::Type, Tile> tile(
      a.group, a.scale_log2, lane, reinterpret_cast<float*>(shared + layout.scratch + warp * Tile::kScratchBytes));
  bool settled = false;
  int parity = 0;
#pragma unroll 1  // of all loops that hold much code: what a block must fetch first is what it waits for
  for (bool again = true; again;) {
    again = false;
    if (warp == 0) {
      const SourceLoads loads(a, lane);
      const Lengths lengths = lengths_of(a, 1, lane);
      const Source now = find_source(a, loads, settled);
      if (lane == 0) source = now;
      plan_line<Tile::kUnitRows>(a, 1, lengths, now.slot_counts, plan, places[1], W, &shares[1], lane);
    } else if (warp == 1) {
      plan_line<Tile::kUnitRows>(a, 0, lengths_of(a, 0, lane), nullptr, plan, places[0], W, &shares[0], lane);
    } else if (warp == 2) {
      const Progress now = find_progress(a, settled, lane);
      if (lane == 0) progress = now;
    }
    arrive(kPlanned, (W + 1) * 32);  // without waiting for the last warp, which may still be waiting itself
    barrier(kReaders, W * 32);
    const bool early = progress.ready && a.engine.flags != nullptr;
    const int lead = early ? 1 : 0;
    reader.start(shares, lead, progress.ready);
#pragma unroll 1
    for (int s = 0; s < Tile::kStages; ++s) {
      if (!settled && !(early && reader.selected_is_next())) {
        wait_for_previous_kernel();
        settled = true;
      }
      reader.issue(s);
    }
    if (!settled) wait_for_previous_kernel();
    settled = true;

    int slot = 0;
    bool checked = false;
#pragma unroll 1
    for (int part = 0; part < 2 && !again; ++part) {
      const int line = part == 0 ? lead : 1 - lead;
      const Share share = shares[line];
      const int* const starts = plan.before(line);
      const int end = share.begin + share.count;
      int next = share.begin + RowReader<Tile, kQuantized>::first_unit(line, warp);
#pragma unroll 1
      for (int head = share.head; share.count > 0 && head < a.heads(line) && starts[head] < end; ++head) {
        if (starts[head] == starts[head + 1]) continue;
        const int last = min(end, starts[head + 1]);
        const T* const query = static_cast<const T*>(a.query) + static_cast<size_t>(a.kv_head(line, head)) * a.group * D;
        tile.begin(query);
#pragma unroll 1
        for (; next < last; next += W) {
          wait_copies<Tile::kStages - 1>();
          __syncwarp();
          add_unit<Tile, kQuantized>(tile, reader, slot, shared + (warp * Tile::kStages + slot) * Layout<Tile>::kStage,
                                     a.format, query, lane);
          __syncwarp();
          reader.issue(slot);
          if (++slot == Tile::kStages) slot = 0;
        }
        float* acc = reinterpret_cast<float*>(shared + layout.acc) + parity * W * a.group * (D + 4);
        float2* state = reinterpret_cast<float2*>(shared + layout.state) + parity * W * a.group;
        tile.finish(acc + warp * a.group * (D + 4), state + warp * a.group);
        // One barrier is enough: who comes back to this half has passed the barrier of the other one since.
        if (checked) {
          barrier(kReaders, W * 32);
        } else {
          barrier(kChecked, (W + 1) * 32);
          checked = true;
          again = changed;
          if (again) break;
        }
        write_fragment<Tile>(a, a.first_slot(line) + (line == 0 ? places[0] : places[1]) + head, acc, state, tid);
        parity ^= 1;
      }
    }
    if (!checked) {
      barrier(kChecked, (W + 1) * 32);
      checked = true;
      again = changed;
    }
    if (again) wait_copies<0>();
  }
}

}  // namespace clo::cuda
