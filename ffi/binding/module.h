// The Python face of a backend: its handlers as capsules, the signatures, and workspace sizes.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "binding/signature.h"
#include "ops/all.h"
#include "xla/ffi/api/c_api.h"

namespace hkv {

namespace nb = nanobind;

inline nb::tuple as_tuple(const Argument& argument) {
  return nb::make_tuple(argument.name, argument.type, argument.shape, argument.in_place);
}

inline nb::dict as_dict(const Signature& signature) {
  nb::list operands;
  nb::list results;
  for (const Argument& argument : signature.operands) operands.append(as_tuple(argument));
  for (const Argument& argument : signature.results) results.append(as_tuple(argument));
  nb::dict entries;
  entries["name"] = signature.name;
  entries["per_position"] = signature.per_position;
  entries["has_workspace"] = signature.has_workspace;
  entries["attributes"] = signature.attributes;
  entries["operands"] = operands;
  entries["results"] = results;
  return entries;
}

inline nb::capsule as_capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// `Backend` has a type Executor, a template `handler<Operation>`, an XLA_FFI_Handler, and maybe an
// `initializer`, another one, of all operations.
template <class Backend>
void define_module(nb::module_& extension) {
  extension.def("handlers", [] {
    nb::dict handlers;
    AllOperations::visit([&]<class Operation>() {
      nb::dict stages;
      stages["execute"] = as_capsule(&Backend::template handler<Operation>);
      if constexpr (requires { &Backend::initializer; }) {
        stages["initialize"] = as_capsule(&Backend::initializer);
      }
      handlers[Operation::kName] = stages;
    });
    return handlers;
  });
  extension.def("signatures", [] {
    nb::list signatures;
    AllOperations::visit([&]<class Operation>() {
      signatures.append(as_dict(signature_of<typename Backend::Executor, Operation>()));
    });
    return signatures;
  });
  extension.def(
      "workspace_bytes",
      [](const std::string& name, const std::vector<std::vector<int64_t>>& shapes,
         const std::map<std::string, int64_t>& attributes) {
        size_t bytes = 0;
        AllOperations::visit([&]<class Operation>() {
          if (name == Operation::kName) {
            bytes = workspace_bytes<typename Backend::Executor, Operation>(shapes, attributes);
          }
        });
        return bytes;
      },
      nb::arg("name"), nb::arg("shapes"), nb::arg("attributes"));
  extension.attr("built_with_jaxlib") = HKV_BUILT_WITH_JAXLIB;
  extension.attr("xla_ffi_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
}

}  // namespace hkv
