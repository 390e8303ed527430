"""Servers that follow with a store behind their table, or with a time of their own."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from combinations import pairs
from many_devices import assert_same_bits, entries_of
from test_sharding_traffic import mesh_of

import jax_hkv as hkv
from jax_hkv import sharding, tiered
from jax_hkv.index import Policy

DIM = 4
OPT = hkv.optim.adagrad(0.5)


@jax.jit(donate_argnums=0)
def train(table, ids):
    table, found = hkv.find_or_insert(table, ids)
    return OPT.update(table, found, 0.5 * found.values)


def in_order(exported, names=("keys", "values", "scores")):
    order = np.argsort(exported.keys)
    return [np.asarray(getattr(exported, name))[order] for name in names]


@pytest.mark.parametrize(
    "policy, count, touch",
    pairs([Policy.LRU, Policy.EPOCH_LRU, Policy.LFU], [None, 2], [False, True]),
)
def test_a_server_with_a_store_follows(policy, count, touch, rng):
    """Its cache is a sixteenth of what it serves; erased and evicted ids go from both tiers."""
    placement = None if count is None else sharding.Placement(mesh_of(count))
    trained = OPT.init(hkv.create(512, DIM, policy=policy))
    cache = hkv.create(128, DIM, policy=policy)
    if placement is not None:
        cache = placement.create(lambda: hkv.create(128, DIM, policy=policy))
    serving = tiered.Tiers(cache, tiered.create_store(cache, 4096, placement=placement))
    known = time = None
    erased = restored = 0
    for turn in range(8):
        for _ in range(4):
            trained = train(trained, rng.integers(0, 1200, 80).astype(np.int32))
        trained, _ = hkv.erase(trained, rng.integers(0, 1200, 40).astype(np.int32))
        if turn == 4:
            trained = hkv.advance_epoch(trained)
        known = sharding.export_changes(trained, known)
        serving, counts = sharding.import_changes(placement, serving, known, time=time)
        time = known.entries.clock if touch else None
        assert int(counts.erased) == len(known.removed)
        assert int(counts.entries.evicted) == int(counts.entries.refused) == 0
        names = ("keys", "values") if touch else ("keys", "values", "scores")
        exported = tiered.export_entries(serving, placement=placement)
        assert_same_bits(in_order(exported, names), in_order(entries_of(trained), names))
        if placement is None and turn:  # a second time, from the same changes
            serving, again = sharding.import_changes(None, serving, known, time=time)
            assert int(again.entries.inserted) == int(again.erased) == 0
        erased += int(counts.erased)
        for _ in range(5):
            ids = rng.integers(0, 1200, 48).astype(np.int32)
            asked = ids if placement is None else placement.put(ids)
            serving, found = tiered.prefetch(
                serving, asked, insert=False, touch=touch, placement=placement
            )
            assert int(found.refused) == int(found.dropped) == 0
            restored += int(found.restored)
            if placement is None:
                rows = hkv.find(serving.cache, ids, fill="initial")[1]
                wanted = hkv.find(trained, ids, fill="initial")[1]
                assert_same_bits(rows[:2], wanted[:2])
    assert erased > 100 and restored > 300


@functools.cache
def exports():
    """Of three times: each of other ids, and those before them."""
    table, known, each = hkv.create(1024, DIM), None, []
    for first in (0, 50, 100):
        table, _ = hkv.find_or_insert(table, np.arange(first, first + 50, dtype=np.int32))
        known = sharding.export_changes(table, known)
        each.append(known)
    return each


@pytest.mark.parametrize("has_store", [False, True])
def test_a_time_that_reads_have_moved_is_given(has_store):
    first, second, third = exports()
    serving = hkv.create(1024, DIM)
    if has_store:
        cache = hkv.create(128, DIM)
        serving = tiered.Tiers(cache, tiered.create_store(cache, 1024))

    def touched(serving):
        ids = np.arange(0, 100, 7, dtype=np.int32)
        for _ in range(20):
            if has_store:
                serving, _ = tiered.prefetch(serving, ids, insert=False, touch=True)
            else:
                serving, _ = hkv.find(serving, ids, touch=True)
        return serving

    serving, _ = sharding.import_changes(None, serving, first)
    serving = touched(serving)
    with pytest.raises(ValueError, match=r"its time 21, got .* give that of the last ones, time="):
        sharding.import_changes(None, serving, second)
    for wrong in (0, 2 + third.entries.clock):
        with pytest.raises(ValueError, match=f"the given time {wrong}, got changes from 1 to 2"):
            sharding.import_changes(None, serving, second, time=wrong)
    serving, _ = sharding.import_changes(None, serving, second, time=first.entries.clock)
    serving = touched(serving)
    with pytest.raises(ValueError, match=r"another past|behind the table's last ones"):
        sharding.import_changes(None, serving, first, time=second.entries.clock)
    serving, counts = sharding.import_changes(None, serving, third, time=second.entries.clock)
    assert int(counts.entries.inserted) == 50
    left = tiered.export_entries(serving) if has_store else entries_of(serving)
    assert sorted(left.keys) == list(range(150))


def test_a_time_of_another_type_is_refused():
    serving, _ = sharding.import_changes(None, hkv.create(1024, DIM), exports()[0])
    for wrong, error in (("1", TypeError), (-1, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match=r"import_changes: time must be"):
            sharding.import_changes(None, serving, exports()[1], time=wrong)


def test_changes_go_to_no_tiers_that_hold_others():
    first, second, _ = exports()
    cache = hkv.create(128, DIM)
    serving = tiered.Tiers(cache, tiered.create_store(cache, 1024))
    with pytest.raises(ValueError, match="must have the 50 entries that were there before"):
        sharding.import_changes(None, serving, second, time=1)
    serving, _ = tiered.prefetch(serving, np.array([7, 300], np.int32))
    with pytest.raises(ValueError, match="must have no entries before changes from the beginning"):
        sharding.import_changes(None, serving, first)
    assert tiered.size(serving) == 2
