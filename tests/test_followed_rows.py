"""Rows that change without their scores: nobody who follows a table is told of them."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from many_devices import entries_of
from test_sharding_traffic import mesh_of

import jax_hkv as hkv
from jax_hkv import sharding, tiered
from jax_hkv.index import Policy

DIM = 4
OPT = hkv.optim.adagrad(0.5)
MESSAGE = "rows of table 'table' changed since the earlier export, and their scores did not"
IDS = [np.arange(own, dtype=np.int32) for own in (40, 20, 10)]
OTHERS = np.arange(1_000, 1_240, dtype=np.int32)  # a cache that has these has few of the rest


@jax.jit(donate_argnums=0)
def train(table, ids, slope):
    table, found = hkv.find_or_insert(table, ids)
    return OPT.update(table, found, jnp.full_like(found.values, slope))


def created(kind, policy):
    """A table, or tiers with a cache that has room for `OTHERS` and few more."""
    table = OPT.init(hkv.create(256, DIM, policy=policy))
    if kind == "tiers":
        return tiered.Tiers(table, tiered.create_store(table, 1024))
    return table


def trained_on(kind, trained, *steps):
    trained = jax.tree.map(jnp.copy, trained)
    for ids, slope in steps:
        if kind == "tiers":
            trained, _ = tiered.prefetch(trained, ids)
            trained = tiered.Tiers(train(trained.cache, ids, slope), trained.store)
        else:
            trained = train(trained, ids, slope)
    return trained


def told(trained, since):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        changes = sharding.export_changes(trained, since)
    return changes, [str(own.message) for own in warned]


@pytest.mark.parametrize("kind", ["table", "tiers", "numpy"])
@pytest.mark.parametrize("policy", [Policy.LRU, Policy.EPOCH_LRU])
def test_who_went_back_and_met_the_same_ids_is_told(policy, kind):
    """Of the other labels that they came with: followers would keep rows of the other history."""
    old = [(IDS[0], 1.0), (OTHERS, 1.0)] if kind == "tiers" else []  # rows of cache and store
    yesterday = trained_on(kind, created(kind, policy), *old, (IDS[0], 1.0), (IDS[1], 1.0))
    if kind == "tiers":
        assert int(hkv.contains(yesterday.store, IDS[0])[1].sum()) > 10
    before, none = told(trained_on(kind, yesterday, (IDS[1], 1.0)), None)
    assert not none
    for slope in (1.0, -1.0):
        again = trained_on(kind, yesterday, (IDS[1], slope), (IDS[2], 1.0))
        if kind == "numpy":
            again = jax.device_get(again)
        changes, warned = told(again, before)
        assert sorted(changes.entries.keys.tolist()) == IDS[2].tolist()
        if slope > 0:
            assert not warned
        else:
            (message,) = warned
            assert MESSAGE in message and "since=None and fresh tables" in message
            assert ("(10 of 26" if old else "(10 of 30 looked at, one of key ") in message
    assert not told(again, None)[1]


def test_epochs_that_are_exported_again_bring_their_rows():
    """Under EPOCH_LFU a count of 0 leaves the score, and the row comes with its epoch."""
    table = OPT.init(hkv.create(256, DIM, policy=Policy.EPOCH_LFU))
    table, _ = hkv.find_or_insert(table, IDS[0])
    before = sharding.export_changes(table, None)
    follower, _ = sharding.import_changes(
        None, hkv.create(256, DIM, policy=Policy.EPOCH_LFU), before
    )
    table, found = hkv.find_or_insert(table, IDS[1], scores=np.zeros(len(IDS[1]), np.uint32))
    table = OPT.update(table, found, jnp.ones_like(found.values))
    changes, warned = told(table, before)
    assert not warned
    follower, _ = sharding.import_changes(None, follower, changes)
    mine, its = (entries_of(own) for own in (follower, table))
    np.testing.assert_array_equal(mine.values, its.values)


@pytest.mark.parametrize("policy", [Policy.LRU, Policy.LFU])
def test_rows_that_were_assigned_are_told_of(policy):
    """But under LFU, where all are exported."""
    table = trained_on("table", created("table", policy), (IDS[0], 1.0))
    before = sharding.export_changes(table, None)
    table, _ = hkv.assign(table, IDS[2], jnp.ones((len(IDS[2]), DIM), jnp.float32))
    assert len(told(table, before)[1]) == (policy is Policy.LRU)
    assert len(told(table, before.entries)[1]) == (policy is Policy.LRU)  # and since an export
    # Rows of another type, or width, in what somebody has made of the earlier export are not read.
    for values in (before.entries.values.astype(np.float16), before.entries.values[:, :2]):
        other = before._replace(entries=before.entries._replace(values=values))
        assert not told(table, other)[1]


def test_rows_that_are_no_numbers_are_equal_to_themselves():
    table = trained_on("table", created("table", Policy.LRU), (IDS[0], np.nan))
    before = sharding.export_changes(table, None)
    assert np.isnan(before.entries.values).all()
    assert not told(train(table, IDS[2] + 100, 1.0), before)[1]


def test_parts_and_large_exports_are_looked_at_too():
    placement = sharding.Placement(mesh_of(2))
    ids = np.arange(6_000, dtype=np.int32)
    table = placement.create(lambda: OPT.init(hkv.create(2**14, DIM)))
    step = placement.step(lambda t, k: sharding.find_or_insert(t, k, axis_name="device"))
    table, _ = step(table, placement.put(ids))
    before = sharding.export_changes(placement.shards(table), None)
    _, warned = told(placement.shards(table), before)
    assert not warned
    moved = dataclasses.replace(table, values=table.values.at[:].add(1))
    (message,) = told(placement.shards(moved), before)[1]
    assert "(3000 of 3000 looked at" in message


def test_the_id_0_of_a_table_on_the_host_is_no_empty_slot():
    table, _ = hkv.find_or_insert(hkv.create(128, 2), np.arange(3, dtype=np.int32))
    first = sharding.export_changes(jax.device_get(table), None)
    table, _ = hkv.find_or_insert(table, np.array([9], np.int32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changes = sharding.export_changes(jax.device_get(table), first)
    assert changes.entries.keys.tolist() == [9]


def test_changes_with_scores_of_ones_own_are_followed_under_another_policy():
    """Of what was there before, scores under the followed table's policy say nothing."""
    table, follower = hkv.create(128, 2, policy=hkv.Policy.LFU), hkv.create(128, 2)
    since = None
    for ids in ([5, 5, 5, 6], [6, 7]):
        table, _ = hkv.find_or_insert(table, np.array(ids, np.int32))
        since = changes = sharding.export_changes(table, since)
        entries = changes.entries
        times = np.full(len(entries.keys), entries.clock, np.uint64)
        own = entries._replace(scores=times, policy=int(hkv.Policy.LRU))
        follower, _ = sharding.import_changes(None, follower, changes._replace(entries=own))
    assert sorted(sharding.export_entries(follower).keys.tolist()) == [5, 6, 7]
