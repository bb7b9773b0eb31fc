#include "cpu/hash_encode.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "clo/params.h"
#include "cpu/parallel.h"
#include "cpu/simd/dispatch.h"

namespace clo {
namespace {

// A non-negative float to half, to nearest, ties to even. Beyond the largest finite half: that one.
uint16_t to_half(float value) {
  constexpr float kLargest = 65504, kSmallestNormal = 6.103515625e-05f, kSmallest = 5.9604644775390625e-08f;
  if (!(value < kLargest)) return 0x7bff;
  if (value < kSmallestNormal) return static_cast<uint16_t>(std::nearbyint(value / kSmallest));
  uint32_t u;
  std::memcpy(&u, &value, 4);
  u += 0xfffu + ((u >> 13) & 1u);
  return static_cast<uint16_t>((u - (112u << 23)) >> 13);
}

// The estimator's factor. No finite projection to divide by (x equals the mean, or is not finite): 0.
uint16_t factor(float squares, float magnitudes) {
  const float ratio = squares / magnitudes;
  return magnitudes > 0 && ratio >= 0 ? to_half(ratio) : 0;
}

}  // namespace

void hash_encode(const HashEncodeParams& p) {
  const CodesTable& table = codes_table();
  const auto centre = p.dtype == DType::kF32 ? table.centre_f32 : table.centre_bf16;
  const int64_t K = p.heads, N = p.tokens, D = p.head_dim, words = p.bits / 32;
  const int64_t blocks = (N + kEncodeBlock - 1) / kEncodeBlock;
  const int64_t total_us = p.batch * K * N * D * p.bits / 50000;  // about 50 multiply-adds a nanosecond
  parallel_for(p.batch * K * blocks, total_us, [&](int64_t task) {
    thread_local std::vector<float> centred;
    centred.resize(static_cast<size_t>(kEncodeBlock * D));
    const int64_t bh = task / blocks, h = bh % K, begin = task % blocks * kEncodeBlock;
    const int64_t tokens = std::min(kEncodeBlock, N - begin), first = bh * N + begin;
    float squares[kEncodeBlock], magnitudes[kEncodeBlock];
    const char* x = static_cast<const char*>(p.x) + first * D * dtype_bytes(p.dtype);
    for (int64_t t = 0; t < tokens; ++t)
      squares[t] = centre(x + t * D * dtype_bytes(p.dtype), p.mean + bh * D, D, centred.data() + t * D);
    table.encode(centred.data(), tokens, {p.weights + h * D * p.bits, D, p.bits}, p.codes + first * words, magnitudes);
    for (int64_t t = 0; t < tokens; ++t) p.factors[first + t] = factor(squares[t], magnitudes[t]);
  });
}

void encode_query_sign(const float* query, int64_t count, const Weights& weights, int8_t* levels, float* steps) {
  const int64_t bits = weights.bits;
  thread_local std::vector<float> z;
  z.resize(static_cast<size_t>(count * bits));
  codes_table().project(query, count, weights, z.data());
  for (int64_t i = 0; i < count; ++i) steps[i] = codes_table().quantise(z.data() + i * bits, bits, levels + i * bits);
}

}  // namespace clo
