// The policies: what a score becomes, and who is let in (docs/semantics.md, section 3.3).
#pragma once

#include "core/types.h"

namespace hkv {

struct Scoring {
  Policy policy;
  uint64_t clock;
  uint32_t epoch;

  HKV_HOST_DEVICE bool counts() const { return policy == Policy::kLfu || policy == Policy::kEpochLfu; }

  // Whether a new score depends on what the batch says.
  HKV_HOST_DEVICE bool takes_given() const { return counts() || policy == Policy::kCustom; }

  // Whether a newcomer of a lower score than the lowest unpinned entry's is turned away.
  HKV_HOST_DEVICE bool can_refuse() const { return policy == Policy::kEpochLfu || policy == Policy::kCustom; }

  // `given` is the merged count of LFU and EpochLFU, and the score itself of Custom.
  HKV_HOST_DEVICE Score of_new(uint64_t given) const {
    switch (policy) {
      case Policy::kLru: return clock;
      case Policy::kLfu: return given;
      case Policy::kEpochLru: return in_epoch(clock & kLow);
      case Policy::kEpochLfu: return in_epoch(given < kLow ? given : kLow);
      case Policy::kCustom: return given;
    }
    return given;
  }

  HKV_HOST_DEVICE Score of_hit(Score old, uint64_t given) const {
    switch (policy) {
      case Policy::kLfu: return saturating_add(old, given);
      case Policy::kEpochLfu: return of_new(saturating_add(old & kLow, given));
      default: return of_new(given);
    }
  }

 private:
  static constexpr uint64_t kLow = 0xffffffff;

  HKV_HOST_DEVICE Score in_epoch(uint64_t low) const { return (static_cast<uint64_t>(epoch) << 32) | low; }
};

}  // namespace hkv
