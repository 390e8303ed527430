// Counting what held and what did not.
#pragma once

#include <cstdio>
#include <string>

namespace hkv::testing {

class Checks {
 public:
  void expect(bool holds, const std::string& what) {
    ++(holds ? passed_ : failed_);
    constexpr int kMostShown = 20;
    if (!holds && failed_ <= kMostShown) std::printf("FAILED: %s\n", what.c_str());
  }

  // The last line of a test program, and its exit status.
  int finish() const {
    std::printf("%d passed, %d failed\n", passed_, failed_);
    return failed_ == 0 ? 0 : 1;
  }

 private:
  int passed_ = 0;
  int failed_ = 0;
};

}  // namespace hkv::testing
