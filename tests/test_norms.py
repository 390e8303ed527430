"""Norms of the sums of gradients, in every bit (docs/semantics.md, section 8)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_updates
import pytest

import jax_hkv as hkv

# Keys of a batch; over 32 and 1,024 of them are summed level by level.
COUNTS = [0, 1, 2, 31, 33, 200, 1025, 2500]


def norm_of(result: Any, rows: Any) -> np.float32:
    return np.float32(hkv.optim.clip_by_global_norm(1.0, {}, [result], [rows])[2])


def expected_norm(keys: np.ndarray, valid: np.ndarray, rows: Any, slots: np.ndarray) -> Any:
    """By the gradients of positions and the slots of distinct keys."""
    distinct = oracle.unique(keys, valid)
    own = slots[distinct.first]
    square = oracle_updates.square_norm(np.asarray(rows).astype(np.float32), distinct, own)
    return np.sqrt(square)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("dim", "dtype"), [(1, "float32"), (6, "bfloat16"), (19, "float32"), (64, "float16")]
)
def test_a_norm_is_that_of_the_oracle_in_every_bit(count, dim, dtype, rng):
    keys = rng.integers(0, max(count, 1) * 2, 2 * count).astype(np.uint64)
    valid = rng.random(2 * count) < 0.9
    rows = jnp.asarray(rng.normal(size=(2 * count, dim)), dtype)
    table = hkv.create(1024, dim)  # too small for the most of them: some are refused
    table, result = hkv.find_or_insert(table, hkv.Keys.from_numpy(keys), valid=valid)
    expected = expected_norm(keys, valid, rows, np.asarray(result.slots))
    got = norm_of(result, rows)
    assert got.view(np.uint32) == np.float32(expected).view(np.uint32)
    assert (got > 0) == bool(np.any(valid))


def test_a_key_that_is_everywhere_is_summed_first(rng):
    keys = np.where(rng.random(5000) < 0.7, 7, rng.integers(0, 50, 5000)).astype(np.uint64)
    rows = rng.normal(size=(5000, 5)).astype(np.float32)
    _, result = hkv.find_or_insert(hkv.create(1024, 5), hkv.Keys.from_numpy(keys))
    valid = np.ones(5000, bool)
    expected = expected_norm(keys, valid, rows, np.asarray(result.slots))
    assert norm_of(result, rows) == expected


@pytest.mark.parametrize("odd", [None, np.inf, np.nan])
@pytest.mark.parametrize("dim", [1, 2, 3, 6, 8, 17])
def test_the_norm_of_bags_is_that_of_what_their_positions_add(dim, odd, rng):
    """Also of weights that are no numbers, whose products with nothing are none."""
    keys = rng.integers(0, 60, (40, 3)).astype(np.uint64)
    valid = rng.random(keys.shape) < 0.9
    weights = rng.random(keys.shape).astype(np.float32)
    weights[7, 1] = 0.5 if odd is None else odd
    valid[7, 1] = True
    table = hkv.create(128, dim)
    bags = hkv.Keys.from_numpy(keys)
    _, result = hkv.find_or_insert_pooled(table, bags, valid=valid, weights=weights, combiner="sum")
    rows = rng.normal(size=(40, dim)).astype(np.float32)
    terms = weights.reshape(-1, 1) * np.repeat(rows, 3, axis=0)
    slots = np.asarray(result.slots).reshape(-1)
    expected = expected_norm(keys.reshape(-1), valid.reshape(-1), terms, slots)
    assert norm_of(result, rows).view(np.uint32) == np.float32(expected).view(np.uint32)
    assert np.isfinite(expected) == (odd is None)


@pytest.mark.parametrize("number", [np.nan, -np.nan, np.inf])
def test_the_norm_of_what_is_no_number_is_none(number):
    _, result = hkv.find_or_insert(hkv.create(128, 3), np.arange(40, dtype=np.int32))
    rows = np.zeros((40, 3), np.float32)
    rows[17, 1] = number
    got = norm_of(result, rows)
    bits = np.float32(np.inf) if np.isinf(number) else np.uint32(0x7FC00000).view(np.float32)
    assert got.view(np.uint32) == bits.view(np.uint32)


def test_a_norm_makes_no_sums_of_all_keys(rng):
    """Of 2^15 ids of 64 elements they would be 8 MiB."""
    table = hkv.create(1 << 16, 64)
    table, result = hkv.find_or_insert(table, np.arange(1 << 15, dtype=np.int32))
    step = jax.jit(lambda own, rows: hkv.optim.clip_by_global_norm(1.0, {}, [own], [rows])[2])
    plan = step.lower(result, result.values).compile().memory_analysis()
    assert plan.temp_size_in_bytes < 1 << 20


def test_norms_of_several_gradients_of_one_batch_are_those_of_each(rng):
    _, result = hkv.find_or_insert(hkv.create(128, 3), rng.integers(0, 30, 40).astype(np.int32))
    rows = jnp.asarray(rng.normal(size=(40, 5, 3)), jnp.float32)
    together = jax.vmap(
        lambda own: hkv.optim.clip_by_global_norm(1.0, {}, [result], [own])[2], in_axes=1
    )(rows)
    np.testing.assert_array_equal(together, [norm_of(result, rows[:, i]) for i in range(5)])

    def of_slots(slots):
        own = result._replace(unique_slots=slots)
        return hkv.optim.clip_by_global_norm(1.0, {}, [own], [rows[:, 0]])[2]

    without = jnp.full_like(result.unique_slots, -1)
    by_slots = jax.vmap(of_slots)(jnp.stack([result.unique_slots, without]))
    np.testing.assert_array_equal(by_slots, [together[0], 0])
