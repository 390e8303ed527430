// The sum of the rows of each bag of positions (section 8), in float32. A read: the rows of the
// positions go through registers, and a bag's sum is all that is written.
#pragma once

#include "ops/gather_rows.h"

namespace hkv {

// The tree of section 8 over terms that come one by one. A level keeps the sum of its open chunk, and
// a chunk that is full is a term of the level above.
template <int kBlock>
class TreeSum {
 public:
  HKV_HOST_DEVICE int64_t terms() const { return terms_; }

  HKV_HOST_DEVICE void add(const float (&term)[kBlock]) {
    append(open_, terms_, term);
    ++terms_;
    if (terms_ % kChunk == 0) carry();
  }

  // The sum of all terms, of which there is one at least.
  HKV_HOST_DEVICE void finish(float (&sum)[kBlock]) const {
    bool has_rest = terms_ % kChunk != 0;  // what is left open at the levels below is a last term
    assign(sum, open_);
    if (terms_ <= kChunk) return;
    for (int level = 1;; ++level) {
      const float (&own)[kBlock] = upper_[level - 1];
      const bool is_open = terms_of(level) % kChunk != 0;
      const bool is_last = ((terms_ - 1) >> (kShift * (level + 1))) == 0;
      if (has_rest && is_open) {
        for (int c = 0; c < kBlock; ++c) sum[c] = own[c] + sum[c];
      } else if (!has_rest && (is_open || is_last)) {
        assign(sum, own);
      }
      if (is_last) return;
      has_rest = has_rest || is_open;
    }
  }

 private:
  static constexpr int kShift = 5;
  static constexpr int64_t kChunk = int64_t{1} << kShift;
  static constexpr int kUpperLevels = 6;  // 32^7 terms are more than an int32 counts

  HKV_HOST_DEVICE int64_t terms_of(int level) const { return terms_ >> (kShift * level); }

  static HKV_HOST_DEVICE void assign(float (&to)[kBlock], const float (&from)[kBlock]) {
    for (int c = 0; c < kBlock; ++c) to[c] = from[c];
  }

  // Term `number` of a level comes to its sum.
  static HKV_HOST_DEVICE void append(float (&sum)[kBlock], int64_t number, const float (&term)[kBlock]) {
    if (number % kChunk == 0) return assign(sum, term);
    for (int c = 0; c < kBlock; ++c) sum[c] = sum[c] + term[c];
  }

  HKV_HOST_DEVICE void carry() {
    append(upper_[0], terms_of(1) - 1, open_);
    for (int level = 2; level <= kUpperLevels && terms_of(level - 1) % kChunk == 0; ++level) {
      append(upper_[level - 1], terms_of(level) - 1, upper_[level - 2]);
    }
  }

  int64_t terms_ = 0;
  float open_[kBlock] = {};             // of level 0, apart from the others: it stays in registers
  float upper_[kUpperLevels][kBlock];  // written before they are read, by the first term of a chunk
};

struct PoolRows {
  static constexpr const char* kName = "pool_rows";
  static constexpr bool kPerPosition = false;

  InitializerAttributes init;
  Array<uint32_t> clock;
  RowsView values;
  Array<Slot> slots;
  Array<int32_t> splits;
  Array<float> weights;
  Array<Words> keys;
  Array<bool> initial;
  RowsView pooled;

  template <class Binder>
  void describe(Binder& binder) {
    init.describe(binder);
    binder.inout("clock", clock, "2");
    binder.in_floats("values", values, "S ...");
    binder.in("slots", slots, "n");
    binder.in("splits", splits, "b+1");
    binder.in("weights", weights, "n?");
    binder.in("keys", keys, "n? 2");
    binder.in("initial", initial, "n?");
    binder.out_float32("pooled", pooled, "b ...");
  }

  struct Step {
    static constexpr int kGroup = 8;
    static constexpr int kBlocks = 3;  // of a multiprocessor: a tree takes registers
    static constexpr int64_t kGrain = 64;  // bags of one task, of some ten rows each
    Initializer initializer;
    RowsView values;
    int64_t positions;
    const Slot* slots;
    const int32_t* splits;
    const float* weights;  // null: all are one
    const Words* keys;
    const bool* initial;  // null: never
    RowsView pooled;

    template <Group G>
    HKV_HOST_DEVICE void operator()(const G& group, int64_t bag) const {
      const int64_t begin = clamp(splits[bag]);
      const int64_t end = clamp(splits[bag + 1]);
      if (end - begin == 1 && weights == nullptr) return copy(group, begin, bag);
      for_each_block<G>(group, pooled.width, [&]<int kBlock>(int64_t column, int columns) {
        TreeSum<kBlock> tree;
        for (int64_t position = begin; position < end; ++position) {
          if (column == 0) prefetch_ahead(position);
          float term[kBlock];
          if (!load(position, column, columns, term)) continue;
          if (weights != nullptr) {
            for (float& element : term) element = weights[position] * element;
          }
          tree.add(term);
        }
        float sum[kBlock] = {};  // of an empty bag
        if (tree.terms() > 0) tree.finish(sum);
        if (weights != nullptr || tree.terms() > 1) {  // else it is a copy
          for (float& element : sum) element = same_nan(element);
        }
        store_block(RowType::kFloat32, pooled.row(bag), column, columns, sum);
      });
    }

   private:
    // What bags of one position without a weight are.
    template <Group G>
    HKV_HOST_DEVICE void copy(const G& group, int64_t position, int64_t bag) const {
      if (group.rank() == 0) prefetch_ahead(position);
      for_each_block<G>(group, pooled.width, [&]<int kBlock>(int64_t column, int columns) {
        float row[kBlock];
        if (!load(position, column, columns, row)) {
          for (float& element : row) element = 0.0f;
        }
        store_block(RowType::kFloat32, pooled.row(bag), column, columns, row);
      });
    }

    // Splits come from data: wrong ones make wrong sums, but nothing is read outside the batch.
    HKV_HOST_DEVICE int64_t clamp(int64_t split) const {
      const int64_t at_least_zero = split < 0 ? 0 : split;
      return at_least_zero < positions ? at_least_zero : positions;
    }

    // Bags differ in length, so rows are fetched by position, into the bags that follow.
    HKV_HOST_DEVICE void prefetch_ahead(int64_t position) const {
      constexpr int64_t kFar = 24;  // as far ahead as the CPU executor does it
      if (position + kFar < positions) prefetch_row(values, slots[position + kFar]);
    }

    // Elements of the row of a position; whether it has one.
    template <int kBlock>
    HKV_HOST_DEVICE bool load(int64_t position, int64_t column, int columns, float (&term)[kBlock]) const {
      const Slot slot = slots[position];
      if (slot >= 0 && slot < values.count) {
        load_block(values.type, values.row(slot), column, columns, term);
        return true;
      }
      if (initial == nullptr || !initial[position]) return false;
      const uint64_t base = initializer.base(keys[position].value());
      for (int c = 0; c < kBlock; ++c) {
        term[c] = c < columns ? rounded(values.type, initializer.element(base, column + c)) : 0.0f;
      }
      return true;
    }
  };

  template <class Executor>
  void run(Executor& executor) const {
    const bool* mask = initial.rows > 0 && keys.rows > 0 ? initial.data : nullptr;
    const float* factors = weights.rows > 0 ? weights.data : nullptr;
    executor.each(pooled.count, Step{init.initializer(), values, slots.rows, slots.data, splits.data, factors,
                                     keys.data, mask, pooled});
  }
};

}  // namespace hkv
