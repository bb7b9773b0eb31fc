// Sources of windows onto the current CUDA device. What makes one throws std::runtime_error that says what is missing.
#pragma once

#include <memory>
#include <string>

#include "host/backends/window.h"

namespace clo {

std::unique_ptr<WindowSource> make_gdr_windows();     // libgdrapi and gdrdrv, over memory of cudaMalloc
std::unique_ptr<WindowSource> make_vulkan_windows();  // memory of Vulkan, imported into CUDA

// The first of them that can be had and whose stores the GPU sees, and in `skipped` why not those before it. Throws
// std::runtime_error with the reason of each when there is none.
std::unique_ptr<WindowSource> choose_windows(std::string* skipped);

// The same, kept for each device: one source for all engines.
struct FoundWindows {
  std::shared_ptr<WindowSource> source;
  std::string skipped;
};
FoundWindows find_windows();

}  // namespace clo
