// The node of a PCI device by a /sys of the test's own, and the advice to the system, which may be refused.
#include "host/numa.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "check.h"

namespace {

void make(const std::filesystem::path& root, const std::string& address, const char* text) {
  const std::filesystem::path folder = root / "sys/bus/pci/devices" / address;
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "numa_node") << text;
}

}  // namespace

int main() {
  const std::filesystem::path root =
      std::filesystem::temp_directory_path() / ("clo_test_numa_" + std::to_string(getpid()));
  make(root, "0000:1a:00.0", "1\n");
  make(root, "0000:1b:00.0", "-1\n");
  make(root, "0000:1c:00.0", "none\n");
  CHECK(clo::numa_node_of_pci("0000:1A:00.0", root.string()) == 1);
  CHECK(clo::numa_node_of_pci("0000:1b:00.0", root.string()) == -1);
  CHECK(clo::numa_node_of_pci("0000:1c:00.0", root.string()) == -1);
  CHECK(clo::numa_node_of_pci("0000:1d:00.0", root.string()) == -1);
  std::filesystem::remove_all(root);

  constexpr int64_t kBytes = 1 << 20;
  void* data = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(!clo::prefer_numa_node(data, kBytes, -1) && !clo::prefer_numa_node(data, kBytes, 5000));
  std::printf("node 0: %s\n", clo::prefer_numa_node(data, kBytes, 0) ? "taken" : "not taken");
  std::memset(data, 1, kBytes);
  CHECK(static_cast<char*>(data)[kBytes - 1] == 1);
  munmap(data, kBytes);
  std::puts("ok");
}
