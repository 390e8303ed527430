"""Behaviours 1 to 9 of the conformance list: placement and lookup."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from oracle import FOUND, INSERTED, LANES, U64_MAX

import jax_hkv as hkv

DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16]
DIMS = [1, 2, 3, 7, 16, 33, 64, 257, 1000, 1024]
SPECIAL_KEYS = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 2, 2**64 - 4]


def any_bits(rng, count, dim, dtype=np.float32):
    """Rows of any bits, so NaNs of any payload, infinities and subnormal numbers too."""
    size = np.dtype(dtype).itemsize
    return rng.integers(0, 256, (count, dim * size), np.uint8).view(dtype)


def distinct_keys(rng, count):
    """Different random keys, with every bit of their words in use."""
    return oracle.mix(rng.integers(2**63, dtype=np.uint64) + np.arange(count, dtype=np.uint64))


def all_bits(table):
    return [oracle.as_bits(np.array(leaf)) for leaf in jax.tree.leaves(table)]


@pytest.mark.parametrize("capacity", [1, 127, 128, 129, 1000, 25_837])
def test_a_capacity_is_rounded_up_to_whole_buckets(capacity, twin):
    """1: and a new table is empty."""
    table = twin(capacity, 2).table
    assert table.capacity == -(-capacity // LANES) * LANES
    assert table.capacity == table.digests.size == len(table.values)
    assert int(hkv.size(table)) == 0
    assert float(hkv.load_factor(table)) == 0
    assert not np.asarray(table.digests).any()


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(dim, np.float32) for dim in DIMS]
    + [(dim, half) for dim in (1, 7, 64, 1000) for half in DTYPES[1:]],
)
def test_rows_of_any_width_and_dtype_keep_their_bits(dim, dtype, twin, rng):
    """1: dims from 1 to 1,024, not only powers of two."""
    both = twin(300, dim, dtype=dtype, choices=2)
    keys, rows = distinct_keys(rng, 50), any_bits(rng, 50, dim, dtype)
    both.insert_or_assign(keys, rows)
    found = both.find(keys)
    assert np.array_equal(oracle.as_bits(found.values), oracle.as_bits(rows))
    assert both.table.dim == dim


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize(
    ("count", "capacity"), [(2**12, 2**17), pytest.param(2**20, 2**26, marks=pytest.mark.slow)]
)
def test_every_row_of_a_sparse_table_is_found(count, capacity, choices, twin, rng):
    """2: size, find and contains after distinct keys, a sixty-fourth of the slots."""
    both = twin(capacity, 1, choices=choices, check=False)
    keys, rows = distinct_keys(rng, count), any_bits(rng, count, 1)
    for part in np.array_split(np.arange(count), 16):
        both.insert_or_assign(keys[part], rows[part])
    both.assert_equal()
    assert both.oracle.size == count
    asked = np.concatenate([keys, distinct_keys(rng, count)])
    found = both.find(asked)
    assert found.found[:count].all()
    assert np.array_equal(oracle.as_bits(found.values[:count]), oracle.as_bits(rows))
    assert np.array_equal(both.contains(asked), found.found)


@pytest.mark.parametrize("policy", ["LRU", "LFU"])
@pytest.mark.parametrize("choices", [1, 2])
def test_inserting_the_same_keys_again_replaces_their_rows(policy, choices, twin, rng):
    """3: the size stays, and find returns the new rows."""
    both = twin(2000, 5, policy=policy, choices=choices)
    keys = distinct_keys(rng, 500)
    both.insert_or_assign(keys, any_bits(rng, 500, 5))
    size, rows = both.oracle.size, any_bits(rng, 500, 5)
    outcome = both.insert_or_assign(keys, rows)
    assert (outcome.status == FOUND).all()
    assert both.oracle.size == size
    assert np.array_equal(oracle.as_bits(both.find(keys).values), oracle.as_bits(rows))


@pytest.mark.parametrize("choices", [1, 2])
def test_erased_and_cleared_keys_can_be_inserted_again(choices, twin, rng):
    """4: erase of half halves the size, the rest stays; clear gives 0."""
    both = twin(1024, 3, choices=choices)
    keys, rows = distinct_keys(rng, 400), any_bits(rng, 400, 3)
    both.insert_or_assign(keys, rows)
    erased = both.erase(keys[::2])
    assert erased.counts.hits == both.oracle.size == 200
    assert both.contains(keys).tolist() == [False, True] * 200
    again = both.insert_or_assign(keys, rows)
    assert (again.status == np.tile([INSERTED, FOUND], 200)).all()
    assert both.oracle.size == 400
    both.clear()
    assert both.oracle.size == 0
    assert not both.contains(keys).any()
    assert (both.insert_or_assign(keys, rows).status == INSERTED).all()
    assert both.oracle.size == 400


def test_erased_entries_are_those_for_which_the_predicate_holds(twin, rng):
    """4: by key, by score and by row, at the boundaries of the 64-bit comparisons."""
    both = twin(1024, 2, policy="CUSTOM")
    keys = np.array(SPECIAL_KEYS, np.uint64)
    keys = np.unique(np.concatenate([keys, distinct_keys(rng, 300)]))
    bound = 2**63 - 1
    # It goes to the greatest key: one below 2**32 is gone before its score is asked for.
    scores = np.append(rng.permutation(keys[keys != bound]), np.uint64(bound))
    rows = rng.standard_normal((len(keys), 2)).astype(np.float32)
    both.insert_or_assign(keys, rows, scores)
    erased = [
        both.erase_if(lambda k, s, v: hkv.less(k, 2**32), lambda k, s, v: k < 2**32),
        both.erase_if(lambda k, s, v: hkv.equal(s, bound), lambda k, s, v: s == bound),
        both.erase_if(lambda k, s, v: hkv.less_equal(s, k), lambda k, s, v: s <= k),
        both.erase_if(lambda k, s, v: v[:, 1] > 0, lambda k, s, v: v[:, 1] > 0),
    ]
    assert erased[0] >= 4
    assert min(erased) > 0
    assert both.oracle.size == len(keys) - sum(erased)


@pytest.mark.parametrize("chunk", [1, 100, LANES, 1000, 2048])
def test_export_in_any_chunking_returns_every_entry_once(chunk, twin, rng):
    """5: keys, scores and rows are exact; behind the end there is nothing."""
    both = twin(512 if chunk == 1 else 2048, 3, policy="LFU", choices=2)
    keys = distinct_keys(rng, both.table.capacity // 2)
    rows = any_bits(rng, len(keys), 3)
    both.insert_or_assign(keys, rows, rng.integers(0, U64_MAX, len(keys), np.uint64))
    both.erase(keys[::3])
    parts = [both.export_batch(start, chunk) for start in range(0, both.table.capacity, chunk)]
    exported = np.concatenate([part.keys[: part.count] for part in parts])
    assert len(exported) == len(np.unique(exported)) == both.oracle.size
    assert set(exported.tolist()) == set(keys.tolist()) - set(keys[::3].tolist())
    assert both.export_batch(both.table.capacity, chunk).count == 0


@pytest.mark.parametrize("choices", [1, 2])
def test_filtered_exports_and_sizes_agree_with_a_filter_in_numpy(choices, twin, rng):
    """5: export_batch_if and size_if."""
    both = twin(1024, 2, policy="CUSTOM", choices=choices)
    keys, scores = distinct_keys(rng, 700), rng.integers(0, U64_MAX, 700, np.uint64)
    both.insert_or_assign(keys, rng.standard_normal((700, 2)).astype(np.float32), scores)
    bound = int(np.median(scores))

    def traceable(keys, scores, values):
        return hkv.less_equal(scores, bound) & (values[:, 0] > 0) & ~hkv.less(keys, 2**62)

    def in_numpy(keys, scores, values):
        return (scores <= bound) & (values[:, 0] > 0) & (keys >= 2**62)

    expected = both.oracle.export_batch(100, 500, in_numpy)
    actual = hkv.export_batch_if(both.table, traceable, 100, 500)
    both.compare("export_batch_if", actual, expected)
    assert 0 < expected.count < 500
    everywhere = both.oracle.export_batch(0, both.table.capacity, in_numpy)
    assert int(hkv.size_if(both.table, traceable)) == everywhere.count
    beyond = hkv.export_batch_if(both.table, traceable, both.table.capacity + 5, 10)
    assert int(beyond.count) == 0


@pytest.mark.parametrize("fill", [0.0, -2.5, "initial"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("choices", [1, 2])
def test_find_on_an_empty_table_fills_every_row(fill, dtype, choices, twin, rng):
    """6: also the masked ones, and every element of a wide row."""
    init = hkv.initializers.uniform(1.0, 2.0)
    both = twin(1000, 65, dtype=dtype, choices=choices, init=init, seed=9)
    keys = distinct_keys(rng, 300)
    valid = rng.random(300) < 0.8
    for touch in (False, True):
        found = both.find(keys, valid=valid, fill=fill, touch=touch)
        assert not found.found.any()
        assert (found.slots == -1).all()
        masked, absent = found.values[~valid], found.values[valid]
        assert (masked == (0 if fill == "initial" else fill)).all()
        assert (absent >= 1).all() if fill == "initial" else (absent == fill).all()


@pytest.mark.parametrize("policy", ["LRU", "CUSTOM"])
@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("capacity", [1, 1000])
def test_every_64_bit_number_is_an_ordinary_key(policy, choices, capacity, twin, rng):
    """7: the ends of the ranges, and keys that are equal in one of their words."""
    base = distinct_keys(rng, 1)[0]
    words = np.arange(20, dtype=np.uint64)
    same_low = (base & np.uint64(2**32 - 1)) | (words << np.uint64(32))
    same_high = (base & ~np.uint64(2**32 - 1)) | words
    signed = np.array([-1, -2, -3, -4, -(2**63)]).astype(np.uint64)
    keys = np.unique(np.concatenate([np.array(SPECIAL_KEYS, np.uint64), same_low, same_high]))
    keys = rng.permutation(np.union1d(keys, signed))
    scores = keys if policy == "CUSTOM" else None
    both = twin(capacity, 1, policy=policy, choices=choices)
    rows = np.arange(len(keys), dtype=np.float32)[:, None]
    assert not both.contains(keys).any()
    outcome = both.insert_or_assign(keys, rows, scores)
    assert (outcome.status == INSERTED).all()
    assert np.array_equal(both.find(keys).values, rows)
    both.erase(keys[::2])
    assert both.contains(keys).tolist() == [i % 2 == 1 for i in range(len(keys))]


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_keys_keep_all_bits_of_numpy_integers(dtype):
    """7: from NumPy and back, in any shape."""
    numbers = np.array(SPECIAL_KEYS, np.uint64).astype(dtype).reshape(2, 5)
    keys = hkv.Keys.from_numpy(numbers)
    assert keys.shape == (2, 5)
    assert np.array_equal(keys.to_numpy(), numbers.astype(np.uint64))
    assert np.array_equal(
        np.asarray(keys.words[..., 1]), numbers.astype(np.uint64) >> np.uint64(32)
    )


def test_the_missed_keys_of_a_find_are_available_in_order(twin, rng):
    """8: with their positions, from what find returns."""
    both = twin(1000, 2)
    keys, absent = distinct_keys(rng, 200), rng.random(200) < 0.4
    both.insert_or_assign(keys[~absent], any_bits(rng, int((~absent).sum()), 2))
    both.table, result = hkv.find(both.table, hkv.Keys.from_numpy(keys))
    count = int(absent.sum())
    positions = jnp.flatnonzero(~result.found, size=count)
    assert np.array_equal(np.asarray(positions), np.flatnonzero(absent))
    missed = hkv.Keys.from_numpy(keys).words[positions]
    assert np.array_equal(hkv.Keys(missed).to_numpy(), keys[absent])


def test_reads_never_change_a_bit_of_the_table(twin, rng):
    """9: find, contains, export and sizes; outside of a trace not even the object."""
    both = twin(500, 4, policy="LFU", choices=2)
    keys = distinct_keys(rng, 600)
    both.insert_or_assign(keys, any_bits(rng, 600, 4))
    before = all_bits(both.table)
    asked = hkv.Keys.from_numpy(np.concatenate([keys[:100], distinct_keys(rng, 100)]))
    read, _ = hkv.find(both.table, asked)
    assert read is both.table
    read, _ = hkv.contains(both.table, asked)
    assert read is both.table
    hkv.export_batch(both.table, 0, 100)
    hkv.export_batch_if(both.table, lambda k, s, v: v[:, 0] > 0, 0, 100)
    assert float(hkv.load_factor(both.table)) == int(hkv.size(both.table)) / both.table.capacity
    both.find(keys, fill="initial")
    both.contains(keys)
    after = all_bits(both.table)
    assert all(np.array_equal(b, a) for b, a in zip(before, after, strict=True))
