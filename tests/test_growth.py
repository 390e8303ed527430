"""`hkv.grow`: tables that double with their entries, up to a capacity that somebody set."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from test_expire import warnings_of
from test_resize import contents

import jax_hkv as hkv
from jax_hkv import _growth, sharding

DIM = 4
ADAM = hkv.optim.adam(0.05)
BATCH = 100
LOAD = {1: 0.6, 2: 0.9}  # from where on buckets fill up


def load(choices, capacity):
    """With two candidates it is lower where a batch is more than an eighth of the slots."""
    return LOAD[choices] - 0.75 * max(0, BATCH / capacity - 1 / 8) * (choices == 2)


def batches(rng, count):
    return rng.integers(0, 2**63, (count, BATCH))


def over_four(mode="shard_map", kind=AxisType.Explicit):
    devices = jax.devices()[:4]
    mesh = jax.make_mesh((4,), ("device",), axis_types=(kind,), devices=devices)
    return sharding.Placement(mesh, mode=mode)


def insert_on_each(table, keys):
    return sharding.find_or_insert(table, keys, axis_name="device")


@pytest.mark.parametrize("choices", [1, 2])
def test_a_table_evicts_nothing_until_it_has_grown_to_its_maximum(rng, choices):
    """After every look there is room for the next batch, and entries stay what they were."""
    table = ADAM.init(hkv.create(256, DIM, choices=choices))
    capacities = []
    for ids in batches(rng, 30):
        before, wanted = table, int(hkv.size(table)) + BATCH
        table = hkv.grow(table, 2048, room=BATCH)
        assert table is before or contents(table) == contents(before)
        assert wanted <= load(choices, table.capacity) * table.capacity or table.capacity == 2048
        if table is not before:
            sooner = load(choices, before.capacity) * before.capacity
            assert wanted > sooner, "no sooner than it must"
        capacities.append(table.capacity)
        table, result = hkv.find_or_insert(table, hkv.Keys.from_numpy(ids))
        assert table.capacity == 2048 or int(result.counts.inserted) == BATCH
        assert table.capacity == 2048 or not int(result.counts.evicted + result.counts.refused)
    assert sorted(set(capacities)) == [256, 512, 1024, 2048] and capacities == sorted(capacities)
    assert int(result.counts.evicted) > 0, "now it is full"


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("batch", [40, 115, 230, 460, 920, 1840, 7368])
def test_batches_of_any_size_find_the_room_that_was_asked_for(batch, choices, rng):
    """Keys of one batch choose between two buckets by what lay there before it."""
    table = hkv.create(128, 1, choices=choices)
    for ids in rng.integers(0, 2**63, (6, batch)):
        table = hkv.grow(table, 2**20, room=batch)
        table, result = hkv.find_or_insert(table, hkv.Keys.from_numpy(ids))
        assert int(result.counts.inserted) == batch
        assert int(result.counts.evicted) == 0


def test_small_parts_grow_before_the_fullest_of_them_evicts(rng):
    placement = over_four()
    insert = placement.step(insert_on_each)
    table = placement.create(lambda: hkv.create(128, 1, choices=2))
    for ids in rng.integers(0, 2**63, (70, 16)):
        table = hkv.grow(table, 2**16, room=16, placement=placement)
        table, result = insert(table, placement.put(hkv.Keys.from_numpy(ids)))
        assert int(result.counts.inserted) == 16 and int(result.counts.evicted) == 0
    assert table.capacity == 4 * 512


def test_a_table_grows_by_several_doublings_at_once_and_by_whole_ones_only(rng):
    table = hkv.create(384, DIM)
    ids = hkv.Keys.from_numpy(batches(rng, 2))
    assert hkv.grow(table, 10_000).capacity == 384, "an empty one has room"
    assert hkv.grow(hkv.create(640, DIM), 10_000, room=384).capacity == 640, "0.6 of it, no more"
    table, _ = hkv.find_or_insert(table, ids)
    assert hkv.grow(table, 10_000, room=800).capacity == 3072
    assert hkv.grow(table, 3071, room=800).capacity == 1536
    assert hkv.grow(table, 767, room=800) is table
    assert hkv.grow(table, 1, room=800) is table, "a maximum below what it has"


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_a_table_over_devices_grows_with_the_entries_of_all(rng, mode):
    placement = over_four(mode)
    table = placement.create(lambda: ADAM.init(hkv.create(128, DIM)))
    insert = placement.step(insert_on_each)
    for number, ids in enumerate(batches(rng, 12)):
        before = table
        table = hkv.grow(table, 2048, room=BATCH, placement=placement)
        if table is not before:
            assert contents(placement.shards(table)) == contents(placement.shards(before))
        assert table.capacity == 2048 or (number + 1) * BATCH <= 0.6 * table.capacity
        table, result = insert(table, placement.put(hkv.Keys.from_numpy(ids)))
        assert int(result.counts.inserted) == BATCH and not int(result.counts.evicted)
    assert [part.capacity for part in placement.shards(table)] == [512] * 4
    assert hkv.grow(table, 2048, room=BATCH, placement=placement) is table


def test_a_part_has_its_share_of_the_room_and_three_deviations_of_that():
    """For 128 slots 49 and 3 * 7 new ids are no more than 0.6, 56.25 and 3 * 7.5 are."""
    placement = over_four()
    table = placement.create(lambda: hkv.create(128, DIM))
    assert hkv.grow(table, 2048, room=4 * 49, placement=placement) is table
    assert hkv.grow(table, 2048, room=225, placement=placement).capacity == 2 * table.capacity


def test_a_look_at_a_table_that_does_not_grow_compiles_nothing():
    placement = over_four()
    many = placement.create(lambda: hkv.create(128, DIM))
    one = hkv.create(128, DIM)
    hkv.grow(many, 2048, room=1, placement=placement), hkv.grow(one, 2048, room=1)
    with jax.log_compiles(), warnings_of("jax") as records:
        for room in range(5):
            assert hkv.grow(many, 2048, room=room, placement=placement) is many
            assert hkv.grow(one, 2048, room=room) is one
    assert [text for text in records if "Compiling" in text] == []


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
@pytest.mark.parametrize("on_host", [False, True])
def test_the_fullest_part_counts(mode, on_host):
    """By occupancies that no such table has: of all parts together more than 32 bits count."""
    placement = over_four(mode)
    table = placement.create(lambda: hkv.create(256, DIM))
    occupancy = table.index.occupancy
    loads = 2**29 + np.array([0, 1, 3, 2])
    full = np.repeat(loads, occupancy.size // 4).reshape(occupancy.shape).astype(np.int32)
    full = full if on_host else jax.device_put(full, occupancy.sharding)
    table = dataclasses.replace(table, index=dataclasses.replace(table.index, occupancy=full))
    assert _growth._entries(table, placement, 4) == 2 * (2**29 + 3)


@pytest.mark.parametrize("parts", [1, 4])
def test_a_table_that_a_step_has_used_up_is_named(parts, rng):
    """Twice: what is compiled already ended the process with jaxlib 0.10."""
    ids = hkv.Keys.from_numpy(batches(rng, 1)[0])
    if parts == 1:
        placement, table = None, hkv.create(128, DIM)
    else:
        placement = over_four()
        table = placement.create(lambda: hkv.create(128, DIM))
    table = hkv.grow(table, 4096, room=400, placement=placement)
    assert hkv.grow(table, 4096, room=400, placement=placement) is table
    if placement is None:
        jax.jit(hkv.find_or_insert, donate_argnums=0)(table, ids)
    else:
        placement.step(lambda table: (hkv.advance_epoch(table), None))(table)
    with pytest.raises(RuntimeError, match="grow: table was used up .* with the table that"):
        hkv.grow(table, 4096, room=400, placement=placement)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_table_over_devices_that_was_on_the_host_grows(rng, kind):
    placement = over_four(kind=kind)
    table = placement.create(lambda: hkv.create(128, DIM))
    insert = placement.step(insert_on_each)
    table, _ = insert(table, placement.put(hkv.Keys.from_numpy(batches(rng, 1)[0])))
    expected = contents(placement.shards(table))
    grown = hkv.grow(jax.device_get(table), 4096, room=400, placement=placement)
    assert grown.capacity == 2048 and contents(placement.shards(grown)) == expected


@pytest.mark.parametrize("parts", [1, 4])
def test_entries_without_room_are_warned_of(monkeypatch, rng, parts):
    """Of tables of two candidates none is known: here resize loses three of each part."""
    real = _growth.resize

    def losing(table, capacity):
        table, counts = real(table, capacity)
        return table, counts._replace(evicted=counts.evicted + 1, refused=counts.refused + 2)

    monkeypatch.setattr(_growth, "resize", losing)
    placement = None if parts == 1 else over_four()
    if placement is None:
        table = hkv.create(128, DIM, name="users")
    else:
        table = placement.create(lambda: hkv.create(384, DIM, name="users"))
    wanted = 2 * table.capacity
    message = rf"grow: {3 * parts} entries of table 'users' found no room in {wanted} slots"
    with pytest.warns(UserWarning, match=message):
        hkv.grow(table, wanted, room=table.capacity, placement=placement)


class Linen(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, ids, train=False):
        embed = hkv.linen.Embed(128, DIM, optimizer=ADAM, axis_name=self.axis_name, name="embed")
        return nn.Dense(1)(embed(ids, train=train).mean(axis=1))[:, 0]


class Nnx(nnx.Module):
    def __init__(self):
        self.embed = hkv.nnx.Embed(128, DIM, optimizer=ADAM)
        self.dense = nnx.Linear(DIM, 1, rngs=nnx.Rngs(0))

    def __call__(self, ids, train=False):
        return self.dense(self.embed(ids, train=train).mean(axis=1))[:, 0]


def loss_fn(model, ids, labels):
    return jnp.mean((model(ids, train=True) - labels) ** 2)


def grown(table):
    return hkv.grow(table, 2048, room=BATCH)  # with 1024 one seed of 70 fills a bucket


@pytest.mark.parametrize("flax", ["linen", "nnx"])
def test_the_tables_of_a_state_grow_while_it_trains(rng, flax):
    ids = rng.integers(0, 2**31, (8, BATCH // 2, 2)).astype(np.int32)
    labels = rng.normal(size=(8, BATCH // 2)).astype(np.float32)
    if flax == "linen":
        state = hkv.linen.TrainState.create(Linen(), jax.random.key(0), ids[0], tx=optax.sgd(0.1))
        step = hkv.linen.train_step(loss_fn)
    else:
        state = hkv.nnx.TrainState(Nnx(), optax.sgd(0.1))
        step = hkv.nnx.train_step(loss_fn)
    for batch in zip(ids, labels, strict=True):
        if flax == "linen":
            state = state.map_tables(grown)
            state, info = step(state, *batch)
        else:
            state.map_tables(grown)
            info = step(state, *batch)
        (counts,) = info.tables.values()
        assert int(counts.inserted) == BATCH and not int(counts.evicted + counts.refused)
    assert float(counts.load_factor) == pytest.approx(8 * BATCH / 2048)


def test_the_tables_of_a_state_over_devices_grow_while_it_trains(rng):
    placement = over_four()
    ids = rng.integers(0, 2**31, (8, BATCH // 2, 2)).astype(np.int32)
    labels = rng.normal(size=(8, BATCH // 2)).astype(np.float32)
    model = Linen(axis_name="device")
    state = placement.create(
        lambda: hkv.linen.TrainState.create(
            model, jax.random.key(0), jnp.zeros((4, 2), jnp.int32), tx=optax.sgd(0.1)
        )
    )
    step = hkv.linen.train_step(loss_fn, placement=placement)
    for number in range(8):
        state = state.map_tables(lambda table: hkv.grow(table, 2048, room=96, placement=placement))
        state, info = step(state, *placement.put((ids[number, :48], labels[number, :48])))
        (counts,) = info.tables.values()
        assert int(counts.inserted) == 96 and not int(counts.evicted + counts.refused)
    assert state.tables["embed"]["table"].capacity == 2048


def test_bad_arguments_are_named():
    table = hkv.create(128, DIM)
    placement = over_four()
    many = placement.create(lambda: hkv.create(128, DIM))
    with pytest.raises(TypeError, match="grow: table must be a jax_hkv Table, got dict"):
        hkv.grow({}, 256)
    with pytest.raises(TypeError, match="grow: table must be a jax_hkv Table, got tuple of 2"):
        hkv.grow((hkv.create(128, 2), hkv.create(128, 2)), 1024)
    with pytest.raises(TypeError, match="grow: max_capacity must be an integer, got float"):
        hkv.grow(table, 256.0)
    with pytest.raises(ValueError, match="grow: max_capacity must be from 1 to 2147483647, got 0"):
        hkv.grow(table, 0)
    with pytest.raises(ValueError, match="grow: room must be from 0 to"):
        hkv.grow(table, 256, room=-1)
    with pytest.raises(TypeError, match="grow: placement must be a jax_hkv.sharding.Placement"):
        hkv.grow(table, 256, placement=placement.mesh)
    with pytest.raises(TypeError, match=r"got uint32\[8\]: of a table over devices say placement="):
        hkv.grow(many, 4096)
    with pytest.raises(TypeError, match="grow: a table must be spread over the 4 devices"):
        hkv.grow(table, 4096, placement=placement)
    with pytest.raises(TypeError, match="grow: table must be one whose entries can be counted now"):
        jax.jit(lambda table: hkv.grow(table, 256))(table)
