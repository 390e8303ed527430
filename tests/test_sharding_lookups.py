"""Bags, reads and replicas over many devices, the helpers beside them, and what errors say."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import seldom
from many_devices import (
    ADAM,
    DIM,
    GOLDEN,
    Batch,
    Case,
    Many,
    One,
    assert_entries,
    assert_same_bits,
    assert_seen,
    everywhere,
    on_device,
    zipf_batch,
)
from oracle import U64_MAX
from oracle_sharding import owner_of

import jax_hkv as hkv
from jax_hkv import _compat, operations, sharding
from jax_hkv.sharding import Exchange, Placement

CUSTOM = hkv.Policy.CUSTOM
AXES = ("node", "device")
ROOMY = 8192
FOUR = Case(shape=(4,), capacity=ROOMY // 4, options=(("choices", 2),))
LEVELS = dataclasses.replace(FOUR, exchange=Exchange(AXES), shape=(2, 2), names=AXES)
NEAR = 1e-6


def with_exchange(case, **fields):
    return dataclasses.replace(case, exchange=dataclasses.replace(case.exchange, **fields))


# --- Bags ----------------------------------------------------------------------------------------

PARTIAL = {
    "chosen": FOUR,
    "sums": with_exchange(FOUR, partial=True),
    "rows": with_exchange(FOUR, partial=False),
    "sums over levels": with_exchange(LEVELS, partial=True),
    "rows over levels": with_exchange(LEVELS, partial=False),
    "sums, no room": with_exchange(FOUR, partial=True, distinct=0.02),
    "rows, no room": with_exchange(FOUR, partial=False, distinct=0.02),
    "replicas": dataclasses.replace(with_exchange(FOUR, replicas=True), capacity=ROOMY),
    "two replicas": dataclasses.replace(
        with_exchange(LEVELS, replicas=2, partial=True), capacity=ROOMY // 2
    ),
    "one device": dataclasses.replace(FOUR, shape=(1,), capacity=ROOMY),
}


def lists_of_ids(rng, devices, bags):
    """Bags for each device, many of them empty; the first device has none but empty ones."""
    lengths = rng.integers(0, 5, (devices, bags)) * (rng.random((devices, bags)) < 0.7)
    lengths[0] = 0
    ids = [[rng.integers(0, 60, n).astype(np.uint64) * GOLDEN for n in own] for own in lengths]
    weights = [[(rng.integers(1, 9, n) / 8).tolist() for n in own] for own in lengths]
    return ids, weights


def jagged(lists, weights, capacity):
    return hkv.Jagged.from_lists(lists, capacity=capacity, weights=weights)


def local_and_joined(rng, devices, bags, is_weighted):
    """The bags of all devices, padded device by device, and as one batch."""
    ids, weights = lists_of_ids(rng, devices, bags)
    weights = weights if is_weighted else [None] * devices
    own = [jagged(*pair, 5 * bags) for pair in zip(ids, weights, strict=True)]
    stacked = jax.tree.map(lambda *leaves: np.concatenate(leaves), *own)
    joined_weights = sum(weights, []) if is_weighted else None
    return stacked, jagged(sum(ids, []), joined_weights, 5 * bags * devices)


def pooled_step(lookup, update, table, bags, slopes):
    table, result = lookup(table, bags)
    return update(table, result, slopes), result


COMBINERS = ("sum", "mean", "sqrtn")
# Every way with one combiner, and one way with every combiner.
WAYS = [*zip(PARTIAL, COMBINERS * len(PARTIAL), strict=False), *product(["sums"], COMBINERS)]


@pytest.mark.parametrize("name, combiner", seldom(sorted(set(WAYS)), set(WAYS[4:])))
def test_jagged_bags_of_many_devices_are_those_of_one(name, combiner, rng):
    case = PARTIAL[name]
    many, one = Many(case), One(case, ROOMY)
    lookup = partial(sharding.find_or_insert_pooled, axis_name=case.exchange, combiner=combiner)

    def local(table, bags, slopes):
        update = partial(sharding.update, ADAM)
        table, result = pooled_step(lookup, update, table, bags, slopes)
        return table, (everywhere(case, result.values), result.counts)

    step = case.placement.step(local)
    on_one = partial(hkv.find_or_insert_pooled, combiner=combiner)
    expected_step = jax.jit(partial(pooled_step, on_one, ADAM.update), donate_argnums=0)
    for _ in range(2):
        stacked, joined = local_and_joined(rng, case.devices, 8, combiner != "mean")
        slopes = (rng.integers(-8, 9, (8 * case.devices, DIM)) / 8).astype(np.float32)
        batch = many.placement.put((stacked, slopes))
        many.table, (values, counts) = step(many.table, *batch)
        one.table, expected = expected_step(one.table, joined, slopes)
        np.testing.assert_allclose(values, expected.values, atol=NEAR, rtol=NEAR)
        assert not np.asarray(values)[:8].any()
        assert [int(n) for n in counts] == [int(n) for n in expected.counts]
    assert_entries(many.parts[: case.parts], one.table, NEAR)


@pytest.mark.parametrize(
    ("name", "combiner"),
    seldom(
        [
            *product(["chosen"], COMBINERS),
            ("sums", "mean"),
            ("rows over levels", "mean"),
            ("rows, no room", "sqrtn"),
        ],
        {("chosen", "mean"), ("chosen", "sqrtn"), ("sums", "mean")},
    ),
)
def test_the_gradient_of_weights_is_that_of_one_device(name, combiner, rng):
    case = PARTIAL[name]
    many, one = Many(case), One(case, ROOMY)
    ids = rng.integers(0, 60, (16, 5)).astype(np.uint64) * GOLDEN
    valid = rng.random(ids.shape) < 0.8
    weights = rng.uniform(0.5, 1, ids.shape).astype(np.float32)
    slopes = rng.normal(size=(16, DIM)).astype(np.float32)

    def gradient(lookup, table, ids, valid, weights, slopes):
        def loss(weights):
            _, rows = lookup(table, ids, valid=valid, weights=weights, combiner=combiner)
            return jnp.sum(rows.values * slopes)

        return jax.grad(loss)(weights)

    batch = (hkv.Keys.from_numpy(ids), valid, weights, slopes)
    for module in ("find_or_insert_pooled", "find_pooled"):
        lookup = partial(getattr(sharding, module), axis_name=case.exchange)
        found = many.placement.run(partial(gradient, lookup))(
            many.table, *many.placement.put(batch)
        )
        expected = jax.jit(partial(gradient, getattr(hkv, module)))(one.table, *batch)
        assert np.abs(np.asarray(expected)).max() > 0.1
        np.testing.assert_allclose(found, expected, atol=NEAR, rtol=1e-5)


# --- Reads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [0.0, "initial", -1.5])
@pytest.mark.parametrize("mode", seldom(["shard_map", "pmap"], {"pmap"}))
def test_reading_finds_what_one_table_finds_and_inserts_nothing(mode, fill, rng):
    case = dataclasses.replace(FOUR, mode=mode)
    many, one = Many(case), One(case, ROOMY)
    batch = zipf_batch(rng, (160,))
    assert_seen(many.step(batch), one.step(batch))
    before = [jax.tree.map(np.array, part) for part in many.parts]
    other = zipf_batch(rng, (40, 3))
    asked = on_device(Batch(other.keys, other.slopes, other.valid))

    fill_of_bags = fill if fill == "initial" else 0.0

    def read(table, batch):
        args = {"axis_name": case.exchange, "valid": batch.valid, "fill": fill}
        table, rows = sharding.find(table, batch.keys, **args)
        _, bags = sharding.find_pooled(table, batch.keys, **args | {"fill": fill_of_bags})
        _, touched = sharding.find(table, batch.keys, touch=True, **args)
        del args["fill"]
        _, present = sharding.contains(table, batch.keys, **args)
        return rows.values, rows.found, bags.values, bags.found, *touched[:2], present.found

    outputs = many.placement.run(read)(many.table, many.placement.put(asked))
    if mode == "pmap":
        outputs = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), outputs)
    values, found, pooled, pooled_found, *again, present = outputs
    _, rows = hkv.find(one.table, asked.keys, valid=asked.valid, fill=fill)
    _, bags = hkv.find_pooled(one.table, asked.keys, valid=asked.valid, fill=fill_of_bags)
    assert_same_bits((values, found, pooled_found), (rows.values, rows.found, bags.found))
    assert_same_bits((again, present), ([rows.values, rows.found], rows.found))
    np.testing.assert_allclose(pooled, bags.values, atol=NEAR)
    assert 0 < int(found.sum()) < found.size
    assert_same_bits(many.parts, before)


def test_whether_keys_are_present_comes_without_rows():
    """Keys, statuses and the overflow move, and no owner reads a row."""
    placement = FOUR.placement
    table, keys = placement.create(FOUR.table), placement.put(hkv.Keys.from_numpy(np.arange(400)))
    about_rows = {}
    for call in (sharding.contains, sharding.find):
        step = placement.step(partial(call, axis_name="device"))
        compiled = step.lower(table, keys).compile()
        moved = sharding.traffic(compiled, placement.mesh).collectives
        rows_of_table = f"f32[{table.capacity // 4},{DIM}]"
        reads = [
            line
            for line in compiled.as_text().splitlines()
            if "jax_hkv.gather_rows" in line and rows_of_table in line
        ]
        assert moved
        about_rows[call.__name__] = (any("f32" in one.operands for one in moved), len(reads))
    assert about_rows == {"contains": (False, 0), "find": (True, 2)}  # in either round


@pytest.mark.parametrize("counts", [False, True])
def test_hits_are_scored_with_their_occurrences_where_the_policy_counts(counts):
    """An admission rule that counts does not ask: nothing is admitted."""
    policy = hkv.Policy.LFU if counts else hkv.Policy.LRU
    rule = hkv.admission.frequency(3)
    case = dataclasses.replace(FOUR, options=(("policy", policy), ("admission", rule)))
    step = case.placement.step(partial(sharding.find, axis_name=case.exchange, touch=True))
    keys = case.placement.put(hkv.Keys.from_numpy(np.arange(400)))
    compiled = step.lower(case.placement.create(case.table), keys).compile()
    moved = [one.operands for one in sharding.traffic(compiled, case.mesh).collectives]
    keys_of = [operands for operands in moved if operands.startswith("u32")]
    words = 3 if counts else 2
    assert len(keys_of) == 2 and all(f",{words}]" in operands for operands in keys_of)


# What acts on a table of any number of devices as it is, or has another name there.
LOCAL = {
    "clear": "a part by itself",
    "initial_rows": "what is static of a table",
    "insert_and_evict": "insert_or_assign(return_evicted=True)",
}


def test_every_operation_on_keys_has_its_twin_over_devices():
    own = {
        name
        for name, call in vars(operations).items()
        if getattr(call, "__module__", "") == operations.__name__ and getattr(hkv, name, 0) is call
    }
    assert own - LOCAL.keys() <= set(sharding.__all__) and own >= LOCAL.keys()
    for name in own - LOCAL.keys():
        arguments = [
            set(inspect.signature(getattr(module, name)).parameters) for module in (hkv, sharding)
        ]
        assert arguments[0] <= arguments[1], name


def test_a_batch_without_positions_is_refused_where_it_would_end_the_process(monkeypatch):
    monkeypatch.setattr(_compat, "_CRASHES_WITHOUT_ELEMENTS", True)
    for mode in ("shard_map", "pmap"):
        many = Many(dataclasses.replace(PARTIAL["rows"], mode=mode))
        with pytest.raises(ValueError, match="batch must have elements.*jaxlib 0.11.2.*valid="):
            many.step(Batch(np.zeros((0,), np.uint64), np.zeros((0, DIM), np.float32)))


@pytest.mark.skipif(_compat._CRASHES_WITHOUT_ELEMENTS, reason="this jaxlib ends the process")
@pytest.mark.parametrize("name", ["sums", "rows", "replicas"])
def test_a_batch_without_positions_ticks_the_clock_and_no_more(name):
    many, bags = Many(PARTIAL[name]), Many(dataclasses.replace(PARTIAL[name], combiner="mean"))
    none = np.zeros((0,), np.uint64)
    seen = many.step(Batch(none, np.zeros((0, DIM), np.float32)))
    assert seen.values.shape == (0, DIM) and int(seen.counts.unique) == 0
    seen = bags.step(Batch(none.reshape(0, 3), np.zeros((0, DIM), np.float32)))
    assert seen.values.shape == (0, DIM)
    for part in (*many.parts, *bags.parts):
        assert part.clock.tolist() == [1, 0]
        assert int(hkv.size(part)) == 0


# --- Replicas ------------------------------------------------------------------------------------

REPLICAS = {
    "shard_map": with_exchange(FOUR, replicas=True),
    "pmap": dataclasses.replace(with_exchange(FOUR, replicas=True), mode="pmap"),
    "levels": with_exchange(LEVELS, replicas=True),
    "no room": with_exchange(FOUR, replicas=True, distinct=0.02),
    "not merged": with_exchange(FOUR, replicas=True, deduplicate=False),
    "LFU": dataclasses.replace(
        with_exchange(FOUR, replicas=True), options=(("policy", hkv.Policy.LFU),)
    ),
}


@pytest.mark.parametrize("steps", [50, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", seldom(REPLICAS, {"pmap", "not merged", "no room"}))
def test_replicas_stay_equal_bit_for_bit(name, steps, rng):
    """They evict: a table that holds 1,024 of 5,000 keys, and one of one device beside it."""
    case = dataclasses.replace(REPLICAS[name], capacity=1024)
    many, one = Many(case), One(case)
    lost = overflow = 0
    for _ in range(steps):
        batch = zipf_batch(rng, (80,))
        seen = many.step(batch)
        assert_seen(seen, one.step(batch))
        lost, overflow = lost + int(seen.counts.evicted), overflow + int(seen.overflow)
    assert lost > 0
    assert (overflow > 0) == (case.exchange.distinct < 1)
    assert many.placement.replicas_agree(many.table)
    for part in many.parts:
        assert_same_bits(part, one.table)


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_one_bit_of_one_replica_is_noticed(mode, rng):
    case = dataclasses.replace(REPLICAS[mode], capacity=1024)
    many = Many(case)
    many.step(zipf_batch(rng, (80,)))
    assert many.placement.replicas_agree(many.table)
    for name in ("values", "keys", "scores"):
        parts = many.parts
        parts[2] = with_a_bit_changed(parts[2], name)
        assert not many.placement.replicas_agree(many.placement.join(parts)), name
    digests = many.placement.digests(many.placement.join(parts))
    assert digests.shape == (4, 2)
    assert [bool((own == digests[0]).all()) for own in digests] == [True, True, False, True]


def with_a_bit_changed(table, name):
    index = table.index
    holder = table if name == "values" else index
    leaf = np.array(getattr(holder, name))
    leaf.reshape(-1).view(np.uint32)[-1] ^= 1
    changed = dataclasses.replace(holder, **{name: jnp.asarray(leaf)})
    return changed if name == "values" else dataclasses.replace(table, index=changed)


# --- Helpers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2, 7, 8, 1024])
def test_owners_are_those_of_the_oracle(devices, rng):
    keys = rng.integers(0, 2**64, (5, 40), dtype=np.uint64)
    keys[0, :2] = 0, U64_MAX
    found = np.asarray(sharding.owners(hkv.Keys.from_numpy(keys), devices))
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, owner_of(keys.reshape(-1), devices).reshape(5, 40))
    small = np.array([-1, 5], np.int32)
    wide = small.astype(np.int64).view(np.uint64)
    np.testing.assert_array_equal(sharding.owners(small, devices), owner_of(wide, devices))


def test_owners_of_no_keys_are_none():
    assert sharding.owners(np.zeros((0, 3), np.int32), 4).shape == (0, 3)


def test_distinct_keys_are_measured_by_positions(rng):
    keys = hkv.Keys.from_numpy(np.array([[7, 7, 2**40], [2**40, 9, 9]], np.uint64))
    assert sharding.distinct_in(keys) == 3 / 6
    valid = np.array([[True, True, True], [False, False, False]])
    assert sharding.distinct_in(keys, valid) == 2 / 6
    assert sharding.distinct_in(np.zeros((0,), np.int32)) == 1


def test_skew_is_that_of_the_busiest_owner(rng):
    keys = rng.integers(0, 50, 300).astype(np.uint64)
    valid = rng.random(300) < 0.7
    counts = np.bincount(owner_of(keys[valid], 8), minlength=8)
    found = sharding.skew_in(hkv.Keys.from_numpy(keys), 8, valid)
    assert found == pytest.approx(counts.max() / counts.mean())


def test_the_measured_share_of_distinct_keys_leaves_room_for_all(rng):
    """What `distinct_in` is for: fewer places, and still no overflow."""
    keys = rng.integers(0, 100, 4 * 400).astype(np.uint64) * GOLDEN
    most = max(sharding.distinct_in(hkv.Keys.from_numpy(own)) for own in keys.reshape(4, 400))
    many = Many(with_exchange(FOUR, distinct=most))
    seen = many.step(Batch(keys, np.zeros((len(keys), DIM), np.float32)))
    assert int(seen.overflow) == 0 and int(seen.counts.unique) == 100


# --- What errors say -----------------------------------------------------------------------------


def trace(fn):
    """Traces a function of a part of a table inside shard_map."""
    placement = Placement(jax.make_mesh((2,), ("device",), devices=jax.devices("cpu")[:2]))
    table = placement.create(FOUR.table)
    return placement.step(lambda table: (fn(table), 0))(table)


KEYS = np.arange(4, dtype=np.int32)
CALLS = {
    "find": sharding.find,
    "find_or_insert": sharding.find_or_insert,
    "find_pooled": lambda table, keys, **axis: sharding.find_pooled(table, keys[None], **axis),
    "find_or_insert_pooled": lambda table, keys, **axis: sharding.find_or_insert_pooled(
        table, keys[None], **axis
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_axis_that_is_not_bound_is_an_error_with_a_remedy(name):
    call = CALLS[name]
    with pytest.raises(NameError, match=r"no mesh axis \('device',\) is bound.*Placement\(mesh\)"):
        call(FOUR.table(), KEYS, axis_name="device")
    with pytest.raises(NameError, match=r"no mesh axis \('node',\) is bound"):
        trace(lambda table: call(table, KEYS, axis_name="node"))
    with pytest.raises(NameError, match=r"no mesh axis \('node', 'device'\) is bound"):
        trace(lambda table: call(table, KEYS, axis_name=AXES))


@pytest.mark.parametrize("name", CALLS)
def test_no_axis_name_is_an_error_that_names_the_call_for_one_device(name):
    with pytest.raises(
        TypeError, match=rf"sharding\.{name}: axis_name .*got None.*jax_hkv\.{name}"
    ):
        CALLS[name](FOUR.table(), KEYS, axis_name=None)


@pytest.mark.parametrize("name", [3, "", (), ("device", 3), ("device", "")])
def test_what_is_no_axis_name_is_an_error(name):
    with pytest.raises(TypeError, match=r"sharding\.Exchange: axis_name must be the name"):
        sharding.find(FOUR.table(), KEYS, axis_name=name)


def test_an_axis_given_twice_is_an_error():
    with pytest.raises(ValueError, match="names an axis twice"):
        Exchange(("device", "device"))


@pytest.mark.parametrize("value", [0, -1.0, 1.5, float("nan"), True, "1", None])
def test_a_share_of_distinct_keys_is_above_0_and_up_to_1(value):
    with pytest.raises(ValueError, match="distinct must be a number above 0 and up to 1, got"):
        Exchange("device", distinct=value)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), False, "2"])
def test_slack_is_above_0(value):
    with pytest.raises(ValueError, match="slack must be a number above 0, got"):
        Exchange("device", slack=value)


def test_a_placement_names_axes_of_its_mesh_and_a_mode():
    mesh = jax.make_mesh((2, 2), AXES, devices=jax.devices("cpu")[:4])
    with pytest.raises(ValueError, match=r"must name axes of the mesh, .*'node'.*got 'model'"):
        Placement(mesh, "model")
    with pytest.raises(ValueError, match="mode must be one of .*'shard_map', 'pmap'.*got 'vmap'"):
        Placement(mesh, mode="vmap")
    with pytest.raises(ValueError, match="pmap has one axis.*use mode='shard_map'"):
        Placement(mesh, mode="pmap")


def test_arguments_of_lookups_are_checked_as_those_of_one_device():
    axis = {"axis_name": "device"}
    for kind, message, call in [
        (
            TypeError,
            r"sharding\.find: valid must be bool",
            lambda t: sharding.find(t, KEYS, valid=np.ones(3, bool), **axis),
        ),
        (
            TypeError,
            r"sharding\.find: touch must be True or False, got str 'yes'",
            lambda t: sharding.find(t, KEYS, touch="yes", **axis),
        ),
        (
            ValueError,
            r"sharding\.find with touch=True: scores are needed under Policy\.CUSTOM.* to assign",
            lambda t: sharding.find(hkv.create(128, 4, policy=CUSTOM), KEYS, touch=True, **axis),
        ),
        (
            ValueError,
            r"sharding\.find_or_insert: scores are not accepted",
            lambda t: sharding.find_or_insert(t, KEYS, scores=KEYS, **axis),
        ),
        (
            TypeError,
            r"sharding\.find_or_insert: keys must hold integers",
            lambda t: sharding.find_or_insert(t, np.ones(4, np.float32), **axis),
        ),
        (
            TypeError,
            r"sharding\.find_or_insert: ",
            lambda t: sharding.find_or_insert(None, KEYS, **axis),
        ),
        (
            ValueError,
            r"sharding\.find_or_insert_pooled: combiner",
            lambda t: sharding.find_or_insert_pooled(t, KEYS[None], combiner="max", **axis),
        ),
    ]:
        with pytest.raises(kind, match=message):
            trace(call)


def updating(results, gradients):
    def step(table):
        table, own = sharding.find_or_insert(table, KEYS, axis_name="device")
        with warnings.catch_warnings(action="ignore"):  # of a part
            _, other = hkv.find_or_insert(table, KEYS)
        return sharding.update(ADAM, table, results(own, other), gradients(own))

    return step


@pytest.mark.parametrize(
    ("results", "gradients", "kind", "message"),
    [
        (lambda own, other: other, lambda own: own.values, TypeError, "got InsertResult"),
        (lambda own, other: [own, other], lambda own: [own.values] * 2, TypeError, "InsertResult"),
        (
            lambda own, other: [own, own],
            lambda own: [own.values],
            ValueError,
            "got 1 for 2 results",
        ),
        (lambda own, other: [], lambda own: [], ValueError, "got 0 for 0"),
        (lambda own, other: own, lambda own: own.values[:2], ValueError, r"shape \[4, 4\]"),
        (lambda own, other: own, lambda own: KEYS, TypeError, "float32, bfloat16 or float16"),
    ],
)
def test_results_and_gradients_of_an_update_are_checked(results, gradients, kind, message):
    with pytest.raises(kind, match=message):
        trace(updating(results, gradients))


def test_an_update_needs_a_table_with_the_rows_of_its_optimizer():
    def step(table):
        table, result = sharding.find_or_insert(table, KEYS, axis_name="device")
        return sharding.update(hkv.optim.sgd(0.1), table, result, result.values)

    with pytest.raises(ValueError, match=r"opt\.init\(table\)"):
        trace(step)
    with pytest.raises(TypeError, match=r"sharding\.update"):
        trace(lambda table: sharding.update(ADAM, None, None, None))


def test_a_table_of_one_device_has_room_for_its_share():
    sizes = []

    def local(table):
        sizes.append(Exchange("device").local_capacity(1001))
        sizes.append(Exchange("device", replicas=True).local_capacity(1001))
        return table

    trace(local)
    assert sizes == [501, 1001]
