// attend on a GPU, in two launches: every row is read once by a grid of about one block per multiprocessor, which leaves
// partial results of (block, head) pairs, the fragments; a second, small kernel beside it merges them as they come. The
// order of all sums is fixed by the lengths alone.
#include <algorithm>

#include "clo/softmax_state.h"
#include "cuda/attend/args.cuh"
#include "cuda/attend/fma.cuh"
#include "cuda/attend/merge.cuh"
#include "cuda/attend/mma.cuh"
#include "cuda/attend/plan.cuh"
#include "cuda/attend/read_rows.cuh"
#include "cuda/check.h"
#include "cuda/kernels.h"

namespace clo::cuda {
namespace {

constexpr int kMaxHeads = 2048;  // B·K: the plan of all heads is in shared memory

// Fragments of both lines: a line of n blocks and h heads has at most n + h.
size_t slots(const AttendParams& p) { return 2 * kMaxBlocks + p.batch * (p.offloaded_heads + p.resident_heads); }

// Before the kernels in front of it are over; how far it may go then is the kernel's affair.
cudaError_t launch_early(void (*kernel)(AttendArgs), int blocks, int threads, size_t shared_bytes, const AttendArgs& args,
                         cudaStream_t stream) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args);
}

template <class Tile>
cudaError_t launch(const AttendArgs& args, cudaStream_t stream) {
  const int heads = args.batch * (args.offloaded + args.resident);
  const size_t bytes = Layout<Tile>(args.group, heads).total;
  void (*const read)(AttendArgs) =
      args.format == RowFormat::kPlain ? read_rows<Tile, false> : read_rows<Tile, true>;
  CLO_CUDA_RETURN(cudaFuncSetAttribute(read, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(bytes)));
  // Merging blocks come to the multiprocessors beside those that read, if these leave them some shared memory.
  for (const auto kernel : {read, merge_fragments<Tile>})
    CLO_CUDA_RETURN(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                         cudaSharedmemCarveoutMaxShared));
  CLO_CUDA_RETURN(launch_early(read, args.blocks, (Tile::kWarps + 1) * 32, bytes, args, stream));
  return launch_early(merge_fragments<Tile>, heads * args.group, kMergeThreads, 0, args, stream);
}

template <int D>
using BFloatTile = MmaTile<D, __nv_bfloat16>;
template <int D>
using HalfTile = MmaTile<D, __half>;

template <template <int> class Tile>
cudaError_t launch_dim(int64_t head_dim, const AttendArgs& args, cudaStream_t stream) {
  switch (head_dim) {
    case 64: return launch<Tile<64>>(args, stream);
    case 80: return launch<Tile<80>>(args, stream);
    case 96: return launch<Tile<96>>(args, stream);
    case 128: return launch<Tile<128>>(args, stream);
    case 256: return launch<Tile<256>>(args, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

size_t attend_workspace_bytes(const AttendParams& p) {
  return slots(p) * p.group * (p.head_dim + 2) * 4 + p.batch * p.offloaded_heads * (p.bits / 32) * 4;
}

cudaError_t attend(const AttendParams& p, const EngineRef& engine, void* workspace, cudaStream_t stream) {
  const int64_t heads = p.batch * (p.offloaded_heads + p.resident_heads);
  if (heads < 1 || heads > kMaxHeads || p.group < 1 || p.group > 8 || p.bits % 32 != 0) return cudaErrorInvalidValue;
  int device, multiprocessors;
  CLO_CUDA_RETURN(cudaGetDevice(&device));
  CLO_CUDA_RETURN(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  AttendArgs a{};
  a.batch = static_cast<int>(p.batch);
  a.offloaded = static_cast<int>(p.offloaded_heads);
  a.resident = static_cast<int>(p.resident_heads);
  a.group = static_cast<int>(p.group);
  a.words = static_cast<int>(p.bits / 32);
  a.max_tokens = static_cast<int>(p.max_tokens);
  a.tail_rows = static_cast<int>(p.tail_rows);
  a.sink = static_cast<int>(p.sink);
  a.num_slots = static_cast<int>(p.view.num_slots);
  a.format = p.view.format;
  a.scale_log2 = p.scale * kLog2E;
  a.query = p.query;
  a.key = p.key;
  a.value = p.value;
  a.weights = p.weights;
  a.mean = p.mean;
  a.position = p.position;
  a.flushed = p.flushed;
  a.resident_rows = static_cast<char*>(p.resident);
  a.tail = static_cast<char*>(p.tail);
  a.codes = p.codes;
  a.factors = p.factors;
  a.out = p.out;
  a.lse = p.lse;
  a.engine = engine;
  // The transfer kernel has its multiprocessors to itself; where rows stay put all the same, so that offloading does not
  // move the cuts and with them the rounding.
  a.blocks = std::clamp(multiprocessors - (p.offloaded_heads > 0 ? kTransferBlocks : 0), 1, kMaxBlocks);
  a.acc = static_cast<float*>(workspace);
  a.state = reinterpret_cast<float2*>(a.acc + slots(p) * p.group * p.head_dim);
  a.magnitudes = reinterpret_cast<float*>(a.state + slots(p) * p.group);
  return choose(p.dtype, launch_dim<FmaTile>, launch_dim<BFloatTile>, launch_dim<HalfTile>)(p.head_dim, a, stream);
}

}  // namespace clo::cuda
