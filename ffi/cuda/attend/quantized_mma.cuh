// One warp's attention over units of quantized rows on tensor cores, whose operands are made from the stored bytes in
// registers: through shared memory as wide rows (quantized.cuh) they would pass it three times, which takes as long as
// the narrow ones take to arrive.
//
// A matrix of bytes is loaded as one of pairs. So a thread gets four neighbouring elements of a key at once, where two and
// two further ones come from wide rows; and of each value a pair of dimensions instead of one. Sums over the elements of a
// key may be taken in any order if the query has the same, and the dimensions of the result are put in their places at
// last: with the first quantized unit of a head the registers of both go over to the other order.
#pragma once

#include <cstdint>

#include "clo/row_format.h"
#include "cuda/attend/mma.cuh"
#include "cuda/attend/ptx.cuh"
#include "cuda/attend/quantized.cuh"

namespace clo::cuda {

template <int D>
class QuantizedMmaTile : public MmaTile<D, __nv_bfloat16> {
  using Base = MmaTile<D, __nv_bfloat16>;
  using Base::acc_, Base::g_, Base::group_, Base::kSteps, Base::query_, Base::t_;
  static constexpr int kRow = 2 * D + kScaleBytes, kStepsOfGroup = kSteps / static_cast<int>(kScaleGroups);
  static_assert(kSteps % (2 * kScaleGroups) == 0 || kStepsOfGroup == 1, "two steps are loaded at once");
  static_assert(kRow % 128 == 16, "8 rows of one column are in different banks");

 public:
  using Element = __nv_bfloat16;

  __device__ QuantizedMmaTile(int group, float scale_log2, int lane, float* scratch)
      : Base(group, scale_log2, lane, scratch) {}

  __device__ void begin(const Element* query) {
    Base::begin(query);
    paired_ = false;
  }

  // unit: 16 rows one after the other, of which n are valid, the others zero. query: of the head that was begun.
  __device__ void add_quantized(const unsigned char* unit, RowFormat format, int n, const Element* query) {
    if (!paired_) pair_up(query);
    if (format == RowFormat::kInt8) add_bytes<RowFormat::kInt8>(unit, n);
    else add_bytes<RowFormat::kFp8>(unit, n);
  }

  __device__ void finish(float* acc, float2* state) {
    Base::finish(acc, state, paired_ ? 2 * g_ : g_, paired_ ? 2 * g_ + 1 : g_ + 8);
  }

 private:
  // Of every 16 elements of a query, those at 2·t and 2·t + 8 and the ones behind them become the four at 4·t, even and odd
  // ones; of every 16 dimensions of the result, g and g + 8 become 2·g and the next.
  __device__ void pair_up(const Element* query) {
    paired_ = true;
    const int from = (2 * g_ & 7) * 4 + t_;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (g_ < group_) {
        const uint2 q = *reinterpret_cast<const uint2*>(query + g_ * D + k * 16 + 4 * t_);
        query_[k][0] = __byte_perm(q.x, q.y, 0x5410);
        query_[k][1] = __byte_perm(q.x, q.y, 0x7632);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float low = __shfl_sync(~0u, acc_[k][j], from), high = __shfl_sync(~0u, acc_[k][2 + j], from);
        const float next_low = __shfl_sync(~0u, acc_[k][j], from + 4);
        const float next_high = __shfl_sync(~0u, acc_[k][2 + j], from + 4);
        acc_[k][j] = g_ < 4 ? low : high;
        acc_[k][2 + j] = g_ < 4 ? next_low : next_high;
      }
    }
  }

  template <RowFormat kFormat>
  __device__ void add_bytes(const unsigned char* unit, int n) {
    // Row 0 to 15 by the lowest four bits of the lane, the first or second of two steps by the highest.
    const int lane = g_ * 4 + t_;
    const uint32_t at = shared_address(unit) + (lane & 15) * kRow + (lane >> 4) * 16;
    float s[2][4] = {};
    {
      const uint2 above = scales(unit, g_, 0), below = scales(unit, g_ + 8, 0);
#pragma unroll
      for (int k = 0; k < kSteps; k += 2) {
        uint32_t x[4];  // rows g and g + 8 of either step
        load_matrix(x, at + k * 16);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int group = (k + j) / kStepsOfGroup;
          const uint32_t scale0 = twice(above, group), scale1 = twice(below, group);
          const uint32_t x0 = x[2 * j], x1 = x[2 * j + 1];
          const uint32_t a[4] = {scaled_pair<kFormat, false>(x0, scale0), scaled_pair<kFormat, false>(x1, scale1),
                                 scaled_pair<kFormat, true>(x0, scale0), scaled_pair<kFormat, true>(x1, scale1)};
          multiply(Base::kType, s[j], a, query_[k + j][0], query_[k + j][1]);
        }
      }
    }
    uint32_t b0, b1;
    Base::weigh(s, n, &b0, &b1);
    // Of rows 2·t and the next, and of 8 more.
    const uint2 even0 = scales(unit, 2 * t_, 1), odd0 = scales(unit, 2 * t_ + 1, 1);
    const uint2 even1 = scales(unit, 2 * t_ + 8, 1), odd1 = scales(unit, 2 * t_ + 9, 1);
#pragma unroll
    for (int k = 0; k < kSteps; k += 2) {
      uint32_t x[4];  // two dimensions of rows 2·t and the next, and of 8 more, of either step
      load_matrix_transposed(x, at + D + k * 16);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int group = (k + j) / kStepsOfGroup;
        const uint32_t scale0 = both(even0, odd0, group), scale1 = both(even1, odd1, group);
        const uint32_t x0 = x[2 * j], x1 = x[2 * j + 1];
        const uint32_t a[4] = {scaled_pair<kFormat, false>(x0, scale0), scaled_pair<kFormat, true>(x0, scale0),
                               scaled_pair<kFormat, false>(x1, scale1), scaled_pair<kFormat, true>(x1, scale1)};
        multiply(Base::kType, acc_[k + j], a, b0, b1);
      }
    }
  }

  // The four scales of a row's key (part 0) or value (part 1).
  __device__ static uint2 scales(const unsigned char* unit, int row, int part) {
    return *reinterpret_cast<const uint2*>(unit + row * kRow + 2 * D + part * 8);
  }

  // That of a group, in both halves of a word; those of two rows.
  __device__ static uint32_t twice(uint2 x, int group) {
    return __byte_perm(group < 2 ? x.x : x.y, 0, group % 2 == 0 ? 0x1010 : 0x3232);
  }
  __device__ static uint32_t both(uint2 even, uint2 odd, int group) {
    return __byte_perm(group < 2 ? even.x : even.y, group < 2 ? odd.x : odd.y, group % 2 == 0 ? 0x5410 : 0x7632);
  }

  bool paired_ = false;
};

}  // namespace clo::cuda
