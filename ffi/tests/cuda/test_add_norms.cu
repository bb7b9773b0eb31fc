// add_norms on the device against a computation in double precision.
#include <cmath>
#include <cstdio>
#include <type_traits>

#include "clo/params.h"
#include "cuda/kernels.h"
#include "device.h"

namespace {

using clo::DType;
using clo::test::element;
using Bytes = clo::test::Array<uint8_t>;

struct Case {
  int64_t rows, hidden;
  int norms;
  DType dtype, scale_dtype;
  bool in_place = false;
  int64_t shift = 0;  // elements that the arrays begin behind a multiple of 16 bytes
};

// Half the distance of neighbours, relative, and what sums of another order differ by.
double tolerance(DType dtype) {
  return (dtype == DType::kF32 ? 0 : dtype == DType::kBF16 ? std::ldexp(1, -8) : std::ldexp(1, -11)) + 2e-6;
}

void check(std::mt19937& random, const Case& c) {
  const int64_t size = clo::dtype_bytes(c.dtype), scale_size = clo::dtype_bytes(c.scale_dtype);
  const auto count = static_cast<size_t>(c.rows * c.hidden), with_shift = count + static_cast<size_t>(c.shift);
  const float eps = 1e-5f;
  Bytes x(clo::test::normal(random, with_shift, c.dtype)), y(clo::test::normal(random, with_shift, c.dtype));
  Bytes first(clo::test::normal(random, static_cast<size_t>(c.hidden + c.shift), c.scale_dtype));
  Bytes second(clo::test::normal(random, static_cast<size_t>(c.hidden + c.shift), c.scale_dtype));
  const Bytes* const scales[] = {&first, &second};
  Bytes sum(x.host.size(), 0x77), one(x.host.size(), 0x77), two(x.host.size(), 0x77);
  const int64_t skip = c.shift * size;
  clo::AddNormsParams p{};
  p.rows = c.rows;
  p.hidden = c.hidden;
  p.norms = c.norms;
  p.dtype = c.dtype;
  p.scale_dtype = c.scale_dtype;
  p.eps = eps;
  p.x = x.device + skip;
  p.y = y.device + skip;
  p.sum = (c.in_place ? x : sum).device + skip;
  p.normed[0] = one.device + skip;
  if (c.norms > 1) p.normed[1] = two.device + skip;
  for (int n = 0; n < c.norms; ++n) p.scales[n] = scales[n]->device + c.shift * scale_size;
  CLO_CUDA_CHECK(clo::cuda::add_norms(p, nullptr));
  CLO_CUDA_CHECK(cudaDeviceSynchronize());

  const std::vector<uint8_t> sums = (c.in_place ? x : sum).download(), normed[] = {one.download(), two.download()};
  std::vector<uint8_t> want = c.in_place ? x.host : sum.host;
  const auto shift = static_cast<size_t>(c.shift), hidden = static_cast<size_t>(c.hidden);
  for (size_t i = shift; i < with_shift; ++i)
    clo::dispatch(c.dtype, [&](auto* tag) {
      std::remove_pointer_t<decltype(tag)> rounded;
      clo::from_float(element(x.host, i, c.dtype) + element(y.host, i, c.dtype), &rounded);
      std::memcpy(want.data() + i * sizeof rounded, &rounded, sizeof rounded);
    });
  CHECK(sums == want);
  for (size_t row = 0; row < static_cast<size_t>(c.rows); ++row) {
    double squares = 0;
    for (size_t i = 0; i < hidden; ++i) squares += std::pow(element(sums, shift + row * hidden + i, c.dtype), 2);
    const double factor = 1 / std::sqrt(squares / static_cast<double>(c.hidden) + eps);
    for (int n = 0; n < c.norms; ++n)
      for (size_t i = 0; i < hidden; ++i) {
        const size_t at = shift + row * hidden + i;
        const double exact = element(sums, at, c.dtype) * factor * element(scales[n]->host, shift + i, c.scale_dtype);
        // The last term: halves have a smallest distance.
        CHECK(std::abs(element(normed[n], at, c.dtype) - exact) <= tolerance(c.dtype) * std::abs(exact) + 6e-8);
      }
  }
  // Nothing in front of the arrays has been written, nor the norm that nobody asked for.
  for (const auto& written : normed)
    CHECK(std::vector<uint8_t>(written.begin(), written.begin() + skip) == std::vector<uint8_t>(skip, 0x77));
  if (c.norms == 1) CHECK(two.same());
}

void refuses_what_no_block_holds() {
  clo::AddNormsParams p{};
  p.rows = 1;
  p.norms = 1;
  p.hidden = clo::kMaxNormHidden + 1;
  CHECK(clo::cuda::add_norms(p, nullptr) == cudaErrorInvalidValue);
  p.hidden = 64;
  p.norms = clo::kMaxNorms + 1;
  CHECK(clo::cuda::add_norms(p, nullptr) == cudaErrorInvalidValue);
  p.rows = 0;
  CHECK(clo::cuda::add_norms(p, nullptr) == cudaSuccess);
}

}  // namespace

// "small": for a sanitizer.
int main(int argc, char** argv) {
  std::mt19937 random(3);
  const bool small = argc > 1 && std::string(argv[1]) == "small";
  const std::vector<int64_t> sizes =
      small ? std::vector<int64_t>{7, 96, 4096, 8200, 16384}
            : std::vector<int64_t>{1,    2,    7,    8,    31,   33,   64,    96,    127,   576,   1000,  1024, 2056,
                                   4095, 4096, 4097, 4104, 8192, 8193, 8200, 12288, 16383, 16384};
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16})
    for (DType scale_dtype : {dtype, DType::kF32}) {
      for (int64_t hidden : sizes)
        for (int norms : {1, 2})
          for (int64_t rows : {1, 2, hidden > 5000 ? 3 : 9})
            check(random, {rows, hidden, norms, dtype, scale_dtype, rows == 2});
      check(random, {3, 4096, 2, dtype, scale_dtype, true, 1});
      check(random, {2, 8192, 1, dtype, scale_dtype, false, 3});
    }
  for (int64_t rows = 1; rows <= 9; ++rows) check(random, {rows, 4096, 2, DType::kBF16, DType::kBF16, true});
  refuses_what_no_block_holds();
  std::puts("add_norms: ok");
  return 0;
}
