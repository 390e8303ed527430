"""Writes and removals over many devices, and the entries that leave a table there."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from combinations import seldom
from jaxlib.version import __version__ as JAXLIB_VERSION
from many_devices import (
    ADAM,
    DIM,
    Batch,
    Case,
    Many,
    assert_entries,
    assert_same_bits,
    entries_of,
    everywhere,
    on_device,
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
    "two replicas, overflow": of(LEVELS, {"replicas": 2, "distinct": 0.02}, capacity=256),
}
SLOW = {
    *("EPOCH_LFU, scores", "not merged, levels", "replicas, LFU", "LFU, scores, levels"),
    *("LFU, levels", "overflow", "bfloat16", "strict, with room"),
    *("LRU, two choices, pmap", "CUSTOM, levels", "LRU", "overflow, CUSTOM, levels"),
}


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

    def export(table, batch, values):
        """The entries of a part, where evicted ones stand in other results."""
        if module is hkv:
            table, entries = hkv.export_keys(table, batch.keys, valid=batch.valid)
            found = hkv.contains(table, batch.keys, valid=batch.valid)[1]
            overflow = jnp.int32(0)
        else:
            table, (entries, found, overflow) = sharding.export_keys(
                table, batch.keys, valid=batch.valid, **axis
            )
        none = hkv.Counts(*[jnp.int32(0)] * 6)
        return table, sharding.ShardedWrite(found.astype(jnp.int32), none, overflow, entries)

    def contains(table, batch, values):
        table, found = module.contains(table, batch.keys, valid=batch.valid, **axis)
        return table, read(found)

    def touch(table, batch, values):
        table, found = module.find(table, batch.keys, valid=batch.valid, touch=True, **axis)
        return table, read(found)

    def read(result):
        found, overflow = getattr(result, "found", result), getattr(result, "overflow", 0)
        none = hkv.Counts(*[jnp.int32(0)] * 6)
        return sharding.ShardedWrite(found.astype(jnp.int32), none, jnp.int32(overflow))

    def accumulate(table, batch, values):
        exists = values[:, 0] > -0.5  # mostly: half of the keys are there
        more = {"valid": batch.valid, "scores": batch.scores}
        return module.accum_or_assign(table, batch.keys, values, exists, **more, **axis)

    def give(table, batch, values):
        """Entries with the scores of their place, and optimizer rows."""
        numbers = jax.lax.iota(jnp.uint32, len(values)) % 7
        scores = hkv.Keys(jnp.stack([numbers, jnp.zeros_like(numbers)], axis=1))
        given = {
            name: (leaf * values[:, :1]).astype(leaf.dtype) for name, leaf in optimizer.items()
        }
        entries = hkv.Entries(batch.keys, scores, values, given, jnp.int32(len(values)))
        return module.import_batch(table, entries, valid=batch.valid, return_evicted=True, **axis)

    optimizer = jax.tree.map(lambda row: jnp.ones_like(row), case.table().optimizer.fresh)
    by_name = {
        "insert": insert,
        "assign": assign,
        "look_up": look_up,
        "give": give,
        "export": export,
        "contains": contains,
        "accumulate": accumulate,
        "erase": erase,
    }
    own = {"score": score} if scored else {}
    return by_name | own | ({} if case.table().policy is Policy.CUSTOM else {"touch": touch})


def on_owners(case, tables, act, batch, values):
    """A table of one device for each owner, fed the whole batch with the others' keys masked."""
    owner = owner_of(batch.keys, case.parts)
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
    tables = [case.table() for _ in range(case.parts)]

    def step(act, table, batch, values):
        table, result = act(table, batch, values)
        status = everywhere(case, result.status)
        evicted = getattr(result, "evicted", None)
        return table, (status, result.counts, result.overflow, evicted)

    steps = {name: many.placement.step(partial(step, act)) for name, act in on_many.items()}
    ones = {name: jax.jit(act, donate_argnums=0) for name, act in on_one.items()}
    gone, overflow = 0, dict.fromkeys(on_many, 0)
    for turn in range(3 * len(on_many)):
        batch = zipf_batch(rng, (case.devices * 70,), scored=case.scored)
        values = rng.normal(size=(len(batch.keys), DIM)).astype(case.table().dtype)
        act = [*on_many][turn % len(on_many)]
        given = many.placement.put((on_device(batch), values))
        many.table, (status, counts, left_out, evicted) = steps[act](many.table, *given)
        expected = on_owners(case, tables, ones[act], batch, values)
        np.testing.assert_array_equal(status, expected[0])
        assert [int(n) for n in counts] == expected[1], act
        parts = many.parts[: case.parts]
        assert_entries(parts, tables)
        for number, entries in enumerate(expected[2]):
            if entries is None:
                continue
            own = parts_of(evicted, case.devices)[number]
            assert_same_bits(compact(own), compact(entries))
            assert not any(leaf.any() for leaf in jax.tree.leaves(beyond(own)))
            gone += int(entries.count)
        overflow[act] += int(left_out)
    assert gone > 0
    del overflow["accumulate"]  # whose keys are not merged, so that `distinct` does not count
    assert {own > 0 for own in overflow.values()} == {case.exchange.distinct < 1}
    assert_same_bits([each.index for each in parts], [each.index for each in tables])


@pytest.mark.parametrize("case", [FOUR, LEVELS], ids=["one hop", "levels"])
def test_deltas_for_one_owner_are_added_in_a_second_round(case, rng):
    """As one sum for each key, in the order of the devices."""
    case = of(case, capacity=1024)
    keys = rng.integers(0, 2**63, 4000).astype(np.uint64)
    keys = rng.choice(keys[owner_of(keys, 4) == 2][:60], 400)
    values = rng.normal(size=(400, DIM)).astype(np.float32)
    accumulate = operations(case, sharding, {"axis_name": case.exchange})["accumulate"]

    def step(table, batch, values):
        table, result = accumulate(table, batch, values)
        return table, (everywhere(case, result.status), result.counts, result.overflow)

    table, many = case.table(), case.placement.create(case.table)
    compiled = case.placement.step(step)
    on_one = jax.jit(operations(case, hkv, {})["accumulate"])
    for exists in (False, True):
        given = -np.abs(values) - 1 if not exists else np.abs(values)
        batch = Batch(keys, None)
        put = case.placement.put((on_device(batch), given))
        many, (status, counts, overflow) = compiled(many, *put)
        table, expected = on_one(table, on_device(batch), given)
        assert int(overflow) > 0
        np.testing.assert_array_equal(status, expected.status)
        assert [int(n) for n in counts] == [int(n) for n in expected.counts]
        assert int(counts.hits if exists else counts.inserted) == len(np.unique(keys))
        parts = case.placement.shards(many)
        assert_same_bits(parts[2].index, table.index)
        assert_entries(parts, [table])


def compact(entries):
    count = int(entries.count)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:count], entries._replace(count=None))


def beyond(entries):
    count = int(entries.count)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[count:], entries._replace(count=None))


def parts_of(entries, devices):
    """Of Entries in a report those of each device."""
    assert entries.count.shape == (devices,)
    stacked = jax.tree.map(np.asarray, entries)
    if entries.keys.ndim == 1:  # one after the other: not of pmap
        stacked = jax.tree.map(lambda leaf: leaf.reshape(devices, -1, *leaf.shape[1:]), stacked)
        stacked = stacked._replace(count=stacked.count[:, 0])
    return [jax.tree.map(lambda leaf, n=n: leaf[n], stacked) for n in range(devices)]


def step_of(case, act):
    """A compiled step that writes a row for each key."""
    more = {"axis_name": case.exchange}

    def step(table, keys, values):
        rows = () if act == "erase" else (values,)
        if act == "accum_or_assign":
            rows += (jnp.zeros(keys.shape, bool),)
        table, result = getattr(sharding, act)(table, keys, *rows, **more)
        return table, (everywhere(case, result.status), result.counts, result.overflow)

    return case.placement.step(step)


def given_to(case, keys, rng):
    keys = np.asarray(keys, np.uint64)
    values = rng.normal(size=(len(keys), DIM)).astype(np.float32)
    return case.placement.put((hkv.Keys.from_numpy(keys), values))


WRITES = ("insert_or_assign", "accum_or_assign", "assign", "erase")


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
    assert int(overflow) > 0 and [int(count) for count in counts] == [0] * 6
    assert (np.asarray(status) == hkv.Status.MISSING).all()
    with pytest.raises(sharding.ExchangeOverflow, match="found no room"):
        sharding.check_overflow(overflow)
    for part, old in zip(case.placement.shards(table), before, strict=True):
        assert part.clock.tolist() == [2, 0]
        assert_same_bits(part.index, dataclasses.replace(old.index, clock=part.clock))
        assert_same_bits((part.values, part.optimizer), (old.values, old.optimizer))


def test_a_strict_exchange_without_room_exports_nothing(rng):
    case = of(FOUR, {"strict": True}, capacity=2048)
    keys = rng.integers(0, 2**63, 40_000).astype(np.uint64)
    owned = keys[owner_of(keys, 4) == 2][:400]
    table, _ = step_of(case, "insert_or_assign")(
        case.placement.create(case.table), *given_to(case, keys[:400], rng)
    )

    def export(table, keys):
        table, (entries, found, overflow) = sharding.export_keys(
            table, keys, axis_name=case.exchange
        )
        return table, (entries, everywhere(case, found), overflow)

    step = case.placement.step(export)
    for given in (keys[:400], owned):
        put = case.placement.put(hkv.Keys.from_numpy(given))
        table, (entries, found, overflow) = step(table, put)
        is_full = given is owned
        assert np.asarray(found).all() != is_full and np.asarray(found).any() != is_full
        assert int(entries.count.sum()) == (0 if is_full else 400)
        assert (int(overflow) > 0) == is_full


ACTS = ["insert", "look_up", "assign", "accumulate", "give", "erase", "touch", "contains"]


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("exchange", [{}, {"distinct": 0.02}], ids=["plain", "a second round"])
def test_a_write_copies_no_part_of_the_table(act, exchange, rng):
    """With the entries that are evicted, where there are some."""
    case = of(FOUR, exchange, capacity=2048)
    table = case.placement.create(case.table)
    call = operations(case, sharding, {"axis_name": case.exchange})[act]

    def step(table, batch, values):
        table, result = call(table, batch, values)
        return table, (result.counts, getattr(result, "evicted", None))

    batch = zipf_batch(rng, (400,))
    given = case.placement.put((on_device(batch), np.ones((400, DIM), np.float32)))
    hlo = case.placement.step(step).lower(table, *given).compile().as_text()
    assert testing.copies_in(hlo, case.placement.shards(table)[0]) == []


EXCHANGES = {
    "plain": {},
    "not merged": {"deduplicate": False},
    "strict": {"strict": True},
    "replicas": {"replicas": True},
}


@pytest.mark.skipif(JAXLIB_VERSION.startswith("0.11.2"), reason="it ends the process there")
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("act", [*WRITES, "find_or_insert"])
def test_an_empty_batch_ticks_the_clock(act, exchange):
    """27."""
    case = of(FOUR, EXCHANGES[exchange])

    def step(table, keys, values):
        rows = (values,) if act.endswith("assign") else ()
        if act == "accum_or_assign":
            rows += (jnp.zeros(keys.shape, bool),)
        table, result = getattr(sharding, act)(table, keys, *rows, axis_name=case.exchange)
        return table, (result.counts, result.status)

    keys, rows = hkv.Keys.from_numpy(np.zeros(0, np.int64)), np.zeros((0, DIM), np.float32)
    given = case.placement.put((keys, rows))
    table, (counts, _) = case.placement.step(step)(case.placement.create(case.table), *given)
    assert [int(count) for count in counts] == [0] * 6
    assert [part.clock.tolist() for part in case.placement.shards(table)] == [[1, 0]] * 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("exchange", ["plain", "replicas"])
def test_rows_of_all_bits_come_to_their_owners(exchange, dtype, rng):
    """NaNs and subnormal numbers too."""
    case = of(FOUR, EXCHANGES[exchange], capacity=2048, dtype=dtype)
    kind = jnp.dtype(dtype)
    bits = rng.integers(0, 256, (400, DIM * kind.itemsize)).astype(np.uint8)
    bits[::3, kind.itemsize - 2 :: kind.itemsize] |= 0xF0  # exponents of NaNs
    bits[::3, kind.itemsize - 1 :: kind.itemsize] |= 0x7F
    values = bits.view(kind)
    keys = np.arange(400, dtype=np.uint64)
    table, _ = step_of(case, "insert_or_assign")(
        case.placement.create(case.table),
        *case.placement.put((hkv.Keys.from_numpy(keys), values)),
    )
    parts = case.placement.shards(table)
    exported = sharding.export_entries(parts[:1] if exchange == "replicas" else parts)
    assert len(exported.keys) == 400 and np.isnan(values.astype(np.float32)).any()
    assert_same_bits(exported.values, values[exported.keys.astype(int)])


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_what_parts_have_lost_goes_back_into_them(mode, rng):
    """Entries of a report are the batch of a later step."""
    case = of(FOUR, mode=mode)

    def step(table, ids):
        table, result = sharding.find_or_insert(table, ids, axis_name="device", return_evicted=True)
        return table, (result.evicted, result.counts.evicted)

    def back(table, entries):
        table, result = hkv.import_batch(table, entries, return_evicted=True)
        return table, (result.evicted, jax.lax.psum(result.counts.evicted, "device"))

    compiled, give_back = case.placement.step(step), case.placement.step(back)
    table = case.placement.create(case.table)
    for first in range(0, 2400, 400):
        ids = np.arange(first, first + 400, dtype=np.int32)
        table, (gone, evicted) = compiled(table, case.placement.put(ids))
    before = sharding.export_entries(case.placement.shards(table))
    assert 0 < int(evicted) == int(np.sum(gone.count))
    highest = hkv.Keys(jnp.full_like(gone.scores.words, 0xFFFFFFFF))
    back_in = gone._replace(scores=jax.device_put(highest, gone.keys.words.sharding))
    table, (others, again) = give_back(table, back_in)
    assert int(again) == int(evicted) == int(np.sum(others.count))
    after = sharding.export_entries(case.placement.shards(table))
    kept = [compact(part).keys.to_numpy() for part in parts_of(gone, 4)]
    lost = [compact(part).keys.to_numpy() for part in parts_of(others, 4)]
    expected = set(before.keys.tolist()) - set(np.concatenate(lost).tolist())
    assert set(after.keys.tolist()) == expected | set(np.concatenate(kept).tolist())
    table, _ = give_back(table, gone)
    final = sharding.export_entries(case.placement.shards(table))
    rows = dict(zip(final.keys.tolist(), final.values.tolist(), strict=True))
    for part in parts_of(gone, 4):
        own = compact(part)
        for key, row in zip(own.keys.to_numpy().tolist(), own.values.tolist(), strict=True):
            assert rows[key] == row


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
    case = of(FOUR, {"partial": partial, "distinct": 0.1, "slack": 0.05})

    def step(table, ids):
        table, result = sharding.find_or_insert_pooled(
            table, ids, axis_name=case.exchange, return_evicted=True
        )
        return table, (result.evicted, result.counts, result.overflow)

    compiled, table = case.placement.step(step), case.placement.create(case.table)
    expected, overflows = [], []
    for first in range(0, 4000, 800):
        before = keys_of(case, table)
        ids = np.arange(first, first + 800, dtype=np.uint64).reshape(-1, 4)
        table, (gone, counts, overflow) = compiled(
            table, case.placement.put(hkv.Keys.from_numpy(ids))
        )
        overflows.append(int(overflow))
        left = [compact(part).keys.to_numpy() for part in parts_of(gone, case.devices)]
        assert sum(map(len, left)) == int(counts.evicted)
        expected.append(int(counts.evicted))
        after = keys_of(case, table)
        for own, was, now in zip(left, before, after, strict=True):
            assert set(own.tolist()) == was - now
    assert sum(expected) > 0 and all(overflows)


def keys_of(case, table):
    """The keys of each part."""
    parts = case.placement.shards(table)
    return [set(sharding.export_entries(part).keys.tolist()) for part in parts]


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_entries_from_the_host_go_to_their_owners(mode):
    """`put` gives each device its share of the count; padding is no key 0."""
    case = of(FOUR, mode=mode, capacity=512)
    one, _ = hkv.find_or_insert(case.table(512), np.arange(5, 50, dtype=np.int32))
    entries = jax.device_get(hkv.export_batch(one, 0, 512))

    def give(table, entries):
        table, result = sharding.import_batch(table, entries, axis_name="device")
        return table, result.counts

    step, table = case.placement.step(give), case.placement.create(case.table)
    table, counts = step(table, case.placement.put(entries))
    assert int(counts.inserted) == int(counts.unique) == 45
    parts, alone = map(entries_of, (case.placement.shards(table), one))
    for field in ("keys", "scores", "values", "optimizer"):
        assert_same_bits(getattr(parts, field), getattr(alone, field))
    unput = case.placement.put(entries)._replace(count=entries.count)
    with pytest.raises(ValueError, match=r"a count for each device, got one .*placement\.put"):
        step(table, unput)


def displaced(table, ids):
    """Of a step: ids are looked up, and what has to go is in the report."""
    table, found = sharding.find_or_insert(table, ids, axis_name="device", return_evicted=True)
    return table, found.evicted


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_what_parts_have_lost_goes_into_a_table_of_one_device(mode, rng):
    """A store on the host, say: entries of a report have a count for each device."""
    case = of(FOUR, mode=mode)
    step, table = case.placement.step(displaced), case.placement.create(lambda: case.table(128))
    store, lost = case.table(4096), []
    for _ in range(6):
        ids = rng.integers(0, 3000, 400).astype(np.int32)
        table, entries = step(table, case.placement.put(ids))
        entries = jax.device_get(entries)
        store, result = hkv.import_batch(store, entries)
        keys = entries.keys.to_numpy().reshape(4, -1)  # of pmap they are stacked
        lost.append(keys[np.arange(keys.shape[1]) < entries.count[:, None]])
        assert int(result.counts.unique) == len(lost[-1]) == int(entries.count.sum())
    assert set(entries_of(store).keys) == set(np.concatenate(lost))
    assert len(np.concatenate(lost)) > 500


@pytest.mark.parametrize(
    "name, choices",
    seldom([("LRU", 1), ("overflow", 2), ("LFU, levels", 1)], {("LRU", 1), ("LFU, levels", 1)}),
)
def test_small_parts_before_large_ones_train_as_the_large_ones(name, choices, rng):
    """Over devices: what an owner's cache displaces is in the owner's store, and comes back."""
    case = dataclasses.replace(CASES[name], options=(*CASES[name].options, ("choices", choices)))
    axis = {"axis_name": case.exchange}

    def second_tier(tiers, ids):
        cache, store = tiers
        cache, found = sharding.find_or_insert(cache, ids, return_evicted=True, **axis)
        is_new = hkv.is_new(found.status)
        store, back = sharding.export_keys(store, ids, valid=is_new, **axis)
        store, kept = hkv.import_batch(store, found.evicted)
        cache, _ = hkv.import_batch(cache, back.entries)
        lost = jax.lax.psum(kept.counts.refused + kept.counts.evicted, case.exchange.axes)
        return train((cache, store), ids) + (lost + found.counts.refused,)

    def train(tiers, ids):
        table, found = sharding.find_or_insert(tiers[0], ids, **axis)
        return (sharding.update(ADAM, table, found, 0.5 * found.values), *tiers[1:]), found.counts

    def tiered(tiers, ids):
        tiers, counts, lost = second_tier(tiers, ids)
        return tiers, (counts, lost)

    placement = case.placement
    near, far = (placement.create(lambda size=size: case.table(size)) for size in (512, 8192))
    step, plain = placement.step(tiered), placement.step(train)
    tiers, one = (near, far), (placement.create(lambda: case.table(8192)),)
    for _ in range(12):
        ids = placement.put(rng.integers(0, 6000, 4 * 96).astype(np.int32))
        tiers, (counts, lost) = step(tiers, ids)
        one, _ = plain(one, ids)
        assert int(counts.hits) == int(counts.unique) and not int(lost)
    held, behind, whole = (entries_of(placement.shards(table)) for table in (*tiers, one[0]))
    assert len(behind.keys) > 1000
    order, keys = np.argsort(whole.keys), np.sort(whole.keys)
    newest = {int(key): (part, n) for part in (behind, held) for n, key in enumerate(part.keys)}
    assert sorted(newest) == keys.tolist()
    for number, key in zip(order, keys, strict=True):
        part, place = newest[int(key)]
        assert_same_bits(part.values[place], whole.values[number])
        for leaf, own in whole.optimizer.items():
            assert_same_bits(part.optimizer[leaf][place], own[number])


def test_a_report_has_one_count_for_each_device():
    """Whatever the form of the counts in the step; entries that were gathered stay as they are."""
    case = of(FOUR)

    def step(table, ids):
        table, entries = hkv.export_keys(table, ids)
        gathered = jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, "device"), entries)
        own = [entries, entries._replace(count=entries.count[None]), entries._replace(count=3)]
        return table, (own, {"all": gathered, "none": None, "number": jnp.int32(7)})

    table, (own, rest) = case.placement.step(step)(
        case.placement.create(case.table), case.placement.put(np.arange(8, dtype=np.int32))
    )
    assert [each.count.shape for each in own] == [(4,)] * 3
    assert own[2].count.tolist() == [3] * 4 and own[0].keys.shape == (8,)
    assert rest["all"].keys.shape == (4, 2) and rest["all"].count.shape == (4,)
    assert rest["none"] is None and int(rest["number"]) == 7


def test_entries_among_the_auxiliary_outputs_of_a_layer_step_are_stacked_once():
    """As all auxiliary outputs are, by device."""
    case = of(FOUR, capacity=512)

    def make():
        model = hkv.linen.Embed(2048, DIM, optimizer=ADAM, axis_name="device")
        ids = np.zeros(2, np.int32)
        return hkv.linen.TrainState.create(model, jax.random.key(0), ids, tx=optax.sgd(0.1))

    def loss(apply, ids):
        rows = apply(ids, train=True)
        zeros = hkv.Keys(jnp.zeros((2, 2), jnp.uint32))
        return rows.mean(), hkv.Entries(zeros, zeros, rows, {}, jnp.int32(2))

    step = hkv.linen.train_step(loss, has_aux=True, placement=case.placement)
    batch = case.placement.put(np.arange(8, dtype=np.int32))
    _, info = step(case.placement.create(make), batch)
    assert info.aux.values.shape == (4, 2, DIM) and info.aux.count.tolist() == [2] * 4


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
    "no belief": (
        lambda table: sharding.accum_or_assign(table, IDS, ROWS, None, axis_name="device"),
        TypeError,
        r"sharding\.accum_or_assign: exists must be bool\[3\] like the keys, got None: give",
    ),
    "a belief of another type": (
        lambda table: sharding.accum_or_assign(table, IDS, ROWS, IDS, axis_name="device"),
        TypeError,
        r"sharding\.accum_or_assign: exists must be bool\[3\] like the keys, got int32\[3\]",
    ),
    "a belief in the form of another device's": (
        lambda table: sharding.accum_or_assign(
            table, IDS, ROWS, sharding.ShardedFound(IDS > 0, jnp.int32(0)), axis_name="device"
        ),
        TypeError,
        r"sharding\.accum_or_assign: exists must be bool\[3\] like the keys, got ShardedFound",
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
