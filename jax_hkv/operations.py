"""The operations on a batch of keys: lookups, inserts, assignments, removals.

Each public function checks and flattens its arguments; the function of the same name with an
underscore does the work, compiled.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from jax_hkv import _checks
from jax_hkv import index as _index
from jax_hkv import rows as _rows
from jax_hkv._compat import is_traced
from jax_hkv._keys import Keys, as_keys
from jax_hkv.index import NO_SLOT, Groups, Status
from jax_hkv.table import (
    Bags,
    Counts,
    Entries,
    EraseResult,
    FindResult,
    InsertResult,
    Table,
    WriteResult,
    check_one_device,
    entries_at,
    gather_values,
    jitted,
    scatter_optimizer,
    scatter_values,
    with_clock,
)

# The name under which rows of a lookup are saved by jax.checkpoint policies.
ROWS_NAME = "hkv_rows"


def _batch(call: str, table: Table, keys: Any, valid: Any) -> tuple[Keys, Keys, jax.Array]:
    """The keys as given, flat, and their mask."""
    check_one_device(call, table)
    given = as_keys(call, "keys", keys)
    flat = given.reshape(-1)
    return given, flat, _checks.as_mask(call, "valid", valid, given.shape).reshape(-1)


def _flat_rows(call: str, argument: str, values: Any, table: Table, keys: Keys) -> jax.Array:
    expected = (*keys.shape, table.dim)
    array = _checks.as_rows(call, argument, values, expected, table.dtype)
    return array.reshape(-1, table.dim)


def after_read(table: Table, clock: jax.Array) -> Table:
    """A table after a read. Outside a trace nothing needs an order: the same object."""
    return with_clock(table, clock) if is_traced(clock) else table


def _start_optimizer_rows(table: Table, slots: jax.Array) -> Table:
    """New rows start with fresh optimizer values: nobody inherits a victim's moments."""
    fresh = table.optimizer.fresh if table.optimizer else {}
    return scatter_optimizer(table, slots, jnp.zeros_like(slots), fresh)


def counts_of(groups: Groups, unique_status: jax.Array) -> Counts:
    """What became of the distinct keys of a batch."""
    # All in one pass: as sums of their own they are one each.
    tallies = [
        (unique_status == Status.FOUND).astype(jnp.int32),
        _is_new(unique_status).astype(jnp.int32),
        (unique_status == Status.EVICTED).astype(jnp.int32),
        (unique_status == Status.REFUSED).astype(jnp.int32),
    ]
    hits, inserted, evicted, refused = jax.lax.reduce(
        tallies,
        [jnp.int32(0)] * len(tallies),
        lambda sums, terms: [a + b for a, b in zip(sums, terms, strict=True)],
        (0,),
    )
    return Counts(groups.count[0], hits, inserted, evicted, refused)


def _is_new(unique_status: jax.Array) -> jax.Array:
    return (unique_status == Status.INSERTED) | (unique_status == Status.EVICTED)


def _new_slots(upserted: _index.Upserted) -> jax.Array:
    """The slots of the distinct keys that were inserted, -1 for the others."""
    return jnp.where(_is_new(upserted.unique_status), upserted.unique_slots, NO_SLOT)


def _upsert(
    table: Table,
    groups: Groups,
    scores: Keys | None,
    report_evicted: bool,
    pinned: jax.Array | None = None,
    is_ticked: bool = False,
) -> tuple[Table, _index.Upserted, Entries | None]:
    """Inserts and refreshes; new rows have fresh optimizer values but no value yet."""
    index, upserted = _index.upsert(
        table.index if is_ticked else _index.tick(table.index),
        groups,
        scores,
        admit=True,
        pinned=pinned,
        report_evicted=report_evicted,
    )
    table = dataclasses.replace(table, index=index)
    evicted = None
    if report_evicted:
        table, evicted = entries_at(
            table, upserted.evicted_keys, upserted.evicted_scores, upserted.evicted_slots
        )
    new_slots = _new_slots(upserted)
    return _start_optimizer_rows(table, new_slots), upserted, evicted


def _let_in(
    table: Table,
    keys: Keys,
    seen: Groups,
    occurrences: jax.Array | None = None,
    is_ticked: bool = False,
) -> tuple[Table, Groups]:
    """Asks the table's admission about the absent keys; the groups without those turned away."""
    assert table.admission is not None
    distinct, asked = Keys(seen.keys), _index.all_of(seen)
    index, slots = _index.find(table.index, distinct, asked)
    is_present = slots >= 0
    admission, admitted = table.admission.decide(
        table.seed,
        (index if is_ticked else _index.tick(index)).clock,
        distinct,
        asked & ~is_present,
        _index.occurrences(seen).counts if occurrences is None else occurrences,
    )
    table = dataclasses.replace(table, index=index, admission=admission)
    enters = _index.by_position(seen, is_present | admitted, False)
    return table, _index.unique(keys, enters)


def _with_refused(result: InsertResult, seen: Groups) -> InsertResult:
    """A result of the keys that were let in, completed by those that were not."""
    away = (seen.inverse >= 0) & (result.groups.inverse < 0)
    unique = seen.count[0]
    refused = result.counts.refused + unique - result.counts.unique
    slots = jnp.where(_index.all_of(seen), _index.take(result.slots, seen.first), NO_SLOT)
    return result._replace(
        groups=seen,
        unique_slots=slots,
        status=jnp.where(away, jnp.int32(Status.REFUSED), result.status),
        counts=result.counts._replace(unique=unique, refused=refused),
    )


# --- Reads ---------------------------------------------------------------------------------------


def find(
    table: Table,
    keys: Any,
    *,
    valid: Any = None,
    touch: bool = False,
    fill: float | str = 0.0,
) -> tuple[Table, FindResult]:
    """Looks up rows. Absent keys stay absent; :func:`contains` reads no rows.

    Args:
      table: to look in.
      keys: of any shape: Keys, or an integer array.
      valid: ``bool`` of the keys' shape; False masks a position. None: all are valid.
      touch: whether hits are scored as if they had been inserted again (this changes the table).
      fill: the row of absent keys: a number, or "initial" for the row that a key starts with. The
        default is 0.0 here, and "initial" in :func:`jax_hkv.find_pooled`. Another number is
        another program.

    Returns:
      The table, and rows ``[*keys.shape, dim]``, found and slots. Masked positions are not found;
      their row is the fill number, or zero with "initial".

    Raises:
      TypeError, ValueError: naming the argument; also for `touch` under Policy.CUSTOM, whose scores
        are always given (use :func:`assign` with scores).

    Example:
      >>> import numpy as np
      >>> import jax_hkv as hkv
      >>> table = hkv.create(128, dim=2)
      >>> table, _ = hkv.insert_or_assign(table, np.array([5], np.int32), jnp.ones((1, 2)))
      >>> _, result = hkv.find(table, np.array([5, 6], np.int32), fill=-1.0)
      >>> result.values.tolist()
      [[1.0, 1.0], [-1.0, -1.0]]
    """
    given, flat, mask = _batch("find", table, keys, valid)
    if not (fill == "initial" if isinstance(fill, str) else _checks.is_number(fill)):
        raise ValueError(
            f'find: fill must be a number of Python or "initial", got {fill!r}: put anything else '
            "in place of absent keys' rows by jnp.where(result.found[..., None], result.values, "
            "other)"
        )
    number = None if isinstance(fill, str) else _bits_of("find", fill)
    if touch:
        _checks.check_scores("find with touch=True", table.policy, None)
        table, values, slots = _find_and_touch(table, flat, mask, fill=number)
    else:
        clock, values, slots = _find(table, flat, mask, fill=number)
        table = after_read(table, clock)
    slots = slots.reshape(given.shape)
    return table, FindResult(values.reshape(*given.shape, table.dim), slots >= 0, slots)


def _bits_of(call: str, fill: Any) -> int:
    """Static arguments are compared, and NaN is not equal to itself: its bits are."""
    try:
        return int(np.float32(fill).view(np.uint32))
    except OverflowError:
        raise ValueError(
            f"{call}: fill must be a number that a float can hold, got "
            f"{type(fill).__name__} beyond 1e308: clip it, "
            'or give float("inf")'
        ) from None


def _as_number(fill: int | None) -> float:
    return float(np.uint32(fill or 0).view(np.float32))


@jitted("fill")
def _find(table: Table, keys: Keys, valid: jax.Array, fill: int | None) -> Any:
    initial = (table.initializer, table.seed) if fill is None else None
    index, slots, values = _index.find_rows(
        table.index, keys, valid, table.values, fill=_as_number(fill), initial=initial
    )
    return index.clock, checkpoint_name(values, ROWS_NAME), slots


@jitted("fill")
def _find_and_touch(table: Table, keys: Keys, valid: jax.Array, fill: int | None) -> Any:
    groups = _index.unique(keys, valid)
    index, upserted = _index.upsert(_index.tick(table.index), groups, None, admit=False)
    table = dataclasses.replace(table, index=index)
    initial = (table.initializer, table.seed, keys, valid) if fill is None else None
    table, values = gather_values(table, upserted.slots, fill=_as_number(fill), initial=initial)
    return table, checkpoint_name(values, ROWS_NAME), upserted.slots


def contains(table: Table, keys: Any, *, valid: Any = None) -> tuple[Table, Bool[Array, "*batch"]]:
    """Whether keys are present; masked positions are not.

    Args:
      table: to look in.
      keys: of any shape.
      valid: see :func:`find`.

    Example:
      >>> import jax_hkv as hkv
      >>> table, _ = find_or_insert(hkv.create(128, 2), np.array([5], np.int32))
      >>> contains(table, np.array([5, 6], np.int32))[1].tolist()
      [True, False]
    """
    given, flat, mask = _batch("contains", table, keys, valid)
    clock, slots = _slots(table, flat, mask)
    return after_read(table, clock), (slots >= 0).reshape(given.shape)


@jitted()
def _slots(table: Table, keys: Keys, valid: jax.Array) -> Any:
    index, slots = _index.find(table.index, keys, valid)
    return index.clock, slots


def initial_rows(table: Table, keys: Any) -> Float[Array, "*batch dim"]:
    """The rows that keys start with, ``[*keys.shape, dim]``, whether they are present or not.

    Example:
      >>> import jax_hkv as hkv
      >>> table = hkv.create(128, 2, init=hkv.initializers.constant(0.5))
      >>> initial_rows(table, np.array([5], np.int32)).tolist()
      [[0.5, 0.5]]
    """
    given, flat, mask = _batch("initial_rows", table, keys, None)
    # From an array without rows: reading the table's own would keep it from being updated in place.
    _, values = _rows.gather(
        jnp.zeros((2,), jnp.uint32),
        jnp.zeros((0, table.dim), table.dtype),
        jnp.full(mask.shape, NO_SLOT, jnp.int32),
        initial=(table.initializer, table.seed, flat, mask),
        name=table.name,
    )
    return values.reshape(*given.shape, table.dim)


# --- Writes --------------------------------------------------------------------------------------


def find_or_insert(
    table: Table,
    keys: Any,
    *,
    values: Any = None,
    scores: Any = None,
    valid: Any = None,
    return_evicted: bool = False,
) -> tuple[Table, InsertResult]:
    """Looks up rows; absent keys are inserted, with their initial or the given row.

    Where the table was created with an admission rule, absent keys that it does not admit are
    refused: they get no slot, and their initial row.

    Args:
      table: to change.
      keys: of any shape.
      values: rows for new keys, ``[*keys.shape, dim]``; of equal keys the first counts.
      scores: needed under CUSTOM; counts under LFU and EPOCH_LFU; an error under the others.
        Unsigned: uint32, int32 from 0 on, or Keys.
      valid: see :func:`find`.
      return_evicted: whether the result carries the evicted entries.

    Returns:
      The table, and an :class:`InsertResult`. Its row gradients go to
      ``jax_hkv.optim.sparse(...).update``.

    Raises:
      TypeError, ValueError: naming the argument.

    Example:
      >>> import numpy as np
      >>> import jax_hkv as hkv
      >>> table, result = hkv.find_or_insert(hkv.create(128, 2), np.array([5, 5], np.int32))
      >>> [hkv.Status(s).name for s in result.status.tolist()]
      ['INSERTED', 'FOUND']
    """
    given, flat, mask = _batch("find_or_insert", table, keys, valid)
    pairs = _checks.as_scores("find_or_insert", table.policy, scores, given.shape)
    offered = None
    if values is not None:
        offered = _flat_rows("find_or_insert", "values", values, table, given)
    table, result = _find_or_insert(table, flat, mask, pairs, offered, evicted=return_evicted)
    shape = given.shape
    return table, result._replace(
        values=result.values.reshape(*shape, table.dim),
        keys=given,
        slots=result.slots.reshape(shape),
        status=result.status.reshape(shape),
    )


@jitted("evicted")
def _find_or_insert(
    table: Table,
    keys: Keys,
    valid: jax.Array,
    scores: Keys | None,
    offered: jax.Array | None,
    evicted: bool,
) -> Any:
    table, inserted = insert_rows(table, keys, valid, scores, offered, evicted)
    initial = (table.initializer, table.seed, keys, valid)
    table, values = gather_values(table, inserted.upserted.slots, initial=initial)
    return table, insert_result(checkpoint_name(values, ROWS_NAME), keys, inserted)


class Inserted(NamedTuple):
    """What became of a batch: of the keys let in; those seen are more if some were not admitted."""

    groups: Groups
    seen: Groups
    upserted: _index.Upserted
    evicted: Entries | None


def insert_rows(
    table: Table,
    keys: Keys,
    valid: jax.Array,
    scores: Keys | None,
    offered: jax.Array | None,
    evicted: bool,
    *,
    occurrences: jax.Array | None = None,
    is_ticked: bool = False,
) -> tuple[Table, Inserted]:
    """Inserts absent keys with their initial or the given rows, and refreshes the others.

    Args:
      table: to change.
      keys: flat.
      valid: of them.
      scores: of the positions, or None.
      offered: rows of the positions, or None.
      evicted: whether the evicted entries are wanted.
      occurrences: ``int32``, as how many occurrences each position counts; None: as one.
      is_ticked: whether the clock already stands at the time of this batch.
    """
    groups = seen = _index.unique(keys, valid)
    if table.admission is not None:
        counted = None if occurrences is None else _index.sum_by_key(seen, occurrences)
        table, groups = _let_in(table, keys, seen, counted, is_ticked)
    table, upserted, entries = _upsert(table, groups, scores, evicted, is_ticked=is_ticked)
    inserted = Inserted(groups, seen, upserted, entries)
    new_slots = _new_slots(upserted)
    if offered is not None:
        return scatter_values(table, new_slots, groups.first, offered), inserted
    clock, values = _rows.initialize(
        table.index.clock,
        table.values,
        new_slots,
        Keys(groups.keys),
        table.initializer,
        table.seed,
        name=table.name,
    )
    return dataclasses.replace(with_clock(table, clock), values=values), inserted


def insert_result(
    values: jax.Array, keys: Keys, inserted: Inserted, bags: Bags | None = None
) -> InsertResult:
    """What became of the flat keys of a batch, with the rows that were read for them."""
    groups, seen, upserted, entries = inserted
    result = InsertResult(
        values=values,
        keys=keys,
        slots=upserted.slots,
        status=upserted.status,
        counts=counts_of(groups, upserted.unique_status),
        evicted=entries,
        groups=groups,
        unique_slots=upserted.unique_slots,
        bags=bags,
    )
    return result if seen is groups else _with_refused(result, seen)


def insert_or_assign(
    table: Table, keys: Any, values: Any, *, scores: Any = None, valid: Any = None
) -> tuple[Table, WriteResult]:
    """Writes rows; absent keys are inserted. Of equal keys the last row counts.

    Args:
      table: to change.
      keys: of any shape.
      values: rows, ``[*keys.shape, dim]``.
      scores: see :func:`find_or_insert`.
      valid: see :func:`find`.

    Example:
      >>> import jax_hkv as hkv
      >>> ids, rows = np.array([5, 5], np.int32), np.array([[1.0], [2.0]], np.float32)
      >>> table, result = insert_or_assign(hkv.create(128, 1), ids, rows)
      >>> find(table, ids)[1].values.tolist(), int(result.counts.inserted)
      ([[2.0], [2.0]], 1)
    """
    return _write_through("insert_or_assign", table, keys, values, scores, valid, evicted=False)


def insert_and_evict(
    table: Table, keys: Any, values: Any, *, scores: Any = None, valid: Any = None
) -> tuple[Table, WriteResult]:
    """As :func:`insert_or_assign`; the result carries the evicted entries.

    ``result.evicted`` has room for as many entries as there are keys; ``evicted.count`` of them are
    evicted ones, in order of the keys that took their places.

    Example:
      >>> import jax_hkv as hkv
      >>> table, _ = find_or_insert(hkv.create(128, 1), np.arange(128, dtype=np.int32))
      >>> new, row = np.array([200], np.int32), np.zeros((1, 1), np.float32)
      >>> table, result = insert_and_evict(table, new, row)
      >>> int(result.evicted.count), int(result.evicted.keys.to_numpy()[0])
      (1, 0)
    """
    return _write_through("insert_and_evict", table, keys, values, scores, valid, evicted=True)


def _write_through(
    call: str, table: Table, keys: Any, values: Any, scores: Any, valid: Any, *, evicted: bool
) -> tuple[Table, WriteResult]:
    given, flat, mask = _batch(call, table, keys, valid)
    pairs = _checks.as_scores(call, table.policy, scores, given.shape)
    rows = _flat_rows(call, "values", values, table, given)
    table, result = _insert_or_assign(table, flat, mask, pairs, rows, evicted=evicted)
    return table, _shaped(result, given.shape)


def _shaped(result: WriteResult, shape: tuple[int, ...]) -> WriteResult:
    return result._replace(slots=result.slots.reshape(shape), status=result.status.reshape(shape))


@jitted("evicted")
def _insert_or_assign(
    table: Table,
    keys: Keys,
    valid: jax.Array,
    scores: Keys | None,
    values: jax.Array,
    evicted: bool,
) -> Any:
    groups = _index.unique(keys, valid)
    table, upserted, entries = _upsert(table, groups, scores, evicted)
    table = scatter_values(table, upserted.unique_slots, groups.last, values)
    return table, _write_result(groups, upserted, entries)


def _write_result(
    groups: Groups, upserted: _index.Upserted, entries: Entries | None = None
) -> WriteResult:
    counts = counts_of(groups, upserted.unique_status)
    return WriteResult(upserted.slots, upserted.status, counts, entries)


def accum_or_assign(
    table: Table,
    keys: Any,
    values: Any,
    exists: Any,
    *,
    scores: Any = None,
    valid: Any = None,
) -> tuple[Table, WriteResult]:
    """Adds to rows that are believed present, and inserts rows that are believed absent.

    Args:
      table: to change.
      keys: of any shape.
      values: deltas where `exists`, rows elsewhere, ``[*keys.shape, dim]``.
      exists: ``bool`` of the keys' shape. True and present: the delta is added. False and absent:
        the row is inserted. Where the belief is wrong nothing changes, not even the score.
      scores: see :func:`find_or_insert`.
      valid: see :func:`find`.

    Example:
      >>> import jax_hkv as hkv
      >>> ids, rows = np.array([5, 6], np.int32), np.ones((2, 1), np.float32)
      >>> table, _ = insert_or_assign(hkv.create(128, 1), ids[:1], rows[:1])
      >>> table, _ = accum_or_assign(table, ids, rows, np.array([True, False]))
      >>> find(table, ids)[1].values.tolist()
      [[2.0], [1.0]]
    """
    call = "accum_or_assign"
    given, flat, mask = _batch(call, table, keys, valid)
    pairs = _checks.as_scores(call, table.policy, scores, given.shape)
    rows = _flat_rows(call, "values", values, table, given)
    if exists is None:
        raise TypeError(
            f"{call}: exists must be a bool array of shape {list(given.shape)}, got None"
        )
    believed = _checks.as_mask(call, "exists", exists, given.shape).reshape(-1)
    table, result = _accum_or_assign(table, flat, mask, pairs, rows, believed)
    return table, _shaped(result, given.shape)


@jitted()
def _accum_or_assign(
    table: Table,
    keys: Keys,
    valid: jax.Array,
    scores: Keys | None,
    values: jax.Array,
    believed: jax.Array,
) -> Any:
    index, slots = _index.find(table.index, keys, valid)
    table = dataclasses.replace(table, index=index)
    effective = valid & (believed == (slots >= 0))
    groups = _index.unique(keys, effective)
    table, upserted, _ = _upsert(table, groups, scores, False, pinned=slots)
    new = _is_new(upserted.unique_status)
    table = scatter_values(
        table, jnp.where(new, upserted.unique_slots, NO_SLOT), groups.last, values
    )
    clock, summed = _rows.add(
        table.index.clock,
        table.values,
        jnp.where(new, NO_SLOT, upserted.unique_slots),
        _index.combine(groups, _index.Terms(values)),
        name=table.name,
    )
    table = dataclasses.replace(with_clock(table, clock), values=summed)
    result = _write_result(groups, upserted)
    read_status = jnp.where(slots >= 0, Status.FOUND, Status.MISSING).astype(jnp.int32)
    return table, result._replace(
        slots=jnp.where(effective, result.slots, slots),
        status=jnp.where(effective, result.status, read_status),
    )


def assign(
    table: Table, keys: Any, values: Any = None, *, scores: Any = None, valid: Any = None
) -> tuple[Table, WriteResult]:
    """Writes rows and/or scores of keys that are present; absent keys stay absent.

    Args:
      table: to change.
      keys: of any shape.
      values: rows, or None to leave them alone. Rows alone do not change scores.
      scores: scores (CUSTOM) or counts (LFU, EPOCH_LFU), or None to leave them alone.
      valid: see :func:`find`.

    Example:
      >>> import jax_hkv as hkv
      >>> ids, rows = np.array([5, 6], np.int32), np.ones((2, 1), np.float32)
      >>> table, _ = insert_or_assign(hkv.create(128, 1), ids[:1], rows[:1])
      >>> table, result = assign(table, ids, 3 * rows)
      >>> [hkv.Status(s).name for s in result.status.tolist()]
      ['FOUND', 'MISSING']
    """
    given, flat, mask = _batch("assign", table, keys, valid)
    if values is None and scores is None:
        raise ValueError("assign: values or scores must be given, got neither")
    pairs = None
    if scores is not None:
        pairs = _checks.as_scores("assign", table.policy, scores, given.shape)
    rows = None if values is None else _flat_rows("assign", "values", values, table, given)
    table, result = _assign(table, flat, mask, pairs, rows)
    return table, _shaped(result, given.shape)


@jitted()
def _assign(
    table: Table, keys: Keys, valid: jax.Array, scores: Keys | None, values: jax.Array | None
) -> Any:
    groups = _index.unique(keys, valid)
    index, upserted = _index.upsert(
        _index.tick(table.index), groups, scores, admit=False, write_scores=scores is not None
    )
    table = dataclasses.replace(table, index=index)
    if values is not None:
        table = scatter_values(table, upserted.unique_slots, groups.last, values)
    return table, _write_result(groups, upserted)


# --- Removal -------------------------------------------------------------------------------------


def erase(table: Table, keys: Any, *, valid: Any = None) -> tuple[Table, EraseResult]:
    """Removes keys; those absent are MISSING.

    Args:
      table: to change.
      keys: of any shape.
      valid: see :func:`find`.

    Example:
      >>> import jax_hkv as hkv
      >>> table, _ = find_or_insert(hkv.create(128, 1), np.array([5, 6], np.int32))
      >>> table, result = erase(table, np.array([5, 7], np.int32))
      >>> int(result.counts.hits), int(hkv.size(table))
      (1, 1)
    """
    given, flat, mask = _batch("erase", table, keys, valid)
    table, result = _erase(table, flat, mask)
    return table, result._replace(status=result.status.reshape(given.shape))


@jitted()
def _erase(table: Table, keys: Keys, valid: jax.Array) -> Any:
    groups = _index.unique(keys, valid)
    index, upserted = _index.upsert(
        _index.tick(table.index), groups, None, admit=False, write_scores=False
    )
    index = _index.erase(index, upserted.unique_slots)
    counts = counts_of(groups, upserted.unique_status)
    return dataclasses.replace(table, index=index), EraseResult(upserted.status, counts)


def clear(table: Table) -> Table:
    """Removes every entry; the clock goes on.

    Example:
      >>> import jax_hkv as hkv
      >>> table, _ = find_or_insert(hkv.create(128, 1), np.array([5, 6], np.int32))
      >>> int(hkv.size(clear(table)))
      0
    """
    check_one_device("clear", table)
    return _clear(table)


@jitted()
def _clear(table: Table) -> Table:
    return dataclasses.replace(table, index=_index.clear(_index.tick(table.index)))
