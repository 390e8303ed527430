// Behind runtime.cc: a device that carries out the PTX that nvcc has left beside the program, in a file of
// the program's name with .ptx behind it. Launches and memsets of a capture wait for the launch of its graph.
#include "ptx_device.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <utility>
#include <vector>

#include "runtime.h"

using Work = std::function<void()>;
struct CUgraph_st {
  std::vector<Work> work;
};
struct CUgraphExec_st {
  std::vector<Work> work;
};

namespace hkv::testing {
namespace {

ptx::Memory memory;
Random order_of_threads{7};
CUgraph_st* captured = nullptr;

const ptx::Kernel& find_kernel(const std::string& name) {
  static const std::map<std::string, ptx::Kernel> kKernels = [] {
    std::ifstream file(std::filesystem::read_symlink("/proc/self/exe").string() + ".ptx");
    return ptx::read_program({std::istreambuf_iterator<char>(file), {}});
  }();
  const auto found = kKernels.find(name);
  if (found == kKernels.end()) ptx::stop("the PTX beside the program has no kernel " + name);
  return found->second;
}

cudaError_t give(Work work) {
  if (captured != nullptr) {
    captured->work.push_back(std::move(work));
  } else {
    work();
  }
  return cudaSuccess;
}

bool is_array(const void* address, size_t bytes) {
  return bytes == 0 || memory.has(reinterpret_cast<uintptr_t>(address), bytes);
}

}  // namespace

ptx::Memory& ptx_memory() { return memory; }

cudaError_t launch_kernel(const void* function, dim3 grid, dim3 block, size_t shared, void** arguments) {
  const ptx::Kernel& kernel = find_kernel(kernel_name(function));
  if (grid.y * grid.z * block.y * block.z != 1) ptx::stop(kernel.name + ": more than one dimension");
  if (shared != 0) ptx::stop(kernel.name + ": shared memory that the launch asks for");
  if (grid.x == 0 || block.x == 0 || block.x > kernel.most_threads) return cudaErrorInvalidConfiguration;
  std::vector<char> parameters(static_cast<size_t>(kernel.parameter_bytes));
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    const auto [offset, bytes] = kernel.parameters[i];
    std::memcpy(parameters.data() + offset, arguments[i], static_cast<size_t>(bytes));
  }
  return give([&kernel, grid, block, parameters] {
    ptx::run_grid(kernel, grid.x, block.x, parameters, memory, order_of_threads);
  });
}

cudaError_t set_memory(void* address, int value, size_t bytes) {
  if (!is_array(address, bytes)) return cudaErrorInvalidValue;
  return give([=] {
    if (bytes > 0) std::memset(address, value, bytes);
    memory.begin_launch("memset");
    if (memory.counts) memory.traffic["memset"].written += static_cast<int64_t>(bytes / ptx::kSector);
  });
}

}  // namespace hkv::testing

using namespace hkv::testing;

extern "C" {
cudaError_t cudaMalloc(void** address, size_t bytes) {
  *address = memory.allocate(bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* address) {
  memory.free(address);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (!is_array(kind == cudaMemcpyHostToDevice ? to : from, bytes)) return cudaErrorInvalidValue;
  if (bytes > 0) std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  captured = new CUgraph_st;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  *graph = std::exchange(captured, nullptr);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = new CUgraphExec_st{graph->work};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
  for (const Work& work : executable->work) work();
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
}
