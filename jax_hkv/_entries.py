"""All entries of a table on the host, and back into tables of any number of devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_hkv._checks import (
    as_integer,
    as_list,
    check_arrays,
    check_known,
    check_not_used_up,
)
from jax_hkv._compat import of_one_device
from jax_hkv._digest import digest
from jax_hkv._exchange import owners
from jax_hkv._exported import Exported, as_part, check_part, namespace_of
from jax_hkv._inserts import erase, import_rows, most_at_once
from jax_hkv._keys import Keys, check_unmasked, less_equal
from jax_hkv._namespaces import Namespace, as_array, keys_are
from jax_hkv._placed import check_replicas
from jax_hkv._placement import Placement, check_placement
from jax_hkv._programs import named, of_any_name
from jax_hkv._warnings import warn
from jax_hkv.index import Policy
from jax_hkv.table import (
    Counts,
    Entries,
    Table,
    check_one_device,
    check_table,
    forms_of,
    no_counts,
)
from jax_hkv.whole_table import export_batch, export_batch_if

_CHUNK = 65536  # slots read, and entries written, at a time
LATE = "take all chunks before the step that uses it up, or those of a copy"
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio (Knuth: multiplicative hashing)


def join_entries(parts: Sequence[Exported]) -> Exported:
    """The entries of several exports as one: of the processes that each saved their own.

    Exports of one table at several times can be joined too: an entry, and what rows share, is that
    of the export whose clock is last, and of equal clocks of the last export (an entry of the one
    in which its score is highest): exports of replicas, by several processes, are one. Tables that
    were trained apart are not told from those (docs/recipes.md has their averages).

    Args:
      parts: of the parts of one table, at least one.

    Raises:
      TypeError: if one of them is no export.
      ValueError: if there is none, or if they are of different tables.

    Warns:
      UserWarning: if a time has the exports of some processes of a job, and not of all: a file is
        missing, or is left of another save. (Where those are meant, such as the chunks of one
        process, give ``part._replace(part=None)``.)

    Example:
      >>> import jax_hkv as hkv
      >>> tables = [hkv.find_or_insert(hkv.create(128, 2), np.array([i], np.int32))[0]
      ...           for i in (5, 6)]
      >>> join_entries(list(map(hkv.sharding.export_entries, tables))).keys.tolist()
      [5, 6]
    """
    call = "sharding.join_entries"
    parts = as_list(call, "parts", parts, "exports: each process saves its own")
    for number, part in enumerate(parts):
        check_exported(call, f"parts[{number}]", part, "parts are a list of exports")
    if not parts:
        raise ValueError("sharding.join_entries: parts must be exported entries, got none")
    missing = _warn_of_missing(call, parts)
    if len(parts) == 1:
        return parts[0]  # a table of one device may fill the host's memory: no second copy
    kinds = [
        f"{forms_of(part.values, part.optimizer, part.shared)}, sightings "
        f"{getattr(part.counters, 'shape', None)}, scores of "
        f"Policy.{Policy(part.policy).name} and {keys_are(namespace_of(part))}"
        for part in parts
    ]
    seeds = sorted({part.seed for part in parts if part.seed is not None})
    is_counted = any(part.counters is not None for part in parts)
    if len(set(kinds)) > 1 or (is_counted and len(seeds) > 1):
        raise ValueError(
            "sharding.join_entries: parts must be of one table, with the same rows, optimizer "
            f"rows, sightings and policy, got {kinds}, sightings by seeds {seeds}"
        )
    whole = as_one(_without_older(parts))
    return whole if missing else whole._replace(part=None)


def _warn_of_missing(call: str, parts: Sequence[Exported]) -> bool:
    """Whether of a time the exports of some processes are not among these."""
    missing: dict[tuple[int, int], set[int]] = {}
    for part in parts:
        if (of_job := as_part(part.part)) is not None:
            number, count = of_job
            left = missing.setdefault((part.clock, count), set(range(count)))
            left.discard(number)
    each = [
        f"of time {time} that of {sorted(left)}"
        for (time, _), left in sorted(missing.items())
        if left
    ]
    if each:
        warn(
            f"{call}: parts must be of all processes that have exported a time, and there is not "
            f"{', '.join(each)}: a file is missing, or is left of another save. Where those of "
            "some processes alone are meant, give part._replace(part=None) of each part"
        )
    return bool(each)


def as_one(parts: Sequence[Exported]) -> Exported:
    """Exports of one table that have different keys, as one; what rows share is of the last one."""
    if len(parts) == 1:
        return parts[0]
    seeds = sorted({part.seed for part in parts if part.seed is not None})
    counters = [part.counters for part in parts if part.counters is not None]
    of_jobs = {as_part(part.part) for part in parts}
    latest = max(reversed(parts), key=lambda part: part.clock)
    return Exported(
        *jax.tree.map(lambda *all_of: np.concatenate(all_of), *(part.columns() for part in parts)),
        shared=latest.shared,
        clock=latest.clock,
        epoch=max(part.epoch for part in parts),
        counters=functools.reduce(np.maximum, counters) if counters else None,
        policy=latest.policy,
        namespace=latest.namespace,
        seed=seeds[0] if len(seeds) == 1 else None,
        part=of_jobs.pop() if len(of_jobs) == 1 else None,
    )


def _without_older(parts: Sequence[Exported]) -> list[Exported]:
    """Each without entries of keys that another has of a later clock, or, of equal ones, score."""
    counts = [len(part.keys) for part in parts]
    clocks = np.repeat(np.array([part.clock for part in parts], np.uint64), counts)
    keys, scores = (np.concatenate(own) for own in zip(*(part[:2] for part in parts), strict=True))
    stays = _last_of_each(keys, clocks, scores)
    if stays.all():
        return list(parts)
    masks = np.split(stays, np.cumsum(counts)[:-1])
    return [part.select(own) for part, own in zip(parts, masks, strict=True)]


_AHEAD = 2**62  # of times that no clock has come to: one that has come to 2**63 is exported no more


def latest_time(
    exported: Exported, call: str = "sharding.import_entries", argument: str = "exported"
) -> int:
    """The latest score under LRU, 0 under other policies; raises if time could not go on."""
    if exported.policy != Policy.LRU:
        return 0
    latest = int(exported.scores.max(initial=0))
    if latest >= max(_AHEAD, exported.clock + 1):
        raise ValueError(
            f"{call}: {argument} must have scores below 2**62 under Policy.LRU, or none behind its "
            f"clock, where they are times, which go on from the latest one, got {latest}: give "
            "entries of another origin scores of 0"
        )
    return latest


def is_of(exported: Exported, namespace: Namespace | None) -> bool:
    """Whether keys mean in an export what they mean in a table of some namespace."""
    given = namespace_of(exported)
    if namespace is None or given is None:
        return namespace is given
    return namespace.begins_with(given)


def without_entries(part: Table) -> Exported:
    """What an export of a table looks like that has no entries, and is of no time."""
    states: Any = part.optimizer.rows if part.optimizer else {}
    shared: Any = part.optimizer.shared if part.optimizer else {}
    counters: Any = None if part.admission is None else part.admission.sightings()
    values, optimizer = jax.tree.map(
        lambda leaf: np.zeros((0, *leaf.shape[1:]), leaf.dtype), (part.values, states)
    )
    numbers = np.zeros(0, np.uint64)
    return Exported(
        *(numbers, numbers, values, optimizer),
        shared=shared,
        clock=0,
        epoch=0,
        counters=counters,
        policy=int(part.policy),
        namespace=as_array(part.index.namespace),
        seed=part.seed,
    )


def common_of(part: Table) -> Exported:
    """What the entries of a table have in common, without any of them."""
    # A key is counted by its owner alone, so that the highest count of all parts is never too low.
    exported = without_entries(part)
    shared, counters = jax.tree.map(np.asarray, (exported.shared, exported.counters))
    return exported._replace(
        shared=shared, counters=counters, clock=clock_of(part), epoch=epoch_of(part)
    )


def clock_of(part: Table) -> int:
    return int(Keys(part.clock).to_numpy())


def keys_of(part: Table) -> np.ndarray:
    """The keys of a table of one device, uint64 on the host, in the order of slots."""
    return _of_entries(part, part.keys)


def scores_of(part: Table) -> np.ndarray:
    """The scores of the keys of :func:`keys_of`."""
    return _of_entries(part, part.index.scores)


def _of_entries(part: Table, words: Any) -> np.ndarray:
    is_entry = np.asarray(part.digests).reshape(-1) != 0
    return Keys(np.asarray(words).reshape(-1, 2)[is_entry]).to_numpy()


def epoch_of(part: Table) -> int:
    return int(np.asarray(part.epoch)[0])


@functools.partial(jax.jit, static_argnames="count")
def _export_from(table: Table, lowest: Keys, offset: jax.Array, count: int) -> Entries:
    return export_batch_if(
        table, lambda keys, scores, rows: less_equal(lowest, scores), offset, count
    )


def slots_at_once(table: Table, most: int) -> int:
    """How many slots are read by one program where no more entries than `most` are wanted."""
    return min(_CHUNK, most, table.capacity)


def chunks_of(
    call: str, table: Table, lowest: int | None, most: int
) -> Iterator[tuple[np.ndarray, np.ndarray, Any, Any]]:
    """Keys, scores, rows and optimizer rows of entries, some slots at a time, in their order.

    Args:
      call: for errors.
      table: of one device; it must stay as it is until its last slots were read.
      lowest: the lowest score of an entry; None: all.
      most: how many entries are wanted at a time.
    """
    slots, table = slots_at_once(table, most), named(table, "table")  # as in `of_any_name`
    words = None if lowest is None else Keys.from_numpy(np.array(lowest, np.uint64))
    for offset in range(0, table.capacity, slots):
        check_not_used_up(call, jax.tree.leaves(table), "table", LATE)
        if words is None:
            entries = export_batch(table, offset, slots)
        else:
            entries = _export_from(table, words, jnp.int32(offset), count=slots)
        count = int(entries.count)
        keys, scores = entries.keys.to_numpy(), entries.scores.to_numpy()
        yield jax.tree.map(
            lambda leaf, count=count: np.asarray(leaf)[:count],
            (keys, scores, entries.values, entries.optimizer),
        )


@of_one_device
def import_entries(
    placement: Placement | None, table: Table, exported: Exported
) -> tuple[Table, Counts]:
    """Puts exported entries into a table, of any number of devices. For use between steps.

    Entries keep their scores and rows; keys that are present are overwritten. Of several entries
    for one key the one with the highest score counts, and of equal ones the last (of exports at
    several times :func:`join_entries` leaves the latest entry of each key). Of the table's own
    clock, epoch and sightings of absent keys and the exported ones the later and higher ones hold
    (under LRU the latest score is such a time too: that of :func:`jax_hkv.import_batch`, say);
    what rows share of the optimizer's state (a step count) comes from the side whose clock is
    later. So a fresh table takes all that was exported. Entries come in order of score, from the
    highest, so that a bucket without room keeps its highest ones (with two candidates, nearly:
    entries of one call choose together). Scores are not translated: under LRU entries of a younger
    table are the oldest of an older one, and those of another policy are refused.

    Args:
      placement: of the table, or None for a table of one device.
      table: to fill; it is used up. Of replicas each gets all entries.
      exported: of `export_entries`; every process gives all entries.

    Returns:
      The table, and counts over this process's devices: `evicted` and `refused` entries found no
      room.

    Raises:
      TypeError: naming the argument.
      ValueError: if rows, optimizer rows or sightings have another shape than the table's, if
        scores are of another policy, or if keys are other ids in the table's collection.

    Example:
      >>> import jax_hkv as hkv
      >>> table, _ = hkv.find_or_insert(hkv.create(128, 2), np.array([5, 6], np.int32))
      >>> entries = hkv.sharding.export_entries(table)
      >>> other, counts = import_entries(None, hkv.create(1024, 2), entries)
      >>> int(counts.inserted), int(hkv.size(other))
      (2, 2)
    """
    call = "sharding.import_entries"
    check_target(call, placement, table, "exported")
    check_exported(
        call, "exported", exported, "make one of a restored dict by Exported(**restored)"
    )
    parts = parts_of(placement, table)
    for part in parts:
        check_fits(part, exported)
    latest = latest_time(exported)  # of all parts together: their clocks are equal
    total = no_counts()
    filled = []
    for owner, part in zip(owners_of(placement, table), parts, strict=True):
        part, counts = fill(part, owned(exported, *owner), latest)
        filled.append(part)
        total = plus(total, counts)
    return whole_of(placement, filled), total


def check_target(call: str, placement: Any, table: Any, argument: str) -> None:
    """Raises unless something can go into a table; `argument` is what goes, the last one."""
    if placement is not None:
        order = f"the order is (placement, table, {argument})"
        check_placement(call, placement, ", or None for a table of one device", order)
    check_table(call, table)
    check_arrays(call, jax.tree.leaves(table), "table")
    check_not_used_up(call, jax.tree.leaves(table), "table")
    check_known(call, table.values)
    if placement is not None:
        check_replicas(call, table, placement)


def parts_of(placement: Placement | None, table: Table) -> list[Table]:
    """A table of one device, or this process's parts of one, as tables of one device each."""
    # One of one device may have NumPy's leaves, after jax.device_get.
    return [jax.tree.map(jnp.asarray, table)] if placement is None else placement.shards(table)


def owners_of(placement: Placement | None, table: Table) -> list[tuple[int, int]]:
    """Of each part of a table its number among the owners of keys, and how many these are."""
    if placement is None:
        return [(0, 1)]
    parts = table.parts_on(placement.devices)
    return [(number % parts, parts) for number in placement.local_parts]


def distinct_parts(call: str, parts: Sequence[Any]) -> list[Any]:
    """The parts of a table, or tiers of them, that hold all of it: of replicas the first.

    Of several replicas that are split themselves only their keys, and sightings of others, tell
    which of the parts that a process has are the same.
    """
    kinds = {getattr(part, "replicas", False) for part in parts}
    if len(kinds) > 1:
        raise ValueError(
            f"{call}: tables must be parts of one table, got some with replicas="
            f"{' and some with '.join(map(str, sorted(kinds)))}: give placement.shards(table)"
        )
    (replicas,) = kinds
    if replicas is False:
        return list(parts)
    if replicas is True:
        return list(parts[:1])
    held = [(part.index.digests, part.index.keys, part.admission) for part in parts]
    digests = [np.asarray(jax.jit(digest)(each)).tobytes() for each in held]
    return [part for number, part in enumerate(parts) if digests.index(digests[number]) == number]


def whole_of(placement: Placement | None, parts: Sequence[Table]) -> Table:
    """The inverse of :func:`parts_of`."""
    return parts[0] if placement is None else placement.join(parts)


def check_exported(call: str, argument: str, exported: Any, remedy: str) -> None:
    """Raises unless it is an export, whose arrays have names and are of the same entries."""
    if not isinstance(exported, Exported):
        if isinstance(exported, Entries):
            remedy = "jax_hkv.import_batch takes Entries"
        raise TypeError(
            f"{call}: {argument} must be what export_entries returned, got "
            f"{type(exported).__name__}: {remedy}"
        )
    for name in ("optimizer", "shared"):
        own = getattr(exported, name)
        if not isinstance(own, Mapping):
            raise TypeError(
                f"{call}: {argument}.{name} must be a dict of arrays by their names, got "
                f"{type(own).__name__}: give {{}} for none"
            )
    entries = np.shape(exported.keys)[:1]
    states = [(f"optimizer[{name!r}]", leaf, False) for name, leaf in exported.optimizer.items()]
    for name, leaf, is_number in (
        ("keys", exported.keys, True),
        ("scores", exported.scores, True),
        ("values", exported.values, False),
        *states,
    ):
        check_unmasked(f"{call}: {argument}.{name}", leaf)
        dtype, shape = getattr(leaf, "dtype", None), np.shape(leaf)
        is_form = dtype == np.uint64 and len(shape) == 1 if is_number else _is_of_numbers(leaf)
        if not is_form or not shape or shape[:1] != entries:
            cast = _in_own_order(leaf)
            if is_number and shape == entries and np.dtype(dtype).kind in "iu":
                cast = f"give {name}.astype(np.uint64), which keeps the bits of 64 that are signed"
            same = "whoever leaves entries out takes the same ones of keys, scores, values and "
            raise TypeError(
                f"{call}: {argument} must have arrays of the same entries, {name} as "
                f"{'uint64[n]' if is_number else 'numbers [n, ...]'} with n = {list(entries)} as "
                f"of its keys, got {dtype or type(leaf).__name__}{list(shape)}: "
                f"{cast or same + 'every optimizer array'}"
            )
    check_unmasked(f"{call}: {argument}.counters", exported.counters)
    for name, leaf in exported.shared.items():
        check_unmasked(f"{call}: {argument}.shared[{name!r}]", leaf)
        if not _is_of_numbers(leaf):
            raise TypeError(
                f"{call}: {argument}.shared[{name!r}] must be an array of numbers, got "
                f"{getattr(leaf, 'dtype', type(leaf).__name__)}: "
                f"{_in_own_order(leaf) or 'leave it as it was exported'}"
            )
    as_integer(call, f"{argument}.clock", exported.clock, 0, 2**63 - 1)  # so that time goes on
    as_integer(call, f"{argument}.epoch", exported.epoch, 0, 2**32 - 1)
    as_integer(call, f"{argument}.policy", exported.policy, 0, max(Policy))
    if exported.seed is not None:
        as_integer(call, f"{argument}.seed", exported.seed, 0, 2**64 - 1)
    check_part(call, argument, exported.part)
    try:
        namespace_of(exported)
    except (TypeError, ValueError, AttributeError, OverflowError):
        raise TypeError(
            f"{call}: {argument}.namespace must be as it was exported, or the `namespace` of a "
            f"collection's group, got {type(exported.namespace).__name__}"
        ) from None
    counters = exported.counters
    if counters is not None and getattr(counters, "dtype", None) != np.uint32:
        raise TypeError(
            f"{call}: {argument}.counters must be uint32, or None, got "
            f"{getattr(counters, 'dtype', type(counters).__name__)}: leave them as they were "
            "exported"
        )


def _is_of_numbers(leaf: Any) -> bool:
    """Whether it is an array that files hold: objects would be pickled, which nobody can load.

    And one that devices hold: they take the order of this machine's bytes.
    """
    dtype = getattr(leaf, "dtype", np.dtype(object))
    return dtype.isnative and any(jnp.issubdtype(dtype, kind) for kind in (np.number, np.bool_))


def _in_own_order(leaf: Any) -> str:
    """The remedy where bytes are in another order than this machine's."""
    is_native = getattr(getattr(leaf, "dtype", None), "isnative", True)
    return "" if is_native else "give array.astype(array.dtype.newbyteorder('=')) of it"


def check_fits(
    table: Table,
    exported: Exported,
    call: str = "sharding.import_entries",
    argument: str = "exported",
) -> None:
    """Raises unless entries can go into a table of one device.

    Args:
      table: to fill.
      exported: the entries.
      call: for errors.
      argument: in which the caller gave them, "changes.entries" where they are a field of it.
    """
    check_one_device(call, table)
    if len(table.values.devices()) > 1:
        raise ValueError(
            f"{call}: table must lie on one device, got one that "
            f"{len(table.values.devices())} hold: put it on one by jax.device_put(table, device), "
            "or make it by Placement.create and give its placement"
        )
    state = table.optimizer
    wanted = forms_of(table.values, state.rows if state else {}, state.shared if state else {})
    given = forms_of(exported.values, exported.optimizer, exported.shared)
    if wanted != given:
        raise ValueError(
            f"{call}: {argument} must have rows, optimizer rows and shared state "
            f"like the table's, {wanted}, got {given}: {_remedy(table, exported, argument)}"
        )
    if table.policy != exported.policy:
        own, given = table.policy.name, Policy(exported.policy).name
        raise ValueError(
            f"{call}: {argument} must have scores of Policy.{own} like the table's, "
            f"got those of Policy.{given}, which mean something else: give each entry a score that "
            "the table understands (under LRU a time, under LFU a count) "
            f"by {_replaced(argument, f'scores=scores, policy=int(jax_hkv.Policy.{own})')}"
        )
    own, given = table.index.namespace, namespace_of(exported)
    if not is_of(exported, own):
        raise ValueError(
            f"{call}: {argument} must have keys like the table's, {keys_are(own)}, "
            f"got {keys_are(given)}: declare the same tables in the same order (others may stand "
            "behind them) with the same table_bits, give what the group of the table makes of it, "
            f"group.take({argument.split('.')[0]}, of=its_group), or, of keys by group.keys, "
            f"{_replaced(argument, 'namespace=group.namespace')}"
        )
    if own is not None and len(exported.keys):
        latest, most = exported.keys.max(), len(own.tables) - 1
        if (number := int(latest) >> (64 - own.bits)) > most:
            raise ValueError(
                f"{call}: {argument}.keys must be of {list(own.tables)}, numbers 0 to {most} in "
                f"their highest {own}, got one of number {number} (key {latest}): make keys of ids "
                "by group.keys(name, ids)"
            )
    own = None if table.admission is None else table.admission.counters
    if own is None or exported.counters is None:
        return
    wanted, given = (list(own.shape), table.seed), (list(exported.counters.shape), exported.seed)
    if given not in (wanted, (wanted[0], None)):
        raise ValueError(
            f"{call}: {argument} must have sightings like the table's, {wanted[0]} by seed "
            f"{wanted[1]}, got {given[0]} by seed {given[1]}: create the table with the same "
            f"admission and seed, or import {_replaced(argument, 'counters=None')}, which forgets "
            "them"
        )


def _replaced(argument: str, fields: str) -> str:
    """How a caller changes fields of entries that are an argument, or a field of one."""
    owner, _, field = argument.rpartition(".")
    entries = f"{argument}._replace({fields})"
    return f"{owner}._replace({field}={entries})" if owner else entries


def _remedy(table: Table, exported: Exported, argument: str) -> str:
    """What to do about rows that are not like the table's."""
    if table.optimizer and not exported.optimizer and not exported.shared:
        return (
            "rows alone go into a table without an optimizer, of the same dim and dtype, which is "
            "then given fresh optimizer rows, on one device by opt.init(table), over devices by "
            "placement.step(lambda table: (opt.init(table), None))(table)[0]"
        )
    cast = f"values={argument}.values.astype(table.dtype)"
    return (
        "create the table with the same dim, dtype and optimizer. A table for inference takes "
        f"{_replaced(argument, 'optimizer={}, shared={}')}, and one of another dtype "
        f"{_replaced(argument, cast)}; optimizer rows of another dtype are cast likewise, "
        "name by name, or kept by optim.sparse(dtype=), and those of an optimizer that means the "
        "same by other names (optim.adam by mu, a chain of optax by 0.mu) are renamed, its count "
        "cast to the table's type, and a schedule's count left out"
    )


def owned(exported: Exported, number: int, devices: int) -> Exported:
    """The entries of a part, the highest score first: of a call's keys the first find room.

    Equal ones come in an order that has nothing to do with the slots that they come from: two
    candidates of one old bucket would choose together.
    """
    from_here = np.flatnonzero(owner_of(exported.keys, devices) == number)
    from_here = from_here[_last_of_each(exported.keys[from_here], exported.scores[from_here])]
    keys, scores = exported.keys[from_here], exported.scores[from_here]
    return exported.select(from_here[np.lexsort((keys * _GOLDEN, ~scores))])


def owned_keys(keys: np.ndarray, number: int, devices: int) -> np.ndarray:
    """The keys of a part."""
    return keys[owner_of(keys, devices) == number]


def _last_of_each(keys: np.ndarray, *ranks: np.ndarray) -> np.ndarray:
    """Which entries stay, one of each key: by the first rank, then the others, then the last."""
    ascending = np.sort(keys)
    is_last = np.append(ascending[1:] != ascending[:-1], True)[: len(keys)]
    if is_last.all():
        return np.ones(len(keys), bool)
    order = np.lexsort((*reversed(ranks), keys))  # stable: of equal ranks the last comes last
    stays = np.zeros(len(keys), bool)
    stays[order[is_last]] = True
    return stays


def key_chunks(keys: np.ndarray) -> Iterator[tuple[Keys, np.ndarray]]:
    """Keys, uint64 on the host, in parts of one size, and which places of each are meant."""
    size = min(_CHUNK, _room(len(keys)))
    for start in range(0, len(keys), size):
        part = keys[start : start + size]
        yield Keys.from_numpy(padded(part, size)), np.arange(size) < len(part)


def owner_of(keys: np.ndarray, devices: int) -> np.ndarray:
    found = [np.asarray(owners(part, devices)) for part, _ in key_chunks(keys)]
    return np.concatenate([*found, np.zeros(0, np.int32)])[: len(keys)]


def _room(entries: int) -> int:
    """A power of two: parts of about the same number of entries take one compiled program."""
    return 1 << max(0, entries - 1).bit_length()


def fill(table: Table, exported: Exported, latest: int) -> tuple[Table, Counts]:
    """Puts entries into a table of one device."""
    (device,) = table.values.devices()
    size = min(most_at_once(table, _CHUNK), _room(len(exported.keys)))
    total = no_counts()
    for start in range(0, len(exported.keys), size):
        keys, scores, values, optimizer = jax.tree.map(
            lambda leaf, start=start: padded(leaf[start : start + size], size),
            exported.columns(),
        )
        valid = np.arange(size) < len(exported.keys) - start
        batch = (Keys.from_numpy(keys), Keys.from_numpy(scores), values, optimizer, valid)
        table, counts = _write(table, *jax.device_put(batch, device))
        total = plus(total, counts)
    return _with_common(table, exported, device, latest), total


def without(table: Table, keys: np.ndarray) -> tuple[Table, int]:
    """A table of one device without some keys, uint64 on the host, and how many it had."""
    (device,) = table.values.devices()
    erased = []
    for batch in key_chunks(keys):
        table, count = _erase(table, *jax.device_put(batch, device))
        erased.append(count)
    return table, sum(map(int, erased))


@of_any_name
@functools.partial(jax.jit, donate_argnums=0)
def _erase(table: Table, keys: Keys, valid: jax.Array) -> tuple[Table, jax.Array]:
    # Its time is that of the entries that it is given.
    table, result = erase(table, keys, valid, is_ticked=True)
    return table, result.counts.hits


def plus(a: Counts, b: Counts) -> Counts:
    """Counts of different devices, added up on the first."""
    return Counts(*(x + jax.device_put(y, x.device) for x, y in zip(a, b, strict=True)))


def padded(array: np.ndarray, size: int) -> np.ndarray:
    return np.pad(array, [(0, size - len(array))] + [(0, 0)] * (array.ndim - 1))


@of_any_name
@functools.partial(jax.jit, donate_argnums=0)
def _write(table: Table, *entries: Any) -> tuple[Table, Counts]:
    table, result = import_rows(table, *entries, evicted=False, is_ticked=True)
    return table, result.counts


def _with_common(table: Table, exported: Exported, device: Any, latest: int) -> Table:
    own_clock, own_epoch = clock_of(table), epoch_of(table)
    clock = max(own_clock, exported.clock, latest)
    epoch = np.array([max(own_epoch, exported.epoch)], np.uint32)
    index = dataclasses.replace(
        table.index,
        clock=jax.device_put(np.array([clock & 0xFFFFFFFF, clock >> 32], np.uint32), device),
        epoch=jax.device_put(epoch, device),
    )
    table = dataclasses.replace(table, index=index)
    if table.optimizer is not None and exported.clock >= own_clock:
        shared = jax.device_put(exported.shared, device)
        table = dataclasses.replace(
            table, optimizer=dataclasses.replace(table.optimizer, shared=shared)
        )
    admission = table.admission
    if admission and admission.counters is not None and exported.counters is not None:
        counts = np.maximum(np.asarray(admission.sightings()), exported.counters)
        counters = jax.device_put(admission.with_sightings(counts).counters, device)
        admission = dataclasses.replace(admission, counters=counters)
        table = dataclasses.replace(table, admission=admission)
    return table
