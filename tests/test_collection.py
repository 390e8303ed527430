"""Collections: many features over few tables, fused or not, and what a wrong declaration says."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from many_devices import assert_same_bits

import jax_hkv as hkv
from jax_hkv import index as _index
from jax_hkv import sharding, whole_table
from jax_hkv._namespaces import in_namespace

DIM = 8
ADAM = hkv.optim.adam(1e-2)
TABLES = [
    hkv.TableConfig("users", 512, DIM, optimizer=ADAM),
    hkv.TableConfig("items", 1024, DIM, optimizer=ADAM),
    hkv.TableConfig("words", 512, 2 * DIM, optimizer=ADAM),
]
FEATURES = [
    hkv.Feature("user", "users"),
    hkv.Feature("item", "items", None),
    hkv.Feature("seen", "items", "mean"),
    hkv.Feature("title", "words", "sqrtn"),
]
BATCH = 6
TWO = ("users", "items")
WORD = 2**32


def jagged(rng, capacity=40):
    lengths = rng.integers(0, 5, BATCH)
    rows = [rng.integers(0, 50, length) for length in lengths]
    return hkv.Jagged.from_lists(rows, capacity=capacity)


def inputs_of(rng):
    seen = rng.integers(0, 50, (BATCH, 4), dtype=np.int32)
    weights = rng.random((BATCH, 4), np.float32)
    return {
        "user": rng.integers(0, 50, BATCH, dtype=np.int32),
        "item": rng.integers(0, 50, (BATCH, 3), dtype=np.int32),
        "seen": hkv.Padded(seen, valid=rng.random((BATCH, 4)) < 0.7, weights=weights),
        "title": jagged(rng),
    }


def train(collection, tables, inputs):
    """A step with loss sum(rows**2) over all features, and their rows."""
    tables, found = collection.lookup(tables, inputs, train=True)

    def loss(rows):
        spread = collection.spread(rows, found.parts)
        return sum(jnp.sum(part**2) for part in spread.values()), spread

    gradients, spread = jax.grad(loss, has_aux=True)(found.rows)
    for group in collection.groups:
        tables[group.name] = ADAM.update(
            tables[group.name], found.results[group.name], gradients[group.name]
        )
    return tables, spread


def test_tables_that_agree_are_one_and_others_are_not():
    """Different dims group by themselves; each feature goes where its table is."""
    fused = hkv.Collection(TABLES, FEATURES)
    assert [group.name for group in fused.groups] == ["users+items", "words"]
    tables = fused.create()
    assert [table.dim for table in tables.values()] == [DIM, 2 * DIM]
    assert tables["users+items"].capacity >= 512 + 1024
    assert tables["users+items"].name == "users+items"
    apart = hkv.Collection(TABLES, FEATURES, fuse=False)
    assert [group.name for group in apart.groups] == ["users", "items", "words"]


@pytest.mark.parametrize(
    "field, value",
    [
        ("dtype", jnp.bfloat16),
        ("policy", hkv.Policy.LFU),
        ("choices", 2),
        ("init", hkv.initializers.normal(0.1)),
        ("seed", 1),
        ("optimizer", hkv.optim.adam(2e-2)),
        ("admission", hkv.admission.probability(0.5)),
    ],
)
def test_tables_that_differ_in_one_setting_stay_apart(field, value):
    """A physical table has one setting of each."""
    configs = [TABLES[0], hkv.TableConfig("items", 1024, DIM, **{"optimizer": ADAM, field: value})]
    features = [hkv.Feature("user", "users"), hkv.Feature("item", "items")]
    assert len(hkv.Collection(configs, features).groups) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: hkv.optim.sparse(optax.adagrad(0.1)),
        lambda: hkv.optim.adagrad(optax.exponential_decay(0.1, 3, 0.5)),
    ],
    ids=["optax", "schedule"],
)
def test_tables_with_one_optimizer_object_are_one_and_with_two_are_not(make):
    """Functions are equal if they are the same, and optimizers hold some."""
    features = [hkv.Feature("user", "users"), hkv.Feature("item", "items")]
    one = make()
    for optimizers, groups in (((one, one), 1), ((make(), make()), 2)):
        configs = [
            hkv.TableConfig(name, 128, DIM, optimizer=optimizer)
            for name, optimizer in zip(("users", "items"), optimizers, strict=True)
        ]
        assert len(hkv.Collection(configs, features).groups) == groups


@pytest.mark.parametrize("is_weighted", [False, True])
def test_jagged_ids_without_a_combiner_have_a_row_each(is_weighted, rng):
    """As the same ids with a mask have; in training, too, and traced."""
    collection = hkv.Collection(TABLES, FEATURES)
    given = inputs_of(rng)
    bags = jagged(rng)
    if is_weighted:
        bags = dataclasses.replace(bags, weights=rng.random(40, np.float32))
    count = int(bags.row_splits[-1])
    flat = hkv.Padded(bags.ids, valid=np.arange(40) < count, weights=bags.weights)
    tables, expected = train(collection, collection.create(), {**given, "item": flat})
    jitted = jax.jit(lambda tables, inputs: train(collection, tables, inputs))
    trained, rows = jitted(collection.create(), {**given, "item": bags})
    assert rows["item"].shape == (40, DIM) and not np.asarray(rows["item"])[count:].any()
    assert np.asarray(rows["item"])[:count].any(1).all()
    assert_same_bits((trained, rows), (tables, expected))


def test_fusing_tables_changes_no_feature(rng):
    """The rows start differently (the key holds the table), so both start from the same ones."""
    ids = np.arange(50, dtype=np.int32)
    start = {name: rng.standard_normal((50, DIM), np.float32) for name in ("users", "items")}
    words = rng.standard_normal((50, 2 * DIM), np.float32)
    outputs = {}
    state = rng.bit_generator.state
    for fuse in (True, False):
        collection = hkv.Collection(TABLES, FEATURES, fuse=fuse)
        tables = collection.create()
        for group in collection.groups:
            for config in group.tables:
                keys = hkv.Keys.from_numpy(ids.astype(np.int64))
                keys = in_namespace(keys, group.number(config.name), group.bits)
                rows = start.get(config.name, words)
                tables[group.name], _ = hkv.insert_or_assign(tables[group.name], keys, rows)
        rng.bit_generator.state = state
        outputs[fuse] = []
        for _ in range(4):
            tables, spread = train(collection, tables, inputs_of(rng))
            outputs[fuse].append(spread)
        sizes = collection.sizes(tables)
        assert {name: int(size) for name, size in sizes.items()} == dict.fromkeys(sizes, 50)
    for one, other in zip(outputs[True], outputs[False], strict=True):
        for name, rows in one.items():
            np.testing.assert_array_equal(rows, other[name])


def test_features_weighed_together_get_the_bits_of_each_by_itself(rng):
    """For every combiner, padded and Jagged, weighted or not; and the gradients of weights."""
    kinds = [(c, w, j) for c in ("sum", "mean", "sqrtn") for w in (0, 1) for j in (0, 1)]
    names = [f"feature {number}" for number in range(len(kinds))]
    collection = hkv.Collection(
        [hkv.TableConfig("all", 512, DIM, init=hkv.initializers.uniform(-1.0, 1.0))],
        [hkv.Feature(n, "all", kind[0]) for n, kind in zip(names, kinds, strict=True)],
    )
    ids = rng.permutation(50).astype(np.int32)
    (table,) = collection.create().values()
    table, _ = hkv.find_or_insert(table, ids[:30])

    def given(is_jagged, weights):
        if is_jagged:
            lists = [rng.choice(ids, rng.integers(0, 40)) for _ in range(BATCH)]
            flat = hkv.Jagged.from_lists(lists, capacity=250)
            own = np.asarray(rng.normal(size=250), np.float32)
            return dataclasses.replace(flat, weights=jnp.asarray(own)) if weights else flat
        shape = (BATCH, int(rng.integers(8, 40)))
        own = jnp.asarray(rng.normal(size=shape), jnp.float32) if weights else None
        return hkv.Padded(rng.choice(ids, shape), valid=rng.random(shape) < 0.7, weights=own)

    inputs = {n: given(j, w) for n, (_, w, j) in zip(names, kinds, strict=True)}
    of_weights = {n: inputs[n].weights for n in names if inputs[n].weights is not None}
    weighed = rng.normal(size=(BATCH, DIM)).astype(np.float32)

    def put(weights):
        return {
            name: dataclasses.replace(own, weights=weights[name]) if name in weights else own
            for name, own in inputs.items()
        }

    def together(weights):
        _, found = collection.lookup({"all": table}, put(weights))
        return collection.spread(found.rows, found.parts)

    def alone(weights):
        rows = {}
        for (combiner, _, is_jagged), (name, own) in zip(kinds, put(weights).items(), strict=True):
            padded = {} if is_jagged else {"weights": own.weights, "valid": own.valid}
            bags = own if is_jagged else own.ids
            rows[name] = hkv.find_pooled(table, bags, combiner=combiner, **padded)[1].values
        return rows

    results = [jax.vjp(lookup, of_weights) for lookup in (together, alone)]
    gradients = [pull(dict.fromkeys(names, weighed))[0] for _, pull in results]
    (rows, _), (expected, _) = results
    for name in names:
        np.testing.assert_array_equal(rows[name], expected[name], name, strict=True)
    # What XLA compiles for a product's derivative may be fused differently.
    for name, own in gradients[1].items():
        assert np.any(own)
        np.testing.assert_allclose(gradients[0][name], own, rtol=1e-3, atol=1e-4, err_msg=name)


def test_each_feature_gets_the_rows_of_its_own_table(rng):
    """Combiners, masks and weights, computed again from the rows of a plain lookup."""
    collection = hkv.Collection(TABLES, FEATURES)
    tables, inputs = collection.create(), inputs_of(rng)
    tables, found = collection.lookup(tables, inputs, train=True)
    spread = collection.spread(found.rows, found.parts)
    assert list(spread) == [feature.name for feature in FEATURES]
    (big, _) = collection.groups

    def rows_of(table, ids):
        keys = hkv.Keys.from_numpy(np.asarray(ids, np.int64))
        keys = in_namespace(keys, big.number(table), big.bits)
        _, result = hkv.find(tables[big.name], keys)
        assert np.asarray(result.found).all()
        return np.asarray(result.values)

    np.testing.assert_array_equal(spread["user"], rows_of("users", inputs["user"]))
    np.testing.assert_array_equal(spread["item"], rows_of("items", inputs["item"]))
    seen = inputs["seen"]
    weights = np.where(seen.valid, seen.weights, 0)
    rows = np.zeros((BATCH, 4, DIM))
    rows[seen.valid] = rows_of("items", seen.ids[seen.valid])
    total = weights.sum(axis=1)
    mean = (rows * weights[..., None]).sum(axis=1) / np.where(total, total, 1)[:, None]
    np.testing.assert_allclose(spread["seen"], mean, rtol=1e-5, atol=1e-7)
    assert spread["title"].shape == (BATCH, 2 * DIM)


@pytest.mark.parametrize("kinds", [1, 9, 200])
@pytest.mark.parametrize("positions", [0, 1, 1000])
def test_numbers_are_tallied_alike_natively_by_scatters_and_by_comparison(rng, positions, kinds):
    """Of a table's slots a GPU compares, a CPU scatters."""
    numbers = rng.integers(-3, kinds + 3, positions, dtype=np.int32)
    expected = np.bincount(numbers[(numbers >= 0) & (numbers < kinds)], minlength=kinds)
    by_xla = (whole_table._scattered, whole_table._compared, whole_table._tally_in_xla)
    for tally in (*by_xla, _index.tally):
        counted = tally(jnp.asarray(numbers), kinds=kinds)
        assert counted.dtype == jnp.int32
        np.testing.assert_array_equal(counted, expected)


def test_evaluation_inserts_nothing(rng):
    """Unseen ids get the rows that they would start with, or zeros."""
    collection = hkv.Collection(TABLES, FEATURES)
    inputs = inputs_of(rng)
    tables, found = collection.lookup(collection.create(), inputs)
    assert all(int(hkv.size(table)) == 0 for table in tables.values())
    assert list(found.results.values()) == [None, None]
    _, trained = collection.lookup(tables, inputs, train=True)
    for name, rows in found.rows.items():
        np.testing.assert_array_equal(rows, trained.rows[name])
    _, empty = collection.lookup(tables, inputs, fill=0.0)
    assert not any(np.asarray(rows).any() for rows in empty.rows.values())


@pytest.mark.parametrize("bits", [1, 5, 8])
def test_a_namespace_keeps_small_ids_exact_and_large_ones_apart(rng, bits):
    """Ids below 2**(64 - bits) come back; hashes differ from each other and from other tables."""
    small = rng.integers(0, 2 ** (64 - bits), 1000, dtype=np.uint64)
    number = 2**bits - 1
    keys = in_namespace(hkv.Keys.from_numpy(small), number, bits).to_numpy()
    np.testing.assert_array_equal(keys, small | np.uint64(number << (64 - bits)))
    hashes = np.unique(rng.integers(0, 2**64, 10**5, dtype=np.uint64))
    folded = [in_namespace(hkv.Keys.from_numpy(hashes), n, bits).to_numpy() for n in (0, 1)]
    assert len(np.unique(np.concatenate(folded))) == 2 * len(hashes)
    negative = np.arange(-1000, 0, dtype=np.int64)
    assert len(np.unique(
        in_namespace(hkv.Keys.from_numpy(negative), 1, bits).to_numpy()
    )) == 1000  # fmt: skip


def test_sizes_count_the_entries_of_each_table(rng):
    """By the names that were declared, whatever table they are in."""
    collection = hkv.Collection(TABLES, FEATURES)
    inputs = inputs_of(rng) | {"user": np.array([7, 7, 7, 8, -1, -1], np.int32)}
    tables, _ = collection.lookup(collection.create(), inputs, train=True)
    seen = inputs["seen"]
    items = set(inputs["item"].reshape(-1)) | set(seen.ids[seen.valid])
    sizes = {name: int(size) for name, size in collection.sizes(tables).items()}
    assert sizes["users"] == 3 and sizes["items"] == len(items)
    assert sum(sizes.values()) == sum(int(hkv.size(table)) for table in tables.values())


def test_a_collection_with_room_for_tables_gets_one_and_keeps_what_it_has(rng):
    """Rows of hashed ids, which are folded; the bits of the table's number stay what they were."""
    ids = hkv.Keys.from_numpy(rng.integers(0, 2**64, 100, np.uint64))
    names = ["users", "items", "shops"]

    def declared(count):
        return hkv.Collection(
            [hkv.TableConfig(name, 1024, DIM) for name in names[:count]],
            [hkv.Feature(name, name) for name in names[:count]],
            table_bits=6,
        )

    for before in (1, 2):
        old, new = declared(before), declared(3)
        (was,), (group,) = old.groups, new.groups
        assert (was.bits, group.bits) == (6, 6)
        tables = old.create()
        rows = {name: rng.standard_normal((100, DIM), np.float32) for name in names[:before]}
        for name, own in rows.items():
            tables[was.name], _ = hkv.insert_or_assign(tables[was.name], was.keys(name, ids), own)
        exported = sharding.export_entries(tables[was.name])
        moved, counts = sharding.import_entries(None, new.create()[group.name], exported)
        assert int(counts.inserted) == 100 * before
        _, found = new.lookup({group.name: moved}, dict.fromkeys(names, ids), fill=0.0)
        spread = new.spread(found.rows, found.parts)
        for name in names:
            np.testing.assert_array_equal(spread[name], rows.get(name, np.zeros((100, DIM))))
        sizes = {name: int(size) for name, size in new.sizes({group.name: moved}).items()}
        assert sizes == {name: 100 * (name in rows) for name in names}


def test_the_default_initializer_is_the_one_that_it_stands_for():
    own = [None, hkv.initializers.variance_scaling(1.0, "normal")]
    tables = [hkv.TableConfig(f"{each}", 128, DIM, init=each) for each in own]
    features = [hkv.Feature(table.name, table.name) for table in tables]
    assert len(hkv.Collection(tables, features).groups) == 1


def test_bits_that_do_not_hold_the_tables_are_refused():
    for bits, error in {0: ValueError, 17: ValueError, "8": TypeError}.items():
        with pytest.raises(error, match="Collection: table_bits must be"):
            hkv.Collection(TABLES, FEATURES, table_bits=bits)
    with pytest.raises(ValueError, match="table_bits must be None where fuse=False"):
        hkv.Collection(TABLES, FEATURES, fuse=False, table_bits=4)


@pytest.mark.parametrize("unseen", ["initial", "learned"])
@pytest.mark.parametrize("fuse", [True, False])
def test_some_features_get_the_rows_that_they_get_among_all(rng, fuse, unseen):
    """Of a fused table, of one of its own; the layers of linen and of nnx too."""
    collection = hkv.Collection(TABLES, FEATURES, fuse=fuse)
    inputs = inputs_of(rng)
    tables, found = collection.lookup(collection.create(), inputs, train=True)
    every = collection.spread(found.rows, found.parts)
    layer = hkv.linen.EmbedCollection(collection, unseen=unseen)
    variables = layer.init(jax.random.key(0), inputs)
    twin = hkv.nnx.EmbedCollection(collection, unseen=unseen)
    by_layer, by_twin = layer.apply(variables, inputs), twin(inputs)
    for names in (["title"], ["item", "user"], ["seen"]):
        some = {name: inputs[name] for name in names}
        after, found = collection.lookup(tables, some, partial=True)
        rows = collection.spread(found.rows, found.parts)
        assert set(rows) == set(names) and set(after) == set(tables)
        assert list(rows) == [feature.name for feature in FEATURES if feature.name in names]
        alone = layer.apply(variables, some, partial=True), twin(some, partial=True)
        for name in names:
            np.testing.assert_array_equal(rows[name], every[name])
            np.testing.assert_array_equal(alone[0][name], by_layer[name])
            np.testing.assert_array_equal(alone[1][name], by_twin[name])
    untouched = [group.name for group in collection.groups if group.features[0].name == "title"]
    _, found = collection.lookup(tables, {"user": inputs["user"]}, train=True, partial=True)
    assert all(found.results[name] is None for name in untouched)


@pytest.mark.parametrize("inputs", [{}, {"user": 1, "city": 2}])
def test_no_features_and_unknown_ones_are_refused_in_part_too(inputs):
    collection = hkv.Collection(TABLES, FEATURES)
    with pytest.raises(ValueError, match="inputs must be of some of the features"):
        collection.lookup(collection.create(), inputs, partial=True)


@pytest.mark.parametrize("fuse", [True, False])
def test_a_fused_table_starts_warm_and_is_exported_by_its_own_ids(rng, fuse):
    """Two tables with the same ids, other rows; negative ids are folded and still found."""
    collection = hkv.Collection(TABLES, FEATURES, fuse=fuse)
    tables = collection.create()
    ids = np.concatenate([np.arange(40), [2**62 - 1, -7, -(2**60)]])
    rows = {name: jnp.asarray(rng.normal(size=(43, DIM)), jnp.float32) for name in TWO}
    for name in TWO:
        group = collection.group_of(name)
        keys = group.keys(name, hkv.Keys.from_numpy(ids))
        tables[group.name], _ = hkv.insert_or_assign(tables[group.name], keys, rows[name])
    assert {name: int(collection.sizes(tables)[name]) for name in TWO} == {"users": 43, "items": 43}
    inputs = inputs_of(rng) | {
        "user": hkv.Keys.from_numpy(ids),
        "item": hkv.Keys.from_numpy(ids[:, None]),
    }
    _, found = collection.lookup(tables, inputs)
    spread = collection.spread(found.rows, found.parts)
    np.testing.assert_array_equal(spread["user"], rows["users"])
    np.testing.assert_array_equal(spread["item"][:, 0], rows["items"])

    for name in TWO:
        group = collection.group_of(name)
        batch = hkv.export_batch(tables[group.name], 0, 2048)
        own_ids, is_own = group.ids(name, batch.keys)
        kept = np.flatnonzero(np.asarray(is_own)[: int(batch.count)])
        own_ids = own_ids.to_numpy(signed=True)[kept]
        exact = 41 if fuse else 43
        assert len(own_ids) == 43 and set(ids[:exact]) <= set(own_ids)
        by_id = dict(zip(own_ids, np.asarray(batch.values)[kept], strict=True))
        for number in range(exact):
            np.testing.assert_array_equal(by_id[ids[number]], rows[name][number])
        again = group.keys(name, hkv.Keys.from_numpy(own_ids)).to_numpy()
        np.testing.assert_array_equal(again, batch.keys.to_numpy()[kept])


def test_a_table_that_a_collection_does_not_have_is_named():
    collection = hkv.Collection(TABLES, FEATURES)
    with pytest.raises(ValueError, match=r"group_of: table must be one of .*'users'.*got 'user'"):
        collection.group_of("user")
    with pytest.raises(ValueError, match=r"Group 'users\+items': table must be .* got 'words'"):
        collection.group_of("users").keys("words", np.array([1], np.int32))


def declared(tables=None, features=None):
    return lambda: hkv.Collection(tables or TABLES, features or FEATURES)


def looked_up(**changes):
    """A lookup in which some inputs are replaced; None leaves one out."""

    def call():
        inputs = inputs_of(np.random.default_rng(0)) | changes
        kept = {name: given for name, given in inputs.items() if given is not None}
        collection = hkv.Collection(TABLES, FEATURES)
        jax.eval_shape(lambda: collection.lookup(collection.create(), kept, train=True))

    return call


WRONG = {
    "tables that disagree": (
        declared([*TABLES, hkv.TableConfig("items", 1024, 16, optimizer=ADAM)]),
        ValueError,
        "table 'items' is declared twice, disagreeing in ['dim']",
    ),
    "a feature declared twice": (
        declared(features=[*FEATURES, FEATURES[0]]),
        ValueError,
        "feature 'user' is declared twice",
    ),
    "a table that is not there": (
        declared(features=[*FEATURES, hkv.Feature("city", "cities")]),
        ValueError,
        "feature 'city' names the table 'cities', but tables are ['users', 'items', 'words']",
    ),
    "a table without features": (
        declared([*TABLES, hkv.TableConfig("cities", 128, DIM)]),
        ValueError,
        "no feature is looked up in ['cities']",
    ),
    "a combiner that is none": (
        lambda: hkv.Feature("last", "items", "max"),
        ValueError,
        "Feature 'last': combiner must be one of 'sum', 'mean', 'sqrtn' or None, got 'max'",
    ),
    "an optimizer that mixes rows": (
        lambda: declared([
            hkv.TableConfig(
                "users", 128, DIM, optimizer=hkv.optim.sparse(optax.clip_by_global_norm(1.0))
            )
        ], FEATURES[:1])().create(),
        ValueError,
        "clip_by_global_norm",
    ),
    "an unknown feature": (
        looked_up(city=np.zeros(BATCH, np.int32)),
        ValueError,
        "missing: [], unknown: ['city']",
    ),
    "a missing feature": (
        looked_up(seen=None),
        ValueError,
        "missing: ['seen'], unknown: []; of some with partial=True",
    ),
    "ids of a float dtype": (
        looked_up(user=np.zeros(BATCH, np.float32)),
        TypeError,
        "feature 'user': ids must hold integers of 8 to 64 bits, got float32",
    ),
    "mismatched weights": (
        looked_up(
            seen=hkv.Padded(
                np.zeros((BATCH, 4), np.int32), weights=np.ones((BATCH, 3), np.float32)
            )
        ),
        TypeError,
        "feature 'seen': weights must be float32[6, 4], one for each id, got float32[6, 3]",
    ),
    "row splits that do not fit": (
        looked_up(title=hkv.Jagged(hkv.Keys.from_numpy(np.arange(9)), np.ones(4, np.float32))),
        TypeError,
        "feature 'title': ids.row_splits must be int32 or int64 [batch + 1], got float32[4]",
    ),
    "jagged ids without a combiner, in padded ones": (
        looked_up(item=hkv.Padded(jagged(np.random.default_rng(0)), weights=np.ones(40))),
        ValueError,
        "feature 'item': weights cannot be given beside a Jagged",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name):
    """31: which feature or table, what was expected, what came."""
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=re.escape(message)):
        call()


@pytest.mark.parametrize("bits", [1, 5, 16])
def test_folded_ids_have_the_keys_that_files_have(bits):
    """Two factors times the highest bits: others would leave what was trained behind."""
    ids = [2**63 + 5, 2**64 - 1, 0x0123456789ABCDEF]
    expected = []
    for number in ids:
        low, high = number % 2**32, number >> 32
        above = high >> (32 - bits)
        low ^= above * 0x9E3779B9 % 2**32
        high = (high ^ above * 0x85EBCA6B % 2**32) % 2 ** (32 - bits) | 1 << (32 - bits)
        expected.append(high << 32 | low)
    keys = in_namespace(hkv.Keys.from_numpy(np.array(ids, np.uint64)), 1, bits)
    assert keys.to_numpy().tolist() == expected
