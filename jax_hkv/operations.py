"""The operations on a batch of keys: lookups, inserts, assignments, removals.

Each public function checks its arguments; the function of the same name with an underscore does the
work, compiled: outside of jit that is one program.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from jax_hkv import _checks, _inserts
from jax_hkv import index as _index
from jax_hkv import rows as _rows
from jax_hkv._compat import is_traced
from jax_hkv._inserts import insert_result, insert_rows, meant_entries
from jax_hkv._keys import Keys, check_fixed, check_keys, keys_of
from jax_hkv._options import Fill
from jax_hkv._pins import pinned_slots
from jax_hkv._warnings import warn_of_part
from jax_hkv.index import NO_SLOT
from jax_hkv.table import (
    Entries,
    EraseResult,
    FindResult,
    InsertResult,
    ScoredFindResult,
    Table,
    WriteResult,
    check_one_device,
    gather_values,
    jitted,
    with_clock,
)

# The name under which rows of a lookup are saved by jax.checkpoint policies.
ROWS_NAME = "hkv_rows"

# Keys as they were given and checked: Keys, or an array of integers.
_Given = Any


def _batch(
    call: str,
    table: Table,
    keys: Any,
    valid: Any,
    *,
    merges: bool = True,
    changes: bool = True,
) -> tuple[_Given, jax.Array | None]:
    """Keys and mask as they were given, checked."""
    check_one_device(call, table)
    if changes or table.replicas is not True:  # of which any may be read as a table of one device
        warn_of_part(call)
    given = check_keys(call, "keys", keys, table.index.namespace)
    if merges:
        check_fixed(call, "keys", given.shape)
    return given, _checks.as_mask(call, "valid", valid, given.shape)


def rows_of(call: str, values: Any, table: Table, keys: Any) -> jax.Array:
    """Rows for keys, one for each, as a caller gave them."""
    return _checks.as_rows(call, "values", values, (*keys.shape, table.dim), table.dtype)


def after_read(table: Table, clock: jax.Array) -> Table:
    """A table after a read. Outside a trace nothing needs an order: the same object."""
    return with_clock(table, clock) if is_traced(clock) else table


# --- Reads ---------------------------------------------------------------------------------------


# fmt: off
@overload
def find(
    table: Table, keys: Any, *, valid: Any = ..., touch: bool = ..., fill: Fill = ...,
    dtype: Any = ..., return_scores: Literal[False] = ...,
) -> tuple[Table, FindResult]: ...
@overload
def find(
    table: Table, keys: Any, *, valid: Any = ..., touch: bool = ..., fill: Fill = ...,
    dtype: Any = ..., return_scores: Literal[True],
) -> tuple[Table, ScoredFindResult]: ...
@overload
def find(
    table: Table, keys: Any, *, valid: Any = ..., touch: bool = ..., fill: Fill = ...,
    dtype: Any = ..., return_scores: bool,
) -> tuple[Table, FindResult | ScoredFindResult]: ...
# fmt: on


def find(
    table: Table,
    keys: Any,
    *,
    valid: Any = None,
    touch: bool = False,
    fill: Fill = 0.0,
    dtype: Any = None,
    return_scores: bool = False,
) -> tuple[Table, Any]:
    """Looks up rows. Absent keys stay absent; :func:`contains` reads no rows.

    Args:
      table: to look in.
      keys: of any shape: Keys, or an integer array.
      valid: ``bool`` of the keys' shape; False masks a position. None: all are valid.
      touch: whether hits are scored as if they had been inserted again (this changes the table).
      fill: the row of absent keys: a number, or "initial" for the row that a key starts with. The
        default is 0.0 here, and "initial" in :func:`jax_hkv.find_pooled`. Another number is
        another program.
      dtype: float32, bfloat16 or float16: the type in which rows come, as by ``astype`` (from
        float32 rounded to nearest even), but cast where they are read. None: the table's.
      return_scores: whether the scores of the entries come with their rows.

    Returns:
      The table, and a :class:`FindResult`: rows ``[*keys.shape, dim]``, found and slots. Masked
      positions are not found; their row is the fill number, or zero with "initial". With
      `return_scores` a :class:`ScoredFindResult`, whose last field is `scores`, Keys of the keys'
      shape: those that entries have after this call, zero where keys are absent or masked.

    Raises:
      TypeError, ValueError: naming the argument; also for `touch` under Policy.CUSTOM, whose scores
        are always given (use :func:`assign` with scores).
      RuntimeError: of a table that an earlier call has used up.

    Example:
      >>> import numpy as np
      >>> import jax_hkv as hkv
      >>> ids, rows = np.array([5], np.int32), np.ones((1, 2), np.float32)
      >>> table, _ = hkv.insert_or_assign(hkv.create(128, dim=2), ids, rows)
      >>> _, result = hkv.find(table, np.array([5, 6], np.int32), fill=-1.0)
      >>> result.values.tolist()
      [[1.0, 1.0], [-1.0, -1.0]]
      >>> _, result = hkv.find(table, np.array([5, 6], np.int32), return_scores=True)
      >>> result.scores.to_numpy().tolist()
      [1, 0]
    """
    touches = _checks.as_bool("find", "touch", touch)
    given, mask = _batch("find", table, keys, valid, merges=touches, changes=touches)
    number = fill_of("find", fill)
    kind = _checks.as_row_dtype("find", dtype)
    scored = _checks.as_bool("find", "return_scores", return_scores)
    if touches:
        _checks.check_scores("find with touch=True", table.policy, None)
        return _find_and_touch(table, given, mask, fill=number, dtype=kind, scored=scored)
    clock, result = _find(table, given, mask, fill=number, dtype=kind, scored=scored)
    return after_read(table, clock), result


def fill_of(call: str, fill: Any) -> int | None:
    """The bits of a number to fill with; None: first rows.

    Static arguments are compared, and NaN is not equal to itself: its bits are.
    """
    if not (fill == "initial" if isinstance(fill, str) else _checks.is_number(fill)):
        raise ValueError(
            f'{call}: fill must be a number of Python or "initial", got {fill!r}: put anything '
            "else in place of absent keys' rows by jnp.where(result.found[..., None], "
            "result.values, other)"
        )
    if isinstance(fill, str):
        return None
    number = _checks.as_number(call, "fill", fill)
    with np.errstate(over="ignore"):
        rounded = np.float32(number)
    if np.isinf(rounded) and abs(fill) != np.inf:
        raise ValueError(
            f"{call}: fill must be a number that float32 can hold, 3.4e38 at most, got "
            f'{type(fill).__name__} beyond that: clip it, or give float("inf")'
        )
    return int(rounded.view(np.uint32))


def as_number(fill: int | None) -> float:
    """The number of the bits that :func:`fill_of` gives, 0 for none."""
    return float(np.uint32(fill or 0).view(np.float32))


@jitted("fill", "dtype", "scored")
def _find(
    table: Table, given: _Given, valid: jax.Array | None, fill: int | None, dtype: Any, scored: bool
) -> Any:
    keys, valid = _checks.flat_batch(given, valid)
    initial = (table.initializer, table.seed) if fill is None else None
    index, slots, values = _index.find_rows(
        *(table.index, keys, valid, table.values),
        fill=as_number(fill),
        initial=initial,
        dtype=dtype,
    )
    table, result = _found(dataclasses.replace(table, index=index), given, values, slots, scored)
    return table.index.clock, result


@jitted("fill", "dtype", "scored")
def _find_and_touch(
    table: Table, given: _Given, valid: jax.Array | None, fill: int | None, dtype: Any, scored: bool
) -> Any:
    keys, valid = _checks.flat_batch(given, valid)
    table, slots = _inserts.touch(table, keys, valid)
    initial = (table.initializer, table.seed, keys, valid) if fill is None else None
    table, values = gather_values(table, slots, fill=as_number(fill), initial=initial, dtype=dtype)
    return _found(table, given, values, slots, scored)


def _found(
    table: Table, given: _Given, values: jax.Array, slots: jax.Array, scored: bool
) -> tuple[Table, FindResult | ScoredFindResult]:
    rows = checkpoint_name(values, ROWS_NAME).reshape(*given.shape, values.shape[-1])
    shaped = slots.reshape(given.shape)
    result = FindResult(rows, shaped >= 0, shaped)
    if not scored:
        return table, result
    index, scores = _index.scores_at(table.index, slots)
    table = dataclasses.replace(table, index=index)
    return table, ScoredFindResult(*result, scores.reshape(*given.shape))


def contains(table: Table, keys: Any, *, valid: Any = None) -> tuple[Table, Bool[Array, "*batch"]]:
    """Whether keys are present; masked positions are not.

    Args:
      table: to look in.
      keys: of any shape.
      valid: see :func:`find`.

    Raises:
      TypeError, ValueError, RuntimeError: naming the argument; the last of a used-up table.

    Example:
      >>> import jax_hkv as hkv
      >>> table, _ = find_or_insert(hkv.create(128, 2), np.array([5], np.int32))
      >>> contains(table, np.array([5, 6], np.int32))[1].tolist()
      [True, False]
    """
    given, mask = _batch("contains", table, keys, valid, merges=False, changes=False)
    clock, found = _contains(table, given, mask)
    return after_read(table, clock), found


@jitted()
def _contains(table: Table, given: _Given, valid: jax.Array | None) -> Any:
    index, slots = _index.find(table.index, *_checks.flat_batch(given, valid))
    return index.clock, (slots >= 0).reshape(given.shape)


def export_keys(table: Table, keys: Any, *, valid: Any = None) -> tuple[Table, Entries]:
    """The entries of keys that are present: rows, scores and optimizer rows.

    Args:
      table: to read.
      keys: of any shape: Keys, or an integer array.
      valid: see :func:`find`.

    Returns:
      The table, and the entries of the distinct keys, in the order of first occurrence: as many
      places as there are keys, of which ``.count`` are meant; zero behind them.

    Raises:
      TypeError, ValueError, RuntimeError: naming the argument; the last of a used-up table.

    Example:
      >>> import jax_hkv as hkv
      >>> table, _ = find_or_insert(hkv.create(128, 2), np.array([5, 6], np.int32))
      >>> table, entries = export_keys(table, np.array([6, 7, 6], np.int32))
      >>> int(entries.count), entries.keys.to_numpy().tolist()
      (1, [6, 0, 0])
    """
    given, mask = _batch("export_keys", table, keys, valid, changes=False)
    clock, entries = _export_keys(table, given, mask)
    return after_read(table, clock), entries


@jitted()
def _export_keys(table: Table, given: _Given, valid: jax.Array | None) -> Any:
    table, entries, _ = _inserts.export_keys(table, *_checks.flat_batch(given, valid))
    return table.index.clock, entries


def initial_rows(table: Table, keys: Any) -> Float[Array, "*batch dim"]:
    """The rows that keys start with, ``[*keys.shape, dim]``, whether they are present or not.

    Args:
      table: whose initializer and seed they come from, to read.
      keys: Keys or integers, of any shape.

    Raises:
      TypeError, ValueError, RuntimeError: naming the argument; the last of a used-up table.

    Example:
      >>> import jax_hkv as hkv
      >>> table = hkv.create(128, 2, init=hkv.initializers.constant(0.5))
      >>> initial_rows(table, np.array([5], np.int32)).tolist()
      [[0.5, 0.5]]
    """
    check_one_device("initial_rows", table)
    return _initial_rows(table, check_keys("initial_rows", "keys", keys, table.index.namespace))


@jitted()
def _initial_rows(table: Table, given: _Given) -> jax.Array:
    keys = keys_of(given).reshape(-1)
    # From an array without rows: reading the table's own would keep it from being updated in place.
    _, values = _rows.gather(
        jnp.zeros((2,), jnp.uint32),
        jnp.zeros((0, table.dim), table.dtype),
        jnp.full(keys.shape, NO_SLOT, jnp.int32),
        initial=(table.initializer, table.seed, keys, None),
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
    admit: Any = None,
    pinned: Any = None,
    dtype: Any = None,
    return_evicted: bool = False,
) -> tuple[Table, InsertResult]:
    """Looks up rows; absent keys are inserted, with their initial or the given row.

    Absent keys that `admit`, or the admission rule that the table was created with, does not let in
    get no slot, their initial row, and the status NOT_ADMITTED.

    Args:
      table: to change.
      keys: of any shape.
      values: rows for new keys, ``[*keys.shape, dim]``; of equal keys the first counts.
      scores: needed under CUSTOM; counts under LFU and EPOCH_LFU; an error under the others.
        Unsigned, of the keys' shape: uint32, int32 from 0 on, or Keys; or one number for all keys,
        which may be an int up to 2**64 - 1. In an argument of your own ``jax.jit`` a number is
        ``Keys.from_numpy(number)``: of others JAX, with x64 off, leaves the low 32 bits, silently.
      valid: see :func:`find`.
      admit: ``bool`` of the keys' shape: an absent key is let in if it is True at one of the key's
        valid positions (others are no sightings to `frequency`). None: at all. Present keys are
        found and scored whatever it says.
      pinned: results of earlier lookups of this table whose update is to come, one or a list, or
        int32 slots (no ids): nothing there is evicted. Layers pin what their step has brought.
      dtype: of the rows that come back; see :func:`find`. Their gradients may have it too.
      return_evicted: whether the result carries the evicted entries.

    Returns:
      The table, and an :class:`InsertResult`. Its row gradients go to
      ``jax_hkv.optim.sparse(...).update``.

    Raises:
      TypeError, ValueError, RuntimeError: naming the argument; the last of a used-up table.

    Example:
      >>> import numpy as np
      >>> import jax_hkv as hkv
      >>> table, result = hkv.find_or_insert(hkv.create(128, 2), np.array([5, 5], np.int32))
      >>> [hkv.Status(s).name for s in result.status.tolist()]
      ['INSERTED', 'FOUND']
      >>> ids, known = np.array([5, 6, 7], np.int32), np.array([False, False, True])
      >>> table, result = hkv.find_or_insert(table, ids, admit=known)
      >>> [hkv.Status(s).name for s in result.status.tolist()]
      ['FOUND', 'NOT_ADMITTED', 'INSERTED']
    """
    given, mask = _batch("find_or_insert", table, keys, valid)
    pairs = _checks.as_scores("find_or_insert", table.policy, scores, given.shape)
    offered = None
    if values is not None:
        offered = rows_of("find_or_insert", values, table, given)
    own = _checks.as_mask("find_or_insert", "admit", admit, given.shape)
    kind = _checks.as_row_dtype("find_or_insert", dtype)
    evicted = _checks.as_bool("find_or_insert", "return_evicted", return_evicted)
    batch = (given, mask, pairs, offered, own, pinned_slots("find_or_insert", pinned))
    return _find_or_insert(table, *batch, dtype=kind, evicted=evicted)


@jitted("dtype", "evicted")
def _find_or_insert(
    table: Table,
    given: _Given,
    valid: jax.Array | None,
    scores: Keys | None,
    offered: jax.Array | None,
    admit: jax.Array | None,
    pinned: jax.Array | None,
    dtype: Any,
    evicted: bool,
) -> Any:
    keys, valid = _checks.flat_batch(given, valid)
    if offered is not None:
        offered = offered.reshape(-1, table.dim)
    table, inserted = insert_rows(
        *(table, keys, valid, scores, offered, evicted),
        admit=admit,
        pinned=pinned,
        reads=True,
        dtype=dtype,
    )
    result = insert_result(checkpoint_name(inserted.values, ROWS_NAME), keys, inserted)
    rows = result.values.reshape(*given.shape, table.dim)
    return table, _shaped(result._replace(values=rows, keys=keys_of(given)), given.shape)


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

    Raises:
      TypeError, ValueError, RuntimeError: naming the argument; the last of a used-up table.

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

    Raises:
      TypeError, ValueError, RuntimeError: naming the argument; the last of a used-up table.

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
    given, mask = _batch(call, table, keys, valid)
    pairs = _checks.as_scores(call, table.policy, scores, given.shape)
    rows = rows_of(call, values, table, given)
    return _insert_or_assign(table, given, mask, pairs, rows, evicted=evicted)


def _shaped(result: Any, shape: tuple[int, ...]) -> Any:
    return result._replace(slots=result.slots.reshape(shape), status=result.status.reshape(shape))


@jitted("evicted")
def _insert_or_assign(
    table: Table,
    given: _Given,
    valid: jax.Array | None,
    scores: Keys | None,
    values: jax.Array,
    evicted: bool,
) -> Any:
    batch = _checks.flat_batch(given, valid)
    rows = values.reshape(-1, table.dim)
    table, result = _inserts.insert_or_assign(table, *batch, scores, rows, evicted=evicted)
    return table, _shaped(result, given.shape)


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

    Raises:
      TypeError, ValueError, RuntimeError: naming the argument; the last of a used-up table.

    Example:
      >>> import jax_hkv as hkv
      >>> ids, rows = np.array([5, 6], np.int32), np.ones((2, 1), np.float32)
      >>> table, _ = insert_or_assign(hkv.create(128, 1), ids[:1], rows[:1])
      >>> table, _ = accum_or_assign(table, ids, rows, np.array([True, False]))
      >>> find(table, ids)[1].values.tolist()
      [[2.0], [1.0]]
    """
    call = "accum_or_assign"
    given, mask = _batch(call, table, keys, valid)
    pairs = _checks.as_scores(call, table.policy, scores, given.shape)
    rows = rows_of(call, values, table, given)
    believed = _checks.as_flags(call, "exists", exists, given.shape)
    return _accum_or_assign(table, given, mask, pairs, rows, believed)


@jitted()
def _accum_or_assign(
    table: Table,
    given: _Given,
    valid: jax.Array | None,
    scores: Keys | None,
    values: jax.Array,
    believed: jax.Array,
) -> Any:
    batch = _checks.flat_batch(given, valid)
    rows = values.reshape(-1, table.dim)
    table, result = _inserts.accum_or_assign(table, *batch, scores, rows, believed.reshape(-1))
    return table, _shaped(result, given.shape)


def assign(
    table: Table, keys: Any, values: Any = None, *, scores: Any = None, valid: Any = None
) -> tuple[Table, WriteResult]:
    """Writes rows and/or scores of keys that are present; absent keys stay absent.

    Args:
      table: to change.
      keys: of any shape.
      values: rows, or None to leave them alone. Rows alone do not change scores, so that
        :func:`jax_hkv.sharding.export_changes` does not see them.
      scores: scores (CUSTOM) or counts (LFU, EPOCH_LFU), or None to leave them alone.
      valid: see :func:`find`.

    Raises:
      TypeError, ValueError, RuntimeError: naming the argument; the last of a used-up table.

    Example:
      >>> import jax_hkv as hkv
      >>> ids, rows = np.array([5, 6], np.int32), np.ones((2, 1), np.float32)
      >>> table, _ = insert_or_assign(hkv.create(128, 1), ids[:1], rows[:1])
      >>> table, result = assign(table, ids, 3 * rows)
      >>> [hkv.Status(s).name for s in result.status.tolist()]
      ['FOUND', 'MISSING']
    """
    given, mask = _batch("assign", table, keys, valid)
    if values is None and scores is None:
        raise ValueError("assign: values or scores must be given, got neither")
    pairs = None
    if scores is not None:
        pairs = _checks.as_scores("assign", table.policy, scores, given.shape)
    rows = None if values is None else rows_of("assign", values, table, given)
    return _assign(table, given, mask, pairs, rows)


@jitted()
def _assign(
    table: Table,
    given: _Given,
    valid: jax.Array | None,
    scores: Keys | None,
    values: jax.Array | None,
) -> Any:
    batch = _checks.flat_batch(given, valid)
    rows = None if values is None else values.reshape(-1, table.dim)
    table, result = _inserts.assign(table, *batch, scores, rows)
    return table, _shaped(result, given.shape)


def import_batch(
    table: Table, entries: Entries, *, valid: Any = None, return_evicted: bool = False
) -> tuple[Table, WriteResult]:
    """Puts entries in as they are: those that a table has evicted, or that were exported.

    Keys, scores, rows and optimizer rows become the given ones, of keys that are present too. A
    full bucket gives up its entry of lowest score, or refuses one of a lower score than that, under
    every policy; the clock ticks, and nothing else of the table changes. Under LRU scores of an
    older table are later than that clock, and those of its entries that are looked up would get
    earlier ones than those that are not: :func:`jax_hkv.sharding.import_entries` brings the clock.

    Args:
      table: to change.
      entries: with rows and optimizer rows like the table's, and scores of its policy; of equal
        keys the last counts. A `count` for each of several equal parts stands for those of so many
        devices, one after the other or stacked (``[devices, n]``).
      valid: ``bool``, one for each entry; False leaves it out, as do places behind
        ``entries.count``. None: all are valid.
      return_evicted: whether the result carries the entries that had to go.

    Returns:
      The table, and a :class:`WriteResult`.

    Raises:
      TypeError, ValueError, RuntimeError: naming the argument; the last of a used-up table.

    Example:
      >>> import jax_hkv as hkv
      >>> small, _ = find_or_insert(hkv.create(128, 2), np.arange(100, dtype=np.int32))
      >>> small, found = find_or_insert(small, np.arange(100, 150, dtype=np.int32),
      ...                               return_evicted=True)
      >>> large, result = import_batch(hkv.create(1024, 2), found.evicted)
      >>> int(result.counts.inserted), int(hkv.size(large))
      (22, 22)
    """
    call = "import_batch"
    check_one_device(call, table)
    entries, is_meant = meant_entries(call, table, entries, valid)
    evicted = _checks.as_bool(call, "return_evicted", return_evicted)
    return _import_batch(table, entries, is_meant, evicted=evicted)


@jitted("evicted")
def _import_batch(table: Table, entries: Entries, valid: jax.Array, evicted: bool) -> Any:
    return _inserts.import_rows(table, *entries[:-1], valid, evicted=evicted)


# --- Removal -------------------------------------------------------------------------------------


def erase(table: Table, keys: Any, *, valid: Any = None) -> tuple[Table, EraseResult]:
    """Removes keys; those absent are MISSING.

    Args:
      table: to change.
      keys: of any shape.
      valid: see :func:`find`.

    Raises:
      TypeError, ValueError, RuntimeError: naming the argument; the last of a used-up table.

    Example:
      >>> import jax_hkv as hkv
      >>> table, _ = find_or_insert(hkv.create(128, 1), np.array([5, 6], np.int32))
      >>> table, result = erase(table, np.array([5, 7], np.int32))
      >>> int(result.counts.hits), int(hkv.size(table))
      (1, 1)
    """
    given, mask = _batch("erase", table, keys, valid)
    return _erase(table, given, mask)


@jitted()
def _erase(table: Table, given: _Given, valid: jax.Array | None) -> Any:
    table, result = _inserts.erase(table, *_checks.flat_batch(given, valid))
    return table, result._replace(status=result.status.reshape(given.shape))


def clear(table: Table) -> Table:
    """Removes every entry; the clock, step counts, sightings and skipped rows go on.

    Args:
      table: to change. A fresh one is made by what made it, opt.init(create(...)).

    Raises:
      TypeError, RuntimeError: if it is no table of one device, or is used up.

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
