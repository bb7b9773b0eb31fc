#include <cmath>
#include <type_traits>

#include "clo/params.h"

namespace clo {
namespace {

// Cosine of two vectors; 0 when either is zero, so that an all-zero query never passes a positive threshold.
template <typename T>
float cosine(const T* a, const T* b, int64_t n) {
  float dot = 0, aa = 0, bb = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float x = to_float(a[i]), y = to_float(b[i]);
    dot += x * y;
    aa += x * x;
    bb += y * y;
  }
  const float norms = std::sqrt(aa) * std::sqrt(bb);
  return norms > 0 ? dot / norms : 0;
}

template <typename T>
void lookup(const CacheLookupParams& p) {
  const int64_t G = p.group, D = p.head_dim;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      const T* query = static_cast<const T*>(p.query) + (b * p.kv_heads + h) * G * D;
      T* label = static_cast<T*>(p.label) + (b * p.kv_heads + h) * G * D;
      int32_t& age = p.age[b * p.kv_heads + h];
      const float* s = p.importance + h * G;
      float weighted = 0, plain = 0, total = 0;
      for (int64_t g = 0; g < G; ++g) {
        const float sim = cosine(query + g * D, label + g * D, D);
        weighted += s[g] * sim;
        plain += sim;
        total += s[g];
      }
      // Equation 10; with no importance at all it is the plain mean.
      const float similarity = total > 0 ? weighted / total : plain / static_cast<float>(G);
      const bool hit = age >= 0 && age < p.max_age[b] && similarity >= p.thresholds[h];
      p.hit[b * p.kv_heads + h] = hit;
      if (hit) {
        ++age;
      } else {
        for (int64_t i = 0; i < G * D; ++i) label[i] = query[i];
        age = 0;
      }
    }
  }
}

}  // namespace

void cache_lookup(const CacheLookupParams& p) {
  dispatch(p.dtype, [&](auto* tag) { lookup<std::remove_pointer_t<decltype(tag)>>(p); });
}

}  // namespace clo
