"""Where two features meet over devices: what steps skip, report, refuse and send again."""

from __future__ import annotations

import copy
import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from many_devices import ADAM, turns
from test_sharding_traffic import mesh_of

import jax_hkv as hkv
from jax_hkv import sharding
from jax_hkv.sharding import Exchange, Placement

SGD = hkv.optim.sgd(0.1)


def placed(placement, model, *example):
    """The state of a linen model that is initialised by the batch of one device."""
    return placement.create(
        lambda: hkv.linen.TrainState.create(model, jax.random.key(0), *example, tx=optax.sgd(0.1))
    )


@pytest.mark.parametrize("apply", [False, True])
@pytest.mark.parametrize("slack", [0.1, 4.0])
def test_a_step_over_devices_that_is_not_applied_changes_nothing(slack, apply):
    """Nor in the second round, of keys without room; one that is applied has the rate given."""
    placement = Placement(mesh_of(4))
    exchange = Exchange("device", distinct=0.05 if slack < 1 else 1.0, slack=slack)

    def step(table, keys, apply):
        table, result = sharding.find_or_insert(table, keys, axis_name=exchange)
        ones = jnp.ones_like(result.values)
        options = {"apply": apply, "learning_rate": 0.5}
        return sharding.update(ADAM, table, result, ones, **options), result.overflow

    table = placement.create(lambda: ADAM.init(hkv.create(1024, 4)))
    keys = hkv.Keys.from_numpy(np.arange(4 * 100))
    table, overflow = placement.step(step)(table, placement.put(keys), np.bool_(apply))
    assert (int(overflow) > 0) == (slack < 1)
    exported = sharding.export_entries(placement.shards(table))
    moments = [leaf.any() for leaf in exported.optimizer.values()]
    assert len(exported.keys) == 400 and moments == [apply] * 2
    assert exported.shared["count"].tolist() == [int(apply)]
    first = hkv.initial_rows(placement.shards(table)[0], hkv.Keys.from_numpy(exported.keys))
    np.testing.assert_allclose(exported.values - first, -0.5 * apply, rtol=1e-5)


def test_a_digest_sees_the_places_of_words_and_of_leaves():
    first = {"a": jnp.array([1, 2, 3, 4]), "b": jnp.array([5, 6, 7, 8])}
    exchanged = {"a": first["b"], "b": first["a"]}
    moved = {**first, "a": jnp.array([2, 1, 3, 4])}
    digests = {tuple(sharding.digest(tree).tolist()) for tree in (first, exchanged, moved)}
    assert len(digests) == 3


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_statistics_of_a_linen_model_are_averaged(mode):
    class Normed(nn.Module):
        axis_name: str | None = "device"

        @nn.compact
        def __call__(self, ids, train=False):
            layer = hkv.linen.Embed(1024, 4, optimizer=SGD, axis_name=self.axis_name)
            rows = layer(ids, train=train)
            return nn.BatchNorm(use_running_average=not train)(rows)  # of each device's batch

    placement = Placement(mesh_of(4), mode=mode)
    state = placed(placement, Normed(), jnp.zeros((8,), jnp.int32))
    step = hkv.linen.train_step(
        lambda apply, ids: jnp.mean(apply(ids, train=True) ** 2), placement=placement
    )
    ids = np.arange(4 * 8, dtype=np.int32)
    state, _ = step(state, placement.put(ids))
    mean = state.variables["batch_stats"]["BatchNorm_0"]["mean"]
    parts = [np.asarray(part.data).reshape(-1) for part in mean.addressable_shards]
    rows = np.asarray(hkv.initial_rows(hkv.create(128, 4), ids))
    for part in parts:
        np.testing.assert_allclose(part, 0.01 * rows.mean(axis=0), rtol=1e-4, atol=1e-7)


def test_aux_of_two_axes_is_in_the_order_of_the_batch():
    placement = Placement(mesh_of(2, 4))
    model = hkv.linen.Embed(1024, 4, optimizer=SGD, axis_name=("node", "device"))
    state = placed(placement, model, jnp.zeros((2,), jnp.int32))
    step = hkv.linen.train_step(
        lambda apply, ids: (apply(ids, train=True).sum(), ids), has_aux=True, placement=placement
    )
    ids = np.arange(16, dtype=np.int32)
    _, info = step(state, placement.put(ids))
    assert info.aux.shape == (8, 2)
    np.testing.assert_array_equal(info.aux.reshape(-1), ids)


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_aux_may_be_keys_and_arrays_without_elements(mode, micro_batches):
    """As on one device."""
    placement = Placement(mesh_of(4), mode=mode)
    model = hkv.linen.Embed(1024, 4, optimizer=SGD, axis_name="device")

    def loss(apply, ids):
        key = jax.random.key(ids[0].astype(jnp.uint32), impl="rbg")
        aux = {"key": key, "pair": jax.random.split(key), "none": jnp.zeros((0, 3), jnp.int8)}
        return apply(ids, train=True).sum(), aux

    step = hkv.linen.train_step(
        loss, has_aux=True, placement=placement, micro_batches=micro_batches
    )
    ids = np.arange(16, dtype=np.int32)
    _, info = step(placed(placement, model, ids[:4]), placement.put(ids))
    parts = (4,) if micro_batches == 1 else (4, micro_batches)
    assert jax.tree.map(jnp.shape, info.aux) == {
        "key": parts, "pair": (*parts, 2), "none": (*parts, 0, 3)
    }  # fmt: skip
    assert info.aux["none"].dtype == jnp.int8 and jax.random.key_impl(info.aux["key"]) == "rbg"
    firsts = ids.reshape(*parts, -1)[..., 0].reshape(-1)
    keys = [jax.random.key(first, impl="rbg") for first in firsts]
    for got, expected in zip(
        (info.aux["key"].reshape(-1), info.aux["pair"].reshape(-1, 2)),
        (jnp.stack(keys), jnp.stack([jax.random.split(key) for key in keys])),
        strict=True,
    ):
        np.testing.assert_array_equal(*map(jax.random.key_data, (got, expected)))


def test_axes_in_another_order_are_an_error_but_for_replicas():
    placement = Placement(mesh_of(2, 4))

    def run(exchange):
        model = hkv.linen.Embed(1024, 4, optimizer=SGD, axis_name=exchange)
        state = placed(placement, model, jnp.zeros((2,), jnp.int32))
        step = hkv.linen.train_step(
            lambda apply, ids: apply(ids, train=True).sum(), placement=placement
        )
        return step(state, placement.put(np.arange(16, dtype=np.int32)))[1]

    with pytest.raises(ValueError, match="in the same order"):
        run(Exchange(("device", "node")))
    assert int(run(Exchange(("device", "node"), replicas=True)).tables["table"].inserted) == 16


def test_load_factors_and_skipped_rows_are_those_of_all_devices():
    placement = Placement(mesh_of(2))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids, *, train=False):
            layer = hkv.linen.Embed(256, 4, optimizer=SGD, axis_name="device")
            return turns(layer, (ids, ids + 1000), train=train)

    ids = np.arange(256, dtype=np.int32)
    own = np.asarray(sharding.owners(ids, 2))
    ids = ids[np.concatenate([np.flatnonzero(own == 0)[:20], np.flatnonzero(own == 1)[:100]])]
    state = placed(placement, Model(), jnp.zeros((60,), jnp.int32))
    step = hkv.linen.train_step(
        lambda apply, ids: apply(ids, train=True).sum(), placement=placement
    )
    state, info = step(state, placement.put(ids))
    (table,) = jax.tree.leaves(state.tables, is_leaf=lambda node: isinstance(node, hkv.Table))
    (metrics,) = info.tables.values()
    assert float(metrics.load_factor) == pytest.approx(float(hkv.load_factor(table)))
    assert len(set(np.asarray(table.optimizer.skipped).tolist())) == 2
    assert int(metrics.skipped) == int(np.sum(np.asarray(table.optimizer.skipped)))


@pytest.mark.parametrize("kind", [jnp.float32, jnp.int32, jnp.uint32, jnp.int8, jnp.bool_])
def test_statistics_are_means_of_all_devices_whatever_their_kind(kind):
    """Of integers the nearest; what is equal on all devices stays as it is."""
    placement = Placement(mesh_of(4))
    most = 255 if kind is jnp.uint32 else 1
    limits = jnp.iinfo(kind) if jnp.issubdtype(kind, jnp.integer) else None
    low, high = (limits.min, limits.max) if limits else (0, 1)
    equal = jnp.array([high], kind)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids, train=False):
            seen = self.variable("seen", "differs", lambda: jnp.zeros((2,), kind))
            same = self.variable("seen", "equal", lambda: jnp.zeros((1,), kind))
            far = self.variable("seen", "far apart", lambda: jnp.zeros((1,), kind))
            if train:
                far.value = jnp.where(ids == 0, jnp.array(low, kind), jnp.array(high, kind))
                seen.value = jnp.stack([most * (ids[0] > 0), most * (ids[0] == 3)]).astype(kind)
                same.value = equal
            rows = hkv.linen.Embed(4096, 4, optimizer=SGD, axis_name="device")(ids, train=train)
            return nn.Dense(1)(rows)

    state = placed(placement, Model(), jnp.zeros((1,), jnp.int32))
    step = hkv.linen.train_step(
        lambda apply, ids: apply(ids, train=True).sum(), placement=placement
    )
    state, _ = step(state, placement.put(np.arange(4, dtype=np.int32)))
    assert placement.replicas_agree(state.variables)
    found = state.variables["seen"]
    means = np.array([0.75, 0.25]) * most
    np.testing.assert_array_equal(
        found["differs"], (means if kind is jnp.float32 else np.round(means)).astype(kind)
    )
    np.testing.assert_array_equal(found["equal"], equal)
    if limits:
        np.testing.assert_allclose(
            found["far apart"], [low / 4 + high / 4 * 3], rtol=1e-6, atol=0.5
        )


def test_a_strict_overflow_of_any_lookup_of_a_table_is_an_error():
    placement = Placement(mesh_of(4))
    tight = Exchange("device", distinct=0.02, slack=0.1, strict=True)

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, ids, same, train=False):
            layer = hkv.linen.Embed(4096, 4, optimizer=SGD, axis_name=tight)
            return layer(ids, train=train).sum() + layer(same, train=train).sum()

    none = jnp.zeros((100,), jnp.int32)
    state = placed(placement, Twice(), none, none)
    step = hkv.linen.train_step(
        lambda apply, *ids: apply(*ids, train=True), placement=placement, donate=False
    )
    ids, same = np.arange(400, dtype=np.int32), np.zeros(400, np.int32)
    for batch in ((ids, same), (same, ids)):
        with pytest.raises(sharding.ExchangeOverflow):
            step(state, *placement.put(batch))


def test_a_step_is_skipped_on_all_devices_if_rows_of_one_have_an_infinite_gradient():
    """Nothing else tells the others: there are no dense gradients, which are summed before."""
    placement = Placement(mesh_of(2))
    ids, factors = np.arange(4, dtype=np.int32), np.array([1, 1, 1, np.inf], np.float32)
    model = hkv.linen.Embed(256, 4, optimizer=SGD, axis_name="device")
    scale = hkv.optim.LossScale.create(4.0)
    state = placement.create(
        lambda: hkv.linen.TrainState.create(
            model, jax.random.key(0), ids[:2], tx=optax.sgd(0.1), loss_scale=scale
        )
    )
    step = hkv.linen.train_step(
        lambda apply, ids, factors: (apply(ids, train=True) * factors[:, None]).sum(),
        placement=placement,
    )
    state, info = step(state, *placement.put((ids, factors)))
    assert not info.finite and placement.replicas_agree(state.loss_scale)
    parts = placement.shards(state.tables["table"])
    assert [int(hkv.size(part)) > 0 for part in parts] == [True, True]
    exported = sharding.export_entries(parts)
    first = hkv.initial_rows(parts[0], hkv.Keys.from_numpy(exported.keys))
    np.testing.assert_array_equal(exported.values, first)


def test_misplaced_entries_of_the_worst_replica_are_told_by_every_device():
    placement = Placement(mesh_of(2))
    table = hkv.create(256, 4, replicas=True)
    table, _ = hkv.find_or_insert(table, np.arange(100, dtype=np.int32))
    swapped = {name: getattr(table.index, name)[::-1] for name in ("keys", "digests")}
    index = dataclasses.replace(table.index, **swapped)
    exchange = Exchange("device", replicas=True)
    count = placement.run(lambda part: sharding.misplaced(part, axis_name=exchange)[None])
    for parts in ([table, dataclasses.replace(table, index=index)], [table, table]):
        worst = max(int(hkv.misplaced(part)) for part in parts)
        assert count(placement.join(parts)).tolist() == [worst, worst]
        assert (worst > 50) == (parts[1] is not table)


def _reads_of_layers(axis_name):
    """By name: what makes rows of a table and of padded ids, nothing being trained."""
    collection = hkv.Collection(
        [hkv.TableConfig("t", 4096, 4)], [hkv.Feature("t", "t"), hkv.Feature("bags", "t", "sum")]
    )
    (group,) = collection.groups

    def collected(table, ids):
        _, found = collection.lookup(
            {group.name: table}, {"t": ids, "bags": ids}, axis_name=axis_name
        )
        return list(collection.spread(found.rows, found.parts).values())

    def linen(layer):
        def read(table, ids):
            return layer.apply({hkv.linen.TABLES: {"table": table}}, ids)

        return read

    def nnx(table, ids):
        layer = hkv.nnx.Embed(4096, 4, axis_name=axis_name)
        layer.table.set_value(table)
        return layer(ids)

    return {
        "linen": linen(hkv.linen.Embed(4096, 4, axis_name=axis_name)),
        "zeros": linen(hkv.linen.Embed(4096, 4, axis_name=axis_name, unseen="zeros")),
        "bags": linen(hkv.linen.EmbedBag(4096, 4, combiner="sum", axis_name=axis_name)),
        "nnx": nnx,
        "collection": collected,
    }


@pytest.mark.parametrize("layer", _reads_of_layers(None))
def test_lookups_of_layers_that_do_not_train_lose_nothing_where_an_exchange_is_strict(layer):
    """Evaluation, and frozen tables in training: nobody is told of an overflow there."""
    placement = Placement(mesh_of(4))
    tight = Exchange("device", distinct=0.02, slack=0.1, strict=True)
    keys = placement.put(np.arange(400, dtype=np.int32).reshape(200, 2))

    def fill(table, keys):
        table, result = sharding.insert_or_assign(
            table, keys, jnp.ones((*keys.shape, 4)), axis_name="device"
        )
        return table, result.overflow

    table, _ = placement.step(fill)(placement.create(lambda: hkv.create(4096, 4)), keys)
    find = placement.run(
        lambda table, keys: sharding.find(table, keys, axis_name=tight)[1].overflow[None]
    )
    assert int(find(table, keys)[0]) > 0
    rows = placement.run(_reads_of_layers(tight)[layer])(table, keys)
    for each in jax.tree.leaves(rows):
        in_a_bag = 4 * keys.size // each.size
        np.testing.assert_array_equal(each, jnp.full_like(each, in_a_bag))


@pytest.mark.filterwarnings("ignore:.*nothing trains their rows")
@pytest.mark.parametrize("layer", ["Embed", "EmbedBag"])
def test_a_layer_over_devices_passes_scores_on_and_knows_the_ids_without_a_row(layer):
    """One id comes often enough to be admitted, with counts of 2 and 3; others get zeros."""
    options = {"policy": hkv.Policy.LFU, "admission": hkv.admission.frequency(2, width=64)}
    layer = getattr(hkv.linen, layer)(
        256, 4, optimizer=SGD, unseen="zeros", axis_name="device", **options
    )
    placement = Placement(mesh_of(2))
    ids = np.array([[7], [8], [7], [9]], np.int32)
    counts = np.array([[2], [5], [3], [5]], np.uint32)

    def step(variables, ids, counts):
        rows, updated = layer.apply(
            variables, ids, train=True, scores=counts, mutable=hkv.linen.MUTABLE
        )
        return {"tables": updated["tables"]}, jax.lax.all_gather(rows, "device", tiled=True)

    variables = placement.create(lambda: layer.init(jax.random.key(0), ids[:2]))
    variables, rows = placement.step(step)(variables, *placement.put((ids, counts)))
    assert rows.reshape(4, 4).any(axis=1).tolist() == [True, False, True, False]
    entries = sharding.export_entries(placement.shards(variables["tables"]["table"]))
    assert (entries.keys.tolist(), entries.scores.tolist()) == ([7], [5])


def test_strict_and_other_lookups_do_not_go_into_one_update():
    placement = Placement(mesh_of(2))

    def step(table, keys):
        table, one = sharding.find_or_insert(table, keys, axis_name="device")
        table, two = sharding.find_or_insert(table, keys, axis_name=Exchange("device", strict=True))
        return sharding.update(ADAM, table, [one, two], [one.values, two.values]), 0

    table = placement.create(lambda: ADAM.init(hkv.create(128, 4)))
    with pytest.raises(ValueError, match="all strict, or all not; got both"):
        placement.step(step)(table, placement.put(np.arange(4, dtype=np.int32)))


def test_a_jagged_whose_bags_end_behind_its_positions_is_refused():
    placement = Placement(mesh_of(2))
    splits = np.array([0, 1, 4, 0, 1, 2], np.int32)  # of 3 positions each
    with pytest.raises(ValueError, match="end within its 6 / 2 positions"):
        placement.put(hkv.Jagged(np.arange(6, dtype=np.int32), splits))


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
@pytest.mark.parametrize("count", [2, 4])
def test_an_evaluation_refuses_a_table_of_one_device(mode, count):
    """Of two devices the clock has two words as well."""
    placement = Placement(mesh_of(count), mode=mode)
    message = f"Placement.*run: a table must be spread over the {count} devices"
    with pytest.raises(TypeError, match=message):
        placement.run(lambda table, x: x)(hkv.create(512, 4), placement.put(np.zeros(4)))


def test_a_placement_without_axes_is_refused():
    with pytest.raises(ValueError, match="axis_name must name axes of the mesh"):
        Placement(mesh_of(2), ())


@pytest.mark.parametrize("policy", [hkv.Policy.LFU, hkv.Policy.EPOCH_LFU])
def test_counts_that_are_given_for_equal_keys_are_summed(policy):
    placement = Placement(mesh_of(2))

    def step(table, keys, counts):
        return sharding.find_or_insert(table, keys, axis_name="device", scores=counts)[0], 0

    table = placement.create(lambda: hkv.create(128, 4, policy=policy))
    keys = np.array([7, 7, 8, 7, 8, 9], np.int32)
    counts = np.array([2, 3, 10, 4, 20, 1], np.uint32)
    table, _ = placement.step(step)(table, placement.put(keys), placement.put(counts))
    exported = sharding.export_entries(placement.shards(table))
    assert dict(zip(exported.keys.tolist(), exported.scores.tolist(), strict=True)) == {
        7: 9,
        8: 30,
        9: 1,
    }


def test_there_is_an_owner_among_one_device_at_least():
    for call in (sharding.owners, sharding.skew_in):
        with pytest.raises(ValueError, match=f"sharding.{call.__name__}: devices must be from 1"):
            call(np.arange(3, dtype=np.int32), 0)


WRONG = {
    "tables must be a jax_hkv Table, got None": lambda: sharding.export_entries(None),
    "export_entries: tables must be .* got int": lambda: sharding.export_entries([3]),
    "join_entries: parts must be a list of exports.* got NoneType": lambda: sharding.join_entries(
        None
    ),
    "concatenate: batches must be a list of .* got NoneType": lambda: sharding.concatenate(None),
    "digest: tree must have arrays as leaves, got str 'a'": lambda: sharding.digest({"b": "a"}),
    "check_overflow: overflow must be a count.* got NoneType": lambda: sharding.check_overflow(
        None
    ),
    "check_overflow: overflow must be a count.* got float": lambda: sharding.check_overflow(0.5),
    r"Placement: axis_name names an axis twice: \('d', 'd'\)": lambda: Placement(
        jax.make_mesh((1,), ("d",)), ("d", "d")
    ),
    "join: shards must be a list of tables.* got int": lambda: over_one().join(3),
    r"join: shards\[0\] must be a jax_hkv Table, got None": lambda: over_one().join([None]),
}


def over_one():
    return Placement(jax.make_mesh((1,), ("d",)))


@pytest.mark.parametrize("message", WRONG)
def test_what_is_no_table_list_or_count_is_named(message):
    with pytest.raises((TypeError, ValueError), match=message):
        WRONG[message]()


def test_parts_of_different_tables_are_not_joined():
    """They were one table whose update failed, or no array at all."""
    tables = [hkv.create(128, 4), hkv.create(256, 4)]
    with pytest.raises(ValueError, match=r"Placement\.join: shards must be tables of one form"):
        Placement(mesh_of(2)).join(tables)
    tables = [ADAM.init(tables[0]), tables[0]]
    with pytest.raises(ValueError, match=r"Placement\.join: shards must be tables of one form"):
        Placement(mesh_of(2)).join(tables)


def test_keys_that_find_no_room_on_the_first_of_two_hops_take_a_second_round():
    placement = Placement(mesh_of(2, 4))
    every = np.arange(4000, dtype=np.int32)
    own = every[np.asarray(sharding.owners(every, 8)) % 4 == 0][:100]  # of one device of a node
    axes = ("node", "device")

    def step(table, keys):
        table, result = sharding.find_or_insert(table, keys, axis_name=axes)
        return table, (result.overflow, result.counts)

    table = placement.create(lambda: hkv.create(1024, 4))
    table, (overflow, counts) = placement.step(step)(table, placement.put(np.tile(own, 8)))
    assert int(overflow) == 8 * (100 - 55)  # 25 are expected, and 6 standard deviations of room
    assert int(counts.inserted) == int(hkv.size(table)) == 100


def test_weights_of_one_feature_among_others_are_differentiable_over_devices():
    placement = Placement(mesh_of(2))
    declared = hkv.Collection(
        [hkv.TableConfig("a", 512, 4, optimizer=SGD)],
        [hkv.Feature("f", "a"), hkv.Feature("g", "a")],
    )
    ids = np.arange(32, dtype=np.int32).reshape(4, 8)  # long bags: their sums are fewer bytes

    def loss(weights, tables, ids, **axis):
        inputs = {"f": ids, "g": hkv.Padded(ids, weights=weights)}
        _, found = declared.lookup(tables, inputs, train=True, **axis)
        return sum(jnp.sum(own**2) for own in declared.spread(found.rows, found.parts).values())

    weights = np.linspace(0.5, 1.5, 32, dtype=np.float32).reshape(4, 8)
    expected = jax.grad(loss)(jnp.asarray(weights), declared.create(), ids)

    def on_each(tables, ids, weights):
        return jax.grad(loss)(weights, tables, ids, axis_name="device")

    tables = placement.create(lambda: declared.create("device"))
    actual = placement.run(on_each)(tables, placement.put(ids), placement.put(weights))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_a_state_that_a_step_has_used_up_is_named():
    """Where JAX would end the process: it counts the arrays of a mesh without looking at them."""
    placement = Placement(mesh_of(4))

    def insert(table, keys):
        return sharding.find_or_insert(table, keys, axis_name="device")[0], None

    step, keys = placement.step(insert), placement.put(np.arange(64, dtype=np.int32))
    table = placement.create(lambda: hkv.create(256, 4))
    step(table, keys)
    with pytest.raises(RuntimeError, match="state was used up by an earlier step"):
        step(table, keys)


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_a_batch_that_was_not_put_is_named_where_jax_takes_none(mode):
    """On a mesh of Explicit axes, the default of JAX's; on one of Auto axes it may be any array."""
    kind = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((4,), ("device",), kind, devices=jax.devices("cpu")[:4])
    placement = Placement(mesh, mode=mode)
    step = placement.step(lambda table, ids: (table, None))
    everywhere = jax.device_put(np.arange(8, dtype=np.int32), NamedSharding(mesh, P()))
    for ids in (np.arange(8, dtype=np.int32), jnp.arange(8), everywhere):
        with pytest.raises(
            ValueError, match=r"Placement\.step: arguments\[0\] must .*\.put\(batch\)"
        ):
            step(placement.create(lambda: hkv.create(128, 4)), ids)
    step(placement.create(lambda: hkv.create(128, 4)), placement.put(np.arange(8, dtype=np.int32)))


@pytest.mark.parametrize("axes", ["xy", "x", "y"])
def test_on_a_mesh_of_both_kinds_of_axes_a_batch_that_was_put_is_not_blamed(axes):
    kinds = (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto)
    mesh = jax.make_mesh((2, 2), ("x", "y"), kinds, devices=jax.devices("cpu")[:4])
    placement = Placement(mesh, tuple(axes))
    table = placement.create(lambda: hkv.create(128, 4))
    ids = placement.put(np.arange(8, dtype=np.int32))

    def fails(table, ids):
        raise ValueError("my own")

    with pytest.raises(ValueError, match="^my own"):
        placement.step(fails)(table, ids)
    if axes != "y":  # which is Auto, and takes any array
        other = jax.make_mesh((4,), ("z",), kinds[:1], devices=jax.devices("cpu")[:4])
        with pytest.raises(ValueError, match=r"arguments\[0\] must .*put\(batch\)") as raised:
            placement.step(fails)(table, Placement(other).put(np.arange(8, dtype=np.int32)))
        assert raised.value.__cause__ is not None


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_a_placement_that_has_been_used_is_copied(mode):
    """As a model that holds it is, to go back to its state later."""
    placement = Placement(
        jax.make_mesh((4,), ("device",), devices=jax.devices("cpu")[:4]), mode=mode
    )
    ids = placement.put(np.arange(8, dtype=np.int32))
    placement.check_put("test", ids)
    step = placement.step(lambda table, ids: (table, None), donate=False)
    step(placement.create(lambda: hkv.create(128, 4)), ids)
    assert copy.deepcopy(placement) == placement
    copy.deepcopy(step)(placement.create(lambda: hkv.create(128, 4)), ids)


@pytest.mark.parametrize("call", ["step", "run"])
@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_entries_with_one_count_are_refused_by_the_call(call, mode):
    placement = Placement(
        jax.make_mesh((4,), ("device",), devices=jax.devices("cpu")[:4]), mode=mode
    )
    _, entries = hkv.export_keys(hkv.create(128, 4), np.arange(8, dtype=np.int32))
    put = placement.put(entries)._replace(count=jnp.int32(8))
    table = placement.create(lambda: hkv.create(128, 4))
    with pytest.raises(
        ValueError, match=rf"^Placement\.{call}: Entries of a batch must have a count"
    ):
        getattr(placement, call)(lambda table, entries: (table, None))(table, put)


def test_a_step_on_an_abstract_mesh_is_traced():
    """For its shapes: there are no devices to be asked for."""
    kind = (jax.sharding.AxisType.Explicit,)
    placement = Placement(jax.sharding.AbstractMesh((4,), ("device",), axis_types=kind))
    step = placement.step(lambda table, ids: sharding.find(table, ids, axis_name="device"))
    table = placement.abstract(lambda: hkv.create(128, 4))
    ids = jax.ShapeDtypeStruct((8,), jnp.int32, sharding=NamedSharding(placement.mesh, P("device")))
    after, rows = jax.eval_shape(step, table, ids)
    assert after.values.shape == (512, 4) and rows.values.shape == (2, 4)


def test_an_axis_name_given_to_an_update_is_named():
    placement = Placement(jax.make_mesh((4,), ("device",), devices=jax.devices("cpu")[:4]))
    opt = hkv.optim.sgd(0.1)

    def step(table, ids):
        table, found = sharding.find_or_insert(table, ids, axis_name="device")
        return sharding.update(opt, table, found, found.values, axis_name="device"), None

    table = placement.create(lambda: opt.init(hkv.create(128, 4)))
    with pytest.raises(TypeError, match="axis_name is none of its arguments, got 'device': grad"):
        placement.step(step)(table, placement.put(np.arange(8, dtype=np.int32)))


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
@pytest.mark.parametrize("count", [2, 4])
def test_a_number_of_64_bits_is_for_all_devices(count, mode):
    """Its two words are no axis to split; batches and their micro-batches have it beside them."""
    placement = Placement(mesh_of(count), mode=mode)
    day = hkv.Keys.from_numpy(np.uint64(2**40 + 7))
    table = placement.create(lambda: hkv.create(256, 2, policy=hkv.Policy.CUSTOM))

    def insert(table, ids, score):
        table, result = sharding.find_or_insert(table, ids, scores=score, axis_name="device")
        return table, result.counts.inserted

    def forget(table, before):
        return hkv.erase_if(table, lambda keys, scores, rows: hkv.less(scores, before))[0], None

    ids = np.arange(16, dtype=np.int32)
    insert = placement.step(insert, donate=False)
    for given in (placement.put((ids, day)), (placement.put(ids), day)):
        after, inserted = insert(table, *given)
        assert int(np.asarray(inserted).reshape(-1)[0]) == 16
        scores = sharding.export_entries(placement.shards(after)).scores
        assert scores.tolist() == [2**40 + 7] * 16
    forget = placement.step(forget, donate=False)
    for number, kept in ((2**40 + 7, 16), (2**40 + 8, 0)):
        left, _ = forget(after, hkv.Keys.from_numpy(np.uint64(number)))
        assert len(sharding.export_entries(placement.shards(left)).keys) == kept


def test_a_number_of_64_bits_is_for_all_micro_batches():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids, day, train=False):
            layer = hkv.linen.Embed(
                256, 2, policy=hkv.Policy.CUSTOM, optimizer=hkv.optim.sgd(0.1), name="embed"
            )
            rows = layer(ids, train=train, scores=day if train else None)
            return rows * self.param("w", nn.initializers.ones, (2,))

    ids, day = np.arange(8, dtype=np.int32), hkv.Keys.from_numpy(np.uint64(2**40 + 7))
    state = hkv.linen.TrainState.create(
        Model(), jax.random.key(0), ids, day, tx=optax.set_to_zero()
    )
    step = hkv.linen.train_step(
        lambda apply, ids, day: apply(ids, day, train=True).sum(), micro_batches=4
    )
    state, _ = step(state, ids, day)
    exported = sharding.export_entries(state.tables["embed"]["table"])
    assert exported.scores.tolist() == [2**40 + 7] * 8
