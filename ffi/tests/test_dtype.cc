// Conversions of 16-bit element types, over all of their values and around every border of rounding.
#include "clo/dtype.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>

#include "tests/check.h"

namespace {

template <typename T>
uint16_t rounded(float f) {
  T out{};
  clo::from_float(f, &out);
  return out.bits;
}

// Each value comes back as itself; so does what is nearer to it than to its neighbour; halfway goes to the even one.
template <typename T>
void check_every_value(uint16_t infinity) {
  for (uint32_t bits = 0; bits < infinity; ++bits) {
    const T value{static_cast<uint16_t>(bits)}, next{static_cast<uint16_t>(bits + 1)};
    const float x = clo::to_float(value);
    CHECK(rounded<T>(x) == bits);
    CHECK(rounded<T>(-x) == (bits | 0x8000u));
    if (bits + 1 == infinity) continue;
    const float y = clo::to_float(next);
    CHECK(y > x);
    const float middle = x + (y - x) / 2;
    CHECK(rounded<T>(middle) == bits + (bits & 1u));
    CHECK(rounded<T>(std::nextafter(middle, x)) == bits);
    CHECK(rounded<T>(std::nextafter(middle, y)) == bits + 1);
  }
  const float inf = std::numeric_limits<float>::infinity();
  CHECK(rounded<T>(inf) == infinity && std::isinf(clo::to_float(T{infinity})));
  CHECK(rounded<T>(-inf) == (infinity | 0x8000u));
  CHECK((rounded<T>(std::nanf("")) & 0x7fffu) > infinity);
  for (uint32_t bits = infinity + 1u; bits < 0x8000u; ++bits)
    CHECK(std::isnan(clo::to_float(T{static_cast<uint16_t>(bits)})));
}

}  // namespace

int main() {
  check_every_value<clo::F16>(0x7c00);
  CHECK(clo::to_float(clo::F16{0x3c00}) == 1.0f && clo::to_float(clo::F16{0x7bff}) == 65504.0f);
  CHECK(clo::to_float(clo::F16{1}) == std::ldexp(1.0f, -24));
  CHECK(rounded<clo::F16>(65519.996f) == 0x7bff && rounded<clo::F16>(65520.0f) == 0x7c00);
  CHECK(clo::to_float(clo::BF16{0x3f80}) == 1.0f);
  for (uint32_t bits = 0x80; bits < 0x7f80; ++bits) CHECK(rounded<clo::BF16>(clo::to_float(clo::BF16{static_cast<uint16_t>(bits)})) == bits);
  std::puts("dtype: ok");
}
