// The Python module clo_jax._host: build facts and the FFI targets. Typed Python wrappers live in clo_jax/ops and
// clo_jax/transfer; nothing else imports this module.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "cpu/simd/dispatch.h"
#include "xla/handlers.h"

namespace nb = nanobind;

namespace {

nb::dict registrations() {
  nb::dict targets;
#define CLO_REGISTER(name) targets["clo_" #name] = nb::capsule(reinterpret_cast<void*>(&clo_##name));
  CLO_HANDLERS(CLO_REGISTER)
#undef CLO_REGISTER
  return targets;
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
  m.def("registrations", &registrations, "FFI target name -> capsule, for platform cpu.");
  m.def("build_info", &build_info, "How this module was built: jaxlib headers, compiler, build type, CUDA.");
  m.def("isa", &clo::isa_name, "Instruction set of the CPU kernels: generic, avx2 or avx512 (CLO_JAX_ISA overrides).");
}
