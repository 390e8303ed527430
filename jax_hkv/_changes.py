"""What has become of a table since it was exported: for tables that follow it, in serving."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from jax_hkv import _entries, _entry_files, _tier_checks, _tier_parts, _tiers, operations
from jax_hkv._checks import as_integer, check_not_used_up
from jax_hkv._compat import of_one_device
from jax_hkv._exchange import owners
from jax_hkv._exported import Exported, are_among, given_keys, shown
from jax_hkv._exports import all_of, first_change, tables_of
from jax_hkv._keys import Keys, as_bool, check_unmasked
from jax_hkv._placement import Placement
from jax_hkv._tier_types import Tiers
from jax_hkv._tiers import trained
from jax_hkv._warnings import warn
from jax_hkv.index import Policy
from jax_hkv.table import Counts, ScoredFindResult, Table, check_one_device, no_counts

_SOME = 1024  # keys of a part that tell whether it is one
_MOST_ROWS = 4096  # that are compared


class Witnesses(NamedTuple):
    """Entries of an earlier time, up to 4096: what stands there has them with these scores.

    Attributes:
      keys: ``uint64[w]``, those of the highest scores.
      scores: ``uint64[w]``.
      policy: of the scores, as in :class:`Exported`.
      whole: whether one process has exported all parts, so that no other's changes are to come.
    """

    keys: np.ndarray
    scores: np.ndarray
    policy: int
    whole: bool


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
      scores: ``uint64[n]``, of the keys, or None as these.
      witnesses: some of the entries of that time, :class:`Witnesses`; None where there was none, or
        where that is not known.
    """

    entries: Exported
    removed: np.ndarray
    since: int | None
    keys: np.ndarray | None
    before: int | None = None
    scores: np.ndarray | None = None
    witnesses: Witnesses | None = None

    def __repr__(self) -> str:
        """Without the entries."""
        if not isinstance(self.removed, np.ndarray):  # a tree of something else
            return shown(self)
        return f"Changes({self.entries!r}, {len(self.removed):,} removed, since={self.since})"

    def without(self, keys: Any, *, erase: bool = True) -> Changes:
        """These changes, naming some keys nowhere: of ids that must go from files.

        Clean all files until the first one that was exported after the trained table's own erase,
        that one included: tables that follow are compared with what each says of the time before.

        Args:
          keys: as of :meth:`jax_hkv.sharding.Exported.without`.
          erase: whether they are named in `removed`, so that tables that have them lose them. False
            for those that begin with changes without them, and have never had them.

        Raises:
          TypeError: naming the argument.

        Example:
          >>> import numpy as np, jax_hkv as hkv
          >>> table, _ = hkv.find_or_insert(hkv.create(128, 2), np.array([5, 6], np.int32))
          >>> changes = export_changes(table, None).without([5])
          >>> changes.entries.keys.tolist(), changes.removed.tolist()
          ([6], [5])
        """
        call = "Changes.without"
        gone = given_keys(call, self.entries, keys)
        removed = _others(self.removed.astype(np.uint64, copy=False), gone)
        if as_bool(call, "erase", erase):
            removed = np.union1d(removed, gone)
        own, scores, witnesses = self.keys, self.scores, self.witnesses
        if own is not None:
            stays = ~are_among(own, gone)
            own, scores = own[stays], None if scores is None else scores[stays]
        if witnesses is not None and len(witnesses.keys):
            stays = ~are_among(witnesses.keys, gone)
            seen = witnesses._replace(keys=witnesses.keys[stays], scores=witnesses.scores[stays])
            witnesses = seen if stays.any() else None  # no witness would say: without entries
        entries = self.entries.select(~are_among(self.entries.keys, gone))
        return Changes(entries, removed, self.since, own, None, scores, witnesses)


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
        than it: of a table that went back, or was given earlier scores by an import, or of tiers
        whose cache lost newer entries, in a step without its prefetch.
      RuntimeError: if a table was used up before.

    Warns:
      UserWarning: if rows of `since` (of up to 4096 entries) changed and their scores did not, so
        that nobody is told: of a table that went back and met the same ids again, or of `assign`.

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
    earlier, known, was = _known_of(call, since)
    policy = trained(parts[0]).policy
    tells_time = policy not in (Policy.LFU, Policy.CUSTOM)
    each = [_entries_of(part) for part in parts]
    keys, scores = (np.concatenate(own) for own in zip(*each, strict=True))
    order = np.argsort(keys)
    keys, scores = keys[order], scores[order]
    if earlier is not None and tells_time:
        first = first_change(call, parts, earlier, "since")
        _check_past(call, (known, was), (keys, scores), earlier.clock, first)
        _warn_of_rows(call, parts, earlier, (keys, scores), first)
    are_parts = not isinstance(tables, (Table, Tiers))
    entries = _exported(parts, earlier if tells_time else None, are_parts)
    # New ones whose scores are old: of an import.
    old = _others(_others(keys, known), np.sort(entries.keys))
    if len(old):
        whole = _exported(parts, None, are_parts)
        came = whole.select(are_among(whole.keys, old))
        entries = _entries.as_one([entries, came])
    clock, witnesses = None, None
    if earlier is not None:
        clock, latest = earlier.clock, np.argsort(was, kind="stable")[-4096:]
        witnesses = Witnesses(known[latest], was[latest], earlier.policy, _are_all(each))
    removed = _others(known, keys)
    return Changes(entries, removed, clock, keys, len(known), scores, witnesses)


def _exported(parts: Sequence[Any], since: Exported | None, are_parts: bool) -> Exported:
    return all_of("sharding.export_entries", parts, None, since, are_parts)


def _entries_of(part: Table | Tiers) -> tuple[np.ndarray, np.ndarray]:
    """The keys of a part, in any order, and their scores."""
    if isinstance(part, Tiers):  # what both have, the cache has later
        (near, own), (behind, scores) = map(_entries_of, part)
        alone = ~are_among(behind, near)
        return np.append(near, behind[alone]), np.append(own, scores[alone])
    return _entries.keys_of(part), _entries.scores_of(part)


def _check_past(
    call: str,
    then: tuple[np.ndarray, np.ndarray],
    now: tuple[np.ndarray, np.ndarray],
    clock: int,
    first: int,
) -> None:
    """What was not looked up since an earlier time has the scores that it had."""
    (before, was), (keys, scores) = then, now
    stays, places = _found(before, keys)
    others = places[(scores[places] < np.uint64(first)) & (scores[places] != was[stays])]
    if len(others):
        raise ValueError(
            f"{call}: since must be of this table's own past, got one of time {clock} in which "
            f"{len(others)} entries have other scores than now, of no later time (one of key "
            f"{int(keys[others[0]])}): the table went back to a checkpoint, was given entries by "
            "an import, or, of tiers, its cache lost newer ones (in a step without its prefetch). "
            "Give None, and fresh tables to follow"
        )


def _warn_of_rows(
    call: str,
    parts: Sequence[Table | Tiers],
    earlier: Exported,
    now: tuple[np.ndarray, np.ndarray],
    first: int,
) -> None:
    """Warns where rows of an earlier export, some of them, changed and are not exported again."""
    some = np.arange(0, len(earlier.keys), max(1, len(earlier.keys) // (4 * _MOST_ROWS)))
    stays, places = _found(earlier.keys[some], now[0])
    some, scores = some[stays], now[1][places]
    some = some[(scores == earlier.scores[some]) & (scores < np.uint64(first))]
    some = some[:: max(1, -(-len(some) // _MOST_ROWS))]
    each = tables_of(parts)
    form = (each[0].dtype, each[0].dim)
    if not len(some) or (earlier.values.dtype, *earlier.values.shape[1:]) != form:
        return
    keys, is_other = earlier.keys[some], np.zeros(len(some), bool)
    rows = np.ascontiguousarray(earlier.values[some]).view(np.uint8)
    for table in each:  # of tiers what the cache has last
        is_here, values = _rows_in(table, keys)
        differs = (np.ascontiguousarray(values).view(np.uint8) != rows[is_here]).any(axis=1)
        is_other[is_here] = differs
    if is_other.any():
        warn(
            f"{call}: rows of table {each[0].name!r} changed since the earlier export, and their "
            f"scores did not ({int(is_other.sum())} of {len(some)} looked at, one of key "
            f"{int(keys[is_other.argmax()])}), so that tables which follow keep the "
            "old ones. If it went back to a checkpoint and the same ids came again, or rows were "
            "assigned, give since=None and fresh tables to follow"
        )


def _are_all(each: Sequence[tuple[np.ndarray, np.ndarray]]) -> bool:
    """Whether parts are all that a table has, as far as the owners of their keys tell.

    A part alone may be one of several: its keys are all of one owner then.
    """
    if jax.process_count() > 1:
        return False
    if len(each) > 1:
        numbers = [_entries.owner_of(keys, len(each)) for keys, _ in each]
        return all((own == number).all() for number, own in enumerate(numbers))
    some = each[0][0][:_SOME]
    if not len(some):
        return True
    return bool(_have_several_owners(Keys.from_numpy(np.resize(some, _SOME)), _most_parts()))


def _most_parts() -> int:
    """How many devices of a kind this process has: the default one's, or CPUs."""
    with contextlib.suppress(RuntimeError):  # JAX was told to do without CPUs
        return max(jax.local_device_count(), jax.local_device_count("cpu"))
    return jax.local_device_count()


@functools.partial(jax.jit, static_argnames="most")
def _have_several_owners(keys: Keys, most: int) -> jax.Array:
    """Whether keys have several owners among any number of devices."""
    each = [owners(keys, devices) for devices in range(2, most + 1)]
    return jnp.array([True, *((own != own[0]).any() for own in each)]).all()


def _others(keys: np.ndarray, than: np.ndarray) -> np.ndarray:
    """Keys that are not among others, which are in order."""
    return keys[~_found(keys, than)[0]]


def _found(keys: np.ndarray, among: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which keys are among others, and where these are. With both in order it goes through once."""
    if not len(among):
        return np.zeros(len(keys), bool), np.zeros(0, np.int64)
    places = np.minimum(np.searchsorted(among, keys), len(among) - 1)
    is_found = among[places] == keys
    return is_found, places[is_found]


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


def _known_of(call: str, since: Any) -> tuple[Exported | None, np.ndarray, np.ndarray]:
    """The earlier export, and the keys of that time, in order, and their scores."""
    if since is None:
        return None, np.zeros(0, np.uint64), np.zeros(0, np.uint64)
    if isinstance(since, Changes):
        if since.keys is None or since.scores is None:
            raise ValueError(
                f"{call}: since must know the table's keys, got changes of a file, which has none: "
                "give those that this process has exported; where followers stand at a checkpoint, "
                "export_entries of what was restored from it; or None and a fresh table to follow"
            )
        return since.entries, since.keys, since.scores
    _entries.check_exported(
        call, "since", since, "give what export_changes returned, or None for the first time"
    )
    order = np.argsort(since.keys)
    return since, since.keys[order], since.scores[order]


@overload
def import_changes(
    placement: Placement | None, table: Table, changes: Changes, *, time: int | None = ...
) -> tuple[Table, ChangeCounts]: ...
@overload
def import_changes(
    placement: Placement | None, table: Tiers, changes: Changes, *, time: int | None = ...
) -> tuple[Tiers, ChangeCounts]: ...


@of_one_device
def import_changes(
    placement: Placement | None, table: Any, changes: Changes, *, time: int | None = None
) -> tuple[Any, ChangeCounts]:
    """A table that follows another one, up to date. For use between steps.

    Removed keys go first, so that there is room; then entries come as by :func:`import_entries`,
    without optimizer rows where the table has none.

    Args:
      placement: of the table, or None for a table of one device.
      table: or `jax_hkv.tiered.Tiers`, whose store takes what the cache has not; with what was
        there at the time that the changes begin at, without entries if there is none; it is used
        up. A server that answers meanwhile gives a copy of its own. Its time is that of the
        followed table: reads leave it alone, but for `touch=True`, and its own writes do not. One
        that begins with :func:`import_entries` has that time unless scores are later.
      changes: of :func:`export_changes`, in order; every process gives all of them, those of
        several exporting processes one after the other.
      time: that of the changes that were imported last, `changes.entries.clock`, of a table whose
        own time has moved, by reads with `touch=True`. Entries that it has later scores of are then
        taken for touched, so that a trained table which went back, and came to a time again, may
        not be noticed. None: the table's own.

    Returns:
      The table, and :class:`ChangeCounts`.

    Raises:
      TypeError: naming the argument.
      ValueError: if the table's time is neither the changes' beginning nor their end (that of the
        same ones, or of another process's part, before), or if it came to it by others, as its
        scores tell; if it has entries before changes from the beginning, as far as its time, keys
        and scores tell, or none where the changes begin with some; if it has another seed, or as
        :func:`import_entries`; before anything is changed.
      RuntimeError: if the table was used up before.

    Example:
      >>> import numpy as np, jax_hkv as hkv
      >>> table, _ = hkv.find_or_insert(hkv.create(128, 2), np.array([5, 6], np.int32))
      >>> serving, counts = import_changes(None, hkv.create(1024, 2), export_changes(table, None))
      >>> int(counts.entries.inserted), int(counts.erased)
      (2, 0)
    """
    call = "sharding.import_changes"
    is_own = time is None
    if isinstance(table, Tiers):
        parts: list[Any] = _tier_parts.between_steps(call, table, placement)
    else:
        _entries.check_target(call, placement, table, "changes")
        parts = _entries.parts_of(placement, table)
    of_time = trained(table)
    _check(call, changes, "an export of entries alone goes to import_entries")
    entries = changes.entries
    if of_time.optimizer is None:
        entries = entries._replace(optimizer={}, shared={})
    for part in parts:
        _entries.check_fits(trained(part), entries, call, "changes.entries")
    if entries.seed not in (None, of_time.seed):
        raise ValueError(
            f"{call}: changes.entries must be of a table with seed {of_time.seed} like this one, "
            f"got seed {entries.seed}: give the changes of the table that this one follows, or "
            "create it with that one's seed and initializer (dataclasses.replace(table, seed=...) "
            "gives a table the seed that its rows were given)"
        )
    owners = _entries.owners_of(placement, of_time)
    now = max(_entries.clock_of(trained(part)) for part in parts)
    if not is_own:
        now = as_integer(call, "time", time, 0, 2**64 - 1)
    begins = changes.since is None
    mine = _of_owners(changes, owners)
    is_whole = mine is changes
    each = _entries.distinct_parts(call, parts)
    size = sum(map(_tiers.size, each))
    if begins and not size:
        parts = [_at_time_zero(part) for part in parts]
    elif begins and (now < entries.clock or _is_another(each, mine.entries, is_own)):
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
            f"{call}: changes must be those behind the table's last ones, at "
            f"{'its' if is_own else 'the given'} time {now}, got changes from {changes.since} to "
            f"{entries.clock}: import all of them in order, each since the one before, or begin "
            "anew with a fresh table and export_changes(table, None); own writes and touching "
            "reads move a table's time (where only reads did, give that of the last ones, time=)"
        )
    elif not _follows(each, mine, now, size, is_own):
        raise ValueError(
            f"{call}: changes must be those behind the table's last ones, got some from "
            f"{changes.since} to {entries.clock} of another past than the table has at its time "
            f"{now}, by its scores: the trained table went back to a checkpoint, and came to a "
            "time again, or own writes and touching reads moved this table's time there; begin "
            "anew with a fresh table and export_changes(table, None)"
        )
    _entries.latest_time(entries, call, "changes.entries")
    total, erased, after = no_counts(), 0, []
    for owner, part in zip(owners, parts, strict=True):
        removed, own = _entries.owned_keys(changes.removed, *owner), _entries.owned(entries, *owner)
        part, gone = _tiers.without(part, removed)
        part, counts = _tiers.import_entries(part, own, latest=0)
        after.append(part)
        total, erased = functools.reduce(_entries.plus, counts, total), erased + gone
    whole_of = _tier_parts.whole_of if isinstance(table, Tiers) else _entries.whole_of
    return whole_of(placement, after), ChangeCounts(total, jnp.int32(erased))


def _found_in(table: Table, keys: np.ndarray) -> list[ScoredFindResult]:
    """What a table has of keys, chunk by chunk."""
    devices = table.values.devices() if isinstance(table.values, jax.Array) else ()
    chunks = jax.device_put(
        list(_entries.key_chunks(keys)), *(devices if len(devices) == 1 else ())
    )
    return [
        operations.find(table, own, valid=is_one, return_scores=True)[1] for own, is_one in chunks
    ]


def _rows_in(table: Table, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which keys a table has, and their rows; one of NumPy arrays goes to no device."""
    if isinstance(table.values, np.ndarray):
        order = np.argsort(keys)
        is_one, places = _found(Keys(np.asarray(table.keys).reshape(-1, 2)).to_numpy(), keys[order])
        is_held = is_one & (np.asarray(table.digests).reshape(-1) != 0)
        slots = np.full(len(keys), -1)
        slots[order[places[is_held[is_one]]]] = np.flatnonzero(is_held)
        return slots >= 0, np.asarray(table.values)[slots[slots >= 0]]
    found = _found_in(table, keys)
    is_here, values = (
        np.concatenate([np.asarray(getattr(own, name)) for own in found])[: len(keys)]
        for name in ("found", "values")
    )
    return is_here, values[is_here]


def _are_there(
    parts: Sequence[Table | Tiers], keys: np.ndarray, scores: np.ndarray, is_own: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Which keys tables have, and of those which with these scores, or later ones unless `is_own`.

    Of tiers what the cache has counts.
    """
    is_there, is_same = np.zeros((2, len(keys)), bool)
    for table in tables_of(parts):
        if found := _found_in(table, keys):
            now = np.concatenate([each.scores.to_numpy() for each in found])[: len(keys)]
            is_here = np.concatenate([np.asarray(each.found) for each in found])[: len(keys)]
            is_there |= is_here
            as_said = now == scores if is_own else now >= scores
            is_same = np.where(is_here, as_said, is_same)
    return keys[is_there], is_same[is_there]


def _of_owners(changes: Changes, owners: Sequence[tuple[int, int]]) -> Changes:
    """What changes say of keys, and their scores, of these parts; of others nothing is known."""
    numbers, (devices, *_) = zip(*owners, strict=True)
    if set(numbers) == set(range(devices)):
        return changes
    entries, was = changes.entries, changes.witnesses

    def are_owned(keys: np.ndarray) -> np.ndarray:
        return np.isin(_entries.owner_of(keys, devices), numbers)

    if was is not None:
        own = are_owned(was.keys)
        was = was._replace(keys=was.keys[own], scores=was.scores[own])
    own = are_owned(entries.keys)
    return changes._replace(
        entries=entries._replace(keys=entries.keys[own], scores=entries.scores[own]),
        removed=changes.removed[are_owned(changes.removed)],
        witnesses=was,
    )


def _is_another(parts: Sequence[Any], entries: Exported, is_own: bool) -> bool:
    """Whether tables of a time that changes end at are neither behind all of these nor without any.

    They hold all after the same changes, and none after those of another process.
    """
    keys, are_same = _are_there(parts, entries.keys, entries.scores, is_own)
    return bool(len(keys) and not (len(keys) == len(entries.keys) and are_same.all()))


def _follows(parts: Sequence[Any], changes: Changes, now: int, size: int, is_own: bool) -> bool:
    """Whether tables of a time that changes begin or end at stand where these begin, or end.

    At the end they are behind the same changes, whose scores they have, or behind those of another
    process, and stand at the beginning of these. What found no room is not there.
    """
    entries, was = changes.entries, changes.witnesses
    # Not known, or with scores of one's own.
    if was is None or was.policy != trained(parts[0]).policy:
        return True

    are_there = functools.partial(_are_there, parts, is_own=is_own)

    def are_as_said(keys: np.ndarray, scores: np.ndarray) -> bool:
        there, are_same = are_there(keys, scores)
        return bool(2 * len(there) >= min(len(keys), size) and are_same.all())

    is_first = now == changes.since or not was.whole
    is_more = was.whole and changes.before is not None and size > changes.before
    is_any = bool(len(was.keys)) or not len(are_there(entries.keys, entries.scores)[0])
    if is_first and not is_more and is_any and are_as_said(was.keys, was.scores):
        return True
    stays = ~are_among(was.keys, np.append(entries.keys, changes.removed))
    are_same = are_there(was.keys[stays], was.scores[stays])[1].all()
    return bool(now == entries.clock and are_same and are_as_said(entries.keys, entries.scores))


def _at_time_zero(part: Any) -> Any:
    """A table, or tiers, without entries, whose time will be that of what it follows."""
    if isinstance(part, Tiers):
        return Tiers(*map(_at_time_zero, part))
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
    if changes.witnesses is not None:
        keys, scores, *others = changes.witnesses
        arrays |= {"witnesses": np.stack([keys, scores]), "witnessed": np.array(others, np.uint64)}
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
        witnesses = None
        if "witnesses" in saved:
            keys, scores = saved["witnesses"]
            policy, whole = saved["witnessed"].tolist()
            witnesses = Witnesses(keys, scores, policy, bool(whole))
        changes = Changes(
            entries,
            saved["removed"],
            since[0] if since else None,
            keys=None,
            before=before,
            witnesses=witnesses,
        )
        _check("it", changes, "")
        return changes

    return _entry_files.load_arrays("changes", path, read)
