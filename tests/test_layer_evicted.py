"""What the tables of layers displace in a training step comes out of it, if that is asked for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from combinations import daily, each
from flax import linen, nnx
from many_devices import assert_same_bits, entries_of

import jax_hkv as hkv
from jax_hkv.sharding import Placement

DIM, CAPACITY, BATCH, STEPS = 4, 512, 32, 12
ADAM = hkv.optim.adam(1e-2)
LAYERS = ("Embed", "EmbedBag", "EmbedCollection")


def collection():
    tables = [hkv.TableConfig(name, CAPACITY // 2, DIM, optimizer=ADAM) for name in ("a", "b")]
    return hkv.Collection(tables, [hkv.Feature("a", "a"), hkv.Feature("b", "b", "mean")])


def layer_of(module: Any, layer: str, **options: Any) -> Any:
    if layer == "EmbedCollection":
        return module.EmbedCollection(collection(), **options)
    return getattr(module, layer)(CAPACITY, DIM, optimizer=ADAM, **options)


def inputs_of(layer, ids):
    return {"a": ids, "b": ids + 1} if layer == "EmbedCollection" else ids


def loss_of(rows, weights):
    rows = list(rows.values()) if isinstance(rows, dict) else [rows]
    each = sum(own.reshape(len(weights), -1).sum(1) for own in rows)
    return jnp.mean((each - weights) ** 2)


class Linen:
    """A linen state under one interface with nnx."""

    def __init__(self, layer, placement, step_options, **options):
        class Model(linen.Module):
            @linen.compact
            def __call__(self, ids, *, train=False):
                rows = layer_of(hkv.linen, layer, name="embed", **options)(ids, train=train)
                return jax.tree.map(linen.Dense(2), rows)

        first = inputs_of(layer, np.zeros((BATCH, 3), np.int32))

        def make():
            return hkv.linen.TrainState.create(Model(), jax.random.key(0), first, tx=optax.sgd(0.1))

        self.state = make() if placement is None else placement.create(make)
        self._step = hkv.linen.train_step(
            lambda apply, ids, weights: loss_of(apply(ids, train=True), weights),
            placement=placement,
            donate=False,
            **step_options,
        )

    @property
    def table(self):
        return jax.tree.leaves(self.state.tables, is_leaf=lambda n: isinstance(n, hkv.Table))[0]

    def step(self, *batch):
        self.state, info = self._step(self.state, *batch)
        return info


class Nnx:
    def __init__(self, layer, placement, step_options, **options):
        class Model(nnx.Module):
            def __init__(self, rngs):
                self.embed = layer_of(hkv.nnx, layer, **options)
                self.dense = nnx.Linear(DIM, 2, rngs=rngs)

            def __call__(self, ids, *, train=False):
                return jax.tree.map(self.dense, self.embed(ids, train=train))

        def make():
            return hkv.nnx.TrainState(Model(nnx.Rngs(0)), optax.sgd(0.1))

        self.state = make() if placement is None else hkv.nnx.place(make, placement)
        self._step = hkv.nnx.train_step(
            lambda model, ids, weights: loss_of(model(ids, train=True), weights),
            placement=placement,
            donate=False,
            **step_options,
        )

    @property
    def table(self):
        embed = self.state.model.embed
        if isinstance(embed, hkv.nnx.EmbedCollection):
            return next(iter(embed.tables.values()))
        return embed.table.get_value()

    def step(self, *batch):
        return self._step(self.state, *batch)


FLAX = {"linen": Linen, "nnx": Nnx}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one device": ({}, {}),
    "micro-batches": ({}, {"micro_batches": 4}),
    "shard_map": ({"mode": "shard_map"}, {}),
    "pmap": ({"mode": "pmap"}, {}),
    "shard_map, micro-batches": ({"mode": "shard_map"}, {"micro_batches": 4}),
}


def placed(way, axis):
    """The placement of a way, and the options of its layer."""
    if "mode" not in way:
        return None, {}
    mesh = jax.make_mesh((4,), (axis,), devices=jax.devices("cpu")[:4])
    return Placement(mesh, axis, **way), {"axis_name": axis}


def flat_entries(evicted):
    """The entries of a report as NumPy arrays: keys, rows, optimizer rows."""
    keys, rows, moments = [], [], []
    for entries in jax.device_get(evicted):
        each = entries.keys.to_numpy().reshape(np.size(entries.count), -1)
        shape = each.shape
        own = np.arange(shape[1]) < np.reshape(entries.count, (-1, 1))
        keys.append(each[own])
        rows.append(np.reshape(entries.values, (*shape, DIM))[own])
        moments.append(np.reshape(entries.optimizer["mu"], (*shape, DIM))[own])
    return np.concatenate(keys), np.concatenate(rows), np.concatenate(moments)


@pytest.mark.parametrize("flax, way, layer", daily(each, FLAX, WAYS, LAYERS))
def test_what_a_step_displaces_is_in_its_report(flax, way, layer, rng):
    """Keys: those before and the new ones, less those after. Rows: as they were before the step."""
    placement, axis = placed(WAYS[way][0], "device")
    model = FLAX[flax](layer, placement, WAYS[way][1], return_evicted=True, **axis)
    gone = 0
    for _ in range(STEPS):
        before = held(model, placement)
        ids = rng.integers(0, 4000, (BATCH, 3)).astype(np.int32)
        batch = inputs_of(layer, ids), rng.random(BATCH, np.float32)
        info = model.step(*(placement.put(batch) if placement else batch))
        (where, entries), *others = info.evicted.items()
        assert not others and list(info.tables) == [where]
        keys, rows, moments = flat_entries(entries)
        assert len(keys) == int(info.tables[where].evicted)
        after = held(model, placement)
        was_there = np.isin(keys, before.keys)
        new = len(after.keys) + len(keys) - len(before.keys)
        assert new == int(info.tables[where].inserted)
        if way in ("one device", "shard_map", "pmap"):
            assert was_there.all() and not np.isin(keys, after.keys).any()
        place = np.searchsorted(before.keys, keys[was_there])
        assert_same_bits(rows[was_there], before.values[place])
        assert_same_bits(moments[was_there], before.optimizer["mu"][place])
        gone += len(keys)
    assert gone > CAPACITY / 2


def held(model, placement):
    """What a table holds, in order of keys."""
    table = model.table
    exported = entries_of(table if placement is None else placement.shards(table))
    order = np.argsort(exported.keys)
    optimizer = {name: own[order] for name, own in exported.optimizer.items()}
    return exported._replace(
        keys=exported.keys[order], values=exported.values[order], optimizer=optimizer
    )


@pytest.mark.parametrize("flax", FLAX)
@pytest.mark.parametrize("layer", LAYERS)
def test_unless_it_is_asked_for_nothing_comes_out(flax, layer, rng):
    """And the model trains alike."""
    silent = FLAX[flax](layer, None, {})
    asked = FLAX[flax](layer, None, {}, return_evicted=True)
    for _ in range(4):
        ids = rng.integers(0, 4000, (BATCH, 3)).astype(np.int32)
        batch = inputs_of(layer, ids), rng.random(BATCH, np.float32)
        info, report = silent.step(*batch), asked.step(*batch)
        assert info.evicted == {} and report.evicted != {}
        assert_same_bits(report._replace(evicted={}), info)
    assert_same_bits(asked.table, silent.table)


@pytest.mark.parametrize("flax", FLAX)
def test_entries_go_back_into_the_parts_that_lost_them(flax, rng):
    placement, axis = placed(WAYS["shard_map"][0], "device")
    model = FLAX[flax]("Embed", placement, {}, return_evicted=True, **axis)
    store = placement.create(lambda: ADAM.init(hkv.create(4096, DIM)))
    give = placement.step(lambda store, entries: (hkv.import_batch(store, entries)[0], None))
    seen: set[int] = set()
    for _ in range(STEPS):
        ids = rng.integers(0, 4000, (BATCH, 3)).astype(np.int32)
        info = model.step(*placement.put((ids, rng.random(BATCH, np.float32))))
        for entries in info.evicted["embed/table"]:
            store, _ = give(store, entries)
        seen |= set(ids.ravel().tolist())
    kept, stored = (entries_of(placement.shards(each)).keys for each in (model.table, store))
    assert len(stored) > 300 and set(kept.tolist()) | set(stored.tolist()) == seen
    wrong = placement.run(lambda store: hkv.sharding.misplaced(store, axis_name="device")[None])(
        store
    )
    assert not np.asarray(wrong).any()


@pytest.mark.parametrize("flax", FLAX)
def test_lookups_report_in_order_of_time(flax, rng):
    """Two lookups of two micro-batches; each displaces what its like of the last step brought."""
    if flax == "linen":
        embed = hkv.linen.Embed(128, DIM, optimizer=ADAM, return_evicted=True)
        first = np.zeros(32, np.int32)
        state = hkv.linen.TrainState.create(embed, jax.random.key(0), first, tx=optax.sgd(0.1))

        def loss_fn(apply, *ids):
            return sum(jnp.mean((apply(own, train=True) - 1) ** 2) for own in ids)

        step = hkv.linen.train_step(loss_fn, micro_batches=2)
    else:
        layer = hkv.nnx.Embed(128, DIM, optimizer=ADAM, return_evicted=True)
        state = hkv.nnx.TrainState(layer, optax.sgd(0.1))

        def loss_of_model(model, *ids):
            return sum(jnp.mean((model(own, train=True) - 1) ** 2) for own in ids)

        step = hkv.nnx.train_step(loss_of_model, micro_batches=2)

    def taken(*ids):
        nonlocal state
        if flax == "nnx":
            return step(state, *ids)
        state, info = step(state, *ids)
        return info

    numbers = rng.permutation(10**6).astype(np.int32)[:256].reshape(2, 2, 2, 32)  # step, call, part
    taken(*numbers[0].reshape(2, 64))
    ((_, entries),) = taken(*numbers[1].reshape(2, 64)).evicted.items()
    keys = [set(each.keys.to_numpy()[: int(each.count)].tolist()) for each in entries]
    brought = [set(numbers[0, call, part].tolist()) for part in (0, 1) for call in (0, 1)]
    assert keys == brought


@pytest.mark.parametrize("flax", FLAX)
def test_entries_imported_in_reverse_keep_what_was_trained(flax, rng):
    """No id goes twice in a step, nor one that it has brought: that waits for its update."""
    model = FLAX[flax]("Embed", None, {"micro_batches": 4}, return_evicted=True)
    store, gone = ADAM.init(hkv.create(16384, DIM)), 0
    for _ in range(STEPS):
        before = held(model, None)
        batch = rng.integers(0, 900, (640, 3)).astype(np.int32), rng.random(640)
        evicted = model.step(batch[0], batch[1].astype(np.float32)).evicted["embed/table"]
        for entries in reversed(evicted):
            store, _ = hkv.import_batch(store, entries)
        keys = np.concatenate(
            [each.keys.to_numpy()[: int(each.count)] for each in jax.device_get(evicted)]
        )
        assert len(keys) == len(np.unique(keys)) and np.isin(keys, before.keys).all()
        gone += len(keys)
        was_there = np.isin(before.keys, keys)
        _, found = hkv.find(store, hkv.Keys.from_numpy(before.keys[was_there]))
        assert_same_bits(found.values, before.values[was_there])
    assert gone > CAPACITY
