// In place of the CPU backend, the steps of the CUDA backend: its tiles, hash table and radix sort, under
// whatever calls the package (HKV_CPU_SOURCE of CMakeLists.txt).
#include "lockstep.h"

#include "backends/workers.h"
#include "binding/handler.h"
#include "binding/module.h"

namespace hkv {
namespace {

struct LockstepBackend {
  using Executor = testing::LockstepExecutor;

  template <class Operation>
  static XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame) {
    static auto* const handler =
        ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs().To(&call<Operation>).release();
    return handler->Call(frame);
  }

 private:
  template <class Operation>
  static ffi::Error call(ffi::RemainingArgs operands, ffi::RemainingRets results,
                         ffi::Dictionary attributes) {
    const SubnormalsKept subnormals;
    Executor executor;
    return execute<Operation>(executor, operands, results, attributes);
  }
};

}  // namespace
}  // namespace hkv

NB_MODULE(_cpu, extension) {
  hkv::define_module<hkv::LockstepBackend>(extension);
  extension.attr("is_lockstep") = true;
}
