// The CUDA form of attend against the CPU one on copies of the same memory, over every group, head dim and dtype; and
// around the wait for a transfer.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

#include "clo/params.h"
#include "cuda/check.h"
#include "cuda/flags.cuh"
#include "tests/check.h"
#include "tests/cuda/attend_problem.h"
#include "tests/cuda/mirror.h"

namespace {

using clo::DType;
using clo::RowFormat;

constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr RowFormat kFormats[] = {RowFormat::kPlain, RowFormat::kInt8, RowFormat::kFp8};

int cases = 0;
double worst[3][3] = {};  // by format and dtype

// The GPU twice, for the same bits, then the CPU. The second time the workspace is full of numbers, 0.75 each, that would
// do as an earlier call's partial results.
void check(const Shape& shape) {
  Problem problem(shape);
  problem.launch();
  problem.finish();
  const auto out = problem.output();
  const auto lse = problem.lse();
  problem.prepare(0x3f);
  problem.launch();
  problem.finish();
  CHECK(problem.output() == out && std::memcmp(problem.lse().data(), lse.data(), lse.size() * 4) == 0);
  double& most = worst[static_cast<int>(shape.format)][static_cast<int>(shape.dtype)];
  most = std::max(most, problem.compare_with_reference());
  ++cases;
}

// Three sequences of different lengths: sinks only, a ring that has wrapped, everything flushed.
Shape mixed(int64_t G, int64_t D, DType dtype, RowFormat format = RowFormat::kPlain) {
  Shape s = {3,  3,  2,  G, D, 64 * (1 + G % 4), 700, 48, 4, 300, dtype, {2, 399, 699}, {0, 371, 700},
             {0, 1, 300, 17, 16, 129, 64, 63, 299}};
  s.format = format;
  return s;
}

void test_every_group_head_dim_dtype_and_format() {
  for (const RowFormat format : kFormats)
    for (const DType dtype : kTypes)
      for (const int64_t D : {64, 80, 96, 128, 256})
        for (int64_t G = 1; G <= 8; ++G) check(mixed(G, D, dtype, format));
}

void test_layers_of_one_kind() {
  for (const DType dtype : kTypes) {
    Shape s = mixed(4, 128, dtype);
    s.Kr = 0;
    check(s);
    s.R = 0;
    check(s);
    s = mixed(5, 128, dtype);
    s.Ko = s.R = 0;
    check(s);
  }
}

void test_gathered_rows() {
  for (const RowFormat format : kFormats)
    for (const DType dtype : kTypes)
      for (const int64_t D : {64, 80, 128, 256}) {
        Shape s = mixed(4, D, dtype, format);
        s.gather = true;
        check(s);
      }
}

// Every residue of the ring and of the unit, with and without sinks, and the first tokens of a sequence.
void test_tails() {
  for (const int64_t sink : {0, 1, 4, 16, 17})
    for (int32_t kept = 0; kept <= 32; ++kept) {
      Shape s = mixed(4, 64, kept % 2 == 0 ? DType::kBF16 : DType::kF32);
      s.T = sink + 32;
      s.sink = sink;
      s.counts = {kept % 3, 0, 5};
      s.position = {kept, 200 + kept, 430 + 7 * kept};
      s.flushed.clear();
      for (const int32_t p : s.position) s.flushed.push_back(std::max(0, p + 1 - kept));
      check(s);
    }
}

void test_peaked_scores() {
  for (const DType dtype : kTypes) {
    Shape s = mixed(4, 128, dtype);
    s.spread = 30;
    check(s);
  }
}

// Every number of rows in the last unit, plain and quantized units in turn, and none of either.
void test_counts_of_quantized_rows() {
  for (const RowFormat format : {RowFormat::kInt8, RowFormat::kFp8})
    for (const DType dtype : kTypes)
      for (const int64_t D : {64, 80, 128})
        for (int32_t count = 0; count < 34; count += 11) {
          Shape s = mixed(4, D, dtype, format);
          s.S = 128;
          s.C = 48;
          s.position = {2, 99, 127};
          s.flushed = {0, 71, 128};
          s.counts.clear();
          for (int32_t i = 0; i < 11; ++i) s.counts.push_back(count + i);  // 11 and 9 heads have no common divisor
          check(s);
          s.Kr = 0;
          s.counts.assign(1, count);
          check(s);
        }
}

// Many heads in a block, many blocks on a head, and ranges that are cut anywhere.
void test_balance() {
  for (const DType dtype : kTypes) {
    Shape s = mixed(4, 128, dtype);
    s.B = 40;
    check(s);
    s.B = 1;
    s.Ko = 1;
    s.Kr = 1;
    s.S = 40000;
    s.C = 20000;
    s.position = {39990};
    s.flushed = {39970};
    s.counts = {19999};
    check(s);
    s.Kr = 0;
    s.counts = {13107};
    check(s);
    s.Ko = 8;
    s.counts = {13107, 0, 5000, 17, 20000, 1, 16, 12000};
    check(s);
    if (dtype == DType::kF32) continue;
    s.format = dtype == DType::kBF16 ? RowFormat::kInt8 : RowFormat::kFp8;
    check(s);
  }
}

void test_a_position_out_of_range_gives_nan_and_writes_nothing() {
  for (const int32_t wrong : {-1, 700, 1 << 30}) {
    Shape s = mixed(2, 64, DType::kBF16);
    Problem problem(s);
    problem.position().host[1] = wrong;
    problem.position().upload();
    problem.launch();
    problem.finish();
    const auto lse = problem.lse();
    const int64_t heads = 5 * s.G;
    for (int64_t i = 0; i < 3 * heads; ++i) CHECK(std::isnan(lse[i]) == (i / heads == 1));
    CHECK(problem.unchanged(1) && !problem.unchanged(0));
    CHECK(clo::cuda::error_failure(problem.error()) == clo::cuda::Failure::kBadOperand);
  }
}

void test_a_layer_out_of_range_gives_nan_where_heads_are_offloaded() {
  for (const int32_t wrong : {-1, 3, 1 << 30}) {
    const Shape s = mixed(2, 64, DType::kBF16);
    Problem problem(s);
    problem.layer().host[0] = wrong;
    problem.layer().upload();
    problem.launch(true, 1'000'000);
    problem.finish();
    const auto lse = problem.lse();
    for (int64_t i = 0; i < 3 * 5 * s.G; ++i) CHECK(std::isnan(lse[i]) == (i / s.G % 5 < s.Ko));
    CHECK(clo::cuda::error_failure(problem.error()) == clo::cuda::Failure::kBadOperand);
  }
}

__global__ void deliver(const uint4* from, uint4* to, size_t n, uint64_t delay_ns, clo::cuda::LayerFlags* flags) {
  const uint64_t start = clo::cuda::global_nanoseconds();
  while (clo::cuda::global_nanoseconds() - start < delay_ns) {
  }
  for (size_t i = threadIdx.x; i < n; i += blockDim.x) to[i] = from[i];
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) clo::cuda::store_release(&flags->ready, 7);
}

__global__ void ask(clo::cuda::LayerFlags* flags, uint32_t sequence) { flags->posted = sequence; }

// The selected rows are NaN until another stream, some time after the launch, has brought them.
void test_waits_for_the_transfer() {
  for (const Shape& shape : {mixed(4, 128, DType::kBF16), mixed(4, 256, DType::kBF16),
                             mixed(4, 128, DType::kBF16, RowFormat::kInt8), mixed(4, 256, DType::kF32, RowFormat::kFp8)}) {
    Problem problem(shape);
    Mirror<uint8_t> source(problem.selected().host.size());
    source.host = problem.selected().host;
    source.upload();
    cudaStream_t other;
    CLO_CUDA_CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    CLO_CUDA_CHECK(cudaMemset(problem.selected().device(), 0xff, source.host.size()));
    ask<<<1, 1>>>(problem.flags(), 7);
    CLO_CUDA_CHECK(cudaDeviceSynchronize());
    problem.launch(true, 10'000'000'000);
    deliver<<<1, 1024, 0, other>>>(reinterpret_cast<uint4*>(source.device()),
                                   reinterpret_cast<uint4*>(problem.selected().device()), source.host.size() / 16,
                                   2'000'000, problem.flags());
    problem.finish();
    CLO_CUDA_CHECK(cudaStreamSynchronize(other));
    CHECK(problem.error() == 0 && problem.waited_ns() > 1'000'000);
    problem.compare_with_reference();
    cudaStreamDestroy(other);
  }
}

void test_a_transfer_that_never_comes_ends_in_the_error_word() {
  Problem problem(mixed(4, 128, DType::kBF16));
  ask<<<1, 1>>>(problem.flags(), 1);
  CLO_CUDA_CHECK(cudaDeviceSynchronize());
  problem.launch(true, 3'000'000);
  problem.finish();
  CHECK(clo::cuda::error_failure(problem.error()) == clo::cuda::Failure::kNotDelivered);
}

struct Late {
  uint8_t* to;
  const uint8_t* from;
  size_t bytes;
};

// Lets the next kernel start at once, and writes what that one is about to use some time later: at last the request that
// brought the selected rows, served at once.
__global__ void produce(const Late* late, int count, clo::cuda::LayerFlags* flags) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const uint64_t start = clo::cuda::global_nanoseconds();
  while (clo::cuda::global_nanoseconds() - start < 100'000) {
  }
  for (int i = 0; i < count; ++i)
    for (size_t j = threadIdx.x; j < late[i].bytes; j += blockDim.x) late[i].to[j] = late[i].from[j];
  __threadfence();
  __syncthreads();
  if (threadIdx.x != 0 || flags == nullptr) return;
  clo::cuda::post(flags);
  clo::cuda::store_release(&flags->ready, flags->posted);
}

// Before the kernel in front of it is over, attend finds one of its operands, all of them, or its selected rows wrong.
void test_starts_before_its_operands_are_there() {
  for (const Shape& shape : {mixed(4, 128, DType::kF32), mixed(4, 128, DType::kBF16), mixed(4, 128, DType::kF16),
                             mixed(4, 128, DType::kBF16, RowFormat::kInt8)})
    for (const int wrong : {0xff, 0}) {
      const size_t operands = Problem(shape).operands().size();
      for (size_t which = 0; which <= operands + 1; ++which) {
        Problem problem(shape);
        std::vector<Memory> memories = problem.operands();
        memories.push_back(Problem::memory(problem.selected()));
        if (which < memories.size()) memories = {memories[which]};
        std::vector<Late> late;
        for (const Memory& m : memories) {
          uint8_t* right;
          CLO_CUDA_CHECK(cudaMalloc(&right, m.bytes));
          CLO_CUDA_CHECK(cudaMemcpy(right, m.data, m.bytes, cudaMemcpyDeviceToDevice));
          CLO_CUDA_CHECK(cudaMemset(m.data, wrong, m.bytes));
          late.push_back({static_cast<uint8_t*>(m.data), right, m.bytes});
        }
        Mirror<Late> list(late.size());
        list.host = late;
        list.upload();
        CLO_CUDA_CHECK(cudaDeviceSynchronize());
        produce<<<1, 1024, 0, problem.stream()>>>(list.device(), static_cast<int>(late.size()),
                                                  which >= operands ? problem.flags() : nullptr);
        problem.launch(true, 1'000'000'000);
        problem.finish();
        CHECK(problem.error() == 0);
        problem.compare_with_reference();
        for (const Late& l : late) cudaFree(const_cast<uint8_t*>(l.from));
      }
    }
}

// As XLA runs it: captured, inside of another graph, more than once.
void test_replays_inside_of_another_graph() {
  Problem problem(mixed(4, 128, DType::kBF16));
  cudaGraph_t captured, outer;
  cudaGraphExec_t program;
  CLO_CUDA_CHECK(cudaStreamBeginCapture(problem.stream(), cudaStreamCaptureModeThreadLocal));
  problem.launch();
  CLO_CUDA_CHECK(cudaStreamEndCapture(problem.stream(), &captured));
  CLO_CUDA_CHECK(cudaGraphCreate(&outer, 0));
  cudaGraphNode_t first, second;
  CLO_CUDA_CHECK(cudaGraphAddChildGraphNode(&first, outer, nullptr, 0, captured));
  CLO_CUDA_CHECK(cudaGraphAddChildGraphNode(&second, outer, &first, 1, captured));
  CLO_CUDA_CHECK(cudaGraphInstantiate(&program, outer, 0));
  for (int i = 0; i < 3; ++i) CLO_CUDA_CHECK(cudaGraphLaunch(program, problem.stream()));
  problem.finish();
  problem.run_reference();
  problem.compare();
  cudaGraphExecDestroy(program);
  cudaGraphDestroy(outer);
  cudaGraphDestroy(captured);
}

}  // namespace

// With "small": a few small cases, for the sanitizers, which serialise kernels that wait for each other.
int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "small") {
    for (const DType dtype : kTypes)
      for (const int64_t D : {80, 128, 256}) {
        Shape s = mixed(D == 80 ? 5 : 4, D, dtype);
        s.gather = D == 256;
        check(s);
        s.format = dtype == DType::kBF16 ? RowFormat::kFp8 : RowFormat::kInt8;
        check(s);
      }
    std::printf("attend: %d small cases\n", cases);
    return 0;
  }
  test_every_group_head_dim_dtype_and_format();
  test_layers_of_one_kind();
  test_gathered_rows();
  test_tails();
  test_peaked_scores();
  test_counts_of_quantized_rows();
  test_balance();
  test_a_position_out_of_range_gives_nan_and_writes_nothing();
  test_a_layer_out_of_range_gives_nan_where_heads_are_offloaded();
  test_waits_for_the_transfer();
  test_a_transfer_that_never_comes_ends_in_the_error_word();
  test_starts_before_its_operands_are_there();
  test_replays_inside_of_another_graph();
  std::printf("attend: %d cases, largest head error", cases);
  for (const RowFormat format : kFormats) {
    const double* const of = worst[static_cast<int>(format)];
    const char* const names[] = {"plain", "int8", "fp8"};
    std::printf("; %s rows: float32 %.1e, bfloat16 %.1e, float16 %.1e", names[static_cast<int>(format)], of[0], of[1], of[2]);
  }
  std::puts("");
}
