// Quantized rows: every code and every border of rounding, what scales are, and groups that hold no ordinary numbers.
#include "cpu/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "clo/protocol.h"
#include "tests/check.h"
#include "tests/quantized_rows.h"

namespace {

using clo::DType;
using clo::RowFormat;

constexpr int64_t kGroups = 2 * clo::kScaleGroups;
constexpr int64_t kDims[] = {8, 24, 64, 80, 128, 256};
constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr RowFormat kFormats[] = {RowFormat::kInt8, RowFormat::kFp8};

float largest(RowFormat format) { return format == RowFormat::kInt8 ? 127.0f : 448.0f; }

// [count, 2, D] floats as rows of a dtype, and what these then are.
template <typename T>
std::vector<T> narrowed(const std::vector<float>& values) {
  std::vector<T> rows(values.size());
  for (size_t i = 0; i < values.size(); ++i) clo::from_float(values[i], &rows[i]);
  return rows;
}

// Quantizes them; `values` become what they are in that dtype. The bytes after the last row stay what they are.
std::vector<uint8_t> quantized(std::vector<float>* values, int64_t D, DType dtype, RowFormat format) {
  const int64_t count = static_cast<int64_t>(values->size()) / (2 * D);
  const size_t bytes = static_cast<size_t>(count * clo::row_bytes(D, dtype, format));
  std::vector<uint8_t> out(bytes + 16, 0x5a);
  clo::dispatch(dtype, [&](auto* tag) {
    const auto rows = narrowed<std::remove_pointer_t<decltype(tag)>>(*values);
    clo::quantize_rows(rows.data(), count, D, dtype, format, out.data());
    for (size_t i = 0; i < rows.size(); ++i) (*values)[i] = clo::to_float(rows[i]);
  });
  for (size_t i = bytes; i < out.size(); ++i) CHECK(out[i] == 0x5a);
  out.resize(bytes);
  return out;
}

// The codes of a format that stand for numbers, in growing order; those of zero are one, 0.
std::vector<uint8_t> codes(RowFormat format) {
  std::vector<uint8_t> all;
  for (int i = 0; i < 256; ++i) {
    const bool none = format == RowFormat::kInt8 ? i == 0x80 : (i & 0x7f) == 0x7f || i == 0x80;
    if (!none) all.push_back(static_cast<uint8_t>(i));
  }
  std::sort(all.begin(), all.end(),
            [&](uint8_t a, uint8_t b) { return clo::test::decode(format, a) < clo::test::decode(format, b); });
  return all;
}

// Each of these numbers, times a power of two, in groups whose largest one makes that power the scale: the codes.
std::vector<uint8_t> codes_of(const std::vector<float>& numbers, float power, int64_t D, DType dtype, RowFormat format) {
  const size_t width = static_cast<size_t>(D / clo::kScaleGroups), each = width - 1;  // beside the largest one
  std::vector<float> rows;
  for (size_t i = 0; i < numbers.size(); i += each)
    for (size_t j = 0; j < width; ++j)
      rows.push_back(power * (j == each ? largest(format) : i + j < numbers.size() ? numbers[i + j] : 0.0f));
  rows.resize((rows.size() + 2 * static_cast<size_t>(D) - 1) / (2 * static_cast<size_t>(D)) * 2 * static_cast<size_t>(D));
  const std::vector<uint8_t> out = quantized(&rows, D, dtype, format);
  std::vector<uint8_t> found;
  for (size_t i = 0; i < numbers.size(); ++i) {
    const size_t group = i / each, at = group % kGroups * width + i % each;
    const uint8_t* row = out.data() + group / kGroups * static_cast<size_t>(clo::row_bytes(D, dtype, format));
    CHECK(clo::to_float(clo::test::scale(row, D, static_cast<int64_t>(group % kGroups))) == power);
    CHECK(clo::test::decode(format, row[group % kGroups * width + each]) == largest(format));
    found.push_back(row[at]);
  }
  return found;
}

void test_every_code_comes_back() {
  for (const RowFormat format : kFormats)
    for (const DType dtype : kTypes)
      for (const int64_t D : kDims)
        for (const float power : {1.0f, 0.125f, 32.0f}) {
          const std::vector<uint8_t> all = codes(format);
          std::vector<float> numbers;
          for (const uint8_t code : all) numbers.push_back(clo::test::decode(format, code));
          CHECK(codes_of(numbers, power, D, dtype, format) == all);
        }
  CHECK(codes(RowFormat::kInt8).size() == 255 && codes(RowFormat::kFp8).size() == 253);
}

// Halfway goes to the even one, what is beside that to the nearer one. (Neighbours of a middle need a float's places.)
void test_every_border_of_rounding() {
  for (const RowFormat format : kFormats) {
    const std::vector<uint8_t> all = codes(format);
    std::vector<float> middles, below, above;
    std::vector<uint8_t> even, lower, upper;
    for (size_t i = 0; i + 1 < all.size(); ++i) {
      const float x = clo::test::decode(format, all[i]), y = clo::test::decode(format, all[i + 1]), z = (x + y) / 2;
      middles.push_back(z);
      below.push_back(std::nextafter(z, x));
      above.push_back(std::nextafter(z, y));
      even.push_back((all[i] & 1) == 0 ? all[i] : all[i + 1]);
      lower.push_back(all[i]);
      upper.push_back(all[i + 1]);
    }
    // A negative fp8 number that becomes zero keeps its sign.
    const auto same = [&](const std::vector<uint8_t>& got, const std::vector<uint8_t>& want) {
      for (size_t i = 0; i < want.size(); ++i)
        CHECK(got[i] == want[i] || (clo::test::decode(format, want[i]) == 0 && clo::test::decode(format, got[i]) == 0));
    };
    for (const int64_t D : kDims)
      for (const float power : {1.0f, std::ldexp(1.0f, -80), std::ldexp(1.0f, 90)}) {
        same(codes_of(middles, power, D, DType::kF32, format), even);
        same(codes_of(below, power, D, DType::kF32, format), lower);
        same(codes_of(above, power, D, DType::kF32, format), upper);
      }
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      // 8 places hold the middles of int8 from -64 to 64 only, and all of fp8.
      std::vector<float> some;
      std::vector<uint8_t> want;
      for (size_t i = 0; i < middles.size(); ++i)
        if (format == RowFormat::kFp8 || dtype == DType::kF16 || std::fabs(middles[i]) <= 64) {
          some.push_back(middles[i]);
          want.push_back(even[i]);
        }
      same(codes_of(some, 1.0f, 64, dtype, format), want);
    }
  }
}

std::vector<float> normal(std::mt19937* random, int64_t count, float spread) {
  std::normal_distribution<float> draw(0, spread);
  std::vector<float> x(static_cast<size_t>(count));
  for (float& y : x) y = draw(*random);
  return x;
}

// The largest magnitude over 127 or 448, rounded up to a bfloat16: no less (of float rows: but for the rounding of a
// float), and at most one step more. Each code is a nearest one, and never more than the most.
void check_rows(const std::vector<float>& values, const std::vector<uint8_t>& rows, int64_t D, DType dtype,
                RowFormat format) {
  const int64_t width = D / clo::kScaleGroups, bytes = clo::row_bytes(D, dtype, format);
  const std::vector<uint8_t> all = codes(format);
  for (int64_t group = 0; group < static_cast<int64_t>(values.size()) / width; ++group) {
    const uint8_t* row = rows.data() + group / kGroups * bytes;
    const float* x = values.data() + group * width;
    const clo::BF16 bits = clo::test::scale(row, D, group % kGroups);
    const double s = clo::to_float(bits), less = clo::to_float(clo::BF16{static_cast<uint16_t>(bits.bits - 1)});
    double amax = 0;
    for (int64_t i = 0; i < width; ++i) amax = std::max(amax, std::fabs(static_cast<double>(x[i])));
    const double exact = amax / largest(format), slack = dtype == DType::kF32 ? std::ldexp(1.0, -22) : 0;
    CHECK(s >= exact * (1 - slack) && less <= exact * (1 + slack));
    for (int64_t i = 0; i < width; ++i) {
      const uint8_t code = row[group % kGroups * width + i];
      const double y = x[i] / s, got = clo::test::decode(format, code);
      CHECK(std::fabs(got) <= largest(format));
      const auto next = std::lower_bound(all.begin(), all.end(), y, [&](uint8_t a, double b) {
        return clo::test::decode(format, a) < b;
      });
      double nearest = 1e9;
      if (next != all.end()) nearest = std::fabs(clo::test::decode(format, *next) - y);
      if (next != all.begin()) nearest = std::min(nearest, std::fabs(clo::test::decode(format, *(next - 1)) - y));
      CHECK(std::fabs(got - y) <= nearest + 1e-6 * std::fabs(y));
    }
  }
}

void test_scales_and_nearest_codes_of_random_rows() {
  std::mt19937 random(3);
  for (const RowFormat format : kFormats)
    for (const DType dtype : kTypes)
      for (const int64_t D : kDims)
        for (const float spread : {1.0f, 0.02f, 300.0f}) {
          std::vector<float> values = normal(&random, 20 * 2 * D, spread);
          const std::vector<uint8_t> rows = quantized(&values, D, dtype, format);
          check_rows(values, rows, D, dtype, format);
        }
  // The largest and the smallest magnitudes that there are.
  for (const RowFormat format : kFormats)
    for (const float size : {std::numeric_limits<float>::max(), clo::kSmallestAmax}) {
      std::vector<float> values(2 * 64);
      for (size_t i = 0; i < values.size(); ++i) values[i] = size * (i % 3 == 0 ? 1.0f : -1.0f / static_cast<float>(i));
      const std::vector<uint8_t> rows = quantized(&values, 64, DType::kF32, format);
      check_rows(values, rows, 64, DType::kF32, format);
    }
}

// Whatever a group of one row holds, all others are as without it.
void test_a_group_with_nan_or_infinity() {
  std::mt19937 random(4);
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const RowFormat format : kFormats)
    for (const DType dtype : kTypes)
      for (const int64_t D : kDims)
        for (const float wrong : {nan, -nan, inf, -inf}) {
          const int64_t width = D / clo::kScaleGroups, bytes = clo::row_bytes(D, dtype, format);
          std::vector<float> values = normal(&random, 3 * 2 * D, 1);
          const std::vector<uint8_t> before = quantized(&values, D, dtype, format);
          for (int64_t group = 0; group < kGroups; ++group) {
            std::vector<float> spoiled = values;
            spoiled[static_cast<size_t>(2 * D + group * width + (group + 1) % width)] = wrong;  // of the second row
            const std::vector<uint8_t> after = quantized(&spoiled, D, dtype, format);
            for (int64_t i = 0; i < 3 * bytes; ++i) {
              const int64_t at = i - bytes;
              const bool in_codes = at >= group * width && at < (group + 1) * width;
              const bool in_scale = at == 2 * D + 2 * group || at == 2 * D + 2 * group + 1;
              if (in_codes) CHECK(after[static_cast<size_t>(i)] == 0);
              else if (!in_scale) CHECK(after[static_cast<size_t>(i)] == before[static_cast<size_t>(i)]);
            }
            CHECK(clo::test::scale(after.data() + bytes, D, group).bits == clo::kScaleNaN);
            for (int64_t i = 0; i < 2 * D; ++i)
              CHECK(std::isnan(clo::test::decode(after.data() + bytes, D, format, i)) == (i / width == group));
          }
        }
}

// All bytes of such a group are zero, the scale's too.
void test_zeros_and_what_is_too_small() {
  const float below = std::nextafter(clo::kSmallestAmax, 0.0f);
  for (const RowFormat format : kFormats)
    for (const DType dtype : kTypes)
      for (const int64_t D : kDims)
        for (const float x : {0.0f, -0.0f, below, -below, std::numeric_limits<float>::denorm_min()}) {
          if (dtype == DType::kBF16 && std::fabs(x) == below) continue;  // rounds to 2^-100
          std::vector<float> values(static_cast<size_t>(2 * D), x);
          for (const uint8_t byte : quantized(&values, D, dtype, format)) CHECK(byte == 0);
        }
  CHECK(clo::kSmallestAmax == std::ldexp(1.0f, -100));
  for (const RowFormat format : kFormats)
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      std::vector<float> values(2 * 64, clo::kSmallestAmax);
      const std::vector<uint8_t> rows = quantized(&values, 64, dtype, format);
      CHECK(std::fabs(clo::test::decode(rows.data(), 64, format, 0) / clo::kSmallestAmax - 1) < 0.05f);
    }
}

}  // namespace

int main() {
  test_every_code_comes_back();
  test_every_border_of_rounding();
  test_scales_and_nearest_codes_of_random_rows();
  test_a_group_with_nan_or_infinity();
  test_zeros_and_what_is_too_small();
  std::puts("quantize: ok");
}
