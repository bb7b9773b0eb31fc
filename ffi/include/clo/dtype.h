// Element types of activations and KV rows, and their conversion to the float that every kernel computes in.
#pragma once

#include <cstdint>
#include <cstring>

namespace clo {

enum class DType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

constexpr int64_t dtype_bytes(DType t) { return t == DType::kF32 ? 4 : 2; }

struct BF16 {
  uint16_t bits;
};

struct F16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(BF16 x) {
  uint32_t u = static_cast<uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

inline float to_float(F16 x) {
  uint32_t u = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  float f;
  if (u < 0x00800000u) {
    // From its integer, because the mode that flushes denormals would lose the shifted bits.
    f = static_cast<float>(x.bits & 0x3ffu) * 5.9604644775390625e-08f;
    std::memcpy(&u, &f, 4);
  } else {
    u += u >= 0x0f800000u ? 224u << 23 : 112u << 23;  // infinity and NaN, or a normal number
  }
  u |= static_cast<uint32_t>(x.bits >> 15) << 31;
  std::memcpy(&f, &u, 4);
  return f;
}

inline void from_float(float f, float* out) { *out = f; }

// Round to nearest even, as XLA does; a NaN keeps a set mantissa bit.
inline void from_float(float f, BF16* out) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) {
    out->bits = static_cast<uint16_t>((u >> 16) | 0x40u);
    return;
  }
  out->bits = static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// The same; what rounds beyond the largest finite half becomes infinity.
inline void from_float(float f, F16* out) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  const uint32_t sign = u >> 16 & 0x8000u;
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) {
    u = 0x7e00u | (u >> 13 & 0x3ffu);
  } else if (u >= 0x477ff000u) {  // 65520: halfway to the power of two that is none
    u = 0x7c00u;
  } else if (u < 0x38800000u) {  // below the smallest normal half: 0.5 has the spacing of subnormal halves
    float magnitude;
    std::memcpy(&magnitude, &u, 4);
    magnitude += 0.5f;
    std::memcpy(&u, &magnitude, 4);
    u -= 0x3f000000u;
  } else {
    u = (u + 0xfffu + ((u >> 13) & 1u) - (112u << 23)) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | u);
}

// The one of three that is for the element type.
template <typename T>
constexpr T choose(DType t, T f32, T bf16, T f16) {
  return t == DType::kF32 ? f32 : t == DType::kBF16 ? bf16 : f16;
}

// Calls f with a null pointer of the element type that `t` names: dispatch(t, [&](auto* tag) { using T = ...; }).
template <typename F>
auto dispatch(DType t, F&& f) {
  if (t == DType::kF16) return f(static_cast<F16*>(nullptr));
  if (t == DType::kBF16) return f(static_cast<BF16*>(nullptr));
  return f(static_cast<float*>(nullptr));
}

}  // namespace clo
