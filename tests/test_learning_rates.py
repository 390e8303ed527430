"""A learning rate, or another number of an optimizer, that lies in the table and is set there."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_hkv as hkv

DIM = 4
IDS = np.array([1, 2, 3], np.int32)


MAKERS = {
    "sgd": hkv.optim.sgd,
    "momentum": lambda rate: hkv.optim.sgd(rate, momentum=0.9),
    "adagrad": hkv.optim.adagrad,
    "rowwise": hkv.optim.rowwise_adagrad,
    "adam": lambda rate: hkv.optim.adam(rate, count_per_row=True),
    "adamw": hkv.optim.adamw,
    "rowwise_adam": lambda rate: hkv.optim.rowwise_adam(rate, weight_decay=0.1),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_rate_in_the_table_makes_the_step_of_that_rate(name):
    opt = hkv.optim.inject_learning_rate(MAKERS[name](0.5))
    tables = [opt.init(hkv.create(128, DIM)), MAKERS[name](0.5).init(hkv.create(128, DIM))]
    for rate in (0.5, 0.125, 0.0):
        tables[0] = hkv.optim.set_learning_rate(tables[0], rate)
        for number, own in enumerate((opt, MAKERS[name](rate))):
            table, result = hkv.find_or_insert(tables[number], IDS)
            tables[number] = own.update(table, result, jnp.ones((3, DIM), jnp.float32))
        np.testing.assert_array_equal(tables[0].values, tables[1].values)
    assert tables[0].optimizer.shared["learning_rate"].tolist() == [0]
    table, result = hkv.find_or_insert(tables[0], IDS)
    given = opt.update(
        table, result, jnp.ones((3, DIM), jnp.float32), learning_rate=1.0
    )  # goes before it
    assert (given.values != tables[1].values).any()


def test_setting_a_rate_traces_no_step_anew():
    traced = []
    opt = hkv.optim.inject_learning_rate(hkv.optim.sgd(1.0))

    @jax.jit
    def step(table):
        traced.append(0)
        table, result = hkv.find_or_insert(table, IDS)
        return opt.update(table, result, jnp.ones((3, DIM), jnp.float32))

    table = step(step(opt.init(hkv.create(128, DIM))))
    for rate in (0.5, jnp.float32(0.25), np.float64(0.125), jnp.array([1.0])):
        table = step(hkv.optim.set_learning_rate(table, rate))
    assert len(traced) == 1
    rows = hkv.find(table, IDS)[1].values - hkv.initial_rows(table, IDS)
    np.testing.assert_allclose(rows, -3.875, rtol=1e-6)


def test_a_rate_is_set_for_all_devices():
    mesh = jax.make_mesh((4,), ("device",), devices=jax.devices("cpu")[:4])
    placement = hkv.sharding.Placement(mesh)
    opt = hkv.optim.inject_learning_rate(hkv.optim.sgd(1.0))
    zeros = hkv.initializers.zeros()
    table = placement.create(lambda: opt.init(hkv.create(128, DIM, init=zeros)))

    def step(table, ids):
        table, found = hkv.sharding.find_or_insert(table, ids, axis_name="device")
        table = hkv.sharding.update(opt, table, found, jnp.ones_like(found.values))
        return table, jax.lax.psum(jnp.sum(table.values), "device")

    step, ids = placement.step(step), placement.put(np.arange(8, dtype=np.int32))
    totals = []
    for rate in (1.0, 0.5, 0.25):
        table, total = step(hkv.optim.set_learning_rate(table, rate), ids)
        totals.append(float(total))
    assert totals == [-8.0 * DIM, -12.0 * DIM, -14.0 * DIM]
    inside = placement.step(lambda table: (hkv.optim.set_learning_rate(table, 2.0), None))
    assert inside(table)[0].optimizer.shared["learning_rate"].tolist() == [2.0] * 4


@pytest.mark.parametrize("module", [hkv.linen, hkv.nnx], ids=["linen", "nnx"])
def test_a_training_state_takes_another_rate_without_compiling(module):

    opt = hkv.optim.inject_learning_rate(hkv.optim.sgd(1.0))
    options = {"optimizer": opt, "embedding_init": hkv.initializers.zeros()}
    traced = []

    if module is hkv.linen:

        class Model(nn.Module):
            @nn.compact
            def __call__(self, ids, train=False):
                return hkv.linen.Embed(128, DIM, **options)(ids, train=train)

        state = module.TrainState.create(Model(), jax.random.key(0), IDS, tx=optax.sgd(1.0))
    else:

        class Model(nnx.Module):  # pyright: ignore[reportRedeclaration]
            def __init__(self):
                self.embed = hkv.nnx.Embed(128, DIM, **options)

            def __call__(self, ids, train=False):
                return self.embed(ids, train=train)

        state = module.TrainState(Model(), optax.sgd(1.0))

    def loss_fn(model, ids):
        traced.append(0)
        return jnp.sum(model(ids, train=True))

    step, losses = module.train_step(loss_fn), []
    for rate in (1.0, 0.5, 0.25):
        changed = state.map_tables(
            lambda table, rate=rate: hkv.optim.set_learning_rate(table, rate)
        )
        state = changed if module is hkv.linen else state
        if module is hkv.linen:
            state, info = step(state, IDS)
        else:
            info = step(state, IDS)
        losses.append(float(info.loss))
    assert losses == [0, -3 * DIM, -4.5 * DIM]
    compiled = len(traced)
    state.map_tables(lambda table: hkv.optim.set_learning_rate(table, 0.1))
    step(state, IDS)
    assert len(traced) == compiled


def test_a_rate_of_an_injected_transformation_is_set_likewise():
    """Another number whose name ends like its name is not taken for it."""

    def sgd(learning_rate, least_learning_rate):
        return optax.sgd(jnp.maximum(learning_rate, least_learning_rate))

    injected = optax.inject_hyperparams(sgd)(learning_rate=1.0, least_learning_rate=0.1)
    opt = hkv.optim.sparse(injected)
    table, result = hkv.find_or_insert(opt.init(hkv.create(128, DIM)), IDS)
    table = opt.update(
        hkv.optim.set_learning_rate(table, 0.5), result, jnp.ones((3, DIM), jnp.float32)
    )
    moved = hkv.find(table, IDS)[1].values - result.values
    np.testing.assert_allclose(moved, -0.5, rtol=1e-6)


def test_other_numbers_of_an_injected_transformation_are_set_likewise():
    """Inside of a chain, in a jitted step that is compiled once."""
    chain = optax.chain(
        optax.inject_hyperparams(optax.add_decayed_weights)(weight_decay=0.0), optax.sgd(0.5)
    )
    opt = hkv.optim.sparse(chain)
    table, result = hkv.find_or_insert(
        opt.init(hkv.create(128, DIM)), IDS, values=np.full((3, DIM), 2, np.float32)
    )
    step = jax.jit(lambda table: opt.update(table, result, jnp.zeros((3, DIM), jnp.float32)))
    for decay, expected in ((0.0, 2.0), (0.5, 1.5), (jnp.float32(1.0), 0.75)):
        table = step(hkv.optim.set_hyperparam(table, "weight_decay", decay))
        np.testing.assert_array_equal(hkv.find(table, IDS)[1].values, expected)
    assert step._cache_size() == 1


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        (
            "weight_decay",
            0.1,
            ValueError,
            "table must hold a number as its weight decay, got a sch",
        ),
        ("count", 0.1, ValueError, "table must hold one count in .* got none among .*'count'"),
        ("decay", 0.1, ValueError, "table must hold one decay in .* got none"),
        ("b1", [0.1, 0.2], TypeError, r"value must be one number, got float64\[2\]"),
        ("b1", float("inf"), ValueError, "value must be finite, got inf"),
        (0.1, "b1", TypeError, "name must be a str, got float 0.1"),
        ("", 0.1, TypeError, "name must be a str, got str ''"),
    ],
)
def test_a_number_that_cannot_be_set_is_named(name, value, error, message):
    decay = optax.linear_schedule(0.1, 0.0, 5)
    opt = hkv.optim.sparse(optax.inject_hyperparams(optax.adamw)(0.1, weight_decay=decay))
    table = opt.init(hkv.create(128, DIM))
    with pytest.raises(error, match=f"optim.set_hyperparam: {message}"):
        hkv.optim.set_hyperparam(table, name, value)


def test_a_rate_that_a_schedule_makes_is_not_set():
    """It was, and the next step's schedule made another one, silently."""
    schedule = optax.linear_schedule(0.1, 0.0, 5)
    opt = hkv.optim.sparse(optax.inject_hyperparams(optax.sgd)(schedule))
    message = "set_learning_rate: table must hold a number as its learning rate, got a schedule"
    with pytest.raises(ValueError, match=f"{message}.*give optax.inject_hyperparams a number"):
        hkv.optim.set_learning_rate(opt.init(hkv.create(128, DIM)), 0.1)


def test_a_rate_that_cannot_be_set_is_named():
    for opt, error in (
        (hkv.optim.ftrl(0.1), "must not be FTRL"),
        (hkv.optim.adam(lambda count: 0.1), "must have a number as its learning rate"),
        (hkv.optim.sparse(optax.sgd(0.1)), "must be a native one"),
    ):
        with pytest.raises(TypeError, match=f"inject_learning_rate: optimizer {error}"):
            hkv.optim.inject_learning_rate(opt)  # pyright: ignore[reportArgumentType]
    for table in (hkv.create(128, DIM), hkv.optim.adam(0.1).init(hkv.create(128, DIM))):
        with pytest.raises(ValueError, match="set_learning_rate: table must hold one .* got none"):
            hkv.optim.set_learning_rate(table, 0.1)
    table = hkv.optim.inject_learning_rate(hkv.optim.adam(0.1)).init(hkv.create(128, DIM))
    with pytest.raises(TypeError, match="set_learning_rate: learning_rate must be one number"):
        hkv.optim.set_learning_rate(table, jnp.ones(2))
    own = hkv.optim.sparse(optax.inject_hyperparams(optax.adam)(0.1), count_per_row=True)
    with pytest.raises(ValueError, match=r"got one for each row .*without count_per_row=True"):
        hkv.optim.set_learning_rate(own.init(hkv.create(128, DIM)), 0.1)
    with pytest.raises(TypeError, match="set_learning_rate: table must be"):
        hkv.optim.set_learning_rate(None, 0.1)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("rate", "error", "message"),
    [
        (float("nan"), ValueError, "must be finite, got nan"),
        (-np.inf, ValueError, "must be finite, got -inf"),
        (1e39, ValueError, r"must be finite, got 1e\+39; updates are in float32"),
        (np.float64(1e39), ValueError, "must be finite"),
        (True, TypeError, r"must be one number, got bool\[\]"),
        (jnp.bool_(True), TypeError, r"must be one number, got bool\[\]"),
        ("0.1", TypeError, "must be one number, got <U3"),
    ],
)
def test_a_rate_that_no_optimizer_is_made_with_is_none_later(rate, error, message):
    """One step with it would make NaN of the rows."""
    opt = hkv.optim.inject_learning_rate(hkv.optim.adam(0.1))
    table, result = hkv.find_or_insert(opt.init(hkv.create(128, DIM)), IDS)
    with pytest.raises(error, match=f"optim.set_learning_rate: learning_rate {message}"):
        hkv.optim.set_learning_rate(table, rate)
    with pytest.raises(error, match=f"optim.update: learning_rate {message}"):
        opt.update(table, result, jnp.ones_like(result.values), learning_rate=rate)
    scheduled = hkv.optim.adam(lambda count: rate)
    with pytest.raises(error, match=f"what the schedule learning_rate returns {message}"):
        table, result = hkv.find_or_insert(scheduled.init(hkv.create(128, DIM)), IDS)
        scheduled.update(table, result, jnp.ones_like(result.values))


def test_a_rate_that_became_nan_on_a_device_can_be_replaced():
    """Of an array on a device nobody asks for the value: such a rate may be one by accident."""
    table = hkv.optim.inject_learning_rate(hkv.optim.adam(0.1)).init(hkv.create(128, DIM))
    for rate in (jnp.float32(jnp.nan), 0.5):
        table = hkv.optim.set_learning_rate(table, rate)
        np.testing.assert_array_equal(table.optimizer.shared["learning_rate"], [rate])


def test_a_whole_number_of_a_transformation_stays_one():
    def every(learning_rate, steps):
        return optax.sgd(learning_rate / steps)

    opt = hkv.optim.sparse(optax.inject_hyperparams(every)(learning_rate=1.0, steps=2))
    table = opt.init(hkv.create(128, DIM))
    table = hkv.optim.set_hyperparam(table, "steps", 4)
    assert table.optimizer.shared["hyperparams.steps"].tolist() == [4]
    for wrong in (2.7, 2**31, -(2**31) - 1, jnp.float32("nan"), jnp.float32(1e20)):
        with pytest.raises(ValueError, match="value must be a whole number from -2147483648 to 21"):
            hkv.optim.set_hyperparam(table, "steps", wrong)
    for given in (2**24 + 1, 2**31 - 1, -(2**31), np.int32(2**31 - 1), jnp.int32(2**31 - 1)):
        own = hkv.optim.set_hyperparam(table, "steps", given)
        assert own.optimizer.shared["hyperparams.steps"].tolist() == [int(given)]
    with pytest.raises(TypeError, match="value must be an integer, since .* got float32, traced"):
        jax.jit(hkv.optim.set_hyperparam, static_argnums=1)(table, "steps", 2.7)
    traced = jax.jit(lambda table, steps: hkv.optim.set_hyperparam(table, "steps", steps))
    assert traced(table, 2**31 - 1).optimizer.shared["hyperparams.steps"].tolist() == [2**31 - 1]
    for given in (5, np.array([5]), [5], jnp.array([[5]]), jnp.int32(5)):
        inside = jax.jit(lambda table, given=given: hkv.optim.set_hyperparam(table, "steps", given))
        for own in (inside(table), hkv.optim.set_hyperparam(table, "steps", given)):
            assert own.optimizer.shared["hyperparams.steps"].tolist() == [5]


def test_a_rate_in_the_state_of_ones_own_transformation_is_set():
    """Wherever it lies in a chain."""

    def init(rows):
        return {"learning_rate": jnp.float32(1.0)}

    def update(gradients, state, rows=None):
        return jax.tree.map(lambda own: -state["learning_rate"] * own, gradients), state

    own = optax.GradientTransformation(init, update)
    opt = hkv.optim.sparse(optax.chain(optax.identity(), own))
    table = hkv.optim.set_learning_rate(opt.init(hkv.create(128, DIM)), 0.5)
    table, result = hkv.find_or_insert(table, IDS)
    table = opt.update(table, result, jnp.ones((3, DIM), jnp.float32))
    moved = hkv.find(table, IDS)[1].values - result.values
    np.testing.assert_allclose(moved, -0.5, rtol=1e-6)
    # Beside one that was injected, that one is meant.
    both = optax.chain(optax.inject_hyperparams(optax.sgd)(1.0), own)
    table = hkv.optim.sparse(both).init(hkv.create(128, DIM))
    shared = hkv.optim.set_learning_rate(table, 0.25).optimizer.shared
    assert shared["0.hyperparams.learning_rate"] == 0.25 and shared["1.learning_rate"] == 1
    inside = optax.inject_hyperparams(optax.sgd)(1.0)

    def init_both(rows):
        return init(rows) | {"inner": inside.init(rows)}

    def update_both(gradients, state, rows=None):
        return gradients, state

    table = hkv.optim.sparse(optax.GradientTransformation(init_both, update_both)).init(table)
    shared = hkv.optim.set_learning_rate(table, 0.25).optimizer.shared
    assert shared["inner.hyperparams.learning_rate"] == 0.25 and shared["learning_rate"] == 1
    # Of each row one cannot be set.
    table = hkv.optim.sparse(optax.chain(optax.identity(), own), count_per_row=True).init(table)
    with pytest.raises(ValueError, match=r"got one for each row in .*'1.learning_rate'.*without"):
        hkv.optim.set_learning_rate(table, 0.5)
