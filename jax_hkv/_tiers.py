"""What two tables that are one are made of, and how entries move between them.

See :mod:`jax_hkv.tiered`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Bool, Int32

from jax_hkv import _checks, _entries, _inserts, operations, whole_table
from jax_hkv import index as _index
from jax_hkv._compat import is_traced, match_varying, of_one_device, on_one_device
from jax_hkv._exported import Exported
from jax_hkv._keys import Keys
from jax_hkv._programs import named, of_any_name
from jax_hkv._tier_types import Admits, PrefetchCounts, Tiers
from jax_hkv.index import Policy, Status
from jax_hkv.table import (
    Counts,
    Entries,
    EraseResult,
    FindResult,
    ScoredFindResult,
    Table,
    entries_at,
    no_counts,
)

# The others refuse a key whose score is low, whatever the store has of it.
POLICIES = (Policy.LRU, Policy.LFU, Policy.EPOCH_LRU)

_LEAST = 256  # entries moved at a time, so that few programs serve all numbers of them
_PIECES = 5  # of what leaves a cache, so that the sixteenth of a batch need not move all of it

Batch = tuple[Any, jax.Array | None]  # keys, and their mask
Name = TypeVar("Name")


class Admitted(NamedTuple):
    """What :func:`admit` tells the store.

    Attributes:
      keys: that were not in the cache, the first `count`.
      count: of them.
      evicted: the entries that made room, in pieces of which the first are full, with counts of
        their own: a device that is busy with a step can send those that are wanted, not cut them.
      time: the score of this batch, where scores are times and it is a lookup; else None.
      counts: of the distinct keys of the batch.
      absent: keys that were to be kept, and are not there.
      numbers: ``int32[...]``, `count`, `absent`, `counts` and those of the pieces: what the host
        asks for is one transfer.
    """

    keys: Keys
    count: Int32[Array, ""]
    evicted: tuple[Entries, ...]
    time: Keys | None
    counts: Counts
    absent: Int32[Array, ""]
    numbers: Int32[Array, " counts"]


class Fetched(NamedTuple):
    """What :func:`exchange` gives back: entries for the cache, and what became of the batch."""

    entries: Entries | None
    counts: PrefetchCounts


def host(call: str) -> Any:
    """The host's CPU, where stores lie."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise RuntimeError(
            f"{call}: device is the host's CPU if none is given, and JAX has none here "
            f'({error}): start it with JAX_PLATFORMS="cuda,cpu", or without that variable'
        ) from None


def emptied(table: Table, buckets: int, device: Any) -> Table:
    """A table without entries on a device, otherwise as another one is."""
    # Through a table of one bucket: of the large one nothing may lie on the accelerator.
    small = jax.tree.map(jnp.copy, whole_table.emptied(table, 1))  # of buffers of its own
    small = jax.device_put(small, device)
    with jax.default_device(device):
        return jax.device_put(whole_table.emptied(small, buckets), device)


def emptied_shape(table: Table, buckets: int, device: Any) -> Table:
    """As :func:`emptied`, of shapes."""
    shapes = jax.eval_shape(lambda own: whole_table.emptied(own, buckets), table)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=SingleDeviceSharding(device)
        ),
        shapes,
    )


def in_place(fn: Callable[..., Any]) -> Callable[..., Any]:
    """One program that changes its first argument's arrays, inlined into a caller's that traces."""
    compiled = of_any_name(jax.jit(fn, donate_argnums=0))

    @functools.wraps(fn)
    def call(table: Table, *args: Any) -> Any:
        return (fn if is_traced(table.values) else compiled)(table, *args)

    return call


def _admit(
    cache: Table,
    given: Any,
    mask: jax.Array | None,
    kept: tuple[Any, jax.Array | None] | None,
    *,
    is_lookup: bool,
    is_ticked: bool,
    pieces: int,
) -> tuple[Table, Admitted]:
    keys, valid = _checks.flat_batch(given, mask)
    uncounted = Keys(jnp.zeros_like(keys.words)) if cache.policy.counts else None
    pinned, absent, found = None, jnp.int32(0), jnp.int32(0)
    if kept is not None:
        others, are_meant = _checks.flat_batch(*kept)
        index, pinned = _index.find(cache.index, others, are_meant)
        cache = dataclasses.replace(cache, index=index)
        is_absent = (pinned < 0) & _checks.flat_mask(are_meant, pinned.shape)
        absent, found = (_index.unique(others, own).count[0] for own in (is_absent, pinned >= 0))
    evicted_in = functools.partial(_evicted_in, pieces)
    cache, inserted = _inserts.insert_rows(
        cache, keys, valid, uncounted, None, evicted_in, pinned=pinned, is_ticked=is_ticked
    )
    counts = _inserts.counts_of(inserted.groups, inserted.upserted.unique_status)
    # The new ones side by side.
    new = _index.unique(Keys(inserted.groups.keys), inserted.upserted.new_slots >= 0)
    time = _time(cache) if is_lookup else None
    if not is_lookup:  # those that are kept are of the batch
        counts = counts._replace(unique=counts.unique + found, hits=counts.hits + found)
    evicted = inserted.evicted
    numbers = [counts.inserted, absent, *counts, *(piece.count for piece in evicted)]
    return cache, Admitted(
        *(Keys(new.keys), counts.inserted, evicted, time, counts, absent),
        numbers=jnp.stack(match_varying(tuple(numbers))),
    )


def _evicted_in(
    most: int, table: Table, upserted: _index.Upserted
) -> tuple[Table, tuple[Entries, ...]]:
    """The evicted entries of a batch in pieces, of each of which the rows are read by themselves.

    Five are a sixteenth, as many again, an eighth, and so on.
    """
    keys, scores = upserted.evicted_keys, upserted.evicted_scores
    slots = upserted.evicted_slots
    room = slots.shape[0]
    ends = {-(-room >> number) for number in range(most)}
    ends = sorted(end for end in ends if end >= min(room, _LEAST))
    pieces = []
    for begin, end in zip([0, *ends], ends, strict=False):
        count = jnp.clip(upserted.evicted_count.reshape(()) - begin, 0, end - begin)
        own = slice(begin, end)
        table, piece = entries_at(table, keys[own], scores[own], slots[own], count)
        pieces.append(piece)
    return table, tuple(pieces)


def pieces_of(device: Any) -> int:
    """In how many pieces a device gives entries away.

    A GPU carries programs out one after the other: what would be cut behind a step waits for it,
    while whole arrays leave beside it. On a CPU a cut costs less than pieces do.
    """
    return 1 if device.platform == "cpu" else _PIECES


@functools.cache
def _admitting(is_lookup: bool, is_ticked: bool, pieces: int) -> Callable[..., Any]:
    options = {"is_lookup": is_lookup, "is_ticked": is_ticked, "pieces": pieces}
    return in_place(functools.partial(_admit, **options))


def admit(
    cache: Table,
    given: Any,
    mask: Any,
    kept: tuple[Any, jax.Array | None] | None = None,
    *,
    is_lookup: bool = True,
    is_ticked: bool = False,
) -> tuple[Table, Admitted]:
    """Places for the keys of a batch, which are looked up now, and none for those that are kept.

    Args:
      cache: to change.
      given: keys.
      mask: of them.
      kept: other keys, and their mask.
      is_lookup: whether the keys have been looked up; otherwise they keep their scores.
      is_ticked: whether the time is that of the last batch: of the parts of a table all keep one.
    """
    pieces = 1 if is_traced(cache.values) else pieces_of(device_of(cache))
    return _admitting(is_lookup, is_ticked, pieces)(cache, given, mask, kept)


def _time(table: Table) -> Keys | None:
    """The score of the latest batch, where it is the same for all of its keys."""
    if table.policy is Policy.LRU:
        return Keys(table.clock)
    if table.policy is Policy.EPOCH_LRU:
        return Keys(jnp.stack([table.clock[0], table.epoch[0]]))
    return None


def exchange(
    stores: Sequence[Table], admitted: Sequence[Admitted]
) -> tuple[list[Table], list[Fetched]]:
    """What tables ask of their stores; it waits for an answer when all stores have been asked."""
    known = list(map(_known, admitted))
    asked = [_asked(*each) for each in zip(stores, known, strict=True)]
    return [store for store, _, _ in asked], [
        _fetched(own, entries, dropped)
        for own, (_, entries, dropped) in zip(known, asked, strict=True)
    ]


def _known(admitted: Admitted) -> Admitted:
    """With its numbers on the host, and of what was evicted the pieces that there are.

    A GPU may be busy with a step, so it is asked to compute nothing.
    """
    if is_traced(admitted.count):
        return admitted
    (device,) = admitted.count.devices()
    count, absent, *others = jax.device_get(admitted.numbers)
    kinds = len(Counts._fields)
    of_batch, counts = Counts(*others[:kinds]), others[kinds:]
    pieces = tuple(
        (in_front(piece, own) if pieces_of(device) == 1 else piece)._replace(count=own)
        for piece, own in zip(admitted.evicted, counts, strict=True)
        if own
    )
    return admitted._replace(count=count, counts=of_batch, absent=absent, evicted=pieces)


def _asked(store: Table, admitted: Admitted) -> tuple[Table, Entries | None, Any]:
    """A store, what it has of the keys, and how many entries found no room in it.

    What moves between two devices is about as much as there is, and nothing where there is nothing.
    """
    keys, count, evicted, time = admitted[:4]
    entries, dropped = None, np.int32(0)
    is_inside = is_traced(count) or is_traced(store.values)
    if not is_inside:
        if not count and not evicted and store.policy is not Policy.EPOCH_LRU:
            return store, None, dropped
        if keys.words.devices() != store.values.devices():
            keys, evicted, time = jax.device_put((keys, evicted, time), device_of(store))
        keys = in_front(keys, count)
    if store.policy is Policy.EPOCH_LRU and time is not None:
        store = dataclasses.replace(
            store, index=dataclasses.replace(store.index, epoch=time.words[1:])
        )
    if is_inside or count:
        store, entries = _read(store, keys, count, time)
    if evicted:
        store, dropped = _keep(store, evicted)
    return store, entries, dropped


def _fetched(admitted: Admitted, entries: Entries | None, dropped: Any) -> Fetched:
    own = admitted.counts
    restored: Any = np.int32(0) if entries is None else entries.count
    if not is_traced(own.unique) and not is_traced(restored):
        restored, dropped = np.asarray(restored), np.asarray(dropped)
        entries = in_front(entries, restored) if restored else None
    counts = PrefetchCounts(
        unique=own.unique,
        hits=own.hits,
        restored=restored,
        inserted=own.inserted - restored,
        refused=own.refused,
        evicted=sum((piece.count for piece in admitted.evicted), np.int32(0)),
        dropped=dropped,
        absent=admitted.absent,
    )
    return Fetched(entries, counts)


@in_place
def _read(store: Table, keys: Keys, count: jax.Array, time: Keys | None) -> tuple[Table, Entries]:
    """The entries of keys in front, with the score of a batch that has looked them up."""
    is_meant = jnp.arange(keys.shape[0], dtype=jnp.int32) < count
    store, entries, _ = _inserts.export_keys(store, keys, is_meant)
    if time is not None:
        words = jnp.broadcast_to(time.words, entries.keys.words.shape)
        entries = entries._replace(scores=Keys(words))
    return store, entries


@in_place
def _keep(store: Table, evicted: tuple[Entries, ...]) -> tuple[Table, jax.Array]:
    store, kept = _imported(store, _joined(evicted), admits=True)
    return store, kept.counts.evicted + kept.counts.refused


def _joined(pieces: tuple[Entries, ...]) -> Entries:
    """The inverse of :func:`_evicted_in`, of the first ones of which all but the last are full."""
    rows = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *(each[:-1] for each in pieces))
    count: Any = sum((each.count for each in pieces), np.int32(0))
    return Entries(*rows, count=count)


def restore(cache: Table, fetched: Fetched) -> Table:
    if fetched.entries is None:
        return cache
    return _give_back(cache, from_store(cache, fetched.entries))


def from_store(cache: Table, tree: Any) -> Any:
    """What a store gave, on the cache's device, and committed to it only if the cache is.

    Otherwise the cache would be committed from there on, and steps that take it compiled anew.
    """
    if is_traced(cache.values) or any(map(is_traced, jax.tree.leaves(tree))):
        return tree
    if cache.values.committed:
        return jax.device_put(tree, device_of(cache))
    return jax.tree.map(np.asarray, tree)


@in_place
def _give_back(cache: Table, entries: Entries) -> Table:
    return _imported(cache, entries, admits=False)[0]


def _imported(table: Table, entries: Entries, *, admits: bool) -> tuple[Table, Any]:
    is_meant = jnp.arange(entries.keys.shape[0], dtype=jnp.int32) < entries.count
    return _inserts.import_rows(
        table, *entries[:-1], is_meant, evicted=False, is_ticked=True, admits=admits
    )


def in_front(tree: Any, count: Any) -> Any:
    """What stands in front of arrays, so many elements or some more; scalars as they are."""
    most = max((leaf.shape[0] for leaf in jax.tree.leaves(tree) if leaf.ndim), default=0)
    room = min(max(_LEAST, 1 << (int(count) - 1).bit_length()), most)
    return tree if room == most else _cut(tree, room)


@functools.partial(jax.jit, static_argnums=1)
def _cut(tree: Any, room: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[:room] if leaf.ndim else leaf, tree)


@of_one_device
def prefetch(
    batches: Mapping[Name, tuple[Tiers, Any, jax.Array | None, Admits]],
) -> dict[Name, tuple[Tiers, PrefetchCounts]]:
    """Keys of several tables go to their caches, all of them before the first one is waited for."""
    stores, places = {}, {}
    for name, (tiers, given, mask, admits) in batches.items():
        if admits is Admits.ALL:
            places[name] = admit(tiers.cache, given, mask)
        else:
            tiers, behind, near = known(tiers, given, mask)
            if admits is Admits.KNOWN:
                places[name] = admit(tiers.cache, given, behind | near)
            else:
                options = {"is_lookup": False, "is_ticked": True}  # no time passes
                places[name] = admit(tiers.cache, given, behind, (given, near), **options)
        stores[name] = tiers.store
    caches = {name: cache for name, (cache, _) in places.items()}
    return _exchanged(caches, stores, {name: admitted for name, (_, admitted) in places.items()})


def _exchanged(
    caches: Mapping[Name, Table], stores: Mapping[Name, Table], admitted: Mapping[Name, Admitted]
) -> dict[Name, tuple[Tiers, PrefetchCounts]]:
    names = list(admitted)
    after, fetched = exchange([stores[name] for name in names], [admitted[name] for name in names])
    return {
        name: (Tiers(restore(caches[name], back), store), back.counts)
        for name, store, back in zip(names, after, fetched, strict=True)
    }


def step_and_prefetch(
    batches: Mapping[Name, tuple[Tiers, Batch, Batch | None, Admits]],
    step: Callable[[dict[Name, Table]], tuple[Mapping[Name, Table], Any]],
) -> tuple[dict[Name, tuple[Tiers, PrefetchCounts]], Any]:
    """A step, before which keys of the next one get places, and rows while it is done.

    Args:
      batches: tiers, the keys of the next step, and those of this one, which stay where they are.
        Where not all are admitted, what the step leaves of the cache has to be asked first.
      step: from the caches to the caches and a result. If it raises, these and the stores are used
        up, those of tables of which not all keys are admitted, too.
    """
    admitted: dict[Name, Admitted] = {}
    caches: dict[Name, Table] = {}
    begun: Iterable[Name] = admitted
    try:
        with on_one_device():
            for name, (tiers, coming, kept, admits) in batches.items():
                if admits is Admits.ALL:
                    caches[name], admitted[name] = admit(tiers.cache, *coming, kept)
        caches = {name: caches.get(name, own[0].cache) for name, own in batches.items()}
        begun = batches
        returned, result = step(caches)
        caches = {name: returned[name] for name in batches}
        stores = {name: tiers.store for name, (tiers, *_) in batches.items()}
        with on_one_device():
            after = _exchanged(caches, stores, admitted)
            for name, (tiers, counts) in after.items():
                if counts.refused or counts.absent:
                    tiers, more = _again(tiers, *batches[name][1])
                    after[name] = tiers, _both(counts, more)
            behind = {
                name: (Tiers(caches[name], stores[name]), *coming, admits)
                for name, (_, coming, _, admits) in batches.items()
                if admits is not Admits.ALL
            }
            after |= prefetch(behind)
        return {name: after[name] for name in batches}, result
    except BaseException as error:
        use_up([batches[name][0].store for name in begun], caches)
        if begun:
            error.add_note(
                "step_and_prefetch: the tiers of the step are lost, caches and stores, and so is "
                "what it made of them, as in a model of nnx that it has trained: restore them all"
            )
        raise


def use_up(*tables: Any) -> None:
    """What a step that raised leaves behind: stores lack what has left the caches.

    And caches have first rows of what the stores know: whoever went on with them, or had put them
    into a model, would lose it unawares.
    """
    for leaf in jax.tree.leaves(tables):
        if isinstance(leaf, jax.Array) and not is_traced(leaf):
            leaf.delete()


def _again(tiers: Tiers, given: Any, mask: jax.Array | None) -> tuple[Tiers, PrefetchCounts]:
    """A prefetch behind a step: of keys without room beside its own, or that it has displaced."""
    cache, admitted = admit(tiers.cache, given, mask, is_ticked=True)
    return _exchanged({"": cache}, {"": tiers.store}, {"": admitted})[""]


def _both(first: PrefetchCounts, more: PrefetchCounts) -> PrefetchCounts:
    """The counts of a batch that was prefetched twice."""
    moved = {name: getattr(first, name) + getattr(more, name) for name in ("evicted", "dropped")}
    room = first.unique - more.refused
    hits = min(first.hits, room)
    restored = min(first.restored + more.restored, room - hits)  # some twice, displaced by the step
    found = {"hits": hits, "restored": restored, "inserted": room - hits - restored}
    return first._replace(refused=more.refused, **moved, **found)


def known(
    tiers: Tiers, given: Any, mask: jax.Array | None
) -> tuple[Tiers, Bool[Array, "*batch"], Bool[Array, "*batch"]]:
    """Which keys of a batch the store alone has, and which the cache has."""
    cache, near = operations.contains(tiers.cache, given, valid=mask)
    asked = ask_store(tiers, given, mask, near)
    if asked is None:
        return tiers, jnp.zeros_like(near), near
    store, keys, valid, groups = asked
    store, behind = operations.contains(store, keys, valid=valid)
    behind = by_position(groups, from_store(cache, behind), near)
    return Tiers(cache, store), behind, near


def ask_store(
    tiers: Tiers, given: Any, mask: jax.Array | None, found: jax.Array
) -> tuple[Table, Keys, jax.Array, _index.Groups] | None:
    """What a store is to be asked of a batch that a cache was asked.

    Returns:
      The store, the distinct keys that were not found, on the store's device, which of them are
      meant, and whose they are; None if there is nothing to be asked.
    """
    groups = _missing(given, mask, found)
    words, count = groups.keys, groups.count
    if not is_traced(tiers.store.values) and not is_traced(count):
        if not int(count[0]):
            return None
        words = in_front(words, count[0])
        words, count = jax.device_put((words, count), device_of(tiers.store))
    return tiers.store, Keys(words), jnp.arange(words.shape[0], dtype=jnp.int32) < count, groups


def put_near(cache: Table, tree: Any) -> Any:
    """What a caller gave, on the cache's device."""
    if is_traced(cache.values):
        return tree
    device = device_of(cache)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or is_traced(leaf) or leaf.devices() == {device}:
            return leaf
        # From several devices by the host: device_put keeps what the type says of their mesh.
        if len(leaf.devices()) > 1 or not cache.values.committed:
            leaf = np.asarray(leaf)
        return jax.device_put(leaf, device) if cache.values.committed else leaf

    return jax.tree.map(one, tree)


@jax.jit
def _missing(given: Any, mask: jax.Array | None, found: jax.Array) -> _index.Groups:
    keys, valid = _checks.flat_batch(given, mask)
    asked = ~found.reshape(-1) if valid is None else valid & ~found.reshape(-1)
    return _index.unique(keys, asked)


@jax.jit
def by_position(groups: _index.Groups, found: jax.Array, like: jax.Array) -> jax.Array:
    """What was found of distinct keys, in the form of a batch."""
    return _index.by_position(groups, found, False).reshape(like.shape)


@jax.jit
def with_rows(
    near: Any, groups: _index.Groups, rows: jax.Array, found: jax.Array, scores: Keys | None
) -> FindResult | ScoredFindResult:
    """What a cache found of a batch, completed by what its store has of the missing keys."""
    has_row = by_position(groups, found, near.found)

    def chosen(own: jax.Array, of_store: jax.Array) -> jax.Array:
        of_store = _index.take(of_store, groups.inverse).reshape(own.shape)
        return jnp.where(has_row[..., None], of_store, own)

    values, either = chosen(near.values, rows), near.found | has_row
    if scores is None or not isinstance(near, ScoredFindResult):
        return FindResult(values, either, near.slots)
    words = chosen(near.scores.words, scores.words)
    return ScoredFindResult(values, either, near.slots, Keys(words))


def erase(
    tiers: Tiers, given: Any, mask: jax.Array | None
) -> tuple[Tiers, tuple[jax.Array, jax.Array]]:
    """Keys removed from both tables, and what each of them says of every position."""
    (cache, near), (store, behind) = (
        _erased(table, *put_near(table, (given, mask))) for table in tiers
    )
    return Tiers(cache, store), (near, behind)


@in_place
def _erased(table: Table, given: Any, mask: jax.Array | None) -> tuple[Table, jax.Array]:
    table, result = _inserts.erase(table, *_checks.flat_batch(given, mask))
    return table, result.status


@jax.jit
def either(given: Any, mask: jax.Array | None, statuses: list[jax.Array]) -> EraseResult:
    """What came of a batch's removal out of several tables."""
    keys, valid = _checks.flat_batch(given, mask)
    gone = functools.reduce(jnp.logical_or, [status == Status.FOUND for status in statuses])
    unique, hits = (_index.unique(keys, chosen).count[0] for chosen in (valid, gone))
    status = jnp.where(gone, jnp.int32(Status.FOUND), statuses[0]).reshape(given.shape)
    return EraseResult(status, no_counts()._replace(unique=unique, hits=hits))


# --- Between steps -------------------------------------------------------------------------------


def keys_of_cache_alone(tiers: Tiers) -> np.ndarray:
    """The keys, uint64, that the cache has and the store has not."""
    keys = _entries.keys_of(tiers.cache)
    return keys[~is_in(tiers.store, keys)]


def size(part: Table | Tiers) -> int:
    """Entries of a table of one device, or of tiers of one."""
    if isinstance(part, Tiers):
        return size(part.store) + len(keys_of_cache_alone(part))
    return int(whole_table.size(part))


@of_one_device
def sizes_by(tiers: Tiers, number_of: Callable[[Keys], jax.Array], kinds: int) -> np.ndarray:
    """How many entries of each kind the tables have, ``int32[kinds]``; those in both count once."""
    alone = number_of(Keys.from_numpy(keys_of_cache_alone(tiers)))
    behind = np.asarray(whole_table.sizes_by(tiers.store, number_of, kinds))
    return behind + np.bincount(alone, minlength=kinds).astype(np.int32)


def is_in(table: Table, keys: np.ndarray) -> np.ndarray:
    """Which of some keys, uint64 on the host, a table has."""
    device, table = device_of(table), named(table, "table")  # as in `of_any_name`
    found = [
        np.asarray(operations.contains(table, *jax.device_put((part,), device), valid=valid)[1])
        for part, valid in _entries.key_chunks(keys)
    ]
    return np.concatenate([*found, np.zeros(0, bool)])[: len(keys)]


def import_entries(tiers: Any, own: Exported, latest: int) -> tuple[Any, tuple[Counts, ...]]:
    """A table of one device, or tiers, with entries, each where its key is, or in the store."""
    if not isinstance(tiers, Tiers):
        table, counts = _entries.fill(tiers, own, latest)
        return table, (counts,)
    is_near = is_in(tiers.cache, own.keys)
    near, behind = (own.select(rows) for rows in (is_near, ~is_near))
    cache, overwritten = _entries.fill(tiers.cache, near, latest)
    store, counts = _entries.fill(tiers.store, behind, latest)
    store, _ = _entries.without(store, near.keys)  # whose copies may be younger now
    return Tiers(cache, store), (overwritten, counts)


def without(tiers: Any, keys: np.ndarray) -> tuple[Any, int]:
    """A table of one device, or tiers, without some keys, uint64 on the host; how many it had."""
    if not isinstance(tiers, Tiers):
        return _entries.without(tiers, keys)
    near = keys[is_in(tiers.cache, keys)]
    both = int(is_in(tiers.store, near).sum())
    (cache, of_cache), (store, of_store) = (_entries.without(table, keys) for table in tiers)
    return Tiers(cache, store), of_cache + of_store - both


def trained(part: Table | Tiers) -> Table:
    """Of tiers the cache: whose time it is, and what rows share."""
    return part.cache if isinstance(part, Tiers) else part


def device_of(table: Table) -> Any:
    (device,) = table.values.devices()
    return device
