// A sort in one launch, of what one block can hold.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cub/block/block_load.cuh>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_store.cuh>

namespace hkv {

inline constexpr int kSortThreads = 512;
inline constexpr int kSortMost = 16;  // items a thread has
inline constexpr int64_t kSortedByBlock = kSortMost * kSortThreads;

// Targets in order, by so many bits of theirs, and the numbers of the items that have them: the places where
// they were (Groups::set), which is why `items` is not read. What is added to fill the block comes last
// there, and stays behind its equals.
template <int kItems>
__global__ void __launch_bounds__(kSortThreads)
    sort_by_block(uint32_t* targets, int32_t* items, int n, int bits) {
  constexpr int kDigitBits = 5;
  constexpr bool kRemembers = false;  // its counters, in registers
  using Sort = cub::BlockRadixSort<uint32_t, kSortThreads, kItems, uint16_t, kDigitBits, kRemembers>;
  static_assert(kSortedByBlock <= 1 << 16);
  __shared__ typename Sort::TempStorage storage;
  const auto thread = static_cast<int>(threadIdx.x);
  uint32_t own[kItems];
  uint16_t numbers[kItems];
  cub::LoadDirectBlocked(thread, targets, own, n, ~uint32_t{0});
  for (int k = 0; k < kItems; ++k) numbers[k] = static_cast<uint16_t>(thread * kItems + k);
  Sort(storage).SortBlockedToStriped(own, numbers, 0, bits);
  cub::StoreDirectStriped<kSortThreads>(thread, targets, own, n);
  cub::StoreDirectStriped<kSortThreads>(thread, items, numbers, n);
}

// Of kSortedByBlock at most.
inline void start_sort(uint32_t* targets, int32_t* items, int64_t n, int bits, cudaStream_t stream) {
  const auto launch = [&](auto kernel) {
    kernel<<<1, kSortThreads, 0, stream>>>(targets, items, static_cast<int>(n), bits);
  };
  if (n <= 2 * kSortThreads) return launch(sort_by_block<2>);
  if (n <= 8 * kSortThreads) return launch(sort_by_block<8>);
  launch(sort_by_block<kSortMost>);
}

}  // namespace hkv
