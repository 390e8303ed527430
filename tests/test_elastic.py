"""A checkpoint of a training state, read by a machine with another number of devices."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from combinations import each
from jax.sharding import AbstractMesh

import jax_hkv as hkv
from jax_hkv import sharding

DIM, CAPACITY, SAVED = 4, 2048, 4  # entries of all devices, and the devices that saved
ADAM = hkv.optim.adam(0.1)


def placement_of(devices, mode):
    mesh = jax.make_mesh((devices,), ("device",), devices=jax.devices("cpu")[:devices])
    return sharding.Placement(mesh, mode=mode)


def make(parts, policy=hkv.Policy.LFU, **options):
    """A state with a table, a parameter, a count and a random key."""
    options = {"policy": policy, "choices": 2} | options
    table = ADAM.init(hkv.create(CAPACITY // parts, DIM, **options))
    key = jax.random.key_data(jax.random.key(3))
    return {"users": table, "bias": jnp.arange(3.0), "step": jnp.int32(5), "key": key}


def step(state, keys, axis):
    lookup = functools.partial(sharding.find_or_insert, axis_name=axis)
    table, found = lookup(state["users"], keys)
    table = sharding.update(ADAM, table, found, jnp.sin(found.values))
    return state | {"users": table, "step": state["step"] + 1}, found.counts


def trained(mode, rng):
    placement = placement_of(SAVED, mode)
    state = placement.create(lambda: make(SAVED))
    run = placement.step(functools.partial(step, axis="device"))
    for _ in range(3):
        ids = hkv.Keys.from_numpy(rng.integers(0, 2**63, 400))
        state, _ = run(state, placement.put(ids))
    return placement, state


def read_on_the_host(path, placement):
    """By Orbax, as NumPy arrays, on a machine that needs to have none of the devices."""
    absent = sharding.Placement(AbstractMesh((SAVED,), ("device",)), mode=placement.mode)
    shapes = absent.abstract(lambda: make(SAVED))
    empty = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), shapes)
    with ocp.StandardCheckpointer() as checkpointer:
        return absent, checkpointer.restore(path, empty)


def assert_same_bits(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, tree, other)


@pytest.mark.parametrize("mode, devices", each(["shard_map", "pmap"], [1, 2, 8]))
def test_what_was_saved_on_four_devices_goes_on_on_others(rng, tmp_path, mode, devices):
    """With the bits that the state itself has there, and all of its entries."""
    placement, state = trained(mode, rng)
    if mode == "pmap":  # whose states Placement.abstract does not know
        absent = sharding.Placement(AbstractMesh((SAVED,), ("device",)), mode=mode)
        saved = jax.device_get(state)
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "step", state)
        absent, saved = read_on_the_host(tmp_path / "step", placement)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(saved))
    target = None if devices == 1 else placement_of(devices, "shard_map")

    def fresh():
        return make(1) if target is None else target.create(lambda: make(devices))

    expected, _ = sharding.reshard(state, fresh(), source=placement, target=target)
    moved, counts = sharding.reshard(saved, fresh(), source=absent, target=target)
    assert_same_bits(moved, expected)
    entries = int(hkv.size(moved["users"]))
    assert int(counts["users"].inserted) == entries > 1000
    assert int(moved["step"]) == 8


def test_replicas_that_were_saved_are_seen_to_be_such(rng):
    """Every device had the whole table: asked for as parts its entries would come four times."""
    placement = placement_of(SAVED, "shard_map")
    axis = sharding.Exchange("device", replicas=True)
    state = placement.create(lambda: make(4, replicas=True))
    run = placement.step(functools.partial(step, axis=axis))
    state, counts = run(state, placement.put(hkv.Keys.from_numpy(rng.integers(0, 2**63, 100))))
    absent = sharding.Placement(AbstractMesh((SAVED,), ("device",)))
    saved = jax.device_get(state)
    mistaken = saved | {"users": dataclasses.replace(saved["users"], replicas=False)}
    with pytest.raises(ValueError, match="other entries on each device in the table users"):
        sharding.reshard(mistaken, make(4), source=absent)
    _, came = sharding.reshard(saved, make(4), source=absent)
    assert int(came["users"].inserted) == int(counts.unique) == 100


def test_a_checkpoint_of_another_number_of_devices_than_said_is_an_error(rng):
    _, state = trained("shard_map", rng)
    saved = jax.device_get(state)
    eight = sharding.Placement(AbstractMesh((8,), ("device",)))
    message = (
        r"sharding.reshard: a table must be spread over the 8 devices .* got a clock uint32\[8\]"
    )
    with pytest.raises(TypeError, match=message):
        sharding.reshard(saved, make(1), source=eight)


def test_arrays_of_jax_with_devices_that_are_absent_are_an_error(rng):
    _, state = trained("shard_map", rng)
    absent = sharding.Placement(AbstractMesh((SAVED,), ("device",)))
    with pytest.raises(TypeError, match=r"state must hold NumPy arrays .*jax\.device_get\(state\)"):
        sharding.reshard(state, make(1), source=absent)
