// A problem for both forms of attend: its memory on both sides, filled so that what must not be read is NaN. (0xff bytes
// are: those of quantized rows by their scales.)
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "clo/params.h"
#include "cpu/quantize.h"
#include "cuda/check.h"
#include "cuda/flags.cuh"
#include "cuda/kernels.h"
#include "tests/check.h"
#include "tests/cuda/mirror.h"
#include "tests/quantized_rows.h"

struct Shape {
  int64_t B, Ko, Kr, G, D, R, S, T, sink, C;
  clo::DType dtype;
  std::vector<int32_t> position, flushed;
  std::vector<int32_t> counts;  // of slots, repeated over [B, Ko]
  bool gather = false;          // no selected rows: through the slot table
  float spread = 1;             // of the queries: large ones make peaked distributions
  clo::RowFormat format = clo::RowFormat::kPlain;  // of selected rows
};

struct Memory {
  void* data;
  size_t bytes;
};

class Problem {
 public:
  explicit Problem(const Shape& s)
      : s_(s), K_(s.Ko + s.Kr), bytes_(clo::dtype_bytes(s.dtype)), row_(2 * s.D * bytes_),
        stored_(clo::row_bytes(s.D, s.dtype, s.format)), query_(s.B * K_ * s.G * s.D * bytes_),
        key_(s.B * K_ * s.D * bytes_), value_(s.B * K_ * s.D * bytes_),
        weights_(s.Ko * s.D * s.R), mean_(s.B * s.Ko * s.D), position_(s.B), flushed_(s.B),
        resident_(s.B * s.Kr * s.S * row_), tail_(s.B * s.Ko * s.T * row_), codes_(s.B * s.Ko * s.S * s.R / 32),
        factors_(s.B * s.Ko * s.S), selected_(s.gather ? 0 : s.B * s.Ko * s.C * stored_),
        rows_(s.gather ? s.B * s.Ko * s.S * stored_ : 0), tokens_(s.B * s.Ko * s.C), counts_(s.B * s.Ko),
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

  // Puts the GPU's memory back to its state before the call. fill: each byte of the workspace, in which any call may have
  // left anything.
  void prepare(int fill = 0xff) {
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
    CLO_CUDA_CHECK(cudaMemset(workspace_, fill, workspace_bytes_));
    CLO_CUDA_CHECK(cudaMemset(static_cast<uint8_t*>(workspace_) + workspace_bytes_, 0xff, 256));
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
    if (s_.Ko > 0) engine.layer = {views_.device(), index_.device(), static_cast<uint32_t>(views_.host.size())};
    if (waits) engine.flags = flags_.device();
    engine.error = error_.device();
    engine.counters = counters_.device();
    engine.timeout_ns = timeout_ns;
    CLO_CUDA_CHECK(clo::cuda::attend(p, engine, workspace_, stream_));
  }

  void finish() { CLO_CUDA_CHECK(cudaStreamSynchronize(stream_)); }

  // Runs the CPU kernel on the host's memory, which it changes, as often as one likes. widened: on plain rows of the
  // numbers that quantized ones stand for, rounded to the activations' type as on the GPU.
  void run_reference(bool widened = false) {
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
    std::vector<uint8_t> rows;
    if (widened) {
      rows = widen(s_.gather ? rows_.host : selected_.host);
      (s_.gather ? p.view.host_rows : p.view.selected_rows) = rows.data();
      p.view.format = clo::RowFormat::kPlain;
    }
    CHECK(clo::attend(p).empty());
  }

  // Runs the CPU kernel and compares. Returns the largest error of a head's output, of rows that are the same to both.
  double compare_with_reference() {
    if (s_.format == clo::RowFormat::kPlain || s_.dtype == clo::DType::kF32) {
      run_reference();
      return compare();
    }
    // The GPU rounds the elements of quantized rows to the activations' type, the CPU does not. Rows that are rounded for
    // it, too, leave the usual difference only.
    run_reference(true);
    const double worst = compare();
    // Those that are not differ by up to 2^-8 or 2^-11 an element. So does a score, as its terms' signs are random, times
    // the size of the queries: hence a log-sum-exp by at most as much as the worst of the scores, and the output by that of
    // the weights and that of the values.
    run_reference();
    compare(s_.dtype == clo::DType::kBF16 ? 0x1p-8 : 0x1p-11);
    return worst;
  }

  // Compares the GPU's memory with the host's, after both have run. rounding: of the rows' elements, in which the two
  // differ. Returns the largest error of a head's output.
  double compare(double rounding = 0) const {
    CHECK(resident_.download() == resident_.host);
    CHECK(tail_.download() == tail_.host);
    CHECK(selected_.download() == selected_.host);
    compare_codes();
    const std::vector<uint8_t> out = out_.download();
    const std::vector<float> lse = lse_.download();
    // Scores as large as `spread` carry so much larger an absolute error into the exponents.
    const double rounded = rounding * std::max(1.0f, s_.spread);
    const double tolerance = (s_.dtype == clo::DType::kF32 ? 1e-5 * s_.spread : 6e-3) + 1.5 * rounded;
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
      else CHECK(std::fabs(lse[h] - lse_.host[h]) < 2e-5 * (1 + std::fabs(lse_.host[h])) + 1.25 * rounded);
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
  Mirror<int32_t>& layer() { return index_; }
  // What kernels in front of the call may have written, the layer's flags and selected rows apart.
  std::vector<Memory> operands() const {
    return {memory(query_),    memory(key_),     memory(value_),    memory(weights_), memory(mean_),
            memory(position_), memory(flushed_), memory(resident_), memory(tail_),    memory(counts_), memory(index_)};
  }
  template <typename T>
  static Memory memory(const Mirror<T>& x) {
    return {x.device(), x.host.size() * sizeof(T)};
  }

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
    p.view.format = s_.format;
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
    return clo::dispatch(s_.dtype, [&](auto* tag) {
      return clo::to_float(reinterpret_cast<const std::remove_pointer_t<decltype(tag)>*>(x.data())[i]);
    });
  }

  void randomise(std::vector<uint8_t>& x, float spread = 1) {
    std::normal_distribution<float> normal(0, spread);
    for (size_t i = 0; i < x.size() / bytes_; ++i) {
      const float value = normal(random_);
      clo::dispatch(s_.dtype, [&](auto* tag) {
        clo::from_float(value, reinterpret_cast<std::remove_pointer_t<decltype(tag)>*>(x.data()) + i);
      });
    }
  }

  // Rows as the engine keeps them.
  void randomise_stored(std::vector<uint8_t>& x) {
    if (s_.format == clo::RowFormat::kPlain) return randomise(x);
    const int64_t count = static_cast<int64_t>(x.size()) / stored_;
    std::vector<uint8_t> rows(count * row_);
    randomise(rows);
    clo::quantize_rows(rows.data(), count, s_.D, s_.dtype, s_.format, x.data());
  }

  std::vector<uint8_t> widen(const std::vector<uint8_t>& x) const {
    const std::vector<float> values = clo::test::dequantize(x.data(), x.size() / stored_, s_.D, s_.format);
    std::vector<uint8_t> rows(values.size() * bytes_);
    clo::dispatch(s_.dtype, [&](auto* tag) {
      auto* to = reinterpret_cast<std::remove_pointer_t<decltype(tag)>*>(rows.data());
      for (size_t i = 0; i < values.size(); ++i) clo::from_float(values[i], to + i);
    });
    return rows;
  }

  static void poison(std::vector<uint8_t>& x, int64_t row, int64_t bytes) {
    std::memset(x.data() + row * bytes, 0xff, bytes);
  }

  void fill() {
    randomise(query_.host, s_.spread);
    for (auto* x : {&key_.host, &value_.host, &resident_.host, &tail_.host}) randomise(*x);
    for (auto* x : {&selected_.host, &rows_.host}) randomise_stored(*x);
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
        for (int64_t i = p; i < s_.S; ++i) poison(resident_.host, (b * s_.Kr + h) * s_.S + i, row_);
      for (int64_t h = 0; h < s_.Ko; ++h) fill_offloaded(b * s_.Ko + h, p, f);
    }
  }

  void fill_offloaded(int64_t head, int64_t p, int64_t flushed) {
    std::vector<bool> attended(s_.T);
    for (int64_t token = 0; token < p; ++token)
      if (token < s_.sink || token >= flushed) attended[clo::ring_index(token, s_.sink, s_.T)] = true;
    for (int64_t i = 0; i < s_.T; ++i)
      if (!attended[i]) poison(tail_.host, head * s_.T + i, row_);
    const int64_t count = counts_.host[head] = s_.counts[head % s_.counts.size()];
    CHECK(count <= s_.C);
    std::vector<bool> used(s_.S);
    for (int64_t i = 0; i < s_.C; ++i) {
      const int32_t token = static_cast<int32_t>(random_() % s_.S);
      tokens_.host[head * s_.C + i] = i < count ? token : -1;
      if (i < count) used[token] = true;
      else if (!s_.gather) poison(selected_.host, head * s_.C + i, stored_);
    }
    for (int64_t i = 0; s_.gather && i < s_.S; ++i)
      if (!used[i]) poison(rows_.host, head * s_.S + i, stored_);
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
  const int64_t K_, bytes_, row_, stored_;
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
