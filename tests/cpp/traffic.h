// What a device without silicon counts (ptx_traffic.cc); others are not linked with it.
#pragma once

#include "machines.h"

namespace hkv::testing {

// Prints what operations do with a batch of as many keys as a table has buckets.
[[gnu::weak]] void count_traffic(const Machine& host, const Machine& device, int64_t buckets);

}  // namespace hkv::testing
