// Where the state's arrays lie. Geometry is their shapes.
#pragma once

#include "core/types.h"

namespace hkv {

struct TableView {
  Digest* digests = nullptr;     // [buckets, kLanes]
  Words* keys = nullptr;         // [buckets, kLanes]
  Words* scores = nullptr;       // [buckets, kLanes]; null where an operation does not need them
  int32_t* occupancy = nullptr;  // [buckets]; likewise
  Oldest* oldest = nullptr;      // [buckets]; likewise
  int64_t buckets = 0;
  int64_t choices = 1;

  HKV_HOST_DEVICE const Digest* line(int64_t bucket) const { return digests + bucket * kLanes; }
  HKV_HOST_DEVICE int64_t candidate(uint64_t hash, int choice) const {
    return choice == 0 ? first_bucket(hash, buckets) : second_bucket(hash, buckets);
  }
  HKV_HOST_DEVICE bool has_slot(int64_t slot) const { return slot >= 0 && slot < buckets * kLanes; }
  HKV_HOST_DEVICE bool has_entry(int64_t slot) const { return has_slot(slot) && digests[slot] != kEmpty; }
};

HKV_HOST_DEVICE Slot slot_of(int64_t bucket, int lane) { return static_cast<Slot>(bucket * kLanes + lane); }

}  // namespace hkv
