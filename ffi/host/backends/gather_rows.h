// Scattered rows of a request gathered one after the other, in the order of heads and moves.
#pragma once

#include <cstdint>

#include "host/backends/backend.h"

namespace clo {

// Copies the rows of these jobs to their places in `to`, which has room for the whole request.
void gather_rows(const LayerView& view, const Job* jobs, int64_t count, char* to);

}  // namespace clo
