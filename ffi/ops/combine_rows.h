// The sum of the rows of each distinct key's occurrences (section 8), in float32.
#pragma once

#include "ops/operation.h"

namespace hkv {

struct CombineRows {
  static constexpr const char* kName = "combine_rows";
  static constexpr bool kPerPosition = false;

  Array<int32_t> count, order, offsets;
  RowsView rows;
  RowsView sums;

  template <class Binder>
  void describe(Binder& binder) {
    binder.in("count", count, "1");
    binder.in("order", order, "n");
    binder.in("offsets", offsets, "n+1");
    binder.in("rows", rows, "n ...");
    binder.out_float32("sums", sums, "n ...");
  }

  struct Step {
    static constexpr int kGroup = 8;
    static constexpr int64_t kGrain = 256;
    const int32_t* count;
    const int32_t* order;
    const int32_t* offsets;
    RowsView rows;
    RowsView sums;

    template <Group G>
    HKV_HOST_DEVICE void operator()(const G& group, int64_t u) const {
      const int32_t begin = offsets[u];
      const int32_t end = u < *count ? offsets[u + 1] : begin;
      auto* sum = reinterpret_cast<float*>(sums.row(u));
      for (int64_t j = group.rank(); j < rows.width; j += group.size()) {
        sum[j] = end - begin <= 1 ? single(begin, end, j) : tree(begin, end, j);
      }
    }

   private:
    HKV_HOST_DEVICE float term(int32_t occurrence, int64_t j) const {
      return load_element(rows.type, rows.row(order[occurrence]), j);
    }

    HKV_HOST_DEVICE float single(int32_t begin, int32_t end, int64_t j) const {
      return begin == end ? 0.0f : term(begin, j);
    }

    HKV_HOST_DEVICE float tree(int32_t begin, int32_t end, int64_t j) const {
      TreeSum sum;
      for (int32_t occurrence = begin; occurrence < end; ++occurrence) sum.add(term(occurrence, j));
      return sum.result();
    }
  };

  template <class Executor>
  void run(Executor& executor) const {
    executor.each(rows.count, Step{count.data, order.data, offsets.data, rows, sums});
  }
};

}  // namespace hkv
