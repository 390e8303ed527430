"""Options of optimizers against optax or by hand: the oracle takes them from what it tests."""

from __future__ import annotations

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

import jax_hkv as hkv

DIM = 4
IDS = np.array([1, 2, 3], np.int32)


def test_a_loss_scale_waits_a_whole_period_before_it_doubles_again():
    scale, seen = hkv.optim.LossScale.create(8.0, period=3), []
    for _ in range(7):
        scale = scale.adjust(jnp.bool_(True))
        seen.append(float(scale.scale))
    assert seen == [8, 8, 16, 16, 16, 32, 32]


def test_a_loss_scale_is_not_halved_below_1():
    """One that began below 1 stays as it is: it is not raised either."""
    for scale, expected in ((1.5, 1.0), (1.0, 1.0), (0.25, 0.25)):
        before = hkv.optim.LossScale.create(scale)
        assert float(before.adjust(jnp.bool_(False)).scale) == expected


def test_another_seed_rounds_stochastically_another_way():
    table = hkv.create(128, DIM, dtype=jnp.bfloat16, init=hkv.initializers.constant(1.0))

    def moved(seed):
        opt = hkv.optim.sgd(1e-3, stochastic_rounding=True, seed=seed)
        own, result = hkv.find_or_insert(opt.init(table), np.arange(100, dtype=np.int32))
        return np.asarray(opt.update(own, result, jnp.ones((100, DIM), jnp.bfloat16)).values)

    np.testing.assert_array_equal(moved(3), moved(3))
    assert (moved(3) != moved(4)).any() and (moved(3) != moved(3 + 2**40)).any()


@pytest.mark.parametrize("kind", ["fused", "sparse"])
def test_lookups_of_ids_and_of_bags_make_one_step_together(kind):
    """With and without weights, and of gradients of two types."""
    opt = hkv.optim.sgd(1.0) if kind == "fused" else hkv.optim.sparse(optax.sgd(1.0))
    table = opt.init(hkv.create(128, 1, dtype=jnp.bfloat16, init=hkv.initializers.constant(0.0)))
    weights = np.array([[0.5, 2.0]], np.float32)
    table, one = hkv.find_or_insert(table, IDS)
    table, two = hkv.find_or_insert_pooled(table, np.array([[3, 4], [5, 5]], np.int32))
    table, three = hkv.find_or_insert_pooled(table, np.array([[5, 6]], np.int32), weights=weights)
    gradients = [
        jnp.array([[1.0], [2.0], [4.0]], jnp.bfloat16),
        jnp.array([[8.0], [16.0]], jnp.float32),
        jnp.array([[32.0]], jnp.float32),
    ]
    table = opt.update(table, [one, two, three], gradients)
    rows = hkv.find(table, np.arange(1, 7, dtype=np.int32))[1].values
    assert rows[:, 0].tolist() == [-1, -2, -(4 + 8), -8, -(32 + 16), -64]


def looked_up(form, table, rng, count=6):
    """The table after a lookup of some ids of one form, some masked; its result, and gradients."""
    ids = rng.integers(0, 9, (count, 2), dtype=np.int32)
    valid = rng.random((count, 2)) < 0.7
    if form == "ids":
        table, result = hkv.find_or_insert(table, ids, valid=valid)
    elif form == "jagged":
        splits = np.sort(rng.integers(0, 2 * count - 1, count + 1)).astype(np.int32)
        bags = hkv.Jagged(ids.reshape(-1), splits - splits[:1])  # padding behind the last bag
        table, result = hkv.find_or_insert_pooled(table, bags)
    else:
        weights = rng.random((count, 2), np.float32) if form == "weighted" else None
        table, result = hkv.find_or_insert_pooled(
            table, ids, weights=weights, valid=valid, combiner="mean"
        )
    gradients = rng.normal(size=result.values.shape).astype(np.float32)
    return table, result, jnp.asarray(gradients)


def stacked(*trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


FORMS = [
    ("ids", 6),
    ("ids", 0),
    ("bags", 6),
    ("bags", 0),
    ("weighted", 6),
    ("weighted", 0),
    ("jagged", 6),
]


@pytest.mark.parametrize(("form", "count"), FORMS)
def test_an_update_by_stacked_results_is_that_by_a_list_of_them(form, count, rng):
    """In every bit, whatever is stacked upon what; without any ids, too."""
    opt = hkv.optim.adam(0.1)
    table = opt.init(hkv.create(256, DIM))
    results, gradients = [], []
    for own in [*[form] * 4, "ids", *[form] * 2]:
        table, result, rows = looked_up(own, table, rng, count)
        results.append(result)
        gradients.append(rows)
    expected = opt.update(table, results, gradients)
    nested = stacked(stacked(*results[:2]), stacked(*results[2:4]))
    mixed = [nested, results[4], stacked(*results[5:])]
    rows = [
        stacked(stacked(*gradients[:2]), stacked(*gradients[2:4])),
        gradients[4],
        stacked(*gradients[5:]),
    ]
    got = opt.update(table, mixed, rows)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    norms = [
        hkv.optim.clip_by_global_norm(1.0, {}, [own], [by])[2]
        for own, by in ((mixed, rows), (results, gradients))
    ]
    assert float(norms[0]) == float(norms[1]) and (float(norms[0]) > 0) == (count > 0)
    assert np.any(np.asarray(expected.values) != np.asarray(table.values)) == (count > 0)


def test_gradients_of_several_lookups_keep_the_better_type():
    opt = hkv.optim.sgd(1.0)
    table = opt.init(hkv.create(128, 1, init=hkv.initializers.constant(0.0)))
    table, one = hkv.find_or_insert(table, IDS[:1])
    table, two = hkv.find_or_insert(table, IDS[1:2])
    fine = jnp.array([[1.0 + 2**-20]], jnp.float32)
    table = opt.update(table, [one, two], [jnp.ones((1, 1), jnp.bfloat16), fine])
    assert float(hkv.find(table, IDS[1:2])[1].values[0, 0]) == -float(fine[0, 0])


@pytest.mark.parametrize("bound", [1e-7, 1e3, 1e7])
def test_a_norm_is_seen_whatever_its_bound(bound):
    """Also where one that is no number would be let through."""

    def update(updates, state, params=None):
        norm = jnp.sqrt(jnp.sum(updates**2))
        return updates * jnp.where(norm > bound, bound / norm, 1.0), state

    clipping = optax.GradientTransformation(lambda params: (), update)
    with pytest.raises(ValueError, match="changes with the other rows of its batch"):
        hkv.optim.sparse(clipping).init(hkv.create(128, DIM))


def test_a_norm_is_that_of_the_rows_of_all_tables():
    results = [hkv.find_or_insert(hkv.create(128, 1), IDS[:1])[1] for _ in range(2)]
    gradients = [jnp.full((1, 1), number, jnp.float32) for number in (3, 4)]
    _, rows, norm = hkv.optim.clip_by_global_norm(1.0, {}, results, gradients)
    np.testing.assert_allclose([norm, *np.ravel(rows)], [5, 0.6, 0.8], rtol=1e-6)


def test_a_state_may_start_from_nan():
    """It depends on no row for that."""
    starts = optax.GradientTransformation(
        lambda params: jnp.full_like(params, jnp.nan),
        lambda updates, state, params=None: (updates, state),
    )
    table = hkv.optim.sparse(starts).init(hkv.create(128, DIM))
    assert jnp.isnan(table.optimizer.rows["state"]).all()


def test_the_norm_of_complex_parameters_is_that_of_optax():
    """Of both parts; gradients of which one was left out came through unclipped."""
    gradients = {"w": jnp.array([3 + 2j, -4j, 1]), "b": jnp.array([2.0, 0.5])}
    dense, _, norm = hkv.optim.clip_by_global_norm(1.0, gradients, [], [])
    expected, _ = optax.clip_by_global_norm(1.0).update(gradients, optax.EmptyState())
    np.testing.assert_allclose(norm, np.sqrt(9 + 4 + 16 + 1 + 4 + 0.25), rtol=1e-6)
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-6), dense, expected
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            lambda result, rows: ([None], [rows]),
            "result must be what find_or_insert .* got NoneType",
        ),
        (
            lambda result, rows: ([result], [rows.astype(jnp.int32)]),
            "row_gradients must be float32, bfloat16 or float16, got int32",
        ),
        (lambda result, rows: ([result], [rows[:2]]), r"row_gradients must have shape \[3, 4\]"),
        (
            lambda result, rows: ([[result] * 3], [rows]),
            r"row_gradients must be a list, one .* got float32\[3, 4\] for 3 results",
        ),
    ],
    ids=["no result", "integers", "fewer", "an array for several"],
)
def test_what_cannot_be_clipped_is_named_by_its_call(arguments, message):
    """Also by an update, which the clipping spoke of."""
    opt = hkv.optim.adam(0.1)
    table, result = hkv.find_or_insert(opt.init(hkv.create(128, DIM)), IDS)
    results, rows = arguments(result, jnp.ones_like(result.values))
    with pytest.raises((TypeError, ValueError), match=f"optim.clip_by_global_norm: {message}"):
        hkv.optim.clip_by_global_norm(1.0, {}, results, rows)
    with pytest.raises((TypeError, ValueError), match=f"optim.update: {message}"):
        opt.update(table, results[0], rows[0])


@pytest.mark.parametrize("finite", [None, np.array([True]), 1.0])
def test_a_loss_scale_is_adjusted_by_one_flag(finite):
    with pytest.raises(TypeError, match=r"LossScale\.adjust: finite must be one bool.* got"):
        hkv.optim.LossScale.create().adjust(finite)


def test_rows_that_are_mixed_by_what_is_remembered_are_seen():
    def init(params):
        return jnp.zeros((), jnp.float32)

    def update(updates, state, params=None):
        return updates / (1.0 + state), jnp.sqrt(jnp.sum(updates**2))

    mixing = optax.GradientTransformation(init, update)
    with pytest.raises(ValueError, match="changes with the other rows of its batch"):
        hkv.optim.sparse(mixing).init(hkv.create(128, DIM))


def test_updates_that_wait_for_micro_steps_are_refused():
    with pytest.raises(ValueError, match="MultiSteps and apply_every count micro-steps"):
        hkv.optim.sparse(optax.apply_every(2)).init(hkv.create(128, DIM))


def test_a_transformation_in_float32_sees_half_rows_in_float32():
    tx = optax.chain(optax.add_decayed_weights(1e-8), optax.scale(-1e7))
    opt = hkv.optim.sparse(tx, dtype=jnp.float32)
    table = hkv.create(128, 1, dtype=jnp.float16, init=hkv.initializers.constant(0.5))
    table, result = hkv.find_or_insert(opt.init(table), IDS)
    table = opt.update(table, result, jnp.zeros((3, 1), jnp.float32))
    rows = hkv.find(table, IDS)[1].values
    np.testing.assert_allclose(np.float32(rows), 0.45, rtol=1e-3)


def test_options_of_native_optimizers_are_those_of_optax():
    """With none of their defaults; rows of one element make the row-wise ones the others."""
    gradients = [np.float32(0.5), np.float32(-0.25)]
    adam = {"b1": 0.5, "b2": 0.75, "eps": 0.25}
    pairs = {
        "sgd": (hkv.optim.sgd(0.5, momentum=0.5, nesterov=True),
                optax.sgd(0.5, momentum=0.5, nesterov=True)),
        "adagrad": (hkv.optim.adagrad(0.5, 0.5, eps=0.25), optax.adagrad(0.5, 0.5, eps=0.25)),
        "adam": (hkv.optim.adam(0.5, eps_root=0.125, **adam),
                 optax.adam(0.5, eps_root=0.125, **adam)),
        "adamw": (hkv.optim.adamw(0.5, weight_decay=0.5, **adam),
                  optax.adamw(0.5, weight_decay=0.5, **adam)),
        "rowwise_adam": (hkv.optim.rowwise_adam(0.5, eps_root=0.125, weight_decay=0.5, **adam),
                         optax.adamw(0.5, eps_root=0.125, weight_decay=0.5, **adam)),
    }  # fmt: skip
    for name, (opt, tx) in pairs.items():
        table = opt.init(hkv.create(128, 1, init=hkv.initializers.constant(1.0)))
        param = np.ones(1, np.float32)
        state = tx.init(param)
        for gradient in gradients:
            table, result = hkv.find_or_insert(table, IDS[:1])
            table = opt.update(table, result, jnp.full((1, 1), gradient, jnp.float32))
            updates, state = tx.update(np.full(1, gradient), state, param)
            param = optax.apply_updates(param, updates)
        row = hkv.find(table, IDS[:1])[1].values[0]
        np.testing.assert_allclose(row, param, rtol=1e-5, err_msg=name)
    opt = hkv.optim.rowwise_adagrad(0.5, 0.5, eps=0.25)
    table, result = hkv.find_or_insert(
        opt.init(hkv.create(128, 1, init=hkv.initializers.constant(1.0))), IDS[:1]
    )
    table = opt.update(table, result, jnp.full((1, 1), 0.5, jnp.float32))
    row = float(hkv.find(table, IDS[:1])[1].values[0, 0])
    assert row == pytest.approx(1 - 0.5 * 0.5 / (np.sqrt(0.5 + 0.25) + 0.25))


@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad", "ftrl"])
def test_an_accumulator_starts_where_it_is_said(name):
    opt = getattr(hkv.optim, name)(0.1, initial_accumulator_value=0.75)
    fresh = opt.init(hkv.create(128, DIM)).optimizer.fresh
    accumulators = [leaf for name, leaf in fresh.items() if name.startswith("sum_of_")]
    assert len(accumulators) == 1 and (np.asarray(accumulators[0]) == 0.75).all()


STATES = {"dots": {"a": {"b": 1.0}, "a.b": 2.0}, "empty": {"": 1.0, "state": 2.0}, "bare": 1.0}


@pytest.mark.parametrize("form", STATES)
def test_every_leaf_of_a_state_has_a_name_of_its_own(form):
    """Whatever an optimizer calls them; each counts by a step of its own."""

    def init(params):
        return jax.tree.map(lambda _: jnp.zeros_like(params), STATES[form])

    def update(updates, state, params=None):
        return updates, jax.tree.map(lambda leaf, step: leaf + step, state, STATES[form])

    opt = hkv.optim.sparse(optax.GradientTransformation(init, update))
    table = opt.init(hkv.create(128, DIM))
    table, result = hkv.find_or_insert(table, np.array([1], np.int32))
    for _ in range(3):
        table = opt.update(table, result, jnp.ones((1, DIM), jnp.float32))
    ends = sorted(float(leaf[result.slots[0], 0]) for leaf in table.optimizer.rows.values())
    assert ends == [3 * step for step in jax.tree.leaves(STATES[form])]


@pytest.mark.parametrize(
    ("make", "before", "after"),
    [
        (hkv.optim.adam, {"b1": 0.9}, {"b1": 0.5, "eps": 1e-4}),
        (hkv.optim.adamw, {"weight_decay": 0.1}, {"weight_decay": 0.0}),
        (hkv.optim.sgd, {"momentum": 0.9}, {"momentum": 0.5, "nesterov": True}),
        (hkv.optim.adagrad, {"eps": 1e-7}, {"eps": 1e-2, "initial_accumulator_value": 3.0}),
        (hkv.optim.rowwise_adagrad, {}, {"weight_decay": 0.5}),
        (hkv.optim.rowwise_adam, {"b2": 0.9}, {"b2": 0.5, "weight_decay": 0.5}),
        (hkv.optim.ftrl, {"l1": 0.0}, {"l1": 0.1}),
    ],
)
def test_an_optimizers_numbers_may_change_between_steps(make, before, after):
    """As a checkpoint restored for the other numbers does it; new rows start as they did."""
    old, new = make(0.5, **before), make(0.5, **after)
    table, result = hkv.find_or_insert(old.init(hkv.create(128, DIM)), IDS)
    gradients = jnp.arange(12, dtype=jnp.float32).reshape(3, DIM)
    table = old.update(table, result, gradients)

    leaves, _ = jax.tree.flatten(table)
    restored = jax.tree.unflatten(jax.tree.structure(new.init(table)), leaves)
    expected = new.update(restored, result, gradients)
    changed = jax.lax.scan(
        lambda own, _: (new.update(own, result, gradients), None), table, None, 1
    )
    kept = old.update(table, result, gradients)
    for own, other in zip(jax.tree.leaves(changed[0]), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(own, other)
    assert (np.asarray(kept.values) != np.asarray(expected.values)).any()
    table, fresh = hkv.find_or_insert(changed[0], IDS + 10)
    for name, first in old.init(hkv.create(128, DIM)).optimizer.fresh.items():
        assert (np.asarray(table.optimizer.rows[name])[np.asarray(fresh.slots)] == first).all()


def test_rows_of_another_kind_of_optimizer_are_named():
    table, result = hkv.find_or_insert(hkv.optim.adam(0.1).init(hkv.create(128, DIM)), IDS)
    others = {
        hkv.optim.adagrad(0.1): r"adagrad \(sum_of_squares in float32\)",
        hkv.optim.adam(0.1, state_dtype=jnp.bfloat16): r"adam \(mu, nu in bfloat16\)",
        hkv.optim.adam(0.1, count_per_row=True): r"adam \(mu, nu in float32, count_per_row\)",
        hkv.optim.sparse(optax.trace(0.9)): r"trace \(row\) of PyTreeDef",
    }
    for other, named in others.items():
        with pytest.raises(ValueError, match=rf"adam \(mu, nu in float32\), got {named}.* numbers"):
            other.update(table, result, result.values)


def test_an_average_of_rows_is_a_table_of_its_own():
    """As docs/guide.md does it; averaged leaf by leaf a table would have other keys."""
    opt = hkv.optim.sgd(1.0)
    table, average = opt.init(hkv.create(128, DIM)), hkv.create(128, DIM)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(table, average, ids):
        table, result = hkv.find_or_insert(table, ids)
        table = opt.update(table, result, jnp.ones_like(result.values))
        table, own = hkv.find(table, ids)
        average, old = hkv.find_or_insert(average, ids, values=own.values)
        average, _ = hkv.assign(average, ids, 0.9 * old.values + 0.1 * own.values)
        return table, average

    first = np.asarray(hkv.initial_rows(table, IDS))
    for ids in (IDS, IDS, IDS[:1]):
        before = jax.tree.map(jnp.copy, table)
        table, average = step(table, average, ids)
    moved = np.array([[0.9 * 1.1 + 0.1 * 3], [1.1], [1.1]])
    np.testing.assert_allclose(hkv.find(average, IDS)[1].values, first - moved, rtol=1e-5)
    with pytest.raises(TypeError, match="find: table must have a clock of uint32, got float32"):
        hkv.find(optax.incremental_update(table, before, 0.1), IDS)


class Model(nn.Module):
    @nn.compact
    def __call__(self, ids, train=False):
        layer = hkv.linen.Embed(128, DIM, optimizer=hkv.optim.sgd(0.1))
        return nn.Dense(1)(layer(ids, train=train))


def state_of(tx):
    return hkv.linen.TrainState.create(Model(), jax.random.key(0), IDS, tx=tx)


def test_steps_of_dense_parameters_that_look_around_first_are_noted():
    """By optax.contrib.sam: tables would be trained at the points that it tries."""
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01))
    with pytest.warns(UserWarning, match="contrib.sam.*tables are updated in every step"):
        state_of(sam)
    with pytest.raises(ValueError, match="count micro-steps .* as does contrib.sam"):
        hkv.optim.sparse(sam).init(hkv.create(128, DIM))


@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize("has_scale", [False, True])
def test_what_a_transformation_of_dense_parameters_wants_besides_is_explained(api, has_scale):
    """Of a chain nothing tells it before the step."""
    message = "train_step: tx must need gradients, .* got one .*'value'.*inject_hyperparams between"
    scale = hkv.optim.LossScale.create(1.0) if has_scale else None
    for tx in (optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()), optax.lbfgs()):
        if api == "linen":
            state = hkv.linen.TrainState.create(
                Model(), jax.random.key(0), IDS, tx=tx, loss_scale=scale
            )
        else:
            layer = hkv.nnx.Embed(128, DIM, optimizer=hkv.optim.sgd(0.1))
            model = nnx.List([layer, nnx.Linear(DIM, 1, rngs=nnx.Rngs(0))])
            state = hkv.nnx.TrainState(model, tx, loss_scale=scale)

        def loss_fn(apply, ids):
            if api == "linen":
                return apply(ids, train=True).sum()
            return apply[1](apply[0](ids, train=True)).sum()

        with pytest.raises(TypeError, match=message):
            getattr(hkv, api).train_step(loss_fn)(state, IDS)


def test_a_mistake_of_a_transformation_is_its_own():
    def helper(*, need):
        return need

    mistaken = optax.GradientTransformation(lambda _: (), lambda *_: helper())
    state = state_of(mistaken)
    with pytest.raises(TypeError, match=r"helper\(\) missing 1") as caught:
        hkv.linen.train_step(lambda apply, ids: apply(ids, train=True).sum())(state, IDS)
    assert "tx must need" not in str(caught.value)


@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad", "adam", "rowwise_adam"])
def test_a_bound_of_gradients_clips_their_sum_by_element(name):
    """As FBGEMM's max_gradient: what occurs twice is summed before, and a NaN stays one."""
    make = getattr(hkv.optim, name)
    ids = np.array([5, 6, 5, 7, 8], np.int32)
    gradients = np.array(
        [[0.5, -9], [1, -1], [0.75, 6], [np.inf, 0.25], [np.nan, -np.inf]], np.float32
    )
    sums = np.array([[1.25, -3], [1, -1], [np.inf, 0.25], [np.nan, -np.inf]], np.float32)

    def trained(opt, ids, gradients):
        table, result = hkv.find_or_insert(opt.init(hkv.create(128, 2)), ids)
        table = opt.update(table, result, gradients)
        rows = hkv.find(table, np.array([5, 6, 7, 8], np.int32))[1].values
        return [rows, *table.optimizer.rows.values()]

    distinct = np.array([5, 6, 7, 8], np.int32)
    clipped = trained(make(0.1, max_gradient=1), ids, gradients)
    expected = trained(make(0.1), distinct, np.clip(sums, -1, 1))
    for actual, wanted in zip(clipped, expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)
    assert np.isnan(clipped[0][3]).any() and np.isfinite(clipped[0][:3]).all()
    largest = np.finfo(np.float32).max
    for bound in (None, largest):  # none, and one that leaves all that is finite
        given = np.where(np.isinf(gradients), 0, gradients)
        for actual, wanted in zip(
            trained(make(0.1, max_gradient=bound), ids, given),
            trained(make(0.1), ids, given),
            strict=True,
        ):
            np.testing.assert_array_equal(actual, wanted)


def test_a_subnormal_bound_of_gradients_is_kept():
    """As a subnormal gradient is, whatever thread of XLA's begins the call."""
    bound, small = np.float32(1e-40), np.float32(1e-41)
    opt = hkv.optim.sgd(1.0, max_gradient=float(bound))
    table = opt.init(hkv.create(128, 3, init=hkv.initializers.constant(0)))
    table, result = hkv.find_or_insert(table, np.array([5], np.int32))
    table = opt.update(table, result, np.array([[1.0, -1.0, small]], np.float32))
    rows = hkv.find(table, np.array([5], np.int32))[1].values
    bits = np.array([[-bound, bound, -small]], np.float32).view(np.uint32)
    np.testing.assert_array_equal(np.asarray(rows).view(np.uint32), bits)


@pytest.mark.parametrize(
    "name", ["sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "rowwise_adam", "ftrl"]
)
def test_a_bound_of_gradients_that_is_none_is_named(name):
    for wrong in (0, -1.0, np.nan, np.inf, 1e39, 1e-50, "1", True, [1.0]):
        error = TypeError if isinstance(wrong, str | bool | list) else ValueError
        with pytest.raises(error, match=rf"optim\.{name}: max_gradient must be a positive number"):
            getattr(hkv.optim, name)(0.1, max_gradient=wrong)


def test_a_weight_decay_that_is_not_given_is_that_of_optax():
    table = hkv.optim.adamw(0.5).init(hkv.create(128, 1, init=hkv.initializers.constant(1.0)))
    table, result = hkv.find_or_insert(table, np.array([5], np.int32))
    table = hkv.optim.adamw(0.5).update(table, result, jnp.zeros((1, 1), jnp.float32))
    tx, param = optax.adamw(0.5), np.ones(1, np.float32)
    updates, _ = tx.update(np.zeros(1, np.float32), tx.init(param), param)
    row = hkv.find(table, np.array([5], np.int32))[1].values[0]
    np.testing.assert_allclose(row, optax.apply_updates(param, updates), rtol=1e-7)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_the_norm_of_half_gradients_is_made_in_float32(dtype):
    """Their squares are beyond float16, and their sum is rounded by half types."""
    gradients = {"w": jnp.array([300.0, 401.0, 3.0], dtype)}
    squares = np.square(np.float32(gradients["w"]))
    _, _, norm = hkv.optim.clip_by_global_norm(1.0, gradients, [], [])
    np.testing.assert_allclose(norm, np.sqrt(squares.sum()), rtol=1e-6)


def test_half_gradients_of_rows_are_scaled_in_float32():
    _, result = hkv.find_or_insert(hkv.create(128, 1), np.array([5], np.int32))
    gradients = jnp.full((1, 1), 300, jnp.bfloat16)
    _, (rows,), _ = hkv.optim.clip_by_global_norm(1.1, {}, [result], [gradients])
    assert rows.dtype == jnp.float32
    np.testing.assert_allclose(rows, 1.1, rtol=1e-6)
