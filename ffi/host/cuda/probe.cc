#include "host/backends/probe.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <exception>
#include <vector>

#include "host/cuda/windows.h"
#include "host/engine.h"

namespace clo {
namespace {

constexpr int64_t kHeads = 2, kTokens = 64, kSlots = 16, kHeadDim = 64;
constexpr double kTimeoutS = 5;

std::string how_it_moves(const std::string& name) {
  if (name == "pull") return "kernels read pinned host memory";
  if (name == "staged") return "CPU threads gather rows for the copy engine";
  const FoundWindows found = find_windows();
  const std::string skipped = found.skipped.empty() ? "" : " (" + found.skipped + ")";
  return std::string("CPU threads write through the PCIe BAR, mapped by ") + found.source->name() + skipped;
}

std::string try_copy(Engine& engine) {
  const LayerView v = engine.layer(0);
  const int64_t bytes = row_bytes(v);
  auto* rows = static_cast<uint8_t*>(v.host_rows);
  for (int64_t i = 0; i < kHeads * kTokens * bytes; ++i) rows[i] = static_cast<uint8_t>(i * 167 >> 8 ^ i);
  std::vector<int32_t> counts(kHeads, kSlots), tokens, slots;
  for (int64_t h = 0; h < kHeads; ++h)
    for (int64_t i = 0; i < kSlots; ++i) {
      tokens.push_back(static_cast<int32_t>((i * 29 + h) % kTokens));
      slots.push_back(static_cast<int32_t>(kSlots - 1 - i));
    }
  engine.copy(v.request.counts, counts.data(), kHeads * 4);
  engine.copy(v.request.tokens, tokens.data(), kHeads * kSlots * 4);
  engine.copy(v.request.slots, slots.data(), kHeads * kSlots * 4);
  engine.post(0);
  const std::string why = engine.wait(0);
  if (!why.empty()) return why;
  std::vector<uint8_t> arrived(static_cast<size_t>(kHeads * kSlots * bytes));
  engine.copy(arrived.data(), v.selected_rows, static_cast<int64_t>(arrived.size()));
  for (int64_t i = 0; i < kHeads * kSlots; ++i) {
    const int64_t head = i / kSlots;
    const uint8_t* want = rows + (head * kTokens + tokens[static_cast<size_t>(i)]) * bytes;
    const uint8_t* got = arrived.data() + (head * kSlots + slots[static_cast<size_t>(i)]) * bytes;
    if (std::memcmp(want, got, static_cast<size_t>(bytes)) != 0) return "its probe copy arrived wrong";
  }
  return {};
}

}  // namespace

std::string probe_device(int* device) {
  int devices = 0;
  cudaError_t error = cudaGetDeviceCount(&devices);
  if (error == cudaSuccess && devices > 0) error = cudaGetDevice(device);
  if (error == cudaSuccess && devices > 0) return {};
  cudaGetLastError();  // not sticky: the next call must not report it again
  return "no GPU: " + std::string(cudaGetErrorString(error == cudaSuccess ? cudaErrorNoDevice : error));
}

std::string probe_backend(const std::string& name, std::string* how) {
  EngineConfig c;
  c.kv_heads = {kHeads};
  c.batch = 1;
  c.max_tokens = kTokens;
  c.num_slots = kSlots;
  c.head_dim = kHeadDim;
  c.dtype = DType::kBF16;
  c.threads = 1;
  c.timeout_s = kTimeoutS;
  c.backend = name;
  try {
    Engine engine(c, Engine::kUnprobed);
    *how = how_it_moves(name);
    return try_copy(engine);
  } catch (const std::exception& e) {
    return e.what();
  }
}

}  // namespace clo
