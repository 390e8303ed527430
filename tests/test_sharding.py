"""A table over many devices does what one table does with the batches of all."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from combinations import seldom
from many_devices import (
    Apart,
    Case,
    Many,
    One,
    assert_entries,
    assert_same_bits,
    assert_seen,
    zipf_batch,
)

import jax_hkv as hkv
from jax_hkv.index import Policy
from jax_hkv.sharding import Exchange

STEPS = 100
POOLED_STEPS = 30
NEAR = 1e-6  # between executables: XLA contracts a * b + c
ROOMY = 8192  # entries in all: nothing is evicted

# --- One table without evictions -----------------------------------------------------------------


def training(combiner, devices=1, mode="shard_map"):
    capacity = ROOMY // devices
    attracted = True
    return Case(
        Exchange("device"),
        (devices,),
        mode=mode,
        capacity=capacity,
        combiner=combiner,
        attracted=attracted,
        options=(("choices", 2),),
    )


@cache
def batches(combiner):
    rng = np.random.default_rng(7)
    shape, count = ((48,), STEPS) if combiner is None else ((48, 6), POOLED_STEPS)
    return [zipf_batch(rng, shape, bags=combiner is not None) for _ in range(count)]


@cache
def trained(case, kind=Many):
    """A table after all steps, and what each reported."""
    table = kind(case)
    return table, [table.step(batch) for batch in batches(case.combiner)]


@pytest.mark.parametrize(
    "devices, combiner, mode",
    seldom(
        [
            *((1, None, "shard_map"), (2, None, "pmap"), (4, None, "pmap"), (8, None, "shard_map")),
            *((2, "mean", "shard_map"), (8, "mean", "shard_map"), (8, "mean", "pmap")),
        ],
        {
            *((2, None, "pmap"), (8, None, "shard_map")),
            *((2, "mean", "shard_map"), (8, "mean", "pmap")),
        },
    ),
)
def test_training_on_many_devices_is_training_on_one(devices, mode, combiner):
    many, seen = trained(training(combiner, devices, mode))
    one, expected = trained(dataclasses.replace(training(combiner), capacity=ROOMY), One)
    for own, wanted in zip(seen, expected, strict=True):
        assert_seen(own, wanted, NEAR)
        assert own.counts.evicted == own.counts.refused == 0
    assert_entries(many.parts, one.table, NEAR)


@pytest.mark.parametrize("combiner", [None, "mean"])
@pytest.mark.parametrize("devices", [2, 8])
def test_pmap_and_shard_map_give_the_same_bits(devices, combiner):
    (mapped, seen), (pmapped, expected) = (
        trained(training(combiner, devices, mode)) for mode in ("shard_map", "pmap")
    )
    assert_same_bits(seen, expected)
    assert_same_bits(mapped.parts, pmapped.parts)


# --- Full tables ---------------------------------------------------------------------------------

AXES = ("node", "device")
CASES = {
    "LRU": Case(),
    "LRU, two choices": Case(options=(("choices", 2),), capacity=256),
    "LRU under pmap": Case(mode="pmap"),
    "EPOCH_LRU": Case(options=(("policy", Policy.EPOCH_LRU),)),
    "LFU": Case(options=(("policy", Policy.LFU),)),
    "LFU, scores": Case(options=(("policy", Policy.LFU),), scored=True),
    "LFU, not merged": Case(
        Exchange("device", deduplicate=False), options=(("policy", Policy.LFU),)
    ),
    "LFU, levels": Case(Exchange(AXES), (2, 4), AXES, options=(("policy", Policy.LFU),)),
    "EPOCH_LFU, two choices": Case(
        options=(("policy", Policy.EPOCH_LFU), ("choices", 2)), capacity=256
    ),
    "EPOCH_LFU, scores, levels": Case(
        Exchange(AXES), (4, 2), AXES, options=(("policy", Policy.EPOCH_LFU),), scored=True
    ),
    "CUSTOM": Case(options=(("policy", Policy.CUSTOM),), scored=True),
    "CUSTOM, two choices, levels": Case(
        Exchange(AXES),
        (2, 4),
        AXES,
        capacity=256,
        options=(("policy", Policy.CUSTOM), ("choices", 2)),
        scored=True,
    ),
    "levels": Case(Exchange(AXES), (2, 4), AXES),
    "levels of which one has one device": Case(Exchange(AXES), (1, 8), AXES),
    "levels at once": Case(Exchange(AXES, levels=False), (2, 4), AXES),
    "levels, not merged": Case(Exchange(AXES, deduplicate=False), (2, 4), AXES),
    "levels, the axes exchanged": Case(Exchange(AXES[::-1]), (2, 4), AXES),
    "a further axis inside": Case(shape=(4, 2), names=("device", "model")),
    "a further axis outside": Case(shape=(2, 4), names=("model", "device")),
    "three devices": Case(shape=(3,)),
    "one device": Case(shape=(1,), options=(("policy", Policy.LFU),)),
    "not merged": Case(Exchange("device", deduplicate=False)),
    "overflow": Case(Exchange("device", distinct=0.02)),
    # The draws of a second round are those of the time of the first.
    "overflow, LFU, admission by chance, levels": Case(
        Exchange(AXES, distinct=0.02),
        (2, 4),
        AXES,
        options=(("policy", Policy.LFU), ("admission", hkv.admission.probability(0.5))),
    ),
    "bfloat16": Case(options=(("dtype", jnp.bfloat16),)),
    "bfloat16, not merged": Case(
        Exchange("device", deduplicate=False), options=(("dtype", jnp.bfloat16),)
    ),
    "admission": Case(options=(("admission", hkv.admission.frequency(3, width=256)),)),
    "admission, levels, overflow": Case(
        Exchange(AXES, distinct=0.02),
        (2, 4),
        AXES,
        options=(("admission", hkv.admission.frequency(3, width=256, aging=True)),),
    ),
    "admission by chance": Case(options=(("admission", hkv.admission.probability(0.5)),)),
    "two replicas": Case(Exchange(AXES, replicas=2), (2, 4), AXES),
    "two replicas, LFU, two levels": Case(
        Exchange(("rack", *AXES), replicas=2),
        (2, 2, 2),
        ("rack", *AXES),
        options=(("policy", Policy.LFU), ("choices", 2)),
        capacity=256,
    ),
    "four replicas along two axes, scores": Case(
        Exchange(("rack", *AXES), replicas=4, deduplicate=False),
        (2, 2, 2),
        ("rack", *AXES),
        options=(("policy", Policy.CUSTOM),),
        capacity=512,
        scored=True,
    ),
    "two replicas, overflow, admission": Case(
        Exchange(AXES, distinct=0.02, replicas=2),
        (2, 4),
        AXES,
        options=(("admission", hkv.admission.frequency(3, width=256, aging=True)),),
    ),
    "two replicas, pooled": Case(Exchange(AXES, replicas=2), (2, 4), AXES, combiner="sum"),
    "pooled, sums from owners": Case(Exchange("device", partial=True), combiner="sum"),
    "pooled, rows from owners": Case(Exchange("device", partial=False), combiner="sum"),
    "pooled, levels": Case(Exchange(AXES, partial=True), (2, 4), AXES, combiner="sum"),
    "pooled, LFU, scores, overflow": Case(
        Exchange("device", partial=True, slack=0.05),  # keys are not merged
        combiner="sum",
        options=(("policy", Policy.LFU),),
        scored=True,
    ),
}


# Others stand for these in the run of every day.
SLOW = {
    "EPOCH_LFU, two choices",
    "EPOCH_LRU",
    "LFU, scores",
    "LRU, two choices",
    "a further axis inside",
    "admission, levels, overflow",
    "levels, not merged",
    "levels, the axes exchanged",
    "overflow",
    "pooled, rows from owners",
    "LFU, not merged",
    "LRU under pmap",
    "a further axis outside",
    "admission by chance",
    "bfloat16, not merged",
    "four replicas along two axes, scores",
    "admission",
    "LFU",
    "pooled, levels",
    "two replicas",
    "levels at once",
    "levels of which one has one device",
    "three devices",
}


@pytest.mark.parametrize("name", seldom(CASES, SLOW))
def test_each_part_is_a_table_fed_its_own_keys(name, rng):
    case = CASES[name]
    many, apart = Many(case), Apart(case)
    positions = case.devices * (40 if case.combiner is None else 8)
    shape = (positions,) if case.combiner is None else (positions, 5)
    lost = overflow = 0
    for _ in range(24):
        batch = zipf_batch(rng, shape, scored=case.scored, bags=case.combiner is not None)
        seen, expected = many.step(batch), apart.step(batch)
        assert_seen(seen, expected, 0.0 if case.combiner is None else NEAR)
        lost += int(seen.counts.evicted + seen.counts.refused + seen.counts.not_admitted)
        overflow += int(seen.overflow)
    assert lost > 0
    assert overflow > 0 or case.exchange.distinct == 1  # keys that are not merged may overflow
    copies = case.devices // case.parts
    assert_same_bits(many.parts, [one.table for one in apart.ones] * copies)
    assert copies == 1 or many.placement.replicas_agree(many.table)
