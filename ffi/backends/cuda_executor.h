// Runs operations on a CUDA stream: an index is a tile of a warp's threads, or as many as these; what orders
// or counts a batch is a hash table, a scan or a stable radix sort. Nothing allocates, waits for the device
// or reads its memory on the host, so that a call can be captured into a CUDA graph; and no result depends on
// the order in which threads run.
#pragma once

#include <cuda_runtime_api.h>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#include <limits>
#include <string>
#include <type_traits>

#include "backends/cuda_block.h"

namespace hkv {

#ifndef HKV_BUILT_FOR
#define HKV_BUILT_FOR "that this build names"
#endif
inline const std::string kToolkit =
    std::to_string(__CUDACC_VER_MAJOR__) + "." + std::to_string(__CUDACC_VER_MINOR__);

inline constexpr int kWarp = 32;
inline constexpr int kBlockThreads = 256;
// Blocks of a multiprocessor that registers must suffice for: 64 registers a thread. It also makes the
// compiler ask for all digests of a tile before it compares the first (seen for sm_90 and sm_100).
inline constexpr int kBlocks = 4;

template <class Step>
constexpr int blocks_of() {
  if constexpr (requires { Step::kBlocks; }) return Step::kBlocks;
  return kBlocks;
}

// What the members of one tile of kSize threads tell each other. The mask names the tile alone:
// neighbouring tiles of the warp may be elsewhere.
template <int kSize>
struct DeviceLane {
  static HKV_HOST_DEVICE int rank() {
#ifdef __CUDA_ARCH__
    return static_cast<int>(threadIdx.x % kSize);
#else
    return 0;
#endif
  }
  static HKV_HOST_DEVICE void sync() {
#ifdef __CUDA_ARCH__
    __syncwarp(mask());
#endif
  }
  template <class Value>
  static HKV_HOST_DEVICE Value exchange(Value value, int step) {
#ifdef __CUDA_ARCH__
    return __shfl_xor_sync(mask(), value, step);
#else
    (void)step;
    return value;
#endif
  }
  static HKV_HOST_DEVICE int broadcast(int value, int from) {
#ifdef __CUDA_ARCH__
    return __shfl_sync(mask(), value, from, kSize);
#else
    (void)from;
    return value;
#endif
  }
  static HKV_HOST_DEVICE uint32_t ballot(bool flag) {
#ifdef __CUDA_ARCH__
    return (__ballot_sync(mask(), flag) >> first()) & kTile;
#else
    return flag ? 1 : 0;
#endif
  }

 private:
#ifdef __CUDA_ARCH__
  static constexpr uint32_t kTile = ~uint32_t{0} >> (kWarp - kSize);

  static __device__ __forceinline__ uint32_t first() { return threadIdx.x % kWarp / kSize * kSize; }
  static __device__ __forceinline__ uint32_t mask() { return kTile << first(); }
#endif
};

template <int kSize>
using DeviceGroup = std::conditional_t<kSize == 1, SerialGroup, TileGroup<kSize, DeviceLane<kSize>>>;

// Among those of all blocks. Where 32 of them work on a key, 2^27 keys have more than 32 bits number.
HKV_HOST_DEVICE constexpr int64_t thread_of(uint32_t block, uint32_t thread) {
  return int64_t{block} * kBlockThreads + thread;
}
static_assert(thread_of(1u << 25, 3) == (int64_t{1} << 25) * kBlockThreads + 3);

template <class Step>
__global__ void __launch_bounds__(kBlockThreads, blocks_of<Step>()) run_step(int64_t count, Step step) {
  const int64_t thread = thread_of(blockIdx.x, threadIdx.x);
  if constexpr (kHasOwnIndex<Step>) {
    const int64_t first = thread - thread % Step::kGroup;
    if (first >= count) return;
    step(DeviceGroup<Step::kGroup>{}, thread);
  } else {
    const int64_t index = thread / Step::kGroup;
    if (index >= count) return;
    step(DeviceGroup<Step::kGroup>{}, index);
  }
}

// What is launched where a batch asks for nothing.
struct Nothing {
  static constexpr int kGroup = 1;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t) const {}
};

class CudaExecutor : public ManyWorkers<CudaExecutor> {
 public:
  explicit CudaExecutor(cudaStream_t stream) : stream_(stream) {}

  // What went wrong first; empty if nothing did.
  const std::string& failure() const { return failure_; }

  void zero(void* data, int64_t bytes) {
    if (bytes == 0 || failed()) return;
    has_launched_ = true;
    check(cudaMemsetAsync(data, 0, static_cast<size_t>(bytes), stream_), "cudaMemsetAsync");
  }

  using ManyWorkers::each;
  template <class Step>
  void each(int64_t count, const Step& step) {
    launch(count, step);
  }
  // The second step takes from registers what the first one returns.
  template <class First, class Second>
  void each(int64_t count, const First& first, const Second& second) {
    launch(count, Chain<First, Second>{first, second});
  }

  // To XLA of jaxlib 0.10.0 and 0.10.1 a custom call that adds nothing to a command buffer is an error.
  void finish() {
    if (!has_launched_) launch(1, Nothing{});
  }

  // As many as fill the device several times over: if they filled it once, and something else held a part of
  // it, a few blocks would come last, by themselves.
  template <class Step>
  int64_t groups_in_turns() {
    constexpr int64_t kTurns = 4;
    return kTurns * of_device(cudaDevAttrMultiProcessorCount) * blocks_of<Step>() *
           (kBlockThreads / Step::kGroup);
  }

  static int64_t scan_bytes(int64_t n) { return cub_bytes(n); }
  template <class Terms>
  void scan(int64_t n, const Terms& terms, int32_t* sums, char* scratch) {
    if (n == 0) return;
    const auto values = thrust::make_transform_iterator(thrust::make_counting_iterator(int32_t{0}), terms);
    call_cub(n, scratch, [&](void* storage, size_t& bytes) {
      return cub::DeviceScan::ExclusiveSum(storage, bytes, values, sums, static_cast<int>(n), stream_);
    });
  }

  void unique(int64_t n, const Words* keys, Mask valid, const UniqueKeys& out, char* scratch) {
    const int memory = of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    if (!fits_block(n, memory)) {
      return ManyWorkers::unique(n, keys, valid, out, scratch);
    }
    start([&] { check(start_unique(n, keys, valid, out, memory, stream_), "cudaFuncSetAttribute"); });
  }
  void list(int64_t n, const Occurrences& batch, char* scratch) {
    if (n > kSortedByBlock) return ManyWorkers::list(n, batch, scratch);
    start([&] { start_list(batch, n, stream_); });
  }

  static int64_t group_bytes(int64_t n) { return cub_bytes(n); }
  void group(Groups& groups, char* scratch) {
    if (groups.n == 0) return;
    Flip<uint32_t>& targets = groups.targets;
    Flip<int32_t>& items = groups.items;
    if (groups.n <= kSortedByBlock) {
      return start([&] { start_sort(targets.current, items.current, groups.n, groups.bits(), stream_); });
    }
    cub::DoubleBuffer<uint32_t> target_buffers(targets.current, targets.other);
    cub::DoubleBuffer<int32_t> item_buffers(items.current, items.other);
    call_cub(groups.n, scratch, [&](void* storage, size_t& bytes) {
      return cub::DeviceRadixSort::SortPairs(storage, bytes, target_buffers, item_buffers,
                                             static_cast<int>(groups.n), 0, groups.bits(), stream_);
    });
    if (target_buffers.Current() == targets.current) return;
    targets.turn();
    items.turn();
  }

 private:
  int of_device(cudaDeviceAttr attribute) {
    int device = 0;
    int value = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
    return value;
  }

  // CUB's own query asks the device, and a program may be traced where there is none. So this bounds
  // what CUB (dispatch_radix_sort.cuh, dispatch_scan.cuh in CCCL 3.0) takes for n items:
  //   a sort with two buffers: 256 counters of 4 bytes for each tile, of 1,024 items and more (one
  //     tuned for less would spend more on its counters than on its items), and for each of at most 4
  //     passes, once for every 2^27 items and more;
  //   a scan: 8 bytes for each tile, of 128 items and more, and for 32 tiles of padding;
  //   either: five arrays at multiples of 256 bytes.
  // call_cub compares it with the query.
  static int64_t cub_bytes(int64_t n) {
    constexpr int64_t kCounters = 256 * 4;
    constexpr int64_t kTile = 1024;
    constexpr int64_t kPasses = 4;
    constexpr int64_t kPortion = int64_t{1} << 27;
    constexpr int64_t kAlignments = 8 * 256;
    return kCounters * (n / kTile + 1 + kPasses * (n / kPortion + 1)) + kAlignments;
  }

  template <class Call>
  void call_cub(int64_t n, char* storage, const Call& call) {
    if (failed()) return;
    if (n > std::numeric_limits<int32_t>::max()) {
      return fail("the batch is too large: " + std::to_string(n) + " items to count with 32 bits");
    }
    size_t needed = 0;
    check(call(nullptr, needed), "CUB's size query");
    auto reserved = static_cast<size_t>(cub_bytes(n));
    if (needed > reserved) {
      return fail("CUB needs " + std::to_string(needed) + " bytes of temporary storage for " +
                  std::to_string(n) + " items on this device, " + std::to_string(reserved) +
                  " were reserved: report this as a bug of jax_hkv");
    }
    if (failed()) return;
    has_launched_ = true;
    check(call(storage, reserved), "CUB");
  }

  template <class Step>
  void launch(int64_t count, const Step& step) {
    if (count == 0) return;
    static_assert(kBlockThreads % Step::kGroup == 0, "no tile straddles two blocks");
    constexpr int64_t kIndices = kHasOwnIndex<Step> ? kBlockThreads : kBlockThreads / Step::kGroup;
    const auto blocks = static_cast<unsigned>((count + kIndices - 1) / kIndices);
    start([&] { run_step<<<blocks, kBlockThreads, 0, stream_>>>(count, step); });
  }

  template <class Launch>
  void start(const Launch& launch) {
    if (failed()) return;
    has_launched_ = true;
    launch();
    check(cudaGetLastError(), "a kernel launch, or something before it,");
  }

  void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    (void)cudaGetLastError();  // or the next launch of this thread would be told of it
    fail(std::string(what) + " failed: " + cudaGetErrorString(error) + remedy_of(error));
  }
  static std::string remedy_of(cudaError_t error) {
    switch (error) {
      case cudaErrorNoKernelImageForDevice:
      case cudaErrorUnsupportedPtxVersion:
        return ". jax_hkv was compiled for the GPUs " HKV_BUILT_FOR " by CUDA " + kToolkit +
               ": install it where this GPU is, or name it "
               "(--config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES=80, say)";
      case cudaErrorInsufficientDriver:
        return ". jax_hkv was compiled by CUDA " + kToolkit +
               ", which this driver is too old for: update the "
               "driver, or install jax_hkv with the nvcc of an older CUDA";
      default: return "";
    }
  }
  void fail(const std::string& text) {
    if (!failed()) failure_ = text;
  }
  bool failed() const { return !failure_.empty(); }  // and what follows would read what was not written

  cudaStream_t stream_;
  std::string failure_;
  bool has_launched_ = false;
};

}  // namespace hkv
