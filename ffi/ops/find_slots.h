// The slot of every key of a batch. A read.
#pragma once

#include "ops/operation.h"

namespace hkv {

struct FindSlots {
  static constexpr const char* kName = "find_slots";
  static constexpr bool kPerPosition = true;

  int64_t choices = 1;
  IndexArrays index;
  Array<Words> batch;
  Array<bool> valid;
  Array<Slot> slots;

  template <class Binder>
  void describe(Binder& binder) {
    binder.attribute("choices", choices);
    binder.inout("clock", index.clock, "2");
    binder.in("digests", index.digests, "B 128");
    binder.in("keys", index.keys, "B 128 2");
    binder.in("batch", batch, "n 2");
    binder.in("valid", valid, "n?");
    binder.out("slots", slots, "n");
  }

  struct Step {
    static constexpr int kGroup = 8;
    static constexpr bool kOwnIndex = true;
    int64_t count;
    TableView table;
    const Words* batch;
    Mask valid;
    Slot* slots;

    HKV_HOST_DEVICE void prefetch_far(int64_t i) const { prefetch_digests(table, batch[i].value()); }
    HKV_HOST_DEVICE Matches look_ahead(int64_t i) const {
      return valid[i] ? match_ahead(table, batch[i].value(), false) : Matches{};
    }
    HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t i, const Matches& matches) const {
      slots[i] = find_slot(table, matches, batch[i].value());
    }

    template <Group G>
    HKV_HOST_DEVICE Slot operator()(const G& group, int64_t i) const {
      const bool is_wanted = i < count && valid[i];
      const Slot slot = find_slot(group, table, is_wanted, is_wanted ? batch[i].value() : 0);
      if (i < count) slots[i] = slot;
      return slot;
    }
  };

  Step step() const {
    return {batch.rows, index.view(choices), batch.data, {valid.data_or_null()}, slots.data};
  }

  template <class Executor>
  void run(Executor& executor) const {
    executor.each(batch.rows, step());
  }
};

}  // namespace hkv
