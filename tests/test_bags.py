"""Bags of many features as one batch: whose positions are whose, whatever forms they came in."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import oracle_pooled
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_hkv as hkv
from jax_hkv import _sharded
from jax_hkv._hops import Items

DIM = 3
FORMS = ("ids", "hot", "padded", "jagged", "masked jagged")
FEATURES = st.tuples(
    st.sampled_from(FORMS), st.booleans(), st.sampled_from(("sum", "mean", "sqrtn"))
)


def random_feature(form, is_weighted, batch, rng):
    """Ids of a form as they are given, and of each bag its ids, their mask and weights."""
    is_jagged, has_mask = "jagged" in form, form in ("padded", "masked jagged")
    most = 1 if form == "ids" else int(rng.integers(0, 4))
    lengths = rng.integers(0, most + 1, batch) if is_jagged else np.full(batch, most)
    count = int(lengths.sum()) + (int(rng.integers(0, 3)) if is_jagged else 0)
    ids = rng.integers(0, 50, count)
    weights = rng.random(count).astype(np.float32) if is_weighted else np.ones(count, np.float32)
    valid = rng.random(count) < 0.7 if has_mask else np.ones(count, bool)
    ends = np.cumsum(lengths)
    places = [slice(end - own, end) for own, end in zip(lengths, ends, strict=True)]
    bags = [(ids[own], valid[own], weights[own] if is_weighted else None) for own in places]
    keys = hkv.Keys.from_numpy(ids) if rng.random() < 0.5 else ids.astype(np.int32)
    if is_jagged:
        splits = np.concatenate([[0], ends]).astype(np.int32)
        jagged = hkv.Jagged(keys, splits, weights if is_weighted else None)
        return (hkv.Padded(jagged, valid) if has_mask else jagged), bags
    shape = (batch,) if form == "ids" else (batch, most)
    keys, mask, own = keys.reshape(shape), valid.reshape(shape), weights.reshape(shape)
    if has_mask or is_weighted:
        keys = hkv.Padded(keys, mask if has_mask else None, own if is_weighted else None)
    return keys, bags


@settings(max_examples=30, deadline=None)
@given(st.lists(FEATURES, min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_bags_of_a_collection_are_the_bags_of_its_features(features, seed):
    """Where their ids stand, which count, and the combiner's weights: those of section 8."""
    rng = np.random.default_rng(seed)
    batch = int(rng.integers(0, 5))
    collection = hkv.Collection(
        [hkv.TableConfig("a", 128, DIM), hkv.TableConfig("b", 128, DIM)],
        [hkv.Feature(f"f{n}", "ab"[n % 2], own[2]) for n, own in enumerate([*features] * 2)],
    )
    (group,) = collection.groups
    inputs, expected = {}, []
    for feature, (form, is_weighted, _) in zip(collection.features, [*features] * 2, strict=True):
        inputs[feature.name], bags = random_feature(form, is_weighted, batch, rng)
        expected += [(feature, *bag) for bag in bags]

    _, found = collection.lookup(collection.create(), inputs)
    keys, valid, bags = found.batches[group.name]
    words = keys.to_numpy().astype(np.uint64)
    counts = np.ones(len(words), bool) if valid is None else np.asarray(valid)
    if bags is None:  # each id is a bag, without a weight
        numbers = np.arange(len(words), dtype=np.int32)
        bags = hkv.Bags(numbers, np.arange(len(words) + 1), None)
    ends = np.asarray(bags.splits[1:] if bags.ends is None else bags.ends)
    assert bags.splits.shape == (len(expected) + 1,) and bags.splits[-1] == len(words)
    is_in_bag = np.zeros(len(words), bool)
    for number, (feature, ids, mask, weights) in enumerate(expected):
        own = slice(int(bags.splits[number]), int(ends[number]))
        is_in_bag[own] = True
        of_ids = group.keys(feature.table, hkv.Keys.from_numpy(ids)).to_numpy().astype(np.uint64)
        np.testing.assert_array_equal(words[own], of_ids)
        np.testing.assert_array_equal(counts[own], mask)
        np.testing.assert_array_equal(np.asarray(bags.sources)[own][mask], number)
        factors = np.ones(len(ids), np.float32) if weights is None else weights
        if feature.combiner != "sum":
            splits = np.array([0, len(ids)])
            factors = oracle_pooled.quotients(splits, mask, weights, feature.combiner)
        np.testing.assert_array_equal(np.asarray(bags.factors)[own][mask], factors[mask])
    assert not counts[~is_in_bag].any()


@pytest.mark.parametrize("splits", [[0, 99], [-7, 3], [2, 3], [5, 0], [2**31 - 1, -(2**31)]])
@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_wrong_splits_of_a_feature_leave_the_others_alone(splits, combiner, rng):
    """Traced ones are not checked: what they make of their own feature is its alone."""
    collection = hkv.Collection(
        [hkv.TableConfig("a", 128, DIM, init=hkv.initializers.normal(1.0))],
        [hkv.Feature(name, "a", combiner) for name in ("before", "wrong", "behind")],
    )
    table = collection.create()
    ids = hkv.Keys.from_numpy(rng.integers(0, 50, 4))

    @jax.jit
    def look_up(splits):
        good = np.array([0, 3], np.int32)
        inputs = {"before": good, "wrong": splits, "behind": good}
        inputs = {name: hkv.Jagged(ids, own) for name, own in inputs.items()}
        _, found = collection.lookup(table, inputs)
        return collection.spread(found.rows, found.parts)

    right = look_up(np.array([0, 3], np.int32))
    wrong = look_up(np.array(splits, np.int32))
    for name in ("before", "behind"):
        np.testing.assert_array_equal(wrong[name], right[name])


def test_bags_that_arrive_end_before_what_was_not_sent():
    """A row of a bag is summed by one tile of a GPU, which would walk through a peer's room."""
    hop = types.SimpleNamespace(peers=2, places=6, room=12)
    plan = types.SimpleNamespace(hops=[hop], devices=2)
    sent = np.array([1, 1, 1, 0, 0, 0] * 2, bool)
    numbers = np.array([0, 1, 1, 0, 0, 0, 2, 2, 3, 0, 0, 0], np.int32)  # of 2 bags of each peer
    items = Items(hkv.Keys.from_numpy(np.arange(12)), sent, None)._replace(bags=numbers)
    bags = _sharded.arrived_bags(plan, items, 2)
    assert bags.splits.tolist() == [0, 1, 6, 8, 12]
    assert bags.ends is not None and bags.ends.tolist() == [1, 3, 8, 9]


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_masked_rows_that_are_no_numbers_are_in_no_derivative(combiner):
    rows = jnp.array([[[1.0], [2.0], [jnp.nan]]], jnp.float32)
    valid = np.array([[True, True, False]])

    def total(rows, weights):
        return hkv.pool(rows, weights=weights, valid=valid, combiner=combiner).sum()

    by_rows, by_weights = jax.grad(total, (0, 1))(rows, jnp.ones((1, 3), jnp.float32))
    assert jnp.isfinite(by_rows).all() and jnp.isfinite(by_weights).all()
    assert by_rows[0, 2, 0] == by_weights[0, 2] == 0
