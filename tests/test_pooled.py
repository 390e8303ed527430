"""Pooled lookups: sums of bags in bits, combiners, derivatives, jagged and dense ids."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_pooled
import pytest
from combinations import pairs
from jax.sharding import PartitionSpec as P

import jax_hkv as hkv
from jax_hkv import index as _index

DIM = 5
COMBINERS = ("sum", "mean", "sqrtn")
DTYPES = ("float32", "bfloat16", "float16")
LENGTHS = (0, 1, 31, 32, 33, 0, 1000, 1024, 1, 1100)  # 1100 terms: chunks of chunks of chunks
SPLITS = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int32)
PADDING = 7
COUNT = int(SPLITS[-1]) + PADDING


def random_rows(rng, count, dtype="float32", dim=DIM):
    return jnp.asarray(rng.standard_normal((count, dim)), dtype)


def random_weights(rng, *shape):
    return (rng.random(shape) * 2 - 0.5).astype(np.float32)


def filled_table(rng, dtype="float32", capacity=512, **kwargs):
    table = hkv.create(capacity, DIM, dtype=jnp.dtype(dtype), seed=4, **kwargs)
    keys = hkv.Keys.from_numpy(np.arange(300) << 33)
    return hkv.insert_or_assign(table, keys, random_rows(rng, 300, dtype))[0]


def random_ids(rng, *shape):
    """Half of them are in a filled table."""
    return rng.integers(0, 600, shape) << 33


def assert_same_bits(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


def assert_equal_trees(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def reference(rows, bags, batch, weights, valid, combiner):
    """What a combiner means, in jnp, differentiable by JAX."""
    factors = jnp.where(valid, 1.0 if weights is None else weights, 0.0)
    total = functools.partial(jax.ops.segment_sum, segment_ids=bags, num_segments=batch)
    sums = total(factors[:, None] * rows.astype(jnp.float32))
    if combiner == "sum":
        return sums
    divisors = total(factors) if combiner == "mean" else jnp.sqrt(total(factors**2))
    return sums / divisors[:, None]


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bag_is_summed_by_the_fixed_tree(rng, platform, dtype, is_weighted):
    """Bits of the oracle, NaN and infinity among the rows, for bags of no and of many rows."""
    rows = np.array(random_rows(rng, COUNT, dtype))
    rows.view(f"u{rows.itemsize}")[rng.integers(0, COUNT, 4), 0] = {4: 0xFFC12345, 2: 0xFFD3}[
        rows.itemsize
    ]
    rows[rng.integers(0, COUNT, 4), 1] = np.inf
    valid = rng.random(COUNT) < 0.9
    valid[[0, 1, 32]] = True
    weights = random_weights(rng, COUNT) if is_weighted else None
    pooled = hkv.pool(rows, row_splits=SPLITS, weights=weights, valid=valid)
    assert_same_bits(pooled, oracle_pooled.pool(rows, SPLITS, valid, weights))


@pytest.mark.parametrize("fill", ["initial", 0])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pooled_find_sums_what_find_reads(rng, platform, dtype, is_weighted, fill):
    """Absent ids add their initial rows, or nothing; padding adds nothing."""
    table = filled_table(rng, dtype)
    ids = random_ids(rng, COUNT)
    weights = jnp.asarray(random_weights(rng, COUNT)) if is_weighted else None
    bags = hkv.Jagged(hkv.Keys.from_numpy(ids), jnp.asarray(SPLITS), weights)
    _, pooled = hkv.find_pooled(table, bags, fill=fill)
    words = ids.astype(np.uint64)
    found = oracle.Oracle.from_table(table).find(words, fill=fill)
    inside = np.arange(COUNT) < SPLITS[-1]
    adds = inside if fill == "initial" else inside & found.found
    given = None if weights is None else np.asarray(weights)
    assert_same_bits(pooled.values, oracle_pooled.pool(found.values, SPLITS, adds, given))
    np.testing.assert_array_equal(pooled.found, found.found & inside)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_weights_are_divided_with_one_rounding(rng, platform, combiner, is_weighted):
    """Bits of the oracle, with quotients and squares that are subnormal."""
    rows, valid = random_rows(rng, COUNT, np.float32), rng.random(COUNT) < 0.9
    weights = random_weights(rng, COUNT) if is_weighted else None
    if is_weighted:
        weights[:40] *= np.repeat(np.float32([1e-38, 1e-20]), 20)
    quotients = oracle_pooled.quotients(SPLITS, valid, weights, combiner)
    pooled = hkv.pool(rows, row_splits=SPLITS, weights=weights, valid=valid, combiner=combiner)
    assert_same_bits(pooled, oracle_pooled.pool(rows, SPLITS, valid, quotients))
    table = hkv.create(1024, DIM)
    bags = hkv.Jagged(hkv.Keys.from_numpy(random_ids(rng, COUNT)), jnp.asarray(SPLITS), weights)
    _, result = hkv.find_or_insert_pooled(table, bags, combiner=combiner)
    inside = np.arange(COUNT) < SPLITS[-1]
    expected = oracle_pooled.quotients(SPLITS, inside, weights, combiner)
    assert_same_bits(result.bags.weights, expected)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("combiner", COMBINERS)
def test_combiners_mean_what_tensorflow_means(rng, combiner, is_weighted):
    """To 1e-6 of float64; the divisor counts valid ids, absent ones among them."""
    table = filled_table(rng)
    ids = hkv.Keys.from_numpy(random_ids(rng, 40, 6))
    valid = rng.random((40, 6)) < 0.7
    valid[3] = False
    weights = rng.random((40, 6)).astype(np.float32) if is_weighted else None
    find = functools.partial(hkv.find_pooled, table, ids, combiner=combiner, valid=valid)
    splits = np.arange(41) * 6
    given = None if weights is None else weights.reshape(-1)
    for fill in ("initial", 0):
        _, rows = hkv.find(table, ids, fill=fill)
        flat = np.asarray(rows.values).reshape(-1, DIM)
        expected = oracle_pooled.combine(flat, splits, valid.reshape(-1), given, combiner)
        _, pooled = find(weights=weights, fill=fill)
        np.testing.assert_allclose(pooled.values, expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(pooled.found, np.asarray(rows.found) & valid)
    dense = hkv.pool(flat.reshape(40, 6, DIM), weights=weights, valid=valid, combiner=combiner)
    np.testing.assert_allclose(dense, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_a_bag_without_ids_or_weight_is_zero_and_so_is_its_derivative(combiner):
    """Empty, wholly masked, and of weight zero; NaN in masked weights stays out."""
    rows = jnp.ones((3, 2, DIM), jnp.float32)
    valid = jnp.array([[False, False], [True, True], [True, False]])
    weights = jnp.array([[jnp.nan, 1.0], [0.0, 0.0], [2.0, jnp.nan]], jnp.float32)

    def loss(rows, weights):
        return jnp.sum(hkv.pool(rows, weights=weights, valid=valid, combiner=combiner))

    pooled = hkv.pool(rows, weights=weights, valid=valid, combiner=combiner)
    kept = {"sum": 2.0, "mean": 1.0, "sqrtn": 1.0}[combiner]
    np.testing.assert_array_equal(pooled, np.array([[0.0], [0.0], [kept]]) * np.ones((1, DIM)))
    of_rows, of_weights = jax.grad(loss, (0, 1))(rows, weights)
    assert np.isfinite(of_rows).all() and np.isfinite(of_weights).all()
    assert not np.asarray(of_rows)[0].any() and not np.asarray(of_weights)[~np.asarray(valid)].any()
    empty = hkv.pool(rows[:0].reshape(0, DIM), row_splits=np.zeros(4, np.int32), combiner=combiner)
    np.testing.assert_array_equal(empty, np.zeros((3, DIM)))
    table = hkv.create(128, DIM)
    nothing = hkv.Jagged.from_lists([[], []])
    _, found = hkv.find_pooled(table, nothing, combiner=combiner)
    np.testing.assert_array_equal(found.values, np.zeros((2, DIM)))
    none = hkv.find_pooled(table, hkv.Jagged.from_lists([], capacity=3), combiner=combiner)[1]
    assert none.values.shape == (0, DIM) and none.found.shape == (3,)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_jagged_and_dense_ids_of_equal_content_give_the_same_bits(rng, combiner):
    """One is the other with its masked places left out."""
    table = filled_table(rng)
    lengths = rng.integers(0, 7, 30)
    valid = np.arange(6) < lengths[:, None]
    ids = np.where(valid, random_ids(rng, 30, 6), 0)
    weights = rng.random((30, 6)).astype(np.float32)
    lists = [ids[bag, :length].tolist() for bag, length in enumerate(lengths)]
    factors = [weights[bag, :length].tolist() for bag, length in enumerate(lengths)]
    keys = hkv.Keys.from_numpy(ids)
    for given, listed in ((weights, factors), (None, None)):
        dense = hkv.find_pooled(table, keys, weights=given, valid=valid, combiner=combiner)[1]
        bags = hkv.Jagged.from_lists(lists, weights=listed, capacity=200)
        jagged = hkv.find_pooled(table, bags, combiner=combiner)[1]
        assert_same_bits(dense.values, jagged.values)
        one, dense = hkv.find_or_insert_pooled(
            table, keys, weights=given, valid=valid, combiner=combiner
        )
        other, jagged = hkv.find_or_insert_pooled(table, bags, combiner=combiner)
        assert_same_bits(dense.values, jagged.values)
        assert_equal_trees(one, other)


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("policy", ["LRU", "LFU", "CUSTOM"])
def test_a_pooled_insert_changes_the_table_as_find_or_insert_does(rng, policy, combiner):
    """And its values are the rows that it returns, times the weights of its bags, in bits."""
    table = hkv.create(128, DIM, policy=hkv.Policy[policy], seed=9)
    scores = rng.integers(0, 9, (60, 4)).astype(np.uint32) if policy != "LRU" else None
    refused = 0
    for _ in range(3):
        ids = hkv.Keys.from_numpy(rng.integers(0, 400, (60, 4)))
        valid = rng.random((60, 4)) < 0.8
        weights = random_weights(rng, 60, 4)
        plain, rows = hkv.find_or_insert(table, ids, valid=valid, scores=scores)
        table, result = hkv.find_or_insert_pooled(
            *(table, ids),
            combiner=combiner,
            weights=weights,
            valid=valid,
            scores=scores,
            return_evicted=True,
        )
        assert_equal_trees(plain, table)
        for field in ("keys", "slots", "status", "counts", "groups", "unique_slots"):
            assert_equal_trees(getattr(rows, field), getattr(result, field))
        assert int(result.evicted.count) == int(result.counts.evicted)
        flat = np.asarray(rows.values).reshape(-1, DIM)
        factors = np.asarray(result.bags.weights)
        expected = oracle_pooled.pool(flat, np.asarray(result.bags.splits), valid.ravel(), factors)
        assert_same_bits(result.values, expected)
        refused += int(result.counts.refused)
    assert refused > 0  # more distinct ids than slots


@pytest.mark.parametrize("combiner, is_weighted, dtype", pairs(COMBINERS, [False, True], DTYPES))
def test_derivatives_by_rows_and_weights_are_those_of_jnp(rng, combiner, is_weighted, dtype):
    """jax.grad of a segment sum, for jagged and for dense rows."""
    lengths = rng.integers(1, 50, 12)
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    count = int(splits[-1])
    bags = np.repeat(np.arange(12), lengths)
    rows = random_rows(rng, count, dtype)
    weights = jnp.asarray(rng.random(count) + 0.5, jnp.float32) if is_weighted else None
    valid = rng.random(count) < 0.8
    valid[splits[:-1]] = True
    target = random_rows(rng, 12)

    def loss(pool, rows, weights):
        return jnp.sum(jnp.sin(pool(rows, weights)) * target)

    def own(rows, weights):
        return hkv.pool(rows, row_splits=splits, weights=weights, valid=valid, combiner=combiner)

    def jnps(rows, weights):
        return reference(rows, bags, 12, weights, valid, combiner)

    which = (1, 2) if is_weighted else (1,)
    expected = jax.grad(loss, which)(jnps, rows, weights)
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    for grad in (jax.grad(loss, which), jax.jit(jax.grad(loss, which), static_argnums=0)):
        got = grad(own, rows, weights)
        assert got[0].dtype == rows.dtype
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(
                np.asarray(a, np.float32), np.asarray(b, np.float32), tolerance, 1e-5
            )


@pytest.mark.parametrize("combiner", COMBINERS)
def test_weights_of_a_lookup_are_differentiable(rng, combiner):
    """By find_pooled and by find_or_insert_pooled, absent ids and masked places among them."""
    table = filled_table(rng)
    ids = hkv.Keys.from_numpy(random_ids(rng, 20, 5))
    valid = rng.random((20, 5)) < 0.8
    valid[:, 0] = True
    weights = jnp.asarray(rng.random((20, 5)) + 0.5, jnp.float32)
    target = random_rows(rng, 20)
    _, rows = hkv.find(table, ids, fill="initial")

    def expected(weights):
        flat = rows.values.reshape(-1, DIM), np.repeat(np.arange(20), 5), 20
        pooled = reference(*flat, weights.reshape(-1), valid.reshape(-1), combiner)
        return jnp.sum(jnp.sin(pooled) * target)

    def loss(lookup, weights):
        after, result = lookup(table, ids, weights=weights, valid=valid, combiner=combiner)
        return jnp.sum(jnp.sin(result.values) * target), after

    for lookup in (hkv.find_pooled, hkv.find_or_insert_pooled):
        got, after = jax.grad(functools.partial(loss, lookup), has_aux=True)(weights)
        np.testing.assert_allclose(got, jax.grad(expected)(weights), rtol=1e-5, atol=1e-5)
        assert isinstance(after, hkv.Table)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_the_bags_of_a_result_carry_the_gradient_to_every_row(rng, combiner):
    """weights[i] * d_pooled[sources[i]], summed for equal keys, as JAX has it."""
    ids = rng.integers(0, 40, (30, 6))
    valid = rng.random((30, 6)) < 0.8
    weights = rng.random((30, 6)).astype(np.float32) + 0.5
    _, result = hkv.find_or_insert_pooled(
        *(hkv.create(128, DIM), hkv.Keys.from_numpy(ids)),
        combiner=combiner,
        weights=weights,
        valid=valid,
    )
    of_bags = random_rows(rng, 30)
    bags = result.bags
    terms = _index.Terms(of_bags, bags.sources, bags.weights)
    sums = _index.combine(result.groups, terms)
    numbers = np.asarray(result.groups.inverse)

    def pooled(distinct):
        rows = distinct[np.maximum(numbers, 0)]
        flat = weights.reshape(-1), valid.reshape(-1)
        return jnp.sum(reference(rows, np.repeat(np.arange(30), 6), 30, *flat, combiner) * of_bags)

    expected = jax.grad(pooled)(jnp.ones((180, DIM), jnp.float32))
    np.testing.assert_allclose(sums, expected, rtol=1e-5, atol=1e-5)


def step_of(lookup, **options):
    def step(table, keys, weights):
        def loss(weights):
            after, result = lookup(table, keys, weights=weights, **options)
            return jnp.sum(result.values**2), (after, result)

        gradient, (after, result) = jax.grad(loss, has_aux=True)(weights)
        after, _ = hkv.find_or_insert(after, keys)
        return after, (gradient, result.values)

    return step


LOOKUPS = {
    "find": (hkv.find_pooled, {"combiner": "mean"}),
    "find without absent": (hkv.find_pooled, {"fill": 0}),
    "find_or_insert": (hkv.find_or_insert_pooled, {"combiner": "sqrtn"}),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_steps_that_differentiate_weights_copy_no_table(rng, name):
    """In jit, in scan and under remat; scan gives what the steps give one by one."""
    lookup, options = LOOKUPS[name]
    step = step_of(lookup, **options)
    table = hkv.create(1024, DIM)
    keys = hkv.Keys.from_numpy(random_ids(rng, 3, 16, 4))
    weights = jnp.asarray(random_weights(rng, 3, 16, 4))
    hkv.testing.assert_no_table_copies(step, table, keys[0], weights[0])
    hkv.testing.assert_no_table_copies(
        lambda t, k: hkv.find_or_insert(lookup(t, k, **options)[0], k), table, keys[0]
    )

    def scanned(table, keys, weights):
        return jax.lax.scan(lambda t, x: step(t, *x), table, (keys, weights))

    hkv.testing.assert_no_table_copies(scanned, table, keys, weights)
    last, (_, values) = jax.jit(scanned)(table, keys, weights)
    for number in range(3):
        table, (_, expected) = jax.jit(step)(table, keys[number], weights[number])
        np.testing.assert_allclose(values[number], expected, rtol=1e-6, atol=1e-6)
    assert_equal_trees(last, table)


def test_remat_keeps_the_named_rows_and_inserts_once(rng):
    """The rows that weights are differentiated with are saved under the same name."""
    keys = hkv.Keys.from_numpy(random_ids(rng, 16, 4))
    policy = jax.checkpoint_policies.save_only_these_names(hkv.ROWS_NAME)

    def loss(weights, table, remat):
        def forward(weights, table):
            table, result = hkv.find_or_insert_pooled(table, keys, weights=weights)
            return jnp.sum(jnp.sin(result.values)), table

        return (jax.checkpoint(forward, policy=policy) if remat else forward)(weights, table)

    def gradient(table, weights, remat):
        return jax.grad(loss, has_aux=True)(weights, table, remat)

    weights = jnp.asarray(random_weights(rng, 16, 4))
    plain, table = jax.jit(gradient, static_argnums=2)(hkv.create(256, DIM), weights, False)
    saved, other = jax.jit(gradient, static_argnums=2)(hkv.create(256, DIM), weights, True)
    np.testing.assert_allclose(plain, saved, rtol=1e-6)
    assert_equal_trees(table, other)
    remat = functools.partial(gradient, remat=True)
    hkv.testing.assert_no_table_copies(remat, hkv.create(256, DIM), weights)


@pytest.mark.parametrize("is_shared", [False, True])
def test_shard_map_pools_from_every_devices_own_table(rng, is_shared):
    """Weights split over the devices, or shared by them: then their gradients are summed."""
    mesh = jax.make_mesh(
        (2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2]
    )
    tables = [filled_table(rng) for _ in range(2)]
    stacked = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *tables)
    keys = hkv.Keys.from_numpy(random_ids(rng, 8, 4))
    weights = jnp.asarray(random_weights(rng, 4 if is_shared else 8, 4))
    step = step_of(hkv.find_or_insert_pooled, combiner="sqrtn")
    spec = P() if is_shared else P("d")
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P("d"), P("d"), spec), out_specs=(P("d"), (spec, P("d")))
    )
    hkv.testing.assert_no_table_copies(mapped, stacked, keys, weights)
    _, (gradient, values) = jax.jit(mapped)(stacked, keys, weights)
    own = [
        jax.jit(step)(
            tables[d], keys[4 * d : 4 * d + 4], weights[(0 if is_shared else 4 * d) :][:4]
        )
        for d in range(2)
    ]
    np.testing.assert_allclose(values, jnp.concatenate([r[1][1] for r in own]), 1e-6, 1e-6)
    gradients = [r[1][0] for r in own]
    expected = sum(gradients) if is_shared else jnp.concatenate(gradients)
    np.testing.assert_allclose(gradient, expected, 1e-5, 1e-5)


def test_x64_changes_nothing(rng):
    """Neither values nor types."""
    lists = [rng.integers(-(2**63), 2**63 - 1, size).tolist() for size in (3, 0, 5)]
    weights = [rng.random(len(bag)).tolist() for bag in lists]

    def run():
        bags = hkv.Jagged.from_lists(lists, weights=weights)
        table, result = hkv.find_or_insert_pooled(hkv.create(128, DIM), bags, combiner="sqrtn")
        of_weights = jax.grad(lambda w: hkv.pool(jnp.ones((2, 3, 4), jnp.float32), weights=w).sum())
        gradient = of_weights(jnp.ones((2, 3), jnp.float32))
        return table, result, hkv.find_pooled(table, bags)[1], gradient, hkv.unique(bags.ids)

    expected = run()
    with jax.enable_x64(True):
        got = run()
    assert_equal_trees(got, expected)
    assert [x.dtype for x in jax.tree.leaves(got)] == [x.dtype for x in jax.tree.leaves(expected)]


def test_a_pooled_read_outside_a_trace_returns_the_same_table():
    """With weights too."""
    table = hkv.create(128, DIM)
    ids = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert hkv.find_pooled(table, ids)[0] is table
    assert hkv.find_pooled(table, ids, weights=np.ones((2, 3), np.float32))[0] is table


@pytest.mark.parametrize("weights", [None, np.ones((2, 3), np.float32)])
def test_a_table_is_not_differentiated_by_a_pooled_lookup(weights):
    """The error says what is differentiated instead."""
    ids = np.arange(6, dtype=np.int32).reshape(2, 3)

    def loss(table):
        return hkv.find_pooled(table, ids, weights=weights)[1].values.sum()

    with pytest.raises(NotImplementedError, match=r"pool_rows.*never differentiated.*values"):
        jax.grad(loss, allow_int=True)(hkv.create(128, DIM))


def test_ids_of_any_batch_shape_pool_their_last_axis(rng):
    """A single bag, and a batch of batches."""
    table = filled_table(rng)
    ids = hkv.Keys.from_numpy(random_ids(rng, 2, 3, 4))
    _, all_bags = hkv.find_pooled(table, ids)
    assert all_bags.values.shape == (2, 3, DIM) and all_bags.found.shape == (2, 3, 4)
    _, one_bag = hkv.find_pooled(table, ids[1, 2])
    assert_same_bits(all_bags.values[1, 2], one_bag.values)
    _, result = hkv.find_or_insert_pooled(table, ids)
    assert result.values.shape == (2, 3, DIM) and result.slots.shape == (2, 3, 4)
    assert result.bags.weights is None and result.bags.splits.tolist() == list(range(0, 25, 4))


def test_jagged_from_lists_keeps_64_bits_and_pads():
    """Numbers from -2^63 to 2^64 - 1, in lists and in arrays."""
    lists = [[2**64 - 1, -1], [], np.array([-(2**63), 7]), np.array([2**63], np.uint64)]
    bags = hkv.Jagged.from_lists(lists, capacity=7, weights=[[1, 2], [], [3, 4], [5]])
    expected = [2**64 - 1, 2**64 - 1, 2**63, 7, 2**63, 0, 0]
    np.testing.assert_array_equal(bags.ids.to_numpy(), np.array(expected, np.uint64))
    assert bags.row_splits.tolist() == [0, 2, 2, 4, 5] and bags.row_splits.dtype == np.int32
    assert bags.weights.tolist() == [1, 2, 3, 4, 5, 0, 0]


IDS = np.zeros(4, np.int32)
ONES = np.ones((4, DIM), np.float32)


def jagged(splits=(0, 4), ids=IDS, weights=None):
    return hkv.Jagged(ids, np.array(splits, np.int32), weights)


BAD_CALLS = {
    "float ids": (lambda t: hkv.find_pooled(t, ONES), TypeError, "find_pooled: ids.*float32.*hash"),
    "float jagged ids": (
        lambda t: hkv.find_or_insert_pooled(t, jagged(ids=ONES[:, 0])),
        TypeError,
        r"find_or_insert_pooled: ids\.ids.*float32",
    ),
    "one id": (lambda t: hkv.find_pooled(t, np.array(3, np.int32)), ValueError, r"hotness"),
    "ids with axes": (lambda t: hkv.find_pooled(t, jagged(ids=IDS[None])), ValueError, "be flat"),
    "weights of another shape": (
        lambda t: hkv.find_pooled(t, IDS[None], weights=np.ones((1, 3), np.float32)),
        TypeError,
        r"find_pooled: weights must be float32\[1, 4\].*float32\[1, 3\]",
    ),
    "half weights": (
        lambda t: hkv.pool(ONES[None], weights=jnp.ones((1, 4), jnp.bfloat16)),
        TypeError,
        r"pool: weights must be float32.*bfloat16\[1, 4\].*astype",
    ),
    "jagged weights of another length": (
        lambda t: hkv.find_pooled(t, jagged(weights=np.ones(3, np.float32))),
        TypeError,
        r"weights must be float32\[4\].*\[3\]",
    ),
    "weights beside a Jagged": (
        lambda t: hkv.find_pooled(t, jagged(), weights=np.ones(4, np.float32)),
        ValueError,
        "weights cannot be given beside a Jagged",
    ),
    "a mask beside a Jagged": (
        lambda t: hkv.find_pooled(t, jagged(), valid=np.ones(2, bool)),
        TypeError,
        r"valid must be bool\[4\] like the keys, got bool\[2\]",
    ),
    "a mask of another shape": (
        lambda t: hkv.find_pooled(t, IDS[None], valid=np.ones(4, bool)),
        TypeError,
        r"find_pooled: valid must be bool\[1, 4\]",
    ),
    "splits of 16 bits": (
        lambda t: hkv.find_pooled(t, hkv.Jagged(IDS, np.array([0, 4], np.int16))),
        TypeError,
        r"ids\.row_splits must be int32 or int64 \[batch \+ 1\], got int16\[2\].*from_lists",
    ),
    "splits in a list": (
        lambda t: hkv.pool(ONES, row_splits=[0, 4]),
        TypeError,
        "pool: row_splits.*got list",
    ),
    "no splits": (lambda t: hkv.find_pooled(t, jagged(())), TypeError, r"row_splits.*int32\[0\]"),
    "splits from 1": (lambda t: hkv.find_pooled(t, jagged((1, 4))), ValueError, "start at 0"),
    "splits that decrease": (
        lambda t: hkv.find_pooled(t, jagged((0, 3, 2, 4))),
        ValueError,
        r"not decrease.*\[0, 3, 2, 4\].*cumulative",
    ),
    "splits beyond the ids": (
        lambda t: hkv.find_or_insert_pooled(t, jagged((0, 5))),
        ValueError,
        r"find_or_insert_pooled: ids\.row_splits.*end at 4.*\[0, 5\]",
    ),
    "combiner": (
        lambda t: hkv.find_or_insert_pooled(t, IDS[None], combiner="max"),
        ValueError,
        "find_or_insert_pooled: combiner must be one of 'sum', 'mean', 'sqrtn', got 'max'",
    ),
    "fill": (lambda t: hkv.find_pooled(t, IDS[None], fill=1.0), ValueError, "fill must be .*1.0"),
    "scores": (
        lambda t: hkv.find_or_insert_pooled(t, IDS[None], scores=np.ones(4, np.uint32)),
        ValueError,
        "find_or_insert_pooled: scores are not accepted under Policy.LRU",
    ),
    "integer rows": (lambda t: hkv.pool(IDS[None, None]), TypeError, "pool: rows must be float32"),
    "rows with axes": (
        lambda t: hkv.pool(ONES[None], row_splits=np.array([0, 1], np.int32)),
        TypeError,
        r"pool: rows.*\[n, dim\] with row_splits, got float32\[1, 4, 5\]",
    ),
    "rows without elements": (
        lambda t: hkv.pool(ONES[None, :, :0]),
        TypeError,
        r"pool: rows.*dim from 1 on.*got float32\[1, 4, 0\]",
    ),
    "no rows": (lambda t: hkv.pool(None), TypeError, "pool: rows must be .* got NoneType"),
    "weights that are none": (
        lambda t: hkv.pool(ONES[None], weights="a"),
        TypeError,
        r"pool: weights must be float32\[1, 4\], one for each id, got str",
    ),
    "masked weights": (
        lambda t: hkv.pool(ONES[None], weights=np.ma.ones((1, 4), np.float32)),
        TypeError,
        r"pool: weights must be float32\[1, 4\].* got MaskedArray",
    ),
    "no table": (lambda t: hkv.find_pooled(None, IDS), TypeError, "find_pooled: table"),
    "a float in a list": (
        lambda t: hkv.Jagged.from_lists([[1], [2, 3.5]]),
        TypeError,
        r"from_lists: bag 1 must hold integers, got float 3\.5",
    ),
    "floats in an array": (
        lambda t: hkv.Jagged.from_lists([np.ones(2)]),
        TypeError,
        r"bag 0 must hold integers along one axis, got float64\[2\]",
    ),
    "flat weights": (
        lambda t: hkv.Jagged.from_lists([[1, 2]], weights=[1.0, 2.0]),
        TypeError,
        r"from_lists: weights must be a list of numbers for each bag, got list \[1\.0, 2\.0\]",
    ),
    "too wide": (lambda t: hkv.Jagged.from_lists([[2**64]]), ValueError, "64 bits, got 18446"),
    "capacity": (
        lambda t: hkv.Jagged.from_lists([[1, 2], [3]], capacity=2),
        ValueError,
        "capacity must be at least the number of ids, 3, got 2",
    ),
    "lists of weights": (
        lambda t: hkv.Jagged.from_lists([[1, 2], [3]], weights=[[1.0, 1.0], [1.0, 2.0]]),
        ValueError,
        r"weights must be one for each id.*is 1: give \[1\] weights there, got \[2\]",
    ),
    "lengths of another sum": (
        lambda t: hkv.Jagged.from_lengths([1, 2, 3], [1, 1]),
        ValueError,
        r"from_lengths: lengths must .*number of values, \[3\]; got a sum of 2",
    ),
    "negative lengths": (
        lambda t: hkv.Jagged.from_lengths([1], [2, -1]),
        ValueError,
        "from_lengths: lengths must be from 0 on.*least length of -1",
    ),
    "lengths of floats": (
        lambda t: hkv.Jagged.from_lengths([1], [1.0]),
        TypeError,
        r"lengths must be integers along one axis, got float64\[1\]: give an array whose dtype",
    ),
    "values with axes": (
        lambda t: hkv.Jagged.from_lengths(np.array([[1], [2]]), [1, 1]),
        TypeError,
        r"from_lengths: values must be integers along one axis, got int64\[2, 1\]: flatten them",
    ),
    "values of floats": (
        lambda t: hkv.Jagged.from_lengths(np.ones(2), [2]),
        TypeError,
        "from_lengths: values must be integers.*float64",
    ),
    "a list with a float": (
        lambda t: hkv.Jagged.from_lengths([1, 1.5], [2]),
        TypeError,
        "from_lengths: values must hold integers, got float 1.5: hash or cast",
    ),
    "weights of other values": (
        lambda t: hkv.Jagged.from_lengths([1, 2], [2], weights=[1.0]),
        ValueError,
        "from_lengths: weights must be one for each of the 2 values, got 1",
    ),
    "capacity for lengths": (
        lambda t: hkv.Jagged.from_lengths([1, 2], [2], capacity=1),
        ValueError,
        "from_lengths: capacity must be at least the number of ids, 2, got 1",
    ),
    "unique of floats": (lambda t: hkv.unique(ONES), TypeError, "unique: keys.*float32"),
    "unique size": (lambda t: hkv.unique(IDS, size=-1), ValueError, "unique: size"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_wrong_call_names_the_argument_and_the_remedy(name):
    """Before anything runs."""
    call, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message):
        call(hkv.create(128, DIM))


def test_splits_that_do_not_fit_read_nothing_outside_the_batch():
    """Where they are not known while tracing, they are cut to the batch."""
    rows = jnp.ones((4, DIM), jnp.float32)
    pool = jax.jit(lambda splits: hkv.pool(rows, row_splits=splits))
    pooled = pool(jnp.array([-5, 3, 900, 2, 2**31 - 1], jnp.int32))
    assert np.isfinite(pooled).all() and pooled.shape == (4, DIM)


def test_no_bags_have_no_weights():
    bags = hkv.Jagged.from_lists([], weights=[])
    assert bags.row_splits.tolist() == [0] and bags.weights.shape == (0,)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_remat_with_named_rows_looks_bags_up_once(is_weighted):
    """What is saved by its name is not computed again."""
    table, ids = hkv.create(128, DIM), np.array([[1, 2], [3, 4]], np.int32)

    def loss(dense, weights, table):
        given = weights if is_weighted else None
        _, result = hkv.find_or_insert_pooled(table, ids, weights=given)
        return jnp.sum(jnp.tanh(result.values @ dense))

    policy = jax.checkpoint_policies.save_only_these_names("hkv_rows")
    gradient = jax.grad(jax.checkpoint(loss, policy=policy), argnums=(0, 1))
    arguments = (jnp.ones((DIM, 1), jnp.float32), jnp.ones((2, 2), jnp.float32), table)
    hlo = jax.jit(gradient).lower(*arguments).compile().as_text()
    names = ("jax_hkv.upsert", "jax_hkv.pool_rows", "jax_hkv.gather_rows")
    assert [hlo.count(f'custom_call_target="{name}"') for name in names] == [1, 1, int(is_weighted)]
