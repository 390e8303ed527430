"""Rows that a model gives for ids that its table has not seen."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_hkv as hkv
import jax_hkv.linen
import jax_hkv.nnx

DIM = 3
OPTIONS = {"optimizer": hkv.optim.sgd(1.0), "embedding_init": hkv.initializers.constant(9.0)}
APIS = pytest.mark.parametrize("api", ["linen", "nnx"])


class Linen(nn.Module):
    """Rows of ids; of those not seen, a projection of their features."""

    options: dict

    @nn.compact
    def __call__(self, ids, features, valid=None, train=False):
        first = nn.Dense(DIM, name="first", use_bias=False)(features)
        first = first.astype(self.options.get("param_dtype", jnp.float32))
        embed = hkv.linen.Embed(256, DIM, **{**OPTIONS, **self.options}, name="embed")
        return embed(ids, values=first, valid=valid, train=train)


class Nnx(nnx.Module):
    def __init__(self, options):
        self.first = nnx.Linear(2, DIM, use_bias=False, rngs=nnx.Rngs(0))
        self.embed = hkv.nnx.Embed(256, DIM, **OPTIONS | options)
        self.kind = options.get("param_dtype", jnp.float32)

    def __call__(self, ids, features, valid=None, train=False):
        return self.embed(
            ids, values=self.first(features).astype(self.kind), valid=valid, train=train
        )


def state_of(api, placement=None, **options):
    def make():
        tx = optax.sgd(0.0)  # the projection stays as it is
        if api == "nnx":
            return hkv.nnx.TrainState(Nnx(options), tx)
        args = jax.random.key(0), np.zeros(1, np.int32), np.zeros((1, 2), np.float32)
        return hkv.linen.TrainState.create(Linen(options), *args, tx=tx)

    if placement is None:
        return make()
    return placement.create(make) if api == "linen" else hkv.nnx.place(make, placement)


def apply(api, state, *args):
    return np.asarray((state.apply if api == "linen" else state.model)(*args), np.float32)


def projection(api, state, features):
    own = state.params["first"]["kernel"] if api == "linen" else state.model.first.kernel[...]
    return np.asarray(jnp.asarray(features) @ own)


def step_of(api, **options):
    """With a gradient of ones by rows that come out; returns state, rows."""

    def loss(model, *args):
        rows = model(*args, train=True)
        return rows.astype(jnp.float32).sum(), rows

    step = getattr(hkv, api).train_step(loss, has_aux=True, donate=False, **options)

    def run(state, *args):
        state, info = step(state, *args) if api == "linen" else (state, step(state, *args))
        return state, np.asarray(info.aux, np.float32)

    return run


@APIS
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_unseen_ids_begin_with_the_rows_that_are_given(api, dtype, rng):
    state, step = state_of(api, param_dtype=dtype), step_of(api)
    ids = np.array([5, 6, 7, 5], np.int32)
    features = rng.standard_normal((4, 2)).astype(np.float32)
    first = np.asarray(projection(api, state, features).astype(dtype), np.float32)
    np.testing.assert_array_equal(apply(api, state, ids, features), first)
    state, rows = step(state, ids, features)
    np.testing.assert_array_equal(rows, first[[0, 1, 2, 0]])  # of equal ids the first
    trained = np.asarray((first - 1.0).astype(dtype), np.float32)
    trained[0] = trained[3] = np.asarray((first[0] - 2.0).astype(dtype), np.float32)
    other = rng.standard_normal((4, 2)).astype(np.float32)
    np.testing.assert_array_equal(apply(api, state, ids, other), trained)


@APIS
def test_ids_that_are_turned_away_or_masked(api, rng):
    """The former have the given row, as in evaluation, the latter zeros."""
    state = state_of(api, admission=hkv.admission.frequency(3))
    ids, valid = np.arange(4, dtype=np.int32), np.array([True, True, False, True])
    features = rng.standard_normal((4, 2)).astype(np.float32)
    expected = np.where(valid[:, None], projection(api, state, features), 0)
    for rows in (
        apply(api, state, ids, features, valid),
        step_of(api)(state, ids, features, valid)[1],
    ):
        np.testing.assert_array_equal(rows, expected)


@APIS
@pytest.mark.parametrize("unseen", ["zeros", "learned"])
def test_what_else_unseen_ids_are_goes_before(api, unseen, rng):
    """They are inserted with the given row all the same."""
    state = state_of(api, unseen=unseen)
    ids, features = np.arange(4, dtype=np.int32), rng.standard_normal((4, 2)).astype(np.float32)
    assert not apply(api, state, ids, features).any()
    _, rows = step_of(api)(state, ids, features)
    np.testing.assert_array_equal(rows, projection(api, state, features))


@APIS
@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_given_rows_over_devices(api, mode, rng):
    if len(jax.devices()) < 2:
        pytest.skip("it wants two devices")
    mesh = jax.make_mesh((2,), ("device",), devices=jax.devices()[:2])
    placement = hkv.sharding.Placement(mesh, mode=mode)
    state = state_of(api, placement, axis_name="device")
    ids, features = np.arange(8, dtype=np.int32), rng.standard_normal((8, 2)).astype(np.float32)
    step = step_of(api, placement=placement)
    batch = placement.put((ids, features))
    one = state_of(api)
    first = projection(api, one, features)
    for expected in (first, first - 0.5):  # the loss is the mean of the devices'
        state, rows = step(state, *batch)
        np.testing.assert_allclose(rows.reshape(8, DIM), expected, rtol=1e-5, atol=1e-6)


@APIS
def test_rows_of_another_shape_are_named(api):
    layer = hkv.linen.Embed(256, DIM) if api == "linen" else hkv.nnx.Embed(256, DIM)
    call = layer if api == "nnx" else lambda *a, **k: layer.init_with_output({}, *a, **k)
    with pytest.raises(ValueError, match=r"Embed: values must have shape \[4, 3\].*got \[3\]"):
        call(np.arange(4, dtype=np.int32), values=np.zeros(3, np.float32))
    with pytest.raises(TypeError, match=r"Embed: values must be float32 like the table"):
        call(np.arange(4, dtype=np.int32), values=np.zeros((4, 3), np.float16))
