#include "cpu/simd/codes.h"

#include "cpu/simd/vector.h"

namespace clo {
namespace {

constexpr int kPanelVecs = 32 / kLanes;
// Tokens and panels of one register tile: enough independent sums to hide the latency of a multiply-add, few enough for
// the registers.
constexpr int kTileTokens = kLanes == 16 ? 8 : kLanes == 8 ? 3 : 1;
constexpr int kTilePanels = kLanes == 16 ? 4 : kLanes == 8 ? 2 : 1;  // of a single token

CLO_INLINE float element(const float* x, int64_t i) { return x[i]; }
CLO_INLINE float element(const uint16_t* x, int64_t i) { return bits_to_float(static_cast<uint32_t>(x[i]) << 16); }

template <typename T>
float centre(const void* data, const float* mean, int64_t dim, float* out) {
  const T* x = static_cast<const T*>(data);
  float squares = 0;
  for (int64_t i = 0; i < dim; ++i) {
    out[i] = element(x, i) - mean[i];
    squares += out[i] * out[i];
  }
  return squares;
}

CLO_INLINE Vec magnitude(Vec v) { return v > 0 ? v : -v; }

// Dot products of TT tokens with NP panels. Each is one chain of multiply-adds in the order of d, whatever the tile.
template <int TT, int NP>
CLO_INLINE void dots(const float* x, const Panels& w, int64_t panel, Vec (&sums)[TT][NP * kPanelVecs]) {
  for (int t = 0; t < TT; ++t)
    for (int v = 0; v < NP * kPanelVecs; ++v) sums[t][v] = Vec{};
  const float* base = w.data + panel * w.panel_stride;
  for (int64_t d = 0; d < w.dim; ++d) {
    const float* row = base + d * w.row_stride;
#pragma GCC unroll 8
    for (int v = 0; v < NP * kPanelVecs; ++v) {
      const Vec weights = load(row + (v / kPanelVecs) * w.panel_stride + (v % kPanelVecs) * kLanes);
#pragma GCC unroll 8
      for (int t = 0; t < TT; ++t) sums[t][v] += splat(x[t * w.dim + d]) * weights;
    }
  }
}

// Calls use(token, panel, its kPanelVecs vectors of projections), panels of a token in ascending order.
template <typename Use>
CLO_INLINE void for_projections(const float* x, int64_t tokens, const Panels& w, Use use) {
  const int64_t tiled = tokens / kTileTokens * kTileTokens;
  if (tiled > 0) {
    for (int64_t panel = 0; panel < w.panels; ++panel) {
      for (int64_t t = 0; t < tiled; t += kTileTokens) {
        Vec sums[kTileTokens][kPanelVecs];
        dots<kTileTokens, 1>(x + t * w.dim, w, panel, sums);
        for (int i = 0; i < kTileTokens; ++i) use(t + i, panel, sums[i]);
      }
    }
  }
  for (int64_t t = tiled; t < tokens; ++t) {
    int64_t panel = 0;
    for (; panel + kTilePanels <= w.panels; panel += kTilePanels) {
      Vec sums[1][kTilePanels * kPanelVecs];
      dots<1, kTilePanels>(x + t * w.dim, w, panel, sums);
      for (int q = 0; q < kTilePanels; ++q) use(t, panel + q, sums[0] + q * kPanelVecs);
    }
    for (; panel < w.panels; ++panel) {
      Vec sums[1][kPanelVecs];
      dots<1, 1>(x + t * w.dim, w, panel, sums);
      use(t, panel, sums[0]);
    }
  }
}

void encode(const float* x, int64_t tokens, const Panels& w, uint32_t* codes, float* magnitudes) {
  Vec totals[kEncodeBlock] = {};
  for_projections(x, tokens, w, [&](int64_t t, int64_t panel, const Vec* p) __attribute__((always_inline)) {
    uint32_t word = 0;
    for (int v = 0; v < kPanelVecs; ++v) {
      word |= positive(p[v]) << (v * kLanes);
      totals[t] += magnitude(p[v]);
    }
    codes[t * w.panels + panel] = word;
  });
  for (int64_t t = 0; t < tokens; ++t) magnitudes[t] = sum(totals[t]);
}

void project(const float* x, int64_t tokens, const Panels& w, float* out) {
  for_projections(x, tokens, w, [&](int64_t t, int64_t panel, const Vec* p) __attribute__((always_inline)) {
    for (int v = 0; v < kPanelVecs; ++v) store(out + (t * w.panels + panel) * 32 + v * kLanes, p[v]);
  });
}

float quantise(const float* z, int64_t bits, int8_t* levels) {
  float largest = 0;
  bool finite = true;
  for (int64_t i = 0; i < bits; ++i) {
    const float m = __builtin_fabsf(z[i]);
    largest = m > largest ? m : largest;
    finite &= __builtin_isfinite(z[i]) != 0;
  }
  const float step = largest / 7;
  const bool usable = finite && step > 0;
  for (int64_t i = 0; i < bits; ++i) levels[i] = 0;
  if (!usable) return 0;
  for (int64_t i = 0; i < bits; ++i) {
    // The clamp is for steps so small that dividing by them is inexact.
    float level = __builtin_nearbyintf(z[i] / step);
    level = level > 7 ? 7 : level < -7 ? -7 : level;
    levels[i] = static_cast<int8_t>(static_cast<int32_t>(level));
  }
  return step;
}

constexpr CodesTable kTable = {centre<float>, centre<uint16_t>, encode, project, quantise};

}  // namespace

const CodesTable* CLO_TABLE(codes)() { return &kTable; }

}  // namespace clo
