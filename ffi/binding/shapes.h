// The shapes of ops/operation.h ("n 2", "S ...", "n? 2", "n+1", "n+1?"), checked and unified.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace hkv {

using Dimensions = std::span<const int64_t>;

inline std::string to_text(Dimensions dimensions) {
  std::ostringstream text;
  text << "[";
  for (size_t i = 0; i < dimensions.size(); ++i) text << (i ? ", " : "") << dimensions[i];
  text << "]";
  return text.str();
}

// The sizes that axis names have in one call.
class Axes {
 public:
  void set(const std::string& name, int64_t size) { sizes_[name] = size; }

  // Empty if the dimensions fit the shape, else what was expected.
  std::string match(std::string_view shape, Dimensions dimensions) {
    std::istringstream tokens{std::string(shape)};
    std::string token;
    size_t axis = 0;
    while (tokens >> token) {
      if (token == "...") {
        if (!match_row(dimensions.subspan(axis))) return expectation(shape);
        return "";
      }
      if (axis == dimensions.size() || !match_axis(token, dimensions[axis])) {
        return expectation(shape);
      }
      ++axis;
    }
    return axis == dimensions.size() ? "" : expectation(shape);
  }

 private:
  bool match_row(Dimensions row) {
    if (!has_row_) row_.assign(row.begin(), row.end());
    has_row_ = true;
    return std::vector<int64_t>(row.begin(), row.end()) == row_;
  }

  bool match_axis(std::string token, int64_t size) {
    if (std::isdigit(static_cast<unsigned char>(token[0]))) return size == std::stoll(token);
    if (token.ends_with("?")) {
      if (size == 0) return true;
      token.pop_back();
    }
    int64_t added = 0;
    if (token.ends_with("+1")) {
      added = 1;
      token.resize(token.size() - 2);
    }
    return sizes_.try_emplace(token, size - added).first->second + added == size;
  }

  std::string expectation(std::string_view shape) const {
    std::ostringstream text;
    text << "expected shape [" << shape << "]";
    const char* separator = " with ";
    for (const auto& [name, size] : sizes_) {
      if (shape.find(name) == std::string_view::npos) continue;
      text << separator << name << " = " << size;
      separator = ", ";
    }
    if (has_row_ && shape.find("...") != std::string_view::npos) {
      text << separator << "rows of " << to_text(row_);
    }
    return text.str();
  }

  std::map<std::string, int64_t> sizes_;
  std::vector<int64_t> row_;
  bool has_row_ = false;
};

}  // namespace hkv
