// The Python module clo_jax._host: build facts, the FFI targets and the transfer engine. Typed Python wrappers live in
// clo_jax/ops and clo_jax/transfer; nothing else imports this module.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>
#include <utility>

#include "cpu/simd/dispatch.h"
#include "host/backends/backend.h"
#include "host/engine.h"
#include "python/engine_bindings.h"
#include "xla/handlers.h"

#if CLO_CUDA_BUILD
#include "cuda/kernels.h"
#include "host/cuda/device_memory.h"
#include "xla/common.h"
#endif

namespace nb = nanobind;

namespace {

nb::dict registrations(const std::string& platform) {
  nb::dict targets;
  if (platform == "cpu") {
#define CLO_REGISTER(name) targets["clo_" #name] = nb::capsule(reinterpret_cast<void*>(&clo_##name));
    CLO_HANDLERS(CLO_REGISTER)
#undef CLO_REGISTER
  }
#if CLO_CUDA_BUILD
  if (platform == "CUDA") {
#define CLO_REGISTER(name) targets["clo_" #name] = nb::capsule(reinterpret_cast<void*>(&clo_##name##_cuda));
    CLO_CUDA_HANDLERS(CLO_REGISTER)
#undef CLO_REGISTER
  }
#endif
  return targets;
}

// Bytes of scratch that the CUDA kernel wants as a further result; 0 without CUDA, or without a device.
int64_t select_topk_workspace([[maybe_unused]] int64_t batch, [[maybe_unused]] int64_t kv_heads,
                              [[maybe_unused]] int64_t group, [[maybe_unused]] int64_t head_dim,
                              [[maybe_unused]] int64_t bits, [[maybe_unused]] int64_t max_tokens,
                              [[maybe_unused]] int64_t retriever) {
#if CLO_CUDA_BUILD
  clo::SelectTopkParams p{};
  p.batch = batch;
  p.kv_heads = kv_heads;
  p.group = group;
  p.head_dim = head_dim;
  p.bits = bits;
  p.max_tokens = max_tokens;
  p.retriever = static_cast<clo::Retriever>(retriever);
  return static_cast<int64_t>(clo::cuda::select_topk_workspace_bytes(p));
#else
  return 0;
#endif
}

// The same for clo_prefetch, by the engine that the call names: 0 for one that serves the CPU, or is closed.
int64_t prefetch_workspace([[maybe_unused]] int64_t engine, [[maybe_unused]] int64_t kv_heads,
                           [[maybe_unused]] int64_t group, [[maybe_unused]] int64_t bits,
                           [[maybe_unused]] int64_t retriever) {
#if CLO_CUDA_BUILD
  const std::shared_ptr<clo::Engine> found = clo::find_engine(engine);
  if (found == nullptr || found->device() == nullptr) return 0;
  clo::PrefetchParams p{};
  const int64_t layers = static_cast<int64_t>(found->config().kv_heads.size());
  for (int64_t i = 0; i < layers && p.view.kv_heads != kv_heads; ++i) p.view = found->layer(i);
  p.select.batch = p.view.batch;
  p.select.kv_heads = kv_heads;
  p.select.group = group;
  p.select.head_dim = p.view.head_dim;
  p.select.bits = bits;
  p.select.max_tokens = p.view.max_tokens;
  p.select.retriever = static_cast<clo::Retriever>(retriever);
  return static_cast<int64_t>(clo::cuda::prefetch_workspace_bytes(p));
#else
  return 0;
#endif
}

// The same for clo_attend.
int64_t attend_workspace([[maybe_unused]] int64_t batch, [[maybe_unused]] int64_t offloaded,
                         [[maybe_unused]] int64_t resident, [[maybe_unused]] int64_t group,
                         [[maybe_unused]] int64_t head_dim, [[maybe_unused]] int64_t bits) {
#if CLO_CUDA_BUILD
  clo::AttendParams p{};
  p.batch = batch;
  p.offloaded_heads = offloaded;
  p.resident_heads = resident;
  p.group = group;
  p.head_dim = head_dim;
  p.bits = bits;
  return static_cast<int64_t>(clo::cuda::attend_workspace_bytes(p));
#else
  return 0;
#endif
}

// (free, all) bytes of the device; None without CUDA.
nb::object device_bytes() {
#if CLO_CUDA_BUILD
  int64_t free = 0, total = 0;
  clo::device_bytes(&free, &total);
  return nb::make_tuple(free, total);
#else
  return nb::none();
#endif
}

int64_t handler_launches() {
#if CLO_CUDA_BUILD
  return clo::handler_launches.load();
#else
  return 0;
#endif
}

nb::list backends() {
  nb::list list;
  for (const clo::BackendInfo& b : clo::list_backends()) list.append(nb::make_tuple(b.name, b.available, b.reason));
  return list;
}

std::pair<bool, std::string> find_backend(const std::string& name) {
  const clo::BackendInfo found = clo::find_backend(name);
  return {found.available, found.reason};
}

nb::dict build_info() {
  nb::dict info;
  info["jaxlib"] = CLO_JAXLIB_VERSION;
  info["compiler"] = CLO_COMPILER;
  info["build_type"] = CLO_BUILD_TYPE;
  info["cuda"] = static_cast<bool>(CLO_CUDA_BUILD);
  return info;
}

}  // namespace

NB_MODULE(_host, m) {
  m.def("registrations", &registrations, nb::arg("platform"),
        "FFI target name -> capsule, for platform cpu or CUDA; empty for a platform that this module is not built for.");
  m.def("select_topk_workspace", &select_topk_workspace, nb::kw_only(), nb::arg("batch"), nb::arg("kv_heads"),
        nb::arg("group"), nb::arg("head_dim"), nb::arg("bits"), nb::arg("max_tokens"), nb::arg("retriever"),
        "Bytes of scratch that clo_select_topk wants as its second result on this machine's device.");
  m.def("prefetch_workspace", &prefetch_workspace, nb::kw_only(), nb::arg("engine"), nb::arg("kv_heads"),
        nb::arg("group"), nb::arg("bits"), nb::arg("retriever"),
        "Bytes of scratch that clo_prefetch wants as its last result for this engine.");
  m.def("attend_workspace", &attend_workspace, nb::kw_only(), nb::arg("batch"), nb::arg("offloaded"),
        nb::arg("resident"), nb::arg("group"), nb::arg("head_dim"), nb::arg("bits"),
        "Bytes of scratch that clo_attend wants as its last result.");
  m.def("device_bytes", &device_bytes, "(free, all) bytes of the CUDA device; None in a build without CUDA.");
  m.def("handler_launches", &handler_launches, "Launches by FFI handlers on a GPU so far; a captured call counts once.");
  m.def("backends", &backends,
        "(name, available, reason) of every transfer backend in the order of \"auto\", each after a copy of some rows.");
  m.def("find_backend", &find_backend, nb::arg("name"), "(available, reason) of one of them.");
  m.def("instruction_set", [] { return std::string(clo::isa_name()); },
        "Of the CPU kernels: generic, avx2 or avx512. ValueError when CLO_JAX_ISA names none that works here.");
  m.def("build_info", &build_info, "How this module was built: jaxlib headers, compiler, build type, CUDA.");
  clo::bind_engine(m);
}
