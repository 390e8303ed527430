// The slot and the row of every key of a batch: find_slots and gather_rows in one pass. A read.
#pragma once

#include "ops/find_slots.h"
#include "ops/gather_rows.h"

namespace hkv {

struct FindRows {
  static constexpr const char* kName = "find_rows";
  static constexpr bool kPerPosition = true;

  int64_t initializes = 0;  // whether valid keys without a slot get their first row, not the fill value
  FindSlots find;
  GatherRows gather;

  template <class Binder>
  void describe(Binder& binder) {
    binder.attribute("choices", find.choices);
    binder.attribute("initialize", initializes);
    binder.attribute("fill", gather.fill);
    gather.init.describe(binder);
    binder.inout("clock", find.index.clock, "2");
    binder.in("digests", find.index.digests, "B 128");
    binder.in("keys", find.index.keys, "B 128 2");
    binder.in("values", gather.values, "S ...");
    binder.in("batch", find.batch, "n 2");
    binder.in("valid", find.valid, "n?");
    binder.out("slots", find.slots, "n");
    binder.out_cast("rows", gather.rows, "n ...");
  }

  template <class Executor>
  void run(Executor& executor) const {
    GatherRows rest = gather;
    rest.slots = find.slots;
    if (initializes != 0) {
      rest.keys = find.batch;
      rest.initial = find.valid;
    }
    rest.visit([&](const auto& step) { executor.each(find.batch.rows, find.step(), step); });
  }
};

}  // namespace hkv
