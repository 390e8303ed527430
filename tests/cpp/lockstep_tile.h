// Tiles of a warp whose members take turns on one host thread: each runs to its next exchange, then the next
// member does. Members that do not meet at the same kind of exchange end the process, where a device may hang
// or invent values.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>

#include "core/group.h"

// ThreadSanitizer takes every member for a thread, and who goes on after whom tells it nothing: an exchange
// passes values but orders no memory (as __shfl_xor_sync), `sync` orders memory (as __syncwarp).
#if defined(__SANITIZE_THREAD__)
#define HKV_FIBERS 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define HKV_FIBERS 1
#endif
#endif
#if defined(HKV_FIBERS)
#include <sanitizer/tsan_interface.h>
#endif

// What passes values and takes turns is none of a sanitizer's business.
#if defined(__clang__)
#define HKV_UNWATCHED __attribute__((disable_sanitizer_instrumentation))
#else
#define HKV_UNWATCHED __attribute__((no_sanitize("address", "thread")))
#endif

// The compiler's own jumps, where it has any: the library's take one from stack to stack for an attack
// (_FORTIFY_SOURCE). Clang has none on aarch64.
#if defined(__clang__) && defined(__aarch64__)
#define HKV_SET_JUMP(context) _setjmp(context)
#define HKV_JUMP(context) _longjmp(context, 1)
#else
#define HKV_SET_JUMP(context) __builtin_setjmp(context)
#define HKV_JUMP(context) __builtin_longjmp(context, 1)
#endif

namespace hkv::testing {

enum class Exchange { kNone, kSync, kPass, kBroadcast, kBallot, kEnd };

// Up to a warp of members with a stack each.
class Lockstep {
 public:
  Lockstep() = default;
  Lockstep(const Lockstep&) = delete;
  Lockstep& operator=(const Lockstep&) = delete;
#if defined(HKV_FIBERS)
  ~Lockstep() {
    for (const Member& member : each_) {
      if (member.fiber != nullptr) __tsan_destroy_fiber(member.fiber);
    }
  }
#endif

  // job(member) for all members, which take turns upwards or downwards: who writes what a neighbour has yet
  // to read, without a `sync` in between, is found out by one of the two.
  void run(int members, bool upwards, const std::function<void(int)>& job) {
    begun_.fetch_add(1, std::memory_order_release);
    take_turns(members, upwards, job);
    static_cast<void>(ended_.load(std::memory_order_acquire));
  }

  // What another member brings.
  HKV_UNWATCHED uint64_t exchange(int member, Exchange kind, uint64_t value, int other) {
    return meet(member, kind, value)[other];
  }

  // One bit for each member.
  HKV_UNWATCHED uint32_t ballot(int member, bool flag) {
    const uint64_t* values = meet(member, Exchange::kBallot, flag ? 1 : 0);
    uint32_t flags = 0;
    for (int other = 0; other < members_; ++other) flags |= static_cast<uint32_t>(values[other]) << other;
    return flags;
  }

  // Two orders take turns: who is at the next meeting already has done nothing before this one.
  void sync(int member) {
    std::atomic<int>& order = synced_[half_of(member)];
    order.fetch_add(1, std::memory_order_acq_rel);
    pass(member, Exchange::kSync);
    static_cast<void>(order.load(std::memory_order_acquire));
  }

  // The end of a tile's index: all have come to it.
  void end(int member) { pass(member, Exchange::kEnd); }

 private:
  static constexpr int kMostMembers = 32;
  static constexpr size_t kStackBytes = size_t{256} << 10;

#if defined(__clang__) && defined(__aarch64__)
  using Context = jmp_buf;
#else
  using Context = void* [5];
#endif

  struct Member {
    bool has_begun = false;
    int64_t meetings = 0;
    Exchange kinds[2] = {};
    std::unique_ptr<char[]> stack;
    Context context;
    void* fiber = nullptr;
  };

  HKV_UNWATCHED int half_of(int member) const { return static_cast<int>(each_[member].meetings % 2); }

  HKV_UNWATCHED void take_turns(int members, bool upwards, const std::function<void(int)>& job) {
    members_ = members;
    turn_ = upwards ? 1 : members - 1;
    job_ = &job;
    done_ = 0;
    for (int member = 0; member < members; ++member) prepare(each_[member]);
#if defined(HKV_FIBERS)
    caller_fiber_ = __tsan_get_current_fiber();
#endif
    if (HKV_SET_JUMP(caller_) == 0) enter(upwards ? 0 : members - 1);
  }

  HKV_UNWATCHED static void prepare(Member& own) {
    own.has_begun = false;
    own.meetings = 0;
    if (own.stack != nullptr) return;
    own.stack = std::make_unique<char[]>(kStackBytes);
#if defined(HKV_FIBERS)
    own.fiber = __tsan_create_fiber(0);
#endif
  }

  HKV_UNWATCHED void pass(int member, Exchange kind) { meet(member, kind, 0); }

  // What all members bring, by member; valid until this one has been here twice more.
  HKV_UNWATCHED const uint64_t* meet(int member, Exchange kind, uint64_t value) {
    Member& own = each_[member];
    const int half = half_of(member);
    ++own.meetings;
    values_[half][member] = value;
    own.kinds[half] = kind;
    if (HKV_SET_JUMP(own.context) == 0) enter((member + turn_) % members_);
    for (int other = 0; other < members_; ++other) check(member, other, half);
    return values_[half];
  }

  // The other may have come to its next meeting since, not further.
  HKV_UNWATCHED void check(int member, int other, int half) const {
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

  HKV_UNWATCHED static void become([[maybe_unused]] void* fiber) {
#if defined(HKV_FIBERS)
    __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync);
#endif
  }

  // Who jumps may not be a part of who is jumped to.
  [[noreturn, gnu::noinline]] HKV_UNWATCHED void leave() {
    become(caller_fiber_);
    HKV_JUMP(caller_);
  }
  [[noreturn, gnu::noinline]] HKV_UNWATCHED void enter(int member) {
    Member& its = each_[member];
    become(its.fiber);
    if (its.has_begun) HKV_JUMP(its.context);
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

  HKV_UNWATCHED static void begin(unsigned high, unsigned low, int member) {
    auto* self = reinterpret_cast<Lockstep*>((static_cast<uintptr_t>(high) << 32) | low);
    self->work(*self->job_, member);
    if (++self->done_ == self->members_) self->leave();
    self->enter((member + self->turn_) % self->members_);
  }

  // After what the caller has done, and before what it will do.
  void work(const std::function<void(int)>& job, int member) {
    static_cast<void>(begun_.load(std::memory_order_acquire));
    job(member);
    ended_.fetch_add(1, std::memory_order_release);
  }

  int members_ = 0;
  int turn_ = 1;
  int done_ = 0;
  const std::function<void(int)>* job_ = nullptr;
  Context caller_;
  void* caller_fiber_ = nullptr;
  Member each_[kMostMembers];
  uint64_t values_[2][kMostMembers] = {};
  std::atomic<int> begun_{0};
  std::atomic<int> ended_{0};
  std::atomic<int> synced_[2] = {};
};

struct LockstepLane {
  Lockstep* tile;
  int member;

  int rank() const { return member; }
  void sync() const { tile->sync(member); }
  template <class Value>
  Value exchange(Value value, int step) const {
    return static_cast<Value>(
        tile->exchange(member, Exchange::kPass, static_cast<uint64_t>(value), member ^ step));
  }
  int broadcast(int value, int from) const {
    return static_cast<int>(tile->exchange(member, Exchange::kBroadcast, static_cast<uint64_t>(value), from));
  }
  uint32_t ballot(bool flag) const { return tile->ballot(member, flag); }
};

template <int kSize>
using LockstepTile = TileGroup<kSize, LockstepLane>;

}  // namespace hkv::testing
