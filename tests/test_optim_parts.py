"""A large batch is moved by optim.sparse in parts, each row as if all were moved at once."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from many_devices import assert_same_bits
from test_sharding_traffic import mesh_of

import jax_hkv as hkv
from jax_hkv import _updates, sharding

DIM = 4
OPTIMIZERS = {
    "adam": hkv.optim.sparse(optax.adam(0.1)),
    "adam, a count for each row": hkv.optim.sparse(optax.adam(0.1), count_per_row=True),
    "momentum, rounded": hkv.optim.sparse(optax.sgd(0.1, momentum=0.9), stochastic_rounding=True),
    "adagrad in bfloat16": hkv.optim.sparse(optax.adagrad(0.1), dtype=jnp.bfloat16),
}


def assert_same_but_for_xla(actual, expected):
    """In every bit but those of float32: XLA's powers and roots may go by the size of an array."""
    for own, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(own.dtype, jnp.floating) and own.dtype != jnp.bfloat16:
            np.testing.assert_allclose(own, wanted, rtol=1e-5, atol=1e-7)
        else:
            assert_same_bits(own, wanted)


def stepper(opt, apply=None):
    @functools.partial(jax.jit, donate_argnums=0)
    def step(table, ids, valid, others):
        table, found = hkv.find_or_insert(table, ids, valid=valid)
        table, more = hkv.find_or_insert(table, others, pinned=found.slots)
        rows = [0.5 * (own.values.astype(jnp.float32) + 1) for own in (found, more)]
        return opt.update(table, [found, more], rows, apply=apply)

    return step


@pytest.fixture
def rows_at_once(monkeypatch):
    def use(rows):
        monkeypatch.setattr(_updates, "_AT_ONCE", rows * DIM)

    return use


@pytest.mark.parametrize("rows", [1, 7, 32, 63, 95])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parts_are_moved_as_the_whole_is(name, rows, rows_at_once, rng):
    """Of all sizes: the last part overlaps the one before it, and there moves nothing twice."""
    opt = OPTIMIZERS[name]
    dtype = jnp.bfloat16 if "round" in name else jnp.float32
    tables = [opt.init(hkv.create(256, DIM, dtype=dtype)) for _ in range(2)]
    steps = [stepper(opt) for _ in range(2)]
    for turn in range(4):
        ids = rng.integers(0, 120, 64).astype(np.int32)
        batch = ids, rng.random(64) < 0.9, rng.integers(0, 120, 32).astype(np.int32)
        rows_at_once(10**6)
        tables[0] = steps[0](tables[0], *batch)
        rows_at_once(rows)
        tables[1] = steps[1](tables[1], *batch)
        assert_same_but_for_xla(tables[1], tables[0])
        assert turn or int(hkv.size(tables[0])) > 50


def test_a_part_is_all_that_is_read_at_once(rows_at_once, rng):
    """And without apply nothing changes, nor does the count."""
    rows_at_once(10)
    opt = OPTIMIZERS["adam"]
    table = opt.init(hkv.create(256, DIM))
    batch = rng.integers(0, 120, 64).astype(np.int32), np.ones(64, bool), np.arange(32)
    table = stepper(opt)(table, *batch)
    step = stepper(opt, apply=jnp.bool_(False))
    assert_same_bits(
        jax.tree.leaves(step(jax.tree.map(jnp.copy, table), *batch).optimizer),
        (jax.tree.leaves(table.optimizer)),
    )
    program = str(jax.make_jaxpr(stepper(opt))(table, *batch))
    gathered = [line for line in program.splitlines() if "= gather_rows[" in line]
    assert gathered and all("f32[10,4]" in line.split(" = ")[0] for line in gathered)


@pytest.mark.parametrize("replicas", [False, True])
def test_parts_over_devices_are_moved_as_the_whole_is(replicas, rows_at_once, rng):
    opt = OPTIMIZERS["adam"]
    placement = sharding.Placement(mesh_of(2))
    batches = [rng.integers(0, 200, 64).astype(np.int32) for _ in range(3)]
    after = []
    for rows in (10**6, 5):
        rows_at_once(rows)

        def step(table, ids):
            table, found = sharding.find_or_insert(table, ids, axis_name="device")
            return sharding.update(opt, table, found, found.values + 1), found.counts

        step = placement.step(step)
        table = placement.create(lambda: opt.init(hkv.create(256, DIM, replicas=replicas)))
        for ids in batches:
            table, _ = step(table, placement.put(ids))
        after.append(table)
    assert_same_but_for_xla(*after)
