"""Tiers of a checkpoint on a machine with other devices than the one that saved them."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from combinations import seldom
from jax.sharding import AbstractMesh, SingleDeviceSharding
from many_devices import assert_same_bits
from test_tiered import by_key, made
from test_tiered_devices import DEVICES, placement_of, stepper, tiers_of

import jax_hkv as hkv
from jax_hkv import sharding, tiered
from jax_hkv.sharding import Placement

CACHE, STORES = 512, (8192, 8192 + 128 * DEVICES)  # of all devices, as made and as grown


def make():
    """A cache, on each of the devices."""
    return made(CACHE // DEVICES)


def trained(placement, rng):
    """Tiers one of whose stores has grown, with most of what they hold in the stores."""
    tiers = tiers_of(placement, CACHE, STORES[0])
    step, _ = stepper(placement)
    for _ in range(5):
        ids = rng.integers(0, 3000, DEVICES * 48).astype(np.int32)
        batch = placement.put((ids, np.ones(len(ids), bool)))
        tiers, _ = tiered.prefetch(tiers, batch[0], placement=placement)
        cache, _ = step(tiers.cache, *batch)
        tiers = tiers._replace(cache=cache)
    first, *others = tiers.store
    first, _ = hkv.resize(first, STORES[1] // DEVICES)
    return tiers._replace(store=(first, *others))


def on(devices, cache=1024, store=16384):
    """Tiers on so many devices, without entries."""
    if devices == 1:
        alone = made(cache)
        return None, tiered.Tiers(alone, tiered.create_store(alone, store))
    mesh = jax.make_mesh((devices,), ("device",), devices=jax.devices("cpu")[:devices])
    placement = Placement(mesh)
    cache = placement.create(lambda: made(1024 // devices))
    return placement, tiered.Tiers(cache, tiered.create_store(cache, store, placement=placement))


def of_absent():
    """The placement that saved, and the shapes of its tiers, on a machine without its devices."""
    absent = Placement(AbstractMesh((DEVICES,), ("device",)))
    cache = absent.abstract(make)
    stores = tiered.create_store(cache, STORES[0], placement=absent)
    first = tiered.create_store(jax.eval_shape(make), STORES[1] // DEVICES)
    return absent, tiered.Tiers(cache, (first, *stores[1:]))


@pytest.mark.parametrize("devices", [2, 1])
def test_saved_tiers_go_on_on_other_devices(devices, rng, tmp_path):
    tiers = trained(placement_of("shard_map"), rng)
    wanted = by_key(tiered.export_entries(tiers, placement=placement_of("shard_map")))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tiers", tiers)
    absent, shapes = of_absent()
    empty = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), shapes)
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.restore(tmp_path / "tiers", empty)
    exported = tiered.export_entries(saved, placement=absent)
    assert_same_bits(by_key(exported), wanted)
    chunks = list(tiered.export_chunks(saved, 100, placement=absent))
    assert {len(chunk.keys) for chunk in chunks[:-1]} == {100}
    assert_same_bits(by_key(sharding.join_entries(chunks)), wanted)
    earlier = exported._replace(clock=exported.clock - 2)
    later = tiered.export_entries(saved, changed_since=earlier, placement=absent)
    assert len(later.keys) == int((exported.scores > earlier.clock).sum()) > 0
    placement, fresh = on(devices)
    after, counts = tiered.import_entries(fresh, exported, placement=placement)
    assert int(counts.inserted) == len(exported.keys) > 500
    assert_same_bits(by_key(tiered.export_entries(after, placement=placement)), wanted)


def test_saved_tiers_of_one_device_are_read_as_they_are(rng):
    _, tiers = on(1)
    for _ in range(3):
        tiers, _ = tiered.prefetch(tiers, rng.integers(0, 2000, 500).astype(np.int32))
    wanted = by_key(tiered.export_entries(tiers))
    assert_same_bits(by_key(tiered.export_entries(jax.device_get(tiers))), wanted)
    fresh = on(1)[1]
    with jax.set_mesh(placement_of("shard_map").mesh):
        after, _ = sharding.reshard(jax.device_get(tiers), fresh)
    assert_same_bits(by_key(tiered.export_entries(after)), wanted)
    with pytest.raises(ValueError, match=r"tiers.cache must lie on one device, got one that 0"):
        tiered.size(jax.device_get(tiers))


def test_stores_are_restored_into_their_shapes(rng, tmp_path):
    """On as many devices: nothing but what is restored is made."""
    placement = placement_of("shard_map")
    tiers = trained(placement, rng)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tiers", tiers)
    cache = placement.abstract(make)
    stores = tiered.create_store(cache, STORES[0], placement=placement)
    host = SingleDeviceSharding(jax.devices("cpu")[0])
    assert {leaf.sharding for leaf in jax.tree.leaves(stores)} == {host}
    (first, *_) = tiered.create_store(cache, STORES[1], placement=placement)
    with ocp.StandardCheckpointer() as checkpointer:
        target = tiered.Tiers(cache, (first, *stores[1:]))
        after = checkpointer.restore(tmp_path / "tiers", target)
    assert_same_bits(*map(jax.device_get, (after, tiers)))
    ids = placement.put(rng.integers(0, 3000, DEVICES * 48).astype(np.int32))
    pair = [tiered.prefetch(own, ids, placement=placement) for own in (after, tiers)]
    assert_same_bits(*map(jax.device_get, pair))


@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.parametrize("mode", seldom(["shard_map", "pmap"], {"pmap"}))
def test_a_state_with_tiers_goes_to_other_devices(is_saved, mode, rng):
    """Among parameters; and tiers become a table alone, which becomes tiers again."""
    source = placement_of(mode)
    tiers = trained(source, rng)
    wanted = by_key(tiered.export_entries(tiers, placement=source))
    state = {"users": tiers, "bias": source.create(lambda: jax.numpy.arange(3.0))}
    if is_saved:
        state = jax.device_get(state)
        source = Placement(AbstractMesh((DEVICES,), ("device",)), mode=mode)
    placement, fresh = on(2)
    fresh = {"users": fresh, "bias": placement.create(lambda: jax.numpy.zeros(3))}
    state, counts = sharding.reshard(state, fresh, source=source, target=placement)
    assert int(counts["users"].inserted) == len(wanted[0][0])
    assert_same_bits(by_key(tiered.export_entries(state["users"], placement=placement)), wanted)
    assert state["bias"].tolist() == [0, 1, 2]
    fresh = {"users": made(32768), "bias": jax.numpy.zeros(3)}
    state, _ = sharding.reshard(state, fresh, source=placement)
    assert_same_bits(by_key(sharding.export_entries(state["users"])), wanted)
    fresh = {"users": on(1)[1], "bias": jax.numpy.zeros(3)}
    with jax.set_mesh(placement_of("shard_map").mesh):
        state, _ = sharding.reshard(state, fresh)
    assert_same_bits(by_key(tiered.export_entries(state["users"])), wanted)
    ids = wanted[0][0][:100].astype(np.int32)
    after, counts = tiered.prefetch(state["users"], ids)
    assert int(counts.restored) + int(counts.refused) == 100 and int(counts.restored) > 90


WRONG = {
    "too few stores": (
        lambda absent, saved: tiered.export_entries(
            saved._replace(store=saved.store[:2]), placement=absent
        ),
        TypeError,
        "tiered.export_entries: tiers.store must have a table for each of the 4 parts that the "
        "placement has in all, got 2",
    ),
    "another number of devices": (
        lambda absent, saved: tiered.export_entries(
            saved, placement=Placement(AbstractMesh((2,), ("device",)))
        ),
        TypeError,
        "each of the 2 parts that the placement has in all, got 4",
    ),
    "no placement": (
        lambda absent, saved: tiered.export_entries(saved),
        TypeError,
        "tiers.store must be one table where no placement is given, got 4",
    ),
    "arrays of absent devices": (
        lambda absent, saved: tiered.export_entries(
            jax.tree.map(jax.numpy.asarray, saved), placement=absent
        ),
        TypeError,
        "tiered.export_entries: placement must have devices, got one of an abstract mesh: give "
        "that whose devices the cache lies on. Exports alone read the tiers of other devices, as "
        "NumPy arrays, jax.device_get(tiers)",
    ),
    "to change what is saved": (
        lambda absent, saved: tiered.import_entries(
            saved, tiered.export_entries(saved, placement=absent), placement=absent
        ),
        TypeError,
        "tiered.import_entries: placement must have devices, got one of an abstract mesh",
    ),
    "a table in its place": (
        lambda absent, saved: sharding.reshard(
            {"a": saved}, {"a": {"b": made(128)}}, source=absent
        ),
        ValueError,
        "missing: ['a'], unknown: ['a/b']",
    ),
    "a store of another table": (
        lambda absent, saved: tiered.export_entries(
            saved._replace(store=(made(2176, seed=9), *saved.store[1:])), placement=absent
        ),
        ValueError,
        "tiers.store must have a seed like the cache's, 0, got 9",
    ),
    "replicas": (
        lambda absent, saved: tiered.export_entries(
            saved._replace(cache=dataclasses.replace(saved.cache, replicas=True)), placement=absent
        ),
        ValueError,
        "tiered.export_entries: the cache must be split by keys",
    ),
    "shapes of replicas": (
        lambda absent, saved: tiered.create_store(
            absent.abstract(lambda: made(128, replicas=True)), 4096, placement=absent
        ),
        ValueError,
        "tiered.create_store: the cache must be split by keys",
    ),
    "a shape that stayed": (
        lambda absent, saved: tiered.export_entries(
            jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), saved)._replace(
                cache=saved.cache
            ),
            placement=absent,
        ),
        TypeError,
        "tiered.export_entries: tiers must hold arrays, got the shape of one",
    ),
    "a state of arrays of absent devices": (
        lambda absent, saved: sharding.reshard(
            jax.tree.map(jax.numpy.asarray, saved), on(1)[1], source=absent
        ),
        TypeError,
        "sharding.reshard: state must hold NumPy arrays alone where the mesh of source is abstract",
    ),
    "to devices that are absent": (
        lambda absent, saved: sharding.reshard(saved, saved, source=absent, target=absent),
        TypeError,
        "sharding.reshard: target must have devices, got a placement of an abstract mesh",
    ),
    "other choices": (
        lambda absent, saved: sharding.reshard(
            {"a": saved}, {"a": made(256, choices=2)}, source=absent
        ),
        ValueError,
        "fresh must have the choices of state in the table a, 1, got 2",
    ),
    "another seed": (
        lambda absent, saved: sharding.reshard(
            {"a": saved}, {"a": made(128, seed=9)}, source=absent
        ),
        ValueError,
        "fresh must have the seed of state in the table a, 0, got 9",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_saved_tiers_is_named(name):
    call, kind, message = WRONG[name]
    absent, shapes = of_absent()
    saved = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    with pytest.raises(kind, match=re.escape(message)):
        call(absent, saved)
