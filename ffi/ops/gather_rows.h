// Rows by slot, in their type or in another. Where there is no slot: the key's first row, or a fill value, as
// the type of the rows by slot holds them. A read.
#pragma once

#include "ops/operation.h"

namespace hkv {

struct InitializerAttributes {
  int64_t kind = 0;
  int64_t seed = 0;  // the bits of the unsigned seed
  float a = 0.0f;
  float b = 0.0f;

  template <class Binder>
  void describe(Binder& binder) {
    binder.attribute("init_kind", kind);
    binder.attribute("init_a", a);
    binder.attribute("init_b", b);
    binder.attribute("seed", seed);
  }

  Initializer initializer() const {
    return {static_cast<Initializer::Kind>(kind), a, b, static_cast<uint64_t>(seed)};
  }
};

// store(column, columns, block) for each block of a key's first row.
template <Group G, class Store>
HKV_HOST_DEVICE void for_each_initial_block(const G& group, const Initializer& initializer, Key key,
                                            int64_t width, const Store& store) {
  const uint64_t base = initializer.base(key);
  for_each_block<G>(group, width, [&]<int kBlock>(int64_t column, int columns) {
    float block[kBlock];
    initializer.elements(base, column, columns, block);
    store(column, columns, block);
  });
}

// A block into a row: cast, as a row of the type `own` would have it.
template <bool kCasts, int kBlock>
HKV_HOST_DEVICE void store_in_row(RowType own, const RowsView& rows, int64_t row, int64_t column, int columns,
                                  const float (&block)[kBlock]) {
  if constexpr (kCasts) {
    float held[kBlock];
    for (int c = 0; c < kBlock; ++c) held[c] = c < columns ? rounded(own, block[c]) : 0.0f;
    store_block(rows.type, rows.row(row), column, columns, held);
  } else {
    store_block(rows.type, rows.row(row), column, columns, block);
  }
}

template <Group G>
HKV_HOST_DEVICE void fill_row(const G& group, float fill, const RowsView& rows, int64_t row) {
  for_each_block<G>(group, rows.width, [&]<int kBlock>(int64_t column, int columns) {
    float block[kBlock];
    for (float& element : block) element = fill;
    store_block(rows.type, rows.row(row), column, columns, block);
  });
}

// Of any type: one that is no number gets zeros.
template <Group G>
HKV_HOST_DEVICE void write_fill(const G& group, float fill, const RowsView& rows, int64_t row) {
  if (rows.type != RowType::kOther) return fill_row(group, fill, rows, row);
  for (int64_t byte = group.rank(); byte < rows.row_bytes; byte += group.size()) rows.row(row)[byte] = 0;
}

struct GatherRows {
  static constexpr const char* kName = "gather_rows";
  static constexpr bool kPerPosition = true;

  float fill = 0.0f;
  InitializerAttributes init;
  Array<uint32_t> clock;
  RowsView values;
  Array<Slot> slots;
  Array<Words> keys;
  Array<bool> initial;
  RowsView rows;

  template <class Binder>
  void describe(Binder& binder) {
    binder.attribute("fill", fill);
    init.describe(binder);
    binder.inout("clock", clock, "2");
    binder.in("values", values, "S ...");
    binder.in("slots", slots, "n");
    binder.in("keys", keys, "n? 2");
    binder.in("initial", initial, "n?");
    binder.out_cast("rows", rows, "n ...");
  }

  // Rows that are cast take more registers than copies, and so have a kernel of their own.
  template <bool kCasts>
  struct Read {
    static constexpr int kGroup = 8;
    static constexpr bool kOwnIndex = true;
    static constexpr int64_t kGrain = 256;
    Initializer initializer;
    float fill;
    RowsView values;
    const Slot* slots;
    const Words* keys;  // null: there are no first rows
    Mask initial;
    RowsView rows;

    HKV_HOST_DEVICE void prefetch_far(int64_t i) const { prefetch_row(values, slots[i]); }

    template <Group G>
    HKV_HOST_DEVICE void operator()(const G& group, int64_t i) const {
      (*this)(group, i, i < rows.count ? slots[i] : kNoSlot);
    }

    template <Group G>
    HKV_HOST_DEVICE void operator()(const G& group, int64_t i, Slot slot) const {
      const bool has_row = slot >= 0 && slot < values.count;
      copy_row_each<kCasts>(group, rows, static_cast<Slot>(i), values, has_row ? slot : kNoSlot);
      const int64_t first = i - group.rank();
      for_each_member(group, i < rows.count && !has_row,
                      [&](int member) { write_without_slot(group, first + member); });
    }

   private:
    template <Group G>
    HKV_HOST_DEVICE void write_without_slot(const G& group, int64_t i) const {
      if (keys != nullptr && initial[i]) {
        for_each_initial_block(group, initializer, keys[i].value(), rows.width,
                               [&](int64_t column, int columns, const auto& block) {
                                 store_in_row<kCasts>(values.type, rows, i, column, columns, block);
                               });
      } else {
        write_fill(group, kCasts ? rounded(values.type, fill) : fill, rows, i);
      }
    }
  };

  struct Step : Read<false> {};
  struct Cast : Read<true> {};

  // What to do with the step, a Step or a Cast.
  template <class Visitor>
  void visit(const Visitor& with) const {
    const auto read = [this]<bool kCasts>() -> Read<kCasts> {
      return {init.initializer(),       fill, values, slots.data, keys.data_or_null(),
              {initial.data_or_null()}, rows};
    };
    if (rows.type == values.type) return with(Step{read.template operator()<false>()});
    with(Cast{read.template operator()<true>()});
  }

  template <class Executor>
  void run(Executor& executor) const {
    visit([&](const auto& step) { executor.each(slots.rows, step); });
  }
};

}  // namespace hkv
