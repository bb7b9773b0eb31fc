// Selection of the k best keys of every head, in two kernels: the projections of the queries (select_encode.cu), and this.
//
// The blocks share out the heads that select. Those of a head score a part of its keys each, into 16-bit ranks that stay in
// shared memory, count them, and exchange their counts, which tells every block the rank of the k-th best key and how many
// keys the parts before its own contribute. So each compacts its keys, ascending, straight to their final places. Where
// there are more ranks than bins, the histogram covers those around which the k-th is expected; should it lie outside, two
// more histograms find it, by leading bits and by the others.
#include <algorithm>

#include "cuda/check.h"
#include "cuda/select_kernel.cuh"
#include "cuda/select_topk.cuh"

namespace clo::cuda {
namespace {

using Kernel = void (*)(SelectArguments);

template <Retriever kRetriever, bool kFast, bool kLocal>
Kernel pick_codes(bool two_sets) {
  return two_sets ? select_kernel<kRetriever, 2, kFast, kLocal, float> : select_kernel<kRetriever, 1, kFast, kLocal, float>;
}

template <Retriever kRetriever>
Kernel pick_codes(bool two_sets, bool fast, bool local) {
  if (!fast) return pick_codes<kRetriever, false, false>(two_sets);
  return local ? pick_codes<kRetriever, true, true>(two_sets) : pick_codes<kRetriever, true, false>(two_sets);
}

template <typename T>
Kernel pick_rows(bool two_sets) {
  return two_sets ? select_kernel<Retriever::kExact, 2, false, false, T>
                  : select_kernel<Retriever::kExact, 1, false, false, T>;
}

Kernel pick(const SelectTopkParams& p, const Plan& plan) {
  const bool two = p.group > 4, fast = p.bits == kFastBits;
  if (p.retriever == Retriever::kHata) return pick_codes<Retriever::kHata>(two, fast, plan.shared_ranks);
  if (p.retriever == Retriever::kSign) return pick_codes<Retriever::kSign>(two, fast, plan.shared_ranks);
  return choose(p.dtype, pick_rows<float>(two), pick_rows<BFloat>(two), pick_rows<Half>(two));
}

cudaError_t grid_size(int* grid) {
  int device = 0, processors = 0;
  CLO_CUDA_RETURN(cudaGetDevice(&device));
  CLO_CUDA_RETURN(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  *grid = std::max(1, std::min(kMaxBlocks, processors - kTransferBlocks));
  return cudaSuccess;
}

// Where the parts of the workspace are.
struct Layout {
  size_t published, counters, cleared, queries, largest, offsets, ranks, end;
};

Layout lay_out(const SelectTopkParams& p, const Plan& plan, int grid) {
  const auto heads = static_cast<size_t>(p.batch * p.kv_heads), words = static_cast<size_t>(p.bits / 32);
  const size_t queries = heads * static_cast<size_t>(p.group);
  const bool hata = p.retriever == Retriever::kHata, sign = p.retriever == Retriever::kSign;
  Layout l{};
  l.counters = l.published + static_cast<size_t>(grid * exchange_words(plan.fine)) * sizeof(uint32_t);
  l.cleared = l.counters + static_cast<size_t>(grid * kCounterWords) * sizeof(uint32_t);
  l.queries = align(l.cleared, 256);
  l.largest = l.queries + (hata ? heads * (kPlanes + 1) * words : sign ? queries * words * 32 : 0) * sizeof(uint32_t);
  l.offsets = l.largest + (sign ? queries * words : 0) * sizeof(uint32_t);
  l.ranks = align(l.offsets + queries * sizeof(float), 256);
  l.end = l.ranks + (plan.shared_ranks ? 0 : static_cast<size_t>(grid) * plan.rank_bytes);
  return l;
}

cudaError_t make_arguments(const SelectTopkParams& p, void* workspace, SelectArguments* a) {
  if (p.group > kMaxGroup || p.batch * p.kv_heads >= 1 << 16) return cudaErrorInvalidValue;
  CLO_CUDA_RETURN(grid_size(&a->grid));
  a->p = p;
  a->plan = make_plan(p, a->grid);
  a->kv_heads = Divisor(p.kv_heads);
  const Layout layout = lay_out(p, a->plan, a->grid);
  auto* memory = static_cast<unsigned char*>(workspace);
  a->published = reinterpret_cast<uint32_t*>(memory + layout.published);
  a->counters = reinterpret_cast<uint32_t*>(memory + layout.counters);
  a->encoded.planes = reinterpret_cast<uint32_t*>(memory + layout.queries);
  a->encoded.z = reinterpret_cast<float*>(memory + layout.queries);
  a->encoded.largest = reinterpret_cast<uint32_t*>(memory + layout.largest);
  a->encoded.offsets = reinterpret_cast<float*>(memory + layout.offsets);
  a->encoded.clear = reinterpret_cast<uint4*>(memory);
  a->encoded.clear_words = static_cast<int>(layout.cleared / sizeof(uint4));
  a->ranks = memory + layout.ranks;
  return cudaSuccess;
}

// The blocks of a head wait for each other, so all of the grid must come to run. It does: there is a multiprocessor for each
// block (no two fit on one), kTransferBlocks are left to the transfer kernel; earlier kernels of the stream end, for they do
// not wait for this one; and later ones start when every block of this one has let them (wait_for_queries) and so runs.
// Should another stream hold multiprocessors for good all the same, the waits end with the time limit.
cudaError_t launch(const SelectTopkParams& p, const SelectOptions& options, void* workspace, bool early,
                   cudaStream_t stream) {
  SelectArguments a{};
  CLO_CUDA_RETURN(make_arguments(p, workspace, &a));
  a.options = options;
  a.early = early;
  const Kernel kernel = pick(p, a.plan);
  const auto bytes = static_cast<size_t>(a.plan.shared_bytes);
  CLO_CUDA_RETURN(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  CLO_CUDA_RETURN(share_multiprocessor(reinterpret_cast<const void*>(kernel)));
  cudaLaunchAttribute overlap = overlaps_earlier();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(a.grid));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, a);
}

}  // namespace

size_t select_topk_workspace_bytes(const SelectTopkParams& p) {
  int grid = 0;
  if (grid_size(&grid) != cudaSuccess) return 0;
  return lay_out(p, make_plan(p, grid), grid).end;
}

cudaError_t lookup_and_encode(const CacheLookupParams& lookup, const SelectTopkParams& p, uint32_t* clear, void* workspace,
                              cudaStream_t stream) {
  if (p.batch * p.kv_heads == 0) return cudaSuccess;
  SelectArguments a{};
  CLO_CUDA_RETURN(make_arguments(p, workspace, &a));
  return encode_queries(p, {&lookup, clear}, a.encoded, stream);
}

cudaError_t encode(const SelectTopkParams& p, void* workspace, cudaStream_t stream) {
  if (p.batch * p.kv_heads == 0) return cudaSuccess;
  SelectArguments a{};
  CLO_CUDA_RETURN(make_arguments(p, workspace, &a));
  return encode_queries(p, {nullptr, nullptr}, a.encoded, stream);
}

cudaError_t select_encoded(const SelectTopkParams& p, const SelectOptions& options, void* workspace, cudaStream_t stream) {
  if (p.batch * p.kv_heads == 0) return cudaSuccess;
  return launch(p, options, workspace, false, stream);
}

cudaError_t select(const SelectTopkParams& p, const SelectOptions& options, void* workspace, cudaStream_t stream) {
  if (p.batch * p.kv_heads == 0) return cudaSuccess;
  CLO_CUDA_RETURN(encode(p, workspace, stream));
  return launch(p, options, workspace, true, stream);
}

cudaError_t select_topk(const SelectTopkParams& p, void* workspace, cudaStream_t stream) {
  return select(p, {{nullptr, nullptr}, true, nullptr, nullptr, 0}, workspace, stream);
}

}  // namespace clo::cuda
