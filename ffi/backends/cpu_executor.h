// Runs operations on host threads: steps in chunks, keys and buckets grouped by partitioning. The
// partitions depend on the batch alone, never on the number of threads.
#pragma once

#include <algorithm>
#include <bit>
#include <numeric>
#include <string>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "backends/workers.h"
#include "ops/list_occurrences.h"
#include "ops/unique.h"

namespace hkv {

// A stable partition of n items into `parts` by a function of the item, in parallel chunks.
class Partition {
 public:
  static constexpr int64_t kChunk = 16384;      // items of one task; 128 KiB of keys, an L2's half
  static constexpr int64_t kPartItems = 4096;   // aim for a part: its hash table fits the L2
  static constexpr int64_t kMostParts = 1024;  // open write streams that a core's TLB still covers, and int16

  explicit Partition(int64_t n)
      : n_(n),
        chunks_(std::max<int64_t>(1, (n + kChunk - 1) / kChunk)),  // one, so that there are beginnings
        parts_(std::min<int64_t>(
            kMostParts, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n / kPartItems + 1))))) {}

  int64_t parts() const { return parts_; }
  int64_t chunks() const { return chunks_; }
  int64_t table_size() const { return chunks_ * parts_; }
  int64_t begin_of(int64_t part) const { return part < parts_ ? starts_[part] : total_; }
  int64_t total() const { return total_; }

  // Bits of a number below `limit` that its part does not tell, if the others do: its highest ones.
  int low_bits(int64_t limit) const {
    const int all = limit > 0 ? std::bit_width(static_cast<uint64_t>(limit - 1)) : 0;
    return std::max(0, all - std::countr_zero(static_cast<uint64_t>(parts_)));
  }

  // part_of(i): the part of item i, or -1 to leave it out; place(i, at): item i comes to `at`. It is asked
  // twice, the first time of find_part(i), and both must say the same.
  template <class Workers, class FindPart, class PartOf, class Place>
  void run(const Workers& workers, int32_t* table, const FindPart& find_part, const PartOf& part_of,
           const Place& place) {
    starts_ = table;  // [chunks, parts], later the first row holds the parts' beginnings
    std::fill(table, table + table_size(), 0);
    workers.run(chunks_, [&](int64_t chunk) {
      int32_t* counts = table + chunk * parts_;
      for (int64_t i = chunk * kChunk; i < chunk_end(chunk); ++i) {
        const int64_t part = find_part(i);
        if (part >= 0) ++counts[part];
      }
    });
    accumulate(table);
    workers.run(chunks_, [&](int64_t chunk) {
      int32_t* cursors = table + chunk * parts_;
      for (int64_t i = chunk * kChunk; i < chunk_end(chunk); ++i) {
        const int64_t part = part_of(i);
        if (part >= 0) place(i, cursors[part]++);
      }
    });
    restore(table);
  }
  template <class Workers, class PartOf, class Place>
  void run(const Workers& workers, int32_t* table, const PartOf& part_of, const Place& place) {
    run(workers, table, part_of, part_of, place);
  }

 private:
  int64_t chunk_end(int64_t chunk) const { return std::min(n_, (chunk + 1) * kChunk); }

  void accumulate(int32_t* table) {
    int32_t sum = 0;
    for (int64_t part = 0; part < parts_; ++part) {
      for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
        const int32_t count = table[chunk * parts_ + part];
        table[chunk * parts_ + part] = sum;
        sum += count;
      }
    }
    total_ = sum;
  }

  // The last chunk's cursors stand at the parts' ends: the beginnings are those, shifted by one.
  void restore(int32_t* table) const {
    const int32_t* ends = table + (chunks_ - 1) * parts_;
    for (int64_t part = parts_ - 1; part > 0; --part) table[part] = ends[part - 1];
    table[0] = 0;
  }

  int64_t n_;
  int64_t chunks_;
  int64_t parts_;
  int64_t total_ = 0;
  int32_t* starts_ = nullptr;
};

template <class Pool>
class CpuExecutor {
 public:
  static constexpr bool kHasTiles = false;

  explicit CpuExecutor(Pool& pool) : workers_(pool) {}

  std::string failure() const { return {}; }

  // Large results are fresh memory, and tables are read at random: large pages halve the time of
  // both (measured on 10^7 rows of 64 floats, where the system's default is small ones).
  static void prepare_result(void* data, int64_t bytes) {
#if defined(__linux__)
    constexpr uintptr_t kHugePage = uintptr_t{1} << 21;
    const auto begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
    const auto end =
        (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / kHugePage * kHugePage;
    // Advice only: where the kernel does not take it, nothing changes.
    if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)data;
    (void)bytes;
#endif
  }

  void zero(void* data, int64_t bytes) const {
    constexpr int64_t kBlock = int64_t{1} << 22;  // bytes of one task
    const int64_t blocks = (bytes + kBlock - 1) / kBlock;
    workers_.run(blocks, [=](int64_t block) {
      const int64_t begin = block * kBlock;
      memset(static_cast<char*>(data) + begin, 0, static_cast<size_t>(std::min(kBlock, bytes - begin)));
    });
  }

  template <class Step>
  void each(int64_t count, const Step& step) const {
    constexpr int64_t grain = grain_of<Step>();
    const int64_t chunks = (count + grain - 1) / grain;
    workers_.run(
        chunks, [&](int64_t chunk) { run_steps(step, chunk * grain, std::min(count, (chunk + 1) * grain)); });
  }
  template <class Step>
  void each(const CountOnDevice& count, const Step& step) const {
    each(count.value(), step);
  }
  // One after the other: rows would drive the index out of the caches (docs/performance.md).
  template <class First, class Second>
  void each(int64_t count, const First& first, const Second& second) const {
    each(count, first);
    each(count, second);
  }

  // Exclusive prefix sums. Short work beside the steps around it: one thread.
  static int64_t scan_bytes(int64_t) { return 0; }
  template <class Terms>
  void scan(int64_t n, const Terms& terms, int32_t* sums, char*) const {
    int32_t sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      sums[i] = sum;
      sum += terms(i);
    }
  }

  static int64_t group_bytes(int64_t n) {
    return bytes_taken([n](Arena& arena) { GroupScratch(arena, n); });
  }
  void group(Groups& groups, char* memory) const {
    Arena arena(memory);
    const GroupScratch scratch(arena, groups.n);
    Partition partition(groups.n);
    // A part has the targets that agree in all but their lowest bits.
    const int bits = partition.low_bits(groups.limit);
    const uint32_t* targets = groups.targets.current;
    const auto none = static_cast<uint32_t>(groups.limit);
    partition.run(
        workers_, scratch.table,
        [=](int64_t i) { return targets[i] == none ? int64_t{-1} : int64_t{targets[i] >> bits}; },
        [=](int64_t i, int64_t at) {
          scratch.pairs[at] = (uint64_t{targets[i]} << 32) | static_cast<uint64_t>(i);
        });
    const auto put = [items = groups.items.other, sorted = groups.targets.other](int64_t place,
                                                                                 uint64_t pair) {
      items[place] = static_cast<int32_t>(pair & 0xffffffff);
      sorted[place] = static_cast<uint32_t>(pair >> 32);
    };
    workers_.run(partition.parts(), [&](int64_t part) {
      sort_part(scratch, partition.begin_of(part), partition.begin_of(part + 1), bits, put);
    });
    groups.items.turn();
    groups.targets.turn();
    groups.count = partition.total();
  }

  static int64_t list_bytes(int64_t n) {
    return bytes_taken([n](Arena& arena) { ListScratch(arena, n); });
  }
  void list(int64_t n, const Occurrences& batch, char* memory) const {
    Arena arena(memory);
    const ListScratch scratch(arena, n);
    Partition partition(n);
    // A part has the keys that agree in all but their lowest bits.
    const int64_t keys = batch.keys(n);
    const int bits = partition.low_bits(keys);
    partition.run(
        workers_, scratch.table, [=](int64_t i) { return batch.number(i, keys) >> bits; },
        [=](int64_t i, int64_t at) { scratch.items[at] = {batch.inverse[i], static_cast<int32_t>(i)}; });
    workers_.run(partition.parts(), [&](int64_t part) {
      const int64_t end = std::min(keys, (part + 1) << bits);
      list_part(scratch, partition, part, part << bits, end, batch);
    });
    std::fill(batch.offsets + keys, batch.offsets + n + 1, static_cast<int32_t>(partition.total()));
    std::fill(batch.order + partition.total(), batch.order + n, -1);
  }

  static int64_t unique_bytes(int64_t n) {
    return bytes_taken([n](Arena& arena) { UniqueScratch(arena, n); });
  }
  void unique(int64_t n, const Words* keys, Mask valid, const UniqueKeys& out, char* memory) const {
    Arena arena(memory);
    const UniqueScratch scratch(arena, n);
    Partition partition(n);
    const int shift = 64 - std::countr_zero(static_cast<uint64_t>(partition.parts()));
    // A mask and keys may be memory of NumPy, which somebody fills anew while they are read: each is read
    // once, so that such a batch is a wrong one and no more.
    partition.run(
        workers_, scratch.table,
        [=](int64_t i) -> int64_t {
          const bool is_valid = valid[i];
          const Key key = keys[i].value();
          const int64_t part = shift == 64 ? 0 : static_cast<int64_t>(hash_of(key) >> shift);
          scratch.keys[i] = key;
          scratch.parts[i] = static_cast<int16_t>(is_valid ? part : -1);
          if (!is_valid) out.inverse[i] = -1;
          return is_valid ? part : -1;
        },
        [=](int64_t i) -> int64_t { return scratch.parts[i]; },
        [=](int64_t i, int64_t at) {
          scratch.items[at].key = scratch.keys[i];
          scratch.items[at].position = static_cast<int32_t>(i);
        });
    workers_.run(partition.parts(), [&](int64_t part) {
      find_firsts(scratch, partition.begin_of(part), partition.begin_of(part + 1), out);
    });
    number_firsts(n, scratch, out);
    if (*out.count == partition.total()) return;
    workers_.run(partition.parts(), [&](int64_t part) {
      number_others(scratch, partition.begin_of(part), partition.begin_of(part + 1), out);
    });
  }

 private:
  struct GroupScratch {
    GroupScratch(Arena& arena, int64_t n)
        : table(arena.take<int32_t>(Partition(n).table_size())),
          pairs(arena.take<uint64_t>(n)),
          others(arena.take<uint64_t>(n)) {}
    int32_t* table;
    uint64_t* pairs;  // (target, item)
    uint64_t* others;  // room for them in another order, where it takes several digits
  };

  // By the lowest bits of the target, equal ones as they stand: a radix sort. put(place, pair): that is where
  // the pair belongs.
  template <class Put>
  static void sort_part(const GroupScratch& scratch, int64_t begin, int64_t end, int bits, const Put& put) {
    if (begin == end) return;
    constexpr int kMostBits = 12;  // of a digit: counters in 16 KiB
    uint64_t* from = scratch.pairs;
    uint64_t* to = scratch.others;
    const int digits = std::max(1, (bits + kMostBits - 1) / kMostBits);
    for (int digit = 0; digit < digits; ++digit) {
      const int shift = digit * bits / digits;
      const uint32_t values = uint32_t{1} << ((digit + 1) * bits / digits - shift);
      const auto value_of = [=](uint64_t pair) {
        return static_cast<uint32_t>(pair >> (32 + shift)) & (values - 1);
      };
      int32_t cursors[1 << kMostBits];
      std::fill(cursors, cursors + values, 0);
      for (int64_t place = begin; place < end; ++place) ++cursors[value_of(from[place])];
      std::exclusive_scan(cursors, cursors + values, cursors, static_cast<int32_t>(begin));
      if (digit + 1 == digits) {
        for (int64_t i = begin; i < end; ++i) put(cursors[value_of(from[i])]++, from[i]);
      } else {
        for (int64_t i = begin; i < end; ++i) to[cursors[value_of(from[i])]++] = from[i];
        std::swap(from, to);
      }
    }
  }

  // What the parts of `list` hold, in order of position.
  struct Occurrence {
    int32_t number;
    int32_t position;
  };

  struct ListScratch {
    ListScratch(Arena& arena, int64_t n)
        : table(arena.take<int32_t>(Partition(n).table_size())), items(arena.take<Occurrence>(n)) {}
    int32_t* table;
    Occurrence* items;
  };

  // The keys from `first` to `end` - 1. Their offsets count at first, and are cursors then.
  static void list_part(const ListScratch& scratch, const Partition& partition, int64_t part, int64_t first,
                        int64_t end, const Occurrences& batch) {
    if (first >= end) return;
    const auto begin = static_cast<int32_t>(partition.begin_of(part));
    const Occurrence* items = scratch.items + begin;
    const int64_t count = partition.begin_of(part + 1) - begin;
    std::fill(batch.offsets + first, batch.offsets + end, 0);
    for (int64_t i = 0; i < count; ++i) ++batch.offsets[items[i].number];
    std::exclusive_scan(batch.offsets + first, batch.offsets + end, batch.offsets + first, begin);
    for (int64_t i = 0; i < count; ++i) batch.order[batch.offsets[items[i].number]++] = items[i].position;
    // Each stands where the next key's begin.
    std::copy_backward(batch.offsets + first, batch.offsets + end - 1, batch.offsets + end);
    batch.offsets[first] = begin;
  }

  // What the parts of `unique` hold, in order of position.
  struct Item {
    Key key;
    int32_t position;
    int32_t first;  // the item of the key's first occurrence; there the complement of the last position

    bool is_first() const { return first < 0; }
  };

  struct UniqueScratch {
    UniqueScratch(Arena& arena, int64_t n)
        : table(arena.take<int32_t>(Partition(n).table_size())),
          items(arena.take<Item>(n)),
          keys(arena.take<Key>(n)),
          parts(arena.take<int16_t>(n)),
          firsts(arena.take<int32_t>(Partition(n).chunks())) {}
    int32_t* table;
    Item* items;
    Key* keys;  // of each position
    int16_t* parts;  // likewise, -1 where it is not valid
    int32_t* firsts;  // of each chunk: first occurrences before it
  };

  static constexpr int64_t kFar = 24;  // indices ahead: a few hundred nanoseconds, one miss of memory
  static constexpr int64_t kNear = 12;  // half of that
  // Of long steps: several indices' lines at once, whose addresses are translated side by side. One by one
  // the next one's would not fit into the processor's window beside a step (docs/performance.md).
  static constexpr int64_t kFarOfLong = 8;
  static constexpr int64_t kLinesAtOnce = 16;
  static constexpr int64_t kMostAtOnce = 4;  // indices

  template <class Step>
  static constexpr int64_t grain_of() {
    if constexpr (requires { Step::kGrain; }) return Step::kGrain;
    return 2048;  // indices of one task: some tens of microseconds
  }

  template <class Step>
  static void run_steps(const Step& step, int64_t begin, int64_t end) {
    const auto prefetch_far = [&](int64_t i) HKV_INLINE {
      if constexpr (requires { step.prefetch_far(i); }) {
        if (i + kFar < end) step.prefetch_far(i + kFar);
      }
    };
    if constexpr (requires { step.look_ahead(begin); }) {
      constexpr int64_t kRing = std::bit_ceil(static_cast<uint64_t>(kNear + 1));
      decltype(step.look_ahead(begin)) seen[kRing];
      for (int64_t i = begin; i < std::min(begin + kNear, end); ++i) seen[i % kRing] = step.look_ahead(i);
      for (int64_t i = begin; i < end; ++i) {
        prefetch_far(i);
        if (i + kNear < end) seen[(i + kNear) % kRing] = step.look_ahead(i + kNear);
        step(SerialGroup{}, i, seen[i % kRing]);
      }
    } else if constexpr (requires { step.lines_ahead(); }) {
      const int64_t block = std::clamp(kLinesAtOnce / step.lines_ahead(), int64_t{1}, kMostAtOnce);
      for (int64_t first = begin; first < end; first += block) {
        const int64_t last = std::min(first + block, end);
        for (int64_t i = first + kFarOfLong; i < std::min(last + kFarOfLong, end); ++i) step.prefetch_far(i);
        for (int64_t i = first; i < last; ++i) step(SerialGroup{}, i);
      }
    } else {
      for (int64_t i = begin; i < end; ++i) {
        prefetch_far(i);
        step(SerialGroup{}, i);
      }
    }
  }

  // An open-addressing table over the items of one part, in order of position. Of positions where a key
  // occurs first, `inverse` holds its last one until keys have numbers; of others -1.
  static void find_firsts(const UniqueScratch& scratch, int64_t begin, int64_t end, const UniqueKeys& out) {
    if (begin == end) return;
    constexpr int64_t kCells = 4;  // of an item, or two at least
    constexpr int64_t kLocalCells = kCells * 2 * Partition::kPartItems;
    int32_t local[kLocalCells];  // near, and written again and again
    // A large part's is where the distinct keys are written afterwards.
    static_assert(sizeof(Words) == 2 * sizeof(int32_t));
    auto* elsewhere = reinterpret_cast<int32_t*>(out.unique_keys + begin);
    const bool is_local = 2 * (end - begin) <= kLocalCells;
    const int64_t cells = is_local ? std::min(kLocalCells, kCells * (end - begin)) : 2 * (end - begin);
    int32_t* table = is_local ? local : elsewhere;
    int32_t* lasts = out.inverse;
    Item* items = scratch.items;
    std::fill(table, table + cells, -1);
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t hash = hash_of(items[i].key) & 0xffffffff;
      auto cell = static_cast<int64_t>(hash * static_cast<uint64_t>(cells) >> 32);
      while (table[cell] >= 0 && items[table[cell]].key != items[i].key) {
        if (++cell == cells) cell = 0;
      }
      if (table[cell] < 0) table[cell] = static_cast<int32_t>(i);
      items[i].first = table[cell];
      items[table[cell]].first = ~items[i].position;
    }
    for (int64_t i = begin; i < end; ++i) {
      if (i + kFar < end) prefetch<kToWrite>(lasts + items[i + kFar].position);
      lasts[items[i].position] = items[i].is_first() ? ~items[i].first : -1;
    }
  }

  // Numbers the distinct keys in order of first occurrence; a second pass over chunks knows how many came
  // before each. Until then `inverse` holds what find_firsts says of valid positions, and -1 of others.
  void number_firsts(int64_t n, const UniqueScratch& scratch, const UniqueKeys& out) const {
    const int64_t chunks = (n + Partition::kChunk - 1) / Partition::kChunk;
    int32_t* before = scratch.firsts;
    const auto end_of = [=](int64_t chunk) { return std::min(n, (chunk + 1) * Partition::kChunk); };
    const auto is_first = [=](int64_t i) { return out.inverse[i] >= 0; };
    workers_.run(chunks, [&](int64_t chunk) {
      int32_t firsts = 0;
      for (int64_t i = chunk * Partition::kChunk; i < end_of(chunk); ++i) firsts += is_first(i) ? 1 : 0;
      before[chunk] = firsts;
    });
    int32_t distinct = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      std::swap(distinct, before[chunk]);
      distinct += before[chunk];
    }
    workers_.run(chunks, [&](int64_t chunk) {
      int32_t number = before[chunk];
      for (int64_t i = chunk * Partition::kChunk; i < end_of(chunk); ++i) {
        if (i >= distinct) out.set_none(i);
        const bool is_numbered = is_first(i);
        if (is_numbered) out.set(number, Words::of(scratch.keys[i]), i, out.inverse[i]);
        out.inverse[i] = is_numbered ? number++ : -1;
      }
    });
    *out.count = distinct;
  }

  // The positions where a key has occurred before.
  static void number_others(const UniqueScratch& scratch, int64_t begin, int64_t end, const UniqueKeys& out) {
    const Item* items = scratch.items;
    const auto number_of = [&](int64_t i) -> int32_t& { return out.inverse[items[i].position]; };
    for (int64_t i = begin; i < end; ++i) {
      if (i + kFar < end && !items[i + kFar].is_first()) {
        prefetch(&number_of(items[i + kFar].first));
        prefetch<kToWrite>(&number_of(i + kFar));
      }
      if (!items[i].is_first()) number_of(i) = number_of(items[i].first);
    }
  }

  Workers<Pool> workers_;
};

}  // namespace hkv
