"""What has become of a table since it was exported: for tables that follow it, in serving."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from jax_hkv import _entries, _entry_files, _tier_checks, _tiers, whole_table
from jax_hkv._checks import as_integer, check_not_used_up
from jax_hkv._compat import of_one_device
from jax_hkv._entries import Exported
from jax_hkv._exports import all_of, first_change
from jax_hkv._keys import Keys, check_unmasked
from jax_hkv._placement import Placement
from jax_hkv._tiers import Tiers
from jax_hkv.index import Policy
from jax_hkv.table import Counts, Table, check_one_device, no_counts


class Changes(NamedTuple):
    """What has become of a table since an earlier time, on the host.

    Attributes:
      entries: new ones and those that were looked up since; of a table whose scores tell no time
        (LFU, CUSTOM), or if there is no earlier time, all.
      removed: ``uint64[m]``, keys that were there and are not any more: evicted, erased, expired.
      since: the clock at that time; None: there was none.
      keys: ``uint64[n]``, all that are there now, in order; None where they are not known, from a
        file.
      before: how many entries there were at that time; None where that is not known.
    """

    entries: Exported
    removed: np.ndarray
    since: int | None
    keys: np.ndarray | None
    before: int | None = None


class ChangeCounts(NamedTuple):
    """What became of changes in a table; of this process's devices.

    Attributes:
      entries: of those that were imported: `evicted` and `refused` ones found no room, and no later
        changes bring them back.
      erased: removed keys that the table had, an ``int32`` scalar.
    """

    entries: Counts
    erased: Int32[jax.Array, ""]


@of_one_device
def export_changes(
    tables: Table | Tiers | Sequence[Table | Tiers], since: Changes | Exported | None
) -> Changes:
    """What has become of a table since an earlier export: for one that follows it.

    For use between steps, none of which lies between a lookup and its update. It tells the earlier
    keys from those of now on the host. Rows that changed without their scores are not seen: see
    :func:`export_entries`, `changed_since`. Of a table that went back to a checkpoint everything is
    to be exported: its times come twice, and what became of it in them is not told from what was.

    Args:
      tables: a table of one device, or `jax_hkv.tiered.Tiers` of one; or the parts of a table, of
        `Placement.shards` (with stores ``Tiers(*pair)`` of each part and its store), of which every
        process exports its own. Of replicas one is exported.
      since: what this returned the last time, in this process; or an export of all entries. None:
        everything is new.

    Returns:
      The changes, for :func:`import_changes`, and as `since` of the next ones.

    Raises:
      TypeError: naming the argument.
      ValueError: naming the argument; if entries of `since` have other scores now, of no later time
        than it: of a table that went back, or was given earlier scores by an import.
      RuntimeError: if a table was used up before.

    Example:
      >>> import numpy as np, jax_hkv as hkv
      >>> table, _ = hkv.find_or_insert(hkv.create(128, 2), np.array([5, 6], np.int32))
      >>> first = export_changes(table, None)
      >>> table, _ = hkv.erase(table, np.array([5], np.int32))
      >>> table, _ = hkv.find_or_insert(table, np.array([7], np.int32))
      >>> changes = export_changes(table, first)
      >>> changes.entries.keys.tolist(), changes.removed.tolist()
      ([7], [5])
    """
    call = "sharding.export_changes"
    parts = _parts_of(call, tables)
    earlier, known = _known_of(call, since)
    policy = parts[0].cache.policy if isinstance(parts[0], Tiers) else parts[0].policy
    tells_time = policy not in (Policy.LFU, Policy.CUSTOM)
    if earlier is not None and tells_time:
        _check_past(call, parts, earlier)
    entries = _exported(parts, earlier if tells_time else None)
    keys = np.sort(np.concatenate([_keys_of(part) for part in parts]))
    # New ones whose scores are old: of an import.
    old = _others(_others(keys, known), np.sort(entries.keys))
    if len(old):
        whole = _exported(parts, None)
        came = _entries.chosen(whole, np.isin(whole.keys, old))
        entries = _entries.as_one([entries, came])
    clock = None if earlier is None else earlier.clock
    return Changes(entries, _others(known, keys), clock, keys, len(known))


def _exported(parts: Sequence[Any], since: Exported | None) -> Exported:
    return all_of("sharding.export_entries", parts, None, since)


def _check_past(call: str, parts: Sequence[Any], earlier: Exported) -> None:
    """What was not looked up since an earlier time has the scores that it had."""
    first = np.uint64(first_change("sharding.export_entries", parts, earlier))
    for part in parts:
        at, scores = _scores_of(part, earlier.keys)
        others = at[(scores < first) & (scores != earlier.scores[at])]
        if len(others):
            key = int(earlier.keys[others[0]])
            raise ValueError(
                f"{call}: since must be of this table's own past, got one of time {earlier.clock} "
                f"in which {len(others)} entries have other scores than now, of no later time (one "
                f"of key {key}): the table went back to a checkpoint, or was given entries by an "
                "import. Give None, and fresh tables to follow"
            )


def _scores_of(part: Table | Tiers, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which of some keys there are, by their positions, and the scores of these."""
    if isinstance(part, Tiers):  # what both have, the cache has later
        (near, own), (behind, scores) = (_scores_of(one, keys) for one in (part.cache, part.store))
        alone = ~np.isin(behind, near)
        return np.append(near, behind[alone]), np.append(own, scores[alone])
    scores = Keys(np.asarray(part.index.scores).reshape(-1, 2)).to_numpy()
    scores = scores[np.asarray(part.digests).reshape(-1) != 0]
    _, own, at = np.intersect1d(_entries.keys_of(part), keys, return_indices=True)
    return at, scores[own]


def _others(keys: np.ndarray, than: np.ndarray) -> np.ndarray:
    """Keys that are not among others; both in order, so that a search goes through them once."""
    if not len(than):
        return keys
    places = np.minimum(np.searchsorted(than, keys), len(than) - 1)
    return keys[than[places] != keys]


def _parts_of(call: str, tables: Any) -> list[Any]:
    parts = [tables] if isinstance(tables, (Table, Tiers)) else tables
    if not isinstance(parts, Sequence) or not parts:
        raise TypeError(
            f"{call}: tables must be a table, jax_hkv.tiered.Tiers, or parts of one, got "
            f"{type(tables).__name__}: of a table over devices give placement.shards(table)"
        )
    for part in parts:
        if isinstance(part, Tiers):
            _tier_checks.check(call, part)
        else:
            check_one_device(call, part)
            check_not_used_up(call, jax.tree.leaves(part), "table")
    return _entries.distinct_parts(call, parts)


def _known_of(call: str, since: Any) -> tuple[Exported | None, np.ndarray]:
    """The earlier export, and the keys of that time."""
    if since is None:
        return None, np.zeros(0, np.uint64)
    if isinstance(since, Changes):
        if since.keys is None:
            raise ValueError(
                f"{call}: since must know the table's keys, got changes of a file, which has none: "
                "give those that this process has exported; where followers stand at a checkpoint, "
                "export_entries of what was restored from it; or None and a fresh table to follow"
            )
        return since.entries, since.keys
    _entries.check_exported(
        call, "since", since, "give what export_changes returned, or None for the first time"
    )
    return since, np.sort(since.keys)


def _keys_of(part: Table | Tiers) -> np.ndarray:
    if isinstance(part, Tiers):
        return np.concatenate([_entries.keys_of(part.store), _tiers.keys_of_cache_alone(part)])
    return _entries.keys_of(part)


@of_one_device
def import_changes(
    placement: Placement | None, table: Table, changes: Changes
) -> tuple[Table, ChangeCounts]:
    """A table that follows another one, up to date. For use between steps.

    Removed keys go first, so that there is room; then entries come as by :func:`import_entries`,
    without optimizer rows where the table has none.

    Args:
      placement: of the table, or None for a table of one device.
      table: with what was there at the time that the changes begin at, without entries if there
        is none; it is used up. A server that answers meanwhile gives a copy of its own. Its time is
        that of the followed table: reads leave it alone, but for `touch=True`, and its own writes
        do not. One that begins with :func:`import_entries` has that time unless scores are later.
      changes: of :func:`export_changes`, in order; every process gives all of them, those of
        several exporting processes one after the other.

    Returns:
      The table, and :class:`ChangeCounts`.

    Raises:
      TypeError: naming the argument.
      ValueError: if the table's time is neither the changes' beginning nor their end (that of the
        same ones, or of another process's part, before), if it has entries before changes from the
        beginning, as far as its time and keys tell, or none where the changes begin with some, if
        it has another seed, or as :func:`import_entries`; before anything is changed.
      RuntimeError: if the table was used up before.

    Example:
      >>> import numpy as np, jax_hkv as hkv
      >>> table, _ = hkv.find_or_insert(hkv.create(128, 2), np.array([5, 6], np.int32))
      >>> serving, counts = import_changes(None, hkv.create(1024, 2), export_changes(table, None))
      >>> int(counts.entries.inserted), int(counts.erased)
      (2, 0)
    """
    call = "sharding.import_changes"
    _entries.check_target(call, placement, table, "changes")
    _check(call, changes, "an export of entries alone goes to import_entries")
    entries = changes.entries
    if table.optimizer is None:
        entries = entries._replace(optimizer={}, shared={})
    parts = _entries.parts_of(placement, table)
    for part in parts:
        _entries.check_fits(part, entries, call, "changes.entries")
    if entries.seed not in (None, table.seed):
        raise ValueError(
            f"{call}: changes.entries must be of a table with seed {table.seed} like this one, got "
            f"seed {entries.seed}: give the changes of the table that this one follows, or create "
            "it with that one's seed and initializer (dataclasses.replace(table, seed=...) gives a "
            "table the seed that its rows were given)"
        )
    owners = _entries.owners_of(placement, table)
    now = max(map(_entries.clock_of, parts))
    begins = changes.since is None
    is_whole = {number for number, _ in owners} == set(range(owners[0][1]))
    size = sum(int(whole_table.size(part)) for part in _entries.distinct_parts(call, parts))
    if begins and not size:
        parts = [_at_time_zero(part) for part in parts]
    elif begins and (now < entries.clock or _is_another(owners, parts, entries)):
        raise ValueError(
            f"{call}: table must have no entries before changes from the beginning (since "
            f"None), got one with {size}, which these would not remove, or without some of these, "
            "which found no room: give a fresh one, or clear it"
        )
    # Of a part of the table, another process's or a group's, nobody knows how many there were. And
    # after these very changes there may be none.
    elif changes.before and not size and is_whole and (now == changes.since or len(entries.keys)):
        raise ValueError(
            f"{call}: table must have the {changes.before} entries that were there before these "
            "changes, got one without entries: import all changes in order, from those since None"
        )
    # Behind the changes of another process the table has their time.
    elif now not in (changes.since, entries.clock):
        raise ValueError(
            f"{call}: changes must be those behind the table's last ones, at its time {now}, "
            f"got changes from {changes.since} to {entries.clock}: import all of them in order, "
            "each since the one before, or begin anew with a fresh table and "
            "export_changes(table, None); own writes and touching reads move a table's time"
        )
    elif now != changes.since and _is_of_another_past(owners, parts, changes):
        raise ValueError(
            f"{call}: changes must be those behind the table's last ones, got some from "
            f"{changes.since} to its time {now} with other scores than those that brought it "
            "there: the trained table went back to a checkpoint; begin anew with a fresh table "
            "and export_changes(table, None)"
        )
    _entries.latest_time(entries, call, "changes.entries")
    total, erased, after = no_counts(), 0, []
    for owner, part in zip(owners, parts, strict=True):
        part, gone = _entries.without(part, _entries.owned_keys(changes.removed, *owner))
        part, counts = _entries.fill(part, _entries.owned(entries, *owner), latest=0)
        after.append(part)
        total, erased = _entries.plus(total, counts), erased + gone
    return _entries.whole_of(placement, after), ChangeCounts(total, jnp.int32(erased))


def _present(
    owners: Sequence[Any], parts: Sequence[Table], entries: Exported
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which entries tables have, of those that they own, and these ones' scores here and there."""
    entries = entries._replace(values=entries.values[:, :0], optimizer={})  # rows need no copies
    found = []
    for owner, part in zip(owners, parts, strict=True):
        own = _entries.owned(entries, *owner)
        at, scores = _scores_of(part, own.keys)
        found.append((np.isin(np.arange(len(own.keys)), at), scores, own.scores[at]))
    present, scores, theirs = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return present, scores, theirs


def _is_another(owners: Sequence[Any], parts: Sequence[Table], entries: Exported) -> bool:
    """Whether tables of a time that changes end at are neither behind all of these nor without any.

    They hold all after the same changes, and none after those of another process.
    """
    present, scores, theirs = _present(owners, parts, entries)
    return bool(present.any() and not (present.all() and (scores == theirs).all()))


def _is_of_another_past(owners: Sequence[Any], parts: Sequence[Table], changes: Changes) -> bool:
    """Whether tables of a time that changes end at have come there by others than these.

    Behind the same changes all scores are theirs, and behind those of another process none is of a
    time since they begin. Scores of other policies than LRU and EPOCH_LRU tell no such times.
    """
    entries, policy = changes.entries, parts[0].policy
    if policy not in (Policy.LRU, Policy.EPOCH_LRU) or changes.since is None:
        return False
    first, last = changes.since, entries.clock
    if policy is Policy.EPOCH_LRU:
        first, last = (entries.epoch << 32 | time & 0xFFFFFFFF for time in (first, last))
    _, scores, theirs = _present(owners, parts, entries)
    is_between = (scores > np.uint64(first)) & (scores <= np.uint64(last))
    return bool(is_between.any() and (scores != theirs).any())


def _at_time_zero(part: Table) -> Table:
    """A table without entries, whose time will be that of what it follows."""
    own = part.index
    new = {name: jnp.zeros_like(getattr(own, name)) for name in ("clock", "epoch", "oldest")}
    return dataclasses.replace(part, index=dataclasses.replace(own, **new))


def _check(call: str, changes: Any, remedy: str) -> None:
    if not isinstance(changes, Changes):
        raise TypeError(
            f"{call}: changes must be what export_changes returned, got {type(changes).__name__}: "
            f"{remedy}"
        )
    _entries.check_exported(call, "changes.entries", changes.entries, "leave them as they were")
    removed = changes.removed
    check_unmasked(f"{call}: changes.removed", removed)
    if not isinstance(removed, np.ndarray) or removed.dtype != np.uint64 or removed.ndim != 1:
        raise TypeError(
            f"{call}: changes.removed must be uint64[m] of NumPy, got {type(removed).__name__} "
            f"{getattr(removed, 'dtype', '')}{list(np.shape(removed))}: leave it as it was"
        )
    if changes.before is not None:
        as_integer(call, "changes.before", changes.before, 0, 2**64 - 1)


def save_changes(path: Any, changes: Changes) -> None:
    """Writes changes as one file, as :func:`save_entries` does; without their `keys`.

    Args:
      path: of the file, a path or its name.
      changes: of :func:`export_changes`.

    Raises:
      TypeError: if they are none, or if it is no path.
      OSError: if the path is a directory's, or the file cannot be written.

    Example:
      >>> import tempfile, jax_hkv as hkv
      >>> path = tempfile.mkdtemp() + "/changes"
      >>> save_changes(path, export_changes(hkv.create(128, 2), None))
      >>> load_changes(path).entries.values.shape
      (0, 2)
    """
    call = "sharding.save_changes"
    _check(call, changes, "an export of entries alone goes to save_entries")
    since = np.zeros(0, np.uint64) if changes.since is None else np.array([changes.since], "u8")
    # What may be absent comes first: in a damaged file the last arrays may be part of another.
    arrays = {} if changes.before is None else {"before": np.array(changes.before, np.uint64)}
    arrays |= {"removed": changes.removed, "since": since}
    _entry_files.write_arrays(call, path, arrays | _entry_files.arrays_of(changes.entries))


def load_changes(path: Any) -> Changes:
    """What :func:`save_changes` wrote.

    Raises:
      TypeError: if it is no path.
      ValueError: if the file is one of :func:`save_entries`, another one, or not a whole one.
      OSError: if there is none.
    """

    def read(saved: Any) -> Changes:
        since = [operator.index(time) for time in saved["since"]]
        entries = _entry_files.entries_of_arrays(saved)
        before = operator.index(saved["before"][()]) if "before" in saved else None
        changes = Changes(entries, saved["removed"], *(since or [None]), keys=None, before=before)
        _check("it", changes, "")
        return changes

    return _entry_files.load_arrays("changes", path, read)
