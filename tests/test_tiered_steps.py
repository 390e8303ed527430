"""Steps while whose device trains the host fetches what the next batch wants."""

from __future__ import annotations

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import each, seldom
from many_devices import assert_same_bits
from test_tiered import (
    POLICIES,
    assert_same_table,
    by_key,
    host,
    made,
    prefetched,
    tiers_of,
    touched,
    trainer,
)
from test_tiered_devices import (
    DEVICES,
    Model,
    collection_of_two,
    large,
    placement_of,
    stepper,
)
from test_tiered_devices import assert_same_table as assert_same_parts
from test_tiered_devices import tiers_of as parts_of
from test_tiered_models import (
    ADAM,
    DENSE,
    LARGE,
    NAMES,
    SMALL,
    LinenModel,
    NnxModel,
    assert_same_entries,
    collection_of,
    inputs_of,
    loss_of,
    trainer_of,
)

import jax_hkv as hkv
from jax_hkv import _tiers, sharding, tiered
from jax_hkv._tier_types import PrefetchCounts
from jax_hkv._tiers import _both


def with_next(batches):
    return itertools.pairwise([*batches, None])


def trained(train, ids, *rest):
    return lambda cache: train(cache, ids, *rest)


@pytest.mark.parametrize("choices, policy", each([1, 2], POLICIES))
def test_steps_and_prefetches_train_as_one_table(policy, choices, rng):
    """A prefetch of the next batch is a lookup of its ids before the step, in every bit."""
    options = {"policy": policy, "choices": choices}
    tiers, one = tiers_of(1024, 8192, **options), made(8192, **options)
    train = trainer("adam")
    batches = [
        (rng.integers(0, 2500, (32, 3)).astype(np.int32), rng.random((32, 3)) < 0.9)
        for _ in range(40)
    ]
    ids, valid = batches[0]
    tiers, _ = tiered.prefetch(tiers, ids, valid=valid)
    one, restored = touched(one, ids, valid), 0
    for (ids, valid), coming in with_next(batches):
        next_ids, next_valid = coming or (None, None)
        step = trained(train, ids, valid)
        tiers, counts, of_step = tiered.step_and_prefetch(
            step, tiers, ids, next_ids, valid=valid, coming_valid=next_valid
        )
        if coming:
            known = np.unique(next_ids[next_valid])
            known = np.asarray(hkv.contains(one, known)[1])
            one = touched(one, *coming)
            assert int(counts.unique) == len(known)
            assert int(counts.hits) + int(counts.restored) == known.sum()
            assert int(counts.inserted) == (~known).sum()
            assert int(counts.refused) == int(counts.dropped) == int(counts.absent) == 0
            restored += int(counts.restored)
        one, wanted = train(one, ids, valid)
        assert int(of_step.hits) == int(of_step.unique) == int(wanted.unique)
    assert counts is None and restored > 200
    assert tiers.store.values.devices() == {host()}
    assert_same_table(tiers, one)


def test_the_step_is_under_way_before_a_store_is_asked(monkeypatch):
    """And nothing is waited for before it."""
    order = []
    wait = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: order.append("wait") or wait(tree))
    tiers, _ = tiered.prefetch(tiers_of(256, 1024), np.arange(64, dtype=np.int32))
    exchange, device_get = _tiers.exchange, jax.device_get
    monkeypatch.setattr(_tiers, "exchange", lambda *a: order.append("store") or exchange(*a))
    monkeypatch.setattr(jax, "device_get", lambda tree: order.append("wait") or device_get(tree))
    tiers, counts, result = tiered.step_and_prefetch(
        lambda cache: (cache, order.append("step")),
        tiers,
        np.arange(64, dtype=np.int32),
        np.arange(32, 96, dtype=np.int32),
    )
    assert order[:3] == ["step", "store", "wait"] and result is None
    assert (int(counts.hits), int(counts.inserted)) == (32, 32)


@pytest.fixture
def again(monkeypatch):
    """A list of the prefetches that came behind a step."""
    seen, prefetch = [], _tiers._again
    monkeypatch.setattr(_tiers, "_again", lambda *args: seen.append(args) or prefetch(*args))
    return seen


@pytest.mark.parametrize("choices, policy", each([2, 1], POLICIES))
def test_ids_without_room_beside_a_batch_come_behind_its_step(policy, choices, again, rng):
    """A cache too small for two batches, and large enough for each of them: nothing is lost."""
    options = {"policy": policy, "choices": choices}
    tiers, one = tiers_of(128, 4096, **options), made(4096, **options)
    train = trainer("adam")
    batches = [rng.permutation(600)[:90].astype(np.int32) for _ in range(20)]
    tiers, _ = tiered.prefetch(tiers, batches[0])
    one = touched(one, batches[0])
    for ids, coming in itertools.pairwise(batches):
        known = int(np.sum(hkv.contains(one, coming)[1]))
        one, _ = train(touched(one, coming), ids)
        tiers, counts, of_step = tiered.step_and_prefetch(trained(train, ids), tiers, ids, coming)
        assert int(of_step.hits) == 90
        assert int(counts.refused) == int(counts.dropped) == int(counts.absent) == 0
        assert int(counts.hits) + int(counts.restored) == known
        assert int(counts.unique) == 90 == known + int(counts.inserted)
        assert_same_bits(tiers.cache.clock, one.clock)
    assert len(again) > 10
    if policy is hkv.Policy.LFU:
        assert_same_table(tiers, one)
    else:  # those that came behind a step have its time
        tiers, one = by_key(tiered.export_entries(tiers)), by_key(sharding.export_entries(one))
        assert (tiers[0][1] >= one[0][1]).all()
        assert_same_bits((tiers[0][0], tiers[0][2:], tiers[1]), (one[0][0], one[0][2:], one[1]))


def test_ids_of_a_step_that_are_not_there_are_counted():
    ids = np.arange(64, dtype=np.int32)
    tiers, _ = tiered.prefetch(tiers_of(256, 1024), ids)
    _, counts, _ = tiered.step_and_prefetch(
        lambda cache: (cache, None), tiers, ids + 10, hkv.Jagged.from_lists([[1], [2, 70]])
    )
    assert (int(counts.absent), int(counts.unique), int(counts.inserted)) == (10, 3, 1)


@pytest.mark.parametrize("policy", [hkv.Policy.LRU, hkv.Policy.LFU])
def test_a_loop_whose_first_batch_was_not_prefetched_goes_on_as_one_that_was(policy, rng):
    """What the step itself inserts takes the places of the next batch, which gets others.

    And nothing of what the step has trained is lost for them.
    """
    tiers, train = tiers_of(128, 4096, policy=policy), trainer("adam")
    batches = [np.arange(first, first + 100, dtype=np.int32) for first in (0, 100, 200, 300)]
    for ids in batches:
        tiers, _ = tiered.prefetch(tiers, ids)
        tiers = tiers._replace(cache=train(tiers.cache, ids)[0])
    absent = []
    for number in range(8):
        ids, coming = batches[number % 4], batches[(number + 1) % 4]

        def step(cache, ids=ids):
            cache, _ = train(cache, ids)
            return cache, hkv.find(cache, ids)[1]

        tiers, counts, of_step = tiered.step_and_prefetch(step, tiers, ids, coming)
        tiers, found = tiered.find(tiers, ids)
        assert_same_bits((found.values, found.found), (of_step.values, of_step.found))
        absent.append(int(counts.absent))
        assert sum(map(int, counts[1:5])) == int(counts.unique) == 100
        if not number:  # all of them known, whatever this step displaces
            assert int(counts.hits) + int(counts.restored) == 100
    assert absent[0] == 100 and not any(absent[1:])


@pytest.mark.parametrize("policy", seldom(POLICIES, POLICIES[1:]))
def test_entries_leave_a_gpu_in_pieces(policy, monkeypatch, rng):
    """Here from a CPU: the same entries, wherever the last piece ends."""
    monkeypatch.setattr(_tiers, "pieces_of", lambda device: 5)
    monkeypatch.setattr(_tiers, "_LEAST", 4)
    tiers, one = tiers_of(256, 4096, policy=policy), made(4096, policy=policy)
    train, moved = trainer("adam"), []
    for size in [250, 1, 0, *rng.integers(0, 120, 25)]:
        ids = rng.permutation(2000)[:120].astype(np.int32)
        valid = np.arange(120) < size
        tiers, counts = tiered.prefetch(tiers, ids, valid=valid)
        one = touched(one, ids, valid)
        tiers = tiers._replace(cache=train(tiers.cache, ids, valid)[0])
        one, _ = train(one, ids, valid)
        assert int(counts.dropped) == int(counts.refused) == 0
        assert len(tiered.admit(jax.tree.map(jnp.copy, tiers.cache), ids)[1].evicted) == 5
        moved.append(int(counts.evicted))
    assert len({number * 16 // 120 for number in moved}) > 5
    assert_same_table(tiers, one)
    _tiers._admitting.cache_clear()  # programs of small pieces


def test_a_collection_trains_while_its_next_batch_comes_near(rng):
    small, large = (collection_of(size) for size in (SMALL, LARGE))
    tables, ones = small.create(), large.create()
    stores = {name: tiered.create_store(tables[name], LARGE, device=host()) for name in NAMES}
    steps = [trainer_of(own) for own in (small, large)]
    # One table with a store that stays empty is one table.
    empty = {name: tiered.create_store(ones[name], 2 * LARGE, device=host()) for name in NAMES}
    given = [inputs_of(rng) for _ in range(15)]
    tables, stores, _ = small.prefetch(tables, stores, given[0])
    ones, empty, _ = large.prefetch(ones, empty, given[0])
    restored = 0
    for inputs, coming in with_next(given):
        tables, stores, counts, rows = small.step_and_prefetch(
            lambda tables, inputs=inputs: steps[0](tables, inputs), tables, stores, inputs, coming
        )
        assert list(counts) == (NAMES if coming else [])
        for own in counts.values():
            assert int(own.refused) == int(own.dropped) == int(own.absent) == 0
            restored += int(own.restored)
        if coming:
            ones, empty, _ = large.prefetch(ones, empty, coming)
        ones, wanted = steps[1](ones, inputs)
        assert_same_bits(rows, wanted)
    assert restored > 30 and not any(map(int, large.sizes(empty).values()))
    assert int(hkv.size(tables["frozen"])) == 0
    for name in NAMES:
        assert_same_entries(tiered.Tiers(tables[name], stores[name]), ones[name])


def test_a_table_of_some_features_is_stepped_alone(rng):
    """Tables without ids in the next batch stay as the step has left them."""
    collection, inputs = collection_of(SMALL), inputs_of(rng)
    tables, stores = prefetched(collection, LARGE, NAMES, inputs)

    def step(tables):
        tables, found = collection.lookup(tables, inputs, train=True)
        updated = ADAM.update(
            tables["users+items"], found.results["users+items"], 1 + found.rows["users+items"]
        )
        return {**tables, "users+items": updated}, "done"

    wanted, _ = step(jax.tree.map(jnp.copy, tables))
    tables, stores, counts, result = collection.step_and_prefetch(
        step, tables, stores, inputs, {"word": inputs["word"]}, partial=True
    )
    assert list(counts) == ["words"] and result == "done"
    assert int(counts["words"].hits) == int(counts["words"].unique)
    assert_same_bits(tables["users+items"], wanted["users+items"])


def test_a_linen_model_trains_while_its_next_batch_comes_near(rng):
    train = hkv.linen.train_step(loss_of)
    given = [(ids, (ids.sum(axis=1) % 2).astype(np.float32)) for ids in ids_of_batches(rng)]
    small, one = (
        hkv.linen.TrainState.create(LinenModel(size), jax.random.key(0), given[0][0], tx=DENSE)
        for size in (SMALL * 2, LARGE)
    )

    def with_table(state, table):
        return state.replace(tables={**state.tables, "embed": {"table": table}})

    cache = small.tables["embed"]["table"]
    tiers = tiered.Tiers(cache, tiered.create_store(cache, LARGE, device=host()))
    tiers, _ = tiered.prefetch(tiers, given[0][0])
    for (ids, labels), coming in with_next(given):

        def step(cache, state=small, ids=ids, labels=labels):
            state, info = train(with_table(state, cache), ids, labels)
            return state.tables["embed"]["table"], (state, info.loss)

        tiers, counts, (small, loss) = tiered.step_and_prefetch(
            step, tiers, ids, coming and coming[0]
        )
        one, wanted = train(one, ids, labels)
        assert float(loss) == float(wanted.loss)
        assert coming is None or int(counts.dropped) == int(counts.absent) == 0
    assert_same_bits(small.params, one.params)
    assert_same_entries(tiers, one.tables["embed"]["table"])


def test_an_nnx_model_trains_while_its_next_batch_comes_near(rng):
    train = hkv.nnx.train_step(loss_of)
    given = [(ids, (ids.sum(axis=1) % 2).astype(np.float32)) for ids in ids_of_batches(rng)]
    small, one = (hkv.nnx.TrainState(NnxModel(size), DENSE) for size in (SMALL * 2, LARGE))
    layer = small.model.embed
    cache = layer.table.get_value()
    tiers = tiered.Tiers(cache, tiered.create_store(cache, LARGE, device=host()))
    tiers, _ = tiered.prefetch(tiers, given[0][0])
    for (ids, labels), coming in with_next(given):

        def step(cache, ids=ids, labels=labels):
            layer.table.set_value(cache)
            info = train(small, ids, labels)
            return layer.table.get_value(), info.loss

        tiers, _, loss = tiered.step_and_prefetch(step, tiers, ids, coming and coming[0])
        assert float(loss) == float(train(one, ids, labels).loss)
    assert_same_entries(tiers, one.model.embed.table.get_value())


def ids_of_batches(rng, count=15):
    return [rng.integers(0, 1000, (32, 3)).astype(np.int32) for _ in range(count)]


@pytest.mark.parametrize(
    ("mode", "policy", "capacity", "sets_mesh"),
    [
        ("shard_map", hkv.Policy.LRU, 2048, True),
        ("shard_map", hkv.Policy.LFU, DEVICES * 128, False),  # without room for two batches
        pytest.param("pmap", hkv.Policy.EPOCH_LRU, 2048, True, marks=pytest.mark.slow),
    ],
)
def test_parts_train_while_the_next_batch_comes_near(mode, policy, capacity, sets_mesh, again, rng):
    placement = placement_of(mode)
    with jax.set_mesh(placement.mesh) if sets_mesh else contextlib.nullcontext():
        assert_parts_train_as_one(placement, policy, capacity, rng)
    assert bool(again) == (capacity == DEVICES * 128)


def assert_parts_train_as_one(placement, policy, capacity, rng):
    tiers, one = (
        parts_of(placement, capacity, 16384, policy=policy),
        large(placement, 16384, policy=policy),
    )
    train, touch = stepper(placement)
    given = [
        placement.put(
            (rng.integers(0, 3000, DEVICES * 80).astype(np.int32), rng.random(DEVICES * 80) < 0.9)
        )
        for _ in range(10)
    ]
    tiers, _ = tiered.prefetch(tiers, given[0][0], valid=given[0][1], placement=placement)
    one, _ = touch(one, *given[0])
    for batch, coming in with_next(given):
        next_ids, next_valid = coming or (None, None)
        tiers, counts, of_step = tiered.step_and_prefetch(
            trained(train, *batch),
            tiers,
            batch[0],
            next_ids,
            valid=batch[1],
            coming_valid=next_valid,
            placement=placement,
        )
        if coming:
            one, wanted = touch(one, *coming)
            assert int(counts.unique) == int(wanted.unique)
            assert int(counts.hits) + int(counts.restored) == int(wanted.hits)
            assert int(counts.inserted) == int(wanted.inserted)
            assert int(counts.refused) == int(counts.dropped) == int(counts.absent) == 0
        one, wanted = train(one, *batch)
        assert int(of_step.hits) == int(of_step.unique) == int(wanted.unique)
    assert_same_parts(placement, tiers, one)


def test_a_model_over_devices_trains_while_its_next_batch_comes_near(rng):
    placement = placement_of("shard_map")

    given = []
    for user, item in rng.integers(0, 1500, (12, 2, 64)).astype(np.int32):
        given.append(({"user": user, "item": item}, ((user + item) % 2).astype(np.float32)))
    example = {name: ids[:16] for name, ids in given[0][0].items()}
    small, one = (
        placement.create(
            lambda size=size: hkv.linen.TrainState.create(
                Model(collection_of_two(size)), jax.random.key(0), example, tx=DENSE
            )
        )
        for size in (256, 8192)
    )
    trains = [hkv.linen.train_step(loss_of, placement=placement) for _ in range(2)]
    collection = collection_of_two(256)
    (name,) = [group.name for group in collection.groups]
    tables = small.tables["embed"]
    stores = {name: tiered.create_store(tables[name], 8192, placement=placement)}
    given = [placement.put(batch) for batch in given]
    options = {"placement": placement}
    tables, stores, _ = collection.prefetch(tables, stores, given[0][0], **options)
    restored = 0
    for batch, coming in with_next(given):

        def step(tables, state=small, batch=batch):
            state, info = trains[0](state.replace(tables={**state.tables, "embed": tables}), *batch)
            return state.tables["embed"], (state, info.loss)

        tables, stores, counts, (small, loss) = collection.step_and_prefetch(
            step, tables, stores, batch[0], coming and coming[0], **options
        )
        one, wanted = trains[1](one, *batch)
        assert float(loss) == float(wanted.loss)
        restored += int(counts[name].restored) if coming else 0
    assert restored > 20
    assert_same_bits(small.params, one.params)


LOST = r"tiers\.store was used up .* restore them from a checkpoint, .* inside of the step"


def test_tiers_whose_step_raised_cannot_be_gone_on_with():
    """Their store lacks what the cache gave up, whatever cache the error has brought."""
    first, second = np.arange(128, dtype=np.int32).reshape(2, 64)
    train, kept = trainer("adam"), []

    def failing(cache):
        kept.append(train(cache, first)[0])
        raise sharding.ExchangeOverflow("full")

    tiers, _ = tiered.prefetch(tiers_of(128, 1024), first)
    for _ in range(2):  # behind the last batch nothing is to come
        with pytest.raises(sharding.ExchangeOverflow, match="full"):
            tiered.step_and_prefetch(failing, tiers, first, None)
        tiers = tiers._replace(cache=kept.pop())
    assert tiered.size(tiers) == 64
    with pytest.raises(sharding.ExchangeOverflow, match="full"):
        tiered.step_and_prefetch(failing, tiers, first, second)
    mixed = tiers._replace(cache=kept.pop())
    for call in (tiered.size, tiered.export_entries, lambda own: tiered.prefetch(own, first)):
        with pytest.raises(RuntimeError, match=LOST):
            call(mixed)
    with pytest.raises(RuntimeError, match=r"tiers\.cache was used up"):
        tiered.size(tiers)


@pytest.mark.parametrize("mode", [None, "shard_map", "pmap"])
def test_a_model_that_a_failed_step_has_given_a_cache_is_lost_too(mode):
    """It has first rows of the coming batch, whatever the store knows of it."""
    placement = None if mode is None else placement_of(mode)
    options = {} if placement is None else {"placement": placement}
    near = (lambda ids: ids) if placement is None else placement.put
    made_of = (lambda make: make()) if placement is None else placement.create
    cache = made_of(lambda: hkv.create(256, 4, init=hkv.initializers.normal(1.0)))
    ids = near(np.arange(64, dtype=np.int32)), near(np.arange(64, 128, dtype=np.int32))
    tiers = tiered.Tiers(cache, tiered.create_store(cache, 4096, **options))
    tiers, _ = tiered.prefetch(tiers, ids[0], **options)
    model = {}

    def failing(cache):
        model["table"] = cache
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as raised:
        tiered.step_and_prefetch(failing, tiers, *ids, **options)
    assert "tiers of the step are lost" in raised.value.__notes__[0]
    with pytest.raises(RuntimeError, match="used up"):
        hkv.size(model["table"])

    def returning_another(cache):
        model["table"] = cache
        return hkv.create(128, 8), None

    tiers = tiered.Tiers(made_of(lambda: hkv.create(256, 4)), None)
    tiers = tiers._replace(store=tiered.create_store(tiers.cache, 4096, **options))
    with pytest.raises((TypeError, ValueError), match="step_and_prefetch"):
        tiered.step_and_prefetch(returning_another, tiers, *ids, **options)
    with pytest.raises(RuntimeError, match="used up"):
        hkv.size(model["table"])


def test_an_error_that_the_step_catches_costs_nothing():
    batches = np.arange(400, dtype=np.int32).reshape(4, 100)
    train = trainer("adam")

    def overflowing(cache, ids):
        error = sharding.ExchangeOverflow("full")
        error.outputs = train(cache, ids)
        raise error

    tiers, _ = tiered.prefetch(tiers_of(256, 1024), batches[0])
    for ids, coming in with_next(batches):

        def step(cache, ids=ids):
            try:
                return overflowing(cache, ids)
            except sharding.ExchangeOverflow as error:
                return error.outputs

        tiers, _, counts = tiered.step_and_prefetch(step, tiers, ids, coming)
        assert int(counts.hits) == 100
    assert tiered.size(tiers) == 400


def test_stores_of_a_collection_whose_step_raised_are_used_up():
    def failing(tables):
        kept.update(jax.tree.map(jnp.copy, tables))
        raise KeyError("full")

    tables, kept = COLLECTION.create(), {}
    stores = {"words": tiered.create_store(tables["words"], 1024)}
    with pytest.raises(KeyError, match="full"):
        COLLECTION.step_and_prefetch(failing, tables, stores, INPUTS, INPUTS)
    with pytest.raises(RuntimeError, match=f"Collection.prefetch of 'words': {LOST}"):
        COLLECTION.prefetch(kept, stores, INPUTS)


def test_a_table_without_a_store_outlives_a_failure_behind_the_step(monkeypatch):
    tables = COLLECTION.create()
    stores = {"words": tiered.create_store(tables["words"], 1024)}
    others = {name: table for name, table in tables.items() if name != "words"}
    assert others

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(_tiers, "_exchanged", interrupted)
    with pytest.raises(KeyboardInterrupt):
        COLLECTION.step_and_prefetch(lambda own: (own, None), tables, stores, INPUTS, INPUTS)
    for table in others.values():
        assert not table.values.is_deleted()


IDS = np.arange(3, dtype=np.int32)
INPUTS = inputs_of(np.random.default_rng(0))
COLLECTION = collection_of(128)


def same(cache):
    return cache, None


def of_tiers(step=same, coming=IDS, **options):
    return tiered.step_and_prefetch(step, tiers_of(128, 1024), IDS, coming, **options)


def of_tables(step=same, coming=INPUTS, **options):
    tables = COLLECTION.create()
    stores = {"words": tiered.create_store(tables["words"], 1024)}
    return COLLECTION.step_and_prefetch(step, tables, stores, INPUTS, coming, **options)


WRONG = {
    "no table": (
        lambda: tiered.step_and_prefetch(same, made(128), IDS, IDS),
        TypeError,
        r"step_and_prefetch: tiers must be jax_hkv\.tiered\.Tiers, got Table",
    ),
    "other ids": (
        lambda: of_tiers(coming=np.ones(3)),
        TypeError,
        r"step_and_prefetch: coming must hold integers",
    ),
    "a mask of another shape": (
        lambda: of_tiers(coming_valid=np.ones(4, bool)),
        TypeError,
        r"step_and_prefetch: coming_valid must be bool\[3\]",
    ),
    "a mask beside bags": (
        lambda: of_tiers(coming=hkv.Jagged.from_lists([[1]]), coming_valid=np.ones(1, bool)),
        TypeError,
        r"step_and_prefetch: coming_valid must be None where coming are Jagged",
    ),
    "a step inside of jit": (
        lambda: jax.jit(lambda tiers: tiered.step_and_prefetch(same, tiers, IDS, IDS)[0])(
            tiers_of(128, 1024)
        ),
        TypeError,
        r"step_and_prefetch: tiers\.cache must be outside of jit, got what is traced: "
        r"call tiered\.prefetch there",
    ),
    "a step that returns a table alone": (
        lambda: of_tiers(step=lambda cache: cache),
        TypeError,
        r"step_and_prefetch: step must return the cache and a result, got Table: return None",
    ),
    "a last step that returns a table alone": (
        lambda: of_tiers(step=lambda cache: cache, coming=None),
        TypeError,
        r"step_and_prefetch: step must return the cache and a result, got Table",
    ),
    "a step that returns a result alone": (
        lambda: of_tiers(step=lambda cache: (None, None)),
        TypeError,
        r"step_and_prefetch: the table that step returns must be a jax_hkv Table, got NoneType",
    ),
    "a step that returns another table": (
        lambda: of_tiers(step=lambda _: (made(256), None)),
        ValueError,
        r"step_and_prefetch: the table that step returns must be that which it was given, "
        r".*128.* got .*256",
    ),
    "a step that returns what it has used up": (
        lambda: of_tiers(step=lambda cache: (cache, trainer("adam")(cache, IDS))),
        RuntimeError,
        r"step_and_prefetch: the table that step returns was used up",
    ),
    "a placement that is none": (
        lambda: of_tiers(placement="device"),
        TypeError,
        r"step_and_prefetch: placement must be a jax_hkv\.sharding\.Placement",
    ),
    "inputs of other features": (
        lambda: of_tables(coming={"word": INPUTS["word"]}),
        ValueError,
        r"Collection\.step_and_prefetch: coming must be of the features .*missing: .*'user'.*"
        r"partial=True",
    ),
    "a step that leaves tables out": (
        lambda: of_tables(step=lambda tables: ({"words": tables["words"]}, None)),
        ValueError,
        r"Collection\.step_and_prefetch, behind step: tables must be those of create\(\)",
    ),
    "a step that is none": (
        lambda: of_tiers(step=None),
        TypeError,
        r"step_and_prefetch: step must be a function of tables, got NoneType",
    ),
    "a mask of nothing": (
        lambda: of_tiers(coming=None, coming_valid=np.ones(3, bool)),
        TypeError,
        r"step_and_prefetch: coming_valid must be None where coming is, got ndarray",
    ),
    "ids of the last step": (
        lambda: tiered.step_and_prefetch(same, tiers_of(128, 1024), "ids", None),
        TypeError,
        r"step_and_prefetch: keys must be jax_hkv\.Keys or an integer array, got str",
    ),
    "weights in bags": (
        lambda: of_tiers(coming=hkv.Padded(np.ones((3, 2)))),
        TypeError,
        r"step_and_prefetch, coming: ids must hold integers",
    ),
    "a step that moves a table": (
        lambda: of_tiers(step=lambda cache: (jax.device_put(cache, jax.devices()[1]), None)),
        ValueError,
        r"step_and_prefetch: the table that step returns must lie where it lay",
    ),
    "a collection inside of jit": (
        lambda: jax.eval_shape(of_tables),
        TypeError,
        r"Collection\.step_and_prefetch: tables must be outside of jit, .* Collection\.prefetch",
    ),
    "a step of a collection that is none": (
        lambda: of_tables(step=7),
        TypeError,
        r"Collection\.step_and_prefetch: step must be a function",
    ),
    "inputs of the last step": (
        lambda: COLLECTION.step_and_prefetch(same, COLLECTION.create(), {}, 3, None),
        TypeError,
        r"Collection\.step_and_prefetch: inputs must be a dict",
    ),
    "a store of another table, at last": (
        lambda: COLLECTION.step_and_prefetch(
            same, COLLECTION.create(), {"words": made(1024)}, INPUTS, None
        ),
        ValueError,
        r"Collection\.step_and_prefetch of 'words': tiers\.store must have rows",
    ),
    "a step that returns another table of a collection": (
        lambda: of_tables(
            step=lambda tables: (tables | {"frozen": hkv.create(512, 2)}, None), coming=None
        ),
        ValueError,
        r"of 'frozen': the table that step returns must be that which it was given",
    ),
    "a step that returns no result": (
        lambda: of_tables(step=lambda tables: tables),
        TypeError,
        r"Collection\.step_and_prefetch: step must return the tables and a result, got dict",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_step_is_named(name):
    call, kind, message = WRONG[name]
    if name == "a step that moves a table" and len(jax.devices()) < 2:
        pytest.skip("there is one device")
    with pytest.raises(kind, match=message):
        call()


def test_counts_of_two_prefetches_are_those_of_all_keys():
    first = PrefetchCounts(10, 4, 2, 1, 3, 5, 0, 0)  # of the refused ones one has no room again
    both = _both(first, PrefetchCounts(10, 7, 1, 1, 1, 2, 0, 0))
    assert both == PrefetchCounts(10, 4, 3, 2, 1, 7, 0, 0)
    assert both.unique == sum(both[1:5])
