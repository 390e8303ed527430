"""What a review of tables over devices found, and what users of them do wrong."""

from __future__ import annotations

import copy

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from combinations import each, seldom
from flax import nnx, serialization
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from many_devices import ADAM, turns
from oracle_sharding import owner_of
from test_sharding_traffic import mesh_of, traffic_of

import jax_hkv as hkv
from jax_hkv import sharding
from jax_hkv.sharding import Exchange, Placement


def zipf(rng, *shape):
    return hkv.Keys.from_numpy(rng.zipf(1.3, shape).astype(np.uint64))


@pytest.mark.parametrize("pooled", [False, True])
def test_reads_in_a_typed_shard_map_may_take_a_second_round(pooled, rng):
    """30."""
    placement = Placement(mesh_of(8))
    table = placement.create(lambda: hkv.create(1024, 4))
    find = sharding.find_pooled if pooled else sharding.find

    def read(table, words):
        return find(table, hkv.Keys(words), axis_name="device", fill="initial")[1].values

    keys = zipf(rng, 8 * 40, 5)
    spec = P("device")
    typed = jax.shard_map(read, mesh=placement.mesh, in_specs=(spec, spec), out_specs=spec)
    one = hkv.create(128, 4)
    module = hkv.find_pooled if pooled else hkv.find
    expected = module(one, keys, fill="initial")[1].values
    actual = jax.jit(typed)(table, placement.put(keys.words))
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_the_measured_skew_is_room_enough_for_keys_that_are_not_merged(rng):
    ids = zipf(rng, 8, 64, 50)
    skew = max(sharding.skew_in(ids[device], 8) for device in range(8))
    distinct = max(sharding.distinct_in(ids[device]) for device in range(8))
    placement = Placement(mesh_of(8))
    words = ids.words.reshape(8 * 64, 50, 2)
    for options in ({"partial": True}, {"deduplicate": False, "partial": False}):
        exchange = Exchange("device", distinct=distinct, slack=skew, **options)

        def step(table, words, exchange=exchange):
            table, result = sharding.find_or_insert_pooled(
                table, hkv.Keys(words), axis_name=exchange
            )
            return table, result.overflow

        table = placement.create(lambda: hkv.create(4096, 4))
        overflow = placement.step(step)(table, placement.put(words))[1]
        assert int(overflow) == 0 and overflow.dtype == jnp.int32


@pytest.mark.parametrize(("hotness", "pays"), [(4, False), (100, True)])
def test_what_moves_fewer_bytes_is_chosen_on_two_levels_too(hotness, pays):
    axes, shape = ("node", "device"), (256, hotness)
    sent = {
        partial: traffic_of(
            mesh_of(2, 4), Exchange(axes, partial=partial, strict=True), shape, pooled=True
        ).sent()
        for partial in (None, True, False)
    }
    assert (sent[True] < sent[False]) == pays
    assert sent[None] == min(sent.values())


@pytest.mark.parametrize("devices", [1, 7, 16, 17, 1000, 2**20])
def test_owners_among_any_number_of_devices_are_those_of_the_oracle(devices, rng):
    words = rng.integers(0, 2**64, 3000, np.uint64)
    found = sharding.owners(hkv.Keys.from_numpy(words), devices)
    np.testing.assert_array_equal(found, owner_of(words, devices))


def bags_of(rng, count):
    lists = [rng.integers(0, 50, rng.integers(0, 4)).tolist() for _ in range(count)]
    return hkv.Jagged.from_lists(lists, capacity=4 * count)


def test_a_jagged_for_each_device_is_put_and_one_for_all_is_refused(rng):
    placement = Placement(mesh_of(2))
    bags = bags_of(rng, 5)

    def read(table, bags):
        return sharding.find_pooled(table, bags, axis_name="device")[1].values

    table = placement.create(lambda: hkv.create(128, 4))
    rows = placement.run(read)(table, placement.put(bags.for_parts(2, batch=6)))
    _, expected = hkv.find_pooled(hkv.create(128, 4), bags)
    expected = np.concatenate([expected.values, np.zeros((1, 4), np.float32)])  # of no ids
    np.testing.assert_allclose(rows, expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"one for each of 2 devices.*for_parts\(2, capacity="):
        placement.put(hkv.Jagged.from_lists([[1]] * 7, capacity=28))


def test_an_evaluation_that_returns_one_number_is_an_error():
    placement = Placement(mesh_of(2))
    table = placement.create(lambda: hkv.create(128, 4))
    with pytest.raises(ValueError, match=r"Placement\.run.*return it as x\[None\]"):
        placement.run(lambda table: hkv.size(table))(table)


def test_a_batch_that_needs_too_many_places_is_an_error():
    placement = Placement(mesh_of(8))
    table = jax.eval_shape(lambda: placement.create(lambda: hkv.create(128, 1)))
    keys = jax.ShapeDtypeStruct((2**33, 2), jnp.uint32)

    def step(table, words):
        return sharding.find(table, hkv.Keys(words), axis_name="device")[0], 0

    with pytest.raises(ValueError, match="more than 2\\*\\*31 places: give smaller batches"):
        placement.step(step).lower(table, keys)


class Twice(nn.Module):
    """One table whose exchange has room, and one whose exchange has not."""

    @nn.compact
    def __call__(self, ids, *, train=False):
        roomy = hkv.linen.Embed(4096, 4, optimizer=ADAM, axis_name="device")
        tight = Exchange("device", distinct=0.01, slack=0.1, strict=True)
        strict = hkv.linen.Embed(4096, 4, optimizer=ADAM, axis_name=tight)
        rows = roomy(ids, train=train) + strict(ids, train=train)
        return nn.Dense(1)(rows)[..., 0]


def test_a_step_that_a_strict_exchange_stops_updates_nothing_and_keeps_its_loss_scale(rng):
    placement = Placement(mesh_of(8))
    keys = hkv.Keys.from_numpy(rng.permutation(8 * 100).astype(np.int64))
    scale = hkv.optim.LossScale.create(8.0)
    state = placement.create(
        lambda: hkv.linen.TrainState.create(
            Twice(), jax.random.key(0), keys[:100], tx=optax.adam(1e-2), loss_scale=scale
        )
    )
    params = jax.tree.map(np.asarray, state.params)
    step = hkv.linen.train_step(
        lambda apply, ids: jnp.mean(jnp.square(apply(ids, train=True) - 1.0)), placement=placement
    )
    with pytest.raises(sharding.ExchangeOverflow) as caught:
        step(state, placement.put(keys))
    after, info = caught.value.outputs
    jax.tree.map(np.testing.assert_array_equal, params, jax.tree.map(np.asarray, after.params))
    assert (float(after.loss_scale.scale), int(after.loss_scale.good_steps)) == (8.0, 0)
    inserted = {where: int(own.inserted) for where, own in info.tables.items()}
    assert inserted == {"Embed_0/table": 800, "Embed_1/table": 0}
    table = after.tables["Embed_0"]["table"]
    assert int(np.asarray(table.optimizer.shared["count"]).max()) == 0


class Mean(nnx.Variable):
    """A statistic of a model's own."""


class Averaging(nnx.Module):
    def __init__(self, rngs):
        self.rows = hkv.nnx.Embed(4096, 4, optimizer=ADAM, axis_name="device")
        self.dense = nnx.Linear(4, 1, rngs=rngs)
        self.mean = Mean(jnp.zeros(()))

    def __call__(self, ids, *, train=False):
        rows = self.rows(ids, train=train)
        if train:
            self.mean.set_value(0.5 * self.mean.get_value() + jnp.mean(rows))
            self.sow(nnx.Intermediate, "seen", rows)
        return self.dense(rows)[..., 0]


def test_statistics_of_an_nnx_model_are_averaged_and_what_it_sows_is_dropped(rng):
    placement = Placement(mesh_of(4))
    state = hkv.nnx.place(
        lambda: hkv.nnx.TrainState(Averaging(nnx.Rngs(0)), optax.sgd(0.1)), placement
    )
    step = hkv.nnx.train_step(
        lambda model, ids: jnp.mean(jnp.square(model(ids, train=True) - 1.0)), placement=placement
    )
    for _ in range(2):
        step(state, placement.put(zipf(rng, 64)))
    parts = [float(part.data) for part in state.model.mean.get_value().addressable_shards]
    assert len(set(parts)) == 1 and parts[0] != 0
    assert not hasattr(state.model, "seen")


def test_stale_rows_of_replicas_are_counted_once(rng):
    placement = Placement(mesh_of(4))
    exchange = Exchange("device", replicas=True)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids, *, train=False):
            layer = hkv.linen.Embed(128, 4, optimizer=ADAM, axis_name=exchange)
            return turns(layer, (ids, ids + 1000), train=train)  # the first ids lose their slots

    ids = np.arange(4 * 32, dtype=np.int32)
    state = placement.create(
        lambda: hkv.linen.TrainState.create(
            Model(), jax.random.key(0), jnp.zeros((32,), jnp.int32), tx=optax.sgd(0.1)
        )
    )
    step = hkv.linen.train_step(
        lambda apply, ids: jnp.mean(apply(ids, train=True)), placement=placement
    )
    _, info = step(state, placement.put(ids))
    assert int(info.tables["Embed_0/table"].skipped) == 128


def placement_of_four(kind):
    devices = jax.devices("cpu")[:4]
    return Placement(
        jax.make_mesh((4,), ("device",), axis_types=(AxisType[kind],), devices=devices)
    )


def epoch_table():
    return ADAM.init(hkv.create(1024, 4, policy=hkv.Policy.EPOCH_LRU))


# How an epoch is set between the steps of a table over several devices.
ADVANCES = {
    "next": lambda table: hkv.advance_epoch(table),
    "number": lambda table: hkv.advance_epoch(table, 5),
    "array": lambda table: hkv.advance_epoch(table, jnp.uint32(5)),
    "jitted": jax.jit(lambda table: hkv.advance_epoch(table, 5)),
    "traced": lambda table: jax.jit(hkv.advance_epoch)(table, 5),
}


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("name", ADVANCES)
def test_a_step_goes_on_in_another_epoch_without_being_traced_again(name, kind):
    placement = placement_of_four(kind)
    traces = []

    def step(table, keys):
        traces.append(1)
        table, result = sharding.find_or_insert(table, keys, axis_name="device")
        return sharding.update(ADAM, table, result, result.values), result.counts.hits

    step = placement.step(step)
    keys = placement.put(hkv.Keys.from_numpy(np.arange(64)))
    table, _ = step(placement.create(epoch_table), keys)
    before = table.epoch
    table = ADVANCES[name](table)
    assert (table.epoch.sharding, jax.typeof(table.epoch)) == (before.sharding, jax.typeof(before))
    np.testing.assert_array_equal(table.epoch, [1 if name == "next" else 5] * 4)
    table, hits = step(table, keys)
    assert int(hits) == 64 and len(traces) == 1


@pytest.mark.parametrize("epoch", [None, 5, "traced"])
def test_a_scan_over_devices_may_set_the_epoch(epoch):
    placement = Placement(mesh_of(4))
    spec = P("device")

    def run(table, numbers):
        def turn(table, number):
            return hkv.advance_epoch(table, number if epoch == "traced" else epoch), None

        return jax.lax.scan(turn, table, numbers)[0]

    run = jax.shard_map(run, mesh=placement.mesh, in_specs=(spec, P()), out_specs=spec)
    table = jax.jit(run)(placement.create(epoch_table), jnp.array([3, 7], jnp.uint32))
    np.testing.assert_array_equal(table.epoch, [{None: 2, 5: 5, "traced": 7}[epoch]] * 4)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_tables_of_a_state_go_on_in_another_epoch(kind):
    placement = placement_of_four(kind)
    policy = hkv.Policy.EPOCH_LFU
    model = hkv.linen.Embed(1024, 4, policy=policy, optimizer=ADAM, axis_name="device")
    ids = np.arange(64, dtype=np.int32)
    state = placement.create(
        lambda: hkv.linen.TrainState.create(
            model, jax.random.key(0), jnp.asarray(ids[:16]), tx=optax.sgd(0.1)
        )
    )
    step = hkv.linen.train_step(
        lambda apply, ids: jnp.mean(apply(ids, train=True)), placement=placement
    )
    ids = placement.put(ids)
    state, _ = step(state, ids)
    state, info = step(state.map_tables(lambda table: hkv.advance_epoch(table, 9)), ids)
    (table,) = jax.tree.leaves(state.tables, is_leaf=lambda leaf: isinstance(leaf, hkv.Table))
    np.testing.assert_array_equal(table.epoch, [9] * 4)
    assert [int(own.hits) for own in info.tables.values()] == [64]


@pytest.mark.parametrize("apply", [0.5, jnp.int32(1)])
def test_whether_a_step_over_devices_is_applied_is_one_bool(apply):
    placement = Placement(mesh_of(2))

    def step(table, keys):
        table, result = sharding.find_or_insert(table, keys, axis_name="device")
        return sharding.update(ADAM, table, result, result.values, apply=apply), 0

    table = placement.create(epoch_table)
    with pytest.raises(TypeError, match=r"sharding\.update: apply must be one bool"):
        placement.step(step)(table, placement.put(hkv.Keys.from_numpy(np.arange(4))))


# What people who meet the library get wrong


def one_part(placement, capacity=1024):
    return placement.create(lambda: hkv.create(capacity, 4))


def misplaced_in(placement, table, axis_name="device"):
    count = placement.run(lambda table: sharding.misplaced(table, axis_name=axis_name)[None])
    return np.asarray(count(table)).tolist()


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_keys_on_a_device_that_does_not_own_them_are_counted(mode, rng):
    """An operation of one device, called on a part, puts keys where nobody looks for them."""
    placement = Placement(mesh_of(4), mode=mode)
    keys = hkv.Keys.from_numpy(rng.integers(0, 2**63, 512))
    own = np.asarray(sharding.owners(keys, 4))
    foreign = int((own != np.repeat(np.arange(4), 128)).sum())
    insert = placement.step(
        lambda table, keys: (
            hkv.insert_or_assign(table, keys, jnp.ones((*keys.shape, 4), jnp.float32))[0],
            None,
        )
    )
    table = insert(one_part(placement), placement.put(keys))[0]
    assert np.ravel(misplaced_in(placement, table)).tolist() == 4 * [foreign] and foreign > 300
    look_up = placement.step(
        lambda table, keys: (sharding.find_or_insert(table, keys, axis_name="device")[0], None)
    )
    table = look_up(one_part(placement), placement.put(keys))[0]
    assert not np.any(misplaced_in(placement, table))


def test_axes_in_another_order_leave_keys_with_others(rng):
    mesh = jax.make_mesh((2, 2), ("node", "device"), devices=jax.devices()[:4])
    placement = Placement(mesh)
    keys = placement.put(hkv.Keys.from_numpy(rng.integers(0, 2**63, 512)))
    swapped = ("device", "node")
    step = placement.step(
        lambda table, keys: (sharding.find_or_insert(table, keys, axis_name=swapped)[0], None)
    )
    table = step(one_part(placement), keys)[0]
    assert not np.any(misplaced_in(placement, table, swapped))
    assert np.all(np.asarray(misplaced_in(placement, table, ("node", "device"))) > 200)


def test_an_abstract_state_is_what_orbax_restores_into(tmp_path, rng):
    """With a state beside the table, and no second table in memory."""
    placement = Placement(mesh_of(4))

    def make():
        return {"table": ADAM.init(hkv.create(1024, 4)), "step": jnp.int32(0)}

    step = placement.step(
        lambda state, keys: (
            {
                "table": sharding.find_or_insert(state["table"], keys, axis_name="device")[0],
                "step": state["step"] + 1,
            },
            None,
        )
    )
    keys = placement.put(hkv.Keys.from_numpy(rng.integers(0, 2**63, 512)))
    state, _ = step(placement.create(make), keys)
    target = placement.abstract(make)
    for leaf, own in zip(jax.tree.leaves(target), jax.tree.leaves(state), strict=True):
        assert (leaf.shape, leaf.dtype) == (own.shape, own.dtype)
        assert isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding.is_equivalent_to(
            own.sharding, own.ndim
        )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", target)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert int(step(restored, keys)[0]["step"]) == 2
    with pytest.raises(ValueError, match="abstract: mode must be 'shard_map', got 'pmap'"):
        Placement(mesh_of(4), mode="pmap").abstract(make)


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_a_step_takes_stacked_tables_and_is_copied_as_a_function(mode, rng):
    placement = Placement(mesh_of(4), mode=mode)

    def make():
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *[hkv.create(256, 4)] * 3)

    def all_of_them(tables, keys):
        def one(_, table):
            return None, sharding.find_or_insert(table, keys, axis_name="device")[0]

        return jax.lax.scan(one, None, tables)[1], None

    step = placement.step(all_of_them, donate=False)
    keys = placement.put(hkv.Keys.from_numpy(rng.integers(0, 2**63, 64)))
    tables = placement.create(make)
    for own in (step, copy.copy(step), copy.deepcopy(step)):
        after, _ = own(tables, keys)
        assert int(jnp.sum(after.occupancy)) == 3 * 64
    assert "all_to_all" in step.lower(tables, keys).as_text()


def test_bags_of_unequal_capacity_are_refused():
    """One after the other their ids would go to other devices, or to none."""
    bags = [hkv.Jagged.from_lists([[1, 2], [3]], capacity=own) for own in (8, 24, 8, 24)]
    with pytest.raises(ValueError, match=r"batches must have arrays of equal shapes.*device 1"):
        sharding.concatenate(bags)


WRONG = {
    "a mesh that is none": (
        lambda p: Placement(4), TypeError, "mesh must be a jax.sharding.Mesh, got int"),
    "a state that is made": (
        lambda p: p.create(hkv.create(128, 4)), TypeError, "make must be a function .* got Table"),
    "a target that is made": (
        lambda p: p.abstract(hkv.create(128, 4)), TypeError, "abstract: make must be .* got Table"),
    "an axis by its number": (
        lambda p: Placement(p.mesh, 0), ValueError, r"axis_name must .* \('device',\), got 0"),
    "a step that is none": (
        lambda p: p.step(one_part(p)), TypeError, r"step: fn must be a function .* got Table: st"),
    "a read that is none": (
        lambda p: p.run(one_part(p)), TypeError, r"Placement\.run: fn must be .* got Table"),
    "ids that JAX would cut": (
        lambda p: p.step(lambda t, i: (t, None))(one_part(p), np.arange(4) * 2**40),
        TypeError, r"Placement\.step: the batch has a NumPy int64 array"),
    "a read of ids that JAX would cut": (
        lambda p: p.run(lambda t, i: t.clock)(one_part(p), np.arange(4) * 2**40),
        TypeError, r"Placement\.run: the batch has a NumPy int64 array"),
    "a table of one device": (
        lambda p: p.step(lambda t: (t, None))(hkv.create(128, 4)),
        TypeError, r"spread over the 4 devices .*\[2\], which .* make it by placement\.create"),
    "a step without a report": (
        lambda p: p.step(lambda t: t)(one_part(p)),
        TypeError, r"must return a plain tuple \(state, report\), got Table"),
    "a table on other devices": (
        lambda p: Placement(mesh_of(2)).shards(one_part(p)),
        ValueError, "on the 2 devices of the mesh .*got an array on 4"),
    "a table of one device, in parts": (
        lambda p: p.shards(hkv.create(128, 4)), ValueError, "got an array on 1"),
    "a part too few": (
        lambda p: p.join(p.shards(one_part(p))[:3]), ValueError, "this process's 4 parts, got 3"),
    "a flag that is none": (
        lambda p: Exchange("device", strict="no"), TypeError, "strict must be True or False, got"),
    "a choice that is none": (
        lambda p: Exchange("device", partial=1), TypeError, "True or False or None, got int 1"),
    "arguments in another order": (
        lambda p: sharding.import_entries(one_part(p), p, None),
        TypeError, r"placement must be .* got Table: the order is"),
    "a summary of all parts": (
        lambda p: hkv.metrics.summarize(one_part(p)),
        TypeError, "metrics.summarize: table must be that of one device"),
    "optimizer rows of all parts": (
        lambda p: hkv.optim.adam(0.1).init(one_part(p)),
        TypeError, "optim.init: table must be that of one device"),
    "optax's rows of all parts": (
        lambda p: hkv.optim.sparse(optax.sgd(0.1)).init(one_part(p)),
        TypeError, "optim.init: table must be that of one device"),
    "entries that are none": (
        lambda p: sharding.import_entries(p, one_part(p), {"keys": []}),
        TypeError, r"exported must be what .* got dict: .*Exported\(\*\*restored\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_what_is_wrong_with_a_placement_is_named(name, mode):
    if name.endswith("JAX would cut") and jax.config.jax_enable_x64:
        pytest.skip("with 64-bit numbers JAX cuts none")
    call, kind, message = WRONG[name]
    placement = Placement(mesh_of(4), mode=mode)
    with pytest.raises(kind, match=message):
        call(placement)


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_the_slots_of_all_devices_are_the_capacity(mode, rng):
    placement = Placement(mesh_of(4), mode=mode)
    ids = rng.permutation(1024).astype(np.int32)
    look_up = placement.step(
        lambda table, ids: (sharding.find_or_insert(table, ids, axis_name="device")[0], None)
    )
    table, _ = look_up(one_part(placement), placement.put(ids))
    assert table.capacity == 4096 and int(hkv.size(table)) == 1024
    assert float(hkv.load_factor(table)) == 0.25


def test_what_a_batch_without_keys_is_expected_to_need_is_taken():
    for ids, valid in ((np.arange(0), None), (np.arange(3), np.zeros(3, bool))):
        keys = hkv.Keys.from_numpy(ids)
        distinct = sharding.distinct_in(keys, valid)
        Exchange("device", distinct=distinct, slack=sharding.skew_in(keys, 4, valid))


def test_exports_of_several_processes_are_saved_and_joined(rng, tmp_path):
    """Sightings and clocks are those of the latest, as in an export of all parts."""
    placement = Placement(mesh_of(4))
    rule = hkv.admission.frequency(2, width=64)
    opt = hkv.optim.adam(0.1, count_per_row=True)  # leaves of several shapes and types
    table = placement.create(
        lambda: opt.init(hkv.create(1024, 4, dtype=jnp.bfloat16, admission=rule))
    )
    look_up = placement.step(
        lambda table, keys: (sharding.find_or_insert(table, keys, axis_name="device")[0], None)
    )
    for _ in range(3):
        table = look_up(table, placement.put(zipf(rng, 256)))[0]
    parts = placement.shards(table)
    files = [tmp_path / f"{number}.npz" for number in range(2)]
    for file, own in zip(files, (parts[:3], parts[3:]), strict=True):
        sharding.save_entries(file, sharding.export_entries(own))
    joined = sharding.join_entries([sharding.load_entries(file) for file in files])
    occupied = [np.asarray(part.digests) != 0 for part in parts]
    keys = [np.asarray(part.keys)[own] for part, own in zip(parts, occupied, strict=True)]
    np.testing.assert_array_equal(joined.keys, np.concatenate(keys).view("<u8").reshape(-1))
    rows = [
        np.asarray(part.values).reshape(-1, 128, 4)[own]
        for part, own in zip(parts, occupied, strict=True)
    ]
    np.testing.assert_array_equal(joined.values, np.concatenate(rows))
    counters = np.stack([np.asarray(part.admission.counters) for part in parts])
    assert (counters != counters[0]).any() and joined.counters is not None
    np.testing.assert_array_equal(joined.counters, counters.max(axis=0))
    clocks = [int(hkv.Keys(part.clock).to_numpy()) for part in parts]
    assert joined.clock == max(clocks) and joined.epoch == 0
    whole = sharding.export_entries(parts)
    assert joined.values.dtype == jnp.bfloat16 and list(joined.optimizer) == ["count", "mu", "nu"]
    jax.tree.map(np.testing.assert_array_equal, joined, whole)
    with pytest.raises(TypeError, match=r"parts\[0\] must be .* got ndarray: parts are a list"):
        sharding.join_entries(whole)
    with pytest.raises(ValueError, match="parts must be exported entries, got none"):
        sharding.join_entries([])
    with pytest.raises(ValueError, match="parts must be of one table"):
        sharding.join_entries([whole, whole._replace(counters=None)])


def bag_step(api, placement, traced=None):
    """A state with a table and a dense parameter, and a step from it to (state, report)."""
    options: dict = {"optimizer": ADAM, "axis_name": "device", "unseen": "learned"}
    bags = hkv.Jagged.from_lists([[1], [2]], capacity=8)

    def loss(model, bags):
        if traced is not None:
            traced.append(bags)
        return (model(bags, train=True) ** 2).mean()

    if api == "linen":
        layer = hkv.linen.EmbedBag(1024, 4, **options)
        state = placement.create(
            lambda: hkv.linen.TrainState.create(layer, jax.random.key(0), bags, tx=optax.adam(0.1))
        )
        return state, hkv.linen.train_step(loss, placement=placement)

    def make():
        return hkv.nnx.TrainState(hkv.nnx.EmbedBag(1024, 4, **options), optax.adam(0.1))

    step = hkv.nnx.train_step(loss, placement=placement)
    return hkv.nnx.place(make, placement), lambda state, bags: (state, step(state, bags))


def put_bags(placement, rng):
    return placement.put(sharding.concatenate([bags_of(rng, 6) for _ in range(4)]))


def bits_of(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("api", seldom(["linen", "nnx"], {"nnx"}))
def test_jagged_bags_train_alike_in_both_modes(api):
    seen = []
    for mode in ("shard_map", "pmap"):
        rng = np.random.default_rng(0)
        placement = Placement(mesh_of(4), mode=mode)
        state, step = bag_step(api, placement)
        infos = []
        for _ in range(3):
            state, info = step(state, put_bags(placement, rng))
            infos.append(info)
        seen.append(bits_of((placement.shards(nnx.state(state) if api == "nnx" else state), infos)))
    assert seen[0] == seen[1]


def test_row_splits_that_do_not_fit_are_refused_under_pmap_too(rng):
    placement = Placement(mesh_of(4), mode="pmap")
    state, step = bag_step("linen", placement)
    bags = put_bags(placement, rng)
    bags.row_splits[2, 0] = 1
    with pytest.raises(ValueError, match="row_splits of a Jagged must start at 0"):
        step(state, bags)


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_batch_that_was_not_put_is_named_under_pmap_too(api, rng):
    placement = Placement(mesh_of(4), mode="pmap")
    state, step = bag_step(api, placement)
    whole = sharding.concatenate([bags_of(rng, 6) for _ in range(4)])
    with pytest.raises(ValueError, match=r"train_step: .* the 4 devices.*placement\.put"):
        step(state, whole)
    for call in (placement.step(lambda t, i: (t, i)), placement.run(lambda t, i: i[None])):
        with pytest.raises(ValueError, match=r"arguments\[0\] .* the 4 .*got ndarray int64"):
            call(one_part(placement), np.arange(16))
        call(one_part(placement), np.arange(4))  # one number a device
    step(state, placement.put(whole))


@pytest.mark.parametrize("mode", seldom(["shard_map", "pmap"], {"pmap"}))
def test_an_nnx_step_over_devices_takes_a_state_that_flax_has_cached(mode):
    """By ``nnx.cached_partial``: the state itself is trained, and nothing is traced again."""
    traced, seen = [], []
    placement = Placement(mesh_of(4), mode=mode)
    for is_cached in (False, True):
        rng = np.random.default_rng(0)
        state, step = bag_step("nnx", placement, traced)
        own = nnx.cached_partial(step, state) if is_cached else lambda bags: step(state, bags)  # noqa: B023
        infos = [own(put_bags(placement, rng))[1] for _ in range(3)]
        evaluate = hkv.nnx.run(lambda model, bags: model(bags), placement)
        evaluate = nnx.cached_partial(evaluate, state.model) if is_cached else evaluate
        given = (
            (put_bags(placement, rng),) if is_cached else (state.model, put_bags(placement, rng))
        )
        seen.append(bits_of((nnx.state(state), infos, evaluate(*given))))
    assert seen[0] == seen[1]
    assert len(traced) == 2 * 2


def values_of(state):
    return nnx.state(state) if isinstance(state, nnx.Module) else state


def on_host(state):
    """A state's arrays as NumPy's, and a function that makes a state of them."""
    if not isinstance(state, nnx.Module):
        arrays = serialization.from_bytes(state, serialization.to_bytes(state))
        return arrays, lambda: arrays
    graph, values = nnx.split(state)
    arrays = jax.device_get(values)
    return arrays, lambda: nnx.merge(graph, jax.tree.map(lambda leaf: leaf, arrays))


@pytest.mark.parametrize("api, mode", each(["linen", "nnx"], ["Auto", "Explicit", "pmap"]))
def test_a_state_that_was_on_the_host_trains_on(api, mode, rng):
    """And again, for NumPy's arrays are not used up."""
    placement = Placement(mesh_of(4), mode="pmap") if mode == "pmap" else placement_of_four(mode)
    traced = []
    state, step = bag_step(api, placement, traced)
    for _ in range(2):
        state, _ = step(state, put_bags(placement, rng))
    once, bags = len(traced), put_bags(placement, rng)
    arrays, make = on_host(state)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(arrays))
    before = bits_of(arrays)
    expected = bits_of([*map(values_of, step(state, bags))])
    for _ in range(2):
        assert bits_of([*map(values_of, step(make(), bags))]) == expected
        assert bits_of(arrays) == before
    assert mode == "pmap" or len(traced) == once


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_table_that_was_on_the_host_is_read_and_written(kind, rng):
    placement = placement_of_four(kind)
    keys = placement.put(hkv.Keys.from_numpy(rng.integers(0, 2**63, 64)))
    step = placement.step(lambda t, k: sharding.find_or_insert(t, k, axis_name="device"))
    read = placement.run(lambda t, k: sharding.find(t, k, axis_name="device")[1].values)
    table, _ = step(one_part(placement), keys)
    host = jax.device_get(table)
    assert bits_of(read(host, keys)) == bits_of(read(table, keys))
    again = jax.jit(lambda t, k: (read(t, k), read(host, k)))(table, keys)
    assert bits_of(again[0]) == bits_of(again[1])
    assert bits_of(step(host, keys)) == bits_of(step(table, keys))
    with pytest.raises(TypeError, match="spread over the 4 devices"):
        read(jax.device_get(hkv.create(128, 4)), keys)
