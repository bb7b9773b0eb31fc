#include "host/cuda/links.h"

#include "cuda/hand_over.h"
#include "host/backends/gather_rows.h"

namespace clo {

BarLink::BarLink(const DeviceControl& control, const uint32_t* doorbells, const std::vector<LayerView>& views)
    : GpuLink(control, doorbells), stores_(stream_stores_for(row_bytes(views[0]))) {}

void BarLink::serve(int64_t, const LayerView& view, const Job* jobs, int64_t count) {
  stream_rows(view, jobs, count, stores_);
}

void BarLink::publish(int64_t layer, uint32_t number) { control_.publish(layer, number); }

void BarLink::give_up(int64_t layer, uint32_t number) noexcept {
  control_.publish_error(cuda::error_word(cuda::Failure::kAborted, static_cast<uint32_t>(layer), number));
}

StagedLink::StagedLink(const DeviceControl& control, const uint32_t* doorbells, const Layers& layers)
    : GpuLink(control, doorbells), views_(layers.thread_views()), buffer_of_(views_.size()) {
  int least = 0, greatest = 0;
  control_.check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream priorities");
  control_.check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), "the transfer stream");
  control_.check(cudaHostAlloc(reinterpret_cast<void**>(&words_), 3 * sizeof *words_, cudaHostAllocMapped),
                 "words of the host");
  for (int i = 0; i < 2; ++i) {
    buffers_[i].host = static_cast<char*>(layers.staging().host[i]);
    buffers_[i].device = static_cast<char*>(layers.staging().device[i]);
    buffers_[i].freed = words_ + i;
  }
}

StagedLink::~StagedLink() {
  if (words_ != nullptr) cudaFreeHost(words_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

void StagedLink::start() {
  for (Buffer& buffer : buffers_) buffer.uses = *buffer.freed = 0;
}

void StagedLink::enter() { cudaSetDevice(control_.device()); }

bool StagedLink::admit(int64_t layer) {
  for (int i = 0; i < 2; ++i) {
    Buffer& buffer = buffers_[i];
    if (__atomic_load_n(buffer.freed, __ATOMIC_ACQUIRE) != buffer.uses) continue;
    ++buffer.uses;
    buffer_of_[static_cast<size_t>(layer)] = i;
    return true;
  }
  return false;
}

void StagedLink::serve(int64_t layer, const LayerView& view, const Job* jobs, int64_t count) {
  gather_rows(view, jobs, count, buffers_[buffer_of_[static_cast<size_t>(layer)]].host);
}

void StagedLink::publish(int64_t layer, uint32_t number) {
  const LayerView& view = views_[static_cast<size_t>(layer)];
  const Buffer& buffer = buffers_[buffer_of_[static_cast<size_t>(layer)]];
  int64_t rows = 0;
  for (int64_t h = 0; h < view.batch * view.kv_heads; ++h) rows += view.request.counts[h];
  control_.check(cudaMemcpyAsync(buffer.device, buffer.host, static_cast<size_t>(rows * row_bytes(view)),
                                 cudaMemcpyHostToDevice, stream_),
                 "a copy of staged rows");
  control_.check(
      cuda::scatter_rows(control_.ref_of(layer), buffer.device, number, buffer.freed, buffer.uses, stream_),
      "the scatter kernel");
}

void StagedLink::give_up(int64_t layer, uint32_t number) noexcept {
  words_[2] = cuda::error_word(cuda::Failure::kAborted, static_cast<uint32_t>(layer), number);
  cudaMemcpyAsync(control_.ref().error, words_ + 2, sizeof *words_, cudaMemcpyHostToDevice, stream_);
}

}  // namespace clo
