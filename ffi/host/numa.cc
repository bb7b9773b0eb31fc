#include "host/numa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>

namespace clo {

int numa_node_of_pci(const std::string& address, const std::string& root) {
  std::string folder = address;
  std::transform(folder.begin(), folder.end(), folder.begin(), [](unsigned char c) { return std::tolower(c); });
  // Not a stream: where a compiler links a libstdc++ of its own into the module, streams end in another one's locales.
  std::FILE* const file = std::fopen((root + "/sys/bus/pci/devices/" + folder + "/numa_node").c_str(), "r");
  if (file == nullptr) return -1;
  int node = -1;
  const bool found = std::fscanf(file, "%d", &node) == 1;
  std::fclose(file);
  return found ? node : -1;
}

bool prefer_numa_node(void* data, int64_t bytes, int node) {
#ifdef SYS_mbind
  constexpr int kPreferred = 1;  // MPOL_PREFERRED of <numaif.h>, which belongs to libnuma
  constexpr int kMaxNodes = 1024, kBits = 8 * sizeof(unsigned long);
  if (node < 0 || node >= kMaxNodes) return false;
  unsigned long mask[kMaxNodes / kBits] = {};
  mask[node / kBits] |= 1ul << (node % kBits);
  return syscall(SYS_mbind, data, static_cast<unsigned long>(bytes), kPreferred, mask, kMaxNodes + 1, 0) == 0;
#else
  return static_cast<void>(data), static_cast<void>(bytes), static_cast<void>(node), false;
#endif
}

}  // namespace clo
