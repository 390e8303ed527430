// Behind runtime.cc: a device that carries out the PTX that nvcc has left beside the program, in a file of
// the program's name with .ptx behind it. Launches and memsets of a capture wait for the launch of its graph.
// Once a program has loaded kernels, those that it has not loaded cannot be launched.
#include "ptx_device.h"

#include <cudaTypedefs.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <set>
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
std::map<int, std::set<const void*>> loaded;  // by device: functions that stand for kernels

// So few that batches of a test have several indices for a group, as large ones have on a device of silicon.
const int kMultiprocessors = device_form.multiprocessors = 2;

bool is_loaded(const void* function) { return loaded[device_form.device].contains(function); }

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

#if CUDART_VERSION >= 12050
// The driver, whose handles are those functions, and of the library the map of them.
CUresult get_library(CUlibrary* library, CUkernel kernel) {
  if (!kernel_names().contains(kernel)) return CUDA_ERROR_INVALID_HANDLE;
  *library = reinterpret_cast<CUlibrary>(const_cast<std::map<const void*, std::string>*>(&kernel_names()));
  return CUDA_SUCCESS;
}
CUresult count_kernels(unsigned* count, CUlibrary) {
  *count = static_cast<unsigned>(kernel_names().size());
  return CUDA_SUCCESS;
}
CUresult list_kernels(CUkernel* kernels, unsigned most, CUlibrary) {
  for (const auto& [function, name] : kernel_names()) {
    if (most-- == 0) break;
    *kernels++ = reinterpret_cast<CUkernel>(const_cast<void*>(function));
  }
  return CUDA_SUCCESS;
}
CUresult get_function(CUfunction* function, CUkernel kernel) {
  *function = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}
CUresult load_function(CUfunction function) {
  loaded[device_form.device].insert(function);
  return CUDA_SUCCESS;
}
CUresult get_state(CUfunctionLoadingState* state, CUfunction function) {
  *state = is_loaded(function) ? CU_FUNCTION_LOADING_STATE_LOADED : CU_FUNCTION_LOADING_STATE_UNLOADED;
  return CUDA_SUCCESS;
}

const std::map<std::string, void*> kDriver = {
    {"cuKernelGetLibrary", reinterpret_cast<void*>(PFN_cuKernelGetLibrary_v12050{get_library})},
    {"cuLibraryGetKernelCount", reinterpret_cast<void*>(PFN_cuLibraryGetKernelCount_v12040{count_kernels})},
    {"cuLibraryEnumerateKernels",
     reinterpret_cast<void*>(PFN_cuLibraryEnumerateKernels_v12040{list_kernels})},
    {"cuKernelGetFunction", reinterpret_cast<void*>(PFN_cuKernelGetFunction_v12000{get_function})},
    {"cuFuncLoad", reinterpret_cast<void*>(PFN_cuFuncLoad_v12040{load_function})},
    {"cuFuncIsLoaded", reinterpret_cast<void*>(PFN_cuFuncIsLoaded_v12040{get_state})},
};
#endif

}  // namespace

ptx::Memory& ptx_memory() { return memory; }

cudaError_t launch_kernel(const void* function, dim3 grid, dim3 block, size_t shared, void** arguments) {
  const ptx::Kernel& kernel = find_kernel(kernel_names().at(function));
  if (!loaded.empty() && !is_loaded(function)) ptx::stop(kernel.name + ": is not among those loaded");
  if (grid.y * grid.z * block.y * block.z != 1) ptx::stop(kernel.name + ": more than one dimension");
  if (shared != 0 && !kernel.asks_for_shared) ptx::stop(kernel.name + ": shared memory for nobody");
  if (grid.x == 0 || block.x == 0 || block.x > kernel.most_threads) return cudaErrorInvalidConfiguration;
  std::vector<char> parameters(static_cast<size_t>(kernel.parameter_bytes));
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    const auto [offset, bytes] = kernel.parameters[i];
    std::memcpy(parameters.data() + offset, arguments[i], static_cast<size_t>(bytes));
  }
  return give([&kernel, grid, block, shared, parameters] {
    ptx::run_grid(kernel, grid.x, block.x, shared, parameters, memory, order_of_threads);
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
#if CUDART_VERSION >= 12050
cudaError_t cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** address, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const auto entry = kDriver.find(name);
  *address = entry == kDriver.end() ? nullptr : entry->second;
  *found = entry == kDriver.end() ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
#endif
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = kStream;
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
