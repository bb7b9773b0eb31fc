// attend around the transfer: what it does before, during and after the wait, and the accuracy of its powers of two.
#undef NDEBUG
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "clo/params.h"
#include "cpu/quantize.h"
#include "cpu/simd/dispatch.h"
#include "cpu/simd/rows.h"
#include "tests/quantized_rows.h"

namespace {

// One sequence, one offloaded and one resident head, two query heads each, D = 4, at position 2 of 8 tokens. All keys
// are zero, so that the output is the mean of the values.
struct Problem {
  static constexpr int64_t kS = 8, kD = 4, kT = 4, kSink = 1, kSlots = 3;
  std::vector<float> query = std::vector<float>(4 * kD, 1.0f), key = std::vector<float>(2 * kD),
                     value = std::vector<float>(2 * kD), resident = std::vector<float>(kS * 2 * kD),
                     tail = std::vector<float>(kT * 2 * kD), selected = std::vector<float>(kSlots * 2 * kD),
                     out = std::vector<float>(4 * kD), lse = std::vector<float>(4);
  int32_t position = 2, flushed = 2, slot_count = 2;
  int waits = 0;
  std::string error;
  clo::AttendParams params{};

  Problem() {
    set_values(tail, 0, 10);                                              // sink, token 0
    for (int64_t i = 0; i < 2; ++i) set_values(resident, i, 1.0f + i);     // tokens 0 and 1
    std::fill(value.begin(), value.begin() + kD, 20.0f);                  // token 2 of the offloaded head
    std::fill(value.begin() + kD, value.end(), 6.0f);                     // and of the resident one
    clo::AttendParams& p = params;
    p.batch = p.offloaded_heads = p.resident_heads = 1;
    p.group = 2;
    p.head_dim = kD;
    p.max_tokens = kS;
    p.tail_rows = kT;
    p.sink = kSink;
    p.scale = 0.5f;
    p.query = query.data();
    p.key = key.data();
    p.value = value.data();
    p.position = &position;
    p.flushed = &flushed;
    p.resident = resident.data();
    p.tail = tail.data();
    p.out = out.data();
    p.lse = lse.data();
    p.view.batch = p.view.kv_heads = 1;
    p.view.max_tokens = kS;
    p.view.num_slots = kSlots;
    p.view.head_dim = kD;
    p.view.selected_rows = selected.data();
    p.view.slot_counts = &slot_count;
    p.ready.context = this;
    p.ready.wait = [](void* context) { return static_cast<Problem*>(context)->deliver(); };
  }

  static void set_values(std::vector<float>& rows, int64_t row, float x) {
    std::fill_n(rows.begin() + (2 * row + 1) * kD, kD, x);
  }

  // The transfer arrives during the wait. What attention should have read by then is spoiled.
  std::string deliver() {
    ++waits;
    std::fill(tail.begin(), tail.end(), 1e6f);
    std::fill(resident.begin(), resident.end(), 1e6f);
    set_values(selected, 0, 30);
    set_values(selected, 1, 40);
    return error;
  }

  void check(float offloaded, float rows) const {
    assert(waits == 1);
    for (int64_t i = 0; i < 4 * kD; ++i) assert(std::fabs(out[i] - (i < 2 * kD ? offloaded : 3.0f)) < 1e-5);
    for (int64_t h = 0; h < 4; ++h) assert(std::fabs(lse[h] - std::log(h < 2 ? rows : 3.0f)) < 1e-6);
  }
};

void test_waits_after_the_rows_at_hand_and_before_the_selected_ones() {
  Problem problem;
  assert(clo::attend(problem.params).empty());
  problem.check((10 + 20 + 30 + 40) / 4.0f, 4);
}

void test_a_failed_wait_gives_its_text_and_attends_to_the_rest() {
  Problem problem;
  problem.error = "layer 3: late";
  assert(clo::attend(problem.params) == "layer 3: late");
  problem.check((10 + 20) / 2.0f, 2);
}

// With a maximum of 0 given, the sum over one row of score t is 2^t.
float power(const clo::RowsTable& table, float t) {
  const float query = 1;
  const float row[2] = {t, 1};
  const void* rows[1] = {row};
  float max = 0, sum = 0, acc = 0;
  table.f32({&query, 1, 1, rows, 1, rows, 0, &max, &sum, &acc});
  assert(max == 0 && sum == acc);
  return sum;
}

void test_powers_of_two() {
  for (const clo::RowsTable* table : {clo::rows_table_generic(), &clo::rows_table()}) {
    for (int i = 0; i <= 126 * 1000; ++i) {
      const float t = -1e-3f * static_cast<float>(i);
      if (t < -126) break;
      assert(std::fabs(power(*table, t) / std::exp2(static_cast<double>(t)) - 1) < 2e-7);
    }
    for (int i = 0; i <= 126; ++i) assert(power(*table, static_cast<float>(-i)) == std::exp2(static_cast<float>(-i)));
    assert(power(*table, -126.5f) == 0 && power(*table, -1e30f) == 0);
    assert(power(*table, -std::numeric_limits<float>::infinity()) == 0);
  }
}

// Zero keys: the result is the mean of the values, here of 0, 1, ..., count - 1. Buffers are exactly as long as needed,
// so that the address sanitizer sees any access beside them.
template <typename T>
void average(void (*kernel)(const clo::RowsBlock&), int64_t G, int64_t D, int64_t count) {
  std::vector<float> query(G * D, 1.0f), max(G, -std::numeric_limits<float>::infinity()), sum(G), acc(G * D);
  std::vector<T> rows(count * 2 * D);
  std::vector<const void*> addresses(count);
  for (int64_t r = 0; r < count; ++r) {
    addresses[r] = rows.data() + r * 2 * D;
    for (int64_t d = 0; d < 2 * D; ++d) clo::from_float(d < D ? 0.0f : static_cast<float>(r), &rows[r * 2 * D + d]);
  }
  kernel({query.data(), G, D, addresses.data(), count, addresses.data(), count, max.data(), sum.data(), acc.data()});
  for (int64_t g = 0; g < G; ++g) {
    assert(max[g] == 0 && sum[g] == static_cast<float>(count));
    for (int64_t d = 0; d < D; ++d)
      assert(std::fabs(acc[g * D + d] / sum[g] - 0.5f * static_cast<float>(count - 1)) < 1e-4);
  }
}

void test_every_shape_of_a_block() {
  for (int64_t G = 1; G <= 9; ++G)
    for (const int64_t D : {1, 4, 20, 64, 80, 96, 128, 256})
      for (const int64_t count : {1, 2, 3, 4, 5, 15, 16, 17, 63, 64}) {
        average<float>(clo::rows_table().f32, G, D, count);
        average<clo::BF16>(clo::rows_table().bf16, G, D, count);
      }
}

using Kernel = void (*)(const clo::RowsBlock&);

Kernel kernel_of(const clo::RowsTable& table, clo::RowFormat format) {
  return format == clo::RowFormat::kInt8 ? table.int8 : table.fp8;
}

// The same of quantized rows: row r's values are the bytes r, and each group of channels has another power of two for a
// scale. The scratch is as long as needed, too.
void average_quantized(const clo::RowsTable& table, clo::RowFormat format, int64_t G, int64_t D, int64_t count) {
  const int64_t bytes = 2 * D + clo::kScaleBytes, width = D / clo::kScaleGroups;
  std::vector<float> query(G * D, 1.0f), max(G, -std::numeric_limits<float>::infinity()), sum(G), acc(G * D),
      scratch(count * 2 * D);
  std::vector<uint8_t> rows(count * bytes);
  std::vector<const void*> addresses(count);
  float mean = 0;
  for (int64_t r = 0; r < count; ++r) {
    uint8_t* row = rows.data() + r * bytes;
    addresses[r] = row;
    std::memset(row + D, static_cast<int>(r), static_cast<size_t>(D));
    for (int64_t g = 0; g < 2 * clo::kScaleGroups; ++g) {
      const uint16_t scale = static_cast<uint16_t>((127 + g - clo::kScaleGroups) << 7);  // 2^(g - 4)
      std::memcpy(row + 2 * D + 2 * g, &scale, sizeof scale);
    }
    mean += clo::test::decode(format, static_cast<uint8_t>(r)) / static_cast<float>(count);
  }
  kernel_of(table, format)({query.data(), G, D, addresses.data(), count, addresses.data(), count, max.data(), sum.data(),
                            acc.data(), scratch.data()});
  for (int64_t g = 0; g < G; ++g) {
    assert(max[g] == 0 && sum[g] == static_cast<float>(count));
    for (int64_t d = 0; d < D; ++d) {
      const float scale = static_cast<float>(1 << d / width);
      assert(std::fabs(acc[g * D + d] / sum[g] - scale * mean) < 1e-4 * scale);
    }
  }
}

void test_every_shape_of_a_block_of_quantized_rows() {
  for (const clo::RowsTable* table : {clo::rows_table_generic(), &clo::rows_table()})
    for (int64_t G = 1; G <= 9; ++G)
      for (const int64_t D : {8, 24, 64, 80, 96, 128, 256})
        for (const int64_t count : {1, 2, 3, 4, 5, 15, 16, 17, 63, 64}) {
          average_quantized(*table, clo::RowFormat::kInt8, G, D, count);
          average_quantized(*table, clo::RowFormat::kFp8, G, D, count);
        }
}

// Random rows: the same as plain rows of the numbers that the bytes stand for.
void test_quantized_rows_are_what_their_bytes_stand_for() {
  constexpr int64_t G = 5, kCount = clo::kRowsBlock;
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  for (const clo::RowsTable* table : {clo::rows_table_generic(), &clo::rows_table()})
    for (const clo::RowFormat format : {clo::RowFormat::kInt8, clo::RowFormat::kFp8})
      for (const int64_t D : {8, 24, 64, 80, 96, 128, 256}) {
        std::vector<float> query(G * D), values(kCount * 2 * D), scratch(kCount * 2 * D);
        for (float& x : query) x = normal(random) / std::sqrt(static_cast<float>(D));
        for (float& x : values) x = normal(random);
        const int64_t bytes = clo::row_bytes(D, clo::DType::kF32, format);
        std::vector<uint8_t> rows(kCount * bytes);
        clo::quantize_rows(values.data(), kCount, D, clo::DType::kF32, format, rows.data());
        const std::vector<float> plain = clo::test::dequantize(rows.data(), kCount, D, format);
        std::vector<const void*> narrow(kCount), wide(kCount);
        for (int64_t r = 0; r < kCount; ++r) {
          narrow[r] = rows.data() + r * bytes;
          wide[r] = plain.data() + r * 2 * D;
        }
        std::vector<float> max[2], sum[2], acc[2];
        for (const int side : {0, 1}) {
          max[side].assign(G, -std::numeric_limits<float>::infinity());
          sum[side].assign(G, 0);
          acc[side].assign(G * D, 0);
          const void* const* addresses = side == 0 ? narrow.data() : wide.data();
          const Kernel kernel = side == 0 ? kernel_of(*table, format) : table->f32;
          kernel({query.data(), G, D, addresses, kCount, addresses, 0, max[side].data(), sum[side].data(),
                  acc[side].data(), scratch.data()});
        }
        for (int64_t g = 0; g < G; ++g) {
          assert(std::fabs(max[0][g] - max[1][g]) < 1e-6 && std::fabs(sum[0][g] / sum[1][g] - 1) < 1e-6);
          for (int64_t d = 0; d < D; ++d)
            assert(std::fabs(acc[0][g * D + d] - acc[1][g * D + d]) < 1e-6 * sum[1][g]);
        }
      }
}

}  // namespace

int main() {
  test_waits_after_the_rows_at_hand_and_before_the_selected_ones();
  test_a_failed_wait_gives_its_text_and_attends_to_the_rest();
  test_powers_of_two();
  test_every_shape_of_a_block();
  test_every_shape_of_a_block_of_quantized_rows();
  test_quantized_rows_are_what_their_bytes_stand_for();
}
