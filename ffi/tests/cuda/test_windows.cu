// Windows onto device memory on a GPU: stores of the CPU arrive, memory is given back, and each source that cannot be
// had says why. The stand-in for libgdrapi maps ordinary memory, which the probe must notice.
#include <dirent.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "cuda/check.h"
#include "host/backends/stream_rows.h"
#include "host/cuda/windows.h"
#include "tests/check.h"

using namespace clo;

namespace {

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Of all 32-bit words, how many are not their index times `factor`.
__global__ void compare(const uint32_t* words, int64_t n, uint32_t factor, unsigned long long* wrong) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x)
    if (words[i] != static_cast<uint32_t>(i) * factor) atomicAdd(wrong, 1ull);
}

// What choose_windows says when libgdrapi is `library` and refuses `step`, and the source if there is one.
std::string reasons(const char* library, const char* step, std::unique_ptr<WindowSource>* source) {
  setenv("CLO_JAX_GDRAPI", library, 1);
  setenv("STANDIN_GDR_REFUSE", step, 1);
  std::string skipped;
  try {
    *source = choose_windows(&skipped);
  } catch (const std::runtime_error& e) {
    skipped = e.what();
    *source = nullptr;
  }
  unsetenv("CLO_JAX_GDRAPI");
  unsetenv("STANDIN_GDR_REFUSE");
  return skipped;
}

void stores_arrive(WindowSource& source) {
  unsigned long long* wrong = nullptr;
  CLO_CUDA_CHECK(cudaHostAlloc(&wrong, sizeof *wrong, cudaHostAllocMapped));
  *wrong = 0;
  for (const int64_t bytes : {int64_t{4}, int64_t{65536}, int64_t{3} << 20, int64_t{64} << 20}) {
    const std::unique_ptr<Window> window = source.open(bytes);
    CHECK(reinterpret_cast<uintptr_t>(window->device()) % 65536 == 0);
    CHECK(reinterpret_cast<uintptr_t>(window->host()) % 4096 == 0);
    for (const uint32_t factor : {3u, 5u}) {
      auto* words = static_cast<volatile uint32_t*>(window->host());
      for (int64_t i = 0; i < bytes / 4; ++i) words[i] = static_cast<uint32_t>(i) * factor;
      drain_stores();
      compare<<<32, 256>>>(static_cast<const uint32_t*>(window->device()), bytes / 4, factor, wrong);
      CLO_CUDA_CHECK(cudaDeviceSynchronize());
      CHECK(*wrong == 0);
    }
  }
  CLO_CUDA_CHECK(cudaFreeHost(wrong));
}

int open_files() {
  int n = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++n;
  closedir(folder);
  return n;
}

// alone: nobody else takes or gives back memory of the device meanwhile.
void memory_is_given_back(WindowSource& source, bool alone) {
  constexpr int64_t kBytes = int64_t{256} << 20;
  source.open(kBytes);
  size_t before = 0, after = 0, total = 0;
  const int files = open_files();
  CLO_CUDA_CHECK(cudaMemGetInfo(&before, &total));
  for (int i = 0; i < 20; ++i) source.open(kBytes);
  CLO_CUDA_CHECK(cudaMemGetInfo(&after, &total));
  CHECK(!alone || after + kBytes > before);
  CHECK(open_files() == files);
  bool refused = false;
  try {
    source.open(int64_t{1} << 42);
  } catch (const std::runtime_error& e) {
    refused = contains(e.what(), source.name());
  }
  CHECK(refused);
  source.open(kBytes);  // and the next one works
}

}  // namespace

// test_windows [small] [STANDIN]: the stand-in's file where it is not where it was built; "small": beside other programs.
int main(int argc, char** argv) {
  const bool small = argc > 1 && std::strcmp(argv[1], "small") == 0;
  const bool given = argc > 1 && std::strcmp(argv[argc - 1], "small") != 0;
  const char* standin = given ? argv[argc - 1] : CLO_STANDIN_GDRAPI;
  std::unique_ptr<WindowSource> source;
  const struct {
    const char *library, *step, *text;
  } cases[] = {
      {"/nowhere/libgdrapi.so", "", "no libgdrapi: /nowhere/libgdrapi.so: cannot open shared object file"},
      {standin, "open", "libgdrapi: gdr_open refused: no /dev/gdrdrv"},
      {standin, "pin", "libgdrapi: gdr_pin_buffer refused"},
      {standin, "map", "libgdrapi: gdr_map refused"},
      {standin, "", "libgdrapi: what the CPU writes does not arrive on the GPU"},
  };
  for (const auto& c : cases) CHECK(contains(reasons(c.library, c.step, &source), c.text));
  const std::string why = reasons("/nowhere/libgdrapi.so", "", &source);
  if (source == nullptr) {
    CHECK(contains(why, "ulkan"));
    std::printf("no windows here: %s\nok\n", why.c_str());
    return 0;
  }
  std::printf("windows by %s\n", source->name());
  stores_arrive(*source);
  memory_is_given_back(*source, !small);
  std::puts("ok");
}
