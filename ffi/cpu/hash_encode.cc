#include "cpu/hash_encode.h"

#include <algorithm>
#include <vector>

#include "clo/params.h"
#include "cpu/parallel.h"
#include "cpu/simd/dispatch.h"

namespace clo {
namespace {

// The estimator's factor, at most the largest finite half. No finite projection to divide by (x equals the mean, or is not
// finite): 0.
uint16_t factor(float squares, float magnitudes) {
  const float ratio = squares / magnitudes;
  F16 half{0};
  if (magnitudes > 0 && ratio >= 0) from_float(std::min(ratio, 65504.0f), &half);
  return half.bits;
}

}  // namespace

void hash_encode(const HashEncodeParams& p) {
  const CodesTable& table = codes_table();
  const auto centre = choose(p.dtype, table.centre_f32, table.centre_bf16, table.centre_f16);
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
