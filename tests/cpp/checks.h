// Counting what held and what did not.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

namespace hkv::testing {

class Checks {
 public:
  explicit Checks(bool ends_at_failure = false) : ends_at_failure_(ends_at_failure) {}

  void expect(bool holds, const std::string& what) {
    ++(holds ? passed_ : failed_);
    constexpr int kMostShown = 20;
    if (!holds && failed_ <= kMostShown) std::printf("FAILED: %s\n", what.c_str());
    if (!holds && ends_at_failure_) std::exit(finish());
  }

  // The last line of a test program, and its exit status.
  int finish() const {
    std::printf("%d passed, %d failed\n", passed_, failed_);
    return failed_ == 0 ? 0 : 1;
  }

 private:
  bool ends_at_failure_;
  int passed_ = 0;
  int failed_ = 0;
};

}  // namespace hkv::testing
