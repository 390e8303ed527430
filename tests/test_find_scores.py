"""The scores of a batch's ids, where a lookup is asked for them."""

from __future__ import annotations

import dataclasses
import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import seldom
from many_devices import Case, assert_same_bits, entries_of, zipf_batch

import jax_hkv as hkv
from jax_hkv import sharding, testing, tiered
from jax_hkv.index import Policy
from jax_hkv.sharding import Exchange, Placement

AXES = ("node", "device")


def as_keys(words):
    return hkv.Keys.from_numpy(words)


@pytest.mark.parametrize("policy", ["LFU", "EPOCH_LRU", "CUSTOM"])
def test_scores_are_those_of_the_entries_found_after_the_call(policy, rng, twin):
    """By position, zero where a key is absent or masked, and those of a touch where it touches."""
    both = twin(256, 2, policy=policy, choices=2)
    universe = rng.integers(0, 2**64, 400, np.uint64)
    for _ in range(4):
        keys = rng.choice(universe, 150)
        scores = rng.integers(0, 2**64, 150, np.uint64) if policy == "CUSTOM" else None
        both.find_or_insert(keys, scores=scores)
        both.advance_epoch()
    keys, valid = rng.choice(universe, 60), rng.random(60) < 0.8
    for touch in (False, True) if policy != "CUSTOM" else (False,):
        find = jax.jit(partial(hkv.find, touch=touch, return_scores=True, fill="initial"))
        both.table, result = find(
            both.table, as_keys(keys.reshape(3, 20)), valid=valid.reshape(3, 20)
        )
        found = both.oracle.find(keys, valid, touch=touch, fill="initial")
        expected = np.where(found.slots < 0, np.uint64(0), both.oracle.score_words[found.slots])
        assert expected.any() and not expected.all() and not valid.all()
        np.testing.assert_array_equal(result.scores.to_numpy().reshape(-1), expected, strict=True)
        assert_same_bits(np.asarray(result.values).reshape(-1, 2), found.values)
        np.testing.assert_array_equal(np.asarray(result.found).reshape(-1), found.found)
        both.assert_equal()


def test_who_does_not_ask_has_the_program_and_the_three_fields_of_before():
    """A native call more reads scores, and that only where they are asked for."""
    table, keys = hkv.create(256, 2), np.arange(5, dtype=np.int32)
    programs = {
        (touch, scored): str(
            jax.make_jaxpr(partial(hkv.find, touch=touch, return_scores=scored))(table, keys)
        )
        for touch in (False, True)
        for scored in (False, True)
    }
    calls = {asked: text.count("gather_rows[") for asked, text in programs.items()}
    assert calls == {(False, False): 0, (False, True): 1, (True, False): 1, (True, True): 2}
    assert str(jax.make_jaxpr(hkv.find)(table, keys)) == programs[False, False]
    _, (values, found, slots) = hkv.find(table, keys)
    assert values.shape == (5, 2) and found.shape == slots.shape == (5,)
    _, result = hkv.find(table, keys, return_scores=True)
    assert result._fields == (*hkv.FindResult._fields, "scores")
    for module in (hkv, sharding, tiered):
        parameter = inspect.signature(module.find).parameters["return_scores"]
        assert parameter.default is False and parameter.kind is parameter.KEYWORD_ONLY
        with pytest.raises(TypeError, match="find: return_scores must be True or False, got int 1"):
            of_tiers = tiered.Tiers(table, tiered.create_store(table, 512))
            axis = {"axis_name": "device"} if module is sharding else {}
            given = of_tiers if module is tiered else table
            module.find(given, keys, return_scores=1, **axis)


def test_scores_come_in_scan_and_vmap_and_copy_no_table(rng):
    table, _ = hkv.find_or_insert(hkv.create(1024, 2), np.arange(300, dtype=np.int32))
    batches = rng.integers(0, 400, (4, 30)).astype(np.int32)
    batches[0, :2] = 5, 350  # present, absent

    def step(table, keys):
        table, result = hkv.find(table, keys, touch=True, return_scores=True)
        table, again = hkv.find(table, keys, return_scores=True)
        table, _ = hkv.find_or_insert(table, keys + 100)
        return table, (result.scores, again.scores)

    def steps(table, batches):
        return jax.lax.scan(step, table, batches)

    testing.assert_no_table_copies(steps, table, batches)
    after, (scores, again) = jax.jit(steps)(table, batches)
    assert_same_bits(scores, again)
    low = np.asarray(scores.low)
    time = 2 + 2 * np.arange(4)[:, None]  # of each touch
    assert set(low[0]) == {0, 2} and ((low == time) | (low == 0)).all()
    mapped = jax.vmap(partial(hkv.find, return_scores=True), (None, 0), (None, 0))
    _, result = jax.jit(mapped)(after, batches)
    _, expected = hkv.find(after, batches, return_scores=True)
    assert_same_bits(result, expected)


# --- Over devices --------------------------------------------------------------------------------

FOUR = Case(shape=(4,), options=(("policy", Policy.LFU),))
CASES = {
    "one hop": FOUR,
    "levels": dataclasses.replace(FOUR, exchange=Exchange(AXES), shape=(2, 2), names=AXES),
    "a second round": dataclasses.replace(FOUR, exchange=Exchange("device", distinct=0.02)),
    "not merged, pmap": dataclasses.replace(
        FOUR, exchange=Exchange("device", deduplicate=False), mode="pmap"
    ),
    "replicas": dataclasses.replace(
        FOUR, exchange=Exchange("device", replicas=True), capacity=1024
    ),
    "two replicas, a second round": dataclasses.replace(
        FOUR, exchange=Exchange(AXES, replicas=2, distinct=0.02), shape=(2, 2), names=AXES
    ),
}


@pytest.mark.parametrize("name", seldom(CASES, {"not merged, pmap"}))
def test_over_devices_scores_are_those_that_the_owners_have(name, rng):
    case = CASES[name]
    placement, axis = case.placement, {"axis_name": case.exchange}

    def fill(table, keys, valid):
        table, result = sharding.find_or_insert(table, keys, valid=valid, **axis)
        return table, result.counts

    def read(table, keys, valid):
        both = []
        for touch in (False, True):
            table, result = sharding.find(
                table, keys, valid=valid, touch=touch, fill=-2.0, return_scores=True, **axis
            )
            both.append(result)
        table, plain = sharding.find(table, keys, valid=valid, fill=-2.0, **axis)
        everyones = partial(jax.lax.all_gather, axis_name=case.exchange.axes)
        return table, jax.tree.map(everyones, (both, plain))

    table = placement.create(case.table)
    first, batch = zipf_batch(rng, (280,)), zipf_batch(rng, (280,))
    table, _ = placement.step(fill)(table, *placement.put((as_keys(first.keys), first.valid)))
    asked = placement.put((as_keys(batch.keys.reshape(-1, 7)), batch.valid.reshape(-1, 7)))
    held = [entries_of(placement.shards(table)[: case.parts])]
    table, (results, plain) = placement.step(read)(table, *asked)
    held.append(entries_of(placement.shards(table)[: case.parts]))
    for exported, result in zip(held, results, strict=True):
        score_of = dict(zip(exported.keys.tolist(), exported.scores.tolist(), strict=True))
        meant = zip(batch.keys.tolist(), batch.valid.tolist(), strict=True)
        expected = np.array([score_of.get(k, 0) * v for k, v in meant], np.uint64)
        assert expected.max() > 3 and not expected.all() and expected.any()
        assert result.scores.shape[-1] == 7
        words = np.ascontiguousarray(result.scores.words).view(np.uint64)
        np.testing.assert_array_equal(words.reshape(-1), expected)
        assert_same_bits(result[:2], plain[:2])
        if exported is held[0] or case.parts in (1, case.devices):
            assert_same_bits(result.overflow, plain.overflow)
        else:  # a key that is scored comes to all replicas, on a way one hop longer
            assert int(np.max(result.overflow)) > int(np.max(plain.overflow))
    assert (int(np.max(plain.overflow)) > 0) == (case.exchange.distinct < 1)


def test_over_devices_scores_travel_with_what_says_whether_keys_are_there():
    """As many collectives as without them, in one of which a key has two words more."""
    placement = FOUR.placement
    table, keys = placement.create(FOUR.table), placement.put(as_keys(np.arange(400)))
    moved = {}
    for scored in (False, True):
        find = partial(sharding.find, axis_name=Exchange("device", strict=True))
        step = placement.step(partial(find, return_scores=scored))
        compiled = step.lower(table, keys).compile()
        collectives = sharding.traffic(compiled, placement.mesh).collectives
        moved[scored] = sorted(one.operands for one in collectives)
    statuses = [operands for operands in moved[False] if operands.startswith("s32[55,1]")]
    assert len(statuses) == 1
    more = [operands.replace("s32[55,1]", "s32[55,3]") for operands in moved[False]]
    assert moved[True] == sorted(more)


# --- Tiers ---------------------------------------------------------------------------------------


def test_of_tiers_scores_are_those_of_one_table(rng):
    """Of the cache where it has the entry, else of the store; inside of jit too."""
    cache = hkv.create(256, 2, policy=Policy.LFU)
    tiers = tiered.Tiers(cache, tiered.create_store(cache, 4096))
    one = hkv.create(4096, 2, policy=Policy.LFU)
    for _ in range(12):
        ids = rng.integers(0, 900, 96).astype(np.int32)
        tiers, _ = tiered.prefetch(tiers, ids)
        tiers = tiers._replace(cache=hkv.find_or_insert(tiers.cache, ids)[0])
        one, _ = hkv.find_or_insert(one, ids)
    ids, valid = rng.integers(0, 1000, (20, 10)).astype(np.int32), rng.random((20, 10)) < 0.9
    _, expected = hkv.find(one, ids, valid=valid, fill="initial", return_scores=True)
    find = partial(tiered.find, valid=valid, fill="initial", return_scores=True)
    tiers, result = find(tiers, ids)
    in_store = np.asarray(result.found & (result.slots < 0))
    assert in_store.any() and (np.asarray(result.slots) >= 0).any()
    near = jax.device_put(tiers, jax.devices()[0])
    _, jitted = jax.jit(find)(near, ids)
    for own in (result, jitted):
        assert_same_bits((own.values, own.found, own.scores), expected[:2] + expected[3:])
    _, of_cache = find(tiers, jnp.asarray(ids[:1]), valid=np.asarray(result.slots[:1]) >= 0)
    assert isinstance(of_cache, hkv.ScoredFindResult)
    _, plain = tiered.find(tiers, ids)
    assert type(plain) is hkv.FindResult


def test_scores_over_devices_are_read_before_a_later_write_without_a_copy():
    mesh = jax.make_mesh((4,), ("device",), devices=jax.devices("cpu")[:4])
    placement = Placement(mesh, "device")

    def step(table, ids):
        table, found = sharding.find(table, ids, axis_name="device", return_scores=True)
        table, _ = sharding.find_or_insert(table, ids, axis_name="device")
        return table, (found.values, found.scores)

    table = placement.create(lambda: hkv.create(1024, 2))
    ids = placement.put(np.arange(64, dtype=np.int32))
    hkv.testing.assert_no_table_copies(placement.step(step), table, ids)
