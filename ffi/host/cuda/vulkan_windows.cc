// Windows by Vulkan: device memory of a type that the host may map lies behind the PCIe BAR. It is exported as a file
// descriptor and imported into CUDA, so that both sides have it; no kernel module is needed beyond the driver's own.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/cuda/vulkan_abi.h"
#include "host/cuda/windows.h"

namespace clo {
namespace {

constexpr int64_t kPage = int64_t{64} << 10;

[[noreturn]] void refuse(const std::string& what) { throw std::runtime_error("Vulkan: " + what); }

void check(vk::Result result, const char* what) {
  if (result != 0) refuse(std::string(what) + " refused (VkResult " + std::to_string(result) + ")");
}

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // not sticky: the next call must not report it again
  refuse(std::string(what) + ": " + cudaGetErrorString(error));
}

// Instance and device of the physical device that CUDA's current device is.
class VulkanDevice {
 public:
  VulkanDevice() {
    library_ = dlopen("libvulkan.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr) throw std::runtime_error("no libvulkan: " + std::string(dlerror()));
    try {
      create();
    } catch (...) {
      destroy();
      throw;
    }
  }
  ~VulkanDevice() { destroy(); }
  VulkanDevice(const VulkanDevice&) = delete;
  VulkanDevice& operator=(const VulkanDevice&) = delete;

  vk::Result (*allocate)(vk::Device, const vk::MemoryAllocateInfo*, const void*, vk::Memory*) = nullptr;
  void (*free)(vk::Device, vk::Memory, const void*) = nullptr;
  vk::Result (*map)(vk::Device, vk::Memory, uint64_t, uint64_t, vk::Flags, void**) = nullptr;
  vk::Result (*get_fd)(vk::Device, const vk::MemoryGetFdInfo*, int*) = nullptr;
  vk::Device device = nullptr;
  uint32_t memory_type = 0;

 private:
  template <typename F>
  void find(F* function, const char* name) {
    *function = reinterpret_cast<F>(get_proc_(instance_, name));
    if (*function == nullptr) refuse(std::string(name) + " is missing");
  }

  void create() {
    get_proc_ = reinterpret_cast<decltype(get_proc_)>(dlsym(library_, "vkGetInstanceProcAddr"));
    if (get_proc_ == nullptr) refuse("libvulkan has no vkGetInstanceProcAddr");
    vk::Result (*create_instance)(const vk::InstanceCreateInfo*, const void*, vk::Instance*) = nullptr;
    find(&create_instance, "vkCreateInstance");
    const vk::ApplicationInfo application;
    vk::InstanceCreateInfo instance_info;
    instance_info.application = &application;
    const vk::Result created = create_instance(&instance_info, nullptr, &instance_);
    if (created != 0) refuse("no driver (vkCreateInstance: VkResult " + std::to_string(created) + ")");
    find(&destroy_instance_, "vkDestroyInstance");
    const vk::PhysicalDevice physical = find_physical_device();
    find_memory_type(physical);

    vk::Result (*create_device)(vk::PhysicalDevice, const vk::DeviceCreateInfo*, const void*, vk::Device*) = nullptr;
    find(&create_device, "vkCreateDevice");
    const float priority = 1;
    vk::DeviceQueueCreateInfo queue;  // a device must have one; nothing is ever submitted
    queue.count = 1;
    queue.priorities = &priority;
    const char* extensions[] = {"VK_KHR_external_memory_fd"};
    vk::DeviceCreateInfo device_info;
    device_info.num_queues = 1;
    device_info.queues = &queue;
    device_info.num_extensions = 1;
    device_info.extensions = extensions;
    check(create_device(physical, &device_info, nullptr, &device), "vkCreateDevice with VK_KHR_external_memory_fd");
    find(&destroy_device_, "vkDestroyDevice");
    find(&allocate, "vkAllocateMemory");
    find(&free, "vkFreeMemory");
    find(&map, "vkMapMemory");
    find(&get_fd, "vkGetMemoryFdKHR");
  }

  vk::PhysicalDevice find_physical_device() {
    vk::Result (*enumerate)(vk::Instance, uint32_t*, vk::PhysicalDevice*) = nullptr;
    void (*properties_of)(vk::PhysicalDevice, vk::PhysicalDeviceProperties2*) = nullptr;
    find(&enumerate, "vkEnumeratePhysicalDevices");
    find(&properties_of, "vkGetPhysicalDeviceProperties2");
    uint32_t count = 0;
    check(enumerate(instance_, &count, nullptr), "vkEnumeratePhysicalDevices");
    std::vector<vk::PhysicalDevice> devices(count);
    if (count > 0) check(enumerate(instance_, &count, devices.data()), "vkEnumeratePhysicalDevices");
    int ordinal = 0;
    cudaDeviceProp cuda{};
    check(cudaGetDevice(&ordinal), "CUDA's current device");
    check(cudaGetDeviceProperties(&cuda, ordinal), "CUDA's current device");
    for (const vk::PhysicalDevice candidate : devices) {
      vk::PhysicalDeviceIDProperties id{};
      vk::PhysicalDeviceProperties2 properties{};
      properties.next = &id;
      properties_of(candidate, &properties);
      if (std::memcmp(id.device_uuid, cuda.uuid.bytes, sizeof id.device_uuid) == 0) return candidate;
    }
    refuse("none of " + std::to_string(count) + " devices is the CUDA device " + std::to_string(ordinal));
  }

  void find_memory_type(vk::PhysicalDevice physical) {
    void (*memory_of)(vk::PhysicalDevice, vk::PhysicalDeviceMemoryProperties*) = nullptr;
    find(&memory_of, "vkGetPhysicalDeviceMemoryProperties");
    vk::PhysicalDeviceMemoryProperties memory{};
    memory_of(physical, &memory);
    constexpr vk::Flags kWanted = vk::kDeviceLocal | vk::kHostVisible | vk::kHostCoherent;
    for (memory_type = 0; memory_type < memory.num_types; ++memory_type)
      if ((memory.types[memory_type].flags & kWanted) == kWanted) return;
    refuse("no memory type is on the device and visible to the host");
  }

  void destroy() noexcept {
    if (device != nullptr) destroy_device_(device, nullptr);
    if (instance_ != nullptr && destroy_instance_ != nullptr) destroy_instance_(instance_, nullptr);
    dlclose(library_);
  }

  void* library_ = nullptr;
  vk::Instance instance_ = nullptr;
  vk::Function (*get_proc_)(vk::Instance, const char*) = nullptr;
  void (*destroy_instance_)(vk::Instance, const void*) = nullptr;
  void (*destroy_device_)(vk::Device, const void*) = nullptr;
};

class VulkanWindow : public Window {
 public:
  VulkanWindow(std::shared_ptr<VulkanDevice> vulkan, int64_t wanted) : vulkan_(std::move(vulkan)) {
    const uint64_t bytes = static_cast<uint64_t>((wanted + kPage - 1) / kPage * kPage);
    try {
      create(bytes);
    } catch (...) {
      destroy();
      throw;
    }
  }
  ~VulkanWindow() override { destroy(); }

 private:
  void create(uint64_t bytes) {
    const vk::ExportMemoryAllocateInfo exported;
    vk::MemoryAllocateInfo info;
    info.next = &exported;
    info.bytes = bytes;
    info.memory_type = vulkan_->memory_type;
    check(vulkan_->allocate(vulkan_->device, &info, nullptr, &memory_),
          ("vkAllocateMemory of " + std::to_string(bytes) + " bytes").c_str());
    check(vulkan_->map(vulkan_->device, memory_, 0, bytes, 0, &host_), "vkMapMemory");
    vk::MemoryGetFdInfo fd_info;
    fd_info.memory = memory_;
    int fd = -1;
    check(vulkan_->get_fd(vulkan_->device, &fd_info, &fd), "vkGetMemoryFdKHR");
    cudaExternalMemoryHandleDesc handle{};
    handle.type = cudaExternalMemoryHandleTypeOpaqueFd;
    handle.handle.fd = fd;
    handle.size = bytes;
    const cudaError_t imported = cudaImportExternalMemory(&external_, &handle);
    if (imported != cudaSuccess) close(fd);  // else CUDA has taken it over
    check(imported, "import of Vulkan's memory into CUDA");
    cudaExternalMemoryBufferDesc buffer{};
    buffer.size = bytes;
    check(cudaExternalMemoryGetMappedBuffer(&device_, external_, &buffer), "mapping of Vulkan's memory in CUDA");
  }

  void destroy() noexcept {
    if (device_ != nullptr) cudaFree(device_);
    if (external_ != nullptr) cudaDestroyExternalMemory(external_);
    if (memory_ != 0) vulkan_->free(vulkan_->device, memory_, nullptr);  // ends its mapping too
  }

  const std::shared_ptr<VulkanDevice> vulkan_;
  vk::Memory memory_ = 0;
  cudaExternalMemory_t external_ = nullptr;
};

class VulkanWindows : public WindowSource {
 public:
  const char* name() const override { return "Vulkan"; }
  std::unique_ptr<Window> open(int64_t bytes) override { return std::make_unique<VulkanWindow>(vulkan_, bytes); }

 private:
  std::shared_ptr<VulkanDevice> vulkan_ = std::make_shared<VulkanDevice>();
};

}  // namespace

std::unique_ptr<WindowSource> make_vulkan_windows() { return std::make_unique<VulkanWindows>(); }

}  // namespace clo
