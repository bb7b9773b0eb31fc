// hash_encode on the device against the CPU kernel: equal codes, factors within one unit of a half.
#include <cstdio>
#include <cstdlib>

#include "clo/params.h"
#include "cuda/kernels.h"
#include "device.h"

namespace {

using clo::DType;

void check(std::mt19937& random, int64_t B, int64_t K, int64_t N, int64_t D, int64_t R, DType dtype) {
  const auto n = static_cast<size_t>(B * K * N);
  clo::test::Array<uint8_t> x(clo::test::normal(random, n * D, dtype));
  clo::test::Array<float> weights(clo::test::normal_floats(random, static_cast<size_t>(K * D * R)));
  clo::test::Array<float> mean(clo::test::normal_floats(random, static_cast<size_t>(B * K * D), 0.3f));
  clo::test::Array<uint32_t> codes(n * R / 32, 0);
  clo::test::Array<uint16_t> factors(n, 0);
  codes.poison();
  factors.poison();
  clo::HashEncodeParams p{B, K, N, D, R, dtype, x.host.data(), weights.host.data(), mean.host.data(),
                          codes.host.data(), factors.host.data()};
  clo::hash_encode(p);
  p.x = x.device;
  p.weights = weights.device;
  p.mean = mean.device;
  p.codes = codes.device;
  p.factors = factors.device;
  CLO_CUDA_CHECK(clo::cuda::hash_encode(p, nullptr));
  CLO_CUDA_CHECK(cudaDeviceSynchronize());
  CHECK(codes.same());
  const auto got = factors.download();
  for (size_t i = 0; i < n; ++i) CHECK(std::abs(got[i] - factors.host[i]) <= 1);
}

void a_key_that_is_the_mean_has_factor_zero() {
  constexpr int64_t D = 64, R = 64;
  clo::test::Array<float> x(std::vector<float>(D, 0.5f)), weights(std::vector<float>(D * R, 1.0f));
  clo::test::Array<uint32_t> codes(R / 32, 1);
  clo::test::Array<uint16_t> factors(1, 1);
  const clo::HashEncodeParams p{1, 1, 1, D, R, DType::kF32, x.device, weights.device, x.device, codes.device,
                                factors.device};
  CLO_CUDA_CHECK(clo::cuda::hash_encode(p, nullptr));
  CHECK(factors.download()[0] == 0);
  CHECK(codes.download() == std::vector<uint32_t>(R / 32, 0));
}

}  // namespace

int main() {
  std::mt19937 random(0);
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (int64_t D : {64, 80, 96, 128, 256}) check(random, 2, 3, 130, D, 256, dtype);
    for (int64_t R : {32, 96, 128, 160, 512}) check(random, 1, 2, 65, 128, R, dtype);
    for (int64_t N : {1, 63, 64, 4096}) check(random, 2, 2, N, 128, 256, dtype);
  }
  a_key_that_is_the_mean_has_factor_zero();
  std::puts("hash_encode: ok");
  return 0;
}
