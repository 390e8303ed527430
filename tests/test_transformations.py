"""Behaviours 30 and 31: what JAX's transformations do with a table, and what goes wrong clearly."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_hkv as hkv
from jax_hkv import _ffi

DIM = 8
BATCH = 40
SGD = hkv.optim.sparse(optax.sgd(0.1, momentum=0.9))
DEVICES = 4


def make_table(capacity=256, **kwargs):
    return SGD.init(hkv.create(capacity, DIM, **kwargs))


def random_keys(rng, *shape):
    return hkv.Keys.from_numpy(rng.integers(0, 400, shape, dtype=np.int64) << 20)


def train_step(table, keys):
    table, result = hkv.find_or_insert(table, keys)
    gradients = jax.grad(lambda rows: jnp.sum(rows**2))(result.values)
    return SGD.update(table, result, gradients), result.counts


def assert_equal_tables(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_equal_index(one, other):
    """Keys, scores and slots agree in bits, rows to the rounding of different executables."""
    assert_equal_tables(one.index, other.index)
    live = np.asarray(one.digests).reshape(-1) != 0
    np.testing.assert_allclose(
        np.asarray(one.values)[live], np.asarray(other.values)[live], rtol=1e-6, atol=1e-7
    )


def unrolled(table, batches):
    step = jax.jit(train_step)
    for words in batches.words:
        table, _ = step(table, hkv.Keys(words))
    return table


def test_one_primitive_stands_in_the_jaxpr_for_each_native_operation_of_a_call():
    """30: primitives are named after the operations of the native list."""
    keys = hkv.Keys.from_numpy(np.arange(5))
    text = str(jax.make_jaxpr(train_step)(make_table(), keys))
    names = {signature.name for signature in _ffi.signatures()}
    called = [name for name in re.findall(r"(\w+)\[", text) if name in names]
    once = ("unique", "upsert", "gather_or_init_rows", "combine_rows", "verify_slots")
    assert all(called.count(name) == 1 for name in once) and "init_rows" not in called, called


@pytest.mark.parametrize(
    ("read", "expected"), [(hkv.find, ["find_rows"]), (hkv.contains, ["find_slots"])]
)
def test_a_read_is_one_native_call(read, expected):
    """30: rows are found in one pass, and not read where nobody asks for them."""
    text = str(jax.make_jaxpr(read)(make_table(), hkv.Keys.from_numpy(np.arange(5))))
    names = {signature.name for signature in _ffi.signatures()}
    assert [name for name in re.findall(r"(\w+)\[", text) if name in names] == expected


OCCURRENCES = {
    "found or inserted": (lambda t, k: hkv.find_or_insert(t, k)[1].values, "LRU", {}, 0),
    "assigned": (lambda t, k: hkv.insert_or_assign(t, k, rows_like(k))[0], "LRU", {}, 0),
    "counted": (lambda t, k: hkv.find_or_insert(t, k)[1].values, "LFU", {}, 1),
    "touched": (lambda t, k: hkv.find(t, k, touch=True)[1].values, "EPOCH_LFU", {}, 1),
    "trained": (train_step, "LRU", {}, 1),
    "counted and trained": (train_step, "LFU", {}, 1),
    "admitted, counted and trained": (
        train_step,
        "LFU",
        {"admission": hkv.admission.frequency(2)},
        2,  # of the keys seen, and of those let in
    ),
}


@pytest.mark.parametrize("case", OCCURRENCES)
def test_occurrences_are_listed_for_those_alone_who_need_them_and_once(case):
    """On a GPU the list is a sort of the batch."""
    call, policy, settings, expected = OCCURRENCES[case]
    arguments = make_table(policy=hkv.Policy[policy], **settings), hkv.Keys.from_numpy(np.arange(5))
    hlo = jax.jit(call).lower(*arguments).compile().as_text()
    assert hlo.count('custom_call_target="jax_hkv.list_occurrences"') == expected


@pytest.mark.parametrize("choices", [1, 2])
def test_scan_while_fori_and_cond_change_a_table_as_the_unrolled_steps_do(rng, choices):
    """30: control flow."""
    batches = random_keys(rng, 3, BATCH)
    table = make_table(choices=choices)
    expected = unrolled(table, batches)

    scanned, _ = jax.jit(lambda t, b: jax.lax.scan(train_step, t, b))(table, batches)

    def body(number, t):
        return train_step(t, batches[number])[0]

    looped = jax.jit(lambda t: jax.lax.fori_loop(0, 3, body, t))(table)
    whiled = jax.jit(
        lambda t: jax.lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, body(c[0], c[1])), (jnp.int32(0), t)
        )[1]
    )(table)

    def conditional(t, keys):
        return jax.lax.cond(keys.low[0] >= 0, lambda t: train_step(t, keys)[0], lambda t: t, t)

    branched = table
    for words in batches.words:
        branched = jax.jit(conditional)(branched, hkv.Keys(words))
    for other in (scanned, looped, whiled, branched):
        assert_equal_index(expected, other)


def test_eager_jitted_and_donated_calls_give_the_same_bits(rng):
    """28, 30: one call, three ways."""
    keys = random_keys(rng, BATCH)
    eager, result = hkv.find_or_insert(make_table(), keys)
    jitted, jitted_result = jax.jit(hkv.find_or_insert)(make_table(), keys)
    donated, _ = jax.jit(hkv.find_or_insert, donate_argnums=0)(make_table(), keys)
    assert_equal_tables(eager, jitted)
    assert_equal_tables(eager, donated)
    assert_equal_tables(result, jitted_result)


def test_remat_saves_the_named_rows_and_runs_the_mutation_once(rng):
    """30: remat."""
    keys = random_keys(rng, BATCH)
    policy = jax.checkpoint_policies.save_only_these_names(hkv.ROWS_NAME)

    def loss(weight, table, remat):
        def forward(weight, table):
            table, result = hkv.find_or_insert(table, keys)
            return jnp.sum(jnp.sin(result.values * weight)), table

        return (jax.checkpoint(forward, policy=policy) if remat else forward)(weight, table)

    def gradient(table, remat):
        return jax.grad(loss, has_aux=True)(jnp.float32(2.0), table, remat)

    plain, table = jax.jit(gradient, static_argnums=1)(make_table(), False)
    saved, other = jax.jit(gradient, static_argnums=1)(make_table(), True)
    np.testing.assert_allclose(plain, saved, rtol=1e-6)
    assert_equal_tables(table, other)
    hkv.testing.assert_no_table_copies(functools.partial(gradient, remat=True), make_table())


def test_remat_keeps_the_named_rows_of_a_plain_read(rng):
    """30: the backward pass does not look the keys up once more."""
    policy = jax.checkpoint_policies.save_only_these_names(hkv.ROWS_NAME)
    table, keys = make_table(), random_keys(rng, BATCH)

    @functools.partial(jax.checkpoint, policy=policy)
    def loss(weight):
        return jnp.sum(jnp.sin(hkv.find(table, keys, fill="initial")[1].values * weight))

    text = str(jax.make_jaxpr(jax.grad(loss))(jnp.float32(2.0)))
    assert text.count("find_rows[") == 1


def test_the_clock_carries_into_its_high_word():
    """Time goes on after 2**32 calls."""
    table = hkv.create(128, DIM)
    index = dataclasses.replace(table.index, clock=jnp.array([2**32 - 1, 6], jnp.uint32))
    table, _ = hkv.find_or_insert(dataclasses.replace(table, index=index), KEYS)
    np.testing.assert_array_equal(table.clock, [0, 7])
    slots = np.asarray(hkv.find(table, KEYS)[1].slots)
    np.testing.assert_array_equal(np.asarray(table.scores).reshape(-1, 2)[slots], [[0, 7]] * 4)


def test_integers_of_32_bits_are_extended_by_their_sign():
    """int32 ids are those of int64, uint32 ids those of uint64."""
    signed, unsigned = np.array([-1, -(2**31), 5], np.int32), np.array([2**32 - 1, 2**31], "u4")
    for ids in (signed, unsigned):
        table, _ = hkv.find_or_insert(hkv.create(128, DIM), ids)
        assert hkv.find(table, hkv.Keys.from_numpy(ids))[1].found.all()
    table, _ = hkv.find_or_insert(hkv.create(128, DIM), signed)
    assert hkv.find(table, hkv.Keys.from_numpy(unsigned))[1].found.tolist() == [False, False]


def test_conditions_are_asked_of_every_slot_of_a_large_table():
    """Chunks are 16,384 slots; an offset that no int32 holds is past the end."""
    table = hkv.create(40_000, 1)
    table, result = hkv.find_or_insert(table, hkv.Keys.from_numpy(np.arange(20_000)))
    stored = int(hkv.size(table))
    assert (np.asarray(result.slots) > 2 * 16_384).any()
    assert int(hkv.size_if(table, lambda keys, scores, rows: keys.low >= 0)) == stored
    table, erased = hkv.erase_if(table, lambda keys, scores, rows: keys.low % 2 == 0)
    assert int(erased) + int(hkv.size(table)) == stored
    assert not hkv.contains(table, hkv.Keys.from_numpy(np.arange(0, 20_000, 2)))[1].any()
    for offset in (2**31, 2**32, 2**63):
        assert int(hkv.export_batch(table, offset, 4).count) == 0


def test_differentiating_a_table_says_what_to_differentiate():
    """30."""
    table = hkv.create(128, DIM)
    keys = hkv.Keys.from_numpy(np.arange(4))

    def loss(table):
        return hkv.find(table, keys)[1].values.sum()

    with pytest.raises(NotImplementedError, match=r"never differentiated.*result\.values"):
        jax.grad(loss, allow_int=True)(table)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("keys_are_replicated", [True, False])
def test_shard_map_gives_every_device_its_own_table(rng, axis_type, keys_are_replicated):
    """30: shard_map on Auto and Explicit meshes, keys split or replicated."""
    devices = jax.devices("cpu")[:DEVICES]
    mesh = jax.make_mesh((DEVICES,), ("d",), axis_types=(axis_type,), devices=devices)
    words = np.asarray(random_keys(rng, BATCH).words)
    tables = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *[make_table()] * DEVICES)
    tables = jax.device_put(tables, NamedSharding(mesh, P("d")))
    spec = P() if keys_are_replicated else P("d")
    keys = jax.device_put(hkv.Keys(words), NamedSharding(mesh, spec))
    step = jax.shard_map(
        lambda t, k: train_step(t, k)[0], mesh=mesh, in_specs=(P("d"), spec), out_specs=P("d")
    )
    hkv.testing.assert_no_table_copies(step, tables, keys)
    stepped = jax.jit(step, donate_argnums=0)(tables, keys)
    for device in range(DEVICES):
        share = words if keys_are_replicated else np.split(words, DEVICES)[device]
        expected, _ = jax.jit(train_step)(make_table(), hkv.Keys(jnp.asarray(share)))
        own = jax.tree.map(lambda leaf: np.split(np.asarray(leaf), DEVICES)[device], stepped)  # noqa: B023
        assert_equal_index(expected, own)


def test_pmap_gives_every_device_its_own_table(rng):
    """30: pmap, whose leading axis costs copies on the CPU pipeline, as documented."""
    keys = random_keys(rng, DEVICES, BATCH)
    tables = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[make_table()] * DEVICES)
    devices = jax.devices("cpu")[:DEVICES]
    stepped, counts = jax.pmap(train_step, donate_argnums=0, devices=devices)(tables, keys)
    assert counts.unique.shape == (DEVICES,)
    for device in range(DEVICES):
        expected, _ = jax.jit(train_step)(make_table(), keys[device])
        assert_equal_index(expected, jax.tree.map(lambda leaf: leaf[device], stepped))  # noqa: B023


STEPS = {
    "find": lambda t, k: hkv.find(t, k),
    "find touch": lambda t, k: hkv.find(t, k, touch=True),
    "contains": lambda t, k: hkv.contains(t, k),
    "find_or_insert": lambda t, k: hkv.find_or_insert(t, k),
    "return_evicted": lambda t, k: hkv.find_or_insert(t, k, return_evicted=True),
    "insert_or_assign": lambda t, k: hkv.insert_or_assign(t, k, rows_like(k)),
    "insert_and_evict": lambda t, k: hkv.insert_and_evict(t, k, rows_like(k)),
    "accum_or_assign": lambda t, k: hkv.accum_or_assign(t, k, rows_like(k), k.low > 9),
    "assign": lambda t, k: hkv.assign(t, k, rows_like(k)),
    "erase": lambda t, k: hkv.erase(t, k),
    "erase_if": lambda t, k: hkv.erase_if(t, lambda keys, scores, rows: rows[:, 0] > 0),
    "clear": lambda t, k: hkv.clear(t),
    "advance_epoch": lambda t, k: hkv.advance_epoch(t),
    "train_step": train_step,
    "scan": lambda t, k: jax.lax.scan(train_step, t, hkv.Keys(jnp.stack([k.words] * 2))),
    "while": lambda t, k: jax.lax.fori_loop(*k.low[2:4], lambda _, t: train_step(t, k)[0], t),
    "cond": lambda t, k: jax.lax.cond(k.low[0] > 3, lambda t: train_step(t, k)[0], lambda t: t, t),
}


def rows_like(keys):
    return jnp.ones((*keys.shape, DIM), jnp.float32)


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("name", STEPS)
def test_a_donated_table_is_never_copied(name, choices):
    """30: no copy of a table-sized array in the compiled step."""
    table = make_table(1024, choices=choices)
    hkv.testing.assert_no_table_copies(STEPS[name], table, hkv.Keys.from_numpy(np.arange(BATCH)))


READS = {
    "find": hkv.find,
    "find initial": lambda t, k: hkv.find(t, k, fill="initial"),
    "find touch": lambda t, k: hkv.find(t, k, touch=True),
    "contains": hkv.contains,
    "find_pooled": lambda t, k: hkv.find_pooled(t, k.reshape(-1, 4)),
    "find_pooled weights": lambda t, k: hkv.find_pooled(
        t, k.reshape(-1, 4), weights=jnp.ones((k.shape[0] // 4, 4), jnp.float32)
    ),
    "find_or_insert": hkv.find_or_insert,
    "find_or_insert_pooled": lambda t, k: hkv.find_or_insert_pooled(t, k.reshape(-1, 4)),
    "return_evicted": lambda t, k: hkv.find_or_insert(t, k, return_evicted=True),
    "insert_and_evict": lambda t, k: hkv.insert_and_evict(t, k, rows_like(k)),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_whose_result_outlives_a_later_write_copies_nothing(name):
    """30: the write waits for the read, since it takes the clock that the read returned."""

    def step(table, keys, others):
        table, read = READS[name](table, keys)
        table, written = hkv.insert_or_assign(table, others, rows_like(others))
        return table, read, written

    keys = hkv.Keys.from_numpy(np.arange(BATCH))
    others = hkv.Keys.from_numpy(np.arange(BATCH) + BATCH // 2)
    hkv.testing.assert_no_table_copies(step, make_table(1024), keys, others)


def test_the_copy_check_sees_a_copy():
    """A read of an old table after a write must copy, and the check must say so."""
    keys = hkv.Keys.from_numpy(np.arange(BATCH))

    def stale(table, keys):
        after, _ = hkv.insert_or_assign(table, keys, rows_like(keys))
        return after, hkv.find(table, keys)[1].values

    with pytest.raises(AssertionError, match="copies of table-sized arrays"):
        hkv.testing.assert_no_table_copies(stale, make_table(1024), keys)
    with pytest.raises(ValueError, match="no argument holds a jax_hkv Table"):
        hkv.testing.assert_no_table_copies(lambda k: k, keys)


def test_nothing_retraces_when_only_data_change(rng):
    """30: three batches of different data, one trace."""
    traces = []

    @functools.partial(jax.jit, donate_argnums=0)
    def step(table, keys, valid):
        traces.append(1)
        table, result = hkv.find_or_insert(table, keys, valid=valid)
        table = SGD.update(table, result, result.values)
        return hkv.advance_epoch(hkv.erase(table, keys)[0])

    table = make_table()
    for _ in range(3):
        table = step(table, random_keys(rng, BATCH), rng.random(BATCH) < 0.5)
    assert len(traces) == 1


def test_x64_changes_nothing(rng):
    """30: x64 off and on; with it on, 64-bit arrays are keys."""
    ids = rng.integers(-(2**63), 2**63 - 1, BATCH)
    expected, result = hkv.find_or_insert(make_table(), hkv.Keys.from_numpy(ids))
    with jax.enable_x64(True):
        table = make_table()
        for form in (hkv.Keys.from_numpy(ids), ids, jnp.asarray(ids), jnp.asarray(ids).view("u8")):
            got, other = jax.jit(hkv.find_or_insert)(table, form)
            assert_equal_tables(expected, got)
            assert_equal_tables(result, other)
            erased, count = hkv.erase_if(got, lambda k, s, v: v[:, 0] > 10)
            assert int(count) == int(hkv.size_if(erased, lambda k, s, v: v[:, 0] > 10)) == 0
            stepped, _ = jax.jit(train_step)(table, other.keys)
            assert stepped.values.dtype == jnp.float32


def test_a_stale_result_changes_no_other_keys_row():
    """30: the slots of an old result hold other keys by now."""
    table = make_table(128)
    table, old = hkv.find_or_insert(table, hkv.Keys.from_numpy(np.arange(128)))
    table, _ = hkv.find_or_insert(table, hkv.Keys.from_numpy(np.arange(1000, 1100)))
    before = np.asarray(table.values)
    updated = SGD.update(table, old, jnp.ones_like(old.values))
    keys = hkv.Keys(updated.keys.reshape(-1, 2)).to_numpy()
    changed = (np.asarray(updated.values) != before).any(axis=1)
    np.testing.assert_array_equal(changed, keys < 128)
    assert int(updated.optimizer.skipped[0]) == 100


def test_an_erased_key_zero_is_not_mistaken_for_an_empty_slot():
    """30: an empty lane has key words zero, as key 0 has."""
    zero = hkv.Keys.from_numpy(np.array([0]))
    table, result = hkv.find_or_insert(make_table(128), zero)
    table, _ = hkv.erase(table, zero)
    updated = SGD.update(table, result, jnp.ones_like(result.values))
    assert_equal_tables(updated.values, table.values)
    assert int(updated.optimizer.skipped[0]) == 1


def test_a_donated_table_used_again_gives_jaxs_own_error():
    """31."""
    table = hkv.create(128, DIM)
    keys = hkv.Keys.from_numpy(np.arange(4))
    jax.jit(hkv.find_or_insert, donate_argnums=0)(table, keys)
    with pytest.raises((RuntimeError, ValueError), match="deleted|donated"):
        jax.jit(hkv.find_or_insert)(table, keys)


def test_a_read_outside_a_trace_returns_the_same_table():
    """9, 30: a read never copies."""
    table = hkv.create(128, DIM)
    keys = hkv.Keys.from_numpy(np.arange(4))
    assert hkv.find(table, keys)[0] is table
    assert hkv.contains(table, keys)[0] is table


KEYS = hkv.Keys.from_numpy(np.arange(4))
ROWS = np.ones((4, DIM), np.float32)
BAD_CALLS = {
    "float ids": (lambda t: hkv.find(t, np.ones(4)), TypeError, "find: keys.*float64"),
    "a list": (lambda t: hkv.find(t, [1, 2]), TypeError, r"find: keys.*list.*Keys\.from_numpy"),
    "int64 with x64 off": (
        lambda t: hkv.find_or_insert(t, np.arange(4) - 2**31 - 1),
        TypeError,
        r"find_or_insert: keys is a NumPy int64.*from -2147483649 to -2147483646.*Keys\.from_numpy",
    ),
    "bad words": (
        lambda t: hkv.find(t, hkv.Keys(jnp.zeros((4, 3), jnp.uint32))),
        TypeError,
        r"keys\.words must be uint32\[\.\.\., 2\], got uint32\[4, 3\]",
    ),
    "no table": (lambda t: hkv.find(KEYS, KEYS), TypeError, "find: table must be.*got Keys"),
    "mask shape": (
        lambda t: hkv.find(t, KEYS, valid=np.ones(3, bool)),
        TypeError,
        r"find: valid must be bool\[4\].*got bool\[3\]",
    ),
    "mask dtype": (
        lambda t: hkv.erase(t, KEYS, valid=np.ones(4, np.float32)),
        TypeError,
        r"erase: valid must be bool\[4\].*got float32\[4\].*astype\(bool\)",
    ),
    "rows shape": (
        lambda t: hkv.insert_or_assign(t, KEYS, ROWS[:, :5]),
        ValueError,
        rf"insert_or_assign: values must have shape \[4, {DIM}\].*got \[4, 5\]",
    ),
    "rows dtype": (
        lambda t: hkv.assign(t, KEYS, ROWS.astype(np.float16)),
        TypeError,
        r"assign: values must be float32.*got float16.*astype",
    ),
    "scores under LRU": (
        lambda t: hkv.find_or_insert(t, KEYS, scores=np.ones(4, np.uint32)),
        ValueError,
        r"scores are not accepted under Policy\.LRU",
    ),
    "nothing to assign": (lambda t: hkv.assign(t, KEYS), ValueError, "values or scores"),
    "an epoch too large": (
        lambda t: hkv.advance_epoch(t, np.int64(2**32 + 7)),
        ValueError,
        "epoch must be from 0",
    ),
    "a float offset": (lambda t: hkv.export_batch(t, 1.5, 4), TypeError, "offset must be an int"),
    "no predicate": (lambda t: hkv.erase_if(t, None), TypeError, "erase_if: predicate.*NoneType"),
    "size of nothing": (lambda t: hkv.size(3), TypeError, "size: table must be.*got int"),
    "bad fill": (lambda t: hkv.find(t, KEYS, fill="zeros"), ValueError, 'fill.*"initial".*zeros'),
    "a fill too large": (
        lambda t: hkv.find(t, KEYS, fill=10**400),
        ValueError,
        r"find: fill must be a number that float32 can hold, .* got int.*float\(\"inf\"\)",
    ),
    "bad epoch": (lambda t: hkv.advance_epoch(t, -1), ValueError, "epoch must be from 0"),
    "bad count": (lambda t: hkv.export_batch(t, 0, -1), ValueError, "count must be from 0"),
    "bad offset": (lambda t: hkv.export_batch(t, -1, 4), ValueError, "offset must be from 0"),
    "predicate": (
        lambda t: hkv.erase_if(t, lambda k, s, v: v > 0),
        TypeError,
        r"predicate must return bool\[128\].*got bool\[128, 8\]",
    ),
    "no exists": (
        lambda t: hkv.accum_or_assign(t, KEYS, ROWS, None),
        TypeError,
        "accum_or_assign: exists",
    ),
    "update without rows": (
        lambda t: SGD.update(t, hkv.find_or_insert(t, KEYS)[1], ROWS),
        ValueError,
        r"no optimizer rows.*opt\.init",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_names_the_argument_what_was_expected_and_what_came(name):
    """31."""
    call, kind, message = BAD_CALLS[name]
    x64 = jax.config.jax_enable_x64 and "x64 off" not in name  # pyright: ignore[reportAttributeAccessIssue]
    with jax.enable_x64(x64), pytest.raises(kind, match=message):
        call(hkv.create(128, DIM))


BAD_TABLES = {
    "capacity": ({"capacity": 0}, ValueError, "create: capacity must be from 1.*got 0"),
    "float capacity": ({"capacity": 1.5}, TypeError, "create: capacity must be an integer"),
    "huge capacity": ({"capacity": 2**31}, ValueError, "create: capacity must be from 1"),
    "dim": ({"dim": 0}, ValueError, "create: dim must be from 1.*got 0"),
    "dtype": ({"dtype": jnp.int32}, TypeError, "create: dtype.*got int32"),
    "dtype by name": ({"dtype": "int8"}, TypeError, "create: dtype.*got int8: take one of"),
    "no dtype": ({"dtype": "bf16"}, TypeError, "create: dtype must be float32.*got bf16"),
    "choices": ({"choices": 3}, ValueError, "create: choices must be from 1 to 2, got 3"),
    "seed": ({"seed": -1}, ValueError, "create: seed must be from 0"),
    "policy": ({"policy": "lru"}, ValueError, "create: policy must be one of LRU.*'lru'"),
    "a bool": ({"choices": True}, TypeError, "create: choices must be an integer, got bool"),
    "name": ({"name": 5}, TypeError, "create: name must be a str, got int"),
    "init": ({"init": jax.nn.initializers.normal()}, TypeError, "create: init must come from"),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_bad_tables_name_the_argument(name):
    """31."""
    arguments, kind, message = BAD_TABLES[name]
    with pytest.raises(kind, match=message):
        hkv.create(**{"capacity": 128, "dim": DIM} | arguments)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_type_of_rows_can_be_named(dtype):
    """As JAX and Flax take it: of tables, of layers and of optimizer rows."""
    table = hkv.create(128, DIM, dtype=dtype)
    assert table.dtype == np.dtype(dtype) == hkv.create(128, DIM, dtype=table.dtype).dtype
    table = hkv.optim.adam(0.1, state_dtype=dtype).init(table)
    assert {name: leaf.dtype for name, leaf in table.optimizer.rows.items()} == {
        "mu": np.dtype(dtype),
        "nu": np.dtype(dtype),
    }
    layer = hkv.linen.Embed(128, DIM, param_dtype=dtype)
    assert layer.init(jax.random.key(0), KEYS)["tables"]["table"].dtype == np.dtype(dtype)
    assert hkv.nnx.Embed(128, DIM, param_dtype=dtype).table.get_value().dtype == np.dtype(dtype)
    assert hkv.TableConfig("a", 128, DIM, dtype=dtype).dtype == np.dtype(dtype)


def test_custom_scores_are_required_and_checked():
    """22, 31."""
    table = hkv.create(128, DIM, policy=hkv.Policy.CUSTOM)
    for call in (
        lambda: hkv.find_or_insert(table, KEYS),
        lambda: hkv.find(table, KEYS, touch=True),
    ):
        with pytest.raises(ValueError, match=r"scores are needed under Policy\.CUSTOM"):
            call()
    with pytest.raises(ValueError, match="scores are unsigned, got -3"):
        hkv.find_or_insert(table, KEYS, scores=np.array([1, 2, -3, 4], np.int32))
    for wrong in (np.ones(4, np.float32), np.ones(4, bool)):
        with pytest.raises(TypeError, match=rf"scores must be integers.*{wrong.dtype}: round"):
            hkv.find_or_insert(table, KEYS, scores=wrong)
    for kind in (np.int64, np.uint64):
        wide = np.array([1, 2, 3, 4], kind)
        assert int(hkv.find_or_insert(table, KEYS, scores=wide)[1].counts.inserted) == 4
        if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
            continue
        message = rf"scores are a NumPy {wide.dtype} array.*17179869184.*Keys\.from_numpy"
        with pytest.raises(TypeError, match=message):
            hkv.find_or_insert(table, KEYS, scores=wide << kind(32))
    with pytest.raises(ValueError, match=r"scores must have the keys' shape \[4\], got \[3\]"):
        hkv.find_or_insert(table, KEYS, scores=np.ones(3, np.uint32))


def test_a_native_call_that_does_not_fit_names_the_operand_while_tracing():
    """31: shapes and types of native calls come from their signatures."""
    index = hkv.create(256, DIM, name="ads").index
    operands = [index.clock, index.digests, index.keys, KEYS.words, jnp.ones(4, jnp.bool_)]
    for number, wrong, message in (
        (
            2,
            index.keys[:1],
            r"find_slots: keys must be uint32\[2, 128, 2\].*got uint32\[1, 128, 2\]",
        ),
        (4, jnp.ones(3, jnp.bool_), r"find_slots: valid must be bool\[4\].*got bool\[3\]"),
        (4, jnp.ones(4, jnp.int32), r"find_slots: valid must be bool\[4\].*got int32\[4\]"),
    ):
        changed = [*operands[:number], wrong, *operands[number + 1 :]]
        with pytest.raises(TypeError, match=message):
            jax.eval_shape(lambda *xs: _ffi.call("find_slots", *xs, choices=1), *changed)


def test_numpy_integers_make_the_table_that_they_say():
    """31: small integer types do not overflow on the way."""
    assert hkv.create(np.uint8(200), np.int16(4), seed=np.uint64(2**63 + 1)).capacity == 256


def test_keys_are_indexed_iterated_and_counted_by_their_own_axes():
    """An index never reaches the words."""
    keys = hkv.Keys.from_numpy(np.arange(6).reshape(3, 2))
    np.testing.assert_array_equal(keys[..., 0].to_numpy(), [0, 2, 4])
    assert [row.to_numpy().tolist() for row in keys] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(TypeError, match="no length"):
        len(keys[0, 0])


def test_a_nan_fill_compiles_once_and_keeps_its_bits():
    """30: NaN is not equal to itself, its bits are."""
    table = hkv.create(128, DIM)
    for fill in (float("nan"), -0.0):
        rows = [np.asarray(hkv.find(table, KEYS, fill=fill)[1].values) for _ in range(2)]
        assert (rows[0].view(np.uint32) == np.float32(fill).view(np.uint32)).all()


@pytest.mark.parametrize("order", [(0.0, -0.0), (-0.0, 0.0)])
@pytest.mark.parametrize("is_jitted", [True, False])
def test_zeros_of_either_sign_are_different_programs(order, is_jitted):
    """5, 30: what is static is compared in bits, whichever zero was traced first."""
    jax.clear_caches()
    _ffi._eager.cache_clear()

    def rows_of(zero):
        table = hkv.create(128, DIM, init=hkv.initializers.constant(zero))
        missing = hkv.find(table, KEYS, fill=zero)[1].values
        return missing, hkv.find_or_insert(table, KEYS)[1].values

    with jax.disable_jit(not is_jitted):
        both = [rows_of(zero) for zero in order]
        both += jax.jit(lambda: [rows_of(zero) for zero in order])()  # in one program
    for zero, rows in zip(2 * order, both, strict=True):
        for each in rows:
            assert (np.signbit(each) == np.signbit(zero)).all()
    nan = hkv.initializers.constant(float("nan"))
    assert nan == hkv.initializers.constant(float("nan")) != hkv.initializers.zeros()


def test_initial_rows_do_not_read_the_table():
    """30: they can stand anywhere in a donated step."""

    def step(table, keys):
        rows = hkv.initial_rows(table, keys)
        table, result = hkv.find_or_insert(table, keys)
        return table, rows - result.values

    table = make_table(1024)
    hkv.testing.assert_no_table_copies(step, table, KEYS)
    assert not np.asarray(jax.jit(step)(table, KEYS)[1]).any()


def test_repr_says_what_a_table_is_in_one_line_without_its_arrays():
    """Section 3 of the contract with users: one line, no device."""
    text = "Table('ads', capacity=128, dim=8, dtype=bfloat16, policy=LFU, choices=2, bytes="
    table = hkv.create(100, DIM, dtype=jnp.bfloat16, policy=hkv.Policy.LFU, choices=2, name="ads")
    shapes = jax.eval_shape(lambda: table)
    assert repr(table).startswith(text) and "\n" not in repr(table)
    assert repr(shapes) == repr(table)
    for leaf in (None, np.dtype("int8"), (8,), True):
        assert "Table(" in repr(jax.tree.map(lambda _, leaf=leaf: leaf, table))
