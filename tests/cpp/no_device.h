// What the device of no_device.cc was asked for.
#pragma once

#include <cstdint>

namespace hkv::testing {

struct Notes {
  int64_t launches = 0;  // of kernels, and memsets
  bool grids_are_possible = true;
};

extern Notes notes;

}  // namespace hkv::testing
