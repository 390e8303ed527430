"""What jax.vmap does with bags: one native call, with the bits of a loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_pooled import (
    COMBINERS,
    DIM,
    assert_equal_trees,
    assert_same_bits,
    filled_table,
    random_ids,
    random_rows,
    random_weights,
)

import jax_hkv as hkv


def looped(function, *batches):
    """What `jax.vmap` promises: one call after the other."""
    results = [function(*(batch[i] for batch in batches)) for i in range(len(batches[0]))]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("fill", ["initial", 0])
def test_vmap_of_a_pooled_lookup_is_one_lookup_with_the_bits_of_a_loop(rng, combiner, fill):
    table = filled_table(rng)
    ids = hkv.Keys.from_numpy(random_ids(rng, 3, 4, 40))
    weights = jnp.asarray(random_weights(rng, 3, 4, 40))
    for given in ((ids,), (ids, weights)):

        def look_up(ids, weights=None):
            kwargs = {"combiner": combiner, "weights": weights, "fill": fill}
            return hkv.find_pooled(table, ids, **kwargs)

        same, mapped = jax.vmap(look_up, out_axes=(None, 0))(*given)
        assert_equal_trees(same, table)
        expected = looped(lambda *each: look_up(*each)[1], *given)
        assert_same_bits(mapped.values, expected.values)
        np.testing.assert_array_equal(mapped.found, expected.found)
        text = str(jax.make_jaxpr(jax.vmap(look_up, out_axes=(None, 0)))(*given))
        assert text.count("pool_rows[") == (1 + (combiner != "sum") * (len(given) - 1))


def test_vmap_of_jagged_pools_keeps_each_in_its_own_positions(rng):
    """Also where splits say something that cannot be, and where rows or splits are shared."""
    rows = random_rows(rng, 3 * 10).reshape(3, 10, DIM)
    splits = jnp.asarray([[0, 3, 3, 8], [0, 0, 1, 99], [2, 7, 10, 4]], jnp.int32)

    def add(rows, splits):
        return hkv.pool(rows, row_splits=splits)

    expected = looped(jax.jit(add), rows, splits)
    assert_same_bits(jax.vmap(add)(rows, splits), expected)
    behind = jnp.moveaxis(rows, 0, 1)
    assert_same_bits(jax.vmap(add, in_axes=(1, -1))(behind, splits.T), expected)
    shared = jax.vmap(add, in_axes=(None, 0))(rows[1], splits)
    assert_same_bits(shared, looped(jax.jit(lambda s: add(rows[1], s)), splits))
    shared = jax.vmap(add, in_axes=(0, None))(rows, splits[0])
    assert_same_bits(shared, looped(lambda r: add(r, splits[0]), rows))
    assert jax.vmap(add)(rows[:0], splits[:0]).shape == (0, 3, DIM)


def test_vmap_of_the_derivatives_of_a_pool_is_a_loop(rng):
    rows = random_rows(rng, 3 * 12).reshape(3, 3, 4, DIM)
    weights = jnp.asarray(random_weights(rng, 3, 3, 4))

    @jax.jit
    def derivatives(rows, weights):
        def loss(rows, weights):
            return jnp.sum(jnp.square(hkv.pool(rows, weights=weights, combiner="mean")))

        return jax.grad(loss, argnums=(0, 1))(rows, weights)

    mapped = jax.jit(jax.vmap(derivatives))(rows, weights)
    for got, expected in zip(mapped, looped(derivatives, rows, weights), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_vmap_that_cannot_be_names_what_it_is_over_and_the_remedy(rng):
    keys = hkv.Keys.from_numpy(random_ids(rng, 3, 4))
    with pytest.raises(
        NotImplementedError, match=r"unique, .*: it looks at a batch.*jax\.lax\.map"
    ):
        jax.vmap(hkv.unique)(keys)
    table = filled_table(rng)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), table)
    with pytest.raises(NotImplementedError, match="the table cannot"):
        jax.vmap(lambda table: hkv.find_pooled(table, keys)[1].values)(stacked)
    wide = jax.ShapeDtypeStruct((2**16, 2**15, 1, 1), jnp.float32)
    with pytest.raises(ValueError, match=r"fewer than 2\*\*31.*jax\.lax\.map"):
        jax.eval_shape(jax.vmap(hkv.pool), wide)
    many = hkv.Keys(jax.ShapeDtypeStruct((2**16, 2**15, 2), jnp.uint32))
    with pytest.raises(ValueError, match=r"find_rows: .* fewer than 2\*\*31.*jax\.lax\.map"):
        jax.eval_shape(jax.vmap(lambda keys: hkv.find(table, keys)[1].values), many)
