"""What goes over a whole table: sizes, exports, conditional removal, the epoch, its capacity."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jax_hkv import _checks
from jax_hkv import index as _index
from jax_hkv import rows as _rows
from jax_hkv._compat import is_traced, match_varying
from jax_hkv._inserts import import_rows, most_at_once
from jax_hkv._keys import Keys, form_of
from jax_hkv._programs import program_of
from jax_hkv.index import LANES, MAX_SLOTS, NO_SLOT
from jax_hkv.table import (
    Counts,
    Entries,
    Table,
    buckets_of,
    check_live,
    check_one_device,
    entries_at,
    gather_optimizer,
    gather_values,
    jitted,
    no_counts,
    one_more,
    scatter_optimizer,
    scatter_values,
)

# Slots read at a time by operations that go over the whole table: some megabytes of rows.
_CHUNK_SLOTS = 16384
_MOST_CHUNKS = 1024  # of a table whose entries go to another


Predicate = Callable[[Keys, Keys, jax.Array], jax.Array]


def erase_if(table: Table, predicate: Predicate) -> tuple[Table, Int32[Array, ""]]:
    """Removes every entry for which a predicate holds.

    Args:
      table: to change.
      predicate: traceable; given Keys, scores (as Keys) and rows ``[c, dim]`` of a chunk of slots,
        it returns ``bool[c]``. Compare 64-bit numbers with :func:`less`, :func:`less_equal`,
        :func:`equal`. If it does not use the rows, they are not read. It is static: a program is
        compiled for each function, and what one closes over or reads from globals stays as it was
        when it was first called. Where such a number changes, call this inside a jitted function
        that takes the number: ``erase = jax.jit(lambda table, oldest: hkv.erase_if(table, lambda
        keys, scores, rows: hkv.less(scores, oldest)), donate_argnums=0)`` is compiled once. Give it
        Keys, ``erase(table, hkv.Keys.from_numpy(number))``: of an integer ``jax.jit`` would, with
        x64 off, leave the low 32 bits, silently.

    Returns:
      The table, and how many entries were removed.

    Raises:
      TypeError: naming the argument, or if the predicate returns something else.
      RuntimeError: of a used-up table.

    Example:
      >>> import numpy as np
      >>> import jax_hkv as hkv
      >>> table, _ = hkv.find_or_insert(hkv.create(128, 2), np.arange(10, dtype=np.int32))
      >>> table, erased = erase_if(table, lambda keys, scores, rows: hkv.less(keys, 4))
      >>> int(erased), int(size(table))
      (4, 6)
    """
    _check_predicate("erase_if", table, predicate)
    return program_of(_erase_if, table, predicate)(table, predicate)


def _erase_matching(table: Table, predicate: Predicate) -> tuple[Table, jax.Array]:
    table = dataclasses.replace(table, index=_index.tick(table.index))

    def body(table: Table, offset: jax.Array, erased: jax.Array) -> tuple[Table, jax.Array]:
        table, slots = _matching(table, predicate, offset, _chunk(table))
        table = dataclasses.replace(table, index=_index.erase(table.index, slots))
        return table, erased + jnp.sum(slots >= 0, dtype=jnp.int32)

    return _over_chunks(table, body)


_erase_if = jitted("predicate")(_erase_matching)


def expire(
    table: Table, epochs: Any, *, where: Predicate | None = None
) -> tuple[Table, Int32[Array, ""]]:
    """Removes the entries that were not touched for more than `epochs` epochs: time to live.

    An entry keeps the epoch in which it was inserted or last scored (``find(touch=True)`` and the
    writes do that, but `assign` only with scores, which EPOCH_LRU takes none of, and
    `accum_or_assign` only where its belief is right); it goes when the table's epoch is more than
    `epochs` later.

    Args:
      table: to change, under EPOCH_LRU or EPOCH_LFU.
      epochs: 0 to 2**32 - 1; may be traced (one that is none of these removes nothing). 0 leaves
        the entries of the current epoch.
      where: which entries may go at all, a predicate as of :func:`erase_if`, static too; None: all.
        So the ids of one table of a fused group have a time to live of their own:
        ``where=lambda keys, scores, rows: group.ids("items", keys)[1]``.

    Returns:
      The table, and how many entries were removed.

    Raises:
      ValueError: under a policy whose scores hold no epoch, and if `epochs` is out of its range.
      TypeError: if `epochs` is no integer, or `where` no predicate.
      RuntimeError: of a used-up table.

    Example:
      >>> import numpy as np
      >>> import jax_hkv as hkv
      >>> table = hkv.create(128, dim=2, policy=hkv.Policy.EPOCH_LRU)
      >>> table, _ = hkv.find_or_insert(table, np.array([5, 6], np.int32))
      >>> table, _ = hkv.find(hkv.advance_epoch(table), np.array([5], np.int32), touch=True)
      >>> table, erased = hkv.expire(table, 0)
      >>> int(erased), int(hkv.size(table))
      (1, 1)
    """
    check_one_device("expire", table)
    if not table.policy.has_epochs:
        raise ValueError(
            f"expire: the policy of table {table.name!r} must be EPOCH_LRU or EPOCH_LFU, got "
            f"{table.policy.name}, whose scores hold no epoch: create the table with one of those, "
            "or use erase_if"
        )
    if where is not None:
        _check_predicate("expire", table, where, "where")
    epochs = _epoch("expire", "epochs", epochs, negative=2**32 - 1)
    return program_of(_expire, table, where)(table, where, epochs)


@jitted("where")
def _expire(table: Table, where: Predicate | None, epochs: jax.Array) -> Any:
    now = table.epoch[0]

    def is_old(keys: Keys, scores: Keys, values: jax.Array) -> jax.Array:
        # An epoch that was set back is behind some entries: those are not old.
        old = (scores.high < now) & (now - scores.high > epochs)
        if where is None:
            return old
        return old & _checked(where(keys, scores, values), keys.shape, "expire: where")

    return _erase_matching(table, is_old)


def zero_empty_rows(table: Table) -> Table:
    """Writes zeros over rows and optimizer rows of slots without an entry.

    Removing an entry leaves its row where it was, in memory and in checkpoints of the whole table,
    until another one takes its place. After this no bit of such rows is left, and every operation
    does what it would have done. (The sketch of :func:`jax_hkv.admission.frequency` still counts
    sightings of removed keys, by their hashes.) Each part of a table over devices is one: call it
    inside ``Placement.step``. Jit it with the table donated, or it copies the table.

    Args:
      table: to change.

    Raises:
      TypeError, RuntimeError: if it is not the table of one device, or its part, or is used up.

    Example:
      >>> import numpy as np
      >>> import jax_hkv as hkv
      >>> table, _ = hkv.find_or_insert(hkv.create(128, 2), np.array([5], np.int32))
      >>> table, _ = hkv.erase(table, np.array([5], np.int32))
      >>> bool(table.values.any()), bool(zero_empty_rows(table).values.any())
      (True, False)
    """
    check_one_device("zero_empty_rows", table)
    return _zero_empty_rows(table)


@jitted()
def _zero_empty_rows(table: Table) -> Table:
    fresh = table.optimizer.fresh if table.optimizer else {}
    zero, zeros = jax.tree.map(jnp.zeros_like, (table.values[:1], fresh))

    def body(table: Table, offset: jax.Array, nothing: jax.Array) -> tuple[Table, jax.Array]:
        index, *_, is_occupied = _index.read(table.index, offset, _chunk(table))
        places = _rows.positions(_chunk(table))
        is_empty = ~is_occupied & (places < table.capacity - offset)
        slots = jnp.where(is_empty, offset + places, NO_SLOT)
        table = scatter_values(dataclasses.replace(table, index=index), slots, None, zero)
        return scatter_optimizer(table, slots, None, zeros), nothing

    return _over_chunks(table, body)[0]


def resize(table: Table, capacity: int) -> tuple[Table, Counts]:
    """A table of another capacity with the entries of this one, for use between steps.

    So a table starts small and grows with its ids; what is compiled for its shapes, a training
    step, is compiled anew for the new ones. Keys, scores, rows and optimizer rows stay as they are;
    clock, epoch, step counts and sightings too. With one candidate bucket and a whole multiple of
    the old buckets every entry finds room, and with two in every table that we made, however full.
    Otherwise `counts` tell how many did not: with one candidate, a bucket keeps the highest scores
    of what comes to it; with two, nearly. Results of lookups before it name slots of the old table:
    an update skips and counts those whose key stands elsewhere now.

    Args:
      table: whose entries to take; it is only read (to donate it frees nothing), and lies in memory
        beside the new one until nobody holds it.
      capacity: entries, static; rounded up to whole buckets of 128. Of a table over devices, inside
        ``Placement.step``, that of this device's part.

    Returns:
      The table, and counts: of `unique` entries `inserted` found a slot, `evicted` of them in place
      of another entry, and `refused` none. It holds ``inserted - evicted``.

    Raises:
      TypeError, ValueError, RuntimeError: naming the argument; the last of a used-up table.

    Example:
      >>> import numpy as np
      >>> import jax_hkv as hkv
      >>> table, _ = hkv.find_or_insert(hkv.create(128, 2), np.arange(100, dtype=np.int32))
      >>> table, counts = resize(table, 2 * table.capacity)
      >>> table.capacity, int(counts.inserted), int(counts.refused)
      (256, 100, 0)
    """
    check_one_device("resize", table)
    buckets = buckets_of("resize", capacity)
    if buckets * LANES == table.capacity:
        entries = size(table)
        return table, no_counts(0 * entries)._replace(unique=entries, inserted=entries)
    return _resize(table, buckets=buckets)


@jitted("buckets")
def _resize(table: Table, buckets: int) -> Any:
    wider = emptied(table, buckets)
    # Every chunk visits all buckets of the new table: of a large one there are no more than these.
    chunk = min(max(_CHUNK_SLOTS, table.capacity // _MOST_CHUNKS), table.capacity)
    chunk = most_at_once(wider, chunk)

    def body(old: Table, offset: jax.Array, so_far: Any) -> Any:
        new, total = so_far
        old, entries = _ranked(old, _across(old, offset, chunk))
        new, result = import_rows(new, *entries, evicted=False, is_ticked=True)
        return old, (new, jax.tree.map(jnp.add, total, result.counts))

    return _over_chunks(table, body, (wider, no_counts(_zeros(table))), chunk)[1]


def emptied(table: Table, buckets: int) -> Table:
    """A table of another number of buckets without entries, else as this one is."""
    clock, epoch = table.index.clock, table.index.epoch
    settings = table.policy, table.choices, table.name, table.index.namespace
    index = _index.create(buckets, *settings)
    first = jnp.zeros((1, table.dim), table.dtype), table.optimizer.fresh if table.optimizer else {}
    values, rows = jax.tree.map(lambda row: _rows.new(row, buckets * LANES), first)
    index, values, rows = jax.tree.map(
        lambda leaf: match_varying((clock, leaf))[1], (index, values, rows)
    )
    return dataclasses.replace(
        table,
        index=dataclasses.replace(index, clock=clock, epoch=epoch),
        values=values,
        optimizer=table.optimizer and dataclasses.replace(table.optimizer, rows=rows),
    )


def _across(table: Table, offset: jax.Array, count: int) -> jax.Array:
    """The slots of entries at places of an order: the first lane of all buckets, then the next.

    Keys that stand in one bucket have a candidate in common. Were they to come together, they would
    choose together. Where there is no entry, or no such place, the slot is -1.
    """
    buckets, further = table.capacity // LANES, _rows.positions(count)
    places = offset + further
    slots = places % buckets * LANES + places // buckets
    occupied = _index.take(table.index.digests.reshape(-1), slots) != 0
    return jnp.where(occupied & (further < table.capacity - offset), slots, NO_SLOT)


def _ranked(table: Table, slots: jax.Array) -> tuple[Table, tuple[Any, ...]]:
    """The entries of slots by score, the highest first: what :func:`import_rows` takes."""
    keys, scores = (
        Keys(_index.take(words.reshape(-1, 2), slots)) for words in (table.keys, table.scores)
    )
    high, low, *words, slots = jax.lax.sort(
        [~scores.high, ~scores.low, keys.low, keys.high, slots], num_keys=2
    )
    table, entries = entries_at(table, jnp.stack(words, -1), jnp.stack([~low, ~high], -1), slots)
    return table, (entries.keys, entries.scores, entries.values, entries.optimizer, slots >= 0)


def halve_sightings(table: Table) -> Table:
    """Halves the counters of :func:`jax_hkv.admission.frequency`, rounding down.

    Done now and then it lets the sketch forget keys that are no longer seen (Einziger, Friedman and
    Manes: TinyLFU: a highly efficient cache admission policy, 2017). A key that is waiting needs
    more sightings then, the more the closer it comes to ``sightings / 2`` between two halvings;
    with that many or fewer it never gets in.

    Args:
      table: to change, of one device or of many.

    Raises:
      TypeError, ValueError: if it is no table, or one that counts no sightings.
      RuntimeError: if it is used up.

    Example:
      >>> import numpy as np
      >>> import jax_hkv as hkv
      >>> table = hkv.create(128, 2, admission=hkv.admission.frequency(9, width=64))
      >>> table, _ = hkv.find_or_insert(table, np.full(5, 7, np.int32))
      >>> int(table.admission.counters.max()), int(halve_sightings(table).admission.counters.max())
      (5, 2)
    """
    check_live("halve_sightings", table)
    admission = table.admission
    if admission is None or admission.counters is None:
        raise ValueError(
            f"halve_sightings: the table {table.name!r} counts no sightings: create it with "
            "admission=jax_hkv.admission.frequency(sightings), sightings above 1"
        )
    return dataclasses.replace(table, admission=admission.halved())


def advance_epoch(table: Table, epoch: Any = None) -> Table:
    """Sets the epoch of the EPOCH policies.

    Args:
      table: to change.
      epoch: 0 to 2**32 - 1, a traced one clipped to that (JAX cuts 64-bit integers before, see
        :func:`jax_hkv.checked`); None: the next one, which stops at 2**32 - 1.

    Raises:
      TypeError, ValueError, RuntimeError: naming the argument; the last of a used-up table.

    Example:
      >>> import jax_hkv as hkv
      >>> table = advance_epoch(hkv.create(128, 2, policy=hkv.Policy.EPOCH_LRU))
      >>> int(table.epoch[0]), int(advance_epoch(table, 20).epoch[0])
      (1, 20)
    """
    check_live("advance_epoch", table)
    old = table.index.epoch
    if epoch is None:
        new = one_more(old)
    else:
        # The old one clipped to it, which lies on the devices, and varies over them, as the old
        # one does; what XLA sees to be constant (a product with 0) lies on all of them.
        number = _epoch("advance_epoch", "epoch", epoch, negative=0)
        new = jnp.clip(old, number, number)
    return dataclasses.replace(table, index=dataclasses.replace(table.index, epoch=new))


def _epoch(call: str, argument: str, epoch: Any, negative: int) -> jax.Array:
    """A number of epochs. A traced one below 0 becomes `negative`, one too high the highest."""
    if not is_traced(epoch):
        return jnp.uint32(_checks.as_integer(call, argument, epoch, 0, 2**32 - 1))
    if not jnp.issubdtype(epoch.dtype, jnp.integer) or epoch.size != 1:
        raise TypeError(
            f"{call}: {argument} must be one integer, got {epoch.dtype}{list(epoch.shape)}"
        )
    number, highest = epoch.reshape(()), 2**32 - 1
    if number.dtype.itemsize == 8:
        number = jnp.minimum(number, jnp.asarray(highest, number.dtype))
    is_negative = number < jnp.zeros((), number.dtype)
    return jnp.where(is_negative, jnp.uint32(negative), number.astype(jnp.uint32))


def size(table: Table) -> Int32[Array, ""]:
    """Entries in the table. For use between steps, as all functions that return only a result.

    Of a table over devices, seen from outside, all of them together, or those of each of replicas.

    Args:
      table: to read.

    Raises:
      TypeError, RuntimeError: if it is no table, or is used up.

    Example:
      >>> import numpy as np
      >>> import jax_hkv as hkv
      >>> table, _ = hkv.find_or_insert(hkv.create(128, 2), np.array([5, 5, 6], np.int32))
      >>> int(size(table)), float(load_factor(table))
      (2, 0.015625)
    """
    check_live("size", table)
    occupancy = table.index.occupancy
    if table.copies == 1:
        return jnp.sum(occupancy, dtype=jnp.int32)
    return jnp.max(jnp.sum(occupancy.reshape(table.copies, -1), axis=1, dtype=jnp.int32))


def load_factor(table: Table) -> Float[Array, ""]:
    """Entries by slots, 0 to 1; of what it takes and raises see :func:`size`."""
    check_live("load_factor", table)
    return _load_factor(table)


@jitted()
def _load_factor(table: Table) -> jax.Array:
    entries = size(table).astype(jnp.float32)
    # Compilers multiply by the inverse of a constant, and of what vmap makes of one.
    slots = jax.lax.optimization_barrier(jnp.float32(table.capacity) + 0 * entries)
    with jax.enable_x64(True):  # XLA's division of float32 on a GPU is not rounded correctly
        return (entries.astype(jnp.float64) / slots.astype(jnp.float64)).astype(jnp.float32)


def size_if(table: Table, predicate: Predicate) -> Int32[Array, ""]:
    """How many entries a predicate holds for (see :func:`erase_if`, also on what is static).

    Raises:
      TypeError: naming the argument, or if the predicate returns something else.
      RuntimeError: of a used-up table.

    Example:
      >>> import numpy as np
      >>> import jax_hkv as hkv
      >>> table, _ = hkv.find_or_insert(hkv.create(128, 2), np.arange(10, dtype=np.int32))
      >>> int(size_if(table, lambda keys, scores, rows: hkv.less(keys, 4)))
      4
    """
    _check_predicate("size_if", table, predicate)
    return program_of(_size_if, table, predicate)(table, predicate)


def _check_predicate(call: str, table: Any, predicate: Any, argument: str = "predicate") -> None:
    check_one_device(call, table)
    if not callable(predicate):
        raise TypeError(
            f"{call}: {argument} must be a function of (keys, scores, rows), got "
            f"{type(predicate).__name__}"
        )
    try:
        hash(predicate)
    except TypeError as error:
        raise TypeError(
            f"{call}: {argument} must be hashable, for a program is compiled for each one, got a "
            f"{type(predicate).__name__} ({error}): give a function, or a frozen dataclass"
        ) from None


@jitted("kind_of", "kinds")
def sizes_by(
    table: Table, kind_of: Callable[[Keys], Int32[Array, " c"]], kinds: int
) -> Int32[Array, " kinds"]:
    """Entries by the kinds that a function gives their keys, 0 to `kinds` - 1, in one pass."""

    def body(table: Table, offset: jax.Array, total: jax.Array) -> tuple[Table, jax.Array]:
        index, keys, _, occupied = _index.read(table.index, offset, _chunk(table))
        counted = _tally_in_xla(jnp.where(occupied, kind_of(keys), -1), kinds)
        return dataclasses.replace(table, index=index), total + counted

    return _over_chunks(table, body, _zeros(table, kinds))[1]


@jitted("kind_of", "kinds")
def sizes_over_devices(
    table: Table, kind_of: Callable[[Keys], Int32[Array, " c"]], kinds: int
) -> Int32[Array, " kinds"]:
    """As :func:`sizes_by`, of a table over devices seen from outside: XLA sums their parts.

    Parts lie side by side on the first axis, or stacked: each device counts its own.
    """
    numbers = jnp.where(table.digests != 0, kind_of(Keys(table.keys)), -1)
    parts = numbers.reshape(table.clock.size // 2, -1, LANES)
    counted = jax.vmap(lambda part: _tally_in_xla(part.reshape(-1), kinds))(parts)
    return jnp.sum(counted.reshape(table.copies, -1, kinds), axis=1, dtype=jnp.int32).max(axis=0)


def _tally_in_xla(numbers: Int32[Array, " n"], kinds: int) -> Int32[Array, " kinds"]:
    """As :func:`jax_hkv.index.tally`, of numbers without order, over devices too."""
    few = 1024
    if kinds == 1:
        return _index.total_of(numbers == 0)[None]
    scattered = functools.partial(_scattered, kinds=kinds)
    # A GPU's atomics on a few neighbouring addresses wait for each other.
    other = functools.partial(_compared, kinds=kinds) if kinds <= few else scattered
    return jax.lax.platform_dependent(numbers, cpu=scattered, default=other)


def _scattered(numbers: Int32[Array, " n"], kinds: int) -> Int32[Array, " kinds"]:
    target = jnp.where(numbers < 0, kinds, numbers)
    return jnp.zeros((kinds,), jnp.int32).at[target].add(1, mode="drop")


def _compared(numbers: Int32[Array, " n"], kinds: int) -> Int32[Array, " kinds"]:
    kind = jax.lax.iota(jnp.int32, kinds)
    return jnp.sum(numbers[:, None] == kind[None], axis=0, dtype=jnp.int32)


@jitted("predicate")
def _size_if(table: Table, predicate: Predicate) -> jax.Array:
    def body(table: Table, offset: jax.Array, total: jax.Array) -> tuple[Table, jax.Array]:
        table, slots = _matching(table, predicate, offset, _chunk(table))
        return table, total + jnp.sum(slots >= 0, dtype=jnp.int32)

    return _over_chunks(table, body)[1]


def misplaced(table: Table) -> Int32[Array, ""]:
    """How many entries a lookup of their own key does not find: 0 in a sound table.

    Where arrays have come into a table that was made with other arguments, past the names by which
    a checkpoint is refused, keys may stand in buckets where nobody looks for them (a smaller
    `choices`), and this counts them. It cannot see another policy, seed or initializer. Of a table
    over devices it counts this device's part alone, and does not ask who owns a key:
    :func:`jax_hkv.sharding.misplaced` does.

    Args:
      table: to read; rows are not.

    Returns:
      Entries that stand in none of their key's candidate buckets or under another key's digest, or
      whose key stands in another slot too.

    Raises:
      TypeError, RuntimeError: naming the argument; the latter of a used-up table.

    Example:
      >>> import dataclasses
      >>> import numpy as np
      >>> import jax_hkv as hkv
      >>> table, _ = hkv.find_or_insert(hkv.create(512, 2, choices=2), np.arange(480, dtype="i4"))
      >>> int(misplaced(table))
      0
      >>> index = dataclasses.replace(table.index, choices=1)
      >>> int(misplaced(dataclasses.replace(table, index=index))) > 0
      True
    """
    check_one_device("misplaced", table)
    return _misplaced(table)


@jitted()
def _misplaced(table: Table) -> jax.Array:
    return count_misplaced(table, lambda keys: jnp.zeros(keys.shape, jnp.bool_))


def count_misplaced(table: Table, is_foreign: Callable[[Keys], jax.Array]) -> jax.Array:
    """As :func:`misplaced`, with all entries whose keys do not belong into this table at all."""

    def body(table: Table, offset: jax.Array, total: jax.Array) -> tuple[Table, jax.Array]:
        chunk = _chunk(table)
        index, keys, _, occupied = _index.read(table.index, offset, chunk)
        index, slots = _index.find(index, keys, occupied)
        is_elsewhere = is_foreign(keys) | (slots != offset + _rows.positions(chunk))
        is_elsewhere &= occupied
        table = dataclasses.replace(table, index=index)
        return table, total + jnp.sum(is_elsewhere, dtype=jnp.int32)

    return _over_chunks(table, body)[1]


def export_batch(table: Table, offset: Any, count: int) -> Entries:
    """The entries of a range of slots, in slot order.

    Args:
      table: to read.
      offset: first slot; may be traced. Past the end there is nothing.
      count: slots, static: also the leading axis of the result.

    Returns:
      Entries, of which ``.count`` are meant; zero behind them.

    Raises:
      TypeError, ValueError, RuntimeError: naming the argument; the last of a used-up table.

    Example:
      >>> import numpy as np
      >>> import jax_hkv as hkv
      >>> table, _ = hkv.find_or_insert(hkv.create(128, 2), np.array([5, 6], np.int32))
      >>> entries = export_batch(table, 0, table.capacity)
      >>> sorted(entries.keys.to_numpy()[:int(entries.count)].tolist())
      [5, 6]
    """
    check_one_device("export_batch", table)
    return _checked_export("export_batch", table, None, offset, count)


def export_batch_if(table: Table, predicate: Predicate, offset: Any, count: int) -> Entries:
    """As :func:`export_batch`, where a predicate holds (see :func:`erase_if`).

    Raises:
      TypeError, ValueError, RuntimeError: naming the argument; the last of a used-up table.

    Example:
      >>> import numpy as np
      >>> import jax_hkv as hkv
      >>> table, _ = hkv.find_or_insert(hkv.create(128, 2), np.array([5, 6], np.int32))
      >>> chosen = export_batch_if(table, lambda keys, *_: hkv.less(5, keys), 0, table.capacity)
      >>> chosen.keys.to_numpy()[:int(chosen.count)].tolist()
      [6]
    """
    _check_predicate("export_batch_if", table, predicate)
    return _checked_export("export_batch_if", table, predicate, offset, count)


def _checked_export(
    call: str, table: Table, predicate: Predicate | None, offset: Any, count: int
) -> Entries:
    count = _checks.as_integer(call, "count", count, 0, MAX_SLOTS)
    export = program_of(_export, table, predicate)
    if not is_traced(offset):
        first = min(_checks.as_integer(call, "offset", offset, 0, 2**63), table.capacity)
        return export(table, predicate, jnp.int32(first), count=count)
    if not jnp.issubdtype(offset.dtype, jnp.integer) or offset.size != 1:
        raise TypeError(
            f"{call}: offset must be one integer, got {offset.dtype}{list(offset.shape)}"
        )
    first = offset.reshape(())
    if first.dtype.itemsize < 4:
        first = first.astype(jnp.int32)
    # Before the first slot and behind the last one there is nothing, however far.
    lowest = -MAX_SLOTS if jnp.issubdtype(first.dtype, jnp.signedinteger) else 0
    bounds = [jnp.asarray(bound, first.dtype) for bound in (lowest, table.capacity)]
    return export(table, predicate, jnp.clip(first, *bounds).astype(jnp.int32), count=count)


@jitted("predicate", "count")
def _export(table: Table, predicate: Predicate | None, offset: jax.Array, count: int) -> Entries:
    chosen = None
    if predicate is not None:
        table, slots = _matching(table, predicate, offset, count)
        chosen = slots >= 0
    index, found = _index.export(table.index, table.values, offset, count, chosen)
    _, optimizer = gather_optimizer(dataclasses.replace(table, index=index), found.slots)
    return Entries(found.keys, found.scores, found.values, optimizer, found.count)


def _chunk(table: Table) -> int:
    return min(_CHUNK_SLOTS, table.capacity)


def _matching(
    table: Table, predicate: Predicate, offset: jax.Array, count: int
) -> tuple[Table, jax.Array]:
    """Of a chunk of slots those whose entries match, else -1."""
    index, keys, scores, occupied = _index.read(table.index, offset, count)
    table = dataclasses.replace(table, index=index)
    slots = jnp.where(occupied, offset + _rows.positions(count), NO_SLOT)
    zeros = jnp.zeros((count, *table.values.shape[1:]), table.values.dtype)
    _, values = match_varying((keys.words, zeros))
    if _looks_at_rows(predicate, keys, scores, values):
        table, values = gather_values(table, slots)
    matches = _checked(predicate(keys, scores, values), (count,), "predicate")
    return table, jnp.where(matches, slots, NO_SLOT)


def _checked(matches: Any, shape: tuple[int, ...], predicate: str) -> jax.Array:
    """What a predicate, named for errors, returned for a chunk of keys."""
    if getattr(matches, "dtype", None) != jnp.bool_ or matches.shape != shape:
        raise TypeError(
            f"{predicate} must return bool[{shape[0]}], one for each key of the chunk, got "
            f"{form_of(matches)}"
        )
    return matches


def _looks_at_rows(predicate: Predicate, keys: Keys, scores: Keys, rows: jax.Array) -> bool:
    """Whether what a predicate returns can depend on the rows, which take most time to read."""
    traced = jax.make_jaxpr(predicate)(keys, scores, rows).jaxpr
    read = [atom for equation in traced.eqns for atom in equation.invars] + list(traced.outvars)
    return any(atom is traced.invars[-1] for atom in read)


def _over_chunks(
    table: Table,
    body: Callable[[Table, jax.Array, Any], tuple[Table, Any]],
    start: Any = None,
    chunk: int | None = None,
) -> tuple[Table, Any]:
    """Folds over all slots of a table, chunk by chunk, what a start or a count of zero becomes."""
    start = _zeros(table) if start is None else start
    chunk = _chunk(table) if chunk is None else chunk

    def step(number: jax.Array, carry: tuple[Table, Any]) -> tuple[Table, Any]:
        return body(carry[0], jnp.int32(number * chunk), carry[1])

    chunks = jnp.int32(-(-table.capacity // chunk))
    return jax.lax.fori_loop(jnp.int32(0), chunks, step, (table, start))


def _zeros(table: Table, *shape: int) -> Int32[Array, " ..."]:
    """Counts to start from: with part of the clock's type they vary over devices as it does."""
    return jnp.broadcast_to((table.index.clock[0] * 0).astype(jnp.int32), shape)
