"""Several whole tables on the devices of a mesh, each of which is split along further axes."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from combinations import seldom
from flax import linen as nn
from flax import nnx
from many_devices import (
    ADAM,
    DIM,
    Case,
    Many,
    One,
    assert_entries,
    assert_same_bits,
    features_and_labels,
    on_device,
    tables_of,
    zipf_batch,
)
from oracle_sharding import owner_of

import jax_hkv as hkv
from jax_hkv import sharding
from jax_hkv.sharding import Exchange, Placement

AXES = ("node", "device")
TWO = Exchange(AXES, replicas=2)
CASE = Case(TWO, (2, 2), AXES, capacity=1024)
IDS = np.arange(200, dtype=np.int32)
PLACEMENT = CASE.placement
make = CASE.table


def mesh_of(*shape, names=AXES):
    return jax.make_mesh(shape, names, devices=jax.devices("cpu")[: int(np.prod(shape))])


def trained(placement=PLACEMENT, table=None, axis_name=AXES, ids=IDS):
    def step(table, ids):
        table, found = sharding.find_or_insert(table, ids, axis_name=axis_name)
        return sharding.update(ADAM, table, found, found.values), None

    table = placement.create(make) if table is None else table
    return placement.step(step, donate=False)(table, placement.put(ids))[0]


# --- Steps ---------------------------------------------------------------------------------------

TABLES = [
    hkv.TableConfig("country", 256, DIM, optimizer=ADAM, replicas=True),
    hkv.TableConfig("shop", 1024, DIM, optimizer=ADAM, replicas=2),
    hkv.TableConfig("user", 4096, DIM, optimizer=ADAM),
]
FEATURES = [hkv.Feature(own.name, own.name, "mean") for own in TABLES]
COLLECTION = hkv.Collection(TABLES, FEATURES)


class Linen(nn.Module):
    axis_name: tuple[str, ...] | None = None

    @nn.compact
    def __call__(self, features, *, train=False):
        embed = hkv.linen.EmbedCollection(COLLECTION, axis_name=self.axis_name)
        rows = embed(features, train=train)
        return nn.Dense(1)(jnp.concatenate([rows[name] for name in sorted(rows)], -1))[:, 0]


class Nnx(nnx.Module):
    def __init__(self, axis_name=None, *, rngs):
        self.embed = hkv.nnx.EmbedCollection(COLLECTION, axis_name=axis_name)
        self.dense = nnx.Linear(3 * DIM, 1, rngs=rngs)

    def __call__(self, features, *, train=False):
        rows = self.embed(features, train=train)
        return self.dense(jnp.concatenate([rows[name] for name in sorted(rows)], -1))[:, 0]


def loss_of(model, features, labels):
    return optax.sigmoid_binary_cross_entropy(model(features, train=True), labels).mean()


def of_model(flax, placement=None):
    axis_name = None if placement is None else AXES
    if flax == "linen":
        example = dict.fromkeys(("country", "shop", "user"), IDS[:4, None])

        def made():
            model = Linen(axis_name)
            return hkv.linen.TrainState.create(model, jax.random.key(0), example, tx=optax.sgd(0.1))

        step = hkv.linen.train_step(loss_of, placement=placement)
        return (made() if placement is None else placement.create(made)), step

    def make_nnx():
        return hkv.nnx.TrainState(Nnx(axis_name, rngs=nnx.Rngs(0)), optax.sgd(0.1))

    step = hkv.nnx.train_step(loss_of, placement=placement)
    state = make_nnx() if placement is None else hkv.nnx.place(make_nnx, placement)
    return state, lambda state, *batch: (state, step(state, *batch))


def tables_in(state):
    return tables_of(state.tables if hasattr(state, "tables") else nnx.state(state))


@pytest.mark.parametrize("flax", seldom(["linen", "nnx"], {"nnx"}))
def test_one_collection_has_tables_of_every_layout_and_trains_as_on_one_device(flax, rng):
    """Small ones on each device, others once on each node, large ones over all devices."""
    (many, step), (one, alone) = of_model(flax, PLACEMENT), of_model(flax)
    for _ in range(4):
        batch = features_and_labels(rng, "shop")
        many, info = step(many, *PLACEMENT.put(batch))
        one, expected = alone(one, *batch)
        assert float(info.loss) == pytest.approx(float(expected.loss), abs=1e-6)
        for name, metrics in expected.tables.items():
            for figure in ("inserted", "hits", "unique", "evicted"):
                assert int(getattr(info.tables[name], figure)) == int(getattr(metrics, figure))
            load = pytest.approx(float(metrics.load_factor), rel=1e-6)
            assert float(info.tables[name].load_factor) == load
    kinds = {table.name: table.replicas for table in tables_in(many)}
    assert kinds == {"country": True, "shop": 2, "user": False}
    for own, other in zip(tables_in(many), tables_in(one), strict=True):
        assert int(hkv.size(own)) == int(hkv.size(other)) and own.capacity == other.capacity
        assert PLACEMENT.replicas_agree(own)
        assert own.replicas is False or f"replicas={own.replicas}" in repr(own)
        parts = PLACEMENT.shards(own)
        held = {"country": 1, "shop": 2, "user": 4}[own.name]
        assert_entries(parts[:held], other, 1e-5)


def test_bags_are_read_as_sums_from_the_devices_of_one_node(rng):
    """And what is only read moves nothing between nodes, of which each has the table."""
    table = trained()

    def read(table, ids):
        found = sharding.find_pooled(table, ids, combiner="sum", fill=0, axis_name=AXES)[1]
        rows = sharding.find(table, ids, axis_name=Exchange(AXES, strict=True))[1]
        return found.values, rows.values.sum(1), rows.found, rows.overflow[None]

    run, ids = PLACEMENT.run(read), PLACEMENT.put(rng.integers(0, 250, (40, 4)).astype(np.int32))
    sums, by_row, found, overflow = run(table, ids)
    assert not overflow.any() and found.any() and not found.all()
    np.testing.assert_allclose(sums, by_row, atol=1e-6)
    traffic = sharding.traffic(run.lower(table, ids).compile(), PLACEMENT.mesh)
    assert traffic.bytes(axis="device") > 0
    between = [one for one in traffic.collectives if "node" in one.axes]
    assert sum(one.bytes for one in between) <= 16  # how many keys found no room


def test_what_trains_moves_keys_and_gradients_between_nodes_and_no_rows():
    """Of a device those of its part of its node's keys, to each other node."""
    mesh, positions, row = mesh_of(2, 4), 1024, 4 * DIM

    def step(exchange, table, ids):
        table, found = sharding.find_or_insert(table, ids, axis_name=exchange)
        return sharding.update(ADAM, table, found, found.values), None

    found = {}
    for replicas in (False, 2):
        exchange = Exchange(AXES, replicas=replicas, strict=True, distinct=0.5)
        case = Case(exchange, (2, 4), AXES, capacity=1024)
        ids = case.placement.put(np.arange(8 * positions, dtype=np.int32))
        compiled = case.placement.step(partial(step, exchange))
        compiled = compiled.lower(case.placement.create(case.table), ids).compile()
        found[replicas] = sharding.traffic(compiled, mesh)
    places = int(np.ceil(512 + 6 * np.sqrt(512)))
    between = [one for one in found[2].collectives if "node" in one.axes]
    assert {one.kind for one in between} == {"all-gather", "all-reduce"}
    gathered = found[2].bytes("all-gather", axis="node")
    assert gathered == (places + 1) * 8 + places * row
    assert found[2].bytes("all-reduce", axis="node") < 100
    assert found[2].sent("all-gather") == gathered  # to one other node
    # Split over all devices rows go there and gradients come, to half of them.
    assert found[False].sent("all-to-all", axis="node") > places * row
    within = found[2].sent("all-to-all", axis="device")
    assert within == found[False].sent("all-to-all", axis="device") > 2 * 3 * 128 * row


@pytest.mark.parametrize("combiner", [None, "mean"])
def test_training_is_that_of_one_table(combiner, rng):
    case = dataclasses.replace(CASE, combiner=combiner, attracted=True, capacity=4096)
    many, one = Many(case), One(case, 8192)
    for _ in range(3):
        batch = zipf_batch(rng, (64,) if combiner is None else (64, 3), bags=combiner is not None)
        seen, expected = many.step(batch), one.step(batch)
        np.testing.assert_array_equal(seen.status, expected.status)
        np.testing.assert_allclose(seen.values, expected.values, atol=1e-5)
        assert [int(n) for n in seen.counts] == [int(n) for n in expected.counts]
    assert many.placement.replicas_agree(many.table)
    assert_entries(many.parts[:2], one.table, 1e-5)


def test_clipping_and_stale_rows_count_each_replica_once():
    """The norm is that of all distinct keys, whoever has their rows."""

    def step(table, ids):
        table, found = sharding.find_or_insert(table, ids, axis_name=AXES)
        _, _, norm = hkv.optim.clip_by_global_norm(1.0, {}, [found], [jnp.ones_like(found.values)])
        table, _ = sharding.erase(table, ids[:1], axis_name=AXES)
        table = sharding.update(ADAM, table, found, found.values)
        return table, (norm, hkv.metrics.of(table, found))

    table, (norm, report) = PLACEMENT.step(step)(PLACEMENT.create(make), PLACEMENT.put(IDS))
    assert float(norm) == pytest.approx(np.sqrt(len(IDS) * DIM), rel=1e-6)
    assert (int(report.skipped), int(report.inserted)) == (4, 200)
    assert float(report.load_factor) == pytest.approx(196 / 2048)
    bare = PLACEMENT.create(lambda: hkv.create(1024, DIM, replicas=2))  # without an optimizer
    assert int(hkv.metrics.of(bare, []).skipped) == 0
    outside = hkv.metrics.of(table, [])
    assert float(outside.load_factor) == float(report.load_factor) and int(outside.unique) == 0


# --- Entries -------------------------------------------------------------------------------------


def test_entries_are_exported_once_whichever_parts_a_process_has():
    table = trained()
    parts = PLACEMENT.shards(table)
    whole = sharding.export_entries(parts)
    assert sorted(whole.keys.tolist()) == IDS.tolist()
    for own in (parts[:2], parts[2:], parts[1:3], parts[:3]):
        assert_entries(own, parts)
    assert 0 < len(sharding.export_entries(parts[::2]).keys) < 200  # one part, twice
    chunks = [*sharding.export_chunks(parts, 150)]
    assert [len(chunk.keys) for chunk in chunks] == [150, 50]
    fresh, counts = sharding.import_entries(PLACEMENT, PLACEMENT.create(make), whole)
    assert int(counts.inserted) == 2 * 200 and PLACEMENT.replicas_agree(fresh)
    assert_entries(PLACEMENT.shards(fresh), parts)
    misplaced = PLACEMENT.run(lambda table: sharding.misplaced(table, axis_name=AXES)[None])
    assert not misplaced(fresh).any()
    wrong = PLACEMENT.join([parts[1], *parts[1:]])
    assert misplaced(wrong).tolist() == [int(hkv.size(parts[1]))] * 4


LAYOUTS = {
    "one device": None,
    "split": (Placement(mesh_of(2, 2)), False),
    "replicas": (Placement(mesh_of(2, 2)), True),
    "three nodes": (Placement(mesh_of(3, 2)), 3),
    "one replica": (Placement(mesh_of(1, 2)), False),
}


@pytest.mark.parametrize(
    "name, is_on_host",
    seldom(product(LAYOUTS, [False, True]), {(name, True) for name in [*LAYOUTS][1:]}),
)
def test_a_state_goes_to_another_layout_and_back(name, is_on_host):
    state = {"table": trained(), "w": PLACEMENT.create(lambda: jnp.arange(3.0))}
    given = jax.device_get(state) if is_on_host else state
    other = LAYOUTS[name]
    if other is None:
        fresh, target = {"table": ADAM.init(hkv.create(2048, DIM)), "w": jnp.zeros(3)}, None
    else:
        target, replicas = other
        fresh = target.create(
            lambda: {
                "table": ADAM.init(hkv.create(2048, DIM, replicas=replicas)),
                "w": jnp.zeros(3),
            }
        )
    moved, counts = sharding.reshard(given, fresh, source=PLACEMENT, target=target)
    copies = moved["table"].copies
    assert int(counts["table"].inserted) == 200 * copies
    assert int(hkv.size(moved["table"])) == 200
    if target is not None:
        assert target.replicas_agree(moved)
        assert copies == {"split": 1, "replicas": 4, "three nodes": 3, "one replica": 1}[name]
    back = PLACEMENT.create(lambda: {"table": make(), "w": jnp.zeros(3)})
    back, _ = sharding.reshard(moved, back, source=target, target=PLACEMENT)
    assert_entries(PLACEMENT.shards(back["table"]), PLACEMENT.shards(state["table"]))
    assert PLACEMENT.replicas_agree(back)


@pytest.mark.parametrize("is_on_host", [False, True])
def test_replicas_that_went_apart_are_not_resharded(is_on_host):
    parts = PLACEMENT.shards(trained())
    parts[3] = hkv.erase(parts[3], IDS)[0]
    apart = PLACEMENT.join(parts)
    assert not PLACEMENT.replicas_agree(apart)
    given = jax.device_get(apart) if is_on_host else apart
    with pytest.raises(ValueError, match="has replicas=2, got different ones: .*replicas=2"):
        sharding.reshard({"t": given}, {"t": ADAM.init(hkv.create(2048, DIM))}, source=PLACEMENT)


@pytest.mark.parametrize("is_on_host", [False, True])
@pytest.mark.parametrize("replicas", [True, 2])
def test_a_state_whose_mark_was_lost_is_not_taken_for_one_that_is_split(replicas, is_on_host):
    placement = Placement(mesh_of(2, 2))
    table = placement.create(lambda: ADAM.init(hkv.create(1024, DIM, replicas=replicas)))
    fresh = ADAM.init(hkv.create(2048, DIM))
    bare = dataclasses.replace(table, replicas=False)
    sharding.reshard({"t": bare}, {"t": fresh}, source=placement)  # without entries it may be any
    bare = dataclasses.replace(trained(placement, table), replicas=False)
    given = jax.device_get(bare) if is_on_host else bare
    message = f"which is split by keys, got the same on .* of 4: .*with replicas={replicas}"
    with pytest.raises(ValueError, match=message):
        sharding.reshard({"t": given}, {"t": fresh}, source=placement)


ELSEWHERE = {
    "axes exchanged": Placement(mesh_of(2, 3, names=AXES[::-1]), AXES),
    "an axis inside": Placement(mesh_of(2, 2, 2, names=(*AXES, "model")), AXES),
    "an axis between": Placement(mesh_of(2, 2, 2, names=("node", "model", "device")), AXES),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_parts_lie_by_the_axes_of_the_placement_and_not_of_the_mesh(name):
    placement = ELSEWHERE[name]
    replicas = placement.mesh.shape["node"]
    table = placement.create(lambda: make_of(replicas))
    table = trained(placement, table, ids=IDS[: 24 * placement.devices // 4 * 4])
    assert placement.replicas_agree({"t": table, "w": placement.create(lambda: jnp.ones(3))})
    one, counts = sharding.reshard(
        {"t": table}, {"t": ADAM.init(hkv.create(4096, DIM))}, source=placement
    )
    assert int(counts["t"].inserted) == int(hkv.size(table)) == int(hkv.size(one["t"]))
    parts = placement.shards(table)
    parts[-1] = dataclasses.replace(parts[-1], values=parts[-1].values + 1)
    assert not placement.replicas_agree(placement.join(parts))


def make_of(replicas):
    return ADAM.init(hkv.create(1024, DIM, replicas=replicas))


def test_keys_of_replicas_whose_rows_differ_are_exported_once():
    parts = PLACEMENT.shards(trained())
    other = dataclasses.replace(parts[3], values=parts[3].values + 1)
    exported = sharding.export_entries([*parts[:3], other])
    assert_entries(parts, PLACEMENT.shards(PLACEMENT.join(parts)))
    assert sorted(exported.keys.tolist()) == IDS.tolist()
    np.testing.assert_array_equal(exported.values, sharding.export_entries(parts).values)


def test_sightings_of_parts_without_entries_are_exported():
    """By keys alone parts that have none would be the same."""
    rule = hkv.admission.frequency(3, width=256, aging=True)
    table = PLACEMENT.create(lambda: hkv.create(1024, DIM, replicas=2, admission=rule))
    run = PLACEMENT.step(
        lambda table, ids: (sharding.find_or_insert(table, ids, axis_name=AXES)[0], None)
    )
    table, _ = run(table, PLACEMENT.put(IDS))
    parts = PLACEMENT.shards(table)
    assert int(hkv.size(table)) == 0
    whole, first, second = map(sharding.export_entries, (parts, parts[:1], parts[1:2]))
    seen = [int(np.sum(own.counters)) for own in (whole, first, second)]
    assert seen[0] > max(seen[1:]) > 0  # of counters the higher one holds


def test_a_table_follows_the_changes_of_another():
    table = trained()
    follower, since = PLACEMENT.create(make), None
    for ids in (IDS[:0], IDS + 100):
        table = trained(table=table, ids=ids) if len(ids) else table
        changes = sharding.export_changes(PLACEMENT.shards(table), since)
        follower, _ = sharding.import_changes(PLACEMENT, follower, changes)
        since = changes
        assert PLACEMENT.replicas_agree(follower)
        assert_entries(PLACEMENT.shards(follower), PLACEMENT.shards(table))


def test_a_bit_of_one_part_is_noticed():
    table = trained()
    assert PLACEMENT.replicas_agree({"table": table, "w": jnp.ones(3)})
    for number in range(4):
        parts = PLACEMENT.shards(table)
        parts[number] = dataclasses.replace(parts[number], values=parts[number].values + 1)
        assert not PLACEMENT.replicas_agree(PLACEMENT.join(parts))
        assert not PLACEMENT.replicas_agree({"w": jnp.ones(3), "t": PLACEMENT.join(parts)})


def test_each_replica_grows_by_what_it_holds():
    table = trained(table=PLACEMENT.create(partial(make, 128)), ids=IDS[:180])
    assert table.capacity == 256 and int(hkv.size(table)) == 180
    assert hkv.grow(table, 511, placement=PLACEMENT) is table
    grown = hkv.grow(table, 512, placement=PLACEMENT)
    assert grown.capacity == 512 and grown.replicas == 2
    assert_same_bits(
        *(np.sort(sharding.export_entries(PLACEMENT.shards(each)).keys) for each in (table, grown))
    )
    assert hkv.grow(table, 2048, room=800, placement=PLACEMENT).capacity == 2048
    trained(table=grown)  # goes on
    with pytest.raises(ValueError, match="max_capacity must be from 1 to 4294967294, got"):
        hkv.grow(table, 2**33, placement=PLACEMENT)


def test_layers_divide_their_capacity_by_the_devices_of_a_replica():
    layer = hkv.linen.Embed(1000, DIM, axis_name=TWO)
    variables = PLACEMENT.create(lambda: layer.init(jax.random.key(0), jnp.zeros(3, jnp.int32)))
    (table,) = jax.tree.leaves(
        variables["tables"], is_leaf=lambda node: isinstance(node, hkv.Table)
    )
    assert (table.capacity, table.replicas, table.copies) == (1024, 2, 2)
    assert [part.capacity for part in PLACEMENT.shards(table)] == [512] * 4
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(table)]
    assert any("replicas=2" in name for name in names)
    embed = hkv.nnx.place(lambda: hkv.nnx.Embed(1000, DIM, axis_name=TWO), PLACEMENT)
    assert embed.table.get_value().replicas == 2


@pytest.mark.parametrize("says", [True, 2, False])
def test_a_tables_own_word_counts_and_others_are_what_the_axis_name_says(says):
    tables = [hkv.TableConfig("a", 512, DIM), hkv.TableConfig("b", 512, DIM, replicas=True)]
    tables.append(hkv.TableConfig("c", 512, DIM, replicas=2))
    names = [own.name for own in tables]
    collection = hkv.Collection(tables, [hkv.Feature(name, name) for name in names])
    exchange = Exchange(AXES, replicas=says)
    made = PLACEMENT.create(lambda: collection.create(exchange))
    assert {name: table.replicas for name, table in made.items()} == {"a": says, "b": True, "c": 2}
    assert {table.capacity for table in made.values()} == {512}

    def look_up(tables, ids):
        inputs = dict.fromkeys(names, ids)
        return [*collection.lookup(tables, inputs, axis_name=exchange)[1].rows.values()]

    for rows in PLACEMENT.run(look_up)(made, PLACEMENT.put(IDS)):
        assert rows.shape == (200, DIM)


def test_whole_tables_are_made_outside_of_a_mesh_too():
    """They are what each device has, whatever the number of devices."""
    whole = Exchange(AXES, replicas=True)
    assert whole.local_capacity(1000) == 1000
    assert hkv.nnx.Embed(1000, DIM, axis_name=whole).table.get_value().capacity == 1024
    config = hkv.TableConfig("t", 1000, DIM, replicas=True)
    (table,) = hkv.Collection([config], [hkv.Feature("t", "t")]).create("device").values()
    assert table.capacity == 1024 and table.replicas is True


def test_an_axis_of_as_many_devices_as_replicas_is_one_of_replicas(rng):
    """With pmap too, which has one axis: a number is then another word for True."""
    batch = zipf_batch(rng, (80,))
    tables = []
    for replicas in (True, 4):
        case = Case(Exchange("device", replicas=replicas), (4,), mode="pmap", capacity=1024)
        many = Many(case)
        many.step(batch)
        tables.append(many)
        assert many.placement.replicas_agree(many.table)
        assert many.table.copies == 4 and many.table.capacity == 1024
    assert_same_bits(jax.tree.leaves(tables[0].table), jax.tree.leaves(tables[1].table))


# --- Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [0, -2, 2.0, "2", None, (2,), jnp.array(2)])
@pytest.mark.parametrize(
    ("call", "make"),
    [
        ("create", partial(hkv.create, 128, 2)),
        ("TableConfig 't'", partial(hkv.TableConfig, "t", 128, 2)),
        ("sharding.Exchange", partial(Exchange, "device")),
    ],
    ids=["create", "TableConfig", "Exchange"],
)
def test_replicas_are_a_flag_or_a_number(call, make, given):
    message = f"{call}: replicas must be True or False, or the number of whole tables that devices "
    with pytest.raises(TypeError, match=f"^{re.escape(message)}.*got {type(given).__name__}"):
        make(replicas=given)
    for right in (True, np.False_, 2, np.int64(3)):
        assert make(replicas=right).replicas == right
    assert make(replicas=1).replicas is False  # of mesh.shape["node"], on one node


def test_a_number_that_the_first_axes_do_not_have_is_an_error():
    message = r"replicas must be the number of devices along the first axes of {'node': 2, "
    for wrong in (3, 8):
        with pytest.raises(ValueError, match=f"Placement.create: of the table 'users': {message}"):
            PLACEMENT.create(lambda wrong=wrong: hkv.create(128, 2, name="users", replicas=wrong))
        with pytest.raises(ValueError, match=f"Placement.abstract: of the table 't.*{message}"):
            PLACEMENT.abstract(lambda wrong=wrong: make_of(wrong))
    one = Placement(mesh_of(1, 1))
    with pytest.raises(ValueError, match="Placement.create: of the table .*{'node': 1, 'device'"):
        one.create(make)
    marked = dataclasses.replace(trained(), replicas=3)
    with pytest.raises(ValueError, match=f"Placement.step: of the table 'table': {message}"):
        trained(table=marked)
    for call in ("Placement.replicas_agree", "sharding.reshard"):
        with pytest.raises(ValueError, match=f"{call}.*: of the table 'table': {message}"):
            if call.endswith("agree"):
                PLACEMENT.replicas_agree(marked)
            else:
                sharding.reshard({"t": marked}, {"t": make_of(False)}, source=PLACEMENT)
    exported = sharding.export_entries(make_of(False))
    with pytest.raises(ValueError, match=f"import_entries: of the table 'table': {message}"):
        sharding.import_entries(PLACEMENT, marked, exported)
    layer = hkv.linen.Embed(1000, DIM, axis_name=Exchange(AXES, replicas=3))
    with pytest.raises(ValueError, match=f"sharding.Exchange: {message}.*got 3: name those first"):
        PLACEMENT.create(lambda: layer.init(jax.random.key(0), jnp.zeros(3, jnp.int32)))


@pytest.mark.parametrize("says", [True, 4])
def test_an_exchange_of_other_replicas_than_the_tables_is_an_error(says):
    table = PLACEMENT.create(make)
    message = f"for the table 'table', which has replicas=2, got replicas={says}: leave that out"
    with pytest.raises(ValueError, match=message):
        trained(table=table, axis_name=Exchange(AXES, replicas=says))
    trained(table=table, axis_name=TWO)


def test_axes_in_another_order_are_warned_of():
    """Those that hold the same would be others."""
    with pytest.warns(UserWarning, match="axis_name names the axes"):
        trained(axis_name=AXES[::-1])


def test_parts_of_replicas_are_no_caches_and_no_tables_of_one_device():
    table = trained()
    with pytest.raises(ValueError, match="cache must be split by keys.*without replicas=2"):
        hkv.tiered.create_store(table, 8192, placement=PLACEMENT)
    with pytest.warns(UserWarning, match="^find: inside a function of Placement a table is one"):
        PLACEMENT.run(lambda table, ids: hkv.find(table, ids)[1].found)(table, PLACEMENT.put(IDS))


def test_tables_made_with_entries_would_have_those_of_others():
    filled = partial(hkv.find_or_insert, make(), on_device(IDS))
    with pytest.raises(ValueError, match="make must return tables without entries, got 'table'"):
        PLACEMENT.create(lambda: filled()[0])


def test_where_keys_of_one_replica_have_no_room_a_strict_read_finds_none_on_any():
    numbers = np.arange(1, 4000, dtype=np.uint64)
    keys = np.stack([numbers[owner_of(numbers, 2) == 1][:400]] * 4).reshape(-1)
    valid = np.repeat([True, True, False, False], 400)
    valid[[-1, -401]] = True

    def step(table, batch):
        return sharding.insert_or_assign(table, *batch, axis_name=TWO)[0], None

    table = PLACEMENT.create(lambda: hkv.create(4096, 2, replicas=2))
    rows = np.ones((1600, 2), np.float32)
    batch = PLACEMENT.put((hkv.Keys.from_numpy(keys), rows))
    table, _ = PLACEMENT.step(step)(table, batch)
    exchange = dataclasses.replace(TWO, strict=True)

    def read(table, batch):
        found = sharding.find(table, batch[0], valid=batch[1], axis_name=exchange)[1]
        return found.found, found.overflow[None]

    found, overflow = PLACEMENT.run(read)(table, PLACEMENT.put((hkv.Keys.from_numpy(keys), valid)))
    assert len(set(overflow.tolist())) == 1 and overflow.tolist()[0] > 0
    assert not found.any()
