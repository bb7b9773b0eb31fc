// Whether a backend of a GPU works here: by a copy of a few rows through an engine of its own.
#pragma once

#include <string>

namespace clo {

// The current device of CUDA; empty, or why there is none.
std::string probe_device(int* device);

// Empty when the copy arrived, with how the rows go in words; else why not.
std::string probe_backend(const std::string& name, std::string* how);

}  // namespace clo
