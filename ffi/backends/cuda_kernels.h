// CUDA loads a kernel when it is first launched, and may wait then for what the device is doing (CUDA
// programming guide, "Lazy Loading", potential hazards): for a collective, say, of which another device has
// yet to begin its part, whose thread waits for the lock that this one holds. So all kernels of this module,
// CUB's among them, are loaded before a program with one of them begins.
#pragma once

#include <cudaTypedefs.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "backends/cuda_executor.h"

namespace hkv {

struct LoadedKernels {
  size_t all = 0;
  size_t loaded = 0;
  std::string failure;  // the first one; empty if there was none
};

class KernelLoader {
 public:
  // The current device's.
  static LoadedKernels load() {
    KernelLoader loader;
    for (const CUkernel kernel : loader.find_kernels()) loader.load(kernel);
    return loader.result_;
  }

 private:
#if CUDART_VERSION >= 12050
  std::vector<CUkernel> find_kernels() {
    cudaKernel_t one = nullptr;  // of the module, whichever
    CUlibrary library = nullptr;
    unsigned count = 0;
    if (!is_done(cudaGetKernel(&one, reinterpret_cast<const void*>(&run_step<Nothing>)), "cudaGetKernel") ||
        !ask<PFN_cuKernelGetLibrary_v12050>("cuKernelGetLibrary", 12050, &library, one) ||
        !ask<PFN_cuLibraryGetKernelCount_v12040>("cuLibraryGetKernelCount", 12040, &count, library)) {
      return {};
    }
    std::vector<CUkernel> kernels(count);
    if (!ask<PFN_cuLibraryEnumerateKernels_v12040>("cuLibraryEnumerateKernels", 12040, kernels.data(), count,
                                                   library)) {
      return {};
    }
    result_.all = count;
    return kernels;
  }

  void load(CUkernel kernel) {
    CUfunction function = nullptr;
    CUfunctionLoadingState state = CU_FUNCTION_LOADING_STATE_UNLOADED;
    if (ask<PFN_cuKernelGetFunction_v12000>("cuKernelGetFunction", 12000, &function, kernel) &&
        ask<PFN_cuFuncLoad_v12040>("cuFuncLoad", 12040, function) &&
        ask<PFN_cuFuncIsLoaded_v12040>("cuFuncIsLoaded", 12040, &state, function) &&
        state == CU_FUNCTION_LOADING_STATE_LOADED) {
      ++result_.loaded;
    }
  }

  // Calls a function of the driver, which this module is not linked with.
  template <class Function, class... Arguments>
  bool ask(const char* name, unsigned version, Arguments... arguments) {
    void* address = nullptr;
    auto found = cudaDriverEntryPointSymbolNotFound;
    if (!is_done(cudaGetDriverEntryPointByVersion(name, &address, version, cudaEnableDefault, &found),
                 name)) {
      return false;
    }
    if (found != cudaDriverEntryPointSuccess) return is_done(cudaErrorSymbolNotFound, name);
    // The driver's errors have the numbers of the runtime's.
    return is_done(static_cast<cudaError_t>(reinterpret_cast<Function>(address)(arguments...)), name);
  }

  bool is_done(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return true;
    (void)cudaGetLastError();
    if (result_.failure.empty()) result_.failure = std::string(what) + ": " + cudaGetErrorString(error);
    return false;
  }
#else
  std::vector<CUkernel> find_kernels() {
    result_.failure = "CUDA " + kToolkit + " cannot list the kernels of a module";
    return {};
  }
  void load(CUkernel) {}
#endif

  LoadedKernels result_;
};

// Once for each device. What cannot be loaded is left to its launch, which says why.
inline const LoadedKernels& load_kernels_of(int device) {
  struct Loading {
    std::once_flag once;
    LoadedKernels kernels;
  };
  static std::mutex mutex;
  static std::map<int, Loading> devices;
  Loading* own = nullptr;
  {
    const std::lock_guard lock(mutex);
    own = &devices[device];
  }
  std::call_once(own->once, [own, device] {
    int before = 0;
    int count = 0;  // asked, not tried: a tool that watches tells of calls that fail
    if (cudaGetDeviceCount(&count) == cudaSuccess && device < count &&
        cudaGetDevice(&before) == cudaSuccess && cudaSetDevice(device) == cudaSuccess) {
      own->kernels = KernelLoader::load();
      (void)cudaSetDevice(before);
    }
    (void)cudaGetLastError();
  });
  return own->kernels;
}

}  // namespace hkv
