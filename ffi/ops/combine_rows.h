// The sum of the rows of each distinct key's occurrences (section 8), in float32. Chunks are summed
// level by level, a worker for each, so that a key that occurs a hundred thousand times keeps as many
// workers busy as a hundred thousand keys; what is left of a key, at most 32 terms, is summed where it
// is needed.
#pragma once

#include "ops/operation.h"

namespace hkv {

// Consecutive terms of one key: its occurrences (level 0), or sums of chunks of the level below.
struct TermSpan {
  int level;
  int64_t begin;   // at level 0 in the order of the batch, above among the partial sums
  int64_t length;  // at most a chunk, or it is not summed at once
};

// What the sums are made of: position i adds rows[sources[i]] * weights[i].
struct SumTerms {
  static constexpr int64_t kChunk = 32;
  static constexpr int kShift = 4;  // log2 of terms for a place of the level above

  int64_t positions;
  const int32_t* order;
  const int32_t* offsets;
  const int32_t* sources;  // null: position i adds rows[i]
  const float* weights;    // null: all are one
  RowsView rows;
  RowsView partial;  // the sums of all levels above the first, one level behind the other

  // A key of m terms at a level, the first of them at `begin`, has its sums at begin / 16: m > 32
  // terms have m / 16 places there, and ceil(m / 32) sums.
  HKV_HOST_DEVICE int64_t places(int level) const {
    return level == 0 ? positions : (positions >> (kShift * level)) + 1;
  }
  HKV_HOST_DEVICE int64_t first_place(int level) const {
    int64_t place = 0;
    for (int below = 1; below < level; ++below) place += places(below);
    return place;
  }
  static HKV_HOST_DEVICE int64_t chunks_of(int64_t terms) { return (terms + kChunk - 1) / kChunk; }

  HKV_HOST_DEVICE int64_t occurrences(int64_t key) const { return offsets[key + 1] - offsets[key]; }

  // The terms whose sum is that of the key.
  HKV_HOST_DEVICE TermSpan last_terms(int64_t key) const {
    TermSpan span{0, offsets[key], occurrences(key)};
    while (span.length > kChunk) {
      span.length = chunks_of(span.length);
      ++span.level;
    }
    if (span.level > 0) span.begin = first_place(span.level) + (span.begin >> (kShift * span.level));
    return span;
  }

  // The row that is the sum of a span, if there is such a float32 row.
  HKV_HOST_DEVICE const float* only_term(const TermSpan& span) const {
    if (span.level > 0 || span.length != 1 || weights != nullptr || rows.type != RowType::kFloat32)
      return nullptr;
    float weight;
    return reinterpret_cast<const float*>(row_of(span, 0, weight));
  }

  // Elements column to column + columns - 1 of the sum of a span, from left to right. A tile asks for some
  // terms before it adds the first: each is a row of its own somewhere in memory.
  template <int kAhead, int kBlock>
  HKV_HOST_DEVICE void add(const TermSpan& span, int64_t column, int columns, float (&sum)[kBlock]) const {
    const RowType type = span.level > 0 ? RowType::kFloat32 : rows.type;
    for (float& element : sum) element = 0.0f;  // the sum of no terms
    if constexpr (kAhead > 1) {
      if (columns == kBlock && are_aligned<Floats>(span, type == RowType::kFloat32)) {
        return add_aligned<Floats, kAhead>(span, type, column, sum);
      }
      if (columns == kBlock && are_aligned<Halves>(span, type != RowType::kFloat32)) {
        return add_aligned<Halves, kAhead>(span, type, column, sum);
      }
    }
    int64_t term = 0;
    if (kAhead > 1 && columns == kBlock) {
      HKV_ROLLED for (; term + kAhead <= span.length; term += kAhead) {
        RawBlock<kBlock> raw[kAhead];
        float weight[kAhead];
        for (int k = 0; k < kAhead; ++k) {
          const char* row = row_of(span, term + k, weight[k]);
          if (row != nullptr) raw[k].load(type, row, column);
        }
        for (int k = 0; k < kAhead; ++k) {
          float values[kBlock];
          raw[k].decode(type, values);
          append(span, term + k, weight[k], values, sum);
        }
      }
    }
    HKV_ROLLED for (; term < span.length; ++term) {
      float values[kBlock] = {};
      float weight;
      const char* row = row_of(span, term, weight);
      if (row != nullptr && type == RowType::kFloat32 && columns == kBlock) {
        // Apart from load_block: with its other cases GCC's loop is 4 to 8 % slower (Adam, ids of a power
        // law).
        load_words<kBlock>(reinterpret_cast<const float*>(row) + column, values);
      } else if (row != nullptr) {
        load_block(type, row, column, columns, values);
      }
      append(span, term, weight, values, sum);
    }
  }

  // The same of a key's sum, which has one NaN only; that of one occurrence is the occurrence itself.
  template <int kBlock>
  HKV_HOST_DEVICE void sum_of(int64_t key, const TermSpan& span, int64_t column, int columns,
                              float (&sum)[kBlock]) const {
    add<kRowsAhead<kBlock>>(span, column, columns, sum);
    if (weights == nullptr && occurrences(key) == 1) return;
    for (int c = 0; c < kBlock; ++c) sum[c] = same_nan(sum[c]);
  }

  // The squares of a key's sum, which `change` may change before: those of kPart columns from left to right,
  // and the parts so, too. Each member has the squares of its own blocks, and adds up those of all.
  template <int kPart, Group G, class Change>
  HKV_HOST_DEVICE float square_of(const G& group, int64_t key, const TermSpan& span,
                                  const Change& change) const {
    constexpr int kBlock = kBlockOf<G>;
    static_assert(kBlock % kPart == 0, "no part straddles two blocks");
    float total = 0.0f;
    for (int64_t first = 0; first < rows.width; first += kBlock * group.size()) {
      const int64_t column = first + kBlock * group.rank();
      const int64_t left = rows.width - column;
      float sum[kBlock] = {};
      if (left > 0) sum_of(key, span, column, static_cast<int>(left < kBlock ? left : kBlock), sum);
      change(sum);
      float squares[kBlock / kPart];
      for (int c = 0; c < kBlock; ++c) {
        // Behind the end there are products of weights, which may be no numbers.
        const float square = column + c < rows.width ? sum[c] * sum[c] : 0.0f;
        squares[c / kPart] = c % kPart == 0 ? square : squares[c / kPart] + square;
      }
      for (int member = 0; member < group.size(); ++member) {
        for (int part = 0; part < kBlock / kPart; ++part) {
          const auto square = bit_cast<float>(group.broadcast(bit_cast<int>(squares[part]), member));
          if (first + member * kBlock + part * kPart < rows.width) total = total + square;
        }
      }
    }
    return total;
  }

 private:
  // Four elements that are read at once.
  struct alignas(16) Floats {
    float elements[4];

    HKV_HOST_DEVICE void decode(RowType, float (&values)[4]) const {
      memcpy(values, elements, sizeof(values));
    }
  };
  struct alignas(8) Halves {
    uint16_t elements[4];

    HKV_HOST_DEVICE void decode(RowType type, float (&values)[4]) const {
      decode_halves(type, elements, values);
    }
  };

  HKV_HOST_DEVICE const RowsView& rows_of(const TermSpan& span) const {
    return span.level > 0 ? partial : rows;
  }

  // Whether every row that a span can name lies on such blocks, and there is one.
  template <class Block>
  HKV_HOST_DEVICE bool are_aligned(const TermSpan& span, bool is_type) const {
    const RowsView& of = rows_of(span);
    const auto alignment = reinterpret_cast<uintptr_t>(of.data) | static_cast<uintptr_t>(of.row_bytes);
    return is_type && of.count > 0 && alignment % sizeof(Block) == 0;
  }

  // `add` of such rows, those of short spans too. All numbers are on their way together, then all rows.
  // Nothing is decided between the loads, or each would wait for the one before it: where there is no term or
  // no row, another one is read and left out.
  template <class Block, int kAhead, int kBlock>
  HKV_HOST_DEVICE void add_aligned(const TermSpan& span, RowType type, int64_t column,
                                   float (&sum)[kBlock]) const {
    const RowsView& of = rows_of(span);
    HKV_ROLLED for (int64_t first = 0; first < span.length; first += kAhead) {
      int32_t number[kAhead];
      float weight[kAhead];
      for (int k = 0; k < kAhead; ++k) {
        number[k] = static_cast<int32_t>(span.begin + (first + k < span.length ? first + k : first));
        weight[k] = 1.0f;
      }
      if (span.level == 0) {
        for (int32_t& own : number) own = order[own];
        if (weights != nullptr) {
          for (int k = 0; k < kAhead; ++k) weight[k] = weights[number[k]];
        }
        if (sources != nullptr) {
          for (int32_t& own : number) own = sources[own];
        }
      }
      Block read[kAhead];
      for (int k = 0; k < kAhead; ++k) {
        number[k] = number[k] < of.count ? number[k] : -1;
        read[k] = reinterpret_cast<const Block*>(of.row(number[k] < 0 ? 0 : number[k]))[column / kBlock];
      }
      for (int k = 0; k < kAhead; ++k) {
        float values[kBlock];
        read[k].decode(type, values);
        for (float& value : values) value = number[k] < 0 ? 0.0f : value;
        if (first + k < span.length) append(span, first + k, weight[k], values, sum);
      }
    }
  }

  // The row that a term is made of, or null if it does not exist and the term is zero; and its factor.
  HKV_HOST_DEVICE const char* row_of(const TermSpan& span, int64_t term, float& weight) const {
    weight = 1.0f;
    if (span.level > 0) return partial.row(span.begin + term);
    const int32_t position = order[span.begin + term];
    const int64_t source = sources != nullptr ? sources[position] : position;
    if (weights != nullptr) weight = weights[position];
    return source >= 0 && source < rows.count ? rows.row(source) : nullptr;
  }

  template <int kBlock>
  HKV_HOST_DEVICE void append(const TermSpan& span, int64_t term, float weight, const float (&values)[kBlock],
                              float (&sum)[kBlock]) const {
    const bool is_weighted = weights != nullptr && span.level == 0;
    for (int c = 0; c < kBlock; ++c) {
      const float value = is_weighted ? weight * values[c] : values[c];
      sum[c] = term == 0 ? value : sum[c] + value;
    }
  }
};

// The sums of chunks, for keys of more than a chunk of terms: one level after the other.
struct SumTree {
  Array<int32_t> count, inverse, order, offsets, sources;
  Array<float> weights;
  RowsView rows;
  RowsView partial;
  int32_t* owners = nullptr;  // of places: one more than the number of the key, 0 where nothing is

  template <class Binder>
  void describe(Binder& binder, const char* name, const char* shape_of_offsets) {
    binder.in("count", count, "1");
    binder.in("inverse", inverse, "n");
    binder.in("order", order, "n");
    binder.in("offsets", offsets, shape_of_offsets);
    binder.in("sources", sources, "n?");
    binder.in("weights", weights, "n?");
    binder.in_floats(name, rows, "k ...");
  }

  SumTerms terms() const {
    return {order.rows, order.data, offsets.data, sources.data_or_null(), weights.data_or_null(),
            rows,       partial};
  }

  struct Step {
    // More lanes than elsewhere: the levels of a frequent key's sum wait for each other.
    static constexpr int kGroup = 16;
    static constexpr bool kOwnIndex = true;
    static constexpr int kBlocks = 3;  // of a multiprocessor: rows on their way take registers
    static constexpr int64_t kGrain = 1024;
    // And more rows: a whole chunk's come in four turns.
    template <int kBlock>
    static constexpr int kAhead = kRowsAhead<kBlock> > 1 ? 8 : 1;
    SumTerms terms;
    int level;
    const int32_t* inverse;
    int32_t* owners;

    template <Group G>
    HKV_HOST_DEVICE void operator()(const G& group, int64_t place) const {
      const int64_t first = place - group.rank();
      for_each_member(group, length_from(place) > 0, [&](int member) { sum_chunk(group, first + member); });
    }

   private:
    // Terms of the chunk that begins at a place, if one does there.
    HKV_HOST_DEVICE int64_t length_from(int64_t place) const {
      const int32_t owner = place < terms.places(level) ? owner_of(place) : -1;
      if (owner < 0) return 0;
      int64_t length = terms.occurrences(owner);
      for (int below = 0; below < level; ++below) length = SumTerms::chunks_of(length);
      const int64_t term = term_of(owner, place);
      if (length <= SumTerms::kChunk || term % SumTerms::kChunk != 0) return 0;
      return length - term < SumTerms::kChunk ? length - term : SumTerms::kChunk;
    }

    HKV_HOST_DEVICE int64_t term_of(int32_t owner, int64_t place) const {
      return place - (int64_t{terms.offsets[owner]} >> (SumTerms::kShift * level));
    }

    template <Group G>
    HKV_HOST_DEVICE void sum_chunk(const G& group, int64_t place) const {
      const int32_t owner = owner_of(place);
      const TermSpan span{level, level == 0 ? place : terms.first_place(level) + place, length_from(place)};
      const int64_t target = terms.first_place(level + 1) +
                             (int64_t{terms.offsets[owner]} >> (SumTerms::kShift * (level + 1))) +
                             term_of(owner, place) / SumTerms::kChunk;
      if (group.rank() == 0) owners[target] = owner + 1;
      for_each_block<G>(group, terms.rows.width, [&]<int kBlock>(int64_t column, int columns) HKV_INLINE {
        float sum[kBlock];
        terms.add<kAhead<kBlock>>(span, column, columns, sum);
        store_block(RowType::kFloat32, terms.partial.row(target), column, columns, sum);
      });
    }

    HKV_HOST_DEVICE int32_t owner_of(int64_t place) const {
      if (level > 0) return owners[terms.first_place(level) + place] - 1;
      const int32_t position = terms.order[place];
      return position < 0 ? -1 : inverse[position];
    }
  };

  template <class Executor>
  void reserve(Arena& arena) {
    const int64_t row_bytes = rows.width * static_cast<int64_t>(sizeof(float));
    partial = {arena.take<char>(places() * row_bytes), RowType::kFloat32, places(), rows.width, row_bytes};
    owners = arena.take<int32_t>(places());
  }

  template <class Executor>
  void run(Executor& executor) const {
    executor.zero(owners, places() * static_cast<int64_t>(sizeof(int32_t)));
    sum(executor);
  }

  // Of partial sums: fewer than positions.
  int64_t places() const { return terms().first_place(depth() + 1); }

  // Once all owners are 0.
  template <class Executor>
  void sum(Executor& executor) const {
    const SumTerms view = terms();
    for (int level = 0; level < depth(); ++level) {
      executor.each(view.places(level), Step{view, level, inverse.data, owners});
    }
  }

 private:
  // Levels of partial sums that a batch can need.
  int depth() const {
    int levels = 0;
    for (int64_t terms = order.rows; terms > SumTerms::kChunk; terms = SumTerms::chunks_of(terms)) ++levels;
    return levels;
  }
};

// Of the first m keys, where no position in the order is of another one.
struct CombineRows {
  static constexpr const char* kName = "combine_rows";
  static constexpr bool kPerPosition = false;

  SumTree tree;
  RowsView sums;

  template <class Binder>
  void describe(Binder& binder) {
    tree.describe(binder, "rows", "m+1");
    binder.out_float32("sums", sums, "m ...");
  }

  struct Step {
    static constexpr int kGroup = 8;
    static constexpr int64_t kGrain = 256;
    SumTerms terms;
    const int32_t* count;
    RowsView sums;

    template <Group G>
    HKV_HOST_DEVICE void operator()(const G& group, int64_t key) const {
      const bool exists = key < *count;
      const TermSpan span = exists ? terms.last_terms(key) : TermSpan{};
      for_each_block<G>(group, sums.width, [&]<int kBlock>(int64_t column, int columns) HKV_INLINE {
        float sum[kBlock] = {};  // keys that do not exist have none
        if (exists) terms.sum_of(key, span, column, columns, sum);
        store_block(RowType::kFloat32, sums.row(key), column, columns, sum);
      });
    }
  };

  template <class Executor>
  void reserve(Arena& arena) {
    tree.reserve<Executor>(arena);
  }

  template <class Executor>
  void run(Executor& executor) const {
    if (tree.order.rows > 0) tree.run(executor);
    executor.each(sums.count, Step{tree.terms(), tree.count.data, sums});
  }
};

}  // namespace hkv
