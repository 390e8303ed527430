"""The deduplication of a batch by itself: distinct keys, and what belongs to them spread again."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_pooled
import pytest

import jax_hkv as hkv

DIM = 3


@pytest.mark.parametrize("size", [None, 0, 5, 60, 300])
def test_unique_gives_distinct_keys_in_order_of_first_occurrence(rng, platform, size):
    """Those beyond the size are left out and counted."""
    ids = rng.integers(0, 50, 200).astype(np.uint64) << np.uint64(40)
    valid = rng.random(200) < 0.8
    found = jax.jit(hkv.unique, static_argnames="size")(
        hkv.Keys.from_numpy(ids), valid=valid, size=size
    )
    keys, inverse, counts, count, overflow = oracle_pooled.unique(
        ids, valid, 200 if size is None else size
    )
    np.testing.assert_array_equal(found.keys.to_numpy(), keys)
    np.testing.assert_array_equal(found.inverse, inverse)
    np.testing.assert_array_equal(found.counts, counts)
    assert (int(found.count), int(found.overflow)) == (count, overflow)
    square = hkv.unique(hkv.Keys.from_numpy(ids.reshape(10, 20)))
    assert square.inverse.shape == (10, 20) and int(square.overflow) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [None, 0, 5, 60, 300])
def test_rows_of_distinct_keys_are_spread_over_the_batch(rng, platform, size, dtype):
    """And gradients of positions summed for their keys, against a loop in double precision."""
    ids = rng.integers(0, 50, (20, 10)).astype(np.int32)
    valid = rng.random(ids.shape) < 0.8
    found = hkv.unique(ids, valid=valid, size=size)
    size = found.keys.shape[0]
    assert found.valid.tolist() == [number < int(found.count) for number in range(size)]
    rows = jnp.asarray(rng.integers(-8, 8, (size, DIM)), dtype)
    expanded, pull = jax.vjp(jax.jit(found.expand), rows)
    gradient = jnp.asarray(rng.integers(-8, 8, expanded.shape), dtype)
    (of_rows,) = pull(gradient)
    assert expanded.shape == (20, 10, DIM)
    assert expanded.dtype == of_rows.dtype == rows.dtype and of_rows.shape == rows.shape
    expected, sums = np.zeros((20, 10, DIM)), np.zeros((size, DIM))
    for place, number in np.ndenumerate(np.asarray(found.inverse)):
        if number >= 0:
            expected[place] = np.asarray(rows, np.float64)[number]
            sums[number] += np.asarray(gradient, np.float64)[place]
    np.testing.assert_array_equal(np.asarray(expanded, np.float64), expected)
    np.testing.assert_array_equal(np.asarray(of_rows, np.float64), sums)


@pytest.mark.parametrize("jitted", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_spread_rows_have_the_derivatives_that_indexing_has(jitted):
    """A second and a third one, in reverse mode, and those of several losses at once."""
    found = hkv.unique(np.array([3, 1, 3, 2, 3], np.int32), size=2)
    rows = jnp.arange(4.0).reshape(2, 2)
    index = jnp.where(found.inverse >= 0, found.inverse, 2)  # which reads zeros
    factors = jnp.array([1.0, -2.0, 0.5, 4.0, 2.0])[:, None]

    def loss(expand, rows):
        return jnp.sum(factors * expand(rows) ** 3 * (1 + expand(rows)))

    def by_index(rows):
        return rows.at[index].get(mode="fill", fill_value=0)

    def derivatives(expand):
        first = jax.grad(functools.partial(loss, expand))
        second = jax.grad(lambda rows: jnp.sum(first(rows) ** 2))
        third = jax.grad(lambda rows: jnp.vdot(second(rows), rows))
        several = jax.jacrev(lambda rows: jnp.stack([jnp.sum(expand(rows) ** 2), rows.sum()]))
        hessian = jax.jacrev(first)
        return jitted(lambda rows: [fn(rows) for fn in (first, second, third, several, hessian)])

    for got, expected in zip(
        derivatives(found.expand)(rows), derivatives(by_index)(rows), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        assert np.any(expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_several_losses_are_each_ones_bits(rng, dtype):
    ids = rng.integers(0, 5, 100).astype(np.int32)
    found = hkv.unique(ids, valid=rng.random(100) < 0.9)
    _, pull = jax.vjp(found.expand, jnp.zeros((100, DIM), dtype))
    gradients = jnp.asarray(rng.standard_normal((3, 100, DIM)), dtype)
    each = [pull(gradient)[0] for gradient in gradients]
    for axis in (0, 1, -1):
        (together,) = jax.vmap(pull, in_axes=axis)(jnp.moveaxis(gradients, 0, axis))
        np.testing.assert_array_equal(together, jnp.stack(each))


def test_training_on_distinct_keys_is_training_on_the_batch(rng):
    """To the bit, with a mask and with more room than keys: the padding is no key."""
    ids = rng.integers(0, 30, 64).astype(np.int32) + 1
    valid = rng.random(64) < 0.9
    gradients = rng.standard_normal((64, DIM), np.float32)
    opt = hkv.optim.adagrad(0.1)

    def loss(rows):
        return jnp.sum(rows * gradients)

    def fresh():
        return opt.init(hkv.create(128, DIM))

    table, result = hkv.find_or_insert(fresh(), ids, valid=valid)
    expected = opt.update(table, result, jax.grad(loss)(result.values))
    found = hkv.unique(ids, valid=valid)
    table, result = hkv.find_or_insert(fresh(), found.keys, valid=found.valid)
    got = opt.update(table, result, jax.grad(lambda r: loss(found.expand(r)))(result.values))
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("rows", [np.ones((3, 2), np.float32), np.ones((4, 2), np.int32), None])
def test_rows_that_are_not_of_the_keys_are_refused(rows):
    found = hkv.unique(np.array([5, 6, 5, 7], np.int32))
    with pytest.raises(TypeError, match=r"Unique.expand: rows must be .*\[4, ...\].*got"):
        found.expand(rows)
