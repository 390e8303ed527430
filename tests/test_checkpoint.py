"""Behaviour 32, as far as a plain pytree goes: Orbax saves and restores a table unharmed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jax_hkv as hkv


def random_keys(rng, count):
    return hkv.Keys.from_numpy(rng.integers(-(2**63), 2**63 - 1, count))


def save(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def restore(path, target):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, jax.tree.map(ocp.utils.to_shape_dtype_struct, target))


def assert_same_bits(tree, other):
    for got, expected in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


@pytest.mark.parametrize("optimizer", [None, optax.adam(0.1)])
def test_orbax_restores_every_bit_of_a_table(rng, tmp_path, optimizer):
    """32: on the same layout, equal bits; the keys survive x64 off."""
    opt = None if optimizer is None else hkv.optim.sparse(optimizer)
    table = hkv.create(512, 4, policy=hkv.Policy.EPOCH_LFU, choices=2)
    table = table if opt is None else opt.init(table)
    keys = random_keys(rng, 300)
    table, result = hkv.find_or_insert(table, keys)
    if opt is not None:
        table = opt.update(table, result, result.values)

    save(tmp_path / "step", table)
    restored = restore(tmp_path / "step", table)

    assert isinstance(restored, hkv.Table) and repr(restored) == repr(table)
    assert_same_bits(restored, table)
    restored, found = hkv.find(restored, keys)
    assert bool(found.found.all())
    if opt is not None:  # a step resumes where it stopped
        again, result = hkv.find_or_insert(restored, keys)
        continued = opt.update(again, result, result.values)
        table, result = hkv.find_or_insert(table, keys)
        np.testing.assert_array_equal(
            continued.values, opt.update(table, result, result.values).values
        )


def test_a_table_restored_into_one_of_other_choices_is_seen_to_be_misplaced(rng, tmp_path):
    """32: a checkpoint holds no static argument, so nothing else can tell."""
    keys = random_keys(rng, 1000)
    table, _ = hkv.insert_or_assign(hkv.create(1024, 4, choices=2), keys, jnp.ones((1000, 4)))
    save(tmp_path / "step", table)
    assert int(hkv.misplaced(restore(tmp_path / "step", table))) == 0

    restored = restore(tmp_path / "step", hkv.create(1024, 4, choices=1))
    lost = int(hkv.size(restored)) - int(hkv.contains(restored, keys)[1].sum())
    assert lost > 100
    assert int(hkv.misplaced(restored)) == lost


@pytest.mark.parametrize("choices", [1, 2])
def test_every_chunk_of_a_table_is_asked_for_misplaced_entries(rng, choices):
    """A sound table has none, whatever was evicted and erased; a wrong digest or bucket is one."""
    table = hkv.create(20_000, 1, choices=choices)
    for _ in range(2):
        keys = random_keys(rng, 20_000)
        table, _ = hkv.find_or_insert(table, keys)
    table, _ = hkv.erase(table, keys[::7])
    assert int(hkv.misplaced(table)) == 0

    slots = rng.choice(np.flatnonzero(np.asarray(table.digests)), 50, replace=False)
    digests = np.array(table.digests).reshape(-1)
    digests[slots] = digests[slots] % 255 + 1  # not 0, which is an empty lane
    index = dataclasses.replace(table.index, digests=jnp.asarray(digests.reshape(-1, 128)))
    assert int(hkv.misplaced(dataclasses.replace(table, index=index))) == 50

    halves = jax.tree.map(lambda leaf: jnp.roll(leaf, 3, axis=0), table.index)
    moved = dataclasses.replace(halves, clock=table.clock, epoch=table.epoch)
    moved = dataclasses.replace(table, index=moved)
    found = hkv.contains(moved, hkv.export_batch(table, 0, table.capacity).keys)[1]
    assert int(hkv.misplaced(moved)) == int(hkv.size(table)) - int(found.sum()) > 10_000


def test_asking_for_misplaced_entries_copies_no_table():
    """Neither of a table that is donated nor of one that is kept."""
    table = hkv.create(20_000, 4)
    hkv.testing.assert_no_table_copies(lambda table: (table, hkv.misplaced(table)), table)
    program = jax.jit(hkv.misplaced).lower(table).compile().as_text()
    assert not hkv.testing.copies_in(program, [table])
