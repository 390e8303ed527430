"""Layers with outputs in half precision: gradients come in it, and rows learn as in float32."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from combinations import pairs
from flax import nnx
from many_devices import assert_same_bits

import jax_hkv as hkv
import jax_hkv.linen
import jax_hkv.nnx

DIM, BATCH, HOTNESS = 8, 24, 3
HALF = [jnp.bfloat16, jnp.float16]
LAYERS = ["Embed", "EmbedBag", "EmbedCollection"]
OPTIMIZER = hkv.optim.adam(0.1)
FEATURES = {"single": "sum", "several": "mean", "apart": None}


def collection():
    """Features of one table, with bags and without."""
    config = hkv.TableConfig("ids", 256, DIM, optimizer=OPTIMIZER)
    return hkv.Collection([config], [hkv.Feature(n, "ids", how) for n, how in FEATURES.items()])


def layer_of(api, kind, dtype, **options):
    """A layer of linen or nnx."""
    module = getattr(hkv, api)
    if kind == "EmbedCollection":
        return module.EmbedCollection(collection(), dtype=dtype, **options)
    options |= {"optimizer": OPTIMIZER, "dtype": dtype}
    return getattr(module, kind)(256, DIM, **options)


def looked_up(layer, kind, ids, dtype):
    """Its rows for ids, one or several a feature, in a dtype."""
    if kind == "EmbedCollection":
        inputs = {"single": ids[:, :1], "several": ids, "apart": ids[:, :2]}
        rows = jnp.concatenate(
            [own.reshape(len(ids), -1) for own in layer(inputs, train=True).values()], axis=1
        )
    else:
        rows = layer(ids, train=True).reshape(len(ids), -1)
    return rows.astype(dtype)


class Linen(nn.Module):
    """The rows of a layer by themselves."""

    kind: str
    dtype: object
    output: object
    options: tuple = ()

    @nn.compact
    def __call__(self, ids):
        layer = layer_of("linen", self.kind, self.dtype, **dict(self.options))
        return looked_up(layer, self.kind, ids, self.output)


class Nnx(nnx.Module):
    """The same in nnx."""

    def __init__(self, kind, dtype, output, options=()):
        self.layer = layer_of("nnx", kind, dtype, **dict(options))
        self.kind, self.output = kind, output

    def __call__(self, ids):
        return looked_up(self.layer, self.kind, ids, self.output)


def loss_of(model, ids, factors):
    """Whose gradient by each output is a factor, with whatever precision XLA computes."""
    rows = model(ids)
    return jnp.sum(rows.astype(jnp.float32) * factors[:, : rows.shape[1]])


def batches(rng):
    """Ids that occur again and again, and factors that all types hold."""
    for _ in range(3):
        factors = rng.integers(-128, 129, (BATCH, 6 * DIM)) / np.float32(16)  # exact, halved too
        ids = rng.integers(0, 60, (BATCH, HOTNESS), dtype=np.int32)
        yield jnp.asarray(ids), jnp.asarray(factors, jnp.float32)


def trained(api, kind, dtype, output, given, **options):
    """The arrays of a model after some steps."""
    if api == "linen":
        model = Linen(kind, dtype, output)
        state = hkv.linen.TrainState.create(model, jax.random.key(0), given[0][0], tx=optax.sgd(1))
    else:
        model = Nnx(kind, dtype, output)
        state = hkv.nnx.TrainState(model, optax.sgd(1))
    step = getattr(hkv, api).train_step(loss_of, **options)
    for batch in given:
        state, info = step(state, *batch) if api == "linen" else (state, step(state, *batch))
    assert float(info.loss) != 0
    return state.tables if api == "linen" else nnx.state(state.model)


@pytest.mark.parametrize(
    "api, kind, output, options",
    pairs(["linen", "nnx"], LAYERS, HALF, [{}, {"max_norm": 0.5}, {"micro_batches": 2}]),
)
def test_rows_learn_as_where_the_model_rounds_them(rng, api, kind, output, options):
    """A layer in half precision, and one in float32 whose rows the model makes half ones."""
    given = list(batches(rng))
    inside = trained(api, kind, output, output, given, **options)
    outside = trained(api, kind, None, output, given, **options)
    assert_same_bits(jax.tree.leaves(inside), jax.tree.leaves(outside))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_gradients_of_bfloat16_outputs_have_half_the_bytes(rng, api, kind):
    """Those of float16 keep their range; those that a learned row has a part in are added up."""
    ids, factors = next(batches(rng))

    def dtypes(dtype, **options):
        given = (kind, dtype, jnp.float32, tuple(options.items()))
        if api == "linen":
            model = Linen(*given)
            variables = jax.eval_shape(lambda: model.init(jax.random.key(0), ids))
            rows = hkv.linen.perturbations(model, variables, ids)
        else:
            _, _, rows = hkv.nnx.value_and_grad(loss_of)(Nnx(*given), ids, factors)
            rows = [own.gradients for own in rows.values()]
        return {leaf.dtype for leaf in jax.tree.leaves(rows)}

    full = {jnp.dtype(jnp.float32)}
    assert dtypes(jnp.bfloat16) == dtypes("bfloat16") == {jnp.dtype(jnp.bfloat16)}
    assert dtypes(jnp.bfloat16, unseen="learned") == full
    assert dtypes(jnp.float16) == dtypes(None) == dtypes(jnp.float32) == full


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_derivatives_by_weights_of_half_rows_are_in_float32(dtype):
    rows = jnp.array([[1.0, 1 / 256], [3.0, 5 / 256]], dtype)
    table, _ = hkv.insert_or_assign(
        hkv.create(128, 2, dtype=dtype), np.array([5, 6], np.int32), rows
    )

    def total(weights):
        bags = hkv.Padded(np.array([[5, 6]], np.int32), None, weights)
        return hkv.find_pooled(table, bags, dtype=dtype)[1].values.astype(jnp.float32).sum()

    slope = jax.grad(total)(jnp.ones((1, 2), jnp.float32))
    assert slope.dtype == jnp.float32
    np.testing.assert_array_equal(slope, rows.astype(jnp.float32).sum(axis=1)[None])
