"""A table that evicts nothing trains as `nn.Embed` does with a dense optimizer."""

from __future__ import annotations

import dataclasses
from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from combinations import pairs
from flax import nnx

import jax_hkv as hkv
from jax_hkv._namespaces import in_namespace

VOCABULARY, DIM, BATCH, STEPS = 300, 8, 64, 200
TABLES = ("users", "items")
FEATURES = [
    hkv.Feature("user", "users"),
    hkv.Feature("item", "items", None),
    hkv.Feature("seen", "items", "mean"),
]
DENSE = optax.sgd(0.2)
# Rates at which the losses fall. optax rounds 1 - b2**n to float32: with the usual b2 = 0.999 its
# first steps are off by 1e-5, those of the fused Adam are not, and losses differ by 3e-6.
OPTAX = {"sgd": optax.sgd(1.0), "adam": optax.adam(3e-3, b2=0.95), "adagrad": optax.adagrad(0.1)}
FUSED = {
    "sgd": hkv.optim.sgd(1.0),
    "adam": hkv.optim.adam(3e-3, b2=0.95),
    "adagrad": hkv.optim.adagrad(0.1),
}
GENERIC = {name: hkv.optim.sparse(tx) for name, tx in OPTAX.items()}


def loss_of(logits, labels):
    return optax.sigmoid_binary_cross_entropy(logits, labels).mean()


def joined(rows):
    return jnp.concatenate([rows["user"], rows["item"], rows["seen"]], axis=-1)


class Plain(nn.Module):
    """What a user has before: fixed vocabularies, rows among the parameters."""

    @nn.compact
    def __call__(self, inputs):
        users = nn.Embed(VOCABULARY, DIM, name="users")
        items = nn.Embed(VOCABULARY, DIM, name="items")
        rows = {"user": users(inputs["user"]), "item": items(inputs["item"])}
        rows["seen"] = items(inputs["seen"]).mean(axis=1)
        return nn.Dense(1, name="dense")(nn.relu(nn.Dense(16, name="hidden")(joined(rows))))[:, 0]


class Linen(nn.Module):
    collection: hkv.Collection

    @nn.compact
    def __call__(self, inputs, train=False):
        rows = hkv.linen.EmbedCollection(self.collection)(inputs, train=train)
        return nn.Dense(1, name="dense")(nn.relu(nn.Dense(16, name="hidden")(joined(rows))))[:, 0]


class Nnx(nnx.Module):
    def __init__(self, collection, rngs):
        self.embed = hkv.nnx.EmbedCollection(collection)
        self.hidden = nnx.Linear(3 * DIM, 16, rngs=rngs)
        self.dense = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, inputs, train=False):
        rows = self.embed(inputs, train=train)
        return self.dense(nnx.relu(self.hidden(joined(rows))))[:, 0]


@cache
def batches():
    """The label is what most of the ids say; some ids occur often, some once."""
    rng = np.random.default_rng(3)
    secret = rng.standard_normal((2, VOCABULARY))

    def ids(*shape):
        return (VOCABULARY * rng.random(shape) ** 3).astype(np.int32)

    made = []
    for _ in range(STEPS):
        inputs = {"user": ids(BATCH), "item": ids(BATCH), "seen": ids(BATCH, 3)}
        signal = secret[0][inputs["user"]] + secret[1][inputs["item"]]
        signal += secret[1][inputs["seen"]].mean(axis=1)
        made.append((inputs, (signal > 0).astype(np.float32)))
    return made


def collection_of(optimizer, fuse):
    tables = [hkv.TableConfig(name, 4 * VOCABULARY, DIM, optimizer=optimizer) for name in TABLES]
    return hkv.Collection(tables, FEATURES, fuse=fuse)


@cache
def dense_params():
    return Plain().init(jax.random.key(0), batches()[0][0])["params"]


def first_rows(collection):
    """What each row of `nn.Embed` starts with, so that both start alike."""
    rows = {}
    for group in collection.groups:
        table = group.create()
        for config in group.tables:
            keys = hkv.Keys.from_numpy(np.arange(VOCABULARY))
            keys = in_namespace(keys, group.number(config.name), group.bits)
            rows[config.name] = {"embedding": hkv.initial_rows(table, keys)}
    return rows


@cache
def plain_losses(name, fuse):
    """Dense optax, whose steps and moments count on touched rows only."""
    collection = collection_of(FUSED[name], fuse)
    params = {**dense_params(), **first_rows(collection)}
    labels = {key: "rows" if key in TABLES else "dense" for key in params}
    tx = optax.multi_transform({"rows": OPTAX[name], "dense": DENSE}, labels)

    def touched(path, new, old, inputs):
        names = [getattr(key, "key", None) for key in path]
        if not set(names) & set(TABLES):
            return new
        ids = [inputs["user"]] if "users" in names else [inputs["item"], inputs["seen"]]
        seen = jnp.zeros(VOCABULARY, bool).at[jnp.concatenate([i.ravel() for i in ids])].set(True)
        return jnp.where(seen[:, None], new, old)

    @jax.jit
    def step(params, state, inputs, labels):
        def loss_fn(params):
            return loss_of(Plain().apply({"params": params}, inputs), labels)

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, after = tx.update(gradients, state, params)
        moved = optax.apply_updates(params, updates)
        params, state = jax.tree_util.tree_map_with_path(
            lambda path, new, old: touched(path, new, old, inputs), (moved, after), (params, state)
        )
        return params, state, loss

    state, losses = tx.init(params), []
    for inputs, answers in batches():
        params, state, loss = step(params, state, inputs, answers)
        losses.append(float(loss))
    return np.array(losses)


def linen_losses(collection):
    model = Linen(collection)
    state = hkv.linen.TrainState.create(model, jax.random.key(0), batches()[0][0], tx=DENSE)
    dense = {name: dense_params()[name] for name in ("dense", "hidden")}
    assert set(state.params) == set(dense)
    state = dataclasses.replace(state, params=jax.tree.map(jnp.copy, dense))
    step = hkv.linen.train_step(
        lambda apply, inputs, labels: loss_of(apply(inputs, train=True), labels)
    )
    losses = []
    for batch in batches():
        state, info = step(state, *batch)
        losses.append(float(info.loss))
    for metrics in info.tables.values():
        assert int(metrics.evicted) == int(metrics.refused) == 0
    return np.array(losses)


def nnx_losses(collection):
    model = Nnx(collection, nnx.Rngs(0))
    for layer in ("dense", "hidden"):
        getattr(model, layer).kernel.set_value(jnp.copy(dense_params()[layer]["kernel"]))
        getattr(model, layer).bias.set_value(jnp.copy(dense_params()[layer]["bias"]))
    state = hkv.nnx.TrainState(model, DENSE)
    step = hkv.nnx.train_step(lambda model, x, labels: loss_of(model(x, train=True), labels))
    return np.array([float(step(state, *batch).loss) for batch in batches()])


@pytest.mark.parametrize(
    "losses, fuse, name", pairs([linen_losses, nnx_losses], [True, False], OPTAX)
)
def test_losses_are_those_of_dense_embeddings(name, fuse, losses):
    expected = plain_losses(name, fuse)
    assert expected[-20:].mean() < 0.95 * expected[:20].mean()
    np.testing.assert_allclose(losses(collection_of(FUSED[name], fuse)), expected, rtol=1e-6)


@pytest.mark.parametrize("name", OPTAX)
def test_losses_with_an_optax_transformation_are_those_of_dense_embeddings(name):
    expected = plain_losses(name, True)
    np.testing.assert_allclose(
        linen_losses(collection_of(GENERIC[name], True)), expected, rtol=1e-6
    )
