// How the CPU's executor brings a batch into order, against the plain way: by target, and by key. Batches are
// larger than those of the other tests, so that there are several parts, and parts that one key fills.
#include <algorithm>
#include <bit>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "backends/distinct.h"
#include "machines.h"
#include "random.h"

namespace {

using namespace hkv;
using namespace hkv::testing;
using Executor = CpuExecutor<ThreadPool>;

constexpr int64_t kSizes[] = {0, 1, 77, 5000, 70000};

std::vector<char> memory_of(int64_t bytes) { return std::vector<char>(static_cast<size_t>(bytes), '\xcd'); }

// What lies behind an array of a workspace is watched, to the byte.
void arrays_lie_apart(Checks& checks) {
  const auto take = [](Arena& arena) { return std::pair{arena.take<char>(300), arena.take<int32_t>(3)}; };
  Arena sizes;
  take(sizes);
  std::vector<char> memory = memory_of(static_cast<int64_t>(sizes.used()));
  Arena arena(memory.data());
  const auto [bytes, words] = take(arena);
  checks.expect(arena.used() == memory.size(), "a workspace is as large as was measured");
  checks.expect(reinterpret_cast<char*>(words) >= bytes + 300, "arrays do not overlap");
#if defined(__SANITIZE_ADDRESS__)
  checks.expect(!__asan_address_is_poisoned(bytes + 299) && __asan_address_is_poisoned(bytes + 300), "bytes");
  checks.expect(!__asan_address_is_poisoned(words + 2) && __asan_address_is_poisoned(words + 3), "words");
#endif
}

// More of it than one worker sets to zero at once, and no byte behind it.
void memory_is_zeroed(Checks& checks) {
  constexpr int64_t kBytes = (int64_t{9} << 20) + 5;
  std::vector<char> memory = memory_of(kBytes + 1);
  ThreadPool pool(2);
  Executor(pool).zero(memory.data(), kBytes);
  const auto zeros = std::count(memory.begin(), memory.end(), '\0');
  checks.expect(zeros == kBytes && memory.back() == '\xcd', "zeros of 9 MiB");
}

// Two cells for each key, and as many as there are keys at the least, numbered by an int32.
void cells_suffice(Checks& checks) {
  for (int64_t n : {1, 2, 3, 1000, 1 << 20, (1 << 29) + 1, (1 << 30) + 5, 2147483647}) {
    const int64_t cells = distinct::cells_for(n);
    const bool is_enough = cells >= std::min(2 * n, int64_t{1} << 31) && cells > n && cells - 1 <= 2147483647;
    checks.expect(is_enough && std::has_single_bit(static_cast<uint64_t>(cells)),
                  "cells of " + std::to_string(n) + " keys: " + std::to_string(cells));
  }
}

// Items that have a target, by (target, item).
void groups(Checks& checks, int64_t n, int64_t limit, double hot) {
  Random random(static_cast<uint64_t>(n + limit));
  Arena sizes;
  Groups::take(sizes, n, limit);
  std::vector<char> arrays = memory_of(static_cast<int64_t>(sizes.used()));
  Arena arena(arrays.data());
  Groups groups = Groups::take(arena, n, limit);
  std::multimap<int64_t, int32_t> expected;  // keeps the order of equal targets
  for (int64_t item = 0; item < n; ++item) {
    const int64_t target = random.chance(hot) ? limit / 2 : random.below(limit + limit / 4 + 1);
    if (target >= limit) {
      groups.leave_out(item);
    } else {
      groups.set(item, target);
      expected.emplace(target, static_cast<int32_t>(item));
    }
  }
  ThreadPool pool(2);
  std::vector<char> scratch = memory_of(Executor::group_bytes(n));
  Executor(pool).group(groups, scratch.data());
  bool is_same = groups.count == static_cast<int64_t>(expected.size());
  int64_t place = 0;
  for (const auto& [target, item] : expected) {
    is_same = is_same && groups.target(place) == target && groups.item(place) == item;
    ++place;
  }
  const std::string what = std::to_string(n) + " items, " + std::to_string(limit) + " targets";
  checks.expect(is_same, what);
  bool knows_heads = true;
  for (int64_t head = 0, run = 0; head < groups.count; head += run) {
    const int64_t target = groups.target(head);
    run = static_cast<int64_t>(expected.count(target));
    for (const int64_t of : {head, head + run / 2, head + run - 1}) {
      for (const int64_t length : {int64_t{0}, int64_t{1}, run - 1, run, run + 1, int64_t{128}}) {
        knows_heads = knows_heads && groups.head_within(of, target, length) == (run <= length ? head : -1);
      }
    }
  }
  checks.expect(knows_heads, what + ": the heads of runs that are no longer than that");
}

// The positions of every distinct key.
bool are_listed(const std::vector<std::vector<int32_t>>& positions, const std::vector<int32_t>& inverse) {
  ThreadPool pool(2);
  Executor executor(pool);
  auto count = static_cast<int32_t>(positions.size());
  const auto n = static_cast<int64_t>(inverse.size());
  std::vector<int32_t> numbers = inverse;
  std::vector<int32_t> order(inverse.size(), 77), offsets(inverse.size() + 1, 77);
  ListOccurrences operation;
  operation.inverse = {numbers.data(), n};
  operation.count = {&count, 1};
  operation.order = {order.data(), n};
  operation.offsets = {offsets.data(), n + 1};
  std::vector<char> memory = memory_of(Executor::list_bytes(n));
  run_operation(operation, executor, memory.data());

  std::vector<int32_t> expected, ends = {0};
  for (const std::vector<int32_t>& own : positions) {
    expected.insert(expected.end(), own.begin(), own.end());
    ends.push_back(static_cast<int32_t>(expected.size()));
  }
  expected.resize(inverse.size(), -1);
  ends.resize(inverse.size() + 1, ends.back());
  return order == expected && offsets == ends;
}

void distinct_keys(Checks& checks, int64_t n, int64_t universe, double hot) {
  Random random(static_cast<uint64_t>(n + universe));
  std::vector<Words> keys;
  std::vector<char> valid;
  std::vector<std::vector<int32_t>> positions;  // of the distinct keys
  std::map<Key, size_t> numbers;
  for (int64_t i = 0; i < n; ++i) {
    const Key key = random.chance(hot) ? 0 : mix(static_cast<Key>(random.below(universe) + 1));
    keys.push_back(Words::of(key));
    valid.push_back(random.chance(0.9) ? 1 : 0);
    if (!valid.back()) continue;
    const auto [found, is_new] = numbers.emplace(key, positions.size());
    if (is_new) positions.emplace_back();
    positions[found->second].push_back(static_cast<int32_t>(i));
  }
  const auto size = static_cast<size_t>(n);
  std::vector<Words> unique_keys(size);
  std::vector<int32_t> inverse(size), first(size), last(size);
  int32_t count = -1;
  ThreadPool pool(2);
  std::vector<char> scratch = memory_of(Executor::unique_bytes(n));
  Executor(pool).unique(n, keys.data(), {reinterpret_cast<const bool*>(valid.data())},
                        {unique_keys.data(), inverse.data(), first.data(), last.data(), &count},
                        scratch.data());
  bool is_same = count == static_cast<int64_t>(positions.size());
  for (size_t number = 0; is_same && number < positions.size(); ++number) {
    const std::vector<int32_t>& own = positions[number];
    const Key key = keys[static_cast<size_t>(own.front())].value();
    is_same =
        unique_keys[number].value() == key && first[number] == own.front() && last[number] == own.back();
    for (const int32_t position : own) {
      is_same = is_same && inverse[static_cast<size_t>(position)] == static_cast<int32_t>(number);
    }
  }
  for (size_t i = 0; i < size; ++i) {
    is_same = is_same && (valid[i] || inverse[i] == -1);
    is_same = is_same && (i < positions.size() || unique_keys[i].value() == 0);
    is_same = is_same && (i < positions.size() || (first[i] == -1 && last[i] == -1));
  }
  is_same = is_same && are_listed(positions, inverse);
  checks.expect(is_same, std::to_string(n) + " keys of " + std::to_string(universe));
}

}  // namespace

int main() {
  Checks checks;
  arrays_lie_apart(checks);
  memory_is_zeroed(checks);
  cells_suffice(checks);
  for (const int64_t n : kSizes) {
    for (const double hot : {0.0, 0.5, 1.0}) {
      for (const int64_t limit : {1, 2, 9, 1000, 1024, 1025, 300000, 1 << 20, 1 << 24}) {
        groups(checks, n, limit, hot);
      }
      for (const int64_t universe : {1, 3, 100, 20000, 1 << 30}) distinct_keys(checks, n, universe, hot);
    }
  }
  return checks.finish();
}
