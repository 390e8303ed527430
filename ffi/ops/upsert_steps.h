// What an upsert does to a table, step by step: looks keys up, finds empty lanes for the others, and evicts
// where there are none. Sections 3.1 to 3.4.
#pragma once

#include "ops/upsert_state.h"

namespace hkv {

// Slots that the caller pins besides the batch's own.
struct PinSlots {
  static constexpr int kGroup = 1;
  UpsertState state;
  const Slot* slots;

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
    const bool exists = u < *state.count;
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

// Buckets are told of hits, which keep their slots (and get their scores from tiles), and with two candidates
// of keys that may come. A step of its own because on a CPU an atomic waits for all that its thread has
// stored: it must not come between the misses of the probe.
struct TellBuckets {
  static constexpr int kGroup = ProbeKey::kGroup;
  static constexpr bool kOwnIndex = true;
  int64_t n;
  UpsertState state;

  HKV_HOST_DEVICE void prefetch_far(int64_t u) const {
    if (state.unique_slots[u] >= 0) prefetch<kToWrite>(state.pin_word(state.unique_slots[u]));
  }

  template <Group G>
  HKV_HOST_DEVICE void operator()(const G& group, int64_t u) const {
    const Slot slot = u < n ? state.unique_slots[u] : kNoSlot;
    if (!kScoresInProbe<G> && state.write_scores) {
      const uint64_t given = state.given_each(group, u, slot >= 0);
      if (slot >= 0) state.score_hit(slot, given);
    }
    if (!state.admit || u >= n) return;
    if (slot >= 0) return state.pin(slot);
    if (state.table.choices == 2 && state.is_pending(u)) announce(u);
  }

 private:
  HKV_HOST_DEVICE void announce(int64_t u) const {
    const int64_t first = state.candidate(u, 0);
    const int64_t second = state.candidate(u, 1);
    atomic_add(state.loads + first, 1);
    if (second != first) atomic_add(state.loads + second, 1);
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

// Before round 3 with two candidates, where a batch asks for most buckets of a table: the victim of each full
// one that had keys to come. Its scores are read once for all of them, and nothing is pinned or written until
// they evict.
struct NoteVictims {
  static constexpr int kGroup = 8;
  static constexpr bool kOwnIndex = true;
  int64_t buckets;
  UpsertState state;

  HKV_HOST_DEVICE void prefetch_far(int64_t bucket) const {
    if (was_named(bucket) && is_full(bucket)) prefetch_scores(state.table, bucket);
  }

  template <Group G>
  HKV_HOST_DEVICE void operator()(const G& group, int64_t bucket) const {
    const bool is_named = bucket < buckets && was_named(bucket);
    const int64_t first = bucket - group.rank();
    Victim own = {~Score{0}, -1};
    for_each_member(group, is_named && is_full(bucket), [&](int member) {
      const Victim victim = victim_of(group, first + member);
      if (member == group.rank()) own = victim;
    });
    if (is_named) state.victims[bucket] = own;
  }

 private:
  HKV_HOST_DEVICE bool was_named(int64_t bucket) const { return state.loads[bucket] > 0; }

  // Keys that are left over had no room in either candidate.
  HKV_HOST_DEVICE bool is_full(int64_t bucket) const { return state.table.occupancy[bucket] >= kLanes; }

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
    for (int choice = 0; choice < 2; ++choice) prefetch_scores(state.table, state.candidate(u, choice));
  }

  template <Group G>
  HKV_HOST_DEVICE void operator()(const G& group, int64_t u) const {
    const bool is_pending = u < n && state.is_pending(u);
    if (u < n && !is_pending) state.groups.leave_out(u);
    const int64_t first = u - group.rank();
    for_each_member(group, is_pending, [&](int member) { choose(group, first + member); });
  }

 private:
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
    state.victims[u] = {victim.score, is_first ? victim.lane : victim.lane - kLanes};
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
    const bool has_room = empty.any();
    LaneMask pinned = has_room ? state.pinned(bucket) : LaneMask{};
    int64_t place = i;
    for (; empty.any() && groups.is_in_run(place, bucket); ++place) {
      const int lane = empty.lowest();
      empty.remove(lane);
      pinned.add(lane);
      prefetch_item(place + kItemsAhead);
      insert(groups.item(place), slot_of(bucket, lane));
    }
    if (has_room) {
      state.set_pinned(bucket, pinned);
      state.table.occupancy[bucket] += static_cast<int32_t>(place - i);
    }
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

// Before keys are let in by their scores: the highest of each stretch of places that is of one bucket alone,
// so that a tile which looks for the next one passes over those of many keys that the bucket refuses. Not on
// a CPU, where looking at them is the lesser part.
inline constexpr int kStretch = 512;
template <Group G>
inline constexpr bool kNotesHighestScores = G::size() > 1;

struct NoteHighestScores {
  static constexpr int kGroup = 8;
  UpsertState state;

  template <Group G>
  HKV_HOST_DEVICE void operator()(const G& group, int64_t stretch) const {
    const Groups& groups = state.groups;
    const int64_t begin = kStretch * stretch;
    const int64_t target = groups.target(begin);
    Score highest = ~Score{0};  // of several buckets' keys: nobody passes over them
    if (target != groups.limit && groups.target(begin + kStretch - 1) == target) {
      constexpr int kAtOnce = 4;
      highest = 0;
      HKV_ROLLED for (int64_t i = begin + group.rank(); i < begin + kStretch; i += kAtOnce * group.size()) {
        int32_t items[kAtOnce];
        for (int k = 0; k < kAtOnce; ++k) items[k] = groups.item(i + k * group.size());
        for (int k = 0; k < kAtOnce; ++k) {
          const Score score = state.new_scores[items[k]];
          highest = score > highest ? score : highest;
        }
      }
      highest = group.maximum(highest);
    }
    if (group.rank() == 0) state.highest_scores[stretch] = highest;
  }
};

// The new keys that found no empty lane take the place of the lowest unpinned entry. Those that may not, or
// find none, stay refused. Of each run the first victim may be known.
template <bool kKnowsVictims>
struct EvictFromBucket {
  static constexpr int kGroup = 8;
  static constexpr bool kOwnIndex = true;
  bool are_of_buckets;  // the known ones
  UpsertState state;

  template <Group G>
  HKV_HOST_DEVICE void operator()(const G& group, int64_t i) const {
    evict(group, state.groups.head_target(i) >= 0 ? static_cast<int32_t>(i) : -1);
  }

  // `first`: the place of the first pending key of the run whose head this is, or -1.
  //
  // A tile goes from key to key, whichever run they are of: in a warp whose tiles went through their runs
  // side by side, the ones with shorter runs would wait. What the keys replace is written by all members at
  // once.
  template <Group G>
  HKV_HOST_DEVICE void evict(const G& group, int32_t first) const {
    uint32_t heads = group.ballot(first >= 0);
    Run<G> run;
    Replacement own;
    int held = 0;  // members that hold one
    HKV_ROLLED while (run.place != kNone || heads != 0) {
      if (run.place == kNone) {
        begin(group, run, group.broadcast(first, count_trailing_zeros(heads)));
        heads &= heads - 1;
      }
      const Candidate victim = next_victim(group, run);
      const int place = victim.lane < 0 ? kNone : next_place(group, run, victim.score);
      run.place = place != kNone && state.groups.is_in_run(place + 1, run.target) ? place + 1 : kNone;
      if (place == kNone) continue;
      run.pinned.add(victim.lane);
      if (group.rank() == held) own = {place, slot_of(bucket_of(run), victim.lane)};
      if (++held == group.size()) {
        write(group, own);
        held = 0;
      }
    }
    if (held > 0) write(group, own);
  }

 private:
  static constexpr int kNone = 0x7fffffff;

  // Keys of one bucket, in order, and what they may replace.
  template <class G>
  struct Run {
    int place = kNone;  // of the next key; none: the run is at its end
    uint32_t target = 0;
    LaneMask pinned;
    int victims = 0;  // that were asked for
    typename G::Scores scores = {};
  };

  struct Replacement {
    int place = kNone;
    Slot slot = kNoSlot;
  };

  template <class G>
  HKV_HOST_DEVICE int64_t bucket_of(const Run<G>& run) const {
    return kKnowsVictims ? int64_t{run.target} : state.bucket_of(run.target);
  }

  template <Group G>
  HKV_HOST_DEVICE void begin(const G& group, Run<G>& run, int place) const {
    run.place = place;
    run.target = static_cast<uint32_t>(state.groups.target(place));
    run.pinned = state.pinned(bucket_of(run));
    run.victims = 0;
    if (!kKnowsVictims) read_scores(group, run);
  }

  template <Group G>
  HKV_HOST_DEVICE void read_scores(const G& group, Run<G>& run) const {
    run.scores = group.scores_of(state.table.scores + bucket_of(run) * kLanes);
    group.sync();  // before a member writes what the others have read; and all reads are on their way
  }

  // The lowest unpinned entry. Who has chosen the bucket by it has left it: pins are what they were then, and
  // those that chose one bucket saw the same.
  template <Group G>
  HKV_HOST_DEVICE Candidate next_victim(const G& group, Run<G>& run) const {
    const int before = run.victims++;
    if (kKnowsVictims && before == 0) {
      const Victim victim = state.victims[are_of_buckets ? bucket_of(run) : state.groups.item(run.place)];
      return {victim.score, static_cast<int>(victim.lane)};
    }
    if (kKnowsVictims && before == 1) read_scores(group, run);
    return group.lowest_score({run.scores}, {run.pinned});
  }

  // Of the next key that is let in. Those before it are refused, by later victims too: their scores are
  // higher.
  template <Group G>
  HKV_HOST_DEVICE int next_place(const G& group, const Run<G>& run, Score victim) const {
    if (!state.scoring().can_refuse()) return run.place;
    const auto count = static_cast<uint32_t>(state.groups.count);
    auto begin = static_cast<uint32_t>(run.place);
    HKV_ROLLED while (begin < count) {
      const uint32_t next = kNotesHighestScores<G> ? (begin / kStretch + 1) * kStretch : count;
      const uint32_t end = next < count ? next : count;
      const uint32_t place = next_place_before(group, begin, end, run.target, victim);
      if (place != end) return static_cast<int>(place);
      begin = end < count ? pass_over(group, end, run.target, victim) : count;
    }
    return kNone;
  }

  // The first place of the run between two places whose key is let in; the end, if none is and the run may go
  // on there. Each member looks at some in steps of the group, whose numbers are on their way together, and
  // then their scores: no branch lies between.
  template <Group G>
  HKV_HOST_DEVICE uint32_t next_place_before(const G& group, uint32_t begin, uint32_t end, uint32_t target,
                                             Score victim) const {
    constexpr uint32_t kAtOnce = G::size() > 1 ? 2 : 1;
    const uint32_t* targets = state.groups.targets.current;
    const int32_t* numbers = state.groups.items.current;
    uint32_t found = kNone;
    uint32_t own = begin + static_cast<uint32_t>(group.rank());
    HKV_ROLLED while (found == kNone && own < end && targets[own] == target) {
      int32_t items[kAtOnce];
      bool is_in_run[kAtOnce];
      for (uint32_t k = 0; k < kAtOnce; ++k) {
        const uint32_t further = own + k * G::size();
        const uint32_t place = further < end ? further : end - 1;
        is_in_run[k] = (further < end) & (targets[place] == target);
        items[k] = numbers[place];
      }
      Score scores[kAtOnce];  // of policies that can refuse: given
      for (uint32_t k = 0; k < kAtOnce; ++k) scores[k] = state.new_scores[is_in_run[k] ? items[k] : items[0]];
      for (uint32_t k = kAtOnce; k-- > 0;) {
        const bool is_let_in = is_in_run[k] & !(scores[k] < victim);
        found = is_let_in ? own + k * G::size() : found;
      }
      own += kAtOnce * G::size();
    }
    if (found == kNone && own >= end) found = end;
    return static_cast<uint32_t>(group.minimum(static_cast<int>(found)));
  }

  // From a stretch on, the beginning of the first that is not of the run alone, or has a key that is let in.
  template <Group G>
  HKV_HOST_DEVICE uint32_t pass_over(const G& group, uint32_t begin, uint32_t target, Score victim) const {
    HKV_ROLLED for (;; begin += kStretch * G::size()) {
      const uint32_t own = begin + kStretch * static_cast<uint32_t>(group.rank());
      const bool is_refused = own + kStretch <= state.groups.count &&
                              state.groups.targets.current[own] == target &&
                              state.highest_scores[own / kStretch] < victim;
      const uint32_t others = group.ballot(!is_refused);
      if (others != 0) return begin + kStretch * static_cast<uint32_t>(count_trailing_zeros(others));
    }
  }

  template <Group G>
  HKV_HOST_DEVICE void write(const G& group, Replacement& own) const {
    if (own.place != kNone) replace(state.groups.item(own.place), own);
    own.place = kNone;
    group.sync();  // before others read these scores: a run whose first victim was known reads them only now
  }

  HKV_HOST_DEVICE void replace(int64_t u, const Replacement& own) const {
    if (state.replaced != nullptr) {
      state.replaced[u] = {state.table.keys[own.slot], state.table.scores[own.slot]};
    }
    write_entry(state.table, own.slot, state.unique_keys[u].value(), state.new_score(u));
    state.unique_slots[u] = own.slot;
    const bool is_told = !kKnowsVictims && state.is_of_full(state.groups.target(own.place));
    if (!is_told) state.unique_status[u] = static_cast<int32_t>(Status::kEvicted);
  }
};

// Both, one after the other: with one candidate bucket. On a GPU every place of a run that fits is a thread's
// own: what it writes goes to memory beside what others write, not behind it. Such a bucket evicts nobody, so
// that nobody asks for its pins.
struct FillOrEvict {
  static constexpr int kGroup = FillBucket::kGroup;
  static constexpr bool kOwnIndex = true;
  FillBucket filling;
  EvictFromBucket<false> evicting;

  HKV_HOST_DEVICE void prefetch_far(int64_t i) const {
    const UpsertState& state = filling.state;
    const int64_t bucket = state.groups.head_target(i);  // on a CPU, which marks none
    if (bucket < 0) return;
    const int64_t room = kLanes - state.table.occupancy[bucket];
    if (room > 0) prefetch(state.table.line(bucket));
    if (state.groups.is_in_run(i + room, bucket)) prefetch_scores(state.table, bucket);
  }

  template <Group G>
  HKV_HOST_DEVICE void operator()(const G& group, int64_t i) const {
    const int32_t first = fill(group, i);
    group.sync();  // before the others read what a member has pinned and written
    evicting.evict(group, first);
  }

 private:
  template <Group G>
  HKV_HOST_DEVICE int32_t fill(const G& group, int64_t i) const {
    const UpsertState& state = filling.state;
    const Groups& groups = state.groups;
    if constexpr (kNotesEmptyLanes<G>) {
      if (!groups.has_item(i)) return -1;
      const int64_t target = groups.target(i);
      if (state.is_of_full(target)) return groups.head_target(i) < 0 ? -1 : static_cast<int32_t>(i);
      const int64_t bucket = target;
      // A run reads what its first key noted.
      const int64_t head = groups.head_within(i, bucket, kLanes);
      const LaneMask empty = state.empty_lanes[groups.item(head < 0 ? i : head)];
      if (head < 0 || groups.is_in_run(head + empty.count(), bucket)) {
        return filling.fill(i, groups.head_target(i), empty);
      }
      filling.fill_one(i, head, bucket, empty);
      return -1;
    } else {
      const int64_t bucket = groups.head_target(i);
      return filling.fill(i, bucket, state.find_empty_lanes(group, bucket));
    }
  }
};

}  // namespace hkv
