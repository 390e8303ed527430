"""Calls outside of jit: what a call asks of the device is one program, not an operation each."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from many_devices import assert_same_bits
from test_sharding_traffic import mesh_of

import jax_hkv as hkv

DIM = 3
SHAPES = itertools.count(1013)  # of batches that no other test has: programs are compiled anew
COMPILED = "/jax/core/compile/backend_compile_duration"
_compiled: list[str] = []


def _note(event: str, duration_secs: float, **_: str | int) -> None:
    del duration_secs
    _compiled.append(event)


@pytest.fixture(scope="module", autouse=True)
def _noted():
    jax.monitoring.register_event_duration_secs_listener(_note)
    yield


def programs(call):
    """How many programs a call had compiled."""
    _compiled.clear()
    jax.block_until_ready(call())
    return _compiled.count(COMPILED)


def made(kind, ids):
    return {
        "keys": lambda: jax.device_put(hkv.Keys.from_numpy(ids)),
        "host keys": lambda: hkv.Keys.from_numpy(ids),
        "int32": lambda: jnp.asarray(ids, jnp.int32),
        "numpy": lambda: ids,
    }[kind]()


CALLS = {
    "find": lambda table, keys, *_: hkv.find(table, keys),
    "find, filled": lambda table, keys, *_: hkv.find(table, keys, fill="initial"),
    "find, touched": lambda table, keys, *_: hkv.find(table, keys, touch=True),
    "contains": lambda table, keys, *_: hkv.contains(table, keys),
    "initial_rows": lambda table, keys, *_: hkv.initial_rows(table, keys),
    "find_or_insert": lambda table, keys, *_: hkv.find_or_insert(table, keys),
    "find_or_insert, values": lambda table, keys, rows, _: hkv.find_or_insert(
        table, keys, values=rows, return_evicted=True
    ),
    "insert_or_assign": lambda table, keys, rows, _: hkv.insert_or_assign(table, keys, rows),
    "insert_and_evict": lambda table, keys, rows, _: hkv.insert_and_evict(table, keys, rows),
    "accum_or_assign": hkv.accum_or_assign,
    "assign": lambda table, keys, rows, _: hkv.assign(table, keys, rows),
    "erase": lambda table, keys, *_: hkv.erase(table, keys),
    "unique": lambda table, keys, *_: hkv.unique(keys),
    "equal": lambda table, keys, *_: hkv.equal(keys, 7),
}


@pytest.mark.parametrize(
    ("call", "kind"),
    [("find", kind) for kind in ("keys", "host keys", "numpy")]
    + [(call, "int32") for call in CALLS],
)
def test_a_call_is_one_program(call, kind):
    shape = (next(SHAPES), 2)
    ids = np.arange(2 * shape[0], dtype=np.int64).reshape(shape)
    rows = jnp.ones((*shape, DIM), jnp.float32)
    believed = jnp.ones(shape, jnp.bool_)
    table, keys = hkv.create(128, DIM), made(kind, ids)
    converted = 1 if call == "equal" else 0
    assert programs(lambda: CALLS[call](table, keys, rows, believed)) == 1 + converted
    assert programs(lambda: CALLS[call](table, keys, rows, believed)) == 0


@pytest.mark.parametrize(
    ("call", "combiner", "is_jagged"),
    [
        (hkv.find_pooled, "sum", False),
        (hkv.find_pooled, "mean", True),
        (hkv.find_or_insert_pooled, "sqrtn", False),
    ],
)
def test_a_pooled_call_is_three_programs(call, combiner, is_jagged):
    """One makes the bags, one their weights, one looks up."""
    count = next(SHAPES)
    table, ids = hkv.create(128, DIM), np.arange(2 * count, dtype=np.int32)
    bags = ids.reshape(-1, 2)
    if is_jagged:
        bags = hkv.Jagged(jnp.asarray(ids), jnp.arange(count + 1, dtype=jnp.int32))
    assert programs(lambda: call(table, bags, combiner=combiner)) == 3
    assert programs(lambda: call(table, bags, combiner=combiner)) == 0


def test_tables_of_any_name_share_what_takes_long():
    """Prefetches, exports and imports: a program for each of many tables is waited for."""

    def moved(name, ids):
        cache = hkv.create(1280, DIM, name=name)
        tiers = hkv.tiered.Tiers(cache, hkv.tiered.create_store(cache, 2560))
        first = programs(lambda: None)
        for batch in (ids, ids + 10_000, ids):
            tiers, counts = hkv.tiered.prefetch(tiers, batch)
        assert int(counts.restored) > 0
        tiers, _ = hkv.tiered.import_entries(tiers, hkv.tiered.export_entries(tiers))
        assert (tiers.cache.name, tiers.store.name) == (name, name)
        return first + _compiled.count(COMPILED)

    ids = np.arange(next(SHAPES), dtype=np.int32)
    assert moved("one", ids) > 3
    assert moved("another", ids) == 0


@pytest.mark.parametrize("rates", [(None, None), (0.5, 0.25), (None, np.float32(0.5))])
def test_an_update_is_one_program_and_has_its_bits(rates, rng):
    """Beside the one of its learning rate, where that is a number of the step."""
    optimizer = hkv.optim.adam(0.1)
    options = [{"learning_rate": rate} for rate in rates]
    table = optimizer.init(hkv.create(1280, DIM))
    ids = rng.integers(0, 900, next(SHAPES)).astype(np.int32)
    table, found = hkv.find_or_insert(table, ids)
    rows = jnp.asarray(rng.normal(size=(len(ids), DIM)), jnp.float32)
    jitted = jax.jit(lambda table: optimizer.update(table, found, rows, **options[0]))
    counts = [
        programs(lambda own=own: optimizer.update(table, found, rows, **own)) for own in options
    ]
    assert counts[1] == 0 and counts[0] - 1 in (0, 1)
    assert_same_bits(optimizer.update(table, found, rows, **options[0]), jitted(table))


def test_rows_are_pooled_by_one_program():
    rows = jnp.ones((next(SHAPES), 2, DIM), jnp.float32)
    valid = jnp.ones(rows.shape[:-1], jnp.bool_)
    assert programs(lambda: hkv.pool(rows, combiner="mean", valid=valid)) == 1


PREDICATES = {
    "erase_if": lambda table, predicate: hkv.erase_if(table, predicate)[1],
    "size_if": hkv.size_if,
    "export_batch_if": lambda table, own: hkv.export_batch_if(table, own, 0, 1280).count,
    "expire": lambda table, predicate: hkv.expire(table, 0, where=predicate)[1],
}


@pytest.mark.parametrize("call", PREDICATES)
def test_a_program_of_a_predicate_goes_when_it_does(call):
    """Made anew for each call it would stay, and what it closes over, some megabytes each."""
    table = hkv.create(1280, DIM, policy=hkv.Policy.EPOCH_LRU)
    table = hkv.advance_epoch(hkv.advance_epoch(hkv.find_or_insert(table, np.arange(9))[0]))
    client = jax.devices()[0].client
    seen, kept = [], []
    for most in (3, 5, 7):
        words = jnp.array([most, 0], jnp.uint32)
        limit = hkv.Keys(words)
        forms = [
            lambda keys, scores, rows, limit=limit: hkv.less(keys, limit),
            functools.partial(lambda limit, keys, *_: hkv.less(keys, limit), limit),
        ]
        for predicate in forms:
            assert int(PREDICATES[call](table, predicate)) == most
            assert programs(lambda given=predicate: PREDICATES[call](table, given)) == 0
            seen.append(weakref.ref(predicate))
        seen.append(weakref.ref(words))
        del words, limit, forms, predicate
        gc.collect()
        kept.append(len(client.live_executables()))
    assert kept[1] == kept[2]
    assert [ref() for ref in seen] == [None] * len(seen)


def test_a_predicate_may_read_what_another_trace_has_made():
    """Of a table that is none of the trace, which a program of its own would not see again."""
    table, _ = hkv.find_or_insert(hkv.create(1280, DIM), np.arange(9, dtype=np.int32))
    limits = []

    def is_small(keys, scores, rows):
        return hkv.less(keys, limits[-1])

    for most in (3, 5):

        @jax.jit
        def count(words):
            limits.append(hkv.Keys(words))
            return hkv.size_if(table, is_small)

        assert int(count(jnp.array([most, 0], jnp.uint32))) == most


@flax.struct.dataclass
class Noted:
    of_table: hkv.Table
    notes: list[str] = flax.struct.field(pytree_node=False)


def test_the_parts_of_a_state_under_pmap_are_a_program_each():
    placement = hkv.sharding.Placement(mesh_of(2), mode="pmap")
    table = placement.create(lambda: hkv.create(next(SHAPES) * 128, DIM, seed=5))
    parts = []
    assert programs(lambda: parts.extend(placement.shards(table)) or parts) == 2
    assert_same_bits(parts, [jax.tree.map(lambda leaf, n=n: leaf[n], table) for n in range(2)])
    assert [part.values.devices() for part in parts] == [{device} for device in jax.devices()[:2]]
    assert programs(lambda: placement.shards(table)) == 0
    noted = [part.of_table for part in placement.shards(Noted(table, ["a list has no hash"]))]
    assert_same_bits(noted, parts)


class Limit:
    def is_small(self, keys, scores, rows):
        return hkv.less(keys, 4)


def test_a_method_as_a_predicate_is_compiled_once():
    """Each mention of it is another object, equal to those before it."""
    table, _ = hkv.find_or_insert(hkv.create(1280, DIM), np.arange(9, dtype=np.int32))
    limit = Limit()
    assert int(hkv.size_if(table, limit.is_small)) == 4
    assert programs(lambda: hkv.size_if(table, limit.is_small)) == 0


WRONG = {
    "row_gradients a text": ({"row_gradients": "x"}, "row_gradients must be"),
    "row_gradients an object": ({"row_gradients": object()}, "row_gradients must be"),
    "row_gradients of objects": ({"row_gradients": np.array([None])}, "row_gradients must be"),
    "result a text": ({"result": "x"}, "row_gradients must be a list, one for each result"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_no_program_takes_is_named(name):
    given, message = WRONG[name]
    optimizer = hkv.optim.adam(0.1)
    table, found = hkv.find_or_insert(optimizer.init(hkv.create(1280, DIM)), np.arange(9))
    arguments = {"result": found, "row_gradients": found.values} | given
    with pytest.raises(TypeError, match=f"optim.update: {message}"):
        optimizer.update(table, **arguments)
