// Tiles of a warp whose members take turns on one host thread: each runs to its next exchange, then the next
// member does. That is fast enough for the Python tests, and strict in one thing: members that do not meet at
// the same kind of exchange end the process, where a device may hang or invent values. (That an exchange
// orders no memory is seen by ThreadSanitizer alone, with host_tiles.h: here every exchange does.)
#pragma once

#include <ucontext.h>

#include <bit>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>

#include "host_tiles.h"

namespace hkv::testing {

enum class Exchange { kNone, kSync, kPass, kBroadcast, kBallot, kEnd };

// Up to a warp of members with a stack each.
class Lockstep {
 public:
  // job(member) for all members, which take turns upwards or downwards: who writes what a neighbour has yet
  // to read, without a `sync` in between, is found out by one of the two.
  void run(int members, bool upwards, const std::function<void(int)>& job) {
    members_ = members;
    turn_ = upwards ? 1 : members - 1;
    job_ = &job;
    ended_ = 0;
    for (int member = 0; member < members; ++member) {
      Member& own = each_[member];
      own.has_begun = false;
      own.meetings = 0;
      if (own.stack == nullptr) own.stack = std::make_unique<char[]>(kStackBytes);
    }
    if (__builtin_setjmp(caller_) == 0) enter(upwards ? 0 : members - 1);
  }

  // What all members bring, by member; valid until this one has been here twice more.
  const uint64_t* meet(int member, Exchange kind, uint64_t value) {
    Member& own = each_[member];
    const int half = own.meetings % 2;
    ++own.meetings;
    values_[half][member] = value;
    own.kinds[half] = kind;
    if (__builtin_setjmp(own.context) == 0) enter((member + turn_) % members_);
    for (int other = 0; other < members_; ++other) check(member, other, half);
    return values_[half];
  }

 private:
  static constexpr int kMostMembers = 32;
  static constexpr size_t kStackBytes = size_t{256} << 10;

  // Of the compiler's own jumps: the library's take one from stack to stack for an attack (_FORTIFY_SOURCE).
  using Context = void* [5];

  struct Member {
    bool has_begun = false;
    int64_t meetings = 0;
    Exchange kinds[2] = {};
    std::unique_ptr<char[]> stack;
    Context context;
  };

  // The other may have come to its next meeting since, not further.
  void check(int member, int other, int half) const {
    const Member& own = each_[member];
    const Member& its = each_[other];
    const int64_t ahead = its.meetings - own.meetings;
    if (its.kinds[half] == own.kinds[half] && (ahead == 0 || ahead == 1)) return;
    std::fprintf(stderr,
                 "lockstep: member %d exchanges (%d), member %d does not (%d, %lld exchanges ahead)\n",
                 member, static_cast<int>(own.kinds[half]), other, static_cast<int>(its.kinds[half]),
                 static_cast<long long>(ahead));
    std::abort();
  }

  // Who jumps may not be a part of who is jumped to.
  [[noreturn, gnu::noinline]] void leave() { __builtin_longjmp(caller_, 1); }
  [[noreturn, gnu::noinline]] void enter(int member) {
    Member& its = each_[member];
    if (its.has_begun) __builtin_longjmp(its.context, 1);
    its.has_begun = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = its.stack.get();
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    const auto self = reinterpret_cast<uintptr_t>(this);  // makecontext passes ints on
    makecontext(&context, reinterpret_cast<void (*)()>(&Lockstep::begin), 3,
                static_cast<unsigned>(self >> 32), static_cast<unsigned>(self), member);
    setcontext(&context);
    std::abort();
  }

  static void begin(unsigned high, unsigned low, int member) {
    auto* self = reinterpret_cast<Lockstep*>((static_cast<uintptr_t>(high) << 32) | low);
    (*self->job_)(member);
    if (++self->ended_ == self->members_) self->leave();
    self->enter((member + self->turn_) % self->members_);
  }

  int members_ = 0;
  int turn_ = 1;
  int ended_ = 0;
  const std::function<void(int)>* job_ = nullptr;
  Context caller_;
  Member each_[kMostMembers];
  uint64_t values_[2][kMostMembers] = {};
};

template <int kSize>
struct LockstepLane {
  Lockstep* tile;
  int member;

  int rank() const { return member; }
  void sync() const { tile->meet(member, Exchange::kSync, 0); }
  template <class Value>
  Value exchange(Value value, int step) const {
    const uint64_t* values = tile->meet(member, Exchange::kPass, static_cast<uint64_t>(value));
    return static_cast<Value>(values[member ^ step]);
  }
  int broadcast(int value, int from) const {
    const uint64_t* values = tile->meet(member, Exchange::kBroadcast, static_cast<uint64_t>(value));
    return static_cast<int>(values[from]);
  }
  uint32_t ballot(bool flag) const {
    const uint64_t* values = tile->meet(member, Exchange::kBallot, flag ? 1 : 0);
    uint32_t flags = 0;
    for (int other = 0; other < kSize; ++other) flags |= static_cast<uint32_t>(values[other]) << other;
    return flags;
  }
};

// Runs operations as the CUDA executor does, one tile after the other, in an order of chance: no result may
// depend on it. What an operation leaves unwritten is garbage.
class LockstepExecutor : public OrdersOnHost<LockstepExecutor> {
 public:
  static void prepare_result(void* data, int64_t bytes) {
    constexpr int kGarbage = 0xa5;
    if (bytes > 0) memset(data, kGarbage, static_cast<size_t>(bytes));
  }

  template <class Step>
  void each(int64_t count, const Step& step) const {
    if (count <= 0) return;
    if constexpr (Step::kGroup == 1) {
      in_any_order(count, [&](int64_t i) { step(SerialGroup{}, i); });
    } else {
      run_tiles(count, step);
    }
  }
  template <class First, class Second>
  void each(int64_t count, const First& first, const Second& second) const {
    each(count, Chain<First, Second>{first, second});
  }

 private:
  // Every number below count: an odd multiple of it modulo a power of two.
  struct Order {
    uint64_t mask;
    uint64_t factor;
    uint64_t first;

    template <class Visit>
    void visit(int64_t count, const Visit& visitor) const {
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
  static Order order_of(int64_t count) {
    return {std::bit_ceil(static_cast<uint64_t>(count)) - 1, chance()() | 1, chance()()};
  }

  template <class Visit>
  static void in_any_order(int64_t count, const Visit& visit) {
    order_of(count).visit(count, visit);
  }

  template <class Step>
  static void run_tiles(int64_t count, const Step& step) {
    constexpr int kSize = Step::kGroup;
    constexpr int64_t kIndices = kHasOwnIndex<Step> ? kSize : 1;
    const int64_t tiles = (count + kIndices - 1) / kIndices;
    const Order order = order_of(tiles);
    static thread_local Lockstep lockstep;
    lockstep.run(kSize, chance()() % 2 == 0, [&](int member) {
      order.visit(tiles, [&](int64_t tile) {
        const int64_t i = kHasOwnIndex<Step> ? tile * kSize + member : tile;
        step(TileGroup<kSize, LockstepLane<kSize>>{{&lockstep, member}}, i);
        lockstep.meet(member, Exchange::kEnd, 0);
      });
    });
  }
};

}  // namespace hkv::testing
