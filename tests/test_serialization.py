"""Programs that `jax.export` writes, with tables among what they take and return."""

from __future__ import annotations

import dataclasses
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import seldom
from flax import linen as nn
from flax import nnx

import jax_hkv as hkv
from jax_hkv import _serialization, sharding

IDS = np.array([5, -1, 5, 9], np.int64)
KEYS = hkv.Keys.from_numpy(IDS)
BAGS = hkv.Jagged.from_lists([[5, 6, 7], [], [5]], capacity=8)
CHECKS = [jax.export.DisabledSafetyCheck.custom_call(name) for name in hkv.CUSTOM_CALLS]

ADMISSIONS = (
    None,
    hkv.admission.frequency(2, width=64),
    hkv.admission.frequency(2, width=64, aging=True),
    hkv.admission.probability(0.5),
)
INITIALIZERS = (
    hkv.initializers.constant(-0.0),
    hkv.initializers.constant(np.inf),
    hkv.initializers.uniform(-0.1, 1 / 3),
    hkv.initializers.variance_scaling(0.7, "normal"),
)
SETTINGS = [
    {"policy": policy, "choices": choices, "admission": admission, "init": init}
    for (policy, choices, admission), init in zip(
        itertools.product(hkv.Policy, (1, 2), ADMISSIONS), itertools.cycle(INITIALIZERS)
    )
]


def filled(**settings) -> hkv.Table:
    table = hkv.create(256, 4, seed=7, name="users", **settings)
    scores = {"scores": KEYS} if table.policy is hkv.Policy.CUSTOM else {}
    return hkv.find_or_insert(table, KEYS, **scores)[0]


def nodes(tree, kinds):
    """All nodes of these classes in a pytree."""
    found = []

    def note(node):
        if isinstance(node, kinds):
            found.append(node)
        return False

    jax.tree.flatten(tree, is_leaf=note)
    return found


@pytest.mark.parametrize("settings", SETTINGS)
def test_what_is_static_of_a_table_is_read_as_it_was_written(settings):
    parts = nodes(filled(**settings), _serialization._NODES)
    assert {"Table", "Index"} <= {type(part).__name__ for part in parts}
    for part in parts:
        static = jax.tree.structure(part).node_data()[1]
        again = _serialization.read(_serialization.written(static))
        assert again == static
        assert [type(setting) for setting in again] == [type(setting) for setting in static]


def exported(function, *args, **options):
    return jax.export.export(jax.jit(function), disabled_checks=CHECKS, **options)(*args)


CALLS = {
    "find": lambda table, keys, bags: hkv.find(table, keys, fill="initial"),
    "find_or_insert": lambda table, keys, bags: hkv.find_or_insert(table, keys),
    "insert_and_evict": lambda table, keys, bags: hkv.insert_and_evict(
        table, keys, jnp.ones((4, 4))
    ),
    "erase": lambda table, keys, bags: hkv.erase(table, keys),
    "find_pooled": lambda table, keys, bags: hkv.find_pooled(table, bags),
    "find_or_insert_pooled": lambda table, keys, bags: hkv.find_or_insert_pooled(table, bags),
    "unique": lambda table, keys, bags: hkv.unique(keys),
    "export_batch": lambda table, keys, bags: hkv.export_batch(table, 0, 128),
    "metrics": lambda table, keys, bags: hkv.metrics.of(*hkv.find_or_insert(table, keys)),
    "padded": lambda table, keys, bags: hkv.Padded(keys, keys.words[:, 0] > 1),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_program_that_was_written_takes_and_returns_what_it_did(call):
    """A table with a sketch, of two candidate buckets, with its clock, keys and bags of ids."""
    pytest.importorskip("flatbuffers", reason="jax.export writes programs with it")
    table = filled(choices=2, admission=ADMISSIONS[1])
    program = exported(CALLS[call], table, KEYS, BAGS)
    again = jax.export.deserialize(program.serialize())
    assert again.in_tree == program.in_tree and again.out_tree == program.out_tree
    expected = jax.jit(CALLS[call])(table, KEYS, BAGS)
    result = again.call(table, KEYS, BAGS)
    jax.tree.map(np.testing.assert_array_equal, result, expected)


def test_the_package_can_be_imported_anew():
    """As IPython's autoreload does: what is registered already is no error."""
    importlib.reload(_serialization)


def test_a_program_for_two_platforms_has_the_bits_of_one():
    table = filled()
    program = exported(CALLS["find_or_insert"], table, KEYS, BAGS, platforms=["cpu", "cuda"])
    assert program.platforms == ("cpu", "cuda")
    result = jax.device_get(program.call(table, KEYS, BAGS))
    jax.tree.map(np.testing.assert_array_equal, result, hkv.find_or_insert(table, KEYS))


def test_a_program_refuses_a_table_of_other_settings():
    table = filled()
    program = exported(CALLS["find"], table, KEYS, BAGS)
    with pytest.raises(ValueError, match="EPOCH_LRU"):
        program.call(filled(policy=hkv.Policy.EPOCH_LRU), KEYS, BAGS)


def test_optimizer_rows_are_not_written_and_the_error_says_what_to_do():
    pytest.importorskip("flatbuffers", reason="jax.export writes programs with it")
    table = hkv.optim.adam(0.1).init(filled())
    with pytest.raises(ValueError, match=r"optimizer rows cannot be written.*replace\(table, opt"):
        exported(CALLS["find"], table, KEYS, BAGS).serialize()
    bare = dataclasses.replace(table, optimizer=None)
    assert exported(lambda t, k, b: hkv.find(t, k)[1], bare, KEYS, BAGS).serialize()


TABLE = hkv.create(256, 4, choices=2)
TABLE, _ = hkv.find_or_insert(TABLE, np.arange(20, dtype=np.int32))
TABLE, _ = hkv.find_or_insert(TABLE, hkv.Keys.from_numpy(np.arange(20) * 2**33))
SIZES = jax.export.symbolic_shape("b, h, n")
LOOKUPS = {
    "find": lambda table, x: hkv.find(table, x.keys, fill="initial", valid=x.valid),
    "find of ids": lambda table, x: hkv.find(table, x.flat),
    "contains": lambda table, x: hkv.contains(table, x.ids),
    "initial_rows": lambda table, x: (table, hkv.initial_rows(table, x.keys)),
    "bags": lambda table, x: hkv.find_pooled(table, x.ids),
    "means": lambda table, x: hkv.find_pooled(table, x.ids, combiner="mean", valid=x.valid),
    "weighted": lambda table, x: hkv.find_pooled(table, x.ids, combiner="sqrtn", weights=x.weights),
    "Jagged": lambda table, x: hkv.find_pooled(table, x.jagged, combiner="mean"),
    "pool": lambda table, x: (table, hkv.pool(x.rows, valid=x.valid)),
    "vmap": lambda table, x: jax.vmap(lambda ids: hkv.find(table, ids), out_axes=(None, 0))(x.ids),
    "vmap of bags": lambda table, x: jax.vmap(
        lambda ids: hkv.find_pooled(table, ids), out_axes=(None, 0)
    )(x.ids.reshape(1, *x.ids.shape)),
    "vmap of pool": lambda table, x: (table, jax.vmap(hkv.pool)(x.rows[:, None])),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """A batch of a request in all forms."""

    ids: jax.Array
    keys: hkv.Keys
    flat: jax.Array
    valid: jax.Array
    weights: jax.Array
    rows: jax.Array
    jagged: hkv.Jagged


def request(batch, hotness, seed=0):
    """Bags of some ids that have a row, and some that have none."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 40, (batch, hotness)).astype(np.int32)
    splits = np.sort(rng.integers(0, 2 * batch, batch + 1)).astype(np.int32)
    splits[0] = 0
    return Inputs(
        jnp.asarray(ids),
        hkv.Keys.from_numpy(ids.astype(np.int64) * 2**33),
        jnp.asarray(ids[:, 0]),
        jnp.asarray(rng.random(ids.shape) < 0.8),
        jnp.asarray(rng.random(ids.shape), jnp.float32),
        jnp.asarray(rng.normal(size=(*ids.shape, 4)), jnp.float32),
        hkv.Jagged(jnp.asarray(rng.integers(0, 40, batch * 2), jnp.int32), splits),
    )


def of_any_size():
    """What `request` makes, of b bags of h ids, in n positions where they are jagged."""
    b, h, n = SIZES
    form = jax.ShapeDtypeStruct
    ids, words = form((b, h), jnp.int32), form((b, h, 2), jnp.uint32)
    return Inputs(
        *(ids, hkv.Keys(words), form((b,), jnp.int32), form((b, h), jnp.bool_)),
        *(form((b, h), jnp.float32), form((b, h, 4), jnp.float32)),
        hkv.Jagged(form((n,), jnp.int32), form((b + 1,), jnp.int32)),
    )


@pytest.mark.parametrize("call", LOOKUPS)
def test_one_program_looks_up_batches_of_any_size(call):
    """The bits of a program that is compiled for the size, for two platforms at once."""
    lookup = LOOKUPS[call]
    program = exported(lookup, TABLE, of_any_size(), platforms=["cpu", "cuda"])
    for batch, hotness in ((5, 3), (1, 1), (300, 7)):
        given = request(batch, hotness)
        result = jax.device_get(program.call(TABLE, given))
        jax.tree.map(np.testing.assert_array_equal, result, jax.jit(lookup)(TABLE, given))


OPT = hkv.optim.adagrad(0.1)
CONFIGS = [hkv.TableConfig(name, 256, 4, optimizer=OPT) for name in ("users", "items")]
COLLECTION = hkv.Collection(
    CONFIGS,
    [
        hkv.Feature("user", "users"),
        hkv.Feature("seen", "items", "mean"),
        hkv.Feature("bought", "items", "sum"),
        hkv.Feature("friends", "users", "mean"),
    ],
)


def features(given):
    padded = hkv.Padded(given.ids, given.valid, given.weights)
    return {
        "user": given.flat,
        "seen": padded,
        "bought": given.jagged,
        "friends": given.ids,
    }


class Linen(nn.Module):
    unseen: str = "initial"

    @nn.compact
    def __call__(self, x, train=False):
        form = {"optimizer": OPT, "unseen": self.unseen}
        rows = hkv.linen.EmbedCollection(COLLECTION, unseen=self.unseen)(features(x), train=train)
        one = hkv.linen.Embed(256, 4, **form)(x.keys, train=train)
        bag = hkv.linen.EmbedBag(256, 4, combiner="mean", **form)(x.jagged, train=train)
        return rows, one, bag


class Nnx(nnx.Module):
    def __init__(self):
        self.all = hkv.nnx.EmbedCollection(COLLECTION)
        self.bag = hkv.nnx.EmbedBag(256, 4, optimizer=OPT)

    def __call__(self, x, train=False):
        return self.all(features(x), train=train), self.bag(x.ids, weights=x.weights, train=train)


@pytest.mark.parametrize("unseen", seldom(["initial", "learned"], {"initial"}))
def test_one_program_serves_a_trained_linen_model_whatever_the_batch(unseen):
    """All kinds of features, ids with and without a row."""
    model = Linen(unseen)
    variables = model.init(jax.random.key(0), request(4, 3))
    _, trained = model.apply(variables, request(50, 3, seed=1), train=True, mutable=True)
    kept = {name: trained[name] for name in ("params", "tables") if name in trained}
    program = exported(model.apply, kept, of_any_size())
    for batch, hotness in ((5, 3), (1, 1)):
        given = request(batch, hotness, seed=2)
        result = program.call(kept, given)
        jax.tree.map(np.testing.assert_array_equal, result, jax.jit(model.apply)(kept, given))


@pytest.mark.filterwarnings("ignore:Embed.* train=True outside")
def test_one_program_serves_a_trained_nnx_model_whatever_the_batch():
    """Its state as a dict of arrays: Flax has not told `jax.export` how to write its variables."""
    model = Nnx()
    model(request(50, 3, seed=1), train=True)
    kinds = hkv.nnx.TableVariable, nnx.Param
    graph, tables, params, rest = nnx.split(model, *kinds, ...)
    assert not jax.tree.leaves(params)
    arrays = nnx.to_pure_dict(tables)

    def serve(arrays, given):
        nnx.replace_by_pure_dict(tables, arrays)
        return nnx.merge(graph, tables, params, rest)(given)

    program = exported(serve, arrays, of_any_size())
    for batch, hotness in ((5, 3), (1, 1)):
        given = request(batch, hotness, seed=2)
        result = program.call(arrays, given)
        jax.tree.map(np.testing.assert_array_equal, result, jax.jit(serve)(arrays, given))


def test_what_needs_a_workspace_says_that_its_size_must_be_known():
    """Whatever merges equal keys: what inserts, writes, refreshes or removes."""
    merging = {
        "find_or_insert: keys": lambda x: hkv.find_or_insert(TABLE, x.ids),
        "find_or_insert_pooled: ids": lambda x: hkv.find_or_insert_pooled(TABLE, x.jagged),
        "find: keys": lambda x: hkv.find(TABLE, x.ids, touch=True),
        "erase: keys": lambda x: hkv.erase(TABLE, x.flat),
        "export_keys: keys": lambda x: hkv.export_keys(TABLE, x.flat),
        "unique: keys": lambda x: hkv.unique(x.flat),
        "Collection.lookup of 'users.items': ids": lambda x: COLLECTION.lookup(
            COLLECTION.create(), features(x), train=True
        ),
    }
    for name, call in merging.items():
        with pytest.raises(TypeError, match=f"{name}.* must have a fixed shape, got .*valid="):
            jax.eval_shape(call, of_any_size())


def over_devices(call, keys, exchange):
    return call(dataclasses.replace(TABLE, replicas=exchange.replicas), keys, axis_name=exchange)


def bags_of(x, exchange):
    """By a layer; its `init`, which sends nothing, takes any size."""
    layer = hkv.linen.EmbedBag(256, 4, axis_name=exchange)
    return layer.apply(layer.init(jax.random.key(0), x.ids), x.ids)


OVER_DEVICES = {
    "sharding.find": lambda x, exchange: over_devices(sharding.find, x.flat, exchange),
    "sharding.erase": lambda x, exchange: over_devices(sharding.erase, x.flat, exchange),
    "sharding.find_pooled": lambda x, exchange: over_devices(sharding.find_pooled, x.ids, exchange),
    "sharding.owners": lambda x, exchange: sharding.owners(x.flat, 4),
    "jax_hkv.sharding": bags_of,
}


@pytest.mark.parametrize("replicas", [False, True])
@pytest.mark.parametrize("call", OVER_DEVICES)
def test_batches_over_devices_have_a_size_that_is_known(call, replicas):
    mesh = jax.make_mesh((1,), ("device",), devices=jax.devices("cpu")[:1])
    exchange = sharding.Exchange("device", replicas=replicas)
    nowhere = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(
        lambda x: OVER_DEVICES[call](x, exchange),
        mesh=mesh,
        in_specs=nowhere,
        out_specs=nowhere,
        check_vma=False,
    )
    with pytest.raises(TypeError, match=f"{call}: (keys|ids) must have a fixed shape, got .*valid"):
        jax.eval_shape(mapped, of_any_size())
