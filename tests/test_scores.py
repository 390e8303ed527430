"""Scores that a caller gives: one number for a batch, and those of the features of a collection."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_same
from many_devices import assert_same_bits
from oracle import Oracle

import jax_hkv as hkv
from jax_hkv import sharding
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
        table = call(**options)[1]["tables"]["table"]
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

        axis = {"axis_name": "device"}
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
