// Rows of activations to quantized rows (clo/row_format.h).
#pragma once

#include <cstdint>

#include "clo/protocol.h"

namespace clo {

// rows: [count, 2, D] of `dtype`. out: [count] rows of `format`, which is not kPlain.
void quantize_rows(const void* rows, int64_t count, int64_t head_dim, DType dtype, RowFormat format, uint8_t* out);

}  // namespace clo
