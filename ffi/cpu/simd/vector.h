// Float vectors as wide as the instruction set that this file is compiled for. For *_body.cc files only: everything here
// is static, because an inline function compiled for AVX-512 could be the copy that the linker keeps for everybody.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// CLO_TABLE(codes) is codes_table_avx2 in the file that is compiled for avx2.
#define CLO_PASTE_(name, isa) name##_table_##isa
#define CLO_PASTE(name, isa) CLO_PASTE_(name, isa)
#define CLO_TABLE(name) CLO_PASTE(name, CLO_ISA)

#define CLO_INLINE static inline __attribute__((always_inline))

namespace clo {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));

CLO_INLINE Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

CLO_INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

// Elements of 16 bits, as in clo/dtype.h, which only files compiled for one instruction set may include.
struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

typedef uint32_t BitVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes)));

// bfloat16 is the upper half of a float.
CLO_INLINE Vec load(const BF16* p) {
  HalfVec half;
  std::memcpy(&half, p, sizeof half);
  return (Vec)(__builtin_convertvector(half, BitVec) << 16);
}

CLO_INLINE Vec load(const F16* p) {
#if defined(__AVX512F__)
  return _mm512_maskz_cvtph_ps(~__mmask16{0}, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  HalfVec half;
  std::memcpy(&half, p, sizeof half);
  const BitVec bits = __builtin_convertvector(half, BitVec), value = (bits & 0x7fffu) << 13;
  const BitVec normal = value + (value >= 0x0f800000u ? BitVec{} + (224u << 23) : BitVec{} + (112u << 23));
  // From its integer, because the mode that flushes denormals would lose the shifted bits.
  const Vec subnormal = __builtin_convertvector((IntVec)(bits & 0x3ffu), Vec) * 5.9604644775390625e-08f;
  return (Vec)((value < 0x00800000u ? (BitVec)subnormal : normal) | (bits & 0x8000u) << 16);
#endif
}

// Elements of one byte, as in clo/row_format.h.
struct Int8 {
  int8_t value;
};
struct Fp8 {
  uint8_t bits;
};

typedef uint8_t ByteVec __attribute__((vector_size(kLanes)));
typedef int8_t SignedByteVec __attribute__((vector_size(kLanes)));

CLO_INLINE Vec load(const Int8* p) {
  SignedByteVec bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, IntVec), Vec);
}

// e4m3: the exponent's bias is 7. Subnormals from their integers, because the mode that flushes denormals would lose them.
CLO_INLINE Vec load(const Fp8* p) {
  ByteVec bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  const BitVec bits = __builtin_convertvector(bytes, BitVec), magnitude = bits & 0x7fu;
  const Vec subnormal = __builtin_convertvector((IntVec)magnitude, Vec) * 0.001953125f;
  const BitVec normal = (magnitude << 20) + (120u << 23);
  return (Vec)((magnitude < 8u ? (BitVec)subnormal : normal) | (bits & 0x80u) << 24);
}

CLO_INLINE Vec splat(float x) { return Vec{} + x; }

// Bit i is set iff lane i is greater than 0 (NaN is not).
CLO_INLINE uint32_t positive(Vec v) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_GT_OQ);
#elif defined(__AVX__)
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(v, _mm256_setzero_ps(), _CMP_GT_OQ)));
#elif defined(__SSE__)
  return static_cast<uint32_t>(_mm_movemask_ps(_mm_cmpgt_ps(v, _mm_setzero_ps())));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(v[i] > 0) << i;
  return bits;
#endif
}

// To the nearest integer, ties to even.
CLO_INLINE IntVec round_even(Vec v) {
#if defined(__AVX512F__)
  return reinterpret_cast<IntVec>(_mm512_maskz_cvtps_epi32(~__mmask16{0}, v));
#elif defined(__AVX__)
  return reinterpret_cast<IntVec>(_mm256_cvtps_epi32(v));
#elif defined(__SSE2__)
  return reinterpret_cast<IntVec>(_mm_cvtps_epi32(v));
#else
  IntVec out;
  for (int i = 0; i < kLanes; ++i) out[i] = static_cast<int32_t>(__builtin_nearbyintf(v[i]));
  return out;
#endif
}

// Sum of the lanes, by halves: the order is fixed by the width.
CLO_INLINE float sum(Vec v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

CLO_INLINE float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

CLO_INLINE uint32_t float_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

CLO_INLINE float half_to_float(uint16_t half) {
  const uint32_t shifted = static_cast<uint32_t>(half & 0x7fffu) << 13, sign = static_cast<uint32_t>(half >> 15) << 31;
  const uint32_t exponent = shifted >= 0x0f800000u ? 224u << 23 : 112u << 23;  // infinity and NaN, or a normal number
  // From its integer, because the mode that flushes denormals would lose the shifted bits.
  const float subnormal = static_cast<float>(static_cast<int32_t>(half & 0x3ffu)) * 5.9604644775390625e-08f;
  const uint32_t bits = shifted < 0x00800000u ? float_to_bits(subnormal) : shifted + exponent;
  return bits_to_float(bits | sign);
}

CLO_INLINE float element(const float* p) { return *p; }
CLO_INLINE float element(const BF16* p) { return bits_to_float(static_cast<uint32_t>(p->bits) << 16); }
CLO_INLINE float element(const F16* p) { return half_to_float(p->bits); }
CLO_INLINE float element(const Int8* p) { return static_cast<float>(p->value); }
CLO_INLINE float element(const Fp8* p) {
  const uint32_t magnitude = p->bits & 0x7fu, sign = static_cast<uint32_t>(p->bits & 0x80u) << 24;
  const float subnormal = static_cast<float>(magnitude) * 0.001953125f;
  return bits_to_float((magnitude < 8 ? float_to_bits(subnormal) : (magnitude << 20) + (120u << 23)) | sign);
}

}  // namespace
}  // namespace clo
