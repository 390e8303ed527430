"""A table that follows another one by what has become of it."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import each, seldom
from many_devices import assert_same_bits, entries_of
from test_tiered import tiers_of, trainer
from test_tiered_devices import DEVICES, large, placement_of, stepper

import jax_hkv as hkv
from jax_hkv import sharding, tiered
from jax_hkv.index import Policy

DIM = 4
OPT = hkv.optim.adagrad(0.5)


@jax.jit(donate_argnums=0)
def train(table, ids, scores):
    scores = scores if table.policy in (Policy.CUSTOM, Policy.LFU) else None
    table, found = hkv.find_or_insert(table, ids, scores=scores)
    return OPT.update(table, found, 0.5 * found.values)


def assert_follows(serving, trained):
    """Keys, scores and rows, and time, but no optimizer rows."""
    wanted = entries_of(trained)._replace(optimizer={}, shared={})
    assert_same_bits(*(jax.tree.map(np.asarray, own) for own in (entries_of(serving), wanted)))


@pytest.mark.parametrize("dtype, policy", each([jnp.float32, jnp.bfloat16], Policy))
def test_a_table_for_inference_has_what_the_trained_one_has(policy, dtype, rng, tmp_path):
    """New rows, changed ones, and none that were evicted, erased or expired; through files."""
    table = OPT.init(hkv.create(256, DIM, policy=policy, dtype=dtype))
    serving = hkv.create(2048, DIM, policy=policy, dtype=dtype)
    known, moved, erased = None, [], 0
    for turn in range(8):
        for _ in range(3):
            ids = rng.integers(0, 900, 60).astype(np.int32)
            scores = rng.integers(0, 100, 60).astype(np.uint32)
            table = train(table, ids, scores)
        table, _ = hkv.erase(table, rng.integers(0, 900, 40).astype(np.int32))
        if turn == 5:
            table = hkv.advance_epoch(table)
        known = sharding.export_changes(table, known)
        sharding.save_changes(tmp_path / "changes", known)
        changes = sharding.load_changes(tmp_path / "changes")
        assert changes.keys is None
        assert_same_bits(*(jax.tree.map(np.asarray, own[:2]) for own in (changes, known)))
        serving, counts = sharding.import_changes(None, serving, changes)
        assert int(counts.entries.evicted) == int(counts.entries.refused) == 0
        assert int(counts.erased) == len(known.removed)
        assert_follows(serving, table)
        moved.append(len(changes.entries.keys))
        erased += int(counts.erased)
    assert erased > 100
    # What was looked up since is less than all; EPOCH_LFU tells turns apart by epochs alone.
    later = {Policy.LRU: moved[1:], Policy.EPOCH_LRU: moved[1:], Policy.EPOCH_LFU: moved[6:7]}
    assert int(hkv.size(table)) > 180
    if policy in later:
        assert max(later[policy]) <= 180


@pytest.mark.parametrize("mode", seldom(["shard_map", "pmap"], {"pmap"}))
@pytest.mark.parametrize("replicas", [False, True])
def test_tables_over_devices_follow_each_other(mode, replicas, rng):
    """Exported by two processes, each of its own parts; into parts, replicas, and one device."""
    placement = placement_of(mode)
    table = large(placement, DEVICES * 128, optimizer="adam")
    many = placement.create(lambda: hkv.create(2048, DIM, replicas=replicas))
    one = hkv.create(4096, DIM)
    step, _ = stepper(placement)
    own, erased = [None, None], 0
    for _ in range(5):
        ids = rng.integers(0, 1500, DEVICES * 48).astype(np.int32)
        table, _ = step(table, *placement.put((ids, np.ones(len(ids), bool))))
        parts = placement.shards(table)
        own = [
            sharding.export_changes(parts[first : first + 2], since)
            for first, since in zip((0, 2), own, strict=True)
        ]
        for changes in own:
            many, counts = sharding.import_changes(placement, many, changes)
            one, of_one = sharding.import_changes(None, one, changes)
            assert int(of_one.erased) == len(changes.removed)
            assert int(counts.erased) == len(changes.removed) * (DEVICES if replicas else 1)
            erased += len(changes.removed)
        assert len(entries_of(parts).keys) > 100
        assert_follows(one, parts)
        followers = placement.shards(many)
        for follower in followers if replicas else [followers]:
            assert_follows(follower, parts)
    assert erased > 30


def test_entries_of_any_part_are_too_many_for_changes_from_the_beginning():
    placement = placement_of("shard_map")
    ids = np.arange(40, dtype=np.int32)
    ids = ids[np.asarray(sharding.owners(ids, DEVICES)) == DEVICES - 1]
    trained, _ = hkv.find_or_insert(hkv.create(128, DIM), ids)
    table = placement.create(lambda: hkv.create(128, DIM))
    table, _ = sharding.import_entries(placement, table, sharding.export_entries(trained))
    changes = sharding.export_changes(hkv.find_or_insert(trained, ids)[0], None)
    with pytest.raises(ValueError, match=f"must have no entries .* got one with {len(ids)}"):
        sharding.import_changes(placement, table, changes)


@pytest.mark.parametrize("since", ["changes", "an export"])
def test_a_table_follows_tiers(since, rng):
    tiers, step = tiers_of(128, 1024), trainer("adam")
    serving, known = hkv.create(4096, DIM), None
    for turn in range(6):
        ids = rng.integers(0, 700, 60).astype(np.int32)
        tiers, _ = tiered.prefetch(tiers, ids)
        tiers = tiers._replace(cache=step(tiers.cache, ids)[0])
        tiers, _ = tiered.erase(tiers, rng.integers(0, 700, 50).astype(np.int32))
        changes = sharding.export_changes(tiers, known)
        serving, counts = sharding.import_changes(None, serving, changes)
        assert int(counts.erased) == len(changes.removed)
        assert turn == 0 or len(changes.entries.keys) <= 60 < tiered.size(tiers)
        wanted = entries_of_tiers(tiers)
        assert_same_bits(entries_of(serving)[:3], wanted[:3])
        known = changes if since == "changes" else tiered.export_entries(tiers)


def entries_of_tiers(tiers):
    exported = tiered.export_entries(tiers)
    order = np.argsort(exported.keys)
    return exported._replace(
        **{name: getattr(exported, name)[order] for name in ("keys", "scores", "values")}
    )


def test_a_table_with_the_same_optimizer_gets_its_rows(rng):
    """A second trainer, not a server."""
    table, other, known = OPT.init(hkv.create(256, DIM)), OPT.init(hkv.create(1024, DIM)), None
    for _ in range(3):
        table = train(table, rng.integers(0, 600, 60).astype(np.int32), np.zeros(60, np.uint32))
        known = sharding.export_changes(table, known)
        other, _ = sharding.import_changes(None, other, known)
        assert_same_bits(*(jax.tree.map(np.asarray, entries_of(own)) for own in (other, table)))


def test_changes_that_do_not_follow_are_refused_before_anything_is_changed():
    ids = np.arange(3, dtype=np.int32)
    table = hkv.create(128, DIM)
    known, seen = None, []
    for position in range(3):
        table, _ = hkv.find_or_insert(table, ids[position : position + 1])
        known = sharding.export_changes(table, known)
        seen.append(known)
    serving, _ = sharding.import_changes(None, hkv.create(1024, DIM), seen[0])
    with pytest.raises(
        ValueError,
        match=r"changes must be those behind .* its time 1, got changes from 2 to 3: .*fresh table",
    ):
        sharding.import_changes(None, serving, seen[2])
    for changes in seen[1:]:
        serving, _ = sharding.import_changes(None, serving, changes)
    for changes in seen[:2]:
        with pytest.raises(ValueError, match=r"at its time 3, got changes from"):
            sharding.import_changes(None, serving, changes)
    assert sorted(entries_of(serving).keys) == [0, 1, 2]


def test_changes_since_an_older_time_than_the_table_has_are_refused():
    """What came and went in between would stay."""
    first, second, third = (np.array([key], np.int32) for key in (1, 2, 3))
    table, _ = hkv.find_or_insert(hkv.create(128, DIM), first)
    whole = sharding.export_changes(table, None)
    serving, _ = sharding.import_changes(None, hkv.create(1024, DIM), whole)
    table, _ = hkv.find_or_insert(table, second)
    then = sharding.export_changes(table, whole)
    serving, _ = sharding.import_changes(None, serving, then)
    table, _ = hkv.find_or_insert(hkv.erase(table, second)[0], third)
    with pytest.raises(ValueError, match=r"at its time 2, got changes from 1 to 4: .*each since"):
        sharding.import_changes(None, serving, sharding.export_changes(table, whole))
    serving, _ = sharding.import_changes(None, serving, sharding.export_changes(table, then))
    assert sorted(entries_of(serving).keys) == [1, 3]


def test_a_table_is_followed_whose_scores_are_later_than_its_time():
    entries = of_ids(3)
    for _ in range(20):
        entries, _ = hkv.find_or_insert(entries, np.arange(3, dtype=np.int32))
    _, old = hkv.export_keys(entries, np.arange(3, dtype=np.int32))
    table, _ = hkv.import_batch(hkv.create(128, DIM), old)
    assert int(entries_of(table).scores.max()) > int(table.clock[0])
    serving, known = hkv.create(1024, DIM), None
    for position in range(3):
        table, _ = hkv.find_or_insert(table, np.array([0, 7 + position], np.int32))
        known = sharding.export_changes(table, known)
        serving, _ = sharding.import_changes(None, serving, known)
        assert_same_bits(entries_of(serving)[:3], entries_of(table)[:3])
        assert serving.clock.tolist() == table.clock.tolist()


@pytest.mark.parametrize("policy", [Policy.LRU, Policy.EPOCH_LRU, Policy.EPOCH_LFU])
def test_a_table_that_was_cleared_follows_from_the_beginning(policy):
    """A later time and epoch than those of what it follows are its own no more."""
    table, _ = hkv.find_or_insert(hkv.create(128, DIM, policy=policy), np.arange(3, dtype=np.int32))
    changes = sharding.export_changes(table, None)
    serving, _ = sharding.import_changes(None, hkv.create(1024, DIM, policy=policy), changes)
    if policy != Policy.LRU:
        serving = hkv.advance_epoch(serving)
    serving, _ = sharding.import_changes(None, hkv.clear(serving), changes)
    assert_same_bits(entries_of(serving)[:3], entries_of(table)[:3])
    assert serving.clock.tolist() == table.clock.tolist()
    assert serving.epoch.tolist() == table.epoch.tolist()


def used_up():
    table = hkv.create(128, DIM)
    jax.jit(lambda table: hkv.clear(table), donate_argnums=0)(table)
    return table


def of_ids(*counts):
    """A table after a lookup of so many ids, and of so many."""
    table = hkv.create(128, DIM)
    for count in counts:
        table, _ = hkv.find_or_insert(table, np.arange(count, dtype=np.int32))
    return table


TABLE = hkv.create(128, DIM)
CHANGES = sharding.export_changes(TABLE, None)
WRONG = {
    "no table": (
        lambda: sharding.export_changes(5, None),
        TypeError,
        r"export_changes: tables must be a table, .* got int",
    ),
    "no parts": (
        lambda: sharding.export_changes([], None),
        TypeError,
        r"export_changes: tables must be a table, .*placement\.shards\(table\)",
    ),
    "a table that was used up": (
        lambda: sharding.export_changes(used_up(), None),
        RuntimeError,
        r"export_changes: table was used up",
    ),
    "no earlier export": (
        lambda: sharding.export_changes(TABLE, 7),
        TypeError,
        r"export_changes: since must be .* got int.*None for the first time",
    ),
    "changes of a file": (
        lambda: sharding.export_changes(TABLE, CHANGES._replace(keys=None)),
        ValueError,
        r"export_changes: since must know the table's keys, got changes of a file",
    ),
    "changes of a later time": (
        lambda: sharding.export_changes(TABLE, sharding.export_entries(TABLE)._replace(clock=9)),
        ValueError,
        r"must be an export of an earlier time",
    ),
    "entries alone": (
        lambda: sharding.import_changes(None, TABLE, CHANGES.entries),
        TypeError,
        r"import_changes: changes must be what export_changes returned, got Exported",
    ),
    "another order": (
        lambda: sharding.import_changes(TABLE, CHANGES, None),
        TypeError,
        r"import_changes: placement must be .* the order is \(placement, table, changes\)",
    ),
    "rows of another dim": (
        lambda: sharding.import_changes(None, hkv.create(128, 2), CHANGES),
        ValueError,
        r"import_changes: changes\.entries must have rows, .* values float32\[n, 2\], .* got "
        r"values float32\[n, 4\]",
    ),
    "rows of another type": (
        lambda: sharding.import_changes(None, hkv.create(128, 4, dtype="bfloat16"), CHANGES),
        ValueError,
        r"import_changes: .* takes changes\._replace\(entries=changes\.entries\._replace\(optim.* "
        r"of another dtype changes\._replace\(entries=changes\.entries\._replace\(values=changes\."
        r"entries\.values\.astype\(table\.dtype\)\)\)",
    ),
    "scores of another policy": (
        lambda: sharding.import_changes(None, hkv.create(128, 4, policy=Policy.LFU), CHANGES),
        ValueError,
        r"changes\._replace\(entries=changes\.entries\._replace\(scores=scores, policy=int",
    ),
    "a table that follows and was used up": (
        lambda: sharding.import_changes(None, used_up(), CHANGES),
        RuntimeError,
        r"import_changes: table was used up",
    ),
    "a table with entries of its own": (
        lambda: sharding.import_changes(
            None, of_ids(8), sharding.export_changes(of_ids(5, 4), None)
        ),
        ValueError,
        r"import_changes: table must have no entries .* got one with 8, .* clear it",
    ),
    "no entries": (
        lambda: sharding.import_changes(None, TABLE, CHANGES._replace(entries=None)),
        TypeError,
        r"import_changes: changes\.entries must be",
    ),
    "a list of removed keys": (
        lambda: sharding.import_changes(None, TABLE, CHANGES._replace(removed=[5])),
        TypeError,
        r"import_changes: changes\.removed must be uint64\[m\] of NumPy, got list",
    ),
    "nothing removed to be saved": (
        lambda: sharding.save_changes("changes", CHANGES._replace(removed=None)),
        TypeError,
        r"save_changes: changes\.removed must be uint64\[m\]",
    ),
    "no changes to be saved": (
        lambda: sharding.save_changes("changes", CHANGES.entries),
        TypeError,
        r"save_changes: changes must be what export_changes returned, got Exported",
    ),
}


def test_half_rows_follow_as_the_error_says():
    ids = np.array([5, 6, 7], np.int32)
    table, _ = hkv.find_or_insert(hkv.create(128, DIM), ids[:2])
    changes = sharding.export_changes(table, None)
    serving = hkv.create(128, DIM, dtype=jnp.bfloat16)
    for turn in range(2):
        rows = changes.entries.values.astype(serving.dtype)
        half = changes._replace(entries=changes.entries._replace(values=rows))
        serving, counts = sharding.import_changes(None, serving, half)
        assert int(counts.entries.inserted) == 2 - turn
        table, _ = hkv.find_or_insert(table, ids[2:])
        changes = sharding.export_changes(table, changes)
    rows, served = (hkv.find(own, ids)[1].values for own in (table, serving))
    np.testing.assert_array_equal(served, rows.astype(jnp.bfloat16))


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_changes_is_named(name):
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        call()


def test_a_file_of_entries_is_none_of_changes(tmp_path):
    sharding.save_entries(tmp_path / "entries", CHANGES.entries)
    with pytest.raises(ValueError, match=r"load_changes: path must be a file of save_changes"):
        sharding.load_changes(tmp_path / "entries")
    sharding.save_changes(tmp_path / "changes", CHANGES)
    with pytest.raises(ValueError, match=r"load_entries: path must be a file of save_entries"):
        sharding.load_entries(tmp_path / "changes")


@pytest.mark.parametrize("kind", ["entries", "changes"])
def test_what_nobody_could_load_replaces_no_file(kind, tmp_path):
    """NumPy pickles objects, and loads none."""
    save, load = getattr(sharding, f"save_{kind}"), getattr(sharding, f"load_{kind}")
    given = CHANGES if kind == "changes" else CHANGES.entries
    path = tmp_path / kind
    save(path, given)
    before = path.read_bytes()
    for own, message in (
        ({"values": CHANGES.entries.values.astype(object)}, "values as numbers .* got object"),
        ({"values": CHANGES.entries.values.astype("U8")}, "values as numbers .* got <U8"),
        ({"shared": {"a": 1}}, r"shared\['a'\] must be an array of numbers, got int"),
    ):
        wrong = CHANGES.entries._replace(**own)
        wrong = CHANGES._replace(entries=wrong) if kind == "changes" else wrong
        with pytest.raises(TypeError, match=f"sharding.save_{kind}: .*{message}"):
            save(path, wrong)
    with pytest.raises(IsADirectoryError, match=f"save_{kind}: path must be .* the directory '.*'"):
        save(tmp_path, given)
    for call in (lambda: save(3, given), lambda: load(3)):
        with pytest.raises(TypeError, match=f"sharding.*_{kind}: path must be a path .* got int"):
            call()
    assert not list(tmp_path.parent.glob("*.writing"))
    assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == before
    save(bytes(path), given)
    assert len(load(bytes(path))) and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("kind", ["entries", "changes"])
def test_a_file_that_is_another_one_or_not_whole_is_named(kind, tmp_path):
    save, load = getattr(sharding, f"save_{kind}"), getattr(sharding, f"load_{kind}")
    save(tmp_path / "whole", CHANGES if kind == "changes" else CHANGES.entries)
    whole = (tmp_path / "whole").read_bytes()
    files = {"half": whole[: len(whole) // 2], "empty": b"", "text": b"no arrays"}
    files["broken"] = whole.replace(b"keys.npy", b"keyx.npy")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    np.save(tmp_path / "one.npy", np.ones(3))
    removed = {"removed": np.zeros(0, np.uint64)} if kind == "changes" else {}
    np.savez(tmp_path / "other.npz", **removed, types=np.array([1]), since=np.zeros(0))
    for name in (*files, "one.npy", "other.npz"):
        with pytest.raises(
            ValueError,
            match=rf"(?s)load_{kind}: path must be a file of save_{kind}, got '.*/{name}', which "
            ".*not whole",
        ):
            load(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("is_tiers", [False, True])
def test_new_entries_with_old_scores_are_told(is_tiers, rng):
    """Those of an import, which were looked up in another table, long ago."""
    old = train(OPT.init(hkv.create(1024, DIM)), np.arange(100, 140, dtype=np.int32), None)
    old = sharding.export_entries(old)
    table = OPT.init(hkv.create(256, DIM))
    tiers = tiered.Tiers(table, tiered.create_store(table, 1024))
    for first in range(0, 60, 20):
        ids = np.arange(first, first + 20, dtype=np.int32)
        if is_tiers:
            tiers, _ = tiered.prefetch(tiers, ids)
        else:
            table = train(table, ids, None)
    known = sharding.export_changes(tiers if is_tiers else table, None)
    serving, _ = sharding.import_changes(None, hkv.create(1024, DIM), known)
    if is_tiers:
        tiers, _ = tiered.import_entries(tiers, old)
    else:
        table, _ = sharding.import_entries(None, table, old)
    changes = sharding.export_changes(tiers if is_tiers else table, known)
    assert sorted(changes.entries.keys) == list(range(100, 140)) and not len(changes.removed)
    serving, _ = sharding.import_changes(None, serving, changes)
    assert sorted(entries_of(serving).keys) == [*range(60), *range(100, 140)]


def test_some_tables_of_a_collection_follow():
    """Removed ids are those of the tables that are served."""
    tables = [hkv.TableConfig(name, 256, DIM) for name in ("users", "items")]
    features = [hkv.Feature("user", "users"), hkv.Feature("item", "items")]
    trained = hkv.Collection(tables, features).group_of("items")
    served = hkv.Collection(tables[1:], features[1:], table_bits=1).group_of("items")
    table, serving, known = trained.create(), served.create(), None
    ids = np.arange(10, dtype=np.int32)
    for users, items in (([], []), ([5], [6]), ([7, 8], [])):
        for name, gone in (("users", users), ("items", items)):
            table, _ = hkv.find_or_insert(table, trained.keys(name, ids))
            gone = trained.keys(name, np.array(gone, np.int32))
            table, _ = hkv.erase(table, gone)
        known = sharding.export_changes(table, known)
        changes = served.take(known, of=trained)
        assert len(changes.removed) == (known.since is not None and len(items))
        serving, counts = sharding.import_changes(None, serving, changes)
        assert int(counts.erased) == len(changes.removed)
        found = hkv.contains(serving, served.keys("items", ids))[1]
        assert_same_bits(found, ~np.isin(ids, items))
        assert len(changes.keys) == 10 - len(items)


def test_changes_are_those_of_one_device_whatever_mesh_is_set():
    tiers, _ = tiered.prefetch(tiers_of(128, 1024), np.arange(5, dtype=np.int32))
    serving = hkv.create(128, DIM)
    with jax.set_mesh(jax.make_mesh((len(jax.devices()),), ("device",))):
        changes = sharding.export_changes(tiers, None)
        serving, _ = sharding.import_changes(None, serving, changes)
    assert sorted(entries_of(serving).keys) == [0, 1, 2, 3, 4]


def test_changes_of_another_history_of_the_same_time_are_refused():
    """A trainer that went back to a checkpoint reaches a time again; a server without the rest."""
    table = of_ids(3)
    earlier = jax.tree.map(jnp.copy, table)
    table, _ = hkv.find_or_insert(table, np.array([7], np.int32))
    whole = sharding.export_changes(table, None)
    serving, _ = sharding.import_changes(None, hkv.create(1024, DIM), whole)
    serving, counts = sharding.import_changes(None, serving, whole)  # the same ones again
    assert int(counts.entries.hits) == 4
    other, _ = hkv.find_or_insert(earlier, np.array([8], np.int32))
    assert other.clock.tolist() == serving.clock.tolist()
    with pytest.raises(ValueError, match="table must have no entries before .* got one with 4"):
        sharding.import_changes(None, serving, sharding.export_changes(other, None))
    later = sharding.export_changes(hkv.find_or_insert(table, np.array([9], np.int32))[0], whole)
    assert later.before == 4
    with pytest.raises(ValueError, match="must have the 4 entries .* got one without entries"):
        sharding.import_changes(None, hkv.clear(jax.tree.map(jnp.copy, serving)), later)
    serving, _ = sharding.import_changes(None, serving, later)
    assert sorted(entries_of(serving).keys) == [0, 1, 2, 7, 9]
    table, _ = hkv.find_or_insert(table, np.array([9], np.int32))
    table, _ = hkv.erase(table, entries_of(table).keys)
    gone = sharding.export_changes(table, later)
    for _ in range(2):  # the last ones twice, which leave nothing
        serving, _ = sharding.import_changes(None, serving, gone)
    assert int(hkv.size(serving)) == 0


@pytest.mark.parametrize(
    ("policy", "is_tiers"),
    [*itertools.product([Policy.LRU, Policy.EPOCH_LRU], [False, True]), (Policy.EPOCH_LFU, False)],
)
def test_a_table_that_went_back_and_passed_its_old_time_is_noticed(policy, is_tiers):
    """Entries of the time that comes twice would stay as the other history left them."""
    table = OPT.init(hkv.create(128, DIM, policy=policy))
    trained = tiered.Tiers(table, tiered.create_store(table, 1024)) if is_tiers else table

    def trained_on(trained, *batches):
        trained = jax.tree.map(jnp.copy, trained)
        for ids in batches:
            ids = np.array(ids, np.int32)
            if isinstance(trained, tiered.Tiers):
                trained, _ = tiered.prefetch(trained, ids)
                trained = tiered.Tiers(train(trained.cache, ids, None), trained.store)
            else:
                trained = train(trained, ids, None)
        return trained

    checkpoint = trained_on(trained, [1, 2], [3, 4])
    passed = trained_on(checkpoint, [1], [2, 2])
    known = sharding.export_changes(passed, None)
    later = sharding.export_changes(passed, sharding.export_changes(checkpoint, None))
    again = trained_on(checkpoint, [1], [2, 2], [4])  # the same steps: nobody sees a difference
    changes = sharding.export_changes(again, known)
    others = () if policy is Policy.EPOCH_LFU else ([1, 2, 3],)  # whose epoch is exported again
    assert sorted(changes.entries.keys.tolist()) == ([4] if others else [1, 2, 3, 4])
    for batches in others:
        went_back = trained_on(checkpoint, [3], [3], [4], [4])
        with pytest.raises(ValueError, match=r"since must be of this table's own past, .* None, "):
            sharding.export_changes(went_back, known)
        for since in (known, known.entries, later):
            with pytest.raises(ValueError, match="the table went back to a checkpoint, was given"):
                sharding.export_changes(trained_on(checkpoint, batches, [4], [4], [3], [3]), since)


@pytest.mark.parametrize("policy", [Policy.LRU, Policy.EPOCH_LRU, Policy.LFU, Policy.EPOCH_LFU])
@pytest.mark.parametrize("devices", [1, 2])
def test_changes_of_a_history_that_went_back_are_refused(policy, devices, tmp_path):
    """Its trainer resumes at a checkpoint that servers have passed, and reaches their time."""
    table = hkv.create(128, DIM, policy=policy)
    placement, serving = None, hkv.create(1024, DIM, policy=policy)
    if devices > 1:
        placement = placement_of("shard_map")
        serving = placement.create(lambda: hkv.create(1024, DIM, policy=policy))

    def after(table, *batches):
        for ids in batches:
            table, _ = hkv.find_or_insert(table, np.array(ids, np.int32))
        return table

    restored = jax.tree.map(jnp.copy, table := after(table, [1, 2, 3], [3, 4]))
    known = sharding.export_changes(table, None)
    serving, _ = sharding.import_changes(placement, serving, known)
    changes = sharding.export_changes(after(table, [1], [2, 5]), known)
    for _ in range(2):  # the last ones twice
        serving, _ = sharding.import_changes(placement, serving, changes)
    since = sharding.export_entries(restored)
    for batches in ([2], [2]), ([1], [4, 5]), ([4], "epoch", [3]), ([7], [8, 9]):
        other = jax.tree.map(jnp.copy, restored)
        for batch in batches:
            other = hkv.advance_epoch(other) if batch == "epoch" else after(other, batch)
        other = sharding.export_changes(other, since)
        sharding.save_changes(tmp_path / "changes", other)
        for changes in (other, sharding.load_changes(tmp_path / "changes")):
            with pytest.raises(ValueError, match="from 2 to 4 of another past than the table has"):
                sharding.import_changes(placement, serving, changes)


@pytest.mark.parametrize("policy", [Policy.LRU, Policy.LFU, Policy.EPOCH_LRU])
def test_a_server_without_room_follows_with_what_it_has(policy, rng):
    """By counts of what it lacks; that is no other past."""
    table, serving = (hkv.create(size, DIM, policy=policy) for size in (4096, 256))
    known, lost = None, 0
    for _ in range(5):
        table, _ = hkv.find_or_insert(table, rng.integers(0, 2000, 300).astype(np.int32))
        known = sharding.export_changes(table, known)
        for _ in range(1 if known.since is None else 2):
            serving, counts = sharding.import_changes(None, serving, known)
            lost += int(counts.entries.evicted) + int(counts.entries.refused)
    assert lost > 500 and int(hkv.size(serving)) > 240


def test_a_table_that_was_given_earlier_scores_is_noticed():
    """They are not told from those that it had, and neither are their rows."""
    table = of_ids(3)
    _, old = hkv.export_keys(table, np.arange(3, dtype=np.int32))
    for _ in range(2):
        table, _ = hkv.find_or_insert(table, np.arange(3, dtype=np.int32))
    known = sharding.export_changes(table, None)
    for _ in range(2):  # also what the last changes did not have
        given, _ = hkv.import_batch(jax.tree.map(jnp.copy, table), old)
        with pytest.raises(ValueError, match="3 entries have other scores .* given entries by an"):
            sharding.export_changes(given, known)
        known = sharding.export_changes(table, known)
        assert not len(known.entries.keys)


def test_tiers_whose_cache_lost_newer_entries_are_noticed():
    """Their old copies in the store show again."""
    tiers, _ = tiered.prefetch(tiers_of(128, 1024), np.arange(120, dtype=np.int32))
    tiers, _ = tiered.prefetch(tiers, np.arange(120, 240, dtype=np.int32))
    ids = np.arange(5, dtype=np.int32)
    tiers, counts = tiered.prefetch(tiers, ids)
    assert int(counts.restored) == 5
    tiers, _ = tiered.prefetch(tiers, ids)
    known = sharding.export_changes(tiers, None)
    assert_same_bits(known.scores[:5], np.full(5, tiers.cache.clock[0], np.uint64))
    same = sharding.export_changes(tiers, known)
    assert not len(same.entries.keys) and not len(same.removed) and same.before == 240
    lost = tiers._replace(cache=hkv.erase(tiers.cache, ids)[0])
    with pytest.raises(ValueError, match="of tiers, its cache lost newer ones"):
        sharding.export_changes(lost, known)


def test_scores_later_than_the_time_are_no_sign_of_another_past():
    """Of a part of another process, whose entries another table's time scored."""
    placement, other = placement_of("shard_map"), hkv.create(1024, DIM)
    theirs = np.arange(100, 164, dtype=np.int32)
    for _ in range(6):
        other, _ = hkv.find_or_insert(other, theirs)
    _, given = hkv.export_keys(other, theirs)

    def insert(table, entries):
        return sharding.import_batch(table, entries, axis_name="device")[0], None

    @placement.step
    def look_up(table, ids):
        return sharding.find_or_insert(table, ids, axis_name="device")[0], None

    table = placement.create(lambda: hkv.create(128, DIM))
    table, _ = look_up(table, placement.put(np.arange(64, dtype=np.int32)))
    table, _ = placement.step(insert)(table, placement.put(given))
    serving, known = hkv.create(4096, DIM), [None] * 3
    for turn in range(3):
        parts = placement.shards(table)
        for process, own in enumerate([parts[:2], parts[2], parts[3:]]):  # a part is a table too
            known[process] = sharding.export_changes(own, known[process])
            serving, _ = sharding.import_changes(None, serving, known[process])
        assert_follows(serving, parts)
        more = np.arange(32 * turn, 32 * turn + 128, dtype=np.int32)
        table, _ = look_up(table, placement.put(more))


def test_changes_that_a_group_takes_are_followed_from_a_table_without_entries():
    """Of how many there were it knows nothing; the seed is the trained table's."""
    tables = [hkv.TableConfig(name, 128, DIM, optimizer=OPT) for name in ("users", "items")]
    features = [hkv.Feature("user", "users"), hkv.Feature("item", "items")]
    trained = hkv.Collection(tables, features).group_of("items")
    served = hkv.Collection(tables[:1], features[:1], table_bits=1).group_of("users")
    table, serving, known = trained.create(), served.create(), None
    for name in ("items", "users"):
        table, _ = hkv.find_or_insert(table, trained.keys(name, np.array([5, 6], np.int32)))
        known = sharding.export_changes(table, known)
        taken = served.take(known, of=trained)
        assert taken.entries.seed == table.seed and taken.before is None
        serving, counts = sharding.import_changes(None, serving, taken)
    assert int(counts.entries.inserted) == int(hkv.size(serving)) == 2
    other = dataclasses.replace(served.create(), seed=9)
    with pytest.raises(ValueError, match="of a table with seed 9 like this one, got seed 0"):
        sharding.import_changes(None, other, taken)


def test_changes_of_a_table_without_entries_are_followed(tmp_path):
    table, serving = hkv.create(128, DIM), hkv.create(1024, DIM)
    known = sharding.export_changes(table, None)
    for ids in ([], [5]):
        serving, _ = sharding.import_changes(None, serving, known)
        table, _ = hkv.find_or_insert(table, np.array(ids, np.int32))
        known = sharding.export_changes(table, known)
        assert known.before == 0
        sharding.save_changes(tmp_path / "changes", known)
        assert sharding.load_changes(tmp_path / "changes").before == 0
    serving, _ = sharding.import_changes(None, serving, known)
    assert entries_of(serving).keys.tolist() == [5]


def test_changes_of_a_table_with_another_seed_are_refused(tmp_path):
    """Users' rows for items: tables of one model have one time."""
    made = {
        seed: hkv.find_or_insert(hkv.create(128, DIM, seed=seed), np.array([5]))[0]
        for seed in (1, 2)
    }
    sharding.save_changes(tmp_path / "changes", sharding.export_changes(made[2], None))
    changes = sharding.load_changes(tmp_path / "changes")
    with pytest.raises(
        ValueError, match="must be of a table with seed 1 like this one, got seed 2"
    ):
        sharding.import_changes(None, hkv.create(1024, DIM, seed=1), changes)
    serving, _ = sharding.import_changes(None, hkv.create(1024, DIM, seed=2), changes)
    assert_same_bits(entries_of(serving)[:3], entries_of(made[2])[:3])
