// What can be asked of, and done to, one bucket.
#pragma once

#include "core/group.h"
#include "core/table_view.h"

namespace hkv {

// Every member brings a key, if it wants one looked for: the slot of its own key, in whichever candidate
// bucket it is, or kNoSlot.
template <Group G>
HKV_HOST_DEVICE Slot find_slot(const G& group, const TableView& table, bool is_wanted, Key key) {
  const uint64_t hash = hash_of(key);
  Slot slot = kNoSlot;
  for (int choice = 0; choice < table.choices; ++choice) {
    const Probe probe{is_wanted && slot < 0, table.candidate(hash, choice), digest_of(hash), key};
    if (group.ballot(probe.is_wanted) == 0) break;
    const int lane = group.find_each(table.digests, table.keys, probe);
    if (lane >= 0) slot = slot_of(probe.bucket, lane);
  }
  return slot;
}

// Brings near what match_ahead reads.
HKV_HOST_DEVICE void prefetch_digests(const TableView& table, Key key) {
  const uint64_t hash = hash_of(key);
  for (int choice = 0; choice < table.choices; ++choice) {
    const Digest* line = table.line(table.candidate(hash, choice));
    prefetch(line);
    prefetch(line + kLanes / 2);
  }
}

// A key's hash, and the lanes of its digest in its candidate buckets, for as long as nobody writes digests.
struct Matches {
  uint64_t hash = 0;
  LaneMask lanes[2];
};

// By a thread, once the digests are near: brings near the keys that find_slot will compare (and, with
// `to_score`, their scores, which will be written).
HKV_HOST_DEVICE Matches match_ahead(const TableView& table, Key key, bool to_score) {
  Matches matches{hash_of(key), {}};
  for (int choice = 0; choice < table.choices; ++choice) {
    const int64_t bucket = table.candidate(matches.hash, choice);
    const LaneMask lanes = SerialGroup::match(table.line(bucket), digest_of(matches.hash));
    matches.lanes[choice] = lanes;
    if (!lanes.any()) continue;
    const int64_t slot = bucket * kLanes + lanes.lowest();
    prefetch(table.keys + slot);
    if (to_score) prefetch<kToWrite>(table.scores + slot);
  }
  return matches;
}

// The slot of a key that was matched ahead, or kNoSlot.
HKV_HOST_DEVICE Slot find_slot(const TableView& table, const Matches& matches, Key key) {
  for (int choice = 0; choice < table.choices; ++choice) {
    if (!matches.lanes[choice].any()) continue;
    const int64_t bucket = table.candidate(matches.hash, choice);
    const int lane = SerialGroup::find(table.keys + bucket * kLanes, matches.lanes[choice], key);
    if (lane >= 0) return slot_of(bucket, lane);
  }
  return kNoSlot;
}

// Brings near what a search for a victim reads.
HKV_HOST_DEVICE void prefetch_scores(const TableView& table, int64_t bucket) {
  constexpr int kLine = 64;
  const auto* scores = reinterpret_cast<const char*>(table.scores + bucket * kLanes);
  for (int byte = 0; byte < kLanes * static_cast<int>(sizeof(Words)); byte += kLine) prefetch(scores + byte);
}

// The lowest unpinned entry of a bucket, as a Candidate; read and written at once.
struct alignas(16) Victim {
  Score score;
  int64_t lane;

  static HKV_HOST_DEVICE Victim none() { return {~Score{0}, -1}; }
};

// Called by one member; the lane is empty or its entry has been noted.
HKV_HOST_DEVICE void write_entry(const TableView& table, Slot slot, Key key, Score score) {
  table.digests[slot] = digest_of(hash_of(key));
  table.keys[slot] = Words::of(key);
  table.scores[slot] = Words::of(score);
}

// Called by one member.
HKV_HOST_DEVICE void erase_entry(const TableView& table, Slot slot) {
  table.digests[slot] = kEmpty;
  table.keys[slot] = Words::of(0);
  table.scores[slot] = Words::of(0);
}

}  // namespace hkv
