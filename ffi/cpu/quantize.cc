#include "cpu/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

namespace clo {
namespace {

uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

float from_bits(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

uint8_t to_int8(float x) {
  const float clamped = std::min(std::max(std::nearbyint(x), -kLargestInt8), kLargestInt8);
  return static_cast<uint8_t>(static_cast<int8_t>(clamped));
}

// Round to nearest even, at most 448.
uint8_t to_fp8(float x) {
  const uint32_t u = bits_of(x), magnitude = u & 0x7fffffffu;
  uint32_t code;
  if (magnitude < 0x3c800000u) {  // below the smallest normal number, 2^-6: 2^14 has the spacing of subnormal ones
    code = bits_of(from_bits(magnitude) + 16384.0f) - bits_of(16384.0f);
  } else {
    code = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u) - (120u << 23)) >> 20;
  }
  return static_cast<uint8_t>(std::min(code, 0x7eu) | (u >> 24 & 0x80u));
}

// One group of channels; returns its scale.
uint16_t quantize_group(const float* x, int64_t count, RowFormat format, uint8_t* out) {
  uint32_t top = 0;  // NaN compares as larger than infinity
  for (int64_t i = 0; i < count; ++i) top = std::max(top, bits_of(x[i]) & 0x7fffffffu);
  if (top >= 0x7f800000u || from_bits(top) < kSmallestAmax) {
    std::memset(out, 0, static_cast<size_t>(count));
    return top >= 0x7f800000u ? kScaleNaN : 0;
  }
  const float largest = format == RowFormat::kInt8 ? kLargestInt8 : kLargestFp8;
  const auto scale = static_cast<uint16_t>((bits_of(from_bits(top) * (1.0f / largest)) + 0xffffu) >> 16);
  const float inverse = 1.0f / from_bits(static_cast<uint32_t>(scale) << 16);
  if (format == RowFormat::kInt8)
    for (int64_t i = 0; i < count; ++i) out[i] = to_int8(x[i] * inverse);
  else
    for (int64_t i = 0; i < count; ++i) out[i] = to_fp8(x[i] * inverse);
  return scale;
}

}  // namespace

void quantize_rows(const void* rows, int64_t count, int64_t head_dim, DType dtype, RowFormat format, uint8_t* out) {
  const int64_t width = head_dim / kScaleGroups;
  std::vector<float> x(2 * head_dim);
  dispatch(dtype, [&](auto* tag) {
    const auto* from = static_cast<const std::remove_pointer_t<decltype(tag)>*>(rows);
    for (int64_t r = 0; r < count; ++r, from += 2 * head_dim, out += row_bytes(head_dim, dtype, format)) {
      for (size_t i = 0; i < x.size(); ++i) x[i] = to_float(from[i]);
      for (int64_t g = 0; g < 2 * kScaleGroups; ++g) {
        const uint16_t scale = quantize_group(x.data() + g * width, width, format, out + g * width);
        std::memcpy(out + 2 * head_dim + 2 * g, &scale, 2);
      }
    }
  });
}

}  // namespace clo
