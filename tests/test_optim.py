"""The sparse update: optax on touched rows only."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_hkv as hkv
from jax_hkv import index as _index

DIM = 6
ONE_SGD = optax.sgd(0.1)
VOCABULARY = 64
TRANSFORMATIONS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda: optax.adagrad(0.1),
    "adam": lambda: optax.adam(0.01),
    "adamw": lambda: optax.adamw(0.01, weight_decay=0.1),
    "rmsprop": lambda: optax.rmsprop(0.01),
    "chain": lambda: optax.chain(optax.clip(0.5), optax.scale_by_adam(), optax.scale(-0.01)),
    "schedule": lambda: optax.adam(optax.exponential_decay(0.1, 3, 0.5)),
}


def row_of_each_key(table, leaf):
    """Rows of a leaf by key; every key of the vocabulary is present."""
    _, result = hkv.find(table, hkv.Keys.from_numpy(np.arange(VOCABULARY)))
    assert bool(result.found.all())
    return np.asarray(leaf)[np.asarray(result.slots)]


def dense_step(transformation, params, state, touched, gradients):
    """optax on all rows, kept only where touched; shared leaves advance."""
    updates, new_state = transformation.update(gradients, state, params)
    mask = touched[:, None]

    def keep(new, old):
        return jnp.where(mask, new, old) if new.ndim == 2 else new

    return keep(params + updates, params), jax.tree.map(keep, new_state, state)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_an_update_is_optax_on_the_touched_rows_with_equal_keys_gradients_summed(rng, name):
    """Section 4 of the issue: duplicates summed, untouched rows and their state unchanged."""
    transformation = TRANSFORMATIONS[name]()
    opt = hkv.optim.sparse(transformation)
    table = opt.init(hkv.create(256, DIM, seed=3))
    everything = hkv.Keys.from_numpy(np.arange(VOCABULARY))
    table, first = hkv.find_or_insert(table, everything)
    params = first.values
    state = transformation.init(params)

    @jax.jit
    def step(table, keys, valid, gradients):
        table, result = hkv.find_or_insert(table, keys, valid=valid)
        return opt.update(table, result, gradients)

    for _ in range(12):
        ids = rng.integers(0, VOCABULARY, 30)
        valid = rng.random(30) < 0.8
        gradients = rng.standard_normal((30, DIM)).astype(np.float32)
        table = step(table, hkv.Keys.from_numpy(ids), valid, gradients)
        summed = np.zeros((VOCABULARY, DIM), np.float32)
        np.add.at(summed, ids[valid], gradients[valid])
        touched = np.isin(np.arange(VOCABULARY), ids[valid])
        params, state = dense_step(transformation, params, state, touched, summed)

    np.testing.assert_allclose(row_of_each_key(table, table.values), params, rtol=2e-6, atol=1e-6)
    rows, shared = table.optimizer.structure.split(state)
    assert table.optimizer.rows.keys() == rows.keys()
    for name, expected in rows.items():
        got = row_of_each_key(table, table.optimizer.rows[name])
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-6)
    assert table.optimizer.shared.keys() == shared.keys()
    for name, expected in shared.items():
        np.testing.assert_array_equal(table.optimizer.shared[name], expected)


def test_new_rows_start_fresh_and_evicted_rows_take_their_state_along(rng):
    """Nobody inherits a victim's moments."""
    opt = hkv.optim.sparse(optax.adagrad(0.1, initial_accumulator_value=0.25))
    table = opt.init(hkv.create(128, DIM))
    table, result = hkv.find_or_insert(table, hkv.Keys.from_numpy(np.arange(128)))
    table = opt.update(table, result, rng.standard_normal((128, DIM)).astype(np.float32))
    before = np.asarray(table.optimizer.rows["0.sum_of_squares"])
    rows = np.asarray(table.values)

    table, new = hkv.find_or_insert(
        table, hkv.Keys.from_numpy(np.arange(1000, 1040)), return_evicted=True
    )
    slots = np.asarray(new.slots)
    after = np.asarray(table.optimizer.rows["0.sum_of_squares"])
    assert (after[slots] == 0.25).all()
    untouched = np.setdiff1d(np.arange(128), slots)
    np.testing.assert_array_equal(after[untouched], before[untouched])
    assert int(new.evicted.count) == 40
    np.testing.assert_array_equal(new.evicted.optimizer["0.sum_of_squares"], before[slots])
    np.testing.assert_array_equal(new.evicted.values, rows[slots])


def test_several_lookups_make_one_step_together(rng):
    """A layer called twice, or several features on one table: one sum for equal keys."""
    opt = hkv.optim.sparse(optax.adam(0.05))
    ids = rng.integers(0, 20, (2, 15))
    gradients = rng.standard_normal((2, 15, DIM)).astype(np.float32)
    table = opt.init(hkv.create(256, DIM))
    _, expected = table, None
    table, one = hkv.find_or_insert(table, hkv.Keys.from_numpy(ids[0]))
    table, other = hkv.find_or_insert(table, hkv.Keys.from_numpy(ids[1]))
    joined = opt.update(table, [one, other], list(gradients))

    table, both = hkv.find_or_insert(table, hkv.Keys.from_numpy(ids))
    expected = opt.update(table, both, gradients)
    np.testing.assert_array_equal(joined.values, expected.values)
    assert joined.optimizer.shared == expected.optimizer.shared == {"0.count": 1}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_rows_are_updated_in_their_own_type(dtype):
    """Rows keep the table's type."""
    opt = hkv.optim.sparse(optax.sgd(0.5))
    table = opt.init(hkv.create(128, DIM, dtype=dtype, init=hkv.initializers.ones()))
    table, result = hkv.find_or_insert(table, hkv.Keys.from_numpy(np.array([7, 7])))
    table = opt.update(table, result, jnp.full((2, DIM), 0.25, dtype))
    _, found = hkv.find(table, hkv.Keys.from_numpy(np.array([7])))
    assert found.values.dtype == dtype
    np.testing.assert_array_equal(found.values.astype(jnp.float32), np.full((1, DIM), 0.75))


def test_extra_arguments_reach_the_transformation():
    """optax transformations may take more than gradients and parameters."""

    def update(updates, state, params=None, *, factor):
        return jax.tree.map(lambda g: factor * g, updates), state

    transformation = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    opt = hkv.optim.sparse(transformation)
    table = opt.init(hkv.create(128, DIM, init=hkv.initializers.zeros()))
    table, result = hkv.find_or_insert(table, hkv.Keys.from_numpy(np.array([1])))
    table = opt.update(table, result, jnp.ones((1, DIM), jnp.float32), factor=3.0)
    np.testing.assert_array_equal(hkv.find(table, result.keys)[1].values, np.full((1, DIM), 3.0))


# What shows only with the arguments of an update: a norm over all rows, and a line search.
MIXING = {
    "norm": (optax.polyak_sgd(), {"value": 3.0}),
    "search": (
        optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(5)),
        {"value": 3.0, "grad": np.ones((3, 2), np.float32), "value_fn": jnp.sum},
    ),
}


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jitted", "eager"])
@pytest.mark.parametrize("name", MIXING)
def test_a_transformation_that_mixes_rows_by_its_arguments_is_refused(name, jit):
    """At the first step, which has them."""
    transformation, extra = MIXING[name]
    opt = hkv.optim.sparse(transformation)
    table = opt.init(hkv.create(128, 2))
    table, result = hkv.find_or_insert(table, np.arange(3, dtype=np.int32))

    @jit
    def step(table, value):
        return opt.update(table, result, jnp.ones((3, 2), jnp.float32), **{**extra, "value": value})

    with pytest.raises(ValueError, match=r"optim.sparse: .*mixes.*count_per_row=True"):
        step(table, 3.0)


def test_a_transformation_that_sees_each_row_alone_may_take_any_argument():
    """The remedy that the refusal names: a row moves as it does without the others."""
    opt = hkv.optim.sparse(optax.polyak_sgd(), count_per_row=True)
    moved = []
    for keys in ([1], [1, 2]):
        table = opt.init(hkv.create(128, 2, init=hkv.initializers.zeros()))
        table, result = hkv.find_or_insert(table, np.array(keys, np.int32))
        gradients = jnp.array([[1.0, 2.0], [8.0, 8.0]], jnp.float32)[: len(keys)]
        table = jax.jit(opt.update)(table, result, gradients, value=jnp.float32(3.0))
        moved.append(hkv.find(table, np.array([1], np.int32))[1].values.tolist())
    np.testing.assert_allclose(moved, [[[-0.6, -1.2]]] * 2, rtol=1e-6)


def test_arguments_that_mix_no_rows_are_taken_by_any_kind_of_step():
    """The rate falls once the loss does not; the check of rows runs inside of the step's trace."""
    transformation = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(0.5, patience=1))
    opt = hkv.optim.sparse(transformation)
    table = opt.init(hkv.create(128, 1, init=hkv.initializers.zeros()))

    def step(table, value):
        table, result = hkv.find_or_insert(table, np.array([1], np.int32))
        return opt.update(table, result, jnp.ones((1, 1), jnp.float32), value=value), None

    losses = jnp.array([3.0, 3.0, 3.0, 3.0, 3.0])
    mesh = jax.make_mesh((1,), ("device",))
    spec = jax.sharding.PartitionSpec()
    run = jax.shard_map(
        lambda t, v: jax.lax.scan(step, t, v)[0], mesh=mesh, in_specs=(spec, spec), out_specs=spec
    )
    scanned = jax.jit(run)(table, losses)
    for value in losses:
        table, _ = step(table, value)
    rows = [hkv.find(each, np.array([1], np.int32))[1].values for each in (table, scanned)]
    np.testing.assert_array_equal(*rows)
    assert -5 < float(rows[0][0, 0]) < -1


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_arguments_that_an_update_misses_are_asked_for(is_scheduled):
    tx = optax.polyak_sgd()
    if is_scheduled:
        tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(0.5))
    opt = hkv.optim.sparse(tx)
    table, result = hkv.find_or_insert(opt.init(hkv.create(128, 1)), np.array([1], np.int32))
    with pytest.raises(TypeError, match=r"optim.update: .*'value'.*update\(\.\.\., value=loss\)"):
        opt.update(table, result, jnp.ones((1, 1), jnp.float32))


@pytest.mark.parametrize("tx", [optax.adam(0.1), optax.scale(-0.1)], ids=["chain", "plain"])
def test_a_rate_that_a_transformation_would_not_look_at_is_refused(tx):
    """A chain of optax swallows every argument, so that the rate would be ignored."""
    opt = hkv.optim.sparse(tx)
    table = opt.init(hkv.create(128, DIM))
    table, result = hkv.find_or_insert(table, np.arange(3, dtype=np.int32))
    with pytest.raises(TypeError, match=r"takes no learning_rate.*schedule.*native optimizer"):
        opt.update(table, result, jnp.ones((3, DIM), jnp.float32), learning_rate=0.5)


def test_arguments_go_only_to_transformations_that_take_them():
    """A name that is mistaken is an error, and no silence."""
    opt = hkv.optim.sparse(optax.scale(-0.1))
    table = opt.init(hkv.create(128, DIM))
    table, result = hkv.find_or_insert(table, np.arange(3, dtype=np.int32))
    with pytest.raises(
        TypeError, match=r"takes \['updates', 'state', 'params'\], got also \['lr'\]"
    ):
        opt.update(table, result, jnp.ones((3, DIM), jnp.float32), lr=0.5)


def test_a_rate_that_optax_injects_is_among_the_shared_leaves():
    """What the error about learning_rate names works."""
    opt = hkv.optim.sparse(optax.inject_hyperparams(optax.sgd)(learning_rate=0.25))
    table = opt.init(hkv.create(128, DIM, init=hkv.initializers.zeros()))
    assert table.optimizer.shared["hyperparams.learning_rate"] == 0.25
    shared = table.optimizer.shared | {"hyperparams.learning_rate": jnp.array([0.5])}
    table = dataclasses.replace(
        table, optimizer=dataclasses.replace(table.optimizer, shared=shared)
    )
    table, result = hkv.find_or_insert(table, np.array([1], np.int32))
    table = opt.update(table, result, jnp.ones((1, DIM), jnp.float32))
    np.testing.assert_array_equal(hkv.find(table, result.keys)[1].values, np.full((1, DIM), -0.5))


@pytest.mark.parametrize("opt", [hkv.optim.sparse(optax.sgd(0.1)), hkv.optim.sgd(0.1)])
def test_arguments_in_the_order_of_optax_are_named(opt):
    """optax.update takes gradients first."""
    table = opt.init(hkv.create(128, DIM))
    table, result = hkv.find_or_insert(table, np.arange(3, dtype=np.int32))
    with pytest.raises(TypeError, match=r"optim.update: table must be a jax_hkv Table, got Array"):
        opt.update(jnp.ones((3, DIM), jnp.float32), result, table)


def test_a_transformation_that_mixes_rows_is_refused_with_the_leaf():
    """Factored moments belong to columns as well."""
    with pytest.raises(ValueError, match=r"state.*shape.*mixes rows"):
        hkv.optim.sparse(optax.adafactor(0.1, min_dim_size_to_factor=1)).init(hkv.create(128, 4))


@pytest.mark.parametrize("make", [optax.adafactor, optax.sm3, optax.contrib.muon])
def test_a_transformation_that_mixes_rows_sees_each_alone_as_the_error_says(make):
    with pytest.raises(ValueError, match=r"mixes rows.*sparse\(\.\.\., count_per_row=True\)"):
        hkv.optim.sparse(make(0.1)).init(hkv.create(128, DIM))
    opt = hkv.optim.sparse(make(0.1), count_per_row=True)
    table, result = hkv.find_or_insert(opt.init(hkv.create(128, DIM)), np.array([1, 2], np.int32))
    after = opt.update(table, result, jnp.ones((2, DIM), jnp.float32))
    assert (hkv.find(after, result.keys)[1].values != result.values).all()


@pytest.mark.parametrize("count_per_row", [False, True])
@pytest.mark.parametrize(
    ("tx", "reason"),
    [
        (optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)), "mixes rows"),
        (optax.lookahead(optax.sgd(0.1), 5, 0.5), "update of rows .* fails .*AttributeError"),
        (
            optax.multi_transform({"a": optax.sgd(0.1)}, {"a": "a"}),
            r"init of rows \[n, dim\] fails (?s:.*)takes any array of parameters",
        ),
        (
            optax.chain(optax.clip(1.0), hkv.optim.rowwise_adagrad(0.1)),
            "init of rows .* fails .*native optimizers are no part of an optax chain.*max_gradient",
        ),
    ],
    ids=["noise", "lookahead", "multi_transform", "native"],
)
def test_a_transformation_that_takes_no_rows_is_refused_at_once(tx, reason, count_per_row):
    with pytest.raises(ValueError, match=f"optim.sparse: .*{reason}"):
        hkv.optim.sparse(tx, count_per_row=count_per_row).init(hkv.create(128, DIM))


@pytest.mark.parametrize("count_per_row", [False, True])
def test_a_transformation_may_take_its_arguments_out_of_a_dictionary(count_per_row):
    def update(updates, state, params=None, **extra):
        return jax.tree.map(lambda g: extra["factor"] * g, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    opt = hkv.optim.sparse(tx, count_per_row=count_per_row)
    table = opt.init(hkv.create(128, DIM, init=hkv.initializers.zeros()))
    table, result = hkv.find_or_insert(table, np.array([1], np.int32))
    table = opt.update(table, result, jnp.ones((1, DIM), jnp.float32), factor=3.0)
    np.testing.assert_array_equal(hkv.find(table, result.keys)[1].values, np.full((1, DIM), 3.0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (optax.adam, r"got function: call what makes one: adam\(\.\.\.\)"),
        (hkv.optim.adam(0.1), "got FusedOptimizer: .*leave sparse out"),
        (hkv.optim.sparse(optax.sgd(0.1)), "got SparseOptimizer: .*leave sparse out"),
        (0.1, "got float: give optax"),
        (None, "got NoneType: give optax"),
    ],
)
def test_what_is_no_transformation_is_refused_at_once(given, message):
    with pytest.raises(TypeError, match=f"optim.sparse: transformation must be .*{message}"):
        hkv.optim.sparse(given)


def test_optimizer_rows_of_another_dtype_are_named():
    """What has the same state but its dtype was initialised by another optimizer."""
    half = hkv.optim.sparse(optax.adam(0.1), dtype=jnp.bfloat16)
    full = hkv.optim.sparse(optax.adam(0.1))
    table = half.init(hkv.create(128, DIM, dtype=jnp.bfloat16))
    table, result = hkv.find_or_insert(table, np.arange(3, dtype=np.int32))
    with pytest.raises(ValueError, match=r"optimizer rows are bfloat16, .* float32: .*opt\.init"):
        full.update(table, result, result.values)


def test_a_transformation_that_starts_from_the_row_is_refused():
    """A new row's state must not depend on the row."""
    copying = optax.GradientTransformation(lambda p: p, lambda g, s, p=None: (g, s))
    with pytest.raises(ValueError, match="starts from the parameters"):
        hkv.optim.sparse(copying).init(hkv.create(128, DIM))


def test_gradients_of_another_shape_are_refused():
    """31: the argument, what was expected, what came."""
    opt = hkv.optim.sparse(optax.sgd(0.1))
    table = opt.init(hkv.create(128, DIM))
    table, result = hkv.find_or_insert(table, hkv.Keys.from_numpy(np.arange(3)))
    with pytest.raises(ValueError, match=r"row_gradients must have shape \[3, 6\].*got \[2, 6\]"):
        opt.update(table, result, jnp.ones((2, DIM), jnp.float32))


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("opt", [hkv.optim.sparse(optax.sgd(0.1)), hkv.optim.sgd(0.1)])
def test_a_result_of_a_table_with_another_dim_is_refused(opt, several):
    """Its gradient would be spread over the columns where it has but one."""
    keys = np.arange(3, dtype=np.int32)
    table, own = hkv.find_or_insert(opt.init(hkv.create(128, 3)), keys)
    _, other = hkv.find_or_insert(hkv.create(128, 1), keys)
    pair = ([own, other], [own.values, other.values]) if several else (other, other.values)
    with pytest.raises(ValueError, match=r"optim.update: result must be .* dim 3 .*got .* dim 1:"):
        opt.update(table, *pair)


@pytest.mark.parametrize("several", [False, True])
def test_a_key_that_left_and_came_back_elsewhere_is_stale(several):
    """The result names a slot; the key is in another one by now."""
    opt = hkv.optim.sparse(optax.sgd(1.0))
    table = opt.init(hkv.create(128, DIM, init=hkv.initializers.zeros()))
    first = hkv.Keys.from_numpy(np.arange(128))
    table, _ = hkv.find_or_insert(table, first)
    seven = hkv.Keys.from_numpy(np.array([1000]))
    table, old = hkv.find_or_insert(table, seven)
    table, _ = hkv.find_or_insert(table, hkv.Keys.from_numpy(np.arange(2000, 2128)))
    table, _ = hkv.find_or_insert(table, hkv.Keys.from_numpy(np.array([3000])))
    table, new = hkv.find_or_insert(table, seven)
    assert 0 <= int(old.slots[0]) != int(new.slots[0]) >= 0
    rows = jnp.ones((1, DIM), jnp.float32)
    result, gradients = ([old, old], [rows, rows]) if several else (old, rows)
    updated = opt.update(table, result, gradients)
    np.testing.assert_array_equal(hkv.find(updated, seven)[1].values, np.zeros((1, DIM)))
    assert int(updated.optimizer.skipped[0]) == (2 if several else 1)


@pytest.mark.parametrize("key", [0, 1])
def test_a_key_whose_lane_is_empty_is_stale(key):
    """Key 0 is what stands in an empty lane, too."""
    opt = hkv.optim.sgd(1.0)
    ids = np.array([key], np.int32)
    table, result = hkv.find_or_insert(opt.init(hkv.create(128, DIM)), ids)
    gone, _ = hkv.erase(table, ids)
    after = opt.update(gone, result, jnp.ones((1, DIM), jnp.float32))
    assert int(after.optimizer.skipped[0]) == 1
    np.testing.assert_array_equal(after.values, gone.values)
    there = opt.update(table, result, jnp.ones((1, DIM), jnp.float32))
    assert int(there.optimizer.skipped[0]) == 0
    assert (np.asarray(there.values) != np.asarray(table.values)).any()


@pytest.mark.parametrize("opt", [hkv.optim.sparse(optax.sgd(1.0)), hkv.optim.sgd(1.0)])
def test_a_stale_result_takes_nothing_from_another_one_of_the_same_key(opt):
    """Of two results of a key, one before it left and came back: the other's gradient counts."""
    table = opt.init(hkv.create(128, 1, init=hkv.initializers.zeros()))
    seven, nine = (hkv.Keys.from_numpy(np.array([key])) for key in (7, 9))
    table, old = hkv.find_or_insert(table, seven)
    table, _ = hkv.erase(table, seven)
    table, taken = hkv.find_or_insert(table, nine)
    table, new = hkv.find_or_insert(table, seven)
    assert int(taken.slots[0]) == int(old.slots[0]) != int(new.slots[0])
    pairs = [(old, jnp.full((1, 1), 4.0, jnp.float32)), (new, jnp.ones((1, 1), jnp.float32))]
    for results, gradients in (zip(*pairs, strict=True), zip(*pairs[::-1], strict=True)):
        updated = opt.update(table, results, gradients)
        assert hkv.find(updated, seven)[1].values.tolist() == [[-1.0]]
        assert hkv.find(updated, nine)[1].values.tolist() == [[0.0]]
        assert int(updated.optimizer.skipped[0]) == 1


def test_wrong_results_and_gradients_are_named():
    """31: what update takes."""
    opt = hkv.optim.sparse(optax.sgd(0.1))
    table = opt.init(hkv.create(128, DIM))
    table, result = hkv.find_or_insert(table, hkv.Keys.from_numpy(np.arange(3)))
    rows = jnp.ones((3, DIM), jnp.float32)
    with pytest.raises(
        TypeError, match=r"what find_or_insert returned.*up by find_or_insert to train"
    ):
        opt.update(table, hkv.find(table, result.keys)[1], rows)
    with pytest.raises(ValueError, match=r"one for each result, got 0 for 0 results"):
        opt.update(table, [], [])
    with pytest.raises(TypeError, match=r"row_gradients must be float32.*got int32"):
        opt.update(table, result, jnp.ones((3, DIM), jnp.int32))
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), result)
    with pytest.raises(ValueError, match=r"row_gradients must have shape \[2, 3, 6\]"):
        opt.update(table, stacked, rows)


def test_results_that_a_scan_stacked_are_those_of_its_turns(rng):
    """Gradients that a scan over micro-batches accumulates are applied once."""
    opt = hkv.optim.adam(0.1)
    table = opt.init(hkv.create(512, DIM))
    parts = hkv.Keys.from_numpy(rng.integers(0, 40, (3, 20)))
    gradients = jnp.asarray(rng.normal(size=(3, 20, DIM)), jnp.float32)
    scanned, stacked = jax.lax.scan(hkv.find_or_insert, table, parts)
    results = []
    for number in range(3):
        table, result = hkv.find_or_insert(table, parts[number])
        results.append(result)
    one, other = (
        opt.update(scanned, stacked, gradients),
        opt.update(table, results, list(gradients)),
    )
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)
    counted = [hkv.metrics.of(*pair) for pair in ((one, stacked), (other, results))]
    assert [int(c.unique) for c in counted] == [sum(int(r.counts.unique) for r in results)] * 2


def test_refused_and_masked_positions_are_not_updated(rng):
    """A refused key has no row; its gradient goes nowhere, and is not counted as stale."""
    opt = hkv.optim.sparse(optax.sgd(0.1))
    table = opt.init(hkv.create(128, DIM, policy=hkv.Policy.CUSTOM))
    full = hkv.Keys.from_numpy(np.arange(128))
    table, _ = hkv.find_or_insert(table, full, scores=np.full(128, 9, np.uint32))
    keys = hkv.Keys.from_numpy(np.array([5, 500, 6]))
    table, result = hkv.find_or_insert(
        table, keys, scores=np.ones(3, np.uint32), valid=np.array([True, True, False])
    )
    assert [hkv.Status(s) for s in result.status.tolist()] == [
        hkv.Status.FOUND,
        hkv.Status.REFUSED,
        hkv.Status.MISSING,
    ]
    updated = opt.update(table, result, np.ones((3, DIM), np.float32))
    changed = np.flatnonzero((np.asarray(updated.values) != np.asarray(table.values)).any(axis=1))
    np.testing.assert_array_equal(changed, np.asarray(result.slots)[:1])
    assert int(updated.optimizer.skipped[0]) == 0


@pytest.mark.parametrize("opt", [hkv.optim.adam(0.1), hkv.optim.sparse(optax.adam(0.1))])
def test_results_that_no_lookup_has_returned_change_no_row_without_a_position(platform, rng, opt):
    """A delayed update starts from zeros, say; numbers that are no key's mask their position."""
    ids = np.concatenate([np.zeros(25, np.int32), np.arange(1, 26, dtype=np.int32)])
    table, result = hkv.find_or_insert(opt.init(hkv.create(256, DIM)), ids)
    table = opt.update(table, result, jnp.ones_like(result.values))  # momentum, which moves on

    def moved(given):
        """The ids whose rows change, or the rows of whose optimizer do."""
        gradients = jnp.asarray(rng.standard_normal(given.values.shape), jnp.float32)
        after = opt.update(table, given, gradients)
        assert all(
            np.isfinite(leaf).all() for leaf in (after.values, *after.optimizer.rows.values())
        )
        leaves = [(table.values, after.values)]
        leaves += [
            (leaf, after.optimizer.rows[name]) for name, leaf in table.optimizer.rows.items()
        ]
        changed = [(np.asarray(a != b)).reshape(256, -1).any(axis=1) for a, b in leaves]
        slots = np.asarray(hkv.find(table, np.arange(26, dtype=np.int32))[1].slots)
        everywhere = np.flatnonzero(np.any(changed, axis=0))
        assert set(everywhere) <= set(slots.tolist())
        return {number for number, slot in enumerate(slots.tolist()) if slot in everywhere}

    assert moved(result) == set(range(26))
    assert moved(jax.tree.map(jnp.zeros_like, result)) == set()
    assert moved(jax.tree.map(lambda leaf: leaf[:25] if leaf.ndim else leaf, result)) == {0}
    assert moved(jax.tree.map(lambda leaf: leaf[-9:] if leaf.ndim else leaf, result)) == set()
    inverse = rng.integers(-60, 60, 50)
    groups = result.groups._replace(
        inverse=jnp.asarray(inverse, jnp.int32), count=jnp.array([1000], jnp.int32)
    )
    assert moved(result._replace(groups=groups)) == set(range(26)) & set(inverse.tolist())
    for wild in (nothing_but_minus_one(result), result._replace(groups=groups)):
        clipped = hkv.optim.clip_by_global_norm(1.0, {}, [wild], [result.values])
        assert np.isfinite(clipped[2])


def nothing_but_minus_one(result):
    return jax.tree.map(lambda leaf: -jnp.ones_like(leaf) if leaf.dtype != bool else leaf, result)


def test_positions_are_listed_by_numbers_that_a_caller_made_up(platform, rng):
    """As semantics.md, section 6, says of numbers that are none, and of keys without a position."""
    for n in (1, 40, 3000):
        for count in (-2, 0, n // 2, n, n + 7):
            inverse = rng.integers(-3, n + 3, n).astype(np.int32)
            empty = jnp.zeros((n,), jnp.int32)
            words = jnp.zeros((n, 2), jnp.uint32)
            total = jnp.array([count], jnp.int32)
            groups = _index.Groups(words, jnp.asarray(inverse), empty, empty, total)
            listed = jax.jit(_index.occurrences)(groups)
            keys = min(max(count, 0), n)
            own = [np.flatnonzero(inverse == number) for number in range(keys)]
            expected = np.concatenate([*own, np.zeros(0, int)])
            offsets = np.full(n + 1, len(expected))
            offsets[: keys + 1] = np.cumsum([0, *map(len, own)])
            np.testing.assert_array_equal(listed.offsets, offsets)
            behind = np.full(n - len(expected), -1)
            np.testing.assert_array_equal(listed.order, np.concatenate([expected, behind]))


def test_accumulators_of_half_rows_go_on_growing():
    """In bfloat16 the sum would stand still at 0.1: a step adds 0.000025."""
    opt = hkv.optim.sparse(optax.adagrad(0.1))
    table = opt.init(hkv.create(128, 1, dtype=jnp.bfloat16))

    def step(table, _):
        table, result = hkv.find_or_insert(table, np.array([1], np.int32))
        return opt.update(table, result, jnp.full((1, 1), 5e-3, jnp.float32)), result.slots[0]

    table, slots = jax.jit(lambda table: jax.lax.scan(step, table, None, length=400))(table)
    (sums,) = table.optimizer.rows.values()
    np.testing.assert_allclose(sums[slots[0], 0], 0.1 + 400 * 2.5e-5, rtol=1e-4)


def test_decayed_weights_are_a_transformation_before_another():
    """As the guide says of optimizers without a weight decay: lazily, of touched rows."""
    transformation = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1))
    opt = hkv.optim.sparse(transformation)
    table = opt.init(hkv.create(128, 2, init=hkv.initializers.ones()))
    table, result = hkv.find_or_insert(table, np.array([1], np.int32))
    table, _ = hkv.find_or_insert(table, np.array([2], np.int32))
    table = opt.update(table, result, jnp.zeros((1, 2), jnp.float32))
    rows = hkv.find(table, np.array([1, 2], np.int32))[1].values
    np.testing.assert_allclose(rows, [[0.95, 0.95], [1.0, 1.0]], rtol=1e-6)


def test_ftrl_has_one_rate():
    """What its rows keep is for one alpha: with a smaller one they would shrink, with 0 be NaN."""
    with pytest.raises(
        TypeError, match=r"ftrl: learning_rate must be a number, got a function.*ad"
    ):
        hkv.optim.ftrl(optax.linear_schedule(0.1, 0.0, 10))  # pyright: ignore[reportArgumentType]
    for rate in (0.0, -0.1, 1e-60):
        with pytest.raises(ValueError, match=rf"learning_rate must be a positive .*, got {rate}"):
            hkv.optim.ftrl(rate)
    for rate in (None, jnp.ones(2)):
        with pytest.raises(TypeError, match="ftrl: learning_rate must be a number, got"):
            hkv.optim.ftrl(rate)  # pyright: ignore[reportArgumentType]
    opt = hkv.optim.ftrl(0.1)
    table, result = hkv.find_or_insert(opt.init(hkv.create(128, 1)), np.array([1], np.int32))
    with pytest.raises(TypeError, match="FTRL takes no learning_rate: .* one alpha"):
        opt.update(table, result, result.values, learning_rate=0.01)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda flag: hkv.optim.sgd(0.1, 0.9, flag), "optim.sgd: nesterov"),
        (lambda flag: hkv.optim.sgd(0.1, stochastic_rounding=flag), "sgd: stochastic_rounding"),
        (lambda flag: hkv.optim.adam(0.1, count_per_row=flag), "optim.adam: count_per_row"),
        (lambda flag: hkv.optim.sparse(ONE_SGD, count_per_row=flag), "sparse: count_per_row"),
    ],
)
def test_options_that_are_flags_are_flags(make, argument):
    assert make(np.True_) == make(True) != make(False)
    for wrong in ("False", 1, None):
        got = type(wrong).__name__
        with pytest.raises(TypeError, match=f"{argument} must be True or False, got {got}"):
            make(wrong)


def test_float32_is_what_a_transformation_works_in():
    """So that tables whose optimizers say so, and say nothing, are fused."""
    assert hkv.optim.sparse(ONE_SGD) == hkv.optim.sparse(ONE_SGD, dtype="float32")


def test_what_looks_ahead_of_a_trace_needs_one():
    with pytest.raises(ValueError, match="momentum must be a number where nesterov is True"):
        hkv.optim.sgd(0.1, nesterov=True)


def test_clipping_is_rounded_once():
    """In float16 this factor would be 0."""
    gradients = {"w": jnp.full((1,), 3e4, jnp.float16)}
    clipped, _, norm = hkv.optim.clip_by_global_norm(1e-4, gradients, [], [])
    assert clipped["w"].dtype == jnp.float16
    np.testing.assert_allclose(clipped["w"].astype(jnp.float32), 1e-4, rtol=1e-3)
    np.testing.assert_allclose(norm, 3e4, rtol=1e-3)


@pytest.mark.parametrize("opt", [hkv.optim.adam(0.1), hkv.optim.sparse(optax.adam(0.1))])
def test_optimizer_rows_lie_where_the_table_lies(opt):
    device = jax.devices("cpu")[-1]
    table = opt.init(jax.device_put(hkv.create(128, DIM), device))
    assert {own for leaf in jax.tree.leaves(table) for own in leaf.devices()} == {device}
    uncommitted = jax.tree.leaves(opt.init(hkv.create(128, DIM)))
    assert not any(leaf.committed for leaf in uncommitted)
