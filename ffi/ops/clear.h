// Empties the whole table.
#pragma once

#include "ops/operation.h"

namespace hkv {

struct Clear {
  static constexpr const char* kName = "clear";
  static constexpr bool kPerPosition = false;

  IndexArrays index;

  template <class Binder>
  void describe(Binder& binder) {
    binder.inout("clock", index.clock, "2");
    binder.inout("digests", index.digests, "B 128");
    binder.inout("keys", index.keys, "B 128 2");
    binder.inout("scores", index.scores, "B 128 2");
    binder.inout("occupancy", index.occupancy, "B");
  }

  template <class Executor>
  void run(Executor& executor) const {
    const int64_t slots = index.digests.rows * kLanes;
    executor.zero(index.digests.data, slots);
    executor.zero(index.keys.data, slots * static_cast<int64_t>(sizeof(Words)));
    executor.zero(index.scores.data, slots * static_cast<int64_t>(sizeof(Words)));
    executor.zero(index.occupancy.data, index.digests.rows * static_cast<int64_t>(sizeof(int32_t)));
  }
};

}  // namespace hkv
