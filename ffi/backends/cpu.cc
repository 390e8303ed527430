// The CPU backend: operations on XLA's own thread pool.
#include "backends/cpu_executor.h"
#include "binding/handler.h"
#include "binding/module.h"

namespace hkv {
namespace {

struct CpuBackend {
  using Executor = CpuExecutor<ffi::ThreadPool>;

  template <class Operation>
  static XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame) {
    static auto* const handler = ffi::Ffi::Bind()
                                     .Ctx<ffi::ThreadPool>()
                                     .RemainingArgs()
                                     .RemainingRets()
                                     .Attrs()
                                     .To(&call<Operation>)
                                     .release();
    return handler->Call(frame);
  }

 private:
  template <class Operation>
  static ffi::Error call(ffi::ThreadPool pool, ffi::RemainingArgs operands, ffi::RemainingRets results,
                         ffi::Dictionary attributes) {
    Executor executor(pool);
    return execute<Operation>(executor, operands, results, attributes);
  }
};

}  // namespace
}  // namespace hkv

NB_MODULE(_cpu, extension) { hkv::define_module<hkv::CpuBackend>(extension); }
