// The distinct keys of a batch, in order of first occurrence, and where each is first and last (section 6).
#pragma once

#include "ops/operation.h"

namespace hkv {

// What `unique` finds; all arrays have n entries, count one.
struct UniqueKeys {
  Words* unique_keys;
  int32_t* inverse;
  int32_t* first;
  int32_t* last;
  int32_t* count;

  HKV_HOST_DEVICE void set(int64_t number, Words key, int64_t first_position, int64_t last_position) const {
    unique_keys[number] = key;
    first[number] = static_cast<int32_t>(first_position);
    last[number] = static_cast<int32_t>(last_position);
  }
  // Behind the last key.
  HKV_HOST_DEVICE void set_none(int64_t number) const { set(number, Words::of(0), -1, -1); }
};

struct Unique {
  static constexpr const char* kName = "unique";
  static constexpr bool kPerPosition = false;

  Array<Words> batch;
  Array<bool> valid;
  Array<Words> unique_keys;
  Array<int32_t> inverse;
  Array<int32_t> first;
  Array<int32_t> last;
  Array<int32_t> count;
  char* scratch = nullptr;

  template <class Binder>
  void describe(Binder& binder) {
    binder.in("keys", batch, "n 2");
    binder.in("valid", valid, "n?");
    binder.out("unique_keys", unique_keys, "n 2");
    binder.out("inverse", inverse, "n");
    binder.out("first", first, "n");
    binder.out("last", last, "n");
    binder.out("count", count, "1");
  }

  template <class Executor>
  void reserve(Arena& arena) {
    scratch = arena.take<char>(Executor::unique_bytes(batch.rows));
  }

  template <class Executor>
  void run(Executor& executor) const {
    executor.unique(batch.rows, batch.data, Mask{valid.data_or_null()},
                    UniqueKeys{unique_keys.data, inverse.data, first.data, last.data, count.data}, scratch);
  }
};

}  // namespace hkv
