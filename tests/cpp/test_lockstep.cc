// What members of a tile tell each other in lockstep, and what is found out when they do not.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "checks.h"
#include "lockstep.h"

namespace {

using namespace hkv;
using namespace hkv::testing;

constexpr int kSize = 8;
using Tile = LockstepTile<kSize>;

// Every member brings its number and a large one.
struct Exchanging {
  static constexpr int kGroup = kSize;
  static constexpr bool kOwnIndex = true;
  bool* is_right;

  void operator()(const Tile& tile, int64_t i) const {
    const auto rank = static_cast<uint64_t>(i % kSize);
    const uint64_t large = (rank << 60) + rank;
    is_right[i] = tile.rank() == i % kSize &&
                  tile.lane.exchange(large, 3) == ((rank ^ 3) << 60) + (rank ^ 3) &&
                  tile.broadcast(static_cast<int>(rank), 5) == 5 &&
                  tile.ballot(rank % 3 == 0) == 0b01001001 && tile.minimum(20 - static_cast<int>(rank)) == 13;
  }
};

// As many exchanges as the member's number, if a condition depends on it.
struct Parting {
  static constexpr int kGroup = kSize;
  bool is_apart;

  void operator()(const Tile& tile, int64_t) const {
    for (int k = 0; k < (is_apart ? tile.rank() : 3); ++k) tile.ballot(true);
  }
};

// Votes, where one member waits for the others' writes.
struct Mixing {
  static constexpr int kGroup = kSize;

  void operator()(const Tile& tile, int64_t) const {
    if (tile.rank() == 4) return tile.sync();
    tile.ballot(true);
  }
};

enum class Meets { kNot, kVoting, kAround, kBetween };

// One member writes what the others read.
struct Racing {
  static constexpr int kGroup = kSize;
  int writer;
  Meets meets;
  int* cells;
  int* seen;

  void operator()(const Tile& tile, int64_t i) const {
    if (meets == Meets::kAround) tile.sync();
    if (tile.rank() == writer) cells[i] = 1;
    if (meets == Meets::kVoting) tile.ballot(true);
    if (meets == Meets::kBetween) tile.sync();
    seen[kSize * i + tile.rank()] = cells[i];
    if (meets == Meets::kAround) tile.sync();
  }
};

// How a process of its own ends that runs a step.
template <class Step>
int end_of(const Step& step) {
  constexpr int64_t kTiles = 3;
  const pid_t child = fork();
  if (child == 0) {
    if (freopen("/dev/null", "w", stderr) == nullptr) _exit(1);
    LockstepExecutor().each(kTiles, step);
    exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

template <class Step>
bool aborts(const Step& step) {
  const int status = end_of(step);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

// What one wrote is seen by all after a meeting only: in lockstep, by those whose turn comes before.
#if !defined(HKV_FIBERS)
void racing(Checks& checks, int writer) {
  constexpr int64_t kTiles = 100;
  int64_t unseen[2] = {};
  for (int run = 0; run < 40; ++run) {
    const bool is_safe = run % 2 == 0;
    int cells[kTiles] = {};
    int seen[kTiles * kSize] = {};
    LockstepExecutor().each(kTiles, Racing{writer, is_safe ? Meets::kBetween : Meets::kNot, cells, seen});
    unseen[is_safe] += std::ranges::count(seen, 0);
  }
  checks.expect(unseen[false] > 0 && unseen[true] == 0, "who reads what one wrote");
}
#else
// ThreadSanitizer sees it whoever comes first, and takes no exchange for an order.
void racing(Checks& checks, int writer) {
  for (const Meets meets : {Meets::kNot, Meets::kVoting, Meets::kAround, Meets::kBetween}) {
    int cells[kSize] = {};
    int seen[kSize * kSize] = {};
    const int status = end_of(Racing{writer, meets, cells, seen});
    checks.expect((status == 0) == (meets == Meets::kBetween), "a race between members of a tile");
  }
}
#endif

}  // namespace

int main() {
  Checks checks;
  // First: in the child of a process that has had fibers ThreadSanitizer no longer looks.
  for (int writer = 0; writer < kSize; ++writer) racing(checks, writer);
  constexpr int64_t kCount = 1000;
  bool is_right[kCount] = {};
  LockstepExecutor().each(kCount, Exchanging{is_right});
  for (const bool is : is_right) checks.expect(is, "an exchange");
  checks.expect(!aborts(Parting{false}), "members that exchange as often as each other");
  checks.expect(aborts(Parting{true}), "members that exchange more often than others");
  checks.expect(aborts(Mixing{}), "members that exchange something else");
  return checks.finish();
}
