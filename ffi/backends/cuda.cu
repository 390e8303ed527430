// The CUDA backend: operations on XLA's stream, or captured into its command buffers.
#include "backends/cuda_executor.h"
#include "backends/cuda_kernels.h"
#include "binding/handler.h"
#include "binding/module.h"

namespace hkv {
namespace {

struct CudaBackend {
  using Executor = CudaExecutor;

  template <class Operation>
  static XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame) {
    static auto* const handler = ffi::Ffi::Bind()
                                     .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                     .RemainingArgs()
                                     .RemainingRets()
                                     .Attrs()
                                     .To(&call<Operation>, {ffi::Traits::kCmdBufferCompatible})
                                     .release();
    return handler->Call(frame);
  }

  // Before each execution of a program.
  static XLA_FFI_Error* initializer(XLA_FFI_CallFrame* frame) {
    static auto* const handler = ffi::Ffi::BindInitialize()
                                     .Ctx<ffi::DeviceOrdinal>()
                                     .RemainingArgs()
                                     .RemainingRets()
                                     .Attrs()
                                     .To(&initialize)
                                     .release();
    return handler->Call(frame);
  }

 private:
  static ffi::Error initialize(int32_t device, ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
    load_kernels_of(device);
    return ffi::Error::Success();
  }

  template <class Operation>
  static ffi::Error call(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                         ffi::Dictionary attributes) {
    Executor executor(stream);
    return execute<Operation>(executor, operands, results, attributes);
  }
};

}  // namespace
}  // namespace hkv

NB_MODULE(_cuda, extension) { hkv::define_module<hkv::CudaBackend>(extension); }
