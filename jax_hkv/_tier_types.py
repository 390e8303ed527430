"""Two tables that are one, and what is said of them; see :mod:`jax_hkv.tiered`."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from jax_hkv._options import Count
from jax_hkv.table import Table


class Admits(enum.Enum):
    """Which keys of a batch a prefetch brings: all of them, or those that one of the tables has."""

    ALL = enum.auto()
    KNOWN = enum.auto()  # which have been looked up then
    UNNOTICED = enum.auto()  # known ones, and no time passes


class Tiers(NamedTuple):
    """Two tables that are one: what stands in the cache counts, whatever the store has of it.

    Attributes:
      cache: the smaller one, which is trained.
      store: the larger one, of :func:`create_store`. Of a cache over devices there is one for each
        of this process's parts.
    """

    cache: Table
    store: Any


class PrefetchCounts(NamedTuple):
    """What became of the distinct keys of a batch; ``int32`` scalars.

    Attributes:
      unique: distinct keys, the sum of the next four; with `insert=False` without those that
        neither had.
      hits: of them, those that the cache had.
      restored: those that the store had, as far as they found room in the cache.
      inserted: those that neither had; they have their first rows.
      refused: those that found no room in the cache, where the keys of the batch had filled their
        buckets. A training step gives them their first rows, or trains them for nothing: take a
        larger cache, or smaller batches.
      evicted: entries that moved from the cache to the store.
      dropped: entries that found no room in the store, or were evicted there. They are lost, but
        for those that the cache has, too: take a larger store.
      absent: of other keys, which were to be kept (`keep` of :func:`admit`), those that the cache
        did not have.
    """

    unique: Count
    hits: Count
    restored: Count
    inserted: Count
    refused: Count
    evicted: Count
    dropped: Count
    absent: Count
