// The query's side of the hash codes, shared by the kernels that select.
#pragma once

#include <cstdint>

#include "cpu/simd/codes.h"

namespace clo {

// z = q·W of each query, rounded to 15 levels: step = max|z| / 7 and levels = round(z / step) in [-7, 7], ties to even.
// All are 0 when z is zero or not finite. query [count, dim], levels [count, bits], steps [count].
void encode_query_sign(const float* query, int64_t count, const Weights& weights, int8_t* levels, float* steps);

}  // namespace clo
