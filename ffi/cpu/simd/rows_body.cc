// Compiled once per instruction set (CLO_ISA). Vectors are the compiler's own (GCC and Clang), as wide as the set.
#include "cpu/simd/rows.h"

#include "clo/row_format.h"
#include "cpu/simd/vector.h"

// Loops over constants must unroll completely, or the vectors they index live on the stack.
#define CLO_UNROLL _Pragma("GCC unroll 16")

namespace clo {
namespace {

#if defined(__AVX512F__)
constexpr int kHeads = 4;  // query heads that share one pass: 32 registers
#else
constexpr int kHeads = 2;  // 16 registers
#endif
constexpr int kRows = 4;  // rows that share one pass over the query

typedef float Vec4 __attribute__((vector_size(16)));

// Adds the upper half to the lower one until four floats are left.
CLO_INLINE Vec4 fold(Vec4 x) { return x; }

#if defined(__AVX__)
CLO_INLINE Vec4 fold(__m256 x) { return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)); }
#endif
#if defined(__AVX512F__)
// The masked form, because GCC 12 takes the plain one for a use of an uninitialised variable.
CLO_INLINE Vec4 fold(Vec x) {
  return fold(_mm256_add_ps(_mm512_maskz_extractf32x8_ps(0xff, x, 0), _mm512_maskz_extractf32x8_ps(0xff, x, 1)));
}
#endif

// The sums of four vectors.
CLO_INLINE Vec4 sum4(const Vec* x) {
  const Vec4 a = fold(x[0]), b = fold(x[1]), c = fold(x[2]), d = fold(x[3]);
#if defined(__SSE3__)
  return _mm_hadd_ps(_mm_hadd_ps(a, b), _mm_hadd_ps(c, d));
#else
  return Vec4{a[0], b[0], c[0], d[0]} + Vec4{a[1], b[1], c[1], d[1]} + Vec4{a[2], b[2], c[2], d[2]} +
         Vec4{a[3], b[3], c[3], d[3]};
#endif
}

// 2^t for t <= 0: the integer part goes into the exponent, the rest (within half of 0) through a minimax polynomial.
CLO_INLINE Vec exp2(Vec t) {
  const Vec clamped = t < -126.0f ? Vec{} - 126.0f : t;
  const IntVec whole = __builtin_convertvector(clamped - 0.5f, IntVec);
  const Vec f = clamped - __builtin_convertvector(whole, Vec);
  Vec p = f * 1.5353362e-4f + 1.3398875e-3f;
  p = p * f + 9.6184369e-3f;
  p = p * f + 5.5503324e-2f;
  p = p * f + 2.4022648e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  p *= (Vec)((whole + 127) << 23);
  return t < -126.0f ? Vec{} : p;
}

// Rows of the next block. Their prefetches go between the arithmetic of this one: in a burst they would fill the
// machine's miss buffers and stall it.
struct Next {
  const void* const* rows;
  int64_t count;
  int64_t half;  // bytes of a key, and of a value

  // Every cache line of the key (part 0) or the value (part 1) of row r.
  __attribute__((always_inline)) void prefetch(int64_t r, int64_t part) const {
    const char* p = static_cast<const char*>(rows[r]) + part * half;
    for (int64_t i = 0; i < half; i += 64) __builtin_prefetch(p + i, 0, 3);
  }
};

// scores[g][r] = q[g]·K[r]; `rows` is padded to a multiple of kRows.
template <typename T, int G>
CLO_INLINE void score(const float* q, const T* const* rows, int64_t count, int64_t D, Next next, float* scores) {
  for (int64_t r = 0; r < count; r += kRows) {
    for (int64_t i = r; i < r + kRows && i < next.count; ++i) next.prefetch(i, 0);
    Vec a[G][kRows] = {};
    int64_t c = 0;
    for (; c + kLanes <= D; c += kLanes) {
      Vec k[kRows];
      CLO_UNROLL
      for (int j = 0; j < kRows; ++j) k[j] = load(rows[r + j] + c);
      CLO_UNROLL
      for (int g = 0; g < G; ++g) {
        const Vec x = load(q + g * D + c);
        CLO_UNROLL
        for (int j = 0; j < kRows; ++j) a[g][j] += x * k[j];
      }
    }
    CLO_UNROLL
    for (int g = 0; g < G; ++g) {
      Vec4 s = sum4(a[g]);
      for (int64_t i = c; i < D; ++i)
        CLO_UNROLL
        for (int j = 0; j < kRows; ++j) s[j] += q[g * D + i] * element(rows[r + j] + i);
      __builtin_memcpy(scores + g * kRowsBlock + r, &s, sizeof s);
    }
  }
}

// Turns one head's scores into weights relative to the new maximum; returns what the old accumulator is worth now.
CLO_INLINE float weigh(float* scores, int64_t count, float* max, float* total) {
  const float inf = __builtin_inff();
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int64_t r = count; r < padded; ++r) scores[r] = -inf;
  Vec top = load(scores);
  for (int64_t r = kLanes; r < padded; r += kLanes) {
    const Vec x = load(scores + r);
    top = x > top ? x : top;
  }
  const float before = *max;
  float after = before;
  for (int i = 0; i < kLanes; ++i) after = top[i] > after ? top[i] : after;
  const float reference = after == -inf ? 0.0f : after;  // -inf - -inf would be NaN
  Vec partial = {};
  for (int64_t r = 0; r < padded; r += kLanes) {
    const Vec w = exp2(load(scores + r) - reference);
    partial += w;
    store(scores + r, w);
  }
  const Vec kept = exp2(Vec{} + (before - reference));
  *max = after;
  *total = *total * kept[0] + sum(partial);
  return kept[0];
}

// acc[g][c..] = acc[g][c..] * kept[g] + Σ_r weights[g][r]·V[r][c..] over C vectors of the head dim.
template <typename T, int G, int C>
CLO_INLINE void accumulate(const float* weights, const T* const* rows, int64_t count, int64_t D, int64_t c,
                           const float* kept, Next next, float* acc) {
  Vec a[G][C];
  CLO_UNROLL
  for (int g = 0; g < G; ++g)
    CLO_UNROLL
    for (int i = 0; i < C; ++i) a[g][i] = load(acc + g * D + c + i * kLanes) * kept[g];
  for (int64_t r = 0; r < count; ++r) {
    if (r < next.count) next.prefetch(r, 1);
    const T* v = rows[r] + D + c;
    Vec x[C];
    CLO_UNROLL
    for (int i = 0; i < C; ++i) x[i] = load(v + i * kLanes);
    CLO_UNROLL
    for (int g = 0; g < G; ++g) {
      const float w = weights[g * kRowsBlock + r];
      CLO_UNROLL
      for (int i = 0; i < C; ++i) a[g][i] += x[i] * w;
    }
  }
  CLO_UNROLL
  for (int g = 0; g < G; ++g)
    CLO_UNROLL
    for (int i = 0; i < C; ++i) store(acc + g * D + c + i * kLanes, a[g][i]);
}

template <typename T, int G>
CLO_INLINE void heads(const RowsBlock& b, const T* const* rows, int64_t g0) {
  const int64_t D = b.head_dim;
  const Next none{nullptr, 0, 0};
  const Next next = g0 == 0 ? Next{b.next, b.next_count, D * static_cast<int64_t>(sizeof(T))} : none;
  alignas(64) float weights[G * kRowsBlock];
  float kept[G];
  float* acc = b.acc + g0 * D;
  score<T, G>(b.query + g0 * D, rows, b.count, D, next, weights);
  CLO_UNROLL
  for (int g = 0; g < G; ++g) kept[g] = weigh(weights + g * kRowsBlock, b.count, b.max + g0 + g, b.sum + g0 + g);
  int64_t c = 0;
  for (; c + 4 * kLanes <= D; c += 4 * kLanes)
    accumulate<T, G, 4>(weights, rows, b.count, D, c, kept, c == 0 ? next : none, acc);
  for (; c + kLanes <= D; c += kLanes)
    accumulate<T, G, 1>(weights, rows, b.count, D, c, kept, c == 0 ? next : none, acc);
  for (; c < D; ++c) {
    CLO_UNROLL
    for (int g = 0; g < G; ++g) {
      float a = acc[g * D + c] * kept[g];
      for (int64_t r = 0; r < b.count; ++r) a += weights[g * kRowsBlock + r] * element(rows[r] + D + c);
      acc[g * D + c] = a;
    }
  }
}

template <typename T>
void attend_rows(const RowsBlock& b) {
  const T* rows[kRowsBlock];
  for (int64_t r = 0; r < b.count; ++r) rows[r] = static_cast<const T*>(b.rows[r]);
  for (int64_t r = b.count; r % kRows; ++r) rows[r] = rows[0];  // scored, then overwritten or never read
  int64_t g = 0;
  for (; g + kHeads <= b.group; g += kHeads) heads<T, kHeads>(b, rows, g);
  if (kHeads > 2 && g + 3 == b.group) {
    heads<T, 3>(b, rows, g);
    g += 3;
  }
  if (g + 2 <= b.group) {
    heads<T, 2>(b, rows, g);
    g += 2;
  }
  if (g < b.group) heads<T, 1>(b, rows, g);
}

// Quantized rows become floats in the scratch first: that is done once for all query heads.
template <typename Code>
void attend_quantized(const RowsBlock& b) {
  const int64_t D = b.head_dim, width = D / kScaleGroups;
  const void* rows[kRowsBlock];
  for (int64_t r = 0; r < b.count; ++r) {
    if (r < b.next_count)
      for (int64_t i = 0; i < 2 * D + kScaleBytes; i += 64)
        __builtin_prefetch(static_cast<const char*>(b.next[r]) + i, 0, 3);
    const auto* codes = static_cast<const Code*>(b.rows[r]);
    float* out = b.scratch + r * 2 * D;
    rows[r] = out;
    for (int64_t g = 0; g < 2 * kScaleGroups; ++g) {
      BF16 scale;
      __builtin_memcpy(&scale, codes + 2 * D + 2 * g, sizeof scale);
      const float x = element(&scale);
      int64_t i = g * width;
      for (; i + kLanes <= (g + 1) * width; i += kLanes) store(out + i, load(codes + i) * x);
      for (; i < (g + 1) * width; ++i) out[i] = element(codes + i) * x;
    }
  }
  RowsBlock plain = b;
  plain.rows = rows;
  plain.next_count = 0;
  attend_rows<float>(plain);
}

constexpr RowsTable kTable = {attend_rows<float>, attend_rows<BF16>, attend_rows<F16>, attend_quantized<Int8>,
                              attend_quantized<Fp8>};

}  // namespace

const RowsTable* CLO_TABLE(rows)() { return &kTable; }

}  // namespace clo
