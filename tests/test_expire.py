"""Time to live: entries that were not touched for some epochs."""

from __future__ import annotations

import contextlib
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import U32_MAX

import jax_hkv as hkv

EPOCH_POLICIES = ("EPOCH_LRU", "EPOCH_LFU")


@contextlib.contextmanager
def warnings_of(logger):
    """The texts that a logger writes."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger(logger).addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger(logger).removeHandler(handler)


class Unhashable:
    """A predicate for which no program can be kept."""

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __call__(self, keys, scores, rows):
        return scores.high == 0


def numbers(*ids):
    return hkv.Keys.from_numpy(np.array(ids, np.int64))


@pytest.mark.parametrize("policy", EPOCH_POLICIES)
def test_expiry_erases_what_the_oracle_says(rng, twin, policy):
    """Epochs that go forwards, jump and go back; the epochs are traced in one program."""
    both = twin(512, 2, policy=policy)
    total, traces = 0, []

    @functools.partial(jax.jit, donate_argnums=0)
    def expire(table, epochs):
        traces.append(1)
        return hkv.expire(table, epochs)

    epochs_of = {0: 1, 1: 0, 2: 1, 9: 5, 10: U32_MAX, 4: 0, U32_MAX: 5, 11: 2, 12: 0}
    for epoch, epochs in epochs_of.items():
        both.advance_epoch(epoch)
        both.find_or_insert(rng.integers(0, 900, 150).astype(np.uint64))
        both.find(rng.integers(0, 900, 50).astype(np.uint64), touch=True)

        def is_old(keys, scores, values, epoch=epoch, epochs=epochs):
            ages = np.int64(epoch) - (scores >> np.uint64(32)).astype(np.int64)
            return ages > epochs

        both.table, erased = expire(both.table, jnp.uint32(epochs))
        both.compare("expire", erased, both.oracle.erase_if(is_old))
        total += int(erased)
    assert len(traces) == 1 and total > 0


@pytest.mark.parametrize("policy", EPOCH_POLICIES)
def test_a_part_of_a_table_expires_as_the_oracle_says(rng, twin, policy):
    """What is old and meant goes; the numbers that say what is meant are traced."""
    both = twin(512, 2, policy=policy)
    total, traces = 0, []

    @functools.partial(jax.jit, donate_argnums=0)
    def expire(table, epochs, limit):
        traces.append(1)
        return hkv.expire(table, epochs, where=lambda keys, scores, rows: hkv.less(keys, limit))

    for epoch, epochs, limit in (
        (1, 0, 400),
        (9, 5, 900),
        (4, 0, 500),
        (U32_MAX, 0, 0),
        (12, 2, 700),
    ):
        both.advance_epoch(epoch)
        both.find_or_insert(rng.integers(0, 900, 150).astype(np.uint64))

        def is_meant(keys, scores, values, epoch=epoch, epochs=epochs, limit=limit):
            ages = np.int64(epoch) - (scores >> np.uint64(32)).astype(np.int64)
            return (ages > epochs) & (keys < limit)

        both.table, erased = expire(both.table, jnp.uint32(epochs), numbers(limit)[0])
        both.compare("expire", erased, both.oracle.erase_if(is_meant))
        total += int(erased)
    assert len(traces) == 1 and total > 0 and int(hkv.size(both.table)) > 100


def test_each_table_of_a_fused_group_has_a_time_to_live_of_its_own():
    tables = [
        hkv.TableConfig(name, 256, 2, policy=hkv.Policy.EPOCH_LRU) for name in ("users", "items")
    ]
    features = [hkv.Feature("user", "users"), hkv.Feature("item", "items")]
    collection = hkv.Collection(tables, features)
    (group,) = collection.groups
    tables = collection.create()
    for first in (0, 10, 20):  # ten users and ten items an epoch
        ids = np.arange(first, first + 10, dtype=np.int32)
        given = {"users": ids, "items": ids}
        tables, _ = collection.on_tables(hkv.find_or_insert, tables, given)
        tables[group.name] = hkv.advance_epoch(tables[group.name])
    expire = jax.jit(
        lambda table: hkv.expire(table, 2, where=lambda keys, *_: group.ids("items", keys)[1]),
        donate_argnums=0,
    )
    hkv.testing.assert_no_table_copies(expire, tables[group.name])
    tables[group.name], erased = expire(tables[group.name])
    assert int(erased) == 10
    assert {name: int(own) for name, own in collection.sizes(tables).items()} == {
        "users": 30,
        "items": 20,
    }
    ids = np.arange(30, dtype=np.int32)
    left = hkv.contains(tables[group.name], group.keys("items", ids))[1]
    assert left.tolist() == [False] * 10 + [True] * 20


def test_an_entry_lives_as_long_as_it_is_touched():
    table = hkv.create(128, 2, policy=hkv.Policy.EPOCH_LFU)
    table, _ = hkv.find_or_insert(table, numbers(1, 2, 3))
    for _ in range(3):
        table = hkv.advance_epoch(table)
        table, _ = hkv.find(table, numbers(2), touch=True)
        table, _ = hkv.find(table, numbers(3))  # a look is no touch
    same, erased = hkv.expire(table, 3)
    assert int(erased) == 0 and int(hkv.size(same)) == 3
    table, erased = hkv.expire(table, jnp.int32(2))
    assert int(erased) == 2
    assert hkv.contains(table, numbers(1, 2, 3))[1].tolist() == [False, True, False]


def test_expiry_copies_no_table_and_compiles_once_outside_jit():
    table = hkv.create(384, 3, policy=hkv.Policy.EPOCH_LRU)
    hkv.testing.assert_no_table_copies(hkv.expire, table, jnp.int32(3))
    table, _ = hkv.expire(table, 0)
    with jax.log_compiles(), warnings_of("jax") as records:
        hkv.expire(table, 1)
    assert [text for text in records if "Compiling" in text] == []
    with jax.log_compiles(), warnings_of("jax") as records:
        hkv.expire(hkv.create(384, 5, policy=hkv.Policy.EPOCH_LRU), 1)
    assert [text for text in records if "Compiling" in text] != []


def test_rows_are_read_only_for_a_predicate_that_looks_at_them():
    table = hkv.create(384, 3, policy=hkv.Policy.EPOCH_LRU)
    by_key = lambda keys, scores, rows: hkv.less(keys, scores)  # noqa: E731
    by_row = lambda keys, scores, rows: rows[:, 0] > 0  # noqa: E731
    by_both = jax.jit(lambda keys, scores, rows: (rows[:, 0] > 0) & hkv.less(keys, scores))
    calls = {
        "expire": (lambda table: hkv.expire(table, 3), False),
        "erase_if by key": (lambda table: hkv.erase_if(table, by_key), False),
        "size_if by key": (lambda table: hkv.size_if(table, by_key), False),
        "expire by key": (lambda table: hkv.expire(table, 3, where=by_key), False),
        "expire by row": (lambda table: hkv.expire(table, 3, where=by_row), True),
        "erase_if by row": (lambda table: hkv.erase_if(table, by_row), True),
        "size_if by both": (lambda table: hkv.size_if(table, by_both), True),
    }
    for name, (call, reads) in calls.items():
        assert ("gather_rows" in str(jax.make_jaxpr(call)(table))) == reads, name


@pytest.mark.parametrize("policy", ["LRU", "LFU", "CUSTOM"])
def test_a_policy_without_epochs_is_named_with_the_remedy(policy):
    table = hkv.create(128, 2, policy=hkv.Policy[policy])
    with pytest.raises(ValueError, match=rf"expire: .* got {policy}, .* or use erase_if"):
        hkv.expire(table, 1)


def test_epochs_that_are_no_count_are_named():
    table = hkv.create(128, 2, policy=hkv.Policy.EPOCH_LRU)
    with pytest.raises(ValueError, match="expire: epochs must be from 0 to"):
        hkv.expire(table, -1)
    with pytest.raises(TypeError, match="expire: epochs must be an integer"):
        hkv.expire(table, 1.5)
    with pytest.raises(
        TypeError, match=r"expire: epochs must be one integer, got float(32|64)\[\]"
    ):
        jax.jit(hkv.expire)(table, 1.5)


def test_what_is_wrong_with_the_part_that_is_to_expire_is_named():
    table = hkv.create(128, 2, policy=hkv.Policy.EPOCH_LRU)
    wrong: list = [
        (np.ones(128, bool), "expire: where must be a function of .* got ndarray"),
        (Unhashable(), "expire: where must be hashable, .* got a Unhashable"),
        (lambda *_: None, r"expire: where must return bool\[128\], .* got None"),
        (lambda keys, *_: keys.low, r"expire: where must return bool\[128\], .* got uint32\[128\]"),
    ]
    for where, message in wrong:
        with pytest.raises(TypeError, match=message):
            hkv.expire(table, 1, where=where)


@pytest.mark.parametrize("got", [None, True])
def test_a_predicate_that_returns_no_array_is_named(got):
    """One that prints, say, returns None."""
    table = hkv.create(128, 2)
    with pytest.raises(TypeError, match=r"predicate must return bool\[128\], .* got (None|bool)"):
        hkv.erase_if(table, lambda keys, scores, rows: got)


def test_a_predicate_takes_a_number_that_changes_and_is_compiled_once():
    """As the docstring of erase_if says: the number is an argument of a jitted function."""
    traced = []

    def older(table, oldest):
        traced.append(oldest)
        return hkv.erase_if(table, lambda keys, scores, rows: hkv.less(scores, oldest))

    erase_older = jax.jit(older, donate_argnums=0)
    table = hkv.create(128, 2)
    for number in range(1, 11):  # scored by their number
        table, _ = hkv.find_or_insert(table, np.array([number], np.int32))
    left = []
    for oldest in (4, 9):
        table, erased = erase_older(table, numbers(oldest)[0])
        left.append((int(erased), int(hkv.size(table))))
    assert left == [(3, 7), (5, 2)]
    assert len(traced) == 1


def test_a_number_of_64_bits_goes_through_jit_as_keys():
    """As the docstrings of erase_if and find_or_insert say: a time in milliseconds."""
    now = 1_790_000_000_000
    insert = jax.jit(lambda table, ids, time: hkv.find_or_insert(table, ids, scores=time)[0])
    erase_older = jax.jit(
        lambda table, oldest: hkv.erase_if(
            table, lambda keys, scores, rows: hkv.less(scores, oldest)
        )
    )
    table = hkv.create(128, 2, policy=hkv.Policy.CUSTOM)
    for number in (0, 1):
        time = hkv.Keys.from_numpy(now + 60_000 * number)
        table = insert(table, np.array([number], np.int32), time)
    table, erased = erase_older(table, hkv.Keys.from_numpy(now + 30_000))
    assert int(erased) == 1
    assert hkv.find(table, np.array([0, 1], np.int32))[1].found.tolist() == [False, True]


def test_a_traced_number_of_epochs_below_0_removes_nothing():
    table = hkv.create(128, 2, policy=hkv.Policy.EPOCH_LRU)
    table, _ = hkv.find_or_insert(table, np.array([5, 6], np.int32))
    expire = jax.jit(hkv.expire)
    erased = [int(expire(hkv.advance_epoch(table), jnp.int32(n))[1]) for n in (-1, 0, 1)]
    assert erased == [0, 2, 0]


def test_a_traced_epoch_is_clipped_to_those_that_there_are():
    table = hkv.create(128, 2, policy=hkv.Policy.EPOCH_LRU)
    advance = jax.jit(hkv.advance_epoch)
    assert [int(advance(table, jnp.int32(n)).epoch[0]) for n in (-1, 7)] == [0, 7]
    assert int(advance(table, jnp.uint32(2**32 - 1)).epoch[0]) == 2**32 - 1
