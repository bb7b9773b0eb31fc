// The CUDA form of attend against the CPU one on copies of the same memory, over every group, head dim and dtype; and
// around the wait for a transfer. What must not be read is NaN.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "clo/params.h"
#include "cuda/check.h"
#include "cuda/flags.cuh"
#include "cuda/kernels.h"
#include "tests/check.h"

namespace {

using clo::DType;

// Memory on both sides; the GPU's copy ends with a guard that must stay untouched.
template <typename T>
class Mirror {
 public:
  std::vector<T> host;

  explicit Mirror(size_t n) : host(n) { CLO_CUDA_CHECK(cudaMalloc(&device_, n * sizeof(T) + kGuard)); }
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;
  ~Mirror() { cudaFree(device_); }

  T* device() const { return device_; }
  void upload() {
    CLO_CUDA_CHECK(cudaMemcpy(device_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    CLO_CUDA_CHECK(cudaMemset(device_ + host.size(), kPattern, kGuard));
  }
  std::vector<T> download() const {
    std::vector<T> x(host.size());
    CLO_CUDA_CHECK(cudaMemcpy(x.data(), device_, x.size() * sizeof(T), cudaMemcpyDeviceToHost));
    std::vector<uint8_t> guard(kGuard);
    CLO_CUDA_CHECK(cudaMemcpy(guard.data(), device_ + x.size(), kGuard, cudaMemcpyDeviceToHost));
    for (const uint8_t byte : guard) CHECK(byte == kPattern);
    return x;
  }

 private:
  static constexpr size_t kGuard = 256;
  static constexpr int kPattern = 0x5a;
  T* device_ = nullptr;
};

struct Shape {
  int64_t B, Ko, Kr, G, D, R, S, T, sink, C;
  DType dtype;
  std::vector<int32_t> position, flushed;
  std::vector<int32_t> counts;  // of slots, repeated over [B, Ko]
  bool gather = false;          // no selected rows: through the slot table
  float spread = 1;             // of the queries: large ones make peaked distributions
};

class Problem {
 public:
  explicit Problem(const Shape& s)
      : s_(s), K_(s.Ko + s.Kr), bytes_(clo::dtype_bytes(s.dtype)), row_(2 * s.D * bytes_),
        query_(s.B * K_ * s.G * s.D * bytes_), key_(s.B * K_ * s.D * bytes_), value_(s.B * K_ * s.D * bytes_),
        weights_(s.Ko * s.D * s.R), mean_(s.B * s.Ko * s.D), position_(s.B), flushed_(s.B),
        resident_(s.B * s.Kr * s.S * row_), tail_(s.B * s.Ko * s.T * row_), codes_(s.B * s.Ko * s.S * s.R / 32),
        factors_(s.B * s.Ko * s.S), selected_(s.gather ? 0 : s.B * s.Ko * s.C * row_),
        rows_(s.gather ? s.B * s.Ko * s.S * row_ : 0), tokens_(s.B * s.Ko * s.C), counts_(s.B * s.Ko),
        out_(s.B * K_ * s.G * s.D * bytes_), lse_(s.B * K_ * s.G), views_(3), index_(1), flags_(3), error_(1),
        counters_(1) {
    fill();
    params_ = sizes();
    workspace_bytes_ = clo::cuda::attend_workspace_bytes(params_);
    CLO_CUDA_CHECK(cudaMalloc(&workspace_, workspace_bytes_ + 256));
    CLO_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    prepare();
  }
  ~Problem() {
    cudaFree(workspace_);
    cudaStreamDestroy(stream_);
  }

  // Puts the GPU's memory back to its state before the call.
  void prepare() {
    for (Mirror<uint8_t>* m : {&query_, &key_, &value_, &resident_, &tail_, &selected_, &rows_, &out_}) m->upload();
    for (Mirror<float>* m : {&weights_, &mean_, &lse_}) m->upload();
    for (Mirror<int32_t>* m : {&position_, &flushed_, &tokens_, &counts_, &index_}) m->upload();
    codes_.upload();
    factors_.upload();
    std::memset(views_.host.data(), 0xff, sizeof(clo::LayerView) * views_.host.size());
    views_.host[1] = view(false);
    views_.upload();
    flags_.host.assign(3, {});
    flags_.upload();
    error_.host = {0};
    error_.upload();
    counters_.host.assign(1, {});
    counters_.upload();
    CLO_CUDA_CHECK(cudaMemset(workspace_, 0xff, workspace_bytes_ + 256));
    CLO_CUDA_CHECK(cudaDeviceSynchronize());
  }

  void launch(bool waits = false, uint64_t timeout_ns = 0) {
    clo::AttendParams p = params_;
    p.query = query_.device();
    p.key = key_.device();
    p.value = value_.device();
    p.weights = weights_.device();
    p.mean = mean_.device();
    p.position = position_.device();
    p.flushed = flushed_.device();
    p.resident = resident_.device();
    p.tail = tail_.device();
    p.codes = codes_.device();
    p.factors = factors_.device();
    p.out = out_.device();
    p.lse = lse_.device();
    clo::cuda::EngineRef engine{};
    if (s_.Ko > 0) engine.layer = {views_.device(), index_.device()};
    if (waits) engine.flags = flags_.device();
    engine.error = error_.device();
    engine.counters = counters_.device();
    engine.timeout_ns = timeout_ns;
    CLO_CUDA_CHECK(clo::cuda::attend(p, engine, workspace_, stream_));
  }

  void finish() { CLO_CUDA_CHECK(cudaStreamSynchronize(stream_)); }

  // Runs the CPU kernel on the host's memory, which it changes.
  void run_reference() {
    clo::AttendParams p = params_;
    p.query = query_.host.data();
    p.key = key_.host.data();
    p.value = value_.host.data();
    p.weights = weights_.host.data();
    p.mean = mean_.host.data();
    p.position = position_.host.data();
    p.flushed = flushed_.host.data();
    p.resident = resident_.host.data();
    p.tail = tail_.host.data();
    p.codes = codes_.host.data();
    p.factors = factors_.host.data();
    p.out = out_.host.data();
    p.lse = lse_.host.data();
    p.view = view(true);
    CHECK(clo::attend(p).empty());
  }

  // Compares the GPU's memory with the host's, after both have run. Returns the largest error of a head's output.
  double compare() const {
    CHECK(resident_.download() == resident_.host);
    CHECK(tail_.download() == tail_.host);
    CHECK(selected_.download() == selected_.host);
    compare_codes();
    const std::vector<uint8_t> out = out_.download();
    const std::vector<float> lse = lse_.download();
    // Scores as large as `spread` carry so much larger an absolute error into the exponents.
    const double tolerance = s_.dtype == DType::kF32 ? 1e-5 * s_.spread : 6e-3;
    double worst = 0;
    for (int64_t h = 0; h < s_.B * K_ * s_.G; ++h) {
      double difference = 0, size = 0;
      for (int64_t d = 0; d < s_.D; ++d) {
        const double x = element(out, h * s_.D + d), y = element(out_.host, h * s_.D + d);
        CHECK(std::isfinite(x));
        difference += (x - y) * (x - y);
        size += y * y;
      }
      const double error = size > 0 ? std::sqrt(difference / size) : std::sqrt(difference);
      if (!(error < tolerance)) std::fprintf(stderr, "query head %lld: output error %g\n", static_cast<long long>(h), error);
      CHECK(error < tolerance);
      worst = std::max(worst, error);
      if (std::isinf(lse_.host[h])) CHECK(lse[h] == lse_.host[h]);
      else CHECK(std::fabs(lse[h] - lse_.host[h]) < 2e-5 * (1 + std::fabs(lse_.host[h])));
    }
    uint8_t guard[256];
    CLO_CUDA_CHECK(cudaMemcpy(guard, static_cast<uint8_t*>(workspace_) + workspace_bytes_, 256, cudaMemcpyDeviceToHost));
    for (const uint8_t byte : guard) CHECK(byte == 0xff);
    return worst;
  }

  std::vector<uint8_t> output() const { return out_.download(); }
  std::vector<float> lse() const { return lse_.download(); }
  uint32_t error() const { return error_.download()[0]; }
  uint64_t waited_ns() const { return counters_.download()[0].wait_ns; }
  cudaStream_t stream() const { return stream_; }
  Mirror<uint8_t>& selected() { return selected_; }
  clo::cuda::LayerFlags* flags() const { return flags_.device() + 1; }
  // The rows of a sequence in resident and tail are what they were.
  bool unchanged(int64_t b) const {
    const auto same = [b](const Mirror<uint8_t>& rows, size_t each) {
      const std::vector<uint8_t> now = rows.download();
      return std::equal(now.begin() + b * each, now.begin() + (b + 1) * each, rows.host.begin() + b * each);
    };
    return same(resident_, s_.Kr * s_.S * row_) && same(tail_, s_.Ko * s_.T * row_);
  }
  Mirror<int32_t>& position() { return position_; }

 private:
  clo::AttendParams sizes() const {
    clo::AttendParams p{};
    p.batch = s_.B;
    p.offloaded_heads = s_.Ko;
    p.resident_heads = s_.Kr;
    p.group = s_.G;
    p.head_dim = s_.D;
    p.bits = s_.R;
    p.max_tokens = s_.S;
    p.tail_rows = s_.T;
    p.sink = s_.sink;
    p.dtype = s_.dtype;
    p.scale = 1 / std::sqrt(static_cast<float>(s_.D));
    p.view.batch = s_.B;
    p.view.kv_heads = s_.Ko;
    p.view.max_tokens = s_.S;
    p.view.num_slots = s_.C;
    p.view.head_dim = s_.D;
    p.view.dtype = s_.dtype;
    return p;
  }

  clo::LayerView view(bool host) {
    clo::LayerView v = params_.view;
    if (s_.Ko == 0) return v;
    v.host_rows = s_.gather ? (host ? rows_.host.data() : rows_.device()) : nullptr;
    v.selected_rows = s_.gather ? nullptr : (host ? selected_.host.data() : selected_.device());
    v.slot_tokens = host ? tokens_.host.data() : tokens_.device();
    v.slot_counts = host ? counts_.host.data() : counts_.device();
    return v;
  }

  float element(const std::vector<uint8_t>& x, int64_t i) const {
    if (s_.dtype == DType::kF32) return reinterpret_cast<const float*>(x.data())[i];
    return clo::to_float(reinterpret_cast<const clo::BF16*>(x.data())[i]);
  }

  void randomise(std::vector<uint8_t>& x, float spread = 1) {
    std::normal_distribution<float> normal(0, spread);
    for (size_t i = 0; i < x.size() / bytes_; ++i) {
      if (s_.dtype == DType::kF32) reinterpret_cast<float*>(x.data())[i] = normal(random_);
      else clo::from_float(normal(random_), reinterpret_cast<clo::BF16*>(x.data()) + i);
    }
  }

  void poison(std::vector<uint8_t>& x, int64_t row) { std::memset(x.data() + row * row_, 0xff, row_); }

  void fill() {
    randomise(query_.host, s_.spread);
    for (auto* x : {&key_.host, &value_.host, &resident_.host, &tail_.host, &selected_.host, &rows_.host}) randomise(*x);
    std::normal_distribution<float> normal;
    for (float& x : weights_.host) x = normal(random_);
    for (float& x : mean_.host) x = normal(random_);
    for (uint32_t& x : codes_.host) x = static_cast<uint32_t>(random_());
    for (uint16_t& x : factors_.host) x = static_cast<uint16_t>(random_() % 0x7c00);
    std::memset(out_.host.data(), 0xff, out_.host.size());
    for (float& x : lse_.host) x = std::numeric_limits<float>::quiet_NaN();
    index_.host[0] = 1;
    for (int64_t b = 0; b < s_.B; ++b) {
      const int64_t p = position_.host[b] = s_.position[b % s_.position.size()];
      const int64_t f = flushed_.host[b] = s_.flushed[b % s_.flushed.size()];
      for (int64_t h = 0; h < s_.Kr; ++h)
        for (int64_t i = p; i < s_.S; ++i) poison(resident_.host, (b * s_.Kr + h) * s_.S + i);
      for (int64_t h = 0; h < s_.Ko; ++h) fill_offloaded(b * s_.Ko + h, p, f);
    }
  }

  void fill_offloaded(int64_t head, int64_t p, int64_t flushed) {
    std::vector<bool> attended(s_.T);
    for (int64_t token = 0; token < p; ++token)
      if (token < s_.sink || token >= flushed) attended[clo::ring_index(token, s_.sink, s_.T)] = true;
    for (int64_t i = 0; i < s_.T; ++i)
      if (!attended[i]) poison(tail_.host, head * s_.T + i);
    const int64_t count = counts_.host[head] = s_.counts[head % s_.counts.size()];
    CHECK(count <= s_.C);
    std::vector<bool> used(s_.S);
    for (int64_t i = 0; i < s_.C; ++i) {
      const int32_t token = static_cast<int32_t>(random_() % s_.S);
      tokens_.host[head * s_.C + i] = i < count ? token : -1;
      if (i < count) used[token] = true;
      else if (!s_.gather) poison(selected_.host, head * s_.C + i);
    }
    for (int64_t i = 0; s_.gather && i < s_.S; ++i)
      if (!used[i]) poison(rows_.host, head * s_.S + i);
  }

  // A bit may differ where its projection is zero but for rounding; a factor by one place.
  void compare_codes() const {
    const std::vector<uint32_t> codes = codes_.download();
    const std::vector<uint16_t> factors = factors_.download();
    for (size_t i = 0; i < factors.size(); ++i)
      CHECK(std::abs(static_cast<int>(factors[i]) - static_cast<int>(factors_.host[i])) <= 1);
    const int64_t words = s_.R / 32;
    for (size_t i = 0; i < codes.size(); ++i) {
      const uint32_t different = codes[i] ^ codes_.host[i];
      const int64_t head = static_cast<int64_t>(i) / words / s_.S, b = head / s_.Ko, h = head % s_.Ko;
      for (int64_t bit = 0; bit < 32; ++bit) {
        if ((different >> bit & 1) == 0) continue;
        double projection = 0;
        for (int64_t d = 0; d < s_.D; ++d)
          projection += (element(key_.host, (b * K_ + h) * s_.D + d) - mean_.host[head * s_.D + d]) *
                        weights_.host[(h * s_.D + d) * s_.R + static_cast<int64_t>(i) % words * 32 + bit];
        CHECK(std::fabs(projection) < 1e-4);
      }
    }
  }

  const Shape s_;
  const int64_t K_, bytes_, row_;
  std::mt19937 random_{7};
  Mirror<uint8_t> query_, key_, value_;
  Mirror<float> weights_, mean_;
  Mirror<int32_t> position_, flushed_;
  Mirror<uint8_t> resident_, tail_;
  Mirror<uint32_t> codes_;
  Mirror<uint16_t> factors_;
  Mirror<uint8_t> selected_, rows_;
  Mirror<int32_t> tokens_, counts_;
  Mirror<uint8_t> out_;
  Mirror<float> lse_;
  Mirror<clo::LayerView> views_;
  Mirror<int32_t> index_;
  Mirror<clo::cuda::LayerFlags> flags_;
  Mirror<uint32_t> error_;
  Mirror<clo::cuda::DeviceCounters> counters_;
  clo::AttendParams params_{};
  void* workspace_ = nullptr;
  size_t workspace_bytes_ = 0;
  cudaStream_t stream_ = nullptr;
};

int cases = 0;
double worst[2] = {0, 0};

// The GPU twice, for the same bits, then the CPU.
void check(const Shape& shape) {
  Problem problem(shape);
  problem.launch();
  problem.finish();
  const auto out = problem.output();
  const auto lse = problem.lse();
  problem.prepare();
  problem.launch();
  problem.finish();
  CHECK(problem.output() == out && std::memcmp(problem.lse().data(), lse.data(), lse.size() * 4) == 0);
  problem.run_reference();
  const int i = shape.dtype == DType::kF32 ? 0 : 1;
  worst[i] = std::max(worst[i], problem.compare());
  ++cases;
}

// Three sequences of different lengths: sinks only, a ring that has wrapped, everything flushed.
Shape mixed(int64_t G, int64_t D, DType dtype) {
  return {3,  3,  2,  G, D, 64 * (1 + G % 4), 700, 48, 4, 300, dtype, {2, 399, 699}, {0, 371, 700},
          {0, 1, 300, 17, 16, 129, 64, 63, 299}};
}

void test_every_group_head_dim_and_dtype() {
  for (const DType dtype : {DType::kF32, DType::kBF16})
    for (const int64_t D : {64, 80, 96, 128, 256})
      for (int64_t G = 1; G <= 8; ++G) check(mixed(G, D, dtype));
}

void test_layers_of_one_kind() {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
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
  for (const DType dtype : {DType::kF32, DType::kBF16})
    for (const int64_t D : {64, 80, 128, 256}) {
      Shape s = mixed(4, D, dtype);
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
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Shape s = mixed(4, 128, dtype);
    s.spread = 30;
    check(s);
  }
}

// Many heads in a block, many blocks on a head, and ranges that are cut anywhere.
void test_balance() {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
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
  for (const int64_t D : {128, 256}) {
    Problem problem(mixed(4, D, DType::kBF16));
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
    problem.run_reference();
    problem.compare();
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
    for (const DType dtype : {DType::kF32, DType::kBF16})
      for (const int64_t D : {80, 128, 256}) {
        Shape s = mixed(D == 80 ? 5 : 4, D, dtype);
        s.gather = D == 256;
        check(s);
      }
    std::printf("attend: %d small cases\n", cases);
    return 0;
  }
  test_every_group_head_dim_and_dtype();
  test_layers_of_one_kind();
  test_gathered_rows();
  test_tails();
  test_peaked_scores();
  test_balance();
  test_a_position_out_of_range_gives_nan_and_writes_nothing();
  test_waits_for_the_transfer();
  test_a_transfer_that_never_comes_ends_in_the_error_word();
  test_replays_inside_of_another_graph();
  std::printf("attend: %d cases, largest head error float32 %.1e, bfloat16 %.1e\n", cases, worst[0], worst[1]);
}
