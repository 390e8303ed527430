"""Files of entries and changes: damaged ones, several writers, and places that are full."""

from __future__ import annotations

import functools
import os
import re
import resource
import stat
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_hkv as hkv
from jax_hkv import sharding

OPT = hkv.optim.adam(0.1)


def table_of(ids, **options):
    table = OPT.init(hkv.create(256, 2, **options))
    return hkv.find_or_insert(table, np.asarray(ids, np.int32))[0]


EXPORTED = sharding.export_entries(table_of(range(20), dtype=jnp.bfloat16, seed=3))
CHANGES = sharding.export_changes(table_of(range(20)), None)
SAVED = {"entries": EXPORTED, "changes": CHANGES}


def functions(kind):
    return getattr(sharding, f"save_{kind}"), getattr(sharding, f"load_{kind}")


def assert_equal_saved(actual, expected):
    for own, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.asarray(own).dtype == np.asarray(wanted).dtype
        np.testing.assert_array_equal(own, wanted)


@pytest.mark.parametrize("kind", SAVED)
def test_a_damaged_file_is_named_or_no_number_is_another(kind, tmp_path, rng):
    """Bits that flip, and pieces that are missing or zero, anywhere."""
    save, load = functions(kind)
    save(tmp_path / "whole", SAVED[kind])
    whole = (tmp_path / "whole").read_bytes()
    expected = load(tmp_path / "whole")
    damaged = tmp_path / "damaged"
    named = 0
    for turn in range(400):
        start, length = (int(n) for n in rng.integers(0, [len(whole), 600]))
        piece = whole[start : start + length]
        if turn % 4 == 0:
            piece = b""
        elif turn % 4 == 1:
            piece = bytes(len(piece))
        else:
            piece = bytes([piece[0] ^ (1 << int(rng.integers(8)))]) + piece[1:] if piece else b""
        damaged.write_bytes(whole[:start] + piece + whole[start + length :])
        try:
            loaded = load(damaged)
        except ValueError as error:
            assert f"load_{kind}: path must be a file of save_{kind}, got" in str(error)
            assert str(damaged) in str(error)
            named += 1
        else:
            assert_equal_saved(loaded, expected)
    assert named > 200


@pytest.mark.parametrize("kind", SAVED)
def test_arrays_that_claim_to_be_smaller_than_they_are_are_named(kind, tmp_path):
    """What is left over nobody would read, and zip compares what was read to its end."""
    save, load = functions(kind)
    save(tmp_path / "whole", SAVED[kind])
    whole = (tmp_path / "whole").read_bytes()
    damaged, tried = tmp_path / "damaged", 0
    for shape in re.finditer(rb"'shape': \(([0-9, ]*)\)", whole):
        for place in range(*shape.span(1)):
            digit = whole[place] - ord("0")
            if not 0 < digit <= 9:
                continue
            smaller = bytes([ord("0") + digit - 1])
            damaged.write_bytes(whole[:place] + smaller + whole[place + 1 :])
            tried += 1
            with pytest.raises(ValueError, match=f"load_{kind}: path must be a file .* not whole"):
                load(damaged)
    assert tried >= 8


@pytest.mark.parametrize("kind", SAVED)
def test_a_file_with_other_contents_is_named(kind, tmp_path):
    """Among them what a later version may add."""
    save, load = functions(kind)
    save(tmp_path / "file", SAVED[kind])
    with np.load(tmp_path / "file") as file:
        arrays = dict(file)
    of_changes = (
        ({"removed": np.zeros((2, 2), np.uint64)}, "removed must be uint64"),
        ({"removed": np.zeros(2, ">u8")}, "removed must be uint64"),
        ({"since": np.array([1.5])}, "TypeError"),
    )
    for own, message in (
        *(of_changes if kind == "changes" else ()),
        ({"clock": np.float32(3.5)}, "TypeError"),
        ({"keys": arrays["keys"][:3]}, "same entries, scores"),
        ({"keys": arrays["keys"].astype(np.float32)}, "keys as uint64"),
        ({"policy": np.uint64(77)}, "policy must be .* got 77"),
        ({"levels": np.zeros(3)}, r"\['levels'\], which are of a later version"),
        ({"values": arrays["values"].astype(np.uint64)}, "uint64 that should be"),
        ({"values": arrays["values"].astype(arrays["values"].dtype.newbyteorder())}, "not whole"),
    ):
        np.savez(tmp_path / "other", **(arrays | own))
        with pytest.raises(ValueError, match=f"other.npz', which is another one .*{message}"):
            load(tmp_path / "other.npz")


@pytest.mark.parametrize("field", ["values", "optimizer", "shared"])
def test_bytes_in_another_order_are_refused_before_a_table_is_used(field, tmp_path):
    """Elsewhere they would be other numbers."""
    table = table_of(range(3))
    exported = sharding.export_entries(table)
    swapped = jax.tree.map(lambda a: a.astype(a.dtype.newbyteorder()), getattr(exported, field))
    for call in (
        functools.partial(sharding.import_entries, None, table),
        functools.partial(sharding.save_entries, tmp_path / "file"),
    ):
        with pytest.raises(TypeError, match=rf"{field}.*got >[fu]4.*astype\(.*newbyteorder\(.=.\)"):
            call(exported._replace(**{field: swapped}))
    assert int(hkv.size(table)) == 3 and not [*tmp_path.iterdir()]


def test_types_that_numpy_does_not_know_come_back(tmp_path):
    """An optimizer of one's own may keep them."""
    rows = {
        name: np.ones((20, 2), np.float32).astype(getattr(ml_dtypes, name))
        for name in ("float8_e5m2", "float8_e4m3fn", "bfloat16")
    }
    sharding.save_entries(tmp_path / "file", EXPORTED._replace(optimizer=rows))
    loaded = sharding.load_entries(tmp_path / "file")
    assert_equal_saved(loaded.optimizer, rows)


def test_of_several_writers_one_file_is_whole_at_any_time(tmp_path):
    path, errors = tmp_path / "file", []
    sharding.save_entries(path, EXPORTED)

    def write():
        try:
            for _ in range(15):
                sharding.save_entries(path, EXPORTED)
        except Exception as error:
            errors.append(error)

    writers = [threading.Thread(target=write) for _ in range(3)]
    for writer in writers:
        writer.start()
    for _ in range(15):
        assert_equal_saved(sharding.load_entries(path), EXPORTED)
    for writer in writers:
        writer.join()
    assert not errors and [*tmp_path.iterdir()] == [path]


def test_a_file_that_cannot_be_written_leaves_the_one_that_was_there(tmp_path):
    """And nothing of its own: on a full disk that would be in the way of the next one."""
    path = tmp_path / "file"
    sharding.save_entries(path, EXPORTED)
    before = path.read_bytes()
    large = sharding.export_entries(hkv.find_or_insert(hkv.create(8192, 64), np.arange(8000))[0])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"save_entries: File too large: .*as it was: '.*/file'"):
            sharding.save_entries(path, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == before


def test_a_path_that_ends_as_a_directorys_makes_no_file(tmp_path):
    with pytest.raises(IsADirectoryError, match="must be that of a file, got the directory"):
        sharding.save_entries(f"{tmp_path}/backup/", EXPORTED)
    assert not [*tmp_path.iterdir()]


def test_a_link_stays_one_and_a_file_keeps_its_mode(tmp_path):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "file", tmp_path / "link"
    sharding.save_entries(target, EXPORTED)
    os.chmod(target, 0o600)
    link.symlink_to(target)
    sharding.save_changes(link, CHANGES)
    assert link.is_symlink() and stat.S_IMODE(target.stat().st_mode) == 0o600
    assert_equal_saved(sharding.load_changes(target).removed, CHANGES.removed)


@pytest.mark.parametrize("lost", ["namespace", "seed", "counters"])
def test_a_file_that_lacks_what_only_some_have_is_not_whole(lost, tmp_path):
    """As a damaged directory of the archive makes of one: keys of a group were plain ids then."""
    rule = hkv.admission.frequency(3, width=64, depth=2)
    tables = [hkv.TableConfig(name, 128, 2, admission=rule) for name in ("users", "items")]
    collection = hkv.Collection(tables, [hkv.Feature(name, name) for name in ("users", "items")])
    (table,) = collection.create().values()
    exported = sharding.export_entries(table)
    sharding.save_entries(tmp_path / "whole", exported)
    read = sharding.load_entries(tmp_path / "whole")
    assert read.seed == exported.seed is not None
    assert_equal_saved((read.namespace, read.counters), (exported.namespace, exported.counters))
    with np.load(tmp_path / "whole") as saved:
        arrays = {name: saved[name] for name in saved.files}
    del arrays[lost]
    with open(tmp_path / "part", "wb") as file:
        np.savez(file, **arrays)
    with pytest.raises(ValueError, match=f"not whole.*{lost}"):
        sharding.load_entries(tmp_path / "part")


def test_changes_whose_last_array_is_part_of_another_are_named(tmp_path):
    """Its directory says how long an entry's comment is: one bit, and it swallows what follows."""
    save, load = functions("changes")
    save(tmp_path / "whole", CHANGES)
    assert load(tmp_path / "whole").before == 0
    whole = (tmp_path / "whole").read_bytes()
    *_, before_last, last = (match.start() for match in re.finditer(b"PK\x01\x02", whole))
    swallowed = whole.rindex(b"PK\x05\x06") - last
    lengths = int(swallowed).to_bytes(2, "little")
    damaged = whole[: before_last + 32] + lengths + whole[before_last + 34 :]
    (tmp_path / "damaged").write_bytes(damaged)
    with pytest.raises(ValueError, match="load_changes: path must be a file of save_changes"):
        load(tmp_path / "damaged")


def test_a_name_may_be_as_long_as_the_system_takes(tmp_path, monkeypatch):
    for name in ("x" * 255, "a" + "\u00e9" * 127):
        sharding.save_entries(tmp_path / name, EXPORTED)
        assert_equal_saved(sharding.load_entries(tmp_path / name), EXPORTED)
    assert len([*tmp_path.iterdir()]) == 2

    def refuse(*_):
        raise OSError(5, "I/O error")

    monkeypatch.setattr("os.remove", refuse)
    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(OSError, match="save_entries: I/O error: free or name another place"):
        sharding.save_entries(tmp_path / "other", EXPORTED)


def of_process(number, time, ids):
    """What one of two processes has exported at a time."""
    table = table_of([])
    for _ in range(time - 1):  # of which it has had one
        table, _ = hkv.find_or_insert(table, np.asarray(ids, np.int32))
    return sharding.export_entries(table)._replace(part=(number, 2))


def test_files_know_which_process_of_how_many_has_saved_them(tmp_path):
    for number in (0, 1):
        sharding.save_entries(tmp_path / f"{number}", of_process(number, 3, [number]))
    loaded = [sharding.load_entries(tmp_path / f"{number}") for number in (0, 1)]
    assert [part.part for part in loaded] == [(0, 2), (1, 2)]
    assert sharding.join_entries(loaded).part is None
    assert loaded[1].select([0]).part == (1, 2)
    sharding.save_entries(tmp_path / "whole", EXPORTED)
    assert sharding.load_entries(tmp_path / "whole").part is None


@pytest.mark.parametrize("lost", ["a file", "a save", "an increment"])
def test_an_export_of_some_processes_alone_is_told(lost):
    """As the files of two saves in one folder, of which the second was cut short."""
    first = [of_process(number, 3, [number, number + 2]) for number in (0, 1)]
    second = [of_process(number, 6, [number]) for number in (0, 1)]
    given, message = {
        "a file": (first[:1], r"there is not of time 3 that of \[1\]: a file is missing"),
        "a save": ([second[0], first[1]], r"of time 3 that of \[0\], of time 6 that of \[1\]"),
        "an increment": ([*first, second[1]], r"there is not of time 6 that of \[0\]"),
    }[lost]
    with pytest.warns(UserWarning, match=f"join_entries: parts must be of all .*{message}"):
        joined = sharding.join_entries(given)
    assert joined.part == ((0, 2) if lost == "a file" else None)
    complete = sharding.join_entries([*first, *second])  # warnings are errors here
    assert sorted(complete.keys) == [0, 1, 2, 3] and complete.part is None
    sharding.join_entries([part._replace(part=None) for part in given])
    restored = [part._replace(part=[np.array(own) for own in part.part]) for part in first]
    assert sharding.join_entries(restored).part is None


@pytest.mark.parametrize("held", ["new ids", "an erasure"])
def test_the_times_of_several_exporters_tell_what_is_missing(held):
    """The changes of the others move the table's own time on."""
    tables = [table_of([number]) for number in (0, 1)]
    known: list = [None, None]
    times: list = [None, None]
    serving = hkv.create(1024, 2)
    for turn in range(3):
        for number in (0, 1):
            ids, valid = np.asarray([10 * turn + number], np.int32), np.ones(1, bool)
            if turn == 1 and held == "an erasure":  # in step with each other
                tables[number], _ = hkv.erase(tables[number], np.asarray([0], np.int32))
                valid[:] = number == 1
            tables[number], _ = hkv.find_or_insert(tables[number], ids, valid=valid)
            known[number] = sharding.export_changes(tables[number], known[number])
            known[number] = known[number]._replace(
                witnesses=known[number].witnesses and known[number].witnesses._replace(whole=False)
            )
            if (turn, number) == (1, 0):
                continue  # it does not arrive
            if (turn, number) == (2, 0):
                with pytest.raises(ValueError, match="changes must be those behind the table's"):
                    sharding.import_changes(None, serving, known[0], time=times[0])
                sharding.import_changes(None, jax.tree.map(jnp.copy, serving), known[0])  # unseen
                continue
            serving, _ = sharding.import_changes(None, serving, known[number], time=times[number])
            times[number] = known[number].entries.clock


def test_only_parts_of_several_processes_are_of_one(monkeypatch):
    """A table of a process's own is whole, and so is each of replicas."""
    table = table_of([5, 6])
    whole = OPT.init(hkv.create(256, 2, replicas=True))
    tiers = hkv.tiered.Tiers(table, hkv.tiered.create_store(table, 512))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert sharding.export_entries([table]).part == (1, 2)
    assert {chunk.part for chunk in sharding.export_chunks([table], 1)} == {(1, 2)}
    assert sharding.export_changes([table], None).entries.part == (1, 2)
    for export in (
        sharding.export_entries(table),
        sharding.export_entries([jax.device_get(table)]),
        sharding.export_entries([whole]),
        sharding.export_changes(table, None).entries,
        hkv.tiered.export_entries(tiers),
        next(hkv.tiered.export_chunks(tiers)),
    ):
        assert export.part is None
        assert sharding.join_entries([export]) is export


@pytest.mark.parametrize(
    "part", [3, (-1, 2), (2, 2), (0, 0), (1,), (0, 1, 2), ("a", "b"), (0.5, 2), ([1, [2]], 3)]
)
def test_a_part_that_is_no_process_is_refused(part, tmp_path):
    wrong = EXPORTED._replace(part=part)
    for call in (
        lambda: sharding.save_entries(tmp_path / "file", wrong),
        lambda: sharding.join_entries([wrong, wrong]),
        lambda: sharding.import_entries(None, table_of([], dtype=jnp.bfloat16), wrong),
    ):
        with pytest.raises(TypeError, match=r"\.part must be the number of a process and that of"):
            call()
