// select_topk on the device: hata against the CPU kernel, index for index; sign and exact against scores in double
// precision, whose keys may be off by one unit.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <string>

#include "clo/params.h"
#include "cuda/flags.cuh"
#include "cuda/kernels.h"
#include "cuda/select_topk.cuh"
#include "device.h"

namespace {

using clo::DType;
using clo::Retriever;

enum class Codes { kRandom, kClustered, kEqual };

struct Case {
  int64_t batch, kv_heads, group, dim, bits, tokens, k_max;
  DType dtype = DType::kF32;
  Codes codes = Codes::kRandom;
  bool ragged = true;
};

struct Inputs {
  Inputs(std::mt19937& random, const Case& c, Retriever retriever)
      : query(clo::test::normal(random, static_cast<size_t>(c.batch * c.kv_heads * c.group * c.dim), c.dtype)),
        rows(retriever == Retriever::kExact
                 ? clo::test::normal(random, static_cast<size_t>(c.batch * c.kv_heads * c.tokens * 2 * c.dim), c.dtype)
                 : std::vector<uint8_t>(1)),
        weights(clo::test::normal_floats(random, static_cast<size_t>(c.kv_heads * c.dim * c.bits))),
        mean(clo::test::normal_floats(random, static_cast<size_t>(c.batch * c.kv_heads * c.dim), 0.1f)),
        lse(clo::test::normal_floats(random, static_cast<size_t>(c.batch * c.kv_heads * c.group))),
        codes(static_cast<size_t>(c.batch * c.kv_heads * c.tokens * c.bits / 32), 0u),
        factors(static_cast<size_t>(c.batch * c.kv_heads * c.tokens), uint16_t{0x2e00}),
        begin(static_cast<size_t>(c.batch), 0),
        end(static_cast<size_t>(c.batch), static_cast<int32_t>(c.tokens)),
        k(static_cast<size_t>(c.batch), static_cast<int32_t>(c.k_max)),
        skip(static_cast<size_t>(c.batch * c.kv_heads), uint8_t{0}),
        indices(static_cast<size_t>(c.batch * c.kv_heads * c.k_max), -7) {
    const auto words = static_cast<size_t>(c.bits / 32);
    for (size_t i = 0; i < codes.host.size(); ++i) {
      size_t centre = i;
      if (c.codes == Codes::kEqual) centre = i % words;
      if (c.codes == Codes::kClustered) centre = i / words / 64 % 8 * words + i % words;
      uint64_t x = (centre + 1) * 0x9E3779B97F4A7C15ull;
      x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
      codes.host[i] = static_cast<uint32_t>((x ^ (x >> 27)) >> 16);
      if (c.codes == Codes::kClustered && random() % 8 == 0) codes.host[i] ^= 1u << (random() % 32);
    }
    if (c.codes == Codes::kRandom)
      for (auto& f : factors.host) f = static_cast<uint16_t>(0x2c00 + random() % 0x400);
    if (c.ragged) {
      for (size_t b = 0; b < begin.host.size(); ++b) {
        begin.host[b] = static_cast<int32_t>(random() % 5);
        end.host[b] -= static_cast<int32_t>(random() % static_cast<uint32_t>(c.tokens / 3 + 1));
        k.host[b] -= static_cast<int32_t>(random() % static_cast<uint32_t>(c.k_max / 2 + 1));
        if (b == 3) k.host[b] = 0;
        if (b == 4) end.host[b] = 0;
        if (b == 5) end.host[b] = begin.host[b] + 33;
      }
      for (auto& s : skip.host) s = random() % 4 == 0;
    }
    codes.upload();
    factors.upload();
    begin.upload();
    end.upload();
    k.upload();
    skip.upload();
    indices.poison();
  }

  clo::test::Array<uint8_t> query, rows;
  clo::test::Array<float> weights, mean, lse;
  clo::test::Array<uint32_t> codes;
  clo::test::Array<uint16_t> factors;
  clo::test::Array<int32_t> begin, end, k;
  clo::test::Array<uint8_t> skip;
  clo::test::Array<int32_t> indices;
};

float half(uint16_t h) { return std::ldexp(static_cast<float>((h & 0x3ff) | 0x400), (h >> 10) - 25); }

// Keys of one head's tokens in double precision.
std::vector<int> keys(const Case& c, const Inputs& in, Retriever retriever, int64_t bh, float scale) {
  const int64_t G = c.group, D = c.dim, R = c.bits, S = c.tokens;
  std::vector<double> score(static_cast<size_t>(S), 0.0);
  for (int64_t g = 0; g < G; ++g) {
    std::vector<double> q(static_cast<size_t>(D));
    double along_mean = 0;
    for (int64_t d = 0; d < D; ++d) {
      q[d] = clo::test::element(in.query.host, static_cast<size_t>((bh * G + g) * D + d), c.dtype);
      along_mean += q[d] * in.mean.host[static_cast<size_t>(bh * D + d)];
    }
    std::vector<int> level(static_cast<size_t>(R));
    double step = 0;
    if (retriever == Retriever::kSign) {
      std::vector<float> z(static_cast<size_t>(R), 0.0f);
      for (int64_t d = 0; d < D; ++d)
        for (int64_t r = 0; r < R; ++r)
          z[r] = std::fma(static_cast<float>(q[d]),
                          in.weights.host[static_cast<size_t>((bh % c.kv_heads * D + d) * R + r)], z[r]);
      float most = 0;
      for (float x : z) most = std::max(most, std::fabs(x));
      const float fstep = most / 7;
      step = fstep;
      for (int64_t r = 0; r < R; ++r) level[r] = static_cast<int>(std::nearbyint(z[r] / fstep));
    }
    for (int64_t m = 0; m < S; ++m) {
      double logit = 0;
      if (retriever == Retriever::kSign) {
        const uint32_t* code = in.codes.host.data() + (bh * S + m) * R / 32;
        int dot = 0;
        for (int64_t r = 0; r < R; ++r) dot += code[r / 32] >> (r % 32) & 1 ? level[r] : -level[r];
        logit = scale * (along_mean + half(in.factors.host[static_cast<size_t>(bh * S + m)]) * step * dot);
      } else {
        for (int64_t d = 0; d < D; ++d)
          logit += q[d] * clo::test::element(in.rows.host, static_cast<size_t>((bh * S + m) * 2 * D + d), c.dtype);
        logit *= scale;
      }
      score[m] += std::exp(logit - in.lse.host[static_cast<size_t>(bh * G + g)]);
    }
  }
  std::vector<int> out(static_cast<size_t>(S));
  for (int64_t m = 0; m < S; ++m) {
    const float f = static_cast<float>(score[m]);
    uint32_t u;
    std::memcpy(&u, &f, 4);
    out[m] = static_cast<int>(u >> 15);
  }
  return out;
}

// Every selected key is at least every other one, where each may be off by one.
void check_head(const Case& c, const Inputs& in, Retriever retriever, int64_t bh, float scale, const int32_t* got) {
  const auto b = static_cast<size_t>(bh / c.kv_heads);
  const int begin = in.begin.host[b], end = in.end.host[b];
  const int k = in.skip.host[static_cast<size_t>(bh)] ? 0 : std::max(0, std::min(in.k.host[b], end - begin));
  for (int64_t i = k; i < c.k_max; ++i) CHECK(got[i] == -1);
  if (k == 0) return;
  const std::vector<int> key = keys(c, in, retriever, bh, scale);
  std::vector<bool> chosen(static_cast<size_t>(c.tokens), false);
  int least = 1 << 16, most = -1;
  for (int i = 0; i < k; ++i) {
    CHECK(got[i] >= begin && got[i] < end && (i == 0 || got[i] > got[i - 1]));
    chosen[static_cast<size_t>(got[i])] = true;
    least = std::min(least, key[static_cast<size_t>(got[i])]);
  }
  for (int m = begin; m < end; ++m)
    if (!chosen[static_cast<size_t>(m)]) most = std::max(most, key[static_cast<size_t>(m)]);
  CHECK(least >= most - 2);
}

// The rows of bits that the kernel has left are those of the tokens in `indices` where a head selects.
void check_bits(const Case& c, const std::vector<int32_t>& indices, const clo::test::Array<uint32_t>& bits) {
  const auto words = static_cast<size_t>((c.tokens + 31) / 32), k_max = static_cast<size_t>(c.k_max);
  std::vector<uint32_t> wanted = bits.host;
  for (size_t bh = 0; bh < static_cast<size_t>(c.batch * c.kv_heads); ++bh) {
    if (indices[bh * k_max] < 0) continue;
    std::fill_n(wanted.begin() + static_cast<std::ptrdiff_t>(bh * words), words, 0u);
    for (size_t i = 0; i < k_max && indices[bh * k_max + i] >= 0; ++i) {
      const auto t = static_cast<size_t>(indices[bh * k_max + i]);
      wanted[bh * words + t / 32] |= 1u << (t % 32);
    }
  }
  CHECK(bits.download() == wanted);
}

clo::SelectTopkParams on_device(clo::SelectTopkParams p, Inputs& in) {
  p.query = in.query.device;
  p.weights = in.weights.device;
  p.mean = in.mean.device;
  p.lse = in.lse.device;
  p.codes = in.codes.device;
  p.factors = in.factors.device;
  p.rows = in.rows.device;
  p.begin = in.begin.device;
  p.end = in.end.device;
  p.k = in.k.device;
  p.skip = in.skip.device;
  p.indices = in.indices.device;
  return p;
}

void check(std::mt19937& random, const Case& c, Retriever retriever) {
  Inputs in(random, c, retriever);
  const float scale = 1.0f / std::sqrt(static_cast<float>(c.dim));
  const bool exact = retriever == Retriever::kExact;
  clo::SelectTopkParams p{c.batch, c.kv_heads, c.group, c.dim, exact ? 0 : c.bits, c.tokens, c.k_max, c.dtype, retriever,
                          scale, in.query.host.data(), in.weights.host.data(), in.mean.host.data(), in.lse.host.data(),
                          in.codes.host.data(), in.factors.host.data(), in.rows.host.data(), in.begin.host.data(),
                          in.end.host.data(), in.k.host.data(), in.skip.host.data(), in.indices.host.data()};
  clo::select_topk(p);
  p = on_device(p, in);
  clo::test::Array<uint8_t> workspace(clo::cuda::select_topk_workspace_bytes(p), uint8_t{0});
  workspace.poison();
  CLO_CUDA_CHECK(clo::cuda::select_topk(p, workspace.device, nullptr));
  CLO_CUDA_CHECK(cudaDeviceSynchronize());
  const auto got = in.indices.download();
  clo::test::Array<uint32_t> bits(static_cast<size_t>(c.batch * c.kv_heads * ((c.tokens + 31) / 32)), 0x5a5a5a5au);
  p.indices = nullptr;
  workspace.poison();
  CLO_CUDA_CHECK(clo::cuda::select(p, {{nullptr, nullptr}, false, bits.device, nullptr, 0}, workspace.device, nullptr));
  CLO_CUDA_CHECK(cudaDeviceSynchronize());
  check_bits(c, got, bits);
  if (retriever == Retriever::kHata || c.codes == Codes::kEqual) {
    if (got != in.indices.host) {
      size_t i = 0;
      while (got[i] == in.indices.host[i]) ++i;
      std::fprintf(stderr, "B %ld Ko %ld G %ld D %ld R %ld S %ld k %ld retriever %d: [%zu] got %d, wanted %d\n", c.batch,
                   c.kv_heads, c.group, c.dim, c.bits, c.tokens, c.k_max, static_cast<int>(retriever), i, got[i],
                   in.indices.host[i]);
    }
    CHECK(got == in.indices.host);
    return;
  }
  // The CPU kernel's own keys may be off too, but the two selections are nearly the same.
  size_t same = 0, filled = 0;
  for (int64_t bh = 0; bh < c.batch * c.kv_heads; ++bh) {
    const int32_t *mine = got.data() + bh * c.k_max, *theirs = in.indices.host.data() + bh * c.k_max;
    check_head(c, in, retriever, bh, scale, mine);
    const auto count = static_cast<size_t>(std::find(theirs, theirs + c.k_max, -1) - theirs);
    std::vector<int32_t> both;
    std::set_intersection(mine, mine + count, theirs, theirs + count, std::back_inserter(both));
    same += both.size();
    filled += count;
  }
  CHECK(static_cast<double>(same) >= 0.97 * static_cast<double>(filled) - 2);
}

// One block a multiprocessor until the host lets go.
__global__ void __launch_bounds__(1024) hold_kernel(const volatile uint32_t* go, uint64_t limit_ns) {
  extern __shared__ unsigned char all[];
  all[threadIdx.x] = 0;
  const uint64_t start = clo::cuda::global_nanoseconds();
  while (*go == 0 && clo::cuda::global_nanoseconds() - start < limit_ns) {
  }
}

// Where the blocks of a head cannot all run, the kernel ends in time and says so; afterwards it works as before. Operands
// out of range are told too.
void failures(std::mt19937& random) {
  const Case c{1, 2, 4, 64, 256, 65536, 1000, DType::kF32, Codes::kRandom, false};
  Inputs in(random, c, Retriever::kHata);
  clo::SelectTopkParams host{c.batch, c.kv_heads, c.group, c.dim, c.bits, c.tokens, c.k_max, c.dtype, Retriever::kHata,
                             0.125f, in.query.host.data(), in.weights.host.data(), in.mean.host.data(), in.lse.host.data(),
                             in.codes.host.data(), in.factors.host.data(), in.rows.host.data(), in.begin.host.data(),
                             in.end.host.data(), in.k.host.data(), in.skip.host.data(), in.indices.host.data()};
  clo::select_topk(host);
  const clo::SelectTopkParams p = on_device(host, in);
  clo::test::Array<uint8_t> workspace(clo::cuda::select_topk_workspace_bytes(p), uint8_t{0});
  clo::test::Array<uint32_t> error(1, 0u), bits(static_cast<size_t>(c.kv_heads * c.tokens / 32), ~0u);
  const clo::cuda::SelectOptions options{{nullptr, nullptr}, true, bits.device, error.device, 20000000};
  uint32_t* go = nullptr;
  CLO_CUDA_CHECK(cudaHostAlloc(reinterpret_cast<void**>(&go), 4, cudaHostAllocMapped));
  *go = 0;
  cudaStream_t holding, selecting;
  CLO_CUDA_CHECK(cudaStreamCreateWithFlags(&holding, cudaStreamNonBlocking));
  CLO_CUDA_CHECK(cudaStreamCreateWithFlags(&selecting, cudaStreamNonBlocking));
  constexpr int kAll = 220 * 1024;
  CLO_CUDA_CHECK(cudaFuncSetAttribute(hold_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kAll));
  hold_kernel<<<100, 1024, kAll, holding>>>(go, 3000000000);
  CLO_CUDA_CHECK(clo::cuda::select(p, options, workspace.device, selecting));
  CLO_CUDA_CHECK(cudaStreamSynchronize(selecting));
  CHECK(*const_cast<volatile uint32_t*>(go) == 0);
  CHECK(clo::cuda::error_failure(error.download()[0]) == clo::cuda::Failure::kSelection);
  // What there is of it are tokens of the selection.
  std::vector<uint32_t> wanted(bits.host.size(), 0u);
  for (size_t i = 0; i < in.indices.host.size(); ++i) {
    const auto row = i / static_cast<size_t>(c.k_max) * static_cast<size_t>(c.tokens / 32);
    wanted[row + static_cast<size_t>(in.indices.host[i] / 32)] |= 1u << (in.indices.host[i] % 32);
  }
  const auto partial = bits.download();
  for (size_t i = 0; i < wanted.size(); ++i) CHECK((partial[i] & ~wanted[i]) == 0);
  *const_cast<volatile uint32_t*>(go) = 1;
  CLO_CUDA_CHECK(cudaDeviceSynchronize());

  error.upload();
  CLO_CUDA_CHECK(clo::cuda::select(p, options, workspace.device, selecting));
  CLO_CUDA_CHECK(cudaStreamSynchronize(selecting));
  CHECK(in.indices.same() && error.same());

  for (const bool k_too : {false, true}) {
    in.end.host[0] = static_cast<int32_t>(c.tokens) + !k_too;
    in.k.host[0] = static_cast<int32_t>(c.k_max) + k_too;
    in.end.upload();
    in.k.upload();
    error.upload();
    CLO_CUDA_CHECK(clo::cuda::select(p, options, workspace.device, selecting));
    CLO_CUDA_CHECK(cudaStreamSynchronize(selecting));
    CHECK(clo::cuda::error_failure(error.download()[0]) == clo::cuda::Failure::kBadOperand);
    CHECK(in.indices.same());
  }
  CLO_CUDA_CHECK(cudaStreamDestroy(holding));
  CLO_CUDA_CHECK(cudaStreamDestroy(selecting));
  CLO_CUDA_CHECK(cudaFreeHost(go));
}

}  // namespace

// "small": for a sanitizer.
int main(int argc, char** argv) {
  std::mt19937 random(2);
  if (argc > 1 && std::string(argv[1]) == "small") {
    for (Retriever retriever : {Retriever::kHata, Retriever::kSign, Retriever::kExact}) {
      check(random, {1, 2, 4, 64, 256, 3001, 300, DType::kBF16}, retriever);
      check(random, {1, 2, 5, 64, 256, 2000, 37, DType::kF32, Codes::kEqual}, retriever);
      if (retriever != Retriever::kExact) check(random, {1, 2, 3, 64, 96, 1000, 333}, retriever);
    }
    check(random, {70, 2, 2, 64, 256, 70, 10}, Retriever::kHata);  // more heads than blocks
    std::puts("select_topk: small cases ok");
    return 0;
  }
  for (Retriever retriever : {Retriever::kHata, Retriever::kSign, Retriever::kExact}) {
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (int64_t G = 1; G <= 8; ++G) check(random, {2, 3, G, 128, 256, 3001, 300, dtype}, retriever);
      for (int64_t D : {64, 80, 96, 256}) check(random, {1, 2, 4, D, 256, 1000, 100, dtype}, retriever);
    }
    for (Codes codes : {Codes::kRandom, Codes::kClustered, Codes::kEqual}) {
      if (retriever == Retriever::kExact && codes != Codes::kRandom) continue;
      for (int64_t k : {1, 37, 2500, 5000}) check(random, {7, 3, 4, 64, 256, 5000, k, DType::kF32, codes}, retriever);
      for (int64_t S : {1, 31, 33, 64, 65}) check(random, {2, 2, 3, 64, 256, S, S, DType::kF32, codes, false}, retriever);
    }
    if (retriever != Retriever::kExact)
      for (int64_t R : {32, 96, 128, 160, 512, 1024}) check(random, {2, 2, 5, 64, R, 2000, 333}, retriever);
    check(random, {40, 8, 2, 64, 256, 300, 40}, retriever);  // more heads than blocks
    check(random, {2, 70, 2, 64, 256, 700, 40, DType::kF32, Codes::kRandom, false}, retriever);
    std::printf("retriever %d: small cases ok\n", static_cast<int>(retriever));
    std::fflush(stdout);
  }
  failures(random);
  check(random, {1, 8, 4, 128, 256, 131072, 13107, DType::kBF16, Codes::kRandom, false}, Retriever::kHata);
  check(random, {1, 8, 5, 128, 256, 131072, 13107, DType::kBF16, Codes::kClustered}, Retriever::kHata);
  check(random, {1, 2, 4, 128, 256, 131072, 13107, DType::kBF16, Codes::kRandom, false}, Retriever::kSign);
  check(random, {8, 8, 4, 128, 256, 32768, 3276, DType::kBF16}, Retriever::kHata);
  check(random, {1, 8, 4, 128, 256, 1048576, 104857, DType::kBF16, Codes::kRandom, false}, Retriever::kHata);
  check(random, {1, 40, 4, 128, 256, 400000, 40000, DType::kBF16, Codes::kRandom, false}, Retriever::kHata);
  std::puts("select_topk: ok");
  return 0;
}
