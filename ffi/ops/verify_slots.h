// Which slots still hold the keys that they are said to hold: the others become kNoSlot, and are counted.
#pragma once

#include "ops/operation.h"

namespace hkv {

struct HeldSlots {
  TableView table;
  const Words* batch;
  const Slot* slots;
  uint32_t* stale;

  HKV_HOST_DEVICE void prefetch_far(int64_t i) const {
    if (table.has_slot(slots[i])) prefetch(table.keys + slots[i]);
  }

  HKV_HOST_DEVICE Slot verified(int64_t i) const {
    const Slot slot = slots[i];
    if (slot < 0) return kNoSlot;
    if (holds(slot, batch[i].value())) return slot;
    atomic_add(stale, uint32_t{1});
    return kNoSlot;
  }

 private:
  // An empty lane's key is 0 (section 1): only of that key the digest says more.
  HKV_HOST_DEVICE bool holds(Slot slot, Key key) const {
    if (!table.has_slot(slot) || table.keys[slot].value() != key) return false;
    return key != 0 || table.digests[slot] != kEmpty;
  }
};

struct VerifySlots {
  static constexpr const char* kName = "verify_slots";
  static constexpr bool kPerPosition = false;

  IndexArrays index;
  Array<Words> batch;
  Array<Slot> slots;
  Array<Slot> verified;
  Array<uint32_t> stale;

  template <class Binder>
  void describe(Binder& binder) {
    binder.inout("clock", index.clock, "2");
    binder.in("digests", index.digests, "B 128");
    binder.in("keys", index.keys, "B 128 2");
    binder.in("batch", batch, "n 2");
    binder.in("slots", slots, "n");
    binder.inout("stale", stale, "1");
    binder.out("verified", verified, "n");
  }

  struct Step {
    static constexpr int kGroup = 1;
    HeldSlots held;
    Slot* verified;

    HKV_HOST_DEVICE void prefetch_far(int64_t i) const { held.prefetch_far(i); }
    HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t i) const { verified[i] = held.verified(i); }
  };

  template <class Executor>
  void run(Executor& executor) const {
    executor.each(batch.rows, Step{{index.view(1), batch.data, slots.data, stale.data}, verified.data});
  }
};

}  // namespace hkv
