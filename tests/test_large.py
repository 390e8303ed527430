"""Arrays of more than 2^31 bytes, of more than 2^31 elements; batches of 2^24 keys; no memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_hkv as hkv

pytestmark = pytest.mark.slow

INT32_MAX = 2**31 - 1
KEYS = 1 << 20


def random_keys(rng, count=KEYS):
    return hkv.Keys.from_numpy(np.unique(rng.integers(0, 2**64, count, np.uint64)))


def check_rows_far_apart(table, rng):
    """Inserts, trains and reads back keys all over a table."""
    insert = jax.jit(hkv.find_or_insert, donate_argnums=0)
    optimizer = hkv.optim.sgd(0.5)
    update = jax.jit(optimizer.update, donate_argnums=0)
    keys = random_keys(rng)
    table, result = insert(optimizer.init(table), keys)
    assert int(result.counts.inserted) == len(keys) == int(hkv.size(table))
    slots = np.asarray(result.slots).astype(np.int64)
    assert slots.min() < table.capacity // 1000
    assert slots.max() > table.capacity - table.capacity // 1000
    expected = np.asarray(hkv.initial_rows(table, keys).astype(jnp.float32))
    np.testing.assert_array_equal(np.asarray(result.values.astype(jnp.float32)), expected)
    table = update(table, result, result.values)
    _, found = jax.jit(hkv.find)(table, keys)
    np.testing.assert_array_equal(np.asarray(found.values.astype(jnp.float32)), expected * 0.5)
    last = hkv.export_batch(table, table.capacity - 4096, 4096)
    own = slots >= table.capacity - 4096
    assert int(last.count) == own.sum() > 0
    rows = dict(zip(keys.to_numpy()[own].tolist(), expected[own] * 0.5, strict=True))
    for key, row in zip(
        last.keys.to_numpy()[: own.sum()].tolist(),
        np.asarray(last.values.astype(jnp.float32)),
        strict=False,
    ):
        np.testing.assert_array_equal(row, rows[key])


def test_an_array_of_rows_may_have_more_than_2_31_bytes(platform, rng):
    table = hkv.create(1 << 24, 40)
    assert table.values.nbytes > INT32_MAX
    check_rows_far_apart(table, rng)


def test_an_array_of_rows_may_have_more_than_2_31_elements(platform, rng):
    table = hkv.create(1 << 25, 65, dtype=jnp.bfloat16)
    assert table.values.size > INT32_MAX
    check_rows_far_apart(table, rng)


def test_the_keys_of_a_table_may_take_more_than_2_31_bytes(platform, rng):
    table = hkv.create((1 << 28) + 128, 1, dtype=jnp.bfloat16)
    assert table.keys.nbytes > INT32_MAX
    check_rows_far_apart(table, rng)


def test_a_batch_may_have_2_24_keys(platform, rng):
    count = 1 << 24
    ids = rng.integers(0, 2**22, count, np.uint64)
    keys = hkv.Keys.from_numpy(ids)
    table = hkv.create(1 << 24, 4)
    table, result = jax.jit(hkv.find_or_insert, donate_argnums=0)(table, keys)
    distinct, first = np.unique(ids, return_index=True)
    assert int(result.counts.unique) == int(result.counts.inserted) == len(distinct)
    status = np.asarray(result.status)
    assert (status[first] == hkv.Status.INSERTED).all()
    assert (status == hkv.Status.FOUND).sum() == count - len(distinct)
    sample = rng.integers(0, count, 4096)
    rows = hkv.initial_rows(table, hkv.Keys.from_numpy(ids[sample]))
    np.testing.assert_array_equal(np.asarray(result.values)[sample], np.asarray(rows))


def test_running_out_of_memory_is_jaxs_own_error_and_leaves_other_tables_usable(platform, rng):
    keys = random_keys(rng, 1000)
    table, result = hkv.find_or_insert(hkv.create(4096, 8), keys)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"RESOURCE_EXHAUSTED|[Oo]ut of memory"):
        jax.block_until_ready(hkv.create(1 << 30, 4096))
    _, found = hkv.find(table, keys)
    np.testing.assert_array_equal(np.asarray(found.values), np.asarray(result.values))
