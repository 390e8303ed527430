// The distinct keys of a batch, in order of first occurrence, and who they are (section 6).
#pragma once

#include "ops/operation.h"

namespace hkv {

// What `unique` finds; all arrays have n entries, offsets has n + 1, count one.
struct UniqueKeys {
  Words* unique_keys;
  int32_t* inverse;
  int32_t* order;
  int32_t* offsets;
  int32_t* count;
};

struct Unique {
  static constexpr const char* kName = "unique";
  static constexpr bool kPerPosition = false;

  Array<Words> batch;
  Array<bool> valid;
  Array<Words> unique_keys;
  Array<int32_t> inverse;
  Array<int32_t> order;
  Array<int32_t> offsets;
  Array<int32_t> count;
  char* scratch = nullptr;

  template <class Binder>
  void describe(Binder& binder) {
    binder.in("keys", batch, "n 2");
    binder.in("valid", valid, "n");
    binder.out("unique_keys", unique_keys, "n 2");
    binder.out("inverse", inverse, "n");
    binder.out("order", order, "n");
    binder.out("offsets", offsets, "n+1");
    binder.out("count", count, "1");
  }

  template <class Executor>
  void reserve(Arena& arena) {
    scratch = arena.take<char>(Executor::unique_bytes(batch.rows));
  }

  template <class Executor>
  void run(Executor& executor) const {
    executor.unique(batch.rows, batch.data, valid.data,
                    UniqueKeys{unique_keys.data, inverse.data, order.data, offsets.data, count.data},
                    scratch);
  }
};

}  // namespace hkv
