"""Tables that layers are given, in place of those that they made."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_hkv as hkv

DIM = 4
IDS = np.array([1, 2, 3], np.int32)
SGD = hkv.optim.sgd(0.1)
OTHERWISE = {
    "policy": hkv.Policy.LFU,
    "choices": 2,
    "seed": 5,
    "embedding_init": hkv.initializers.constant(1.0),
    "param_dtype": jnp.bfloat16,
    "admission": hkv.admission.frequency(2),
}


class Given:
    """A layer of an api, with a table of the caller's."""

    def __init__(self, api, layer, table, **options):
        self.api, self.table = api, table
        self.layer = getattr(getattr(hkv, api), layer)(256, DIM, optimizer=SGD, **options)
        if api == "nnx":
            self.layer.table.set_value(table)

    def __call__(self, ids, train):
        if self.api == "nnx":
            return self.layer(ids, train=train)
        apply = functools.partial(self.layer.apply, {"tables": {"table": self.table}}, ids)
        return apply(train=True, mutable=hkv.linen.MUTABLE)[0] if train else apply()


@pytest.mark.filterwarnings("ignore:.*nothing trains their rows")
@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize("layer", ["Embed", "EmbedBag"])
@pytest.mark.parametrize("name", OTHERWISE)
def test_a_layer_trains_no_table_that_was_made_otherwise(api, layer, name):
    """What the table is would decide, silently; to read one nothing need be said of it."""
    option = {name: OTHERWISE[name]}
    made = getattr(hkv.nnx, layer)(256, DIM, optimizer=SGD, **option).table.get_value()
    ids = IDS if layer == "Embed" else IDS[:, None]
    given = Given(api, layer, made)
    assert given(ids, False).shape == (3, DIM)
    with pytest.raises(ValueError, match=rf"{layer}: {name} must be that of the table that it tr"):
        given(ids, True)
    assert Given(api, layer, made, **option)(ids, True).shape == (3, DIM)


@pytest.mark.filterwarnings("ignore:.*nothing trains their rows")
def test_a_step_of_nnx_trains_no_table_that_was_made_otherwise():
    state = hkv.nnx.TrainState(hkv.nnx.Embed(256, DIM, optimizer=SGD), optax.sgd(0.1))
    state.map_tables(lambda table: dataclasses.replace(table, seed=7))
    step = hkv.nnx.train_step(lambda model, ids: model(ids, train=True).sum())
    with pytest.raises(ValueError, match="Embed: seed must be that of the table that it trains, 7"):
        step(state, IDS)


@pytest.mark.filterwarnings("ignore:.*nothing trains their rows")
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize("layer", ["Embed", "EmbedBag"])
def test_a_layer_of_ids_takes_no_fused_table(api, layer, train):
    """None of its entries would be found there."""
    tables = [hkv.TableConfig(name, 128, DIM, optimizer=SGD) for name in ("users", "items")]
    features = [hkv.Feature("user", "users"), hkv.Feature("item", "items")]
    (fused,) = hkv.Collection(tables, features).create().values()
    message = rf"{layer}: table must be one whose keys are ids, got .*\['users', 'items'\].*find"
    with pytest.raises(ValueError, match=message):
        Given(api, layer, fused)(IDS[:, None], train)


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_layer_takes_a_table_of_a_collection_whose_keys_are_ids(api):
    config = hkv.TableConfig("users", 128, DIM, optimizer=SGD)
    alone = hkv.Collection([config], [hkv.Feature("user", "users")]).create()["users"]
    alone, result = hkv.find_or_insert(alone, IDS)
    rows = Given(api, "Embed", alone)(jnp.asarray(IDS), False)
    np.testing.assert_array_equal(rows, result.values)


def test_layers_that_say_the_same_are_the_same():
    """Whatever their words: what is static of them is compared where they are jitted."""
    plain = hkv.nnx.Embed(256, DIM, param_dtype="float32", seed=jnp.int32(5), choices=np.int8(1))
    other = hkv.nnx.Embed(256, DIM, param_dtype=jnp.float32, seed=5)
    assert nnx.split(plain)[0] == nnx.split(other)[0]
    assert hash(nnx.split(plain)[0]) == hash(nnx.split(other)[0])
