"""What a checked function says of its arguments before JAX cuts or refuses them."""

from __future__ import annotations

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_hkv as hkv

WIDE = np.array([2**40 + 5, 7])
DIM = 4
SGD = hkv.optim.sgd(0.1)


@pytest.fixture(autouse=True)
def without_x64():
    with jax.enable_x64(False):
        yield


class Column:
    """A column of a data frame, as pandas and polars have them."""

    dtype = "uint64"

    def to_numpy(self):
        return WIDE


class Foreign:
    """An array of another library."""

    dtype = "torch.int64"

    def __dlpack__(self):
        raise AssertionError("nobody needs its numbers")


WRONG = {
    "64-bit ids": (WIDE, r"holds int64 numbers, which JAX would cut to 32 bits: make keys"),
    "a wide number": (2**70, r"is the number 1180591620717411303424, which JAX would cut"),
    "texts": (np.array(["u:1", "u:2"]), r"holds <U3, for which JAX has no type: hash texts"),
    "objects": (np.array([1, None], object), r"holds object, .*missing values filled"),
    "times": (np.array(["2026-01-01"], "datetime64[s]"), r"holds datetime64\[s\], .*as numbers"),
    "a column": (Column(), r"is a column, .*\.Column, of uint64: .*column\.to_numpy\(\)"),
    "another library's": (Foreign(), r"is an array of another library, .*\.Foreign"),
}


def predict(table, inputs, **named):
    return hkv.find(table, inputs["ids"])[1].values.sum() + len(named)


@pytest.mark.parametrize("case", WRONG)
def test_arguments_are_named_before_jax_takes_them(case):
    table, (wrong, message) = hkv.create(128, DIM), WRONG[case]
    look_up = hkv.checked(jax.jit(predict))
    if not isinstance(wrong, int):  # which may be static, and JAX refuses otherwise
        with pytest.raises(TypeError, match=rf"^predict: arguments\[1\]\['ids'\] {message}"):
            look_up(table, {"ids": wrong})
        with pytest.raises(TypeError, match=rf"^predict: arguments\['more'\]\[0\] {message}"):
            look_up(table, {"ids": np.array([3])}, more=[wrong])
        with pytest.raises(TypeError, match=rf"^predict: arguments\[1\]\['ids'\] {message}"):
            look_up.lower(table, {"ids": wrong})
        with pytest.raises(TypeError, match=rf"^device_put: arguments\[0\]\['ids'\] {message}"):
            hkv.checked(jax.device_put)({"ids": wrong})
    step = hkv.nnx.train_step(lambda model, ids: model(ids, train=True).sum())
    state = hkv.nnx.TrainState(hkv.nnx.Embed(128, DIM, optimizer=SGD), optax.sgd(0.1))
    with pytest.raises(TypeError, match=rf"^train_step: arguments\[0\] {message}"):
        step(state, wrong)


def test_row_splits_are_looked_at_where_a_batch_goes_to_the_device():
    """Later nobody sees them."""
    keys = hkv.Keys.from_numpy(WIDE)
    right, wrong = (hkv.Jagged(keys, np.array(splits, np.int32)) for splits in ([0, 1, 2], [1, 1]))
    put = hkv.checked(jax.device_put)
    assert jax.tree.leaves(put({"a": right}))[0].shape == (2, 2)
    with pytest.raises(ValueError, match=r"^device_put: row_splits of a Jagged must start at 0"):
        put({"a": wrong})
    lengths = hkv.Jagged(hkv.Keys.from_numpy(np.arange(6)), np.array([2, 1, 3], np.int32))
    with pytest.raises(ValueError, match=r"got \[2, 1, 3\]"):
        put([lengths])


@pytest.mark.parametrize("lists", [[[1, 2], [3], [], [4, 5, 6]], [[], [], [], []]])
def test_bags_of_each_part_of_a_batch_are_taken(lists):
    """For micro-batches and devices: some part may have no ids at all."""
    bags = hkv.Jagged.from_lists(lists).for_parts(2, capacity=4)
    put = hkv.checked(jax.device_put)(bags)
    np.testing.assert_array_equal(put.row_splits, bags.row_splits)
    joined = hkv.sharding.concatenate([bags, bags])
    assert hkv.checked(jax.device_put)(joined).ids.shape == joined.ids.shape


def test_what_is_right_comes_through_as_it_is():
    table, _ = hkv.find_or_insert(hkv.create(128, DIM), hkv.Keys.from_numpy(WIDE))
    jitted = jax.jit(predict)
    look_up = hkv.checked(jitted)
    for ids in (hkv.Keys.from_numpy(WIDE), np.array([7, 8]), jnp.array([7]), [7]):
        inputs = {"ids": np.array(ids) if isinstance(ids, list) else ids}
        assert look_up(table, inputs) == jitted(table, inputs)
    assert look_up.__name__ == "predict" and "stablehlo" in look_up.lower(
        table, {"ids": np.array([7])}
    ).as_text("stablehlo")
    assert hkv.checked(lambda name: name)("static texts are taken") == "static texts are taken"
    static = jax.jit(lambda ids, number: ids + number % 7, static_argnums=1)
    assert hkv.checked(static)(np.array([1]), 2**40).tolist() == [1 + 2**40 % 7]
    with pytest.raises(TypeError, match=r"^predict: arguments\[0\]\['ids'\] holds int64"):
        hkv.checked(functools.partial(predict, table))({"ids": WIDE})
    with pytest.raises(TypeError, match=r"checked: fn must be a function .* got int: give jax.jit"):
        hkv.checked(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ZeroDivisionError):
        hkv.checked(lambda: 1 // 0)()


def test_with_x64_nothing_is_cut():
    call = hkv.checked(jax.jit(lambda ids: ids))
    with jax.enable_x64(True):
        assert call(WIDE).tolist() == WIDE.tolist()
    with pytest.raises(TypeError, match="would cut to 32 bits"):
        call(WIDE)


def test_a_model_that_a_step_has_used_up_is_named():
    ids = np.arange(5, dtype=np.int32)
    state = hkv.nnx.TrainState(hkv.nnx.Embed(128, DIM, optimizer=SGD), optax.sgd(0.1))
    evaluate = hkv.checked(jax.jit(lambda model, ids: model(ids)))
    shared, copied = nnx.clone(state.model), copy.deepcopy(state.model)
    hkv.nnx.train_step(lambda model, ids: model(ids, train=True).sum())(state, ids)
    assert evaluate(state.model, ids).shape == evaluate(copied, ids).shape == (5, DIM)
    with pytest.raises(RuntimeError, match=r"arguments\[0\].* was used up by an earlier step"):
        evaluate(shared, ids)
