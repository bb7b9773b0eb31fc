// Sources of windows onto the current CUDA device. Each constructor throws std::runtime_error that says what is missing.
#pragma once

#include <memory>

#include "host/backends/window.h"

namespace clo {

std::unique_ptr<WindowSource> make_gdr_windows();     // libgdrapi and gdrdrv, over memory of cudaMalloc
std::unique_ptr<WindowSource> make_vulkan_windows();  // memory of Vulkan, imported into CUDA

// The first of them that can be had and whose stores a kernel sees. Throws std::runtime_error with the reason of each
// that cannot. One for each device, for all engines.
std::shared_ptr<WindowSource> find_windows();

}  // namespace clo
