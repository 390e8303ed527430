"""One table over many devices.

A table over a mesh axis is the same pytree as a table of one device, each of whose leaves is split
along its first axis: every device holds buckets, rows and a clock of its own, and owns the keys
that a hash gives it. The operations of this module are called inside ``jax.shard_map`` or
``jax.pmap``, by all devices of the axis, each with its part of the batch; they send keys to their
owners and bring rows back. Together the devices do what one table does with the batches of all, one
after the other.

    mesh = jax.make_mesh((8,), ("device",))
    placement = hkv.sharding.Placement(mesh)
    state = placement.create(lambda: opt.init(hkv.create(capacity // 8, dim)))

    def step(table, keys, labels):
        table, result = hkv.sharding.find_or_insert(table, keys, axis_name="device")
        ...
        return hkv.sharding.update(opt, table, result, gradients), loss
    step = placement.step(step)

The layers of :mod:`jax_hkv.linen` and :mod:`jax_hkv.nnx` do all of that when they are given an axis
name. docs/sharding.md says what moves, and how many bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, overload

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jax_hkv import _checks, _inserts, _sharded, _sharded_updates, _sharded_writes, pooled
from jax_hkv._bags import Bagged
from jax_hkv._changes import (
    ChangeCounts,
    Changes,
    Witnesses,
    export_changes,
    import_changes,
    load_changes,
    save_changes,
)
from jax_hkv._digest import digest
from jax_hkv._entries import import_entries, join_entries
from jax_hkv._entry_files import load_entries, save_entries
from jax_hkv._exchange import Exchange, distinct_in, owners, skew_in
from jax_hkv._exported import Exported
from jax_hkv._exports import export_chunks, export_entries
from jax_hkv._keys import Keys, check_fixed
from jax_hkv._options import Arrays, Combiner, Fill, Flag
from jax_hkv._pins import pinned_slots
from jax_hkv._placement import Mode, Placement
from jax_hkv._processes import synchronized
from jax_hkv._reports import ExchangeOverflow, check_overflow
from jax_hkv._resharding import reshard
from jax_hkv._sharded import (
    ScoredShardedRows,
    ShardedFound,
    ShardedResult,
    ShardedRows,
    exchange_of,
    misplaced,
)
from jax_hkv._sharded_writes import ShardedEntries, ShardedWrite, write_of
from jax_hkv._traffic import Collective, Traffic, traffic
from jax_hkv.features import concatenate
from jax_hkv.index import Status
from jax_hkv.operations import as_number, fill_of, rows_of
from jax_hkv.table import Entries, Table, WriteResult, check_one_device, no_counts

__all__ = [
    "ChangeCounts",
    "Changes",
    "Collective",
    "Exchange",
    "ExchangeOverflow",
    "Exported",
    "Mode",
    "Placement",
    "ScoredShardedRows",
    "ShardedEntries",
    "ShardedFound",
    "ShardedResult",
    "ShardedRows",
    "ShardedWrite",
    "Traffic",
    "Witnesses",
    "accum_or_assign",
    "assign",
    "check_overflow",
    "concatenate",
    "contains",
    "digest",
    "distinct_in",
    "erase",
    "export_changes",
    "export_chunks",
    "export_entries",
    "export_keys",
    "find",
    "find_or_insert",
    "find_or_insert_pooled",
    "find_pooled",
    "import_batch",
    "import_changes",
    "import_entries",
    "insert_or_assign",
    "join_entries",
    "load_changes",
    "load_entries",
    "misplaced",
    "owners",
    "reshard",
    "save_changes",
    "save_entries",
    "skew_in",
    "synchronized",
    "traffic",
    "update",
]


# fmt: off
@overload
def find(
    table: Table, keys: Any, *, axis_name: str | tuple[str, ...] | Exchange, valid: Any = ...,
    touch: bool = ..., fill: Fill = ..., dtype: Any = ..., return_scores: Literal[False] = ...,
) -> tuple[Table, ShardedRows]: ...
@overload
def find(
    table: Table, keys: Any, *, axis_name: str | tuple[str, ...] | Exchange, valid: Any = ...,
    touch: bool = ..., fill: Fill = ..., dtype: Any = ..., return_scores: Literal[True],
) -> tuple[Table, ScoredShardedRows]: ...
@overload
def find(
    table: Table, keys: Any, *, axis_name: str | tuple[str, ...] | Exchange, valid: Any = ...,
    touch: bool = ..., fill: Fill = ..., dtype: Any = ..., return_scores: bool,
) -> tuple[Table, ShardedRows | ScoredShardedRows]: ...
# fmt: on


def find(
    table: Table,
    keys: Any,
    *,
    axis_name: str | tuple[str, ...] | Exchange,
    valid: Any = None,
    touch: bool = False,
    fill: Fill = 0.0,
    dtype: Any = None,
    return_scores: bool = False,
) -> tuple[Table, Any]:
    """As :func:`jax_hkv.find`, of a table over the devices of an axis; inside shard_map or pmap.

    Args:
      table: this device's part.
      keys: of this device's batch, of any shape; all devices give equally many.
      axis_name: of the mesh axis, or an :class:`Exchange`.
      valid: ``bool`` of the keys' shape; False masks a position. None: all are valid.
      touch: whether hits are scored as if they had been inserted again (this changes the table).
      fill: the row of absent keys: a number, or "initial" for the row that a key starts with. The
        default is 0.0 here, and "initial" in :func:`find_pooled`.
      dtype: of the rows, in which they travel, too; see :func:`jax_hkv.find`.
      return_scores: whether scores come with the rows; see :func:`jax_hkv.find`.

    Returns:
      The table, and rows with `found` and `overflow`, and with `scores` if they were asked for.

    Raises:
      TypeError, ValueError: naming the argument; also for `touch` under Policy.CUSTOM.
      NameError: if the axis is not bound.
    """
    call = "sharding.find"
    number = fill_of(call, fill)
    touches = _checks.as_bool(call, "touch", touch)
    exchange, given, flat = _sharded.as_flat(call, table, keys, valid, axis_name)
    if touches:
        _checks.check_scores(f"{call} with touch=True", table.policy, None)
    scored = _checks.as_bool(call, "return_scores", return_scores)
    table, result, scores = _sharded.look_up(
        *(exchange, table, flat),
        train=False,
        touches=touches,
        scored=scored,
        initial=number is None,
        dtype=_checks.as_row_dtype(call, dtype),
    )
    values, found = result.values, _has_row(result)
    if number:
        other = jnp.asarray(as_number(number), table.dtype).astype(values.dtype)
        values = jnp.where(found[:, None], values, other)
    values = values.reshape(*given.shape, table.dim)
    rows = ShardedRows(values, found.reshape(given.shape), result.overflow)
    if scores is None:
        return table, rows
    return table, ScoredShardedRows(*rows, scores.reshape(*given.shape))


def contains(
    table: Table, keys: Any, *, axis_name: str | tuple[str, ...] | Exchange, valid: Any = None
) -> tuple[Table, ShardedFound]:
    """As :func:`jax_hkv.contains`, of a table over devices; inside shard_map or pmap.

    Args:
      table: this device's part.
      keys: of this device's batch, of any shape; all devices give equally many.
      axis_name: of the mesh axis, or an :class:`Exchange`.
      valid: ``bool`` of the keys' shape; False masks a position.

    Returns:
      The table, and whether this device's keys are present, with whoever owns them.

    Raises:
      TypeError, ValueError: naming the argument.
      NameError: if the axis is not bound.
    """
    call = "sharding.contains"
    exchange, given, flat = _sharded.as_flat(call, table, keys, valid, axis_name)
    table, result, _ = _sharded.look_up(
        exchange, table, flat, train=False, reads=False, initial=False
    )
    return table, ShardedFound(_has_row(result).reshape(given.shape), result.overflow)


def _has_row(result: ShardedResult) -> Bool[Array, "*batch"]:
    return _sharded.slots_like(result.status) >= 0


def find_or_insert(
    table: Table,
    keys: Any,
    *,
    axis_name: str | tuple[str, ...] | Exchange,
    values: Any = None,
    scores: Any = None,
    valid: Any = None,
    admit: Any = None,
    pinned: Any = None,
    dtype: Any = None,
    return_evicted: bool = False,
) -> tuple[Table, ShardedResult]:
    """As :func:`jax_hkv.find_or_insert`, of a table over devices; inside shard_map or pmap.

    It does to the table what :func:`jax_hkv.find_or_insert` does with the batches of all devices,
    one after the other, as one batch.

    Args:
      table: this device's part.
      keys: of this device's batch, of any shape; all devices give equally many.
      axis_name: of the mesh axis, or an :class:`Exchange`.
      values: rows for new keys, ``[*keys.shape, dim]``, of the table's type; of equal keys the
        first one of the first device that gives the key counts.
      scores: see :func:`jax_hkv.find_or_insert`.
      valid: ``bool`` of the keys' shape; False masks a position (uneven batches, padding).
      admit: see :func:`jax_hkv.find_or_insert`; True at a position of any device lets the key in.
      pinned: see :func:`jax_hkv.find_or_insert`; what the devices, as owners, did for them is kept.
      dtype: of the rows that come back, in which they travel, too; see :func:`jax_hkv.find`.
      return_evicted: whether the result carries the entries that this device's part has lost. With
        an exchange that may take a second round they have room for all devices' keys.

    Returns:
      The table, and a :class:`ShardedResult`; its row gradients go to :func:`update`.

    Raises:
      TypeError, ValueError: naming the argument.
      NameError: if the axis is not bound.
    """
    call = "sharding.find_or_insert"
    exchange, given, flat = _sharded.as_flat(call, table, keys, valid, axis_name)
    pairs = _checks.as_scores(call, table.policy, scores, given.shape)
    offered = None
    if values is not None:
        offered = rows_of(call, values, table, given).reshape(-1, table.dim)
    table, result, _ = _sharded.look_up(
        *(exchange, table, flat),
        train=True,
        initial=True,
        scores=pairs,
        offered=offered,
        admit=_checks.as_mask(call, "admit", admit, given.shape),
        pinned=pinned_slots(call, pinned, over_devices=True),
        evicted=_checks.as_bool(call, "return_evicted", return_evicted),
        dtype=_checks.as_row_dtype(call, dtype),
    )
    return table, _shaped(result, given, (*given.shape, table.dim))


def _shaped(result: ShardedResult, keys: Keys, shape: tuple[int, ...]) -> ShardedResult:
    return result._replace(
        values=result.values.reshape(shape), keys=keys, status=result.status.reshape(keys.shape)
    )


def insert_or_assign(
    table: Table,
    keys: Any,
    values: Float[Arrays, "*batch dim"],
    *,
    axis_name: str | tuple[str, ...] | Exchange,
    scores: Any = None,
    valid: Any = None,
    return_evicted: bool = False,
) -> tuple[Table, ShardedWrite]:
    """As :func:`jax_hkv.insert_or_assign`, of a table over devices; inside shard_map or pmap.

    Of equal keys the last row counts: the last one of the last device that gives the key.

    Args:
      table: this device's part.
      keys: of this device's batch, of any shape; all devices give equally many.
      values: rows, ``[*keys.shape, dim]``, of the table's type.
      axis_name: of the mesh axis, or an :class:`Exchange`.
      scores: see :func:`jax_hkv.find_or_insert`.
      valid: ``bool`` of the keys' shape; False masks a position.
      return_evicted: see :func:`find_or_insert`.

    Returns:
      The table, and a :class:`ShardedWrite`.

    Raises:
      TypeError, ValueError: naming the argument.
      NameError: if the axis is not bound.
    """
    call = "sharding.insert_or_assign"
    exchange, given, batch = _sharded.as_flat(call, table, keys, valid, axis_name)
    pairs = _checks.as_scores(call, table.policy, scores, given.shape)
    rows = rows_of(call, values, table, given)

    evicted = _checks.as_bool(call, "return_evicted", return_evicted)
    act = partial(_inserts.insert_or_assign, evicted=evicted)
    rows = rows.reshape(-1, table.dim)
    table, result = _sharded_writes.write(
        exchange, table, batch, act, scores=pairs, values=rows, counts_occurrences=True
    )
    return table, write_of(result, given)


def accum_or_assign(
    table: Table,
    keys: Any,
    values: Float[Arrays, "*batch dim"],
    exists: Bool[Arrays, "*batch"],
    *,
    axis_name: str | tuple[str, ...] | Exchange,
    scores: Any = None,
    valid: Any = None,
) -> tuple[Table, ShardedWrite]:
    """As :func:`jax_hkv.accum_or_assign`, of a table over devices; inside shard_map or pmap.

    Equal keys are not merged before they are sent: the deltas of a key are summed by its owner, one
    device's after the other's. So `distinct` of the exchange does not count, and batches that
    repeat some keys often overflow it, unless its `slack` is what :func:`skew_in` says.

    Args:
      table: this device's part.
      keys: of this device's batch, of any shape; all devices give equally many.
      values: deltas where `exists`, rows elsewhere, ``[*keys.shape, dim]``, of the table's type.
      exists: ``bool`` of the keys' shape; see :func:`jax_hkv.accum_or_assign`.
      axis_name: of the mesh axis, or an :class:`Exchange`.
      scores: see :func:`jax_hkv.find_or_insert`.
      valid: ``bool`` of the keys' shape; False masks a position.

    Returns:
      The table, and a :class:`ShardedWrite`.

    Raises:
      TypeError, ValueError: naming the argument.
      NameError: if the axis is not bound.
    """
    call = "sharding.accum_or_assign"
    exchange, given, batch = _sharded.as_flat(call, table, keys, valid, axis_name)
    pairs = _checks.as_scores(call, table.policy, scores, given.shape)
    rows = rows_of(call, values, table, given)
    believed = _checks.as_flags(call, "exists", exists, given.shape)

    def act(table: Table, keys: Keys, valid: Any, scores: Any, sent: Any, is_ticked: bool) -> Any:
        rows, believed = sent
        return _inserts.accum_or_assign(
            table, keys, valid, scores, rows, believed[:, 0] != 0, is_ticked=is_ticked
        )

    sent = rows.reshape(-1, table.dim), believed.reshape(-1, 1).astype(jnp.int32)
    table, result = _sharded_writes.write(
        exchange, table, batch, act, scores=pairs, values=sent, merges=False
    )
    return table, write_of(result, given)


def assign(
    table: Table,
    keys: Any,
    values: Float[Arrays, "*batch dim"] | None = None,
    *,
    axis_name: str | tuple[str, ...] | Exchange,
    scores: Any = None,
    valid: Any = None,
) -> tuple[Table, ShardedWrite]:
    """As :func:`jax_hkv.assign`, of a table over devices; inside shard_map or pmap.

    Of equal keys the last row counts: the last one of the last device that gives the key.

    Args:
      table: this device's part.
      keys: of this device's batch, of any shape; all devices give equally many.
      values: rows, ``[*keys.shape, dim]``, of the table's type, or None to leave them alone.
      axis_name: of the mesh axis, or an :class:`Exchange`.
      scores: see :func:`jax_hkv.assign`.
      valid: ``bool`` of the keys' shape; False masks a position.

    Returns:
      The table, and a :class:`ShardedWrite`.

    Raises:
      TypeError, ValueError: naming the argument.
      NameError: if the axis is not bound.
    """
    call = "sharding.assign"
    exchange, given, batch = _sharded.as_flat(call, table, keys, valid, axis_name)
    if values is None and scores is None:
        raise ValueError(f"{call}: values or scores must be given, got neither")
    pairs = rows = None
    if scores is not None:
        pairs = _checks.as_scores(call, table.policy, scores, given.shape)
    if values is not None:
        rows = rows_of(call, values, table, given)
        rows = rows.reshape(-1, table.dim)
    table, result = _sharded_writes.write(
        exchange, table, batch, _inserts.assign, scores=pairs, values=rows
    )
    return table, write_of(result, given)


def import_batch(
    table: Table,
    entries: Entries,
    *,
    axis_name: str | tuple[str, ...] | Exchange,
    valid: Any = None,
    return_evicted: bool = False,
) -> tuple[Table, ShardedWrite]:
    """As :func:`jax_hkv.import_batch`, of a table over devices; inside shard_map or pmap.

    Of equal keys the last entry of the last device counts. (What a device's own part has lost goes
    back into that part by :func:`jax_hkv.import_batch`, without an exchange.)

    Args:
      table: this device's part.
      entries: of this device's batch, whoever owns them; all devices give equally many places.
      axis_name: of the mesh axis, or an :class:`Exchange`.
      valid: ``bool``, one for each entry; see :func:`jax_hkv.import_batch`.
      return_evicted: see :func:`find_or_insert`.

    Returns:
      The table, and a :class:`ShardedWrite`.

    Raises:
      TypeError, ValueError: naming the argument.
      NameError: if the axis is not bound.
    """
    call = "sharding.import_batch"
    exchange = exchange_of(call, table, axis_name)
    entries, is_meant = _inserts.meant_entries(call, table, entries, valid)
    evicted = _checks.as_bool(call, "return_evicted", return_evicted)

    def act(table: Table, keys: Keys, valid: Any, scores: Any, rows: Any, is_ticked: bool) -> Any:
        values, optimizer = rows
        return _inserts.import_rows(
            table, keys, scores, values, optimizer, valid, evicted=evicted, is_ticked=is_ticked
        )

    keys, scores, values, optimizer, _ = entries
    return _sharded_writes.write(
        *(exchange, table, Bagged(keys, is_meant, None), act),
        scores=scores,
        values=(values, optimizer),
        as_given=True,
    )


def export_keys(
    table: Table, keys: Any, *, axis_name: str | tuple[str, ...] | Exchange, valid: Any = None
) -> tuple[Table, ShardedEntries]:
    """As :func:`jax_hkv.export_keys`, of a table over devices; inside shard_map or pmap.

    Entries stay with their owners: they go into the same device's part of another table by
    :func:`jax_hkv.import_batch`, or out of a step in its report.

    Args:
      table: this device's part.
      keys: of this device's batch, of any shape; all devices give equally many.
      axis_name: of the mesh axis, or an :class:`Exchange`.
      valid: ``bool`` of the keys' shape; False masks a position.

    Returns:
      The table, and :class:`ShardedEntries`, with room for all devices' keys.

    Raises:
      TypeError, ValueError: naming the argument.
      NameError: if the axis is not bound.
    """
    call = "sharding.export_keys"
    exchange, given, batch = _sharded.as_flat(call, table, keys, valid, axis_name)

    def act(table: Table, keys: Keys, valid: Any, *_: Any, is_ticked: bool) -> Any:
        table, entries, slots = _inserts.export_keys(table, keys, valid)
        status = _inserts.found_or_missing(slots)
        return table, WriteResult(slots, status, no_counts(), entries)

    table, read = _sharded_writes.write(exchange, table, batch, act)
    assert read.evicted is not None
    found = (read.status == Status.FOUND).reshape(given.shape)
    return table, ShardedEntries(read.evicted, found, read.overflow)


def erase(
    table: Table,
    keys: Any,
    *,
    axis_name: str | tuple[str, ...] | Exchange,
    valid: Any = None,
) -> tuple[Table, ShardedWrite]:
    """As :func:`jax_hkv.erase`, of a table over devices; inside shard_map or pmap.

    Args:
      table: this device's part.
      keys: of this device's batch, of any shape; all devices give equally many.
      axis_name: of the mesh axis, or an :class:`Exchange`.
      valid: ``bool`` of the keys' shape; False masks a position.

    Returns:
      The table, and a :class:`ShardedWrite`: FOUND for what was erased, ``counts.hits`` keys of all
      devices.

    Raises:
      TypeError, ValueError: naming the argument.
      NameError: if the axis is not bound.
    """
    call = "sharding.erase"
    exchange, given, batch = _sharded.as_flat(call, table, keys, valid, axis_name)

    def act(table: Table, keys: Keys, valid: Any, *_: Any, is_ticked: bool) -> Any:
        return _inserts.erase(table, keys, valid, is_ticked=is_ticked)

    table, result = _sharded_writes.write(exchange, table, batch, act)
    return table, write_of(result, given)


def find_pooled(
    table: Table,
    ids: Any,
    *,
    axis_name: str | tuple[str, ...] | Exchange,
    combiner: Combiner = "sum",
    weights: Any = None,
    valid: Any = None,
    fill: Fill = "initial",
    dtype: Any = None,
) -> tuple[Table, ShardedRows]:
    """As :func:`jax_hkv.find_pooled`, of a table over devices; inside shard_map or pmap.

    Args:
      table: this device's part.
      ids: of this device's batch; see :func:`jax_hkv.find_pooled`.
      axis_name: of the mesh axis, or an :class:`Exchange`.
      combiner: "sum", "mean" or "sqrtn".
      weights: ``float32`` of the shape of `ids`. Differentiable.
      valid: ``bool`` of the shape of `ids`.
      fill: what absent ids add: "initial" or 0. The default is "initial" here, and 0.0 in
        :func:`find`.
      dtype: of the rows; see :func:`jax_hkv.find_pooled`.

    Returns:
      The table, and rows ``[*batch, dim]`` with `found` of the shape of the ids and `overflow`.

    Raises:
      TypeError, ValueError: naming the argument.
      NameError: if the axis is not bound.
    """
    call = "sharding.find_pooled"
    exchange = exchange_of(call, table, axis_name)
    batch, layout = pooled.as_batch(call, combiner, ids, weights, valid, table.index.namespace)
    check_fixed(call, "ids", layout.ids)
    table, result, _ = _sharded.look_up(
        exchange,
        table,
        batch,
        is_weighted=layout.is_weighted,
        train=False,
        initial=pooled.is_initial(call, fill),
        dtype=_checks.as_row_dtype(call, dtype),
    )
    values = result.values.reshape(*layout.batch, table.dim)
    return table, ShardedRows(values, _has_row(result).reshape(layout.ids), result.overflow)


def find_or_insert_pooled(
    table: Table,
    ids: Any,
    *,
    axis_name: str | tuple[str, ...] | Exchange,
    combiner: Combiner = "sum",
    weights: Any = None,
    valid: Any = None,
    scores: Any = None,
    admit: Any = None,
    pinned: Any = None,
    dtype: Any = None,
    return_evicted: bool = False,
) -> tuple[Table, ShardedResult]:
    """As :func:`jax_hkv.find_or_insert_pooled`, of a table over devices; in shard_map or pmap.

    Args:
      table: this device's part.
      ids: of this device's batch; see :func:`jax_hkv.find_pooled`.
      axis_name: of the mesh axis, or an :class:`Exchange`.
      combiner: "sum", "mean" or "sqrtn".
      weights: ``float32`` of the shape of `ids`. Differentiable.
      valid: ``bool`` of the shape of `ids`.
      scores: of the shape of `ids`, or one number; see :func:`jax_hkv.find_or_insert`.
      admit: ``bool`` of the shape of `ids`; see :func:`find_or_insert`.
      pinned: see :func:`find_or_insert`.
      dtype: of the rows that come back; see :func:`jax_hkv.find_pooled`.
      return_evicted: see :func:`find_or_insert`.

    Returns:
      The table, and a :class:`ShardedResult` whose values are ``[*batch, dim]``; their gradients
      go to :func:`update`.

    Raises:
      TypeError, ValueError: naming the argument.
      NameError: if the axis is not bound.
    """
    call = "sharding.find_or_insert_pooled"
    exchange = exchange_of(call, table, axis_name)
    batch, layout = pooled.as_batch(call, combiner, ids, weights, valid, table.index.namespace)
    check_fixed(call, "ids", layout.ids)
    table, result, _ = _sharded.look_up(
        exchange,
        table,
        batch,
        is_weighted=layout.is_weighted,
        train=True,
        initial=True,
        scores=_checks.as_scores(call, table.policy, scores, layout.ids),
        admit=_checks.as_mask(call, "admit", admit, layout.ids),
        pinned=pinned_slots(call, pinned, over_devices=True),
        evicted=_checks.as_bool(call, "return_evicted", return_evicted),
        dtype=_checks.as_row_dtype(call, dtype),
    )
    keys = batch.keys.reshape(*layout.ids)
    return table, _shaped(result, keys, (*layout.batch, table.dim))


def update(
    optimizer: Any,
    table: Table,
    result: ShardedResult | Sequence[ShardedResult],
    row_gradients: Float[Arrays, "*batch dim"] | Sequence[Float[Arrays, "*batch dim"]],
    *,
    apply: Flag | None = None,
    **extra: Any,
) -> Table:
    """This device's part of a table after one step of an optimizer; inside shard_map or pmap.

    The gradients of equal keys are summed over all devices, and each key is updated once, by its
    owner. Divide the loss (or the gradients) by the number of devices to have those of a mean.

    Args:
      optimizer: of :mod:`jax_hkv.optim`, whose rows the table has.
      table: after the lookup that gave the result.
      result: of :func:`find_or_insert` or :func:`find_or_insert_pooled`; or those of several
        lookups, which make one step together.
      row_gradients: like ``result.values``; or as many of them as there are results.
      apply: a bool, traced if need be, the same on every device; where it is False nothing changes.
      **extra: for the optimizer.

    Raises:
      TypeError, ValueError: naming the argument.
      NameError: if the axis is not bound.
    """
    check_one_device("sharding.update", table, is_part=True)
    return _sharded_updates.update(optimizer, table, result, row_gradients, apply=apply, **extra)
