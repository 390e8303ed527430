"""Numbers at the ends of what can be held: refused by name where they are known, or clipped."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_hkv as hkv
from jax_hkv import Policy, sharding
from jax_hkv.sharding import Exchange, Placement

FAR = 2**32 + 3


def aged(epochs):
    """A table whose two entries are so many epochs old."""
    table = hkv.create(128, 2, policy=Policy.EPOCH_LRU)
    table, _ = hkv.find_or_insert(hkv.advance_epoch(table, 1), np.arange(2, dtype=np.int32))
    return hkv.advance_epoch(table, 1 + epochs)


# --- Traced numbers, which cannot raise ----------------------------------------------------------


@pytest.mark.parametrize(
    ("epochs", "expected"),
    [(3, 2), (10, 0), (-1, 0), (2**31 - 1, 0), (FAR, 0), (-FAR, 0)],
)
def test_traced_epochs_that_are_too_many_expire_nothing(epochs, expected):
    with jax.enable_x64(True):
        number = jnp.int64(epochs)
        _, erased = jax.jit(hkv.expire)(aged(10), number)
    assert int(erased) == expected
    if abs(epochs) < 2**31:
        assert int(jax.jit(hkv.expire)(aged(10), jnp.int32(epochs))[1]) == expected


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [(5, 5), (-1, 0), (FAR, 2**32 - 1), (-FAR, 0), (2**32 - 1, 2**32 - 1)],
)
def test_a_traced_epoch_is_clipped(epoch, expected):
    table = hkv.create(128, 2, policy=Policy.EPOCH_LRU)
    with jax.enable_x64(True):
        assert int(jax.jit(hkv.advance_epoch)(table, jnp.int64(epoch)).epoch[0]) == expected
    if -(2**31) <= epoch < 2**31:
        assert int(jax.jit(hkv.advance_epoch)(table, jnp.int32(epoch)).epoch[0]) == expected


@pytest.mark.parametrize("kind", [jnp.int8, jnp.uint8, jnp.int16, jnp.int32, jnp.uint32])
def test_a_traced_offset_of_any_type_begins_there(kind):
    table, _ = hkv.find_or_insert(hkv.create(512, 2), np.arange(300, dtype=np.int32))
    export = jax.jit(hkv.export_batch, static_argnums=2)
    expected = hkv.export_batch(table, 100, 64)
    np.testing.assert_array_equal(export(table, kind(100), 64).keys.words, expected.keys.words)


@pytest.mark.parametrize("offset", [-(2**32), 2**32, 2**40, -(2**63)])
def test_a_traced_offset_beyond_the_slots_exports_nothing(offset):
    table, _ = hkv.find_or_insert(hkv.create(512, 2), np.arange(300, dtype=np.int32))
    with jax.enable_x64(True):
        entries = jax.jit(hkv.export_batch, static_argnums=2)(table, jnp.int64(offset), 64)
    assert int(entries.count) == 0


# --- Numbers that float32 does not hold ----------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hkv.optim.sgd(1e39), "optim.sgd: learning_rate must be finite, got 1e[+]39"),
        (lambda: hkv.optim.ftrl(1e39), "optim.ftrl: learning_rate must be finite"),
        (lambda: hkv.optim.ftrl(1e-40), "learning_rate must be a positive number, and 1 / "),
        (lambda: hkv.optim.adagrad(0.1, eps=1e39), "eps must be a number from 0 on, got 1e[+]39"),
        (lambda: hkv.optim.adamw(0.1, weight_decay=1e39), "weight_decay must be a number from 0"),
        (
            lambda: hkv.optim.adagrad(0.1, 1e5, state_dtype=jnp.float16),
            "initial_accumulator_value must be a number of state_dtype, got 100000.0, .* inf",
        ),
        (
            lambda: hkv.optim.adagrad(0.1, 1e-9, state_dtype=jnp.float16),
            "initial_accumulator_value must be a number of state_dtype, got 1e-09, .* 0.0",
        ),
        (lambda: hkv.initializers.constant(10**400), "constant: value must be a float32"),
        (lambda: hkv.initializers.normal(np.inf), "normal: stddev must be finite, got inf"),
        (lambda: hkv.initializers.normal(1, mean=np.nan), "normal: mean must be finite, got nan"),
        (lambda: hkv.initializers.uniform(0, np.inf), "uniform: high must be finite"),
        (lambda: hkv.initializers.variance_scaling(np.inf), "scale must be finite"),
    ],
)
def test_a_number_that_updates_or_rows_cannot_hold_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("fill", [1e39, -1e39, 10**400])
def test_a_fill_that_float32_cannot_hold_is_named(fill):
    with pytest.raises(ValueError, match="find: fill must be a number that float32 can hold"):
        hkv.find(hkv.create(128, 2), np.zeros(1, np.int32), fill=fill)


@pytest.mark.parametrize("fill", [float("inf"), -float("inf"), 3.4e38])
def test_a_fill_may_be_infinite(fill):
    _, found = hkv.find(hkv.create(128, 2), np.zeros(1, np.int32), fill=fill)
    assert (np.asarray(found.values) == np.float32(fill)).all()


def test_flags_are_no_numbers():
    with pytest.raises(TypeError, match="constant: value must be a number, got bool"):
        hkv.initializers.constant(np.bool_(True))


# --- Arrays that do not belong together ----------------------------------------------------------


@pytest.fixture(scope="module")
def exported():
    table = hkv.optim.adam(0.1).init(hkv.create(128, 2))
    table, _ = hkv.find_or_insert(table, np.arange(6, dtype=np.int32))
    return sharding.export_entries(table)


def shorter(entries, *names):
    return entries._replace(**{name: getattr(entries, name)[:3] for name in names})


WRONG = {
    "keys": lambda e: shorter(e, "keys"),
    "values": lambda e: shorter(e, "values"),
    "scores": lambda e: shorter(e, "scores"),
    "mu": lambda e: e._replace(optimizer=e.optimizer | {"mu": e.optimizer["mu"][:3]}),
    "float keys": lambda e: e._replace(keys=e.keys.astype(float)),
    "signed scores": lambda e: e._replace(scores=e.scores.astype(np.int64)),
    "two axes": lambda e: e._replace(keys=e.keys[:, None]),
    "a list": lambda e: e._replace(values=e.values.tolist()),
    "no keys": lambda e: e._replace(keys=None),
    "clock": lambda e: e._replace(clock=2**64),
    "epoch": lambda e: e._replace(epoch=-1),
    "counters": lambda e: e._replace(counters=np.zeros((4, 8), np.int32)),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_export_that_does_not_belong_together_is_refused_before_anything_changes(exported, name):
    """Rows would go to other keys; a table that is used up could not be tried again."""
    wrong = WRONG[name](exported)
    table = hkv.optim.adam(0.1).init(hkv.create(128, 2))
    for call in (
        lambda: sharding.import_entries(None, table, wrong),
        lambda: sharding.join_entries([exported, wrong]),
    ):
        with pytest.raises((TypeError, ValueError), match=r"(exported|parts\[1\])[ .]"):
            call()
    assert int(hkv.size(table)) == 0


def test_optimizer_rows_may_have_the_names_of_an_export_s_fields():
    class State(NamedTuple):
        keys: Any
        scores: Any
        values: Any

    def update(gradients, state, params=None):
        return gradients, State(*(leaf + gradients for leaf in state))

    own = optax.GradientTransformation(lambda rows: State(*[jnp.zeros_like(rows)] * 3), update)
    opt = hkv.optim.sparse(own)
    table, result = hkv.find_or_insert(opt.init(hkv.create(128, 2)), np.arange(3, dtype=np.int32))
    table = opt.update(table, result, jnp.ones((3, 2), jnp.float32))
    exported = sharding.export_entries(table)
    assert set(exported.optimizer) == {"keys", "scores", "values"}
    again, _ = sharding.import_entries(None, opt.init(hkv.create(256, 2)), exported)
    assert sharding.export_entries(again).optimizer["scores"].shape == (3, 2)
    short = exported._replace(values=exported.values[:1])
    with pytest.raises(TypeError, match=r"exported must have arrays of the same entries, values"):
        sharding.import_entries(None, again, short)
    for name in ("keys", "scores"):
        signed = exported._replace(**{name: getattr(exported, name).astype(np.int64)})
        message = rf"{name} as uint64\[n\].*got int64\[3\]: give {name}\.astype\(np\.uint64\)"
        with pytest.raises(TypeError, match=message):
            sharding.import_entries(None, again, signed)


def test_a_counter_that_was_reset_to_another_form_is_named():
    opt = hkv.optim.sgd(0.1)
    table, result = hkv.find_or_insert(opt.init(hkv.create(128, 2)), np.zeros(1, np.int32))
    rows = dataclasses.replace(table.optimizer, skipped=jnp.uint32(0))
    with pytest.raises(TypeError, match=r"optimizer.skipped must be uint32\[1\], got uint32\[\]"):
        table = dataclasses.replace(table, optimizer=rows)
        opt.update(table, result, jnp.ones((1, 2), jnp.float32))


def test_a_mask_of_numbers_does_not_choose_positions():
    keys = np.array([7, 8, 9, 9], np.int32)
    for measure in (sharding.distinct_in, lambda k, v: sharding.skew_in(k, 4, v)):
        for mask in (np.array([1, 1, 1, 0]), np.ones(3, bool)):
            with pytest.raises(TypeError, match=r"valid must be bool\[4\] like the keys"):
                measure(keys, mask)


def test_weights_of_bags_are_numbers_one_for_each_id():
    half = jnp.ones(2, jnp.bfloat16)
    assert hkv.Jagged.from_lists([[1, 2]], weights=[half]).weights.tolist() == [1, 1]
    for weights in (
        [np.ma.array([1.0, 2.0], mask=[False, True])],
        [["2", "3"]],
        [[[1.0], [2.0]]],
        [[1j, 2j]],
    ):
        with pytest.raises(TypeError, match=r"Jagged.from_lists: weights\[0\] must"):
            hkv.Jagged.from_lists([[1, 2]], weights=weights)


def test_lengths_whose_sum_goes_round_are_refused():
    lengths = np.array([2**62] * 4 + [2])
    with pytest.raises(ValueError, match="lengths must be from 0 on and say how many"):
        hkv.Jagged.from_lengths([5, 6], lengths)


def test_a_jagged_of_other_devices_is_refused():
    """Of four made for four, on two: each half has two beginnings."""
    mesh = jax.make_mesh((2,), ("device",), devices=jax.devices("cpu")[:2])
    each = hkv.Jagged.from_lists([[1, 2], [3]], capacity=4)
    one = jax.make_mesh((1,), ("device",), devices=jax.devices("cpu")[:1])
    for devices in (mesh, one):
        with pytest.raises(ValueError, match="begin at 0, do not decrease and end within"):
            Placement(devices).put(sharding.concatenate([each] * 4))
    Placement(mesh).put(sharding.concatenate([each] * 2))
    Placement(one).put(each)


def test_shared_state_of_an_optimizer_keeps_its_axis():
    opt = hkv.optim.sparse(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    table, result = hkv.find_or_insert(opt.init(hkv.create(128, 2)), np.zeros(1, np.int32))
    name = "hyperparams.learning_rate"

    def update(rate):
        rows = table.optimizer
        rows = dataclasses.replace(rows, shared=rows.shared | {name: rate})
        changed = dataclasses.replace(table, optimizer=rows)
        return opt.update(changed, result, jnp.ones((1, 2), jnp.float32))

    with pytest.raises(TypeError, match=rf"shared\['{name}'\] must have a leading axis of 1"):
        update(jnp.float32(0.25))
    moved = hkv.find(update(jnp.array([0.25], jnp.float32)), np.zeros(1, np.int32))[1].values
    np.testing.assert_allclose(moved, result.values - 0.25)


# --- Numbers that XLA may drop -------------------------------------------------------------------


@pytest.mark.parametrize("deduplicate", [True, False])
def test_subnormal_gradients_reach_their_rows_over_devices(deduplicate):
    """A weight times a gradient is one, whether or not equal keys are merged before they leave."""
    mesh = jax.make_mesh((4,), ("device",), devices=jax.devices("cpu")[:4])
    exchange = Exchange("device", deduplicate=deduplicate)
    opt, placement = hkv.optim.sgd(1.0), Placement(mesh)

    def step(table, ids):
        weights = jnp.full(ids.shape, 0.5, jnp.float32)
        table, found = sharding.find_or_insert_pooled(
            table, ids, axis_name=exchange, weights=weights
        )
        table = sharding.update(opt, table, found, jnp.full_like(found.values, 2e-38))
        _, found = sharding.find(table, ids, axis_name=exchange)
        words = jax.lax.bitcast_convert_type(found.values, jnp.uint32)
        return table, (jax.lax.pmax(words.max(), "device"), jax.lax.pmin(words.min(), "device"))

    init = hkv.initializers.zeros()
    table = placement.create(lambda: opt.init(hkv.create(128, 2, init=init)))
    ids = placement.put(np.arange(8, dtype=np.int32)[:, None])
    _, words = placement.step(step)(table, ids)
    assert {int(word) for word in words} == {int(np.float32(-1e-38).view(np.uint32))}


def test_a_wide_number_of_a_step_has_a_remedy_if_it_is_no_id():
    """A Python int too, of which JAX says that it overflows."""
    ids, table = np.array([1, 2], np.int32), hkv.linen.Embed(128, 2, optimizer=hkv.optim.sgd(0.1))
    state = hkv.linen.TrainState.create(table, jax.random.key(0), ids, tx=optax.sgd(0.1))
    step = hkv.linen.train_step(
        lambda apply, ids, times: apply(ids, train=True).sum() + jnp.sum(times)
    )
    wide = 2**63 if jax.config.jax_enable_x64 else 2**31
    texts = [(-wide - 1, rf"is the number {-wide - 1}"), (wide, rf"is the number {wide}")]
    if not jax.config.jax_enable_x64:
        texts.append((np.array([1, 2**40]), "holds int64 numbers"))
    for given, what in texts:
        message = rf"train_step: arguments\[1\] {what}.*from_numpy.*cast them to int32 or float32"
        with pytest.raises(TypeError, match=message):
            step(state, ids, given)
    step(state, ids, wide - 1)
