// Scores of keys against the query heads of one group, as 16-bit ranks: the smaller, the better.
//
// hata and sign are both sums over the set bits of a code of small integers, one a bit and query: for sign the query's
// levels in [-7, 7]; for hata, where all queries of the group count alike, G - 2n of a bit that n queries have set (the
// distance of the key grows by that when its bit is set), halved for an even G, whose distances all have one parity. Such
// integers are four bit planes of weight 1, 2, 4 and -8, and binary tensor-core products count the bits of code AND plane:
// m16n8k256, rows = keys, columns = planes, depth = 8 code words of which lane % 4 holds two.
#pragma once

#include "clo/params.h"
#include "cuda/select_query.cuh"

namespace clo::cuda {

constexpr int kStep = 64;         // keys that a warp scores at a time
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void multiply(int (&d)[4], const uint32_t (&a)[4], uint2 b) {
  asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

// exp of x / log2(e) as clamped_exp has it; x is a logarithm to base 2.
__device__ __forceinline__ float clamped_power(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fminf(x, 80.0f * kLog2e)));
  return x >= -87.0f * kLog2e ? y : 0.0f;
}

// Rank of a score >= 0, by the 16 leading bits of its value.
__device__ __forceinline__ uint16_t score_rank(float score) {
  return static_cast<uint16_t>(0xffffu - (__float_as_uint(score) >> 15));
}

// Column fragments of one 8-word block of the planes, from registers (256 bits) or shared memory.
template <Retriever kRetriever, int kSets>
struct Columns {
  static constexpr int kCount = kRetriever == Retriever::kHata ? 2 : 2 * kSets;

  // Fragment i. hata: columns 4i to 4i + 3 are the planes, for every other 16 keys. sign: columns 2q and 2q + 1 are planes
  // 2(i % 2) and the next of query q + 4(i / 2), so that one lane has all planes of a query.
  __device__ static uint2 load(const uint32_t* planes, int words, int block, int i) {
    const int lane = thread_index() % 32, column = lane / 4, w = block * 8 + lane % 4 * 2;
    const uint32_t* at;
    if constexpr (kRetriever == Retriever::kHata) {
      if (column / 4 != i) return {0, 0};
      at = planes + column % 4 * words;
    } else {
      at = planes + ((column / 2 + 4 * (i / 2)) * kPlanes + i % 2 * 2 + column % 2) * words;
    }
    return {w < words ? at[w] : 0, w + 1 < words ? at[w + 1] : 0};
  }
};

// 256-bit codes on their way to shared memory, and factors with them for sign, one step ahead of their scoring. Each warp
// has a slot of its own. More steps ahead are slower: what is in flight already covers the latency of memory (64 KiB on a
// multiprocessor), and the rest only delays the loads of what a block begins with.
template <bool kFactors>
class CodeStream {
 public:
  static constexpr int kCodeBytes = kStep * 32;
  static constexpr int kFactorBytes = kFactors ? kStep * 2 + 16 : 0;  // begins at a word: up to one more than kStep
  static constexpr int kBytes = kWarps * (kCodeBytes + kFactorBytes);

  __device__ CodeStream(unsigned char* memory, const uint32_t* codes, const uint16_t* factors, int n) {
    const int thread = thread_index(), lane = thread % 32, first = thread / 32 * kStep;
    slot_ = memory + thread / 32 * (kCodeBytes + kFactorBytes);
    codes_ = codes + first * 8 + lane * 4;
    left_ = n - first - lane / 2;
    if constexpr (kFactors) {
      odd_ = reinterpret_cast<uintptr_t>(factors) / 2 % 2;
      factors_ = factors - odd_ + first + 2 * lane;
    }
  }

  // Starts the copies of the next step.
  __device__ __forceinline__ void start() {
    const int lane = thread_index() % 32;
    const uint32_t slot = shared_address(slot_);
    uint64_t policy;  // codes are read once: they must not push what is small and read often out of L2
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#pragma unroll
    for (int i = 0; i < kStep / 16; ++i)
      if (left_ > i * 16)
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(slot + lane * 16 + i * 512),
                     "l"(codes_ + i * 128), "l"(policy)
                     : "memory");
    if constexpr (kFactors) {
      const int left = left_ + lane / 2 + odd_ - 2 * lane;
      fetch_factors(slot + kCodeBytes + lane * 4, factors_, left);
      if (lane == 0) fetch_factors(slot + kCodeBytes + kStep * 2, factors_ + kStep, left - kStep);
      factors_ += kWarps * kStep;
    }
    codes_ += kWarps * kStep * 8;
    left_ -= kWarps * kStep;
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // Waits for the step's codes, gets this lane's words of keys 8·l + lane / 4 and the factors of keys lane and lane + 32,
  // and starts the copies of the next one.
  __device__ __forceinline__ void take(uint2 (&words)[kStep / 8], uint16_t (&factors)[2]) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncwarp();
    const int lane = thread_index() % 32;
    const uint2* from = reinterpret_cast<const uint2*>(slot_) + lane;
#pragma unroll
    for (int l = 0; l < kStep / 8; ++l) words[l] = from[l * 32];
    if constexpr (kFactors) {
      const uint16_t* f = reinterpret_cast<const uint16_t*>(slot_ + kCodeBytes) + odd_ + lane;
      factors[0] = f[0];
      factors[1] = f[32];
    }
    __syncwarp();
    start();
  }

 private:
  // Two factors from an address that is a multiple of 4 bytes, of `left` that there are.
  // Without a cache policy: nvcc 13.0 encodes a copy of 4 bytes with one wrongly ("illegal instruction").
  __device__ __forceinline__ static void fetch_factors(uint32_t to, const uint16_t* from, int left) {
    if (left > 0)
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(left > 1 ? 4 : 2) : "memory");
  }

  unsigned char* slot_;
  const uint32_t* codes_;    // the lane's, of the next step
  int left_, odd_ = 0;       // keys from the lane's first of that step on; factors begin in the middle of a word
  const uint16_t* factors_ = nullptr;
};

// Ranks of keys [0, n) by code: put(key, rank) for each, by any thread. kFast: 256 bits, and `stream` has been started.
// hata: `base` is the rank of an empty code, and with kFast the planes are those in `encoded_planes`, not s.planes.
template <Retriever kRetriever, int kSets, bool kFast, typename Put>
__device__ __forceinline__ void score_codes(const uint32_t* codes, const uint16_t* factors, int words, int n,
                                            const GroupQuery& s, const uint32_t* encoded_planes, int base,
                                            CodeStream<kRetriever == Retriever::kSign>& stream, Put put) {
  using C = Columns<kRetriever, kSets>;
  constexpr bool kHata = kRetriever == Retriever::kHata;
  constexpr int kGroups = kStep / 16;
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32, row = lane / 4, column = lane % 4;
  uint2 held[kFast ? C::kCount : 1];
  if constexpr (kFast && kHata) {
    // Straight from what the kernel ahead has left.
    const uint2 mine = __ldcg(reinterpret_cast<const uint2*>(encoded_planes + row % 4 * 8) + column);
#pragma unroll
    for (int i = 0; i < C::kCount; ++i) held[i] = row / 4 == i ? mine : uint2{0, 0};
  } else if constexpr (kFast) {
#pragma unroll
    for (int i = 0; i < C::kCount; ++i) held[i] = C::load(s.planes, 8, 0, i);
  }

  float slopes[kSets] = {}, offsets[kSets] = {};
  int biases[kSets] = {};  // an integer's bits plus this are those of a float, 2^23 + 2^22 too large
  constexpr float kBias = 12582912.0f;
  if constexpr (!kHata) {
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      slopes[set] = s.facts->slopes[column + 4 * set];
      offsets[set] = s.facts->offsets[column + 4 * set];
      biases[set] = __float_as_int(kBias) - s.facts->sums[column + 4 * set];
    }
  }
  const int low = column % 2 ? 4 : 1, high = column % 2 ? -8 : 2;

  for (int first = warp * kStep; first < n; first += kWarps * kStep) {
    uint2 code[kFast ? kStep / 8 : 1];
    uint16_t bits[2] = {};
    if constexpr (kFast) {
      stream.take(code, bits);
    } else if constexpr (!kHata) {
#pragma unroll
      for (int i = 0; i < 2; ++i) bits[i] = first + i * 32 + lane < n ? __ldcs(factors + first + i * 32 + lane) : 0;
    }
    const float halves[2] = {__half2float(__ushort_as_half(bits[0])), __half2float(__ushort_as_half(bits[1]))};
    float scores[kGroups][2];
    int counts[4] = {};
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      int products[kHata ? 1 : 2 * kSets][4] = {};
      const int blocks = kFast ? 1 : (words + 7) / 8;
      for (int block = 0; block < blocks; ++block) {
        uint32_t a[4];
        if constexpr (kFast) {
          a[0] = code[2 * group].x;
          a[1] = code[2 * group + 1].x;
          a[2] = code[2 * group].y;
          a[3] = code[2 * group + 1].y;
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int key = first + group * 16 + i % 2 * 8 + row, w = block * 8 + column * 2 + i / 2;
            a[i] = key < n && w < words ? codes[static_cast<int64_t>(key) * words + w] : 0;
          }
        }
        if constexpr (kHata) {
          multiply(counts, a, kFast ? held[group % 2] : C::load(s.planes, words, block, group % 2));
        } else {
#pragma unroll
          for (int i = 0; i < C::kCount; ++i)
            multiply(products[i], a, kFast ? held[kFast ? i : 0] : C::load(s.planes, words, block, i));
        }
      }
      if constexpr (kHata) {
        if (group % 2 == 1) {
          // A lane pair has all planes of one key each once they have exchanged halves.
          const int x = low * counts[0] + high * counts[1], y = low * counts[2] + high * counts[3];
          const int rank = __shfl_xor_sync(~0u, column % 2 ? x : y, 1) + (column % 2 ? y : x) + base;
          const int key = first + (group - 1) * 16 + column / 2 * 16 + column % 2 * 8 + row;
          if (key < n) put(key, static_cast<uint16_t>(rank));
#pragma unroll
          for (int i = 0; i < 4; ++i) counts[i] = 0;
        }
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float factor = __shfl_sync(~0u, halves[group / 2], group % 2 * 16 + half * 8 + row);
          float score = 0;
#pragma unroll
          for (int set = 0; set < kSets; ++set) {
            const int(&low_planes)[4] = products[2 * set];
            const int(&high_planes)[4] = products[2 * set + 1];
            const int twice = 2 * low_planes[2 * half] + 4 * low_planes[2 * half + 1] + 8 * high_planes[2 * half] -
                              16 * high_planes[2 * half + 1] + biases[set];
            score += clamped_power(slopes[set] * factor * (__int_as_float(twice) - kBias) + offsets[set]);
          }
          scores[group][half] = score;
        }
      }
    }
    if constexpr (!kHata) {
      const int self = thread_index() % 32, quarter = self % 4;  // lane and column, not kept in registers meanwhile
      // Sums over the four lanes of a key, scattered: each lane ends up with the keys of one group of 16.
      float two[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float keep = quarter / 2 ? scores[2 + i][half] : scores[i][half];
          const float give = quarter / 2 ? scores[i][half] : scores[2 + i][half];
          two[i][half] = keep + __shfl_xor_sync(~0u, give, 2);
        }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float keep = quarter % 2 ? two[1][half] : two[0][half], give = quarter % 2 ? two[0][half] : two[1][half];
        const float score = keep + __shfl_xor_sync(~0u, give, 1);
        const int key = first + quarter * 16 + half * 8 + self / 4;
        if (key < n) put(key, score_rank(score));
      }
    }
  }
}

// Ranks of keys [0, n) by their rows [n, 2, D]: eight lanes a key.
template <int kSets, typename T, typename Put>
__device__ void score_rows(const T* rows, int D, int n, const GroupQuery& s, Put put) {
  constexpr int kQueries = 4 * kSets, kVector = 16 / sizeof(T);
  const int lane = threadIdx.x % 32, part = lane % 8;
  for (int first = threadIdx.x / 32 * 4; first < n; first += kWarps * 4) {
    const int key = first + lane / 8;
    float dots[kQueries] = {};
    if (key < n) {
      const T* x = rows + static_cast<int64_t>(key) * 2 * D;
      for (int d = part * kVector; d < D; d += 8 * kVector) {
        alignas(16) T values[kVector];
        *reinterpret_cast<uint4*>(values) = *reinterpret_cast<const uint4*>(x + d);
#pragma unroll
        for (int i = 0; i < kVector; ++i)
#pragma unroll
          for (int g = 0; g < kQueries; ++g) dots[g] = fmaf(s.query[(d + i) * kQueries + g], widen(values[i]), dots[g]);
      }
    }
    float score = 0;
#pragma unroll
    for (int g = 0; g < kQueries; ++g)
      score += clamped_power(s.facts->slopes[g] * warp_sum<8>(dots[g]) + s.facts->offsets[g]);
    if (part == 0 && key < n) put(key, score_rank(score));
  }
}

}  // namespace clo::cuda
