// The entries of `count` consecutive slots: keys, scores, and whether there is one. A read.
#pragma once

#include "ops/operation.h"

namespace hkv {

struct ReadSlots {
  static constexpr const char* kName = "read_slots";
  static constexpr bool kPerPosition = false;

  int64_t count = 0;
  IndexArrays index;
  Array<Slot> offset;
  Array<Words> keys;
  Array<Words> scores;
  Array<bool> occupied;

  template <class Binder>
  void describe(Binder& binder) {
    binder.attribute("count", count);
    binder.inout("clock", index.clock, "2");
    binder.in("digests", index.digests, "B 128");
    binder.in("keys", index.keys, "B 128 2");
    binder.in("scores", index.scores, "B 128 2");
    binder.in("offset", offset, "1");
    binder.out("slot_keys", keys, "count 2");
    binder.out("slot_scores", scores, "count 2");
    binder.out("occupied", occupied, "count");
  }

  struct Step {
    static constexpr int kGroup = 1;
    TableView table;
    const Slot* offset;
    Words* keys;
    Words* scores;
    bool* occupied;

    HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t i) const {
      const int64_t slot = *offset + i;
      const bool exists = table.has_entry(slot);
      keys[i] = exists ? table.keys[slot] : Words::of(0);
      scores[i] = exists ? table.scores[slot] : Words::of(0);
      occupied[i] = exists;
    }
  };

  template <class Executor>
  void run(Executor& executor) const {
    executor.each(count, Step{index.view(1), offset.data, keys.data, scores.data, occupied.data});
  }
};

}  // namespace hkv
