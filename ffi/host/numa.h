// Memory near a PCI device, where the machine has more than one NUMA node. Both calls are best effort: a system that
// knows no nodes, or forbids to choose one, is as good as before.
#pragma once

#include <cstdint>
#include <string>

namespace clo {

// Node of the PCI device of that address ("0000:17:00.0", in any case of letters), or -1 when the system names none.
// `root`: of the file system; tests give a folder of their own.
int numa_node_of_pci(const std::string& address, const std::string& root = "");

// Asks for pages of [data, data + bytes), which starts at a page and is not touched yet, on that node, as long as it
// has any. False when the system does not take the advice.
bool prefer_numa_node(void* data, int64_t bytes, int node);

}  // namespace clo
