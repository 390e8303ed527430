// Behind runtime.cc: takes notes of launches and memsets.
#include "no_device.h"

#include "runtime.h"

namespace hkv::testing {

Notes notes;

cudaError_t launch_kernel(const void*, dim3 grid, dim3 block, size_t, void**) {
  constexpr unsigned kMostThreads = 1024;
  constexpr unsigned kMostX = 0x7fffffff;
  constexpr unsigned kMostYZ = 65535;
  ++notes.launches;
  const unsigned threads = block.x * block.y * block.z;
  const bool is_possible = grid.x > 0 && grid.x <= kMostX && grid.y > 0 && grid.y <= kMostYZ && grid.z > 0 &&
                           grid.z <= kMostYZ && threads > 0 && threads <= kMostThreads;
  notes.grids_are_possible = notes.grids_are_possible && is_possible;
  return cudaSuccess;
}

cudaError_t set_memory(void* address, int, size_t) {
  ++notes.launches;
  return address == nullptr ? cudaErrorInvalidValue : cudaSuccess;
}

}  // namespace hkv::testing
