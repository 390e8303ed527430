"""Behaviour 30: one read of many batches by vmap; what changes a table is refused, and says why."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_hkv as hkv
from jax_hkv import index as _index

DIM = 8
IDS = np.arange(8, dtype=np.int32)
SGD = hkv.optim.sparse(optax.sgd(0.1, momentum=0.9))
REMEDY = r"in a list, .*jax_hkv\.Keys\.cross\(number, ids\).*lax\.map .* copies each of them whole"


def make_table():
    return SGD.init(hkv.create(256, DIM))


def random_keys(rng, *shape):
    return hkv.Keys.from_numpy(rng.integers(0, 400, shape, dtype=np.int64) << 20)


def assert_equal_tables(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_vmap_over_any_axis_of_the_keys_is_the_same_read(rng):
    """30: axes are moved to the front."""
    keys = random_keys(rng, 6, 40)
    table, _ = hkv.find_or_insert(make_table(), keys[:3])
    turned = hkv.Keys(jnp.swapaxes(keys.words, 0, 1))
    _, mapped = jax.vmap(lambda k: hkv.find(table, k), in_axes=1, out_axes=(None, 0))(turned)
    assert_equal_tables(mapped, hkv.find(table, keys)[1])


def test_vmap_of_reads_is_one_read_of_all_keys(rng):
    """30: vmap over reads."""
    keys = random_keys(rng, 6, 40)
    table, _ = hkv.find_or_insert(make_table(), keys[:3])
    mapped = jax.vmap(lambda k: hkv.find(table, k, fill="initial"), out_axes=(None, 0))
    unchanged, result = mapped(keys)
    _, expected = hkv.find(table, keys, fill="initial")
    assert_equal_tables(result, expected)
    assert_equal_tables(unchanged, table)
    _, found = jax.vmap(lambda k: hkv.contains(table, k), out_axes=(None, 0))(keys)
    np.testing.assert_array_equal(found, expected.found)


def test_vmap_of_a_mutation_says_what_to_do_instead():
    """30."""
    with pytest.raises(NotImplementedError, match=r"one table has no order.*jax\.lax\.scan"):
        jax.vmap(lambda slots: _index.erase(make_table().index, slots))(jnp.zeros((3, 4), "i4"))


def test_vmap_over_tables_says_that_the_table_cannot_be_mapped():
    """30."""
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), hkv.create(128, DIM))
    keys = hkv.Keys.from_numpy(np.arange(4))
    with pytest.raises(NotImplementedError, match=f"the table cannot.*{REMEDY}"):
        jax.vmap(lambda t: hkv.contains(t, keys)[1])(stacked)
    table = hkv.create(128, DIM)
    either = jax.vmap(lambda p: jax.lax.cond(p, lambda: hkv.contains(table, keys)[1][0], bool))
    with pytest.raises(NotImplementedError, match=r"whose condition is mapped .* jnp\.where"):
        either(jnp.array([True, False]))


def test_vmap_of_a_read_over_nothing_is_nothing():
    """30: an axis of size 0."""
    table = hkv.create(128, DIM)
    keys = hkv.Keys.from_numpy(np.zeros((0, 3), np.int64))
    _, found = jax.vmap(lambda k: hkv.contains(table, k), out_axes=(None, 0))(keys)
    assert found.shape == (0, 3)


def test_vmap_over_what_changes_a_table_says_where_it_begins():
    table = hkv.create(128, DIM)
    message = "jax.vmap of unique, with which all that changes a table begins: it looks at a batch"
    message += ".* with jax.lax.scan;.* In a train_step's loss_fn, call the layers once with"
    with pytest.raises(NotImplementedError, match=message):
        jax.vmap(lambda ids: hkv.find_or_insert(table, ids)[1].values)(IDS.reshape(2, 4))


@pytest.mark.parametrize("call", ["find_or_insert", "erase", "update"])
def test_vmap_of_changes_to_several_tables_says_how_several_are_trained(call):
    """Stacked tables, with one batch for all of them."""
    table, found = hkv.find_or_insert(make_table(), IDS)
    calls = {
        "find_or_insert": lambda table: hkv.find_or_insert(table, IDS)[0],
        "erase": lambda table: hkv.erase(table, IDS)[0],
        "update": lambda table: SGD.update(table, found, found.values),
    }
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), table)
    with pytest.raises(NotImplementedError, match=f"over its table: several .*{REMEDY}"):
        jax.vmap(calls[call])(stacked)


def test_vmap_over_batches_of_several_tables_names_a_list_of_them():
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), make_table())
    with pytest.raises(NotImplementedError, match="has a table of its own, in Python over"):
        jax.vmap(lambda table, ids: hkv.find_or_insert(table, ids)[0])(stacked, IDS.reshape(2, 4))
