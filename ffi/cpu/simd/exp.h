// The exponential of the kernels. For *_body.cc files only (see vector.h).
#pragma once

#include "cpu/simd/vector.h"

namespace clo {
namespace {

// exp(x) with a relative error below 2^-16 for x in [-87, 80]; most of it comes from rounding x·log2(e), the polynomial's
// part is 8e-8. Below -87 and for NaN: 0, so that no result is subnormal. Above 80: exp(80), so that sums of results
// stay finite. (Written with vector types, because compilers do not vectorise a loop with these comparisons.)
CLO_INLINE Vec clamped_exp(Vec x) {
  const Vec least = splat(-87.0f), most = splat(80.0f);
  const Vec low = x > least ? x : least;
  const Vec t = (low < most ? low : most) * splat(1.44269504f);
  const IntVec whole = __builtin_convertvector(t + splat(128.5f), IntVec) - 128;  // t > -128: truncation rounds down
  const Vec f = t - __builtin_convertvector(whole, Vec);                         // in [-0.5, 0.5]
  Vec p = splat(0.00132764713f);
  p = p * f + splat(0.00967554096f);
  p = p * f + splat(0.0555071309f);
  p = p * f + splat(0.240221202f);
  p = p * f + splat(0.693146944f);
  p = p * f + splat(1.00000012f);
  const Vec value = reinterpret_cast<Vec>(reinterpret_cast<IntVec>(p) + (whole << 23));
  return x >= least ? value : Vec{};
}

}  // namespace
}  // namespace clo
