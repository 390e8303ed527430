"""Bags of ids are made on the host, and dealt out to devices and micro-batches."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from many_devices import assert_same_bits

import jax_hkv as hkv

DIM = 4


@pytest.mark.parametrize("form", ["Keys", "int64", "uint64", "list"])
def test_jagged_from_lengths_is_jagged_from_lists(form):
    """The same bags, their ids one after the other, with the lengths beside them."""
    lists = [[-1, 2**40], [], [3], [4, 5, 6]]
    weights = [[1.0, 2.0], [], [0.5], [4.0, 5.0, 6.0]]
    flat = [each for bag in lists for each in bag]
    values = {
        "Keys": hkv.Keys.from_numpy(np.array(flat)),
        "int64": np.array(flat),
        "uint64": np.array(flat).view(np.uint64),
        "list": flat,
    }[form]
    expected = hkv.Jagged.from_lists(lists, capacity=9, weights=weights)
    got = hkv.Jagged.from_lengths(
        values, np.array([2, 0, 1, 3], np.int32), capacity=9, weights=sum(weights, [])
    )
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, expected)
    assert [leaf.dtype for leaf in jax.tree.leaves(got)] == [np.uint32, np.int32, np.float32]


PLAIN = [[-1, 2**40], [], [3], list(range(20))]
LISTS = {
    "lists": PLAIN,
    "tuples": [*map(tuple, PLAIN)],
    "lists and tuples": [PLAIN[0], *map(tuple, PLAIN[1:])],
    "NumPy's numbers": [[np.int64(id_) for id_ in bag] for bag in PLAIN],
    "arrays": [np.array(bag, np.int64) for bag in PLAIN],
    "arrays of two types": [np.array(PLAIN[0]), np.zeros(0), *map(np.array, PLAIN[2:])],
    "both ends of 64 bits": [[-1, 2**40], [], [3], [*range(19), 2**64 - 1, -(2**63)]],
    "the upper half": [[2**64 - 1, 2**63], [], [3], [5] * 19],
    "arrays of the upper half": [np.array([2**64 - 1], np.uint64), np.zeros(0, np.uint64)],
    "no ids": [[], [], []],
    "no bags": [],
}


@pytest.mark.parametrize("name", LISTS)
def test_ids_of_lists_keep_their_64_bits(name):
    """Whether they are taken all at once or bag by bag."""
    lists = LISTS[name]
    bags = hkv.Jagged.from_lists(iter(lists))
    expected = np.array([int(id_) % 2**64 for bag in lists for id_ in bag], np.uint64)
    np.testing.assert_array_equal(bags.ids.to_numpy().astype(np.uint64), expected)
    assert bags.row_splits.tolist() == np.cumsum([0, *map(len, lists)]).tolist()
    assert bags.row_splits.dtype == np.int32


def test_jagged_from_lengths_of_nothing_has_empty_bags():
    """Batches without any id."""
    bags = hkv.Jagged.from_lengths([], [0, 0], capacity=2, weights=[])
    assert bags.row_splits.tolist() == [0, 0, 0] and bags.ids.shape == (2,)
    assert hkv.Jagged.from_lengths(np.zeros(0, np.int64), []).row_splits.tolist() == [0]
    assert not hkv.find_pooled(hkv.create(128, DIM), bags)[1].values.any()


def test_lists_of_weights_may_come_one_after_the_other():
    """An iterator has them once: they were read for their lengths, and lost."""
    lists, weights = [[5, 6], [], [7]], [[1.0, 2.0], [], [3.0]]
    expected = hkv.Jagged.from_lists(lists, capacity=4, weights=weights)
    got = hkv.Jagged.from_lists(iter(lists), capacity=4, weights=iter(weights))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize(
    ("bag", "message"),
    [
        ("user", "bag 0 must be a list .* got str 'user'"),
        (None, "bag 0 must be a list .* got None: a missing bag is one without ids"),
        (float("nan"), "bag 0 must be a list .* got nan: a missing bag is one without ids"),
        (b"user", "bag 0 must be a list .* got bytes b'user'"),
        (bytearray(b"u"), "bag 0 must be a list .* got bytearray"),
        (memoryview(b"u"), "bag 0 must be a list .* got memoryview"),
        ([True, False], "bag 0 must hold integers, got bool True: hash or cast"),
        (["a"], "bag 0 must hold integers, got str 'a': .* not Python's hash"),
        (np.array(["a"]), "bag 0 must hold integers .* got <U1.*: .* not Python's hash"),
        (np.array(["a"], object), "bag 0 must hold integers.* object: .* not Python's hash"),
        ([7, None], "bag 0 must hold integers, got NoneType None: .* missing values .* valid="),
        (np.array([7, None]), "bag 0 must hold integers.* object: .* missing values"),
        ([7, 1.5], "bag 0 must hold integers, got float 1.5: .* become floats"),
        ([np.True_], "bag 0 must hold integers, got bool.* .*True"),
    ],
)
def test_what_python_takes_for_integers_makes_no_bag(bag, message):
    with pytest.raises(TypeError, match=f"Jagged.from_lists: {message}"):
        hkv.Jagged.from_lists([bag])


@pytest.mark.parametrize("form", ["Keys", "int32", "jax"])
@pytest.mark.parametrize("batch", [None, 12, 15])
def test_jagged_is_dealt_out_to_parts_in_order(form, batch, rng):
    """As if each part's bags had been made apart; empty bags make up what is missing."""
    parts, count = 3, 12 if batch is None else 11
    lists = [rng.integers(0, 1000, rng.integers(0, 4)).tolist() for _ in range(count)]
    weights = [rng.random(len(bag)).astype(np.float32) for bag in lists]
    whole = hkv.Jagged.from_lists(lists, capacity=50, weights=weights)
    if form != "Keys":
        whole = dataclasses.replace(whole, ids=whole.ids.to_numpy().astype(np.int32))
    if form == "jax":
        whole = jax.tree.map(jnp.asarray, whole)
    got = whole.for_parts(parts, capacity=20, batch=batch)
    each = (batch or count) // parts
    lists, weights = (given + [[]] * (each * parts - count) for given in (lists, weights))
    expected = hkv.sharding.concatenate(
        [
            hkv.Jagged.from_lists(
                lists[first : first + each], capacity=20, weights=weights[first : first + each]
            )
            for first in range(0, each * parts, each)
        ]
    )
    if form != "Keys":
        assert got.ids.dtype == np.int32
        got = dataclasses.replace(got, ids=hkv.Keys.from_numpy(got.ids))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert [leaf.dtype for leaf in jax.tree.leaves(got)] == [np.uint32, np.int32, np.float32]
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(got))
    fullest = max(
        sum(map(len, lists[first : first + each])) for first in range(0, each * parts, each)
    )
    assert whole.for_parts(parts, batch=batch).ids.shape == (parts * fullest,)


def test_no_bags_are_dealt_out_as_empty_ones():
    none = hkv.Jagged.from_lists([])
    assert none.for_parts(2).row_splits.tolist() == [0, 0]
    filled = none.for_parts(2, capacity=3, batch=4)
    assert filled.row_splits.tolist() == [0] * 6 and filled.ids.shape == (6,)


IDS = np.zeros(4, np.int32)


def jagged(splits=(0, 4), ids=IDS, weights=None):
    return hkv.Jagged(ids, np.array(splits, np.int32), weights)


WRONG = {
    "bags that no parts take": (
        lambda: jagged((0, 1, 2, 4)).for_parts(2),
        ValueError,
        r"for_parts: batch must be a multiple of the 2 parts, with room for 3 bags, got 3: "
        r"with batch=4",
    ),
    "a batch smaller than its bags": (
        lambda: jagged((0, 1, 2, 4)).for_parts(2, batch=2),
        ValueError,
        r"for_parts: batch must be .*room for 3 bags, got 2",
    ),
    "no parts": (
        lambda: jagged().for_parts(0),
        ValueError,
        r"for_parts: parts must be",
    ),
    "parts with less room than ids": (
        lambda: jagged((0, 1, 4)).for_parts(2, capacity=2),
        ValueError,
        r"for_parts: capacity must be at least the number of ids of each part, 3 .*got 2",
    ),
    "splits of several Jagged dealt out": (
        lambda: jagged((0, 2, 0, 2)).for_parts(2),
        ValueError,
        r"for_parts: row_splits must start at 0, not decrease",
    ),
    "weights of fewer ids dealt out": (
        lambda: jagged(weights=np.ones(3, np.float32)).for_parts(1),
        ValueError,
        r"for_parts: weights must be one for each of the 4 positions, got 3",
    ),
    "float ids dealt out": (
        lambda: jagged(ids=np.ones(4, np.float32)).for_parts(1),
        TypeError,
        r"for_parts: ids must be integers along one axis, got float32",
    ),
    "keys of two axes dealt out": (
        lambda: hkv.Jagged(
            hkv.Keys.from_numpy(np.zeros((4, 2), np.int64)), np.array([0, 4], np.int32)
        ).for_parts(1),
        ValueError,
        r"for_parts: ids must be flat, .*got Keys of shape \[4, 2\]",
    ),
    "no bags for parts": (
        lambda: jagged((0,)).for_parts(2, batch=3),
        ValueError,
        r"for_parts: batch must be a multiple .* got 3: with batch=2",
    ),
    "traced bags dealt out": (
        lambda: jax.jit(lambda bags: bags.for_parts(1))(jagged()),
        TypeError,
        r"for_parts: the bags must be on the host, got .* traced",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_dealt_out_is_named(name):
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("module", ["linen", "nnx"])
@pytest.mark.parametrize("unseen", ["initial", "learned"])
def test_each_id_of_bags_has_a_row_of_embed(module, unseen, rng):
    """As flat ids with a mask have; in training, and in evaluation with ids that are unseen."""
    bags = hkv.Jagged.from_lists([rng.integers(0, 50, n) for n in (3, 0, 5, 1)], capacity=12)
    valid = np.arange(12) < 9
    other = dataclasses.replace(bags, ids=hkv.Keys.from_numpy(rng.integers(0, 90, 12)))
    options = {"optimizer": hkv.optim.adam(0.1), "unseen": unseen}
    found = []
    for given, mask in ((lambda bags: bags, None), (lambda bags: bags.ids, valid)):

        def loss_of(call, bags, given=given, mask=mask):
            rows = call(given(bags), train=True, valid=mask)
            return jnp.sum((rows - 1) ** 2), rows

        if module == "linen":
            layer = hkv.linen.Embed(256, DIM, **options)
            state = hkv.linen.TrainState.create(
                layer, jax.random.key(0), given(bags), tx=optax.sgd(0.1)
            )
            step = hkv.linen.train_step(loss_of, has_aux=True)
            for _ in range(2):
                state, info = step(state, bags)
            rows = state.apply(given(other), valid=mask)
        else:
            state = hkv.nnx.TrainState(hkv.nnx.Embed(256, DIM, **options), optax.sgd(0.1))
            step = hkv.nnx.train_step(loss_of, has_aux=True)
            for _ in range(2):
                info = step(state, bags)
            rows = state.model(given(other), valid=mask)
        assert info.aux.shape == (12, DIM) and not np.asarray(info.aux)[9:].any()
        assert not np.asarray(rows)[9:].any()
        found.append((info.loss, info.aux, rows))
    assert_same_bits(*found)


def test_bags_that_embed_does_not_take_are_named():
    layer = hkv.nnx.Embed(256, DIM)
    bags = hkv.Jagged.from_lists([[1], [2]], weights=[[1.0], [2.0]])
    with pytest.raises(
        ValueError, match=r"Embed: ids must be a Jagged without weights .* got .*\[2\]"
    ):
        layer(bags)
    with pytest.raises(TypeError, match=r"Embed: valid must be bool\[2\] like the keys, got .*3"):
        layer(dataclasses.replace(bags, weights=None), valid=np.ones(3, bool))
    with pytest.raises(ValueError, match=r"Embed: ids must be a Jagged without weights"):
        layer(hkv.Padded(bags))
    padded = hkv.Padded(bags.ids, None, bags.weights)
    with pytest.raises(ValueError, match=r"Embed: ids must be a Padded without weights"):
        layer(padded)
    with pytest.raises(ValueError, match=r"find_pooled: weights cannot be given beside a Padded"):
        hkv.find_pooled(hkv.create(128, DIM), padded, weights=bags.weights)
    with pytest.raises(
        TypeError, match=r"find: keys .* Give .*: padded\.ids, and valid=padded\.valid"
    ):
        hkv.find(hkv.create(128, DIM), padded)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize("name", ["Embed", "EmbedBag"])
def test_layers_take_masks_and_weights_inside_of_padded(api, name, rng):
    """As :class:`hkv.EmbedCollection` does; as if they were given apart."""
    ids = rng.integers(0, 9, (4, 3)).astype(np.int32)
    apart = {"valid": (rng.random((4, 3)) < 0.6) | (ids == ids[0, 0])}
    if name == "EmbedBag":
        apart["weights"] = rng.random((4, 3)).astype(np.float32)
    padded = hkv.Padded(ids, **apart)
    layer = getattr(getattr(hkv, api), name)(256, DIM)
    if api == "linen":
        variables = layer.init(jax.random.key(0), padded)
        layer = functools.partial(layer.apply, variables)
    assert np.asarray(layer(ids, **apart)).any()
    assert_same_bits(layer(padded), layer(ids, **apart))


@pytest.mark.parametrize("call", ["find_pooled", "Embed", "EmbedBag", "sum", "each"])
@pytest.mark.parametrize("is_jagged", [False, True])
@pytest.mark.parametrize("outer", [{}, {"valid": np.ones(4, bool)}], ids=["plain", "masked"])
def test_a_padded_in_a_padded_is_refused(call, is_jagged, outer):
    """Not taken apart twice, which had summed the bags of features that have a row for each id."""
    ids = np.array([1, 2, 3, 4], np.int32)
    inner = hkv.Padded(hkv.Jagged(ids, np.array([0, 3, 4], np.int32)) if is_jagged else ids)
    collection = hkv.Collection(
        [hkv.TableConfig("t", 128, DIM)],
        [hkv.Feature("sum", "t"), hkv.Feature("each", "t", combiner=None)],
    )
    calls = {
        "find_pooled": lambda given: hkv.find_pooled(hkv.create(128, DIM), given),
        "Embed": hkv.nnx.Embed(128, DIM),
        "EmbedBag": hkv.nnx.EmbedBag(128, DIM),
    }
    of_feature = functools.partial(collection.lookup, collection.create(), partial=True)
    looked_up = calls.get(call, lambda given: of_feature({call: given}))
    looked_up(inner)
    with pytest.raises(TypeError, match=r"must be jax_hkv\.Keys or an integer array, got Padded"):
        looked_up(hkv.Padded(inner, **outer))


@pytest.mark.parametrize("form", [hkv.Keys.from_numpy, np.asarray, jnp.asarray])
def test_single_ids_of_padded_are_a_bag_each(form):
    """As collections have it."""
    ids, table = np.array([5, 6, 7], np.int32), hkv.create(128, DIM)
    valid, weights = np.array([True, False, True]), np.array([1, 2, 3], np.float32)
    _, got = hkv.find_pooled(table, hkv.Padded(form(ids), valid, weights))
    _, expected = hkv.find_pooled(
        table, ids[:, None], valid=valid[:, None], weights=weights[:, None]
    )
    assert got.values.shape == (3, DIM)
    assert_same_bits(got.values, expected.values)


def gradients_of_step(tables, collection, given, optimizer):
    """The rows of a step without Flax, and the tables after it."""
    tables, found = collection.lookup(tables, given, train=True)
    for name, result in found.results.items():
        gradients = jnp.cos(found.rows[name])
        tables[name] = optimizer.update(tables[name], result, gradients)
    return collection.spread(found.rows, found.parts), tables


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", None])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_positions_before_traced_splits_are_padding_too(combiner, is_weighted, rng):
    """Nobody checks the values of splits inside of jit; forward and update agree all the same."""
    optimizer = hkv.optim.sgd(0.5)
    tables = [hkv.TableConfig("table", 128, 2, optimizer=optimizer)]
    features = [hkv.Feature("bags", "table", combiner), hkv.Feature("others", "table", "sum")]
    collection = hkv.Collection(tables, features)
    step = jax.jit(functools.partial(gradients_of_step, collection=collection, optimizer=optimizer))
    ids = rng.integers(0, 9, 8).astype(np.int32)
    weights = rng.uniform(1, 2, 8).astype(np.float32) if is_weighted and combiner else None
    others = hkv.Jagged.from_lists([[1], [2, 20], []], capacity=4)
    got, expected = [], []
    for found, splits in ((got, [2, 3, 3, 6]), (expected, [0, 1, 1, 4])):
        order = np.roll(np.arange(8), 0 if splits[0] else -2)
        own = None if weights is None else weights[order]
        bags = hkv.Jagged(ids[order], np.array(splits, np.int32), own)
        rows, tables = step(collection.create(), given={"bags": bags, "others": others})
        each = rows["bags"] if combiner else rows["bags"][splits[0] : splits[-1]]
        found += [each, rows["others"], tables]
        if combiner is None:
            assert not np.asarray(rows["bags"])[splits[-1] :].any()
            assert not np.asarray(rows["bags"])[: splits[0]].any()
    assert_same_bits(got, expected)


def test_pool_leaves_out_what_is_before_traced_splits():
    """In both directions."""
    rows, splits = np.ones((5, 2), np.float32), np.array([1, 2, 4], np.int32)
    sums, gradients = jax.jit(
        lambda rows, splits: jax.value_and_grad(
            lambda rows: hkv.pool(rows, row_splits=splits).sum()
        )(rows)
    )(rows, splits)
    assert float(sums) == 6
    assert np.asarray(gradients)[:, 0].tolist() == [0, 1, 1, 1, 0]


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", None])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_masked_positions_of_bags_are_not_in_them(combiner, is_weighted, rng):
    """As if they had been left out of the lists: forward, in the table and in the update."""
    optimizer = hkv.optim.sgd(0.5)
    tables = [hkv.TableConfig("table", 128, 2, optimizer=optimizer)]
    collection = hkv.Collection(tables, [hkv.Feature("bags", "table", combiner)])
    step = jax.jit(functools.partial(gradients_of_step, collection=collection, optimizer=optimizer))
    lists = [rng.integers(0, 40, size).tolist() for size in (5, 0, 9, 1, 4)]
    weights = [rng.uniform(1, 2, len(bag)).tolist() for bag in lists]
    lists[0][:2] = [3, 30]  # whatever is drawn, some are left out, and some are not
    kept = [[number > 8 for number in bag] for bag in lists]
    left = [
        [[number for number, keep in zip(*pair, strict=True) if keep] for pair in pairs]
        for pairs in (zip(lists, kept, strict=True), zip(weights, kept, strict=True))
    ]
    has_weights = is_weighted and combiner is not None
    whole, fewer = (
        hkv.Jagged.from_lists(own, capacity=24, weights=factors if has_weights else None)
        for own, factors in ((lists, weights), left)
    )
    valid = np.ones(24, bool)
    valid[: len(np.concatenate(kept))] = np.concatenate(kept)
    assert not valid.all()
    rows, got = step(collection.create(), given={"bags": hkv.Padded(whole, valid)})
    expected_rows, expected = step(collection.create(), given={"bags": fewer})
    rows, expected_rows = rows["bags"], expected_rows["bags"]
    if combiner is None:
        assert not np.asarray(rows)[~valid].any()
        is_id = valid & (np.arange(24) < whole.row_splits[-1])
        rows, expected_rows = rows[is_id], expected_rows[: fewer.row_splits[-1]]
    assert_same_bits((rows, got), (expected_rows, expected))
    if combiner is not None:
        table = got["table"]
        apart = hkv.find_pooled(table, whole, combiner=combiner, valid=valid)[1].values
        assert_same_bits(apart, hkv.find_pooled(table, fewer, combiner=combiner)[1].values)


IN_JIT = {
    "from_lengths: values": lambda ids: hkv.Jagged.from_lengths(ids, [2, 1]),
    "from_lengths: lengths": lambda ids: hkv.Jagged.from_lengths([1] * 6, ids),
    "from_lengths: weights": lambda ids: hkv.Jagged.from_lengths([1] * 3, [2, 1], weights=ids),
    "from_lengths: values of a list": lambda ids: hkv.Jagged.from_lengths([*ids], [2, 1]),
    "from_lengths: values as Keys": lambda ids: hkv.Jagged.from_lengths(
        hkv.Keys(jnp.zeros((3, 2), jnp.uint32) + ids.astype(jnp.uint32)[:, None]), [2, 1]
    ),
    "from_lists: bag 0": lambda ids: hkv.Jagged.from_lists([ids]),
    "for_parts: the bags": lambda ids: hkv.Jagged(ids, np.array([0, 3])).for_parts(1),
}


@pytest.mark.parametrize("name", IN_JIT)
def test_bags_are_made_on_the_host(name):
    """Inside of jit the error has what makes some of traced lengths."""
    argument = name.split(" of ")[0].split(" as ")[0]
    lengths = np.array([1, 2, 3], np.int32)
    message = rf"Jagged\.{argument} must be on the host, got .* traced .*Jagged\(ids, row_splits\)"
    with pytest.raises(TypeError, match=message):
        jax.jit(lambda ids: IN_JIT[name](ids).ids)(lengths)

    def as_it_says(lengths):
        return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])

    assert jax.jit(as_it_says)(lengths).tolist() == [0, 1, 3, 6]


def test_what_a_masked_array_masks_is_masked_by_the_lookup():
    """As the error says."""
    ids = np.ma.masked_array(np.array([5, 6, 7]), [False, True, False])
    with pytest.raises(TypeError, match=r"values must not be a masked array.*filled\(0\).*valid="):
        hkv.Jagged.from_lengths(ids, [2, 1])
    lengths = np.ma.masked_array(np.array([2, 1]), [False, True])
    with pytest.raises(TypeError, match=r"lengths must not be a masked.*lengths\.filled\(0\)"):
        hkv.Jagged.from_lengths(ids.filled(0), lengths)
    bags = hkv.Jagged.from_lengths(ids.filled(0), [2, 1])
    table, result = hkv.find_or_insert_pooled(
        hkv.create(128, DIM), bags, valid=~np.ma.getmaskarray(ids)
    )
    assert int(result.counts.inserted) == int(hkv.size(table)) == 2


def test_masks_of_bags_are_cut_into_micro_batches():
    """As the bags are: the step is that of the bags without what is masked."""
    lists, fewer = [[[1, 2], [3], [4, 5, 6], []], [[2], [3], [4, 6], []]]
    valid = np.array([0, 1, 1, 0, 0, 1, 0, 1, 1, 1], bool)
    labels, found = np.ones(4, np.float32), []
    layer = hkv.linen.EmbedBag(512, DIM, combiner="mean", optimizer=hkv.optim.sgd(0.1))
    step = hkv.linen.train_step(
        lambda apply, bags, labels: ((apply(bags, train=True).sum(-1) - labels) ** 2).mean(),
        micro_batches=2,
    )
    for bags, mask in ((lists, valid), (fewer, None)):
        bags = hkv.Jagged.from_lists(bags).for_parts(2, capacity=5)
        state = hkv.linen.TrainState.create(
            layer, jax.random.key(0), hkv.Jagged.from_lists(fewer), tx=optax.sgd(0.1)
        )
        found.append(step(state, bags if mask is None else hkv.Padded(bags, mask), labels))
    assert_same_bits(*found)
    with pytest.raises(TypeError, match=r"\[0\]\.valid must be bool\[10\] like .* got shape \[9\]"):
        step(state, hkv.Padded(bags, valid[:9]), labels)


@pytest.mark.parametrize("keep", [None, "first", "last"])
@pytest.mark.parametrize("hotness", [None, 0, 1, 3, 7])
def test_padded_lists_are_the_lists_with_a_mask(rng, keep, hotness):
    lists = [list(map(int, rng.integers(-(2**63), 2**63, count))) for count in (2, 0, 5, 1, 3)]
    weights = [rng.random(len(bag)).astype(np.float32).tolist() for bag in lists]
    if keep is None and hotness is not None and hotness < 5:
        with pytest.raises(
            ValueError, match="Padded.from_lists: hotness must be at least 5.*bag 2"
        ):
            hkv.Padded.from_lists(lists, hotness=hotness)
        return
    bags = hkv.Padded.from_lists(lists, hotness=hotness, keep=keep, weights=weights)
    most = 5 if hotness is None else hotness
    for number, (ids, factors) in enumerate(zip(lists, weights, strict=True)):
        cut = slice(0, most) if keep != "last" else slice(max(len(ids) - most, 0), None)
        count = len(ids[cut])
        assert bags.valid[number].tolist() == [True] * count + [False] * (most - count)
        expected = [key % 2**64 for key in ids[cut]] + [0] * (most - count)
        assert bags.ids[number].to_numpy().tolist() == expected
        assert bags.weights[number].tolist() == factors[cut] + [0.0] * (most - count)


def test_padded_lists_pool_as_jagged_ones():
    lists = [[5, 6], [], [2**64 - 1, 5, 5]]
    table = hkv.create(128, DIM, init=hkv.initializers.uniform(-1.0, 1.0))
    table, _ = hkv.find_or_insert(table, hkv.Keys.from_numpy([5, 6, 2**64 - 1]))
    for combiner in ("sum", "mean"):
        rows = [
            hkv.find_pooled(table, kind.from_lists(lists), combiner=combiner)[1].values
            for kind in (hkv.Jagged, hkv.Padded)
        ]
        np.testing.assert_array_equal(*rows)
    assert hkv.Padded.from_lists([]).ids.shape == (0, 0)
    for wrong, message in (
        ({"keep": "middle"}, 'keep must be "first", "last" or None, got .middle'),
        ({"hotness": -1}, "hotness must be"),
        ({"weights": [[1.0]]}, "weights must be one for each id"),
    ):
        with pytest.raises(ValueError, match=f"Padded.from_lists: {message}"):
            hkv.Padded.from_lists(lists, **wrong)
    with pytest.raises(TypeError, match="Padded.from_lists: bag 1 must hold integers"):
        hkv.Padded.from_lists([[1], ["a"]])


@pytest.mark.parametrize("given", [-(2**63) - 1, 2**64])
def test_ids_next_to_those_of_64_bits_are_refused(given):
    with pytest.raises(ValueError, match=f"bag 0 must hold integers of 64 bits, got {given}"):
        hkv.Jagged.from_lists([[given]])


@pytest.mark.parametrize("make", [hkv.Jagged.from_lists, hkv.Padded.from_lists])
def test_weights_of_another_bag_are_refused(make):
    """As many as there are ids of all bags together."""
    with pytest.raises(ValueError, match="the first bag where they are not is 0: give .2. weights"):
        make([[5, 6], [7]], weights=[[0.5], [0.25, 2.0]])


def test_a_length_below_0_is_refused_whatever_the_sum():
    with pytest.raises(ValueError, match="got a sum of 3 and a least length of -1"):
        hkv.Jagged.from_lengths([5, 6, 7], [2, -1, 2])


@pytest.mark.parametrize("weights", [[1.0, 2.0], [1.0] * 4])
def test_weights_are_one_for_each_value(weights):
    with pytest.raises(ValueError, match=f"one for each of the 3 values, got {len(weights)}"):
        hkv.Jagged.from_lengths([5, 6, 7], [2, 1], weights=weights)


@pytest.mark.parametrize("form", ["NumPy", "Keys", "jax", "jit"])
def test_the_mask_of_positions_in_bags_is_that_of_their_ids(form):
    """Positions before the first split and behind the last one are padding."""
    bags = hkv.Jagged.from_lists([[5, 6], [], [7, 5]], capacity=7)
    late = hkv.Jagged(np.arange(7, dtype=np.int64), np.array([2, 3, 5], np.int64))
    table, _ = hkv.find_or_insert(hkv.create(128, 2), np.array([0, 5, 6, 7], np.int32))
    for own, wanted in ((bags, [1, 1, 1, 1, 0, 0, 0]), (late, [0, 0, 1, 1, 1, 0, 0])):
        if form != "Keys":
            ids = own.ids.to_numpy() if isinstance(own.ids, hkv.Keys) else own.ids
            own = hkv.Jagged(ids.astype(np.int32), own.row_splits)
        if form in ("jax", "jit"):
            own = jax.device_put(own)
        mask = jax.jit(lambda own: own.valid)(own) if form == "jit" else own.valid
        assert mask.dtype == bool and mask.tolist() == [bool(is_one) for is_one in wanted]
        assert isinstance(mask, np.ndarray) == (form in ("NumPy", "Keys"))
    _, erased = hkv.erase(table, bags.ids, valid=bags.valid)
    assert int(erased.counts.hits) == 3  # not 0, which pads
    assert hkv.sharding.distinct_in(bags.ids, bags.valid) == 3 / 7
