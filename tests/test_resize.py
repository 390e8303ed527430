"""Another capacity: behaviour 33, and what it means to what comes before and after."""

from __future__ import annotations

import dataclasses
import functools
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from combinations import daily, each
from flax import nnx
from oracle import POLICIES, as_bits

import jax_hkv as hkv
from jax_hkv import sharding, whole_table
from jax_hkv.index import LANES, MAX_SLOTS

DIM = 4
ADAM = hkv.optim.adam(0.05)
BIG = 40_000  # slots of more than two chunks


def scores_for(policy, rng, size):
    return rng.integers(0, 2**64, size, np.uint64) if policy == "CUSTOM" else None


def fill(both, rng, policy, keys, batches):
    for _ in range(batches):
        ids = rng.integers(0, 2**64, keys, np.uint64)
        both.find_or_insert(ids, scores=scores_for(policy, rng, keys))
        both.advance_epoch()


def contents(table):
    """Of every key: score, row and optimizer rows, as bits."""
    exported = sharding.export_entries(table)
    leaves = [exported.values, *(exported.optimizer[name] for name in sorted(exported.optimizer))]
    rows = zip(exported.keys.tolist(), exported.scores.tolist(), *leaves, strict=True)
    return {key: (score, *(row.tobytes() for row in own)) for key, score, *own in rows}


@pytest.mark.parametrize("policy, choices", daily(each, POLICIES, [1, 2]))
def test_a_resized_table_is_what_the_oracle_says(rng, twin, policy, choices):
    """Wider, as wide and narrower, with entries evicted and refused; and it goes on as a table."""
    both = twin(512, DIM, policy=policy, choices=choices, check=False)
    fill(both, rng, policy, 150, 3)
    lost = 0
    for capacity in (1000, 640, 600, 128):
        counts = both.resize(capacity)
        both.assert_equal()
        assert both.table.capacity == -(-capacity // 128) * 128
        assert counts.inserted - counts.evicted == both.oracle.size
        assert counts.unique == counts.inserted + counts.refused and counts.hits == 0
        lost += counts.refused + counts.evicted
    assert lost > 0
    fill(both, rng, policy, 150, 1)
    both.assert_equal()


@pytest.mark.parametrize("choices", [1, 2])
def test_a_table_of_several_chunks_is_resized_by_the_same_rule(rng, twin, choices):
    both = twin(BIG, 1, policy="CUSTOM", choices=choices, check=False)
    fill(both, rng, "CUSTOM", BIG // 2, 2)
    assert both.resize(BIG // 3).evicted > 0
    both.assert_equal()
    kept = both.oracle.size
    assert both.resize(2 * BIG).inserted == kept == both.oracle.size
    both.assert_equal()


@pytest.mark.parametrize("choices, dtype", each([1, 2], [jnp.float32, jnp.bfloat16]))
def test_doubling_keeps_every_entry_with_its_score_row_and_optimizer_rows(rng, choices, dtype):
    """Behaviour 33. The table is full; with one candidate each bucket becomes two."""
    table = ADAM.init(hkv.create(1024, DIM, choices=choices, dtype=dtype))
    for _ in range(20):
        keys = hkv.Keys.from_numpy(rng.integers(0, 2**63, 200))
        table, result = hkv.find_or_insert(table, keys)
        table = ADAM.update(table, result, rng.normal(size=(200, DIM)).astype(np.float32))
    before = contents(table)
    assert len(before) > 1000
    for factor in (2, 3):
        larger, counts = hkv.resize(table, factor * 1024)
        assert [int(count) for count in counts] == [len(before), 0, len(before), 0, 0, 0]
        assert int(hkv.misplaced(larger)) == 0
        assert contents(larger) == before
        assert (larger.clock == table.clock).all() and larger.epoch == table.epoch
        shared = larger.optimizer.shared["count"], table.optimizer.shared["count"]
        assert shared[0] == shared[1] > 0
    assert contents(hkv.resize(larger, 1024)[0]).keys() <= before.keys()
    assert contents(table) == before


def test_a_table_starts_small_and_grows_to_its_maximum_where_it_evicts(rng):
    """Behaviour 33. Nothing is evicted before; each program is compiled for its shapes once."""
    most, traces = 4096, []

    @functools.partial(jax.jit, donate_argnums=0)
    def insert(table, keys):
        traces.append(table.capacity)
        return hkv.find_or_insert(table, keys)

    table, ids = hkv.create(128, DIM), rng.permutation(6000).astype(np.int32)
    for start in range(0, len(ids), 50):
        table, result = insert(table, ids[start : start + 50])
        if table.capacity < most:
            assert int(result.counts.evicted) == int(result.counts.refused) == 0
            assert int(hkv.size(table)) == start + 50
        while table.capacity < most and hkv.load_factor(table) > 0.4:
            table, counts = hkv.resize(table, 2 * table.capacity)
            assert int(counts.inserted) == start + 50
    assert traces == [128, 256, 512, 1024, 2048, 4096]
    assert hkv.load_factor(table) > 0.95 and int(result.counts.evicted) > 0
    assert np.asarray(hkv.contains(table, ids[-50:])[1]).all()


def test_a_smaller_table_keeps_the_highest_scores_of_each_bucket(rng, platform):
    """With one candidate, and half of the buckets, two become one."""
    table = hkv.create(1024, 1, policy=hkv.Policy.CUSTOM)
    keys = rng.integers(0, 2**64, 3000, np.uint64)
    scores = rng.permutation(3000).astype(np.uint64)
    table, _ = hkv.find_or_insert(
        table, hkv.Keys.from_numpy(keys), scores=hkv.Keys.from_numpy(scores)
    )
    before = np.sort(hkv.Keys(table.scores).to_numpy().reshape(-1, 2 * 128), axis=1)
    smaller, counts = hkv.resize(table, 512)
    after = np.sort(hkv.Keys(smaller.scores).to_numpy().reshape(-1, 128), axis=1)
    assert (after == before[:, 128:]).all()
    assert int(counts.refused) == int(hkv.size(table)) - 512 and int(counts.evicted) == 0


@pytest.mark.parametrize("policy", ["LRU", "LFU"])
def test_two_candidates_lose_nothing_where_there_is_room(rng, policy):
    """Of a full table into a slightly larger one, and of a sparse one into a nearly full one."""

    def filled(capacity, entries):
        insert = jax.jit(lambda table, keys: hkv.find_or_insert(table, keys)[0], donate_argnums=0)
        table = hkv.create(capacity, 1, choices=2, policy=hkv.Policy[policy])
        for _ in range(16):
            table = insert(table, hkv.Keys.from_numpy(rng.integers(0, 2**63, entries // 16)))
        return table

    for table, capacity in [(filled(16_384, 20_000), 20_480), (filled(65_536, 14_700), 16_384)]:
        entries = int(hkv.size(table))
        resized, counts = hkv.resize(table, capacity)
        assert [int(count) for count in counts] == [entries, 0, entries, 0, 0, 0]
        again, counts = sharding.import_entries(
            None,
            hkv.create(capacity, 1, choices=2, policy=table.policy),
            sharding.export_entries(table),
        )
        assert int(counts.inserted) == entries and int(counts.evicted + counts.refused) == 0
        assert 0.75 < hkv.load_factor(resized) < 0.95
        assert contents(resized) == contents(again) == contents(table)


def test_sightings_and_skipped_updates_stay(rng, platform):
    """A key that was seen once is let in at its second sighting, whatever happened between."""
    rule = hkv.admission.frequency(2, width=1024)
    table = hkv.optim.adagrad(0.1).init(hkv.create(128, DIM, admission=rule))
    table, result = hkv.find_or_insert(table, np.array([7, 7, 8], np.int32))
    assert result.status.tolist() == [
        hkv.Status.INSERTED,
        hkv.Status.FOUND,
        hkv.Status.NOT_ADMITTED,
    ]
    optimizer = dataclasses.replace(table.optimizer, skipped=jnp.full(1, 5, jnp.uint32))
    table, _ = hkv.resize(dataclasses.replace(table, optimizer=optimizer), 512)
    table, result = hkv.find_or_insert(table, np.array([8, 9], np.int32))
    assert result.status.tolist() == [hkv.Status.INSERTED, hkv.Status.NOT_ADMITTED]
    assert table.optimizer.skipped.tolist() == [5]
    rows = [np.asarray(leaf) for leaf in table.optimizer.rows.values()]
    assert all((leaf == leaf[0, 0]).all() for leaf in rows), "empty slots have fresh rows"


def test_a_result_of_the_old_table_trains_no_other_keys_row(rng, platform):
    table = ADAM.init(hkv.create(256, DIM))
    ids = np.arange(200, dtype=np.int32)
    table, result = hkv.find_or_insert(table, ids)
    larger, _ = hkv.resize(table, 1024)
    slots = np.asarray(hkv.find(larger, ids)[1].slots)
    stays = slots == np.asarray(result.slots)
    assert stays.any() and not stays.all()
    before = np.asarray(hkv.find(larger, ids)[1].values)
    trained = ADAM.update(larger, result, jnp.ones((200, DIM), jnp.float32))
    assert trained.optimizer.skipped.tolist() == [np.count_nonzero(~stays)]
    after = np.asarray(hkv.find(trained, ids)[1].values)
    assert (as_bits(after[~stays]) == as_bits(before[~stays])).all()
    assert (after[stays] != before[stays]).all()


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("choices", [1, 2])
def test_resizing_inside_jit_gives_the_same_bits_and_copies_no_table(rng, platform, choices):
    table = ADAM.init(hkv.create(30_000, DIM, choices=choices))
    table, _ = hkv.find_or_insert(table, hkv.Keys.from_numpy(rng.integers(0, 2**63, 20_000)))
    eager = hkv.resize(table, 60_000)
    resize = jax.jit(lambda table: hkv.resize(table, 60_000))
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(resize(table)), strict=True):
        assert (as_bits(np.asarray(a)) == as_bits(np.asarray(b))).all()
    loop, _, _ = resize.lower(table).compile().as_text().partition("ENTRY")
    assert "jax_hkv.upsert" in loop
    assert hkv.testing.copies_in(loop, eager[0]) == [], "none in each turn"
    hkv.testing.assert_no_table_copies(lambda table: hkv.resize(table, 60_000), table)


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_a_table_over_devices_is_resized_part_by_part(rng, mode):
    """Every device's keys stay its own, and lookups of the larger table find them all."""
    mesh = jax.make_mesh((4,), ("device",), devices=jax.devices()[:4])
    placement = sharding.Placement(mesh, mode=mode)
    table = placement.create(lambda: ADAM.init(hkv.create(512, DIM)))
    keys = placement.put(hkv.Keys.from_numpy(rng.integers(0, 2**63, 800)))
    insert = placement.step(
        lambda table, keys: sharding.find_or_insert(table, keys, axis_name="device")
    )
    table, result = insert(table, keys)
    rows, before = np.asarray(result.values), contents(placement.shards(table))

    def widen(table):
        table, counts = hkv.resize(table, 1024)
        return table, jax.lax.psum(counts.inserted, "device")

    table, inserted = placement.step(widen, donate=False)(table)
    assert int(inserted) == len(before) == 800
    assert [part.capacity for part in placement.shards(table)] == [1024] * 4
    assert contents(placement.shards(table)) == before
    table, result = insert(table, keys)
    assert int(result.counts.hits) == 800
    assert (as_bits(np.asarray(result.values)) == as_bits(rows)).all()


class LinenModel(nn.Module):
    capacity: int

    @nn.compact
    def __call__(self, ids, train=False):
        rows = hkv.linen.Embed(self.capacity, DIM, optimizer=ADAM)(ids, train=train)
        return nn.Dense(1)(rows.mean(axis=1))[:, 0]


class NnxModel(nnx.Module):
    def __init__(self, capacity):
        self.embed = hkv.nnx.Embed(capacity, DIM, optimizer=ADAM)
        self.dense = nnx.Linear(DIM, 1, rngs=nnx.Rngs(0))

    def __call__(self, ids, train=False):
        return self.dense(self.embed(ids, train=train).mean(axis=1))[:, 0]


def mean_square(model, ids, labels):
    return jnp.mean((model(ids, train=True) - labels) ** 2)


def trained_in_linen(capacity, batches, resized):
    ids = batches[0][0]
    state = hkv.linen.TrainState.create(
        LinenModel(capacity), jax.random.key(0), ids, tx=optax.sgd(0.1)
    )
    step, losses = hkv.linen.train_step(mean_square), []
    for number, batch in enumerate(batches):
        if number in resized:
            state = state.map_tables(lambda table: hkv.resize(table, 2 * table.capacity)[0])
        state, info = step(state, *batch)
        losses.append(float(info.loss))
    (table,) = jax.tree.leaves(state.tables, is_leaf=lambda node: isinstance(node, hkv.Table))
    return table, losses, np.asarray(state.apply(ids))


def trained_in_nnx(capacity, batches, resized):
    state = hkv.nnx.TrainState(NnxModel(capacity), optax.sgd(0.1))
    step, losses = hkv.nnx.train_step(mean_square), []
    for number, batch in enumerate(batches):
        if number in resized:
            state.map_tables(lambda table: hkv.resize(table, 2 * table.capacity)[0])
        losses.append(float(step(state, *batch).loss))
    return state.model.embed.table.get_value(), losses, np.asarray(state.model(batches[0][0]))


@pytest.mark.parametrize("trained", [trained_in_linen, trained_in_nnx])
def test_a_model_whose_table_grows_trains_as_one_that_was_large_from_the_start(rng, trained):
    """Equal in every bit: losses, outputs, scores, rows and moments."""
    batches = [
        (rng.integers(0, 600, (32, 3)).astype(np.int32), rng.normal(size=32).astype(np.float32))
        for _ in range(8)
    ]
    table, losses, outputs = trained(512, batches, (2, 5))
    expected, expected_losses, expected_outputs = trained(2048, batches, ())
    assert table.capacity == expected.capacity == 2048
    assert losses == expected_losses
    assert (as_bits(outputs) == as_bits(expected_outputs)).all()
    assert contents(table) == contents(expected)


def test_bad_arguments_are_named():
    table = hkv.create(128, DIM)
    for capacity, error in [(0, ValueError), (2**31, ValueError), (1.5, TypeError)]:
        with pytest.raises(error, match="resize: capacity must be"):
            hkv.resize(table, capacity)
    with pytest.raises(TypeError, match="resize: table must be .*unpack"):
        hkv.resize(hkv.find(table, np.zeros(1, np.int32)), 256)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), table, table)
    with pytest.raises(TypeError, match="resize: table must be that of one device"):
        hkv.resize(stacked, 256)


def test_no_place_behind_the_largest_table_is_a_slot():
    """Some of them are more than an int32 holds: such a number is negative, and below any bound."""
    capacity, left = MAX_SLOTS // LANES * LANES, 100
    index = types.SimpleNamespace(digests=jnp.ones((1, LANES), jnp.uint8))
    table = types.SimpleNamespace(capacity=capacity, index=index)
    slots = np.asarray(whole_table._across(table, jnp.int32(capacity - left), 300))
    assert (slots[:left] >= 0).all() and (slots[left:] == -1).all()
