// The little of Vulkan 1.1 that exporting mapped device memory takes: values and layouts as in the specification, so
// that no headers are needed to build.
#pragma once

#include <cstdint>

namespace clo::vk {

using Flags = uint32_t;
using Result = int32_t;       // 0: success
using Instance = struct Instance_T*;
using PhysicalDevice = struct PhysicalDevice_T*;
using Device = struct Device_T*;
using Memory = uint64_t;      // a handle that is no pointer
using Function = void (*)();

constexpr uint32_t kVersion11 = 1u << 22 | 1u << 12;
constexpr Flags kDeviceLocal = 1, kHostVisible = 2, kHostCoherent = 4;  // of memory types
constexpr Flags kOpaqueFd = 1;                                          // of external memory

enum StructureType : int32_t {
  kApplicationInfo = 0,
  kInstanceCreateInfo = 1,
  kDeviceQueueCreateInfo = 2,
  kDeviceCreateInfo = 3,
  kMemoryAllocateInfo = 5,
  kPhysicalDeviceProperties2 = 1000059001,
  kPhysicalDeviceIDProperties = 1000071004,
  kExportMemoryAllocateInfo = 1000072002,
  kMemoryGetFdInfo = 1000074002,
};

struct ApplicationInfo {
  StructureType type = kApplicationInfo;
  const void* next = nullptr;
  const char* application_name = nullptr;
  uint32_t application_version = 0;
  const char* engine_name = nullptr;
  uint32_t engine_version = 0;
  uint32_t api_version = kVersion11;
};

struct InstanceCreateInfo {
  StructureType type = kInstanceCreateInfo;
  const void* next = nullptr;
  Flags flags = 0;
  const ApplicationInfo* application = nullptr;
  uint32_t num_layers = 0;
  const char* const* layers = nullptr;
  uint32_t num_extensions = 0;
  const char* const* extensions = nullptr;
};

struct DeviceQueueCreateInfo {
  StructureType type = kDeviceQueueCreateInfo;
  const void* next = nullptr;
  Flags flags = 0;
  uint32_t family = 0;
  uint32_t count = 0;
  const float* priorities = nullptr;
};

struct DeviceCreateInfo {
  StructureType type = kDeviceCreateInfo;
  const void* next = nullptr;
  Flags flags = 0;
  uint32_t num_queues = 0;
  const DeviceQueueCreateInfo* queues = nullptr;
  uint32_t num_layers = 0;
  const char* const* layers = nullptr;
  uint32_t num_extensions = 0;
  const char* const* extensions = nullptr;
  const void* features = nullptr;
};

struct ExportMemoryAllocateInfo {
  StructureType type = kExportMemoryAllocateInfo;
  const void* next = nullptr;
  Flags handle_types = kOpaqueFd;
};

struct MemoryAllocateInfo {
  StructureType type = kMemoryAllocateInfo;
  const void* next = nullptr;
  uint64_t bytes = 0;
  uint32_t memory_type = 0;
};

struct MemoryGetFdInfo {
  StructureType type = kMemoryGetFdInfo;
  const void* next = nullptr;
  Memory memory = 0;
  Flags handle_type = kOpaqueFd;
};

struct PhysicalDeviceIDProperties {
  StructureType type = kPhysicalDeviceIDProperties;
  void* next = nullptr;
  uint8_t device_uuid[16];
  uint8_t driver_uuid[16];
  uint8_t device_luid[8];
  uint32_t node_mask;
  uint32_t luid_valid;
};
static_assert(sizeof(PhysicalDeviceIDProperties) == 64);

struct PhysicalDeviceProperties2 {
  StructureType type = kPhysicalDeviceProperties2;
  void* next = nullptr;
  alignas(8) unsigned char properties[824];  // VkPhysicalDeviceProperties: names and limits
};
static_assert(sizeof(PhysicalDeviceProperties2) == 840);

struct PhysicalDeviceMemoryProperties {
  uint32_t num_types;
  struct {
    Flags flags;
    uint32_t heap;
  } types[32];
  uint32_t num_heaps;
  struct {
    uint64_t bytes;
    Flags flags;
  } heaps[16];
};
static_assert(sizeof(PhysicalDeviceMemoryProperties) == 520);

}  // namespace clo::vk
