"""Ids that must go from what was exported: they are named nowhere any more."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from many_devices import entries_of

import jax_hkv as hkv
from jax_hkv import sharding

DIM = 2
SGD = hkv.optim.sgd(0.5)
IDS = np.array([5, 2**63 + 1, 2**63 + 2, 2**53, 2**53 + 1, 7], np.uint64)


def table_of(ids, capacity=256):
    return hkv.find_or_insert(SGD.init(hkv.create(capacity, DIM)), hkv.Keys.from_numpy(ids))[0]


def are_among(keys, others):
    return np.array([key in {*others.tolist()} for key in keys.tolist()], bool)


def fused(**options):
    tables = [hkv.TableConfig(name, 256, DIM) for name in ("users", "items")]
    features = [hkv.Feature(name, name) for name in ("users", "items")]
    (group,) = hkv.Collection(tables, features, **options).groups
    return group


@pytest.mark.parametrize(
    ("gone", "stay"),
    [
        (np.array([5, 7], np.int32), IDS[1:5]),
        (IDS[[1, 3]], IDS[[0, 2, 4, 5]]),  # whose neighbours are the same floats
        (IDS[[1]].astype(np.int64), IDS[[0, 2, 3, 4, 5]]),  # a negative one
        (hkv.Keys.from_numpy(IDS[:4].reshape(2, 2)), IDS[4:]),
        ([5, 5, 6], IDS[1:]),
        ([], IDS),
        (IDS, IDS[:0]),
    ],
)
def test_entries_of_some_ids_are_left_out(gone, stay):
    exported = sharding.export_entries(table_of(IDS))
    own = exported.without(gone)
    assert set(own.keys.tolist()) == set(stay.tolist())
    is_own = are_among(exported.keys, own.keys)
    assert is_own.sum() == len(stay)
    others = exported.only(gone)
    assert sorted([*others.keys.tolist(), *own.keys.tolist()]) == sorted(IDS.tolist())
    np.testing.assert_array_equal(others.values, exported.values[~is_own])
    np.testing.assert_array_equal(own.values, exported.values[is_own])
    np.testing.assert_array_equal(own.scores, exported.scores[is_own])
    assert own[4:] == exported[4:]


@pytest.mark.parametrize("bits", [{}, {"table_bits": 8}], ids=str)
def test_ids_of_a_fused_table_go_by_its_keys(bits):
    group = fused(**bits)
    table = group.create()
    for name in ("users", "items"):
        table, _ = hkv.find_or_insert(table, group.keys(name, np.arange(4, dtype=np.int32)))
    exported = sharding.export_entries(table)
    changes = sharding.export_changes(table, None)
    for call, own in (("Exported", exported), ("Changes", changes)):
        with pytest.raises(TypeError, match=rf"^{call}.without: keys must be jax_hkv.Keys.*group"):
            own.without([1, 2])
    with pytest.raises(TypeError, match=r"^Exported.only: keys must be jax_hkv.Keys.*group"):
        exported.only([1, 2])
    items = exported.only(group.keys("items", np.array([1, 2, 9], np.int32)))
    assert len(items.keys) == 2
    for own in (exported, changes.entries):
        left = own.without(group.keys("items", np.array([1, 2], np.int32)))
        after, _ = sharding.import_entries(None, group.create(), left)
        for name, expected in (("users", [1, 1, 1, 1]), ("items", [1, 0, 0, 1])):
            keys = group.keys(name, np.arange(4, dtype=np.int32))
            assert hkv.contains(after, keys)[1].tolist() == expected


def test_signed_keys_of_an_export_are_the_same_words():
    """A view of them, as recipes make for what knows no uint64; near 2^60 floats are 128 apart."""
    ids = np.arange(200) + 2**60
    exported = sharding.export_entries(table_of(ids, 1024))
    signed = exported._replace(keys=exported.keys.view(np.int64))
    for own in (exported, signed):
        assert sorted(own.without(ids[:50]).keys.tolist()) == ids[50:].tolist()
        assert sorted(own.only(ids[:50]).keys.tolist()) == ids[:50].tolist()


def test_signed_keys_of_changes_are_the_same_words():
    ids = np.arange(200) + 2**60
    table = table_of(ids, 1024)
    first = sharding.export_changes(table, None)
    table, _ = hkv.erase(table, hkv.Keys.from_numpy(ids[:80]))
    second = sharding.export_changes(table, first)
    for own in (second, second._replace(removed=second.removed.view(np.int64))):
        after = own.without(ids[75:85], erase=False)
        assert after.removed.dtype == np.uint64 and after.removed.tolist() == ids[:75].tolist()


def test_keys_that_are_no_integers_are_named():
    exported = sharding.export_entries(table_of(IDS))
    with pytest.raises(TypeError, match="Exported.without: keys must hold integers, got .*float64"):
        exported.without(np.array([5.0]))
    with pytest.raises(TypeError, match="Changes.without: erase must be True or False, got int 1"):
        sharding.export_changes(table_of(IDS), None).without([5], erase=1)


def history(ids, gone, capacity):
    """Changes of some days, on the last of which ids were erased; and the table behind them."""
    table, files = table_of(ids, capacity), [None]
    for day in range(4):
        if day == 3:
            table, _ = hkv.erase(table, hkv.Keys.from_numpy(gone))
        own = ids[~are_among(ids, gone)][day::4] if day == 3 else np.append(gone, ids[day::4])
        table, found = hkv.find_or_insert(table, hkv.Keys.from_numpy(own))
        table = SGD.update(table, found, jnp.ones_like(found.values))
        files.append(sharding.export_changes(table, files[-1]))
    return table, files[1:]


@pytest.mark.parametrize("share", ["few", "most", "all that witness", "all"])
@pytest.mark.parametrize("begin", [0, 1, 2], ids="from file {}".format)
def test_tables_follow_changes_without_some_ids(share, begin, tmp_path):
    """Whether they have them already or not; nothing names them afterwards."""
    count = 6_000 if share == "all that witness" else 60
    ids = np.arange(count, dtype=np.uint64) * 3 + 2**63
    gone = {"few": ids[3:5], "most": ids[4:55], "all": ids}.get(share, ids[1_000:])
    table, files = history(ids, gone, 4 * count)
    follower = SGD.init(hkv.create(4 * count, DIM))
    for number, changes in enumerate(files):
        if number >= begin:
            changes = changes.without(gone, erase=begin > 0)
            named = [changes.entries.keys, changes.keys]
            named += [] if changes.witnesses is None else [changes.witnesses.keys]
            named += [changes.removed] if begin == 0 else []
            assert not are_among(gone, np.concatenate(named)).any()
        sharding.save_changes(tmp_path / "changes", changes)
        changes = sharding.load_changes(tmp_path / "changes")
        follower, counts = sharding.import_changes(None, follower, changes)
        has = int(hkv.contains(follower, hkv.Keys.from_numpy(gone))[1].sum())
        assert has == (0 if number >= begin else len(gone))
        assert int(counts.erased) == (len(gone) if number == begin > 0 else 0)
    mine, its = entries_of(follower), entries_of(table)
    for name in ("keys", "scores", "values"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(its, name))
    assert mine.clock == its.clock and len(its.keys) == count - len(gone)


def test_cleaned_changes_are_an_earlier_time_too():
    """What a trainer exports behind them names the ids no more."""
    table, _ = hkv.erase(table_of(IDS), hkv.Keys.from_numpy(IDS[:2]))
    first = sharding.export_changes(table_of(IDS), None)
    for gone in (IDS[1::-1], hkv.Keys.from_numpy(IDS[[1, 0, 1]])):  # in any order
        assert first.without(gone).removed.tolist() == sorted(IDS[:2].tolist())
    first = first.without(IDS[:2], erase=False)
    after = sharding.export_changes(table, first)
    assert not len(after.removed) and after.before == 4
    assert not are_among(IDS[:2], after.witnesses.keys).any()


def test_keys_of_no_table_are_not_imported():
    """Ids for which somebody has not made keys: no lookup of a table would find them."""
    group = fused(table_bits=8)
    table, _ = hkv.find_or_insert(group.create(), group.keys("items", np.array([3], np.int32)))
    exported = sharding.export_entries(table)
    for number in (128, 2):
        hashed = exported._replace(keys=np.array([(number << 56) + 5], np.uint64))
        match = rf"keys must be of \['users', 'items'\], .* number {number} "
        with pytest.raises(ValueError, match=match):
            sharding.import_entries(None, group.create(), hashed)
    right = exported._replace(keys=group.keys("users", IDS[:1].astype(np.int32)).to_numpy())
    assert int(sharding.import_entries(None, group.create(), right)[1].inserted) == 1


def test_exports_are_shown_without_their_arrays():
    """Trees of something else are shown with what they hold."""
    exported = sharding.export_entries(table_of(IDS))
    changes = sharding.export_changes(table_of(IDS), None)
    for own in (exported, changes):
        assert repr(own).startswith(type(own).__name__) and "6 entries, float32[6, 2]" in repr(own)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), np.uint32), own)
        assert "scores=ShapeDtypeStruct(shape=(6,), dtype=uint32)" in repr(shapes)
        jax.jit(lambda own: repr(own) and 0)(jax.tree.map(np.uint32, exported))
