"""What find_or_insert over many devices is offered: rows for the ids that it inserts."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from many_devices import (
    ADAM,
    DIM,
    Case,
    assert_entries,
    assert_same_bits,
    everywhere,
    on_device,
    seldom,
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
    "admission": of(LEVELS, admission=hkv.admission.frequency(2, width=2**16)),
}
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
def test_offered_rows_are_those_that_one_table_would_take(name, rng):
    """Of equal keys the first valid one of the first device; statuses, counts, all bits."""
    case = CASES[name]
    kind = case.table().dtype
    many, one = case.placement.create(case.table), case.table(ROOMY)

    def offering(module, table, batch, rows, **axis):
        return inserting(module, case, table, batch, values=rows, **axis)

    step = case.placement.step(partial(offering, sharding, axis_name=case.exchange))
    expected_step = jax.jit(partial(offering, hkv))
    overflow = taken = 0
    for _ in range(3):
        batch = zipf_batch(rng, (280,))
        rows = np.asarray(rng.normal(size=(280, DIM)), kind)
        put = case.placement.put((on_device(batch), rows))
        many, (values, status, counts, left_out) = step(many, *put)
        one, expected = expected_step(one, on_device(batch), rows)
        assert_same_bits((values, status), expected[:2])
        assert [int(n) for n in counts] == [int(n) for n in expected[2]]
        new = np.asarray(hkv.is_new(status))
        first = {key: i for i, key in reversed([*enumerate(batch.keys.tolist())]) if batch.valid[i]}
        assert all(
            first[key] == i
            for i, key in zip(np.flatnonzero(new), batch.keys[new].tolist(), strict=True)
        )
        assert_same_bits(np.asarray(values)[new], rows[new])
        taken, overflow = taken + int(new.sum()), overflow + int(left_out)
        assert int(counts.hits) < int(counts.unique)
    assert taken > 10 and (overflow > 0) == (case.exchange.distinct < 1)
    parts = case.placement.shards(many)[: 1 if case.exchange.replicas else None]
    assert_entries(parts, one)


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
    table = FOUR.placement.create(FOUR.table)
    for wrong, kind, message in (
        (rows[:, :2], ValueError, r"find_or_insert: values must have shape \[2, 4\]"),
        (rows.astype(np.float16), TypeError, r"find_or_insert: values must be float32 like the"),
    ):
        with pytest.raises(kind, match=f"sharding.{message}"):
            step(table, *FOUR.placement.put((keys, wrong)))
