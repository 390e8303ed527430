"""Entries drawn by chance."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_sharding_traffic import mesh_of
from test_without import fused

import jax_hkv as hkv
from jax_hkv import sharding

IDS = np.array([0, 5, 2**63, 2**64 - 1, *range(100, 196)], np.uint64)


def table_of(ids, **options):
    return hkv.find_or_insert(hkv.create(256, 2, **options), hkv.Keys.from_numpy(ids))[0]


@pytest.mark.parametrize("choices", [1, 2])
def test_entries_are_drawn_alike_often(choices):
    """Key 0 is one like others; whom it is drawn for is valid."""
    count = 100_000
    table, _ = hkv.erase(table_of(IDS, choices=choices), hkv.Keys.from_numpy(IDS[-50:]))
    drawn = hkv.sample(table, jax.random.key(3), count)
    valid = np.asarray(drawn.valid)
    keys, times = np.unique(drawn.keys.to_numpy()[valid], return_counts=True)
    np.testing.assert_array_equal(keys, np.sort(IDS[:50]))
    expected = count / 256  # of all slots, with a standard deviation of its root
    assert abs(valid.mean() - 50 / 256) < 0.01
    assert (abs(times - expected) < 5 * np.sqrt(expected)).all() and np.ptp(times) > 0
    assert not drawn.keys.to_numpy()[~valid].any()


def test_a_step_draws_other_ones_with_each_key_and_copies_nothing():
    def step(table, key):
        drawn = hkv.sample(table, key, 64)
        table, found = hkv.find_or_insert(table, drawn.keys, valid=drawn.valid)
        return table, (found.counts.inserted, found.counts.hits, drawn.keys)

    table, key = table_of(IDS), jax.random.key(0)
    hkv.testing.assert_no_table_copies(step, table, key)
    keys = jax.random.split(key, 3)
    after, (inserted, hits, drawn) = jax.jit(lambda t, k: jax.lax.scan(step, t, k))(table, keys)
    assert inserted.tolist() == [0, 0, 0] and (hits > 5).all()
    assert len({own.to_numpy().tobytes() for own in drawn}) == 3
    assert int(hkv.size(after)) == len(IDS)
    one = hkv.sample(table, jax.random.PRNGKey(1), 64)
    other = jax.jit(hkv.sample, static_argnums=2)(table, jax.random.key(1), 64)
    np.testing.assert_array_equal(one.keys.to_numpy(), other.keys.to_numpy())
    assert not hkv.sample(hkv.create(128, 2), key, 9).valid.any()


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_each_device_draws_from_its_own_part(mode):
    placement = sharding.Placement(mesh_of(2), mode=mode)
    table = placement.create(lambda: hkv.create(512, 2))
    ids = placement.put(np.arange(64, dtype=np.int32))
    insert = placement.step(lambda t, k: sharding.find_or_insert(t, k, axis_name="device"))
    table, _ = insert(table, ids)

    def draw(table, keys):
        return hkv.sample(table, keys[0], 256)

    keys = placement.put(jax.random.split(jax.random.key(0), 2))
    drawn = placement.run(draw)(table, keys)
    words = np.asarray(drawn.keys.words).reshape(2, 256, 2)[..., 0]
    valid = np.asarray(drawn.valid).reshape(2, 256)
    first, second = (set(own[at].tolist()) for own, at in zip(words, valid, strict=True))
    assert first | second <= set(range(64)) and not first & second and first and second


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((None, 5), TypeError, "key must be one of jax.random, got NoneType"),
        ((7, 5), TypeError, r"key must be one of jax.random, got int: give jax.random.key\(seed\)"),
        ((np.zeros(3, np.uint32), 5), TypeError, r"key must be .*, got uint32\[3\]: give"),
        ((jax.random.split(jax.random.key(0)), 5), TypeError, r"key must be .*, got key<fry>\[2\]"),
        ((jax.random.key(0), -1), ValueError, "count must be from 0 to"),
        ((jax.random.key(0), 2.0), TypeError, "count must be an int"),
    ],
)
def test_what_cannot_be_drawn_is_named(given, error, message):
    with pytest.raises(error, match=f"sample: {message}"):
        hkv.sample(hkv.create(128, 2), *given)


def test_a_fused_tables_keys_say_whose_they_are():
    group = fused()
    table = group.create()
    for name, own in (("users", range(50)), ("items", range(50, 80))):
        table, _ = hkv.find_or_insert(table, group.keys(name, np.array(own, np.int32)))
    drawn = hkv.sample(table, jax.random.key(0), 200)
    ids, are_items = group.ids("items", drawn.keys)
    valid = drawn.valid & are_items
    assert set(ids.low[valid].tolist()) <= set(range(50, 80)) and int(jnp.sum(valid)) > 5
