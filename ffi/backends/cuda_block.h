// Sorts, distinct keys and their occurrences in one launch each, of what one block can hold: where batches
// are small, launches take the time.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cub/block/block_load.cuh>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/block/block_store.cuh>
#include <type_traits>

#include "backends/distinct.h"

namespace hkv {

inline constexpr int kSortThreads = 512;
inline constexpr int kSortMost = 16;  // items a thread has
inline constexpr int64_t kSortedByBlock = kSortMost * kSortThreads;

template <int kItems>
struct BlockSort {
  static constexpr int kDigitBits = 5;
  static constexpr bool kRemembers = false;  // its counters, in registers
  using Sort = cub::BlockRadixSort<uint32_t, kSortThreads, kItems, uint16_t, kDigitBits, kRemembers>;
  using Storage = typename Sort::TempStorage;
  static_assert(kSortedByBlock <= 1 << 16);

  uint32_t targets[kItems];  // of a thread: those of neighbouring items; once sorted every kSortThreads-th
  uint16_t items[kItems];

  __device__ __forceinline__ static int item(int k) { return static_cast<int>(threadIdx.x) * kItems + k; }
  __device__ __forceinline__ static int place(int k) {
    return k * kSortThreads + static_cast<int>(threadIdx.x);
  }

  // By so many bits of the targets. What fills the block has the highest ones, and comes last already, so
  // that it stays behind its equals.
  __device__ __forceinline__ void run(Storage& storage, int bits) {
    for (int k = 0; k < kItems; ++k) items[k] = static_cast<uint16_t>(item(k));
    Sort(storage).SortBlockedToStriped(targets, items, 0, bits);
  }
};

// Targets in order, and the numbers of the items that have them: the places where they were (Groups::set),
// which is why `items` is not read.
template <int kItems>
__global__ void __launch_bounds__(kSortThreads)
    sort_by_block(uint32_t* targets, int32_t* items, int n, int bits) {
  __shared__ typename BlockSort<kItems>::Storage storage;
  const auto thread = static_cast<int>(threadIdx.x);
  BlockSort<kItems> sort;
  cub::LoadDirectBlocked(thread, targets, sort.targets, n, ~uint32_t{0});
  sort.run(storage, bits);
  cub::StoreDirectStriped<kSortThreads>(thread, targets, sort.targets, n);
  cub::StoreDirectStriped<kSortThreads>(thread, items, sort.items, n);
}

// What the steps of occurrences::run do.
template <int kItems>
__global__ void __launch_bounds__(kSortThreads) list_by_block(Occurrences batch, int n, int bits) {
  __shared__ union {
    typename BlockSort<kItems>::Storage sort;
    uint16_t numbers[kItems * kSortThreads];
  } storage;
  __shared__ int listed;  // positions with a key
  const auto keys = static_cast<int>(batch.keys(n));
  BlockSort<kItems> sort;
  for (int k = 0; k < kItems; ++k) {
    const int i = sort.item(k);
    const int64_t number = i < n ? batch.number(i, keys) : -1;
    sort.targets[k] = i >= n ? ~uint32_t{0} : static_cast<uint32_t>(number < 0 ? n : number);
  }
  sort.run(storage.sort, bits);
  __syncthreads();  // before numbers lie where it has sorted
  for (int k = 0; k < kItems; ++k) {
    const int j = sort.place(k);
    if (j >= n) continue;
    const auto number = static_cast<int>(sort.targets[k]);
    storage.numbers[j] = static_cast<uint16_t>(number);
    batch.order[j] = number < n ? sort.items[k] : -1;
  }
  __syncthreads();
  for (int j = static_cast<int>(threadIdx.x); j <= n; j += kSortThreads) {
    const int before = j > 0 ? storage.numbers[j - 1] : -1;
    const int here = j < n ? storage.numbers[j] : n;
    occurrences::mark(batch, keys, before, here, j);
    if (here == n && before != n) listed = j;
  }
  __syncthreads();
  for (int j = keys + static_cast<int>(threadIdx.x); j <= n; j += kSortThreads) batch.offsets[j] = listed;
}

inline constexpr int kUniqueThreads = 1024;
inline constexpr int kUniqueMost = 8;  // positions a thread has
inline constexpr int64_t kUniqueByBlock = kUniqueMost * kUniqueThreads;
inline constexpr int64_t kKeptOfBlock = 1536;  // of a block's memory, beside the cells

// What the steps of distinct::run do, with cells in the block's own memory: every thread has each
// kUniqueThreads-th position. Both ends of the batch come first, so that a frequent key's positions are not
// told one after the other of later ones.
template <int kItems>
__global__ void __launch_bounds__(kUniqueThreads, 1)
    unique_by_block(int n, int cell_count, const Words* keys, Mask valid, UniqueKeys out) {
  constexpr int kWarp = 32;
  constexpr int kStretches = kItems * kUniqueThreads / kWarp;  // of a warp's neighbouring positions
  using Scan = cub::BlockScan<int, kUniqueThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ typename Scan::TempStorage storage;
  __shared__ int firsts_before[kStretches];
  static_assert(sizeof(storage) + sizeof(firsts_before) <= kKeptOfBlock && kStretches <= kUniqueThreads);
  extern __shared__ distinct::Cell cells[];
  const auto thread = static_cast<int>(threadIdx.x);
  for (int place = thread; place < cell_count; place += kUniqueThreads) cells[place] = {};
  __syncthreads();
  const auto position = [thread](int k) { return k * kUniqueThreads + thread; };
  // Cells are near, and nothing but an atomic may look at what others are writing: as if all were empty.
  const auto read = [](const uint64_t*) { return uint64_t{0}; };
  int places[kItems];
  HKV_UNROLLED for (int turn = 0; turn < kItems; ++turn) {
    const int k = turn == 0 ? 0 : kItems - turn;
    const int i = position(k);
    places[k] = i < n && valid[i] ? static_cast<int>(distinct::claim(cells, cell_count, keys, i, read)) : -1;
  }
  __syncthreads();
  int lasts[kItems];
  uint32_t firsts[kItems];  // of the warp's positions, a bit each
  for (int k = 0; k < kItems; ++k) {
    const distinct::Cell cell = places[k] < 0 ? distinct::Cell{} : cells[places[k]];
    lasts[k] = static_cast<int>(cell.last);
    firsts[k] = __ballot_sync(~0u, places[k] >= 0 && static_cast<int>(~cell.first) == position(k));
    if (thread % kWarp == 0) firsts_before[position(k) / kWarp] = count_ones(firsts[k]);
  }
  __syncthreads();
  int before = thread < kStretches ? firsts_before[thread] : 0;
  int count;
  Scan(storage).ExclusiveSum(before, before, count);
  if (thread < kStretches) firsts_before[thread] = before;
  __syncthreads();  // and numbers may lie in cells that were positions'
  const uint32_t own = 1u << thread % kWarp;
  for (int k = 0; k < kItems; ++k) {
    if ((firsts[k] & own) == 0) continue;
    const int number = firsts_before[position(k) / kWarp] + count_ones(firsts[k] & (own - 1));
    cells[places[k]].first = static_cast<uint32_t>(number);
    out.set(number, keys[position(k)], position(k), lasts[k]);
  }
  __syncthreads();
  for (int k = 0; k < kItems; ++k) {
    const int i = position(k);
    if (i >= n) break;
    out.inverse[i] = places[k] < 0 ? -1 : static_cast<int32_t>(cells[places[k]].first);
    if (i >= count) out.set_none(i);
  }
  if (thread == 0) *out.count = count;
}

// Of kSortedByBlock items at most: launch(kItems), the least of a thread that a block holds them with.
template <class Launch>
void with_items(int64_t n, const Launch& launch) {
  if (n <= 2 * kSortThreads) return launch(std::integral_constant<int, 2>{});
  if (n <= 8 * kSortThreads) return launch(std::integral_constant<int, 8>{});
  launch(std::integral_constant<int, kSortMost>{});
}

inline void start_sort(uint32_t* targets, int32_t* items, int64_t n, int bits, cudaStream_t stream) {
  with_items(n, [&](auto items_a_thread) {
    sort_by_block<items_a_thread()>
        <<<1, kSortThreads, 0, stream>>>(targets, items, static_cast<int>(n), bits);
  });
}

inline void start_list(const Occurrences& batch, int64_t n, cudaStream_t stream) {
  const int bits = std::bit_width(static_cast<uint64_t>(n));
  with_items(n, [&](auto items_a_thread) {
    list_by_block<items_a_thread()><<<1, kSortThreads, 0, stream>>>(batch, static_cast<int>(n), bits);
  });
}

// The memory that the cells of n positions take.
inline int64_t cell_bytes(int64_t n) {
  return distinct::cells_for(n) * static_cast<int64_t>(sizeof(distinct::Cell));
}
// Whether a block that may ask for so much memory finds the distinct keys of n positions.
inline bool fits_block(int64_t n, int64_t block_memory) {
  return n > 0 && n <= kUniqueByBlock && cell_bytes(n) + kKeptOfBlock <= block_memory;
}

// By a block that may ask for so much memory. What is more than every block may have, 48 KiB, must be asked
// for, and holds for a kernel from then on: always the same, or who launches it meanwhile would get less.
inline cudaError_t start_unique(int64_t n, const Words* keys, Mask valid, const UniqueKeys& out,
                                int64_t block_memory, cudaStream_t stream) {
  const auto launch = [&](auto kernel) {
    kernel<<<1, kUniqueThreads, static_cast<size_t>(cell_bytes(n)), stream>>>(
        static_cast<int>(n), static_cast<int>(distinct::cells_for(n)), keys, valid, out);
    return cudaSuccess;
  };
  constexpr int kFew = 2;
  static_assert(kFew * kUniqueThreads * 2 * sizeof(distinct::Cell) + kKeptOfBlock <= 48 << 10);
  if (n <= kFew * kUniqueThreads) return launch(unique_by_block<kFew>);
  const auto most = static_cast<int>(std::min(cell_bytes(kUniqueByBlock), block_memory - kKeptOfBlock));
  const cudaError_t error =
      cudaFuncSetAttribute(unique_by_block<kUniqueMost>, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  return error == cudaSuccess ? launch(unique_by_block<kUniqueMost>) : error;
}

}  // namespace hkv
