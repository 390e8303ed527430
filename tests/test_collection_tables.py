"""Operations on the tables of a collection by their own names and ids."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
from functools import partial

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from many_devices import assert_same_bits

import jax_hkv as hkv
from jax_hkv import sharding, testing, tiered

DIM = 4
ADAM = hkv.optim.adam(1e-2)
TABLES = [
    hkv.TableConfig("users", 512, DIM, optimizer=ADAM),
    hkv.TableConfig("words", 512, 2 * DIM, optimizer=ADAM),
    hkv.TableConfig("items", 1024, DIM, optimizer=ADAM),
]
FEATURES = [
    hkv.Feature("user", "users"),
    hkv.Feature("title", "words", "mean"),
    hkv.Feature("item", "items", None),
]
IDS = {"items": np.array([[5, 6], [7, 5]], np.int32), "users": np.array([5, -1, 8], np.int32)}
FUSED = [True, False]


def filled(fuse, rng):
    """A collection whose tables hold the ids 0 to 63, and some that are folded."""
    collection = hkv.Collection(TABLES, FEATURES, fuse=fuse)
    tables = collection.create()
    ids = hkv.Keys.from_numpy(np.concatenate([np.arange(64), [-1, 2**62]]))
    for config in TABLES:
        group = collection.group_of(config.name)
        rows = rng.normal(size=(66, config.dim)).astype(np.float32)
        tables[group.name], _ = hkv.insert_or_assign(
            tables[group.name], group.keys(config.name, ids), rows
        )
    return collection, tables


def rows_of(rng, ids=IDS):
    return {
        name: rng.normal(size=(*own.shape, DIM)).astype(np.float32) for name, own in ids.items()
    }


def masks_of(rng):
    return {name: rng.random(own.shape) < 0.6 for name, own in IDS.items()}


OPERATIONS = {
    "find": (hkv.find, False, {"fill": "initial", "touch": True}),
    "contains": (hkv.contains, False, {}),
    "find_or_insert": (hkv.find_or_insert, False, {"return_evicted": True}),
    "insert_or_assign": (hkv.insert_or_assign, True, {}),
    "assign": (hkv.assign, True, {}),
    "erase": (hkv.erase, False, {}),
    "export_keys": (hkv.export_keys, False, {}),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("fuse", FUSED)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_by_names_is_that_by_keys_one_table_after_the_other(name, fuse, masked, rng):
    operation, has_rows, options = OPERATIONS[name]
    collection, tables = filled(fuse, rng)
    rows = [rows_of(rng)] if has_rows else []
    masks = {"valid": masks_of(rng)} if masked else {}
    expected, results = dict(tables), {}
    for table in ("users", "items"):
        group = collection.group_of(table)
        own = {option: by_table[table] for option, by_table in masks.items()}
        keys = group.keys(table, IDS[table])
        expected[group.name], results[table] = operation(
            expected[group.name], keys, *[each[table] for each in rows], **own, **options
        )
    actual = collection.on_tables(operation, tables, IDS, *rows, **masks, **options)
    assert_same_bits(actual, (expected, results))
    jitted = jax.jit(partial(collection.on_tables, operation, **options))
    assert_same_bits(jitted(tables, IDS, *rows, **masks), (expected, results))


@pytest.mark.parametrize("fuse", FUSED)
def test_erased_ids_go_from_their_own_table_alone(fuse, rng):
    collection, tables = filled(fuse, rng)
    tables, erased = collection.on_tables(hkv.erase, tables, {"users": np.arange(60, 70)})
    assert list(erased) == ["users"] and int(erased["users"].counts.hits) == 4
    sizes = {name: int(size) for name, size in collection.sizes(tables).items()}
    assert sizes == {"users": 62, "words": 66, "items": 66}
    everything = {config.name: np.arange(64) for config in TABLES}
    _, present = collection.on_tables(hkv.contains, tables, everything)
    assert present["items"].all() and present["words"].all()
    np.testing.assert_array_equal(present["users"], np.arange(64) < 60)


def test_donated_tables_are_not_copied(rng):
    collection, tables = filled(True, rng)
    write = partial(collection.on_tables, hkv.insert_or_assign)
    testing.assert_no_table_copies(write, tables, IDS, rows_of(rng))


@pytest.mark.parametrize("fuse", FUSED)
@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_over_devices_ids_go_to_the_owners_of_their_keys(mode, fuse, rng):
    """A warm start, a lookup and a removal there give the rows and counts of one device."""
    devices = jax.devices()[:4]
    if len(devices) < 4:
        pytest.skip("needs four devices")
    mesh = jax.make_mesh((4,), ("device",), devices=devices)
    placement = sharding.Placement(mesh, mode=mode)
    collection = hkv.Collection(TABLES, FEATURES, fuse=fuse)
    ids = {name: rng.choice(200, 64, replace=False).astype(np.int32) for name in IDS}
    rows = rows_of(rng, ids)
    gone = {"users": ids["users"][:16]}

    def write(tables, ids, rows):
        tables, written = collection.on_tables(
            sharding.insert_or_assign, tables, ids, rows, axis_name="device"
        )
        return tables, {name: each.counts for name, each in written.items()}

    def erase(tables, ids):
        tables, erased = collection.on_tables(sharding.erase, tables, ids, axis_name="device")
        return tables, erased["users"].counts

    def read(tables, ids):
        _, found = collection.on_tables(sharding.find, tables, ids, axis_name="device")
        return {name: (each.values, each.found) for name, each in found.items()}

    tables = placement.create(lambda: collection.create("device"))
    tables, counts = placement.step(write)(tables, *placement.put((ids, rows)))
    tables, erased = placement.step(erase)(tables, placement.put(gone))
    found = placement.run(read)(tables, placement.put(ids))

    assert int(erased.hits) == 16
    for name in IDS:
        assert int(counts[name].inserted) == 64
        present = ~np.isin(ids[name], gone.get(name, []))
        np.testing.assert_array_equal(np.ravel(found[name][1]), present)
        values = np.where(present[:, None], rows[name], 0)
        np.testing.assert_array_equal(np.reshape(found[name][0], (64, DIM)), values)


@pytest.mark.parametrize("fuse", FUSED)
def test_small_tables_before_large_ones_train_as_the_large_ones(fuse, rng):
    """Padded and jagged inputs; every row that a feature gets, in every step, in every bit."""

    def made(capacity):
        tables = [dataclasses.replace(config, capacity=capacity) for config in TABLES]
        return hkv.Collection(tables, FEATURES, fuse=fuse)

    small, large = made(256), made(4096)

    def inputs_of_step():
        words = [rng.integers(0, 900, rng.integers(0, 6)) for _ in range(24)]
        items = rng.integers(0, 900, (24, 3)).astype(np.int32)
        return {
            "user": rng.integers(0, 900, 24).astype(np.int32),
            "title": hkv.Jagged.from_lists(words, capacity=150),
            "item": hkv.Padded(items, valid=rng.random((24, 3)) < 0.7),
        }

    def admit(tables, stores, inputs):
        lost = 0
        for name, (keys, valid) in small.keys(inputs).items():
            cache, store = tables[name], stores[name]
            cache, found = hkv.find_or_insert(cache, keys, valid=valid, return_evicted=True)
            is_new = hkv.is_new(found.status)
            store, back = hkv.export_keys(store, keys, valid=is_new)
            stores[name], kept = hkv.import_batch(store, found.evicted)
            tables[name], _ = hkv.import_batch(cache, back)
            lost += found.counts.refused + kept.counts.refused + kept.counts.evicted
        return tables, stores, lost

    def train(collection, tables, inputs):
        tables, found = collection.lookup(tables, inputs, train=True)
        gradients = jax.tree.map(lambda rows: 0.5 * rows, found.rows)
        for name, result in found.results.items():
            tables[name] = ADAM.update(tables[name], result, gradients[name])
        return tables, collection.spread(found.rows, found.parts)

    admit, step, plain = map(jax.jit, (admit, partial(train, small), partial(train, large)))
    tables, stores, whole = small.create(), large.create(), large.create()
    for _ in range(25):
        inputs = inputs_of_step()
        tables, stores, lost = admit(tables, stores, inputs)
        assert int(lost) == 0
        tables, rows = step(tables, inputs)
        whole, expected = plain(whole, inputs)
        assert_same_bits(rows, expected)
    assert all(int(hkv.size(store)) > 100 for store in stores.values())


def test_keys_of_some_features_are_those_of_their_tables(rng):
    collection = hkv.Collection(TABLES, FEATURES)
    found = collection.keys({"user": IDS["users"]}, partial=True)
    assert list(found) == ["users+items"]
    keys, valid = found["users+items"]
    expected = collection.group_of("users").keys("users", IDS["users"])
    assert valid is None and keys.to_numpy().tolist() == expected.to_numpy().tolist()
    given = {
        "title": hkv.Jagged.from_lists([[4, 5], [], [6]], capacity=5),
        "item": hkv.Padded(IDS["items"], valid=np.array([[True, False], [True, True]])),
    }
    keys, valid = collection.keys(given, partial=True)["words"]
    assert keys.to_numpy()[np.asarray(valid)].tolist() == [4, 5, 6] and valid.shape == (5,)
    keys, valid = collection.keys(given, partial=True)["users+items"]
    meant = collection.group_of("items").keys("items", np.array([5, 7, 5], np.int32))
    assert keys.to_numpy()[np.asarray(valid)].tolist() == meant.to_numpy().tolist()
    with pytest.raises(ValueError, match=r"Collection\.keys: inputs must be of the features"):
        collection.keys({"user": IDS["users"]})


class Linen(linen.Module):
    collection: hkv.Collection

    @linen.compact
    def __call__(self, inputs, *, train=False):
        rows = hkv.linen.EmbedCollection(self.collection, name="embed")(inputs, train=train)
        return sum(jnp.sum(own) for own in rows.values())


INPUTS = {"user": IDS["users"], "title": np.zeros((3, 2), np.int32), "item": IDS["items"]}


def test_tables_of_a_linen_state_are_changed_by_name(rng):
    collection = hkv.Collection(TABLES, FEATURES)
    model = Linen(collection)
    state = hkv.linen.TrainState.create(model, jax.random.key(0), INPUTS, tx=optax.sgd(0.1))
    step = hkv.linen.train_step(lambda apply, inputs: apply(inputs, train=True))
    state, _ = step(state, INPUTS)
    tables, erased = collection.on_tables(
        hkv.erase, state.tables["embed"], {"users": np.array([5, 9], np.int32)}
    )
    state = state.replace(tables={"embed": tables})
    assert int(erased["users"].counts.hits) == 1
    state, info = step(state, INPUTS)
    [counts] = [counts for where, counts in info.counts.items() if where.endswith("users")]
    assert (int(counts.inserted), int(counts.hits)) == (1, 2)


def test_tables_of_an_nnx_layer_are_changed_by_name(rng):
    collection = hkv.Collection(TABLES, FEATURES)
    layer = hkv.nnx.EmbedCollection(collection)
    rows = rows_of(rng)
    rows["items"][0, 0] = rows["items"][1, 1]  # of one id
    layer.set_tables(collection.on_tables(hkv.insert_or_assign, layer.tables, IDS, rows)[0])
    found = layer(INPUTS)
    np.testing.assert_array_equal(found["item"], rows["items"])
    np.testing.assert_array_equal(found["user"], rows["users"])
    with pytest.raises(ValueError, match=re.escape("EmbedCollection.set_tables: tables must be")):
        layer.set_tables({"users": layer.tables["words"]})
    assert isinstance(getattr(layer, "table_users+items"), nnx.Variable)


WRONG = {
    "a feature": (
        lambda call, tables: call(hkv.erase, tables, {"user": IDS["users"]}),
        "Collection.on_tables: ids must be by names of the tables ['users', 'words', 'items'], got "
        "['user']: the tables of the features are {'user': 'users'}",
    ),
    "no dict": (
        lambda call, tables: call(hkv.erase, tables, IDS["users"]),
        "ids must be a dict by names of the tables ['users', 'words', 'items'], got ndarray",
    ),
    "rows of another table": (
        lambda call, tables: call(
            hkv.insert_or_assign, tables, {"users": IDS["users"]}, {"items": np.ones((3, DIM))}
        ),
        "arguments[0] must be of the tables that ids are of, ['users'], got ['items']",
    ),
    "masks of more tables": (
        lambda call, tables: call(
            hkv.erase, tables, {"users": IDS["users"]}, valid={"users": None, "items": None}
        ),
        "valid must be of the tables that ids are of, ['users'], got ['items', 'users']",
    ),
    "an operation by its name": (
        lambda call, tables: call("erase", tables, {"users": IDS["users"]}),
        "Collection.on_tables: operation must be a function of (table, keys, ...) to a table and a "
        "result, got str: give jax_hkv.find",
    ),
    "an operation without a table": (
        lambda call, tables: call(hkv.initial_rows, tables, {"users": IDS["users"][:2]}),
        "operation must return a table and a result, as jax_hkv.find and jax_hkv.erase do, got "
        "ArrayImpl",
    ),
    "one table": (
        lambda call, tables: call(hkv.find, tables["words"], {"words": IDS["users"]}),
        "tables must be the dict of those of create(), ['users+items', 'words'], got Table",
    ),
    "tables by their own names": (
        lambda call, tables: call(hkv.erase, {"users": None}, {"users": IDS["users"]}),
        "Collection.on_tables: tables must be those of create(), ['users+items', 'words']",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name, rng):
    collection, tables = filled(True, rng)
    call, message = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        call(collection.on_tables, tables)


def test_what_an_operation_refuses_is_said_with_the_table(rng):
    collection, tables = filled(True, rng)
    with pytest.raises(ValueError, match="insert_or_assign: values must") as raised:
        collection.on_tables(
            hkv.insert_or_assign, tables, {"items": IDS["items"]}, {"items": np.ones((3, DIM))}
        )
    assert raised.value.__notes__ == ["Collection.on_tables: of the table 'items'"]


@pytest.mark.parametrize("of_second", [None, ADAM])
def test_tables_that_training_only_reads_are_named(of_second):
    """A forgotten optimizer would train nothing, and say nothing."""
    optimizers = {"a": ADAM, "b": of_second}
    collection = hkv.Collection(
        [hkv.TableConfig(name, 128, DIM, optimizer=own) for name, own in optimizers.items()],
        [hkv.Feature(name, name) for name in optimizers],
    )
    ids = np.array([1, 2], np.int32)

    def looked_up(*names, train=True):
        inputs = dict.fromkeys(names, ids)
        tables, _ = collection.lookup(collection.create(), inputs, train=train, partial=True)
        return collection.sizes(tables)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        looked_up("a")
        looked_up("a", "b", train=False)
    is_told = pytest.warns(UserWarning, match=r"lookup: .*\['b'\] are only read.* no optimizer")
    with contextlib.nullcontext() if of_second else is_told:
        assert int(looked_up("a", "b")["b"]) == (2 if of_second else 0)


def other_than(**changes):
    """A table as the collection's "words", but for this."""
    config = dataclasses.replace(TABLES[1], **changes)
    return hkv.Collection([config], [hkv.Feature("title", "words")]).create()["words"]


REFUSED = {
    "rows of another table": (
        {"words": other_than(dim=DIM)},
        "tables['words'] must have rows of 8 elements, got dim 4: put one there that was made with "
        "dim=8",
    ),
    "rows of another type": (
        {"words": other_than(dtype="bfloat16", optimizer=None)},
        "tables['words'] must have rows of float32, got bfloat16: put one there that came of",
    ),
    "another policy": (
        {"words": other_than(policy=hkv.Policy.LFU)},
        "tables['words'] must have the policy LRU, got LFU: put one there that came of",
    ),
    "keys that are ids": (
        {"users+items": ADAM.init(hkv.create(256, DIM))},
        "tables['users+items'] must have keys of ['users', 'items'] told apart by 1 bit, got keys "
        "that are ids: put one there",
    ),
    "tables in another order": (
        {"users+items": hkv.Collection(TABLES[::-1], FEATURES).create()["items+users"]},
        "must have keys of ['users', 'items'] told apart by 1 bit, got keys of ['items', 'users'] "
        "told apart by 1 bit",
    ),
    "more bits": (
        {"users+items": hkv.Collection(TABLES, FEATURES, table_bits=8).create()["users+items"]},
        "told apart by 8 bits",
    ),
    "a result": (
        {"words": hkv.find(other_than(), IDS["users"])},
        "tables['words'] must be a jax_hkv Table, got tuple: operations return (table, result), "
        "unpack them",
    ),
    "nothing": ({"words": None}, "tables['words'] must be a jax_hkv Table, got NoneType"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tables_that_are_not_those_of_their_groups_are_refused(name):
    """Rows of another length would go to the features, and ids to other tables' entries."""
    wrong, message = REFUSED[name]
    collection = hkv.Collection(TABLES, FEATURES)
    tables = collection.create()
    layer = hkv.nnx.EmbedCollection(collection)
    given = {**tables, **wrong}
    calls = {
        "Collection.lookup": lambda: collection.lookup(given, INPUTS),
        "Collection.sizes": lambda: collection.sizes(wrong),
        "Collection.on_tables": lambda: collection.on_tables(hkv.erase, given, IDS),
        "Collection.prefetch": lambda: collection.prefetch(given, {}, INPUTS),
        "EmbedCollection.set_tables": lambda: layer.set_tables(given),
    }
    before = layer.tables
    for call, refused in calls.items():
        with pytest.raises((TypeError, ValueError), match=re.escape(f"{call}: tables[")) as raised:
            refused()
        assert message in str(raised.value)
    for mine, own in zip(before.values(), layer.tables.values(), strict=True):
        assert mine.values is own.values


def test_tiers_are_refused_where_tables_are_looked_up():
    collection = hkv.Collection(TABLES, FEATURES)
    tables = collection.create()
    store = hkv.tiered.create_store(tables["words"], 2048)
    tables["words"] = hkv.tiered.Tiers(tables["words"], store)
    with pytest.raises(TypeError, match=r"got Tiers: tiers are for .*takes tiers\.cache"):
        collection.lookup(tables, INPUTS)
    wrong = hkv.tiered.Tiers(other_than(dim=DIM), store)
    with pytest.raises(ValueError, match=r"tables\['words'\]\.cache must have rows of 8"):
        collection.on_tables(hkv.tiered.find, {"words": wrong}, {"words": IDS["users"]})


def test_groups_and_optimizers_say_in_one_line_what_they_are():
    adagrad = hkv.optim.adagrad(0.05, eps=0.5)
    configs = [hkv.TableConfig(name, 1000, 8, optimizer=adagrad) for name in ("users", "items")]
    features = [hkv.Feature("user", "users"), hkv.Feature("clicked", "items", "mean")]
    (group,) = hkv.Collection(configs, features).groups
    rule = "<adagrad (sum_of_squares in float32), rate 0.05, eps 0.5, sum_of_squares from 0.1>"
    assert repr(adagrad) == rule
    assert repr(group) == (
        "Group('users+items', dim=8, float32, LRU, tables={'users': 1000, 'items': 1000}, "
        f"features=['user', 'clicked'], optimizer={rule})"
    )
    scheduled = hkv.optim.sgd(lambda step: 0.1, max_gradient=2)
    assert repr(scheduled) == "<sgd (no rows in float32), rate by a schedule, max_gradient 2.0>"


def test_tables_may_differ_from_their_groups_in_size_and_not_in_tables_that_came_behind():
    """With keys of those they would be taken for tables that have none."""
    collection = hkv.Collection(TABLES[::2], FEATURES[::2], table_bits=4)
    (name,) = tables = collection.create()
    write = partial(collection.on_tables, hkv.find_or_insert)
    wider, _ = hkv.resize(write(tables, IDS)[0][name], 4096)
    config = dataclasses.replace(TABLES[0], name="later")
    more = hkv.Collection(
        [*TABLES[::2], config], [*FEATURES[::2], hkv.Feature("later", "later")], table_bits=4
    )
    inputs = {"user": IDS["users"], "item": IDS["items"]}
    bare = dataclasses.replace(wider, optimizer=None)  # as for serving
    _, found = collection.lookup({name: bare}, inputs)
    assert (np.asarray(found.slots[name]) >= 0).all()
    (group,) = more.groups
    with pytest.raises(ValueError, match=r"must have keys of .*'later'\] told .*by import_entries"):
        more.lookup({group.name: wider}, inputs, partial=True)
    moved, counts = hkv.sharding.import_entries(
        None, group.create(), hkv.sharding.export_entries(wider)
    )
    _, found = more.lookup({group.name: moved}, inputs, partial=True)
    assert int(counts.inserted) == hkv.size(wider)
    assert (np.asarray(found.slots[group.name]) >= 0).all()


def test_bags_are_taken_where_the_operation_takes_them():
    configs = [hkv.TableConfig(name, 256, 2) for name in ("users", "items")]
    features = [hkv.Feature("user", "users"), hkv.Feature("item", "items")]
    collection = hkv.Collection(configs, features)
    lists = {"users": [[1, 2], [], [3]], "items": [[4], [5, 5, 1]]}
    bags = {name: hkv.Jagged.from_lists(own) for name, own in lists.items()}
    tables, _ = collection.on_tables(
        hkv.insert_or_assign,
        collection.create(),
        {name: np.arange(6, dtype=np.int32) for name in lists},
        {name: np.arange(12, dtype=np.float32).reshape(6, 2) for name in lists},
    )
    _, pooled = collection.on_tables(hkv.find_pooled, tables, bags)
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    for name, own in lists.items():
        np.testing.assert_array_equal(
            pooled[name].values, [rows[np.array(bag, int)].sum(axis=0) for bag in own]
        )
    with pytest.raises(TypeError, match="keys"):
        collection.on_tables(hkv.contains, tables, bags)


def test_bags_of_a_table_use_no_tiers_up():
    """What none of the operations on tiers takes is told before the first one."""
    adam = hkv.optim.adam(0.1)
    configs = [hkv.TableConfig(name, 256, 2, optimizer=adam) for name in ("users", "items")]
    features = [hkv.Feature("user", "users"), hkv.Feature("item", "items")]
    collection = hkv.Collection(configs, features)
    ((name, table),) = collection.create().items()
    tiers = {name: tiered.Tiers(table, tiered.create_store(table, 1024))}
    ids = {"users": np.array([1], np.int32), "items": hkv.Jagged.from_lists([[1, 2]])}
    with pytest.raises(TypeError, match="ids must be Keys or integers where tables are Tiers"):
        collection.on_tables(tiered.erase, tiers, ids)
    assert int(tiered.size(tiers[name])) == 0  # it is still there
