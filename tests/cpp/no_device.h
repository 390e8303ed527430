// What was asked of the runtime of no_device.cc.
#pragma once

#include <cstdint>

namespace hkv::testing {

struct Notes {
  int sm = 90;  // the device's compute capability, for the program to choose
  int64_t launches = 0;  // of kernels, and memsets
  int64_t copies = 0;
  bool grids_are_possible = true;
};

extern Notes notes;

}  // namespace hkv::testing
