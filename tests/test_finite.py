"""Which steps are finite, and a loss scale that guards against others."""

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

DIM = 2
SGD_ROWS = hkv.optim.sgd(0.5)


def test_a_loss_scale_grows_no_higher_than_it_needs():
    """Gradients of float32 that are finite stay so: the scale is a guard against NaN there."""
    scale = hkv.optim.LossScale.create(1.0, period=1)
    for _ in range(200):
        scale = scale.adjust(jnp.bool_(True))
    assert float(scale.scale) == 2.0**32


class _Normed(nn.Module):
    """Statistics of a branch without a gradient."""

    @nn.compact
    def __call__(self, ids, dense, *, train=False):
        rows = hkv.linen.Embed(256, DIM, optimizer=SGD_ROWS)(ids, train=train)
        nn.BatchNorm(use_running_average=not train)(jax.lax.stop_gradient(dense))
        return rows.mean()


class _NnxNormed(nnx.Module):
    def __init__(self):
        self.embed = hkv.nnx.Embed(256, DIM, optimizer=SGD_ROWS)
        self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))

    def __call__(self, ids, dense, *, train=False):
        rows = self.embed(ids, train=train)
        self.norm(jax.lax.stop_gradient(dense), use_running_average=not train)
        return rows.mean()


@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize("what", ["loss", "statistics"])
def test_a_step_whose_loss_or_statistics_alone_are_not_finite_is_skipped(api, what):
    """Gradients that are finite do not show it."""
    ids, dense = np.arange(8, dtype=np.int32), np.ones((8, 2), np.float32)
    scale = hkv.optim.LossScale.create(1.0)

    def loss(model, ids, dense, off):
        return model(ids, dense, train=True) + jax.lax.stop_gradient(off)

    if api == "linen":
        state = hkv.linen.TrainState.create(
            _Normed(), jax.random.key(0), ids, dense, tx=optax.sgd(0.1), loss_scale=scale
        )
    else:
        state = hkv.nnx.TrainState(_NnxNormed(), optax.sgd(0.1), loss_scale=scale)
    step = getattr(hkv, api).train_step(loss)

    def run(state, *args):
        return step(state, *args) if api == "linen" else (state, step(state, *args))

    def kept(state):
        own = state.variables if api == "linen" else nnx.state(state.model, nnx.BatchStat)
        return jax.device_get(own)

    zero, nan = np.float32(0), np.float32(np.nan)
    state, info = run(state, ids, dense, zero)
    before = kept(state)
    assert info.finite
    wrong = (dense, nan) if what == "loss" else (dense * nan, zero)
    state, info = run(state, ids, *wrong)
    assert not info.finite
    jax.tree.map(np.testing.assert_array_equal, kept(state), before)
    state, info = run(state, ids, dense, zero)
    assert info.finite


class _Norms:
    """Norms of rows, whose gradient is not a number where rows are zeros."""

    def __call__(self, ids, valid, train=False):
        rows = self.embed(ids, valid=valid, train=train)
        has_ids = valid if rows.ndim == 3 else valid.any(axis=-1)
        return jnp.sum(jnp.where(has_ids, jnp.linalg.norm(rows, axis=-1), 0))


class _LinenNorms(_Norms, nn.Module):
    layer: str
    axis_name: str | None = None

    def setup(self):
        kind = getattr(hkv.linen, self.layer)
        self.embed = kind(256, 2, optimizer=hkv.optim.sgd(1e-3), axis_name=self.axis_name)


class _NnxNorms(_Norms, nnx.Module):
    def __init__(self, layer, axis_name=None):
        kind = getattr(hkv.nnx, layer)
        self.embed = kind(256, 2, optimizer=hkv.optim.sgd(1e-3), axis_name=axis_name)


IDS = np.arange(24, dtype=np.int32).reshape(8, 3)
IN_BAGS = np.arange(8)[:, None] % 4 > np.arange(3)  # of every fourth bag no id


def norms_state(api, layer, placement=None):
    scale, axis_name = hkv.optim.LossScale.create(2.0**10), placement and placement.axis_name

    def make():
        if api == "nnx":
            return hkv.nnx.TrainState(_NnxNorms(layer, axis_name), optax.sgd(0.1), scale)
        model = _LinenNorms(layer, axis_name)
        args = (jax.random.key(0), IDS[:2], IN_BAGS[:2])
        return hkv.linen.TrainState.create(model, *args, tx=optax.sgd(0.1), loss_scale=scale)

    if placement is None:
        return make()
    return placement.create(make) if api == "linen" else hkv.nnx.place(make, placement)


@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize("layer", ["Embed", "EmbedBag"])
@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}, {"placement": 2}], ids=str)
def test_gradients_that_no_row_gets_may_be_no_numbers(api, layer, options):
    """Of masked ids and empty bags; with those of rows the scale skips the step."""
    put = np.asarray
    if "placement" in options:
        if len(jax.devices()) < 2:
            pytest.skip("it wants two devices")
        mesh = jax.make_mesh((2,), ("device",), devices=jax.devices()[:2])
        options = {"placement": hkv.sharding.Placement(mesh)}
        put = options["placement"].put
    state = norms_state(api, layer, options.get("placement"))

    def loss(model, ids, valid, factor):
        return model(ids, valid, train=True) * factor.sum()

    step = getattr(hkv, api).train_step(loss, **options)

    def run(state, factor):
        batch = put(IDS), put(IN_BAGS), put(np.full((8,), factor, np.float32))
        return step(state, *batch) if api == "linen" else (state, step(state, *batch))

    losses = []
    for _ in range(4):
        state, info = run(state, 1.0)
        losses.append(float(info.loss))
        assert info.finite
    assert losses[-1] < losses[0]
    state, info = run(state, np.inf)
    assert not info.finite


class _Lowest(nn.Module):
    """The lowest number of each input that was more than zero, infinite until there is one."""

    @nn.compact
    def __call__(self, ids, dense, *, train=False):
        rows = hkv.linen.Embed(256, 2, optimizer=hkv.optim.sgd(0.5))(ids, train=train)
        lowest = self.variable("batch_stats", "lowest", jnp.full, (2,), jnp.inf)
        if not self.is_initializing():
            own = jnp.where(dense > 0, dense, jnp.inf).min(axis=0)
            lowest.value = jnp.minimum(lowest.value, own)
        return rows.mean()


def test_statistics_that_are_infinite_already_skip_no_step():
    ids, dense = np.arange(8, dtype=np.int32), np.array([[3.0, -1.0]] * 8, np.float32)
    scale = hkv.optim.LossScale.create(1.0)
    state = hkv.linen.TrainState.create(
        _Lowest(), jax.random.key(0), ids, dense, tx=optax.sgd(0.1), loss_scale=scale
    )
    step = hkv.linen.train_step(lambda model, *args: model(*args, train=True))
    for _ in range(2):
        state, info = step(state, ids, dense)
        assert info.finite
    assert state.variables["batch_stats"]["lowest"].tolist() == [3.0, float("inf")]
