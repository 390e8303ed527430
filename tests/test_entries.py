"""Entries that leave a table and come back: exported by key, evicted, given back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from many_devices import assert_same_bits, entries_of

import jax_hkv as hkv
from jax_hkv import sharding
from jax_hkv.testing import assert_no_table_copies

DIM = 4
OPTIMIZERS = {
    "none": None,
    "adam": hkv.optim.adam(0.1),
    "rowwise_adagrad": hkv.optim.rowwise_adagrad(0.1),
    "rowwise_adam": hkv.optim.rowwise_adam(0.1),
    "optax": hkv.optim.sparse(optax.adam(0.1), count_per_row=True),
}


def made(capacity, optimizer="adam", **options):
    table = hkv.create(capacity, DIM, **options)
    opt = OPTIMIZERS[optimizer]
    return table if opt is None else opt.init(table)


def trained(table, keys, optimizer="adam"):
    """A table after an update of the keys."""
    table, found = hkv.find_or_insert(table, keys)
    if OPTIMIZERS[optimizer] is None:
        return table
    return OPTIMIZERS[optimizer].update(table, found, 0.5 * found.values)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("choices", [1, 2])
def test_what_is_exported_by_key_makes_the_same_entries_elsewhere(choices, optimizer, rng):
    """Scores, rows and optimizer rows in every bit; only of the keys that are asked for."""
    ids = rng.permutation(2000)[:300].astype(np.int32)
    table = trained(made(1024, optimizer, choices=choices), ids, optimizer)
    asked = rng.permutation(np.concatenate([ids[:200], ids[:50], np.arange(3000, 3100)]))
    after, entries = jax.jit(hkv.export_keys, donate_argnums=0)(table, asked.astype(np.int32))
    present = [int(key) for key in dict.fromkeys(asked.tolist()) if key < 3000]
    assert int(entries.count) == 200 and entries.keys.shape == asked.shape
    assert entries.keys.to_numpy()[:200].tolist() == present
    other, result = hkv.import_batch(made(8192, optimizer), entries)
    assert int(result.counts.inserted) == 200
    assert (np.asarray(result.status)[200:] == hkv.Status.MISSING).all()
    whole, part = entries_of(after), entries_of(other)
    kept = np.isin(whole.keys, part.keys)
    for name in ("keys", "scores", "values", "optimizer"):
        chosen = jax.tree.map(lambda leaf: leaf[kept], getattr(whole, name))
        assert_same_bits(getattr(part, name), chosen)


def test_entries_overwrite_those_that_are_there(rng):
    ids = np.arange(10, dtype=np.int32)
    table, other = (trained(made(128), keys) for keys in (ids, ids[5:]))
    other = trained(other, ids[5:])
    table, entries = hkv.export_keys(table, ids)
    other, result = hkv.import_batch(other, entries)
    assert [int(n) for n in result.counts] == [10, 5, 5, 0, 0, 0]
    assert_same_bits(entries_of(other)[:4], entries_of(table)[:4])


def test_masked_entries_and_those_behind_the_count_are_left_out():
    table = trained(made(128), np.arange(10, dtype=np.int32))
    entries = hkv.export_batch(table, 0, 128)
    other, _ = hkv.import_batch(made(128), entries, valid=np.arange(128) % 2 == 0)
    assert int(hkv.size(other)) == 5
    other, _ = hkv.import_batch(made(128), entries._replace(count=np.int32(3)))
    assert sorted(entries_of(other).keys.tolist()) == sorted(entries.keys.to_numpy()[:3].tolist())


def test_what_import_evicts_and_refuses_is_told():
    """Conservation, under LRU: the lowest scores go, and a lower one is refused."""
    table = trained(made(128), np.arange(128, dtype=np.int32))
    table = trained(table, np.arange(64, dtype=np.int32))
    _, entries = hkv.export_keys(table, np.arange(32, dtype=np.int32))
    words = entries.scores.words.at[:16, 0].set(0)
    strangers = hkv.Keys.from_numpy(np.arange(1000, 1032))
    entries = entries._replace(keys=strangers, scores=hkv.Keys(words))
    after, result = hkv.import_batch(table, entries, return_evicted=True)
    assert [int(n) for n in result.counts] == [32, 0, 16, 16, 16, 0]
    assert (
        np.asarray(result.status).tolist()
        == [int(hkv.Status.REFUSED)] * 16 + [int(hkv.Status.EVICTED)] * 16
    )
    gone = result.evicted.keys.to_numpy()[: int(result.evicted.count)]
    assert len(gone) == 16 and (gone >= 64).all() and (gone < 128).all()
    back, result = hkv.import_batch(made(1024), result.evicted)
    before = entries_of(table)
    kept = np.isin(before.keys, gone)
    assert_same_bits(entries_of(back).values, before.values[kept])
    assert int(after.clock[0]) == int(table.clock[0]) + 1


@pytest.mark.parametrize(
    ("offset", "count"),
    [(0, 256), (0, 0), (256, 7), (-3, 10), (-10, 10), (250, 100), (64, 100), (-(2**31), 5)],
)
def test_an_export_counts_the_entries_of_its_slots(offset, count):
    """Slots before the first one and behind the last have none."""
    table = trained(made(256), np.arange(100, dtype=np.int32))
    occupied = np.asarray(table.digests).reshape(-1) != 0
    slots = np.arange(offset, offset + count)
    slots = slots[(slots >= 0) & (slots < 256)]
    slots = slots[occupied[slots]]
    entries = jax.jit(hkv.export_batch, static_argnums=2)(table, np.int32(offset), count)
    assert int(entries.count) == len(slots) and entries.keys.shape == (count,)
    keys = np.asarray(table.keys).reshape(-1, 2)[slots]
    np.testing.assert_array_equal(np.asarray(entries.keys.words)[: len(slots)], keys)
    assert not np.asarray(entries.keys.words)[len(slots) :].any()


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("size", [0, 1, 40, 300])
def test_evicted_entries_are_counted(size, choices):
    table = trained(made(128, choices=choices), np.arange(128, dtype=np.int32))
    before = set(entries_of(table).keys.tolist())
    ids = np.arange(1000, 1000 + size, dtype=np.int32)
    table, result = hkv.insert_and_evict(table, ids, np.ones((size, DIM), np.float32))
    gone = result.evicted.keys.to_numpy()[: int(result.evicted.count)].tolist()
    assert set(gone) == before - set(entries_of(table).keys.tolist())
    assert len(gone) == len(set(gone)) == int(result.counts.evicted) == min(size, 128)


def second_tier(cache, store, ids):
    """Ids get a place in the cache; what had to go is in the store, what was there is back."""
    cache, found = hkv.find_or_insert(cache, ids, return_evicted=True)
    is_new = hkv.is_new(found.status)
    store, back = hkv.export_keys(store, ids, valid=is_new)
    store, kept = hkv.import_batch(store, found.evicted)
    cache, _ = hkv.import_batch(cache, back)
    return cache, store, (found.counts, kept.counts)


@pytest.mark.parametrize("policy", [hkv.Policy.LRU, hkv.Policy.LFU, hkv.Policy.EPOCH_LRU])
@pytest.mark.parametrize("choices", [1, 2])
def test_a_small_table_before_a_large_one_trains_as_one_large_table(policy, choices, rng):
    """Rows and optimizer rows in every bit, with most entries not in the small table."""
    opt = OPTIMIZERS["adam"]

    @jax.jit(donate_argnums=(0, 1))
    def step(cache, store, ids):
        cache, store, counts = second_tier(cache, store, ids)
        cache, found = hkv.find_or_insert(cache, ids)
        return opt.update(cache, found, 0.5 * found.values), store, (counts, found.counts)

    @jax.jit(donate_argnums=0)
    def plain(table, ids):
        table, found = hkv.find_or_insert(table, ids)
        return opt.update(table, found, 0.5 * found.values)

    cache, store, one = made(512, policy=policy, choices=choices), made(8192), made(8192)
    batches = [rng.integers(0, 2000, 160).astype(np.int32) for _ in range(60)]
    assert_no_table_copies(step, cache, store, batches[0])
    evicted = 0
    for ids in batches:
        cache, store, ((counts, kept), of_step) = step(cache, store, ids)
        one = plain(one, ids)
        assert int(counts.refused) == int(kept.refused) == int(kept.evicted) == 0
        assert int(of_step.hits) == int(of_step.unique)
        evicted += int(counts.evicted)
    assert evicted > 1000
    held, behind, whole = map(entries_of, (cache, store, one))
    newest = sharding.join_entries(
        [
            part._replace(scores=np.full_like(part.scores, rank), policy=0, counters=None)
            for rank, part in enumerate((behind, held))
        ]
    )
    both, _ = sharding.import_entries(None, made(8192, policy=hkv.Policy(0)), newest)
    both = entries_of(both)
    for name in ("keys", "values", "optimizer", "shared"):
        assert_same_bits(getattr(both, name), getattr(whole, name))


@pytest.mark.parametrize("policy", hkv.Policy)
def test_an_entry_of_joined_exports_is_that_of_the_later_one(policy):
    """Also where it has a lower score, having left and come back in between."""
    table = made(1024, policy=policy)
    scored = policy is hkv.Policy.CUSTOM

    def write(table, ids, row, score):
        rows = np.full((len(ids), DIM), row, np.float32)
        given = {"scores": np.full(len(ids), score, np.uint32)} if scored else {}
        return hkv.insert_or_assign(table, ids, rows, **given)[0]

    ids = np.arange(100, dtype=np.int32)
    for _ in range(3):
        table = write(table, ids, 1.0, 9)
    earlier = sharding.export_entries(table)
    table, _ = hkv.erase(table, ids[:50])
    table = write(table, ids[:20], 2.0, 5)
    later = sharding.export_entries(table)
    for parts in ([earlier, later], [later, earlier], [later, earlier, later]):
        joined = sharding.join_entries(parts)
        whole, counts = sharding.import_entries(None, made(1024, policy=policy), joined)
        assert int(counts.inserted) == 100  # nothing tells that 30 have left
        own = sharding.export_entries(hkv.erase(whole, ids[20:50])[0])
        for name in ("keys", "scores", "values"):
            order, expected = np.argsort(own.keys), np.argsort(later.keys)
            assert_same_bits(getattr(own, name)[order], getattr(later, name)[expected])


TABLE = trained(made(128), np.arange(10, dtype=np.int32))
ENTRIES = hkv.export_batch(TABLE, 0, 16)
WRONG = {
    "no entries": (
        lambda: hkv.import_batch(TABLE, sharding.export_entries(TABLE)),
        TypeError,
        "entries must be jax_hkv.Entries, .* got Exported: .*sharding.import_entries",
    ),
    "rows of another width": (
        lambda: hkv.import_batch(hkv.create(128, 8), ENTRIES._replace(optimizer={})),
        ValueError,
        r"like the table's, values float32\[n, 8\], optimizer \{\}, got values float32\[n, 4\]",
    ),
    "no optimizer rows": (
        lambda: hkv.import_batch(TABLE, ENTRIES._replace(optimizer={})),
        ValueError,
        r"entries must have rows and optimizer rows like the table's, .*'mu'.* got .*\{\}",
    ),
    "optimizer rows too many": (
        lambda: hkv.import_batch(hkv.create(128, DIM), ENTRIES),
        ValueError,
        r"one without an optimizer takes entries\._replace\(optimizer=\{\}\)",
    ),
    "fewer rows": (
        lambda: hkv.import_batch(TABLE, ENTRIES._replace(values=ENTRIES.values[:3])),
        ValueError,
        r"as many keys, scores and rows, got leading axes of \[3, 16\]",
    ),
    "no scores": (
        lambda: hkv.import_batch(TABLE, ENTRIES._replace(scores=None)),
        TypeError,
        r"entries\.scores must be jax_hkv\.Keys, got NoneType: .*from_numpy",
    ),
    "keys of NumPy": (
        lambda: hkv.import_batch(TABLE, ENTRIES._replace(keys=ENTRIES.keys.to_numpy())),
        TypeError,
        r"entries\.keys must be jax_hkv\.Keys, got ndarray",
    ),
    "optimizer rows that are none": (
        lambda: hkv.import_batch(TABLE, ENTRIES._replace(optimizer=None)),
        TypeError,
        r"optimizer rows as a dict of arrays, \{\} for none, got .* and NoneType",
    ),
    "an optimizer row that is none": (
        lambda: hkv.import_batch(TABLE, ENTRIES._replace(optimizer={"mu": 1})),
        TypeError,
        r"optimizer rows as a dict of arrays, \{\} for none, got .*\[16, 4\] and int",
    ),
    "no count": (
        lambda: hkv.import_batch(TABLE, ENTRIES._replace(count=None)),
        TypeError,
        r"import_batch: entries\.count must be one integer, or one for each part, got NoneType",
    ),
    "part of an entry": (
        lambda: hkv.import_batch(TABLE, ENTRIES._replace(count=2.5)),
        TypeError,
        r"entries\.count must be one integer, or one for each .* of the 16 entries, got float",
    ),
    "counts of parts that are not equal": (
        lambda: hkv.import_batch(TABLE, ENTRIES._replace(count=np.array([1, 2, 3]))),
        TypeError,
        r"entries\.count must be one integer, or one .* of the 16 entries, got int.*\[3\]",
    ),
    "fewer scores": (
        lambda: hkv.import_batch(TABLE, ENTRIES._replace(scores=ENTRIES.scores[:3])),
        ValueError,
        r"leading axes of \[3, 16\]",
    ),
    "a mask of another size": (
        lambda: hkv.import_batch(TABLE, ENTRIES, valid=np.ones(3, bool)),
        TypeError,
        r"import_batch: valid must be bool\[16\]",
    ),
    "ids that are none": (
        lambda: hkv.export_keys(TABLE, np.ones(3)),
        TypeError,
        "export_keys: keys must hold integers",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_entries_is_named(name):
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        call()


def test_reading_entries_changes_nothing():
    """Outside a trace the very table comes back."""
    before = jax.tree.map(np.array, TABLE)
    after, _ = hkv.export_keys(TABLE, np.arange(20, dtype=np.int32))
    assert after is TABLE
    assert_same_bits(TABLE, before)


@pytest.mark.parametrize(
    "which",
    [
        np.ones(2, bool),
        np.zeros(0, bool),
        np.array([[0]]),
        [3],
        [-1],
        np.array([0.0]),
        "all",
        np.ones((3, 1), bool),
    ],
    ids=str,
)
def test_entries_that_cannot_be_selected_are_named(which):
    table, _ = hkv.find_or_insert(hkv.create(128, 2), np.arange(3, dtype=np.int32))
    exported = sharding.export_entries(table)
    with pytest.raises(
        ValueError, match=r"select: which must be a mask, bool\[3\], or places below"
    ):
        exported.select(which)


def test_a_mask_that_is_masked_selects_nothing():
    table, _ = hkv.find_or_insert(hkv.create(128, 2), np.arange(3, dtype=np.int32))
    with pytest.raises(TypeError, match="Exported.select: which must not be a masked array"):
        sharding.export_entries(table).select(np.ma.masked_array([0, 1], mask=[False, True]))


def test_selected_entries_keep_all_that_they_have(rng):
    opt = hkv.optim.adam(0.1)
    table, result = hkv.find_or_insert(opt.init(hkv.create(256, 3)), rng.integers(0, 99, 60, "i4"))
    table = opt.update(table, result, result.values)
    exported = sharding.export_entries(table)
    order = np.argsort(-exported.scores.astype(np.int64), kind="stable")
    for which in (order, exported.keys % 2 == 0, [], np.array([]), range(0), order[:5].tolist()):
        own = exported.select(which)
        places = np.arange(len(exported.keys))[np.asarray(which, None if len(which) else np.int64)]
        for name in ("keys", "scores", "values"):
            np.testing.assert_array_equal(getattr(own, name), getattr(exported, name)[places])
        for name, leaf in exported.optimizer.items():
            np.testing.assert_array_equal(own.optimizer[name], leaf[places])
        assert own[4:] == exported[4:]


@pytest.mark.parametrize(("scores", "which"), [((9, 3), 0), ((3, 9), 1), ((3, 3), 1)])
def test_of_several_entries_for_one_key_the_highest_or_the_last_one_counts(scores, which):
    table, _ = hkv.insert_or_assign(
        hkv.create(128, 1), np.array([5], np.int32), np.ones((1, 1), np.float32)
    )
    one = sharding.export_entries(table)
    rows = np.array([[1.0], [2.0]], np.float32)
    both = one._replace(
        keys=np.repeat(one.keys, 2), scores=np.array(scores, np.uint64), values=rows
    )
    filled, counts = sharding.import_entries(None, hkv.create(128, 1), both)
    assert (int(counts.inserted), int(counts.unique)) == (1, 1)
    entries = sharding.export_entries(filled)
    assert (entries.values.item(), entries.scores.item()) == (which + 1, max(scores))


def test_what_is_no_table_comes_in_memory_of_its_own():
    state, fresh = {"seen": np.arange(4.0)}, {"seen": np.zeros(4)}
    moved, _ = sharding.reshard(state, fresh)
    moved["seen"] += 1
    assert state["seen"].tolist() == [0, 1, 2, 3]


def test_leaves_of_another_type_are_named():
    state, fresh = {"seen": jnp.ones(2, jnp.float32)}, {"seen": jnp.zeros(2, jnp.int32)}
    with pytest.raises(ValueError, match=r"at seen, float32\[2\], got int32\[2\]"):
        sharding.reshard(state, fresh)
