// Grouping and distinct keys for machines whose way of ordering a batch is a stable radix sort: the steps
// around the sort, for any executor that has
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

// The steps of `unique`. Valid positions are sorted by the hash of their key; the hash is a bijection,
// so a run of equal hashes is one key, and the sort is stable, so a run's head is the key's first
// occurrence. `j` is a place in that order, `i` a position, `u` the number of a distinct key.
namespace distinct {

struct State {
  int64_t n;
  const Words* keys;
  const bool* valid;
  UniqueKeys out;
  int32_t* valid_count;
  const uint64_t* hashes;    // of j
  const int32_t* positions;  // of j; the masked ones stand behind the valid ones
  int32_t* heads;            // of j: 1 at the head of a run; before the sort: of i: 1 if valid
  int32_t* heads_before;     // of j: their exclusive sums; before the sort: likewise
  int32_t* starts;           // of a run: its first j
  int32_t* firsts;           // of i: 1 at the first occurrence of a key; in the end: of u: occurrences
  int32_t* firsts_before;    // of i: their exclusive sums, the numbers of the keys

  HKV_HOST_DEVICE bool is_head(int64_t j) const {
    return j < *valid_count && (j == 0 || hashes[j - 1] != hashes[j]);
  }
  HKV_HOST_DEVICE int32_t start_of_run(int64_t j) const { return starts[heads_before[j] + heads[j] - 1]; }
  HKV_HOST_DEVICE int32_t number_of_run(int32_t start) const { return firsts_before[positions[start]]; }
};

struct MarkValid {
  static constexpr int kGroup = 1;
  State state;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t i) const {
    state.heads[i] = state.valid[i] ? 1 : 0;
  }
};

// Valid positions come first, in order; the masked ones follow with the highest hash, so that a stable
// sort leaves them there.
struct Compact {
  static constexpr int kGroup = 1;
  State state;
  uint64_t* hashes;
  int32_t* positions;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t i) const {
    const int64_t before = state.heads_before[i];
    const int64_t total = state.heads_before[state.n - 1] + state.heads[state.n - 1];
    const int64_t at = state.heads[i] ? before : total + i - before;
    hashes[at] = state.heads[i] ? hash_of(state.keys[i].value()) : ~uint64_t{0};
    positions[at] = static_cast<int32_t>(i);
    if (i == 0) *state.valid_count = static_cast<int32_t>(total);
  }
};

struct MarkHeads {
  static constexpr int kGroup = 1;
  State state;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t j) const {
    const int32_t head = state.is_head(j) ? 1 : 0;
    state.heads[j] = head;
    state.firsts[state.positions[j]] = head;
  }
};

struct NumberKeys {
  static constexpr int kGroup = 1;
  State state;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t j) const {
    const int64_t last = state.n - 1;
    const int64_t count = state.heads_before[last] + state.heads[last];
    if (j == 0) *state.out.count = static_cast<int32_t>(count);
    if (j >= count) state.out.unique_keys[j] = Words::of(0);
    if (!state.heads[j]) return;
    const int32_t position = state.positions[j];
    state.starts[state.heads_before[j]] = static_cast<int32_t>(j);
    state.out.unique_keys[state.firsts_before[position]] = state.keys[position];
  }
};

// For n + 1 indices. The first occurrences are numbered by now: their array takes the run lengths.
struct CountOccurrences {
  static constexpr int kGroup = 1;
  State state;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t j) const {
    if (j >= *state.out.count) state.firsts[j] = 0;
    const bool is_tail = j < *state.valid_count && (j + 1 == *state.valid_count || state.heads[j + 1]);
    if (!is_tail) return;
    const int32_t start = state.start_of_run(j);
    state.firsts[state.number_of_run(start)] = static_cast<int32_t>(j + 1 - start);
  }
};

struct Place {
  static constexpr int kGroup = 1;
  State state;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t j) const {
    const int32_t position = state.positions[j];
    if (j >= *state.valid_count) {
      state.out.inverse[position] = -1;
      state.out.order[j] = -1;
      return;
    }
    const int32_t start = state.start_of_run(j);
    const int32_t u = state.number_of_run(start);
    state.out.inverse[position] = u;
    state.out.order[state.out.offsets[u] + (j - start)] = position;
  }
};

struct Scratch {
  template <class Executor>
  static Scratch take(Arena& arena, int64_t n) {
    return {arena.take<int32_t>(1),
            {arena.take<uint64_t>(n), arena.take<uint64_t>(n)},
            {arena.take<int32_t>(n), arena.take<int32_t>(n)},
            arena.take<int32_t>(n),
            arena.take<int32_t>(n),
            arena.take<int32_t>(n),
            arena.take<int32_t>(n + 1),
            arena.take<int32_t>(n),
            arena.take<char>(std::max(Executor::sort_bytes(n), Executor::scan_bytes(n + 1)))};
  }
  int32_t* valid_count;
  Flip<uint64_t> hashes;
  Flip<int32_t> positions;
  int32_t* heads;
  int32_t* heads_before;
  int32_t* starts;
  int32_t* firsts;
  int32_t* firsts_before;
  char* sorting;
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
  Scratch scratch = Scratch::take<Executor>(arena, n);
  State state{n,
              keys,
              valid,
              out,
              scratch.valid_count,
              nullptr,
              nullptr,
              scratch.heads,
              scratch.heads_before,
              scratch.starts,
              scratch.firsts,
              scratch.firsts_before};
  executor.each(n, MarkValid{state});
  executor.scan(n, state.heads, state.heads_before, scratch.sorting);
  executor.each(n, Compact{state, scratch.hashes.current, scratch.positions.current});
  executor.sort(n, scratch.hashes, scratch.positions, 64, scratch.sorting);
  state.hashes = scratch.hashes.current;
  state.positions = scratch.positions.current;
  executor.each(n, MarkHeads{state});
  executor.scan(n, state.heads, state.heads_before, scratch.sorting);
  executor.scan(n, state.firsts, state.firsts_before, scratch.sorting);
  executor.each(n, NumberKeys{state});
  executor.each(n + 1, CountOccurrences{state});
  executor.scan(n + 1, state.firsts, out.offsets, scratch.sorting);
  executor.each(n, Place{state});
}

}  // namespace distinct

}  // namespace hkv
