// All operations with the CUDA executor, launched and captured into a graph, against the CPU's, byte for
// byte. A program of its own, without XLA, so that compute-sanitizer can watch it. With the argument
// "small" it leaves out the large batches, with "watched" some of the forms as well; with "broken" it does
// what "small" does until something differs. With "traffic" and a number of buckets it counts instead, on a
// device that can.
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "backends/cuda_kernels.h"
#include "device_machine.h"
#include "scenarios.h"
#include "traffic.h"

namespace {

using namespace hkv;
using namespace hkv::testing;

constexpr uint64_t kSeed = 20240229;

}  // namespace

int main(int count, char** arguments) {
  const std::string_view size = count > 1 ? arguments[1] : "";
  const auto forms_of = [&](const std::vector<Form>& all) { return size == "watched" ? some_of(all) : all; };
  int devices = 0;
  require(cudaGetDeviceCount(&devices), "no CUDA device");
  Checks checks(size == "broken");
#if CUDART_VERSION >= 12050
  // On the last device all is launched then; where there is one only, on that.
  for (const int device : {0, devices - 1}) {
    const LoadedKernels& kernels = load_kernels_of(device);
    checks.expect(kernels.failure.empty(), "kernels are not loaded: " + kernels.failure);
    checks.expect(kernels.all > 0 && kernels.loaded == kernels.all, "not all kernels are loaded");
    std::printf("%zu kernels are loaded\n", kernels.loaded);
  }
  load_kernels_of(devices);
  int current = -1;
  checks.expect(cudaGetLastError() == cudaSuccess,
                "a device that is not there is what later calls are told of");
  checks.expect(cudaGetDevice(&current) == cudaSuccess && current == 0,
                "loading leaves another device current");
#endif
  require(cudaSetDevice(devices - 1), "cudaSetDevice");
  CpuMachine cpu("the CPU", 4, 'a');
  CudaMachine launched("the device", false, 'b');
  CudaMachine captured("the device, captured", true, 'c');
  if (size == "traffic") {
    if (count != 3 || count_traffic == nullptr) {
      std::printf("traffic: no number of buckets, or no device that counts\n");
      return 2;
    }
    count_traffic(cpu, launched, std::atoll(arguments[2]));
    return 0;
  }
  // A device without silicon, which counts, carries out the same instructions for both.
  std::vector<Machine*> all = {&cpu, &captured};
  if (count_traffic == nullptr) all.push_back(&launched);
  Together machines(checks, all);
  run_scenarios(machines, checks, forms_of(all_forms(1, 250, kNarrow)), {40, 0, 140, 160, 1, 64}, kSeed);
  run_scenarios(machines, checks, forms_of(all_forms(2, 600, kWide)), {300, 200, 300}, kSeed + 1000);
  run_scenarios(machines, checks, full_forms(), full_batches(6), kSeed + 5000);
  run_scenarios(machines, checks, crowded_forms(), kCrowdedBatches, kSeed + 3001);
  // Enough for CUB to sort and scan in several tiles, and what a block sorts.
  run_scenarios(machines, checks, {{Policy::kLfu, 2, 60, RowType::kFloat32, 8, 12000}},
                {20000, kSortedByBlock, kSortedByBlock - 1, 2049, 1025, 1024}, kSeed + 4000);
  if (size.empty()) {
    run_scenarios(machines, checks, all_forms(60, 12000, kNarrow), {20000, 40000}, kSeed + 2000);
    // For each form the host makes and compares gigabytes, while the device waits.
    const std::vector<Form> forms = some_of(all_forms(4000, 700000, kWide));
    run_scenarios(machines, checks, forms, {400000, 1000000}, kSeed + 3000);
  }
  machines.expect_all_called();
  return checks.finish();
}
