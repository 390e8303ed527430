// Tiles of a warp whose members are host threads, so that the sanitizers see what the device does: an
// exchange meets and passes values but orders no memory (as __shfl_xor_sync), `sync` orders memory
// (as __syncwarp), and neighbouring tiles run independently.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "backends/distinct.h"

namespace hkv::testing {

// The meeting point of a tile's members.
class Meeting {
 public:
  explicit Meeting(int members) : members_(members) {}

  // ThreadSanitizer must not learn an order of memory from an exchange, hence no_sanitize. (Clang's
  // learns it all the same: it finds less, but reports nothing wrong.)
  __attribute__((no_sanitize("thread"))) uint64_t exchange(int member, uint64_t value, int other) {
    const uint64_t* values = meet(member, value);
    return __atomic_load_n(values + other, __ATOMIC_RELAXED);
  }

  // One bit for each member.
  __attribute__((no_sanitize("thread"))) uint32_t ballot(int member, bool flag) {
    const uint64_t* values = meet(member, flag ? 1 : 0);
    uint32_t flags = 0;
    for (int other = 0; other < members_; ++other) {
      flags |= static_cast<uint32_t>(__atomic_load_n(values + other, __ATOMIC_RELAXED)) << other;
    }
    return flags;
  }

  void sync(int member) {
    order_.fetch_add(1, std::memory_order_acq_rel);
    meet(member, 0);
    order_.fetch_add(1, std::memory_order_acq_rel);
  }

 private:
  static constexpr int kMostMembers = 32;

  // The values of all members, until this one has met them twice more.
  __attribute__((no_sanitize("thread"))) const uint64_t* meet(int member, uint64_t value) {
    const uint32_t phase = __atomic_load_n(&phase_, __ATOMIC_RELAXED);
    uint64_t* values = values_[phase & 1];  // the other half may still be read
    __atomic_store_n(values + member, value, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&arrived_, 1, __ATOMIC_ACQ_REL) == members_) {
      __atomic_store_n(&arrived_, 0, __ATOMIC_RELAXED);
      __atomic_store_n(&phase_, phase + 1, __ATOMIC_RELEASE);
      wake();
    }
    while (__atomic_load_n(&phase_, __ATOMIC_ACQUIRE) == phase) sleep_in(phase);
    return values;
  }

  // Threads that went on asking would take a core from whatever runs beside them, and wait for it in turn:
  // six times as long as asleep. The C++ library's waits order memory.
#if defined(__linux__)
  void sleep_in(uint32_t phase) {
    syscall(SYS_futex, &phase_, FUTEX_WAIT_PRIVATE, phase, nullptr, nullptr, 0);
  }
  void wake() { syscall(SYS_futex, &phase_, FUTEX_WAKE_PRIVATE, members_, nullptr, nullptr, 0); }
#else
  void sleep_in(uint32_t) { std::this_thread::yield(); }
  void wake() {}
#endif

  const int members_;
  int arrived_ = 0;
  uint32_t phase_ = 0;
  uint64_t values_[2][kMostMembers] = {};
  std::atomic<int> order_{0};
};

struct HostLane {
  Meeting* meeting;
  int member;

  int rank() const { return member; }
  void sync() const { meeting->sync(member); }
  template <class Value>
  Value exchange(Value value, int step) const {
    return static_cast<Value>(meeting->exchange(member, static_cast<uint64_t>(value), member ^ step));
  }
  int broadcast(int value, int from) const {
    return static_cast<int>(meeting->exchange(member, static_cast<uint64_t>(value), from));
  }
  uint32_t ballot(bool flag) const { return meeting->ballot(member, flag); }
};

// A fixed set of threads that all run one job at a time.
class Team {
 public:
  explicit Team(int size) : gate_(size + 1) {
    for (int member = 0; member < size; ++member) {
      threads_.emplace_back([this, member] { serve(member); });
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

  // job(member), on every thread.
  void run(const std::function<void(int)>& job) {
    job_ = &job;
    gate_.arrive_and_wait();
    gate_.arrive_and_wait();
  }

 private:
  void serve(int member) {
    for (;;) {
      gate_.arrive_and_wait();
      if (job_ == nullptr) return;
      (*job_)(member);
      gate_.arrive_and_wait();
    }
  }

  std::barrier<> gate_;
  const std::function<void(int)>* job_ = nullptr;
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
};

// Runs operations as the CUDA executor does, with tiles of host threads.
class HostTileExecutor : public OrdersOnHost<HostTileExecutor> {
 public:
  explicit HostTileExecutor(Team& team) : team_(team) {}

  template <class Step>
  void each(int64_t count, const Step& step) const {
    constexpr int kSize = Step::kGroup;
    const int tiles = team_.size() / kSize;
    std::vector<std::unique_ptr<Meeting>> meetings;
    for (int tile = 0; tile < tiles; ++tile) meetings.push_back(std::make_unique<Meeting>(kSize));
    team_.run([&](int member) {
      const int tile = member / kSize;
      if (tile >= tiles) return;
      const auto run = [&](int64_t i) {
        if constexpr (kSize == 1) {
          step(SerialGroup{}, i);
        } else {
          step(TileGroup<kSize, HostLane>{{meetings[static_cast<size_t>(tile)].get(), member % kSize}}, i);
        }
      };
      if constexpr (kHasOwnIndex<Step>) {
        for (int64_t i = tile * kSize; i < count; i += tiles * kSize) run(i + member % kSize);
      } else {
        for (int64_t i = tile; i < count; i += tiles) run(i);
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
