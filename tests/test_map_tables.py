"""Tables of a state are changed between steps: all of them, or those whose paths are named."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from test_sharding_traffic import mesh_of

import jax_hkv as hkv

DIM = 4
IDS = np.array([1, 2, 3], np.int32)
SGD = hkv.optim.sgd(0.1)
PATHS = ["a/table", "b/table"]


class Two(nn.Module):
    """Two layers, of which those train that are named."""

    policy: hkv.Policy = hkv.Policy.LRU

    @nn.compact
    def __call__(self, ids, train=("a", "b")):
        options = {"optimizer": SGD, "policy": self.policy}
        layers = [hkv.linen.Embed(256, DIM, name=name, **options) for name in ("a", "b")]
        return sum(layer(ids, train=layer.name in train) for layer in layers)


class NnxTwo(nnx.Module):
    def __init__(self, **options):
        self.a = hkv.nnx.Embed(256, DIM, optimizer=SGD, **options)
        self.b = hkv.nnx.Embed(256, DIM, optimizer=SGD, **options)

    def __call__(self, ids, train=("a", "b")):
        return self.a(ids, train="a" in train) + self.b(ids, train="b" in train)


class NnxModel(nnx.Module):
    def __init__(self, **options):
        self.embed = hkv.nnx.Embed(256, DIM, optimizer=SGD, **options)

    def __call__(self, ids, train=False):
        return self.embed(ids, train=train)


def collection(name, **options):
    config = hkv.TableConfig(name, 128, DIM, optimizer=SGD, **options)
    return hkv.Collection([config], [hkv.Feature(f"f_{name}", name)])


def state_of_two(api, policy=hkv.Policy.LRU):
    if api == "nnx":
        return hkv.nnx.TrainState(NnxTwo(policy=policy), optax.sgd(0.1))
    return hkv.linen.TrainState.create(Two(policy), jax.random.key(0), IDS, tx=optax.sgd(0.1))


def changed(state, fn, **options):
    """The state after `map_tables`, which changes that of nnx in place."""
    after = state.map_tables(fn, **options)
    return state if after is None else after


def trained(state, train):
    """The state after a step, and its report."""
    api = hkv.nnx if isinstance(state, hkv.nnx.TrainState) else hkv.linen
    after = api.train_step(lambda model, ids: model(ids, train=train).sum())(state, IDS)
    return (state, after) if api is hkv.nnx else after


def tables_of(state):
    if isinstance(state, hkv.nnx.TrainState):
        return [own.table.get_value() for own in (state.model.a, state.model.b)]
    return [state.tables[name]["table"] for name in ("a", "b")]


@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize(
    ("only", "epochs"),
    [
        (None, [1, 1]),
        ("b/table", [0, 1]),
        (["a/table"], [1, 0]),
        (["b/table", "a/table", "b/table"], [1, 1]),
        ([], [0, 0]),
    ],
)
def test_the_tables_that_are_named_are_changed_once(api, only, epochs):
    state = state_of_two(api, hkv.Policy.EPOCH_LRU)
    before = tables_of(state)
    fn = jax.jit(hkv.advance_epoch, donate_argnums=0)
    state = changed(state, fn, only=only if only is None or only == "b/table" else iter(only))
    assert [int(table.epoch[0]) for table in tables_of(state)] == epochs
    assert [table.values.is_deleted() for table in before] == [epoch == 1 for epoch in epochs]
    state, info = trained(state, ("a", "b"))
    assert sorted(info.tables) == PATHS


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_path_that_no_table_has_is_refused_before_anything_changes(api):
    state = state_of_two(api, hkv.Policy.EPOCH_LRU)
    with pytest.raises(ValueError, match=r"only must be paths of tables, .* got \[3\]"):
        state.map_tables(hkv.advance_epoch, only=3)
    expected = r"only must be paths of tables, \['a/table', 'b/table'\], got \['b'\]: info.tables"
    with pytest.raises(ValueError, match=expected):
        state.map_tables(jax.jit(hkv.advance_epoch, donate_argnums=0), only=["a/table", "b"])
    assert [int(table.epoch[0]) for table in tables_of(state)] == [0, 0]


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_one_of_two_tables_is_frozen_by_its_path(api):
    state, info = trained(state_of_two(api), ("a", "b"))
    assert sorted(info.tables) == PATHS
    state = changed(state, lambda table: dataclasses.replace(table, optimizer=None), only="b/table")
    before = [np.asarray(table.values) for table in tables_of(state)]
    state, info = trained(state, ("a",))
    assert list(info.tables) == ["a/table"]
    a, b = (np.asarray(table.values) for table in tables_of(state))
    assert (a != before[0]).any()
    np.testing.assert_array_equal(b, before[1])


def test_all_tables_of_a_state_can_be_changed():
    model = hkv.linen.Embed(256, DIM, optimizer=SGD, policy=hkv.Policy.EPOCH_LRU)
    state = hkv.linen.TrainState.create(model, jax.random.key(0), IDS, tx=optax.sgd(0.1))
    state = state.map_tables(hkv.advance_epoch)
    assert int(state.tables["table"].epoch[0]) == 1
    twin = hkv.nnx.TrainState(NnxModel(policy=hkv.Policy.EPOCH_LRU), optax.sgd(0.1))
    twin.map_tables(hkv.advance_epoch)
    assert int(twin.model.embed.table.get_value().epoch[0]) == 1


def test_a_function_of_tables_that_returns_a_pair_is_refused_before_anything_changes():
    model = hkv.linen.Embed(256, DIM, optimizer=SGD, policy=hkv.Policy.EPOCH_LRU)
    state = hkv.linen.TrainState.create(model, jax.random.key(0), IDS, tx=optax.sgd(0.1))
    declared = collection("a", policy=hkv.Policy.EPOCH_LRU)
    twin = hkv.nnx.TrainState(hkv.nnx.EmbedCollection(declared), optax.sgd(0.1))
    for own in (state, twin):
        with pytest.raises(
            TypeError, match=r"map_tables: fn must return a Table, got .* of the table .*\[0\]"
        ):
            own.map_tables(lambda table: hkv.expire(table, 30))
        with pytest.raises(TypeError, match="map_tables: fn must return a Table, got NoneType"):
            own.map_tables(print)
    in_place = jax.jit(lambda table: hkv.expire(table, 30)[0], donate_argnums=0)
    twin.map_tables(in_place)
    assert isinstance(twin.model.tables["a"], hkv.Table)
    rows = state.tables["table"].values
    state = state.map_tables(in_place)
    assert rows.is_deleted()
    hkv.linen.train_step(lambda apply, ids: apply(ids, train=True).sum())(state, IDS)


@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize("jitted", [False, True])
def test_what_a_function_returns_beside_the_table_comes_by_path(api, jitted):
    """Counts of an expiry, and of entries that found no room in a smaller table."""
    state, _ = trained(state_of_two(api, hkv.Policy.EPOCH_LRU), ("a", "b"))

    def next_days(table):
        return hkv.expire(hkv.advance_epoch(table, 5), 3)

    fn = jax.jit(next_days, donate_argnums=0) if jitted else next_days
    after = state.map_tables(fn, has_aux=True, only="b/table")
    state, expired = (state, after) if api == "nnx" else after
    assert {path: int(count) for path, count in expired.items()} == {"b/table": 3}
    assert [int(hkv.size(table)) for table in tables_of(state)] == [3, 0]
    many = np.arange(200, dtype=np.int32)
    filled = changed(state, lambda table: hkv.find_or_insert(table, many)[0])
    before = [int(hkv.size(table)) for table in tables_of(filled)]
    assert before == [200, 200]
    after = filled.map_tables(lambda table: hkv.resize(table, 128), has_aux=True)
    state, counts = (filled, after) if api == "nnx" else after
    assert list(counts) == PATHS and tables_of(state)[0].capacity == 128
    for table, own in zip(tables_of(state), counts.values(), strict=True):
        assert int(own.refused) + int(own.evicted) == 200 - int(hkv.size(table)) > 0


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_over_devices_a_step_reports_what_became_of_tables(api):
    placement = hkv.sharding.Placement(mesh_of(2))
    options = {"policy": hkv.Policy.EPOCH_LRU, "axis_name": "device"}
    ids = np.arange(64, dtype=np.int32)

    def days(table):
        table, expired = hkv.expire(hkv.advance_epoch(table, 5), 3)
        return table, jax.lax.psum(expired, "device")

    if api == "linen":
        model = hkv.linen.Embed(256, DIM, optimizer=SGD, **options)
        start = functools.partial(hkv.linen.TrainState.create, tx=optax.sgd(0.1))
        state = placement.create(lambda: start(model, jax.random.key(0), ids[:32]))
        step = hkv.linen.train_step(
            lambda apply, x: apply(x, train=True).sum(), placement=placement
        )
        state, _ = step(state, placement.put(ids))
        state, expired = placement.step(lambda own: own.map_tables(days, has_aux=True))(state)
    else:
        state = placement.create(lambda: hkv.nnx.TrainState(NnxModel(**options), optax.sgd(0.1)))
        hkv.nnx.train_step(lambda model, x: model(x, train=True).sum(), placement=placement)(
            state, placement.put(ids)
        )
        change = placement.step(lambda own: (own, own.map_tables(days, has_aux=True)))
        state, expired = change(state)
    (path, count), *others = expired.items()
    assert path.endswith("table") and not others
    assert np.unique(np.asarray(count)).tolist() == [64]


def test_what_is_returned_of_a_table_that_layers_share_comes_once():
    class Tied(nnx.Module):
        def __init__(self):
            self.one, self.two = (hkv.nnx.Embed(256, DIM, optimizer=SGD) for _ in range(2))
            self.two.table = self.one.table

    state = hkv.nnx.TrainState(Tied(), optax.sgd(0.1))
    counts = state.map_tables(lambda table: hkv.resize(table, 512), has_aux=True)
    assert list(counts) == ["one/table"] and state.model.two.table.get_value().capacity == 512
    assert state.map_tables(lambda table: hkv.resize(table, 512), has_aux=True, only=[]) == {}


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_no_pair_with_has_aux_is_refused_before_anything_changes(api):
    state = state_of_two(api, hkv.Policy.EPOCH_LRU)
    donating = jax.jit(hkv.advance_epoch, donate_argnums=0)
    with pytest.raises(TypeError, match=r"with has_aux=True, got a tuple of 3: return a pair"):
        state.map_tables(lambda table: (table, 1, 2), has_aux=True)
    for fn in (donating, hkv.advance_epoch):
        with pytest.raises(TypeError, match=r"fn must return \(table, anything\) with has_aux"):
            state.map_tables(fn, has_aux=True)
    turned = jax.jit(lambda table: hkv.expire(table, 3)[::-1], donate_argnums=0)
    with pytest.raises(TypeError, match=r"fn must return a Table, got .*: in the first place"):
        state.map_tables(turned, has_aux=True)
    with pytest.raises(TypeError, match=r"has_aux must be True or False, got str 'yes'"):
        state.map_tables(hkv.advance_epoch, has_aux="yes")
    with pytest.raises(TypeError, match=r"expire\(table, 30\)\[0\]\), or give has_aux=True"):
        state.map_tables(lambda table: hkv.expire(table, 30))
    assert [int(table.epoch[0]) for table in tables_of(state)] == [0, 0]


@pytest.mark.parametrize("api", ["linen", "nnx", "nnx layer", "nnx collection"])
def test_tables_that_have_trained_can_be_frozen(api):
    frozen = optax.sgd(0.0)

    def drop(table):
        return dataclasses.replace(table, optimizer=None)

    if api == "linen":
        model = hkv.linen.Embed(256, DIM, optimizer=SGD)
        state = hkv.linen.TrainState.create(model, jax.random.key(0), IDS, tx=frozen)
        state, _ = hkv.linen.train_step(lambda a, ids: a(ids, train=True).sum())(state, IDS)
        state = state.map_tables(drop)
        after, info = hkv.linen.train_step(lambda a, ids: a(ids).sum(), donate=False)(state, IDS)
        before, now = state.tables["table"], after.tables["table"]
    elif api == "nnx collection":
        state = hkv.nnx.TrainState(hkv.nnx.EmbedCollection(collection("a")), frozen)
        hkv.nnx.train_step(lambda m, x: m({"f_a": x}, train=True)["f_a"].sum())(state, IDS)
        state.map_tables(drop)
        before = state.model.table_a.get_value()
        step = hkv.nnx.train_step(lambda m, x: m({"f_a": x})["f_a"].sum(), donate=False)
        info, now = step(state, IDS), state.model.table_a.get_value()
    else:
        state = hkv.nnx.TrainState(NnxModel(), frozen)
        hkv.nnx.train_step(lambda m, ids: m(ids, train=True).sum())(state, IDS)
        if api == "nnx":
            state.map_tables(drop)
        else:
            state.model.embed.optimizer = None
        before = state.model.embed.table.get_value()
        info = hkv.nnx.train_step(lambda m, ids: m(ids).sum(), donate=False)(state, IDS)
        now = state.model.embed.table.get_value()
    assert not info.tables and int(hkv.size(now)) == 3
    np.testing.assert_array_equal(before.values, now.values)


def test_a_table_of_two_nnx_layers_is_changed_once():
    class Tied(nnx.Module):
        def __init__(self):
            self.one = hkv.nnx.Embed(256, DIM, optimizer=SGD, policy=hkv.Policy.EPOCH_LRU)
            self.two = hkv.nnx.Embed(256, DIM, optimizer=SGD, policy=hkv.Policy.EPOCH_LRU)
            self.two.table = self.one.table

    state = hkv.nnx.TrainState(Tied(), optax.sgd(0.1))
    state.map_tables(jax.jit(hkv.advance_epoch, donate_argnums=0))
    assert int(state.model.two.table.get_value().epoch[0]) == 1


def test_tables_stay_where_they_are_whatever_their_names():
    """Names with the slash that separates names of paths, too."""
    tables = [hkv.TableConfig(name, 128, DIM, optimizer=SGD) for name in ("user/id", "user")]
    features = [hkv.Feature("one", "user/id"), hkv.Feature("two", "user")]

    class Slashed(nn.Module):
        @nn.compact
        def __call__(self, ids, train=()):
            declared = hkv.Collection(tables, features, fuse=False)
            layer = hkv.linen.EmbedCollection(declared, name="both")
            rows = layer({"one": ids, "two": ids}, train=bool(train))
            return (
                rows["one"]
                + rows["two"]
                + hkv.linen.Embed(128, DIM, optimizer=SGD, name="e/x")(ids, train=bool(train))
            )

    state = hkv.linen.TrainState.create(Slashed(), jax.random.key(0), IDS, tx=optax.sgd(0.1))
    state, info = trained(state, True)
    assert sorted(info.tables) == ["both/user", "both/user/id", "e/x/table"]
    for only in (None, "both/user/id", ["e/x/table"]):
        after = state.map_tables(lambda table: table, only=only)
        assert jax.tree.structure(after) == jax.tree.structure(state)
    _, info = trained(after, True)
    assert [int(own.hits) for own in info.tables.values()] == [3, 3, 3]


def test_tables_of_nnx_at_one_path_are_named():
    """Of names that a slash makes alike: one of them would be left out, silently."""

    class Alike(nnx.Module):
        def __init__(self):
            inner = nnx.Dict({"b": hkv.nnx.Embed(256, DIM, optimizer=SGD)})
            self.parts = nnx.Dict({"a/b": hkv.nnx.Embed(256, DIM, optimizer=SGD), "a": inner})

    with pytest.raises(ValueError, match="several at one, .*'parts/a/b/table', 'parts/a/b/table'"):
        hkv.nnx.TrainState(Alike(), optax.sgd(0.1))


@pytest.mark.parametrize("name", ["c", "a/b"])
def test_layers_of_one_table_train_it_whatever_their_names(name):
    class Tied(nnx.Module):
        def __init__(self):
            first, second = (hkv.nnx.Embed(256, DIM, optimizer=SGD) for _ in range(2))
            second.table = first.table
            self.parts = nnx.Dict({name: first, "a": nnx.Dict({"b": second})})

        def __call__(self, ids):
            first, second = self.parts[name], self.parts["a"]["b"]
            return first(ids, train=True).sum() + 10 * second(ids, train=True).sum()

    state = hkv.nnx.TrainState(Tied(), optax.sgd(0.1))
    before = state.model.parts[name].table.get_value()
    before = hkv.find(before, IDS, fill="initial")[1].values
    hkv.nnx.train_step(lambda model: model(IDS))(state)
    after = hkv.find(state.model.parts[name].table.get_value(), IDS)[1].values
    np.testing.assert_allclose(after - before, -0.1 * 11, rtol=1e-5)
