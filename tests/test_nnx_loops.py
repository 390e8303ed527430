"""Layers of flax.nnx inside of its loops: they look up in evaluation, in training before them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_hkv as hkv
import jax_hkv.nnx
from jax_hkv import _nnx_devices

DIM = 4
OPTIMIZER = hkv.optim.sgd(0.1)

LOOPS = {
    "scan": lambda model, ids, train: nnx.scan(
        lambda layer, own: (layer, layer(own, train=train)), in_axes=(nnx.Carry, 0)
    )(model, ids)[1],
    "scan of a broadcast layer": lambda model, ids, train: nnx.scan(
        lambda layer, carry, own: (carry, layer(own, train=train)), in_axes=(None, nnx.Carry, 0)
    )(model, jnp.zeros(()), ids)[1],
    "scan of a broadcast state": lambda model, ids, train: nnx.scan(
        lambda layer, carry, own: (carry, layer(own, train=train)),
        in_axes=(nnx.StateAxes({...: None}), nnx.Carry, 0),
    )(model, jnp.zeros(()), ids)[1],
    "fori_loop": lambda model, ids, train: nnx.fori_loop(
        0,
        len(ids),
        lambda i, pair: (pair[0], pair[1] + pair[0](ids[i], train=train)),
        (model, jnp.zeros((2, DIM))),
    )[1],
    "while_loop": lambda model, ids, train: nnx.while_loop(
        lambda turn: turn[1] < len(ids),
        lambda turn: (turn[0], turn[1] + 1, turn[2] + turn[0](ids[turn[1]], train=train)),
        (model, 0, jnp.zeros((2, DIM))),
    )[2],
    "cond": lambda model, ids, train: nnx.cond(
        ids[0, 0] > 0,
        lambda layer: layer(ids, train=train),
        lambda _: jnp.zeros((3, 2, DIM)),
        model,
    ),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_an_nnx_loop_looks_up_in_evaluation_and_says_where_to_in_training(loop):
    model = hkv.nnx.Embed(256, DIM, optimizer=OPTIMIZER)
    ids = jnp.arange(6).reshape(3, 2)
    rows = LOOPS[loop](model, ids, False)
    assert np.isfinite(rows).all()
    state = hkv.nnx.TrainState(model, optax.sgd(0.1))
    step = hkv.nnx.train_step(lambda model, ids: jnp.sum(LOOPS[loop](model, ids, True)))
    with pytest.raises(TypeError, match=r"nnx\.scan, .*in one call, and pass rows in"):
        step(state, ids)


@pytest.mark.parametrize("is_placed", [False, True])
def test_an_error_of_arguments_is_told_under_flaxs_cache_too(is_placed):
    """Flax demands that a step takes up what it has kept of the state, and told of that alone."""
    mesh = jax.make_mesh((1,), ("device",), devices=jax.devices()[:1])
    placement = hkv.sharding.Placement(mesh) if is_placed else None

    def make():
        axis_name = "device" if is_placed else None
        model = hkv.nnx.Embed(256, DIM, optimizer=OPTIMIZER, axis_name=axis_name)
        return hkv.nnx.TrainState(model, optax.sgd(0.1))

    state = hkv.nnx.place(make, placement) if placement else make()
    step = hkv.nnx.train_step(
        lambda model, ids: jnp.sum(model(ids, train=True)), placement=placement
    )
    step = nnx.cached_partial(step, state)
    ids = np.arange(8, dtype=np.int32)
    of_its_own = "ids must hold|which JAX would cut|arguments.* must lie on"
    for wrong in (np.arange(2**40, 2**40 + 8), ids.astype(np.float32)):
        with pytest.raises((TypeError, ValueError), match=of_its_own) as raised:
            step(wrong)
        assert "GRAPH_CONTEXT" not in str(raised.value)
    given = placement.put(ids) if placement else ids
    first, second = step(given), step(given)
    assert int(first.tables["table"].inserted) == int(second.tables["table"].hits) == 8


def test_an_error_of_the_users_own_stays_as_it_is():
    """That Flax has in the same words where a state is put together."""
    graph, _ = nnx.split(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    state = hkv.nnx.TrainState(hkv.nnx.Embed(256, DIM, optimizer=OPTIMIZER), optax.sgd(0.1))

    def loss_fn(model, ids):
        nnx.merge(graph, nnx.State({}))
        return jnp.sum(model(ids, train=True))

    with pytest.raises(ValueError, match="number of leaves"):
        hkv.nnx.train_step(loss_fn)(state, jnp.arange(3))


class Scaled(nnx.Module):
    def __init__(self, factor):
        self.embed = hkv.nnx.Embed(256, DIM, embedding_init=hkv.initializers.constant(1.0))
        self.factor = factor  # static: of each there is a program

    def __call__(self, ids):
        return self.factor * self.embed(ids)


def test_programs_of_the_graphs_that_were_used_last_are_kept(monkeypatch):
    """A model that is asked all the time is not compiled again for others that come and go."""
    monkeypatch.setattr(_nnx_devices, "_MOST_PROGRAMS", 2)
    mesh = jax.make_mesh((1,), ("device",), devices=jax.devices()[:1])
    placement, traced = hkv.sharding.Placement(mesh), []

    def rows(model, ids):
        traced.append(model.factor)
        return model(ids)

    run = hkv.nnx.run(rows, placement=placement)
    models = [hkv.nnx.place(functools.partial(Scaled, factor), placement) for factor in range(4)]
    ids = placement.put(np.arange(3, dtype=np.int32))
    for factor in (0, 1, 0, 2, 0, 3, 0, 1):
        assert np.asarray(run(models[factor], ids)).tolist() == [[factor] * DIM] * 3
    assert traced == [0, 1, 2, 3, 1]
