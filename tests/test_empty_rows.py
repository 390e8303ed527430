"""Rows of slots without an entry: what an erased one leaves behind, and that it can be removed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from many_devices import assert_same_bits

import jax_hkv as hkv
from jax_hkv import sharding

OPTIMIZERS = {
    "none": None,
    "adam": hkv.optim.adam(1e-2),
    "adagrad, whose rows begin above zero": hkv.optim.adagrad(0.1, initial_accumulator_value=0.5),
    "half rows, a count for each": hkv.optim.adam(1e-2, count_per_row=True, state_dtype="bfloat16"),
}
REMOVALS = {
    "erase": lambda table, ids: hkv.erase(table, ids)[0],
    "erase_if": lambda table, ids: hkv.erase_if(table, lambda keys, *_: hkv.less(keys, 200))[0],
    "expire": lambda table, ids: hkv.expire(hkv.advance_epoch(table), 0)[0],
    "clear": lambda table, ids: hkv.clear(table),
}


def trained(capacity, ids, rng, name="adam", **options):
    """A table whose rows and optimizer rows have moved."""
    table, optimizer = hkv.create(capacity, 3, **options), OPTIMIZERS[name]
    if optimizer is not None:
        table = optimizer.init(table)
    table, found = hkv.find_or_insert(table, ids)
    if optimizer is not None:
        gradients = jnp.asarray(rng.normal(size=(len(ids), 3)), jnp.float32)
        table = optimizer.update(table, found, gradients)
    return table


def rows_of(table):
    """Everything that has a row for each slot, by name."""
    return {"values": table.values, **(table.optimizer.rows if table.optimizer else {})}


def is_occupied(table):
    return np.asarray(table.digests).reshape(-1) != 0


def assert_zeroed(actual, before):
    """Rows of empty slots are zero, and everything else has the bits of before."""
    held = is_occupied(before)
    for name, leaf in rows_of(actual).items():
        own = np.asarray(leaf)
        assert not own[~held].view(np.uint8).any(), name
        assert_same_bits(own[held], np.asarray(rows_of(before)[name])[held])
    assert_same_bits(actual.index, before.index)
    if before.optimizer is not None:
        kept = [(own.optimizer.fresh, own.optimizer.shared) for own in (actual, before)]
        assert_same_bits(*kept)


@pytest.mark.parametrize("removal", REMOVALS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_of_what_was_removed_is_left(name, removal, rng):
    ids = np.arange(1, 401, dtype=np.int32)
    table = trained(640, ids, rng, name, policy=hkv.Policy.EPOCH_LRU, choices=2)
    before = REMOVALS[removal](table, ids[100:300])
    left = np.asarray(before.values)[~is_occupied(before)]
    assert left.any()
    assert_zeroed(hkv.zero_empty_rows(before), before)


def test_slots_at_the_end_of_a_part_of_a_chunk_are_zeroed_too(rng):
    """More slots than are read at once, and no multiple of those."""
    ids = rng.permutation(2**20)[:16_000].astype(np.int32)
    table, _ = hkv.erase(trained(16384 + 384, ids, rng), ids[::2])
    assert table.capacity == 16384 + 384
    assert np.asarray(table.values)[~is_occupied(table)][-300:].any()
    assert_zeroed(hkv.zero_empty_rows(table), table)


def test_what_follows_does_not_depend_on_it(rng):
    """Entries that come into those slots start as everywhere."""
    ids = np.arange(1, 401, dtype=np.int32)
    table, _ = hkv.erase(trained(512, ids, rng), ids[::3])
    outcomes = []
    for own in (table, hkv.zero_empty_rows(table)):
        after, found = hkv.find_or_insert(own, ids + 200)
        entries = sharding.export_entries(after)
        outcomes.append((found, after.index, entries.values, entries.optimizer))
    assert_same_bits(*outcomes)
    assert 100 < int(found.counts.inserted) < 400


def test_a_donated_table_is_not_copied(rng):
    table = trained(512, np.arange(1, 401, dtype=np.int32), rng)
    hkv.testing.assert_no_table_copies(hkv.zero_empty_rows, table)

    def after_a_read(table, ids):
        table, found = hkv.find(table, ids)
        return hkv.zero_empty_rows(table), found

    hkv.testing.assert_no_table_copies(after_a_read, table, np.arange(8, dtype=np.int32))


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_each_part_of_a_table_over_devices_is_zeroed(mode, rng):
    mesh = jax.make_mesh((4,), ("device",), devices=jax.devices("cpu")[:4])
    placement = sharding.Placement(mesh, mode=mode)
    optimizer = hkv.optim.adam(1e-2)

    def fill(table, ids):
        table, found = sharding.find_or_insert(table, ids, axis_name="device")
        table = sharding.update(optimizer, table, found, jnp.ones_like(found.values))
        return sharding.erase(table, ids[::2], axis_name="device")[0], found.overflow

    table = placement.create(lambda: optimizer.init(hkv.create(256, 3)))
    ids = placement.put(rng.permutation(5000)[:400].astype(np.int32))
    table, _ = placement.step(fill)(table, ids)
    before = [jax.tree.map(np.array, part) for part in placement.shards(table)]
    assert all(part.values[~is_occupied(part)].any() for part in before)
    table, _ = placement.step(lambda table: (hkv.zero_empty_rows(table), None))(table)
    for part, old in zip(placement.shards(table), before, strict=True):
        assert_zeroed(part, old)
    with pytest.raises(TypeError, match=r"^zero_empty_rows: table must be.*Placement\.step"):
        hkv.zero_empty_rows(table)
