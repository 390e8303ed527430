// Empties slots. Distinct slots that hold entries; kNoSlot is passed over.
#pragma once

#include "ops/operation.h"

namespace hkv {

struct EraseSlots {
  static constexpr const char* kName = "erase_slots";
  static constexpr bool kPerPosition = false;

  IndexArrays index;
  Array<Slot> slots;

  template <class Binder>
  void describe(Binder& binder) {
    binder.inout("clock", index.clock, "2");
    binder.inout("digests", index.digests, "B 128");
    binder.inout("keys", index.keys, "B 128 2");
    binder.inout("scores", index.scores, "B 128 2");
    binder.inout("occupancy", index.occupancy, "B");
    binder.in("slots", slots, "m");
  }

  struct Step {
    static constexpr int kGroup = 1;
    TableView table;
    const Slot* slots;

    HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t i) const {
      const Slot slot = slots[i];
      if (!table.has_slot(slot)) return;
      erase_entry(table, slot);
      atomic_add(table.occupancy + slot / kLanes, -1);
    }
  };

  template <class Executor>
  void run(Executor& executor) const {
    executor.each(slots.rows, Step{index.view(1), slots.data});
  }
};

}  // namespace hkv
