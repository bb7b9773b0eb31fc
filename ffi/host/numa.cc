#include "host/numa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <fstream>

namespace clo {

int numa_node_of_pci(const std::string& address, const std::string& root) {
  std::string folder = address;
  std::transform(folder.begin(), folder.end(), folder.begin(), [](unsigned char c) { return std::tolower(c); });
  std::ifstream file(root + "/sys/bus/pci/devices/" + folder + "/numa_node");
  int node = -1;
  return file >> node ? node : -1;
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
