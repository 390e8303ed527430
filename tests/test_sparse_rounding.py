"""Rows of bfloat16 that optax transformations move, rounded by chance."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle_updates import rounded_by, threefry

import jax_hkv as hkv

DIM, SEED = 6, 2**63 + 5
KEYS = np.random.default_rng(0).integers(0, 2**64, 200, np.uint64)


def table_of(opt, start=1.0, dtype=jnp.bfloat16):
    init = hkv.initializers.constant(start)
    return opt.init(hkv.create(2048, DIM, dtype=dtype, init=init))


def opt_of(rate=1.0, **options):
    return hkv.optim.sparse(optax.sgd(rate), stochastic_rounding=True, **options)


def rounded(rows, keys, step, seed):
    """As docs/semantics.md, section 7, says."""
    low, high = np.uint64(32), np.uint64(2**32 - 1)
    words = [(keys & high) ^ np.uint64(seed % 2**32), (keys >> low) ^ np.uint64(seed >> 32)]
    element = np.arange(rows.shape[1], dtype=np.uint64)
    key = [word[:, None] for word in words]
    random = threefry(key, (np.uint64(step), element))[0] >> np.uint64(16)
    return rounded_by(random, rows, np.dtype(jnp.bfloat16))


@pytest.mark.parametrize("is_jitted", [False, True])
def test_rows_are_rounded_by_the_bits_that_are_documented(is_jitted):
    opt = opt_of(0.5, seed=SEED)
    table = table_of(opt)
    ids = hkv.Keys.from_numpy(KEYS)
    for step in (1, 2, 3, 2**32 - 1, 2**32 - 1):
        if step == 2**32 - 1:
            most = jnp.array([2**32 - 1], jnp.uint32)
            table = dataclasses.replace(
                table, optimizer=dataclasses.replace(table.optimizer, shared={"roundings": most})
            )
        table, result = hkv.find_or_insert(table, ids)
        gradients = jax.random.normal(jax.random.key(1), result.values.shape) * 1e-3
        before = np.asarray(hkv.find(table, ids)[1].values, np.float32)
        update = jax.jit(opt.update) if is_jitted else opt.update
        table = update(table, result, gradients)
        exact = before + np.float32(-0.5) * np.asarray(gradients)
        after = np.asarray(hkv.find(table, ids)[1].values)
        np.testing.assert_array_equal(after, rounded(exact, KEYS, step, SEED))


def test_small_updates_are_not_lost_on_average():
    """2^-12 is a thirty-second of bfloat16's step at 1, which rounding to nearest never moves."""
    ends = {}
    for name, opt in {"chance": opt_of(), "nearest": hkv.optim.sparse(optax.sgd(1.0))}.items():
        table, ids = table_of(opt), hkv.Keys.from_numpy(KEYS)
        step = jax.jit(
            lambda table, ids, opt=opt: opt.update(
                *hkv.find_or_insert(table, ids), jnp.full((len(KEYS), DIM), -(2.0**-12))
            )
        )
        for _ in range(64):
            table = step(table, ids)
        ends[name] = np.asarray(hkv.find(table, ids)[1].values, np.float64)
    assert (ends["nearest"] == 1).all()
    # 64 steps of 2^-12; each is 2^-7 with probability 1 / 32, so that a mean of 1,200 elements has
    # a standard deviation of 2^-7 * sqrt(64 * 31) / 32 / sqrt(1200) = 3.1e-4.
    assert abs(ends["chance"].mean() - (1 + 64 * 2.0**-12)) < 1.6e-3
    assert ends["chance"].std() > 1e-3


def test_what_is_not_finite_stays_what_it_is():
    opt = opt_of()
    table, result = hkv.find_or_insert(table_of(opt), hkv.Keys.from_numpy(KEYS[:3]))
    gradients = jnp.array([[jnp.inf], [-jnp.inf], [jnp.nan]]) * jnp.ones((3, DIM))
    rows = hkv.find(opt.update(table, result, gradients), hkv.Keys.from_numpy(KEYS[:3]))[1].values
    assert (np.asarray(rows[:2], np.float32) == [[-np.inf], [np.inf]]).all()
    assert np.isnan(np.asarray(rows[2], np.float32)).all()


def test_another_seed_and_another_update_round_another_way():
    """Whatever lookups came between; updates of one lookup are different ones, too."""

    def moved(seed, lookups=1, updates=1):
        opt = opt_of(1e-3, seed=seed)
        table = table_of(opt)
        for _ in range(lookups):
            table, result = hkv.find_or_insert(table, hkv.Keys.from_numpy(KEYS))
        for update in range(updates):
            rate = jnp.full((len(KEYS), DIM), update == updates - 1, jnp.float32)
            table = opt.update(table, result, rate)
        return np.asarray(table.values)

    np.testing.assert_array_equal(moved(3), moved(3))
    np.testing.assert_array_equal(moved(3), moved(3, lookups=2))
    assert (moved(3) != moved(4)).any() and (moved(3) != moved(3 + 2**40)).any()
    assert (moved(3) != moved(3, updates=2)).any()


def test_an_update_that_is_not_applied_is_not_counted():
    opt = opt_of()
    table, result = hkv.find_or_insert(table_of(opt), hkv.Keys.from_numpy(KEYS))
    for apply, expected in ((False, 0), (True, 1)):
        table = opt.update(table, result, jnp.ones((len(KEYS), DIM)), apply=apply)
        assert table.optimizer.shared["roundings"].tolist() == [expected]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_rows_of_an_optimizer_without_rounding_are_refused(dtype):
    """Of float32 ones half the bits were cut off, silently."""
    opt = hkv.optim.sparse(optax.sgd(1.0))
    table, result = hkv.find_or_insert(table_of(opt, dtype=dtype), hkv.Keys.from_numpy(KEYS))
    for own, other in ((opt_of(), table), (opt, table_of(opt_of()))):
        with pytest.raises(ValueError, match=r"no optimizer rows of this optimizer.*roundings"):
            own.update(other, result, jnp.ones((len(KEYS), DIM)))


def test_updates_that_are_64_bits_wide_are_rounded_once():
    with jax.enable_x64(True):
        opt = hkv.optim.sparse(optax.scale(np.float64(-0.5)), stochastic_rounding=True)
        table, result = hkv.find_or_insert(table_of(opt), hkv.Keys.from_numpy(KEYS))
        gradients = jnp.full((len(KEYS), DIM), 2.0**-9, jnp.float32)
        got = hkv.find(opt.update(table, result, gradients), hkv.Keys.from_numpy(KEYS))[1].values
    exact = np.full((len(KEYS), DIM), 1 - 2.0**-10, np.float32)
    np.testing.assert_array_equal(np.asarray(got), rounded(exact, KEYS, 1, 0))


def test_a_state_with_the_name_of_the_count_is_refused():
    """One of the two would have been lost."""

    class State(NamedTuple):
        roundings: jax.Array

    tx = optax.GradientTransformation(
        lambda rows: State(jnp.float32(0)),
        lambda updates, state, rows=None: (updates, State(state.roundings + 1.5)),
    )
    table = hkv.create(128, DIM, dtype=jnp.bfloat16)
    assert "roundings" in hkv.optim.sparse(tx).init(table).optimizer.shared
    with pytest.raises(ValueError, match=r"must have no leaf 'roundings'.*another name"):
        hkv.optim.sparse(tx, stochastic_rounding=True).init(table)


def test_what_cannot_be_rounded_by_chance_is_named():
    with pytest.raises(ValueError, match=r"stochastic_rounding is for bfloat16.*float32"):
        table_of(opt_of(), dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"rounds what is computed in float32, got dtype=bfloat16"):
        opt_of(dtype=jnp.bfloat16)
    with pytest.raises(TypeError, match=r"optim.sparse: stochastic_rounding must be True or False"):
        hkv.optim.sparse(optax.sgd(1.0), stochastic_rounding="no")
    with pytest.raises(ValueError, match=r"optim.sparse: seed must be"):
        opt_of(seed=-1)


def test_tiers_round_as_one_table_does(rng):
    """Whose clock goes on without a prefetch."""
    opt = opt_of(0.1)
    cache = opt.init(hkv.create(512, DIM, dtype=jnp.bfloat16))
    tiers = hkv.tiered.Tiers(cache, hkv.tiered.create_store(cache, 4096))
    one = opt.init(hkv.create(4096, DIM, dtype=jnp.bfloat16))

    @jax.jit
    def train(table, ids):
        table, found = hkv.find_or_insert(table, ids)
        return opt.update(table, found, 0.5 * found.values.astype(jnp.float32))

    for _ in range(8):
        ids = rng.integers(0, 1500, 160).astype(np.int32)
        tiers, _ = hkv.tiered.prefetch(tiers, ids)
        tiers, one = tiers._replace(cache=train(tiers.cache, ids)), train(one, ids)
    got, expected = hkv.tiered.export_entries(tiers), hkv.sharding.export_entries(one)
    assert len(got.keys) > 512
    order, own = np.argsort(got.keys), np.argsort(expected.keys)
    np.testing.assert_array_equal(got.keys[order], expected.keys[own])
    np.testing.assert_array_equal(got.values[order], expected.values[own])
