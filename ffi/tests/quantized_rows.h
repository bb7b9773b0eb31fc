// Quantized rows (clo/row_format.h) read one element after the other, by nothing that the kernels share.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "clo/dtype.h"
#include "clo/row_format.h"

namespace clo::test {

// What a byte stands for, without its scale.
inline float decode(RowFormat format, uint8_t byte) {
  if (format == RowFormat::kInt8) return static_cast<float>(static_cast<int8_t>(byte));
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  const float sign = byte < 128 ? 1.0f : -1.0f;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -9);
  return sign * std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
}

// Scale of group 0 to 2·kScaleGroups - 1 of a row.
inline BF16 scale(const uint8_t* row, int64_t head_dim, int64_t group) {
  BF16 x;
  std::memcpy(&x, row + 2 * head_dim + 2 * group, sizeof x);
  return x;
}

inline float decode(const uint8_t* row, int64_t head_dim, RowFormat format, int64_t i) {
  return decode(format, row[i]) * to_float(scale(row, head_dim, i * kScaleGroups / head_dim));
}

// [count] rows of `format` to [count, 2, D] floats.
inline std::vector<float> dequantize(const uint8_t* rows, int64_t count, int64_t head_dim, RowFormat format) {
  std::vector<float> out;
  for (int64_t r = 0; r < count; ++r, rows += 2 * head_dim + kScaleBytes)
    for (int64_t i = 0; i < 2 * head_dim; ++i) out.push_back(decode(rows, head_dim, format, i));
  return out;
}

}  // namespace clo::test
