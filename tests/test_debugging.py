"""What JAX offers to those who look for an error: no NaN, no jit, 64 bits; and what errors say."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from decimal import Decimal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_hkv as hkv
import jax_hkv.linen
import jax_hkv.nnx
from jax_hkv import _ffi, metrics
from jax_hkv import index as _index

DIM = 2
IDS = np.arange(50, dtype=np.int32)
ONES = jnp.ones((50, DIM), jnp.float32)
OPT = hkv.optim.adam(0.1)
SCALE = hkv.optim.LossScale.create(8.0)
SGD = optax.sgd(0.125)


def table_of(ids=IDS, opt=OPT, **options):
    return hkv.find_or_insert(opt.init(hkv.create(256, DIM, **options)), ids)


@pytest.mark.parametrize("is_jitted", [False, True])
def test_a_nan_is_reported_by_the_operation_that_returns_it(platform, is_jitted):
    def found_rows(table, ids):
        return hkv.find(table, ids)[1].values

    find = jax.jit(found_rows) if is_jitted else found_rows
    rows = jnp.full((3, DIM), jnp.nan, jnp.float32)
    table, _ = hkv.insert_or_assign(hkv.create(128, DIM), IDS[:3], rows)
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError, match="nan"):
            find(table, IDS[:3])
        assert not find(table, IDS[3:]).any()


def test_an_infinity_is_reported_where_it_is_looked_for():
    rows = jnp.full((3, DIM), jnp.inf, jnp.float32)
    table, _ = hkv.insert_or_assign(hkv.create(128, DIM), IDS[:3], rows)
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="inf"):
        hkv.find(table, IDS[:3])
    assert np.isinf(hkv.find(table, IDS[:3])[1].values).all()


def test_transformations_are_tried_with_numbers_that_debug_nans_would_refuse():
    with jax.debug_nans(True), jax.debug_infs(True):
        opt = hkv.optim.sparse(optax.sgd(0.0625, momentum=0.5))
        table, result = table_of(opt=opt)
        opt.update(table, result, ONES)


def test_operations_over_the_whole_table_run_without_jit():
    def old(keys, scores, rows):
        return hkv.less(keys, 20)

    table, _ = table_of(policy=hkv.Policy.EPOCH_LRU)
    expected = hkv.size_if(table, old), hkv.erase_if(table, old)[1], hkv.expire(table, 3)[1]
    with jax.disable_jit():
        got = hkv.size_if(table, old), hkv.erase_if(table, old)[1], hkv.expire(table, 3)[1]
        assert int(hkv.misplaced(table)) == 0
    assert list(map(int, got)) == list(map(int, expected)) == [20, 20, 0]


def test_counts_have_32_bits_with_x64_on_too():
    with jax.enable_x64(True):
        table, result = table_of()
        found = metrics.of(table, [result, result])
        assert {each.dtype for each in (*result.counts, found.unique, found.evicted)} == {
            np.dtype(np.int32)
        }
        collection = hkv.Collection(
            [hkv.TableConfig(name, 128, DIM, optimizer=OPT) for name in "ab"],
            [hkv.Feature(name, name) for name in "ab"],
        )
        _, found = collection.lookup(collection.create(), {"a": IDS, "b": IDS}, train=True)
        (group,) = collection.groups
        for counts in group.counts(found.results[group.name]).values():
            assert {each.dtype for each in counts} == {np.dtype(np.int32)}


class Clicks(nn.Module):
    """Two features of fused tables, a bag of which ids may have no row."""

    @nn.compact
    def __call__(self, ids, train=False):
        options = {"optimizer": OPT, "dtype": jnp.bfloat16}
        options["admission"] = hkv.admission.frequency(2, width=64)
        tables = [hkv.TableConfig(name, 128, DIM, **options) for name in "ab"]
        features = [hkv.Feature("bag", "a", "mean"), hkv.Feature("one", "b")]
        collection = hkv.Collection(tables, features)
        rows = hkv.linen.EmbedCollection(collection, unseen="learned")(ids, train=train)
        return nn.Dense(1)(jnp.concatenate([rows["bag"], rows["one"]], axis=-1))[:, 0]


def trained():
    """What two steps and an evaluation leave."""
    ids = {"bag": IDS.reshape(25, 2), "one": IDS[:25]}
    state = hkv.linen.TrainState.create(Clicks(), jax.random.key(0), ids, tx=SGD, loss_scale=SCALE)
    step = hkv.linen.train_step(
        lambda apply, ids: optax.squared_error(apply(ids, train=True)).mean(), max_norm=1.0
    )
    for _ in range(2):
        state, info = step(state, ids)
    rows = jnp.ones((3, 2, DIM), jnp.bfloat16)
    pooled = jax.grad(lambda weights: hkv.pool(rows, weights=weights).sum())(
        jnp.ones((3, 2), jnp.float32)
    )
    sparse = hkv.optim.sparse(optax.sgd(0.125, momentum=0.5))
    table, result = table_of(opt=sparse, choices=2, dtype=jnp.bfloat16)
    table = sparse.update(table, result, ONES)
    moved, _ = hkv.import_batch(sparse.init(hkv.create(256, DIM, dtype=jnp.bfloat16)), evicted())
    return state, info, state.apply(ids), pooled, table, moved


def evicted():
    """Entries that leave a table whose rows were like those of `trained`."""
    sparse = hkv.optim.sparse(optax.sgd(0.125, momentum=0.5))
    table = sparse.init(hkv.create(128, DIM, dtype=jnp.bfloat16))
    table, _ = hkv.find_or_insert(table, np.arange(128, dtype=np.int32))
    return hkv.find_or_insert(table, IDS + 1000, return_evicted=True)[1].evicted


def test_nothing_is_promoted_without_being_asked_for():
    expected = trained()
    jax.clear_caches()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.tree.map(np.testing.assert_array_equal, trained(), expected)


# --- Loss scales ---------------------------------------------------------------------------------


def test_the_highest_loss_scale_still_trains():
    """Its inverse is a normal number; that of 2**127 is not, and XLA takes it for zero."""
    scale = hkv.optim.LossScale.create(2.0**126, period=1)
    for _ in range(20):
        scale = scale.adjust(jnp.bool_(True))
    assert float(scale.scale) == 2.0**126
    assert float(scale.adjust(jnp.bool_(False)).scale) == 2.0**125
    gradient = jax.jit(jax.grad(lambda w: w * scale.scale))(jnp.float32(0.5))
    assert float(gradient * (1.0 / scale.scale)) == 1.0


def test_a_loss_scale_below_one_is_not_raised_by_a_step_that_is_not_finite():
    scale = hkv.optim.LossScale.create(0.25).adjust(jnp.bool_(False))
    assert float(scale.scale) == 0.25
    assert float(hkv.optim.LossScale.create(1.5).adjust(jnp.bool_(False)).scale) == 1.0


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-50, 1e300, 2.0**127, float("nan")])
def test_a_loss_scale_without_an_inverse_is_refused(scale):
    with pytest.raises(ValueError, match=r"LossScale.create: scale must be from .*inverse"):
        hkv.optim.LossScale.create(scale)


# --- What errors say -----------------------------------------------------------------------------


def of_another_capacity(leaf):
    """A table whose values, or optimizer rows, are those of a smaller one."""
    table, _ = table_of()
    smaller = OPT.init(hkv.create(128, DIM))
    if leaf == "values":
        return dataclasses.replace(table, values=smaller.values)
    rows = dataclasses.replace(table.optimizer, rows=smaller.optimizer.rows)
    return dataclasses.replace(table, optimizer=rows)


@pytest.mark.parametrize("leaf", ["values", "optimizer"])
def test_leaves_of_tables_of_different_capacities_are_refused(leaf):
    table, (_, result) = of_another_capacity(leaf), table_of()
    calls = {
        "find": lambda: hkv.find(table, IDS),
        "insert_or_assign": lambda: hkv.insert_or_assign(table, IDS, ONES),
        "optim.update": lambda: OPT.update(table, result, ONES),
        "sharding.export_entries": lambda: hkv.sharding.export_entries(table),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"{name}: table must have a row in every.*\[.*128"):
            call()


EMBEDDINGS = hkv.Collection([hkv.TableConfig("t", 128, DIM)], [hkv.Feature("f", "t")])
TABLE, RESULT = table_of()
PLACEMENT = hkv.sharding.Placement(jax.make_mesh((1,), ("device",)))
ERRORS = {
    "a row to fill with": (
        lambda: hkv.find(TABLE, IDS, fill=jnp.ones(DIM)),
        ValueError,
        r'find: fill must be a number of Python or "initial".*jnp.where\(result.found',
    ),
    "a flag to fill with": (
        lambda: hkv.find(TABLE, IDS, fill=True),
        ValueError,
        'find: fill must be a number of Python or "initial", got True',
    ),
    "a touch that is a text": (
        lambda: hkv.find(TABLE, IDS, touch="no"),
        TypeError,
        "find: touch must be True or False, got str 'no'",
    ),
    "a result for its status": (
        lambda: hkv.is_new(RESULT),
        TypeError,
        "is_new: status must be an array .* got InsertResult: give result.status",
    ),
    "a list of statuses": (
        lambda: hkv.is_new([2, 3]),
        TypeError,
        "is_new: status must be an array .* got list",
    ),
    "a belief that is no array": (
        lambda: hkv.accum_or_assign(TABLE, IDS, RESULT.values, object()),
        TypeError,
        r"accum_or_assign: exists must be bool\[\d+\] like the keys, got object",
    ),
    "embeddings that are integers": (
        lambda: hkv.nnx.Embed(128, DIM, dtype=jnp.int32)(IDS),
        TypeError,
        "Embed: dtype must be floating-point, got int32",
    ),
    "a loss that is none": (
        lambda: hkv.nnx.value_and_grad(TABLE),
        TypeError,
        r"nnx\.value_and_grad: loss_fn must be a function of \(model, \*args\) .* got Table",
    ),
    "a model to place": (
        lambda: hkv.nnx.place(hkv.nnx.Embed(128, DIM), PLACEMENT),
        TypeError,
        r"nnx\.place: make must be a function without arguments .* got Embed: write lambda",
    ),
    "a mesh to place a model on": (
        lambda: hkv.nnx.place(lambda: hkv.nnx.Embed(128, DIM), PLACEMENT.mesh),
        TypeError,
        r"nnx\.place: placement must be a .*Placement, got Mesh: make one .*Placement\(mesh\)",
    ),
    "a mesh to run a model on": (
        lambda: hkv.nnx.run(lambda model, ids: model(ids), PLACEMENT.mesh),
        TypeError,
        r"nnx\.run: placement must be a .*Placement, got Mesh",
    ),
    "an evaluation that is none": (
        lambda: hkv.nnx.run(IDS, PLACEMENT),
        TypeError,
        r"nnx\.run: fn must be a function of \(model, \*batch\) to arrays, got ndarray",
    ),
    "a row to fill bags with": (
        lambda: hkv.find_pooled(TABLE, IDS[None], fill=jnp.ones(DIM)),
        ValueError,
        'find_pooled: fill must be "initial" or 0',
    ),
    "bags that are ids": (
        lambda: hkv.Jagged.from_lists([1, 2]),
        TypeError,
        r"from_lists: bag 0 must be a list .* got int 1: a bag of one id is \[id\]",
    ),
    "inputs that are no dict": (
        lambda: EMBEDDINGS.lookup(EMBEDDINGS.create(), IDS),
        TypeError,
        r"Collection.lookup: inputs must be a dict of the features \['f'\], got ndarray",
    ),
    "tables by name": (
        lambda: hkv.Collection(["t"], [hkv.Feature("f", "t")]),
        TypeError,
        "Collection: tables must be a list of TableConfig, got one of str 't'",
    ),
    "no result": (lambda: OPT.update(TABLE, None, ONES), TypeError, "result must be what"),
    "no gradients": (
        lambda: OPT.update(TABLE, RESULT, None),
        TypeError,
        "optim.update: row_gradients must be the gradient by result.values, got None",
    ),
    "metrics of nothing": (lambda: metrics.of(TABLE, None), TypeError, "metrics.of: result must"),
    "no rows": (
        lambda: hkv.insert_or_assign(TABLE, IDS, None),
        (TypeError, ValueError),
        "insert_or_assign: values must",
    ),
    "rows that are text": (
        lambda: hkv.insert_or_assign(TABLE, IDS, "abc"),
        TypeError,
        "insert_or_assign: values must be an array of float32, got str",
    ),
    "no results to clip": (
        lambda: hkv.optim.clip_by_global_norm(1.0, {}, None, []),
        TypeError,
        "clip_by_global_norm: results must be a list",
    ),
    "a predicate without a hash": (
        lambda: hkv.size_if(TABLE, Unhashable()),
        TypeError,
        "size_if: predicate must be hashable.*frozen dataclass",
    ),
    "a mean that is text": (
        lambda: hkv.initializers.normal("a"),
        TypeError,
        "normal: stddev must be a number, got str 'a'",
    ),
    "bounds beyond float32": (
        lambda: hkv.initializers.uniform(-1e308, 1e308),
        ValueError,
        "uniform: low must be a float32",
    ),
    "bounds too far apart": (
        lambda: hkv.initializers.uniform(-3e38, 3e38),
        ValueError,
        "their distance must be a float32",
    ),
    "ids with a mask": (
        lambda: hkv.Keys.from_numpy(np.ma.array([5, 6], mask=[0, 1])),
        TypeError,
        "ids must not be a masked array.*valid=",
    ),
    "ids of a lookup with a mask": (
        lambda: hkv.find(TABLE, np.ma.array(IDS, mask=IDS > 9)),
        TypeError,
        "find: keys must not be a masked array.*valid=",
    ),
    "flat ids with a mask": (
        lambda: hkv.Jagged.from_lengths(np.ma.array([5, 6], mask=[0, 1]), [1, 1]),
        TypeError,
        "from_lengths: values must not be a masked array",
    ),
    "bags with a mask": (
        lambda: hkv.Jagged.from_lists([np.ma.array([5, 6], mask=[0, 1])]),
        TypeError,
        "from_lists: bag 0 must not be a masked array",
    ),
    "a bag of text": (
        lambda: hkv.Jagged.from_lists(["ab"]),
        TypeError,
        "from_lists: bag 0 must be a list .* got str 'ab'",
    ),
    "no gradients in a list": (
        lambda: OPT.update(TABLE, [RESULT, RESULT], [ONES, None]),
        TypeError,
        "optim.update: row_gradients must be the gradient by result.values, got None",
    ),
    "no features at all": (
        lambda: EMBEDDINGS.lookup(EMBEDDINGS.create(), {}, partial=True),
        ValueError,
        r"inputs must be of some of the features \['f'\]; missing: \['f'\], unknown: \[\]$",
    ),
    "an export of a number": (
        lambda: hkv.sharding.export_entries(5),
        TypeError,
        "export_entries: tables must be a jax_hkv Table, got int",
    ),
    "a checkpoint without a target": (
        lambda: hkv.find({"index": {}}, IDS),
        TypeError,
        r"table must be a jax_hkv Table, got dict: .*jax.eval_shape\(make_table\)",
    ),
    "one bag that is no list": (
        lambda: hkv.Jagged.from_lists(5),
        TypeError,
        "Jagged.from_lists: lists must be a list of ids for each bag, got int",
    ),
    "batches of no device": (
        lambda: hkv.sharding.concatenate([]),
        ValueError,
        "sharding.concatenate: batches must be those .* got none",
    ),
    "a loss scale in words": (
        lambda: hkv.optim.LossScale.create("large"),
        TypeError,
        "LossScale.create: scale must be a number, got str 'large'",
    ),
    "a bound in words": (
        lambda: hkv.optim.clip_by_global_norm("one", {}, [], []),
        TypeError,
        "clip_by_global_norm: max_norm must be a number, got str 'one'",
    ),
    "a bound that is none, before the first step": (
        lambda: hkv.linen.train_step(lambda apply: 0.0, max_norm=0),
        ValueError,
        "train_step: max_norm must be positive, got 0",
    ),
    "a bound in words, before the first step": (
        lambda: hkv.nnx.train_step(lambda model: 0.0, max_norm="one"),
        TypeError,
        "train_step: max_norm must be a number, got str 'one'",
    ),
    "a type that is none": (
        lambda: hkv.optim.sparse(optax.sgd(0.1), dtype="int8"),
        TypeError,
        "optim.sparse: dtype must be float32, bfloat16 or float16, got int8",
    ),
    "micro-steps": (
        lambda: hkv.optim.sparse(optax.chain(optax.sgd(0.1), optax.apply_every(2))).init(TABLE),
        ValueError,
        "optim.sparse: optax.MultiSteps and apply_every count",
    ),
}


class Unhashable:
    __hash__ = None

    def __call__(self, keys, scores, rows):
        return hkv.less(keys, 20)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_call_the_argument_and_the_remedy(name):
    call, error, message = ERRORS[name]
    with pytest.raises(error, match=re.compile(message, re.DOTALL)):
        call()


def test_numbers_may_be_arrays_of_one_element_and_bags_anything_of_integers():
    """As before errors were asked of them."""
    for quarter in (np.array(0.25), jnp.bfloat16(0.25), 1 / jnp.sqrt(16.0), Decimal("0.25")):
        assert hkv.initializers.normal(quarter) == hkv.initializers.normal(0.25)
    assert hkv.initializers.constant(3.4028235e38).a == 3.4028235e38  # FLT_MAX, as it is spelt
    expected = hkv.Jagged.from_lists([[5, 6], [7]])
    for bags in ([jnp.array([5, 6]), [7]], [(5, 6), {7}], [{5: 0, 6: 0}.keys(), np.array([7])]):
        jax.tree.map(np.testing.assert_array_equal, hkv.Jagged.from_lists(bags), expected)


def test_dense_gradients_may_be_numbers_of_python():
    clipped, _, norm = hkv.optim.clip_by_global_norm(1.0, {"w": 3.0, "b": 4.0}, [], [])
    assert float(norm) == 5.0
    np.testing.assert_allclose([clipped["w"], clipped["b"]], [0.6, 0.8], rtol=1e-6)


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_clipping_hides_no_gradient_that_is_not_finite(odd):
    """As optax's: a norm that is no number is no bound for the others."""
    dense = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([1.0, odd])}
    expected, _ = optax.clip_by_global_norm(1.0).update(dense, optax.EmptyState())
    clipped, _, _ = hkv.optim.clip_by_global_norm(1.0, dense, [], [])
    jax.tree.map(np.testing.assert_array_equal, clipped, expected)
    _, result = hkv.find_or_insert(hkv.create(128, 2), IDS)
    rows = jnp.full((*IDS.shape, 2), 1e4).at[0, 0].set(odd)
    _, (rows,), _ = hkv.optim.clip_by_global_norm(1.0, {}, [result], [rows])
    assert not (np.abs(rows) > 1).any()


def test_an_export_from_far_behind_the_end_is_empty():
    table, _ = hkv.find_or_insert(hkv.create(128, 1), IDS)
    assert int(hkv.export_batch(table, 2**40, 4).count) == 0


def test_sightings_are_halved_only_where_they_are_counted():
    table = hkv.create(128, 1, admission=hkv.admission.probability(0.5))
    with pytest.raises(ValueError, match="counts no sightings"):
        hkv.halve_sightings(table)


def test_copies_are_looked_for_where_numbers_are_debugged():
    """JAX donates nothing then, so that every table would be copied."""
    with jax.debug_nans(True):
        hkv.testing.assert_no_table_copies(hkv.find_or_insert, hkv.create(1024, 8), IDS)


@pytest.mark.parametrize(
    "optimizer, leaf",
    [
        (hkv.optim.rowwise_adagrad(0.1), "sum_of_mean_squares"),
        (hkv.optim.rowwise_adam(0.1), "row_nu"),
        (hkv.optim.adam(0.1, count_per_row=True), "count"),
    ],
)
def test_copies_of_one_number_a_row_are_seen(optimizer, leaf):
    def step(table, old):
        before = table.optimizer.rows[leaf]
        table, result = hkv.find_or_insert(table, IDS)
        return optimizer.update(table, result, result.values), before if old else 0

    table = optimizer.init(hkv.create(1024, DIM))
    assert table.optimizer.rows[leaf].shape == (table.capacity,)
    hkv.testing.assert_no_table_copies(functools.partial(step, old=False), table)
    with pytest.raises(AssertionError, match=r"\[1024\]"):
        hkv.testing.assert_no_table_copies(functools.partial(step, old=True), table)


def test_a_touching_read_can_give_absent_keys_their_first_rows():
    table, _ = hkv.find_or_insert(hkv.create(128, DIM), IDS[:1])
    _, found = hkv.find(table, IDS, touch=True, fill="initial", valid=IDS != 2)
    rows = np.where(IDS[:, None] == 2, 0, hkv.initial_rows(table, IDS))
    np.testing.assert_array_equal(found.values, rows)


def test_a_read_without_copies_is_checked_without_a_warning():
    """It returns no table, and so cannot use the donated one."""
    table, _ = table_of()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hkv.testing.assert_no_table_copies(lambda table: hkv.find(table, IDS)[1].values, table)
        assert warnings.filters[0][0] == "error"


def native_upsert(policy):
    """The call of an upsert below what checks its arguments, and its operands by their names."""
    keys = hkv.Keys.from_numpy(IDS)
    table = hkv.create(256, DIM, policy=hkv.Policy[policy], name="ads")
    groups = _index.unique(keys, None)
    given = groups._asdict() | _index.occurrences(groups)._asdict() | vars(table.index)
    given |= {"unique_keys": groups.keys, "batch_scores": keys.words}
    given["pinned"] = jnp.zeros(0, jnp.int32)
    [upsert] = [one for one in _ffi.signatures() if one.name == "upsert"]
    defaults = {
        "policy": int(table.policy),
        "choices": 1,
        "admit": 1,
        "write_scores": 1,
        "ticks": 1,
        "foreign": 0,
    }

    def call(*operands, **attributes):
        return _ffi.call(
            "upsert", *operands, table="ads", **defaults | {"e": 0, "m": 0} | attributes
        )

    return call, {one.name: given[one.name] for one in upsert.operands}


@pytest.mark.parametrize(
    ("policy", "left_out", "message"),
    [
        ("CUSTOM", {"batch_scores"}, "batch_scores: policy CUSTOM has no others"),
        ("LFU", {"order", "offsets"}, "offsets: LFU and EPOCH_LFU count by them"),
        ("EPOCH_LFU", {"order"}, "order: batch_scores are added up by it"),
    ],
)
def test_a_native_call_without_what_its_policy_asks_for_is_refused(
    platform, policy, left_out, message
):
    """Of operands that may be absent some are what the policy makes its scores of."""
    call, operands = native_upsert(policy)
    jax.block_until_ready(call(*operands.values()))
    without = [each[: 0 if name in left_out else None] for name, each in operands.items()]
    with pytest.raises(jax.errors.JaxRuntimeError, match=f'upsert on "ads": {message}'):
        jax.block_until_ready(call(*without))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"e": len(IDS) - 1}, "e: expected 0, or, of an upsert that admits, the size of the batch"),
        ({"e": len(IDS), "admit": 0}, "e: expected 0"),
        ({"m": len(IDS) + 1}, "m: expected 0 or the size of the batch"),
    ],
)
def test_a_native_call_with_results_of_another_size_is_refused(platform, attributes, message):
    call, operands = native_upsert("LRU")
    jax.block_until_ready(call(*operands.values(), e=len(IDS), m=len(IDS)))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f'upsert on "ads": {message}'):
        jax.block_until_ready(call(*operands.values(), **attributes))


def test_a_native_update_with_counts_of_some_rows_is_refused(platform):
    table = hkv.optim.adam(0.1, count_per_row=True).init(hkv.create(256, DIM, name="ads"))
    table, result = hkv.find_or_insert(table, IDS)
    keys, groups = hkv.Keys(result.groups.keys), result.groups
    assert table.optimizer is not None
    [update] = [one for one in _ffi.signatures() if one.name == "update_adam"]
    operands = groups._asdict() | _index.occurrences(groups)._asdict()
    operands |= {"clock": table.index.clock, "digests": table.index.digests, "keys": keys.words}
    operands |= {"index_keys": table.index.keys, "stale": table.optimizer.skipped}
    operands |= {"values": table.values, "first_state": table.values, "second_state": table.values}
    operands |= {"slots": result.unique_slots, "rate": jnp.ones(1), "gradients": result.values}
    operands |= {"sources": jnp.zeros(0, jnp.int32), "weights": jnp.zeros(0)}
    attributes = {name: dtype.type(0) for name, dtype in update.attributes.items()}

    def call(counts):
        given = operands | {"steps": jnp.zeros(counts, jnp.uint32)}
        values = [given[one.name] for one in update.operands]
        return jax.block_until_ready(_ffi.call("update_adam", *values, table="ads", **attributes))

    call(1)
    call(table.capacity)
    with pytest.raises(jax.errors.JaxRuntimeError, match="steps: expected one number, or one for"):
        call(table.capacity - 1)


def layer_of(api, layer, **options):
    """A layer, one table's name in it, and inputs."""
    kind = getattr(getattr(hkv, api), layer)
    if layer == "EmbedCollection":
        return kind(EMBEDDINGS, **options), "table_t" if api == "nnx" else "t", {"f": IDS}
    return kind(128, DIM, **options), "table", IDS[:, None]


@pytest.mark.parametrize("layer", ["Embed", "EmbedBag", "EmbedCollection"])
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_result_in_place_of_a_layers_table_is_named(api, layer):
    model, name, inputs = layer_of(api, layer)
    pair = hkv.find(hkv.create(128, DIM), IDS)
    message = f"{layer}: {name} must be a jax_hkv Table, got tuple: operations return (table, resul"
    with pytest.raises(TypeError, match=re.escape(message)):
        if api == "linen":
            model.apply({"tables": {name: pair}}, inputs)
        else:
            getattr(model, name).set_value(pair)
            model(inputs)


def test_what_an_update_of_tables_is_given_is_named():
    with pytest.raises(TypeError, match=r"linen\.update_tables: updated must .*'tables', got \[\]"):
        hkv.linen.update_tables({}, {})
    with pytest.raises(TypeError, match=r"linen\.update_tables: updated must .*got Array.*MUTAB"):
        hkv.linen.update_tables(ONES, {})
    with pytest.raises(TypeError, match=r"nnx\.update_tables: row_gradients must .*got NoneType"):
        hkv.nnx.update_tables(hkv.nnx.Embed(128, DIM), None)


@pytest.mark.parametrize("layer", ["Embed", "EmbedBag"])
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_wrong_ids_and_masks_are_named_as_the_layer_calls_them(api, layer):
    model, _, ids = layer_of(api, layer)
    call = model if api == "nnx" else functools.partial(model.init, jax.random.key(0))
    for wrong in ([5, 6], [[5, 6]], np.ones((2, 2), np.float32)):
        with pytest.raises(TypeError, match=f"^{layer}: ids must"):
            call(wrong)
    with pytest.raises(TypeError, match=rf"^{layer}: valid must be bool\[50, 1\] like"):
        call(ids, valid=np.ones(50, bool))


def called(api, layer, **flag):
    """Calls a layer, or makes one, with a flag."""
    of_call = {} if "return_evicted" in flag else flag
    model, _, inputs = layer_of(api, layer, **({} if of_call else flag))
    if api == "nnx":
        return model(inputs, **of_call)
    variables = model.init(jax.random.key(0), inputs)
    return model.apply(variables, inputs, mutable=hkv.linen.MUTABLE, **of_call)


def looked_up(**flag):
    return EMBEDDINGS.lookup(EMBEDDINGS.create(), {"f": IDS}, **flag)


def collection_with(**flag):
    return hkv.Collection(EMBEDDINGS.tables, EMBEDDINGS.features, **flag)


FLAGS = {
    ("Collection", "fuse"): [collection_with],
    ("Collection.lookup", "train"): [looked_up],
    ("Collection.lookup", "partial"): [looked_up],
    ("Collection.lookup", "return_evicted"): [looked_up],
    ("Collection.keys", "partial"): [functools.partial(EMBEDDINGS.keys, {"f": IDS})],
    ("Keys.to_numpy", "signed"): [hkv.Keys.from_numpy([5]).to_numpy],
    ("Placement.step", "donate"): [functools.partial(PLACEMENT.step, lambda table: (table, 0))],
    ("nnx.value_and_grad", "has_aux"): [functools.partial(hkv.nnx.value_and_grad, len)],
}
for _name in ("donate", "has_aux", "check_overflow"):
    FLAGS["train_step", _name] = [
        functools.partial(flax.train_step, len) for flax in (hkv.linen, hkv.nnx)
    ]
for _layer in ("Embed", "EmbedBag", "EmbedCollection"):
    for _name in ("train", "return_evicted"):
        FLAGS[_layer, _name] = [functools.partial(called, api, _layer) for api in ("linen", "nnx")]


@pytest.mark.filterwarnings("ignore:.*(are only read|nothing trains their rows)")
@pytest.mark.parametrize(("name", "flag"), FLAGS)
def test_what_is_no_bool_is_not_taken_for_true(name, flag):
    """A text would be, whatever it says."""
    for call in FLAGS[name, flag]:
        for given in ("False", "no", 1, None, jnp.array(True)):
            message = f"{name}: {flag} must be True or False, got {type(given).__name__} "
            with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
                call(**{flag: given})
        for given in (True, False, np.True_, np.False_):
            call(**{flag: given})


def test_flax_prints_models_that_hold_tables():
    """Its forms of arrays have a shape and no size."""
    layer = hkv.nnx.Embed(256, DIM, optimizer=OPT)
    for shown in (repr(layer), str(hkv.nnx.TrainState(layer, SGD))):
        assert re.search(r"value=Table\('embed', capacity=256, dim=2, .*bytes=\d", shown)
