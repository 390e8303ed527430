"""Operations of one device on a device's part of a table."""

from __future__ import annotations

import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from test_sharding_edges import one_part
from test_sharding_traffic import mesh_of

import jax_hkv as hkv
import jax_hkv.linen
from jax_hkv import sharding
from jax_hkv.sharding import Placement

ON_A_PART = {
    "find": lambda t, k: hkv.find(t, k),
    "contains": lambda t, k: hkv.contains(t, k),
    "export_keys": lambda t, k: hkv.export_keys(t, k),
    "find_or_insert": lambda t, k: hkv.find_or_insert(t, k),
    "insert_or_assign": lambda t, k: hkv.insert_or_assign(t, k, hkv.initial_rows(t, k)),
    "insert_and_evict": lambda t, k: hkv.insert_and_evict(t, k, hkv.initial_rows(t, k)),
    "accum_or_assign": lambda t, k: hkv.accum_or_assign(t, k, hkv.initial_rows(t, k), k.low > 0),
    "assign": lambda t, k: hkv.assign(t, k, hkv.initial_rows(t, k)),
    "erase": lambda t, k: hkv.erase(t, k),
    "find_pooled": lambda t, k: hkv.find_pooled(t, k.reshape(-1, 1)),
    "find_or_insert_pooled": lambda t, k: hkv.find_or_insert_pooled(t, k.reshape(-1, 1)),
}


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
@pytest.mark.parametrize("call", ON_A_PART)
def test_an_operation_of_one_device_warns_of_a_part(call, mode):
    """Of a request to erase four ids it would do one device's share, and report that."""
    placement = Placement(mesh_of(4), mode=mode)
    keys = placement.put(hkv.Keys.from_numpy(np.arange(8)))
    table = one_part(placement)
    twin = "insert_or_assign" if call == "insert_and_evict" else call
    message = rf"^{call}: .* one device's part of 4.*sharding\.{twin}\(\.\.\., axis_name=\)"
    step = placement.step(lambda t, k: (ON_A_PART[call](t, k)[0], None), donate=False)
    with pytest.warns(UserWarning, match=message) as warned:
        step(table, keys)
    assert [one.filename for one in warned] == [__file__]
    if call in ("find", "contains"):
        run = placement.run(lambda t, k: ON_A_PART[call](t, k)[0].clock)
        with pytest.warns(UserWarning, match=message):
            run(table, keys)


COLLECTION = hkv.Collection([hkv.TableConfig("a", 1024, 4)], [hkv.Feature("f", "a")])
LAYERS = {
    "Embed": lambda t, k: hkv.linen.Embed(1024, 4).apply({"tables": {"table": t}}, k),
    "EmbedBag": lambda t, k: hkv.linen.EmbedBag(1024, 4).apply(
        {"tables": {"table": t}}, k[:, None]
    ),
    "Collection.lookup of 'a'": lambda t, k: COLLECTION.lookup({"a": t}, {"f": k})[1].rows["a"],
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_without_an_axis_name_warns_of_a_part(layer):
    """Once, in its own name: of correct rows it would find one device's share."""
    placement = Placement(mesh_of(4))
    keys = placement.put(hkv.Keys.from_numpy(np.arange(8)))
    run = placement.run(lambda t, k: jnp.zeros(1) + jnp.sum(jnp.asarray(LAYERS[layer](t, k))))
    with pytest.warns(UserWarning, match=rf"^{layer}: .* part of 4.* give axis_name=") as warned:
        run(one_part(placement), keys)
    assert [one.filename for one in warned] == [__file__]


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_what_is_meant_for_parts_warns_of_nothing(mode):
    def step(table, keys):
        table, found = sharding.find_or_insert(table, keys, axis_name="device", return_evicted=True)
        table, _ = hkv.import_batch(table, found.evicted)
        table, _ = hkv.erase_if(table, lambda keys, scores, rows: hkv.less(keys, 2))
        table = hkv.zero_empty_rows(hkv.advance_epoch(table))
        return table, jnp.sum(hkv.initial_rows(table, hkv.Keys(jnp.zeros((1, 2), jnp.uint32))))

    placement, one = Placement(mesh_of(4), mode=mode), Placement(mesh_of(1), mode=mode)
    keys = hkv.Keys.from_numpy(np.arange(8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        placement.step(step)(one_part(placement), placement.put(keys))
        one.step(lambda t, k: (hkv.erase(t, k)[0], None))(one_part(one), one.put(keys))
        hkv.erase(hkv.create(128, 2), keys)
