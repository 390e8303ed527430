// What the steps of an upsert share: the table, the batch, and what one step leaves for the next.
#pragma once

#include "ops/operation.h"

namespace hkv {

// An entry that was evicted; read and written at once.
struct alignas(16) Replaced {
  Words key;
  Words score;
};

struct UpsertState {
  TableView table;
  Policy policy;
  bool admit;
  bool write_scores;
  uint32_t* clock;
  uint32_t ticks;  // from there to the time of the batch
  const uint32_t* epoch;

  // The batch: distinct keys, and who their occurrences are.
  const Words* unique_keys;
  const int32_t* count;
  const int32_t* inverse;
  const int32_t* first;
  const int32_t* last;
  const int32_t* order;    // for policies that count
  const int32_t* offsets;  // likewise
  const Words* scores;  // by position, or null

  // Per distinct key.
  Slot* unique_slots;
  int32_t* unique_status;  // until the report, of those that are pending: "refused", and with a slot they
                           // have taken an empty lane; "evicted", and without a slot they are refused
  LaneMask* empty_lanes;  // with one candidate, of those that are pending: of the bucket, as it was found
  int32_t* named;  // with two candidates: the bucket of the first round
  Score* new_scores;  // of those that are pending, unless all have the same
  Score* highest_scores;  // of a stretch of places (NoteHighestScores), where a policy refuses by score
  Replaced* replaced;  // of those that evict, where that is asked for

  // Per bucket.
  uint32_t* loads;  // kEvicts, and with two candidates how many keys may come
  LaneMask* pins;  // where somebody evicts

  // Keys grouped by the bucket of this round: the keys of a bucket are a run of places.
  Groups groups;

  // In round 3 with two candidates: of the buckets (NoteVictims), or of the distinct keys in the bucket that
  // each names (ChooseByScore; not under LRU, where who evicts goes by lists).
  Victim* victims;

  HKV_HOST_DEVICE uint64_t time() const { return Words{clock[0], clock[1]}.value() + ticks; }

  HKV_HOST_DEVICE void set_clock() const {
    const Words now = Words::of(time());
    clock[0] = now.low;
    clock[1] = now.high;
  }

  HKV_HOST_DEVICE Scoring scoring() const { return {policy, time(), epoch[0]}; }

  HKV_HOST_DEVICE int64_t candidate(int64_t u, int choice) const {
    return table.candidate(hash_of(unique_keys[u].value()), choice);
  }

  HKV_HOST_DEVICE void score_hit(Slot slot, uint64_t given) const {
    Words& score = table.scores[slot];
    const Score old = scoring().counts() ? score.value() : 0;  // a load that others need not wait for
    score = Words::of(scoring().of_hit(old, given));
  }

  // The empty lanes of every member's own bucket, or of -1. A full one's digests are not read.
  template <Group G>
  HKV_HOST_DEVICE LaneMask find_empty_lanes(const G& group, int64_t bucket) const {
    const bool has_room = bucket >= 0 && table.occupancy[bucket] < kLanes;
    return group.match_each(table.digests, Probe{has_room, bucket, kEmpty, 0});
  }

  // With two candidates: absent, and without a slot: refused, unless a later step lets the key in.
  HKV_HOST_DEVICE bool is_pending(int64_t u) const {
    return unique_slots[u] < 0 && unique_status[u] == static_cast<int32_t>(Status::kRefused);
  }

  // With one candidate a bucket that was found full may have a target of its own: its keys stand behind
  // those of buckets with room, and who looks at one reads nothing else to see that it evicts.
  HKV_HOST_DEVICE bool marks_full() const { return groups.limit > table.buckets; }
  HKV_HOST_DEVICE bool is_of_full(int64_t target) const { return target >= table.buckets; }
  HKV_HOST_DEVICE int64_t bucket_of(int64_t target) const {
    return is_of_full(target) ? target - table.buckets : target;
  }

  HKV_HOST_DEVICE LaneMask pinned(int64_t bucket) const { return pins[bucket]; }

  HKV_HOST_DEVICE Score new_score(int64_t u) const {
    return scoring().takes_given() ? new_scores[u] : scoring().of_new(0);
  }

  // Whether a bucket's oldest entries are noted, for the batches to come: under LRU no score is lower than
  // those before it.
  HKV_HOST_DEVICE bool notes_oldest() const { return policy == Policy::kLru; }

  // By a thread: the lowest unpinned entry, if it is noted.
  HKV_HOST_DEVICE Victim noted_victim(int64_t bucket) const {
    if (!notes_oldest()) return Victim::none();
    const Oldest oldest = table.oldest[bucket];
    const LaneMask pinned = this->pinned(bucket);
    HKV_ROLLED for (int place = 0; place < Oldest::kMost; ++place) {
      const int lane = oldest.lane(place);
      if (lane < 0 || pinned.has(lane)) continue;
      const Score score = table.scores[slot_of(bucket, lane)].value();
      if (score < oldest.time) return {score, lane};
    }
    return Victim::none();
  }

  HKV_HOST_DEVICE void prefetch_victims(int64_t bucket) const {
    if (notes_oldest()) {
      prefetch(table.oldest + bucket);
    } else {
      prefetch_scores(table, bucket);
    }
  }

  // The bucket of round 3, unless its victim's score refuses the key: later victims' are no lower.
  HKV_HOST_DEVICE void name_by_score(int64_t u, int64_t bucket, Score victim) const {
    if (scoring().can_refuse() && new_score(u) < victim) return groups.leave_out(u);
    groups.set(u, bucket);
  }

  // Set where keys come for whom there is no room. Nothing is pinned elsewhere.
  static constexpr uint32_t kEvicts = uint32_t{1} << 31;
  HKV_HOST_DEVICE bool evicts(int64_t bucket) const { return loads[bucket] >= kEvicts; }

  // With one candidate: whether the keys of a run are more than their bucket has room for, by its occupancy,
  // which is the number of its digests.
  HKV_HOST_DEVICE bool overflows(int64_t head, int64_t target) const {
    if (is_of_full(target)) return true;
    return groups.is_in_run(head + kLanes - table.occupancy[target], target);
  }

  // Several workers may pin lanes of one bucket.
  HKV_HOST_DEVICE void pin(Slot slot) const {
    if (!evicts(slot / kLanes)) return;
    atomic_or(reinterpret_cast<uint32_t*>(pins) + (slot >> 5), uint32_t{1} << (slot & 31));
  }
  HKV_HOST_DEVICE void prefetch_load(Slot slot) const {
    if (table.has_slot(slot)) prefetch(loads + slot / kLanes);
  }

  // One worker owns the bucket.
  HKV_HOST_DEVICE void set_pinned(int64_t bucket, const LaneMask& mask) const { pins[bucket] = mask; }

  // What the occurrences of every member's own key say of its score, merged, if it wants that; a long list is
  // added up by all members.
  template <Group G>
  HKV_HOST_DEVICE uint64_t given_each(const G& group, int64_t u, bool is_wanted) const {
    constexpr int32_t kLong = 32;
    if (!adds_up()) return is_wanted ? last_or_count(u) : 0;
    const bool is_long = is_wanted && offsets[u + 1] - offsets[u] > kLong;
    uint64_t own = is_wanted && !is_long ? sum(SerialGroup{}, u) : 0;
    for_each_member(group, is_long, [&](int member) {
      const uint64_t of_member = sum(group, group.broadcast(static_cast<int>(u), member));
      if (member == group.rank()) own = of_member;
    });
    return own;
  }

 private:
  HKV_HOST_DEVICE bool adds_up() const { return scoring().counts() && scores != nullptr; }

  HKV_HOST_DEVICE uint64_t last_or_count(int64_t u) const {
    if (policy == Policy::kCustom) return scores[last[u]].value();
    return scoring().counts() ? static_cast<uint64_t>(offsets[u + 1] - offsets[u]) : 0;
  }

  template <Group G>
  HKV_HOST_DEVICE uint64_t sum(const G& group, int64_t u) const {
    const int32_t* occurrences = order + offsets[u];
    const Words* terms = scores;
    return group.saturating_sum(offsets[u + 1] - offsets[u],
                                [occurrences, terms](int64_t i) { return terms[occurrences[i]].value(); });
  }
};

}  // namespace hkv
