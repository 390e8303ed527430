// Which slots still hold the keys that they are said to hold: the others become kNoSlot. A read.
#pragma once

#include "ops/operation.h"

namespace hkv {

struct VerifySlots {
  static constexpr const char* kName = "verify_slots";
  static constexpr bool kPerPosition = true;

  IndexArrays index;
  Array<Words> batch;
  Array<Slot> slots;
  Array<Slot> verified;

  template <class Binder>
  void describe(Binder& binder) {
    binder.inout("clock", index.clock, "2");
    binder.in("digests", index.digests, "B 128");
    binder.in("keys", index.keys, "B 128 2");
    binder.in("batch", batch, "n 2");
    binder.in("slots", slots, "n");
    binder.out("verified", verified, "n");
  }

  struct Step {
    static constexpr int kGroup = 1;
    TableView table;
    const Words* batch;
    const Slot* slots;
    Slot* verified;

    HKV_HOST_DEVICE void prefetch_far(int64_t i) const {
      if (!table.has_slot(slots[i])) return;
      prefetch(table.digests + slots[i]);
      prefetch(table.keys + slots[i]);
    }

    HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t i) const {
      const Slot slot = slots[i];
      const bool holds = table.has_entry(slot) && table.keys[slot].value() == batch[i].value();
      verified[i] = holds ? slot : kNoSlot;
    }
  };

  template <class Executor>
  void run(Executor& executor) const {
    executor.each(batch.rows, Step{index.view(1), batch.data, slots.data, verified.data});
  }
};

}  // namespace hkv
