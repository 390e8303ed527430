"""Steps over many devices: keys without room, clipping, micro-batches, scans and hand-made maps."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import seldom
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from many_devices import (
    ADAM,
    DIM,
    GOLDEN,
    Batch,
    Case,
    Many,
    One,
    Seen,
    assert_entries,
    assert_same_bits,
    assert_seen,
    entries_of,
    on_device,
    slopes_of,
    step_on_many,
    zipf_batch,
)
from oracle_sharding import owner_of

import jax_hkv as hkv
from jax_hkv import sharding, testing
from jax_hkv._hops import plan_of
from jax_hkv.index import Status
from jax_hkv.sharding import Exchange, Placement

AXES = ("node", "device")
ROOMY = 8192
EIGHT = Case(capacity=ROOMY // 8, options=(("choices", 2),))
OVERFLOWING = dataclasses.replace(EIGHT, exchange=Exchange("device", distinct=0.02))
# Wide enough that no two keys share all of their counters, in one sketch or in eight.
RULE = (("admission", hkv.admission.frequency(2, width=2**16)),)
NEAR = 1e-6


def owned_by(owner, count, devices=8):
    """Distinct keys of one owner."""
    keys = np.arange(1, 40 * count * devices, dtype=np.uint64) * GOLDEN
    return keys[owner_of(keys, devices) == owner][:count]


def slopes_for(keys, rng):
    return (rng.integers(-8, 9, (*keys.shape, DIM)) / 8).astype(np.float32)


def places(case, positions):
    """Places for the keys of one peer in the first round, for a device's batch."""
    plans = []

    def trace(array):
        plans.append(plan_of(case.exchange, positions, merges=case.exchange.deduplicate))
        return array

    spec = P(case.exchange.axes)
    mapped = jax.shard_map(trace, mesh=case.mesh, in_specs=spec, out_specs=spec)
    mapped(case.placement.put(np.zeros((case.devices,))))
    (hop,) = plans[0].hops
    return hop.places


def without_room(case, keys, devices=8):
    """How many keys have none: those of a device for one peer that exceed its places."""
    local = keys.reshape(devices, -1)
    room = places(case, local.shape[1])
    beyond = 0
    for own in local:
        own = np.unique(own) if case.exchange.deduplicate else own
        counts = np.bincount(owner_of(own, devices), minlength=devices)
        beyond += np.maximum(counts - room, 0).sum()
    return int(beyond)


def unlike_the_clock(table):
    """All leaves but the clock."""
    return [leaf for leaf in jax.tree.leaves(table) if leaf is not table.clock]


# --- Keys without room ---------------------------------------------------------------------------


@pytest.mark.parametrize("merged", [True, False])
def test_keys_of_one_owner_overflow_and_the_step_is_exact(merged, rng):
    case = dataclasses.replace(EIGHT, exchange=Exchange("device", deduplicate=merged))
    many, one = Many(case), One(case, ROOMY)
    keys = rng.choice(owned_by(5, 300), 8 * 100)
    for expected in (without_room(case, keys), 0):
        batch = Batch(keys, slopes_for(keys, rng))
        seen = many.step(batch)
        assert_seen(seen, one.step(batch))
        assert int(seen.overflow) == expected
        keys = rng.integers(0, 2**63, 8 * 100).astype(np.uint64)
    assert_entries(many.parts, one.table)
    for part in many.parts:
        assert part.clock.tolist() == [2, 0]
        assert int(part.optimizer.shared["count"][0]) == 2


@pytest.mark.parametrize("number", seldom([1, 2], {1}))
def test_stale_results_are_as_stale_where_keys_overflowed(number, rng):
    """By the slot that the lookup gave, not by that which a key has now."""
    keys = rng.permutation(400).astype(np.uint64) * GOLDEN
    sgd = hkv.optim.sgd(1.0)

    def run(exchange):
        def step(table, ids):
            table, old = sharding.find_or_insert(table, ids, axis_name=exchange)
            table = hkv.clear(table)
            table, new = sharding.find_or_insert(table, ids[::-1], axis_name="device")
            results = [old, new][:number]
            return sharding.update(sgd, table, results, [r.values + 1 for r in results]), (
                sharding.find(table, ids, axis_name="device")[1].found,
                old.overflow,
            )

        placement = Placement(EIGHT.mesh)
        table = placement.create(lambda: sgd.init(hkv.create(512, 1)))
        table, (found, overflow) = placement.step(step)(
            table, placement.put(hkv.Keys.from_numpy(keys))
        )
        assert found.all()
        return placement.shards(table), int(overflow)

    (roomy, none), (tight, some) = run(Exchange("device")), run(Exchange("device", distinct=0.01))
    assert none == 0 < some
    assert 0 < sum(int(part.optimizer.skipped[0]) for part in roomy) < len(keys)
    for a, b in zip(roomy, tight, strict=True):
        assert_same_bits(a, b)


def test_the_keys_without_room_are_counted_over_all_peers_and_devices(rng):
    many = Many(OVERFLOWING)
    keys = rng.integers(0, 500, 8 * 64).astype(np.uint64) * GOLDEN
    seen = many.step(Batch(keys, slopes_for(keys, rng)))
    assert int(seen.overflow) == without_room(OVERFLOWING, keys) > 0


def test_a_strict_exchange_without_room_changes_nothing_but_the_clock(rng):
    case = dataclasses.replace(EIGHT, exchange=Exchange("device", strict=True))
    many, one = Many(case), One(case, ROOMY)
    fits = rng.integers(0, 2**63, 8 * 100).astype(np.uint64)
    fitting = Batch(fits, slopes_for(fits, rng))
    assert_seen(many.step(fitting), one.step(fitting))
    before = [jax.tree.map(np.array, part) for part in many.parts]
    keys = rng.choice(owned_by(5, 300), 8 * 100)
    seen = many.step(Batch(keys, slopes_for(keys, rng)))
    assert int(seen.overflow) == without_room(case, keys) > 0
    assert not seen.values.any() and (seen.status == Status.MISSING).all()
    assert [int(count) for count in seen.counts] == [0] * 6
    for part, old in zip(many.parts, before, strict=True):
        assert_same_bits(unlike_the_clock(part), unlike_the_clock(old))
        assert part.clock.tolist() == [2, 0]


@pytest.mark.parametrize("strict", [True, False])
def test_a_reading_lookup_without_room_is_exact_or_says_so(strict, rng):
    case = dataclasses.replace(EIGHT, exchange=Exchange("device", strict=strict))
    many = Many(case)
    keys = rng.choice(owned_by(5, 300), 8 * 100)
    read = many.placement.run(
        lambda table, batch: jax.tree.map(
            lambda leaf: leaf[None] if leaf.ndim == 0 else leaf,
            sharding.find(table, batch, axis_name=case.exchange, fill="initial")[1],
        )
    )
    rows = read(many.table, many.placement.put(hkv.Keys.from_numpy(keys)))
    assert rows.overflow.tolist() == [without_room(case, keys)] * 8
    initial = hkv.initial_rows(case.table(), hkv.Keys.from_numpy(keys))
    assert not rows.found.any()
    assert_same_bits(rows.values, jnp.zeros_like(initial) if strict else initial)


# --- Clipping ------------------------------------------------------------------------------------


def clipped(lookup, update, table, batch):
    """A step with gradients of rows and of a dense parameter, clipped to a norm of 1."""
    table, result = lookup(table, batch.keys, valid=batch.valid)
    dense = {"w": jnp.array([3.0, 4.0]) / 16}
    dense, (rows,), norm = hkv.optim.clip_by_global_norm(1.0, dense, [result], [batch.slopes])
    return update(table, result, rows), (norm, dense)


def clip_on_many(case, table, batch):
    lookup = partial(sharding.find_or_insert, axis_name=case.exchange)
    return clipped(lookup, partial(sharding.update, ADAM), table, batch)


CLIP_ON_ONE = jax.jit(partial(clipped, hkv.find_or_insert, ADAM.update))
CLIPPED = {
    "room": EIGHT,
    "no room": OVERFLOWING,
    "refused keys": dataclasses.replace(EIGHT, options=RULE),
    "refused keys, no room": dataclasses.replace(OVERFLOWING, options=RULE),
    "levels, no room": dataclasses.replace(
        EIGHT, exchange=Exchange(AXES, distinct=0.02), shape=(2, 4), names=AXES
    ),
    "one device": dataclasses.replace(EIGHT, shape=(1,), capacity=ROOMY),
}


@pytest.mark.parametrize("name", seldom(CLIPPED, {"room", "refused keys", "one device"}))
def test_the_norm_of_all_gradients_is_that_of_one_device(name, rng):
    case = CLIPPED[name]
    many, one = Many(case), One(case, ROOMY)
    step = case.placement.step(partial(clip_on_many, case))
    for _ in range(4):
        batch = on_device(zipf_batch(rng, (320,)))
        many.table, (norm, dense) = step(many.table, many.placement.put(batch))
        one.table, (expected, dense_expected) = CLIP_ON_ONE(one.table, batch)
        assert float(expected) > 1.0
        np.testing.assert_allclose(norm, expected, rtol=NEAR)
        np.testing.assert_allclose(dense["w"], dense_expected["w"], rtol=NEAR)


# --- Several lookups, one update -----------------------------------------------------------------


class Three(NamedTuple):
    """Lookups of a step, by name: a sequence as good as any."""

    first: Any
    second: Any
    third: Any


def micro_batches(lookup, update, table, batch):
    results = []
    for number in range(batch.keys.shape[1]):
        table, result = lookup(table, batch.keys[:, number], valid=batch.valid[:, number])
        results.append(result)
    slopes = [*jnp.moveaxis(batch.slopes, 1, 0)]
    return update(table, Three(*results), slopes), results[-1].counts


def scanned(lookup, update, table, batch):
    def one(table, part):
        return lookup(table, part.keys, valid=part.valid)

    parts = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), batch)
    table, stacked = jax.lax.scan(one, table, parts)
    return update(table, stacked, parts.slopes), jax.tree.map(lambda leaf: leaf[-1], stacked.counts)


SEVERAL_ON_ONE = jax.jit(partial(micro_batches, hkv.find_or_insert, ADAM.update))
SEVERAL = {
    "room": EIGHT,
    "no room": OVERFLOWING,
    "refused at first": dataclasses.replace(EIGHT, options=RULE),
    "refused at first, no room": dataclasses.replace(OVERFLOWING, options=RULE),
    "levels": dataclasses.replace(EIGHT, exchange=Exchange(AXES), shape=(2, 4), names=AXES),
    "pmap": dataclasses.replace(EIGHT, mode="pmap"),
}


@pytest.mark.parametrize("kind", seldom([micro_batches, scanned], {micro_batches}))
@pytest.mark.parametrize("name", seldom(SEVERAL, {"refused at first", "room", "levels", "pmap"}))
def test_several_lookups_make_one_update(name, kind, rng):
    case = SEVERAL[name]
    many, one = Many(case), One(case, ROOMY)
    lookup = partial(sharding.find_or_insert, axis_name=case.exchange)
    step = case.placement.step(partial(kind, lookup, partial(sharding.update, ADAM)))
    for _ in range(3):
        batch = on_device(zipf_batch(rng, (160, 3)))
        many.table, counts = step(many.table, many.placement.put(batch))
        one.table, expected = SEVERAL_ON_ONE(one.table, batch)
        assert [int(n) for n in counts] == [int(n) for n in expected]
    assert_entries(many.parts, one.table)


@pytest.mark.parametrize("case", [EIGHT, OVERFLOWING], ids=["room", "no room"])
def test_a_result_whose_keys_are_gone_changes_no_other_row(case, rng):
    """The keys of the second lookup push out some of the first, whose gradients come last."""
    case = dataclasses.replace(case, shape=(4,), capacity=128, options=())
    many = Many(case)

    def step(table, batch):
        table, result = sharding.find_or_insert(table, batch.keys[:, 0], axis_name=case.exchange)
        table, _ = sharding.find_or_insert(table, batch.keys[:, 1], axis_name=case.exchange)
        return sharding.update(ADAM, table, result, batch.slopes), result.overflow

    keys = rng.permutation(np.arange(1, 641, dtype=np.uint64) * GOLDEN).reshape(320, 2)
    batch = on_device(Batch(keys, np.ones((320, DIM), np.float32)))
    many.table, overflow = case.placement.step(step)(many.table, many.placement.put(batch))
    assert (int(overflow) > 0) == (case.exchange.distinct < 1)
    entries = entries_of(many.parts)
    initial = np.asarray(hkv.initial_rows(case.table(), hkv.Keys.from_numpy(entries.keys)))
    is_first = np.isin(entries.keys, keys[:, 0])
    assert 0 < is_first.sum() < 320
    np.testing.assert_array_equal(entries.values[~is_first], initial[~is_first])
    assert (entries.values[is_first] < initial[is_first]).all()
    for leaf in entries.optimizer.values():
        assert not leaf[~is_first].any() and leaf[is_first].all()
    skipped = sum(int(part.optimizer.skipped[0]) for part in many.parts)
    assert skipped == 320 - is_first.sum()


# --- Rows that travel ragged ---------------------------------------------------------------------


def ragged_all_to_all(operand, output, starts, sizes, places, received, *, axis_name):
    """What JAX documents of its own, which XLA cannot do on a CPU; NaN or -1 where sizes differ."""
    operands, *parts = jax.lax.all_gather((operand, starts, sizes, places), axis_name)
    me = jax.lax.axis_index(axis_name)
    starts, sizes, places = (part[:, me] for part in parts)
    row = jnp.arange(operand.shape[0])
    for peer in range(operands.shape[0]):
        is_sent = (row >= starts[peer]) & (row < starts[peer] + sizes[peer])
        target = jnp.where(is_sent, row - starts[peer] + places[peer], len(output))
        output = output.at[target].set(operands[peer], mode="drop")
    wrong = jnp.asarray(jnp.nan if jnp.issubdtype(output.dtype, jnp.floating) else -1)
    return jnp.where((sizes == received).all(), output, wrong.astype(output.dtype))


RAGGED = {
    "room": EIGHT,
    "no room": OVERFLOWING,
    "levels": dataclasses.replace(
        EIGHT, exchange=Exchange(AXES, distinct=0.1), shape=(2, 4), names=AXES
    ),
    "axes at once": dataclasses.replace(
        EIGHT, exchange=Exchange(AXES, levels=False), shape=(2, 4), names=AXES
    ),
    "not merged": dataclasses.replace(EIGHT, exchange=Exchange("device", deduplicate=False)),
}


@pytest.mark.parametrize("name", seldom(RAGGED, {"room", "axes at once", "not merged", "levels"}))
def test_ragged_and_padded_rows_give_the_same_bits(name, rng, monkeypatch):
    """As GPUs exchange them: only the meaning of the collective is simulated."""
    case = RAGGED[name]
    called = []

    def counted(*args, **kwargs):
        called.append(args)
        return ragged_all_to_all(*args, **kwargs)

    monkeypatch.setattr(jax.lax, "ragged_all_to_all", counted)
    ways = [dataclasses.replace(case.exchange, ragged=ragged) for ragged in (True, False)]
    ragged, padded = (Many(dataclasses.replace(case, exchange=own)) for own in ways)
    for _ in range(3):
        batch = zipf_batch(rng, (640,))
        seen = ragged.step(batch)
        assert_same_bits(seen, padded.step(batch))
        assert np.isfinite(seen.values).all()
    assert len(called) >= 3
    for own, other in zip(ragged.parts, padded.parts, strict=True):
        assert_same_bits(own, other)


# --- Maps and scans made by hand -----------------------------------------------------------------


def local_step(case, table, batch):
    table, result = sharding.find_or_insert(
        table, batch.keys, axis_name=case.exchange, valid=batch.valid
    )
    gradients = slopes_of(case, result.values, batch.slopes)
    _, _, norm = hkv.optim.clip_by_global_norm(1.0, {}, [result], [gradients])
    table = sharding.update(ADAM, table, result, gradients, apply=result.overflow >= 0)
    return table, Seen(result.values, result.status, result.counts, result.overflow), norm


TYPED = {
    "plain": EIGHT,
    "no room": OVERFLOWING,
    "levels": dataclasses.replace(EIGHT, exchange=Exchange(AXES), shape=(2, 4), names=AXES),
    "one device": dataclasses.replace(EIGHT, shape=(1,), capacity=ROOMY),
    "refused keys": dataclasses.replace(EIGHT, options=RULE),
    "replicas": dataclasses.replace(
        EIGHT, exchange=Exchange("device", replicas=True), capacity=ROOMY
    ),
    "two replicas": dataclasses.replace(
        EIGHT, exchange=Exchange(AXES, replicas=2, distinct=0.02), shape=(2, 4), names=AXES
    ),
}
KINDS = {"Auto": jax.sharding.AxisType.Auto, "Explicit": jax.sharding.AxisType.Explicit}


def mesh_of(case, kind):
    count = int(np.prod(case.shape))
    types = (KINDS[kind],) * len(case.shape)
    return jax.make_mesh(
        case.shape, case.names, axis_types=types, devices=jax.devices("cpu")[:count]
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("plain", "Auto"),
        ("levels", "Explicit"),
        ("no room", "Explicit"),
        ("two replicas", "Explicit"),
        *(
            pytest.param(name, "Explicit", marks=pytest.mark.slow)
            for name in ("plain", "one device", "refused keys", "replicas")
        ),
    ],
)
def test_a_typed_shard_map_by_hand_is_one_table(name, kind, rng):
    """30: axes are Auto or Explicit; counts, overflow and norm have the type of equal values."""
    case = TYPED[name]
    mesh, spec = mesh_of(case, kind), P(case.exchange.axes)
    placement, one = Placement(mesh), One(case, ROOMY)
    table = placement.create(case.table)
    seen_spec = Seen(spec, spec, P(), P())
    mapped = jax.shard_map(
        partial(local_step, case),
        mesh=mesh,
        in_specs=(spec, spec),
        out_specs=(spec, seen_spec, P()),
    )
    step = jax.jit(mapped, donate_argnums=0)
    for _ in range(3):
        batch = zipf_batch(rng, (320,))
        table, seen, norm = step(table, placement.put(on_device(batch)))
        assert_seen(jax.tree.map(np.asarray, seen), one.step(batch))
        assert np.isfinite(norm)
    assert_entries(placement.shards(table)[: case.parts], one.table)


@pytest.mark.parametrize("kind", KINDS)
def test_placements_take_meshes_of_both_kinds_of_axes(kind, rng):
    placement, one = Placement(mesh_of(EIGHT, kind)), One(EIGHT, ROOMY)
    table = placement.create(EIGHT.table)
    batch = zipf_batch(rng, (320,))
    step = placement.step(partial(step_on_many, EIGHT))
    table, seen = step(table, placement.put(on_device(batch)))
    assert_seen(jax.tree.map(np.asarray, seen), one.step(batch))
    assert len(np.unique(placement.digests(table), axis=0)) == EIGHT.devices


def test_a_pmap_by_hand_is_one_table(rng):
    one = One(EIGHT, ROOMY)
    pmap = partial(jax.pmap, axis_name="device", devices=jax.devices("cpu")[:8])
    table = pmap(lambda _: EIGHT.table())(np.arange(8))
    step = pmap(partial(step_on_many, EIGHT), donate_argnums=0)
    for _ in range(3):
        batch = zipf_batch(rng, (320,))
        split = jax.tree.map(lambda leaf: leaf.reshape(8, -1, *leaf.shape[1:]), on_device(batch))
        table, seen = step(table, split)
        assert_seen(jax.tree.map(lambda leaf: np.asarray(leaf[0]), seen), one.step(batch))
    parts = [jax.tree.map(lambda leaf, n=n: leaf[n], table) for n in range(8)]
    assert_entries(parts, one.table)


@pytest.mark.parametrize("case", [EIGHT, OVERFLOWING], ids=["room", "no room"])
def test_a_scan_over_steps_carries_the_table(case, rng):
    many, one = Many(case), One(case, ROOMY)
    batches = [zipf_batch(rng, (320,)) for _ in range(4)]

    def steps(table, batch):
        by_step = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), batch)
        return jax.lax.scan(partial(step_on_many, case), table, by_step)

    stacked = jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *batches)
    step = case.placement.step(steps)
    many.table, seen = step(many.table, many.placement.put(on_device(stacked)))
    for number, batch in enumerate(batches):
        own = jax.tree.map(lambda leaf, n=number: np.asarray(leaf[n]), seen)
        assert_seen(own, one.step(batch))
    assert_entries(many.parts, one.table)


# --- What is compiled ----------------------------------------------------------------------------

COMPILED = {
    "plain": EIGHT,
    "a second round": OVERFLOWING,
    "levels": dataclasses.replace(EIGHT, exchange=Exchange(AXES), shape=(2, 4), names=AXES),
    "sums from owners": dataclasses.replace(
        EIGHT, exchange=Exchange("device", partial=True), combiner="sum"
    ),
    "rows from owners": dataclasses.replace(
        EIGHT, exchange=Exchange("device", partial=False), combiner="mean"
    ),
    "replicas": dataclasses.replace(EIGHT, exchange=Exchange("device", replicas=True)),
    "two replicas": dataclasses.replace(
        EIGHT, exchange=Exchange(AXES, replicas=2), shape=(2, 4), names=AXES
    ),
}


@pytest.mark.parametrize("name", seldom(COMPILED, {"plain", "rows from owners"}))
def test_a_step_copies_no_part_of_the_table_and_is_traced_once(name, rng):
    case = COMPILED[name]
    many, traced = Many(case), []

    def step(table, batch):
        traced.append(name)
        return step_on_many(case, table, batch)

    many.compiled = many.placement.step(step)
    shape = (320,) if case.combiner is None else (80, 5)
    for _ in range(3):
        batch = zipf_batch(rng, shape, bags=case.combiner is not None)
        many.step(batch)
    assert traced == [name]
    batch = many.placement.put(on_device(batch))
    hlo = many.compiled.lower(many.table, batch).compile().as_text()
    assert testing.copies_in(hlo, many.parts[0]) == []


# --- Dense parameters that XLA splits ------------------------------------------------------------


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_tower_is_split_along_an_axis_that_the_table_does_not_know(kind):
    """A shard_map that is manual along the table's axis: the numbers of one device, no copies."""
    mesh = jax.make_mesh(
        (2, 2), ("device", "model"), axis_types=(kind,) * 2, devices=jax.devices("cpu")[:4]
    )
    placement = sharding.Placement(mesh, axis_name="device")
    start = np.linspace(-1, 1, DIM * 8, dtype=np.float32).reshape(DIM, 8)
    ids = np.arange(32, dtype=np.int32) % 20

    def loss_of(tower, rows):
        return jnp.mean(jnp.tanh(rows @ tower) ** 2)

    def split(table, tower, ids):
        table, found = sharding.find_or_insert(table, ids, axis_name="device")
        loss, (slope, rows) = jax.value_and_grad(loss_of, (0, 1))(tower, found.values)
        table = sharding.update(ADAM, table, found, rows / 2)
        slope, loss = jax.lax.pmean((slope, loss), "device")
        return table, tower - 0.1 * slope, loss

    def whole(table, tower, ids):
        table, found = hkv.find_or_insert(table, ids)
        loss, (slope, rows) = jax.value_and_grad(loss_of, (0, 1))(tower, found.values)
        return ADAM.update(table, found, rows), tower - 0.1 * slope, loss

    step = jax.jit(
        jax.shard_map(
            split,
            mesh=mesh,
            axis_names={"device"},
            in_specs=(P("device"), P(), P("device")),
            out_specs=(P("device"), P(), P()),
            check_vma=False,
        ),
        donate_argnums=(0, 1),
    )
    table = placement.create(lambda: ADAM.init(hkv.create(128, DIM)))
    tower = jax.device_put(start, NamedSharding(mesh, P(None, "model")))
    program = step.lower(table, tower, placement.put(ids)).compile().as_text()
    assert not testing.copies_in(program, [placement.shards(table)[0]])
    alone = ADAM.init(hkv.create(256, DIM)), jnp.asarray(start)
    for _ in range(4):
        table, tower, loss = step(table, tower, placement.put(ids))
        *alone, expected = whole(*alone, ids)
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert tower.sharding.spec == P(None, "model")
    np.testing.assert_allclose(tower, alone[1], rtol=1e-5, atol=1e-6)
