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
