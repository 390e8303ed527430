"""Writes and removals over many devices, and the entries that leave a table there."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from many_devices import (
    ADAM,
    DIM,
    Case,
    Many,
    assert_entries,
    assert_same_bits,
    everywhere,
    on_device,
    seldom,
    zipf_batch,
)
from oracle_sharding import owner_of

import jax_hkv as hkv
from jax_hkv import sharding, testing
from jax_hkv.index import Policy
from jax_hkv.sharding import Exchange

AXES = ("node", "device")
FOUR = Case(shape=(4,))
LEVELS = Case(Exchange(AXES), (2, 2), AXES)
REPLICAS = Case(Exchange("device", replicas=True), (4,), capacity=512)


def of(case, exchange=None, **options):
    """A case with options of the table, and fields of its exchange."""
    exchange = dataclasses.replace(case.exchange, **(exchange or {}))
    more = {name: options.pop(name) for name in ("scored", "mode", "capacity") if name in options}
    return dataclasses.replace(case, exchange=exchange, options=tuple(options.items()), **more)


CASES = {
    "LRU": FOUR,
    "LRU, two choices, pmap": of(FOUR, choices=2, capacity=256, mode="pmap"),
    "LFU, levels": of(LEVELS, policy=Policy.LFU),
    "LFU, scores, levels": of(LEVELS, policy=Policy.LFU, scored=True),
    "EPOCH_LFU, scores": of(FOUR, policy=Policy.EPOCH_LFU, scored=True),
    "CUSTOM, levels": of(LEVELS, policy=Policy.CUSTOM, scored=True),
    "not merged, levels": of(LEVELS, {"deduplicate": False}),
    "overflow": of(FOUR, {"distinct": 0.02}),
    "overflow, CUSTOM, levels": of(LEVELS, {"distinct": 0.02}, policy=Policy.CUSTOM, scored=True),
    "strict, with room": of(FOUR, {"strict": True, "slack": 4.0}),
    "bfloat16": of(FOUR, dtype=jnp.bfloat16),
    "one device": of(Case(shape=(1,)), policy=Policy.LFU),
    "replicas": REPLICAS,
    "replicas, LFU": of(REPLICAS, policy=Policy.LFU),
}
SLOW = {"EPOCH_LFU, scores", "not merged, levels", "replicas, LFU", "LFU, scores, levels"}


def operations(case, module, axis):
    """What is done to a table, of the package or of its sharding, by name."""
    scored = case.table().policy is Policy.CUSTOM or case.scored

    def insert(table, batch, values):
        if module is hkv:
            return hkv.insert_and_evict(
                table, batch.keys, values, valid=batch.valid, scores=batch.scores
            )
        more = {"valid": batch.valid, "scores": batch.scores, "return_evicted": True}
        return sharding.insert_or_assign(table, batch.keys, values, **more, **axis)

    def look_up(table, batch, values):
        more = {"valid": batch.valid, "scores": batch.scores, "return_evicted": True}
        return module.find_or_insert(table, batch.keys, **more, **axis)

    def assign(table, batch, values):
        return module.assign(table, batch.keys, values, valid=batch.valid, **axis)

    def score(table, batch, values):
        more = {"valid": batch.valid, "scores": batch.scores}
        return module.assign(table, batch.keys, values, **more, **axis)

    def erase(table, batch, values):
        return module.erase(table, batch.keys, valid=batch.valid, **axis)

    by_name = {"insert": insert, "assign": assign, "look_up": look_up, "erase": erase}
    return by_name | ({"score": score} if scored else {})


def on_owners(case, tables, act, batch, values):
    """A table of one device for each owner, fed the whole batch with the others' keys masked."""
    replicas = case.exchange.replicas
    owner = owner_of(batch.keys, 1 if replicas else case.devices)
    results = []
    for number, table in enumerate(tables):
        own = batch._replace(valid=batch.valid & (owner == number))
        tables[number], result = act(table, on_device(own), values)
        results.append(result)
    status = sum(np.asarray(each.status) for each in results)  # MISSING is 0
    counts = [sum(int(n) for n in own) for own in zip(*(r.counts for r in results), strict=True)]
    return status, counts, [getattr(each, "evicted", None) for each in results]


@pytest.mark.parametrize("name", seldom(CASES, SLOW))
def test_each_part_is_a_table_fed_its_own_keys(name, rng):
    """Statuses, counts, entries and evicted entries, of all writes in turn."""
    case = CASES[name]
    many, on_one = Many(case), operations(case, hkv, {})
    on_many = operations(case, sharding, {"axis_name": case.exchange})
    replicas = case.exchange.replicas
    tables = [case.table() for _ in range(1 if replicas else case.devices)]

    def step(act, table, batch, values):
        table, result = act(table, batch, values)
        evicted = jax.tree.map(
            lambda leaf: everywhere(case, leaf[None]), getattr(result, "evicted", None)
        )
        status = everywhere(case, result.status)
        return table, (status, result.counts, result.overflow, evicted)

    steps = {name: many.placement.step(partial(step, act)) for name, act in on_many.items()}
    ones = {name: jax.jit(act, donate_argnums=0) for name, act in on_one.items()}
    gone = overflow = 0
    for turn in range(20):
        batch = zipf_batch(rng, (case.devices * 70,), scored=case.scored)
        values = rng.normal(size=(len(batch.keys), DIM)).astype(case.table().dtype)
        act = [*on_many][turn % len(on_many)]
        given = many.placement.put((on_device(batch), values))
        many.table, (status, counts, left_out, evicted) = steps[act](many.table, *given)
        expected = on_owners(case, tables, ones[act], batch, values)
        np.testing.assert_array_equal(status, expected[0])
        assert [int(n) for n in counts] == expected[1], act
        parts = many.parts[:1] if replicas else many.parts
        assert_entries(parts, tables)
        for number, entries in enumerate(expected[2]):
            if entries is None:
                continue
            own = jax.tree.map(lambda leaf, n=number: leaf[n], evicted)
            assert_same_bits(compact(own), compact(entries))
            gone += int(entries.count)
        overflow += int(left_out)
    assert gone > 0
    assert (overflow > 0) == (case.exchange.distinct < 1)
    assert_same_bits([each.index for each in parts], [each.index for each in tables])


def compact(entries):
    count = int(entries.count)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:count], entries._replace(count=None))


def step_of(case, act):
    """A compiled step that writes a row for each key."""
    more = {"axis_name": case.exchange}

    def step(table, keys, values):
        if act == "erase":
            table, result = sharding.erase(table, keys, **more)
        else:
            table, result = getattr(sharding, act)(table, keys, values, **more)
        return table, (everywhere(case, result.status), result.counts, result.overflow)

    return case.placement.step(step)


def given_to(case, keys, rng):
    keys = np.asarray(keys, np.uint64)
    values = rng.normal(size=(len(keys), DIM)).astype(np.float32)
    return case.placement.put((hkv.Keys.from_numpy(keys), values))


WRITES = ("insert_or_assign", "assign", "erase")


@pytest.mark.parametrize("act", WRITES)
def test_a_strict_exchange_without_room_writes_nothing_but_the_clock(act, rng):
    case = of(FOUR, {"strict": True}, capacity=2048)
    keys = rng.integers(0, 2**63, 40_000).astype(np.uint64)
    fitting, owned = keys[:400], keys[owner_of(keys, 4) == 2][:400]
    table, _ = step_of(case, "insert_or_assign")(
        case.placement.create(case.table), *given_to(case, fitting, rng)
    )
    before = [jax.tree.map(np.array, part) for part in case.placement.shards(table)]
    table, (status, counts, overflow) = step_of(case, act)(table, *given_to(case, owned, rng))
    assert int(overflow) > 0 and [int(count) for count in counts] == [0] * 5
    assert (np.asarray(status) == hkv.Status.MISSING).all()
    with pytest.raises(sharding.ExchangeOverflow, match="found no room"):
        sharding.check_overflow(overflow)
    for part, old in zip(case.placement.shards(table), before, strict=True):
        assert part.clock.tolist() == [2, 0]
        assert_same_bits(part.index, dataclasses.replace(old.index, clock=part.clock))
        assert_same_bits((part.values, part.optimizer), (old.values, old.optimizer))


@pytest.mark.parametrize("act", WRITES)
@pytest.mark.parametrize("exchange", [{}, {"distinct": 0.02}], ids=["plain", "a second round"])
def test_a_write_copies_no_part_of_the_table(act, exchange, rng):
    case = of(FOUR, exchange, capacity=2048)
    table = case.placement.create(case.table)
    lowered = step_of(case, act).lower(table, *given_to(case, range(400), rng))
    assert testing.copies_in(lowered.compile().as_text(), case.placement.shards(table)[0]) == []


def test_a_warm_start_ends_where_lookups_find_it(rng):
    """Of equal keys the last row of the last device; new optimizer rows; none misplaced."""
    case = of(FOUR, capacity=2048)
    keys = np.arange(400, dtype=np.uint64) % 150
    given = given_to(case, keys, rng)
    table, (status, counts, _) = step_of(case, "insert_or_assign")(
        case.placement.create(case.table), *given
    )
    assert int(counts.inserted) == 150 == int(np.sum(np.asarray(status) == hkv.Status.INSERTED))

    def read(table, ids):
        table, rows = sharding.find(table, ids, axis_name="device")
        lost = sharding.misplaced(table, axis_name="device")
        return rows.values, rows.found, lost[None]

    rows, found, lost = case.placement.run(read)(table, given[0])
    assert found.all() and not lost.any()
    last = {int(key): row for key, row in zip(keys, np.asarray(given[1]), strict=True)}
    np.testing.assert_array_equal(rows, [last[int(key)] for key in keys])
    exported = sharding.export_entries(case.placement.shards(table))
    assert not exported.optimizer["mu"].any()
    table, (status, counts, _) = step_of(case, "erase")(table, *given_to(case, range(200), rng))
    assert int(counts.hits) == 150 == int(np.sum(np.asarray(status) == hkv.Status.FOUND))
    assert not len(sharding.export_entries(case.placement.shards(table)).keys)


@pytest.mark.parametrize("partial", [True, False])
def test_a_lookup_of_bags_gives_back_what_each_part_has_lost(partial, rng):
    case = of(FOUR, {"partial": partial, "distinct": 0.1})

    def step(table, ids):
        table, result = sharding.find_or_insert_pooled(
            table, ids, axis_name=case.exchange, return_evicted=True
        )
        gone = jax.tree.map(lambda leaf: everywhere(case, leaf[None]), result.evicted)
        return table, (gone, result.counts)

    compiled, table = case.placement.step(step), case.placement.create(case.table)
    expected = []
    for first in range(0, 4000, 800):
        before = keys_of(case, table)
        ids = np.arange(first, first + 800, dtype=np.uint64).reshape(-1, 4)
        table, (gone, counts) = compiled(table, case.placement.put(hkv.Keys.from_numpy(ids)))
        left = [part.keys.to_numpy()[: int(part.count)] for part in parts_of(gone)]
        assert sum(map(len, left)) == int(counts.evicted)
        expected.append(int(counts.evicted))
        after = keys_of(case, table)
        for own, was, now in zip(left, before, after, strict=True):
            assert set(own.tolist()) == was - now
    assert sum(expected) > 0


def keys_of(case, table):
    """The keys of each part."""
    parts = case.placement.shards(table)
    return [set(sharding.export_entries(part).keys.tolist()) for part in parts]


def parts_of(entries):
    return [jax.tree.map(lambda leaf, n=n: leaf[n], entries) for n in range(len(entries.count))]


ROWS = jnp.ones((3, DIM))
IDS = np.arange(3, dtype=np.int32)
WRONG = {
    "no axis": (
        lambda table: sharding.erase(table, IDS, axis_name=None),
        TypeError,
        r"sharding\.erase: axis_name must be the name of a mesh axis.*use jax_hkv\.erase",
    ),
    "rows of another shape": (
        lambda table: sharding.insert_or_assign(table, IDS, ROWS[:2], axis_name="device"),
        ValueError,
        r"sharding\.insert_or_assign: values must have shape \[3, 4\]",
    ),
    "rows of another type": (
        lambda table: sharding.assign(table, IDS, ROWS.astype("bfloat16"), axis_name="device"),
        TypeError,
        r"sharding\.assign: values must be float32 like the table, got bfloat16",
    ),
    "nothing to write": (
        lambda table: sharding.assign(table, IDS, axis_name="device"),
        ValueError,
        r"sharding\.assign: values or scores must be given, got neither",
    ),
    "scores that the policy makes": (
        lambda table: sharding.assign(table, IDS, scores=IDS, axis_name="device"),
        ValueError,
        r"sharding\.assign: scores are not accepted under Policy\.LRU",
    ),
    "a mask of another shape": (
        lambda table: sharding.erase(table, IDS, valid=jnp.ones(2, bool), axis_name="device"),
        TypeError,
        r"sharding\.erase: valid must be bool\[3\] like the keys",
    ),
    "no devices": (
        lambda table: sharding.erase(table, IDS, axis_name="device"),
        NameError,
        "no mesh axis .* is bound here",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_write_is_named(name):
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        call(ADAM.init(hkv.create(128, DIM)))
