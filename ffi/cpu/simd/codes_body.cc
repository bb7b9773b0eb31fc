#include "cpu/simd/codes.h"

#include "cpu/simd/vector.h"

namespace clo {
namespace {

constexpr int kPanelVecs = 32 / kLanes;
// Tokens and panels of one register tile: enough independent sums to hide the latency of a multiply-add, few enough for
// the registers.
constexpr int kTileTokens = kLanes == 16 ? 8 : kLanes == 8 ? 3 : 1;
constexpr int kTilePanels = kLanes == 16 ? 4 : kLanes == 8 ? 2 : 1;  // of a single token

template <typename T>
float centre(const void* data, const float* mean, int64_t dim, float* out) {
  const T* x = static_cast<const T*>(data);
  float squares = 0;
  for (int64_t i = 0; i < dim; ++i) {
    out[i] = element(x + i) - mean[i];
    squares += out[i] * out[i];
  }
  return squares;
}

CLO_INLINE Vec magnitude(Vec v) { return v > 0 ? v : -v; }

// Dot products of TT tokens with NP panels of 32 columns. Each is one chain of multiply-adds in the order of d, whatever
// the tile.
template <int TT, int NP>
CLO_INLINE void dots(const float* x, const Weights& w, int64_t panel, Vec (&sums)[TT][NP * kPanelVecs]) {
  for (int t = 0; t < TT; ++t)
    for (int v = 0; v < NP * kPanelVecs; ++v) sums[t][v] = Vec{};
  for (int64_t d = 0; d < w.dim; ++d) {
    const float* row = w.data + d * w.bits + panel * 32;
#pragma GCC unroll 8
    for (int v = 0; v < NP * kPanelVecs; ++v) {
      const Vec weights = load(row + v * kLanes);
#pragma GCC unroll 8
      for (int t = 0; t < TT; ++t) sums[t][v] += splat(x[t * w.dim + d]) * weights;
    }
  }
}

// use(t + i, panel, projections) for TT tokens and every panel, panels in ascending order.
template <int TT, int NP, typename Use>
CLO_INLINE void for_rows(const float* x, int64_t t, const Weights& w, Use& use) {
  int64_t panel = 0;
  for (; panel + NP <= w.bits / 32; panel += NP) {
    Vec sums[TT][NP * kPanelVecs];
    dots<TT, NP>(x + t * w.dim, w, panel, sums);
    for (int q = 0; q < NP; ++q)
      for (int i = 0; i < TT; ++i) use(t + i, panel + q, sums[i] + q * kPanelVecs);
  }
  for (; panel < w.bits / 32; ++panel) {
    Vec sums[TT][kPanelVecs];
    dots<TT, 1>(x + t * w.dim, w, panel, sums);
    for (int i = 0; i < TT; ++i) use(t + i, panel, sums[i]);
  }
}

// Calls use(token, panel, its kPanelVecs vectors of projections), panels of a token in ascending order. Many tokens go
// panel by panel, so that a panel stays in the cache; few, such as the queries of a group, read the weights once.
template <typename Use>
CLO_INLINE void for_projections(const float* x, int64_t tokens, const Weights& w, Use use) {
  const int64_t tiled = tokens / kTileTokens * kTileTokens;
  if (tiled > 0) {
    for (int64_t panel = 0; panel < w.bits / 32; ++panel) {
      for (int64_t t = 0; t < tiled; t += kTileTokens) {
        Vec sums[kTileTokens][kPanelVecs];
        dots<kTileTokens, 1>(x + t * w.dim, w, panel, sums);
        for (int i = 0; i < kTileTokens; ++i) use(t + i, panel, sums[i]);
      }
    }
  }
  int64_t t = tiled;
  if constexpr (kLanes == 16) {
    if (tokens - t >= 4) for_rows<4, 2>(x, t, w, use), t += 4;
    if (tokens - t == 3) for_rows<3, 2>(x, t, w, use), t += 3;
  }
  if constexpr (kLanes >= 8) {
    if (tokens - t >= 2) for_rows<2, kLanes == 16 ? 4 : 1>(x, t, w, use), t += 2;
  }
  for (; t < tokens; ++t) for_rows<1, kTilePanels>(x, t, w, use);
}

void encode(const float* x, int64_t tokens, const Weights& w, uint32_t* codes, float* magnitudes) {
  Vec totals[kEncodeBlock] = {};
  for_projections(x, tokens, w, [&](int64_t t, int64_t panel, const Vec* p) __attribute__((always_inline)) {
    uint32_t word = 0;
    for (int v = 0; v < kPanelVecs; ++v) {
      word |= positive(p[v]) << (v * kLanes);
      totals[t] += magnitude(p[v]);
    }
    codes[t * (w.bits / 32) + panel] = word;
  });
  for (int64_t t = 0; t < tokens; ++t) magnitudes[t] = sum(totals[t]);
}

void project(const float* x, int64_t tokens, const Weights& w, float* out) {
  for_projections(x, tokens, w, [&](int64_t t, int64_t panel, const Vec* p) __attribute__((always_inline)) {
    for (int v = 0; v < kPanelVecs; ++v) store(out + t * w.bits + panel * 32 + v * kLanes, p[v]);
  });
}

float quantise(const float* z, int64_t bits, int8_t* levels) {
  Vec largest = {};
  IntVec unusable = {};
  for (int64_t i = 0; i < bits; i += kLanes) {
    const Vec m = magnitude(load(z + i));
    largest = m > largest ? m : largest;
    unusable |= ~(m <= splat(3.40282347e38f));
  }
  float step = 0;
  bool usable = true;
  for (int i = 0; i < kLanes; ++i) {
    step = largest[i] > step ? largest[i] : step;
    usable = usable && unusable[i] == 0;
  }
  step /= 7;
  if (!usable || !(step > 0)) {
    for (int64_t i = 0; i < bits; ++i) levels[i] = 0;
    return 0;
  }
  const IntVec most = IntVec{} + 7;
  for (int64_t i = 0; i < bits; i += kLanes) {
    IntVec level = round_even(load(z + i) / splat(step));
    level = level > most ? most : level < -most ? -most : level;  // a step near the smallest number is inexact
    for (int j = 0; j < kLanes; ++j) levels[i + j] = static_cast<int8_t>(level[j]);
  }
  return step;
}

constexpr CodesTable kTable = {centre<float>, centre<BF16>, centre<F16>, encode, project, quantise};

}  // namespace

const CodesTable* CLO_TABLE(codes)() { return &kTable; }

}  // namespace clo
