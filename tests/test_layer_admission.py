"""A mask of the caller's says which positions of a layer let new ids in."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from combinations import pairs
from flax import linen, nnx
from many_devices import entries_of

import jax_hkv as hkv
from jax_hkv.sharding import Placement

DIM, BATCH, HOTNESS = 4, 24, 3
SGD = hkv.optim.sgd(0.1)
LAYERS = ("Embed", "EmbedBag", "EmbedCollection")


def collection():
    """Two features of one table, and one of another; a mask is given for the first alone."""
    tables = [
        hkv.TableConfig("shared", 2048, DIM, optimizer=SGD),
        hkv.TableConfig("other", 2048, DIM, optimizer=SGD, policy=hkv.Policy.LFU),
    ]
    features = [
        hkv.Feature("a", "shared", None),
        hkv.Feature("b", "shared", "mean"),
        hkv.Feature("c", "other", "sum"),
    ]
    return hkv.Collection(tables, features)


def layer_of(module: Any, layer: str, **options: Any) -> Any:
    if layer == "EmbedCollection":
        return module.EmbedCollection(collection(), unseen="zeros", **options)
    return getattr(module, layer)(2048, DIM, optimizer=SGD, unseen="zeros", **options)


def batch_of(layer: str, rng: Any) -> tuple[Any, Any]:
    """Ids of a layer, and which of them may come in."""
    shape = (BATCH, HOTNESS)
    ids, admit = rng.integers(0, 400, shape, np.int32), rng.random(shape) < 0.2
    if layer != "EmbedCollection":
        return ids, admit
    others = rng.integers(300, 500, (2, *shape), np.int32)
    return {"a": ids, "b": others[0, :, :1], "c": others[1]}, {"a": admit}


def let_in(layer: str, ids: Any, admit: Any) -> dict[str, set[int]]:
    """By table: the ids of a batch that may come in."""
    if layer != "EmbedCollection":
        return {"table": set(ids[admit].tolist())}
    shared = {*ids["a"][admit["a"]].tolist(), *ids["b"].reshape(-1).tolist()}
    return {"shared": shared, "other": set(ids["c"].reshape(-1).tolist())}


def keys_of(tables: dict[str, Any], placement: Placement | None = None) -> dict[str, set[int]]:
    parts = (lambda table: table) if placement is None else placement.shards
    return {name: set(entries_of(parts(table)).keys.tolist()) for name, table in tables.items()}


def loss_of(rows: Any, slopes: Any) -> Any:
    """With the rows, one array for each example."""
    rows = rows if isinstance(rows, dict) else {"rows": rows}
    each = sum(own.reshape(len(slopes), -1).sum(1) for own in rows.values())
    return jnp.mean(each * slopes), rows


class Linen:
    """A linen state under one interface with nnx."""

    def __init__(self, layer, placement, **options):
        class Model(linen.Module):
            @linen.compact
            def __call__(self, ids, admit, *, train=False):
                embed = layer_of(hkv.linen, layer, name="embed", **options)
                return embed(ids, train=train, admit=admit)

        first = batch_of(layer, np.random.default_rng(0))

        def make():
            return hkv.linen.TrainState.create(Model(), jax.random.key(0), *first, tx=optax.sgd(1))

        self.state = make() if placement is None else placement.create(make)
        self._step = hkv.linen.train_step(
            lambda apply, ids, admit, slopes: loss_of(apply(ids, admit, train=True), slopes),
            has_aux=True,
            placement=placement,
        )

    @property
    def tables(self):
        return self.state.tables["embed"]

    def step(self, *batch):
        self.state, info = self._step(self.state, *batch)
        return info


class Nnx:
    def __init__(self, layer, placement, **options):
        class Model(nnx.Module):
            def __init__(self):
                self.embed = layer_of(hkv.nnx, layer, **options)

            def __call__(self, ids, admit, *, train=False):
                return self.embed(ids, train=train, admit=admit)

        def make():
            return hkv.nnx.TrainState(Model(), optax.sgd(1))

        self.state = make() if placement is None else hkv.nnx.place(make, placement)
        self._step = hkv.nnx.train_step(
            lambda model, ids, admit, slopes: loss_of(model(ids, admit, train=True), slopes),
            has_aux=True,
            placement=placement,
        )

    @property
    def tables(self):
        embed = self.state.model.embed
        is_collection = isinstance(embed, hkv.nnx.EmbedCollection)
        return embed.tables if is_collection else {"table": embed.table.get_value()}

    def step(self, *batch):
        return self._step(self.state, *batch)


MODELS = {"linen": Linen, "nnx": Nnx}


@pytest.mark.parametrize("flax, way, layer", pairs(MODELS, ["one device", "shard_map"], LAYERS))
def test_new_ids_enter_where_a_position_may_let_them_in(flax, way, layer, rng):
    """Features without a mask let all in. Whoever stays out has no row, and trains none."""
    placement, options = None, {}
    if way == "shard_map":
        mesh = jax.make_mesh((4,), ("device",), devices=jax.devices("cpu")[:4])
        placement, options = Placement(mesh, "device"), {"axis_name": "device"}
    model = MODELS[flax](layer, placement, **options)
    present: dict[str, set[int]] = {name: set() for name in keys_of(model.tables, placement)}
    kept_out = 0
    for _ in range(4):
        ids, admit = batch_of(layer, rng)
        batch = ids, admit, rng.random(BATCH, np.float32) + 1
        info = model.step(*(batch if placement is None else placement.put(batch)))
        for name, entering in let_in(layer, ids, admit).items():
            present[name] |= entering
        assert keys_of(model.tables, placement) == present
        is_collection = layer == "EmbedCollection"
        asked, own = (ids["a"], "shared") if is_collection else (ids, "table")
        stays_out = ~np.isin(asked, list(present[own]))
        kept_out += stays_out.sum()
        if layer != "EmbedBag":
            rows = np.reshape(info.aux["a" if is_collection else "rows"], (*asked.shape, DIM))
            np.testing.assert_array_equal((rows != 0).any(-1), ~stays_out)
    assert kept_out > 50


@pytest.mark.parametrize("flax", MODELS)
def test_reading_asks_nobody(flax, rng):
    """An evaluation with a mask gives what it gives without one."""
    ids, admit = batch_of("Embed", rng)
    model = MODELS[flax]("Embed", None)
    model.step(ids, admit, np.ones(BATCH, np.float32))

    def evaluated(**given):
        if flax == "nnx":
            return model.state.model.embed(ids, **given)
        layer = layer_of(hkv.linen, "Embed")
        return layer.apply({"tables": model.tables}, ids, **given)

    np.testing.assert_array_equal(evaluated(admit=~admit), evaluated())


@pytest.mark.parametrize("flax", MODELS)
def test_masks_of_another_form_are_errors(flax, rng):
    """By layer, and of a collection by feature."""

    def call(layer, admit):
        ids = batch_of(layer, rng)[0]
        if flax == "nnx":
            return layer_of(hkv.nnx, layer)(ids, train=True, admit=admit)
        variables = layer_of(hkv.linen, layer).init(jax.random.key(0), ids)
        mutable = [*hkv.linen.MUTABLE, hkv.linen.PERTURBATIONS]
        module = layer_of(hkv.linen, layer)
        return module.apply(variables, ids, train=True, admit=admit, mutable=mutable)

    short = np.ones((BATCH, 1), bool)
    for layer, admit, error, text in [
        (
            "Embed",
            short,
            TypeError,
            r"find_or_insert: admit must be bool\[24, 3\] .* bool\[24, 1\]",
        ),
        ("EmbedBag", short, TypeError, r"EmbedBag: admit must be bool\[24, 3\] .* bool\[24, 1\]"),
        (
            "EmbedCollection",
            short,
            TypeError,
            r"admit must be a dict of features .* \['a', 'b', 'c'\]",
        ),
        ("EmbedCollection", {"d": short}, ValueError, r"admit must be of features .* got \['d'\]"),
        (
            "EmbedCollection",
            {"a": short},
            TypeError,
            r"of the feature 'a': admit must be bool\[24, 3\]",
        ),
    ]:
        with pytest.raises(error, match=text):
            call(layer, admit)


def test_jagged_features_have_a_flag_for_each_of_their_ids():
    """Also where the buffer is longer than the ids: what lies behind them is nobody's."""
    bags = hkv.Jagged.from_lists([[5, 6], [], [7, 5, 8]], capacity=8)
    admit = np.array([True, False, False, False, True, True, True, True])
    tables = collection().create()
    inputs = {"a": np.zeros((3, 1), np.int32), "b": bags, "c": np.zeros((3, 1), np.int32)}
    masks = {"a": np.zeros((3, 1), bool), "b": admit}
    tables, found = collection().lookup(tables, inputs, train=True, admit=masks)
    assert keys_of(tables) == {"shared": {5, 8}, "other": {0}}
    counts = found.results["shared"].counts
    assert [int(counts.inserted), int(counts.not_admitted)] == [2, 3]
