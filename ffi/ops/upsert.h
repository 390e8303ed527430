// Looks up the distinct keys of a batch, refreshes the scores of those present, and (with `admit`)
// inserts the others, evicting where their buckets are full. Sections 3.1 to 3.4.
#pragma once

#include "ops/upsert_eviction.h"

namespace hkv {

// From distinct keys back to positions. A key's first one also tells that it was inserted: of a key with a
// slot no other position reads its status. The first of all, which an empty batch has too, ends the batch's
// time, since nobody reads the clock any more, and says that nothing was evicted until somebody has counted.
struct ReportPosition {
  static constexpr int kGroup = 1;
  int64_t n;
  UpsertState state;
  Slot* slots;
  int32_t* status;
  Slot* new_slots;  // or null
  int32_t* evicted_count;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t i) const {
    if (i == 0) {
      state.set_clock();
      *evicted_count = 0;
    }
    if (i >= n) return;
    const int32_t u = state.inverse[i];
    const bool is_first = u >= 0 && state.first[u] == i;
    const Slot slot = u < 0 ? kNoSlot : state.unique_slots[u];
    const Status reported = u < 0 ? Status::kMissing : settle(u, slot, is_first);
    slots[i] = slot;
    status[i] = static_cast<int32_t>(reported);
    if (new_slots == nullptr) return;
    if (is_first) new_slots[u] = is_new(reported) ? slot : kNoSlot;
    if (i >= *state.count) new_slots[i] = kNoSlot;
  }

 private:
  static HKV_HOST_DEVICE bool is_new(Status status) {
    return status == Status::kInserted || status == Status::kEvicted;
  }

  // Of a key's positions the first alone reads its status, which it may change.
  HKV_HOST_DEVICE Status settle(int32_t u, Slot slot, bool is_first) const {
    const Status absent = state.admit ? Status::kRefused : Status::kMissing;
    if (!is_first) return slot < 0 ? absent : Status::kFound;
    const auto status = static_cast<Status>(state.unique_status[u]);
    const Status present = status == Status::kRefused ? Status::kInserted : status;
    const Status settled = slot < 0 ? absent : present;
    if (settled != status) state.unique_status[u] = static_cast<int32_t>(settled);
    return settled;
  }
};

// 1 for a key that took an entry's place.
struct HasEvicted {
  const int32_t* unique_status;

  HKV_HOST_DEVICE int32_t operator()(int64_t u) const {
    return unique_status[u] == static_cast<int32_t>(Status::kEvicted) ? 1 : 0;
  }
};

// Evicted entries, compact, in order of the keys that took their places; and how many there are.
struct ReportEvicted {
  static constexpr int kGroup = 1;
  UpsertState state;
  HasEvicted has_evicted;
  const int32_t* places;
  int64_t count;
  Words* keys;
  Words* scores;
  Slot* slots;
  int32_t* evicted_count;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t u) const {
    const int64_t total = total_of(count, has_evicted, places);
    if (u == 0) *evicted_count = static_cast<int32_t>(total);
    if (has_evicted(u)) {
      const Replaced replaced = state.replaced[u];
      keys[places[u]] = replaced.key;
      scores[places[u]] = replaced.score;
      slots[places[u]] = state.unique_slots[u];
    }
    if (u < total) return;
    keys[u] = Words::of(0);
    scores[u] = Words::of(0);
    slots[u] = kNoSlot;
  }
};

struct Upsert {
  static constexpr const char* kName = "upsert";
  static constexpr bool kPerPosition = false;

  int64_t policy = 0;
  int64_t choices = 1;
  int64_t admit = 1;
  int64_t write_scores = 1;
  int64_t foreign = 0;  // whether scores are of another policy than the table's
  int64_t ticks = 1;  // of the clock: the batch's time is that much later
  int64_t evicted = 0;
  int64_t inserted = 0;
  IndexArrays index;
  Array<uint32_t> epoch;
  Array<Words> unique_keys;
  Array<int32_t> count, inverse, first, last, order, offsets;
  Array<Words> scores;
  Array<Slot> pinned;
  Array<Slot> slots, unique_slots, evicted_slots, new_slots;
  Array<int32_t> status, unique_status, evicted_count;
  Array<Words> evicted_keys, evicted_scores;
  UpsertState workspace = {};
  int32_t* places = nullptr;
  char* scratch = nullptr;

  template <class Binder>
  void describe(Binder& binder) {
    binder.attribute("policy", policy);
    binder.attribute("choices", choices);
    binder.attribute("admit", admit);
    binder.attribute("write_scores", write_scores);
    binder.attribute("foreign", foreign);
    binder.attribute("ticks", ticks);
    binder.attribute("e", evicted);
    binder.attribute("m", inserted);
    binder.inout("clock", index.clock, "2");
    binder.in("epoch", epoch, "1");
    binder.inout("digests", index.digests, "B 128");
    binder.inout("keys", index.keys, "B 128 2");
    binder.inout("scores", index.scores, "B 128 2");
    binder.inout("occupancy", index.occupancy, "B");
    binder.inout("oldest", index.oldest, "B 4");
    binder.in("unique_keys", unique_keys, "n 2");
    binder.in("count", count, "1");
    binder.in("inverse", inverse, "n");
    binder.in("first", first, "n");
    binder.in("last", last, "n");
    binder.in("order", order, "n?");
    binder.in("offsets", offsets, "n+1?");
    binder.in("batch_scores", scores, "n? 2");
    binder.in("pinned", pinned, "p");
    binder.out("slots", slots, "n");
    binder.out("status", status, "n");
    binder.out("unique_slots", unique_slots, "n");
    binder.out("unique_status", unique_status, "n");
    binder.out("evicted_keys", evicted_keys, "e 2");
    binder.out("evicted_scores", evicted_scores, "e 2");
    binder.out("evicted_slots", evicted_slots, "e");
    binder.out("evicted_count", evicted_count, "1");
    binder.out("new_slots", new_slots, "m");
  }

  // What an operand may be left out for: of a policy whose scores nothing is asked of the batch. And results
  // have a place for each key, or none.
  const char* complaint() const {
    const int64_t n = unique_keys.rows;
    if (evicted != 0 && (evicted != n || admit == 0)) {
      return "e: expected 0, or, of an upsert that admits, the size of the batch";
    }
    if (inserted != 0 && inserted != n) return "m: expected 0 or the size of the batch";
    if ((admit == 0 && write_scores == 0) || n == 0) return nullptr;
    if (static_cast<Policy>(policy) == Policy::kCustom && scores.rows == 0) {
      return "batch_scores: policy CUSTOM has no others, got shape [0 2]";
    }
    if (!scoring().counts()) return nullptr;
    if (offsets.rows == 0) return "offsets: LFU and EPOCH_LFU count by them, got shape [0]";
    if (scores.rows > 0 && order.rows == 0) return "order: batch_scores are added up by it, got shape [0]";
    return nullptr;
  }

  template <class Executor>
  void reserve(Arena& arena) {
    if (admit == 0) return;
    const int64_t n = unique_keys.rows;
    const int64_t buckets = index.digests.rows;
    // What no step asks for is not taken: on a CPU large workspaces are new pages in every call.
    workspace.new_scores = arena.take<Score>(scoring().takes_given() ? n : 0);
    workspace.highest_scores = arena.take<Score>(noted_stretches<Executor>(n));
    workspace.groups = Groups::take(arena, n, marks_full<Executor>() ? 2 * buckets : buckets);
    workspace.pins = arena.take<LaneMask>(buckets);
    workspace.loads = arena.take<uint32_t>(buckets);
    workspace.empty_lanes = arena.take<LaneMask>(Executor::kHasTiles && choices == 1 ? n : 0);
    workspace.named = arena.take<int32_t>(choices == 2 ? n : 0);
    const bool goes_by_lists = static_cast<Policy>(policy) == Policy::kLru && !notes_victims();
    workspace.victims = arena.take<Victim>(choices == 1 || goes_by_lists ? 0 : notes_victims() ? buckets : n);
    if (evicted > 0) {
      workspace.replaced = arena.take<Replaced>(n);
      places = arena.take<int32_t>(n);
    }
    const int64_t grouping = Executor::group_bytes(n);
    const int64_t scanning = Executor::scan_bytes(n);
    scratch = arena.take<char>(grouping > scanning ? grouping : scanning);
  }

  template <class Executor>
  void run(Executor& executor) const {
    const int64_t n = unique_keys.rows;
    const UpsertState state = bound();
    executor.each(n, ProbeKey{n, state});
    if (admit != 0) {
      insert(executor, state, n);
    } else if (Executor::kHasTiles && write_scores != 0) {
      executor.each(n, TellBuckets{n, state});
    }
    if (foreign != 0) executor.each(n, ForgetOldest{state});
    executor.each(n > 0 ? n : 1, ReportPosition{n, state, slots.data, status.data, new_slots.data_or_null(),
                                                evicted_count.data});
    if (evicted > 0) report_evicted(executor, state, n);
  }

 private:
  Scoring scoring() const { return {static_cast<Policy>(policy), 0, 0}; }  // at no time yet

  // Of so many places: those whose highest scores are noted.
  template <class Executor>
  int64_t noted_stretches(int64_t places) const {
    return Executor::kHasTiles && scoring().can_refuse() ? places / kStretch : 0;
  }

  // Whether full buckets have targets of their own: these are a bit longer, which must not cost the sort, of
  // 8 bits a pass, one pass more.
  template <class Executor>
  bool marks_full() const {
    const auto passes = [](int64_t limit) { return (std::bit_width(static_cast<uint64_t>(limit)) + 7) / 8; };
    const int64_t buckets = index.digests.rows;
    return Executor::kHasTiles && choices == 1 && passes(buckets) == passes(2 * buckets);
  }

  // Of two candidate buckets: whether their victims are found for all buckets, not for every key. With twice
  // as many buckets as keys a batch that evicts for each asks for 63 % of them.
  bool notes_victims() const { return index.digests.rows <= 2 * unique_keys.rows; }

  UpsertState bound() const {
    UpsertState state = workspace;
    state.table = index.view(choices);
    state.policy = static_cast<Policy>(policy);
    state.admit = admit != 0;
    state.write_scores = write_scores != 0;
    state.clock = index.clock.data;
    state.ticks = static_cast<uint32_t>(ticks);
    state.epoch = epoch.data;
    state.unique_keys = unique_keys.data;
    state.count = count.data;
    state.inverse = inverse.data;
    state.first = first.data;
    state.last = last.data;
    state.order = order.data;
    state.offsets = offsets.data;
    state.scores = scores.data_or_null();
    state.unique_slots = unique_slots.data;
    state.unique_status = unique_status.data;
    return state;
  }

  template <class Executor>
  void insert(Executor& executor, UpsertState state, int64_t n) const {
    const int64_t load_bytes = state.table.buckets * static_cast<int64_t>(sizeof(uint32_t));
    if (choices == 1) {
      executor.group(state.groups, scratch);
      executor.zero(state.loads, load_bytes);
      executor.each(state.groups.count, NoteOverflows{state});
      executor.each(pinned.rows, PinSlots{state, pinned.data});
      executor.each(n, TellBuckets{n, state});
      executor.each(noted_stretches<Executor>(state.groups.count), NoteHighestScores{state});
      if (!state.notes_oldest()) {
        return executor.each(state.groups.count, FillOrEvict<false>{{state}, {false, state}});
      }
      return executor.each(state.groups.count, FillOrEvict<true>{{state}, {false, state}});
    }
    executor.zero(state.loads, load_bytes);
    executor.each(n, TellBuckets{n, state});
    executor.each(n, ChooseByLoad{state});
    executor.group(state.groups, scratch);
    executor.each(state.groups.count, FillBucket{state});
    executor.each(n, ChooseOther{state});
    executor.group(state.groups, scratch);
    executor.each(state.groups.count, FillBucket{state});
    executor.each(n, NoteEvictions{state});
    executor.each(pinned.rows, PinSlots{state, pinned.data});
    executor.each(n, PinSlots{state, state.unique_slots});
    if (notes_victims()) {
      executor.each(state.table.buckets, NoteVictims{state.table.buckets, state});
      executor.each(n, ChooseByVictim{state});
    } else {
      executor.each(n, ChooseByScore{n, state});
    }
    executor.group(state.groups, scratch);
    if (state.notes_oldest()) {
      return executor.each(state.groups.count, EvictFromBucket<false, true>{false, state});
    }
    executor.each(noted_stretches<Executor>(state.groups.count), NoteHighestScores{state});
    executor.each(state.groups.count, EvictFromBucket<true, false>{notes_victims(), state});
  }

  template <class Executor>
  void report_evicted(Executor& executor, const UpsertState& state, int64_t n) const {
    const HasEvicted has_evicted{unique_status.data};
    executor.scan(n, has_evicted, places, scratch);
    executor.each(n, ReportEvicted{state, has_evicted, places, n, evicted_keys.data, evicted_scores.data,
                                   evicted_slots.data, evicted_count.data});
  }
};

}  // namespace hkv
