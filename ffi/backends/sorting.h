// Grouping and distinct keys for machines of very many workers, whose way of ordering a batch is a stable
// radix sort: the steps around the sort, for any executor that has
//   sort(n, keys, items, bits, scratch)   stable, by the lowest bits of the keys; sort_bytes(n) of scratch
// besides each, scan and zero. No worker meets more than one item of a run of equal keys.
#pragma once

#include <algorithm>
#include <bit>
#include <utility>

#include "ops/unique.h"

namespace hkv {

// An array and room for its next form: whoever writes that turns it over.
template <class T>
struct Flip {
  T* current;
  T* other;

  void turn() { std::swap(current, other); }
};

// The items with a target, ordered by (target, item).
namespace grouping {

struct Prepare {
  static constexpr int kGroup = 1;
  const int32_t* targets;
  uint32_t last;  // stands for "no target", behind all others
  uint32_t* keys;
  int32_t* items;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t i) const {
    keys[i] = targets[i] < 0 ? last : static_cast<uint32_t>(targets[i]);
    items[i] = static_cast<int32_t>(i);
  }
};

struct Finish {
  static constexpr int kGroup = 1;
  int64_t n;
  uint32_t last;
  const uint32_t* sorted_keys;
  const int32_t* sorted_items;
  int32_t* items;
  int32_t* grouped_targets;
  int32_t* count;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t i) const {
    items[i] = sorted_items[i];
    grouped_targets[i] = static_cast<int32_t>(sorted_keys[i]);
    const bool has_target = sorted_keys[i] != last;
    if (i == 0 && !has_target) *count = 0;
    if (has_target && (i + 1 == n || sorted_keys[i + 1] == last)) *count = static_cast<int32_t>(i + 1);
  }
};

struct Scratch {
  template <class Executor>
  static Scratch take(Arena& arena, int64_t n) {
    return {{arena.take<uint32_t>(n), arena.take<uint32_t>(n)},
            {arena.take<int32_t>(n), arena.take<int32_t>(n)},
            arena.take<char>(Executor::sort_bytes(n))};
  }
  Flip<uint32_t> keys;
  Flip<int32_t> items;
  char* sorting;
};

template <class Executor>
int64_t scratch_bytes(int64_t n) {
  Arena arena;
  Scratch::take<Executor>(arena, n);
  return static_cast<int64_t>(arena.used());
}

template <class Executor>
void run(Executor& executor, int64_t n, const int32_t* targets, int64_t limit, int32_t* items,
         int32_t* grouped_targets, int32_t* count, char* memory) {
  if (n == 0) return executor.zero(count, sizeof(int32_t));
  Arena arena(memory);
  auto [keys, sorted, sorting] = Scratch::take<Executor>(arena, n);
  const auto last = static_cast<uint32_t>(limit);
  executor.each(n, Prepare{targets, last, keys.current, sorted.current});
  executor.sort(n, keys, sorted, std::bit_width(last), sorting);
  executor.each(n, Finish{n, last, keys.current, sorted.current, items, grouped_targets, count});
}

}  // namespace grouping

// The steps of `unique`: a hash table of the batch, in which every key's cell comes to hold the key's first
// position, whoever comes first; then the keys are numbered, and the positions grouped by those numbers.
// `i` is a position, `u` the number of a distinct key.
namespace distinct {

struct Scratch {
  template <class Executor>
  static Scratch take(Arena& arena, int64_t n) {
    const int64_t others = std::max(grouping::scratch_bytes<Executor>(n), Executor::scan_bytes(n));
    const int64_t cells = cells_for(n);
    return {cells,
            arena.take<uint32_t>(cells),
            arena.take<int32_t>(n),
            arena.take<int32_t>(n),
            arena.take<int32_t>(n),
            arena.take<int32_t>(n),
            arena.take<int32_t>(1),
            arena.take<char>(others)};
  }
  int64_t cell_count;      // a power of two
  uint32_t* cells;         // the complement of the first position so far; 0: empty
  int32_t* places;         // of i: the cell of its key, or -1
  int32_t* firsts;         // of i: 1 at the first occurrence of a key
  int32_t* firsts_before;  // of i: their exclusive sums, the numbers of the keys
  int32_t* numbers;        // of the grouped positions
  int32_t* valid_count;
  char* others;

 private:
  // At least two for each key, so that probes are short, as far as an int32 can number them.
  static int64_t cells_for(int64_t n) {
    constexpr uint64_t kMost = uint64_t{1} << 31;
    return static_cast<int64_t>(std::min(kMost, std::bit_ceil(static_cast<uint64_t>(2 * n))));
  }
};

struct State : Scratch {
  int64_t n;
  const Words* keys;
  const bool* valid;
  UniqueKeys out;

  HKV_HOST_DEVICE int64_t first_of(int64_t i) const { return ~cells[places[i]]; }
};

// Linear probing: a cell is of one key for ever, and never empty again, so that all positions of a key end at
// the same cell. `begin` is the first of the positions that are claimed for.
struct Claim {
  static constexpr int kGroup = 1;
  int64_t begin;
  State state;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t index) const {
    const int64_t i = begin + index;
    state.places[i] = state.valid[i] ? static_cast<int32_t>(cell_of(~static_cast<uint32_t>(i), i)) : -1;
  }

 private:
  HKV_HOST_DEVICE uint64_t cell_of(uint32_t own, int64_t i) const {
    const Key key = state.keys[i].value();
    const auto mask = static_cast<uint64_t>(state.cell_count - 1);
    for (uint64_t cell = hash_of(key) & mask;; cell = (cell + 1) & mask) {
      uint32_t* occupant = state.cells + cell;
      uint32_t found = atomic_read(occupant);
      if (found == 0) found = atomic_compare_and_swap(occupant, 0, own);
      if (found == 0) return cell;
      if (state.keys[~found].value() != key) continue;
      if (found < own) atomic_max(occupant, own);
      return cell;
    }
  }
};

struct MarkFirst {
  static constexpr int kGroup = 1;
  State state;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t i) const {
    state.firsts[i] = state.places[i] >= 0 && state.first_of(i) == i ? 1 : 0;
  }
};

struct NumberKeys {
  static constexpr int kGroup = 1;
  State state;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t i) const {
    const int64_t count = total_of(state.n, state.firsts, state.firsts_before);
    if (i == 0) *state.out.count = static_cast<int32_t>(count);
    if (i >= count) state.out.unique_keys[i] = Words::of(0);
    state.out.inverse[i] = state.places[i] < 0 ? -1 : state.firsts_before[state.first_of(i)];
    if (state.firsts[i]) state.out.unique_keys[state.firsts_before[i]] = state.keys[i];
  }
};

// For n + 1 indices.
struct MarkGroups {
  static constexpr int kGroup = 1;
  State state;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t j) const {
    const int64_t total = *state.valid_count;
    if (j >= *state.out.count) state.out.offsets[j] = static_cast<int32_t>(total);
    if (j < total) {
      const int32_t u = state.numbers[j];
      if (j == 0 || state.numbers[j - 1] != u) state.out.offsets[u] = static_cast<int32_t>(j);
    } else if (j < state.n) {
      state.out.order[j] = -1;
    }
  }
};

template <class Executor>
int64_t scratch_bytes(int64_t n) {
  Arena arena;
  Scratch::take<Executor>(arena, n);
  return static_cast<int64_t>(arena.used());
}

template <class Executor>
void run(Executor& executor, int64_t n, const Words* keys, const bool* valid, const UniqueKeys& out,
         char* memory) {
  if (n == 0) {
    executor.zero(out.count, sizeof(int32_t));
    return executor.zero(out.offsets, sizeof(int32_t));
  }
  Arena arena(memory);
  const State state{Scratch::take<Executor>(arena, n), n, keys, valid, out};
  executor.zero(state.cells, state.cell_count * static_cast<int64_t>(sizeof(uint32_t)));
  // Thousands of workers must not ask for one cell at once. Frequent keys are among the first positions, and
  // who finds an earlier position of its key there has nothing to write.
  constexpr int64_t kMostAhead = 4096;
  const int64_t ahead = std::min(n / 32, kMostAhead);
  executor.each(ahead, Claim{0, state});
  executor.each(n - ahead, Claim{ahead, state});
  executor.each(n, MarkFirst{state});
  executor.scan(n, state.firsts, state.firsts_before, state.others);
  executor.each(n, NumberKeys{state});
  grouping::run(executor, n, out.inverse, n, out.order, state.numbers, state.valid_count, state.others);
  executor.each(n + 1, MarkGroups{state});
}

}  // namespace distinct

}  // namespace hkv
