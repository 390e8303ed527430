// The operations on threads of the CPU backend and on tiles of host threads leave the same bytes.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "scenarios.h"

namespace {

using namespace hkv;
using namespace hkv::testing;

constexpr uint64_t kSeed = 20240229;

// Few keys: a tile's members meet some hundred times for each.
void small_batches(Checks& checks, bool is_all) {
  CpuMachine one("one thread", 1, 'a');
  CpuMachine four("four threads", 4, 'b');
  TileMachine tiles("tiles on host threads", 4, 'c');
  Together machines(checks, {&one, &four, &tiles});
  const std::vector<int64_t> batches = {40, 0, 140, 60, 1, 90, 60};
  run_scenarios(machines, checks, all_forms(1, 180, kNarrow), batches, kSeed);
  const std::vector<Form> of_two = all_forms(2, 330, kNarrow);
  run_scenarios(machines, checks, is_all ? of_two : some_of(of_two), batches, kSeed + 1000);
  // Rows whose steps on tiles are others: updates from 64 elements on, first rows up to 16 of them.
  run_scenarios(machines, checks, all_forms(2, 330, {12, 64, 20}), {60, 140}, kSeed + 1500);
  // More keys than a bucket has lanes, of which most are refused.
  const Form crowded = {Policy::kCustom, 1, 1, RowType::kFloat32, 4, 5000};
  run_scenarios(machines, checks, {crowded}, {700, 700}, kSeed + 3000);
  run_scenarios(machines, checks, crowded_forms(), kCrowdedBatches, kSeed + 3000);
  // Full buckets with some new keys each: a tile has several runs, whose keys it takes together.
  run_scenarios(machines, checks, full_forms(), full_batches(15), kSeed + 5000);
  // Full ones that have no targets of their own: that would be 9 bits to sort by.
  const Form unmarked = {Policy::kLru, 1, 130, RowType::kOther, 1, 100000, true};
  run_scenarios(machines, checks, {unmarked}, {24000, 24000, 500, 500}, kSeed + 6001);
  machines.expect_all_called();
}

// Enough keys for every loop of the CPU backend to be cut into several tasks.
void large_batches(Checks& checks, bool is_all) {
  CpuMachine one("one thread", 1, 'a');
  CpuMachine two("two threads", 2, 'b');
  CpuMachine four("four threads", 4, 'c');
  Together machines(checks, {&one, &two, &four});
  const std::vector<Form> forms = all_forms(60, 12000, kNarrow);
  run_scenarios(machines, checks, is_all ? forms : some_of(forms), {20000, 40000}, kSeed + 2000);
  run_scenarios(machines, checks, all_forms(4, 600, kWide), {1200}, kSeed + 4000);
}

bool agree(const Candidate& a, const Candidate& b) { return a.score == b.score && a.lane == b.lane; }

// For a tile of any size, a group's functions are those of a single thread.
template <int kSize>
void tile_functions(Checks& checks) {
  Lockstep lockstep;
  Random random(kSeed + kSize);
  const std::string where = "a tile of " + std::to_string(kSize);
  for (int trial = 0; trial < 60; ++trial) {
    alignas(16) Words scores[2][kLanes];
    LaneMask excluded[2];
    for (int bucket = 0; bucket < 2; ++bucket) {
      const double share = random.chance(0.2) ? 1.0 : random.real();
      const double highest = random.chance(0.2) ? 1.0 : 0.5;
      for (int lane = 0; lane < kLanes; ++lane) {
        const bool is_highest = random.chance(highest);
        scores[bucket][lane] = Words::of(is_highest ? ~Score{0} : static_cast<Score>(random.below(3)));
        if (random.chance(share)) excluded[bucket].add(lane);
      }
    }
    const auto term = [&](int64_t i) { return scores[0][i].value() / 4; };
    const int64_t count = random.below(kLanes);
    const Candidate lowest = SerialGroup::lowest_score({scores[0]}, {excluded[0]});
    const Candidate lower = SerialGroup::lowest_score({scores[0], scores[1]}, excluded);
    const uint64_t sum = SerialGroup::saturating_sum(count, term);
    Score highest = 0;
    for (int member = 0; member < kSize; ++member) highest = std::max(highest, scores[0][member].value());
    bool same[kSize];
    lockstep.run(kSize, trial % 2 == 0, [&](int member) {
      const LockstepTile<kSize> tile{{&lockstep, member}};
      const auto first = tile.scores_of(scores[0]);
      const auto second = tile.scores_of(scores[1]);
      same[member] = agree(tile.lowest_score({first}, {excluded[0]}), lowest) &&
                     agree(tile.lowest_score({first, second}, excluded), lower) &&
                     tile.saturating_sum(count, term) == sum &&
                     tile.maximum(scores[0][member].value()) == highest;
    });
    for (const bool is_same : same) checks.expect(is_same, where + ", trial " + std::to_string(trial));
  }
}

// A thread and a tile list the same of a bucket, and what a sort says; nobody, where an entry is too old.
template <int kSize>
void tile_lists(Checks& checks) {
  Lockstep lockstep;
  Random random(kSeed + kSize);
  for (int trial = 0; trial < 60; ++trial) {
    const Score time = (Score{7} << 32) + static_cast<Score>(random.below(3));  // low words have wrapped
    const Score ages[] = {3, 200, Oldest::kTooOld - 1, Oldest::kTooOld + 1, time};
    const Score oldest = ages[trial % 5];
    const double share = random.chance(0.2) ? 0.97 : random.real();
    const bool is_last_too_old = trial % 12 == 0;  // and no other
    alignas(16) Words scores[kLanes];
    LaneMask excluded;
    std::vector<std::pair<Score, int>> expected;
    bool is_too_old = false;
    for (int lane = 0; lane < kLanes; ++lane) {
      const Score age = random.chance(0.3) ? oldest - static_cast<Score>(random.below(3)) : random.word() % 9;
      Score score = random.chance(0.1) ? time + random.word() % 3 : time - age;
      if (is_last_too_old) score = time - (lane == kLanes - 1 ? Oldest::kTooOld : 3);
      scores[lane] = Words::of(score);
      if (random.chance(share) && !is_last_too_old) {
        excluded.add(lane);
      } else if (score < time) {
        expected.emplace_back(score, lane);
        is_too_old |= time - score >= Oldest::kTooOld;
      }
    }
    std::sort(expected.begin(), expected.end());
    Oldest sorted = {time, 0};
    for (int place = 0; place < Oldest::kMost && !is_too_old; ++place) {
      if (place < static_cast<int>(expected.size()))
        sorted.put(place, expected[static_cast<size_t>(place)].second);
    }
    const auto is_it = [&](const Oldest& own) { return own.time == time && own.lanes == sorted.lanes; };
    const std::string where = ", trial " + std::to_string(trial);
    checks.expect(is_it(SerialGroup::oldest_of(scores, excluded, time)), "a thread's list" + where);
    bool same[kSize];
    lockstep.run(kSize, trial % 2 == 0, [&](int member) {
      const LockstepTile<kSize> tile{{&lockstep, member}};
      same[member] = is_it(tile.oldest_of(tile.scores_of(scores), excluded, time));
    });
    for (const bool is_same : same) {
      checks.expect(is_same, "a tile of " + std::to_string(kSize) + ", its list" + where);
    }
    const auto bits = static_cast<uint32_t>(random.below(256));
    Oldest some = sorted;
    for (int place = 0; place < Oldest::kMost; ++place) {
      if ((bits >> place & 1) == 0) some.drop(place);
    }
    for (int place = 0; place < Oldest::kMost; ++place) {
      const int lane = (bits >> place & 1) != 0 ? sorted.lane(place) : -1;
      checks.expect(some.lane(place) == lane, "what is kept of a list" + where);
    }
  }
}

// Where a table's array begins or goes on that has an element somewhere else, at so many elements from here.
template <class T>
T* at(const void* address, int64_t elements) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(address) +
                              static_cast<uintptr_t>(elements * static_cast<int64_t>(sizeof(T))));
}

// Members of a tile look for keys of their own, in buckets of few and of many equal digests; some do not.
template <int kSize>
void tile_probes(Checks& checks) {
  constexpr int kBuckets = 3;
  constexpr Key kKey = (Key{5} << 32) - 60;  // of lane 0: the low words of others begin at 0 again
  constexpr int64_t kLast = int64_t{1} << 24;  // buckets of the largest table
  Lockstep lockstep;
  Random random(kSeed + kSize);
  const std::string where = "probes of a tile of " + std::to_string(kSize);
  int found = 0;
  for (int trial = 0; trial < 40; ++trial) {
    alignas(kLanes) Digest digests[kBuckets * kLanes];
    Words keys[kBuckets * kLanes];
    const int64_t codes = random.chance(0.5) ? 2 : 255;
    for (int slot = 0; slot < kBuckets * kLanes; ++slot) {
      digests[slot] = static_cast<Digest>(random.below(codes + 1));
      keys[slot] = Words::of(kKey + static_cast<uint64_t>(slot % kLanes));
    }
    // Of the first buckets, or the last ones of a large table: as if the arrays had begun long before.
    const int64_t first = trial % 3 == 0 ? kLast - kBuckets : 0;
    const auto* all_digests = at<Digest>(digests, -first * kLanes);
    const auto* all_keys = at<Words>(keys, -first * kLanes);
    Probe probes[kSize];
    int lanes[kSize];
    for (int member = 0; member < kSize; ++member) {
      const int64_t bucket = random.below(kBuckets);
      const int64_t lane = random.below(kLanes + 10);
      const bool is_there = lane < kLanes && random.chance(0.7);
      const auto code =
          is_there ? digests[bucket * kLanes + lane] : static_cast<Digest>(1 + random.below(codes));
      probes[member] = {random.chance(0.8), first + bucket, code, kKey + static_cast<uint64_t>(lane)};
      lanes[member] = SerialGroup::find_each(all_digests, all_keys, probes[member]);
      found += lanes[member] >= 0 ? 1 : 0;
    }
    bool same[kSize];
    lockstep.run(kSize, trial % 2 == 0, [&](int member) {
      const LockstepTile<kSize> tile{{&lockstep, member}};
      same[member] = tile.find_each(all_digests, all_keys, probes[member]) == lanes[member];
    });
    for (const bool is_same : same) checks.expect(is_same, where + ", trial " + std::to_string(trial));
  }
  checks.expect(found > 5 * kSize && found < 35 * kSize, where + " find some keys");
}

// Every byte is equal to itself and to no other.
void tile_matches(Checks& checks) {
  constexpr int kMembers = 4;
  Lockstep lockstep;
  for (int code = 0; code < 256; ++code) {
    alignas(kLanes) Digest digests[kMembers * kLanes];
    for (int i = 0; i < kMembers * kLanes; ++i)
      digests[i] = static_cast<Digest>(i < 2 * kLanes ? code + i % kLanes : code ^ (i % kLanes));
    bool same[kMembers];
    lockstep.run(kMembers, code % 2 == 0, [&](int member) {
      const Probe probe{code % 5 != member, member, static_cast<Digest>(code + member), 0};
      const LaneMask mask = LockstepTile<kMembers>{{&lockstep, member}}.match_each(digests, probe);
      const LaneMask expected = SerialGroup::match_each(digests, probe);
      same[member] = mask.words[0] == expected.words[0] && mask.words[1] == expected.words[1];
    });
    for (const bool is_same : same) checks.expect(is_same, "equal bytes");
  }
}

// Every member brings a row to copy, or none; nothing else is written.
template <int kSize>
void tile_copies(Checks& checks) {
  constexpr int kRows = 40;
  constexpr int64_t kMost = 300;
  Lockstep lockstep;
  Random random(kSeed + kSize);
  for (const int64_t bytes : {0, 1, 2, 4, 10, 16, 20, 32, 48, 128, 272}) {
    for (const int64_t shift : {0, 1, 2, 4, 8}) {
      alignas(16) char from[kRows * kMost];
      alignas(16) char to[kRows * kMost] = {};
      char expected[kRows * kMost] = {};
      for (char& byte : from) byte = static_cast<char>(1 + random.below(100));
      Slot sources[kSize];
      Slot targets[kSize];
      for (int member = 0; member < kSize; ++member) {
        sources[member] = random.chance(0.8) ? static_cast<Slot>(random.below(kRows)) : kNoSlot;
        targets[member] = random.chance(0.8) ? static_cast<Slot>((member * 7) % kRows) : kNoSlot;
        SerialGroup::copy_each(expected, targets[member], from + shift, sources[member], bytes);
      }
      lockstep.run(kSize, shift % 2 == 0, [&](int member) {
        LockstepTile<kSize>{{&lockstep, member}}.copy_each(to, targets[member], from + shift, sources[member],
                                                           bytes);
      });
      checks.expect(memcmp(to, expected, sizeof(to)) == 0, "copies by a tile of " + std::to_string(kSize));
    }
  }
}

// Rows more than 2^31 and 2^32 bytes behind the first one, written in three ways and read back.
template <class Executor, class Workers>
void far_rows(Checks& checks, Workers& workers) {
  constexpr int64_t kWidth = 1024;
  constexpr int64_t kRowBytes = kWidth * static_cast<int64_t>(sizeof(float));
  // Pairs that are the same modulo 2^32 bytes, and some behind 2^31.
  constexpr Slot kSlots[] = {7, (1 << 20) + 7, 1 << 19, (1 << 19) + (1 << 20), (1 << 21) - 1, (1 << 20) - 1};
  constexpr auto kCount = static_cast<int64_t>(std::size(kSlots));
  constexpr int64_t kBytes = (int64_t{1} << 21) * kRowBytes;
  void* const memory = mmap(nullptr, static_cast<size_t>(kBytes), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::printf("rows behind 2^31 bytes are left out: no addresses for %lld bytes\n",
                static_cast<long long>(kBytes));
    return;
  }
  const auto rows_of = [](void* data, int64_t count) {
    return RowsView{static_cast<char*>(data), RowType::kFloat32, count, kWidth, kRowBytes};
  };
  const RowsView values = rows_of(memory, kBytes / kRowBytes);
  Executor executor(workers);
  std::vector<Slot> slots(std::begin(kSlots), std::end(kSlots));
  const std::vector<Words> keys(slots.size(), Words{});
  std::vector<float> numbers(static_cast<size_t>(kCount * kWidth));
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(i);
  const RowsView rows = rows_of(numbers.data(), kCount);
  std::vector<float> read(numbers.size());
  const auto expect_rows = [&](float factor, const std::string& what) {
    executor.each(kCount, GatherRows::Step{
                              {{}, 0.0f, values, slots.data(), nullptr, {}, rows_of(read.data(), kCount)}});
    bool is_same = true;
    for (size_t i = 0; i < read.size(); ++i) is_same = is_same && read[i] == factor * numbers[i];
    checks.expect(is_same, what + " more than 2^31 bytes behind the first row");
  };
  executor.each(kCount, ScatterRows::Step{kCount, values, slots.data(), nullptr, rows});
  expect_rows(1.0f, "copied rows");
  std::vector<Digest> digests(size_t{1} << 21, 1);
  std::vector<Words> held(digests.size());
  const TableView table{digests.data(), held.data(), nullptr, nullptr, nullptr, (1 << 21) / kLanes};
  uint32_t step = 1, stale = 0;
  const float rate = -1.0f;
  std::vector<int32_t> order(slots.size() + 1);
  std::iota(order.begin(), order.end(), 0);
  UpdateRows<SgdRule>::Step add{};
  add.max_gradient = std::numeric_limits<double>::infinity();
  add.values = values;
  add.steps = &step;
  add.held = {table, keys.data(), slots.data(), &stale};
  add.slots = slots.data();
  add.rate = &rate;
  add.terms = {kCount, order.data(), order.data(), nullptr, nullptr, rows, {}};
  executor.each(kCount, add);
  expect_rows(2.0f, "sums");
  executor.each(kCount, InitRows::Step{kCount, {}, values, slots.data(), keys.data()});
  expect_rows(0.0f, "first rows");
  munmap(memory, static_cast<size_t>(kBytes));
}

// In which order a large batch's keys are claimed, with all digits of the products.
void far_positions(Checks& checks) {
  using distinct::State;
  constexpr int64_t kCount = (int64_t{3} << 29) + 5;
  constexpr int64_t kBlocks = kCount / State::kBlock;
  const State state{{}, kCount, State::stride_for(kCount), nullptr, {}, {}};
  bool is_same = true;
  for (int64_t block = 0; block < kBlocks; block += kBlocks / 1000) {
    const auto claimed =
        static_cast<unsigned __int128>(block) * static_cast<uint64_t>(state.stride) % kBlocks;
    is_same = is_same &&
              state.position(block * State::kBlock + 3) == static_cast<int64_t>(claimed) * State::kBlock + 3;
  }
  checks.expect(is_same && state.position(kCount - 1) == kCount - 1, "positions of a large batch");
}

}  // namespace

// With the argument "small" some of the forms get large batches, and those of two buckets.
int main(int count, char** arguments) {
  Checks checks;
  tile_matches(checks);
  tile_lists<4>(checks);
  tile_lists<8>(checks);
  tile_lists<16>(checks);
  tile_lists<32>(checks);
  tile_functions<4>(checks);
  tile_functions<8>(checks);
  tile_functions<16>(checks);
  tile_functions<32>(checks);
  tile_probes<4>(checks);
  tile_probes<8>(checks);
  tile_probes<16>(checks);
  tile_probes<32>(checks);
  tile_copies<4>(checks);
  tile_copies<8>(checks);
  tile_copies<32>(checks);
  Team team(2);
  far_rows<HostTileExecutor>(checks, team);
  ThreadPool pool(2);
  far_rows<CpuExecutor<ThreadPool>>(checks, pool);
  far_positions(checks);
  const bool is_all = count < 2 || std::string(arguments[1]) != "small";
  small_batches(checks, is_all);
  large_batches(checks, is_all);
  return checks.finish();
}
