// Named arrays, and operations bound to them by name.
#pragma once

#include <cctype>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "ops/all.h"

namespace hkv::testing {

inline int64_t element_bytes(RowType type) {
  if (type == RowType::kFloat32) return 4;
  return type == RowType::kOther ? 1 : 2;
}

// An array on the host: `rows` along its leading axis.
struct Buffer {
  int64_t rows = 0;
  RowType type = RowType::kOther;
  int64_t width = 1;
  std::vector<char> bytes;

  template <class T>
  static Buffer of(int64_t rows, const std::vector<T>& elements) {
    Buffer buffer{rows, RowType::kOther, 1, std::vector<char>(elements.size() * sizeof(T))};
    if (!elements.empty()) memcpy(buffer.bytes.data(), elements.data(), buffer.bytes.size());
    return buffer;
  }
  template <class T>
  static Buffer of(const std::vector<T>& elements) {
    return of(static_cast<int64_t>(elements.size()), elements);
  }
  static Buffer of_rows(int64_t rows, RowType type, int64_t width) {
    return {rows, type, width, std::vector<char>(static_cast<size_t>(rows * width * element_bytes(type)))};
  }

  template <class T>
  std::vector<T> as() const {
    std::vector<T> elements(bytes.size() / sizeof(T));
    if (!bytes.empty()) memcpy(elements.data(), bytes.data(), bytes.size());
    return elements;
  }
};

using Store = std::map<std::string, Buffer>;
using Attributes = std::map<std::string, double>;
using Names = std::map<std::string, std::string>;  // of an operation's arguments: their names in the store

// A table without an entry.
inline Store empty_table(int64_t buckets, RowType type, int64_t width) {
  const int64_t slots = buckets * kLanes;
  const std::vector<Words> words(static_cast<size_t>(slots));
  return {{"clock", Buffer::of(std::vector<uint32_t>(2))},
          {"epoch", Buffer::of(std::vector<uint32_t>(1))},
          {"digests", Buffer::of(buckets, std::vector<Digest>(static_cast<size_t>(slots)))},
          {"keys", Buffer::of(buckets, words)},
          {"scores", Buffer::of(buckets, words)},
          {"occupancy", Buffer::of(std::vector<int32_t>(static_cast<size_t>(buckets)))},
          {"oldest", Buffer::of(std::vector<Oldest>(static_cast<size_t>(buckets)))},
          {"values", Buffer::of_rows(slots, type, width)}};
}

// Binds an operation's arguments to arrays of a store, which `Memory` brings to a machine. Results are
// filled with `garbage` first; it differs between machines, and so does what one leaves unwritten.
template <class Memory>
class StoreBinder {
 public:
  StoreBinder(Store& store, Memory& memory, const Attributes& attributes, const Names& names, char garbage)
      : store_(store), memory_(memory), attributes_(attributes), names_(names), garbage_(garbage) {}

  template <class T>
  void attribute(const char* name, T& value) {
    const auto found = attributes_.find(name);
    if (found != attributes_.end()) value = static_cast<T>(found->second);
    if constexpr (std::is_same_v<T, int64_t>) sizes_[name] = value;
  }

  template <class A>
  void inout(const char* name, A& array, const char* shape) {
    in(name, array, shape);
  }
  template <class T>
  void in(const char* name, Array<T>& array, const char* shape) {
    Buffer& buffer = operand(name, shape);
    array = {static_cast<T*>(memory_.upload(buffer)), buffer.rows};
  }
  void in(const char* name, RowsView& rows, const char* shape) {
    const Buffer& buffer = in_rows(name, rows, shape);
    type_ = buffer.type;
    width_ = buffer.width;
  }
  void in_floats(const char* name, RowsView& rows, const char* shape) {
    width_ = in_rows(name, rows, shape).width;
  }
  void inout_floats(const char* name, RowsView& rows, const char* shape) { in_rows(name, rows, shape); }

  template <class T>
  void out(const char* name, Array<T>& array, const char* shape) {
    const std::vector<std::string> tokens = split(shape);
    // Words are the last axis themselves.
    int64_t elements = std::is_same_v<T, Words> ? sizeof(uint32_t) : sizeof(T);
    for (const std::string& token : tokens) elements *= size_of(token);
    Buffer& buffer = result(name, {size_of(tokens[0]), RowType::kOther, 1, {}}, elements);
    array = {static_cast<T*>(memory_.upload(buffer)), buffer.rows};
  }
  void out(const char* name, RowsView& rows, const char* shape) { out_rows(name, rows, shape, type_); }
  void out_float32(const char* name, RowsView& rows, const char* shape) {
    out_rows(name, rows, shape, RowType::kFloat32);
  }
  // Without a wish the type of the call's first rows, or float32.
  void out_cast(const char* name, RowsView& rows, const char* shape) {
    const auto wish = attributes_.find("cast");
    out_rows(name, rows, shape,
             wish == attributes_.end() ? type_ : static_cast<RowType>(static_cast<int>(wish->second)));
  }

 private:
  Buffer& named(const char* name) {
    const auto found = names_.find(name);
    return store_[found == names_.end() ? name : found->second];
  }

  Buffer& operand(const char* name, const char* shape) {
    Buffer& buffer = named(name);
    const std::string axis = split(shape)[0];
    if (axis.ends_with("+1")) sizes_.try_emplace(axis.substr(0, axis.size() - 2), buffer.rows - 1);
    if (axis.find_first_of("?+0123456789") == std::string::npos) sizes_[axis] = buffer.rows;
    return buffer;
  }

  const Buffer& in_rows(const char* name, RowsView& rows, const char* shape) {
    Buffer& buffer = operand(name, shape);
    view(buffer, rows);
    return buffer;
  }

  void out_rows(const char* name, RowsView& rows, const char* shape, RowType type) {
    const int64_t count = size_of(split(shape)[0]);
    view(result(name, {count, type, width_, {}}, count * width_ * element_bytes(type)), rows);
  }

  Buffer& result(const char* name, const Buffer& form, int64_t bytes) {
    Buffer& buffer = named(name);
    buffer = form;
    buffer.bytes.assign(static_cast<size_t>(bytes), garbage_);
    return buffer;
  }

  void view(Buffer& buffer, RowsView& rows) {
    char* data = static_cast<char*>(memory_.upload(buffer));
    rows = {data, buffer.type, buffer.rows, buffer.width, buffer.width * element_bytes(buffer.type)};
  }

  static std::vector<std::string> split(const char* shape) {
    std::istringstream stream{std::string(shape)};
    std::vector<std::string> tokens;
    for (std::string token; stream >> token;) tokens.push_back(token);
    return tokens;
  }

  int64_t size_of(const std::string& token) {
    if (std::isdigit(static_cast<unsigned char>(token[0]))) return std::stoll(token);
    if (token.ends_with("+1")) return sizes_.at(token.substr(0, token.size() - 2)) + 1;
    return sizes_.at(token);
  }

  Store& store_;
  Memory& memory_;
  const Attributes& attributes_;
  const Names& names_;
  const char garbage_;
  RowType type_ = RowType::kFloat32;  // of the call's first rows
  int64_t width_ = 1;
  std::map<std::string, int64_t> sizes_;
};

}  // namespace hkv::testing
