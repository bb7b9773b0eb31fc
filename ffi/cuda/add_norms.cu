#include <algorithm>
#include <cstdint>

#include "cuda/kernels.h"
#include "cuda/numeric.cuh"

namespace clo::cuda {
namespace {

constexpr int kMaxThreads = 1024;

// Words of 32 bits, of one or two elements. They stay whole until they are used: what is taken apart earlier is waited
// for earlier. Two are rounded in one instruction, of which a multiprocessor makes several times as many as of single
// ones.
__device__ __forceinline__ void unpack(uint32_t word, float* to, const float*) { to[0] = __uint_as_float(word); }
__device__ __forceinline__ void unpack(uint32_t word, float* to, const BFloat*) {
  to[0] = __uint_as_float(word << 16);
  to[1] = __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ void unpack(uint32_t word, float* to, const Half*) {
  const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&word));
  to[0] = both.x;
  to[1] = both.y;
}
__device__ __forceinline__ uint32_t pack(const float* from, const float*) { return __float_as_uint(from[0]); }
__device__ __forceinline__ uint32_t pack(const float* from, const BFloat*) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(from[0], from[1]);
  return *reinterpret_cast<const uint32_t*>(&both);
}
__device__ __forceinline__ uint32_t pack(const float* from, const Half*) {
  const __half2 both = __floats2half2_rn(from[0], from[1]);
  return *reinterpret_cast<const uint32_t*>(&both);
}

// kCount elements that lie together, moved 16 bytes at a time.
template <typename T, int kCount>
class Piece {
 public:
  __device__ __forceinline__ void load(const void* array, int64_t index) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const uint4 v = static_cast<const uint4*>(array)[index * kVectors + i];
      words_[4 * i] = v.x, words_[4 * i + 1] = v.y, words_[4 * i + 2] = v.z, words_[4 * i + 3] = v.w;
    }
  }
  __device__ __forceinline__ void store(void* array, int64_t index) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      static_cast<uint4*>(array)[index * kVectors + i] =
          make_uint4(words_[4 * i], words_[4 * i + 1], words_[4 * i + 2], words_[4 * i + 3]);
  }
  __device__ __forceinline__ void widen_to(float (&values)[kCount]) const {
#pragma unroll
    for (int i = 0; i < 4 * kVectors; ++i) unpack(words_[i], values + i * kAWord, static_cast<const T*>(nullptr));
  }
  __device__ __forceinline__ void round(const float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < 4 * kVectors; ++i) words_[i] = pack(values + i * kAWord, static_cast<const T*>(nullptr));
  }

 private:
  static constexpr int kAWord = sizeof(uint32_t) / sizeof(T), kVectors = kCount * sizeof(T) / sizeof(uint4);
  uint32_t words_[4 * kVectors];
};

// One element, wherever it lies.
template <typename T>
class Piece<T, 1> {
 public:
  __device__ __forceinline__ void load(const void* array, int64_t index) {
    element_ = static_cast<const T*>(array)[index];
  }
  __device__ __forceinline__ void store(void* array, int64_t index) const { static_cast<T*>(array)[index] = element_; }
  __device__ __forceinline__ void widen_to(float (&values)[1]) const { values[0] = widen(element_); }
  __device__ __forceinline__ void round(const float (&values)[1]) { element_ = T(values[0]); }

 private:
  T element_;
};

// Sum over the threads of the block, in an order that depends on their number alone; each of them gets it.
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float partial[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  x = warp_sum(x);
  if (lane == 0) partial[warp] = x;
  __syncthreads();
  return warp_sum(lane < blockDim.x / 32 ? partial[lane] : 0.0f);
}

// A block a row, which it has in registers: a thread every blockDim.x-th piece, kPieces at most. One row is a few
// kilobytes, and what takes time is the way to memory and back. So everything that the row needs is asked for at once,
// the scales too, before anything is waited for. (Registers suffice where a thread has one or two pieces.)
template <typename T, typename S, int kNorms, int kCount, int kPieces>
__global__ void __launch_bounds__(kMaxThreads)
    add_norms_kernel(const __grid_constant__ AddNormsParams p, const float inverse_hidden) {
  const int pieces = static_cast<int>(p.hidden) / kCount;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * pieces;
  Piece<T, kCount> x[kPieces], y[kPieces];
  Piece<S, kCount> scales[kNorms][kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= pieces) break;
    x[i].load(p.x, row + at);
    y[i].load(p.y, row + at);
#pragma unroll
    for (int n = 0; n < kNorms; ++n) scales[n][i].load(p.scales[n], at);
  }
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= pieces) break;
    float values[kCount], added[kCount];
    x[i].widen_to(values);
    y[i].widen_to(added);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] += added[j];
    x[i].round(values);
    x[i].store(p.sum, row + at);
    x[i].widen_to(values);
#pragma unroll
    for (int j = 0; j < kCount; ++j) squares += values[j] * values[j];
  }
  const float factor = rsqrtf(block_sum(squares) * inverse_hidden + p.eps);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= pieces) break;
    float values[kCount];
    x[i].widen_to(values);
#pragma unroll
    for (int n = 0; n < kNorms; ++n) {
      float scaled[kCount];
      scales[n][i].widen_to(scaled);
#pragma unroll
      for (int j = 0; j < kCount; ++j) scaled[j] *= values[j] * factor;
      Piece<T, kCount> normed;
      normed.round(scaled);
      normed.store(p.normed[n], row + at);
    }
  }
}

template <typename T, typename S, int kNorms, int kCount, int kPieces>
void launch(const AddNormsParams& p, cudaStream_t stream) {
  static_assert(int64_t{kMaxThreads} * kPieces * kCount <= kMaxNormHidden);
  const int64_t one_piece_each = (p.hidden / kCount + 31) / 32 * 32;
  const int threads = static_cast<int>(std::min<int64_t>(one_piece_each, kMaxThreads));
  add_norms_kernel<T, S, kNorms, kCount, kPieces>
      <<<static_cast<unsigned>(p.rows), threads, 0, stream>>>(p, 1.0f / static_cast<float>(p.hidden));
}

bool aligned(const AddNormsParams& p) {
  const auto begins_well = [](const void* array) { return reinterpret_cast<uintptr_t>(array) % sizeof(uint4) == 0; };
  bool all = begins_well(p.x) && begins_well(p.y) && begins_well(p.sum);
  for (int n = 0; n < p.norms; ++n) all = all && begins_well(p.scales[n]) && begins_well(p.normed[n]);
  return all;
}

template <typename T, typename S, int kNorms>
void launch(const AddNormsParams& p, cudaStream_t stream) {
  constexpr int kCount = sizeof(uint4) / sizeof(T), kMost = kMaxNormHidden / (kCount * kMaxThreads);
  if (p.hidden % kCount != 0 || !aligned(p)) launch<T, S, kNorms, 1, kMaxNormHidden / kMaxThreads>(p, stream);
  else if (p.hidden <= kMaxThreads * kCount) launch<T, S, kNorms, kCount, 1>(p, stream);
  else launch<T, S, kNorms, kCount, kMost>(p, stream);
}

template <typename T>
void launch(const AddNormsParams& p, cudaStream_t stream) {
  const bool wide = p.scale_dtype == DType::kF32;
  if (p.norms == 1) wide ? launch<T, float, 1>(p, stream) : launch<T, T, 1>(p, stream);
  else wide ? launch<T, float, 2>(p, stream) : launch<T, T, 2>(p, stream);
}

}  // namespace

cudaError_t add_norms(const AddNormsParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  if (p.hidden < 1 || p.hidden > kMaxNormHidden || p.norms < 1 || p.norms > kMaxNorms) return cudaErrorInvalidValue;
  choose(p.dtype, launch<float>, launch<BFloat>, launch<Half>)(p, stream);
  return cudaGetLastError();
}

}  // namespace clo::cuda
