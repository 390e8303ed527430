// The entries of `count` consecutive slots, side by side, in slot order: keys, scores, rows and slots, and
// how many there are. A read.
#pragma once

#include "ops/gather_rows.h"

namespace hkv {

struct ExportSlots {
  static constexpr const char* kName = "export_slots";
  static constexpr bool kPerPosition = false;

  int64_t count = 0;
  IndexArrays index;
  Array<Slot> offset;
  Array<bool> chosen;
  RowsView values;
  Array<Words> keys;
  Array<Words> scores;
  Array<Slot> slots;
  Array<int32_t> exported;
  RowsView rows;
  int32_t* places = nullptr;
  char* scratch = nullptr;

  template <class Binder>
  void describe(Binder& binder) {
    binder.attribute("count", count);
    binder.inout("clock", index.clock, "2");
    binder.in("digests", index.digests, "B 128");
    binder.in("keys", index.keys, "B 128 2");
    binder.in("scores", index.scores, "B 128 2");
    binder.in("values", values, "S ...");
    binder.in("offset", offset, "1");
    binder.in("chosen", chosen, "count?");
    binder.out("exported_keys", keys, "count 2");
    binder.out("exported_scores", scores, "count 2");
    binder.out("exported_slots", slots, "count");
    binder.out("exported_count", exported, "1");
    binder.out("exported_rows", rows, "count ...");
  }

  const char* complaint() const {
    return values.count == index.digests.rows * kLanes ? nullptr : "values: expected a row for each slot";
  }

  // 1 for a slot that is exported, the i-th after the offset.
  struct IsExported {
    TableView table;
    const Slot* offset;
    Mask chosen;

    HKV_HOST_DEVICE int32_t operator()(int64_t i) const {
      return table.has_entry(*offset + i) && chosen[i] ? 1 : 0;
    }
  };

  // A tile of the next slots reads and writes what lies side by side, or nearly.
  struct Place {
    static constexpr int kGroup = 8;
    static constexpr bool kOwnIndex = true;
    static constexpr int64_t kGrain = GatherRows::Step::kGrain;
    int64_t count;
    IsExported is_exported;
    const int32_t* places;
    RowsView values;
    Words* keys;
    Words* scores;
    Slot* slots;
    int32_t* exported;
    RowsView rows;

    template <Group G>
    HKV_HOST_DEVICE void operator()(const G& group, int64_t i) const {
      const int64_t total = total_of(count, is_exported, places);
      const bool exists = i < count;
      if (i == 0) *exported = static_cast<int32_t>(total);
      Slot source = kNoSlot;
      Slot target = kNoSlot;
      if (exists && is_exported(i)) {
        const TableView& table = is_exported.table;
        source = static_cast<Slot>(*is_exported.offset + i);
        target = places[i];
        keys[target] = table.keys[source];
        scores[target] = table.scores[source];
        slots[target] = source;
      }
      group.copy_each(rows.data, target, values.data, source, rows.row_bytes);
      const bool is_behind = exists && i >= total;
      const int64_t first = i - group.rank();
      for_each_member(group, is_behind, [&](int member) { write_fill(group, 0.0f, rows, first + member); });
      if (!is_behind) return;
      keys[i] = Words::of(0);
      scores[i] = Words::of(0);
      slots[i] = kNoSlot;
    }
  };

  template <class Executor>
  void reserve(Arena& arena) {
    places = arena.take<int32_t>(count);
    scratch = arena.take<char>(Executor::scan_bytes(count));
  }

  template <class Executor>
  void run(Executor& executor) const {
    if (count == 0) return executor.zero(exported.data, sizeof(int32_t));
    const IsExported is_exported{index.view(1), offset.data, {chosen.data_or_null()}};
    executor.scan(count, is_exported, places, scratch);
    executor.each(count, Place{count, is_exported, places, values, keys.data, scores.data, slots.data,
                               exported.data, rows});
  }
};

}  // namespace hkv
