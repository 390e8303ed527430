// The sum of the rows of each bag of positions (section 8), in float32, then rounded to the type asked for. A
// read: the rows of the positions go through registers, and a bag's sum is all that is written.
#pragma once

#include "ops/gather_rows.h"

namespace hkv {

// The tree of section 8 over terms that come one by one. A level keeps the sum of its open chunk, and a chunk
// that is full is a term of the level above. Sum is where level 0 is kept, and what comes of all: a block of
// its own, or memory.
template <int kBlock, class Sum>
class TreeSum {
 public:
  HKV_HOST_DEVICE explicit TreeSum(Sum sum) : sum_(sum) {}

  HKV_HOST_DEVICE int32_t terms() const { return terms_; }
  HKV_HOST_DEVICE Sum& sum() { return sum_; }

  HKV_HOST_DEVICE void add(const float (&term)[kBlock]) {
    append(sum_, terms_, term);
    ++terms_;
    if (terms_ % kChunk == 0) carry();
  }

  HKV_HOST_DEVICE void finish() {
    if (terms_ == 0) {
      for (int c = 0; c < kBlock; ++c) sum_[c] = 0.0f;
    } else if (terms_ > kChunk) {
      add_levels();
    }
  }

 private:
  static constexpr int kShift = 5;
  static constexpr int32_t kChunk = 1 << kShift;
  static constexpr int kUpperLevels = 6;  // 32^7 terms are more than an int32 counts

  HKV_HOST_DEVICE int32_t terms_of(int level) const {
    return static_cast<int32_t>(int64_t{terms_} >> (kShift * level));
  }

  template <class To, class From>
  static HKV_HOST_DEVICE void assign(To& to, const From& from) {
    for (int c = 0; c < kBlock; ++c) to[c] = from[c];
  }

  // Term `number` of a level comes to its sum; nothing is added to the first, not even zero.
  template <class To, class From>
  static HKV_HOST_DEVICE void append(To& sum, int32_t number, const From& term) {
    if (number % kChunk == 0) return assign(sum, term);
    for (int c = 0; c < kBlock; ++c) sum[c] = sum[c] + term[c];
  }

  HKV_HOST_DEVICE void carry() {
    append(upper_[0], terms_of(1) - 1, sum_);
    for (int level = 2; level <= kUpperLevels && terms_of(level - 1) % kChunk == 0; ++level) {
      append(upper_[level - 1], terms_of(level) - 1, upper_[level - 2]);
    }
  }

  HKV_HOST_DEVICE void add_levels() {
    bool has_rest = terms_ % kChunk != 0;  // what is left open at the levels below is a last term
    for (int level = 1;; ++level) {
      const float (&own)[kBlock] = upper_[level - 1];
      const bool is_open = terms_of(level) % kChunk != 0;
      const bool is_last = (int64_t{terms_ - 1} >> (kShift * (level + 1))) == 0;
      if (has_rest && is_open) {
        for (int c = 0; c < kBlock; ++c) sum_[c] = own[c] + sum_[c];
      } else if (!has_rest && (is_open || is_last)) {
        assign(sum_, own);
      }
      if (is_last) return;
      has_rest = has_rest || is_open;
    }
  }

  int32_t terms_ = 0;  // positions are int32 (row splits)
  Sum sum_;
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
  Array<int32_t> ends;  // of bags with padding behind them; none: each bag ends where the next begins
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
    binder.in("ends", ends, "b?");
    binder.in("weights", weights, "n?");
    binder.in("keys", keys, "n? 2");
    binder.in("initial", initial, "n?");
    binder.out_cast("pooled", pooled, "b ...");
  }

  // What the steps share.
  struct State {
    Initializer initializer;
    RowsView values;
    int64_t positions;
    const Slot* slots;
    const int32_t* splits;
    const int32_t* ends;  // null: the splits that follow
    const float* weights;  // null: all are one
    const Words* keys;  // null: there are no first rows
    Mask initial;
    RowsView pooled;

    // Splits come from data: wrong ones make wrong sums, but nothing is read outside the batch.
    HKV_HOST_DEVICE int64_t within(int64_t split) const {
      const int64_t from_first = split < 0 ? 0 : split;
      return from_first < positions ? from_first : positions;
    }

    HKV_HOST_DEVICE int64_t begin_of(int64_t bag) const { return within(splits[bag]); }

    HKV_HOST_DEVICE int64_t end_of(int64_t bag) const {
      return within(ends == nullptr ? splits[bag + 1] : ends[bag]);
    }

    HKV_HOST_DEVICE bool has_row(Slot slot) const { return slot >= 0 && slot < values.count; }

    // Whether a sum of one row is the row.
    HKV_HOST_DEVICE bool copies_rows() const {
      return weights == nullptr && (values.type == RowType::kFloat32 || values.type == pooled.type);
    }

    // The slot of a bag that is one row as it is, or none.
    HKV_HOST_DEVICE Slot only_slot(int64_t bag) const {
      if (!copies_rows()) return kNoSlot;
      const int64_t begin = begin_of(bag);
      if (end_of(bag) - begin != 1) return kNoSlot;
      return has_row(slots[begin]) ? slots[begin] : kNoSlot;
    }
  };

  // Bags that are one row as it is: many of them side by side.
  template <bool kCasts>
  struct Only {
    static constexpr int kGroup = 8;
    static constexpr bool kOwnIndex = true;
    static constexpr int64_t kGrain = 256;
    State state;

    HKV_HOST_DEVICE void prefetch_far(int64_t bag) const {
      const int64_t begin = state.begin_of(bag);
      if (begin < state.positions) prefetch_row(state.values, state.slots[begin]);
    }

    template <Group G>
    HKV_HOST_DEVICE void operator()(const G& group, int64_t bag) const {
      const bool exists = bag < state.pooled.count;
      const Slot slot = exists ? state.only_slot(bag) : kNoSlot;
      copy_row_each<kCasts>(group, state.pooled, static_cast<Slot>(bag), state.values, slot);
    }
  };

  struct Copy : Only<false> {};
  struct Cast : Only<true> {};

  // All others.
  struct Sum {
    static constexpr int kGroup = 8;
    static constexpr int kBlocks = 3;  // of a multiprocessor: a tree takes registers
    static constexpr int64_t kGrain = 64;  // bags of one task, of some ten rows each
    State state;

    template <Group G>
    HKV_HOST_DEVICE void operator()(const G& group, int64_t bag) const {
      if (state.only_slot(bag) < 0) add_up(group, bag);
    }

    template <Group G>
    HKV_HOST_DEVICE void add_up(const G& group, int64_t bag) const {
      const int64_t begin = state.begin_of(bag);
      const int64_t end = state.end_of(bag);
      const RowsView& pooled = state.pooled;
      for_each_block<G>(group, pooled.width, [&]<int kBlock>(int64_t column, int columns) {
        if constexpr (G::size() == 1) {
          if (columns == kBlock) {  // compilers make vectors of sums in memory
            float held[kBlock];
            const bool is_cast = pooled.type != RowType::kFloat32;
            TreeSum<kBlock, float*> in_memory(is_cast ? held
                                                      : reinterpret_cast<float*>(pooled.row(bag)) + column);
            sum(begin, end, column, columns, in_memory);
            if (is_cast) store_block(pooled.type, pooled.row(bag), column, columns, held);
            return;
          }
        }
        TreeSum<kBlock, Block<kBlock>> tree({});
        sum(begin, end, column, columns, tree);
        store_block(pooled.type, pooled.row(bag), column, columns, tree.sum().elements);
      });
    }

   private:
    template <int kBlock>
    struct Block {
      float elements[kBlock] = {};

      HKV_HOST_DEVICE float& operator[](int c) { return elements[c]; }
      HKV_HOST_DEVICE float operator[](int c) const { return elements[c]; }
    };

    // Elements column to column + columns - 1 of a bag's sum. A tile asks for some rows before it adds the
    // first.
    template <int kBlock, class Own>
    HKV_HOST_DEVICE void sum(int64_t begin, int64_t end, int64_t column, int columns,
                             TreeSum<kBlock, Own>& tree) const {
      constexpr int kAhead = kRowsAhead<kBlock>;
      HKV_ROLLED for (int64_t first = begin; first < end; first += kAhead) {
        if (column == 0) prefetch_ahead(first);
        Slot own[kAhead];
        bool are_rows = kAhead > 1 && columns == kBlock;
        for (int k = 0; k < kAhead; ++k) own[k] = first + k < end ? state.slots[first + k] : kNoSlot;
        for (int k = 0; k < kAhead; ++k) are_rows = are_rows && (first + k >= end || state.has_row(own[k]));
        if (are_rows) {
          add_rows(first, own, column, tree);
        } else {
          HKV_ROLLED for (int64_t i = first; i < end && i < first + kAhead; ++i)
              add(i, column, columns, tree);
        }
      }
      tree.finish();
      if (state.weights == nullptr && tree.terms() <= 1) return;  // a copy, or nothing
      for (int c = 0; c < kBlock; ++c) tree.sum()[c] = same_nan(tree.sum()[c]);
    }

    // Whole blocks of the rows of some positions; those behind the bag's end have no slot.
    template <int kAhead, int kBlock, class Own>
    HKV_HOST_DEVICE void add_rows(int64_t first, const Slot (&slots)[kAhead], int64_t column,
                                  TreeSum<kBlock, Own>& tree) const {
      const RowsView& values = state.values;
      RawBlock<kBlock> raw[kAhead];
      for (int k = 0; k < kAhead; ++k) {
        if (slots[k] >= 0) raw[k].load(values.type, values.row(slots[k]), column);
      }
      HKV_UNROLLED for (int k = 0; k < kAhead; ++k) {
        if (slots[k] < 0) continue;
        float term[kBlock];
        raw[k].decode(values.type, term);
        add_weighted(first + k, term, tree);
      }
    }

    // What a position adds, if anything.
    template <int kBlock, class Own>
    HKV_HOST_DEVICE void add(int64_t position, int64_t column, int columns,
                             TreeSum<kBlock, Own>& tree) const {
      const RowsView& values = state.values;
      const Slot slot = state.slots[position];
      float term[kBlock];
      if (state.has_row(slot)) {
        load_block(values.type, values.row(slot), column, columns, term);
      } else if (state.keys != nullptr && state.initial[position]) {
        state.initializer.elements(state.initializer.base(state.keys[position].value()), column, columns,
                                   term);
        for (int c = 0; c < kBlock; ++c) term[c] = c < columns ? rounded(values.type, term[c]) : 0.0f;
      } else {
        return;
      }
      add_weighted(position, term, tree);
    }

    template <int kBlock, class Own>
    HKV_HOST_DEVICE void add_weighted(int64_t position, float (&term)[kBlock],
                                      TreeSum<kBlock, Own>& tree) const {
      if (state.weights != nullptr) {
        for (float& element : term) element = state.weights[position] * element;
      }
      tree.add(term);
    }

    // Bags differ in length, so rows are fetched by position, into the bags that follow.
    HKV_HOST_DEVICE void prefetch_ahead(int64_t position) const {
      constexpr int64_t kFar = 24;  // as far ahead as the CPU executor does it
      if (position + kFar < state.positions) prefetch_row(state.values, state.slots[position + kFar]);
    }
  };

  // All others, where they are few: a member looks at a bag of its own, the tile sums those that are left.
  struct SumLeft {
    static constexpr int kGroup = Sum::kGroup;
    static constexpr bool kOwnIndex = true;
    static constexpr int kBlocks = Sum::kBlocks;
    static constexpr int64_t kGrain = Sum::kGrain;
    Sum sum;

    template <Group G>
    HKV_HOST_DEVICE void operator()(const G& group, int64_t bag) const {
      const bool is_left = bag < sum.state.pooled.count && sum.state.only_slot(bag) < 0;
      const int64_t first = bag - group.rank();
      for_each_member(group, is_left, [&](int member) { sum.add_up(group, first + member); });
    }
  };

  template <class Executor>
  void run(Executor& executor) const {
    const State state{init.initializer(),
                      values,
                      slots.rows,
                      slots.data,
                      splits.data,
                      ends.data_or_null(),
                      weights.data_or_null(),
                      keys.data_or_null(),
                      {initial.data_or_null()},
                      pooled};
    if (state.copies_rows() && pooled.type == values.type) executor.each(pooled.count, Copy{{state}});
    if (state.copies_rows() && pooled.type != values.type) executor.each(pooled.count, Cast{{state}});
    if (state.copies_rows() && state.positions <= pooled.count) {  // as features of one id have it
      executor.each(pooled.count, SumLeft{{state}});
    } else {
      executor.each(pooled.count, Sum{state});
    }
  }
};

}  // namespace hkv
