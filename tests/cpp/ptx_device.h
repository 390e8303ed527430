// The memory of ptx_device.cc's device.
#pragma once

#include "ptx_machine.h"

namespace hkv::testing {

ptx::Memory& ptx_memory();

}  // namespace hkv::testing
