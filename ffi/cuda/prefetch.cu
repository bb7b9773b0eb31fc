// prefetch on a GPU, a chain of kernels each of which starts while the one before it ends: lookup and projection of the
// queries, selection, difference to the slot table (with the post, and with the transfer where no resident kernel serves).
#include "cuda/check.h"
#include "cuda/difference.h"
#include "cuda/select_topk.cuh"

namespace clo::cuda {
namespace {

constexpr size_t kAlignment = 256;

constexpr size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Where the parts of the workspace are; the number of blocks that have ended comes first.
struct Layout {
  size_t bits, selection, difference, end;
};

Layout lay_out(const PrefetchParams& p) {
  const auto words = static_cast<size_t>(p.view.batch * p.view.kv_heads * ((p.view.max_tokens + 31) / 32));
  Layout l{};
  l.bits = kAlignment;
  l.selection = l.bits + aligned(words * sizeof(uint32_t));
  l.difference = l.selection + aligned(select_topk_workspace_bytes(p.select));
  l.end = l.difference + difference_workspace_bytes(p);
  return l;
}

}  // namespace

size_t prefetch_workspace_bytes(const PrefetchParams& p) { return lay_out(p).end; }

cudaError_t prefetch(const PrefetchParams& p, const EngineRef& engine, void* workspace, cudaStream_t stream) {
  if (p.view.batch * p.view.kv_heads == 0) return cudaSuccess;
  const Layout layout = lay_out(p);
  auto* memory = static_cast<unsigned char*>(workspace);
  auto* finished = reinterpret_cast<uint32_t*>(memory);
  auto* bits = reinterpret_cast<uint32_t*>(memory + layout.bits);
  SelectTopkParams select = p.select;
  select.indices = nullptr;
  CLO_CUDA_RETURN(lookup_and_encode(p.lookup, select, finished, memory + layout.selection, stream));
  CLO_CUDA_RETURN(select_encoded(select, {engine.layer, false, bits, engine.error, engine.timeout_ns},
                                 memory + layout.selection, stream));
  return difference(p, engine, {bits, finished}, memory + layout.difference, stream);
}

}  // namespace clo::cuda
