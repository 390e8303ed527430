"""All entries of two tables that are one on the host, and back. See :mod:`jax_hkv.tiered`."""

from __future__ import annotations

from collections.abc import Iterator

from jax_hkv import _entries, _tier_parts, _tiers
from jax_hkv._compat import of_one_device
from jax_hkv._exported import Exported
from jax_hkv._exports import MOST, all_of, chunked
from jax_hkv._placement import Placement
from jax_hkv._tier_types import Tiers
from jax_hkv.table import Counts


@of_one_device
def export_entries(
    tiers: Tiers,
    *,
    min_score: int | None = None,
    changed_since: Exported | None = None,
    placement: Placement | None = None,
) -> Exported:
    """The entries of both tables as those of one, each once. For use between steps.

    Args:
      tiers: to read. They may be a checkpoint's, NumPy arrays, and the mesh of the placement then a
        ``jax.sharding.AbstractMesh``: see :func:`jax_hkv.tiered.create_store`.
      min_score: see :func:`jax_hkv.sharding.export_entries`.
      changed_since: an earlier export of the tiers, see there.
      placement: of a cache over devices, of whose parts in this process entries are exported;
        those of several processes go together by `jax_hkv.sharding.join_entries`.

    Returns:
      The entries, for :func:`import_entries`, or for `jax_hkv.sharding.import_entries` into one
      table.

    Raises:
      TypeError, ValueError: as that of one table.
      RuntimeError: if tables were used up before.

    Example:
      >>> import numpy as np, jax_hkv as hkv
      >>> cache = hkv.create(128, 2)
      >>> tiers = Tiers(cache, hkv.tiered.create_store(cache, 1024))
      >>> for ids in np.arange(200, dtype=np.int32).reshape(2, 100):
      ...     tiers, _ = hkv.tiered.prefetch(tiers, ids)
      >>> len(export_entries(tiers).keys)
      200
    """
    call = "tiered.export_entries"
    parts = _tier_parts.to_read(call, tiers, placement)
    return all_of(call, parts, min_score, changed_since, placement is not None)


@of_one_device
def export_chunks(
    tiers: Tiers,
    entries: int = MOST,
    *,
    min_score: int | None = None,
    changed_since: Exported | None = None,
    placement: Placement | None = None,
) -> Iterator[Exported]:
    """As :func:`export_entries`, so many entries at a time: of a store that fills the memory.

    Args:
      tiers: to read; until the last chunk nothing may use them up, a `prefetch` neither.
      entries: the most entries of a chunk, at least 1. All chunks but the last have as many.
      min_score: see :func:`jax_hkv.sharding.export_entries`.
      changed_since: see there.
      placement: see :func:`export_entries`.

    Returns:
      An iterator of exports, see :func:`jax_hkv.sharding.export_chunks`.

    Raises:
      TypeError, ValueError: naming the argument, before the first chunk.
      RuntimeError: if tables were used up before, or between two chunks.

    Example:
      >>> import numpy as np, jax_hkv as hkv
      >>> cache = hkv.create(128, 2)
      >>> tiers = Tiers(cache, hkv.tiered.create_store(cache, 1024))
      >>> tiers, _ = hkv.tiered.prefetch(tiers, np.arange(50, dtype=np.int32))
      >>> [len(chunk.keys) for chunk in export_chunks(tiers, 40)]
      [40, 10]
    """
    call = "tiered.export_chunks"
    parts = _tier_parts.to_read(call, tiers, placement)
    return chunked(call, parts, entries, min_score, changed_since, placement is not None)


@of_one_device
def import_entries(
    tiers: Tiers, exported: Exported, *, placement: Placement | None = None
) -> tuple[Tiers, Counts]:
    """Puts exported entries into the store, from where they come when they are looked up.

    What the cache has of their keys is overwritten there, and clock, epoch and step counts are
    brought up to date, as those of one table would be. For use between steps.

    Args:
      tiers: which are used up.
      exported: of :func:`export_entries`, or of `jax_hkv.sharding.export_entries` of one table.
      placement: of a cache over devices; every process gives all entries.

    Returns:
      The tables, and the counts of this process's: `evicted` and `refused` entries found no room in
      the store; `hits` are those that one of the tables had already.

    Raises:
      TypeError, ValueError: as `jax_hkv.sharding.import_entries`, before anything is changed.
      RuntimeError: if tables were used up before.

    Example:
      >>> import numpy as np, jax_hkv as hkv
      >>> table, _ = hkv.find_or_insert(hkv.create(1024, 2), np.arange(500, dtype=np.int32))
      >>> cache = hkv.create(128, 2)
      >>> tiers = Tiers(cache, hkv.tiered.create_store(cache, 1024))
      >>> tiers, counts = import_entries(tiers, hkv.sharding.export_entries(table))
      >>> int(counts.inserted), hkv.tiered.size(tiers)
      (500, 500)
    """
    call = "tiered.import_entries"
    parts = _tier_parts.between_steps(call, tiers, placement)
    _entries.check_exported(call, "exported", exported, "make one by tiered.export_entries")
    latest = _entries.latest_time(exported, call)
    for part in parts:
        _entries.check_fits(part.store, exported, call)
    after = [
        _tiers.import_entries(part, _entries.owned(exported, *owner), latest)
        for owner, part in zip(_entries.owners_of(placement, tiers.cache), parts, strict=True)
    ]
    total = _tier_parts.total([each for _, both in after for each in both])
    return _tier_parts.whole_of(placement, [part for part, _ in after]), total
