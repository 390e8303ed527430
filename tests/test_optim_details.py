"""Options of optimizers against optax or by hand: the oracle takes them from what it tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_hkv as hkv

DIM = 4
IDS = np.array([1, 2, 3], np.int32)


def test_a_loss_scale_waits_a_whole_period_before_it_doubles_again():
    scale, seen = hkv.optim.LossScale.create(8.0, period=3), []
    for _ in range(7):
        scale = scale.adjust(jnp.bool_(True))
        seen.append(float(scale.scale))
    assert seen == [8, 8, 16, 16, 16, 32, 32]


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
        jnp.array([[8.0], [16.0]]),
        jnp.array([[32.0]]),
    ]
    table = opt.update(table, [one, two, three], gradients)
    rows = hkv.find(table, np.arange(1, 7, dtype=np.int32))[1].values
    assert rows[:, 0].tolist() == [-1, -2, -(4 + 8), -8, -(32 + 16), -64]


def test_gradients_of_several_lookups_keep_the_better_type():
    opt = hkv.optim.sgd(1.0)
    table = opt.init(hkv.create(128, 1, init=hkv.initializers.constant(0.0)))
    table, one = hkv.find_or_insert(table, IDS[:1])
    table, two = hkv.find_or_insert(table, IDS[1:2])
    fine = jnp.array([[1.0 + 2**-20]])
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


def test_rows_that_are_mixed_by_what_is_remembered_are_seen():
    def init(params):
        return jnp.zeros(())

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
    table = opt.update(table, result, jnp.zeros((3, 1)))
    rows = hkv.find(table, IDS)[1].values
    np.testing.assert_allclose(np.float32(rows), 0.45, rtol=1e-3)


def test_options_of_native_optimizers_are_those_of_optax():
    """With none of their defaults; rows of one element make rowwise Adagrad Adagrad."""
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
    }  # fmt: skip
    for name, (opt, tx) in pairs.items():
        table = opt.init(hkv.create(128, 1, init=hkv.initializers.constant(1.0)))
        param = np.ones(1, np.float32)
        state = tx.init(param)
        for gradient in gradients:
            table, result = hkv.find_or_insert(table, IDS[:1])
            table = opt.update(table, result, jnp.full((1, 1), gradient))
            updates, state = tx.update(np.full(1, gradient), state, param)
            param = optax.apply_updates(param, updates)
        row = hkv.find(table, IDS[:1])[1].values[0]
        np.testing.assert_allclose(row, param, rtol=1e-5, err_msg=name)
    opt = hkv.optim.rowwise_adagrad(0.5, 0.5, eps=0.25)
    table, result = hkv.find_or_insert(
        opt.init(hkv.create(128, 1, init=hkv.initializers.constant(1.0))), IDS[:1]
    )
    table = opt.update(table, result, jnp.full((1, 1), 0.5))
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
        table = opt.update(table, result, jnp.ones((1, DIM)))
    ends = sorted(float(leaf[result.slots[0], 0]) for leaf in table.optimizer.rows.values())
    assert ends == [3 * step for step in jax.tree.leaves(STATES[form])]
