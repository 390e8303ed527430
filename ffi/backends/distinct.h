// Distinct keys, and where they occur, for machines of very many workers: for any executor whose workers
// group a batch, scan it and run a step together. No worker meets more than one occurrence of a key.
#pragma once

#include <algorithm>
#include <bit>
#include <numeric>

#include "ops/list_occurrences.h"
#include "ops/unique.h"

namespace hkv {

// The steps of `unique`: a hash table of the batch, in which every key's cell comes to hold the key's first
// and last position, in whatever order they come; then the keys are numbered. `i` is a position.
namespace distinct {

// Of one key, from when its first position came until the end; positions only get better. Both words are
// read, and the first time written, as one: of distinct keys each takes a single atomic then.
struct alignas(8) Cell {
  uint32_t first;  // the complement of the first position so far; 0: empty
  uint32_t last;   // the last position so far
};
static_assert(sizeof(Cell) == sizeof(uint64_t));

// At least two for each key, so that probes are short, as far as an int32 can number them.
inline int64_t cells_for(int64_t n) {
  constexpr uint64_t kMost = uint64_t{1} << 31;
  return static_cast<int64_t>(std::min(kMost, std::bit_ceil(static_cast<uint64_t>(2 * n))));
}

struct Scratch {
  template <class Executor>
  static Scratch take(Arena& arena, int64_t n) {
    const int64_t cells = cells_for(n);
    return {cells,
            arena.take<Cell>(cells),
            arena.take<int32_t>(n),
            arena.take<int32_t>(n),
            arena.take<int32_t>(n),
            arena.take<char>(Executor::scan_bytes(n))};
  }
  int64_t cell_count;  // a power of two
  Cell* cells;
  int32_t* places;         // of i: the cell of its key, or -1; after NoteEnds the last position of the key
  int32_t* firsts;         // of i: the first position of its key, or -1
  int32_t* firsts_before;  // of i: first occurrences before it, the numbers of the keys
  char* others;
};

struct State : Scratch {
  static constexpr int64_t kBlock = 32;  // of positions: a warp's
  int64_t n;
  int64_t stride;  // of blocks of positions
  const Words* keys;
  Mask valid;
  UniqueKeys out;

  // Positions in an order without trend. A key's occurrences are seldom spread over a whole batch (features
  // stand one after the other); in their own order each would be a later one than all before.
  HKV_HOST_DEVICE int64_t position(int64_t index) const {
    const int64_t blocks = n / kBlock;
    const int64_t block = index / kBlock;
    return block < blocks ? block * stride % blocks * kBlock + index % kBlock : index;
  }
  // A number of blocks that leads to all of them, in steps of the golden section.
  static int64_t stride_for(int64_t n) {
    const int64_t blocks = std::max<int64_t>(1, n / kBlock);
    auto stride = static_cast<int64_t>(0.618 * static_cast<double>(blocks)) + 1;
    while (std::gcd(stride, blocks) != 1) ++stride;
    return stride;
  }
};

// Linear probing: a cell is of one key for ever, and never empty again, so that all positions of a key end at
// the same cell. Returns that of position i. `read`: a cell that others may be writing to, as a word, or 0.
template <class Read>
HKV_HOST_DEVICE int64_t claim(Cell* cells, int64_t cell_count, const Words* keys, int64_t i,
                              const Read& read) {
  constexpr uint64_t kFree = 0;
  const Key key = keys[i].value();
  const Cell own = {~static_cast<uint32_t>(i), static_cast<uint32_t>(i)};
  const auto mask = static_cast<uint64_t>(cell_count - 1);
  for (uint64_t place = hash_of(key) & mask;; place = (place + 1) & mask) {
    Cell& cell = cells[place];
    auto* both = reinterpret_cast<uint64_t*>(&cell);
    uint64_t found = read(both);
    if (found == kFree) found = atomic_compare_and_swap(both, kFree, bit_cast<uint64_t>(own));
    if (found == kFree) return static_cast<int64_t>(place);
    const auto occupant = bit_cast<Cell>(found);
    if (keys[~occupant.first].value() != key) continue;
    if (occupant.first < own.first) atomic_max(&cell.first, own.first);
    if (occupant.last < own.last) atomic_max(&cell.last, own.last);
    return static_cast<int64_t>(place);
  }
}

// `begin`: of the indices in the order of claims.
struct Claim {
  static constexpr int kGroup = 1;
  int64_t begin;
  State state;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t index) const {
    const int64_t i = state.position(begin + index);
    if (!state.valid[i]) {
      state.places[i] = -1;
      return;
    }
    const auto read = [](const uint64_t* word) { return atomic_read(word); };
    state.places[i] = static_cast<int32_t>(claim(state.cells, state.cell_count, state.keys, i, read));
  }
};

// By all positions at once: what reads them in order, as a scan does, would wait for one cell after the
// other. Nobody reads a cell a second time.
struct NoteEnds {
  static constexpr int kGroup = 1;
  State state;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t i) const {
    const int32_t place = state.places[i];
    const Cell cell = place < 0 ? Cell{} : state.cells[place];
    state.firsts[i] = place < 0 ? -1 : static_cast<int32_t>(~cell.first);
    state.places[i] = static_cast<int32_t>(cell.last);
  }
};

// 1 at the first occurrence of a key.
struct IsFirst {
  const int32_t* firsts;

  HKV_HOST_DEVICE int32_t operator()(int64_t i) const { return firsts[i] == i ? 1 : 0; }
};

struct NumberKeys {
  static constexpr int kGroup = 1;
  State state;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t i) const {
    const int64_t count = total_of(state.n, IsFirst{state.firsts}, state.firsts_before);
    if (i == 0) *state.out.count = static_cast<int32_t>(count);
    if (i >= count) state.out.set_none(i);
    const int32_t first = state.firsts[i];
    const int32_t number = first < 0 ? -1 : state.firsts_before[first];
    state.out.inverse[i] = number;
    if (first == i) state.out.set(number, state.keys[i], i, state.places[i]);
  }
};

template <class Executor>
void run(Executor& executor, int64_t n, const Words* keys, Mask valid, const UniqueKeys& out, char* memory) {
  if (n == 0) return executor.zero(out.count, sizeof(int32_t));
  Arena arena(memory);
  const State state{Scratch::take<Executor>(arena, n), n, State::stride_for(n), keys, valid, out};
  executor.zero(state.cells, state.cell_count * static_cast<int64_t>(sizeof(Cell)));
  // Thousands of workers must not ask for one cell at once. Frequent keys are among those that go ahead, and
  // who finds an earlier and a later position of its key there has nothing to write.
  constexpr int64_t kMostAhead = 8192;
  const int64_t ahead = std::min(n / 16, kMostAhead);
  executor.each(ahead, Claim{0, state});
  executor.each(n - ahead, Claim{ahead, state});
  executor.each(n, NoteEnds{state});
  executor.scan(n, IsFirst{state.firsts}, state.firsts_before, state.others);
  executor.each(n, NumberKeys{state});
}

}  // namespace distinct

// The steps of `list_occurrences`: a sort of the positions by the numbers of their keys.
namespace occurrences {

struct NameKeys {
  static constexpr int kGroup = 1;
  Groups groups;
  Occurrences batch;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t i) const {
    const int64_t number = batch.number(i, batch.keys(groups.n));
    groups.set(i, number < 0 ? groups.limit : number);
  }
};

// At place j of the order, between the numbers of two keys, or at an end: the key that begins here, and those
// before it that have no position; at the end those that are left.
HKV_HOST_DEVICE void mark(const Occurrences& batch, int64_t keys, int64_t before, int64_t here, int64_t j) {
  const int64_t end = here < keys ? here + 1 : keys;
  HKV_ROLLED for (int64_t key = before + 1; key < end; ++key) batch.offsets[key] = static_cast<int32_t>(j);
}

// For n + 1 indices.
struct MarkGroups {
  static constexpr int kGroup = 1;
  Groups groups;
  Occurrences batch;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t j) const {
    const int64_t keys = batch.keys(groups.n);
    if (j >= keys) batch.offsets[j] = static_cast<int32_t>(groups.items_with_target());
    mark(batch, keys, j > 0 ? groups.target(j - 1) : -1, j < groups.n ? groups.target(j) : groups.limit, j);
    if (j < groups.n) batch.order[j] = groups.has_item(j) ? groups.item(j) : -1;
  }
};

struct Scratch {
  template <class Executor>
  static Scratch take(Arena& arena, int64_t n) {
    return {Groups::take(arena, n, n), arena.take<char>(Executor::group_bytes(n))};
  }
  Groups groups;
  char* others;
};

template <class Executor>
void run(Executor& executor, int64_t n, const Occurrences& batch, char* memory) {
  Arena arena(memory);
  auto [groups, others] = Scratch::take<Executor>(arena, n);
  executor.each(n, NameKeys{groups, batch});
  executor.group(groups, others);
  executor.each(n + 1, MarkGroups{groups, batch});
}

}  // namespace occurrences

// Of the indices below a count each of `stride` groups takes the one of its number, and from there every
// `stride`-th.
template <class Step>
struct Strided : Step {
  static_assert(!kHasOwnIndex<Step>);
  CountOnDevice count;
  int64_t stride;

  template <Group G>
  HKV_HOST_DEVICE void operator()(const G& group, int64_t first) const {
    const int64_t end = count.value();
    HKV_ROLLED for (int64_t i = first; i < end; i += stride) Step::operator()(group, i);
  }
};

// What executors of tiles have in common, whose workers are many.
template <class Executor>
class ManyWorkers {
 public:
  static constexpr bool kHasTiles = true;

  // No more groups than keep the device busy: those that the count leaves without an index have to start,
  // too.
  template <class Step>
  void each(const CountOnDevice& count, const Step& step) {
    const int64_t groups = std::min(count.most, self().template groups_in_turns<Step>());
    self().each(groups, Strided<Step>{step, count, groups});
  }

  static int64_t unique_bytes(int64_t n) {
    return bytes_taken([n](Arena& arena) { distinct::Scratch::take<Executor>(arena, n); });
  }
  void unique(int64_t n, const Words* keys, Mask valid, const UniqueKeys& out, char* scratch) {
    distinct::run(self(), n, keys, valid, out, scratch);
  }

  static int64_t list_bytes(int64_t n) {
    return bytes_taken([n](Arena& arena) { occurrences::Scratch::take<Executor>(arena, n); });
  }
  void list(int64_t n, const Occurrences& batch, char* scratch) {
    occurrences::run(self(), n, batch, scratch);
  }

 private:
  Executor& self() { return static_cast<Executor&>(*this); }
};

}  // namespace hkv
