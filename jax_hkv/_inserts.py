"""What every insertion does, whoever asks for it: the operations, pooled lookups, many devices."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jax_hkv import index as _index
from jax_hkv import rows as _rows
from jax_hkv._checks import as_array, as_mask
from jax_hkv._keys import Keys, check_fixed, form_of
from jax_hkv.index import LANES, NO_SLOT, Groups, Status
from jax_hkv.table import (
    STATUSES_OF,
    Bags,
    Counts,
    Entries,
    EraseResult,
    InsertResult,
    Table,
    WriteResult,
    entries_at,
    forms_of,
    gather_values,
    scatter_optimizer,
    scatter_values,
    with_clock,
)

# Makes of what an upsert has evicted, before its rows are written, what is wanted of it.
EvictedOf = Callable[[Table, _index.Upserted], tuple[Table, Any]]


def _added(sums: Any, terms: Any) -> Any:  # one function: JAX keeps what it reduces by
    return [a + b for a, b in zip(sums, terms, strict=True)]


def counts_of(groups: Groups, unique_status: jax.Array) -> Counts:
    """What became of the distinct keys of a batch."""
    # All in one pass: as sums of their own they are one each. Of those that are not admitted there
    # are none, since the native call knows no admission: a sum of its own would copy a constant.
    kinds = [[unique_status == each for each in STATUSES_OF[kind]] for kind in Counts._fields[1:]]
    tallies = [functools.reduce(operator.or_, own).astype(jnp.int32) for own in kinds]
    sums = jax.lax.reduce(tallies, [jnp.int32(0)] * len(tallies), _added, (0,))
    return Counts(groups.count[0], *sums)


def upsert(
    table: Table,
    groups: Groups,
    scores: Keys | None,
    evicted: bool | EvictedOf,
    pinned: jax.Array | None = None,
    is_ticked: bool = False,
    report_new: bool = True,
) -> tuple[Table, _index.Upserted, Any]:
    """Inserts and refreshes; new rows have fresh optimizer values but no value yet."""
    index, upserted = _index.upsert(
        table.index,
        groups,
        scores,
        admit=True,
        pinned=pinned,
        report_evicted=evicted is not False,
        report_new=report_new or table.optimizer is not None,
        is_ticked=is_ticked,
    )
    table = dataclasses.replace(table, index=index)
    entries = None
    if evicted is not False:
        table, entries = (_evicted if evicted is True else evicted)(table, upserted)
    fresh = table.optimizer.fresh if table.optimizer else {}  # nobody inherits a victim's moments
    return scatter_optimizer(table, upserted.new_slots, None, fresh), upserted, entries


def _let_in(
    table: Table,
    keys: Keys,
    seen: Groups,
    admit: jax.Array | None = None,
    occurrences: jax.Array | None = None,
    is_ticked: bool = False,
) -> tuple[Table, Groups]:
    """Asks the caller and the table's admission about the absent keys; the groups of the others.

    Sightings are those at positions that let their keys in.
    """
    distinct, asked = Keys(seen.keys), _index.all_of(seen)
    index, slots = _index.find(table.index, distinct, asked)
    table = dataclasses.replace(table, index=index)
    is_present = slots >= 0
    admitted, sightings = asked, occurrences
    if admit is not None:
        sightings = _index.sum_by_key(seen, admit.reshape(-1).astype(jnp.int32))
        admitted = sightings > 0
    if table.admission is not None:
        admission, by_rule = table.admission.decide(
            table.seed,
            (index if is_ticked else _index.tick(index)).clock,
            distinct,
            asked & ~is_present,
            _index.occurrences(seen).counts if sightings is None else sightings,
        )
        table = dataclasses.replace(table, admission=admission)
        admitted = by_rule if admit is None else by_rule & admitted
    enters = _index.by_position(seen, is_present | admitted, False)
    return table, _index.unique(keys, enters)


def _with_those_away(result: InsertResult, seen: Groups) -> InsertResult:
    """A result of the keys that were let in, completed by those that were not."""
    away = (seen.inverse >= 0) & (result.groups.inverse < 0)
    unique = seen.count[0]
    not_admitted = unique - result.counts.unique
    slots = jnp.where(_index.all_of(seen), _index.take(result.slots, seen.first), NO_SLOT)
    return result._replace(
        groups=seen,
        unique_slots=slots,
        status=jnp.where(away, jnp.int32(Status.NOT_ADMITTED), result.status),
        counts=result.counts._replace(unique=unique, not_admitted=not_admitted),
    )


def most_at_once(table: Table, limit: int) -> int:
    """How many entries to give :func:`import_rows`: those of one call do not evict each other.

    With two candidates all of a call choose by the same numbers, before any of them is there. Of as
    many entries as slots 0.3 % find no room in calls of a 256th of them, 11 % in one, if they come
    in an order that has nothing to do with their buckets (simulated; else 5 % to 8 %).
    """
    if table.choices == 1:
        return limit
    return min(limit, 1 << max(LANES, table.capacity // 256).bit_length() - 1)


def meant_entries(
    call: str, table: Table, entries: Any, valid: Any
) -> tuple[Entries, Bool[Array, " n"]]:
    """Entries that fit a table, flat if they were stacked, and which of them are meant."""
    if not isinstance(entries, Entries):
        raise TypeError(
            f"{call}: entries must be jax_hkv.Entries, as export_batch, export_keys and "
            f"`evicted` of results are, got {type(entries).__name__}: what export_entries gives "
            "goes into a table by jax_hkv.sharding.import_entries"
        )
    for name in ("keys", "scores"):
        numbers = getattr(entries, name)
        if not isinstance(numbers, Keys):
            raise TypeError(
                f"{call}: entries.{name} must be jax_hkv.Keys, got {type(numbers).__name__}: make "
                "them on the host with jax_hkv.Keys.from_numpy"
            )
    is_dict = isinstance(entries.optimizer, Mapping)
    leaves = [entries.values, *(entries.optimizer.values() if is_dict else ())]
    if not is_dict or not all(hasattr(leaf, "dtype") for leaf in leaves):
        kinds = [form_of(leaf) for leaf in (leaves if is_dict else (*leaves, entries.optimizer))]
        raise TypeError(
            f"{call}: entries must have rows as an array and optimizer rows as a dict of arrays, "
            f"{{}} for none, got {' and '.join(kinds)}"
        )
    count = as_array(call, "entries.count", entries.count, "one integer, or one for each part")
    axes = entries.keys.ndim - 1
    if axes and count.shape == entries.keys.shape[:-1]:
        entries = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[axes + 1 :]), entries)
        count = count.reshape(-1)
    rows = table.optimizer.rows if table.optimizer else {}
    wanted, given = forms_of(table.values, rows), forms_of(entries.values, entries.optimizer)
    if wanted != given:
        raise ValueError(
            f"{call}: entries must have rows and optimizer rows like the table's, {wanted}, got "
            f"{given}: create the table with the same dim, dtype and optimizer; one without an "
            "optimizer takes entries._replace(optimizer={})"
        )
    shape = entries.keys.shape
    check_fixed(call, "entries", shape)
    leaves = [*jax.tree.leaves((entries.values, dict(entries.optimizer))), entries.scores]
    sizes = {size for leaf in (entries.keys, *leaves) for size in leaf.shape[:1]}
    if len(shape) != 1 or entries.scores.shape != shape or sizes != set(shape):
        raise ValueError(
            f"{call}: entries must have as many keys, scores and rows, got leading axes of "
            f"{sorted(sizes)}: cut or stack all of them alike, flatten keys and scores, and give "
            "the entries of one device"
        )
    is_number = count.ndim < 2 and jnp.issubdtype(count.dtype, jnp.integer)
    if not is_number or not count.size or shape[0] % count.size:
        raise TypeError(
            f"{call}: entries.count must be one integer, or one for each of as many equal parts of "
            f"the {shape[0]} entries, got {count.dtype}{list(count.shape)}: how many of the "
            "entries are meant, those in front"
        )
    mask = as_mask(call, "valid", valid, shape)
    places = _rows.positions(shape[0] // count.size)
    is_meant = (places[None] < count.reshape(-1, 1).astype(jnp.int32)).reshape(-1)
    return entries, is_meant if mask is None else is_meant & mask


def export_keys(table: Table, keys: Keys, valid: Any) -> tuple[Table, Entries, Int32[Array, " n"]]:
    """The entries of those of some flat keys that are present, each once, and all keys' slots."""
    index, slots = _index.find(table.index, keys, valid)
    groups = _index.unique(keys, slots >= 0)  # which puts those that are present side by side
    distinct = jnp.where(_index.all_of(groups), _index.take(slots, groups.first), NO_SLOT)
    index, scores = _index.scores_at(index, distinct)
    table = dataclasses.replace(table, index=index)
    table, entries = entries_at(table, groups.keys, scores.words, distinct)
    return table, entries, slots


def import_rows(
    table: Table,
    keys: Keys,
    scores: Keys,
    values: jax.Array,
    optimizer: Mapping[str, jax.Array],
    valid: jax.Array,
    *,
    evicted: bool,
    is_ticked: bool = False,
    admits: bool = True,
) -> tuple[Table, WriteResult]:
    """Puts in entries as they are, absent ones if it admits them; of equal keys the last."""
    groups = _index.unique(keys, valid)
    index, upserted = _index.upsert(
        table.index,
        groups,
        scores,
        admit=admits,
        report_evicted=evicted,
        is_ticked=is_ticked,
        as_given=True,
    )
    table = dataclasses.replace(table, index=index)
    table, entries = _evicted(table, upserted) if evicted else (table, None)
    table = scatter_values(table, upserted.unique_slots, groups.last, values)
    table = scatter_optimizer(table, upserted.unique_slots, groups.last, optimizer)
    return table, write_result(groups, upserted, entries)


def _evicted(table: Table, upserted: _index.Upserted) -> tuple[Table, Entries]:
    """The entries that an upsert has evicted, before anything overwrites their rows."""
    entries = upserted.evicted_keys, upserted.evicted_scores, upserted.evicted_slots
    return entries_at(table, *entries, upserted.evicted_count.reshape(()))


def write_result(
    groups: Groups, upserted: _index.Upserted, entries: Entries | None = None
) -> WriteResult:
    """What became of the flat keys of a batch that wrote rows."""
    counts = counts_of(groups, upserted.unique_status)
    return WriteResult(upserted.slots, upserted.status, counts, entries)


def insert_or_assign(
    table: Table,
    keys: Keys,
    valid: jax.Array | None,
    scores: Keys | None,
    values: jax.Array,
    *,
    evicted: bool,
    is_ticked: bool = False,
) -> tuple[Table, WriteResult]:
    """Writes the last row of each key of a flat batch; absent ones are inserted."""
    groups = _index.unique(keys, valid)
    table, upserted, entries = upsert(
        table, groups, scores, evicted, is_ticked=is_ticked, report_new=False
    )
    table = scatter_values(table, upserted.unique_slots, groups.last, values)
    return table, write_result(groups, upserted, entries)


def assign(
    table: Table,
    keys: Keys,
    valid: jax.Array | None,
    scores: Keys | None,
    values: jax.Array | None,
    *,
    is_ticked: bool = False,
) -> tuple[Table, WriteResult]:
    """Writes the last row, or the scores, of the keys of a flat batch that are present."""
    groups = _index.unique(keys, valid)
    has_scores = scores is not None
    index, upserted = _index.upsert(
        table.index, groups, scores, admit=False, write_scores=has_scores, is_ticked=is_ticked
    )
    table = dataclasses.replace(table, index=index)
    if values is not None:
        table = scatter_values(table, upserted.unique_slots, groups.last, values)
    return table, write_result(groups, upserted)


def accum_or_assign(
    table: Table,
    keys: Keys,
    valid: jax.Array | None,
    scores: Keys | None,
    values: jax.Array,
    believed: jax.Array,
    *,
    is_ticked: bool = False,
) -> tuple[Table, WriteResult]:
    """Adds to the rows of a flat batch, or inserts them, where it is believed so rightly."""
    index, slots = _index.find(table.index, keys, valid)
    table = dataclasses.replace(table, index=index)
    effective = believed == (slots >= 0)
    effective = effective if valid is None else effective & valid
    groups = _index.unique(keys, effective)
    table, upserted, _ = upsert(table, groups, scores, False, pinned=slots, is_ticked=is_ticked)
    table = scatter_values(table, upserted.new_slots, groups.last, values)
    hits = jnp.where(upserted.new_slots >= 0, NO_SLOT, upserted.unique_slots)
    result = write_result(groups, upserted)
    return _with_sums(table, groups, hits, values), result._replace(
        slots=jnp.where(effective, result.slots, slots),
        status=jnp.where(effective, result.status, found_or_missing(slots)),
    )


def _with_sums(
    table: Table, groups: _index.Groups, slots: Int32[Array, " n"], values: jax.Array
) -> Table:
    """The table once each key's rows are added to the one in its slot: sgd at a rate of -1."""
    one, none = jnp.ones((1,), jnp.uint32), jnp.zeros((1,), jnp.uint32)
    rate = jnp.full((1,), -1, jnp.float32)
    clock, rows, *_ = _index.update_rows(
        *("sgd", table.index, table.values, (), one, none, slots, groups, rate),
        _index.Terms(values),
        stochastic=0,
        seed=0,
        max_gradient=math.inf,
    )
    return dataclasses.replace(with_clock(table, clock), values=rows)


def found_or_missing(slots: jax.Array) -> jax.Array:
    """The statuses of keys that were looked up."""
    return jnp.where(slots >= 0, Status.FOUND, Status.MISSING).astype(jnp.int32)


def touch(
    table: Table,
    keys: Keys,
    valid: jax.Array | None,
    scores: Keys | None = None,
    *,
    is_ticked: bool = False,
) -> tuple[Table, jax.Array]:
    """Scores the keys of a flat batch that are present as if they came again; and their slots."""
    groups = _index.unique(keys, valid)
    index, upserted = _index.upsert(table.index, groups, scores, admit=False, is_ticked=is_ticked)
    return dataclasses.replace(table, index=index), upserted.slots


def erase(
    table: Table, keys: Keys, valid: jax.Array | None, *, is_ticked: bool = False
) -> tuple[Table, EraseResult]:
    """Removes the keys of a flat batch."""
    groups = _index.unique(keys, valid)
    index, upserted = _index.upsert(
        table.index, groups, None, admit=False, write_scores=False, is_ticked=is_ticked
    )
    index = _index.erase(index, upserted.unique_slots)
    counts = counts_of(groups, upserted.unique_status)
    return dataclasses.replace(table, index=index), EraseResult(upserted.status, counts)


class Inserted(NamedTuple):
    """What became of a batch: of the keys let in; those seen are more if some were not admitted.

    And the rows of its positions, if they were read.
    """

    groups: Groups
    seen: Groups
    upserted: _index.Upserted
    evicted: Any
    values: jax.Array | None


def insert_rows(
    table: Table,
    keys: Keys,
    valid: jax.Array | None,
    scores: Keys | None,
    offered: jax.Array | None,
    evicted: bool | EvictedOf,
    *,
    admit: jax.Array | None = None,
    occurrences: jax.Array | None = None,
    pinned: jax.Array | None = None,
    is_ticked: bool = False,
    reads: bool = False,
    dtype: Any = None,
) -> tuple[Table, Inserted]:
    """Inserts absent keys with their initial or the given rows, and refreshes the others.

    Args:
      table: to change.
      keys: flat.
      valid: of them, or None: all.
      scores: of the positions, or None.
      offered: rows of the positions, or None.
      evicted: whether the evicted entries are wanted, or what gets them, in another form.
      admit: of the positions, of any shape, those that let their keys in, or at how many of its
        occurrences each does; None: all.
      occurrences: ``int32``, as how many occurrences each position counts; None: as one.
      pinned: slots that must not be evicted, besides those of the keys.
      is_ticked: whether the clock already stands at the time of this batch.
      reads: whether the rows of the positions are wanted: initial ones where they got none, zeros
        where masked.
      dtype: of those rows; None: of the table's.
    """
    groups = seen = _index.unique(keys, valid)
    if table.admission is not None or admit is not None:
        counted = None if occurrences is None else _index.sum_by_key(seen, occurrences)
        table, groups = _let_in(table, keys, seen, admit, counted, is_ticked)
    table, upserted, entries = upsert(
        table, groups, scores, evicted, pinned=pinned, is_ticked=is_ticked
    )
    slots, new, values = upserted.slots, upserted.new_slots, None
    start = (table.initializer, table.seed)
    if offered is not None:
        table = scatter_values(table, new, groups.first, offered)
        if reads:
            initial = (*start, keys, valid)
            table, values = gather_values(table, slots, initial=initial, dtype=dtype)
        return table, Inserted(groups, seen, upserted, entries, values)
    if reads:
        clock, stored, values = _rows.gather_or_init(
            *(table.index.clock, table.values, slots, groups.inverse, groups.first, new),
            *(groups.keys, keys, valid, *start),
            dtype=dtype,
            name=table.name,
        )
    else:
        clock, stored = _rows.initialize(
            *(table.index.clock, table.values, new, Keys(groups.keys), *start), name=table.name
        )
    table = dataclasses.replace(with_clock(table, clock), values=stored)
    return table, Inserted(groups, seen, upserted, entries, values)


def insert_result(
    values: jax.Array, keys: Keys, inserted: Inserted, bags: Bags | None = None
) -> InsertResult:
    """What became of the flat keys of a batch, with the rows that were read for them."""
    groups, seen, upserted, entries, _ = inserted
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
    return result if seen is groups else _with_those_away(result, seen)
