// The rows of a batch that has inserted keys, in the table's type or another: those of new keys are not there
// yet. By tiles first rows are computed where they are asked for, and go into the table from their keys'
// first positions, so that nothing is read back. A thread of a CPU computes longer than it copies: there they
// are written before all rows are read.
#pragma once

#include "ops/write_rows.h"

namespace hkv {

struct GatherOrInitRows {
  static constexpr const char* kName = "gather_or_init_rows";
  static constexpr bool kPerPosition = false;

  InitializerAttributes init;
  Array<uint32_t> clock;
  RowsView values;
  Array<Slot> slots;
  Array<int32_t> inverse;
  Array<int32_t> first;
  Array<Slot> new_slots;
  Array<Words> unique_keys;
  Array<Words> keys;
  Array<bool> initial;
  RowsView rows;

  template <class Binder>
  void describe(Binder& binder) {
    init.describe(binder);
    binder.inout("clock", clock, "2");
    binder.inout("values", values, "S ...");
    binder.in("slots", slots, "n");
    binder.in("inverse", inverse, "n");
    binder.in("first", first, "n");
    binder.in("new_slots", new_slots, "n");
    binder.in("unique_keys", unique_keys, "n 2");
    binder.in("keys", keys, "n 2");
    binder.in("initial", initial, "n?");
    binder.out_cast("rows", rows, "n ...");
  }

  template <bool kCasts>
  struct Read {
    static constexpr int kGroup = 8;
    static constexpr bool kOwnIndex = true;
    static constexpr int64_t kGrain = 256;
    int64_t count;
    Initializer initializer;
    RowsView values;
    const Slot* slots;
    const int32_t* inverse;  // of i: the number of its key, or -1
    const int32_t* first;  // of a number: the key's first position
    const Slot* new_slots;  // of a number: the slot of a key without a row, or -1
    const Words* keys;
    Mask initial;  // who gets the first row of its key where it has no slot, and not zeros
    RowsView rows;

    template <Group G>
    HKV_HOST_DEVICE void operator()(const G& group, int64_t i) const {
      const bool exists = i < count;
      const bool has_row = exists && new_slot_of(i) < 0 && slots[i] < values.count;
      const Slot slot = has_row ? slots[i] : kNoSlot;
      copy_row_each<kCasts>(group, rows, static_cast<Slot>(i), values, slot);
      const bool is_away = exists && slot < 0;
      if (group.ballot(is_away) == 0) return;
      const Slot new_slot = is_away ? new_slot_of(i) : kNoSlot;  // read again: copies need the registers
      const bool is_first_row = is_away && (new_slot >= 0 || initial[i]);
      Slot own = is_first_row ? kRead : kNoSlot;
      if (new_slot >= 0 && first[inverse[i]] == i) own = new_slot;
      const int64_t begin = i - group.rank();
      for_each_first_row(group, initializer, rows.width, keys + begin, own,
                         [&](int member, Slot written, int64_t column, int columns, const auto& block) {
                           store_in_row<kCasts>(values.type, rows, begin + member, column, columns, block);
                           if (written == kRead) return;
                           store_block(values.type, values.row(written), column, columns, block);
                         });
      for_each_member(group, is_away && !is_first_row,
                      [&](int member) { fill_row(group, 0.0f, rows, begin + member); });
    }

   private:
    static constexpr Slot kRead = 0x7fffffff;  // and written by another position; no slot is so high

    HKV_HOST_DEVICE Slot new_slot_of(int64_t i) const {
      const int32_t u = inverse[i];
      if (u < 0 || u >= count) return kNoSlot;
      return new_slots[u] < values.count ? new_slots[u] : kNoSlot;
    }
  };

  struct Step : Read<false> {};
  struct Cast : Read<true> {};

  template <class Executor>
  void run(Executor& executor) const {
    if constexpr (Executor::kHasTiles) {
      if (rows.type == values.type) {
        executor.each(slots.rows, Step{read<false>()});
      } else {
        executor.each(slots.rows, Cast{read<true>()});
      }
    } else {
      const Initializer initializer = init.initializer();
      executor.each(slots.rows,
                    InitRows::Step{slots.rows, initializer, values, new_slots.data, unique_keys.data});
      GatherRows{0.0f, init, clock, values, slots, keys, initial, rows}.run(executor);
    }
  }

 private:
  template <bool kCasts>
  Read<kCasts> read() const {
    return {
        slots.rows, init.initializer(),       values, slots.data, inverse.data, first.data, new_slots.data,
        keys.data,  {initial.data_or_null()}, rows};
  }
};

}  // namespace hkv
