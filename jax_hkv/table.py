"""The table: an index, rows and optimizer rows, and the operations on all of them together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int32, Num

from jax_hkv import _checks, index as _index, initializers, rows as _rows
from jax_hkv._keys import Keys, as_keys
from jax_hkv.index import LANES, MAX_SLOTS, NO_SLOT, Groups, Index, Policy, Status

# The name under which rows of a lookup are saved by jax.checkpoint policies.
ROWS_NAME = "hkv_rows"

# Slots read at a time by operations that go over the whole table: some megabytes of rows.
_CHUNK_SLOTS = 16384

_ROW_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)

Predicate = Callable[[Keys, Keys, jax.Array], jax.Array]
Result = TypeVar("Result")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OptimizerRows:
    """An optimizer's state that lies in the table.

    Attributes:
      rows: leaves of a row each, ``[slots, ...]``; they are evicted and moved with the row.
      fresh: what a new row starts with, ``[1, ...]`` for each of `rows`.
      shared: leaves that all rows share (step counts), with a leading axis of 1.
      skipped: ``uint32[1]``, updates that were dropped because their slot held another key by then.
      structure: static, how the leaves make up the optimizer's state.
    """

    rows: tuple[Num[Array, "S ..."], ...]
    fresh: tuple[Num[Array, "1 ..."], ...]
    shared: tuple[Num[Array, "1 ..."], ...]
    skipped: jax.Array
    structure: Any = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Table:
    """A dynamic embedding table as a value: every operation returns a new one.

    Make one with :func:`create`. Under ``jax.jit`` with the table donated nothing is copied.

    Attributes:
      index: digests, keys, scores, occupancy, clock and epoch.
      values: ``dtype[slots, dim]``, rows by slot; rows of empty slots have no meaning.
      optimizer: optimizer rows, or None.
      initializer: static, the first value of a row.
      seed: static, of the first values.
    """

    index: Index
    values: Float[Array, "S dim"]
    optimizer: OptimizerRows | None
    initializer: initializers.Initializer = dataclasses.field(metadata={"static": True})
    seed: int = dataclasses.field(metadata={"static": True})

    @property
    def capacity(self) -> int:
        """Slots, a multiple of 128."""
        return self.values.shape[-2]

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return self.values.shape[-1]

    @property
    def dtype(self) -> np.dtype:
        """Element type of the rows."""
        return np.dtype(self.values.dtype)

    @property
    def policy(self) -> Policy:
        """How entries are scored."""
        return self.index.policy

    @property
    def choices(self) -> int:
        """Candidate buckets of a key."""
        return self.index.choices

    @property
    def name(self) -> str:
        """For error messages."""
        return self.index.name

    @property
    def digests(self) -> jax.Array:
        """``uint8[B, 128]``."""
        return self.index.digests

    @property
    def keys(self) -> jax.Array:
        """``uint32[B, 128, 2]``."""
        return self.index.keys

    @property
    def scores(self) -> jax.Array:
        """``uint32[B, 128, 2]``."""
        return self.index.scores

    @property
    def occupancy(self) -> jax.Array:
        """``int32[B]``."""
        return self.index.occupancy

    @property
    def clock(self) -> jax.Array:
        """``uint32[2]``."""
        return self.index.clock

    @property
    def epoch(self) -> jax.Array:
        """``uint32[1]``."""
        return self.index.epoch

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        leaves = jax.tree.leaves(self)
        return sum(int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in leaves)

    def __repr__(self) -> str:
        if not hasattr(self.values, "shape"):  # JAX unflattens with objects that are no arrays
            return f"Table({self.name!r})"
        return (
            f"Table({self.name!r}, capacity={self.capacity:,}, dim={self.dim}, "
            f"dtype={self.dtype.name}, policy={self.policy.name}, choices={self.choices}, "
            f"bytes={self.nbytes:,})"
        )


class Counts(NamedTuple):
    """What became of the distinct keys of a batch; ``int32`` scalars.

    size_after + evicted = size_before + inserted.
    """

    unique: Int32[Array, ""]
    hits: Int32[Array, ""]
    inserted: Int32[Array, ""]
    evicted: Int32[Array, ""]
    refused: Int32[Array, ""]


class Entries(NamedTuple):
    """Entries that left a table or were read from it; compact, zero behind `count`."""

    keys: Keys
    scores: Keys
    values: Float[Array, "n dim"]
    optimizer: tuple[Num[Array, "n ..."], ...]
    count: Int32[Array, ""]


class FindResult(NamedTuple):
    """Rows, whether the keys are present, and their slots (-1: absent)."""

    values: Float[Array, "*batch dim"]
    found: Bool[Array, "*batch"]
    slots: Int32[Array, "*batch"]


class InsertResult(NamedTuple):
    """What `find_or_insert` returns, and what an optimizer's update needs.

    Attributes:
      values: rows of the keys; initial rows where refused, zeros where masked.
      keys: of the batch.
      slots: valid until the next inserting operation; -1 where refused or masked.
      status: see :class:`Status`.
      counts: of distinct keys.
      evicted: the entries that were evicted, if asked for.
      groups: the distinct keys of the batch.
      unique_slots: of the distinct keys.
    """

    values: Float[Array, "*batch dim"]
    keys: Keys
    slots: Int32[Array, "*batch"]
    status: Int32[Array, "*batch"]
    counts: Counts
    evicted: Entries | None
    groups: Groups
    unique_slots: Int32[Array, " n"]


class WriteResult(NamedTuple):
    """What an operation that writes rows returns; `evicted` is None unless asked for."""

    slots: Int32[Array, "*batch"]
    status: Int32[Array, "*batch"]
    counts: Counts
    evicted: Entries | None = None


class EraseResult(NamedTuple):
    """FOUND for what was erased; `counts.hits` keys were."""

    status: Int32[Array, "*batch"]
    counts: Counts


def create(
    capacity: int,
    dim: int,
    *,
    dtype: Any = jnp.float32,
    policy: Policy = Policy.LRU,
    choices: int = 1,
    init: initializers.Initializer | None = None,
    seed: int = 0,
    name: str = "table",
) -> Table:
    """An empty table.

    Args:
      capacity: entries; rounded up to whole buckets of 128.
      dim: elements of a row.
      dtype: of the rows: float32, bfloat16 or float16.
      policy: how entries are scored, hence which is evicted from a full bucket.
      choices: candidate buckets of a key. Two fill a table to 98 % before anything is evicted
        (one: about 65 %) and keep better entries, for a second probe.
      init: first values of rows, by default ``variance_scaling(1.0, "normal")`` as ``nn.Embed``.
      seed: of the first values, 0 to 2**64 - 1.
      name: appears in error messages.

    Raises:
      ValueError, TypeError: naming the argument.

    Example:
      >>> table = create(1000, dim=4)
      >>> table.capacity
      1024
    """
    _checks.check_integer("create", "capacity", capacity, 1, MAX_SLOTS // LANES * LANES)
    _checks.check_integer("create", "dim", dim, 1, MAX_SLOTS)
    _checks.check_integer("create", "choices", choices, 1, 2)
    _checks.check_integer("create", "seed", seed, 0, 2**64 - 1)
    if np.dtype(dtype) not in [np.dtype(row) for row in _ROW_DTYPES]:
        raise TypeError(
            f"create: dtype must be float32, bfloat16 or float16, got {np.dtype(dtype)}"
        )
    initializer = initializers.variance_scaling(1.0, "normal") if init is None else init
    if not isinstance(initializer, initializers.Initializer):
        raise TypeError(
            "create: init must come from jax_hkv.initializers (a row is a function of seed and key "
            f"alone, on every backend), got {type(initializer).__name__}"
        )
    buckets = -(-capacity // LANES)
    return Table(
        index=_index.create(buckets, Policy(policy), choices, name),
        values=_rows.new(jnp.zeros((1, dim), dtype), buckets * LANES),
        optimizer=None,
        initializer=initializer.for_dim(dim),
        seed=seed,
    )


# --- What the operations share -------------------------------------------------------------------


def _batch(call: str, table: Table, keys: Any, valid: Any) -> tuple[Keys, Keys, jax.Array]:
    """The keys as given, flat, and their mask."""
    if not isinstance(table, Table):
        raise TypeError(f"{call}: table must be a jax_hkv Table, got {type(table).__name__}")
    given = as_keys(call, "keys", keys)
    flat = given.reshape(-1)
    return given, flat, _checks.as_mask(call, "valid", valid, given.shape).reshape(-1)


def _flat_rows(call: str, argument: str, values: Any, table: Table, keys: Keys) -> jax.Array:
    expected = (*keys.shape, table.dim)
    array = _checks.as_rows(call, argument, values, expected, table.dtype)
    return array.reshape(-1, table.dim)


def _read_clock(table: Table, clock: jax.Array) -> Table:
    """A table after a read. Outside a trace nothing needs an order: the same object."""
    if not isinstance(clock, jax.core.Tracer):
        return table
    return _with_clock(table, clock)


def _with_clock(table: Table, clock: jax.Array) -> Table:
    return dataclasses.replace(table, index=dataclasses.replace(table.index, clock=clock))


def gather_values(
    table: Table, slots: jax.Array, *, fill: float = 0.0, initial: Any = None
) -> tuple[Table, jax.Array]:
    """Rows by slot; see :func:`jax_hkv.rows.gather` for positions without one."""
    clock, values = _rows.gather(
        table.index.clock, table.values, slots, fill=fill, initial=initial, name=table.name
    )
    return _with_clock(table, clock), values


def scatter_values(
    table: Table, slots: jax.Array, sources: jax.Array, values: jax.Array
) -> Table:
    """Writes rows: ``values[slots[i]] = rows[sources[i]]`` for distinct slots, -1 passed over."""
    clock, values = _rows.scatter(
        table.index.clock, table.values, slots, sources, values, name=table.name
    )
    return dataclasses.replace(_with_clock(table, clock), values=values)


def gather_optimizer(table: Table, slots: jax.Array) -> tuple[Table, tuple[jax.Array, ...]]:
    """Optimizer rows by slot, zero where the slot is -1."""
    gathered = []
    clock = table.index.clock
    for leaf in table.optimizer.rows if table.optimizer else ():
        clock, values = _rows.gather(clock, leaf, slots, name=table.name)
        gathered.append(values)
    return _with_clock(table, clock), tuple(gathered)


def scatter_optimizer(
    table: Table, slots: jax.Array, sources: jax.Array, values: Sequence[jax.Array]
) -> Table:
    """Writes optimizer rows: ``leaf[slots[i]] = values[sources[i]]`` for each leaf."""
    if table.optimizer is None:
        return table
    clock = table.index.clock
    leaves = []
    for leaf, new in zip(table.optimizer.rows, values, strict=True):
        clock, leaf = _rows.scatter(clock, leaf, slots, sources, new, name=table.name)
        leaves.append(leaf)
    optimizer = dataclasses.replace(table.optimizer, rows=tuple(leaves))
    return dataclasses.replace(_with_clock(table, clock), optimizer=optimizer)


def _start_optimizer_rows(table: Table, slots: jax.Array) -> Table:
    """New rows start with fresh optimizer values: nobody inherits a victim's moments."""
    fresh = table.optimizer.fresh if table.optimizer else ()
    return scatter_optimizer(table, slots, jnp.zeros_like(slots), fresh)


def _entries(
    table: Table, keys: jax.Array, scores: jax.Array, slots: jax.Array
) -> tuple[Table, Entries]:
    """What stands in slots, before anything overwrites it."""
    table, values = gather_values(table, slots)
    table, optimizer = gather_optimizer(table, slots)
    count = jnp.sum(slots >= 0, dtype=jnp.int32)
    return table, Entries(Keys(keys), Keys(scores), values, optimizer, count)


def _counts(groups: Groups, unique_status: jax.Array) -> Counts:
    def of(status: Status) -> jax.Array:
        return jnp.sum(unique_status == status, dtype=jnp.int32)

    evicted = of(Status.EVICTED)
    return Counts(
        unique=groups.count[0],
        hits=of(Status.FOUND),
        inserted=of(Status.INSERTED) + evicted,
        evicted=evicted,
        refused=of(Status.REFUSED),
    )


def _is_new(unique_status: jax.Array) -> jax.Array:
    return (unique_status == Status.INSERTED) | (unique_status == Status.EVICTED)


def _upsert(
    table: Table,
    groups: Groups,
    scores: Keys | None,
    report_evicted: bool,
    pinned: jax.Array | None = None,
) -> tuple[Table, _index.Upserted, Entries | None]:
    """Inserts and refreshes; new rows have fresh optimizer values but no value yet."""
    index, upserted = _index.upsert(
        _index.tick(table.index),
        groups,
        scores,
        admit=True,
        pinned=pinned,
        report_evicted=report_evicted,
    )
    table = dataclasses.replace(table, index=index)
    evicted = None
    if report_evicted:
        table, evicted = _entries(
            table, upserted.evicted_keys, upserted.evicted_scores, upserted.evicted_slots
        )
    new_slots = jnp.where(_is_new(upserted.unique_status), upserted.unique_slots, NO_SLOT)
    return _start_optimizer_rows(table, new_slots), upserted, evicted


def _jit(*static: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """One compiled function when called eagerly; inlined into the caller's otherwise."""
    return functools.partial(jax.jit, static_argnames=static, inline=True)


# --- Reads ---------------------------------------------------------------------------------------


def find(
    table: Table,
    keys: Any,
    *,
    valid: Any = None,
    touch: bool = False,
    fill: float | str = 0.0,
) -> tuple[Table, FindResult]:
    """Looks up rows. Absent keys stay absent.

    Args:
      table: to look in.
      keys: of any shape: Keys, or an integer array.
      valid: ``bool`` of the keys' shape; False masks a position. None: all are valid.
      touch: whether hits are scored as if they had been inserted again (this changes the table).
      fill: the row of absent keys: a number, or "initial" for the row that the key would start with.

    Returns:
      The table, and rows ``[*keys.shape, dim]``, found and slots. Masked positions are not found;
      their row is the fill number, or zero with "initial".

    Raises:
      TypeError, ValueError: naming the argument; also for `touch` under Policy.CUSTOM, whose scores
        are always given (use :func:`assign` with scores).

    Example:
      >>> import numpy as np
      >>> table, _ = insert_or_assign(create(128, 2), np.array([5], np.int32), jnp.ones((1, 2)))
      >>> _, result = find(table, np.array([5, 6], np.int32), fill=-1.0)
      >>> result.values.tolist()
      [[1.0, 1.0], [-1.0, -1.0]]
    """
    given, flat, mask = _batch("find", table, keys, valid)
    if isinstance(fill, str) and fill != "initial":
        raise ValueError(f'find: fill must be a number or "initial", got {fill!r}')
    number = None if isinstance(fill, str) else float(fill)
    if touch:
        _checks.check_scores("find with touch=True", table.policy, None)
        table, values, slots = _find_and_touch(table, flat, mask, fill=number)
    else:
        clock, values, slots = _find(table, flat, mask, fill=number)
        table = _read_clock(table, clock)
    slots = slots.reshape(given.shape)
    return table, FindResult(values.reshape(*given.shape, table.dim), slots >= 0, slots)


def _found_rows(
    table: Table, keys: Keys, valid: jax.Array, slots: jax.Array, fill: float | None
) -> tuple[Table, jax.Array]:
    initial = (table.initializer, table.seed, keys, valid) if fill is None else None
    table, values = gather_values(table, slots, fill=fill or 0.0, initial=initial)
    return table, checkpoint_name(values, ROWS_NAME)


@_jit("fill")
def _find(table: Table, keys: Keys, valid: jax.Array, fill: float | None) -> Any:
    index, slots = _index.find(table.index, keys, valid)
    table, values = _found_rows(
        dataclasses.replace(table, index=index), keys, valid, slots, fill
    )
    return table.index.clock, values, slots


@_jit("fill")
def _find_and_touch(table: Table, keys: Keys, valid: jax.Array, fill: float | None) -> Any:
    groups = _index.unique(keys, valid)
    index, upserted = _index.upsert(_index.tick(table.index), groups, None, admit=False)
    table = dataclasses.replace(table, index=index)
    table, values = _found_rows(table, keys, valid, upserted.slots, fill)
    return table, values, upserted.slots


def contains(
    table: Table, keys: Any, *, valid: Any = None
) -> tuple[Table, Bool[Array, "*batch"]]:
    """Whether keys are present; masked positions are not.

    Args:
      table: to look in.
      keys: of any shape.
      valid: see :func:`find`.
    """
    given, flat, mask = _batch("contains", table, keys, valid)
    clock, slots = _slots(table, flat, mask)
    return _read_clock(table, clock), (slots >= 0).reshape(given.shape)


@_jit()
def _slots(table: Table, keys: Keys, valid: jax.Array) -> Any:
    index, slots = _index.find(table.index, keys, valid)
    return index.clock, slots


def initial_rows(table: Table, keys: Any) -> Float[Array, "*batch dim"]:
    """The rows that keys start with, whether they are present or not."""
    given, flat, mask = _batch("initial_rows", table, keys, None)
    initial = (table.initializer, table.seed, flat, mask)
    _, values = gather_values(table, jnp.full(mask.shape, NO_SLOT, jnp.int32), initial=initial)
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

    Args:
      table: to change.
      keys: of any shape.
      values: rows for new keys, ``[*keys.shape, dim]``; of equal keys the first counts.
      scores: needed under CUSTOM; counts under LFU and EPOCH_LFU; an error under the others.
      valid: see :func:`find`.
      return_evicted: whether the result carries the evicted entries.

    Returns:
      The table, and an :class:`InsertResult`. Its row gradients go to
      ``jax_hkv.optim.sparse(...).update``.

    Raises:
      TypeError, ValueError: naming the argument.

    Example:
      >>> import numpy as np
      >>> table, result = find_or_insert(create(128, 2), np.array([5, 5], np.int32))
      >>> [Status(s).name for s in result.status.tolist()]
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


@_jit("evicted")
def _find_or_insert(
    table: Table,
    keys: Keys,
    valid: jax.Array,
    scores: Keys | None,
    offered: jax.Array | None,
    evicted: bool,
) -> Any:
    groups = _index.unique(keys, valid)
    table, upserted, entries = _upsert(table, groups, scores, evicted)
    new_slots = jnp.where(_is_new(upserted.unique_status), upserted.unique_slots, NO_SLOT)
    if offered is None:
        clock, values = _rows.initialize(
            table.index.clock,
            table.values,
            new_slots,
            Keys(groups.keys),
            table.initializer,
            table.seed,
            name=table.name,
        )
        table = dataclasses.replace(_with_clock(table, clock), values=values)
    else:
        table = scatter_values(table, new_slots, groups.first, offered)
    initial = (table.initializer, table.seed, keys, valid)
    table, values = gather_values(table, upserted.slots, initial=initial)
    return table, InsertResult(
        values=checkpoint_name(values, ROWS_NAME),
        keys=keys,
        slots=upserted.slots,
        status=upserted.status,
        counts=_counts(groups, upserted.unique_status),
        evicted=entries,
        groups=groups,
        unique_slots=upserted.unique_slots,
    )


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
    """
    return _write_through("insert_or_assign", table, keys, values, scores, valid, evicted=False)


def insert_and_evict(
    table: Table, keys: Any, values: Any, *, scores: Any = None, valid: Any = None
) -> tuple[Table, WriteResult]:
    """As :func:`insert_or_assign`; the result carries the evicted entries.

    ``result.evicted`` has room for as many entries as there are keys; ``evicted.count`` of them are
    evicted ones, in order of the keys that took their places.
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
    return result._replace(
        slots=result.slots.reshape(shape), status=result.status.reshape(shape)
    )


@_jit("evicted")
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
    counts = _counts(groups, upserted.unique_status)
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
      exists: ``bool`` of the keys' shape. True and present: the delta is added. False and absent: the
        row is inserted. Where the belief is wrong nothing changes, not even the score.
      scores: see :func:`find_or_insert`.
      valid: see :func:`find`.
    """
    call = "accum_or_assign"
    given, flat, mask = _batch(call, table, keys, valid)
    pairs = _checks.as_scores(call, table.policy, scores, given.shape)
    rows = _flat_rows(call, "values", values, table, given)
    if exists is None:
        raise TypeError(f"{call}: exists must be a bool array of shape {list(given.shape)}, got None")
    believed = _checks.as_mask(call, "exists", exists, given.shape).reshape(-1)
    table, result = _accum_or_assign(table, flat, mask, pairs, rows, believed)
    return table, _shaped(result, given.shape)


@_jit()
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
        _index.combine(groups, values),
        name=table.name,
    )
    table = dataclasses.replace(_with_clock(table, clock), values=summed)
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


@_jit()
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
    """
    given, flat, mask = _batch("erase", table, keys, valid)
    table, result = _erase(table, flat, mask)
    return table, result._replace(status=result.status.reshape(given.shape))


@_jit()
def _erase(table: Table, keys: Keys, valid: jax.Array) -> Any:
    groups = _index.unique(keys, valid)
    index, upserted = _index.upsert(
        _index.tick(table.index), groups, None, admit=False, write_scores=False
    )
    index = _index.erase(index, upserted.unique_slots)
    counts = _counts(groups, upserted.unique_status)
    return dataclasses.replace(table, index=index), EraseResult(upserted.status, counts)


def erase_if(table: Table, predicate: Predicate) -> tuple[Table, Int32[Array, ""]]:
    """Removes every entry for which a predicate holds.

    Args:
      table: to change.
      predicate: traceable; given Keys, scores (as Keys) and rows ``[c, dim]`` of a chunk of slots, it
        returns ``bool[c]``. Compare 64-bit numbers with :func:`less`, :func:`less_equal`,
        :func:`equal`.

    Returns:
      The table, and how many entries were removed.
    """
    return _erase_if(table, predicate)


@_jit("predicate")
def _erase_if(table: Table, predicate: Predicate) -> Any:
    table = dataclasses.replace(table, index=_index.tick(table.index))

    def body(table: Table, offset: jax.Array, erased: jax.Array) -> tuple[Table, jax.Array]:
        table, _, _, _, slots = _matching(table, predicate, offset, _chunk(table))
        table = dataclasses.replace(table, index=_index.erase(table.index, slots))
        return table, erased + jnp.sum(slots >= 0, dtype=jnp.int32)

    return _over_chunks(table, body)


def clear(table: Table) -> Table:
    """Removes every entry."""
    return _clear(table)


@_jit()
def _clear(table: Table) -> Table:
    return dataclasses.replace(table, index=_index.clear(_index.tick(table.index)))


# --- Time and whole-table reads ------------------------------------------------------------------


def advance_epoch(table: Table, epoch: Any = None) -> Table:
    """Sets the epoch of the EPOCH policies.

    Args:
      table: to change.
      epoch: 0 to 2**32 - 1; None: the next one, which stops at 2**32 - 1.
    """
    old = table.index.epoch
    if epoch is None:
        new = old + (old < jnp.uint32(2**32 - 1)).astype(jnp.uint32)
    else:
        if isinstance(epoch, int):
            _checks.check_integer("advance_epoch", "epoch", epoch, 0, 2**32 - 1)
            epoch = np.uint32(epoch)
        new = jnp.broadcast_to(jnp.asarray(epoch).astype(jnp.uint32), old.shape)
    return dataclasses.replace(table, index=dataclasses.replace(table.index, epoch=new))


def size(table: Table) -> Int32[Array, ""]:
    """Entries in the table. For use between steps, as all functions that return only a result."""
    return jnp.sum(table.index.occupancy, dtype=jnp.int32)


def load_factor(table: Table) -> Float[Array, ""]:
    """Entries by slots, 0 to 1."""
    return size(table).astype(jnp.float32) / table.capacity


def size_if(table: Table, predicate: Predicate) -> Int32[Array, ""]:
    """How many entries a predicate holds for (see :func:`erase_if`)."""
    return _size_if(table, predicate)


@_jit("predicate")
def _size_if(table: Table, predicate: Predicate) -> jax.Array:
    def body(table: Table, offset: jax.Array, total: jax.Array) -> tuple[Table, jax.Array]:
        table, _, _, _, slots = _matching(table, predicate, offset, _chunk(table))
        return table, total + jnp.sum(slots >= 0, dtype=jnp.int32)

    return _over_chunks(table, body)[1]


def export_batch(table: Table, offset: Any, count: int) -> Entries:
    """The entries of a range of slots, in slot order.

    Args:
      table: to read.
      offset: first slot; may be traced. Past the end there is nothing.
      count: slots, static: also the leading axis of the result.

    Returns:
      Entries, of which ``.count`` are meant; zero behind them.
    """
    return export_batch_if(table, _everything, offset, count)


def _everything(keys: Keys, scores: Keys, values: jax.Array) -> jax.Array:
    del scores, values
    return jnp.ones(keys.shape, jnp.bool_)


def export_batch_if(table: Table, predicate: Predicate, offset: Any, count: int) -> Entries:
    """As :func:`export_batch`, of the entries for which a predicate holds (see :func:`erase_if`)."""
    _checks.check_integer("export_batch", "count", count, 0, MAX_SLOTS)
    if isinstance(offset, (int, np.integer)):
        _checks.check_integer("export_batch", "offset", int(offset), 0, 2**63)
        offset = min(int(offset), table.capacity)
    return _export(table, predicate, jnp.asarray(offset, jnp.int32), count=count)


@_jit("predicate", "count")
def _export(table: Table, predicate: Predicate, offset: jax.Array, count: int) -> Entries:
    table, keys, scores, _, slots = _matching(table, predicate, offset, count)
    (chosen,) = jnp.nonzero(slots >= 0, size=count, fill_value=count)

    def compact(array: jax.Array, fill: int = 0) -> jax.Array:
        return array.at[chosen].get(mode="fill", fill_value=fill)

    _, entries = _entries(
        table, compact(keys.words), compact(scores.words), compact(slots, NO_SLOT)
    )
    return entries


def _chunk(table: Table) -> int:
    return min(_CHUNK_SLOTS, table.capacity)


def _matching(
    table: Table, predicate: Predicate, offset: jax.Array, count: int
) -> tuple[Table, Keys, Keys, jax.Array, jax.Array]:
    """A chunk of slots: keys, scores, rows, and the slots of the entries that match (else -1)."""
    index, keys, scores, occupied = _index.read(table.index, offset, count)
    table = dataclasses.replace(table, index=index)
    slots = jnp.where(occupied, offset + _rows.positions(count), NO_SLOT)
    table, values = gather_values(table, slots)
    matches = jnp.asarray(predicate(keys, scores, values))
    if matches.shape != (count,) or matches.dtype != jnp.bool_:
        raise TypeError(
            f"predicate must return bool[{count}], one for each key of the chunk, got "
            f"{matches.dtype}{list(matches.shape)}"
        )
    return table, keys, scores, values, jnp.where(matches, slots, NO_SLOT)


def _over_chunks(
    table: Table, body: Callable[[Table, jax.Array, jax.Array], tuple[Table, jax.Array]]
) -> tuple[Table, jax.Array]:
    """Folds over all slots of a table, chunk by chunk, with a count."""
    chunk = _chunk(table)

    def step(number: jax.Array, carry: tuple[Table, jax.Array]) -> tuple[Table, jax.Array]:
        return body(carry[0], number * chunk, carry[1])

    # The count takes part of the clock's type, so that it varies over devices as the table does.
    start = (table.index.clock[0] * 0).astype(jnp.int32)
    return jax.lax.fori_loop(0, -(-table.capacity // chunk), step, (table, start))
