"""What optimizers are given: constants, options, rates and gradients that are wrong are named."""

from __future__ import annotations

import inspect
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_hkv as hkv

DIM = 4


def table_and_lookup(opt):
    table = opt.init(hkv.create(128, DIM, init=hkv.initializers.normal(1.0)))
    return hkv.find_or_insert(table, hkv.Keys.from_numpy(np.array([5, -9, 5])))


def test_wrong_options_are_named():
    """31: the argument, what was expected, what came."""
    with pytest.raises(ValueError, match=r"stochastic_rounding is for bfloat16.*float32"):
        hkv.optim.sgd(0.1, stochastic_rounding=True).init(hkv.create(128, 2))
    with pytest.raises(TypeError, match=r"arguments are \['learning_rate', .*got \['momentun'\]"):
        hkv.optim.sgd(0.1, momentun=0.9)
    assert hkv.optim.sgd(jnp.float32(0.5)) == hkv.optim.sgd(0.5)
    for arrays in (jnp.ones(3), jax.eval_shape(lambda: jnp.float32(1))):
        with pytest.raises(TypeError, match=r"learning_rate must be a number.*update\(learning"):
            hkv.optim.sgd(arrays)
    with pytest.raises(TypeError, match="learning_rate must be a number.*str"):
        hkv.optim.adam("fast")
    with pytest.raises(ValueError, match="b2 must be below 1, got 1.5"):
        hkv.optim.adam(0.1, b2=1.5)
    with pytest.raises(ValueError, match=r"eps must be a number from 0 on, got 1000"):
        hkv.optim.adam(0.1, eps=10**400)
    with pytest.raises(ValueError, match=r"learning_rate must be finite, got inf"):
        hkv.optim.sgd(10**400)
    with pytest.raises(ValueError, match=r"eps must be a number from 0 on, got -1"):
        hkv.optim.adagrad(0.1, eps=-1.0)
    with pytest.raises(TypeError, match=r"state_dtype must be float32"):
        hkv.optim.adam(0.1, state_dtype=jnp.int32)
    table, result = table_and_lookup(hkv.optim.adam(0.1))
    gradients = jnp.ones((3, DIM), jnp.float32)
    with pytest.raises(ValueError, match=r"of this optimizer.*adam.*got.*adagrad.*begin anew"):
        hkv.optim.adagrad(0.1).update(table, result, gradients)
    with pytest.raises(ValueError, match=r"no optimizer rows\. Call table = opt\.init"):
        hkv.optim.adagrad(0.1).update(hkv.create(128, DIM), result, gradients)
    with pytest.raises(TypeError, match=r"optim\.adam: arguments.*'b1'.*adamw.*weight_decay"):
        hkv.optim.adam(0.1, weight_decay=0.1)
    with pytest.raises(ValueError, match=r"one entry for each table, got 0 for 1"):
        hkv.optim.clip_by_global_norm(1.0, {}, [result], [])
    with pytest.raises(TypeError, match=r"results must be a list.*write \[results\]"):
        hkv.optim.clip_by_global_norm(1.0, {}, result, gradients)  # pyright: ignore
    with pytest.raises(TypeError, match=r"row_gradients must be a list.*write \[row_gradients\]"):
        hkv.optim.adam(0.1).update(table, [result], gradients)
    pair = namedtuple("Pair", ["one", "other"])(result, result)
    stacked = jnp.stack([gradients, gradients])
    for several in (pair, [result, result]):  # as good as lists
        hkv.optim.clip_by_global_norm(1.0, {}, several, stacked)
        hkv.optim.adam(0.1).update(table, several, stacked)
    assert int(hkv.metrics.of(table, pair).unique) == 2 * int(result.counts.unique)


CONSTANTS = {
    "sgd": ["momentum"],
    "adagrad": ["initial_accumulator_value", "eps"],
    "rowwise_adagrad": ["initial_accumulator_value", "eps", "weight_decay"],
    "adam": ["b1", "b2", "eps", "eps_root"],
    "adamw": ["b1", "b2", "eps", "eps_root", "weight_decay"],
    "rowwise_adam": ["b1", "b2", "eps", "eps_root", "weight_decay"],
    "ftrl": ["l1", "l2", "beta", "initial_accumulator_value"],
}


@pytest.mark.parametrize(
    ("name", "argument"), [(name, each) for name, own in CONSTANTS.items() for each in own]
)
def test_a_constant_that_is_no_number_from_0_on_is_named(name, argument):
    """By the function that was called, whatever the native operation is called."""
    make = getattr(hkv.optim, name)
    for wrong, error in [
        ("0.9", TypeError),
        ([0.9], TypeError),
        (np.ones(2), TypeError),
        (np.nan, ValueError),
        (np.inf, ValueError),
        (-1.0, ValueError),
    ]:
        with pytest.raises(error, match=rf"optim\.{name}: {argument} must be a number from 0 on"):
            make(0.1, **{argument: wrong})
    make(0.1, **{argument: jnp.float32(0.5)})
    if name != "sgd":
        with pytest.raises(TypeError, match=rf"optim\.{name}: {argument} .* got NoneType None"):
            make(0.1, **{argument: None})


@pytest.mark.parametrize("name", ["adam", "adamw", "rowwise_adam"])
def test_a_decay_of_one_is_named(name):
    with pytest.raises(ValueError, match=rf"optim\.{name}: b1 must be below 1, got 1"):
        getattr(hkv.optim, name)(0.1, b1=1)


@pytest.mark.parametrize("is_schedule", [False, True])
@pytest.mark.parametrize(
    ("rate", "got"),
    [(jnp.ones(2, jnp.float32), r"float32\[2\]"), ("fast", r"<U4\[\]"), (1j, r"complex128\[\]")],
)
def test_a_rate_that_is_no_number_is_named(rate, got, is_schedule):
    opt = hkv.optim.adam((lambda count: rate) if is_schedule else 0.1)
    table, result = table_and_lookup(opt)
    extra = {} if is_schedule else {"learning_rate": rate}
    source = "what the schedule learning_rate returns" if is_schedule else "learning_rate"
    with pytest.raises(TypeError, match=f"optim.update: {source} must be one number, got {got}"):
        opt.update(table, result, jnp.ones((3, DIM), jnp.float32), **extra)


@pytest.mark.parametrize("rate", [2, np.float64(2), jnp.bfloat16(2), jnp.ones(1) * 2])
def test_a_rate_may_be_any_kind_of_number(rate):
    opt = hkv.optim.sgd(0.1)
    table, result = table_and_lookup(opt)
    steps = [
        opt.update(table, result, jnp.ones((3, DIM), jnp.float32), learning_rate=each)
        for each in (rate, 2.0)
    ]
    np.testing.assert_array_equal(*(step.values for step in steps))


def test_numbers_that_are_not_given_are_those_of_optax():
    def defaults(make):
        return {
            name: each.default
            for name, each in inspect.signature(make).parameters.items()
            if isinstance(each.default, (int, float)) and not isinstance(each.default, bool)
        }

    for name, count in {"adagrad": 2, "adam": 4, "adamw": 5, "sgd": 0}.items():
        own, other = defaults(getattr(hkv.optim, name)), defaults(getattr(optax, name))
        shared = own.keys() & other.keys()
        assert len(shared) == count and {key: own[key] for key in shared} == {
            key: other[key] for key in shared
        }
    assert hkv.optim.LossScale.create().period == 2000  # as torch.amp's


def test_an_accumulator_that_a_half_type_takes_for_zero_is_named():
    with pytest.raises(ValueError, match="got 1e-09, which is 0.0 as float16"):
        hkv.optim.adagrad(0.1, initial_accumulator_value=1e-9, state_dtype=jnp.float16)
