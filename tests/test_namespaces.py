"""Keys of fused tables: what was trained goes nowhere that reads them as other ids."""

from __future__ import annotations

import dataclasses
import enum
import warnings

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from many_devices import assert_same_bits
from test_checkpoint import restore_in_part

import jax_hkv as hkv
import jax_hkv.linen
import jax_hkv.nnx
from jax_hkv import sharding

DIM = 4
ADAGRAD = hkv.optim.adagrad(0.1)
NAMES = ("users", "items", "words")
HASHES = np.array([5, 2**62 + 17, -3, 2**59, 7], np.int64)  # most are folded


def collection_of(*names, **options):
    return hkv.Collection(
        [hkv.TableConfig(name, 512, DIM, optimizer=ADAGRAD) for name in names],
        [hkv.Feature(f"f_{name}", name, None) for name in names],
        **options,
    )


def inputs_of(names):
    return {f"f_{name}": hkv.Keys.from_numpy(HASHES + n) for n, name in enumerate(names)}


def trained(collection, names):
    """The only physical table, with rows that differ from id to id and from table to table."""
    tables, found = collection.lookup(collection.create(), inputs_of(names), train=True)
    (group,) = collection.groups
    result = found.results[group.name]
    slopes = jnp.arange(result.values.size, dtype=jnp.float32).reshape(result.values.shape)
    return ADAGRAD.update(tables[group.name], result, slopes)


def rows_of(collection, table, names):
    (group,) = collection.groups
    _, found = collection.lookup({group.name: table}, inputs_of(names), fill=0.0, partial=True)
    rows = collection.spread(found.rows, found.parts)
    return {name: np.asarray(rows[name]) for name in inputs_of(names)}


class Linen(linen.Module):
    collection: hkv.Collection

    @linen.compact
    def __call__(self, inputs, *, train=False):
        rows = hkv.linen.EmbedCollection(self.collection)(inputs, train=train)
        return sum(jnp.sum(own) for own in rows.values())


class Nnx(nnx.Module):
    def __init__(self, collection):
        self.embed = hkv.nnx.EmbedCollection(collection)


def linen_state(collection):
    inputs = inputs_of([config.name for config in collection.tables])
    return hkv.linen.TrainState.create(
        Linen(collection), jax.random.key(0), inputs, tx=optax.sgd(0.1)
    )


def nnx_state(collection):
    return nnx.split(hkv.nnx.TrainState(Nnx(collection), optax.sgd(0.1)))[1]


OTHERS = {
    "another order": collection_of("items", "users"),
    "more bits": collection_of("users", "items", table_bits=4),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("make", [linen_state, nnx_state])
def test_a_checkpoint_is_not_restored_into_tables_of_other_keys(make, other, tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", make(collection_of("users", "items")))
    like = make(OTHERS[other])
    with ocp.StandardCheckpointer() as checkpointer, pytest.raises(ValueError, match="users"):
        checkpointer.restore(tmp_path / "state", like)


def test_tables_of_an_nnx_model_are_restored_by_their_names(tmp_path):
    """Whatever their order: those that are not fused have equal shapes."""

    def make(*names):
        return hkv.nnx.TrainState(Nnx(collection_of(*names, fuse=False)), optax.sgd(0.1))

    saved, empty = make("users", "items"), collection_of("items").create()
    users = trained(collection_of("users"), ["users"])
    saved.model.embed.set_tables({"users": users, **empty})
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.split(saved)[1])
    graph, like = nnx.split(nnx.eval_shape(lambda: make("items", "users")))
    with ocp.StandardCheckpointer() as checkpointer:
        restored = nnx.merge(graph, checkpointer.restore(tmp_path / "state", like))
    assert_same_bits(restored.model.embed.tables, {"users": users, **empty})


def test_the_bits_of_keys_stand_in_the_names_of_arrays():
    def names(table):
        leaves = jax.tree_util.tree_leaves_with_path(table)
        return " ".join(jax.tree_util.keystr(path) for path, _ in leaves)

    (fused,) = collection_of("users", "items", table_bits=3).create().values()
    (alone,) = collection_of("users").create().values()
    assert "choices=1, namespace=3 bits)" in names(fused)
    assert "choices=1)" in names(alone) and names(alone) == names(
        ADAGRAD.init(hkv.create(512, DIM))
    )


@pytest.mark.parametrize(
    ("names", "bits"), [(("users", "items"), 4), (("items", "users"), 1), (("users", "words"), 1)]
)
def test_a_fused_table_is_not_restored_into_one_of_other_tables(names, bits, tmp_path):
    """By Orbax and by Flax, under whatever name; nor are its ids then those of others."""
    (saved,) = collection_of("users", "items").create().values()
    (like,) = collection_of(*names, table_bits=bits).create().values()
    text = flax.serialization.to_bytes(saved)
    with pytest.raises(ValueError, match="missing: .*namespace.*unknown"):
        flax.serialization.from_bytes(like, text)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "table", saved)
    with ocp.StandardCheckpointer() as checkpointer, pytest.raises(ValueError, match="namespace"):
        checkpointer.restore(tmp_path / "table", jax.eval_shape(lambda: like))


def test_entries_go_into_tables_that_have_their_keys(tmp_path):
    """Through files and Orbax; with other tables behind, but in no other order."""
    old, new = collection_of("users", "items", table_bits=2), collection_of(*NAMES, table_bits=2)
    table = trained(old, NAMES[:2])
    exported = sharding.export_entries(table)
    sharding.save_entries(tmp_path / "entries", exported)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", exported)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = sharding.Exported(**checkpointer.restore(tmp_path / "orbax"))
    expected = rows_of(old, table, NAMES[:2])
    for given in (exported, sharding.load_entries(tmp_path / "entries"), restored):
        assert_same_bits(given.namespace, exported.namespace)
        for collection in (old, new):
            (empty,) = collection.create().values()
            moved, counts = sharding.import_entries(None, empty, given)
            assert int(counts.inserted) == 2 * len(HASHES)
            assert_same_bits(rows_of(collection, moved, NAMES[:2]), expected)
    back = sharding.export_entries(moved)
    (empty,) = old.create().values()
    message = r"like the table's, keys of \['users', 'items'\] told apart by 2 bits, got keys of \["
    with pytest.raises(ValueError, match=message):
        sharding.import_entries(None, empty, back)
    with pytest.raises(ValueError, match=r"join_entries: .*'words'\] told apart"):
        sharding.join_entries([exported, back])


WRONG = {
    "another order": collection_of("items", "users"),
    "more bits": collection_of("users", "items", table_bits=4),
    "one of them": collection_of("items"),
    "a table of that place": collection_of("items", table_bits=1),
}


@pytest.mark.parametrize("name", WRONG)
def test_entries_with_other_keys_are_refused(name):
    exported = sharding.export_entries(trained(collection_of("users", "items"), NAMES[:2]))
    (table,) = WRONG[name].create().values()
    with pytest.raises(ValueError, match=r"import_entries: exported must have keys .*group\.take"):
        sharding.import_entries(None, table, exported)
    plain = sharding.export_entries(ADAGRAD.init(hkv.create(128, DIM)))
    if name != "one of them":  # whose keys are ids
        with pytest.raises(ValueError, match=r"got keys that are ids: .*namespace=group"):
            sharding.import_entries(None, table, plain)


@pytest.mark.parametrize("names", [("items",), ("words", "items"), ("users", "words"), NAMES])
def test_a_group_takes_what_another_one_has_of_its_tables(names):
    """Folded ids too, with the rows and optimizer rows that they had, and nothing of the others."""
    whole, part = collection_of(*NAMES), collection_of(*names, table_bits=2)
    table = trained(whole, NAMES)
    exported = sharding.export_entries(table)
    (source,), (group,) = whole.groups, part.groups
    taken = group.take(exported, of=source)
    assert len(taken.keys) == len(names) * len(HASHES)
    moved, counts = sharding.import_entries(None, group.create(), taken)
    assert int(counts.inserted) == len(taken.keys)
    inputs = {
        name: own for name, own in inputs_of(NAMES).items() if name.removeprefix("f_") in names
    }
    _, found = part.lookup({group.name: moved}, inputs, fill=0.0)
    rows, expected = part.spread(found.rows, found.parts), rows_of(whole, table, NAMES)
    for name in inputs:
        assert_same_bits(np.asarray(rows[name]), expected[name])
        assert expected[name].any()
    sums = {tuple(row) for row in exported.optimizer["sum_of_squares"].tolist()}
    assert {tuple(row) for row in taken.optimizer["sum_of_squares"].tolist()} <= sums
    sizes = {name: int(size) for name, size in part.sizes({group.name: moved}).items()}
    assert sizes == dict.fromkeys(names, len(HASHES))


def test_what_a_group_cannot_take_is_named():
    whole = collection_of("users", "items")
    exported = sharding.export_entries(trained(whole, NAMES[:2]))
    (source,), (other,) = whole.groups, collection_of("items", table_bits=4).groups
    with pytest.raises(ValueError, match=r"Group 'items'.take: .* 4 bits .*table_bits=1"):
        other.take(exported, of=source)
    with pytest.raises(
        ValueError, match=r"take: exported must be of the table of `of`.*by 4 bits.*1 bit:"
    ):
        source.take(exported, of=other)

    with pytest.raises(TypeError, match=r"take: of must be the group .* got str: give coll"):
        source.take(exported, of="items")
    with pytest.raises(TypeError, match=r"take: exported must be what export_entries returned"):
        source.take(source.create(), of=source)
    wrong = exported._replace(namespace=np.zeros(3, np.uint8))
    with pytest.raises(TypeError, match=r"exported\.namespace must be as it was exported, or the"):
        sharding.import_entries(None, source.create(), wrong)


def apart_by_optimizer(**options):
    """Tables that would be put together, had they none."""
    optimizers = {"users": ADAGRAD, "items": hkv.optim.adam(0.1), "words": ADAGRAD}
    configs = [hkv.TableConfig(name, 512, DIM, optimizer=tx) for name, tx in optimizers.items()]
    features = [hkv.Feature(f"f_{name}", name, None) for name in NAMES]
    return hkv.Collection(configs, features, **options)


def test_a_collection_is_served_without_its_optimizers_rows(tmp_path):
    """As the tutorial says."""

    def is_table(leaf):
        return isinstance(leaf, hkv.Table)

    def bare(leaf):
        return dataclasses.replace(leaf, optimizer=None) if is_table(leaf) else leaf

    state = linen_state(apart_by_optimizer())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    serving, inputs = Linen(apart_by_optimizer()), inputs_of(NAMES)
    target = jax.eval_shape(lambda: serving.init(jax.random.key(0), inputs))
    target = jax.tree.map(bare, target, is_leaf=is_table)
    variables = restore_in_part(tmp_path / "state", target)
    assert not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(variables))
    assert float(serving.apply(variables, inputs)) == float(state.apply(inputs)) != 0


@pytest.mark.parametrize("options", [{}, {"fuse": False}, {"table_bits": 8}], ids=str)
def test_tables_of_ids_are_followed_by_others_that_were_put_together(options):
    """Their keys are whole ids, of which those of any group are made; increments, too."""
    trained = apart_by_optimizer(fuse=False)
    tables = trained.create()
    configs = [dataclasses.replace(config, optimizer=None) for config in trained.tables]
    serving = hkv.Collection(configs, trained.features, **options)
    served, known, ids = serving.create(), dict.fromkeys(NAMES), {}
    for seen, gone in ((HASHES, HASHES[:0]), (HASHES[:3] + 9, HASHES[:2])):
        for number, name in enumerate(NAMES):
            ids[name] = seen + number
            table, _ = hkv.find_or_insert(tables[name], hkv.Keys.from_numpy(ids[name]))
            tables[name], _ = hkv.erase(table, hkv.Keys.from_numpy(gone + number))
            group, of = serving.group_of(name), trained.group_of(name)
            known[name] = sharding.export_changes(tables[name], known[name])
            taken = group.take(known[name], of=of, names={})
            served[group.name], counts = sharding.import_changes(None, served[group.name], taken)
            assert (int(counts.entries.inserted), int(counts.erased)) == (len(seen), len(gone))
    for name in NAMES:
        group, keys = serving.group_of(name), hkv.Keys.from_numpy(ids[name])
        expected = hkv.find(tables[name], keys)[1]
        found = hkv.find(served[group.name], group.keys(name, keys))[1]
        assert found.found.all()
        np.testing.assert_array_equal(found.values, expected.values)
    sizes = {name: int(size) for name, size in serving.sizes(served).items()}
    assert sizes == {name: int(hkv.size(tables[name])) for name in NAMES}


@pytest.mark.parametrize("bits", [0, 8])
def test_tables_that_were_renamed_are_taken_by_their_names_of_before(bits):
    old = collection_of("users", "items", table_bits=bits or None)
    new = collection_of("people", "things", table_bits=bits or None)
    (of,), (group,) = old.groups, new.groups
    exported = sharding.export_entries(trained(old, ("users", "items")))
    with pytest.raises(ValueError, match=r"tables of this group.*names=\{'people': 'users'\}"):
        group.take(exported, of=of)
    taken = group.take(exported, of=of, names={"things": "items", "people": "users"})
    table, counts = sharding.import_entries(None, group.create(), taken)
    assert int(counts.inserted) == 2 * len(HASHES)
    for n, (mine, its) in enumerate((("people", "users"), ("things", "items"))):
        keys = hkv.Keys.from_numpy(HASHES + n)
        _, found = hkv.find(table, group.keys(mine, keys))
        before = hkv.find(trained(old, ("users", "items")), of.keys(its, keys))[1]
        assert found.found.all() and before.found.all()
        np.testing.assert_array_equal(found.values, before.values)
    for names in ({"things": "words"}, {"others": "items"}, {"people": "items", "things": "items"}):
        with pytest.raises(ValueError, match="names must be from names of this group's tables"):
            group.take(exported, of=of, names=names)


def test_a_table_that_may_have_been_renamed_is_warned_of():
    old, new = collection_of("users", "items"), collection_of("users", "things")
    (of,), (group,) = old.groups, new.groups
    changes = sharding.export_changes(trained(old, ("users", "items")), None)
    with pytest.warns(UserWarning, match=r"\['items'\] are left out, and \['things'\] get none"):
        taken = group.take(changes, of=of)
    assert len(taken.entries.keys) == len(HASHES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(group.take(changes, of=of, names={}).entries.keys) == len(HASHES)
        whole = group.take(changes, of=of, names={"things": "items"})
        some = collection_of("items", table_bits=1).groups[0].take(changes, of=of)
    assert (len(whole.entries.keys), whole.before) == (2 * len(HASHES), changes.before)
    assert len(some.entries.keys) == len(HASHES)


def test_more_tables_than_the_bits_of_before_are_given_keys_anew():
    """As the error says: ids that none of them folded."""
    old, new = collection_of("users", "items"), collection_of("users", "items", "cities")
    (of,), (group,) = old.groups, new.groups
    tables = old.create()
    ids = {"users": np.arange(40), "items": np.arange(20) + 2**40}
    for name, own in ids.items():
        keys = of.keys(name, hkv.Keys.from_numpy(own))
        tables[of.name], _ = hkv.find_or_insert(tables[of.name], keys)
    exported = sharding.export_entries(tables[of.name])
    with pytest.raises(ValueError, match=r"one of 1: .* 3 tables need 2\. .*self.keys\(name"):
        group.take(exported, of=of)
    keys = exported.keys.copy()
    for name in ids:
        given, own = of.ids(name, hkv.Keys.from_numpy(exported.keys))
        keys[np.asarray(own)] = group.keys(name, given).to_numpy()[np.asarray(own)]
    moved = exported._replace(keys=keys, namespace=group.namespace)
    table, counts = sharding.import_entries(None, new.create()[group.name], moved)
    assert int(counts.inserted) == 60
    for name, own in ids.items():
        _, found = hkv.find(table, group.keys(name, hkv.Keys.from_numpy(own)))
        before = hkv.find(tables[of.name], of.keys(name, hkv.Keys.from_numpy(own)))[1]
        assert found.found.all()
        np.testing.assert_array_equal(found.values, before.values)


def test_an_export_made_by_hand_may_have_what_a_group_says(tmp_path):
    """As the guide's warm start does; files hold it as text."""
    (group,) = collection_of("users", "items").groups
    exported = sharding.export_entries(trained(collection_of("users", "items"), NAMES[:2]))
    by_hand = exported._replace(namespace=group.namespace)
    sharding.save_entries(tmp_path / "entries", by_hand)
    with open(tmp_path / "entries", "rb") as file:  # as one reads what is stored elsewhere
        opened = sharding.load_entries(file)
    for given in (by_hand, sharding.load_entries(tmp_path / "entries"), opened):
        _, counts = sharding.import_entries(None, group.create(), given)
        assert int(counts.inserted) == 2 * len(HASHES)


def test_sightings_come_along_between_groups_of_the_same_tables():
    rule = hkv.admission.frequency(3, width=64)

    def group_of(*names, capacity=512):
        configs = [hkv.TableConfig(name, capacity, DIM, admission=rule) for name in names]
        return hkv.Collection(configs, [hkv.Feature(name, name) for name in names]).groups[0]

    source, wider, other = group_of("a", "b"), group_of("a", "b", capacity=1024), group_of("b", "a")
    table, _ = hkv.find_or_insert(source.create(), source.keys("a", np.arange(9, dtype=np.int32)))
    exported = sharding.export_entries(table)
    assert exported.counters.sum() > 0
    assert_same_bits(wider.take(exported, of=source).counters, exported.counters)
    assert other.take(exported, of=source).counters is None


def test_a_resized_table_keeps_its_namespace():
    (table,) = collection_of("users", "items").create().values()
    wider, _ = hkv.resize(table, 4096)
    assert wider.index.namespace == table.index.namespace is not None


def test_names_and_bits_of_numpy_are_those_of_python():
    """In the names of arrays, where a restore looks for them, and in an export."""

    class Name(enum.StrEnum):
        USERS = "users"
        ITEMS = "items"

    names = {"python": ("users", "items"), "numpy": np.array(["users", "items"]), "enum": Name}
    made = {
        kind: collection_of(*own, table_bits=2 if kind == "python" else np.int64(2)).create()
        for kind, own in names.items()
    }
    (saved,) = made["python"].values()
    paths = [
        [path for path, _ in jax.tree_util.tree_leaves_with_path(*own.values())]
        for own in made.values()
    ]
    assert paths[0] == paths[1] == paths[2]
    for (table,) in (own.values() for own in made.values()):
        assert jax.tree.structure(table) == jax.tree.structure(saved)
        assert_same_bits(
            sharding.export_entries(table).namespace, sharding.export_entries(saved).namespace
        )


def test_sightings_of_ids_are_not_those_of_keys_with_bits():
    """Of the same table alone, and with room for others in its keys."""
    config = hkv.TableConfig(
        "users", 512, DIM, optimizer=ADAGRAD, admission=hkv.admission.frequency(2, width=64)
    )
    features = [hkv.Feature("f", "users")]
    (alone,), (roomy,) = (
        hkv.Collection([config], features, table_bits=bits).groups for bits in (None, 8)
    )
    table, _ = hkv.find_or_insert(alone.create(), hkv.Keys.from_numpy(HASHES))
    exported = sharding.export_entries(table)
    assert exported.counters.any()
    assert roomy.take(exported, of=alone).counters is None
    assert_same_bits(alone.take(exported, of=alone).counters, exported.counters)


@pytest.mark.parametrize("names", ["items", 5, [("a", "b")]], ids=str)
def test_names_that_are_no_dict_are_named(names):
    (group,) = collection_of("users", "items").groups
    exported = sharding.export_entries(group.create())
    with pytest.raises(TypeError, match="take: names must be a dict of names of tables, got"):
        group.take(exported, of=group, names=names)


def test_changes_that_a_group_takes_know_the_scores_of_its_own_keys():
    names = ("users", "items")
    tables = [hkv.TableConfig(name, 128, 2) for name in names]
    features = [hkv.Feature(name, name) for name in names]
    trained = hkv.Collection(tables, features).group_of("items")
    table = trained.create()
    for name, ids in (("items", [7, 8]), ("users", [1, 2, 3]), ("items", [5, 9])):
        table, _ = hkv.find_or_insert(table, trained.keys(name, np.array(ids, np.int32)))
    served = hkv.Collection(tables[1:], features[1:], table_bits=1).group_of("items")
    taken = served.take(sharding.export_changes(table, None), of=trained)
    assert len(taken.keys) == 4
    own = dict(zip(taken.keys.tolist(), taken.scores.tolist(), strict=True))
    entries = taken.entries
    assert own == dict(zip(entries.keys.tolist(), entries.scores.tolist(), strict=True))
    served_table, _ = sharding.import_changes(None, served.create(), taken)
    assert not len(sharding.export_changes(served_table, taken).entries.keys)


def test_a_number_next_to_those_of_the_tables_is_refused():
    names = ("a", "b", "c")
    group = hkv.Collection(
        [hkv.TableConfig(name, 128, 2) for name in names], [hkv.Feature(n, n) for n in names]
    ).groups[0]
    table, _ = hkv.find_or_insert(group.create(), group.keys("c", np.array([5], np.int32)))
    exported = sharding.export_entries(table)
    foreign = exported._replace(keys=np.array([3 << 62 | 5], np.uint64))
    with pytest.raises(ValueError, match="numbers 0 to 2 in their highest 2 bits, got .* number 3"):
        sharding.import_entries(None, group.create(), foreign)
