"""Keys that travel along other axes than those of the Placement do not meet their owners."""

from __future__ import annotations

import warnings

import jax
import numpy as np
import pytest

import jax_hkv as hkv
import jax_hkv.linen
import jax_hkv.nnx
from jax_hkv.sharding import Exchange, Placement

IDS = np.arange(64, dtype=np.int32)
COLLECTION = hkv.Collection([hkv.TableConfig("t", 1024, 4)], [hkv.Feature("f", "t", None)])


def placement_of(*axes: str) -> Placement:
    mesh = jax.make_mesh((2, 2), ("data", "table"), devices=jax.devices("cpu")[:4])
    return Placement(mesh, axes or None)


def find(table, ids, axes):
    return hkv.sharding.find(table, ids, axis_name=axes)


def erase(table, ids, axes):
    return hkv.sharding.erase(table, ids, axis_name=axes)


def layer(table, ids, axes):
    return table, hkv.linen.Embed(1024, 4, axis_name=axes).apply({"tables": {"table": table}}, ids)


def bag(table, ids, axes):
    embed = hkv.linen.EmbedBag(1024, 4, axis_name=axes)
    return table, embed.apply({"tables": {"table": table}}, ids[:, None])


def collection(table, ids, axes):
    return table, COLLECTION.lookup({"t": table}, {"f": ids}, axis_name=axes)[1].rows


CALLS = {
    "find": (find, "sharding.find"),
    "erase": (erase, "sharding.erase"),
    "Embed": (layer, "sharding.find"),
    "EmbedBag": (bag, "EmbedBag"),
    "Collection": (collection, "Collection.lookup of 't'"),
}


@pytest.mark.parametrize("axes", ["table", ("table", "data"), Exchange("data")])
@pytest.mark.parametrize("call", CALLS)
def test_another_axis_name_than_the_placement_has_is_warned_of(call, axes):
    placement, (fn, name) = placement_of(), CALLS[call]
    table = placement.create(lambda: hkv.create(256, 4))
    evaluation = placement.run(lambda table, ids: jax.tree.leaves(fn(table, ids, axes)[1])[0])
    with pytest.warns(UserWarning, match=rf"^{name}: axis_name names the axes .*same order"):
        jax.eval_shape(evaluation, table, placement.put(IDS))


@pytest.mark.parametrize(
    ("own", "axes"),
    [
        ((), ("data", "table")),
        (("table", "data"), ("table", "data")),
        (("table",), "table"),
        ((), Exchange(("table", "data"), replicas=True)),
    ],
)
def test_the_axes_of_the_placement_are_not(own, axes):
    placement = placement_of(*own)
    replicas = isinstance(axes, Exchange)
    table = placement.create(lambda: hkv.create(256, 4, replicas=replicas))

    def step(table, ids):
        table, result = hkv.sharding.find_or_insert(table, ids, axis_name=axes)
        return table, result.counts.inserted

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table, inserted = placement.step(step)(table, placement.put(IDS))
        found = placement.run(lambda table, ids: find(table, ids, axes)[1].found)
        assert found(table, placement.put(IDS)).all()
    assert int(inserted) == len(IDS)


def test_axes_of_one_device_matter_not():
    """A model axis that is set to 1, say."""
    mesh = jax.make_mesh((4, 1), ("data", "model"), devices=jax.devices("cpu")[:4])
    placement = Placement(mesh)
    table = placement.create(lambda: hkv.create(256, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = placement.run(lambda table, ids: find(table, ids, "data")[1].found)
        assert not found(table, placement.put(IDS)).any()


def test_an_evaluation_of_nnx_warns_of_the_axes_of_a_layer():
    placement = placement_of()
    make = lambda: hkv.nnx.Embed(1024, 4, axis_name="table")  # noqa: E731
    model = hkv.nnx.place(make, placement)
    with pytest.warns(UserWarning, match="names the axes .'table',.*'data', 'table'"):
        hkv.nnx.run(lambda model, ids: model(ids), placement)(model, placement.put(IDS))
