// How an upsert lets new keys take the places of others, in buckets that are full. Sections 3.2 and 3.5.
#pragma once

#include "ops/upsert_steps.h"

namespace hkv {

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
// find none, stay refused. Of each run the first victim may be known; or of buckets their oldest entries are
// noted, for this batch and those to come.
template <bool kKnowsVictims, bool kNotesOldest>
struct EvictFromBucket {
  static_assert(!(kKnowsVictims && kNotesOldest));
  static constexpr int kGroup = 8;
  static constexpr bool kOwnIndex = true;
  bool are_of_buckets;  // the known ones
  UpsertState state;

  template <Group G>
  HKV_HOST_DEVICE void operator()(const G& group, int64_t i) const {
    int32_t first = state.groups.head_target(i) >= 0 ? static_cast<int32_t>(i) : -1;
    if (kNotesOldest) {
      first = evict_noted(first);
      group.sync();  // before the others read what a member has pinned and written
    }
    evict(group, first);
  }

  // By each member for its own run, of which `first` is the first pending key, or -1: keys take the place of
  // entries that earlier batches have noted, as far as these have not been written since and are not pinned.
  // The place of the first key that finds none, or -1. Of a bucket that such a key is left of, the list stays
  // as it is: whoever looks for that key's victim makes it anew.
  HKV_HOST_DEVICE int32_t evict_noted(int32_t first) const {
    if (first < 0) return -1;
    const Groups& groups = state.groups;
    const int64_t target = groups.target(first);
    const int64_t bucket = state.bucket_of(target);
    Oldest& noted = state.table.oldest[bucket];
    const Oldest oldest = noted;
    LaneMask pinned = state.pinned(bucket);
    Oldest left = oldest;
    int32_t place = first;
    bool is_in_run = true;
    HKV_ROLLED for (Oldest ahead = oldest; ahead.lanes != 0 && is_in_run;) {
      const int listed = ahead.first();
      const int lane = ahead.lane(listed);
      ahead.drop(listed);
      const Slot slot = slot_of(bucket, lane);
      const bool is_old = state.table.scores[slot].value() < oldest.time;
      if (is_old && pinned.has(lane)) continue;
      left.drop(listed);
      if (!is_old) continue;
      pinned.add(lane);
      replace(groups.item(place), {place, slot});
      is_in_run = groups.is_in_run(++place, target);
    }
    if (is_in_run) {
      state.set_pinned(bucket, pinned);
      return place;
    }
    noted.lanes = left.lanes;
    return -1;
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
      if (kNotesOldest && run.place == kNone) note_oldest(group, run);
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
    Oldest oldest = {};  // of those that are not noted before
    uint32_t next = 0;   // bits of these: who may go
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
    run.next = 0;
    if (!kKnowsVictims && !kNotesOldest) read_scores(group, run);
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
    if (kNotesOldest && run.next == 0) renew_oldest(group, run);
    if (kNotesOldest && run.next != 0) return {0, take_next(run)};  // under LRU nobody is refused by a score
    // Once more where nobody is listed who may go: kept meanwhile they would spill.
    if (kNotesOldest || (kKnowsVictims && before == 1)) read_scores(group, run);
    return group.lowest_score({run.scores}, {run.pinned});
  }

  // The oldest but those that have just come, whose scores, as those of hits, are not lower than this time.
  template <Group G>
  HKV_HOST_DEVICE void renew_oldest(const G& group, Run<G>& run) const {
    read_scores(group, run);
    const LaneMask pins = state.pinned(bucket_of(run));
    const LaneMask taken = {{run.pinned.words[0] & ~pins.words[0], run.pinned.words[1] & ~pins.words[1]}};
    run.oldest = group.oldest_of(run.scores, taken, state.time());
    static_assert(G::size() <= Oldest::kMost);
    for (int place = 0; place < Oldest::kMost; place += G::size()) {
      const int lane = run.oldest.lane(place + group.rank());
      run.next |= group.ballot(lane >= 0 && !run.pinned.has(lane)) << place;
    }
  }

  template <class G>
  static HKV_HOST_DEVICE int take_next(Run<G>& run) {
    const int place = count_trailing_zeros(run.next);
    const int lane = run.oldest.lane(place);
    run.next &= run.next - 1;
    run.oldest.drop(place);
    return lane;
  }

  template <Group G>
  HKV_HOST_DEVICE void note_oldest(const G& group, const Run<G>& run) const {
    if (group.rank() == 0) state.table.oldest[bucket_of(run)] = run.oldest;
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
template <bool kNotesOldest>
struct FillOrEvict {
  struct Ahead {};  // it leaves nothing but lines that are near
  static constexpr int kGroup = FillBucket::kGroup;
  static constexpr bool kOwnIndex = true;
  FillBucket filling;
  EvictFromBucket<false, kNotesOldest> evicting;

  HKV_HOST_DEVICE void prefetch_far(int64_t i) const {
    const UpsertState& state = filling.state;
    const int64_t bucket = state.groups.head_target(i);  // on a CPU, which marks none
    if (bucket < 0) return;
    if (state.table.occupancy[bucket] < kLanes) prefetch(state.table.line(bucket));
    if (state.overflows(i, bucket)) state.prefetch_victims(bucket);
  }

  // By a thread, once it is near what is noted of a bucket.
  HKV_HOST_DEVICE Ahead look_ahead(int64_t i) const {
    const UpsertState& state = filling.state;
    const int64_t bucket = kNotesOldest ? state.groups.head_target(i) : -1;
    if (bucket < 0 || !state.overflows(i, bucket)) return {};
    const Oldest oldest = state.table.oldest[bucket];
    if (state.overflows(i + oldest.count(), bucket)) prefetch_scores(state.table, bucket);
    if (oldest.lanes == 0) return {};
    const Slot slot = slot_of(bucket, oldest.lane(oldest.first()));
    prefetch<kToWrite>(state.table.digests + slot);
    prefetch<kToWrite>(state.table.keys + slot);
    prefetch<kToWrite>(state.table.scores + slot);
    return {};
  }
  HKV_HOST_DEVICE void operator()(const SerialGroup& group, int64_t i, Ahead) const { (*this)(group, i); }

  template <Group G>
  HKV_HOST_DEVICE void operator()(const G& group, int64_t i) const {
    int32_t first = fill(group, i);
    if (kNotesOldest) first = evicting.evict_noted(first);
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
        return fill_and_pin(i, groups.head_target(i), empty);
      }
      filling.fill_one(i, head, bucket, empty);
      return -1;
    } else {
      const int64_t bucket = groups.head_target(i);
      return fill_and_pin(i, bucket, state.find_empty_lanes(group, bucket));
    }
  }

  // Who comes too late for an empty lane does not evict who has taken one.
  HKV_HOST_DEVICE int32_t fill_and_pin(int64_t i, int64_t bucket, LaneMask empty) const {
    const int32_t place = filling.fill(i, bucket, empty);
    if (place < 0 || !empty.any()) return place;
    LaneMask pinned = filling.state.pinned(bucket);
    pinned.add(empty);
    filling.state.set_pinned(bucket, pinned);
    return place;
  }
};

// After a batch of scores that its caller has made: where one of them is lower than the time of its bucket's
// list, that list holds no longer. Whoever sees it writes the same.
struct ForgetOldest {
  static constexpr int kGroup = 1;
  UpsertState state;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t u) const {
    const Slot slot = state.unique_slots[u];
    if (slot < 0) return;
    uint64_t* time = &state.table.oldest[slot / kLanes].time;
    const uint64_t noted = atomic_read(time);
    if (state.table.scores[slot].value() < noted) atomic_compare_and_swap(time, noted, uint64_t{0});
  }
};

}  // namespace hkv
