"""Scores that a caller gives: one number for a batch, and those of the features of a collection."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_same
from many_devices import assert_same_bits, entries_of
from oracle import Oracle

import jax_hkv as hkv
from jax_hkv import sharding, testing
from jax_hkv.sharding import Placement

DIM = 4
SGD = hkv.optim.sgd(0.1)
CUSTOM, LFU = hkv.Policy.CUSTOM, hkv.Policy.LFU
WORDS = np.array([[7, 2**40], [5, 7]], np.uint64)
KEYS = hkv.Keys.from_numpy(WORDS)
MASK = np.array([[True, True], [False, True]])
ROWS = np.arange(16, dtype=np.float32).reshape(2, 2, DIM)

# --- One number for all positions ----------------------------------------------------------------

NUMBERS = {
    "int": (2**64 - 1, 2**64 - 1),
    "a small int": (0, 0),
    "NumPy's": (np.int8(9), 9),
    "NumPy's of 64 bits": (np.uint64(2**63 + 5), 2**63 + 5),
    "an array of NumPy": (np.array(2**40 + 1), 2**40 + 1),
    "an array of JAX": (jnp.int32(11), 11),
    "Keys": (hkv.Keys.from_numpy(2**50), 2**50),
}
WRITES = {
    "find_or_insert": (),
    "insert_or_assign": (ROWS,),
    "insert_and_evict": (ROWS,),
    "accum_or_assign": (ROWS, MASK),
    "assign": (),
}


@pytest.mark.parametrize("policy", ["CUSTOM", "LFU"])
def test_one_score_is_that_of_all_positions(policy):
    """As the oracle has it of as many; also where a mask leaves some of them out."""
    table = hkv.create(128, DIM, policy=hkv.Policy[policy])
    oracle = Oracle.from_table(table)
    for number, (name, arguments) in enumerate(WRITES.items()):
        forms = list(NUMBERS.values())
        for given, value in (forms[number], forms[number + 2]):
            table, result = getattr(hkv, name)(table, KEYS, *arguments, scores=given, valid=MASK)
            many = np.full(WORDS.shape, value, np.uint64)
            flat = [np.reshape(own, (4, *np.shape(own)[2:])) for own in (*arguments, many, MASK)]
            *flat, many, mask = flat
            expected = getattr(oracle, name)(WORDS.ravel(), *flat, scores=many, valid=mask)
            assert_same(result.status.reshape(-1), expected.status, name)
            oracle.assert_equal(table)
    single = hkv.find_or_insert(table, np.int32(5), scores=2**33)[1]
    assert single.status.shape == ()


def scored(kind, *args, train=True, scores=None, **options):
    """The scores, by id, of a layer's table after a call."""
    layer = kind(*args, policy=CUSTOM, optimizer=SGD)
    if isinstance(layer, hkv.linen.Embed):
        variables = layer.init(jax.random.key(0), **options)
        mutable = [*hkv.linen.MUTABLE, hkv.linen.PERTURBATIONS]
        call = partial(layer.apply, variables, mutable=mutable, train=train, scores=scores)
        updated: Any = call(**options)[1]
        table = updated["tables"]["table"]
    else:
        layer(train=train, scores=scores, **options)
        table = layer.table.get_value()
    exported = sharding.export_entries(table)
    return dict(zip(exported.keys.tolist(), exported.scores.tolist(), strict=True))


@pytest.mark.filterwarnings("ignore:.*nothing trains their rows")
@pytest.mark.parametrize("kind", ["Embed", "EmbedBag"])
@pytest.mark.parametrize("api", [hkv.linen, hkv.nnx])
def test_one_score_is_that_of_all_ids_of_a_layer(api, kind):
    layer = getattr(api, kind)
    ids = np.array([[5, 6], [7, 5]], np.int32)
    jagged = hkv.Jagged.from_lists([[5, 6], [], [7]], capacity=4)
    for given in (ids, jagged, hkv.Padded(ids)):
        assert scored(layer, 128, DIM, ids=given, scores=2**40) == dict.fromkeys((5, 6, 7), 2**40)
    assert scored(layer, 128, DIM, ids=ids, train=False) == {}


def test_one_score_of_pooled_lookups_and_by_names_of_tables():
    bags = hkv.Jagged.from_lists([[5, 6, 5], []], capacity=4)
    table, result = hkv.find_or_insert_pooled(hkv.create(128, 2, policy=LFU), bags, scores=3)
    assert sharding.export_entries(table).scores.tolist() == [6, 3]  # as many for each occurrence
    tables = [hkv.TableConfig(name, 128, 2, policy=LFU) for name in ("users", "items")]
    features = [hkv.Feature("user", "users"), hkv.Feature("item", "items")]
    collection = hkv.Collection(tables, features)
    ids = {"users": np.arange(2), "items": np.arange(3)}
    tables, _ = collection.on_tables(
        hkv.find_or_insert, collection.create(), ids, scores={"users": 2**33, "items": np.uint8(5)}
    )
    exported = sharding.export_entries(tables["users+items"])
    assert sorted(exported.scores.tolist()) == [5] * 3 + [2**33] * 2


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_one_score_over_devices_is_that_of_all_positions(mode, rng):
    mesh = jax.make_mesh((4,), ("device",), devices=jax.devices("cpu")[:4])
    placement = Placement(mesh, mode=mode)
    keys = hkv.Keys.from_numpy(rng.integers(0, 40, (16, 2)).astype(np.uint64))

    def step(table, keys, full, number):
        def of(value):
            words = hkv.Keys.from_numpy(np.uint64(value)).words
            return hkv.Keys(jnp.broadcast_to(words, (4, 2, 2))) if full else value

        axis: Any = {"axis_name": "device"}
        rows = jnp.ones((4, 2, DIM), jnp.float32)
        traced = jnp.broadcast_to(number, (4, 2)) if full else number
        table, _ = sharding.find_or_insert(table, keys, scores=of(2**40), **axis)
        table, _ = sharding.insert_or_assign(table, keys[:, ::-1], rows, scores=traced, **axis)
        table, _ = sharding.find_or_insert_pooled(table, keys, scores=of(2**33 + 1), **axis)
        table, found = sharding.assign(table, keys, scores=of(3), **axis)
        return table, found.counts

    tables = []
    for full in (True, False):
        table = placement.create(lambda: hkv.create(128, DIM, policy=LFU))
        run = placement.step(lambda table, keys, full=full: step(table, keys, full, jnp.uint32(9)))
        tables.append(run(table, placement.put(keys)))
    assert_same_bits(*tables)
    scores = sharding.export_entries(placement.shards(tables[1][0])).scores
    assert scores.size and not (scores % np.uint64(2**40 + 9 + 2**33 + 1 + 3)).any()


def test_one_score_is_made_into_many_on_the_device():
    """In the program, by a broadcast; eagerly and traced the same."""
    keys = np.arange(5000, dtype=np.int32)
    table = hkv.create(5120, 1, policy=CUSTOM, choices=2)
    lowered = jax.jit(lambda table, keys: hkv.find_or_insert(table, keys, scores=2**40)).lower(
        table, keys
    )
    constants = re.findall(r"stablehlo\.constant.*?: tensor<([\dx]*)", lowered.as_text())
    assert constants and not [shape for shape in constants if "5000" in shape]
    traced = jax.jit(lambda score: hkv.find_or_insert(table, keys, scores=score)[0])
    eager = hkv.find_or_insert(table, keys, scores=77)[0]
    assert_same_bits(traced(77), eager)
    mesh = jax.make_mesh(
        (4,), ("d",), devices=jax.devices("cpu")[:4], axis_types=(jax.sharding.AxisType.Explicit,)
    )
    with jax.set_mesh(mesh):
        assert_same_bits(hkv.find_or_insert(table, keys, scores=77)[0], eager)


WRONG = {
    "negative": (-1, ValueError, "scores must be from 0 to 18446744073709551615, got -1"),
    "negative of NumPy": (np.int64(-3), ValueError, "scores must be from 0 .*, got -3"),
    "negative of JAX": (jnp.int32(-4), ValueError, "scores are unsigned, got -4"),
    "too large": (2**64, ValueError, "scores must be from 0 .*, got 18446744073709551616"),
    "a bool": (True, TypeError, "scores must be integers .* one integer for all .*, got bool"),
    "a bool of NumPy": (np.True_, TypeError, "scores must be integers .*, got bool"),
    "a float": (2.0, TypeError, "scores must be integers .*, got float: round or scale"),
    "a float of JAX": (jnp.float32(2), TypeError, "scores must be integers .*, got float32: round"),
    "a list": ([7, 8], TypeError, r"scores must .*, got list: give jax_hkv\.Keys\.from_numpy\(sco"),
    "a text": ("7", TypeError, "scores must be integers .*, got str"),
    "masked": (np.ma.array(7, mask=True), TypeError, "scores must not be a masked array"),
    "one in an array": (np.ones(1, np.uint32), ValueError, "scores .*, or one number for all of"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_score_is_named_as_one(name):
    given, kind, message = WRONG[name]
    table = hkv.create(128, DIM, policy=CUSTOM)
    layer = hkv.nnx.EmbedBag(128, DIM, policy=CUSTOM)
    calls = {
        "find_or_insert": lambda: hkv.find_or_insert(table, KEYS, scores=given),
        "assign": lambda: hkv.assign(table, KEYS, scores=given),
        "find_or_insert_pooled": lambda: hkv.find_or_insert_pooled(table, KEYS, scores=given),
        "EmbedBag": lambda: layer(KEYS, train=True, scores=given),
    }
    for call, run in calls.items():
        with pytest.raises(kind, match=f"^{call}: {message}") as error:
            run()
        assert "Make keys" not in str(error.value)


# --- Scores of the features of a collection ------------------------------------------------------

BATCH = 8
NUMBER = 2**63 + 1


def collection_of(policy, fuse=True):
    tables = [
        hkv.TableConfig(name, 256, DIM, policy=policy, optimizer=SGD) for name in ("users", "items")
    ]
    features = [
        hkv.Feature("user", "users"),
        hkv.Feature("item", "items", None),
        hkv.Feature("seen", "items", "mean"),
        hkv.Feature("liked", "items", "sqrtn"),
    ]
    return hkv.Collection(tables, features, fuse=fuse)


def inputs_of(rng):
    lists = [rng.integers(0, 9, length) for length in rng.integers(0, 4, BATCH)]
    seen = rng.integers(0, 9, (BATCH, 3), dtype=np.int32)
    weights = rng.random((BATCH, 3), np.float32)
    return {
        "user": rng.integers(0, 9, BATCH, dtype=np.int32),
        "item": rng.integers(0, 9, (BATCH, 2), dtype=np.int32),
        "seen": hkv.Padded(seen, rng.random((BATCH, 3)) < 0.7, weights),
        "liked": hkv.Jagged.from_lists(lists, capacity=30),
    }


@pytest.mark.parametrize(("policy", "fuse"), [("CUSTOM", False), ("LFU", True)])
def test_features_are_looked_up_with_their_scores(policy, fuse, rng):
    """As the oracle does with the ids of a physical table's features, one after the other."""
    collection = collection_of(hkv.Policy[policy], fuse)
    tables = collection.create()
    oracles = {name: Oracle.from_table(table) for name, table in tables.items()}

    @jax.jit
    def look_up(tables, inputs, scores):
        return collection.lookup(tables, inputs, train=True, scores=scores | {"item": NUMBER})

    shapes = {"user": (BATCH,), "item": (BATCH, 2), "seen": (BATCH, 3), "liked": (30,)}
    some = ["seen"] if policy == "LFU" else ["user", "seen", "liked"]  # of others each counts 1
    for names in (["user", "seen", "liked"], some):
        inputs = inputs_of(rng)
        words = {name: np.ones(shape, np.uint64) for name, shape in shapes.items()}
        words["item"] *= np.uint64(NUMBER)
        for name in names:
            words[name] = rng.integers(0, 2**40, shapes[name]).astype(np.uint64)
        given = {name: hkv.Keys.from_numpy(words[name]) for name in names}
        tables, found = look_up(tables, inputs, given)
        for group in collection.groups:
            keys, valid = collection.keys(inputs)[group.name]
            valid = np.ones(keys.shape, bool) if valid is None else np.asarray(valid)
            scores = np.concatenate([words[f.name].ravel() for f in group.features])
            expected = oracles[group.name].find_or_insert(
                keys.to_numpy(), scores=scores, valid=valid
            )
            assert_same(found.results[group.name].status, expected.status, group.name)
            oracles[group.name].assert_equal(tables[group.name])
    tables, found = collection.lookup(tables, inputs_of(rng), scores={"item": "not looked at"})
    for group in collection.groups:  # evaluation scores nothing
        assert found.results[group.name] is None
        oracles[group.name].assert_equal(tables[group.name])


def test_without_scores_a_lookup_is_the_program_that_it_was(rng):
    collection, inputs = collection_of(LFU), inputs_of(rng)
    texts = [
        jax.jit(partial(collection.lookup, train=True, **options))
        .lower(collection.create(), inputs)
        .as_text()
        for options in ({}, {"scores": {}}, {"scores": {"item": None}})
    ]
    assert len(set(texts)) == 1
    scored = partial(collection.lookup, train=True, scores={"item": 2**40})
    testing.assert_no_table_copies(scored, collection.create(), inputs)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_steps_of_layers_take_scores_of_features(api, micro_batches, rng):
    collection = hkv.Collection(
        [hkv.TableConfig(name, 256, DIM, policy=CUSTOM, optimizer=SGD) for name in ("a", "b")],
        [hkv.Feature("x", "a"), hkv.Feature("y", "b", None)],
    )
    flax: Any = getattr(hkv, api)
    model = flax.EmbedCollection(collection)
    inputs = {"x": np.arange(8, dtype=np.int32), "y": rng.integers(0, 9, (8, 2), dtype=np.int32)}

    def loss_fn(call, inputs, scores):
        rows = call(inputs, train=True, scores=scores | {"y": 2**40})
        return sum(jnp.mean(own) for own in rows.values())

    if api == "linen":
        state = hkv.linen.TrainState.create(model, jax.random.key(0), inputs, tx=optax.sgd(0.1))
    else:
        state = hkv.nnx.TrainState(model, tx=optax.sgd(0.1))
    given = {"x": np.arange(100, 108, dtype=np.uint32)}
    stepped = flax.train_step(loss_fn, micro_batches=micro_batches)(state, inputs, given)
    table = stepped[0].tables["a+b"] if api == "linen" else model.tables["a+b"]
    exported = sharding.export_entries(table)
    (group,) = collection.groups
    ids, is_own = group.ids("a", hkv.Keys.from_numpy(exported.keys))
    ids, is_own = ids.to_numpy(), np.asarray(is_own)
    np.testing.assert_array_equal(exported.scores[is_own], ids[is_own] + np.uint64(100))
    assert is_own.sum() == 8 and (exported.scores[~is_own] == 2**40).all()


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_over_devices_features_have_their_scores(mode, rng):
    """Counts of one feature and none of another, and scores that go with the id."""
    tables = [
        hkv.TableConfig("users", 1024, DIM, policy=LFU, optimizer=SGD),
        hkv.TableConfig("items", 1024, DIM, policy=LFU, optimizer=SGD),
        hkv.TableConfig("words", 1024, DIM, policy=CUSTOM, optimizer=SGD),
    ]
    features = [
        hkv.Feature("user", "users"),
        hkv.Feature("item", "items", "mean"),
        hkv.Feature("word", "words", None),
    ]
    collection = hkv.Collection(tables, features)
    mesh = jax.make_mesh((4,), ("device",), devices=jax.devices("cpu")[:4])
    placement = Placement(mesh, mode=mode)
    shapes = {"user": (16,), "item": (16, 2), "word": (16, 2)}
    inputs = {name: rng.integers(0, 20, shape).astype(np.int32) for name, shape in shapes.items()}
    scores = {
        "item": hkv.Keys.from_numpy(rng.integers(0, 2**40, (16, 2)).astype(np.uint64)),
        "word": hkv.Keys.from_numpy(inputs["word"].astype(np.uint64) << np.uint64(35)),
    }

    def step(tables, batch, axis_name="device"):
        inputs, scores = batch
        for given in ({"user": 2**33, "word": 5}, scores):
            tables, found = collection.lookup(
                tables, inputs, train=True, scores=given, axis_name=axis_name
            )
        return tables, {name: own.counts for name, own in found.results.items()}

    many = placement.create(lambda: collection.create("device"))
    many, counts = placement.step(step)(many, placement.put((inputs, scores)))
    one, expected = jax.jit(partial(step, axis_name=None))(collection.create(), (inputs, scores))
    assert jax.tree.map(int, counts) == jax.tree.map(int, expected)
    for name, table in one.items():
        parts = entries_of(placement.shards(many[name])), entries_of(table)
        np.testing.assert_array_equal(parts[0].keys, parts[1].keys)
        np.testing.assert_array_equal(parts[0].scores, parts[1].scores)


LRU = hkv.Policy.LRU
EVERY = dict.fromkeys(("user", "item", "seen", "liked"), 1)
UNFIT = {
    "a time has no scores": (
        LRU,
        {"seen": 1},
        ValueError,
        "Collection.lookup of the feature 'seen': scores are not accepted under Policy.LRU",
    ),
    "one is missing": (
        CUSTOM,
        {"user": 1, "item": 2, "liked": 3},
        ValueError,
        "Collection.lookup: scores must be of the features ['seen'] too, whose table has "
        "Policy.CUSTOM, which makes none of its own, got those of ['user', 'item', 'liked']: give "
        "scores={'seen': ...}",
    ),
    "all are missing": (CUSTOM, None, ValueError, "['user', 'item', 'seen', 'liked'] too"),
    "of no feature": (
        LFU,
        {"users": 1},
        ValueError,
        "Collection.lookup: scores must be of features of the inputs, ['user', 'item', 'seen', "
        "'liked'], got ['users']",
    ),
    "no dict": (LFU, 7, TypeError, "Collection.lookup: scores must be a dict of features"),
    "of another shape": (
        LFU,
        {"seen": np.ones((3, BATCH), np.uint32)},
        ValueError,
        "of the feature 'seen': scores must have the keys' shape [8, 3], got [3, 8]",
    ),
    "of bags": (
        LFU,
        {"liked": np.ones(BATCH, np.uint32)},
        ValueError,
        "of the feature 'liked': scores must have the keys' shape [30], got [8]",
    ),
    "of another type": (
        CUSTOM,
        EVERY | {"item": 1.5},
        TypeError,
        "of the feature 'item': scores must be integers",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_scores_that_do_not_fit_features_are_named_by_them(name, rng):
    policy, given, kind, message = UNFIT[name]
    collection, inputs = collection_of(policy), inputs_of(rng)
    with pytest.raises(kind, match=re.escape(message)):
        jax.eval_shape(
            lambda: collection.lookup(collection.create(), inputs, train=True, scores=given)
        )


@pytest.mark.filterwarnings("ignore:Collection.lookup. with train=True the tables .* are only read")
def test_tables_that_are_only_read_need_no_scores(rng):
    collection = hkv.Collection(
        [hkv.TableConfig("a", 128, DIM, policy=int(CUSTOM))], [hkv.Feature("x", "a")]
    )
    for scores in (None, {"x": 1}):
        tables, found = collection.lookup(
            collection.create(), {"x": np.arange(3)}, train=True, scores=scores
        )
        assert found.results["a"] is None and int(hkv.size(tables["a"])) == 0


@pytest.mark.parametrize("dtype", [np.int8, np.int32])
def test_traced_scores_below_zero_are_zero(dtype):
    """As bits they would be the highest scores, of entries that stay for ever."""
    given = np.array([[-1, 3], [np.iinfo(dtype).min, 0]], dtype)
    table = hkv.create(128, DIM, policy=hkv.Policy.LFU)
    insert = jax.jit(lambda table, keys, scores: hkv.find_or_insert(table, keys, scores=scores))
    _, found = hkv.find(insert(table, KEYS, given)[0], KEYS, return_scores=True)
    assert found.scores.to_numpy().tolist() == [[0, 3], [0, 0]]
