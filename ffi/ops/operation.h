// What an operation is. An operation is a struct with
//   kName                 its name, in XLA, in jaxprs and in errors;
//   kPerPosition          whether every position of the batch is independent of the others, so that
//                         vmap may flatten batches (reads only);
//   describe(binder)      names its attributes, operands and results, with their shapes. This one
//                         description checks calls, tells Python the signature, and says what is
//                         updated in place;
//   complaint()           what is wrong with a call whose shapes are right, or null (optional);
//   reserve<Executor>(arena)   takes its workspace (optional);
//   run(executor)         its steps.
// A step is a function object `step(group, index)`; an executor (ffi/backends) runs a step for every
// index with a group of kGroup workers. Of a step with kOwnIndex every member gets an index of its own, and
// the last group's may go beyond the last: the step looks, and takes part without one. How many indices there
// are is a number, or a CountOnDevice. Steps may offer
// prefetch_far(index), which the CPU executor calls some indices ahead, and for several of them at once where
// steps are long: those say by lines_ahead() how many cache lines one call asks for. And look_ahead(index),
// which it calls less far ahead and whose result it hands to step(group, index, result): what the result is
// made of must stay as it is while the step runs. Tiles call step(group, index).
//
// Shapes are written as axis names and numbers, "n 2": equal names are equal sizes; "..." are the
// axes of a row; "n?" is n or 0 (absent); "n+1" is one more than n, "n+1?" that or 0. A name may also be an
// attribute.
#pragma once

#include <bit>
#include <cstddef>

#include "core/bucket.h"
#include "core/rows.h"
#include "core/scoring.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace hkv {

// An operand or a result: `rows` is the size of its leading axis.
template <class T>
struct Array {
  T* data = nullptr;
  int64_t rows = 0;

  T* data_or_null() const { return rows > 0 ? data : nullptr; }
};

// Which items count. Without flags all do: an operand that XLA would have to fill with ones is left out.
struct Mask {
  const bool* flags = nullptr;

  // As bytes: in memory of a caller's a flag may be another number than 0 and 1, which no bool is.
  HKV_HOST_DEVICE bool operator[](int64_t index) const {
    return flags == nullptr || reinterpret_cast<const unsigned char*>(flags)[index] != 0;
  }
};

// The steps of a bound operation, and what the executor ends a call with.
template <class Operation, class Executor>
void run_steps(const Operation& operation, Executor& executor) {
  operation.run(executor);
  if constexpr (requires { executor.finish(); }) executor.finish();
}

template <class Step>
inline constexpr bool kHasOwnIndex = requires { requires Step::kOwnIndex; };

// visit(member), by all members, for each of them that asks for it.
template <Group G, class Visitor>
HKV_HOST_DEVICE void for_each_member(const G& group, bool asks, const Visitor& visit) {
  HKV_ROLLED for (uint32_t left = group.ballot(asks); left != 0; left &= left - 1) {
    visit(count_trailing_zeros(left));
  }
}

// Two steps as one: what the first returns goes into the second, and not through memory.
template <class First, class Second>
struct Chain {
  static_assert(First::kGroup == Second::kGroup && kHasOwnIndex<First> && kHasOwnIndex<Second>);
  static constexpr int kGroup = First::kGroup;
  static constexpr bool kOwnIndex = true;
  First first;
  Second second;

  template <Group G>
  HKV_HOST_DEVICE void operator()(const G& group, int64_t i) const {
    second(group, i, first(group, i));
  }
};

// A number of indices that is known where steps run, not where they are asked for: callers give it, so it may
// be any.
struct CountOnDevice {
  const int32_t* count;
  int64_t most;

  HKV_HOST_DEVICE int64_t value() const {
    const int64_t bounded = *count < most ? *count : most;
    return bounded < 0 ? 0 : bounded;
  }
};

// The sum of the terms 0 to n - 1, of which there is one at least and the exclusive sums are known.
template <class Terms>
HKV_HOST_DEVICE int64_t total_of(int64_t n, const Terms& terms, const int32_t* sums) {
  return int64_t{sums[n - 1]} + terms(n - 1);
}

inline constexpr int64_t kCacheLine = 64;

// Of a row, as many as are asked for: the hardware's own prefetcher follows from there.
HKV_HOST_DEVICE int64_t lines_of(const RowsView& rows) {
  constexpr int64_t kMost = 4;
  const int64_t lines = (rows.row_bytes + kCacheLine - 1) / kCacheLine;
  return lines < kMost ? lines : kMost;
}

// Brings a row near, if there is one.
template <bool kIsToWrite = false>
HKV_HOST_DEVICE void prefetch_row(const RowsView& rows, int64_t index) {
  if (index < 0 || index >= rows.count) return;
  for (int64_t line = 0; line < lines_of(rows); ++line) {
    prefetch<kIsToWrite>(rows.row(index) + line * kCacheLine);
  }
}

// Columns of a block: a cache line for a thread, 16 bytes for a member of a tile.
template <Group G>
inline constexpr int kBlockOf = G::size() == 1 ? 16 : 4;

// Shares the columns of a row among a group, in blocks: visit.operator()<kBlock>(column, columns).
template <Group G, class Visitor>
HKV_HOST_DEVICE void for_each_block(const G& group, int64_t width, const Visitor& visit) {
  constexpr int kBlock = kBlockOf<G>;
  for (int64_t column = int64_t{kBlock} * group.rank(); column < width;
       column += int64_t{kBlock} * group.size()) {
    const int64_t left = width - column;
    if constexpr (G::size() == 1) {  // what is left by halves: whole blocks are several times faster
      constexpr int kHalf = kBlock / 2;
      if (left >= kHalf && left < kBlock) {
        visit.template operator()<kHalf>(column, kHalf);
        if (left > kHalf) visit.template operator()<kHalf>(column + kHalf, static_cast<int>(left - kHalf));
        return;
      }
    }
    visit.template operator()<kBlock>(column, static_cast<int>(left < kBlock ? left : kBlock));
  }
}

// Rows of one floating-point type as those of another, for TileGroup::move_each: four elements at once, of
// rows that begin where four may.
struct CastBlocks {
  static constexpr int kElements = 4;
  struct alignas(16) Floats {
    float elements[kElements];
  };
  struct alignas(8) Halves {
    uint16_t elements[kElements];
  };
  struct Held {
    uint32_t words[4];  // of halves the first two
  };
  RowsView to;
  RowsView from;

  HKV_HOST_DEVICE bool fits() const {
    const auto is_aligned = [](const RowsView& rows) {
      const size_t bytes = rows.type == RowType::kFloat32 ? sizeof(Floats) : sizeof(Halves);
      return (reinterpret_cast<uintptr_t>(rows.data) | static_cast<uintptr_t>(rows.row_bytes)) % bytes == 0;
    };
    return is_aligned(to) && is_aligned(from);
  }

  HKV_HOST_DEVICE const char* source(Slot row) const { return from.row(row); }
  HKV_HOST_DEVICE char* target(Slot row) const { return to.row(row); }

  HKV_HOST_DEVICE Held load(const char* row, int64_t unit) const {
    Held held;
    if (from.type == RowType::kFloat32) {
      const Floats floats = reinterpret_cast<const Floats*>(row)[unit];
      memcpy(held.words, &floats, sizeof(floats));
    } else {
      const Halves halves = reinterpret_cast<const Halves*>(row)[unit];
      memcpy(held.words, &halves, sizeof(halves));
    }
    return held;
  }

  HKV_HOST_DEVICE void store(char* row, int64_t unit, const Held& held) const {
    Floats floats;
    Halves halves;
    if (from.type == RowType::kFloat32) {
      memcpy(floats.elements, held.words, sizeof(Floats));
    } else {
      memcpy(halves.elements, held.words, sizeof(Halves));
      decode_halves(from.type, halves.elements, floats.elements);
    }
    if (to.type == RowType::kFloat32) {
      reinterpret_cast<Floats*>(row)[unit] = floats;
    } else {
      encode_halves(to.type, floats.elements, halves.elements);
      reinterpret_cast<Halves*>(row)[unit] = halves;
    }
  }
};

// The same, one by one.
struct CastElements {
  using Held = float;
  RowsView to;
  RowsView from;

  HKV_HOST_DEVICE const char* source(Slot row) const { return from.row(row); }
  HKV_HOST_DEVICE char* target(Slot row) const { return to.row(row); }
  HKV_HOST_DEVICE Held load(const char* row, int64_t unit) const {
    return load_element(from.type, row, unit);
  }
  HKV_HOST_DEVICE void store(char* row, int64_t unit, Held held) const {
    store_element(to.type, row, unit, held);
  }
};

// Every member's own row, from one number to another: as it is, or cast: in the target's type, rounded once.
template <bool kCasts, Group G>
HKV_HOST_DEVICE void copy_row_each(const G& group, const RowsView& to, Slot target, const RowsView& from,
                                   Slot source) {
  if constexpr (!kCasts) {
    group.copy_each(to.data, target, from.data, source, to.row_bytes);
  } else if constexpr (G::size() == 1) {
    if (target < 0 || source < 0) return;
    for_each_block<G>(group, to.width, [&]<int kBlock>(int64_t column, int columns) {
      float block[kBlock];
      load_block(from.type, from.row(source), column, columns, block);
      store_block(to.type, to.row(target), column, columns, block);
    });
  } else {
    if (group.ballot(target >= 0 && source >= 0) == 0) return;
    if (const CastBlocks blocks{to, from}; blocks.fits()) {
      constexpr int kInFlight = 2;  // of four, registers would not hold what it takes to cast them
      group.template move_each<kInFlight>(blocks, target, source, to.width / CastBlocks::kElements);
    } else {
      group.template move_each<1>(CastElements{to, from}, target, source, to.width);
    }
  }
}

// Rows that a worker asks for before it looks at the first: some by a member of a tile, whose blocks are the
// smaller ones.
template <int kBlock>
inline constexpr int kRowsAhead = kBlock == 4 ? 4 : 1;

// Cuts a workspace into aligned arrays. Without a base it measures. AddressSanitizer takes the workspace for
// one array: where it watches, arrays lie apart, and what is between them is nobody's.
class Arena {
 public:
  explicit Arena(void* base = nullptr) : base_(static_cast<char*>(base)) {}
#if defined(__SANITIZE_ADDRESS__)
  ~Arena() { ASAN_UNPOISON_MEMORY_REGION(base_, base_ ? used_ : 0); }  // XLA has other uses for it
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
#endif

  template <class T>
  T* take(int64_t count) {
    const size_t offset = used_;
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
#if defined(__SANITIZE_ADDRESS__)
    used_ += kAlignment;
    if (base_) {
      ASAN_UNPOISON_MEMORY_REGION(base_ + offset, bytes);  // another layout may have left it out
      ASAN_POISON_MEMORY_REGION(base_ + offset + bytes, used_ - offset - bytes);
    }
#endif
    return base_ ? reinterpret_cast<T*>(base_ + offset) : nullptr;
  }

  size_t used() const { return used_; }

 private:
  static constexpr size_t kAlignment = 256;  // what CUB asks of temporary storage
  char* base_;
  size_t used_ = 0;
};

// Bytes of a workspace that take(arena) takes.
template <class Take>
int64_t bytes_taken(const Take& take) {
  Arena arena;
  take(arena);
  return static_cast<int64_t>(arena.used());
}

// An array and room for its next form: whoever writes that turns it over.
template <class T>
struct Flip {
  T* current = nullptr;
  T* other = nullptr;

  void turn() {
    T* const written = other;
    other = current;
    current = written;
  }
};

// Items 0 to n - 1 and their targets. A step sets them all; after Executor::group those that have a target
// stand first, ordered by (target, item), and the others, as far as they stand anywhere, behind them.
struct Groups {
  int64_t n = 0;
  int64_t limit = 0;  // targets are below; "none" is the limit itself
  int64_t count = 0;  // places to look at, after grouping
  Flip<uint32_t> targets;
  Flip<int32_t> items;

  static Groups take(Arena& arena, int64_t n, int64_t limit) {
    const Flip<uint32_t> targets = {arena.take<uint32_t>(n), arena.take<uint32_t>(n)};
    return {n, limit, n, targets, {arena.take<int32_t>(n), arena.take<int32_t>(n)}};
  }

  HKV_HOST_DEVICE void set(int64_t item, int64_t target) const {
    targets.current[item] = static_cast<uint32_t>(target);
    items.current[item] = static_cast<int32_t>(item);
  }

  HKV_HOST_DEVICE void leave_out(int64_t item) const { set(item, limit); }

  // Of a target, for a sort.
  int bits() const { return std::bit_width(static_cast<uint64_t>(limit)); }

  HKV_HOST_DEVICE int32_t item(int64_t place) const { return items.current[place]; }
  HKV_HOST_DEVICE int64_t target(int64_t place) const { return targets.current[place]; }
  HKV_HOST_DEVICE bool is_in_run(int64_t place, int64_t of_target) const {
    return place >= 0 && place < count && target(place) == of_target;
  }
  HKV_HOST_DEVICE bool has_item(int64_t place) const { return place < count && target(place) != limit; }

  // The target of the run that begins at a place, or -1.
  HKV_HOST_DEVICE int64_t head_target(int64_t place) const {
    const bool is_head = has_item(place) && (place == 0 || target(place - 1) != target(place));
    return is_head ? target(place) : -1;
  }

  // Where the run begins in which a place is, if it has so many places at most; else -1. In a run of
  // twice as many or more no place looks further than the first line.
  HKV_HOST_DEVICE int64_t head_within(int64_t place, int64_t of_target, int64_t length) const {
    if (is_in_run(place + length, of_target) || is_in_run(place - length, of_target)) return -1;
    int64_t head = place;
    HKV_ROLLED for (; is_in_run(head - 1, of_target); --head) continue;
    return is_in_run(head + length, of_target) ? -1 : head;
  }

  // Once grouped: where those begin that have none.
  HKV_HOST_DEVICE int64_t items_with_target() const {
    int64_t begin = 0;
    int64_t end = count;
    for (int64_t place = end - 1; begin < end; place = (begin + end) / 2) {
      if (target(place) == limit) {
        end = place;
      } else {
        begin = place + 1;
      }
    }
    return begin;
  }
};

// The leaves of the state that operations on the index take.
struct IndexArrays {
  Array<uint32_t> clock;
  Array<Digest> digests;
  Array<Words> keys;
  Array<Words> scores;
  Array<int32_t> occupancy;
  Array<Oldest> oldest;

  HKV_HOST_DEVICE TableView view(int64_t choices) const {
    return {digests.data, keys.data, scores.data, occupancy.data, oldest.data, digests.rows, choices};
  }
};

}  // namespace hkv
