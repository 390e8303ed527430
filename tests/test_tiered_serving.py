"""Tiers that are read: a server's, and those of tables that a model does not train."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import each, pairs
from many_devices import assert_same_bits
from test_sharding_traffic import mesh_of
from test_tiered import POLICIES, assert_same_table, host, prefetched, tiers_of, touched

import jax_hkv as hkv
from jax_hkv import _tiers, sharding, tiered

DIM, SMALL, LARGE = 4, 256, 8192
SGD = hkv.optim.sgd(0.5)


@functools.cache
def exported():
    """2,000 entries with rows of their own, the older the smaller their ids."""
    one = hkv.create(LARGE, DIM)
    for ids in np.arange(2000, dtype=np.int32).reshape(20, 100):
        rows = jnp.asarray(ids[:, None] + np.linspace(0, 0.5, DIM)[None], jnp.float32)
        one, _ = hkv.insert_or_assign(one, ids, rows)
    return sharding.export_entries(one)


def rows_of(exported):
    """By key: keys, and their rows."""
    order = np.argsort(exported.keys)
    return exported.keys[order], np.asarray(exported.values)[order]


@pytest.mark.parametrize("policy, is_jitted", each(POLICIES, [False, True]))
def test_a_touching_prefetch_is_a_lookup_of_what_is_known(policy, is_jitted, rng):
    """Scores and clock are those of one table in which known ids are looked up again."""
    tiers = tiers_of(SMALL, LARGE, policy=policy)
    one = tiers_of(LARGE, LARGE, policy=policy).cache
    for ids in np.arange(900, dtype=np.int32).reshape(9, 100):
        tiers, one = tiered.prefetch(tiers, ids)[0], touched(one, ids)
    prefetch = functools.partial(tiered.prefetch, insert=False, touch=True)
    if is_jitted:
        tiers = tiers._replace(store=jax.device_put(tiers.store, *tiers.cache.values.devices()))
        prefetch = jax.jit(prefetch, donate_argnums=0)
    total = 0
    for _ in range(10):
        ids, valid = rng.integers(0, 1500, 96).astype(np.int32), rng.random(96) < 0.8
        known = valid & np.asarray(hkv.contains(one, ids, valid=valid)[1])
        tiers, counts = prefetch(tiers, ids, valid=valid)
        one = touched(one, ids, valid=known)
        assert int(counts.inserted) == int(counts.refused) == int(counts.dropped) == 0
        assert int(counts.unique) == len(np.unique(ids[known])) > 0
        assert hkv.contains(tiers.cache, ids, valid=valid)[1].tolist() == known.tolist()
        total += int(counts.restored)
    assert total > 100
    assert_same_table(tiers, one)


@pytest.mark.parametrize("count", [None, 2])
def test_the_cache_of_a_server_holds_what_is_asked_for(count):
    """Old entries that are wanted now stay, where without touch= each makes way for the next."""
    placement = None if count is None else sharding.Placement(mesh_of(count))
    wanted = np.arange(100, dtype=np.int32)  # the oldest
    restored = {}
    for touch in (False, True):
        cache = hkv.create(SMALL, DIM)
        if placement is not None:
            cache = placement.create(lambda: hkv.create(SMALL // count, DIM))
        tiers = tiered.Tiers(cache, tiered.create_store(cache, LARGE, placement=placement))
        tiers, _ = tiered.import_entries(tiers, exported(), placement=placement)

        def ask(tiers, ids, **options):
            if placement is not None:
                ids = placement.put(ids)
            return tiered.prefetch(tiers, ids, insert=False, placement=placement, **options)

        for ids in np.arange(1000, 2000, dtype=np.int32).reshape(10, 100):
            tiers, _ = ask(tiers, ids)
        restored[touch] = []
        for _ in range(3):
            total = 0
            for ids in wanted.reshape(10, 10):
                tiers, counts = ask(tiers, ids, touch=touch)
                total += int(counts.restored)
            restored[touch].append(total)
        left = tiered.export_entries(tiers, placement=placement)
        assert_same_bits(rows_of(left), rows_of(exported()))
    assert restored[True] == [100, 0, 0]
    assert min(restored[False]) > 50


FEATURES = [hkv.Feature("seen", "items", "sum"), hkv.Feature("known", "frozen", "mean")]


def collection_of(capacity):
    frozen = hkv.TableConfig("frozen", capacity, DIM, init=hkv.initializers.zeros())
    return hkv.Collection(
        [hkv.TableConfig("items", capacity, DIM, optimizer=SGD), frozen], FEATURES
    )


def inputs_of(rng):
    return {
        "seen": rng.integers(0, 2000, (16, 3)).astype(np.int32),
        "known": rng.integers(0, 3000, (16, 4)).astype(np.int32),
    }


@pytest.mark.parametrize("count, overlaps", pairs([None, 2], [False, True]))
@pytest.mark.filterwarnings("ignore:Collection.lookup. with train=True the tables")
def test_a_table_that_is_not_trained_has_a_store_too(count, overlaps, rng):
    """It comes near as others do; what neither tier has is read as its first row, and stays out."""
    placement = None if count is None else sharding.Placement(mesh_of(count))
    axis_name = None if count is None else "device"

    def stepper(collection):
        def step(tables, inputs):
            tables, found = collection.lookup(tables, inputs, train=True, axis_name=axis_name)
            update = SGD.update if axis_name is None else functools.partial(sharding.update, SGD)
            items = update(tables["items"], found.results["items"], found.rows["items"] + 1)
            return {**tables, "items": items}, collection.spread(found.rows, found.parts)

        return jax.jit(step, donate_argnums=0) if placement is None else placement.step(step)

    def made(collection):
        if placement is None:
            return collection.create()
        return placement.create(lambda: collection.create(axis_name))

    small, large = collection_of(SMALL), collection_of(LARGE)
    tables, ones = made(small), made(large)
    ones["frozen"], _ = sharding.import_entries(placement, ones["frozen"], exported())
    stores = {
        name: tiered.create_store(table, LARGE, placement=placement)
        for name, table in tables.items()
    }
    tiers = tiered.Tiers(tables["frozen"], stores["frozen"])
    tables["frozen"], stores["frozen"] = tiered.import_entries(
        tiers, exported(), placement=placement
    )[0]
    step, step_of_one = stepper(small), stepper(large)
    batches = [inputs_of(rng) for _ in range(12)]
    if placement is not None:
        batches = [placement.put(inputs) for inputs in batches]
    restored = 0
    for inputs, coming in zip(batches, [*batches[1:], None], strict=True):
        if not overlaps or inputs is batches[0]:
            tables, stores, counts = small.prefetch(tables, stores, inputs, placement=placement)
            assert sorted(counts) == ["frozen", "items"]
            restored += int(counts["frozen"].restored)
        if overlaps:
            tables, stores, counts, rows = small.step_and_prefetch(
                lambda tables, inputs=inputs: step(tables, inputs),
                *(tables, stores, inputs, coming),
                placement=placement,
            )
            assert sorted(counts) == (["frozen", "items"] if coming else [])
            restored += int(counts["frozen"].restored) if coming else 0
        else:
            tables, rows = step(tables, inputs)
        for own in counts.values():
            assert int(own.refused) == int(own.dropped) == int(own.absent) == 0
        assert not counts or int(counts["frozen"].inserted) == 0
        ones, wanted = step_of_one(ones, inputs)
        assert_same_bits(rows, wanted)
    assert restored > 100
    after = tiered.Tiers(tables["frozen"], stores["frozen"])
    left = tiered.export_entries(after, placement=placement)
    assert_same_bits(rows_of(left), rows_of(exported()))


def test_an_evaluation_leaves_a_table_that_is_not_trained_as_it_is(rng):
    collection = collection_of(SMALL)
    tables = collection.create()
    store = tiered.create_store(tables["frozen"], LARGE, device=host())
    tiers, _ = tiered.import_entries(tiered.Tiers(tables["frozen"], store), exported())
    tables["frozen"], stores = tiers.cache, {"frozen": tiers.store}
    for options in ({"insert": False}, {"insert": False, "touch": True}):
        tables, stores, counts = collection.prefetch(tables, stores, inputs_of(rng), **options)
        assert int(counts["frozen"].restored) > 5 and int(counts["frozen"].inserted) == 0
        after = tiered.export_entries(tiered.Tiers(tables["frozen"], stores["frozen"]))
        assert_same_bits(rows_of(after), rows_of(exported()))
        assert (after.scores.max() > exported().scores.max()) == ("touch" in options)


@pytest.mark.parametrize("names", [["frozen"], ["frozen", "items"]])
def test_a_step_that_raises_uses_up_all_tiers_that_it_was_given(names, rng):
    """Those of tables that are not trained, too, which the step may have used up."""
    collection, inputs = collection_of(SMALL), inputs_of(rng)
    tables, stores = prefetched(collection, LARGE, names, inputs)

    def step(tables):
        raise KeyError("the cause")

    with pytest.raises(KeyError, match="the cause") as error:
        collection.step_and_prefetch(step, tables, stores, inputs, inputs_of(rng))
    assert "the tiers of the step are lost" in error.value.__notes__[0]
    for name in names:
        assert tables[name].values.is_deleted() and stores[name].values.is_deleted()
    assert names != ["frozen"] or not tables["items"].values.is_deleted()


def test_what_was_not_begun_before_an_error_stays(monkeypatch, rng):
    """The places of the second table cannot be made: the first one's are, and it is lost."""
    collection = hkv.Collection(
        [
            hkv.TableConfig("items", SMALL, DIM, optimizer=SGD),
            hkv.TableConfig("others", SMALL, DIM, optimizer=SGD),
            hkv.TableConfig("frozen", SMALL, DIM),
        ],
        [FEATURES[0], hkv.Feature("other", "others", "sum"), FEATURES[1]],
        fuse=False,
    )
    inputs = inputs_of(rng) | {"other": np.arange(9, dtype=np.int32).reshape(3, 3)}
    tables, stores = prefetched(collection, LARGE, ("items", "others", "frozen"), inputs)
    admit, calls = _tiers.admit, []

    def failing(*given, **options):
        calls.append(given)
        if len(calls) == 2:
            raise MemoryError("the cause")
        return admit(*given, **options)

    monkeypatch.setattr(_tiers, "admit", failing)
    with pytest.raises(MemoryError, match="the cause"):
        collection.step_and_prefetch(lambda own: (own, None), tables, stores, inputs, inputs)
    gone = {name for name in tables if stores[name].values.is_deleted()}
    assert gone == {name for name in tables if tables[name].values.is_deleted()}
    assert len(gone) == 1 and "frozen" not in gone
