// A runtime for CUDA programs that are linked with -cudart none: it takes notes of launches and memsets, and
// answers questions about a device. There is nothing else, so that a program which allocates or waits cannot
// be linked; a copy is refused and noted.
#include "no_device.h"

#include <cuda_runtime_api.h>

namespace hkv::testing {

Notes notes;

}  // namespace hkv::testing

namespace {

using hkv::testing::notes;

constexpr unsigned kMostX = 0x7fffffff;

dim3 pushed_grid, pushed_block;
size_t pushed_shared;

cudaError_t note_launch(dim3 grid, dim3 block, size_t shared) {
  constexpr unsigned kMostThreads = 1024;
  constexpr unsigned kMostYZ = 65535;
  constexpr size_t kMostShared = 227 << 10;  // of a block, sm_90
  ++notes.launches;
  const unsigned threads = block.x * block.y * block.z;
  const bool is_possible = grid.x > 0 && grid.x <= kMostX && grid.y > 0 && grid.y <= kMostYZ && grid.z > 0 &&
                           grid.z <= kMostYZ && threads > 0 && threads <= kMostThreads &&
                           shared <= kMostShared;
  notes.grids_are_possible = notes.grids_are_possible && is_possible;
  return cudaSuccess;
}

}  // namespace

extern "C" {
void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t) {
  pushed_grid = grid;
  pushed_block = block;
  pushed_shared = shared;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed_grid;
  *block = pushed_block;
  *shared = pushed_shared;
  *static_cast<cudaStream_t*>(stream) = nullptr;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t) {
  return note_launch(grid, block, shared);
}
cudaError_t cudaLaunchKernel(const void*, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t) {
  return note_launch(grid, block, shared);  // what nvcc 12 calls
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  return note_launch(config->gridDim, config->blockDim, config->dynamicSmemBytes);
}
cudaError_t cudaMemsetAsync(void* address, int, size_t, cudaStream_t) {
  ++notes.launches;
  return address == nullptr ? cudaErrorInvalidValue : cudaSuccess;
}
// CUB's way of sorting by no bits at all, which nobody asks for.
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) {
  ++notes.copies;
  return cudaErrorNotSupported;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->ptxVersion = attributes->binaryVersion = notes.sm;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  constexpr int kMultiprocessors = 132;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = notes.sm / 10; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = notes.sm % 10; return cudaSuccess;
    case cudaDevAttrMultiProcessorCount: *value = kMultiprocessors; return cudaSuccess;
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
  *device = notes.sm;  // CUB remembers what it was told of a device
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 128;  // as many as CUB remembers
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "refused by the test"; }
}
