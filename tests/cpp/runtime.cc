// A runtime for CUDA programs that are linked with -cudart none: launches and memsets, which it hands on, and
// answers to questions about a device. There is nothing else, so that what allocates or waits cannot be
// linked.
#include "runtime.h"

#include <algorithm>
#include <utility>

namespace hkv::testing {

DeviceForm device_form;

namespace {

std::map<const void*, std::string>& names() {
  static std::map<const void*, std::string> names;
  return names;
}

dim3 pushed_grid, pushed_block;
size_t pushed_shared;
cudaStream_t pushed_stream;
constexpr int kMemoryOfAnyBlock = 48 << 10;
// By the memory of a device's blocks and by function, where more was asked for.
std::map<std::pair<int, const void*>, int> block_memory;
constexpr int kDevices = 128;  // as many as CUB remembers
cudaError_t last_error = cudaSuccess;

// As every call of the runtime does it: who asks for the last error later is told of this one.
cudaError_t told(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

template <class Work>
cudaError_t give(cudaStream_t stream, const Work& work) {
  if (stream != kStream) return told(cudaErrorInvalidResourceHandle);
  return told(device_form.refusal != cudaSuccess ? device_form.refusal : work());
}

cudaError_t give_kernel(const void* function, dim3 grid, dim3 block, size_t shared, void** arguments,
                        cudaStream_t stream) {
  return give(stream, [&] {
    const auto asked = block_memory.find({device_form.block_memory, function});
    const int most = asked == block_memory.end() ? 0 : asked->second;
    if (shared > static_cast<size_t>(std::max(most, kMemoryOfAnyBlock))) return cudaErrorInvalidValue;
    return launch_kernel(function, grid, block, shared, arguments);
  });
}

}  // namespace

const std::map<const void*, std::string>& kernel_names() { return names(); }

}  // namespace hkv::testing

using namespace hkv::testing;

extern "C" {
void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
  names()[function] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  pushed_grid = grid;
  pushed_block = block;
  pushed_shared = shared;
  pushed_stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed_grid;
  *block = pushed_block;
  *shared = pushed_shared;
  *static_cast<cudaStream_t*>(stream) = pushed_stream;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                               cudaStream_t stream) {
  return give_kernel(kernel, grid, block, shared, arguments, stream);
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared,
                             cudaStream_t stream) {  // what nvcc 12 calls
  return give_kernel(function, grid, block, shared, arguments, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  return give_kernel(function, config->gridDim, config->blockDim, config->dynamicSmemBytes, arguments,
                     config->stream);
}
cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t stream) {
  return give(stream, [&] { return set_memory(address, value, bytes); });
}
// CUB's way of sorting by no bits at all, which nobody asks for.
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->ptxVersion = attributes->binaryVersion = device_form.sm;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  int& own = block_memory[{device_form.block_memory, function}];
  // A lower value would refuse the launches of whoever has asked before.
  const bool is_possible = value <= device_form.block_memory && value >= own;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || !is_possible) {
    return told(cudaErrorInvalidValue);
  }
  own = value;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  constexpr int kMostX = 0x7fffffff;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = device_form.sm / 10; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = device_form.sm % 10; return cudaSuccess;
    case cudaDevAttrMultiProcessorCount: *value = device_form.multiprocessors; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = device_form.block_memory; return cudaSuccess;
    case cudaDevAttrMaxGridDimX: *value = kMostX; return cudaSuccess;
    default: return cudaErrorInvalidValue;
  }
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                   unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = device_form.device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return told(cudaErrorInvalidDevice);
  device_form.device = device;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorString(cudaError_t) { return "refused by the test's runtime"; }
}
