// What runtime.cc leaves to the device that stands behind it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

namespace hkv::testing {

// What the program is told of the device.
struct DeviceForm {
  int sm = 90;  // the compute capability
  int multiprocessors = 132;
  cudaError_t error = cudaSuccess;  // of the next launch
};
extern DeviceForm device_form;

// Of the function that stands for a kernel on the host.
const std::string& kernel_name(const void* function);

cudaError_t launch_kernel(const void* function, dim3 grid, dim3 block, size_t shared, void** arguments);
cudaError_t set_memory(void* address, int value, size_t bytes);

}  // namespace hkv::testing
