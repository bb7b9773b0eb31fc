// Sums of query levels over the set bits of codes, for a block of 64 keys: the inner loop of the `sign` scores. For
// *_body.cc files only (see vector.h).
//
// Four bits of a code select one of 16 sums of four levels, so a byte shuffle looks up many keys at once. Entries carry a
// bias of 28 that makes them unsigned, at most 56: four of them fit a byte, the 64 of a chunk fit 16 bits.
//
// Measured against counting the bits of code AND each of four bit planes of the levels, G = 3, R = 256, one thread of a
// Zen 5 server, ns per key for the group: avx512 1.4 (VPOPCNTD 1.8), avx2 3.1 (POPCNT 3.2), generic 4.6 (POPCNT 3.1). Each
// further head of a group adds 0.24, 0.6 and 1.1; POPCNT adds 1.05 here, and more on CPUs that issue one a cycle, so the
// same form serves all.
#pragma once

#include "cpu/simd/scores.h"
#include "cpu/simd/vector.h"

namespace clo {
namespace {

constexpr int kBlock = kScoreBlock;
constexpr int kChunk = 8;  // code words that are handled at once

// words[w][m] = codes[m * stride + w], for 64 keys.
CLO_INLINE void transpose(const uint32_t* codes, int64_t stride, int64_t words, uint32_t (*out)[kBlock]) {
  int64_t w = 0;
#if defined(__x86_64__)
  for (; w + 4 <= words; w += 4) {
    for (int m = 0; m < kBlock; m += 4) {
      const uint32_t* from = codes + m * stride + w;
      const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + stride));
      const __m128i c = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * stride));
      const __m128i d = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 3 * stride));
      const __m128i ab = _mm_unpacklo_epi32(a, b), AB = _mm_unpackhi_epi32(a, b);
      const __m128i cd = _mm_unpacklo_epi32(c, d), CD = _mm_unpackhi_epi32(c, d);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out[w] + m), _mm_unpacklo_epi64(ab, cd));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out[w + 1] + m), _mm_unpackhi_epi64(ab, cd));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out[w + 2] + m), _mm_unpacklo_epi64(AB, CD));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out[w + 3] + m), _mm_unpackhi_epi64(AB, CD));
    }
  }
#endif
  for (; w < words; ++w)
    for (int m = 0; m < kBlock; ++m) out[w][m] = codes[m * stride + w];
}

// Shuffle indices of a chunk: the low and the high nibble of every code byte, in the order that lookup() wants.
struct Indices {
  alignas(64) uint8_t at[kChunk][2][4 * kBlock];
};

#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)

// One shuffle of 64 table bytes serves the four bytes of 16 keys' words; the byte's place is bits 4 and 5 of its index.
CLO_INLINE void make_indices(const uint32_t (*words)[kBlock], int64_t count, Indices* out) {
  typedef uint32_t Words __attribute__((vector_size(64)));
  for (int64_t w = 0; w < count; ++w) {
    for (int v = 0; v < kBlock; v += 16) {
      Words x;
      std::memcpy(&x, words[w] + v, 64);
      const Words low = (x & 0x0f0f0f0fu) | 0x30201000u, high = ((x >> 4) & 0x0f0f0f0fu) | 0x30201000u;
      std::memcpy(out->at[w][0] + 4 * v, &low, 64);
      std::memcpy(out->at[w][1] + 4 * v, &high, 64);
    }
  }
}

// entries[at[i] % 64]. Masked with a full mask, because GCC 12 warns about its own header for the plain form.
CLO_INLINE __m512i shuffle(__m512i entries, const uint8_t* at) {
  return _mm512_maskz_permutexvar_epi8(~__mmask64{0}, _mm512_load_si512(at), entries);
}

CLO_INLINE void lookup(const Indices& indices, int64_t count, const uint8_t* table, int32_t* sums) {
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i total[4];
  for (int v = 0; v < 4; ++v) total[v] = _mm512_loadu_si512(sums + 16 * v);
  for (int64_t w = 0; w < count; ++w) {
    const __m512i low = _mm512_loadu_si512(table + w * 128), high = _mm512_loadu_si512(table + w * 128 + 64);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const __m512i two = _mm512_add_epi8(shuffle(low, indices.at[w][0] + 64 * v),
                                          shuffle(high, indices.at[w][1] + 64 * v));
      total[v] = _mm512_dpbusd_epi32(total[v], two, ones);
    }
  }
  for (int v = 0; v < 4; ++v) _mm512_storeu_si512(sums + 16 * v, total[v]);
}

#else

// A shuffle of 16 table bytes needs the same byte of many keys side by side: at[w][h][b * 64 + m].
CLO_INLINE void make_indices(const uint32_t (*words)[kBlock], int64_t count, Indices* out) {
#if defined(__x86_64__)
  const __m128i nibble = _mm_set1_epi8(0x0f);
  const __m128i group = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int64_t w = 0; w < count; ++w) {
    for (int m = 0; m < kBlock; m += 16) {
      const __m128i* from = reinterpret_cast<const __m128i*>(words[w] + m);
      const __m128i a = _mm_shuffle_epi8(_mm_loadu_si128(from), group);
      const __m128i b = _mm_shuffle_epi8(_mm_loadu_si128(from + 1), group);
      const __m128i c = _mm_shuffle_epi8(_mm_loadu_si128(from + 2), group);
      const __m128i d = _mm_shuffle_epi8(_mm_loadu_si128(from + 3), group);
      const __m128i ab = _mm_unpacklo_epi32(a, b), AB = _mm_unpackhi_epi32(a, b);
      const __m128i cd = _mm_unpacklo_epi32(c, d), CD = _mm_unpackhi_epi32(c, d);
      const __m128i bytes[4] = {_mm_unpacklo_epi64(ab, cd), _mm_unpackhi_epi64(ab, cd), _mm_unpacklo_epi64(AB, CD),
                                _mm_unpackhi_epi64(AB, CD)};
      for (int i = 0; i < 4; ++i) {
        _mm_store_si128(reinterpret_cast<__m128i*>(out->at[w][0] + i * kBlock + m), _mm_and_si128(bytes[i], nibble));
        _mm_store_si128(reinterpret_cast<__m128i*>(out->at[w][1] + i * kBlock + m),
                        _mm_and_si128(_mm_srli_epi16(bytes[i], 4), nibble));
      }
    }
  }
#else
  for (int64_t w = 0; w < count; ++w)
    for (int b = 0; b < 4; ++b)
      for (int m = 0; m < kBlock; ++m) {
        out->at[w][0][b * kBlock + m] = (words[w][m] >> (8 * b)) & 0x0f;
        out->at[w][1][b * kBlock + m] = (words[w][m] >> (8 * b + 4)) & 0x0f;
      }
#endif
}

#if defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
constexpr int kVecs = kBlock / kBytes;
typedef uint8_t Bytes __attribute__((vector_size(kBytes)));
typedef uint16_t Halves __attribute__((vector_size(kBytes)));

// entries[at[i]] for kBytes indices below 16.
CLO_INLINE Bytes shuffle(const uint8_t* entries, const uint8_t* at) {
#if defined(__AVX2__)
  return reinterpret_cast<Bytes>(_mm256_shuffle_epi8(
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(entries))),
      _mm256_load_si256(reinterpret_cast<const __m256i*>(at))));
#elif defined(__SSSE3__)
  return reinterpret_cast<Bytes>(_mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(entries)),
                                                  _mm_load_si128(reinterpret_cast<const __m128i*>(at))));
#else
  Bytes out;
  for (int i = 0; i < kBytes; ++i) out[i] = entries[at[i]];
  return out;
#endif
}

CLO_INLINE void lookup(const Indices& indices, int64_t count, const uint8_t* table, int32_t* sums) {
  Halves even[kVecs] = {}, odd[kVecs] = {};  // sums of the keys at even and at odd places
  for (int64_t w = 0; w < count; ++w) {
    for (int h = 0; h < 2; ++h) {
      Bytes four[kVecs] = {};
#pragma GCC unroll 4
      for (int b = 0; b < 4; ++b)
        for (int v = 0; v < kVecs; ++v)
          four[v] += shuffle(table + ((w * 2 + h) * 4 + b) * 16, indices.at[w][h] + b * kBlock + kBytes * v);
      for (int v = 0; v < kVecs; ++v) {
        even[v] += reinterpret_cast<Halves>(four[v]) & 0x00ff;
        odd[v] += reinterpret_cast<Halves>(four[v]) >> 8;
      }
    }
  }
  for (int v = 0; v < kVecs; ++v) {
    uint16_t halves[2][kBytes / 2];
    std::memcpy(halves[0], &even[v], kBytes);
    std::memcpy(halves[1], &odd[v], kBytes);
    for (int i = 0; i < kBytes / 2; ++i) {
      sums[kBytes * v + 2 * i] += halves[0][i];
      sums[kBytes * v + 2 * i + 1] += halves[1][i];
    }
  }
}

#endif

}  // namespace
}  // namespace clo
