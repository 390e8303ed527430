"""Two tables that are one: a small one before a store on another device."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from combinations import each
from many_devices import assert_same_bits, entries_of

import jax_hkv as hkv
from jax_hkv import sharding, tiered
from jax_hkv.testing import assert_no_table_copies

DIM = 4
POLICIES = [hkv.Policy.LRU, hkv.Policy.LFU, hkv.Policy.EPOCH_LRU]
OPTIMIZERS = {
    "adam": hkv.optim.adam(0.1),
    "rowwise_adagrad": hkv.optim.rowwise_adagrad(0.1),
    "optax": hkv.optim.sparse(optax.adam(0.1), count_per_row=True),
}


def made(capacity, optimizer="adam", **options):
    table = hkv.create(capacity, DIM, **options)
    return OPTIMIZERS[optimizer].init(table) if optimizer else table


def host():
    """Another device than the cache's, if there is one."""
    return jax.local_devices(backend="cpu")[-1]


def tiers_of(capacity, store, *args, **options):
    cache = made(capacity, *args, **options)
    return tiered.Tiers(cache, tiered.create_store(cache, store, device=host()))


def prefetched(collection, capacity, names, inputs):
    """Fresh tables of a collection, and stores of some of them, before a step of inputs."""
    tables = collection.create()
    stores = {name: tiered.create_store(tables[name], capacity, device=host()) for name in names}
    return collection.prefetch(tables, stores, inputs)[:2]


def counting(table):
    """What a prefetch counts an id as, of one table."""
    return np.zeros(1, np.uint32) if table.policy is hkv.Policy.LFU else None


@jax.jit(donate_argnums=0)
def touched(table, ids, valid=None):
    """What a prefetch is for one table."""
    scores = jnp.zeros(ids.shape, jnp.uint32) if table.policy is hkv.Policy.LFU else None
    return hkv.find_or_insert(table, ids, scores=scores, valid=valid)[0]


def trainer(optimizer):
    opt = OPTIMIZERS[optimizer]

    @jax.jit(donate_argnums=0)
    def train(table, ids, valid=None):
        table, found = hkv.find_or_insert(table, ids, valid=valid)
        return opt.update(table, found, 0.5 * found.values), found.counts

    return train


def by_key(exported):
    """An export in an order that does not depend on slots, as arrays."""
    order = np.argsort(exported.keys)
    rows = jax.tree.map(lambda leaf: leaf[order], exported[:4])
    return jax.tree.map(np.asarray, (rows, exported[4:]))


def assert_same_table(tiers, one):
    assert_same_bits(by_key(tiered.export_entries(tiers)), by_key(sharding.export_entries(one)))


@pytest.mark.parametrize("choices, policy", each([1, 2], POLICIES))
def test_tiers_train_as_one_table_of_the_stores_capacity(policy, choices, rng):
    """Rows, optimizer rows, scores, clock and step counts in every bit, most ids in the store."""
    tiers = tiers_of(512, 8192, policy=policy, choices=choices)
    one = made(8192, policy=policy, choices=choices)
    train = trainer("adam")
    total = np.zeros(len(tiered.PrefetchCounts._fields), np.int64)
    for step in range(60):
        ids = rng.integers(0, 2000, 160).astype(np.int32)
        known = np.asarray(hkv.contains(one, np.unique(ids))[1])
        tiers, counts = tiered.prefetch(tiers, ids)
        one = touched(one, ids)
        assert int(counts.hits) + int(counts.restored) == known.sum()
        assert int(counts.inserted) == (~known).sum()
        assert int(counts.unique) == len(known)
        cache, of_step = train(tiers.cache, ids)
        one, _ = train(one, ids)
        assert int(of_step.hits) == int(of_step.unique)
        tiers = tiers._replace(cache=cache)
        if step % 10 == 0:
            tiers = tiered.Tiers(*map(hkv.advance_epoch, tiers))
            one = hkv.advance_epoch(one)
        total += [int(count) for count in counts]
    total = tiered.PrefetchCounts(*total)
    assert total.evicted > 1000 and total.restored > 1000
    assert total.refused == total.dropped == 0
    assert tiers.store.values.devices() == {host()}
    assert_same_table(tiers, one)
    assert tiered.size(tiers) == int(hkv.size(one))


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "optax"])
def test_optimizers_of_every_kind_move_with_their_rows(optimizer, rng):
    tiers, one = tiers_of(256, 4096, optimizer), made(4096, optimizer)
    train = trainer(optimizer)
    for _ in range(20):
        ids = rng.integers(0, 900, 96).astype(np.int32)
        tiers, counts = tiered.prefetch(tiers, ids)
        assert int(counts.refused) == int(counts.dropped) == 0
        tiers = tiers._replace(cache=train(tiers.cache, ids)[0])
        one = train(touched(one, ids), ids)[0]
    assert_same_table(tiers, one)


@pytest.mark.parametrize("policy", POLICIES)
def test_inside_of_jit_a_prefetch_is_part_of_the_program(policy, rng):
    """The store on the same device: a scan of steps, without a copy of either table."""
    batches = rng.integers(0, 900, (20, 96)).astype(np.int32)
    train = trainer("adam")

    def step(tiers, ids):
        tiers, counts = tiered.prefetch(tiers, ids)
        cache, of_step = train(tiers.cache, ids)
        return tiers._replace(cache=cache), (counts, of_step.hits)

    def scanned(tiers, batches):
        return jax.lax.scan(step, tiers, batches)

    def start():
        cache = made(256, policy=policy)
        (device,) = cache.values.devices()
        return tiered.Tiers(cache, tiered.create_store(cache, 4096, device=device))

    assert_no_table_copies(scanned, start(), batches)
    tiers, (counts, hits) = jax.jit(scanned, donate_argnums=0)(start(), batches)
    assert_same_bits(hits, counts.unique)
    eager, of_all = tiers_of(256, 4096, policy=policy), []
    for ids in batches:
        eager, (own, _) = step(eager, ids)
        of_all.append(own)
    assert_same_bits(counts, jax.tree.map(lambda *each: jnp.stack(each), *of_all))
    assert int(counts.restored.sum()) > 100
    assert_same_bits(by_key(entries_of(tiers.cache)), by_key(entries_of(eager.cache)))
    assert_same_bits(by_key(entries_of(tiers.store)), by_key(entries_of(eager.store)))


def test_reads_inside_of_jit_keep_their_place_before_writes():
    """Or XLA would copy a table for those that come later."""

    def step(tiers, ids):
        tiers, has = tiered.contains(tiers, ids)
        tiers, found = tiered.find(tiers, ids)
        tiers, counts = tiered.prefetch(tiers, ids, insert=False)
        tiers, erased = tiered.erase(tiers, ids[:3])
        tiers, again = tiered.prefetch(tiers, ids)
        return tiers, (has, found, counts, erased, again)

    cache = made(256)
    (device,) = cache.values.devices()
    tiers = tiered.Tiers(cache, tiered.create_store(cache, 4096, device=device))
    assert_no_table_copies(step, tiers, np.arange(96, dtype=np.int32))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_host_may_work_while_the_batch_before_is_trained(policy, rng):
    """Ids of a batch get their places before the step of the last one, which keeps its own."""
    tiers, one = tiers_of(1024, 8192, policy=policy), made(8192, policy=policy)
    train = trainer("adam")
    batches = [rng.integers(0, 2500, 96).astype(np.int32) for _ in range(50)]
    tiers, _ = tiered.prefetch(tiers, batches[0])
    one = touched(one, batches[0])
    cache, store = tiers
    restored = 0
    for ids, coming in itertools.pairwise([*batches, batches[-1]]):
        cache, admitted = tiered.admit(cache, coming, keep=ids)
        cache, of_step = train(cache, ids)
        store, fetched = tiered.exchange(store, admitted)
        cache = tiered.restore(cache, fetched)
        one, _ = train(touched(one, coming), ids)
        assert int(of_step.hits) == int(of_step.unique)
        assert int(fetched.counts.refused) == int(fetched.counts.dropped) == 0
        assert int(fetched.counts.absent) == 0
        restored += int(fetched.counts.restored)
    assert restored > 500
    assert_same_table(tiered.Tiers(cache, store), one)


def test_keys_that_are_to_be_kept_stay_and_absent_ones_are_counted():
    """Without `keep` the oldest entries go, and they are those of the batch."""
    rows = [np.arange(start, start + 64, dtype=np.int32) for start in (0, 100, 200, 300)]
    valid = np.arange(64) < 60
    for keep, stay in ((None, 0), (rows[0], 64), (hkv.Padded(rows[0], valid), 60)):
        cache = made(128)
        for ids in rows[:2]:
            cache, _ = hkv.find_or_insert(cache, ids)
        cache, admitted = tiered.admit(cache, rows[2], keep=keep)
        assert int(hkv.contains(cache, rows[0])[1].sum()) == stay
        assert int(admitted.absent) == 0 and int(admitted.counts.refused) == 0
    cache, admitted = tiered.admit(cache, rows[3], keep=rows[0], keep_valid=~valid)
    assert int(admitted.absent) == 4
    _, fetched = tiered.exchange(tiered.create_store(cache, 1024), admitted)
    assert int(fetched.counts.absent) == 4
    absent = np.concatenate([rows[3][:5], np.arange(900, 910), np.arange(900, 903)])
    assert int(tiered.admit(cache, rows[3], keep=absent.astype(np.int32))[1].absent) == 10


def filled(rng, policy=hkv.Policy.LRU, batches=12):
    """Tiers and one table of the same entries, of which the cache has some."""
    tiers, one = tiers_of(256, 4096, policy=policy), made(4096, policy=policy)
    train = trainer("adam")
    for _ in range(batches):
        ids = rng.integers(0, 1000, 96).astype(np.int32)
        tiers, _ = tiered.prefetch(tiers, ids)
        tiers = tiers._replace(cache=train(tiers.cache, ids)[0])
        one = train(touched(one, ids), ids)[0]
    return tiers, one


@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize("fill", [0.0, -1.5, "initial"])
def test_lookups_see_both_tables(fill, is_jitted, rng):
    tiers, one = filled(rng)
    ids = rng.integers(0, 1500, (40, 8)).astype(np.int32)
    valid = rng.random(ids.shape) < 0.8
    lookup, has = tiered.find, tiered.contains
    if is_jitted:
        tiers = tiers._replace(store=jax.device_put(tiers.store, *tiers.cache.values.devices()))
        lookup, has = jax.jit(lookup, static_argnames="fill"), jax.jit(has)
    after, found = lookup(tiers, ids, valid=valid, fill=fill)
    _, wanted = hkv.find(one, ids, valid=valid, fill=fill)
    assert_same_bits(found[:2], wanted[:2])
    assert_same_bits(found.slots >= 0, hkv.contains(tiers.cache, ids, valid=valid)[1])
    assert_same_bits(has(tiers, ids, valid=valid)[1], wanted.found)
    assert 0 < int((found.slots >= 0).sum()) < int(found.found.sum()) < found.found.size
    assert_same_bits(jax.tree.leaves(after), jax.tree.leaves(tiers))
    assert is_jitted or all(x is y for x, y in zip(after, tiers, strict=True))


def test_lookups_of_what_the_cache_has_do_not_ask_the_store(rng):
    tiers, _ = filled(rng)
    ids = np.sort(entries_of(tiers.cache).keys)[:20].astype(np.int32)
    values = tiered.find(tiers, ids)[1].values
    gone = dataclasses.replace(tiers.store, values=jax.tree.map(jnp.copy, tiers.store.values))
    assert_same_bits(tiered.find(tiers._replace(store=hkv.clear(gone)), ids)[1].values, values)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_evaluation_brings_known_ids_and_inserts_none(policy, rng):
    """A layer that looks into the cache alone finds what one table has."""
    tiers, one = filled(rng, policy)
    ids = rng.integers(0, 1500, 96).astype(np.int32)
    valid = rng.random(ids.shape) < 0.8
    known = np.asarray(hkv.contains(one, ids, valid=valid)[1])
    tiers, counts = tiered.prefetch(tiers, ids, valid=valid, insert=False)
    assert int(counts.inserted) == int(counts.refused) == 0
    assert int(counts.unique) == len(np.unique(ids[known]))
    found = hkv.find(tiers.cache, ids, valid=valid, fill="initial")[1]
    wanted = hkv.find(one, ids, valid=valid, fill="initial")[1]
    assert_same_bits(found[:2], wanted[:2])
    assert_same_table(tiers, one)  # whose clock and scores are as they were


@pytest.mark.parametrize("policy", POLICIES)
def test_an_evaluation_inside_of_jit_is_that_of_outside(policy, rng):
    tiers, one = filled(rng, policy)
    local = tiers._replace(store=jax.device_put(tiers.store, *tiers.cache.values.devices()))
    ids = rng.integers(0, 1500, 96).astype(np.int32)
    inside, counts = jax.jit(lambda *args: tiered.prefetch(*args, insert=False))(local, ids)
    outside, wanted = tiered.prefetch(tiers, ids, insert=False)
    assert_same_bits(counts, wanted)
    assert int(counts.hits) > 0 and int(counts.restored) > 10
    assert int(counts.unique) == int(counts.hits) + int(counts.restored)
    for own, other in zip(inside, outside, strict=True):
        assert_same_bits(by_key(entries_of(own)), by_key(entries_of(other)))


@pytest.mark.parametrize("is_jitted", [False, True])
def test_removed_ids_are_gone_from_both(is_jitted, rng):
    tiers, one = filled(rng)
    ids = rng.integers(0, 1500, (30, 8)).astype(np.int32)
    valid = rng.random(ids.shape) < 0.8
    erase = tiered.erase
    if is_jitted:
        tiers = tiers._replace(store=jax.device_put(tiers.store, *tiers.cache.values.devices()))
        erase = jax.jit(erase, donate_argnums=0)
    one, wanted = hkv.erase(one, ids, valid=valid)
    tiers, erased = erase(tiers, ids, valid=valid)
    assert_same_bits(erased.status, wanted.status)
    assert [int(count) for count in erased.counts] == [int(count) for count in wanted.counts]
    assert int(erased.counts.hits) > 50
    assert_same_table(tiers, one)
    assert not tiered.contains(tiers, ids, valid=valid)[1].any()
    tiers, counts = tiered.prefetch(tiers, ids[:4])
    assert int(counts.inserted) == len(np.unique(ids[:4])) - int(
        np.isin(np.unique(ids[:4]), ids[:4][~valid[:4] & hkv.contains(one, ids[:4])[1]]).sum()
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_exports_go_into_one_table_and_back_into_tiers(policy, rng):
    """As those of one table do, and what is trained afterwards too."""
    tiers, one = filled(rng, policy)
    exported = tiered.export_entries(tiers)
    assert len(exported.keys) == len(np.unique(exported.keys)) == tiered.size(tiers)
    table, counts = sharding.import_entries(None, made(4096, policy=policy), exported)
    assert int(counts.inserted) == len(exported.keys)
    assert_same_bits(by_key(entries_of(table)), by_key(entries_of(one)))
    other, counts = tiered.import_entries(tiers_of(512, 4096, policy=policy), exported)
    assert int(counts.inserted) == len(exported.keys) and not int(hkv.size(other.cache))
    assert_same_table(other, one)
    train = trainer("adam")
    for _ in range(5):
        ids = rng.integers(0, 1200, 96).astype(np.int32)
        other, _ = tiered.prefetch(other, ids)
        other = other._replace(cache=train(other.cache, ids)[0])
        one = train(touched(one, ids), ids)[0]
    assert_same_table(other, one)


def test_what_a_cache_took_from_an_older_import_expires(rng):
    """The copy that the store had of it is younger, and does not come back."""
    policy = hkv.Policy.EPOCH_LRU
    tiers, one = filled(rng, policy)

    def today(table):
        return hkv.advance_epoch(table, 5)

    def expire(table):
        return hkv.expire(table, 2)[0]

    tiers, one = tiered.map_tables(tiers, today), today(one)
    ids = np.arange(96, dtype=np.int32)
    for some in (ids, ids + 300, ids + 600, ids + 900, ids):
        tiers, _ = tiered.prefetch(tiers, some)
        one = touched(one, some)
    exported = sharding.export_entries(one)
    older = exported.select(np.isin(exported.keys, ids))
    older = older._replace(scores=np.full_like(older.scores, 1 << 32))
    tiers, _ = tiered.import_entries(tiers, older)
    one, _ = sharding.import_entries(None, one, older)
    tiers, one = tiered.map_tables(tiers, expire), expire(one)
    assert not hkv.contains(one, ids)[1].any()
    assert tiered.size(tiers) == int(hkv.size(one)) > 0
    assert_same_table(tiers, one)


@pytest.mark.parametrize("is_jitted", [False, True])
def test_a_store_follows_the_epoch_of_its_cache(is_jitted):
    tiers = tiers_of(128, 1024, policy=hkv.Policy.EPOCH_LRU)
    prefetch = tiered.prefetch
    if is_jitted:
        tiers = tiers._replace(store=jax.device_put(tiers.store, *tiers.cache.values.devices()))
        prefetch = jax.jit(prefetch)
    tiers = tiers._replace(cache=hkv.advance_epoch(tiers.cache, 7))
    tiers, _ = prefetch(tiers, np.arange(5, dtype=np.int32))
    assert [int(table.epoch[0]) for table in tiers] == [7, 7]


def test_time_and_step_counts_are_those_of_the_cache(rng):
    """Whatever the store has been through."""
    tiers, one = filled(rng)
    store = tiers.store
    for _ in range(100):
        store, _ = hkv.erase(store, np.array([10**6], np.int32))
    assert int(store.clock[0]) > int(tiers.cache.clock[0])
    assert_same_table(tiers._replace(store=store), one)


@pytest.mark.parametrize("policy", [hkv.Policy.LRU, hkv.Policy.EPOCH_LRU])
def test_increments_say_what_has_changed_in_both(policy, rng):
    tiers, one = filled(rng, policy)
    earlier = tiered.export_entries(tiers)
    train = trainer("adam")
    for _ in range(6):
        ids = rng.integers(0, 1000, 96).astype(np.int32)
        tiers, _ = tiered.prefetch(tiers, ids)
        tiers = tiers._replace(cache=train(tiers.cache, ids)[0])
        one = train(touched(one, ids), ids)[0]
    changed = tiered.export_entries(tiers, changed_since=earlier)
    wanted = sharding.export_entries(one, changed_since=earlier)
    assert_same_bits(by_key(changed), by_key(wanted))
    assert int(hkv.size(tiers.cache)) < len(changed.keys) < tiered.size(tiers)
    lowest = int(np.median(changed.scores))
    assert_same_bits(
        by_key(tiered.export_entries(tiers, min_score=lowest)),
        by_key(sharding.export_entries(one, min_score=lowest)),
    )


def test_imported_entries_count_and_not_what_the_tables_had_of_them(rng):
    """In the cache they are overwritten where they are; the clock goes on from the latest score."""
    tiers, one = filled(rng)
    held = sharding.export_entries(one)
    order = rng.permutation(len(held.keys))[:300]
    new = held._replace(
        **{name: getattr(held, name)[order] for name in ("keys", "values")},
        scores=held.scores[order] + np.uint64(10**6),
        optimizer={name: leaf[order] for name, leaf in held.optimizer.items()},
    )
    near = np.asarray(hkv.contains(tiers.cache, hkv.Keys.from_numpy(new.keys))[1])
    new.values[:] += 1
    assert 50 < near.sum() < 250
    tiers, counts = tiered.import_entries(tiers, new)
    one, wanted = sharding.import_entries(None, one, new)
    assert [int(count) for count in counts] == [int(count) for count in wanted]
    assert_same_table(tiers, one)
    ids = new.keys[:96].astype(np.int32)
    tiers, counts = tiered.prefetch(tiers, ids)
    assert int(counts.restored) == 96 - near[:96].sum()
    assert_same_bits(hkv.find(tiers.cache, ids)[1].values, new.values[:96])
    assert_same_table(tiers, touched(one, ids))


@pytest.mark.parametrize("age", [-3, 0, 3])
def test_imports_of_an_earlier_and_of_a_later_time_are_those_of_one_table(age, rng):
    """The later side's step count holds, and no clock ticks."""
    tiers, one = filled(rng)
    held = sharding.export_entries(one)
    chosen = np.arange(0, len(held.keys), 3)
    part = sharding.Exported(
        keys=held.keys[chosen],
        scores=np.minimum(held.scores[chosen], np.uint64(held.clock + age)),
        values=held.values[chosen] + 1,
        optimizer={name: leaf[chosen] * 2 for name, leaf in held.optimizer.items()},
        shared={"count": held.shared["count"] + np.uint32(7)},
        clock=held.clock + age,
        epoch=0,
        counters=None,
        policy=held.policy,
    )
    tiers, _ = tiered.import_entries(tiers, part)
    one, _ = sharding.import_entries(None, one, part)
    assert int(one.optimizer.shared["count"][0]) == 12 + 7 * (age >= 0)
    assert_same_table(tiers, one)
    ids = held.keys[:50].astype(np.int32)
    tiers, _ = tiered.prefetch(tiers, ids)
    assert_same_table(tiers, touched(one, ids))


def test_an_import_into_a_full_store_loses_nothing_that_the_cache_has(rng):
    tiers = tiers_of(128, 128)
    tiers, _ = tiered.prefetch(tiers, np.arange(128, dtype=np.int32))
    tiers, _ = tiered.prefetch(tiers, np.arange(128, 256, dtype=np.int32))
    held = entries_of(tiers.cache)
    old = held._replace(scores=np.zeros_like(held.scores), values=held.values + 1)
    tiers, counts = tiered.import_entries(tiers, old)
    assert int(counts.hits) == 128 and int(counts.refused) == int(counts.evicted) == 0
    assert tiered.size(tiers) == 256
    ids = np.arange(128, 256, dtype=np.int32)
    values = hkv.find(tiers.cache, ids)[1].values
    assert_same_bits(values, old.values[np.argsort(old.keys)])


def test_many_entries_move_at_once(rng):
    """More than the least that is moved, and not a power of two."""
    tiers, one = tiers_of(8192, 32768), made(32768)
    train = trainer("adam")
    for _ in range(12):
        ids = rng.integers(0, 15000, 3000).astype(np.int32)
        tiers, counts = tiered.prefetch(tiers, ids)
        assert int(counts.refused) == int(counts.dropped) == 0
        tiers = tiers._replace(cache=train(tiers.cache, ids)[0])
        one = train(touched(one, ids), ids)[0]
    assert int(counts.evicted) > 512 and int(counts.restored) > 512
    assert_same_table(tiers, one)
    ids = rng.integers(0, 20000, 3000).astype(np.int32)
    assert_same_bits(tiered.find(tiers, ids)[1][:2], hkv.find(one, ids)[1][:2])


def test_whole_tables_are_gone_through_in_chunks(rng, monkeypatch):
    monkeypatch.setattr("jax_hkv._entries._CHUNK", 64)
    tiers, one = filled(rng)
    assert tiered.size(tiers) == int(hkv.size(one)) > 500
    assert_same_table(tiers, one)
    other, _ = tiered.import_entries(tiers_of(256, 4096), tiered.export_entries(tiers))
    assert_same_table(other, one)


@pytest.mark.parametrize("is_jitted", [False, True])
def test_what_is_asked_back_is_read_before_others_take_its_place(is_jitted):
    """A full store: what comes in evicts the oldest, and they come back."""
    tiers = tiers_of(128, 128)
    ids = [np.arange(start, start + 128, dtype=np.int32) for start in (0, 200)]
    tiers, _ = tiered.prefetch(tiers, ids[0])
    rows = np.arange(128 * DIM, dtype=np.float32).reshape(128, DIM)
    tiers = tiers._replace(cache=hkv.insert_or_assign(tiers.cache, ids[0], rows)[0])
    tiers, counts = tiered.prefetch(tiers, ids[1])
    assert int(counts.evicted) == 128 and int(counts.dropped) == 0
    prefetch = tiered.prefetch
    if is_jitted:
        tiers = tiers._replace(store=jax.device_put(tiers.store, *tiers.cache.values.devices()))
        prefetch = jax.jit(prefetch)
    tiers, counts = prefetch(tiers, ids[0])
    assert int(counts.restored) == 128 and int(counts.dropped) == 128
    assert_same_bits(hkv.find(tiers.cache, ids[0])[1].values, rows)


@pytest.mark.parametrize(
    ("policy", "capacity", "store", "batch", "choices"),
    [
        (hkv.Policy.LRU, 256, 512, 128, 1),
        (hkv.Policy.LRU, 128, 4096, 300, 1),
        (hkv.Policy.LRU, 256, 384, 128, 2),
        (hkv.Policy.LFU, 128, 128, 64, 1),
    ],
)
def test_what_finds_no_room_is_counted(policy, capacity, store, batch, choices, rng):
    """In the cache it is refused, and the store gives up older entries, or refuses it too."""
    tiers = tiers_of(capacity, store, policy=policy, choices=choices)
    train = trainer("adam")
    totals, refused = np.zeros(2, int), 0
    for _ in range(36):
        ids = rng.integers(0, 2000, batch).astype(np.int32)
        before = [entries_of(table).keys for table in tiers]
        tiers, counts = tiered.prefetch(tiers, ids)
        after = [entries_of(table).keys for table in tiers]
        assert sum(map(int, counts[1:5])) == int(counts.unique) == len(np.unique(ids))
        moved = np.setdiff1d(before[0], after[0])
        assert int(counts.evicted) == len(moved)
        lost = np.setdiff1d(np.union1d(before[1], moved), after[1])
        assert int(counts.dropped) == len(lost)
        refused += len(np.setdiff1d(moved, after[1]))
        asked = np.setdiff1d(np.unique(ids).astype(np.uint64), after[0])
        assert int(counts.refused) == len(asked)
        totals += int(counts.dropped), int(counts.refused)
        if policy is hkv.Policy.LFU:  # counts what is looked up again
            often = np.tile(ids[:32], 3)
            tiers = tiers._replace(cache=train(tiers.cache, often)[0])
    assert totals.sum() > 0 and (refused > 0) == (policy is hkv.Policy.LFU)


def test_a_batch_of_known_ids_moves_nothing(rng):
    tiers, _ = filled(rng)
    ids = entries_of(tiers.cache).keys[:30].astype(np.int32)
    store = tiers.store
    tiers, counts = tiered.prefetch(tiers, ids)
    assert tiers.store is store and int(counts.hits) == 30
    assert [int(count) for count in counts] == [30, 30, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("insert", [True, False])
def test_ids_of_bags_are_those_without_the_padding(insert):
    bags = [[1, 2], [], [2, 3, 4]]
    jagged = hkv.Jagged.from_lists(bags, capacity=16)
    padded = hkv.Padded(
        np.array([[1, 2, 0], [0, 0, 0], [2, 3, 4]], np.int32),
        np.array([[True, True, False], [False] * 3, [True] * 3]),
    )
    for ids in (jagged, padded):
        tiers, counts = tiered.prefetch(tiers_of(128, 1024), ids)
        assert int(counts.inserted) == int(counts.unique) == 4
        tiers, counts = tiered.prefetch(tiers, ids, insert=insert)
        assert int(counts.hits) == int(counts.unique) == 4
        assert sorted(tiered.export_entries(tiers).keys.tolist()) == [1, 2, 3, 4]


@pytest.mark.parametrize("is_alone", [False, True])
def test_tables_and_programs_stay_where_they_are(is_alone):
    """A cache that is not committed to its device is not, nor does it go to that of the keys."""
    if len(jax.local_devices(backend="cpu")) < 2:
        pytest.skip("it wants two devices")
    cache = made(128)
    (device,) = cache.values.devices()
    store = tiered.create_store(cache, 1024, device=device if is_alone else host())
    tiers = tiered.Tiers(cache, store)
    train = trainer("adam")
    for start in (0, 100, 0, 200, 100):
        for insert in (True, False):
            ids = hkv.Keys.from_numpy(np.arange(start, start + 90))
            keys = jax.device_put(ids, host()) if insert else ids
            tiers, counts = tiered.prefetch(tiers, keys, insert=insert)
            assert tiers.cache.values.devices() == {device} and not tiers.cache.values.committed
            found = tiered.find(tiers, keys)[1]
            assert found.values.devices() == {device} and found.found.all()
            assert tiered.contains(tiers, keys)[1].all()
        tiers = tiers._replace(cache=train(tiers.cache, ids)[0])
        tiers, _ = tiered.erase(tiers, jax.device_put(ids[:2], host()))
        assert tiers.cache.values.devices() == {device}
    assert int(counts.hits) == 90
    assert train._cache_size() == 1
    committed = tiered.Tiers(jax.device_put(tiers.cache, device), tiers.store)
    committed, _ = tiered.prefetch(committed, jax.device_put(ids, host()))
    assert committed.cache.values.devices() == {device} and committed.cache.values.committed


@pytest.mark.parametrize("is_alone, axis_type", each([True, False], ["Auto", "Explicit"]))
def test_tiers_are_those_of_one_device_whatever_mesh_is_set(axis_type, is_alone, rng):
    """Their step, too; inside of jit they are a part of the program."""
    caches = [made(256), made(256)]
    if is_alone:
        caches = jax.device_put(caches, jax.devices()[0])
    batches = [rng.integers(0, 500, 200).astype(np.int32) for _ in range(4)]
    devices = jax.devices("cpu")
    kind = (jax.sharding.AxisType[axis_type],)
    mesh = jax.make_mesh((len(devices),), ("device",), kind, devices=devices)
    expected = through_all(caches[0], batches)
    with jax.set_mesh(mesh):
        got = through_all(caches[1], batches)
        assert jax.sharding.get_mesh() == mesh
    assert_same_bits(got, expected)


def through_all(cache, batches):
    """What all operations of tiers return."""
    tiers = tiered.Tiers(cache, tiered.create_store(cache, 2048, device=host()))
    train = trainer("adam")
    tiers, *found = tiered.prefetch(tiers, batches[0])
    step = functools.partial(train, ids=batches[0])
    tiers, *counts = tiered.step_and_prefetch(step, tiers, batches[0], jnp.asarray(batches[1]))
    step = functools.partial(train, ids=batches[1])
    tiers, _, last = tiered.step_and_prefetch(step, tiers, batches[1], None)
    cache, admitted = tiered.admit(tiers.cache, batches[2], keep=batches[1])
    store, fetched = tiered.exchange(tiers.store, admitted)
    tiers = tiered.Tiers(tiered.restore(cache, fetched), store)
    tiers, *rows = tiered.find(tiers, batches[3])
    tiers, *are = tiered.contains(tiers, batches[3])
    tiers, *gone = tiered.erase(tiers, batches[3][:9])
    tiers = tiered.map_tables(tiers, jax.jit(lambda table: table))
    entries = tiered.export_entries(tiers)
    tiers, *again = tiered.import_entries(tiers, entries)
    assert tiered.size(tiers) == len(entries.keys) > 256
    inside = jax.jit(lambda keys: tiered.contains(tiers, keys)[1])(batches[0])
    tables = by_key(tiered.export_entries(tiers))
    found += [counts, last, fetched.counts, rows, are, gone, again, inside]
    return found, by_key(entries), tables


def test_masked_ids_and_batches_of_none_change_nothing():
    tiers = tiers_of(128, 1024)
    for ids in (np.zeros(0, np.int32), np.arange(5, dtype=np.int32)):
        tiers, counts = tiered.prefetch(tiers, ids, valid=np.zeros(ids.shape, bool))
        assert not any(map(int, counts)) and tiered.size(tiers) == 0
        tiers, found = tiered.find(tiers, ids)
        assert found.values.shape == (*ids.shape, DIM) and not found.found.any()
        tiers, erased = tiered.erase(tiers, ids)
        assert not int(erased.counts.hits)


def test_a_store_has_the_tables_settings_and_no_entries():
    cache = hkv.optim.adam(0.1).init(
        hkv.create(1000, 8, dtype=jnp.bfloat16, choices=2, seed=7, name="items")
    )
    cache, _ = hkv.find_or_insert(cache, np.arange(50, dtype=np.int32))
    store = tiered.create_store(cache, 5000, device=host())
    dtypes = [[leaf.dtype for leaf in jax.tree.leaves(table)] for table in (cache, store)]
    assert dtypes[0] == dtypes[1]
    assert (store.capacity, store.choices, store.seed, store.name) == (5120, 2, 7, "items")
    assert int(hkv.size(store)) == 0 and int(hkv.size(cache)) == 50
    assert {device for leaf in jax.tree.leaves(store) for device in leaf.devices()} == {host()}
    default = tiered.create_store(cache, 5000)
    assert default.values.devices() == {jax.local_devices(backend="cpu")[0]}
