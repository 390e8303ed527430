"""What a model learns in a life of many changes is what it would have learned without any."""

from __future__ import annotations

import functools

import flax.serialization
import jax
import numpy as np
import optax
import pytest
from combinations import seldom
from test_tiered_parts import Model, placement_of

import jax_hkv as hkv
from jax_hkv import sharding, tiered

DIM, BATCH, IDS, RATE = 4, 32, 400, 2.0**-6
WEIGHTS = np.array([0.5, 1.0, -2.0, 0.25], np.float32)  # sums of them have no rounding
SGD = hkv.optim.sgd(RATE)
FEATURES = [
    hkv.Feature("seen", "items", "sum"),
    hkv.Feature("bought", "items", "sum"),
    hkv.Feature("user", "users", None),
]
TABLES = ("items", "users")


def collection_of(capacity):
    options = {"optimizer": SGD, "init": hkv.initializers.zeros()}
    return hkv.Collection(
        [hkv.TableConfig(name, capacity, DIM, **options) for name in TABLES], FEATURES
    )


class Batch:
    """Ids of the features, and how often each table is asked for each."""

    def __init__(self, rng):
        lists = [rng.integers(0, IDS, rng.integers(0, 4)).tolist() for _ in range(BATCH)]
        self.seen = hkv.Jagged.from_lists(lists)
        self.bought = rng.integers(0, IDS, (BATCH, 2)).astype(np.int32)
        self.is_bought = rng.random((BATCH, 2)) < 0.7
        self.user = rng.integers(0, IDS, BATCH).astype(np.int32)
        items = np.concatenate([sum(lists, []), self.bought[self.is_bought]]).astype(int)
        self.occurrences = {
            "items": np.bincount(items, minlength=IDS),
            "users": np.bincount(self.user, minlength=IDS),
        }
        self.lists = lists

    def inputs(self, parts):
        return {
            "seen": self.seen.for_parts(parts, capacity=4 * BATCH // parts),
            "bought": hkv.Padded(self.bought, self.is_bought),
            "user": self.user,
        }

    def outputs(self, rows):
        """Of a model whose tables have these rows."""
        of_example = [
            rows["items"][own].sum(axis=0) + rows["items"][bought[mask]].sum(axis=0)
            for own, bought, mask in zip(self.lists, self.bought, self.is_bought, strict=True)
        ]
        return (np.stack(of_example) + rows["users"][self.user]) @ WEIGHTS


class Life:
    """A model that moves, grows and is restored, and the rows that it should have by now."""

    def __init__(self, is_tiered):
        self.is_tiered = is_tiered
        self.rows = {name: np.zeros((IDS, DIM), np.float32) for name in TABLES}
        self.there = {name: np.zeros(IDS, bool) for name in TABLES}
        self.devices, self.capacity = 1, 512 if is_tiered else 1024
        self.state = self.made()
        self.stores = {
            name: tiered.create_store(table, 4096)
            for name, table in (self.tables.items() if is_tiered else ())
        }

    @property
    def placement(self):
        return placement_of(self.devices)

    @property
    def tables(self):
        return self.state.tables["embed"]

    def made(self):
        model = Model(
            collection_of(self.capacity), None if self.devices == 1 else "device", tuple(WEIGHTS)
        )
        one = Batch(np.random.default_rng(0)).inputs(1)

        def make():
            return hkv.linen.TrainState.create(
                model, jax.random.key(0), one, tx=optax.set_to_zero()
            )

        return make() if self.devices == 1 else self.placement.create(make)

    def put(self, batch, parts):
        inputs = batch.inputs(parts * self.devices)
        if self.devices == 1:
            return inputs
        return self.placement.put(inputs, micro_batches=parts)

    def prefetch(self, inputs, parts, **options):
        if self.is_tiered:
            options |= {"placement": self.placement, "micro_batches": parts}
            tables, self.stores, _ = collection_of(self.capacity).prefetch(
                self.tables, self.stores, inputs, **options
            )
            self.state = self.state.replace(tables={"embed": tables})

    def train(self, rng):
        batch, parts = Batch(rng), int(rng.choice([1, 2, 4]))
        inputs = self.put(batch, parts)
        self.prefetch(inputs, parts)
        self.state, _ = step_of(self.devices, parts)(self.state, inputs)
        for name, count in batch.occurrences.items():
            share = np.float32(RATE / (self.devices * parts))
            self.rows[name] -= share * count[:, None] * WEIGHTS
            self.there[name] |= count > 0

    def evaluate(self, rng):
        batch = Batch(rng)
        inputs = self.put(batch, 1)
        self.prefetch(inputs, 1, insert=False)
        apply = applied_by(self.devices)
        np.testing.assert_array_equal(apply(self.state, inputs), batch.outputs(self.rows))

    def move(self, rng):
        source, self.devices = self.placement, int(rng.choice([1, 2, 4]))
        of_tiers = {name: tiered.Tiers(self.tables[name], own) for name, own in self.stores.items()}
        state = self.state.replace(tables={"embed": {**self.tables, **of_tiers}})
        fresh = self.made()
        stores = {
            name: tiered.create_store(fresh.tables["embed"][name], 4096, placement=self.placement)
            for name in of_tiers
        }
        tiers = {name: tiered.Tiers(fresh.tables["embed"][name], stores[name]) for name in stores}
        fresh = fresh.replace(tables={"embed": {**fresh.tables["embed"], **tiers}})
        state, _ = sharding.reshard(state, fresh, source=source, target=self.placement)
        after = state.tables["embed"]
        self.stores = {name: after[name].store for name in stores}
        caches = {name: after[name].cache for name in stores}
        self.state = state.replace(tables={"embed": {**after, **caches}})

    def grow(self, rng):
        if not self.is_tiered and self.capacity < 4096:
            self.capacity *= 2
            self.move(rng)

    def erase(self, rng):
        name, ids = str(rng.choice(TABLES)), rng.choice(IDS, 16, replace=False).astype(np.int32)
        group = collection_of(self.capacity).group_of(name)
        table, keys = self.tables[group.name], group.keys(name, ids)
        keys = self.placement.put(keys) if self.placement else keys
        if self.is_tiered:
            tiers = tiered.Tiers(table, self.stores[group.name])
            tiers, _ = tiered.erase(tiers, group.keys(name, ids), placement=self.placement)
            table, self.stores = tiers.cache, {**self.stores, group.name: tiers.store}
        elif self.placement:
            table, _ = erased_by(self.devices)(table, keys)
        else:
            table, _ = hkv.erase(table, keys)
        self.state = self.state.replace(tables={"embed": {**self.tables, group.name: table}})
        self.rows[name][ids], self.there[name][ids] = 0, False

    def restore(self, rng):
        saved = flax.serialization.to_bytes((self.state, self.stores))
        fresh = self.made()
        stores = {
            name: tiered.create_store(fresh.tables["embed"][name], 4096, placement=self.placement)
            for name in self.stores
        }
        restored = flax.serialization.from_bytes((fresh, stores), saved)
        where = jax.tree.map(lambda leaf: leaf.sharding, (fresh, stores))
        self.state, self.stores = jax.tree.map(jax.device_put, restored, where)

    def check(self):
        collection = collection_of(self.capacity)
        for name in TABLES:
            group = collection.group_of(name)
            table, placement = self.tables[group.name], self.placement
            if self.is_tiered:
                tiers = tiered.Tiers(table, self.stores[group.name])
                found = tiered.export_entries(tiers, placement=placement)
            else:
                found = sharding.export_entries(placement.shards(table) if placement else table)
            keys, is_own = group.ids(name, hkv.Keys.from_numpy(found.keys))
            ids, rows = keys.to_numpy()[is_own].astype(int), found.values[np.asarray(is_own)]
            assert sorted(ids) == np.flatnonzero(self.there[name]).tolist(), name
            np.testing.assert_array_equal(rows, self.rows[name][ids], err_msg=name)


@functools.cache
def step_of(devices, parts):
    return hkv.linen.train_step(
        lambda apply, inputs: apply(inputs, train=True).sum(),
        placement=placement_of(devices),
        micro_batches=parts,
    )


@functools.cache
def applied_by(devices):
    def apply(state, inputs):
        return state.apply(inputs)

    return jax.jit(apply) if devices == 1 else placement_of(devices).run(apply)


@functools.cache
def erased_by(devices):
    def erase(table, keys):
        return sharding.erase(table, keys, axis_name="device")[0], None

    return placement_of(devices).step(erase)


@pytest.mark.parametrize(
    "is_tiered, seed",
    seldom(
        [(t, s) for t in (False, True) for s in range(4)],
        [(t, s) for t in (False, True) for s in (2, 3)],
    ),
)
def test_a_model_knows_after_many_changes_what_it_was_taught(is_tiered, seed):
    rng = np.random.default_rng(seed)
    life = Life(is_tiered)
    changes = [life.evaluate, life.move, life.grow, life.restore, life.erase]
    for _ in range(16):
        rng.choice([*changes, *[life.train] * 5])(rng)
        life.check()
    assert sum(there.sum() for there in life.there.values()) > 300
