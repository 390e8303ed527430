// The sum of the rows of each distinct key's occurrences (section 8), in float32. The tree is summed
// level by level, a worker for each chunk, so that a key that occurs a hundred thousand times keeps
// as many workers busy as a hundred thousand keys.
#pragma once

#include "ops/operation.h"

namespace hkv {

// One level of the tree: items of one key are its occurrences, later the sums of its chunks. Chunk
// sums lie where begin / 16 says for a key whose items began at `begin`: a key of m > 32 items has
// m / 16 places there, and ceil(m / 32) sums.
struct SumLevel {
  static constexpr int64_t kChunk = 32;
  static constexpr int kShift = 4;  // log2 of items for a place of the next level

  int level;
  int32_t* owners;        // of items: one more than the number of the key, 0 where there is no item
  const int32_t* order;   // of items, at the first level: positions
  RowsView terms;         // the rows by position, later by item
  RowsView next;
  int32_t* next_owners;

  // Places that the items of a level need when the batch has n positions.
  static int64_t places(int64_t n, int level) { return level == 0 ? n : (n >> (kShift * level)) + 1; }

  static HKV_HOST_DEVICE bool is_last(int64_t items) { return items <= kChunk; }
};

struct CombineRows {
  static constexpr const char* kName = "combine_rows";
  static constexpr bool kPerPosition = false;
  static constexpr int kMostLevels = 7;  // 32^7 exceeds the 2^31 positions that a batch can have

  Array<int32_t> count, inverse, order, offsets;
  RowsView rows;
  RowsView sums;
  SumLevel levels[kMostLevels] = {};

  template <class Binder>
  void describe(Binder& binder) {
    binder.in("count", count, "1");
    binder.in("inverse", inverse, "n");
    binder.in("order", order, "n");
    binder.in("offsets", offsets, "n+1");
    binder.in("rows", rows, "n ...");
    binder.out_float32("sums", sums, "n ...");
  }

  // Keys without occurrences have no sum: zero. The owners of the occurrences, from their positions.
  struct Prepare {
    static constexpr int kGroup = 8;
    static constexpr int64_t kGrain = 1024;
    const int32_t* count;
    const int32_t* inverse;
    const int32_t* order;
    int32_t* owners;
    RowsView sums;

    template <Group G>
    HKV_HOST_DEVICE void operator()(const G& group, int64_t i) const {
      if (group.rank() == 0) owners[i] = order[i] < 0 ? 0 : inverse[order[i]] + 1;
      if (i < *count) return;
      auto* sum = reinterpret_cast<float*>(sums.row(i));
      for (int64_t j = group.rank(); j < sums.width; j += group.size()) sum[j] = 0.0f;
    }
  };

  struct Step {
    static constexpr int kGroup = 8;
    static constexpr int64_t kGrain = 256;
    static constexpr int kBlock = 4;  // columns of one member at a time: 16 bytes of float32
    SumLevel level;
    const int32_t* offsets;
    RowsView sums;

    template <Group G>
    HKV_HOST_DEVICE void operator()(const G& group, int64_t item) const {
      const int32_t owner = level.owners[item] - 1;
      if (owner < 0) return;
      const int64_t begin = offsets[owner];
      const int64_t occurrences = offsets[owner + 1] - begin;
      int64_t items = occurrences;
      for (int below = 0; below < level.level; ++below) {
        items = (items + SumLevel::kChunk - 1) / SumLevel::kChunk;
      }
      const int64_t place = item - (begin >> (SumLevel::kShift * level.level));
      if (place % SumLevel::kChunk != 0) return;
      const int64_t left = items - place;
      const auto length = static_cast<int>(left < SumLevel::kChunk ? left : SumLevel::kChunk);
      const bool is_sum = SumLevel::is_last(items);
      int64_t target = owner;
      if (!is_sum) {
        target = (begin >> (SumLevel::kShift * (level.level + 1))) + place / SumLevel::kChunk;
        if (group.rank() == 0) level.next_owners[target] = owner + 1;
      }
      auto* sum = reinterpret_cast<float*>((is_sum ? sums : level.next).row(target));
      if (occurrences == 1 && level.terms.type == RowType::kFloat32) {
        group.copy(sum, level.terms.row(level.order[item]), sums.row_bytes);
        return;
      }
      for (int64_t j = int64_t{kBlock} * group.rank(); j < sums.width; j += int64_t{kBlock} * group.size()) {
        add_chunk(item, length, j, is_sum && occurrences > 1, sum);
      }
    }

   private:
    HKV_HOST_DEVICE void add_chunk(int64_t item, int length, int64_t first_column, bool is_final,
                                   float* sum) const {
      const int64_t left = sums.width - first_column;
      const auto columns = static_cast<int>(left < kBlock ? left : kBlock);
      float partial[kBlock] = {};
      for (int term = 0; term < length; ++term) {
        const char* row = level.terms.row(level.order ? level.order[item + term] : item + term);
        for (int c = 0; c < kBlock; ++c) {
          if (c >= columns) continue;
          const float value = load_element(level.terms.type, row, first_column + c);
          partial[c] = term == 0 ? value : partial[c] + value;
        }
      }
      for (int c = 0; c < kBlock; ++c) {
        if (c < columns) sum[first_column + c] = is_final ? same_nan(partial[c]) : partial[c];
      }
    }
  };

  template <class Executor>
  void reserve(Arena& arena) {
    const int64_t n = order.rows;
    RowsView terms = rows;
    for (int level = 0; level < depth(n); ++level) {
      SumLevel& at = levels[level];
      at.level = level;
      at.order = level == 0 ? order.data : nullptr;
      at.terms = terms;
      at.owners = level == 0 ? arena.take<int32_t>(n) : levels[level - 1].next_owners;
      if (level + 1 == depth(n)) break;
      const int64_t places = SumLevel::places(n, level + 1);
      const int64_t row_bytes = rows.width * static_cast<int64_t>(sizeof(float));
      terms = {arena.take<char>(places * row_bytes), RowType::kFloat32, places, rows.width, row_bytes};
      at.next = terms;
      at.next_owners = arena.take<int32_t>(places);
    }
  }

  template <class Executor>
  void run(Executor& executor) const {
    const int64_t n = order.rows;
    if (n == 0) return;
    executor.each(n, Prepare{count.data, inverse.data, order.data, levels[0].owners, sums});
    for (int level = 0; level < depth(n); ++level) {
      const int64_t places = SumLevel::places(n, level);
      if (level + 1 < depth(n)) {
        executor.zero(levels[level].next_owners,
                      SumLevel::places(n, level + 1) * static_cast<int64_t>(sizeof(int32_t)));
      }
      executor.each(places, Step{levels[level], offsets.data, sums});
    }
  }

 private:
  // Levels that a batch of n positions can need.
  static int depth(int64_t n) {
    int levels = 1;
    while (n > SumLevel::kChunk) {
      n = (n + SumLevel::kChunk - 1) / SumLevel::kChunk;
      ++levels;
    }
    return levels;
  }
};

}  // namespace hkv
