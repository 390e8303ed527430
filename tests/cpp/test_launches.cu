// What the CUDA executor asks the runtime for, whatever the batch: nothing but what runtime.cc has, and no
// array is touched; CUB finds the temporary storage that was reserved for it; no grid is larger than a
// device's; something is launched for an empty batch too. Prints the launches of each operation for batches
// of 2^13 and 2^20.
#include <algorithm>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>

#include "backends/cuda_executor.h"
#include "binding/signature.h"
#include "checks.h"
#include "no_device.h"
#include "ops/all.h"
#include "runtime.h"

namespace {

using namespace hkv;
using testing::device_form;
using testing::kStream;
using testing::notes;

// Arrays of a size, at addresses that belong to nobody.
class SizeBinder {
 public:
  SizeBinder(int64_t n, int64_t choices, bool has_optional)
      : n_(n), choices_(choices), has_optional_(has_optional) {}

  template <class T>
  void attribute(const char* name, T& value) const {
    if (name == std::string_view("choices")) value = static_cast<T>(choices_);
    if (name == std::string_view("policy"))
      value = static_cast<T>(has_optional_ ? Policy::kLfu : Policy::kLru);
    if (name == std::string_view("p")) value = kTargets;
    if (name == std::string_view("devices")) value = kTargets;
    if (name == std::string_view("inner")) value = 1;
    for (const std::string_view axis : {"e", "c", "S", "count"}) {
      if (name == axis) value = static_cast<T>(n_);
    }
  }
  template <class T>
  void inout(const char* name, T& array, const char* shape) {
    in(name, array, shape);
  }
  template <class T>
  void out(const char* name, T& array, const char* shape) {
    in(name, array, shape);
  }
  template <class T>
  void in(const char*, Array<T>& array, const char* shape) {
    array = {reinterpret_cast<T*>(address()), rows_of(shape)};
  }
  void in(const char*, RowsView& rows, const char* shape) {
    constexpr int64_t kWidth = 64;
    rows = {reinterpret_cast<char*>(address()), RowType::kFloat32, rows_of(shape), kWidth, 4 * kWidth};
  }
  void in_floats(const char* name, RowsView& rows, const char* shape) { in(name, rows, shape); }
  void inout_floats(const char* name, RowsView& rows, const char* shape) { in(name, rows, shape); }
  void out_float32(const char* name, RowsView& rows, const char* shape) { in(name, rows, shape); }
  void out_cast(const char* name, RowsView& rows, const char* shape) { in(name, rows, shape); }

 private:
  static constexpr int64_t kTargets = 8;

  uintptr_t address() { return (++arrays_ << 40) + 256; }

  int64_t rows_of(const char* shape) const {
    const std::string axis = std::string(shape).substr(0, std::string(shape).find(' '));
    if (axis == "1" || axis == "2") return std::stoll(axis);
    // More than two for each key, or few.
    if (axis == "B") return std::min<int64_t>(has_optional_ ? 4 * n_ + 1 : n_ / kLanes + 1, int64_t{1} << 23);
    if (axis == "p") return kTargets;
    if (axis.ends_with('?') && !has_optional_) return 0;
    return n_ + (axis.find("+1") != std::string::npos ? 1 : 0);
  }

  const int64_t n_;
  const int64_t choices_;
  const bool has_optional_;
  uintptr_t arrays_ = 0;
};

template <class Operation>
void check(testing::Checks& checks, int64_t n, int64_t choices, bool has_optional) {
  Operation operation;
  SizeBinder binder(n, choices, has_optional);
  operation.describe(binder);
  Arena arena(reinterpret_cast<void*>(uintptr_t{1} << 40));
  reserve<CudaExecutor>(operation, arena);
  CudaExecutor executor(kStream);
  notes.launches = 0;
  run_steps(operation, executor);
  const std::string where =
      std::string(Operation::kName) + " of " + std::to_string(n) + " on sm_" + std::to_string(device_form.sm);
  checks.expect(executor.failure().empty(), where + ": " + executor.failure());
  checks.expect(notes.launches > 0, where + ": a graph of XLA's must not be empty");
  checks.expect(notes.grids_are_possible, where + ": a grid that no device has");
}

void check_error(testing::Checks& checks, cudaError_t error, const std::string& expected) {
  CudaExecutor executor(kStream);
  device_form.refusal = error;
  executor.each(1, Nothing{});
  device_form.refusal = cudaSuccess;
  checks.expect(executor.failure().find(expected) != std::string::npos,
                "no \"" + expected + "\" in: " + executor.failure());
}

struct One {
  HKV_HOST_DEVICE int32_t operator()(int64_t) const { return 1; }
};

void* nobodys() { return reinterpret_cast<void*>(uintptr_t{1} << 40); }
void zero(CudaExecutor& executor) { executor.zero(nobodys(), 4); }
void launch(CudaExecutor& executor) { executor.each(1, Nothing{}); }
void scan(CudaExecutor& executor, int64_t n) {
  executor.scan(n, One{}, static_cast<int32_t*>(nobodys()), static_cast<char*>(nobodys()));
}
void group(CudaExecutor& executor, int64_t n) {
  Arena arena(nobodys());
  Groups groups = Groups::take(arena, n, n);
  executor.group(groups, arena.take<char>(CudaExecutor::group_bytes(n)));
}
void unique(CudaExecutor& executor, int64_t n) {
  executor.unique(n, static_cast<Words*>(nobodys()), {}, {}, static_cast<char*>(nobodys()));
}
void list(CudaExecutor& executor, int64_t n) { executor.list(n, {}, static_cast<char*>(nobodys())); }
void group_few(CudaExecutor& executor) { group(executor, kSortedByBlock); }
void group_many(CudaExecutor& executor) { group(executor, kSortedByBlock + 1); }
void unique_half(CudaExecutor& executor) { unique(executor, kUniqueByBlock / 2); }
void unique_few(CudaExecutor& executor) { unique(executor, kUniqueByBlock); }
void unique_many(CudaExecutor& executor) { unique(executor, kUniqueByBlock + 1); }
void list_few(CudaExecutor& executor) { list(executor, kSortedByBlock); }
void list_many(CudaExecutor& executor) { list(executor, kSortedByBlock + 1); }

int64_t launches_of(testing::Checks& checks, void (*work)(CudaExecutor&)) {
  CudaExecutor executor(kStream);
  notes.launches = 0;
  work(executor);
  checks.expect(executor.failure().empty(), executor.failure());
  return notes.launches;
}

// What is refused is told, and ends the call: nothing is launched that would read what was not written, a
// later refusal does not hide it, and who uses the thread next is not told of it.
template <class Work>
void check_refusal(testing::Checks& checks, const std::string& expected, const Work& work) {
  CudaExecutor executor(kStream);
  device_form.refusal = cudaErrorIllegalAddress;
  work(executor);
  checks.expect(executor.failure().find(expected) == 0, "no \"" + expected + "\" in: " + executor.failure());
  checks.expect(cudaGetLastError() == cudaSuccess, expected + ": left for the next call");
  device_form.refusal = cudaSuccess;
  notes.launches = 0;
  zero(executor);
  launch(executor);
  scan(executor, 1000);
  for (const auto more : {group_few, group_many, unique_few, unique_many, list_few, list_many})
    more(executor);
  scan(executor, int64_t{1} << 31);
  executor.finish();
  checks.expect(notes.launches == 0, expected + ": and something was launched after it");
  checks.expect(executor.failure().find(expected) == 0, expected + ": is no longer what went wrong");
}

}  // namespace

int main() {
  testing::Checks checks;
  check_error(checks, cudaErrorNoKernelImageForDevice, "compiled for the GPUs " HKV_BUILT_FOR);
  check_error(checks, cudaErrorInsufficientDriver, "compiled by CUDA " + kToolkit);
  check_refusal(checks, "cudaMemsetAsync failed", zero);
  check_refusal(checks, "a kernel launch, or something before it, failed", launch);
  for (const auto few : {group_few, unique_few, list_few}) {
    check_refusal(checks, "a kernel launch, or something before it, failed", few);
  }
  check_refusal(checks, "CUB failed", [](CudaExecutor& executor) { scan(executor, 1000); });
  check_refusal(checks, "CUB failed", group_many);
  check_refusal(checks, "the batch is too large: 2147483648 items",
                [](CudaExecutor& executor) { scan(executor, int64_t{1} << 31); });
  for (const auto few : {group_few, unique_few, list_few}) {
    checks.expect(launches_of(checks, few) == 1, "a block does what it holds by more than one launch");
  }
  for (const auto many : {group_many, unique_many, list_many}) {
    checks.expect(launches_of(checks, many) > 2, "what no block holds is done by one launch");
  }
  for (const int kilobytes : {64, 99, 163, 227}) {  // of devices of capability 7.5, 8.6, 8.0 and 9.0
    device_form.block_memory = kilobytes << 10;
    const bool is_one = launches_of(checks, unique_few) == 1;
    const bool is_half_one = launches_of(checks, unique_half) == 1;
    checks.expect(is_one == (kilobytes > 128) && is_half_one == (kilobytes > 64),
                  "distinct keys by a block that has no such memory, or by none");
  }
  for (const int sm : {80, 90, 100}) {
    device_form.sm = device_form.device = sm;  // CUB remembers what it was told of a device
    int asked = 0;
    checks.expect(cub::PtxVersion(asked) == cudaSuccess && asked == 10 * sm, "CUB looks at another device");
    for (int power = 0; power <= 30; ++power) {
      for (const int64_t more : {-1, 0, 1}) {
        const int64_t n = (int64_t{1} << power) + more;
        AllOperations::visit([&]<class Operation>() {
          for (const int64_t choices : {1, 2}) check<Operation>(checks, n, choices, more != 0);
        });
      }
    }
  }
  AllOperations::visit([&]<class Operation>() {
    for (const int power : {13, 20}) {
      for (const int64_t choices : {1, 2}) {
        check<Operation>(checks, int64_t{1} << power, choices, false);
        std::printf("%s, 2^%d keys, %d candidates: %d launches\n", Operation::kName, power,
                    static_cast<int>(choices), static_cast<int>(notes.launches));
      }
    }
  });
  return checks.finish();
}
