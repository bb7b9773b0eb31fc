// How the engine keeps rows: as activations are, or quantized to one byte an element.
//
// A quantized row is 2·D bytes, key then value, and the scales of their channel groups as bfloat16: four of the key, four
// of the value. An element is its byte times the scale of its group. int8 bytes are integers from -127 to 127, fp8 bytes
// are e4m3 (four bits of exponent, three of mantissa, no infinity) up to 448. A scale is the largest magnitude of its
// group over 127 or 448, rounded up, so that nothing is clipped. A group with a NaN or an infinity has scale NaN: it
// shows. One whose largest magnitude is below 2^-100 becomes zero.
#pragma once

#include <cstdint>

namespace clo {

enum class RowFormat : int32_t { kPlain = 0, kInt8 = 1, kFp8 = 2 };

constexpr int64_t kScaleGroups = 4;  // of a key's channels, and of a value's
constexpr int64_t kScaleBytes = 2 * kScaleGroups * 2;
constexpr float kLargestInt8 = 127.0f, kLargestFp8 = 448.0f;
constexpr float kSmallestAmax = 7.888609052210118e-31f;  // 2^-100
constexpr uint16_t kScaleNaN = 0x7fc0;

}  // namespace clo
