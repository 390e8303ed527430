// All operations with the CUDA executor, launched and captured into a graph, against the CPU's, byte for
// byte. A program of its own, without XLA, so that compute-sanitizer can watch it. With the argument
// "small" it leaves out the large batches, which a watched program would take too long for.
#include <cstdio>
#include <string_view>

#include "device_machine.h"
#include "scenarios.h"

namespace {

using namespace hkv;
using namespace hkv::testing;

constexpr uint64_t kSeed = 20240229;

}  // namespace

int main(int count, char** arguments) {
  const bool is_small = count > 1 && std::string_view(arguments[1]) == "small";
  int devices = 0;
  require(cudaGetDeviceCount(&devices), "no CUDA device");
  Checks checks;
  CpuMachine cpu("the CPU", 4, 'a');
  CudaMachine launched("the device", false, 'b');
  CudaMachine captured("the device, captured", true, 'c');
  Together machines(checks, {&cpu, &captured, &launched});
  run_scenarios(machines, checks, all_forms(1, 250, kNarrow), {40, 0, 140, 160, 1, 60}, kSeed);
  run_scenarios(machines, checks, all_forms(2, 600, kWide), {300, 200, 300}, kSeed + 1000);
  run_scenarios(machines, checks, full_forms(), full_batches(6), kSeed + 5000);
  // Enough for CUB to sort and scan in several tiles.
  run_scenarios(machines, checks, {{Policy::kLfu, 2, 60, RowType::kFloat32, 8, 12000}}, {20000},
                kSeed + 4000);
  if (!is_small) {
    run_scenarios(machines, checks, all_forms(60, 12000, kNarrow), {20000, 40000}, kSeed + 2000);
    run_scenarios(machines, checks, all_forms(4000, 700000, kWide), {400000, 1000000}, kSeed + 3000);
  }
  machines.expect_all_called();
  return checks.finish();
}
