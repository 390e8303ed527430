"""Rows that come in a type of their own: converted where they are read, once."""

from __future__ import annotations

import re
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from combinations import seldom
from many_devices import assert_same_bits

import jax_hkv as hkv
from jax_hkv import sharding, tiered
from jax_hkv.sharding import Exchange, Placement

FLOATS = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)]
PAIRS = [pair for pair in product(FLOATS, FLOATS) if pair[0] != pair[1]]
WIDTHS = [1, 6, 8, 37, 128]
SUMMED = [*PAIRS, (FLOATS[1], FLOATS[1])]
POOLED = [(*pair, dim) for pair, dim in zip(SUMMED, WIDTHS * 2, strict=False)]
DEVICES = 4
BATCH = 64
NORMAL = hkv.initializers.normal(0.3)


def rows_like(rng, count, dim, dtype):
    """Of all sizes: too large and too small for half types, halfway between two of them, zeros."""
    rows = rng.standard_normal((count, dim)) * 10.0 ** rng.integers(-42, 38, (count, dim))
    halfway = np.float32(1) + np.float32(2.0**-8) * rng.integers(0, 512, (count, dim))
    rows = np.where(rng.random((count, dim)) < 0.3, halfway, rows)
    with np.errstate(over="ignore"):
        return np.where(rng.random((count, dim)) < 0.1, -0.0, rows).astype(np.float32).astype(dtype)


def cast(rows, dtype):
    with np.errstate(over="ignore"):
        return np.asarray(rows).astype(dtype)


def filled(rng, dim, dtype):
    """A table, and a batch of ids of which some are absent, and a mask."""
    table = hkv.create(256, dim, dtype=dtype, init=NORMAL)
    present = rng.integers(0, 2**64, 100, np.uint64)
    keys = hkv.Keys.from_numpy(present)
    table, _ = hkv.insert_or_assign(table, keys, rows_like(rng, 100, dim, dtype))
    batch = np.concatenate([present, rng.integers(0, 2**64, 30, np.uint64)])
    ids = rng.choice(batch, BATCH)
    return table, hkv.Keys.from_numpy(ids), rng.random(BATCH) < 0.8


LOOKUPS = {
    "find": partial(hkv.find, fill=0.1),
    "find, first rows": partial(hkv.find, fill="initial"),
    "find and touch": partial(hkv.find, touch=True, fill=-3e9),
    "find_or_insert": hkv.find_or_insert,
    "find_or_insert, none let in": partial(hkv.find_or_insert, admit=np.zeros(BATCH, bool)),
}


@pytest.mark.parametrize("pair", range(len(PAIRS)), ids=lambda n: f"{PAIRS[n]}")
@pytest.mark.parametrize("name", LOOKUPS)
def test_rows_are_those_that_come_without_it_cast(name, pair, rng):
    """And all else is as it was: the table, slots, statuses and counts."""
    own, wanted = PAIRS[pair]
    dim = WIDTHS[(pair + [*LOOKUPS].index(name)) % len(WIDTHS)]
    table, keys, valid = filled(rng, dim, own)
    look_up = jax.jit(LOOKUPS[name], static_argnames="dtype")
    after, usual = look_up(table, keys, valid=valid)
    other, result = look_up(table, keys, valid=valid, dtype=wanted)
    assert_same_bits(np.asarray(result.values), cast(usual.values, wanted))
    assert usual.values.dtype == own and result.values.dtype == wanted
    assert_same_bits(
        (after, usual._replace(values=jnp.zeros(()))),
        (other, result._replace(values=jnp.zeros(()))),
    )


@pytest.mark.parametrize(
    "own, wanted, dim",
    seldom(POOLED, POOLED[1::2]),
    ids=str,
)
def test_sums_of_bags_are_rounded_once(own, wanted, dim, rng):
    """They are made in float32; bags of one id, of many and of none."""
    table, keys, _ = filled(rng, dim, own)
    lengths = [1, 0, 1, 1, 40, 1, 3, 0, 1, 16]
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    weights = rng.standard_normal(BATCH).astype(np.float32)
    plain, weighted = hkv.Jagged(keys, splits), hkv.Jagged(keys, splits, weights)
    cases = [(plain, "sum"), (weighted, "sum"), (plain, "mean"), (keys, "sum")]
    for (ids, combiner), train in product(cases, [False, True]):
        call = hkv.find_or_insert_pooled if train else hkv.find_pooled
        look_up = jax.jit(partial(call, combiner=combiner), static_argnames="dtype")
        ids = ids.reshape(BATCH, 1) if ids is keys else ids
        after, usual = look_up(table, ids)
        other, result = look_up(table, ids, dtype=wanted)
        assert usual.values.dtype == np.float32 and result.values.dtype == wanted
        assert_same_bits(np.asarray(result.values), cast(usual.values, wanted))
        assert_same_bits(
            (after, usual._replace(values=jnp.zeros(()))),
            (other, result._replace(values=jnp.zeros(()))),
        )


@pytest.mark.parametrize("wanted, nan", [(FLOATS[1], 0x7FC0), (FLOATS[2], 0x7E00)], ids=str)
def test_no_number_is_the_one_that_half_types_have(wanted, nan):
    table = hkv.create(128, 4)
    rows = np.array([[0x7F800001, 0xFFC12345, 0x7FFFFFFF, 0x7F800000]], np.uint32).view(np.float32)
    table, _ = hkv.insert_or_assign(table, np.array([5], np.int32), rows)
    _, found = hkv.find(table, np.array([5], np.int32), dtype=wanted)
    infinite = cast(np.float32(np.inf), wanted).view(np.uint16)
    expected = np.array([[nan, 0x8000 | nan, nan, infinite]], np.uint16)
    np.testing.assert_array_equal(np.asarray(found.values).view(np.uint16), expected)


@pytest.mark.parametrize(
    "optimizer", [hkv.optim.adagrad(0.1), hkv.optim.sgd(0.5)], ids=["ada", "sgd"]
)
def test_gradients_in_the_type_of_the_rows_train_them(optimizer, rng):
    """As gradients of the usual rows do that are halves widened."""
    table, keys, valid = filled(rng, 8, np.float32)
    table = optimizer.init(table)
    gradients = jnp.asarray(rng.standard_normal((BATCH, 8)), jnp.bfloat16)
    after, usual = hkv.find_or_insert(table, keys, valid=valid)
    wanted = optimizer.update(after, usual, gradients.astype(jnp.float32))
    after, result = hkv.find_or_insert(table, keys, valid=valid, dtype=jnp.bfloat16)
    assert_same_bits(optimizer.update(after, result, gradients), wanted)


@pytest.mark.parametrize("train", [False, True])
def test_weights_have_the_gradients_of_sums_that_are_cast_behind(train, rng):
    table, keys, _ = filled(rng, 8, np.float32)
    ids = keys.reshape(BATCH // 4, 4)
    factors = jnp.asarray(rng.standard_normal((BATCH // 4, 8)), jnp.bfloat16)
    look_up = hkv.find_or_insert_pooled if train else hkv.find_pooled

    def loss(weights, dtype):
        _, found = look_up(table, ids, weights=weights, combiner="mean", dtype=dtype)
        rows = found.values.astype(jnp.bfloat16)
        return jnp.sum((rows * factors).astype(jnp.float32))

    weights = jnp.asarray(rng.random((BATCH // 4, 4)), jnp.float32)
    own, behind = (jax.jit(jax.grad(partial(loss, dtype=d)))(weights) for d in ("bfloat16", None))
    assert np.any(behind != 0)
    np.testing.assert_array_equal(own, behind)


EXCHANGES = {
    "merged": Exchange("device"),
    "not merged": Exchange("device", deduplicate=False),
    "second round": Exchange("device", distinct=0.1),
    "summed at home": Exchange("device", partial=False),
    "summed at home, second round": Exchange("device", partial=False, distinct=0.1),
    "replicas": Exchange("device", replicas=True),
}


SGD = hkv.optim.sgd(0.5)


def over_devices(exchange, own, act, rng):
    """A compiled step over devices, tables, and a batch of keys and of weights for each."""
    placement = Placement(jax.make_mesh((DEVICES,), ("device",), devices=jax.devices()[:DEVICES]))
    options = {"dtype": own, "init": NORMAL, "replicas": exchange.replicas}
    tables = placement.create(lambda: SGD.init(hkv.create(256, 8, **options)))
    words = rng.integers(0, 90, DEVICES * BATCH).astype(np.uint64) << np.uint64(33)
    weights = rng.standard_normal((DEVICES * BATCH // 4, 4)).astype(np.float32)

    def step(tables, ids, weights):
        tables, rows = act(tables, ids, weights, exchange)
        return tables, jax.lax.all_gather(rows, exchange.axes)

    batch = placement.put((hkv.Keys.from_numpy(words), weights))
    return placement.step(step, donate=False), tables, batch


OVER_DEVICES = [
    *((bags, "merged", *PAIRS[0]) for bags in ("none", "weighted")),
    *(("none", name, *PAIRS[0]) for name in ("not merged", "second round")),
    *(("summed", name, *PAIRS[0]) for name in ("summed at home", "replicas")),
    ("weighted", "summed at home, second round", *PAIRS[0]),
    ("none", "merged", *PAIRS[4]),
    ("summed", "merged", *PAIRS[5]),
]


@pytest.mark.parametrize(
    "bags, name, own, wanted",
    seldom(OVER_DEVICES, [own for own in OVER_DEVICES if own[1] in ("not merged", "replicas")]),
    ids=str,
)
def test_over_devices_they_are_the_same(bags, name, own, wanted, rng):
    """And train their rows; a number for absent keys is rounded as the table's rows are."""
    seed = rng.integers(2**32)

    def act(dtype, tables, ids, weights, exchange):
        both = {"axis_name": exchange, "dtype": dtype}
        if bags == "none":
            tables, read = sharding.find(tables, ids, fill=0.1, **both)
            tables, result = sharding.find_or_insert(tables, ids, **both)
        else:
            ids, both = ids.reshape(*weights.shape), both | {"combiner": "mean"}
            both["weights"] = weights if bags == "weighted" else None
            tables, read = sharding.find_pooled(tables, ids, **both)
            tables, result = sharding.find_or_insert_pooled(tables, ids, **both)
        gradients = result.values.astype(wanted)
        rows = jnp.concatenate([read.values, result.values])
        return sharding.update(SGD, tables, result, gradients), rows

    def twice(dtype):
        batches = np.random.default_rng(seed)
        step, tables, batch = over_devices(EXCHANGES[name], own, partial(act, dtype), batches)
        tables, first = step(tables, *batch)
        return *step(tables, *batch), first

    (tables, *usual), (others, *cast_ones) = twice(None), twice(wanted)
    assert_same_bits(tables, others)
    for before, after in zip(usual, cast_ones, strict=True):
        assert after.dtype == wanted
        assert_same_bits(np.asarray(after), cast(before, wanted))


def test_rows_travel_in_the_narrower_type(rng):
    """And those that are summed in the table's."""

    def travelling(own, dtype, pooled):
        call = sharding.find_or_insert_pooled if pooled else sharding.find_or_insert

        def act(tables, ids, weights, exchange):
            ids = ids.reshape(*weights.shape) if pooled else ids
            tables, result = call(tables, ids, axis_name=exchange, dtype=dtype)
            return tables, result.values

        step, tables, batch = over_devices(Exchange("device", partial=False), own, act, rng)
        text = str(jax.make_jaxpr(step)(tables, *batch))
        return set(re.findall(r":(\w+)\[\d+,8\] = all_to_all", text))

    full, half = np.float32, jnp.bfloat16
    assert travelling(full, None, False) == travelling(full, full, False) == {"f32"}
    assert travelling(full, half, False) == {"bf16"}
    assert travelling(half, full, False) == travelling(half, None, False) == {"bf16"}
    assert travelling(full, half, True) == {"f32"}


def test_layers_in_bfloat16_leave_no_rows_to_be_cast(rng):
    """XLA would read all of them in float32 for that."""
    ids = jnp.arange(BATCH, dtype=jnp.int32).reshape(-1, 2)
    optimizer = hkv.optim.sgd(0.1)
    config = hkv.TableConfig("ids", 256, 24, optimizer=optimizer)
    collection = hkv.Collection([config], [hkv.Feature("a", "ids", "mean")])
    layers = [
        (hkv.linen.Embed(256, 24, optimizer=optimizer, dtype=jnp.bfloat16), ids),
        (hkv.linen.EmbedBag(256, 24, optimizer=optimizer, dtype=jnp.bfloat16), ids),
        (hkv.linen.EmbedCollection(collection, dtype=jnp.bfloat16), {"a": ids}),
    ]
    for (layer, inputs), train in product(layers, [False, True]):
        variables = jax.jit(layer.init)(jax.random.key(0), inputs)
        rows = hkv.linen.perturbations(layer, variables, inputs, train=True)

        def call(variables, inputs, layer=layer, train=train):
            return layer.apply(variables, inputs, train=train, mutable=hkv.linen.MUTABLE)

        given = variables | {hkv.linen.PERTURBATIONS: rows}
        text = str(jax.make_jaxpr(call)(given, inputs))
        assert not re.search(r":bf16\[[\d,]*24\] = convert_element_type", text), text
        assert re.search(r":bf16\[\d+,24\] = (find|gather|pool)\w*rows", text)


@pytest.mark.filterwarnings("ignore:.*train=True without perturbations")
@pytest.mark.parametrize("unseen", ["initial", "zeros", "learned"])
@pytest.mark.parametrize("layer", [hkv.linen.Embed, hkv.linen.EmbedBag])
def test_layers_that_are_read_round_what_they_gave(layer, unseen, rng):
    ids = jnp.asarray(rng.integers(0, 40, (BATCH, 2)), jnp.int32)
    layers = {
        kind: layer(256, 8, optimizer=SGD, embedding_init=NORMAL, unseen=unseen, dtype=kind)
        for kind in (None, jnp.bfloat16, jnp.float16)
    }
    variables = layers[None].init(jax.random.key(0), ids)
    _, trained = layers[None].apply(variables, ids[:20], train=True, mutable=hkv.linen.MUTABLE)
    variables = {**variables, "tables": trained["tables"]}
    for kind, own in layers.items():
        rows = np.asarray(own.apply(variables, ids))
        assert_same_bits(rows, cast(layers[None].apply(variables, ids), kind or np.float32))


def test_vmap_gives_what_a_loop_gives(rng):
    table, keys, _ = filled(rng, 8, np.float32)
    for look_up in (hkv.find, hkv.find_pooled):

        def rows(ids, look_up=look_up):
            return look_up(table, ids, dtype=jnp.bfloat16)[1].values

        given = keys.reshape(4, BATCH // 16, 4)
        at_once = jax.vmap(rows)(given)
        assert at_once.dtype == jnp.bfloat16
        assert_same_bits(at_once, jnp.stack([rows(given[n]) for n in range(4)]))


def test_rows_without_a_weight_are_copied(rng):
    """A bag of one row in its own type is that row, whatever its bits."""
    table = hkv.create(128, 4, dtype=jnp.float16)
    patterns = np.array([[0x7C01, 0xFE03, 0x0001, 0x8000]], np.uint16).view(np.float16)
    ids = np.array([5], np.int32)
    table, _ = hkv.insert_or_assign(table, ids, patterns)
    for find, given in ((hkv.find, ids), (hkv.find_pooled, ids[:, None])):
        _, found = find(table, given, dtype=jnp.float16)
        assert_same_bits(np.asarray(found.values), patterns)


@pytest.mark.parametrize(
    "own, wanted",
    seldom(PAIRS, PAIRS[1::2]),
    ids=str,
)
def test_rows_of_both_tiers_come_cast(own, wanted, rng):
    """Near ones, far ones and those of absent ids; with their scores too."""
    cache = hkv.create(128, 6, dtype=own, init=NORMAL)
    tiers = tiered.Tiers(cache, tiered.create_store(cache, 1024))
    for ids in np.arange(300, dtype=np.int32).reshape(3, 100):
        tiers, _ = tiered.prefetch(tiers, ids)
        cache, _ = hkv.assign(tiers.cache, ids, rows_like(rng, 100, 6, own))
        tiers = tiers._replace(cache=cache)
    ids = rng.integers(0, 330, (40, 2)).astype(np.int32)
    for find in (tiered.find, jax.jit(tiered.find, static_argnames=("fill", "dtype"))):
        for options in ({"fill": 0.1}, {"fill": "initial"}):
            _, usual = find(tiers, ids, **options)
            _, result = find(tiers, ids, **options, dtype=wanted)
            assert usual.values.dtype == own and result.values.dtype == wanted
            assert_same_bits(np.asarray(result.values), cast(usual.values, wanted))
            assert_same_bits(usual[1:], result[1:])
    _, scored = tiered.find(tiers, ids, fill="initial", return_scores=True, dtype=wanted)
    assert_same_bits(np.asarray(scored.values), np.asarray(result.values))
    assert ((scored.slots < 0) & scored.found).any() and not scored.found.all()
    with pytest.raises(TypeError, match=r"tiered\.find: dtype must be .*int8"):
        tiered.find(tiers, ids, dtype=np.int8)


CALLS = {
    "find": hkv.find,
    "find_or_insert": hkv.find_or_insert,
    "find_pooled": hkv.find_pooled,
    "find_or_insert_pooled": hkv.find_or_insert_pooled,
    "sharding.find": partial(sharding.find, axis_name="device"),
    "sharding.find_or_insert": partial(sharding.find_or_insert, axis_name="device"),
    "sharding.find_pooled": partial(sharding.find_pooled, axis_name="device"),
    "sharding.find_or_insert_pooled": partial(sharding.find_or_insert_pooled, axis_name="device"),
}


@pytest.mark.parametrize(
    "dtype", [np.int32, "float64", "float8_e4m3fn", "half a float", 3.0, rows_like]
)
@pytest.mark.parametrize("name", [*CALLS, "Collection.lookup"])
def test_another_type_is_an_error(name, dtype):
    ids = np.ones((2, 2), np.int32)
    if name == "Collection.lookup":
        collection = hkv.Collection([hkv.TableConfig("ids", 128, 2)], [hkv.Feature("ids", "ids")])
        call = partial(collection.lookup, collection.create(), {"ids": ids[0]})
    else:
        call = partial(CALLS[name], hkv.create(128, 2), ids)

    def mapped(_):
        call(dtype=dtype)

    with pytest.raises(TypeError, match=rf"{name}: dtype must be float32, bfloat16 or float16"):
        jax.vmap(mapped, axis_name="device")(np.zeros(1))
