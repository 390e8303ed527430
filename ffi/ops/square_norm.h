// The squared norm of the sums of a batch's gradients, of the keys that have a row (docs/semantics.md,
// section 8): the sums themselves are nowhere.
#pragma once

#include "ops/combine_rows.h"

namespace hkv {

struct SquareNorm {
  static constexpr const char* kName = "square_norm";
  static constexpr bool kPerPosition = false;
  static constexpr int64_t kChunk = SumTerms::kChunk;

  Array<Slot> slots;
  SumTree gradients;
  Array<float> norm;
  float* squares = nullptr;  // of keys, and behind them of each level's chunks

  template <class Binder>
  void describe(Binder& binder) {
    binder.in("slots", slots, "n");
    gradients.describe(binder, "gradients", "n+1");
    binder.out("norm", norm, "1");
  }

  struct OfKey {
    static constexpr int kGroup = 8;
    static constexpr int64_t kGrain = 256;
    static constexpr int kPart = 4;  // columns: what one member of a tile reads at once
    SumTerms terms;
    const int32_t* count;
    const Slot* slots;
    float* squares;

    template <Group G>
    HKV_HOST_DEVICE void operator()(const G& group, int64_t key) const {
      float square = 0.0f;
      if (key < *count && slots[key] >= 0) {
        const TermSpan span = terms.last_terms(key);
        square = terms.square_of<kPart>(group, key, span, [](const auto&) {});
      }
      if (group.rank() == 0) squares[key] = square;
    }
  };

  // Two levels at once: a chunk of chunks.
  struct OfChunks {
    static constexpr int kGroup = 8;
    const float* terms;
    int64_t count;
    float* sums;

    template <Group G>
    HKV_HOST_DEVICE void operator()(const G& group, int64_t i) const {
      float total = 0.0f;
      for (int64_t chunk = 0; chunk < kChunk; chunk += group.size()) {
        const float own = sum_of((i * kChunk + chunk + group.rank()) * kChunk);
        for (int member = 0; member < group.size(); ++member) {
          total = total + bit_cast<float>(group.broadcast(bit_cast<int>(own), member));
        }
      }
      if (group.rank() == 0) sums[i] = same_nan(total);
    }

   private:
    // No square is below 0, so that zeros before and behind them change nothing.
    HKV_HOST_DEVICE float sum_of(int64_t first) const {
      float sum = 0.0f;
      for (int64_t k = first; k < first + kChunk; ++k) sum = sum + (k < count ? terms[k] : 0.0f);
      return sum;
    }
  };

  template <class Executor>
  void reserve(Arena& arena) {
    gradients.reserve<Executor>(arena);
    int64_t places = slots.rows;
    for (int64_t count = places; count > kChunk * kChunk; places += count) count = chunks_of(count);
    squares = arena.take<float>(places);
  }

  template <class Executor>
  void run(Executor& executor) const {
    gradients.run(executor);
    executor.each(slots.rows, OfKey{gradients.terms(), gradients.count.data, slots.data, squares});
    float* terms = squares;
    int64_t count = slots.rows;
    for (; count > kChunk * kChunk; terms += count, count = chunks_of(count)) {
      executor.each(chunks_of(count), OfChunks{terms, count, terms + count});
    }
    executor.each(1, OfChunks{terms, count, norm.data});
  }

 private:
  static int64_t chunks_of(int64_t terms) { return (terms + kChunk * kChunk - 1) / (kChunk * kChunk); }
};

}  // namespace hkv
