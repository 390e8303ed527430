"""Before a step in micro-batches a prefetch knows the bags of each of them."""

from __future__ import annotations

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from many_devices import assert_same_bits
from test_sharding_traffic import mesh_of
from test_tiered import by_key, made, tiers_of

import jax_hkv as hkv
from jax_hkv import sharding, tiered

DIM, PARTS = 4, 2
SGD = hkv.optim.sgd(0.1)
FEATURE = hkv.Feature("seen", "items", "sum")


def collection_of(capacity):
    return hkv.Collection([hkv.TableConfig("items", capacity, DIM, optimizer=SGD)], [FEATURE])


class Model(nn.Module):
    """What weights make of the sum of all features."""

    collection: hkv.Collection
    axis_name: str | None
    weights: tuple[float, ...] = (1.0,) * DIM

    @nn.compact
    def __call__(self, inputs, train=False):
        embed = hkv.linen.EmbedCollection(self.collection, name="embed", axis_name=self.axis_name)
        rows = embed(inputs, train=train)
        weights = self.param("w", lambda _: jnp.array(self.weights))
        return sum(rows[name] for name in sorted(rows)) @ weights


def bags_from(first, masked=False):
    """16 bags of three ids each, of four parts; of the masked ones each fourth is left out."""
    ids = first + np.arange(48, dtype=np.int32).reshape(16, 3)
    bags = hkv.Jagged.from_lists(list(ids)).for_parts(4, capacity=14)
    mask = np.arange(56) % 4 != 3
    return (hkv.Padded(bags, mask), mask) if masked else (bags, np.ones(56, bool))


@functools.cache
def placement_of(count):
    """None: one device."""
    return None if count == 1 else sharding.Placement(mesh_of(count))


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_what_a_step_in_micro_batches_trains_is_in_the_cache(count, overlaps):
    placement = placement_of(count)
    axis_name = None if placement is None else "device"
    micro_batches = 4 // count
    at_hand = {"placement": placement, "micro_batches": micro_batches}

    def state_of(capacity):
        one = {"seen": hkv.Jagged.from_lists([[0]] * 4, capacity=14)}
        model = Model(collection_of(capacity), axis_name)

        def make():
            return hkv.linen.TrainState.create(model, jax.random.key(0), one, tx=optax.sgd(0.0))

        return make() if placement is None else placement.create(make)

    def loss_fn(apply, inputs):
        return apply(inputs, train=True).sum()

    step = hkv.linen.train_step(loss_fn, **at_hand)
    small, large, collection = state_of(256), state_of(8192), collection_of(256)
    cache = small.tables["embed"]["items"]
    stores = {"items": tiered.create_store(cache, 8192, placement=placement)}

    def put_batch(first):
        inputs = {"seen": bags_from(first)[0]}
        if placement is None:
            return inputs
        return placement.put(inputs, micro_batches=micro_batches)

    batches = [put_batch(first) for first in (0, 1000, 2000, 3000, 4000, 5000, 6000, 0, 1000)]
    for inputs in batches[:1] if overlaps else batches:
        tables = small.tables["embed"]
        tables, stores, _ = collection.prefetch(tables, stores, inputs, **at_hand)
        small = small.replace(tables={**small.tables, "embed": tables})
        if not overlaps:
            small, info = step(small, inputs)
            assert int(info.tables["embed/items"].inserted) == 0
    for inputs, coming in zip(batches, [*batches[1:], None], strict=True) if overlaps else ():

        def stepped(tables, inputs=inputs, before=small):
            state, info = step(before.replace(tables={"embed": tables}), inputs)
            return state.tables["embed"], (state, info)

        tables, stores, _, (small, info) = collection.step_and_prefetch(
            stepped, small.tables["embed"], stores, inputs, coming, **at_hand
        )
        small = small.replace(tables={"embed": tables})
        assert int(info.tables["embed/items"].inserted) == 0
    for inputs in batches:
        large, _ = step(large, inputs)

    tiers = tiered.Tiers(small.tables["embed"]["items"], stores["items"])
    found = tiered.export_entries(tiers, placement=placement)
    one = large.tables["embed"]["items"]
    expected = sharding.export_entries(one if placement is None else placement.shards(one))
    assert len(expected.keys) == 7 * 48
    assert_same_bits(by_key(found)[0][0::2], by_key(expected)[0][0::2])


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_bags_of_parts_bring_their_ids_and_no_padding(masked, jitted):
    bags, mask = bags_from(100, masked)
    prefetch = jax.jit(tiered.prefetch, static_argnames="micro_batches")
    prefetch = prefetch if jitted else tiered.prefetch
    tiers, counts = prefetch(tiers_of(256, 1024), bags, micro_batches=4)
    (keys, *_), _ = by_key(tiered.export_entries(tiers))
    ids = (bags.ids if masked else bags).ids.to_numpy()
    own = mask & (np.arange(56) % 14 < 12)  # each part has two positions of padding
    assert sorted(np.asarray(keys).tolist()) == sorted(ids[own].tolist())
    assert int(counts.unique) == own.sum()


@pytest.mark.parametrize("count", [1, 2])
def test_bags_of_other_parts_are_refused_before_anything_moves(count):
    bags, _ = bags_from(0)
    collection = collection_of(256)
    if count == 1:
        placement, inputs = None, {"seen": bags}
        tables = collection.create()
    else:
        placement = placement_of(count)
        inputs = placement.put({"seen": bags}, micro_batches=PARTS)
        tables = placement.create(collection.create)
    stores = {"items": tiered.create_store(tables["items"], 4096, placement=placement)}
    before = jax.tree.map(np.asarray, tables)
    with pytest.raises(ValueError, match=r"prefetch.*'seen'.*row_splits|row_splits of 'seen'"):
        collection.prefetch(tables, stores, inputs, placement=placement)
    with pytest.raises(ValueError, match=r"row_splits"):
        collection.step_and_prefetch(
            lambda tables: (tables, None), tables, stores, inputs, inputs, placement=placement
        )
    assert_same_bits(jax.tree.map(np.asarray, tables), before)
    with pytest.raises(ValueError, match=r"a Jagged of each of the 3 micro-batches.*for_parts\(3"):
        collection.prefetch(tables, stores, inputs, placement=placement, micro_batches=3)
    with pytest.raises(ValueError, match="micro_batches must be from 1"):
        collection.prefetch(tables, stores, inputs, placement=placement, micro_batches=0)


def test_bags_of_one_table_over_devices_that_were_put_for_parts():
    placement = placement_of(2)
    bags, _ = bags_from(7)
    put = placement.put(bags, micro_batches=PARTS)
    cache = placement.create(lambda: made(256))
    tiers = tiered.Tiers(cache, tiered.create_store(cache, 1024, placement=placement))
    with pytest.raises(ValueError, match=r"tiered.prefetch: row_splits of 'keys' .*micro_batches="):
        tiered.prefetch(tiers, put, placement=placement)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiers, counts = tiered.prefetch(tiers, put, placement=placement, micro_batches=PARTS)
    assert int(counts.unique) == 48
    tiers, counts, _ = tiered.step_and_prefetch(
        lambda cache: (cache, None), tiers, put, put, placement=placement, micro_batches=PARTS
    )
    assert counts is not None
    assert (int(counts.absent), int(counts.inserted)) == (0, 0)


@pytest.mark.parametrize("what", ["ids", "splits", "mask"])
def test_what_is_no_array_is_told_as_without_parts(what):
    bags, mask = bags_from(0)
    given = {"ids": bags.ids, "splits": bags.row_splits, "mask": mask}
    given[what] = given[what].tolist() if what != "ids" else [1, 2]
    bags = hkv.Jagged(given["ids"], given["splits"])
    bags = hkv.Padded(bags, given["mask"]) if what == "mask" else bags
    messages = []
    for micro_batches in (1, 4):
        with pytest.raises((TypeError, ValueError)) as raised:
            tiered.prefetch(tiers_of(256, 1024), bags, micro_batches=micro_batches)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    assert "must" in messages[0]


def test_parts_need_no_promotion_of_ranks():
    bags, _ = bags_from(0)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        _, counts = tiered.prefetch(tiers_of(256, 1024), bags, micro_batches=4)
    assert int(counts.unique) == 48


def test_what_overlaps_on_one_device_takes_parts_too():
    bags, _ = bags_from(7)
    other, _ = bags_from(500)
    tiers, _ = tiered.prefetch(tiers_of(256, 1024), bags, micro_batches=4)
    tiers, counts, _ = tiered.step_and_prefetch(
        lambda cache: (cache, None), tiers, bags, other, micro_batches=4
    )
    assert counts is not None
    assert (int(counts.absent), int(counts.inserted)) == (0, 48)
