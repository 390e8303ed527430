// Runs the Python tests' operations as the CUDA backend does: fast enough for them, on one thread.
#pragma once

#include <bit>
#include <random>

#include "host_tiles.h"

namespace hkv::testing {

// Runs operations as the CUDA executor does, one tile after the other, in an order of chance: no result may
// depend on it. What an operation leaves unwritten is garbage.
class LockstepExecutor : public OrdersOnHost<LockstepExecutor> {
 public:
  static void prepare_result(void* data, int64_t bytes) {
    constexpr int kGarbage = 0xa5;
    if (bytes > 0) memset(data, kGarbage, static_cast<size_t>(bytes));
  }

  using OrdersOnHost<LockstepExecutor>::each;
  template <class Step>
  void each(int64_t count, const Step& step) const {
    if (count <= 0) return;
    if constexpr (Step::kGroup == 1) {
      any_order().visit(count, [&](int64_t i) { step(SerialGroup{}, i); });
    } else {
      static thread_local Lockstep lockstep;
      const Order order = any_order();
      this->run_tiles(lockstep, chance()() % 2 == 0, count, step,
                      [&](int64_t tiles, const auto& run) { order.visit(tiles, run); });
    }
  }
  template <class First, class Second>
  void each(int64_t count, const First& first, const Second& second) const {
    each(count, Chain<First, Second>{first, second});
  }

 private:
  // Every number below count: an odd multiple of it modulo a power of two.
  struct Order {
    uint64_t factor;
    uint64_t first;

    template <class Visit>
    void visit(int64_t count, const Visit& visitor) const {
      const uint64_t mask = std::bit_ceil(static_cast<uint64_t>(count)) - 1;
      for (uint64_t k = 0; k <= mask; ++k) {
        const auto i = static_cast<int64_t>((k * factor + first) & mask);
        if (i < count) visitor(i);
      }
    }
  };

  static std::mt19937_64& chance() {
    static thread_local std::mt19937_64 generator(20261122);
    return generator;
  }
  static Order any_order() { return {chance()() | 1, chance()()}; }
};

}  // namespace hkv::testing
