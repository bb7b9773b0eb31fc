// Element types of activations and KV rows, and their conversion to the float that every kernel computes in.
#pragma once

#include <cstdint>
#include <cstring>

namespace clo {

enum class DType : int32_t { kF32 = 0, kBF16 = 1 };

constexpr int64_t dtype_bytes(DType t) { return t == DType::kF32 ? 4 : 2; }

struct BF16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(BF16 x) {
  uint32_t u = static_cast<uint32_t>(x.bits) << 16;
  float f;
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

// Calls f with a null pointer of the element type that `t` names: dispatch(t, [&](auto* tag) { using T = ...; }).
template <typename F>
auto dispatch(DType t, F&& f) {
  if (t == DType::kBF16) return f(static_cast<BF16*>(nullptr));
  return f(static_cast<float*>(nullptr));
}

}  // namespace clo
