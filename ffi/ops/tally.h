// How often each number below `kinds` occurs in a batch; others are not counted. A read.
#pragma once

#include "ops/operation.h"

namespace hkv {

struct Tally {
  static constexpr const char* kName = "tally";
  static constexpr bool kPerPosition = false;

  int64_t kinds = 0;
  Array<int32_t> numbers;
  Array<int32_t> counts;

  template <class Binder>
  void describe(Binder& binder) {
    binder.attribute("kinds", kinds);
    binder.in("numbers", numbers, "n");
    binder.out("counts", counts, "kinds");
  }

  // A group counts a chunk. Numbers are to come in runs, of few kinds at a time: each member keeps one kind
  // in each of some places and adds it where all add when another needs the place, or at the end, for all
  // members at once. Without order members would wait for each other where they add.
  struct Step {
    static constexpr int kGroup = 8;
    static constexpr int64_t kGrain = 4;
    int64_t chunk;  // numbers
    int64_t n;
    int64_t kinds;
    const int32_t* numbers;
    int32_t* counts;

    template <Group G>
    HKV_HOST_DEVICE void operator()(const G& group, int64_t index) const {
      constexpr int kAtOnce = 4;
      const int64_t begin = index * chunk;
      const int64_t end = begin + chunk < n ? begin + chunk : n;
      Kept kept[kKept<G>];
      HKV_ROLLED for (int64_t i = begin + group.rank(); i < end; i += kAtOnce * group.size()) {
        int32_t own[kAtOnce];
        for (int k = 0; k < kAtOnce; ++k) {
          const int64_t further = i + k * group.size();
          own[k] = further < end ? numbers[further] : kNone;
        }
        for (int k = 0; k < kAtOnce; ++k) {
          if (own[k] >= 0 && own[k] < kinds) count<G>(kept, own[k]);
        }
      }
      for (const Kept& each : kept) add_together(group, each);
    }

   private:
    static constexpr int32_t kNone = -1;
    struct Kept {
      int32_t number = kNone;
      int32_t times = 0;
    };
    // In a member's registers, or near a thread.
    template <Group G>
    static constexpr int kKept = G::size() > 1 ? 4 : 64;

    template <Group G>
    HKV_HOST_DEVICE void count(Kept (&kept)[kKept<G>], int32_t number) const {
      const int place = number & (kKept<G> - 1);
      if constexpr (G::size() == 1) {
        count(kept[place], number);
      } else {
        for (int k = 0; k < kKept<G>; ++k) {  // registers have no index
          if (k == place) count(kept[k], number);
        }
      }
    }

    HKV_HOST_DEVICE void count(Kept& kept, int32_t number) const {
      if (kept.number != number) {
        add(kept);
        kept = {number, 0};
      }
      ++kept.times;
    }

    HKV_HOST_DEVICE void add(const Kept& kept) const {
      if (kept.times > 0) atomic_add(counts + kept.number, kept.times);
    }

    template <Group G>
    HKV_HOST_DEVICE void add_together(const G& group, const Kept& own) const {
      const uint32_t having = group.ballot(own.times > 0);
      if (having == 0) return;
      const int first = count_trailing_zeros(having);
      const int32_t number = group.broadcast(own.number, first);
      if (group.ballot(own.times > 0 && own.number != number) != 0) return add(own);
      const auto times = static_cast<int32_t>(
          group.saturating_sum(group.size(), [&](int64_t) { return static_cast<uint64_t>(own.times); }));
      if (group.rank() == first) add({number, times});
    }
  };

  template <class Executor>
  void run(Executor& executor) const {
    constexpr int64_t kChunk = Executor::kHasTiles ? 256 : 4096;
    executor.zero(counts.data, kinds * static_cast<int64_t>(sizeof(int32_t)));
    executor.each((numbers.rows + kChunk - 1) / kChunk,
                  Step{kChunk, numbers.rows, kinds, numbers.data, counts.data});
  }
};

}  // namespace hkv
