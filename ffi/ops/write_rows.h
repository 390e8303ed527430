// The ways in which rows are written. Slots are distinct; kNoSlot is passed over.
#pragma once

#include "ops/gather_rows.h"

namespace hkv {

// values[slots[i]] = rows[sources[i]]; without sources rows[i], or the only row.
struct ScatterRows {
  static constexpr const char* kName = "scatter_rows";
  static constexpr bool kPerPosition = false;

  Array<uint32_t> clock;
  RowsView values;
  Array<Slot> slots;
  Array<int32_t> sources;
  RowsView rows;

  template <class Binder>
  void describe(Binder& binder) {
    binder.inout("clock", clock, "2");
    binder.inout("values", values, "S ...");
    binder.in("slots", slots, "m");
    binder.in("sources", sources, "m?");
    binder.in("rows", rows, "k ...");
  }

  struct Step {
    static constexpr int kGroup = 8;
    static constexpr bool kOwnIndex = true;
    static constexpr int64_t kGrain = 256;
    int64_t count;
    RowsView values;
    const Slot* slots;
    const int32_t* sources;  // or null
    RowsView rows;

    HKV_HOST_DEVICE void prefetch_far(int64_t i) const {
      if (slots[i] < 0) return;
      prefetch_row<kToWrite>(values, slots[i]);
      prefetch_row(rows, source_of(i));
    }

    template <Group G>
    HKV_HOST_DEVICE void operator()(const G& group, int64_t i) const {
      const Slot slot = i < count && slots[i] < values.count ? slots[i] : kNoSlot;
      const int64_t source = slot >= 0 ? source_of(i) : kNoSlot;
      group.copy_each(values.data, slot, rows.data,
                      source < rows.count ? static_cast<int32_t>(source) : kNoSlot, values.row_bytes);
    }

   private:
    HKV_HOST_DEVICE int64_t source_of(int64_t i) const {
      if (sources != nullptr) return sources[i];
      return rows.count == 1 ? 0 : i;
    }
  };

  template <class Executor>
  void run(Executor& executor) const {
    executor.each(slots.rows, Step{slots.rows, values, slots.data, sources.data_or_null(), rows});
  }
};

// A new array of rows, all of them equal: the rows of an empty table, or fresh optimizer rows.
struct FillRows {
  static constexpr const char* kName = "fill_rows";
  static constexpr bool kPerPosition = false;

  int64_t slots = 0;
  RowsView row;
  RowsView values;

  template <class Binder>
  void describe(Binder& binder) {
    binder.attribute("S", slots);
    binder.in("row", row, "1 ...");
    binder.out("values", values, "S ...");
  }

  struct Step {
    static constexpr int kGroup = 8;
    static constexpr bool kOwnIndex = true;
    static constexpr int64_t kGrain = 4096;
    RowsView row;
    RowsView values;

    template <Group G>
    HKV_HOST_DEVICE void operator()(const G& group, int64_t i) const {
      group.copy_each(values.data, i < values.count ? static_cast<Slot>(i) : kNoSlot, row.data, 0,
                      values.row_bytes);
    }
  };

  template <class Executor>
  void run(Executor& executor) const {
    executor.each(values.count, Step{row, values});
  }
};

// store(member, own, column, columns, block) for each block of the first row of a member's key, where `own`,
// which is the member's, is not negative. The keys are those from the first member's on; narrow rows come
// side by side.
template <Group G, class Store>
HKV_HOST_DEVICE void for_each_first_row(const G& group, const Initializer& initializer, int64_t width,
                                        const Words* of_members, Slot own, const Store& store) {
  constexpr int kBlock = kBlockOf<G>;
  if constexpr (G::size() > 1) {
    if (width <= kBlock * group.size() / 2) {
      if (group.ballot(own >= 0) == 0) return;
      const int shift = G::sharing((width + kBlock - 1) / kBlock);
      const int64_t column = int64_t{kBlock} * (group.rank() & ((1 << shift) - 1));
      const int64_t left = width - column;
      HKV_ROLLED for (int begin = 0; begin < group.size(); begin += group.size() >> shift) {
        const int member = begin + (group.rank() >> shift);
        const Slot of_member = group.broadcast(own, member);
        if (of_member < 0 || left <= 0) continue;
        float block[kBlock];
        const int columns = static_cast<int>(left < kBlock ? left : kBlock);
        initializer.elements(initializer.base(of_members[member].value()), column, columns, block);
        store(member, of_member, column, columns, block);
      }
      return;
    }
  }
  for_each_member(group, own >= 0, [&](int member) {
    const Slot of_member = group.broadcast(own, member);
    for_each_initial_block(group, initializer, of_members[member].value(), width,
                           [&](int64_t column, int columns, const auto& block) {
                             store(member, of_member, column, columns, block);
                           });
  });
}

// values[slots[i]] = the first row of keys[i]
struct InitRows {
  static constexpr const char* kName = "init_rows";
  static constexpr bool kPerPosition = false;

  InitializerAttributes init;
  Array<uint32_t> clock;
  RowsView values;
  Array<Slot> slots;
  Array<Words> keys;

  template <class Binder>
  void describe(Binder& binder) {
    init.describe(binder);
    binder.inout("clock", clock, "2");
    binder.inout("values", values, "S ...");
    binder.in("slots", slots, "m");
    binder.in("keys", keys, "m 2");
  }

  struct Step {
    static constexpr int kGroup = 8;
    static constexpr bool kOwnIndex = true;
    static constexpr int64_t kGrain = 256;
    int64_t count;
    Initializer initializer;
    RowsView values;
    const Slot* slots;
    const Words* keys;

    HKV_HOST_DEVICE void prefetch_far(int64_t i) const { prefetch_row<kToWrite>(values, slots[i]); }

    template <Group G>
    HKV_HOST_DEVICE void operator()(const G& group, int64_t i) const {
      const Slot own = i < count && slots[i] < values.count ? slots[i] : kNoSlot;
      for_each_first_row(group, initializer, values.width, keys + (i - group.rank()), own,
                         [&](int, Slot slot, int64_t column, int columns, const auto& block) {
                           store_block(values.type, values.row(slot), column, columns, block);
                         });
    }
  };

  template <class Executor>
  void run(Executor& executor) const {
    executor.each(slots.rows, Step{slots.rows, init.initializer(), values, slots.data, keys.data});
  }
};

}  // namespace hkv
