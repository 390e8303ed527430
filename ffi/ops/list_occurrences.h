// The positions of a batch, grouped by their keys (section 6).
#pragma once

#include "ops/operation.h"

namespace hkv {

struct ListOccurrences {
  static constexpr const char* kName = "list_occurrences";
  static constexpr bool kPerPosition = false;

  Array<int32_t> inverse, count, order, offsets;
  Groups groups;  // of positions: by the number of the key
  char* scratch = nullptr;

  template <class Binder>
  void describe(Binder& binder) {
    binder.in("inverse", inverse, "n");
    binder.in("count", count, "1");
    binder.out("order", order, "n");
    binder.out("offsets", offsets, "n+1");
  }

  struct NameKeys {
    static constexpr int kGroup = 1;
    Groups groups;
    const int32_t* inverse;

    HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t i) const {
      groups.set(i, inverse[i] < 0 ? groups.limit : inverse[i]);
    }
  };

  // For n + 1 indices.
  struct MarkGroups {
    static constexpr int kGroup = 1;
    Groups groups;
    const int32_t* count;
    int32_t* order;
    int32_t* offsets;

    HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t j) const {
      if (j >= *count) offsets[j] = static_cast<int32_t>(groups.items_with_target());
      if (groups.is_head(j)) offsets[groups.target(j)] = static_cast<int32_t>(j);
      if (j < groups.n) order[j] = groups.has_item(j) ? groups.item(j) : -1;
    }
  };

  template <class Executor>
  void reserve(Arena& arena) {
    groups = Groups::take(arena, inverse.rows, inverse.rows);
    scratch = arena.take<char>(Executor::group_bytes(inverse.rows));
  }

  template <class Executor>
  void run(Executor& executor) const {
    if (inverse.rows == 0) return executor.zero(offsets.data, sizeof(int32_t));
    executor.each(inverse.rows, NameKeys{groups, inverse.data});
    Groups grouped = groups;
    executor.group(grouped, scratch);
    executor.each(inverse.rows + 1, MarkGroups{grouped, count.data, order.data, offsets.data});
  }
};

}  // namespace hkv
