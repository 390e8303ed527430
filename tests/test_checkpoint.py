"""Behaviour 32, as far as a plain pytree goes: Orbax saves and restores a table unharmed."""

from __future__ import annotations

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jax_hkv as hkv


@pytest.mark.parametrize("optimizer", [None, optax.adam(0.1)])
def test_orbax_restores_every_bit_of_a_table(rng, tmp_path, optimizer):
    """32: on the same layout, equal bits; the keys survive x64 off."""
    opt = None if optimizer is None else hkv.optim.sparse(optimizer)
    table = hkv.create(512, 4, policy=hkv.Policy.EPOCH_LFU, choices=2)
    table = table if opt is None else opt.init(table)
    ids = rng.integers(-(2**63), 2**63 - 1, 300)
    table, result = hkv.find_or_insert(table, hkv.Keys.from_numpy(ids))
    if opt is not None:
        table = opt.update(table, result, result.values)

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", table)
        checkpointer.wait_until_finished()
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, table)
        restored = checkpointer.restore(tmp_path / "step", shapes)

    assert isinstance(restored, hkv.Table) and repr(restored) == repr(table)
    for got, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(table), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))
    restored, found = hkv.find(restored, hkv.Keys.from_numpy(ids))
    assert bool(found.found.all())
    if opt is not None:  # a step resumes where it stopped
        again, result = hkv.find_or_insert(restored, hkv.Keys.from_numpy(ids))
        continued = opt.update(again, result, result.values)
        table, result = hkv.find_or_insert(table, hkv.Keys.from_numpy(ids))
        np.testing.assert_array_equal(
            continued.values, opt.update(table, result, result.values).values
        )
