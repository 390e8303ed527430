"""What find_or_insert over many devices is told of new ids: their rows, and who gets one."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from combinations import seldom
from many_devices import (
    ADAM,
    DIM,
    Case,
    assert_entries,
    assert_same_bits,
    everywhere,
    looked_up,
    on_device,
    zipf_batch,
)

import jax_hkv as hkv
from jax_hkv import sharding, testing
from jax_hkv.index import Policy
from jax_hkv.sharding import Exchange

AXES = ("node", "device")
ROOMY = 4096
FOUR = Case(shape=(4,), capacity=1024)
LEVELS = dataclasses.replace(FOUR, exchange=Exchange(AXES), shape=(2, 2), names=AXES)


def of(case, exchange=None, mode="shard_map", **options):
    """A case with options of the table, and fields of its exchange."""
    exchange = dataclasses.replace(case.exchange, **(exchange or {}))
    return dataclasses.replace(case, exchange=exchange, mode=mode, options=tuple(options.items()))


CASES = {
    "one hop": FOUR,
    "levels, LFU": of(LEVELS, policy=Policy.LFU, choices=2),
    "not merged, pmap": of(FOUR, {"deduplicate": False}, mode="pmap"),
    "a second round, bfloat16": of(FOUR, {"distinct": 0.02}, dtype=jnp.bfloat16),
    "replicas": dataclasses.replace(of(FOUR, {"replicas": True}), capacity=ROOMY),
    "two replicas": dataclasses.replace(of(LEVELS, {"replicas": 2}), capacity=ROOMY // 2),
    "admission": of(LEVELS, admission=hkv.admission.frequency(2, width=2**16)),
}
ADMITTED = {"levels, LFU", "not merged, pmap", "a second round, bfloat16", "admission", "replicas"}
ADMITTED.add("two replicas")
SLOW = {"not merged, pmap", "replicas"}


def inserting(module, case, table, batch, **given):
    """A training step, and what it says of every position."""
    table, result = module.find_or_insert(table, batch.keys, valid=batch.valid, **given)
    slopes = batch.slopes.astype(table.dtype)
    if module is hkv:
        table = ADAM.update(table, result, slopes)
        return table, (result.values, result.status, result.counts, 0)
    table = sharding.update(ADAM, table, result, slopes)
    of_all = (everywhere(case, leaf) for leaf in (result.values, result.status))
    return table, (*of_all, result.counts, result.overflow)


@pytest.mark.parametrize("name", seldom(CASES, SLOW))
def test_new_ids_are_those_of_one_table_and_have_the_rows_that_it_would_take(name, rng):
    """Of equal keys the first valid row of the first device, and what any position admits."""
    case = CASES[name]
    kind, admits = case.table().dtype, name in ADMITTED
    many, one = case.placement.create(case.table), case.table(ROOMY)

    def offering(module, table, batch, rows, admit, **axis):
        own = {"admit": admit} if admits else {}
        return inserting(module, case, table, batch, values=rows, **own, **axis)

    step = case.placement.step(partial(offering, sharding, axis_name=case.exchange))
    expected_step = jax.jit(partial(offering, hkv))
    overflow = taken = by_another = away = 0
    for _ in range(3):
        batch = zipf_batch(rng, (280,))
        rows, admit = np.asarray(rng.normal(size=(280, DIM)), kind), rng.random(280) < 0.4
        put = case.placement.put((on_device(batch), rows, admit))
        many, (values, status, counts, left_out) = step(many, *put)
        one, expected = expected_step(one, on_device(batch), rows, admit)
        assert_same_bits((values, status), expected[:2])
        assert [int(n) for n in counts] == [int(n) for n in expected[2]]
        new = np.asarray(hkv.is_new(status))
        assert_same_bits(np.asarray(values)[new], rows[new])
        taken, overflow = taken + int(new.sum()), overflow + int(left_out)
        by_another += int((new & ~admit).sum())
        away += int(counts.not_admitted)
    assert taken > 0 and (overflow > 0) == (case.exchange.distinct < 1)
    assert by_another > 0 or name == "admission"  # which lets few in
    assert (away > 0) == admits
    assert_entries(case.placement.shards(many)[: case.parts], one)


@pytest.mark.parametrize("sums", [True, False])
def test_bags_let_in_what_a_position_of_any_device_admits(sums, rng):
    """Whether their owners add up rows or send them; ids without a row add their initial ones."""
    case = dataclasses.replace(of(FOUR, {"partial": sums}), combiner="sum")
    many, one = case.placement.create(case.table), case.table(ROOMY)

    def step(module, table, batch, admit, **axis):
        table, result = looked_up(module, case, table, batch, admit=admit, **axis)
        found = result.values, result.status
        if module is sharding:
            found = (everywhere(case, leaf) for leaf in found)
        return table, (*found, result.counts)

    on_many = case.placement.step(partial(step, sharding, axis_name=case.exchange))
    on_one = jax.jit(partial(step, hkv))
    seen = np.zeros(6, np.int64)
    for _ in range(3):
        batch, admit = zipf_batch(rng, (80, 4), bags=True), rng.random((80, 4)) < 0.4
        many, (values, status, counts) = on_many(
            many, *case.placement.put((on_device(batch), admit))
        )
        one, expected = on_one(one, on_device(batch), admit)
        np.testing.assert_allclose(values, expected[0], rtol=1e-6, atol=1e-6)
        assert_same_bits((status, counts), expected[1:])
        seen += [int(n) for n in counts]
    counts = oracle.Counts(*seen)
    assert min(counts.hits, counts.inserted, counts.not_admitted) > 0
    assert_entries(case.placement.shards(many), one)


def test_offered_rows_are_one_exchange_more_and_copy_no_part():
    """Of those who offer none nothing more travels."""
    placement, moved = FOUR.placement, {}
    table = placement.create(FOUR.table)
    put = placement.put((np.arange(400, dtype=np.int32), np.ones((400, DIM), np.float32)))
    for exchange in (Exchange("device", strict=True), Exchange("device", distinct=0.5)):
        for offers in (False, True):

            def step(table, keys, rows, offers=offers, exchange=exchange):
                more = {"values": rows} if offers else {}
                table, result = sharding.find_or_insert(table, keys, axis_name=exchange, **more)
                return table, result.counts

            compiled = placement.step(step).lower(table, *put).compile()
            assert testing.copies_in(compiled.as_text(), placement.shards(table)[0]) == []
            of_rows = sharding.traffic(compiled, placement.mesh).collectives
            moved[exchange.strict, offers] = len(of_rows)
    assert moved[True, True] == moved[True, False] + 1
    assert moved[False, True] == moved[False, False] + 2  # of both rounds


def test_rows_that_do_not_fit_are_refused_in_the_name_of_the_call():
    find_or_insert = partial(sharding.find_or_insert, axis_name="device")
    keys, rows = np.arange(8, dtype=np.int32), np.ones((8, DIM), np.float32)
    step = FOUR.placement.step(lambda table, keys, rows: find_or_insert(table, keys, values=rows))
    masked = FOUR.placement.step(lambda table, keys, mask: find_or_insert(table, keys, admit=mask))
    table = FOUR.placement.create(FOUR.table)
    for wrong, kind, message in (
        (rows[:, :2], ValueError, r"find_or_insert: values must have shape \[2, 4\]"),
        (rows.astype(np.float16), TypeError, r"find_or_insert: values must be float32 like the"),
    ):
        with pytest.raises(kind, match=f"sharding.{message}"):
            step(table, *FOUR.placement.put((keys, wrong)))
    with pytest.raises(TypeError, match=r"sharding.find_or_insert: admit must be bool\[2\] like"):
        masked(table, *FOUR.placement.put((keys, keys)))
