"""Bits of numbers that few batches bring: what many random ones left untested."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle_pooled
import pytest
from test_fused import assert_rows_equal, trainer_of
from test_pooled import assert_same_bits

import jax_hkv as hkv

PAYLOAD = np.uint32(0xFFC12345)  # of a NaN
DIM = 3


def keys_of(*ids):
    return hkv.Keys.from_numpy(np.array(ids, np.uint64))


def test_a_bag_of_more_terms_than_two_levels_of_the_tree_hold(platform, rng):
    rows = rng.random((40_000, 1)).astype(np.float32)
    splits = np.array([0, 40_000], np.int32)
    pooled = hkv.pool(rows, row_splits=splits)
    assert_same_bits(pooled, oracle_pooled.pool(rows, splits, np.ones(40_000, bool)))


@pytest.mark.parametrize("valid", [[True, False], [False, True]])
def test_the_only_valid_row_of_a_bag_keeps_what_its_nan_carries(platform, valid):
    rows = np.ones((2, DIM), np.float32)
    rows.view(np.uint32)[valid] = PAYLOAD
    pooled = hkv.pool(rows, row_splits=np.array([0, 2], np.int32), valid=np.array(valid))
    assert np.asarray(pooled).view(np.uint32).tolist() == [[PAYLOAD] * DIM]


@pytest.mark.parametrize("weights", [[-1.0, -2.0], [np.inf, 1.0], [-np.inf, 0.0], [1.0, -1.0]])
@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_weights_are_divided_by_any_sum_but_zero(platform, combiner, weights):
    """By a negative one, too; and of infinities comes the one NaN that all machines make."""
    splits, given = np.array([0, 2], np.int32), np.array(weights, np.float32)
    table, _ = hkv.find_or_insert(hkv.create(128, DIM), keys_of(5, 6))
    bags = hkv.Jagged(keys_of(5, 6), jnp.asarray(splits), jnp.asarray(given))
    _, result = hkv.find_or_insert_pooled(table, bags, combiner=combiner)
    expected = oracle_pooled.quotients(splits, np.ones(2, bool), given, combiner)
    assert_same_bits(result.bags.weights, expected)
    if weights == [-1.0, -2.0] and combiner == "mean":
        np.testing.assert_allclose(expected, [1 / 3, 2 / 3], rtol=1e-6)


@pytest.mark.parametrize(
    "opt",
    [
        hkv.optim.adagrad(0.1, initial_accumulator_value=0.0, eps=0.0),
        hkv.optim.ftrl(0.1, initial_accumulator_value=0.0, beta=0.0, l2=0.0),
    ],
    ids=["adagrad", "ftrl"],
)
def test_a_row_without_any_gradient_yet_stays_as_it_is(platform, opt):
    """Zero by the root of zero is no update."""
    table, result = hkv.find_or_insert(opt.init(hkv.create(128, DIM)), keys_of(1, 2))
    gradients = np.array([[0] * DIM, [1] * DIM], np.float32)
    after = opt.update(table, result, jnp.asarray(gradients))
    _, found = hkv.find(after, keys_of(1, 2))
    np.testing.assert_array_equal(found.values[0], result.values[0])
    assert np.isfinite(found.values).all()
    assert (np.asarray(found.values[1]) != np.asarray(result.values[1])).all()


@pytest.mark.parametrize("gradient", [np.inf, -np.inf])
def test_a_gradient_is_clipped_to_the_largest_number(platform, gradient):
    most = float(np.finfo(np.float32).max)
    opt = hkv.optim.sgd(1e-38, max_gradient=most)
    table, result = hkv.find_or_insert(opt.init(hkv.create(128, DIM)), keys_of(1))
    after = opt.update(table, result, jnp.full((1, DIM), gradient, jnp.float32))
    moved = np.float32(1e-38) * np.float32(np.copysign(most, gradient))  # XLA's rate would be 0
    expected = np.asarray(result.values) - moved
    np.testing.assert_allclose(hkv.find(after, keys_of(1))[1].values, expected, rtol=1e-6)


@pytest.mark.parametrize("steps", [2**24 + 1, 2**31 + 5])
@pytest.mark.parametrize("name", ["float32", "stochastic"])
def test_an_update_knows_all_bits_of_a_step_count(name, steps, twin, rng):
    """Powers of a rate that is nearly one, and what is drawn for the rounding."""
    is_drawn = name == "stochastic"
    opt = hkv.optim.adam(
        0.05, b2=0.99999997, stochastic_rounding=is_drawn, seed=3 if is_drawn else 0
    )
    dtype = jnp.bfloat16 if is_drawn else jnp.float32
    both = twin(128, DIM, dtype=dtype, init=hkv.initializers.normal(0.5), check=False)
    both.table = opt.init(both.table)
    trainer = trainer_of(opt, both.oracle)
    ids = np.arange(40, dtype=np.uint64)
    both.table, result = hkv.find_or_insert(both.table, hkv.Keys.from_numpy(ids))
    outcome = both.oracle.find_or_insert(ids)
    trainer.inserted(outcome.slots, outcome.status)
    shared = {**both.table.optimizer.shared, "count": jnp.full(1, steps - 1, jnp.uint32)}
    optimizer = dataclasses.replace(both.table.optimizer, shared=shared)
    both.table = dataclasses.replace(both.table, optimizer=optimizer)
    trainer.count = steps - 1
    for _ in range(2):
        gradients = rng.normal(size=(40, DIM)).astype(np.float32)
        both.table = jax.jit(opt.update)(both.table, result, jnp.asarray(gradients))
        trainer.update(ids, outcome.slots, gradients, 0.05)
        assert_rows_equal(both.table, trainer)
    assert trainer.count == steps + 1


def test_a_large_table_is_cleared_to_its_last_byte(platform):
    """In parts, by several threads, of which each has its own place."""
    table, _ = hkv.find_or_insert(hkv.create(1 << 20, 1), keys_of(*range(500_000)))
    table = jax.jit(hkv.clear)(table)
    for name in ("keys", "scores", "digests", "occupancy"):
        assert not np.asarray(getattr(table.index, name)).any(), name
