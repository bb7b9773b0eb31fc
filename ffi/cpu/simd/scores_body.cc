#include "cpu/simd/scores.h"

#include "cpu/simd/exp.h"
#include "cpu/simd/lookup.h"
#include "cpu/simd/vector.h"

namespace clo {
namespace {

CLO_INLINE void add_exp(const float* logits, float* scores) {
  for (int m = 0; m < kBlock; m += kLanes) store(scores + m, load(scores + m) + clamped_exp(load(logits + m)));
}

// The 16 leading value bits of scores >= 0: they sort as the scores do.
CLO_INLINE void to_keys(const float* scores, uint16_t* keys) {
  for (int m = 0; m < kBlock; ++m) keys[m] = static_cast<uint16_t>(float_to_bits(scores[m]) >> 15);
}

int32_t build_lookup(const int8_t* levels, int64_t words, uint8_t* lookup) {
  typedef int8_t Entries __attribute__((vector_size(16)));
  const Entries bit0 = {0, -1, 0, -1, 0, -1, 0, -1, 0, -1, 0, -1, 0, -1, 0, -1};
  const Entries bit1 = {0, 0, -1, -1, 0, 0, -1, -1, 0, 0, -1, -1, 0, 0, -1, -1};
  const Entries bit2 = {0, 0, 0, 0, -1, -1, -1, -1, 0, 0, 0, 0, -1, -1, -1, -1};
  const Entries bit3 = {0, 0, 0, 0, 0, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1};
  int32_t sum = 0;
  for (int64_t w = 0; w < words; ++w) {
    for (int h = 0; h < 2; ++h)
      for (int b = 0; b < 4; ++b) {
        const int8_t* z = levels + w * 32 + b * 8 + h * 4;
        const Entries zero = {};
        const Entries entries =
            (zero + int8_t{28}) + (bit0 & (zero + z[0])) + (bit1 & (zero + z[1])) + (bit2 & (zero + z[2])) +
            (bit3 & (zero + z[3]));
        std::memcpy(lookup + ((w * 2 + h) * 4 + b) * 16, &entries, 16);
      }
    for (int r = 0; r < 32; ++r) sum += levels[w * 32 + r];
  }
  // Sum of z·(2·bit - 1) = 2·(sum of entries - 28·8·words) - sum of z.
  return static_cast<int32_t>(448 * words) + sum;
}

struct Block {
  const uint32_t* codes;
  int64_t stride;
};

// The codes of 64 keys: where they are, or in `copy` when fewer are left.
CLO_INLINE Block whole_block(const uint32_t* codes, int64_t n, int64_t stride, int64_t words, uint32_t* copy) {
  if (n >= kBlock) return {codes, stride};
  for (int64_t i = 0; i < kBlock * kChunk; ++i) copy[i] = 0;
  for (int64_t m = 0; m < n; ++m)
    for (int64_t w = 0; w < words; ++w) copy[m * kChunk + w] = codes[m * stride + w];
  return {copy, kChunk};
}

// sums[g * 64 + m] of one block, over all code words.
CLO_INLINE void block_sums(const uint32_t* codes, int64_t n, const SignQuery& q, int32_t* sums) {
  for (int64_t i = 0; i < q.group * kBlock; ++i) sums[i] = 0;
  for (int64_t first = 0; first < q.words; first += kChunk) {
    const int64_t words = q.words - first < kChunk ? q.words - first : kChunk;
    uint32_t copy[kBlock * kChunk], transposed[kChunk][kBlock];
    const Block block = whole_block(codes + first, n, q.words, words, copy);
    transpose(block.codes, block.stride, words, transposed);
    Indices indices;
    make_indices(transposed, words, &indices);
    for (int64_t g = 0; g < q.group; ++g)
      lookup(indices, words, q.lookups + g * lookup_bytes(q.words) + lookup_bytes(first), sums + g * kBlock);
  }
}

// Heads of a group that are summed up in one pass over a block.
constexpr int64_t kGroup = 8;

void sign(const uint32_t* codes, const uint16_t* factors, int64_t n, const SignQuery& query, uint16_t* keys) {
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t count = n - i < kBlock ? n - i : kBlock;
    uint16_t halves[kBlock] = {};
    for (int64_t m = 0; m < count; ++m) halves[m] = factors[i + m];
    float factor[kBlock], scores[kBlock] = {};
    for (int m = 0; m < kBlock; ++m) factor[m] = half_to_float(halves[m]);
    for (int64_t g = 0; g < query.group; g += kGroup) {
      SignQuery part = query;
      part.group = query.group - g < kGroup ? query.group - g : kGroup;
      part.lookups += g * lookup_bytes(query.words);
      int32_t sums[kGroup * kBlock];
      block_sums(codes + i * query.words, count, part, sums);
      for (int64_t j = 0; j < part.group; ++j) {
        const float slope = query.slopes[g + j], offset = query.offsets[g + j];
        const int32_t shift = query.shifts[g + j];
        float logits[kBlock];
        for (int m = 0; m < kBlock; ++m)
          logits[m] = slope * factor[m] * static_cast<float>(2 * sums[j * kBlock + m] - shift) + offset;
        add_exp(logits, scores);
      }
    }
    to_keys(scores, keys + i);
  }
}

void hata(const uint32_t* codes, int64_t n, const uint32_t* query, int64_t group, int64_t words, uint16_t* keys) {
  const int32_t most = static_cast<int32_t>(group * words * 32);
#if defined(__AVX512VPOPCNTDQ__)
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t count = n - i < kBlock ? n - i : kBlock;
    int32_t scores[kBlock];
    for (int m = 0; m < kBlock; ++m) scores[m] = most;
    for (int64_t first = 0; first < words; first += kChunk) {
      const int64_t some = words - first < kChunk ? words - first : kChunk;
      uint32_t copy[kBlock * kChunk], transposed[kChunk][kBlock];
      const Block block = whole_block(codes + i * words + first, count, words, some, copy);
      transpose(block.codes, block.stride, some, transposed);
      for (int64_t w = 0; w < some; ++w)
        for (int64_t g = 0; g < group; ++g) {
          const uint32_t word = query[g * words + first + w];
          for (int m = 0; m < kBlock; ++m) scores[m] -= __builtin_popcount(transposed[w][m] ^ word);
        }
    }
    for (int m = 0; m < kBlock; ++m) keys[i + m] = static_cast<uint16_t>(scores[m]);
  }
#else
  for (int64_t i = 0; i < n; ++i) {
    int32_t distance = 0;
    for (int64_t g = 0; g < group; ++g) {
      int64_t w = 0;
      for (; w + 2 <= words; w += 2) {
        uint64_t a, b;
        std::memcpy(&a, codes + i * words + w, 8);
        std::memcpy(&b, query + g * words + w, 8);
        distance += __builtin_popcountll(a ^ b);
      }
      for (; w < words; ++w) distance += __builtin_popcount(codes[i * words + w] ^ query[g * words + w]);
    }
    keys[i] = static_cast<uint16_t>(most - distance);
  }
#endif
}

template <typename T>
void exact(const void* rows, int64_t n, int64_t dim, const float* query, int64_t group, float scale,
           const float* offsets, uint16_t* keys) {
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t count = n - i < kBlock ? n - i : kBlock;
    float scores[kBlock] = {};
    for (int64_t g = 0; g < group; ++g) {
      float dots[kBlock] = {};
      for (int64_t m = 0; m < count; ++m) {
        const T* key = static_cast<const T*>(rows) + (i + m) * 2 * dim;
        float dot = 0;
        for (int64_t d = 0; d < dim; ++d) dot += query[g * dim + d] * element(key + d);
        dots[m] = dot;
      }
      for (int m = 0; m < kBlock; ++m) dots[m] = scale * dots[m] + offsets[g];
      add_exp(dots, scores);
    }
    to_keys(scores, keys + i);
  }
}

void compare(const uint16_t* keys, uint16_t threshold, uint64_t* above, uint64_t* equal) {
  uint64_t gt = 0, eq = 0;
#if defined(__AVX512BW__)
  const __m512i t = _mm512_set1_epi16(static_cast<int16_t>(threshold));
  for (int i = 0; i < 2; ++i) {
    const __m512i k = _mm512_loadu_si512(keys + 32 * i);
    gt |= static_cast<uint64_t>(_mm512_cmpgt_epu16_mask(k, t)) << (32 * i);
    eq |= static_cast<uint64_t>(_mm512_cmpeq_epi16_mask(k, t)) << (32 * i);
  }
#elif defined(__SSE4_1__)
  const __m128i t = _mm_set1_epi16(static_cast<int16_t>(threshold));
  for (int i = 0; i < 4; ++i) {
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(keys + 16 * i));
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(keys + 16 * i + 8));
    const __m128i same = _mm_packs_epi16(_mm_cmpeq_epi16(a, t), _mm_cmpeq_epi16(b, t));
    const __m128i least = _mm_packs_epi16(_mm_cmpeq_epi16(_mm_max_epu16(a, t), a), _mm_cmpeq_epi16(_mm_max_epu16(b, t), b));
    eq |= static_cast<uint64_t>(static_cast<uint32_t>(_mm_movemask_epi8(same))) << (16 * i);
    gt |= static_cast<uint64_t>(static_cast<uint32_t>(_mm_movemask_epi8(_mm_andnot_si128(same, least)))) << (16 * i);
  }
#else
  for (int i = 0; i < kBlock; ++i) {
    gt |= static_cast<uint64_t>(keys[i] > threshold) << i;
    eq |= static_cast<uint64_t>(keys[i] == threshold) << i;
  }
#endif
  *above = gt;
  *equal = eq;
}

constexpr ScoresTable kTable = {build_lookup, sign, hata, exact<float>, exact<BF16>, exact<F16>, compare};

}  // namespace

const ScoresTable* CLO_TABLE(scores)() { return &kTable; }

}  // namespace clo
