"""Tables over devices with stores behind their parts: one table of the stores' capacity."""

from __future__ import annotations

import flax.linen as nn
import jax
import numpy as np
import pytest
from combinations import seldom
from jax.sharding import NamedSharding, PartitionSpec
from many_devices import assert_same_bits, entries_of
from test_tiered import by_key, made
from test_tiered_models import DENSE, DIM, loss_of

import jax_hkv as hkv
from jax_hkv import sharding, tiered
from jax_hkv.sharding import Placement

ADAM = hkv.optim.adam(0.1)
AXIS = {"axis_name": "device"}
DEVICES = 4


def placement_of(mode):
    devices = jax.devices("cpu")[:DEVICES]
    return Placement(jax.make_mesh((DEVICES,), ("device",), devices=devices), mode=mode)


@pytest.fixture(params=["shard_map", "pmap"])
def placement(request):
    return placement_of(request.param)


def tiers_of(placement, capacity, store, **options):
    cache = placement.create(lambda: made(capacity // DEVICES, **options))
    return tiered.Tiers(cache, tiered.create_store(cache, store, placement=placement))


def large(placement, capacity, **options):
    return placement.create(lambda: made(capacity // DEVICES, **options))


def stepper(placement):
    def train(table, ids, valid):
        table, found = sharding.find_or_insert(table, ids, valid=valid, **AXIS)
        return sharding.update(ADAM, table, found, 0.5 * found.values), found.counts

    def touch(table, ids, valid):
        scores = None
        if table.policy is hkv.Policy.LFU:
            scores = jax.numpy.zeros(ids.shape, "uint32")
        table, found = sharding.find_or_insert(table, ids, valid=valid, scores=scores, **AXIS)
        return table, found.counts

    return placement.step(train), placement.step(touch)


def assert_same_table(placement, tiers, one):
    exported = tiered.export_entries(tiers, placement=placement)
    assert_same_bits(by_key(exported), by_key(entries_of(placement.shards(one))))


def test_a_cache_on_the_host_is_told_how_it_comes_to_its_devices():
    placement = placement_of("shard_map")
    tiers = tiers_of(placement, 1024, 4096)
    far = tiers._replace(cache=jax.device_get(tiers.cache))
    ids = placement.put(np.arange(64, dtype=np.int32))
    with pytest.raises(TypeError, match="a cache must lie on the devices .* one of ndarray"):
        tiered.prefetch(far, ids, placement=placement)
    own = NamedSharding(placement.mesh, PartitionSpec(placement.axes))
    near = far._replace(cache=jax.device_put(far.cache, own))
    near, counts = tiered.prefetch(near, ids, placement=placement)
    assert int(counts.inserted) == 64
    with pytest.raises(TypeError, match=r"export_changes make Tiers\(\*pair\) of each"):
        hkv.sharding.export_changes(near, None)


@pytest.mark.parametrize(
    ("mode", "policy", "choices"),
    [
        ("shard_map", hkv.Policy.LFU, 1),
        pytest.param("pmap", hkv.Policy.EPOCH_LRU, 2, marks=pytest.mark.slow),
    ],
)
def test_parts_with_stores_train_as_one_large_table(mode, policy, choices, rng):
    """Rows, optimizer rows, scores, clock and counts in every bit."""
    placement = placement_of(mode)
    options = {"policy": policy, "choices": choices}
    tiers, one = tiers_of(placement, 1024, 16384, **options), large(placement, 16384, **options)
    train, touch = stepper(placement)
    restored = 0
    for _ in range(15):
        ids = rng.integers(0, 3000, DEVICES * 64).astype(np.int32)
        valid = rng.random(ids.shape) < 0.9
        batch = placement.put((ids, valid))
        tiers, counts = tiered.prefetch(tiers, batch[0], valid=batch[1], placement=placement)
        one, wanted = touch(one, *batch)
        assert int(counts.unique) == int(wanted.unique) == len(np.unique(ids[valid]))
        assert int(counts.hits) + int(counts.restored) == int(wanted.hits)
        assert int(counts.inserted) == int(wanted.inserted)
        assert int(counts.refused) == int(counts.dropped) == 0
        cache, of_step = train(tiers.cache, *batch)
        one, _ = train(one, *batch)
        assert int(of_step.hits) == int(of_step.unique)
        tiers = tiers._replace(cache=cache)
        restored += int(counts.restored)
    assert restored > 200
    assert_same_table(placement, tiers, one)
    assert tiered.size(tiers, placement=placement) == len(entries_of(placement.shards(one)).keys)
    ids = rng.integers(0, 6000, DEVICES * 64).astype(np.int32)
    put = placement.put(ids)
    tiers, counts = tiered.prefetch(tiers, put, insert=False, placement=placement)
    assert int(counts.inserted) == 0 and int(counts.restored) > 0

    def look(table, ids):
        return sharding.find(table, ids, fill="initial", **AXIS)[1][:2]

    look = placement.run(look)
    assert_same_bits(look(tiers.cache, put), look(one, put))


@pytest.mark.parametrize("mode", seldom(["shard_map", "pmap"], slow={"pmap"}))
def test_removals_exports_and_imports_go_through_all_parts(mode, rng):
    placement = placement_of(mode)
    tiers, one = tiers_of(placement, 512, 8192), large(placement, 8192)
    train, touch = stepper(placement)
    for _ in range(6):
        batch = placement.put((rng.integers(0, 1500, 256).astype(np.int32), np.ones(256, bool)))
        tiers, _ = tiered.prefetch(tiers, batch[0], placement=placement)
        tiers = tiers._replace(cache=train(tiers.cache, *batch)[0])
        one = train(touch(one, *batch)[0], *batch)[0]
    ids = rng.integers(0, 3000, (40, 5)).astype(np.int32)
    before = entries_of(placement.shards(one)).keys
    erase = placement.step(lambda table, ids: sharding.erase(table, ids, **AXIS))
    one, _ = erase(one, placement.put(ids.reshape(-1)))
    given = placement.put(ids) if mode == "shard_map" else ids
    tiers, erased = tiered.erase(tiers, given, placement=placement)
    known = np.isin(ids, before)
    assert erased.status.shape == ids.shape
    assert_same_bits(erased.status == hkv.Status.FOUND, known)
    assert int(erased.counts.hits) == len(np.unique(ids[known])) > 20
    assert_same_table(placement, tiers, one)
    exported = tiered.export_entries(tiers, placement=placement)
    fresh = tiers_of(placement, 512, 8192)
    fresh, counts = tiered.import_entries(fresh, exported, placement=placement)
    assert int(counts.inserted) == len(exported.keys)
    assert_same_table(placement, fresh, one)
    alone = made(512)
    alone = tiered.Tiers(alone, tiered.create_store(alone, 8192))
    alone, _ = tiered.import_entries(alone, exported)
    assert_same_bits(by_key(tiered.export_entries(alone)), by_key(exported))
    fresh, counts = tiered.prefetch(fresh, placement.put(ids[:8].reshape(-1)), placement=placement)
    batch = placement.put((ids[:8].reshape(-1), np.ones(40, bool)))
    one, wanted = touch(one, *batch)
    assert int(counts.inserted) == int(wanted.inserted) and int(counts.hits) == 0
    assert_same_table(placement, fresh, one)


def test_bags_of_all_devices_bring_their_ids(placement):
    """Without their padding, of which each device has its own."""
    parts = [[[10 * number + 1], [], [10 * number + 2, 3]] for number in range(DEVICES)]
    jagged = sharding.concatenate([hkv.Jagged.from_lists(own, capacity=5) for own in parts])
    ids = np.array([[part[0][0], part[2][0], 3, 7] for part in parts], np.int32)
    padded = hkv.Padded(ids, ids != 7)
    wanted = sorted({id for part in parts for bag in part for id in bag})
    for bags in (jagged, padded):
        tiers = tiers_of(placement, 512, 1024)
        tiers, counts = tiered.prefetch(tiers, placement.put(bags), placement=placement)
        assert int(counts.inserted) == int(counts.unique) == len(wanted)
        exported = tiered.export_entries(tiers, placement=placement)
        assert sorted(exported.keys.tolist()) == wanted
    with pytest.raises(TypeError, match="valid must be None where keys are Padded"):
        tiered.prefetch(tiers, placement.put(bags), valid=ids > 0, placement=placement)


def test_whole_tables_are_changed_part_by_part(placement):
    tiers = tiers_of(placement, 512, 1024, policy=hkv.Policy.EPOCH_LRU)
    ids = placement.put(np.arange(64, dtype=np.int32))
    tiers, _ = tiered.prefetch(tiers, ids, placement=placement)
    a_day = jax.jit(lambda table: hkv.expire(hkv.advance_epoch(table), 1)[0], donate_argnums=0)
    tiers = tiered.map_tables(tiers, a_day, placement=placement)
    assert tiered.size(tiers, placement=placement) == 64
    count = jax.jit(lambda table: hkv.expire(hkv.advance_epoch(table), 1), donate_argnums=0)
    tiers, gone = tiered.map_tables(tiers, count, has_aux=True, placement=placement)
    assert len(gone) == 2 * placement.devices and sum(map(int, gone[::2])) == 64
    assert tiered.size(tiers, placement=placement) == 0
    tiers, counts = tiered.prefetch(tiers, ids, placement=placement)
    assert int(counts.inserted) == 64
    donating = jax.jit(lambda table: (table, 0), donate_argnums=0)
    for wrong in (lambda table: (table, 0), donating):
        with pytest.raises(TypeError, match=r"Table, got tuple of fn\(tiers\.cache\): of what"):
            tiered.map_tables(tiers, wrong, placement=placement)
    assert tiered.size(tiers, placement=placement) == 64  # of tables that nobody has used up


def test_tiers_of_a_collection_over_devices_are_looked_at_before_one_is_used_up(placement):
    declared = hkv.Collection(
        [hkv.TableConfig(name, 512, dim) for name, dim in (("a", 2), ("b", 3))],
        [hkv.Feature(name, name) for name in "ab"],
    )
    both = {}
    for group in declared.groups:
        cache = placement.create(lambda group=group: group.create("device"))
        store = tiered.create_store(cache, 2048, placement=placement)
        both[group.name] = tiered.Tiers(cache, store)
    ids = {name: np.arange(5, dtype=np.int32) for name in "ab"}
    after, _ = declared.on_tables(
        tiered.erase, {"b": both["b"]}, {"b": ids["b"]}, placement=placement
    )
    with pytest.raises(RuntimeError, match=r"on_tables of 'b': .* used up by an earlier step"):
        declared.on_tables(tiered.erase, both, ids, placement=placement)
    _, counts = declared.on_tables(tiered.erase, {**both, **after}, ids, placement=placement)
    assert int(counts["a"].counts.hits) == 0


def test_parts_whose_step_raised_cannot_be_gone_on_with(placement):
    """With "pmap" their caches are copies, and alive."""
    kept = []

    def failing(cache):
        kept.append(jax.tree.map(jax.numpy.copy, cache))
        raise sharding.ExchangeOverflow("full")

    tiers = tiers_of(placement, 512, 1024)
    ids = placement.put(np.arange(64, dtype=np.int32))
    with pytest.raises(sharding.ExchangeOverflow, match="full"):
        tiered.step_and_prefetch(failing, tiers, ids, ids, placement=placement)
    for cache in (tiers.cache, kept[0]):
        with pytest.raises(RuntimeError, match="was used up .* catch such an error inside"):
            tiered.size(tiered.Tiers(cache, tiers.store), placement=placement)


class Model(nn.Module):
    collection: hkv.Collection

    @nn.compact
    def __call__(self, inputs, train=False):
        embed = hkv.linen.EmbedCollection(self.collection, axis_name="device", name="embed")
        rows = embed(inputs, train=train)
        return nn.Dense(1)(rows["user"] + rows["item"])[:, 0]


def collection_of_two(capacity):
    return hkv.Collection(
        [hkv.TableConfig(name, capacity, DIM, optimizer=ADAM) for name in ("users", "items")],
        [hkv.Feature("user", "users"), hkv.Feature("item", "items")],
    )


def test_a_model_over_devices_prefetches_all_of_its_tables(rng):
    placement = placement_of("shard_map")

    def batches(count):
        for _ in range(count):
            user, item = rng.integers(0, 1500, (2, 64)).astype(np.int32)
            yield {"user": user, "item": item}, ((user + item) % 2).astype(np.float32)

    ((inputs, _),) = batches(1)
    states = [
        placement.create(
            lambda size=size: hkv.linen.TrainState.create(
                Model(collection_of_two(size)),
                jax.random.key(0),
                {name: ids[:16] for name, ids in inputs.items()},
                tx=DENSE,
            )
        )
        for size in (256, 8192)
    ]
    steps = [hkv.linen.train_step(loss_of, placement=placement) for _ in states]
    collection = collection_of_two(256)
    (name,) = [group.name for group in collection.groups]
    table = states[0].tables["embed"][name]
    stores = {name: tiered.create_store(table, 8192, placement=placement)}
    restored = 0
    for inputs, labels in batches(15):
        inputs, labels = placement.put((inputs, labels))
        small, one = states
        tables, stores, counts = collection.prefetch(
            small.tables["embed"], stores, inputs, placement=placement
        )
        small = small.replace(tables={**small.tables, "embed": tables})
        small, info = steps[0](small, inputs, labels)
        one, wanted = steps[1](one, inputs, labels)
        assert float(info.loss) == float(wanted.loss)
        assert int(counts[name].refused) == int(counts[name].dropped) == 0
        restored += int(counts[name].restored)
        states = [small, one]
    assert restored > 50
    assert_same_bits(states[0].params, states[1].params)
    tiers = tiered.Tiers(states[0].tables["embed"][name], stores[name])
    exported = tiered.export_entries(tiers, placement=placement)
    wanted = sharding.export_entries(placement.shards(states[1].tables["embed"][name]))
    assert_same_bits(by_key(exported)[0][2:], by_key(wanted)[0][2:])
    sizes = collection.sizes({name: tiers}, placement=placement)
    assert sum(map(int, sizes.values())) == len(exported.keys)
    assert_same_bits(sizes, collection_of_two(8192).sizes(states[1].tables["embed"]))


IDS = np.arange(8, dtype=np.int32)
WRONG = {
    "no placement": (
        lambda placement: tiered.size(tiers_of(placement, 512, 1024), placement="device"),
        TypeError,
        r"size: placement must be a jax_hkv\.sharding\.Placement, or None .* got str",
    ),
    "one store": (
        lambda placement: tiered.prefetch(
            tiered.Tiers(large(placement, 512), made(1024)),
            placement.put(np.arange(8, dtype=np.int32)),
            placement=placement,
        ),
        TypeError,
        r"prefetch: tiers\.store must have a table for each of the 4 parts .* got Table: make "
        r"them by tiered\.create_store\(cache, capacity, placement=placement\)",
    ),
    "tables that are traced": (
        lambda placement: jax.jit(
            lambda tiers: tiered.prefetch(
                tiers, placement.put(np.arange(8, dtype=np.int32)), placement=placement
            )
        )(tiers_of(placement, 512, 1024)),
        TypeError,
        r"prefetch: tiers\.cache must be a table over devices outside of jit",
    ),
    "one store for all parts": (
        lambda placement: tiered.prefetch(
            tiered.Tiers(large(placement, 512), (made(1024),) * 4),
            placement.put(np.arange(8, dtype=np.int32)),
            placement=placement,
        ),
        ValueError,
        r"prefetch: store 1 of 'keys' must be another table than store 0 of 'keys'",
    ),
    "a table of one device": (
        lambda placement: tiered.create_store(made(512), 1024, placement=placement),
        TypeError,
        r"create_store: a table must be spread over the 4 devices",
    ),
    "the placement left out": (
        lambda placement: tiered.size(tiers_of(placement, 512, 1024)),
        TypeError,
        r"size: tiers\.store must be one table .* got 4, .*: give the placement= that",
    ),
    "the placement of a store left out": (
        lambda placement: tiered.create_store(large(placement, 512), 1024),
        TypeError,
        r"create_store: table must be a table of one device where no placement .* give the plac",
    ),
    "the placement of a cache left out": (
        lambda placement: tiered.prefetch(tiered.Tiers(large(placement, 512), made(1024)), IDS),
        TypeError,
        r"prefetch: tiers\.cache must be a table of one device .* got clocks .*: give the plac",
    ),
    "ids that are not put": (
        lambda placement: tiered.prefetch(
            tiers_of(placement, 512, 1024), np.arange(8, dtype=np.int32), placement=placement
        ),
        ValueError,
        r"^tiered\.prefetch: keys must .* got ndarray int32\[8\]: give placement\.put\(batch\)",
    ),
    "ids of pmap that are not put": (
        lambda _: tiered.prefetch(
            tiers_of(placement_of("pmap"), 512, 1024), IDS, placement=placement_of("pmap")
        ),
        ValueError,
        r"^tiered\.prefetch: keys must have the shape \[4, \.\.\.\]",
    ),
    "coming ids of pmap that are not put": (
        lambda _: tiered.step_and_prefetch(
            lambda cache: (cache, None),
            tiers_of(placement_of("pmap"), 512, 1024),
            IDS.reshape(4, 2),
            IDS,
            placement=placement_of("pmap"),
        ),
        ValueError,
        r"^tiered\.step_and_prefetch: coming must .* got ndarray int32\[8\]: give pla",
    ),
    "entries of another policy": (
        lambda placement: tiered.import_entries(
            tiers_of(placement, 512, 1024),
            sharding.export_entries(made(128, policy=hkv.Policy.LFU)),
            placement=placement,
        ),
        ValueError,
        r"import_entries: exported must have scores of Policy\.LRU",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_tiers_over_devices_is_named(name, placement):
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        call(placement)


def test_stores_of_parts_have_room_for_all_of_a_capacity_that_they_do_not_divide():
    placement = placement_of("shard_map")
    cache = placement.create(lambda: hkv.create(128, 2))
    stores = hkv.tiered.create_store(cache, 4 * 128 + 1, placement=placement)
    assert [store.capacity for store in stores] == [256] * 4
