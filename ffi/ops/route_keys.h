// Which keys of a batch go to which peer of an exchange between devices: every peer has c places, that
// its keys take in order of position. What does not fit has no place, and is counted.
#pragma once

#include "ops/operation.h"

namespace hkv {

// What the steps of a routing share. `i` is a position, `j` one of the positions grouped by target.
struct RouteState {
  const Words* keys;
  const bool* valid;
  int64_t devices;
  int64_t inner;
  int64_t peers;
  int64_t capacity;  // places of a peer

  int32_t* targets;  // of i, or -1
  int32_t* items;    // of j: its position
  int32_t* grouped_targets;
  int32_t* grouped;  // how many j there are
  int32_t* begins;   // of a peer: its first j
  int32_t* ends;     // of a peer: behind its last j

  int32_t* sent;
  int32_t* places;
  int32_t* counts;
};

struct ChoosePeer {
  static constexpr int kGroup = 1;
  RouteState state;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t i) const {
    state.targets[i] = state.valid[i] ? peer_of(state.keys[i].value()) : -1;
    state.places[i] = -1;
  }

 private:
  HKV_HOST_DEVICE int32_t peer_of(Key key) const {
    return static_cast<int32_t>(owner_of(key, state.devices) / state.inner % state.peers);
  }
};

// The run of each peer among the grouped positions. A peer without any keeps (0, 0).
struct FindRuns {
  static constexpr int kGroup = 1;
  RouteState state;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t j) const {
    const int32_t peer = state.grouped_targets[j];
    if (j == 0 || state.grouped_targets[j - 1] != peer) state.begins[peer] = static_cast<int32_t>(j);
    const bool is_last = j + 1 == *state.grouped || state.grouped_targets[j + 1] != peer;
    if (is_last) state.ends[peer] = static_cast<int32_t>(j + 1);
  }
};

struct FillPlace {
  static constexpr int kGroup = 1;
  RouteState state;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t place) const {
    const int64_t peer = place / state.capacity;
    const int64_t rank = place % state.capacity;
    const int32_t begin = state.begins[peer];
    const int32_t count = state.ends[peer] - begin;
    const int32_t item = rank < count ? state.items[begin + rank] : -1;
    state.sent[place] = item;
    if (item >= 0) state.places[item] = static_cast<int32_t>(place);
    if (rank == 0) state.counts[peer] = count;
  }
};

// Takes c >= 1, and p * c below 2^31, because places are int32.
struct RouteKeys {
  static constexpr const char* kName = "route_keys";
  static constexpr bool kPerPosition = false;

  int64_t devices = 1;
  int64_t inner = 1;
  int64_t peers = 1;
  int64_t capacity = 1;
  Array<Words> batch;
  Array<bool> valid;
  Array<int32_t> sent, places, counts;
  RouteState workspace = {};
  char* scratch = nullptr;

  template <class Binder>
  void describe(Binder& binder) {
    binder.attribute("devices", devices);
    binder.attribute("inner", inner);
    binder.attribute("p", peers);
    binder.attribute("c", capacity);
    binder.in("keys", batch, "n 2");
    binder.in("valid", valid, "n");
    binder.out("sent", sent, "p c");
    binder.out("places", places, "n");
    binder.out("counts", counts, "p");
  }

  template <class Executor>
  void reserve(Arena& arena) {
    const int64_t n = batch.rows;
    workspace.targets = arena.take<int32_t>(n);
    workspace.items = arena.take<int32_t>(n);
    workspace.grouped_targets = arena.take<int32_t>(n);
    workspace.grouped = arena.take<int32_t>(1);
    workspace.begins = arena.take<int32_t>(peers);
    workspace.ends = arena.take<int32_t>(peers);
    scratch = arena.take<char>(Executor::group_bytes(n));
  }

  template <class Executor>
  void run(Executor& executor) const {
    const int64_t n = batch.rows;
    const RouteState state = bound();
    executor.each(n, ChoosePeer{state});
    executor.group(n, state.targets, peers, state.items, state.grouped_targets, state.grouped, scratch);
    executor.zero(state.begins, peers * static_cast<int64_t>(sizeof(int32_t)));
    executor.zero(state.ends, peers * static_cast<int64_t>(sizeof(int32_t)));
    executor.each_up_to(state.grouped, n, FindRuns{state});
    executor.each(peers * capacity, FillPlace{state});
  }

 private:
  RouteState bound() const {
    RouteState state = workspace;
    state.keys = batch.data;
    state.valid = valid.data;
    state.devices = devices;
    state.inner = inner;
    state.peers = peers;
    state.capacity = capacity;
    state.sent = sent.data;
    state.places = places.data;
    state.counts = counts.data;
    return state;
  }
};

}  // namespace hkv
