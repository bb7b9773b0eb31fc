// Partial results of a softmax-weighted sum, and how two of them become one.
//
// Scores are in base 2 here (natural scores times log2 e): powers of two are what hardware computes. A partial result
// over a set of rows is (max, sum, acc): the largest score, Σ 2^(score - max), and Σ 2^(score - max)·V, where acc is
// kept by the caller. The empty set is (-inf, 0, 0) and is neutral under merging.
#pragma once

#include <cmath>
#include <limits>

namespace clo {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

struct SoftmaxState {
  float max = -std::numeric_limits<float>::infinity();
  float sum = 0;
};

// What to multiply the two accumulators with before adding them.
struct MergeWeights {
  float first, second;
};

// Folds `other` into `state`. Equal maxima have weight 1, which also covers two empty states (-inf - -inf is NaN) and
// two infinite ones.
inline MergeWeights merge(SoftmaxState& state, const SoftmaxState& other) {
  const float max = state.max > other.max ? state.max : other.max;
  const MergeWeights w = {state.max == max ? 1.0f : std::exp2(state.max - max),
                          other.max == max ? 1.0f : std::exp2(other.max - max)};
  state.sum = state.sum * w.first + other.sum * w.second;
  state.max = max;
  return w;
}

// What to multiply acc with to get the softmax-weighted mean; 0 for the empty state, whose mean is defined as 0.
inline float normaliser(const SoftmaxState& state) { return state.sum == 0 ? 0.0f : 1.0f / state.sum; }

// Natural logarithm of Σ e^(natural score); -inf for the empty state.
inline float log_sum_exp(const SoftmaxState& state) { return (state.max + std::log2(state.sum)) * kLn2; }

}  // namespace clo
