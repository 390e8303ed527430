"""Capacities that grow with what is in a table."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_hkv._agreement import agreed
from jax_hkv._checks import as_integer, check_not_used_up
from jax_hkv._compat import is_traced, over
from jax_hkv._placement import Placement, check_placement
from jax_hkv.index import MAX_SLOTS
from jax_hkv.table import Counts, Table, check_live, check_one_device
from jax_hkv.whole_table import resize, size

# From which load factor on full buckets are met, by candidate buckets (docs/guide.md, Growth). With
# two, the keys of one batch choose by what lay there before it: a large one fills a table less.
_FULL = {1: 0.6, 2: 0.9}
_SMALL_BATCH = 1 / 8  # of the slots
_LESS = 0.75  # of the load factor, for each further share of the slots


def _full(choices: int, share: float) -> float:
    """The load factor up to which a batch of new ids, as a share of the slots, evicts nothing."""
    less = 0.0 if choices == 1 else _LESS * max(0.0, share - _SMALL_BATCH)
    return _FULL[choices] - less


def grow(
    table: Table, max_capacity: int, *, room: int = 0, placement: Placement | None = None
) -> Table:
    """The table, doubled until its entries evict none, for use between steps.

    It doubles while there are more entries than 0.6 of the capacity, from where on buckets fill up.
    With two candidate buckets that is 0.9 for batches of up to an eighth of the slots, and 0.75 of
    what a batch has above that less. It ends where the double is more than `max_capacity`; from
    then on the table evicts. Of a table over devices the fullest part counts, with its share of
    `room` and three standard deviations of that. What is compiled for its shapes is compiled anew.
    Every call waits for the device, to see how many entries there are. See :func:`resize`.

    Args:
      table: which is only read, and lies in memory beside the new one until nobody holds it.
      max_capacity: entries of all devices together, or of each of replicas, up to 2**31 - 1 of
        each; the same in every process.
      room: the new ids that may come until the next call, in one batch; they count as entries. Of
        several processes that say another number each, the largest counts.
      placement: of a table over devices, whose parts are doubled each.

    Returns:
      The table itself where it does not grow.

    Raises:
      TypeError, ValueError: naming the argument.
      RuntimeError: if a step has used the table up.

    Warns:
      UserWarning: if entries found no room in the larger table, and how many; of none that we made.

    Example:
      >>> import numpy as np
      >>> import jax_hkv as hkv
      >>> table = hkv.create(256, 2)
      >>> for ids in np.arange(2000, dtype=np.int32).reshape(20, 100):
      ...     table = grow(table, 1024, room=100)
      ...     table, result = hkv.find_or_insert(table, ids)
      >>> table.capacity
      1024
    """
    if isinstance(table, (tuple, list)) and table and isinstance(table[0], Table):
        raise TypeError(
            f"grow: table must be a jax_hkv Table, got {type(table).__name__} of {len(table)}: of "
            "(table, result), which operations return, give the table; of tiers the store grows, "
            "tiers._replace(store=grow(tiers.store, ...)), and over devices each of the stores"
        )
    check_live("grow", table)
    if is_traced(table.values):
        raise TypeError(
            "grow: table must be one whose entries can be counted now, got one that is traced: "
            "call grow between steps, outside of jit, or resize to a capacity that you know"
        )
    devices, here = _parts(table, placement)
    parts = table.parts_on(devices)  # of replicas each gets all
    most = as_integer("grow", "max_capacity", max_capacity, 1, MAX_SLOTS * parts)
    coming = as_integer("grow", "room", room, 0, MAX_SLOTS * parts)
    if placement is not None and not isinstance(table.digests, np.ndarray):
        remedy = "parts of one table have one capacity"
        told = agreed(
            *("grow", placement, "max_capacity", most), [coming], got=str(most), remedy=remedy
        )
        coming = int(told[:, 1].max())
    capacity = before = table.digests.size // here  # of a part
    # Owners of ids are drawn: three standard deviations more for the part that gets most.
    new = coming / parts
    new += 3 * math.sqrt(new) if parts > 1 else 0
    entries = _entries(table, placement, here) + new
    while (
        entries > _full(table.choices, new / capacity) * capacity and 2 * capacity * parts <= most
    ):
        capacity *= 2
    if capacity == before:
        return table
    if placement is None:
        table, counts = resize(table, capacity)
    else:
        table, counts = _resizing(placement, capacity)(table)
    if lost := (int(counts.evicted) + int(counts.refused)) * parts // devices:
        slots = parts * capacity
        warnings.warn(
            f"grow: {lost} entries of table {table.name!r} found no room in {slots} slots",
            stacklevel=2,
        )
    return table


def _parts(table: Table, placement: Placement | None) -> tuple[int, int]:
    """Parts of a table, and how many of them its leaves here hold; raises unless it lies so."""
    if placement is None:
        if table.clock.ndim == 1 and table.clock.shape != (2,):
            raise TypeError(
                "grow: table must be that of one device, whose clock is uint32[2], got "
                f"uint32{list(table.clock.shape)}: of a table over devices say placement=, the "
                "sharding.Placement that made it"
            )
        check_one_device("grow", table)
        return 1, 1
    check_placement("grow", placement, " or None")
    local = len(placement.local_devices)
    pmapped = placement.mode == "pmap"
    placement.check_outside("grow", table)
    return placement.devices, local if pmapped else placement.devices


def _entries(table: Table, placement: Placement | None, here: int) -> int:
    """Of the fullest part; on the host, of those that its leaves hold."""
    check_not_used_up("grow", jax.tree.leaves(table), "table")
    occupancy = table.index.occupancy
    if placement is None:
        return int(size(table))
    if isinstance(occupancy, np.ndarray):
        return int(occupancy.reshape(here, -1).sum(axis=1).max())
    return int(_counting(placement)((), occupancy)[1])


@functools.lru_cache(maxsize=16)
def _counting(placement: Placement) -> Callable[..., tuple[Any, Any]]:
    """A compiled function from the occupancies of all parts to the entries of the fullest."""

    def count(nothing: Any, occupancy: jax.Array) -> tuple[Any, Any]:
        return nothing, over(placement.axes, jax.lax.pmax, jnp.sum(occupancy, dtype=jnp.int32))

    return placement.step(count)


@functools.lru_cache(maxsize=64)
def _resizing(placement: Placement, capacity: int) -> Callable[[Table], tuple[Table, Counts]]:
    """A compiled function to the table with parts of this capacity, and what became of entries."""

    def widen(table: Table) -> tuple[Table, Counts]:
        table, counts = resize(table, capacity)
        return table, over(placement.axes, jax.lax.psum, counts)

    return placement.step(widen, donate=False)
