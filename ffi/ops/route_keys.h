// Which keys of a batch go to which peer of an exchange between devices: every peer has c places, that
// its keys take in order of position. What does not fit has no place, and is counted.
#pragma once

#include "ops/operation.h"

namespace hkv {

// What the steps of a routing share. `i` is a position, `j` one of the positions grouped by target.
struct RouteState {
  const Words* keys;
  Mask valid;
  int64_t devices;
  int64_t inner;
  int64_t peers;
  int64_t capacity;  // places of a peer

  Groups groups;    // of positions: by their peer
  int32_t* begins;  // of a peer: its first j
  int32_t* ends;    // of a peer: behind its last j

  int32_t* sent;
  int32_t* places;
  int32_t* counts;
};

struct ChoosePeer {
  static constexpr int kGroup = 1;
  RouteState state;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t i) const {
    state.places[i] = -1;
    if (!state.valid[i]) return state.groups.leave_out(i);
    state.groups.set(i, peer_of(state.keys[i].value()));
  }

 private:
  HKV_HOST_DEVICE int64_t peer_of(Key key) const {
    return owner_of(key, state.devices) / state.inner % state.peers;
  }
};

// The run of each peer among the grouped positions. A peer without any keeps (0, 0).
struct FindRuns {
  static constexpr int kGroup = 1;
  RouteState state;

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t j) const {
    if (!state.groups.has_item(j)) return;
    const int64_t peer = state.groups.target(j);
    if (state.groups.head_target(j) == peer) state.begins[peer] = static_cast<int32_t>(j);
    if (!state.groups.is_in_run(j + 1, peer)) state.ends[peer] = static_cast<int32_t>(j + 1);
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
    const int32_t item = rank < count ? state.groups.item(begin + rank) : -1;
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
    binder.in("valid", valid, "n?");
    binder.out("sent", sent, "p c");
    binder.out("places", places, "n");
    binder.out("counts", counts, "p");
  }

  template <class Executor>
  void reserve(Arena& arena) {
    const int64_t n = batch.rows;
    workspace.groups = Groups::take(arena, n, peers);
    workspace.begins = arena.take<int32_t>(2 * peers);
    scratch = arena.take<char>(Executor::group_bytes(n));
  }

  template <class Executor>
  void run(Executor& executor) const {
    const int64_t n = batch.rows;
    RouteState state = bound();
    executor.each(n, ChoosePeer{state});
    executor.group(state.groups, scratch);
    executor.zero(state.begins, 2 * peers * static_cast<int64_t>(sizeof(int32_t)));
    executor.each(state.groups.count, FindRuns{state});
    executor.each(peers * capacity, FillPlace{state});
  }

 private:
  RouteState bound() const {
    RouteState state = workspace;
    state.ends = state.begins + peers;
    state.keys = batch.data;
    state.valid = {valid.data_or_null()};
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
