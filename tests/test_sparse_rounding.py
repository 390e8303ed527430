"""Rows of bfloat16 that optax transformations move, rounded by chance."""

from __future__ import annotations

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


def rounded(rows, keys, clock, seed):
    """As docs/semantics.md, section 7, says."""
    low, high = np.uint64(32), np.uint64(2**32 - 1)
    words = [(keys & high) ^ np.uint64(seed % 2**32), (keys >> low) ^ np.uint64(seed >> 32)]
    words[1] = words[1] ^ np.uint64(clock >> 32)
    element = np.arange(rows.shape[1], dtype=np.uint64)
    key = [word[:, None] for word in words]
    random = threefry(key, (np.uint64(clock % 2**32), element))[0] >> np.uint64(16)
    return rounded_by(random, rows, np.dtype(jnp.bfloat16))


@pytest.mark.parametrize("is_jitted", [False, True])
def test_rows_are_rounded_by_the_bits_that_are_documented(is_jitted):
    opt = opt_of(0.5, seed=SEED)
    table = table_of(opt)
    ids = hkv.Keys.from_numpy(KEYS)
    for _ in range(3):
        table, result = hkv.find_or_insert(table, ids)
        gradients = jax.random.normal(jax.random.key(1), result.values.shape) * 1e-3
        before = np.asarray(hkv.find(table, ids)[1].values, np.float32)
        update = jax.jit(opt.update) if is_jitted else opt.update
        table = update(table, result, gradients)
        exact = before + np.float32(-0.5) * np.asarray(gradients)
        clock = np.asarray(table.clock).view("<u8").item()
        after = np.asarray(hkv.find(table, ids)[1].values)
        np.testing.assert_array_equal(after, rounded(exact, KEYS, clock, SEED))


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


def test_another_seed_and_another_time_round_another_way():
    def moved(seed, times=1):
        opt = opt_of(1e-3, seed=seed)
        table = table_of(opt)
        for _ in range(times):
            table, result = hkv.find_or_insert(table, hkv.Keys.from_numpy(KEYS))
        return np.asarray(opt.update(table, result, jnp.ones((len(KEYS), DIM))).values)

    np.testing.assert_array_equal(moved(3), moved(3))
    assert (moved(3) != moved(4)).any() and (moved(3) != moved(3 + 2**40)).any()
    assert (moved(3) != moved(3, times=2)).any()


def test_what_cannot_be_rounded_by_chance_is_named():
    with pytest.raises(ValueError, match=r"stochastic_rounding is for bfloat16.*float32"):
        table_of(opt_of(), dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"rounds what is computed in float32, got dtype=bfloat16"):
        opt_of(dtype=jnp.bfloat16)
    with pytest.raises(TypeError, match=r"optim.sparse: stochastic_rounding must be True or False"):
        hkv.optim.sparse(optax.sgd(1.0), stochastic_rounding="no")
    with pytest.raises(ValueError, match=r"optim.sparse: seed must be"):
        opt_of(seed=-1)
