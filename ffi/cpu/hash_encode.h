// The query's side of the hash codes, shared by the kernels that select.
#pragma once

#include <cstdint>

#include "cpu/simd/codes.h"

namespace clo {

// Weights [dim, bits] as they lie in memory.
inline Panels panels(const float* weights, int64_t dim, int64_t bits) { return {weights, bits, 32, bits / 32, dim}; }

// z = q·W of each query, rounded to 15 levels: step = max|z| / 7 and levels = round(z / step) in [-7, 7], ties to even.
// All are 0 when z is zero or not finite. query [count, dim], levels [count, bits], steps [count].
void encode_query_sign(const float* query, int64_t count, const Panels& weights, int8_t* levels, float* steps);

}  // namespace clo
