"""What a table under LRU notes of its full buckets (docs/semantics.md, section 3.5)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import LANES, POLICIES, U64_MAX

import jax_hkv as hkv

LENGTH = 8


def rows_of(keys):
    return np.repeat(keys.astype(np.float32)[:, None], 2, axis=1)


def padded(keys, fill=0):
    """A batch of one length, and its mask: one program serves all."""
    batch = np.full(LENGTH, fill, np.uint64)
    batch[: len(keys)] = keys
    return batch, np.arange(LENGTH) < len(keys)


def insert(both, *keys):
    batch, valid = padded(keys)
    return both.insert_and_evict(batch, rows_of(batch), valid=valid)


def full_bucket(twin, **options):
    """Keys 0 to 127, eight of each time, in their lanes."""
    both = twin(LANES, 2, **options)
    for first in range(0, LANES, LENGTH):
        insert(both, *range(first, first + LENGTH))
    assert not oldest_of(both).any()
    return both


def oldest_of(both):
    return np.asarray(both.table.index.oldest)


def noted(both):
    """The time of the first bucket's list, and its lanes."""
    (own,) = oldest_of(both)[:1]
    lanes = own[2:].view(np.uint8).astype(int)
    return int(own[:2].view("<u8")[0]), [int(lane) - 1 for lane in lanes if lane]


def test_victims_are_noted_once_and_taken_one_after_the_other(twin):
    both = full_bucket(twin)
    assert insert(both, 1000).evicted.keys[0] == 0
    time = both.oracle.time
    assert noted(both) == (time, [1, 2, 3, 4, 5, 6, 7])
    outcome = insert(both, 1001, 1002, 1003)
    assert outcome.evicted.keys[:3].tolist() == [1, 2, 3]
    assert noted(both) == (time, [4, 5, 6, 7])
    outcome = insert(both, 1004, 1005, 1006, 1007, 1008, 1009)
    assert outcome.evicted.keys[:6].tolist() == [4, 5, 6, 7, 8, 9]
    assert noted(both) == (both.oracle.time, [10, 11, 12, 13, 14, 15])


def test_who_came_again_is_no_victim(twin):
    both = full_bucket(twin)
    insert(both, 1000)
    batch, valid = padded([1, 3, 5])
    both.find(batch, valid=valid, touch=True)
    batch, valid = padded([2])
    both.erase(batch, valid)
    insert(both, 1001)  # into the lane of the one that was erased
    assert insert(both, 1002, 1003).evicted.keys[:2].tolist() == [4, 6]
    assert noted(both)[1] == [7]


def test_pinned_entries_stay_noted(twin):
    """Keys that were not believed to be present are pinned, and keep their scores."""
    both = full_bucket(twin)
    insert(both, 1000)
    batch, valid = padded([1, 1001, 2, 1002])
    believed = np.zeros(LENGTH, bool)
    outcome = both.accum_or_assign(batch, rows_of(batch), believed, valid=valid)
    assert outcome.slots[:4].tolist() == [1, 3, 2, 4]
    assert noted(both)[1] == [1, 2, 5, 6, 7]
    assert insert(both, 1003, 1004, 1005).evicted.keys[:3].tolist() == [1, 2, 5]


def test_victims_are_found_behind_more_pinned_entries_than_are_noted(twin):
    """With all eight oldest pinned nothing helps but the scores."""
    both = full_bucket(twin)
    keys = np.concatenate([np.arange(12), 1000 + np.arange(5)]).astype(np.uint64)
    outcome = both.accum_or_assign(keys, rows_of(keys), np.zeros(len(keys), bool))
    assert outcome.slots[12:].tolist() == [12, 13, 14, 15, 16]
    assert noted(both)[1] == list(range(8))
    assert insert(both, 2000).evicted.keys[0] == 0


def test_a_whole_bucket_gives_way_at_once(twin):
    both = full_bucket(twin)
    insert(both, 1000)
    keys = np.arange(2000, 2000 + LANES + 3, dtype=np.uint64)
    outcome = both.insert_and_evict(keys, rows_of(keys))
    assert outcome.counts == (LANES + 3, 0, LANES, LANES, 3, 0)
    assert noted(both)[1] == []


def test_scores_that_were_imported_are_looked_at(twin):
    both = full_bucket(twin)
    insert(both, 1000)
    assert noted(both)[1]
    batch, valid = padded([3000])
    both.import_batch(batch, np.full(LENGTH, 2, np.uint64), rows_of(batch), 1, valid)
    assert noted(both)[0] == 0
    assert insert(both, 1001, 1002).evicted.keys[:2].tolist() == [2, 3]
    batch, valid = padded([60])
    both.import_batch(batch, np.zeros(LENGTH, np.uint64), rows_of(batch), 1, valid)
    assert insert(both, 1003).evicted.keys[0] == 60
    before = oldest_of(both)
    both.import_batch(batch, np.full(LENGTH, 50, np.uint64), rows_of(batch), 1, valid)
    np.testing.assert_array_equal(oldest_of(both), before)  # not lower than the time of the list


def test_a_time_that_begins_anew_has_no_list_of_another(twin):
    both = full_bucket(twin)
    insert(both, 1000)
    both.clear()
    none = hkv.sharding.export_changes(hkv.create(LANES, 2), None)
    both.table, _ = hkv.sharding.import_changes(None, both.table, none)
    both.oracle.clock[:] = 0
    for first in range(0, LANES, LENGTH):
        insert(both, *range(first, first + LENGTH))
    assert insert(both, 1000).evicted.keys[0] == 0


def test_lists_of_a_cache_outlast_what_its_store_gives_back(platform, rng):
    """Such entries have the time of the batch that asks for them."""
    cache = hkv.create(LANES, 2)
    tiers = hkv.tiered.Tiers(cache, hkv.tiered.create_store(cache, 32 * LANES))
    for ids in np.arange(3 * LANES, dtype=np.int32).reshape(6, -1):
        tiers, _ = hkv.tiered.prefetch(tiers, ids)
    restored, used = 0, 0
    for _ in range(60):
        ids = rng.permutation(3 * LANES)[:3].astype(np.int32)
        before = np.asarray(tiers.cache.index.oldest)
        tiers, counts = hkv.tiered.prefetch(tiers, ids)
        restored += int(counts.restored)
        after = np.asarray(tiers.cache.index.oldest)
        used += int(counts.evicted) > 0 and before[0, 0] == after[0, 0] > 0
    assert restored > 20 and used > 20


@pytest.mark.parametrize("ahead, lanes", [(2**25 - 2, [1, 2, 3, 4, 5, 6, 7]), (2**25 - 1, [])])
def test_nothing_is_noted_of_a_bucket_with_an_entry_that_is_too_old(ahead, lanes, twin):
    """Ages of 25 bits are compared; victims are the same ones."""
    both = full_bucket(twin)
    # The first entries are of time 1, and the batch is of one more than this.
    index = dataclasses.replace(both.table.index, clock=jnp.array([ahead, 0], jnp.uint32))
    both.table = dataclasses.replace(both.table, index=index)
    both.oracle.clock[:] = [ahead, 0]
    assert insert(both, 1000).evicted.keys[0] == 0
    assert noted(both)[1] == lanes
    assert insert(both, 1001, 1002).evicted.keys[:2].tolist() == [1, 2]


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "LRU"])
def test_other_policies_note_nothing(policy, twin):
    both = twin(LANES, 2, policy=policy)
    scores = np.full(2 * LANES, 7, np.uint64) if policy == "CUSTOM" else None
    keys = np.arange(2 * LANES, dtype=np.uint64)
    for own in (keys[:LANES], keys):
        both.insert_or_assign(own, rows_of(own), None if scores is None else scores[: len(own)])
    assert both.oracle.size == LANES and not oldest_of(both).any()


@pytest.mark.parametrize("buckets, choices", [(1, 1), (3, 1), (3, 2), (20, 2)])
def test_small_batches_evict_what_the_scores_say(buckets, choices, twin, rng):
    """29: from batch to batch most victims are noted ones, whatever happens to them meanwhile.

    With two candidates they are found for all buckets or, where these are many, for every key.
    """
    both = twin(buckets * LANES, 2, choices=choices)
    universe = rng.integers(0, U64_MAX, 3 * buckets * LANES, np.uint64)
    for keys in universe.reshape(-1, 16 * buckets):
        both.insert_and_evict(keys, rows_of(keys))
    taken = 0
    for _ in range(300):
        batch, valid = padded(rng.choice(universe, rng.integers(1, LENGTH + 1)))
        before, full = oldest_of(both), both.oracle.size == both.oracle.capacity
        names = ["insert", "touch", "accum", "erase", "import"]
        match rng.choice(names, p=[0.6, 0.2, 0.1, 0.07, 0.03]):
            case "insert":
                evicted = both.insert_and_evict(batch, rows_of(batch), valid=valid).counts.evicted
                after = oldest_of(both)
                same = (after[:, :2] == before[:, :2]).all(axis=1) & before.any(axis=1)
                taken += full and evicted > 0 and not (after[~same] != before[~same]).any()
            case "touch":
                both.find(batch, valid=valid, touch=True)
            case "accum":
                both.accum_or_assign(batch, rows_of(batch), rng.random(LENGTH) < 0.5, valid=valid)
            case "erase":
                both.erase(batch, valid & (np.arange(LENGTH) < 2))
            case "import":
                scores = rng.integers(0, both.oracle.time, LENGTH).astype(np.uint64)
                both.import_batch(batch, scores, rows_of(batch), LENGTH, valid)
    assert taken > 30, "notes were hardly used"


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("what", ["ones", "random"])
def test_a_damaged_list_damages_nothing_else(what, choices, platform, rng):
    """Of whatever bits: entries stay in their buckets, and none is lost untold."""
    buckets = 16
    words = np.full((buckets, 4), 2**32 - 1, np.uint32)
    if what == "random":
        words = rng.integers(0, 2**32, (buckets, 4), np.uint32)
        words[:, 1] = 2**31  # a time, high enough that all are older
    table = hkv.create(buckets * LANES, 2, choices=choices)
    for _ in range(6):
        keys = hkv.Keys.from_numpy(rng.integers(0, U64_MAX, 1000, np.uint64))
        table, _ = hkv.find_or_insert(table, keys)
    for length in (5, 100, 400):
        table = dataclasses.replace(
            table, index=dataclasses.replace(table.index, oldest=jnp.asarray(words))
        )
        before = set(hkv.sharding.export_entries(table).keys.tolist())
        keys = rng.integers(0, U64_MAX, length, np.uint64)
        table, result = hkv.insert_and_evict(table, hkv.Keys.from_numpy(keys), rows_of(keys))
        gone = result.evicted
        assert gone is not None
        evicted = gone.keys.to_numpy()[: int(gone.count)].tolist()
        after = hkv.sharding.export_entries(table).keys.tolist()
        inserted = keys[np.asarray(hkv.is_new(result.status))].tolist()
        assert len(evicted) > 3 and sorted(after) == sorted((before - {*evicted}) | {*inserted})
        assert int(hkv.misplaced(table)) == 0


def imported(table, key, score):
    """The table, where the key's entry is of that time."""
    keys = hkv.Keys.from_numpy(np.array([key], np.uint64))
    _, entries = hkv.export_keys(table, keys)
    scores = hkv.Keys.from_numpy(np.array([score], np.uint64))
    return hkv.import_batch(table, entries._replace(scores=scores))[0]


def lists_of(table):
    """Of each bucket, the time of its list, and keys of the lanes in it."""
    keys = hkv.Keys(jnp.asarray(table.index.keys)).to_numpy().reshape(-1, LANES)
    lists = []
    for bucket, own in enumerate(np.asarray(table.index.oldest)):
        lanes = own[2:].view(np.uint8)
        lists.append((int(own[:2].view("<u8")[0]), keys[bucket][lanes[lanes > 0] - 1].tolist()))
    return lists


def insert_all(table, ids):
    return hkv.find_or_insert(table, hkv.Keys.from_numpy(np.asarray(ids, np.uint64)))


def test_an_entry_as_young_as_the_list_is_no_victim_of_it(platform):
    """Its score is the time of the list, at which it was older: others that are listed go first."""
    table, _ = insert_all(hkv.create(LANES, 2), range(LANES))
    table, _ = insert_all(table, [1000])
    ((time, listed),) = lists_of(table)
    assert len(listed) == 7
    table = imported(table, listed[0], time)
    for number in range(6):
        table, _ = insert_all(table, [2000 + number])
    there = hkv.contains(table, hkv.Keys.from_numpy(np.array(listed, np.uint64)))[1]
    assert np.asarray(there).tolist() == [True] + [False] * 6


def test_an_entry_as_young_as_the_list_makes_no_bucket_the_one_to_evict_from(platform):
    """Of two candidates that are full, the one whose oldest entry is older gives its place up."""
    table, _ = insert_all(hkv.create(2 * LANES, 2, choices=2), range(2 * LANES))
    table, _ = insert_all(table, range(1000, 1004))
    (time, listed), other = lists_of(table)
    assert listed and other[1] and time == other[0]
    oldest = {int(score) for score in scores_of(table, listed + other[1])}
    assert oldest == {1}
    for first in (0, 1):
        # What is left of the list of the first candidate is as old as what the other one lists.
        own = imported(table, lists_of(table)[first][1][0], time)
        mine = (keys for keys in range(5000, 6000) if candidates(keys)[0] == first)
        _, result = insert_all(own, [next(mine)])
        assert int(result.slots[0]) // LANES == first


def scores_of(table, keys):
    asked = hkv.Keys.from_numpy(np.array(keys, np.uint64))
    return hkv.find(table, asked, return_scores=True)[1].scores.to_numpy()


def candidates(key):
    """The two buckets of a key, of two."""
    own = hkv.create(2 * LANES, 2, choices=2)
    _, result = insert_all(own, [key])
    first = int(result.slots[0]) // LANES
    return first, 1 - first


def test_who_comes_with_the_newcomer_is_listed_no_more(twin):
    """3.5: what a batch hits and pins is young afterwards."""
    both = full_bucket(twin)
    insert(both, 1000)
    assert noted(both)[1] == [1, 2, 3, 4, 5, 6, 7]
    insert(both, 1, 2000)
    assert noted(both)[1] == [3, 4, 5, 6, 7]
