"""Tables that move between numbers of devices, and where the parts of a table lie."""

from __future__ import annotations

import dataclasses
from functools import cache

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
    Many,
    One,
    assert_entries,
    assert_same_bits,
    assert_seen,
    entries_of,
    sorted_by_key,
    zipf_batch,
)
from oracle_sharding import owner_of

import jax_hkv as hkv
from jax_hkv import sharding
from jax_hkv.index import Policy
from jax_hkv.sharding import Exchange, Placement

ROOMY = 8192
ON_EIGHT = Case(
    capacity=ROOMY // 8,
    options=(("choices", 2), ("admission", hkv.admission.frequency(2, width=2**16))),
)
TARGETS = {
    "eight": ON_EIGHT,
    "four": dataclasses.replace(ON_EIGHT, shape=(4,), capacity=ROOMY // 4),
    "four under pmap": dataclasses.replace(ON_EIGHT, shape=(4,), capacity=ROOMY // 4, mode="pmap"),
    "two by four": dataclasses.replace(
        ON_EIGHT, exchange=Exchange(("node", "device")), shape=(2, 4), names=("node", "device")
    ),
    "four by two, the axes exchanged": dataclasses.replace(
        ON_EIGHT, exchange=Exchange(("device", "node")), shape=(2, 4), names=("node", "device")
    ),
    "four and a further axis": dataclasses.replace(
        ON_EIGHT, shape=(4, 2), names=("device", "model"), capacity=ROOMY // 4
    ),
}


def batches(count):
    rng = np.random.default_rng(3)
    return [zipf_batch(rng, (400,)) for _ in range(count)]


@cache
def source(mode):
    many = Many(dataclasses.replace(ON_EIGHT, mode=mode))
    for batch in batches(8):
        many.step(batch)
    return sharding.export_entries(many.parts)


def fill(exported, case):
    """A table over devices with all entries, and the counts of the import."""
    many = Many(case)
    many.table, counts = sharding.import_entries(many.placement, many.table, exported)
    return many, counts


def assert_all_came(exported, tables, counts):
    assert int(counts.unique) == int(counts.inserted) == len(exported.keys) > 100
    assert int(counts.evicted) == int(counts.refused) == int(counts.hits) == 0
    assert_same_bits(
        jax.tree.map(np.asarray, entries_of(tables)),
        jax.tree.map(np.asarray, sorted_by_key(exported)._replace(counters=None)),
    )


FEW = {"four", "two by four"}  # in the run of every day


@pytest.mark.parametrize("mode", seldom(["shard_map", "pmap"], {"pmap"}))
@pytest.mark.parametrize("name", seldom(TARGETS, set(TARGETS) - FEW))
def test_entries_come_to_other_devices_with_all_that_they_have(mode, name):
    exported = source(mode)
    many, counts = fill(exported, TARGETS[name])
    assert_all_came(exported, many.parts, counts)
    for number, part in enumerate(many.parts):
        keys = sharding.export_entries(part).keys
        assert (owner_of(keys, len(many.parts)) == number).all()
        assert int(part.optimizer.shared["count"][0]) == 8


def test_entries_come_to_one_device():
    exported = source("shard_map")
    table, counts = sharding.import_entries(None, ON_EIGHT.table(ROOMY), exported)
    assert_all_came(exported, table, counts)


GOES_ON = ["four", "four under pmap", "four by two, the axes exchanged"]


@pytest.mark.parametrize("name", seldom(GOES_ON, set(GOES_ON[1:])))
def test_training_goes_on_after_resharding_as_if_nothing_had_happened(name):
    """Sightings of absent keys too: two batches let in a key that was seen once before."""
    many, _ = fill(source("shard_map"), TARGETS[name])
    same = One(ON_EIGHT, ROOMY)
    for batch in batches(8):
        same.step(batch)
    for batch in batches(14)[8:]:
        assert_seen(many.step(batch), same.step(batch))
    assert_entries(many.parts, same.table)


# --- Tables with too little room -----------------------------------------------------------------


def scored_entries(count):
    """A table of one device with keys whose scores are in no order."""
    options = (("policy", Policy.CUSTOM),)
    one = One(Case(options=options), ROOMY)
    keys = np.arange(1, count + 1, dtype=np.uint64) * GOLDEN
    scores = np.random.default_rng(1).permutation(count).astype(np.uint64) + np.uint64(2**33)
    one.step(Batch(keys, np.zeros((count, DIM), np.float32), None, scores))
    return sharding.export_entries(one.table)


@pytest.mark.parametrize("chunk", [65536, 100])
def test_a_small_table_keeps_the_entries_of_highest_score_and_counts_the_others(chunk, monkeypatch):
    monkeypatch.setattr("jax_hkv._entries._CHUNK", chunk)
    exported = scored_entries(1000)
    case = Case(shape=(4,), options=(("policy", Policy.CUSTOM),))  # a bucket on each device
    many, counts = fill(exported, case)
    expected = []
    for part in range(4):
        own = np.flatnonzero(owner_of(exported.keys, 4) == part)
        assert len(own) > 128
        expected += [*exported.keys[own[np.argsort(exported.scores[own])[-128:]]]]
    assert sorted(entries_of(many.parts).keys) == sorted(expected)
    assert int(counts.unique) == 1000
    assert int(counts.inserted) - int(counts.evicted) == 512
    assert int(counts.inserted) + int(counts.refused) == 1000


@pytest.mark.parametrize("policy", [Policy.LRU, Policy.EPOCH_LRU, Policy.EPOCH_LFU])
def test_what_has_changed_brings_a_table_for_inference_up_to_date(policy, monkeypatch):
    monkeypatch.setattr("jax_hkv._entries._CHUNK", 1000)
    opt = hkv.optim.adagrad(0.5)
    table = opt.init(hkv.create(4096, DIM, policy=policy))
    served = hkv.create(4096, DIM, policy=policy)

    def train(table, first):
        ids = np.arange(first, first + 600, dtype=np.int32)
        table, result = hkv.find_or_insert(table, ids)
        return opt.update(table, result, jnp.ones((600, DIM), jnp.float32))

    earlier = sharding.export_entries(train(table, 0))
    table = train(table, 0)
    if policy is Policy.EPOCH_LFU:
        table = hkv.advance_epoch(table)
    table = train(table, 400)
    changed = sharding.export_entries(table, changed_since=earlier)
    if policy is Policy.EPOCH_LFU:  # which counts within an epoch: that of the export comes whole
        assert sorted(changed.keys.tolist()) == list(range(1000))
        changed = sharding.export_entries(table, min_score=1 << 32)
    assert sorted(changed.keys.tolist()) == list(range(400, 1000))
    for exported in (earlier, changed):
        rows = exported._replace(optimizer={}, shared={})
        served, counts = sharding.import_entries(None, served, rows)
        assert int(counts.refused) == int(counts.evicted) == 0
    ids = np.arange(1000, dtype=np.int32)
    rows = [hkv.find(own, ids)[1].values for own in (served, table)]
    np.testing.assert_array_equal(*rows)
    assert (served.clock == table.clock).all() and (served.epoch == table.epoch).all()
    for parts in ([earlier, changed], [changed, earlier]):
        whole, counts = sharding.import_entries(
            None, opt.init(hkv.create(4096, DIM, policy=policy)), sharding.join_entries(parts)
        )
        assert int(counts.inserted) == 1000
        assert {name: leaf.tolist() for name, leaf in whole.optimizer.shared.items()} == {
            "count": [2]
        }
        np.testing.assert_array_equal(hkv.find(whole, ids)[1].values, rows[1])


@pytest.mark.parametrize("policy", [Policy.LFU, Policy.CUSTOM])
def test_scores_that_are_no_times_do_not_tell_what_has_changed(policy):
    table = hkv.create(128, DIM, policy=policy)
    earlier = sharding.export_entries(table)
    with pytest.raises(ValueError, match=f"changed_since needs .* Policy.{policy.name} do not"):
        sharding.export_entries(table, changed_since=earlier)


def test_an_increment_follows_an_export_of_the_same_table():
    table = hkv.create(128, DIM, policy=Policy.EPOCH_LRU)
    later = sharding.export_entries(hkv.advance_epoch(hkv.clear(table)))
    for own in (later, later._replace(clock=0), later._replace(epoch=0)):
        with pytest.raises(ValueError, match="changed_since must be an export of an earlier time"):
            sharding.export_entries(table, changed_since=own)
    with pytest.raises(ValueError, match="got one of 5 too: give one of them"):
        sharding.export_entries(table, changed_since=later, min_score=5)
    with pytest.raises(TypeError, match="changed_since must be what export_entries returned"):
        sharding.export_entries(table, changed_since=5)  # pyright: ignore[reportArgumentType]


def test_an_increment_is_whole_where_the_low_word_of_the_clock_began_anew():
    """Under EPOCH_LRU a score has 32 bits of the time: behind the last one comes 0."""
    ids, high = np.arange(4, dtype=np.int32), jnp.array([0xFFFFFFFE, 0], jnp.uint32)
    table = hkv.create(128, DIM, policy=Policy.EPOCH_LRU)
    index = dataclasses.replace(table.index, clock=high)
    table, _ = hkv.find_or_insert(dataclasses.replace(table, index=index), ids[:1])
    earlier = sharding.export_entries(table)
    for position in (1, 2):
        table, _ = hkv.find_or_insert(table, ids[position : position + 1])
    changed = sharding.export_entries(table, changed_since=earlier)
    assert {1, 2} <= set(changed.keys.tolist())


def test_of_entries_with_one_key_and_one_score_the_last_counts():
    ids = np.array([5, 6], np.int32)
    tables = [
        hkv.insert_or_assign(hkv.create(128, 1), ids, jnp.full((2, 1), value, jnp.float32))[0]
        for value in (1.0, 2.0)
    ]
    joined = sharding.join_entries([sharding.export_entries(table) for table in tables])
    table, _ = sharding.import_entries(None, hkv.create(128, 1), joined)
    assert hkv.find(table, ids)[1].values.tolist() == [[2.0], [2.0]]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_saved_export_is_read_by_numpy_where_it_has_the_type(dtype, tmp_path):
    table, _ = hkv.find_or_insert(hkv.create(128, DIM, dtype=dtype), np.array([5, 6], np.int32))
    exported = sharding.export_entries(table)
    sharding.save_entries(tmp_path / "entries", exported)
    read = np.load(tmp_path / "entries")["values"]
    np.testing.assert_array_equal(read.view(np.dtype(dtype)), exported.values)
    assert read.dtype == (np.float32 if dtype == jnp.float32 else np.uint16)


def test_a_score_to_export_from_that_is_none_is_named():
    table = hkv.create(128, DIM)
    for score in (-1, 2**64):
        with pytest.raises(ValueError, match="export_entries: min_score must be from 0 to"):
            sharding.export_entries(table, min_score=score)
    with pytest.raises(TypeError, match="export_entries: min_score must be an integer, got float"):
        sharding.export_entries(table, min_score=1.5)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("has_equal_scores", [False, True])
def test_a_table_of_two_candidates_comes_back_whole(has_equal_scores):
    """Entries written at once do not evict each other: many at a time would find less room.

    Nor do those of one bucket come together.
    """
    options = {"policy": Policy.CUSTOM, "choices": 2}
    count = 15_680 if has_equal_scores else 14_700
    table, ids = hkv.create(16_384, DIM, **options), np.arange(count, dtype=np.int32)
    for own in np.split(ids, 98):
        rows = jnp.zeros((len(own), DIM), jnp.float32)
        scores = np.full_like(own, 1) if has_equal_scores else own + np.int32(1)
        table, _ = hkv.insert_or_assign(table, own, rows, scores=scores)
    exported = sharding.export_entries(table)
    assert len(exported.keys) == len(ids)
    again, counts = sharding.import_entries(None, hkv.create(16_384, DIM, **options), exported)
    assert int(counts.inserted) == len(ids)
    assert int(hkv.size(again)) == len(ids)


def test_keys_that_are_present_are_overwritten():
    exported = source("shard_map")
    many, _ = fill(exported, ON_EIGHT)
    doubled = exported._replace(values=2 * exported.values)
    many.table, counts = sharding.import_entries(many.placement, many.table, doubled)
    assert int(counts.hits) == len(exported.keys) and int(counts.inserted) == 0
    np.testing.assert_array_equal(entries_of(many.parts).values, sorted_by_key(doubled).values)


def test_an_empty_table_is_exported_and_imported():
    exported = sharding.export_entries(Many(ON_EIGHT).parts)
    assert exported.keys.shape == (0,) and exported.values.shape == (0, DIM)
    many, counts = fill(exported, TARGETS["four"])
    assert [int(count) for count in counts] == [0] * 6
    assert int(hkv.size(many.table)) == 0


def test_rows_of_another_shape_are_an_error():
    table = ADAM.init(hkv.create(1024, DIM + 1))
    with pytest.raises(ValueError, match="import_entries: exported must have rows.*same dim"):
        sharding.import_entries(None, table, source("shard_map"))
    with pytest.raises(ValueError, match="optimizer"):
        sharding.import_entries(None, hkv.create(1024, DIM), source("shard_map"))


def trained(batches, **options):
    """A table after a step on each of the given arrays of ids."""
    table = ADAM.init(hkv.create(options.pop("capacity", 128), DIM, **options))
    for ids in batches:
        table, result = hkv.find_or_insert(table, np.asarray(ids, np.int32))
        table = ADAM.update(table, result, jnp.ones(result.values.shape, jnp.float32))
    return table


def test_a_live_table_goes_on_from_its_own_time_when_it_is_given_entries():
    """Else LRU would evict what comes now, and expire would erase it."""
    for policy in (Policy.LRU, Policy.EPOCH_LRU):
        live = trained([[number] for number in range(100)], policy=policy)
        live = hkv.advance_epoch(live)
        given = sharding.export_entries(trained([range(900, 910)], policy=policy))
        live, counts = sharding.import_entries(None, live, given)
        assert int(counts.inserted) == 10
        after = sharding.export_entries(live)
        assert (after.clock, after.epoch, after.shared["count"].tolist()) == (100, 1, [100])
        for number in range(1000, 1100):
            live, _ = hkv.find_or_insert(live, np.array([number], np.int32))
        assert hkv.contains(live, np.arange(1000, 1100, dtype=np.int32))[1].all()


def test_exports_of_two_times_share_what_the_later_one_has():
    """In any order of parts; the highest epoch holds by itself. A fresh table takes all of it."""
    early, late = (
        sharding.export_entries(trained([[5]] * steps))._replace(epoch=epoch)
        for steps, epoch in ((1, 7), (2, 3))
    )
    for parts in ([early, late], [late, early]):
        joined = sharding.join_entries(parts)
        assert (joined.clock, joined.epoch, joined.shared["count"].tolist()) == (2, 7, [2])
    fresh, _ = sharding.import_entries(None, trained([]), joined._replace(clock=0))
    assert fresh.optimizer.shared["count"].tolist() == [2]


def test_a_younger_table_takes_the_time_of_the_entries():
    given = sharding.export_entries(trained([[number] for number in range(30)]))
    young, _ = sharding.import_entries(None, trained([[500]]), given)
    after = sharding.export_entries(young)
    assert (after.clock, after.shared["count"].tolist()) == (30, [30])


def test_sightings_by_another_seed_say_nothing_and_are_refused(tmp_path):
    """Keys have other cells there: all would have to be seen anew, and others come in early."""
    rule = hkv.admission.frequency(2, width=64)

    def made(seed):
        return hkv.create(128, DIM, admission=rule, seed=seed)

    ids = np.arange(20, dtype=np.int32)
    own, other = (sharding.export_entries(hkv.find_or_insert(made(n), ids)[0]) for n in (0, 9))
    with pytest.raises(ValueError, match=r"import_entries: .* by seed 9, got \[4, 64\] by seed 0"):
        sharding.import_entries(None, made(9), own)
    with pytest.raises(ValueError, match=r"with the same rows.*by seeds \[0, 9\]"):
        sharding.join_entries([own, other])
    for parts in ((own, own._replace(seed=None)), (own._replace(seed=None), own)):
        assert sharding.join_entries(parts).seed == 0
    sharding.join_entries([each._replace(counters=None) for each in (own, other)])
    with pytest.raises(ValueError, match="by seed 9, got"):
        sharding.reshard(hkv.find_or_insert(made(0), ids)[0], made(9))
    sharding.save_entries(tmp_path / "entries", other)
    assert (other := sharding.load_entries(tmp_path / "entries")).seed == 9
    forgotten, _ = sharding.import_entries(None, made(9), own._replace(counters=None))
    for table, are_seen in ((sharding.import_entries(None, made(9), other)[0], True),
                            (sharding.import_entries(None, made(0), own)[0], True),
                            (forgotten, False)):  # fmt: skip
        assert hkv.is_new(hkv.find_or_insert(table, ids)[1].status).all() == are_seen


def test_sightings_are_the_higher_ones_and_stay_where_one_side_has_none():
    rule = hkv.admission.frequency(3, width=64)
    one, other = (
        sharding.export_entries(hkv.find_or_insert(table, ids)[0])
        for table, ids in (
            (hkv.create(128, DIM, admission=rule), np.array([7, 7], np.int32)),
            (hkv.create(128, DIM, admission=rule), np.array([8], np.int32)),
        )
    )
    table, _ = sharding.import_entries(None, hkv.create(128, DIM, admission=rule), one)
    table, _ = sharding.import_entries(None, table, other)
    expected = np.maximum(one.counters, other.counters)
    np.testing.assert_array_equal(table.admission.counters, expected)
    by_chance = hkv.create(128, DIM, admission=hkv.admission.probability(0.5))
    table, _ = sharding.import_entries(None, by_chance, one)
    assert table.admission.counters is None
    hkv.find_or_insert(table, np.array([9], np.int32))


def test_rows_of_another_optimizer_are_refused_by_their_names():
    """Of equal shapes; Adagrad's sums would be the momentum of SGD."""
    exported = sharding.export_entries(hkv.optim.adagrad(0.1).init(hkv.create(128, DIM)))
    given = r"got .* optimizer \{'sum_of_squares': 'float32\[n, 4\]'\} and shared .*count.*renamed"
    for other in (hkv.optim.sgd(0.1, momentum=0.9), hkv.optim.sparse(optax.adagrad(0.1))):
        table = other.init(hkv.create(128, DIM))
        with pytest.raises(ValueError, match=given):
            sharding.import_entries(None, table, exported)
        assert table.values.is_deleted() is False


def test_rows_of_an_optimizer_that_means_the_same_come_under_other_names():
    """As the error says: what optax began a native optimizer goes on with, its count cast."""
    optax_adam, native = hkv.optim.sparse(optax.adam(0.1)), hkv.optim.adam(0.1)
    ids, gradients = np.arange(20, dtype=np.int32), jnp.ones((20, DIM), jnp.float32)

    def step(opt, table):
        table, result = hkv.find_or_insert(table, ids)
        return opt.update(table, result, gradients)

    table = step(optax_adam, step(optax_adam, optax_adam.init(hkv.create(128, DIM))))
    exported = sharding.export_entries(table)
    assert set(exported.optimizer) == {"0.mu", "0.nu"} and set(exported.shared) == {"0.count"}
    renamed = exported._replace(
        optimizer={name.removeprefix("0."): leaf for name, leaf in exported.optimizer.items()},
        shared={"count": exported.shared["0.count"].astype(np.uint32)},
    )
    moved, _ = sharding.import_entries(None, native.init(hkv.create(1024, DIM)), renamed)
    rows = [hkv.find(own, ids)[1].values for own in (step(native, moved), step(optax_adam, table))]
    np.testing.assert_allclose(*rows, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["optimizer", "shared"])
def test_optimizer_rows_without_names_are_an_error(name):
    exported = sharding.export_entries(hkv.create(128, DIM))._replace(**{name: ()})
    message = rf"\.{name} must be a dict of arrays by their names, got tuple: give \{{\}} for none"
    with pytest.raises(TypeError, match=f"import_entries: exported{message}"):
        sharding.import_entries(None, hkv.create(128, DIM), exported)
    with pytest.raises(TypeError, match=rf"join_entries: parts\[0\]{message}"):
        sharding.join_entries([exported])


def test_entries_are_imported_for_inference_as_the_error_says():
    exported = sharding.export_entries(trained([range(20)]))
    serving = hkv.create(128, DIM, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match=r"optimizer=\{\}, shared=\{\}.*values=exported"):
        sharding.import_entries(None, serving, exported)
    exported = exported._replace(
        optimizer={}, shared={}, values=exported.values.astype(jnp.bfloat16)
    )
    serving, counts = sharding.import_entries(None, serving, exported)
    assert int(counts.inserted) == 20
    _, found = hkv.find(serving, hkv.Keys.from_numpy(exported.keys))
    np.testing.assert_array_equal(found.values, exported.values.astype(np.float32))


@pytest.mark.parametrize(
    "opt", [ADAM, hkv.optim.sparse(optax.adagrad(0.1))], ids=["native", "optax"]
)
@pytest.mark.parametrize("devices", [1, 4])
def test_a_table_that_trains_starts_from_rows_alone_as_the_error_says(devices, opt):
    """Optimizer rows are made afterwards, on one device or on several."""
    rows = sharding.export_entries(trained([range(20)]))._replace(optimizer={}, shared={})
    placement = None if devices == 1 else TARGETS["four"].placement

    def made(make):
        return make() if placement is None else placement.create(make)

    table = made(lambda: opt.init(hkv.create(512, DIM)))
    with pytest.raises(ValueError, match=r"without an optimizer.*opt\.init.*placement\.step\(la"):
        sharding.import_entries(placement, table, rows)
    table, counts = sharding.import_entries(placement, made(lambda: hkv.create(512, DIM)), rows)
    assert int(counts.inserted) == 20
    if placement is None:
        (part,) = parts = [opt.init(table)]
    else:
        table, _ = placement.step(lambda table: (opt.init(table), None))(table)
        part, *_ = parts = placement.shards(table)
    after = sharding.export_entries(parts)
    order, expected = np.argsort(after.keys), np.argsort(rows.keys)
    np.testing.assert_array_equal(after.keys[order], rows.keys[expected])
    np.testing.assert_array_equal(after.values[order], rows.values[expected])
    assert set(after.optimizer) == set(opt.init(hkv.create(128, DIM)).optimizer.rows)
    assert part.optimizer.skipped.shape == (1,)


def test_what_is_no_table_is_an_error():
    with pytest.raises(TypeError, match=r"sharding\.export_entries"):
        sharding.export_entries([np.zeros(3)])
    with pytest.raises(ValueError, match="got none"):
        sharding.export_entries([])


# --- Where parts lie -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", seldom(TARGETS, set(TARGETS) - FEW))
def test_parts_that_are_joined_are_the_table(name):
    many = Many(TARGETS[name])
    many.step(batches(1)[0])
    again = many.placement.join(many.parts)
    assert_same_bits(again, many.table)
    shardings = [leaf.sharding.device_set for leaf in jax.tree.leaves(again)]
    assert shardings == [leaf.sharding.device_set for leaf in jax.tree.leaves(many.table)]
    many.table = again
    many.step(batches(1)[0])


def test_digests_see_every_leaf():
    placement = Placement(jax.make_mesh((2,), ("device",), devices=jax.devices("cpu")[:2]))
    state = {"key": jax.random.key(0), "half": jnp.ones((4,), jnp.bfloat16), "on": jnp.bool_(True)}
    first = placement.digests(state)
    assert first.shape == (2, 2) and (first[0] == first[1]).all()
    for name, other in {"key": jax.random.key(1), "on": jnp.bool_(False)}.items():
        assert (placement.digests({**state, name: other}) != first).any()


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_digests_are_compiled_once(mode, monkeypatch):
    many = Many(Case(shape=(2,), mode=mode))
    first = many.placement.digests(many.table)

    def traced(*_):
        raise AssertionError("traced again")

    monkeypatch.setattr("jax_hkv._placement.digest_over", traced)
    again = Placement(many.placement.mesh, mode=mode).digests(many.table)
    np.testing.assert_array_equal(again, first)


def test_a_batch_of_wide_integers_that_would_be_cut_is_an_error():
    if jax.config.jax_enable_x64:
        pytest.skip("nothing is cut with x64 on")
    placement = Placement(jax.make_mesh((2,), ("device",), devices=jax.devices("cpu")[:2]))
    wide = np.array([5, 2**40])
    with pytest.raises(TypeError, match="Placement.put: .*int64.*Keys.from_numpy"):
        placement.put({"ids": wide})
    assert placement.put(np.array([5, -6])).tolist() == [5, -6]
    assert placement.put(hkv.Keys.from_numpy(wide)).to_numpy().tolist() == wide.tolist()


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_a_batch_that_cannot_be_split_is_an_error(mode):
    placement = Placement(
        jax.make_mesh((4,), ("device",), devices=jax.devices("cpu")[:4]), mode=mode
    )
    with pytest.raises(ValueError, match=r"multiple of the devices, 4, got shape \[6, 2\].*valid="):
        placement.put(np.zeros((6, 2)))
    assert placement.put(np.zeros((8, 0))).size == 0


def test_single_numbers_and_random_keys_of_a_batch_are_for_all_devices():
    placement = Placement(jax.make_mesh((4,), ("device",), devices=jax.devices("cpu")[:4]))
    rate, key = placement.put((np.float32(0.5), jax.random.key(1)))
    assert rate == np.float32(0.5) and key.shape == ()


def test_sightings_are_the_same_after_moving_twice():
    once, _ = fill(source("shard_map"), TARGETS["four"])
    twice, _ = fill(sharding.export_entries(once.parts), ON_EIGHT)
    for part in twice.parts:
        np.testing.assert_array_equal(part.admission.counters, source("shard_map").counters)


def test_every_replica_gets_all_entries():
    exported = source("shard_map")
    placement = Placement(dataclasses.replace(ON_EIGHT, shape=(2,)).mesh)
    options = dict(ON_EIGHT.options)
    table = placement.create(lambda: ADAM.init(hkv.create(ROOMY, DIM, replicas=True, **options)))
    table, counts = sharding.import_entries(placement, table, exported)
    assert int(counts.inserted) == 2 * len(exported.keys)
    assert placement.replicas_agree(table)
    parts = placement.shards(table)
    for copy in map(sharding.export_entries, (parts[1], parts)):
        assert sorted(copy.keys.tolist()) == sorted(exported.keys.tolist())


def test_sightings_of_another_shape_are_refused():
    rule = hkv.admission.frequency(2, width=64)
    table = ADAM.init(hkv.create(128, DIM, admission=rule))
    with pytest.raises(ValueError, match="sightings like the table's.*forgets them"):
        sharding.import_entries(None, table, source("shard_map"))


def test_saved_entries_keep_their_epoch_and_no_half_of_a_file_is_found(tmp_path, monkeypatch):
    table = hkv.advance_epoch(hkv.create(128, DIM, policy=hkv.Policy.EPOCH_LRU), 7)
    exported = sharding.export_entries(hkv.find_or_insert(table, np.arange(3, dtype=np.int32))[0])
    sharding.save_entries(tmp_path / "entries", exported)
    again = sharding.load_entries(tmp_path / "entries")
    assert (again.clock, again.epoch) == (exported.clock, exported.epoch) == (1, 7)

    def full(file, **arrays):
        file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="no space"):
        sharding.save_entries(tmp_path / "other", exported)
    assert not (tmp_path / "other").exists()


def test_scores_of_another_policy_are_refused_unless_they_are_made_its_own(tmp_path):
    """Counts of LFU would be the oldest times of LRU."""
    keys = np.array([5, 6, 6], np.int32)
    table, _ = hkv.find_or_insert(hkv.create(128, 2, policy=hkv.Policy.LFU), keys)
    exported = sharding.export_entries(table)
    sharding.save_entries(tmp_path / "entries", exported)
    exported = sharding.load_entries(tmp_path / "entries")
    assert exported.policy == hkv.Policy.LFU
    message = r"import_entries: exported must have scores of Policy\.LRU .*got those of Policy\.LFU"
    with pytest.raises(ValueError, match=message):
        sharding.import_entries(None, hkv.create(128, 2), exported)
    times = exported._replace(scores=exported.scores + np.uint64(100), policy=int(hkv.Policy.LRU))
    other, counts = sharding.import_entries(None, hkv.create(128, 2), times)
    assert int(counts.inserted) == 2
    assert sorted(sharding.export_entries(other).scores.tolist()) == [101, 102]
    with pytest.raises(ValueError, match=r"join_entries: parts .* and policy, got .*Policy\.LRU"):
        sharding.join_entries([exported, times])
    with pytest.raises(ValueError, match=r"exported\.policy must be from 0 to 4, got 7"):
        sharding.import_entries(None, other, times._replace(policy=7))


def test_an_lru_table_goes_on_from_the_latest_score_that_it_is_given(tmp_path):
    """`import_batch` keeps scores of another table's time, and one by hand may have any."""
    small, _ = hkv.find_or_insert(hkv.create(128, 2), np.arange(100, dtype=np.int32))
    for _ in range(5):
        small, _ = hkv.find_or_insert(small, np.arange(8, dtype=np.int32))
    store, _ = hkv.import_batch(hkv.create(128, 2), hkv.export_batch(small, 0, 128))
    exported = sharding.export_entries(store)
    assert exported.clock == 1 and exported.scores.max() == 6
    copy, counts = sharding.import_entries(None, hkv.create(128, 2), exported)
    assert int(counts.inserted) == 100 and copy.clock.tolist() == [6, 0]
    far = exported._replace(scores=exported.scores + np.uint64(2**40))
    copy, _ = sharding.import_entries(None, hkv.create(128, 2), far)
    assert copy.clock.tolist() == [6, 2**8]
    for first in range(1000, 1400, 100):  # what is inserted is newer, so those have to go
        copy, _ = hkv.find_or_insert(copy, np.arange(first, first + 100, dtype=np.int32))
    assert not hkv.contains(copy, np.arange(100, dtype=np.int32))[1].any()
    endless = exported._replace(scores=exported.scores + np.uint64(2**62))
    with pytest.raises(ValueError, match=r"scores below 2\*\*62 under Policy\.LRU.*scores of 0"):
        sharding.import_entries(None, hkv.create(128, 2), endless)
    last = exported._replace(scores=np.minimum(exported.scores, 1) + np.uint64(2**62 - 2))
    copy, _ = sharding.import_entries(None, hkv.create(128, 2), last)
    copy, _ = hkv.find_or_insert(copy, np.array([5], np.int32))
    again = sharding.export_entries(copy)  # time goes on, and comes back
    assert again.clock == 2**62 == again.scores.max()
    copy, counts = sharding.import_entries(None, hkv.create(128, 2), again)
    assert int(counts.inserted) == len(again.keys) and copy.clock.tolist() == [0, 2**30]


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_all_parts_go_on_from_the_same_score(mode):
    mesh = jax.make_mesh((4,), ("device",), devices=jax.devices("cpu")[:4])
    placement = sharding.Placement(mesh, mode=mode)
    table, _ = hkv.find_or_insert(hkv.create(256, 2), np.arange(100, dtype=np.int32))
    exported = sharding.export_entries(table)
    scores = np.arange(100, dtype=np.uint64) + np.uint64(50)
    spread = placement.create(lambda: hkv.create(128, 2))
    spread, _ = sharding.import_entries(placement, spread, exported._replace(scores=scores))
    assert [part.clock.tolist() for part in placement.shards(spread)] == [[149, 0]] * 4


def test_files_keep_names_that_are_none_of_files(tmp_path):
    """Names come from an optimizer's state."""
    exported = sharding.export_entries(trained([range(20)]))
    (rows,) = {leaf.shape for leaf in exported.optimizer.values()}
    names = ["x", "x.npy", "a=b", "../c", "", "optimizer.x", "file", "e\0"]
    leaves = {name: np.full(rows, number, np.float32) for number, name in enumerate(names)}
    sharding.save_entries(tmp_path / "entries", exported._replace(optimizer=leaves))
    loaded = sharding.load_entries(tmp_path / "entries")
    assert loaded.optimizer.keys() == leaves.keys()
    jax.tree.map(np.testing.assert_array_equal, loaded, exported._replace(optimizer=leaves))
    with pytest.raises(TypeError, match=r"save_entries: exported\.optimizer must be a dict"):
        sharding.save_entries(tmp_path / "entries", exported._replace(optimizer=()))


def test_a_table_that_was_made_otherwise_is_named():
    """Ids without a row would start otherwise from there on."""
    state = {"users": hkv.create(128, DIM, seed=1)}
    others = {
        "seed": ({"seed": 2}, r"1, got 2"),
        "initializer": (
            {"seed": 1, "init": hkv.initializers.zeros()},
            r"normal\(0.0, 0.5\), got constant\(0.0\)",
        ),
        "choices": ({"seed": 1, "choices": 2}, "1, got 2"),
    }
    for name, (options, got) in others.items():
        message = f"fresh must have the {name} of state in the table users, {got}.*: make it by"
        with pytest.raises(ValueError, match=message):
            sharding.reshard(state, {"users": hkv.create(256, DIM, **options)})


def test_a_placement_that_was_left_out_is_named():
    placement = sharding.Placement(jax.make_mesh((2,), ("d",), devices=jax.devices("cpu")[:2]))
    spread = {"users": placement.create(lambda: hkv.create(128, DIM))}
    one = {"users": hkv.create(256, DIM)}
    with pytest.raises(
        TypeError, match=r"state must .* source is None, got a table users .*source="
    ):
        sharding.reshard(spread, one)
    with pytest.raises(
        TypeError, match=r"fresh must .* target is None, got a table users .*target="
    ):
        sharding.reshard(one, spread)
