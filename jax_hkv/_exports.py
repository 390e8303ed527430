"""The entries of whole tables on the host: all at once, or so many at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jax_hkv import _tiers
from jax_hkv._checks import as_integer, check_known, check_not_used_up
from jax_hkv._compat import of_one_device
from jax_hkv._entries import (
    LATE,
    Exported,
    as_one,
    check_exported,
    chunks_of,
    clock_of,
    common_of,
    distinct_parts,
    epoch_of,
    join_entries,
    padded,
    slots_at_once,
)
from jax_hkv._placed import is_saved
from jax_hkv._tier_types import Tiers
from jax_hkv.index import Policy
from jax_hkv.table import Table, check_one_device, check_table

MOST = 2**20  # entries at a time, where nobody says how many


@of_one_device
def export_entries(
    tables: Table | Sequence[Table],
    *,
    min_score: int | None = None,
    changed_since: Exported | None = None,
) -> Exported:
    """The entries of a table, or of the parts of a table. For use between steps.

    Args:
      tables: a table of one device, or what :meth:`Placement.shards` returned of one. Of replicas
        one is exported (of a process that holds parts of several, each part once).
      min_score: the lowest score to export, 0 to 2**64 - 1; None: all entries.
      changed_since: an earlier export of the table, of which what is as it was then is left out.
        Training writes the score of an entry at every lookup: under LRU and EPOCH_LRU the time of
        it, so that what was looked up since is exported; under EPOCH_LFU its epoch, and what was
        looked up in the epoch of that export or later is. It says nothing of removed entries, nor
        of rows that changed without their score: by `assign` of rows alone, by an import, or by an
        update whose lookup came before. Of a table that went back since, to a checkpoint or to a
        lower epoch, export everything: its times come twice. The last increment is an earlier
        export for the next one.

    Returns:
      The entries, part by part in the order of slots.

    Raises:
      TypeError: if what is given is no table, or one that is spread over devices, if `min_score`
        is no integer, or `changed_since` no export.
      ValueError: if there is no part, if the score is not one, if both are given, if the export is
        of a later time than the table, or if scores do not tell what has changed: those of LFU are
        counts, those of CUSTOM the caller's.

    Example:
      >>> import jax_hkv as hkv
      >>> table, _ = hkv.find_or_insert(hkv.create(128, 2), np.array([5, 6], np.int32))
      >>> sorted(export_entries(table).keys.tolist())
      [5, 6]
      >>> earlier = export_entries(table)
      >>> table, _ = hkv.find_or_insert(table, np.array([6, 7], np.int32))
      >>> sorted(export_entries(table, changed_since=earlier).keys.tolist())
      [6, 7]
    """
    call = "sharding.export_entries"
    parts = _parts_of(call, tables)
    return all_of(call, parts, min_score, changed_since, not isinstance(tables, Table))


@of_one_device
def export_chunks(
    tables: Table | Sequence[Table],
    entries: int = MOST,
    *,
    min_score: int | None = None,
    changed_since: Exported | None = None,
) -> Iterator[Exported]:
    """As :func:`export_entries`, so many entries at a time: of a table that fills the memory.

    Together the chunks are that export, in its order. Each is one by itself, with the time and what
    rows share, and goes to :func:`save_entries` and :func:`import_entries`; imported one after the
    other into a table with room for all, they make the table that one import makes. The host holds
    the chunk that the caller has, the next one, and what is being read for it.

    Chunks are of the tables as they were given, whatever becomes of the tables that operations
    return meanwhile. Operations that use those up (donate them) come behind the last chunk, or get
    a copy: ``jax.tree.map(jnp.copy, table)``.

    Args:
      tables: see :func:`export_entries`.
      entries: the most entries of a chunk, at least 1. All chunks but the last have as many.
      min_score: see there.
      changed_since: see there.

    Returns:
      An iterator of exports; of tables without entries, of one without any.

    Raises:
      TypeError, ValueError: naming the argument, before the first chunk.
      RuntimeError: if a table was used up before, or between two chunks.

    Example:
      >>> import jax_hkv as hkv
      >>> table, _ = hkv.find_or_insert(hkv.create(128, 2), np.arange(100, dtype=np.int32))
      >>> [len(chunk.keys) for chunk in export_chunks(table, 40)]
      [40, 40, 20]
    """
    call = "sharding.export_chunks"
    parts = _parts_of(call, tables)
    return chunked(call, parts, entries, min_score, changed_since, not isinstance(tables, Table))


def _parts_of(call: str, tables: Any) -> list[Table]:
    is_variable = hasattr(tables, "get_value")  # which can be iterated whatever it holds
    is_one = isinstance(tables, Table) or is_variable or not isinstance(tables, Iterable)
    parts: Any = [tables] if is_one else tables
    parts = list(parts)
    for part in parts:
        check_table(call, part, "tables")
        check_one_device(call, part)
    if not parts:
        raise ValueError(f"{call}: tables must be a table or parts of one, got none")
    return distinct_parts(call, parts)


def _lowest_score(
    call: str,
    parts: Sequence[Table | Tiers],
    min_score: int | None,
    changed_since: Exported | None,
) -> int | None:
    """The lowest score of what is exported; None: everything is."""
    if min_score is not None:
        min_score = as_integer(call, "min_score", min_score, 0, 2**64 - 1)
    if changed_since is None:
        return min_score
    if min_score is not None:
        raise ValueError(
            f"{call}: changed_since makes a min_score, got one of {min_score} too: give one of them"
        )
    return first_change(call, parts, changed_since)


def first_change(
    call: str, parts: Sequence[Table | Tiers], earlier: Exported, argument: str = "changed_since"
) -> int:
    """The lowest score of what was scored after an export."""
    own = list(map(_tiers.trained, parts))
    policy = own[0].policy
    check_exported(call, argument, earlier, "it is an export of this table")
    if policy in (Policy.LFU, Policy.CUSTOM):
        raise ValueError(
            f"{call}: {argument} needs scores that tell the time, and those of a table under "
            f"Policy.{policy.name} do not: export all entries, or create the table under LRU or an "
            "EPOCH policy"
        )
    now, epoch = max(map(clock_of, own)), max(map(epoch_of, own))
    if earlier.clock > now or earlier.epoch > epoch:
        raise ValueError(
            f"{call}: {argument} must be an export of an earlier time of this table, got one of "
            f"time {earlier.clock} in epoch {earlier.epoch} for a table at {now} in {epoch}: of "
            "one that went back export all, with None, for fresh tables"
        )
    if policy is Policy.LRU:
        return min(earlier.clock + 1, 2**64 - 1)
    is_told = policy is Policy.EPOCH_LRU and earlier.clock >> 32 == now >> 32
    low = min((earlier.clock & 0xFFFFFFFF) + 1, 0xFFFFFFFF) if is_told else 0
    return earlier.epoch << 32 | low


def all_of(
    call: str,
    parts: Sequence[Table | Tiers],
    min_score: int | None,
    changed_since: Exported | None,
    are_parts: bool,
) -> Exported:
    """The entries of parts, tables or tiers of one device each, as one export.

    Args:
      call: for errors.
      parts: of one table.
      min_score: see :func:`export_entries`.
      changed_since: see there.
      are_parts: whether other processes may have others.
    """
    return as_one(list(_cut(call, parts, None, min_score, changed_since, are_parts)))


def chunked(
    call: str,
    parts: Sequence[Table | Tiers],
    entries: int,
    min_score: int | None,
    changed_since: Exported | None,
    are_parts: bool,
) -> Iterator[Exported]:
    """As :func:`all_of`, so many entries at a time, in any mesh that is set at its turns."""
    most = as_integer(call, "entries", entries, 1, 2**63 - 1)
    cut = _cut(call, parts, most, min_score, changed_since, are_parts)
    # An iterator that keeps nothing of what it has given: the caller may be done with it.
    return iter(functools.partial(of_one_device(next), cut, None), None)


def _cut(
    call: str,
    parts: Sequence[Table | Tiers],
    most: int | None,
    min_score: int | None,
    changed_since: Exported | None,
    are_parts: bool,
) -> Iterator[Exported]:
    """At least one export, of `most` entries each but for the last; None: all in one or a few."""
    check_not_used_up(call, jax.tree.leaves(list(parts)), "table")
    check_known(call, jax.tree.leaves(parts[0])[0])
    lowest = _lowest_score(call, parts, min_score, changed_since)
    if most is None and lowest is not None:
        most = MOST  # how many have some score is not known before, nor whether there is room
    common = join_entries([common_of(_tiers.trained(part)) for part in parts])
    if are_parts and jax.process_count() > 1 and _are_split(parts):
        common = common._replace(part=(jax.process_index(), jax.process_count()))
    # At most: what cache and store both have counts twice.
    left = sum(int(np.asarray(table.index.occupancy).sum()) for table in tables_of(parts))
    # Not by how many there are: a program is compiled for each number of slots.
    read = MOST if most is None else most
    chunks = (chunk for part in parts for chunk in _chunks(call, part, read, lowest))
    return _filled(common, chunks, max(1, left) if most is None else most, left)


def _are_split(parts: Sequence[Table | Tiers]) -> bool:
    """Whether parts may be some of a table's: not replicas, nor all of a checkpoint."""
    first = _tiers.trained(parts[0])
    return first.replicas is not True and not is_saved(first)


def _filled(
    common: Exported, chunks: Iterator[tuple[Any, ...]], most: int, left: int
) -> Iterator[Exported]:
    """Copies chunks into exports of `most` entries; `left` is how many may come at all."""
    room, filled, is_any = None, 0, False
    for chunk in chunks:
        start, count = 0, len(chunk[0])
        while start < count:
            if room is None:
                room, filled = _room_for(min(most, max(left, count - start)), chunk), 0
            end = min(count, start + len(room[0]) - filled)
            for own, leaf in zip(jax.tree.leaves(room), jax.tree.leaves(chunk), strict=True):
                own[filled : filled + end - start] = leaf[start:end]
            filled, left, start = filled + end - start, left - end + start, end
            if filled == len(room[0]):
                yield Exported(*room, *common[len(room) :])
                room, is_any = None, True
    if room is not None:
        for own in jax.tree.leaves(room):
            own.resize((filled, *own.shape[1:]), refcheck=False)  # in place: nobody else has it
        yield Exported(*room, *common[len(room) :])
    elif not is_any:
        yield common


def _room_for(entries: int, chunk: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arrays for so many entries like those of a chunk."""
    return jax.tree.map(lambda leaf: np.empty((entries, *leaf.shape[1:]), leaf.dtype), chunk)


def tables_of(parts: Sequence[Table | Tiers]) -> list[Table]:
    """The tables of parts; of tiers the cache, whose entries count, behind its store."""
    return [
        table for part in parts for table in (part[::-1] if isinstance(part, Tiers) else [part])
    ]


def _chunks(
    call: str, part: Table | Tiers, most: int, lowest: int | None
) -> Iterator[tuple[np.ndarray, Any, Any, Any]]:
    """Entries of a part: those of the store that the cache has not, and those of the cache."""
    part = _on_a_device(call, part)
    if not isinstance(part, Tiers):
        yield from chunks_of(call, part, lowest, most)
        return
    slots = slots_at_once(part.store, most)
    for chunk in chunks_of(call, part.store, lowest, most):
        keys = chunk[0]
        check_not_used_up(call, jax.tree.leaves(part.cache), "tiers.cache", LATE)
        # Of one size, so that one program asks for all of them.
        is_near = _tiers.is_in(part.cache, padded(keys, slots))[: len(keys)]
        yield jax.tree.map(lambda leaf, others=~is_near: leaf[others], chunk)
    yield from chunks_of(call, part.cache, lowest, most)


def _on_a_device(call: str, part: Table | Tiers) -> Any:
    """Saved tables on a device: they are not put there once for each piece that is read of them."""
    tables = part if isinstance(part, Tiers) else [part]
    if not any(map(is_saved, tables)):
        return part
    try:
        device = _tiers.host(call)
    except RuntimeError:  # JAX was told to do without
        device = None
    after = [jax.device_put(own, device) if is_saved(own) else own for own in tables]
    return Tiers(*after) if isinstance(part, Tiers) else after[0]
