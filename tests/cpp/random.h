// Random numbers that are the same on every machine.
#pragma once

#include "core/types.h"

namespace hkv::testing {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(mix(seed + kGolden)) {}

  uint64_t word() { return mix(state_ += kGolden); }
  int64_t below(int64_t bound) {
    return static_cast<int64_t>(multiply_high(word(), static_cast<uint64_t>(bound)));
  }
  bool chance(double probability) { return real() < probability; }
  double real() { return static_cast<double>(word() >> 11) * 0x1p-53; }  // in [0, 1)

 private:
  uint64_t state_;
};

}  // namespace hkv::testing
