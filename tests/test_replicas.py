"""A table says itself whether the devices of a mesh hold parts of it or replicas."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from combinations import seldom
from flax import linen as nn
from flax import nnx
from many_devices import features_and_labels, tables_of

import jax_hkv as hkv
from jax_hkv import _growth, sharding
from jax_hkv.sharding import Exchange

DEVICES = 4
DIM = 4
IDS = np.arange(200, dtype=np.int32)
ADAM = hkv.optim.adam(0.1)
WHOLE = sharding.Exchange("device", replicas=True)


def placement_of(mode="shard_map"):
    mesh = jax.make_mesh((DEVICES,), ("device",), devices=jax.devices("cpu")[:DEVICES])
    return sharding.Placement(mesh, mode=mode)


def made(capacity=1024, **options):
    return ADAM.init(hkv.create(capacity, DIM, **options))


def train(table, ids, axis_name):
    table, found = sharding.find_or_insert(table, ids, axis_name=axis_name)
    return sharding.update(ADAM, table, found, found.values), found.counts


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_the_name_of_the_axis_is_enough_for_a_table_of_replicas(mode, rng):
    placement = placement_of(mode)
    tables = [placement.create(lambda: made(replicas=True)) for _ in range(2)]
    for _ in range(3):
        ids = placement.put(rng.integers(0, 300, 400).astype(np.int32))
        for number, axis in enumerate(("device", WHOLE)):
            run = placement.step(lambda table, ids, axis=axis: train(table, ids, axis))
            tables[number], counts = run(tables[number], ids)
    assert int(counts.hits) > 0
    for one, other in zip(*map(jax.tree.leaves, tables), strict=True):
        assert one.tobytes() == other.tobytes()
    assert placement.replicas_agree(tables[0])
    held = [int(hkv.size(part)) for part in placement.shards(tables[0])]
    assert len(set(held)) == 1 and held[0] > 200


KEYS = jnp.asarray(IDS[:8])
ROWS = jnp.ones((8, DIM))
CALLS = {
    "find": lambda table: sharding.find(table, KEYS, axis_name=WHOLE),
    "contains": lambda table: sharding.contains(table, KEYS, axis_name=WHOLE),
    "find_or_insert": lambda table: sharding.find_or_insert(table, KEYS, axis_name=WHOLE),
    "find_pooled": lambda table: sharding.find_pooled(table, KEYS[None], axis_name=WHOLE),
    "find_or_insert_pooled": lambda table: sharding.find_or_insert_pooled(
        table, KEYS[None], axis_name=WHOLE
    ),
    "insert_or_assign": lambda table: sharding.insert_or_assign(table, KEYS, ROWS, axis_name=WHOLE),
    "assign": lambda table: sharding.assign(table, KEYS, ROWS, axis_name=WHOLE),
    "accum_or_assign": lambda table: sharding.accum_or_assign(
        table, KEYS, ROWS, KEYS >= 0, axis_name=WHOLE
    ),
    "erase": lambda table: sharding.erase(table, KEYS, axis_name=WHOLE),
    "export_keys": lambda table: sharding.export_keys(table, KEYS, axis_name=WHOLE),
    "misplaced": lambda table: (table, sharding.misplaced(table, axis_name=WHOLE)),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_table_that_is_split_is_not_taken_for_replicas(call):
    """Each device would look into its own part alone, and insert again what others have."""
    placement = placement_of()
    run = placement.run(lambda table: jax.tree.leaves(CALLS[call](table)[1])[0][None])
    message = f"sharding.{call}: axis_name must say nothing of replicas for the table 'table', "
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(run, placement.create(made))
    jax.eval_shape(run, placement.create(lambda: made(replicas=True)))


def test_the_tables_of_layers_and_collections_are_what_their_exchange_says():
    """Found split, a layer's table is an error to one whose exchange is of replicas."""
    placement = placement_of()
    collection = hkv.Collection([hkv.TableConfig("t", 512, DIM)], [hkv.Feature("f", "t")])
    tables = {}
    for axis, replicas in ((WHOLE, True), ("device", False)):
        layer = hkv.linen.Embed(512, DIM, axis_name=axis)
        variables = placement.create(lambda layer=layer: layer.init(jax.random.key(0), KEYS))
        (split,) = jax.tree.leaves(variables["tables"], is_leaf=lambda x: hasattr(x, "replicas"))
        (own,) = placement.create(lambda axis=axis: collection.create(axis)).values()
        embed = hkv.nnx.place(lambda axis=axis: hkv.nnx.Embed(512, DIM, axis_name=axis), placement)
        table = embed.table.get_value()
        for each in (split, own, table):
            assert each.replicas is replicas and each.capacity == 512
        tables[replicas] = variables
    reading = hkv.linen.Embed(512, DIM, axis_name=WHOLE)
    run = placement.run(lambda variables, ids: reading.apply(variables, ids))
    ids = placement.put(IDS)
    assert run(tables[True], ids).shape == (200, DIM)
    with pytest.raises(ValueError, match="axis_name must say nothing of replicas"):
        run(tables[False], ids)
    features = placement.run(
        lambda tables, ids: collection.lookup(tables, {"f": ids}, axis_name=WHOLE)[1]["f"].values
    )
    with pytest.raises(ValueError, match="Collection.lookup of 't.*nothing of replicas"):
        features(placement.create(lambda: collection.create("device")), ids)


TABLES = [
    hkv.TableConfig("country", 256, DIM, optimizer=ADAM, replicas=True),
    hkv.TableConfig("user", 4096, DIM, optimizer=ADAM),
    hkv.TableConfig("item", 4096, DIM, optimizer=ADAM),
]
COLLECTION = hkv.Collection(TABLES, [hkv.Feature(own.name, own.name) for own in TABLES])


class Model(nn.Module):
    """A small table that every device has, and two large ones of which each has a part."""

    axis_name: str | None = None

    @nn.compact
    def __call__(self, features, *, train=False):
        embed = hkv.linen.EmbedCollection(COLLECTION, axis_name=self.axis_name)
        rows = embed(features, train=train)
        return nn.Dense(1)(jnp.concatenate([rows[name] for name in sorted(rows)], -1))[:, 0]


def of_model(axis_name, placement=None):
    example = dict.fromkeys(("country", "user", "item"), IDS[:4, None])

    def make():
        model = Model(axis_name)
        return hkv.linen.TrainState.create(model, jax.random.key(0), example, tx=optax.sgd(0.1))

    def loss(apply, features, labels):
        return optax.sigmoid_binary_cross_entropy(apply(features, train=True), labels).mean()

    step = hkv.linen.train_step(loss, placement=placement)
    return (make() if placement is None else placement.create(make)), step


@pytest.mark.parametrize("mode", seldom(["shard_map", "pmap"], {"pmap"}))
def test_one_collection_has_tables_that_are_split_and_others_that_are_not(mode, rng):
    """TorchRec's sharding by table: small tables data-parallel, large ones by row."""
    placement = placement_of(mode)
    (many, step), (one, alone) = of_model("device", placement), of_model(None)
    for _ in range(4):
        batch = features_and_labels(rng, "item")
        many, info = step(many, *placement.put(batch))
        one, expected = alone(one, *batch)
        for name, metrics in expected.tables.items():
            assert int(info.tables[name].inserted) == int(metrics.inserted)
            assert int(info.tables[name].hits) == int(metrics.hits)
    kinds = {table.name: table.replicas for table in tables_of(many.tables)}
    assert kinds == {"country": True, "user+item": False}
    assert placement.replicas_agree(many)
    (path,) = many.tables
    sizes = [COLLECTION.sizes(state.tables[path]) for state in (many, one)]
    assert jax.device_get(sizes[0]) == jax.device_get(sizes[1])
    for own, other in zip(tables_of(many.tables), tables_of(one.tables), strict=True):
        assert int(hkv.size(own)) == int(hkv.size(other)) and own.capacity == other.capacity
        entries, same = (
            sharding.export_entries(parts) for parts in (placement.shards(own), [other])
        )
        mine, theirs = np.argsort(entries.keys), np.argsort(same.keys)
        assert entries.keys[mine].tolist() == same.keys[theirs].tolist()
        np.testing.assert_allclose(entries.values[mine], same.values[theirs], atol=1e-6)
    fresh, _ = of_model(None)
    moved, counts = sharding.reshard(many, fresh, source=placement)
    assert sorted(int(each.inserted) for each in counts.values()) == sorted(
        int(hkv.size(table)) for table in tables_of(one.tables)
    )
    assert [table.replicas for table in tables_of(moved.tables)] == [True, False]


def test_replicas_are_no_cache_of_a_second_tier():
    placement = placement_of()
    table = placement.create(lambda: made(replicas=True))
    message = "the cache must be split by keys, got 'table', of replicas.*without replicas=True"
    with pytest.raises(ValueError, match=f"tiered.create_store: {message}"):
        hkv.tiered.create_store(table, 8192, placement=placement)
    cache = placement.create(made)
    stores = hkv.tiered.create_store(cache, 8192, placement=placement)
    tiers = hkv.tiered.Tiers(table, stores)
    with pytest.raises(ValueError, match=f"tiered.prefetch: {message}"):
        hkv.tiered.prefetch(tiers, placement.put(IDS), placement=placement)
    assert not table.values.is_deleted() and not stores[0].values.is_deleted()
    one = made(128, replicas=True)  # a model on one device
    tiers = hkv.tiered.Tiers(one, hkv.tiered.create_store(one, 1024))
    tiers, counts = hkv.tiered.prefetch(tiers, IDS[:50])
    assert int(counts.inserted) == 50


def test_replicas_grow_by_what_each_of_them_holds():
    """`max_capacity` and `room` are those of a table, however many devices have it."""
    placement = placement_of()
    table = placement.create(lambda: made(128, replicas=True))
    split = placement.create(lambda: made(128))
    insert = placement.step(lambda table, ids: train(table, ids, "device"))
    (table, _), (split, _) = (insert(each, placement.put(IDS[:80])) for each in (table, split))
    grown = hkv.grow(table, 256, placement=placement)
    assert grown.capacity == 256 and grown.replicas
    assert hkv.grow(table, 255, placement=placement) is table
    assert hkv.grow(split, 4 * 128, placement=placement) is split
    assert hkv.grow(table, 1024, room=400, placement=placement).capacity == 1024
    parts = placement.shards(grown)
    assert [int(hkv.size(part)) for part in parts] == [80] * DEVICES
    with pytest.raises(ValueError, match="max_capacity must be from 1 to 2147483647, got"):
        hkv.grow(table, 2**32, placement=placement)


def test_replicas_that_went_apart_are_not_resharded():
    placement = placement_of()
    whole = placement.create(lambda: made(replicas=True))
    apart, _ = placement.step(
        lambda table, ids: (hkv.find_or_insert(table, ids)[0], None)  # of one device
    )(whole, placement.put(IDS))
    with pytest.raises(ValueError, match="state must have the same entries on all devices in"):
        sharding.reshard({"t": apart}, {"t": made()}, source=placement)


def test_a_replica_may_be_read_as_a_table_of_one_device_and_not_changed():
    placement = placement_of()
    table, _ = placement.step(lambda table, ids: train(table, ids, "device"))(
        placement.create(lambda: made(replicas=True)), placement.put(IDS)
    )

    def run(call, table=table):
        return placement.run(lambda table, ids: call(table, ids)[None])(table, placement.put(IDS))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(lambda table, ids: hkv.find(table, ids)[1].found.all()).all()
        assert run(lambda table, ids: hkv.contains(table, ids)[1].all()).all()
        rows = run(lambda table, ids: hkv.find(table, ids)[1].values)
        pooled = run(lambda table, ids: hkv.find_pooled(table, ids[:, None])[1].values)
        np.testing.assert_array_equal(pooled, rows)
        assert (run(lambda table, ids: hkv.export_keys(table, ids)[1].values) != 0).any()
    with pytest.warns(UserWarning, match="find_or_insert: inside a function of Placement"):
        run(lambda table, ids: hkv.find_or_insert(table, ids)[1].counts.hits)
    split = placement.create(made)
    with pytest.warns(UserWarning, match="^find: inside a function of Placement"):
        run(lambda table, ids: hkv.find(table, ids)[1].found.any(), split)


def test_exports_of_replicas_are_joined_to_one():
    """Every process exports the whole table; of equal clocks the later export has the later row."""
    placement = placement_of()
    table, _ = placement.step(lambda table, ids: train(table, ids, "device"))(
        placement.create(lambda: made(replicas=True)), placement.put(IDS)
    )
    own = [sharding.export_entries([part]) for part in placement.shards(table)]
    newer = own[1]._replace(values=own[1].values + 1)
    joined = sharding.join_entries([own[0], newer])
    assert len(joined.keys) == len(IDS) == len(set(joined.keys.tolist()))
    np.testing.assert_array_equal(joined.values, newer.values)
    higher = own[0]._replace(scores=own[0].scores + np.uint64(1))
    np.testing.assert_array_equal(
        sharding.join_entries([higher, newer]).values, own[0].values, "the highest score counts"
    )
    _, counts = sharding.import_entries(placement, placement.create(made), joined)
    assert int(counts.inserted) == len(IDS)


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_what_is_split_is_not_compared(mode):
    """A whole state of a step of one's own: its parameters, and tables of replicas."""
    placement = placement_of(mode)

    def make():
        return {"split": made(), "whole": made(replicas=True), "w": jnp.ones(3)}

    def step(state, ids, apart):
        tables = {name: train(state[name], ids, "device")[0] for name in ("split", "whole")}
        number = jax.lax.axis_index("device")
        return tables | {"w": state["w"] + jnp.where(apart.all(), number, 1)}, None

    run, ids = placement.step(step), placement.put(IDS)
    state, _ = run(placement.create(make), ids, placement.put(np.zeros(DEVICES, bool)))
    assert placement.replicas_agree(state)
    assert not (placement.digests(state) == placement.digests(state)[0]).all()
    assert placement.replicas_agree(state["split"])
    state, _ = run(state, ids, placement.put(np.ones(DEVICES, bool)))
    assert not placement.replicas_agree(state)
    assert placement.replicas_agree({name: state[name] for name in ("split", "whole")})


def test_replicas_on_one_device_are_a_table_as_any():
    """A server's: the part of one device, without a mesh."""
    placement = placement_of()
    table, _ = placement.step(lambda table, ids: train(table, ids, "device"))(
        placement.create(lambda: made(replicas=True)), placement.put(IDS)
    )
    part = placement.shards(table)[2]
    assert hkv.find(part, IDS)[1].found.all()
    split = nnx.to_pure_dict(nnx.state(hkv.nnx.Embed(1024, DIM)))
    assert not split["table"].replicas
    exported = sharding.export_entries(placement.shards(table))
    again, counts = sharding.import_entries(None, part, exported)
    assert int(counts.hits) == len(exported.keys) == len(IDS) and again.replicas


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_optimizer_rows_lie_where_a_table_lies_that_is_whole_on_each_device(kind):
    types = (jax.sharding.AxisType[kind],)
    mesh = jax.make_mesh((DEVICES,), ("device",), types, devices=jax.devices("cpu")[:DEVICES])
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    table = ADAM.init(jax.device_put(hkv.create(128, DIM), whole))
    for path, leaf in jax.tree_util.tree_leaves_with_path(table):
        assert leaf.sharding == whole and leaf.committed, jax.tree_util.keystr(path)
    assert len({leaf.unsafe_buffer_pointer() for leaf in map(_first, jax.tree.leaves(table))}) == (
        len(jax.tree.leaves(table))
    )
    table, found = hkv.find_or_insert(table, KEYS)
    own, result = hkv.find_or_insert(ADAM.init(hkv.create(128, DIM)), KEYS)
    a, b = ADAM.update(table, found, ROWS), ADAM.update(own, result, ROWS)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(one, other)


def _first(leaf):
    return leaf.addressable_data(0)


def test_the_size_of_replicas_is_that_of_the_fullest_and_overflows_no_earlier():
    """Each may have 2**31 - 1 entries, all together more; and replicas may have gone apart."""
    placement = placement_of()
    table = placement.create(lambda: hkv.create(128 * 64, 1, replicas=True))
    full = jnp.full_like(table.occupancy, 2**24)
    table = dataclasses.replace(table, index=dataclasses.replace(table.index, occupancy=full))
    assert int(hkv.size(table)) == 2**30
    parts = placement.shards(placement.create(lambda: made(replicas=True)))
    parts[2], _ = hkv.find_or_insert(parts[2], IDS[:16])
    assert int(hkv.size(placement.join(parts))) == 16


def test_parts_of_both_kinds_are_no_table():
    placement = placement_of()
    parts = placement.shards(placement.create(made))
    parts[0] = dataclasses.replace(parts[0], replicas=True)
    with pytest.raises(ValueError, match="sharding.export_entries: tables must be parts of one ta"):
        sharding.export_entries(parts)
    with pytest.raises(ValueError, match="Placement.join: shards must be tables of one form"):
        placement.join(parts)


def test_what_rows_share_is_of_the_export_that_has_the_rows():
    """An update is no tick: exports before and after it have one clock."""
    table, found = hkv.find_or_insert(made(), IDS)
    before = sharding.export_entries(table)
    after = sharding.export_entries(ADAM.update(table, found, found.values))
    assert before.clock == after.clock
    joined = sharding.join_entries([before, after])
    np.testing.assert_array_equal(joined.values, after.values)
    assert joined.shared["count"] == after.shared["count"] != before.shared["count"]


def test_replicas_have_room_for_a_batch_of_distinct_keys_whatever_the_slack():
    """They are all gathered; how owners are drawn has no part in it."""
    placement = placement_of()
    exchange = Exchange("device", replicas=True, slack=0.01, strict=True)
    table = placement.create(lambda: hkv.create(4096, 2, replicas=True))

    def step(table, keys):
        table, found = sharding.find_or_insert(table, keys, axis_name=exchange)
        return table, (found.overflow, found.counts.inserted)

    keys = placement.put(np.arange(4 * 500, dtype=np.int32))
    _, (overflow, inserted) = placement.step(step)(table, keys)
    assert (int(overflow), int(inserted)) == (0, 2000)


def test_entries_that_replicas_lose_as_they_grow_are_counted_once(monkeypatch):
    real = _growth.resize

    def losing(table, capacity):
        table, counts = real(table, capacity)
        return table, counts._replace(evicted=counts.evicted + 1, refused=counts.refused + 2)

    monkeypatch.setattr(_growth, "resize", losing)
    placement = placement_of()
    table = placement.create(lambda: hkv.create(640, 2, replicas=True))
    with pytest.warns(UserWarning, match="grow: 3 entries of table 'table' found no room in 1280"):
        hkv.grow(table, 1280, room=640, placement=placement)
