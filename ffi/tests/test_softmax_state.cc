// Merging partial softmax results: any split of the rows gives the result of one pass, and empty or extreme parts do
// no harm.
#undef NDEBUG
#include "clo/softmax_state.h"

#include <cassert>
#include <cmath>
#include <limits>
#include <vector>

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Partial {
  clo::SoftmaxState state;
  float acc = 0;
};

// One row with the natural score s and the value v.
Partial row(float s, float v) {
  Partial p;
  p.state.max = s * clo::kLog2E;
  p.state.sum = 1;
  p.acc = v;
  return p;
}

void fold(Partial& a, const Partial& b) {
  const clo::MergeWeights w = clo::merge(a.state, b.state);
  a.acc = a.acc * w.first + b.acc * w.second;
}

float mean(const Partial& p) { return p.acc * clo::normaliser(p.state); }

bool close(float a, double b) { return std::fabs(a - b) <= 1e-5 * (1 + std::fabs(b)); }

void test_splits_agree_with_one_pass() {
  const std::vector<float> scores = {0.5f, -3, 2, 2, 17, -40, 16.5f, 0}, values = {1, 2, -3, 4, 5, -6, 7, 8};
  double sum = 0, acc = 0;
  for (size_t i = 0; i < scores.size(); ++i) {
    sum += std::exp(static_cast<double>(scores[i]));
    acc += std::exp(static_cast<double>(scores[i])) * values[i];
  }
  for (size_t split = 0; split <= scores.size(); ++split) {
    Partial left, right;
    for (size_t i = 0; i < scores.size(); ++i) fold(i < split ? left : right, row(scores[i], values[i]));
    Partial both = left, reversed = right;
    fold(both, right);
    fold(reversed, left);
    for (const Partial& p : {both, reversed}) {
      assert(close(mean(p), acc / sum));
      assert(close(clo::log_sum_exp(p.state), std::log(sum)));
    }
  }
}

void test_the_empty_state_is_neutral() {
  Partial empty, other;
  fold(empty, other);
  assert(empty.state.max == -kInf && empty.state.sum == 0 && empty.acc == 0);
  assert(mean(empty) == 0 && clo::log_sum_exp(empty.state) == -kInf);
  Partial left = row(-2, 3), right;
  fold(left, Partial());
  fold(right, row(-2, 3));
  for (const Partial& p : {left, right}) {
    assert(p.state.max == -2 * clo::kLog2E && p.state.sum == 1 && p.acc == 3);
    assert(close(clo::log_sum_exp(p.state), -2));
  }
}

void test_a_score_of_minus_infinity_weighs_nothing() {
  Partial p = row(-kInf, 100);
  fold(p, row(1, 2));
  assert(mean(p) == 2 && close(clo::log_sum_exp(p.state), 1));
  fold(p, row(-kInf, 100));
  assert(mean(p) == 2 && close(clo::log_sum_exp(p.state), 1));
}

void test_large_scores_neither_overflow_nor_vanish() {
  Partial p = row(30000, 1);
  fold(p, row(30000, 3));
  fold(p, row(-30000, 1e6f));
  assert(mean(p) == 2 && close(clo::log_sum_exp(p.state), 30000 + std::log(2.0)));
  Partial low = row(-30000, 1);
  fold(low, row(-30000, 3));
  assert(mean(low) == 2 && close(clo::log_sum_exp(low.state), -30000 + std::log(2.0)));
}

void test_not_a_number_is_not_lost() {
  Partial p = row(std::nanf(""), 1);
  p.state.sum = std::nanf("");
  fold(p, row(0, 1));
  assert(std::isnan(mean(p)));
}

}  // namespace

int main() {
  test_splits_agree_with_one_pass();
  test_the_empty_state_is_neutral();
  test_a_score_of_minus_infinity_weighs_nothing();
  test_large_scores_neither_overflow_nor_vanish();
  test_not_a_number_is_not_lost();
}
