"""Lookups over devices that a scan stacks: one exchange for all, and the bits of a list of them."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from combinations import seldom
from many_devices import (
    ADAM,
    DIM,
    GOLDEN,
    Batch,
    Case,
    assert_same_bits,
    looked_up,
    on_device,
)
from test_sharding_steps import ragged_all_to_all

import jax_hkv as hkv
from jax_hkv import sharding
from jax_hkv.sharding import Exchange, Placement

AXES = ("node", "device")
PARTS = 4
POSITIONS = 64  # of a device and a part
EIGHT = Case(capacity=1024)
LEVELS = dataclasses.replace(EIGHT, shape=(2, 4), names=AXES)
BAGS = dataclasses.replace(EIGHT, combiner="mean")
BAGS_BY_LEVELS = dataclasses.replace(LEVELS, combiner="mean")


def along(exchange: Exchange, case: Case = EIGHT, **changes: Any) -> Case:
    return dataclasses.replace(case, exchange=exchange, **changes)


CASES = {
    "room": EIGHT,
    "no room": along(Exchange("device", distinct=0.02)),
    "strict": along(Exchange("device", strict=True)),
    "strict, no room": along(Exchange("device", strict=True, distinct=0.02)),
    "pmap": along(Exchange("device", distinct=0.02), mode="pmap"),
    "levels": along(Exchange(AXES), LEVELS),
    "levels, no room": along(Exchange(AXES, distinct=0.02), LEVELS),
    "not merged": along(Exchange("device", deduplicate=False, slack=8.0)),
    "not merged, no room": along(Exchange("device", deduplicate=False, slack=0.1)),
    "levels, not merged": along(Exchange(AXES, deduplicate=False, slack=0.5), LEVELS),
    "replicas": along(Exchange("device", replicas=True)),
    "replicas, no room": along(Exchange("device", replicas=True, distinct=0.1)),
    "two replicas, no room": along(Exchange(AXES, replicas=2, distinct=0.02), LEVELS),
    "ragged": along(Exchange("device", ragged=True)),
    "one device": dataclasses.replace(EIGHT, shape=(1,)),
    "bags": along(Exchange("device", partial=False), BAGS),
    "bags, no room": along(Exchange("device", partial=False, distinct=0.02), BAGS),
    "bags, not merged": along(
        Exchange("device", partial=False, deduplicate=False, slack=8.0), BAGS
    ),
    "sums of bags": along(Exchange("device", partial=True, slack=8.0), BAGS),
    "sums of bags, no room": along(Exchange("device", partial=True, slack=0.5), BAGS),
    "sums of bags, levels": along(Exchange(AXES, partial=True, slack=8.0), BAGS_BY_LEVELS),
    "bags, one device": dataclasses.replace(BAGS, shape=(1,)),
}
SELDOM = set(CASES) - {"no room", "two replicas, no room"}


def batch_of(case: Case, rng: Any) -> Batch:
    """Of every other part there are few keys, and all fit; gradients whose sums round."""
    shape = (case.devices * POSITIONS, PARTS) + ((5,) if case.combiner else ())
    few = np.arange(PARTS).reshape(-1, *(1,) * (len(shape) - 2)) % 2 == 0
    numbers = np.where(few, rng.integers(0, 3, shape), rng.integers(0, 500, shape))
    slopes = rng.normal(size=(*shape[:2], DIM)).astype(np.float32)
    is_weighted = case.combiner and not case.exchange.partial  # else owners return no sums
    weights = rng.random(shape).astype(np.float32) if is_weighted else None
    keys = numbers.astype(np.uint64) * GOLDEN
    return on_device(Batch(keys, slopes, rng.random(shape) < 0.9, None, weights))


def listed(lookup: Any, table: hkv.Table, parts: Batch) -> tuple[hkv.Table, Any]:
    results = []
    for number in range(PARTS):
        table, result = lookup(table, jax.tree.map(lambda leaf: leaf[number], parts))  # noqa: B023
        results.append(result)
    table = sharding.update(ADAM, table, results, [*parts.slopes])
    return table, jnp.stack([result.overflow for result in results])


def stacked(lookup: Any, table: hkv.Table, parts: Batch) -> tuple[hkv.Table, Any]:
    table, result = jax.lax.scan(lookup, table, parts)
    return sharding.update(ADAM, table, result, parts.slopes), result.overflow


def stacked_twice(lookup: Any, table: hkv.Table, parts: Batch) -> tuple[hkv.Table, Any]:
    pairs = jax.tree.map(lambda leaf: leaf.reshape(2, -1, *leaf.shape[1:]), parts)
    table, result = jax.lax.scan(partial(jax.lax.scan, lookup), table, pairs)
    return sharding.update(ADAM, table, result, pairs.slopes), result.overflow.reshape(-1)


def in_both(lookup: Any, table: hkv.Table, parts: Batch) -> tuple[hkv.Table, Any]:
    """One result of a scan beside one that is not."""
    first = jax.tree.map(lambda leaf: leaf[0], parts)
    rest = jax.tree.map(lambda leaf: leaf[1:], parts)
    table, one = lookup(table, first)
    table, result = jax.lax.scan(lookup, table, rest)
    table = sharding.update(ADAM, table, [one, result], [first.slopes, rest.slopes])
    return table, jnp.concatenate([one.overflow[None], result.overflow])


def parts_after(case: Case, kind: Any, batches: list[Batch]) -> tuple[list[hkv.Table], np.ndarray]:
    def step(table: hkv.Table, batch: Batch) -> tuple[hkv.Table, Any]:
        lookup = partial(looked_up, sharding, case, axis_name=case.exchange)
        return kind(lookup, table, jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), batch))

    placement = case.placement
    table, compiled = placement.create(case.table), placement.step(step)
    for batch in batches:
        table, overflow = compiled(table, placement.put(batch))
    return placement.shards(table), np.asarray(overflow)


KINDS = [(name, stacked) for name in CASES]
KINDS += [(name, kind) for name in ("room", "no room") for kind in (stacked_twice, in_both)]


@pytest.mark.parametrize(
    ("name", "kind"),
    seldom(KINDS, [pair for pair in KINDS if pair[0] in SELDOM]),
)
def test_stacked_lookups_are_updated_as_a_list_of_them_bit_by_bit(name, kind, rng, monkeypatch):
    """Lookup by lookup, device by device: no sum has another order."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    case = CASES[name]
    batches = [batch_of(case, rng) for _ in range(2)]
    expected, overflow = parts_after(case, listed, batches)
    got, overflow_of_stack = parts_after(case, kind, batches)
    np.testing.assert_array_equal(overflow, overflow_of_stack)
    if case.exchange.slack < 1 or case.exchange.distinct < 1:
        assert (overflow > 0).any() and (overflow == 0).any(), "lookups of both kinds are meant"
    else:
        assert not overflow.any()
    for one, other in zip(got, expected, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_a_step_is_as_long_a_program_for_8_micro_batches_as_for_4(mode, strict):
    """One exchange of gradients, and one second round, for all of them."""
    mesh = jax.make_mesh((4,), ("device",), devices=jax.devices("cpu")[:4])
    placement = Placement(mesh, mode=mode)
    exchange = Exchange("device", distinct=0.1, strict=strict)
    ids = np.arange(8 * 4 * POSITIONS, dtype=np.int32)
    model = hkv.linen.Embed(1024, DIM, optimizer=ADAM, axis_name=exchange)
    state = placement.create(
        lambda: hkv.linen.TrainState.create(model, jax.random.key(0), ids[:4], tx=optax.sgd(0.1))
    )

    def loss(apply: Any, ids: Any) -> Any:
        return jnp.square(apply(ids, train=True)).mean()

    def text_of(count: int) -> str:
        step = hkv.linen.train_step(
            loss, placement=placement, micro_batches=count, max_norm=1.0, check_overflow=False
        )
        return step.lower(state, *placement.put((ids[: count * 4 * POSITIONS],))).as_text()

    four, eight = text_of(4), text_of(8)
    assert "all_to_all" in four
    assert [text.count("all_to_all") for text in (four, eight)] == [four.count("all_to_all")] * 2
    assert len(four.splitlines()) == len(eight.splitlines())
