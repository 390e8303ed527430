// From an XLA FFI call to an operation: buffers are typed, shapes are checked by name, results that
// are updated in place must be their operands, and the last result is the workspace.
#pragma once

#include <bit>
#include <exception>
#include <stdexcept>
#include <string>

#include "binding/signature.h"
#include "xla/ffi/api/ffi.h"

namespace hkv {

namespace ffi = xla::ffi;

template <class T>
constexpr ffi::DataType element_type() {
  if constexpr (std::is_same_v<T, bool>) return ffi::DataType::PRED;
  if constexpr (std::is_same_v<T, float>) return ffi::DataType::F32;
  if constexpr (std::is_same_v<T, Digest>) return ffi::DataType::U8;
  if constexpr (std::is_same_v<T, int32_t>) return ffi::DataType::S32;
  if constexpr (kIsOfWords<T>) return ffi::DataType::U32;
}

inline RowType row_type(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32: return RowType::kFloat32;
    case ffi::DataType::BF16: return RowType::kBfloat16;
    case ffi::DataType::F16: return RowType::kFloat16;
    default: return RowType::kOther;
  }
}

template <class Executor>
class CallBinder {
 public:
  CallBinder(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
             const ffi::Dictionary& attributes)
      : operands_(operands), results_(results), attributes_(attributes) {}

  void attribute(const char* name, int64_t& value) {
    value = attribute_word(name);
    axes_.set(name, value);
  }
  // Floats come as their bits: JAX makes one of two calls whose attributes are equal, like 0.0 and -0.0.
  void attribute(const char* name, float& value) {
    value = std::bit_cast<float>(static_cast<uint32_t>(attribute_word(name)));
  }
  void attribute(const char* name, double& value) { value = std::bit_cast<double>(attribute_word(name)); }

  template <class T>
  void inout(const char* name, T& array, const char* shape) {
    bind(name, next_in_place(name), array, shape);
  }
  template <class T>
  void in(const char* name, T& array, const char* shape) {
    bind(name, next_operand(name), array, shape);
  }
  template <class T>
  void out(const char* name, T& array, const char* shape) {
    bind(name, prepared(next_result(name)), array, shape);
  }
  // Rows with a floating-point type of their own.
  void in_floats(const char* name, RowsView& rows, const char* shape) {
    bind_floats(name, next_operand(name), rows, shape);
  }
  void inout_floats(const char* name, RowsView& rows, const char* shape) {
    bind_floats(name, next_in_place(name), rows, shape);
  }
  void out_float32(const char* name, RowsView& rows, const char* shape) {
    const ffi::AnyBuffer buffer = prepared(next_result(name));
    check_type(name, buffer, ffi::DataType::F32);
    bind_rows(name, buffer, rows, shape);
  }

  // Rows of the type that is asked for: that of the first rows, if it is no floating-point one.
  void out_cast(const char* name, RowsView& rows, const char* shape) {
    const ffi::AnyBuffer buffer = prepared(next_result(name));
    if (has_rows_ && row_type(rows_type_) == RowType::kOther) return bind(name, buffer, rows, shape);
    bind_floats(name, buffer, rows, shape);
  }

  // The workspace stands behind the results.
  ffi::AnyBuffer workspace() { return prepared(next_result("workspace")); }

 private:
  int64_t attribute_word(const char* name) {
    const auto found = attributes_.get<int64_t>(name);
    if (!found.has_value()) throw std::invalid_argument(std::string("attribute ") + name + " is missing");
    return *found;
  }

  ffi::AnyBuffer next_operand(const char* name) {
    const auto buffer = operands_.get<ffi::AnyBuffer>(operand_++);
    if (!buffer.has_value()) throw std::invalid_argument(std::string("operand ") + name + " is missing");
    return *buffer;
  }
  ffi::AnyBuffer next_result(const char* name) {
    auto buffer = results_.get<ffi::AnyBuffer>(result_++);
    if (!buffer.has_value()) throw std::invalid_argument(std::string("result ") + name + " is missing");
    return **buffer;
  }

  ffi::AnyBuffer next_in_place(const char* name) {
    const ffi::AnyBuffer operand = next_operand(name);
    if (operand.untyped_data() != next_result(name).untyped_data()) {
      throw std::logic_error(std::string(name) +
                             " is not updated in place: XLA gave the result a buffer of its own");
    }
    return operand;
  }

  static ffi::AnyBuffer prepared(ffi::AnyBuffer result) {
    if constexpr (requires { Executor::prepare_result(nullptr, int64_t{0}); }) {
      Executor::prepare_result(result.untyped_data(), static_cast<int64_t>(result.size_bytes()));
    }
    return result;
  }

  template <class T>
  void bind(const char* name, const ffi::AnyBuffer& buffer, Array<T>& array, const char* shape) {
    check(name, buffer, shape);
    check_type(name, buffer, element_type<T>());
    array.data = static_cast<T*>(buffer.untyped_data());
    array.rows = buffer.dimensions()[0];
  }

  void bind(const char* name, const ffi::AnyBuffer& buffer, RowsView& rows, const char* shape) {
    if (!has_rows_) rows_type_ = buffer.element_type();
    has_rows_ = true;
    check_type(name, buffer, rows_type_);
    bind_rows(name, buffer, rows, shape);
  }

  void bind_floats(const char* name, const ffi::AnyBuffer& buffer, RowsView& rows, const char* shape) {
    if (row_type(buffer.element_type()) == RowType::kOther) {
      std::ostringstream text;
      text << name << ": expected float32, bfloat16 or float16, got " << buffer.element_type();
      throw std::invalid_argument(text.str());
    }
    bind_rows(name, buffer, rows, shape);
  }

  void bind_rows(const char* name, const ffi::AnyBuffer& buffer, RowsView& rows, const char* shape) {
    check(name, buffer, shape);
    const auto dimensions = buffer.dimensions();
    rows.data = static_cast<char*>(buffer.untyped_data());
    rows.type = row_type(buffer.element_type());
    rows.count = dimensions[0];
    rows.width = 1;
    for (size_t axis = 1; axis < dimensions.size(); ++axis) rows.width *= dimensions[axis];
    rows.row_bytes = rows.width * static_cast<int64_t>(ffi::ByteWidth(buffer.element_type()));
  }

  void check(const char* name, const ffi::AnyBuffer& buffer, const char* shape) {
    const auto dimensions = buffer.dimensions();
    const Dimensions sizes(dimensions.begin(), dimensions.size());
    const std::string expected = axes_.match(shape, sizes);
    if (expected.empty()) return;
    throw std::invalid_argument(std::string(name) + ": " + expected + ", got " + to_text(sizes));
  }

  void check_type(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType expected) {
    if (buffer.element_type() == expected) return;
    std::ostringstream text;
    text << name << ": expected element type " << expected << ", got " << buffer.element_type();
    throw std::invalid_argument(text.str());
  }

  const ffi::RemainingArgs& operands_;
  const ffi::RemainingRets& results_;
  const ffi::Dictionary& attributes_;
  Axes axes_;
  size_t operand_ = 0;
  size_t result_ = 0;
  ffi::DataType rows_type_ = ffi::DataType::INVALID;
  bool has_rows_ = false;
};

// Runs an operation on an executor. Executor::failure() says whether
// the machine accepted the work.
template <class Operation, class Executor>
ffi::Error execute(Executor& executor, const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                   const ffi::Dictionary& attributes) {
  const auto table = attributes.get<std::string_view>("table");
  const auto where = [&] {
    return std::string("jax_hkv ") + Operation::kName + " on " +
           (table.has_value() ? "\"" + std::string(*table) + "\"" : std::string("a table")) + ": ";
  };
  try {
    Operation operation;
    CallBinder<Executor> binder(operands, results, attributes);
    operation.describe(binder);
    if constexpr (requires { operation.complaint(); }) {
      if (const char* complaint = operation.complaint()) throw std::invalid_argument(complaint);
    }
    const ffi::AnyBuffer workspace = binder.workspace();
    Arena arena(workspace.untyped_data());
    reserve<Executor>(operation, arena);
    if (arena.used() > workspace.size_bytes()) {
      return ffi::Error(ffi::ErrorCode::kInternal, where() + "the workspace has " +
                                                       std::to_string(workspace.size_bytes()) + " bytes, " +
                                                       std::to_string(arena.used()) + " are needed");
    }
    run_steps(operation, executor);
    const std::string failure = executor.failure();
    if (!failure.empty()) return ffi::Error(ffi::ErrorCode::kInternal, where() + failure);
    return ffi::Error::Success();
  } catch (const std::invalid_argument& error) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, where() + error.what());
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, where() + error.what());
  }
}

}  // namespace hkv
