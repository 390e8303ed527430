"""The contract of docs/semantics.md in NumPy and Python integers: what every backend must do.

Numbers in parentheses are sections of that page. 64-bit words are uint64 here; the state leaves
keep the layout of section 1, so that they can be compared with those of a table directly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from oracle_rows import (
    GOLDEN,
    ZEROS,
    Init,
    f32,
    initial_rows,
    initialiser_of,
    mix,
    round_to,
)

LANES = 128
CHUNK = 32
MISSING, FOUND, INSERTED, EVICTED, REFUSED, NOT_ADMITTED = range(6)
POLICIES = ("LRU", "LFU", "EPOCH_LRU", "EPOCH_LFU", "CUSTOM")
COUNTING_POLICIES = ("LFU", "EPOCH_LFU")
REFUSING_POLICIES = ("EPOCH_LFU", "CUSTOM")
SCORED_POLICIES = ("LFU", "EPOCH_LFU", "CUSTOM")
U64_MAX = 2**64 - 1
U32_MAX = 2**32 - 1
LOOKUP_CHUNK = 2**15
RESIZE_CHUNK = 2**14
LEAVES = ("digests", "keys", "scores", "occupancy", "clock", "epoch", "values")

Array = np.ndarray
Predicate = Callable[[Array, Array, Array], Array]


@dataclass(frozen=True)
class Distinct:
    """The distinct keys of a batch (6)."""

    unique_keys: Array
    inverse: Array
    order: Array
    offsets: Array
    count: int

    @property
    def keys(self) -> Array:
        return self.unique_keys[: self.count]

    @property
    def occurrences(self) -> Array:
        """How often each distinct key occurs."""
        return np.diff(self.offsets[: self.count + 1])

    @property
    def first(self) -> Array:
        """The position of the first valid occurrence of each distinct key."""
        return self.order[self.offsets[: self.count]]

    @property
    def last(self) -> Array:
        """The position of the last valid occurrence of each distinct key."""
        return self.order[self.offsets[1 : self.count + 1] - 1]


class Found(NamedTuple):
    values: Array
    found: Array
    slots: Array


class Counts(NamedTuple):
    unique: int
    hits: int
    inserted: int
    evicted: int
    refused: int
    not_admitted: int = 0


@dataclass(frozen=True)
class Entries:
    """Entries, compact, zero behind `count`."""

    keys: Array
    scores: Array
    values: Array
    count: int

    def by_key(self) -> dict[int, tuple[int, bytes]]:
        """The score and the row of each key."""
        rows = [row.tobytes() for row in self.values]
        entries = zip(self.keys.tolist(), self.scores.tolist(), rows, strict=True)
        return {key: (score, row) for key, score, row in [*entries][: self.count]}


class Outcome(NamedTuple):
    """What a writing call returns (3.4)."""

    slots: Array
    status: Array
    counts: Counts
    values: Array | None = None
    evicted: Entries | None = None


class Erased(NamedTuple):
    status: Array
    counts: Counts


class Placement(NamedTuple):
    """Where the distinct keys of a batch are after the call, and what made room for them."""

    slots: Array
    status: Array
    evicted: Entries

    @property
    def is_new(self) -> Array:
        return (self.status == INSERTED) | (self.status == EVICTED)

    def counts(self) -> Counts:
        evicted, refused = self.status == EVICTED, self.status == REFUSED
        tallies = self.status == FOUND, self.is_new, evicted, refused
        return Counts(len(self.slots), *(int(tally.sum()) for tally in tallies))


def as_bits(array: Any) -> Array:
    """An array as unsigned integers, so that equality is that of bits."""
    array = np.ascontiguousarray(array)
    return array if array.dtype == bool else array.view(f"u{array.dtype.itemsize}")


# Hashing (2)


def high64(word: Array, factor: int) -> Array:
    """The high word of the product of a word and a factor below 2^32."""
    high, low = word >> np.uint64(32), word & np.uint64(U32_MAX)
    return (high * np.uint64(factor) + (low * np.uint64(factor) >> np.uint64(32))) >> np.uint64(32)


def hash_keys(keys: Array) -> Array:
    return mix(keys + GOLDEN)


def digests_of(keys: Array) -> Array:
    bits = hash_keys(keys) & np.uint64(0xFFFF)
    return (np.uint64(1) + (bits * np.uint64(255) >> np.uint64(16))).astype(np.uint8)


def candidate_buckets(keys: Array, buckets: int, choices: int) -> Array:
    """The candidate buckets of each key: int64[n, choices]."""
    hashes = hash_keys(keys)
    first = high64(hashes, buckets).astype(np.int64)
    if choices == 1:
        return first[:, None]
    if buckets == 1:
        return np.zeros((len(keys), 2), np.int64)
    second = high64(mix(hashes + GOLDEN), buckets - 1).astype(np.int64)
    return np.stack([first, second + (second >= first)], axis=1)


# Batches (3, 6) and sums (8)


def unique(keys: Array, valid: Array | None = None) -> Distinct:
    """The distinct valid keys of a batch, in order of first occurrence."""
    positions = np.arange(len(keys)) if valid is None else np.flatnonzero(valid)
    ascending, first, group = np.unique(keys[positions], return_index=True, return_inverse=True)
    by_occurrence = np.argsort(first)
    number = np.empty_like(by_occurrence)
    number[by_occurrence] = np.arange(len(ascending))

    unique_keys = np.zeros(len(keys), np.uint64)
    unique_keys[: len(ascending)] = ascending[by_occurrence]
    inverse = np.full(len(keys), -1, np.int32)
    inverse[positions] = number[group]
    order = np.full(len(keys), -1, np.int32)
    order[: len(positions)] = positions[np.argsort(number[group], kind="stable")]
    offsets = np.full(len(keys) + 1, len(positions), np.int32)
    sizes = np.bincount(number[group], minlength=len(ascending))
    offsets[: len(ascending) + 1] = np.concatenate([[0], np.cumsum(sizes)])
    return Distinct(unique_keys, inverse, order, offsets, len(ascending))


def tree_sum(rows: Array) -> Array:
    """The sum of float32 rows by chunks of 32, each from left to right, and so on."""
    while len(rows) > 1:
        chunks = [rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK)]
        rows = np.stack([reduce(np.add, chunk) for chunk in chunks])
    return rows[0]


def same_nan(sums: Array) -> Array:
    """Sums with the one NaN that they have (8)."""
    return np.where(np.isnan(sums), np.uint32(0x7FC00000), sums.view(np.uint32)).view(np.float32)


def combine(rows: Array, distinct: Distinct) -> Array:
    """The sum of each distinct key's rows: float32[count, dim]."""
    sums = rows[distinct.first].astype(np.float32)
    for group in np.flatnonzero(distinct.occurrences > 1):
        start, end = distinct.offsets[group : group + 2]
        sums[group] = same_nan(tree_sum(rows[distinct.order[start:end]].astype(np.float32)))
    return sums


def saturating_sum(scores: Array, distinct: Distinct) -> Array:
    """The sum of each distinct key's scores, at most 2^64 - 1."""
    totals = [0] * distinct.count
    for group, score in zip(distinct.inverse.tolist(), scores.tolist(), strict=True):
        if group >= 0:
            totals[group] += score
    return np.array([min(total, U64_MAX) for total in totals], np.uint64)


# The table


def spread(per_key: Array, distinct: Distinct, masked: int) -> Array:
    """What belongs to each distinct key, at each of its positions."""
    per_position = np.full((len(distinct.inverse), *per_key.shape[1:]), masked, per_key.dtype)
    valid = distinct.inverse >= 0
    per_position[valid] = per_key[distinct.inverse[valid]]
    return per_position


def rank_within(groups: Array) -> Array:
    """How many earlier positions name the same group."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    starts = np.searchsorted(ordered, ordered)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(groups)) - starts
    return rank


def outcome_of(distinct: Distinct, placement: Placement) -> Outcome:
    """What a call reports of where the keys of its batch went (3.4)."""
    slots = spread(placement.slots, distinct, -1)
    status = spread(placement.status, distinct, MISSING)
    again = np.ones(len(status), bool)
    again[distinct.first] = False
    status[again & ((status == INSERTED) | (status == EVICTED))] = FOUND
    return Outcome(slots, status, placement.counts())


class Oracle:
    """A table and all that can be done to it."""

    def __init__(
        self,
        capacity: int,
        dim: int,
        dtype: Any = np.float32,
        policy: str = "LRU",
        choices: int = 1,
        init: Init = ZEROS,
        seed: int = 0,
    ):
        buckets = -(-capacity // LANES)
        self.dim, self.dtype = dim, np.dtype(dtype)
        self.policy, self.choices, self.init, self.seed = policy, choices, init, seed
        self.digests = np.zeros((buckets, LANES), np.uint8)
        self.keys = np.zeros((buckets, LANES, 2), np.uint32)
        self.scores = np.zeros((buckets, LANES, 2), np.uint32)
        self.occupancy = np.zeros(buckets, np.int32)
        self.values = np.zeros((buckets * LANES, dim), self.dtype)
        self.clock = np.zeros(2, np.uint32)
        self.epoch = np.zeros(1, np.uint32)

    @classmethod
    def from_table(cls, table: Any) -> Oracle:
        """An oracle in the state of a table of jax_hkv, of which it shares nothing."""
        init = initialiser_of(table.initializer, table.dim)
        oracle = cls(
            table.capacity,
            table.dim,
            table.values.dtype,
            table.policy.name,
            table.choices,
            init,
            table.seed,
        )
        for leaf in LEAVES:
            setattr(oracle, leaf, np.array(getattr(table, leaf)))
        return oracle

    def assert_equal(self, table: Any) -> None:
        """Every bit of a table that has a meaning is that of the oracle."""
        for leaf in LEAVES:
            expected, actual = as_bits(getattr(self, leaf)), as_bits(getattr(table, leaf))
            if leaf == "values":
                expected, actual = expected[self.occupied], actual[self.occupied]
            if np.array_equal(expected, actual):
                continue
            assert expected.shape == actual.shape, f"{leaf}: {actual.shape}, not {expected.shape}"
            where = np.argwhere(expected != actual)[0]
            place = f"index {where.tolist()}"
            if leaf == "values":
                slot = self.occupied[where[0]]
                place = f"bucket {slot // LANES}, lane {slot % LANES}, element {where[1]}"
            elif len(where) > 1:
                place = f"bucket {where[0]}, lane {where[1]}, {['low', 'high'][where[-1] % 2]} word"
            there, here = actual[tuple(where)], expected[tuple(where)]
            raise AssertionError(
                f"{leaf} at {place}: {there:#x}, the oracle has {here:#x}; "
                f"{np.count_nonzero(expected != actual)} elements differ"
            )
        self._check_oldest(np.asarray(table.index.oldest))

    def _check_oldest(self, oldest: Array) -> None:
        """What a table notes of its buckets (section 3.5); here victims are found by scores."""
        if self.policy != "LRU":
            assert not oldest.any(), "noted where nobody looks"
        time, lanes = oldest.view("<u8")[:, 0], oldest.view(np.uint8)[:, 8:].astype(np.int64) - 1
        for bucket in np.flatnonzero((lanes >= 0).any(axis=1)):
            scores = self.score_words.reshape(-1, LANES)[bucket]
            occupied = np.flatnonzero(self.digests[bucket])
            noted = [
                lane for lane in lanes[bucket] if lane in occupied and scores[lane] < time[bucket]
            ]
            ascending = occupied[np.argsort(scores[occupied], kind="stable")]
            assert noted == ascending[: len(noted)].tolist(), f"bucket {bucket} notes {noted}"

    @property
    def buckets(self) -> int:
        return len(self.occupancy)

    @property
    def capacity(self) -> int:
        return self.buckets * LANES

    @property
    def size(self) -> int:
        return int(self.occupancy.sum())

    @property
    def key_words(self) -> Array:
        """The keys by slot as one word each; writing to it writes to the state."""
        return self.keys.view("<u8").reshape(-1)

    @property
    def score_words(self) -> Array:
        """The scores by slot as one word each; writing to it writes to the state."""
        return self.scores.view("<u8").reshape(-1)

    @property
    def occupied(self) -> Array:
        """The occupied slots, ascending."""
        return np.flatnonzero(self.digests)

    @property
    def time(self) -> int:
        return int(self.clock.view("<u8")[0])

    # Reading

    def lookup(self, keys: Array) -> Array:
        """The slot of each key, -1 where it is absent."""
        slots = np.full(len(keys), -1, np.int64)
        for start in range(0, len(keys), LOOKUP_CHUNK):
            part = keys[start : start + LOOKUP_CHUNK]
            digests = digests_of(part)[:, None]
            for bucket in candidate_buckets(part, self.buckets, self.choices).T:
                row, lane = np.nonzero(self.digests[bucket] == digests)
                slot = bucket[row] * LANES + lane
                hit = self.key_words[slot] == part[row]
                slots[start + row[hit]] = slot[hit]
        return slots

    def initial_rows(self, keys: Array) -> Array:
        return initial_rows(keys, self.dim, self.dtype, self.init, self.seed)

    def find(
        self,
        keys: Array,
        valid: Array | None = None,
        touch: bool = False,
        fill: float | str = 0.0,
    ) -> Found:
        distinct = unique(keys, valid)
        slots = self.lookup(distinct.keys)
        if touch:
            assert self.policy != "CUSTOM", "under Custom only assign touches"
            self._tick()
            present = slots >= 0
            merged = self._merge_scores(None, distinct)
            self._write_scores(slots[present], merged[present], is_new=False)
        slot_of = spread(slots, distinct, -1)
        number = f32(0 if fill == "initial" else fill)
        values = round_to(np.full((len(keys), self.dim), number), self.dtype)
        if fill == "initial":
            absent = (distinct.inverse >= 0) & (slot_of < 0)
            values[absent] = self.initial_rows(keys[absent])
        values[slot_of >= 0] = self.values[slot_of[slot_of >= 0]]
        return Found(values, slot_of >= 0, slot_of)

    def contains(self, keys: Array, valid: Array | None = None) -> Array:
        return self.find(keys, valid).found

    def export_batch(self, offset: int, count: int, predicate: Predicate | None = None) -> Entries:
        """The entries of slots offset to offset + count - 1 (for which the predicate holds)."""
        slots = self.occupied
        slots = slots[(slots >= offset) & (slots < offset + count)]
        if predicate is not None:
            holds = predicate(self.key_words[slots], self.score_words[slots], self.values[slots])
            slots = slots[holds]
        return self._entries(slots, count)

    def export_keys(self, keys: Array, valid: Array | None = None) -> Entries:
        """The entries of the keys that are present, in the order of first occurrence."""
        slots = self.lookup(unique(keys, valid).keys)
        return self._entries(slots[slots >= 0], len(keys))

    # Writing

    def import_batch(
        self, keys: Array, scores: Array, values: Array, valid: Array, return_evicted: bool
    ) -> Outcome:
        """Entries as they are, whatever the policy."""
        policy, self.policy = self.policy, "CUSTOM"
        outcome = self.insert_and_evict(keys, values, scores, valid)
        self.policy = policy
        return outcome if return_evicted else outcome._replace(evicted=None)

    def find_or_insert(
        self,
        keys: Array,
        values: Array | None = None,
        scores: Array | None = None,
        valid: Array | None = None,
        return_evicted: bool = False,
        pinned: Array | None = None,
    ) -> Outcome:
        distinct = unique(keys, valid)
        initial = self.initial_rows(distinct.keys)
        placement = self._insert(distinct, self._merge_scores(scores, distinct), pinned)
        new, slots = placement.is_new, placement.slots
        self.values[slots[new]] = initial[new] if values is None else values[distinct.first[new]]
        rows = np.where((slots < 0)[:, None], initial, self.values[slots])
        outcome = outcome_of(distinct, placement)._replace(values=spread(rows, distinct, 0))
        return outcome._replace(evicted=placement.evicted if return_evicted else None)

    def insert_and_evict(
        self,
        keys: Array,
        values: Array,
        scores: Array | None = None,
        valid: Array | None = None,
    ) -> Outcome:
        distinct = unique(keys, valid)
        placement = self._insert(distinct, self._merge_scores(scores, distinct))
        placed = placement.slots >= 0
        self.values[placement.slots[placed]] = values[distinct.last[placed]]
        return outcome_of(distinct, placement)._replace(evicted=placement.evicted)

    def insert_or_assign(
        self,
        keys: Array,
        values: Array,
        scores: Array | None = None,
        valid: Array | None = None,
    ) -> Outcome:
        return self.insert_and_evict(keys, values, scores, valid)._replace(evicted=None)

    def accum_or_assign(
        self,
        keys: Array,
        values: Array,
        exists: Array,
        scores: Array | None = None,
        valid: Array | None = None,
    ) -> Outcome:
        valid = np.ones(len(keys), bool) if valid is None else valid
        slot_before = np.where(valid, self.lookup(keys), -1)
        effective = valid & (exists == (slot_before >= 0))
        read = valid & ~effective

        distinct = unique(keys, effective)
        merged = self._merge_scores(scores, distinct)
        placement = self._insert(distinct, merged, pins=slot_before[read])
        hit, new, slots = placement.status == FOUND, placement.is_new, placement.slots
        sums = combine(values, distinct)[hit] + self.values[slots[hit]].astype(f32)
        self.values[slots[hit]] = round_to(same_nan(sums), self.dtype)
        self.values[slots[new]] = values[distinct.last[new]]

        outcome = outcome_of(distinct, placement)
        outcome.slots[read] = slot_before[read]
        outcome.status[read] = np.where(slot_before[read] >= 0, FOUND, MISSING)
        return outcome

    def assign(
        self,
        keys: Array,
        values: Array | None = None,
        scores: Array | None = None,
        valid: Array | None = None,
    ) -> Outcome:
        self._tick()
        distinct = unique(keys, valid)
        slots = self.lookup(distinct.keys)
        present = slots >= 0
        if scores is not None:
            merged = self._merge_scores(scores, distinct)
            self._write_scores(slots[present], merged[present], is_new=False)
        if values is not None:
            self.values[slots[present]] = values[distinct.last[present]]
        status = np.where(present, FOUND, MISSING)
        return outcome_of(distinct, Placement(slots, status, self._entries(slots[:0], 0)))

    def erase(self, keys: Array, valid: Array | None = None) -> Erased:
        self._tick()
        distinct = unique(keys, valid)
        slots = self.lookup(distinct.keys)
        present = slots >= 0
        self._remove(slots[present])
        status = np.where(present, FOUND, MISSING)
        outcome = outcome_of(distinct, Placement(slots, status, self._entries(slots[:0], 0)))
        return Erased(outcome.status, outcome.counts)

    def erase_if(self, predicate: Predicate) -> int:
        """Erase every entry for which the predicate holds; how many those were."""
        self._tick()
        slots = self.occupied
        holds = predicate(self.key_words[slots], self.score_words[slots], self.values[slots])
        self._remove(slots[holds])
        return int(holds.sum())

    def clear(self) -> None:
        self._tick()
        self._remove(self.occupied)

    def resize(self, capacity: int) -> tuple[Oracle, Counts]:
        """A table of another capacity with these entries, and what became of them (13)."""
        if -(-capacity // LANES) == self.buckets:
            return self, Counts(self.size, 0, self.size, 0, 0)
        form = self.dim, self.dtype, "CUSTOM", self.choices, self.init, self.seed
        other, total = Oracle(capacity, *form), np.zeros(len(Counts._fields), int)
        chunk = min(max(RESIZE_CHUNK, self.capacity // 1024), self.capacity)
        if self.choices == 2:
            chunk = min(chunk, 1 << max(LANES, other.capacity // 256).bit_length() - 1)
        across = np.arange(self.capacity).reshape(-1, LANES).T.reshape(-1)
        for start in range(0, self.capacity, chunk):
            slots = across[start : start + chunk]
            slots = slots[self.digests.reshape(-1)[slots] != 0]
            slots = slots[np.argsort(~self.score_words[slots], kind="stable")]
            batch = self.key_words[slots], self.values[slots], self.score_words[slots]
            total += other.insert_or_assign(*batch).counts
        other.policy, other.clock, other.epoch = self.policy, self.clock.copy(), self.epoch.copy()
        return other, Counts(*total.tolist())

    def advance_epoch(self, epoch: int | None = None) -> None:
        self.epoch[0] = min(int(self.epoch[0]) + 1, U32_MAX) if epoch is None else epoch

    # Scores (3.3)

    def _tick(self) -> None:
        self.clock.view("<u8")[0] += np.uint64(1)

    def _merge_scores(self, scores: Array | None, distinct: Distinct) -> Array:
        """What the occurrences of each key say about its score."""
        assert scores is None or self.policy in SCORED_POLICIES, "the policy refuses scores"
        assert scores is not None or self.policy != "CUSTOM", "the policy needs scores"
        if scores is None:
            return distinct.occurrences.astype(np.uint64)
        if self.policy == "CUSTOM":
            return scores[distinct.last].astype(np.uint64)
        return saturating_sum(scores, distinct)

    def _new_scores(self, merged: Array, old: Array) -> Array:
        """The scores of keys that had the scores `old`, new keys having had 0."""
        epoch = self.epoch.astype(np.uint64) << np.uint64(32)
        low = np.uint64(U32_MAX)
        if self.policy == "LRU":
            return np.full_like(merged, self.time)
        if self.policy == "LFU":
            return np.where(merged > ~old, np.uint64(U64_MAX), old + merged)
        if self.policy == "EPOCH_LRU":
            return np.full_like(merged, epoch | (np.uint64(self.time) & low))
        if self.policy == "EPOCH_LFU":
            return epoch | np.minimum((old & low) + np.minimum(merged, low), low)
        return merged

    def _write_scores(self, slots: Array, merged: Array, is_new: bool) -> None:
        old = np.zeros_like(merged) if is_new else self.score_words[slots]
        self.score_words[slots] = self._new_scores(merged, old)

    # Placing (3.1, 3.2)

    def _insert(self, distinct: Distinct, merged: Array, pins: Array | None = None) -> Placement:
        """Touch the present keys, insert the absent ones; rows are the caller's."""
        self._tick()
        keys, slots = distinct.keys, self.lookup(distinct.keys)
        absent = np.flatnonzero(slots < 0)
        status = np.full(len(keys), FOUND)
        self._write_scores(slots[slots >= 0], merged[slots >= 0], is_new=False)

        candidates = candidate_buckets(keys[absent], self.buckets, self.choices)
        named = self._choose(candidates)
        for _ in range(self.choices):  # rounds 1 and 2
            waiting = slots[absent] < 0
            slots[absent[waiting]] = self._take_empty_lanes(keys[absent[waiting]], named[waiting])
            named = candidates.sum(axis=1) - named
        status[absent] = INSERTED
        pinned = np.zeros(self.capacity, bool)
        pinned[slots[slots >= 0]] = True
        pinned[slots[:0] if pins is None else pins[pins >= 0]] = True

        last = absent[slots[absent] < 0]
        scores = self._new_scores(merged[last], np.zeros_like(merged[last]))
        slots[last] = self._pick_victims(candidates[slots[absent] < 0], scores, pinned)
        status[last] = np.where(slots[last] < 0, REFUSED, EVICTED)
        winners = last[slots[last] >= 0]
        evicted = self._entries(slots[winners], len(distinct.inverse))
        self._occupy(slots[winners], keys[winners])

        new = absent[slots[absent] >= 0]
        self._write_scores(slots[new], merged[new], is_new=True)
        return Placement(slots, status, evicted)

    def _choose(self, candidates: Array) -> Array:
        """Round 1: the candidate with fewer entries and fewer keys of this batch to come."""
        if self.choices == 1:
            return candidates[:, 0]
        first, second = candidates.T
        load = self.occupancy.astype(np.int64)
        np.add.at(load, first, 1)
        np.add.at(load, second[second != first], 1)
        return np.where(load[second] < load[first], second, first)

    def _take_empty_lanes(self, keys: Array, buckets: Array) -> Array:
        """The r-th key that names a bucket gets its r-th empty lane, or -1."""
        involved, row = np.unique(buckets, return_inverse=True)
        empty = np.argsort(self.digests[involved] != 0, axis=1, kind="stable")
        rank = rank_within(buckets)
        fits = rank < LANES - self.occupancy[buckets]
        slots = np.full(len(keys), -1, np.int64)
        slots[fits] = buckets[fits] * LANES + empty[row[fits], rank[fits]]
        np.add.at(self.occupancy, buckets[fits], 1)
        self._occupy(slots[fits], keys[fits])
        return slots

    def _pick_victims(self, candidates: Array, scores: Array, pinned: Array) -> Array:
        """Round 3: the slot that each key takes from its victim, or -1 if it is refused."""
        involved, row = np.unique(candidates, return_inverse=True)
        row = row.reshape(candidates.shape)
        bucket_scores = self.score_words.reshape(-1, LANES)[involved]
        bucket_pins = pinned.reshape(-1, LANES)[involved]
        ascending = np.lexsort((bucket_scores, bucket_pins), axis=1)  # unpinned first
        unpinned = LANES - bucket_pins.sum(axis=1)
        named = row[:, 0]
        if self.choices == 2:
            first, second = row.T
            lowest = np.take_along_axis(bucket_scores, ascending[:, :1], axis=1)[:, 0]
            lower = (unpinned[first] == 0) | (lowest[second] < lowest[first])
            named = np.where((unpinned[second] > 0) & lower, second, first)

        taken = [0] * len(involved)
        slots = np.full(len(candidates), -1, np.int64)
        for i, (bucket, score) in enumerate(zip(named.tolist(), scores.tolist(), strict=True)):
            if taken[bucket] == unpinned[bucket]:
                continue
            lane = ascending[bucket, taken[bucket]]
            if self.policy in REFUSING_POLICIES and score < bucket_scores[bucket, lane]:
                continue
            slots[i] = involved[bucket] * LANES + lane
            taken[bucket] += 1
        return slots

    def _occupy(self, slots: Array, keys: Array) -> None:
        self.digests.reshape(-1)[slots] = digests_of(keys)
        self.key_words[slots] = keys

    def _remove(self, slots: Array) -> None:
        self.digests.reshape(-1)[slots] = 0
        self.key_words[slots] = 0
        self.score_words[slots] = 0
        np.subtract.at(self.occupancy, slots // LANES, 1)

    # Results

    def _entries(self, slots: Array, length: int) -> Entries:
        """Copies of the entries of slots, compact in arrays of a length, zero behind them."""
        keys, scores = np.zeros(length, np.uint64), np.zeros(length, np.uint64)
        values = np.zeros((length, self.dim), self.dtype)
        keys[: len(slots)] = self.key_words[slots]
        scores[: len(slots)] = self.score_words[slots]
        values[: len(slots)] = self.values[slots]
        return Entries(keys, scores, values, len(slots))
