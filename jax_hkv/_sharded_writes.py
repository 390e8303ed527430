"""Writes to a table that lies on several devices: rows and scores go to their owners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jax_hkv import _checks, _sharded
from jax_hkv._bags import Bagged
from jax_hkv._compat import vary
from jax_hkv._exchange import Exchange
from jax_hkv._hops import Items, Leg, Plan, onward_one, plan_of
from jax_hkv._keys import Keys
from jax_hkv.table import Counts, Entries, Table

# Of (table, keys, valid, scores, rows, is_ticked=), all of them flat: the table and its result.
Act = Callable[..., tuple[Table, Any]]


class ShardedWrite(NamedTuple):
    """What an operation returns that writes to a table over several devices, on each of them.

    Attributes:
      status: of this device's positions; see :class:`jax_hkv.Status`.
      counts: of the distinct keys of all devices' batches, the same on every device.
      overflow: as in :class:`ShardedResult`: above 0, a strict exchange has written nothing.
      evicted: the entries that this device's part lost, if asked for.
      exchange: static.
    """

    status: Int32[Array, "*batch"]
    counts: Counts
    overflow: Int32[Array, ""]
    evicted: Entries | None = None
    exchange: Exchange | None = None


class ShardedEntries(NamedTuple):
    """What `export_keys` over several devices returns, on each of them.

    Attributes:
      entries: of this device's part, those of all devices' keys.
      found: whether this device's keys are present, with whoever owns them.
      overflow: as in :class:`ShardedResult`: above 0, a strict exchange has found nothing.
    """

    entries: Entries
    found: Bool[Array, "*batch"]
    overflow: Int32[Array, ""]


def write_of(result: ShardedWrite, keys: Keys) -> ShardedWrite:
    return result._replace(status=result.status.reshape(keys.shape))


def write(
    exchange: Exchange,
    table: Table,
    batch: Bagged,
    act: Act,
    *,
    scores: Keys | None = None,
    values: Any = None,
    counts_occurrences: bool = False,
    as_given: bool = False,
    merges: bool = True,
) -> tuple[Table, ShardedWrite]:
    """Has the owners of keys do something to them; inside shard_map or pmap.

    Args:
      exchange: how keys travel.
      table: this device's part.
      batch: of this device, without bags.
      act: what is done.
      scores: one for each key, or None.
      values: arrays with a row for each key, or None; of equal keys the last counts.
      counts_occurrences: whether the table's policy may ask how often each key occurs.
      as_given: whether scores are written as they are, of equal keys the last, under any policy.
      merges: whether equal keys may be merged before they are sent.
    """
    positions = batch.keys.shape[0]
    valid = _checks.flat_mask(batch.valid, (positions,))
    merges = merges and _sharded.may_merge(exchange, table, None if as_given else scores)
    plan = plan_of(exchange, positions, merges=merges)
    items = Items(batch.keys, valid, None if scores is None else scores.words)
    if counts_occurrences and plan.merges and plan.hops and table.policy.counts:
        items = items._replace(occurrences=jnp.ones((positions,), jnp.int32))
    items, values = vary((items, values), exchange.axes)

    def at_owner(
        plan: Plan, table: Table, legs: tuple[Leg, ...], arrived: Items, *, is_ticked: bool
    ) -> tuple[Table, tuple[Any, ...], None]:
        rows = jax.tree.map(lambda leaf: onward_one(plan, legs, leaf), values)
        given = _sharded.scores_of(table, arrived)
        table, result = act(table, arrived.keys, arrived.valid, given, rows, is_ticked=is_ticked)
        entries = _sharded.padded(getattr(result, "evicted", None), exchange, plan, items)
        status = _sharded.home_status(plan, legs, result.status)
        return table, (status, result.counts, entries), None

    table, (status, counts, entries), route = _sharded.in_rounds(
        exchange, plan, table, items, at_owner
    )
    counts = exchange.of_all(counts)
    return table, ShardedWrite(status, counts, route.left_out, entries, exchange)
