// What an upsert does to a table, step by step: looks keys up, finds empty lanes for the others, and chooses
// where they evict if there are none (upsert_eviction.h). Sections 3.1 to 3.4.
#pragma once

#include "ops/upsert_state.h"

namespace hkv {

// Nothing evicts the entries of these slots.
struct PinSlots {
  static constexpr int kGroup = 1;
  UpsertState state;
  const Slot* slots;

  HKV_HOST_DEVICE void prefetch_far(int64_t i) const { state.prefetch_load(slots[i]); }

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t i) const {
    if (state.table.has_slot(slots[i])) state.pin(slots[i]);
  }
};

// With one candidate whoever probes a bucket notes what is empty, for whoever fills it: nobody fills it
// between them. Not on a CPU, where that costs more than it saves (docs/performance.md).
template <Group G>
inline constexpr bool kNotesEmptyLanes = G::size() > 1;

// The scores of hits are written by the probe, which brings them near, or (where many workers look for their
// keys side by side) by TellBuckets: behind a search each would wait for the members that search longest.
template <Group G>
inline constexpr bool kScoresInProbe = G::size() == 1;

// Looks a key up: a hit has a slot (and on a CPU a score) at once, who is absent waits for one.
struct ProbeKey {
  static constexpr int kGroup = 8;
  static constexpr bool kOwnIndex = true;
  int64_t n;
  UpsertState state;

  HKV_HOST_DEVICE void prefetch_far(int64_t u) const {
    if (u < *state.count) prefetch_digests(state.table, state.unique_keys[u].value());
  }
  HKV_HOST_DEVICE Matches look_ahead(int64_t u) const {
    if (u >= *state.count) return {};
    return match_ahead(state.table, state.unique_keys[u].value(), state.write_scores);
  }
  HKV_HOST_DEVICE void operator()(const SerialGroup& group, int64_t u, const Matches& matches) const {
    note(group, u, u < *state.count, find_slot(state.table, matches, state.unique_keys[u].value()));
  }

  template <Group G>
  HKV_HOST_DEVICE void operator()(const G& group, int64_t u) const {
    const bool exists = u < n && u < *state.count;  // the last group's threads may be behind n
    const Slot slot = find_slot(group, state.table, exists, exists ? state.unique_keys[u].value() : 0);
    note(group, u, exists, slot);
  }

 private:
  template <Group G>
  HKV_HOST_DEVICE void note(const G& group, int64_t u, bool exists, Slot slot) const {
    const bool is_pending = exists && slot < 0 && state.admit;
    const bool is_scored = kScoresInProbe<G> && slot >= 0 && state.write_scores;
    const uint64_t given = state.given_each(group, u, is_pending || is_scored);
    bool is_marked = false;
    if (kNotesEmptyLanes<G> && state.table.choices == 1) is_marked = note_empty_lanes(group, u, is_pending);
    if (u >= n) return;
    state.unique_slots[u] = slot;
    if (state.admit && state.table.choices == 1) choose(u, is_pending, is_marked);
    if (is_scored) state.score_hit(slot, given);
    if (slot >= 0) {
      state.unique_status[u] = static_cast<int32_t>(Status::kFound);
    } else {
      miss(u, is_pending, is_marked, given);
    }
  }

  // Now that the digests are near. Whether the key's target is to say instead that there are none.
  template <Group G>
  HKV_HOST_DEVICE bool note_empty_lanes(const G& group, int64_t u, bool is_pending) const {
    const LaneMask lanes = state.find_empty_lanes(group, is_pending ? state.candidate(u, 0) : -1);
    if (!is_pending) return false;
    if (!lanes.any() && state.marks_full()) return true;
    state.empty_lanes[u] = lanes;
    return false;
  }

  HKV_HOST_DEVICE void miss(int64_t u, bool is_pending, bool is_marked, uint64_t given) const {
    const Status waiting = is_marked ? Status::kEvicted : Status::kRefused;
    state.unique_status[u] = static_cast<int32_t>(is_pending ? waiting : Status::kMissing);
    if (!is_pending) return;
    if (state.scoring().takes_given()) state.new_scores[u] = state.scoring().of_new(given);
  }

  HKV_HOST_DEVICE void choose(int64_t u, bool is_pending, bool is_marked) const {
    if (!is_pending) return state.groups.leave_out(u);
    state.groups.set(u, state.candidate(u, 0) + (is_marked ? state.table.buckets : 0));
  }
};

// With one candidate, once keys are grouped: which buckets evict.
struct NoteOverflows {
  static constexpr int kGroup = 1;
  UpsertState state;

  HKV_HOST_DEVICE void prefetch_far(int64_t i) const {
    const int64_t bucket = state.groups.head_target(i);  // on a CPU, which marks none
    if (bucket >= 0) prefetch(state.table.occupancy + bucket);
  }

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t i) const {
    const int64_t target = state.groups.head_target(i);
    if (target < 0 || !state.overflows(i, target)) return;
    const int64_t bucket = state.bucket_of(target);
    state.loads[bucket] = UpsertState::kEvicts;
    state.set_pinned(bucket, {});
  }
};

// With two, before round 3: both of whoever has found no room in either.
struct NoteEvictions {
  static constexpr int kGroup = 1;
  UpsertState state;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t u) const {
    if (!state.is_pending(u)) return;
    note(state.candidate(u, 0));
    note(state.candidate(u, 1));
  }

 private:
  HKV_HOST_DEVICE void note(int64_t bucket) const {
    if (atomic_read(state.loads + bucket) >= UpsertState::kEvicts) return;
    const uint32_t before = atomic_or(state.loads + bucket, UpsertState::kEvicts);
    if (before < UpsertState::kEvicts) state.set_pinned(bucket, {});
  }
};

// With one candidate buckets that evict are told of hits, which keep their slots; with two, all are told of
// keys that may come. Tiles give hits their scores here. A step of its own because on a CPU an atomic waits
// for all that its thread has stored: it must not come between the misses of the probe.
struct TellBuckets {
  static constexpr int kGroup = ProbeKey::kGroup;
  static constexpr bool kOwnIndex = true;
  int64_t n;
  UpsertState state;

  HKV_HOST_DEVICE void prefetch_far(int64_t u) const {
    if (state.table.choices == 1) state.prefetch_load(state.unique_slots[u]);
  }

  template <Group G>
  HKV_HOST_DEVICE void operator()(const G& group, int64_t u) const {
    const Slot slot = u < n ? state.unique_slots[u] : kNoSlot;
    if (!kScoresInProbe<G> && state.write_scores) {
      const uint64_t given = state.given_each(group, u, slot >= 0);
      if (slot >= 0) state.score_hit(slot, given);
    }
    if (!state.admit || u >= n) return;
    if (state.table.choices == 1) {
      if (slot >= 0) state.pin(slot);
    } else if (state.is_pending(u)) {
      announce(u);
    }
  }

 private:
  HKV_HOST_DEVICE void announce(int64_t u) const {
    const int64_t first = state.candidate(u, 0);
    const int64_t second = state.candidate(u, 1);
    atomic_add(state.loads + first, uint32_t{1});
    if (second != first) atomic_add(state.loads + second, uint32_t{1});
  }
};

// Round 1 with two candidates: the emptier one. Where that is full nobody finds a lane, and who does not go
// there need not be sorted.
struct ChooseByLoad {
  static constexpr int kGroup = 1;
  UpsertState state;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t u) const {
    if (!state.is_pending(u)) return state.groups.leave_out(u);
    const int64_t first = state.candidate(u, 0);
    const int64_t second = state.candidate(u, 1);
    const int64_t in_first = state.table.occupancy[first];
    const int64_t in_second = state.table.occupancy[second];
    const bool is_second = in_second + state.loads[second] < in_first + state.loads[first];
    const int64_t bucket = is_second ? second : first;
    state.named[u] = static_cast<int32_t>(bucket);
    if ((is_second ? in_second : in_first) >= kLanes) return state.groups.leave_out(u);
    state.groups.set(u, bucket);
  }
};

// Round 2: the candidate that the key did not name in round 1.
struct ChooseOther {
  static constexpr int kGroup = 1;
  UpsertState state;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t u) const {
    if (!state.is_pending(u)) return state.groups.leave_out(u);
    const int64_t first = state.candidate(u, 0);
    const int64_t bucket = state.named[u] == first ? state.candidate(u, 1) : first;
    if (state.table.occupancy[bucket] >= kLanes) return state.groups.leave_out(u);
    state.groups.set(u, bucket);
  }
};

// Before round 3 with two candidates, where a batch asks for most buckets of a table: the victim of each one
// that evicts. Its scores are read once for all its keys, and nothing is pinned or written until they evict.
struct NoteVictims {
  static constexpr int kGroup = 8;
  static constexpr bool kOwnIndex = true;
  int64_t buckets;
  UpsertState state;

  HKV_HOST_DEVICE void prefetch_far(int64_t bucket) const {
    if (state.evicts(bucket)) state.prefetch_victims(bucket);
  }

  template <Group G>
  HKV_HOST_DEVICE void operator()(const G& group, int64_t bucket) const {
    const int64_t first = bucket - group.rank();
    const bool is_asked = bucket < buckets && state.evicts(bucket);
    Victim own = is_asked ? state.noted_victim(bucket) : Victim::none();
    for_each_member(group, is_asked && own.lane < 0, [&](int member) {
      const Victim victim = victim_of(group, first + member);
      if (member == group.rank()) own = victim;
    });
    if (is_asked) state.victims[bucket] = own;
  }

 private:
  template <Group G>
  HKV_HOST_DEVICE Victim victim_of(const G& group, int64_t bucket) const {
    const typename G::Scores scores = group.scores_of(state.table.scores + bucket * kLanes);
    group.sync();  // or ptxas spreads these reads among the comparisons
    const Candidate lowest = group.lowest_score({scores}, {state.pinned(bucket)});
    return {lowest.score, lowest.lane};
  }
};

// Round 3 with two candidates: the one whose lowest unpinned score is lower. By what is noted of both.
struct ChooseByVictim {
  static constexpr int kGroup = 1;
  UpsertState state;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t u) const {
    if (!state.is_pending(u)) return state.groups.leave_out(u);
    const int64_t first = state.candidate(u, 0);
    const int64_t second = state.candidate(u, 1);
    const Victim of_first = state.victims[first];
    const Victim of_second = state.victims[second];
    // Of two that have none it matters not which: a bucket that is pinned whole takes nobody.
    const bool is_second = of_first.lane < 0 || of_second.score < of_first.score;
    state.name_by_score(u, is_second ? second : first, is_second ? of_second.score : of_first.score);
  }
};

// The same by the scores of both, which every key reads.
struct ChooseByScore {
  static constexpr int kGroup = 8;
  static constexpr bool kOwnIndex = true;
  int64_t n;
  UpsertState state;

  HKV_HOST_DEVICE void prefetch_far(int64_t u) const {
    if (!state.is_pending(u)) return;
    for (int choice = 0; choice < 2; ++choice) state.prefetch_victims(state.candidate(u, choice));
  }

  template <Group G>
  HKV_HOST_DEVICE void operator()(const G& group, int64_t u) const {
    const bool is_pending = u < n && state.is_pending(u);
    if (u < n && !is_pending) state.groups.leave_out(u);
    const int64_t first = u - group.rank();
    const bool is_known = is_pending && state.notes_oldest() && choose_noted(u);
    for_each_member(group, is_pending && !is_known, [&](int member) { choose(group, first + member); });
  }

 private:
  // If both candidates' victims are noted. Who evicts looks for them anew.
  HKV_HOST_DEVICE bool choose_noted(int64_t u) const {
    const int64_t first = state.candidate(u, 0);
    const int64_t second = state.candidate(u, 1);
    const Victim of_first = state.noted_victim(first);
    const Victim of_second = state.noted_victim(second);
    if (of_first.lane < 0 || of_second.lane < 0) return false;
    state.groups.set(u, of_second.score < of_first.score ? second : first);
    return true;
  }

  template <Group G>
  HKV_HOST_DEVICE void choose(const G& group, int64_t u) const {
    const TableView& table = state.table;
    const int64_t first = state.candidate(u, 0);
    const int64_t second = state.candidate(u, 1);
    typename G::Scores scores[2];
    scores[0] = group.scores_of(table.scores + first * kLanes);
    group.sync();  // or ptxas spreads these reads among the comparisons
    scores[1] = group.scores_of(table.scores + second * kLanes);
    const Candidate victim = group.lowest_score(scores, {state.pinned(first), state.pinned(second)});
    if (group.rank() != 0) return;
    const bool is_first = victim.lane < kLanes;
    if (!state.notes_oldest()) {
      state.victims[u] = {victim.score, is_first ? victim.lane : victim.lane - kLanes};
    }
    state.name_by_score(u, is_first ? first : second, victim.score);
  }
};

// The new keys of one bucket take its empty lanes, lowest first. The bucket is of the member that has the
// head of the run.
struct FillBucket {
  static constexpr int kGroup = 8;
  static constexpr bool kOwnIndex = true;
  UpsertState state;

  HKV_HOST_DEVICE void prefetch_far(int64_t i) const {
    const int64_t bucket = state.groups.head_target(i);
    if (bucket >= 0) prefetch(state.table.line(bucket));
  }

  template <Group G>
  HKV_HOST_DEVICE void operator()(const G& group, int64_t i) const {
    const int64_t bucket = state.groups.head_target(i);
    const LaneMask empty = state.find_empty_lanes(group, bucket);
    group.sync();  // before a member writes to its bucket what the others have just read
    fill(i, bucket, empty);
  }

  // By one member, of the bucket whose run begins here, or of -1. The first place of the run whose key found
  // no empty lane, or -1.
  HKV_HOST_DEVICE int32_t fill(int64_t i, int64_t bucket, LaneMask empty) const {
    if (bucket < 0) return -1;
    const Groups& groups = state.groups;
    int64_t place = i;
    for (; empty.any() && groups.is_in_run(place, bucket); ++place) {
      const int lane = empty.lowest();
      empty.remove(lane);
      prefetch_item(place + kItemsAhead);
      insert(groups.item(place), slot_of(bucket, lane));
    }
    if (place != i) state.table.occupancy[bucket] += static_cast<int32_t>(place - i);
    return groups.is_in_run(place, bucket) ? static_cast<int32_t>(place) : -1;
  }

  // One key of a run that fits, whoever takes the others.
  HKV_HOST_DEVICE void fill_one(int64_t place, int64_t head, int64_t bucket, LaneMask empty) const {
    HKV_ROLLED for (int64_t before = head; before < place; ++before) empty.remove(empty.lowest());
    insert(state.groups.item(place), slot_of(bucket, empty.lowest()));
    if (state.groups.is_in_run(place + 1, bucket)) return;
    state.table.occupancy[bucket] += static_cast<int32_t>(place - head + 1);
  }

 private:
  static constexpr int64_t kItemsAhead = 16;

  HKV_HOST_DEVICE void prefetch_item(int64_t place) const {
    if (!state.groups.has_item(place)) return;
    const int32_t u = state.groups.item(place);
    prefetch(state.unique_keys + u);
    prefetch<kToWrite>(state.unique_slots + u);
  }

  HKV_HOST_DEVICE void insert(int64_t u, Slot slot) const {
    write_entry(state.table, slot, state.unique_keys[u].value(), state.new_score(u));
    state.unique_slots[u] = slot;
  }
};

}  // namespace hkv
