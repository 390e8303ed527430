// What runtime.cc leaves to the device that stands behind it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <string>

namespace hkv::testing {

// What the program is told of the device.
struct DeviceForm {
  int sm = 90;  // the compute capability
  int multiprocessors = 132;
  int block_memory = 227 << 10;       // that a block may ask for
  int device = 0;                     // the current one
  cudaError_t refusal = cudaSuccess;  // of every launch and memset
};
extern DeviceForm device_form;

// The only stream. What comes on another one, the default one above all, would not wait for what the caller
// has put on its own: it is refused.
inline const cudaStream_t kStream = reinterpret_cast<cudaStream_t>(uintptr_t{0x5000});

// The names of kernels, by the functions that stand for them on the host.
const std::map<const void*, std::string>& kernel_names();

cudaError_t launch_kernel(const void* function, dim3 grid, dim3 block, size_t shared, void** arguments);
cudaError_t set_memory(void* address, int value, size_t bytes);

}  // namespace hkv::testing
