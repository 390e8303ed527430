// The positions of a batch, grouped by their keys (section 6).
#pragma once

#include "ops/operation.h"

namespace hkv {

// The arrays of `list_occurrences`: for n positions, offsets has n + 1 entries, count one. Numbers and count
// come back from callers: a position whose number is none of a key counts as masked, and keys may have none.
struct Occurrences {
  const int32_t* inverse;
  const int32_t* count;
  int32_t* order;
  int32_t* offsets;

  HKV_HOST_DEVICE int64_t keys(int64_t n) const { return CountOnDevice{count, n}.value(); }
  HKV_HOST_DEVICE int64_t number(int64_t i, int64_t keys) const {
    return inverse[i] >= 0 && inverse[i] < keys ? inverse[i] : -1;
  }
};

struct ListOccurrences {
  static constexpr const char* kName = "list_occurrences";
  static constexpr bool kPerPosition = false;

  Array<int32_t> inverse, count, order, offsets;
  char* scratch = nullptr;

  template <class Binder>
  void describe(Binder& binder) {
    binder.in("inverse", inverse, "n");
    binder.in("count", count, "1");
    binder.out("order", order, "n");
    binder.out("offsets", offsets, "n+1");
  }

  template <class Executor>
  void reserve(Arena& arena) {
    scratch = arena.take<char>(Executor::list_bytes(inverse.rows));
  }

  template <class Executor>
  void run(Executor& executor) const {
    if (inverse.rows == 0) return executor.zero(offsets.data, sizeof(int32_t));
    executor.list(inverse.rows, Occurrences{inverse.data, count.data, order.data, offsets.data}, scratch);
  }
};

}  // namespace hkv
