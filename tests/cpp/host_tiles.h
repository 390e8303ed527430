// Tiles of a warp on several host threads, so that the sanitizers see what the device does: members of a tile
// take turns, neighbouring tiles run at the same time.
#pragma once

#include <algorithm>
#include <barrier>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "backends/distinct.h"
#include "lockstep_tile.h"

namespace hkv::testing {

// A fixed set of threads that all run one job at a time, each with the members of a tile.
class Team {
 public:
  explicit Team(int size) : gate_(size + 1), tiles_(static_cast<size_t>(size)) {
    for (int thread = 0; thread < size; ++thread) {
      threads_.emplace_back([this, thread] { serve(thread); });
    }
  }
  ~Team() {
    job_ = nullptr;
    gate_.arrive_and_wait();
    for (std::thread& thread : threads_) thread.join();
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return static_cast<int>(threads_.size()); }
  Lockstep& tile(int thread) { return tiles_[static_cast<size_t>(thread)]; }

  // job(thread), on every thread.
  void run(const std::function<void(int)>& job) {
    job_ = &job;
    gate_.arrive_and_wait();
    gate_.arrive_and_wait();
  }

 private:
  void serve(int thread) {
    for (;;) {
      gate_.arrive_and_wait();
      if (job_ == nullptr) return;
      (*job_)(thread);
      gate_.arrive_and_wait();
    }
  }

  std::barrier<> gate_;
  const std::function<void(int)>* job_ = nullptr;
  std::vector<Lockstep> tiles_;
  std::vector<std::thread> threads_;
};

// What executors of tiles on the host have in common: scans and sorts are the standard library's.
template <class Executor>
class OrdersOnHost : public ManyWorkers<Executor> {
 public:
  std::string failure() const { return {}; }
  void zero(void* data, int64_t bytes) const {
    std::fill_n(static_cast<char*>(data), static_cast<size_t>(bytes), char{0});
  }

  // So few that they have several indices each.
  template <class Step>
  static int64_t groups_in_turns() {
    return 5;
  }

  static int64_t scan_bytes(int64_t) { return 0; }
  template <class Terms>
  void scan(int64_t n, const Terms& terms, int32_t* sums, char*) const {
    for (int64_t i = 0, sum = 0; i < n; sum += terms(i++)) sums[i] = static_cast<int32_t>(sum);
  }

  // By the bits that are needed, as the device does it.
  static int64_t group_bytes(int64_t) { return 0; }
  void group(Groups& groups, char*) const {
    const int unused = 32 - groups.bits();
    const uint32_t* targets = groups.targets.current;
    std::vector<int32_t> order(static_cast<size_t>(groups.n));
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, {}, [=](int32_t at) { return targets[at] << unused; });
    for (size_t at = 0; at < order.size(); ++at) {
      groups.targets.other[at] = targets[order[at]];
      groups.items.other[at] = groups.items.current[order[at]];
    }
    groups.targets.turn();
    groups.items.turn();
  }

 protected:
  // The tiles of a step for so many indices that are one thread's: `visit(tiles, run)` runs them in its
  // order, the same for all members.
  template <class Step, class Visit>
  static void run_tiles(Lockstep& lockstep, bool upwards, int64_t count, const Step& step,
                        const Visit& visit) {
    constexpr int kSize = Step::kGroup;
    constexpr int64_t kIndices = kHasOwnIndex<Step> ? kSize : 1;
    const int64_t tiles = (count + kIndices - 1) / kIndices;
    lockstep.run(kSize, upwards, [&](int member) {
      visit(tiles, [&](int64_t tile) {
        const int64_t i = kHasOwnIndex<Step> ? tile * kSize + member : tile;
        step(LockstepTile<kSize>{{&lockstep, member}}, i);
        lockstep.end(member);
      });
    });
  }
};

// Runs operations as the CUDA executor does, with tiles on several threads.
class HostTileExecutor : public OrdersOnHost<HostTileExecutor> {
 public:
  explicit HostTileExecutor(Team& team) : team_(team) {}

  using OrdersOnHost<HostTileExecutor>::each;
  template <class Step>
  void each(int64_t count, const Step& step) const {
    team_.run([&](int thread) {
      const auto visit = [&](int64_t end, const auto& run) {
        for (int64_t i = thread; i < end; i += team_.size()) run(i);
      };
      if constexpr (Step::kGroup == 1) {
        visit(count, [&](int64_t i) { step(SerialGroup{}, i); });
      } else {
        this->run_tiles(team_.tile(thread), thread % 2 == 0, count, step, visit);
      }
    });
  }
  template <class First, class Second>
  void each(int64_t count, const First& first, const Second& second) const {
    each(count, Chain<First, Second>{first, second});
  }

 private:
  Team& team_;
};

}  // namespace hkv::testing
