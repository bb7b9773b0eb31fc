// The transfer engine in the Python module clo_jax._host.
#pragma once

#include <nanobind/nanobind.h>

namespace clo {

// Adds the class Engine to the module.
void bind_engine(nanobind::module_& m);

}  // namespace clo
