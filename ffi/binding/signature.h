// What Python is told of an operation: names, element types, shapes, and what is updated in place.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "binding/shapes.h"
#include "ops/operation.h"

namespace hkv {

template <class T>
inline constexpr bool kIsOfWords =
    std::is_same_v<T, uint32_t> || std::is_same_v<T, Words> || std::is_same_v<T, Oldest>;

// The NumPy name of an attribute's type or of an array's element type. Words are two uint32, Oldest are four.
template <class T>
constexpr const char* type_name() {
  if constexpr (std::is_same_v<T, bool>) return "bool";
  if constexpr (std::is_same_v<T, float>) return "float32";
  if constexpr (std::is_same_v<T, double>) return "float64";
  if constexpr (std::is_same_v<T, int64_t>) return "int64";
  if constexpr (std::is_same_v<T, Digest>) return "uint8";
  if constexpr (std::is_same_v<T, int32_t>) return "int32";
  if constexpr (kIsOfWords<T>) return "uint32";
}

inline constexpr const char* kRowType = "row";  // the element type of the call's first rows
inline constexpr const char* kFloatType = "float";  // float32, bfloat16 or float16, whatever the others have
inline constexpr const char* kCastType = "cast";  // the type that the call asks for; no number, no other type

struct Argument {
  std::string name;
  std::string type;
  std::string shape;
  bool in_place;
};

struct Signature {
  std::string name;
  bool per_position = false;
  bool has_workspace = false;
  std::vector<std::pair<std::string, std::string>> attributes;  // name and type
  std::vector<Argument> operands;
  std::vector<Argument> results;
};

class SignatureBinder {
 public:
  explicit SignatureBinder(Signature& signature) : signature_(signature) {}

  template <class T>
  void attribute(const char* name, T) {
    signature_.attributes.emplace_back(name, type_name<T>());
  }

  template <class T>
  void inout(const char* name, const T& array, const char* shape) {
    operand(name, array, shape, true);
    result(name, array, shape, true);
  }
  template <class T>
  void in(const char* name, const T& array, const char* shape) {
    operand(name, array, shape, false);
  }
  template <class T>
  void out(const char* name, const T& array, const char* shape) {
    result(name, array, shape, false);
  }
  void in_floats(const char* name, const RowsView&, const char* shape) {
    signature_.operands.push_back({name, kFloatType, shape, false});
  }
  void inout_floats(const char* name, const RowsView&, const char* shape) {
    signature_.operands.push_back({name, kFloatType, shape, true});
    signature_.results.push_back({name, kFloatType, shape, true});
  }
  void out_float32(const char* name, const RowsView&, const char* shape) {
    signature_.results.push_back({name, "float32", shape, false});
  }
  void out_cast(const char* name, const RowsView&, const char* shape) {
    signature_.results.push_back({name, kCastType, shape, false});
  }

 private:
  template <class T>
  static const char* type_of(const Array<T>&) {
    return type_name<T>();
  }
  static const char* type_of(const RowsView&) { return kRowType; }

  template <class T>
  void operand(const char* name, const T& array, const char* shape, bool in_place) {
    signature_.operands.push_back({name, type_of(array), shape, in_place});
  }
  template <class T>
  void result(const char* name, const T& array, const char* shape, bool in_place) {
    signature_.results.push_back({name, type_of(array), shape, in_place});
  }

  Signature& signature_;
};

// Fills in what `reserve` reads, from the shapes known while tracing: attributes and leading axes.
class TraceBinder {
 public:
  TraceBinder(const std::vector<std::vector<int64_t>>& shapes,
              const std::map<std::string, int64_t>& attributes)
      : shapes_(shapes), attributes_(attributes) {}

  void attribute(const char* name, int64_t& value) {
    const auto found = attributes_.find(name);
    if (found != attributes_.end()) value = found->second;
  }
  void attribute(const char*, float&) {}
  void attribute(const char*, double&) {}

  template <class T>
  void inout(const char*, T& array, const char*) {
    set_size(array);
  }
  template <class T>
  void in(const char*, T& array, const char*) {
    set_size(array);
  }
  template <class T>
  void out(const char*, T&, const char*) {}
  void in_floats(const char*, RowsView& rows, const char*) { set_size(rows); }
  void inout_floats(const char*, RowsView& rows, const char*) { set_size(rows); }
  void out_float32(const char*, RowsView&, const char*) {}
  void out_cast(const char*, RowsView&, const char*) {}

 private:
  template <class T>
  void set_size(Array<T>& array) {
    array.rows = shapes_.at(next_++).at(0);
  }
  void set_size(RowsView& rows) {
    const std::vector<int64_t>& shape = shapes_.at(next_++);
    rows.count = shape.at(0);
    rows.width = 1;
    for (size_t axis = 1; axis < shape.size(); ++axis) rows.width *= shape[axis];
  }

  const std::vector<std::vector<int64_t>>& shapes_;
  const std::map<std::string, int64_t>& attributes_;
  size_t next_ = 0;
};

template <class Operation, class Executor>
inline constexpr bool kHasWorkspace =
    requires(Operation operation, Arena arena) { operation.template reserve<Executor>(arena); };

template <class Executor, class Operation>
Signature signature_of() {
  Signature signature;
  signature.name = Operation::kName;
  signature.per_position = Operation::kPerPosition;
  signature.has_workspace = kHasWorkspace<Operation, Executor>;
  Operation operation;
  SignatureBinder binder(signature);
  operation.describe(binder);
  return signature;
}

template <class Executor, class Operation>
void reserve(Operation& operation, Arena& arena) {
  if constexpr (kHasWorkspace<Operation, Executor>) operation.template reserve<Executor>(arena);
}

// Bytes of workspace that a call needs, for operands of the given shapes.
template <class Executor, class Operation>
size_t workspace_bytes(const std::vector<std::vector<int64_t>>& shapes,
                       const std::map<std::string, int64_t>& attributes) {
  Operation operation;
  TraceBinder binder(shapes, attributes);
  operation.describe(binder);
  Arena arena;
  reserve<Executor>(operation, arena);
  return arena.used();
}

}  // namespace hkv
